"""A process group under any launcher, and none for one process."""

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_utils import Stop, UserError, WriteError

# How each launcher tells a process its rank, the world size, its rank on the node and how many
# processes the node has. It counts only when the first three are set: people export WORLD_SIZE by
# hand, and the batch step of Slurm has a SLURM_PROCID but no SLURM_STEP_NUM_TASKS. PALS documents
# its ranks but not the size: any of three names will do.
LAUNCHERS = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "pals": "PALS_RANKID PMI_SIZE|PALS_SIZE|WORLD_SIZE PALS_LOCAL_RANKID "
    "PALS_LOCAL_SIZE|LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpiexec": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
}
BINDERS = {"pals", "mpirun", "mpiexec", "srun"}  # may show each process one GPU of its own
# ccl is what Intel's backend was called before torch had one itself
BACKENDS = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu", "gloo": "cpu"}

JOBS = ("SLURM_JOB_ID", "PBS_JOBID")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}  # of a disk


class World(NamedTuple):
    """One process's place among all of them; the same fields whether there is one or a thousand."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    device: torch.device = torch.device("cpu")
    backend: str = "none"

    @property
    def is_main(self):
        return self.rank == 0


def whoami(env=os.environ, argv=()) -> World:
    """Read the launcher's environment; nothing is started and no device is touched."""
    for launcher, names in LAUNCHERS.items():
        names = [next(filter(env.get, either.split("|")), "") for either in names.split()]
        if all(names[:3]):
            rank, world_size, local_rank = (_number(env, name) for name in names[:3])
            # Slurm writes "2(x3)": two tasks on each of three nodes
            local = re.match(r"\d+", env.get(names[3], ""))
            local_size = int(local.group()) if local else local_rank + 1
            if launcher == "torchrun":  # accelerate, deepspeed and others set the same names
                launcher = _who_set_rank(env, argv)
            return World(rank, world_size, local_rank, local_size, launcher)
    return World()


def _number(env, name):
    if not env[name].isdecimal():
        raise UserError(f"{name}: '{env[name]}' is not a number; let the launcher set it")
    return int(env[name])


def _who_set_rank(env, argv):
    if "ACCELERATE_MIXED_PRECISION" in env:
        return "accelerate"
    if "CROSS_SIZE" in env:
        return "deepspeed"
    if any(word.startswith("--local-rank") for word in argv):
        return "torch.distributed.launch"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"


def choose_device(world, backend) -> World:
    """Add device and backend: `auto` by what the machine has, anything else to the letter.

    Raises UserError if the backend's device is absent or has fewer units than processes.
    """
    asked = backend
    kind = BACKENDS.get(backend, "cpu")
    if backend == "auto" and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true"):
        kind = next(filter(_count, ("cuda", "xpu")), "cpu")
    backend = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}[kind]
    if kind == "cpu":
        return world._replace(device=torch.device("cpu"), backend=backend)
    index = device_index(world, kind, _count(kind), asked)
    return world._replace(device=torch.device(kind, index), backend=backend)


def device_index(world, kind, count, backend) -> int:
    """Which of this node's `count` devices belongs to this process."""
    if count == 0:
        raise UserError(
            f"--backend {backend} needs a {kind} device, this machine has none; use auto"
        )
    if count == 1 and world.launcher in BINDERS:  # the launcher shows each process its own
        return 0
    if world.local_size > count:
        raise UserError(
            f"{world.local_size} processes on a node with {count} {kind} devices; "
            f"start at most {count} per node"
        )
    return world.local_rank


def _count(kind):
    unit = getattr(torch, kind)
    return unit.device_count() if unit.is_available() else 0


# --- the process group ---------------------------------------------------------------------------


def init_process_group(world, backend="auto", timeout_minutes=30) -> World:
    """Choose the device and meet the other processes: the first thing that a script does.

    Raises UserError within a minute: wrong address, port in use, more processes than devices.
    """
    world = choose_device(world, backend)
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device)
    if world.world_size == 1 or dist.is_initialized():
        return world
    address, port = meeting_point(world)
    if world.local_size == world.world_size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: no need to resolve its name
    # DETAIL puts a wrapper around gloo on which DDP dies (torch 2.13, SIGSEGV in its logger): the
    # group is made one level lower, DDP's own checks stay at DETAIL
    level = dist.get_debug_level()
    if world.backend == "gloo" and level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    timeout = timedelta(minutes=timeout_minutes)
    try:
        store = _open_store(world, address, port)
        store.set_timeout(timeout)
        dist.init_process_group(
            world.backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=None if world.device.type == "cpu" else world.device,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        who = f"rank {world.rank} could not meet the {world.world_size} processes"
        raise UserError(why_not_met(error, who, address, port)) from error
    dist.set_debug_level(level)
    return world


def _open_store(world, address, port):
    """Return the store through which the ranks find each other: torchrun's, or one of rank 0."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        seconds = float(os.environ.get("DDP_JOIN_SECONDS", 50))
        options = {"timeout": timedelta(seconds=seconds)}
    except (ValueError, OverflowError) as error:
        raise UserError(f"DDP_JOIN_SECONDS: {error}; export a number, such as 300") from None
    options["is_master"] = world.is_main and not has_agent
    if options["is_master"]:
        options["master_listen_fd"] = _listen(world, address, port)
    wait_for_listener(address, port, time.monotonic() + seconds)
    store = dist.TCPStore(address, port, world.world_size, **options)
    if not has_agent:
        return store
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # its store outlives restarts
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _listen(world, address, port) -> int:
    """Open the port on which rank 0 is met: for one node on its own address alone, else on all."""
    if world.local_size == world.world_size:
        family = socket.getaddrinfo(address, port)[0][0]
        return socket.create_server((address, port), family=family).detach()
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both).detach()


def wait_for_listener(address, port, deadline):
    """Try to connect until the deadline: TCPStore tries twice as long, and prints C++ frames."""
    while True:
        try:
            return socket.create_connection((address, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def meeting_point(world, env=os.environ):
    """Address and port where rank 0 keeps the store: the environment's, else one of this node's."""
    job = next((env[name] for name in JOBS if env.get(name)), "")
    address = env.get("MASTER_ADDR")
    port = env.get("MASTER_PORT")
    one_node = world.local_size == world.world_size
    if not address and not one_node:
        raise UserError(
            f"MASTER_ADDR is not set and {world.launcher} started {world.world_size} processes on "
            "several nodes; export MASTER_ADDR=<host of rank 0> and a free MASTER_PORT"
        )
    if not port:  # the same number on every rank, another one for every job
        seed = int(re.sub(r"\D", "", job.split(".")[0]) or (os.getppid() if one_node else 9500))
        port = str(20000 + seed % 10000)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT: '{port}' is not a port; give a number from 1 to 65535")
    return address or "127.0.0.1", int(port)


def why_not_met(error, who, address, port) -> str:
    """What to mend where one of several processes or nodes could not meet the others."""
    reason = str(error).splitlines()[0]
    if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
        return (
            f"MASTER_PORT: {port} is in use on {socket.gethostname()}; export another MASTER_PORT"
        )
    return (
        f"{who} at {address}:{port} ({reason[:160]}); check MASTER_ADDR, MASTER_PORT and firewall, "
        "for several networks GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, for nodes that start "
        "slowly DDP_JOIN_SECONDS"
    )


def to_device(values, device, dtype=None):
    """Copy numbers to a device, without waiting for the copy."""
    device = torch.device(device)
    tensor = torch.as_tensor(values, dtype=dtype)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def all_sum(tensor, world):
    """Sum a tensor over all ranks, in place; with one process it is already the sum."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def is_first():
    """Whether this is rank 0 of the group, or there is none."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_by_index(count, micro_batches, values, world):
    """A table [count, K] of what each rank found for its rows, the same on all ranks.

    micro_batches: of this rank; values: [B, K] for each of them. Every row is written by one rank,
    so that the sum over ranks is exact; rows of no micro-batch, and fillers, stay 0.
    """
    table = torch.zeros(count, values[0].shape[-1], device=world.device)
    for micro_batch, scores in zip(micro_batches, values, strict=True):
        if any(micro_batch.weight):
            table[micro_batch.index] = scores.float()
    return all_sum(table, world)


# --- how an error ends all ranks -----------------------------------------------------------------


def exit_code(error) -> int:
    """The exit status that an exception, or None, ends a run with."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(error, "exit_code", 1) if error else 0


def write_error(error):
    """A WriteError for an OSError of a full disk, a quota or a read-only place, else None."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return None
    file = f"{error.filename}: " if error.filename else ""
    free = ""
    with contextlib.suppress(OSError, TypeError):
        free = f" ({shutil.disk_usage(Path(error.filename).parent).free >> 20} MiB free)"
    problem = WriteError(f"{file}{error.strerror}{free}; make room, the same command goes on")
    problem.__cause__ = error
    return problem


def leave():
    """Wait for the others, then close the group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def on_main(world, fn):
    """fn() on rank 0; what it returns, plain data, on every rank.

    If it raises a UserError all ranks end with its exit status; rank 0 alone says why.
    """
    answer = problem = None
    if world.is_main:
        try:
            answer = {"value": fn()}
        except (UserError, OSError) as error:
            problem = write_error(error) or error
            answer = {"code": exit_code(problem)}
    if world.world_size > 1:
        answer = json.loads(_broadcast_text(json.dumps(answer), world))
    if problem:
        raise problem
    if "code" in answer:
        raise Stop("", answer["code"])
    return answer["value"]


def on_each(world, fn):
    """fn() on every rank; where it raises on one, a UserError or OSError, all end, and say why."""
    answer = problem = None
    try:
        answer = fn()
    except (UserError, OSError) as error:
        problem = write_error(error) or error
    codes = torch.zeros(world.world_size, device=world.device)
    codes[world.rank] = exit_code(problem) if problem else 0
    codes = all_sum(codes, world).tolist()
    if not any(codes):
        return answer
    first = next(rank for rank, code in enumerate(codes) if code)
    if world.world_size > 1 and problem is None:
        problem = UserError(_broadcast_text("", world, first))
        problem.exit_code = int(codes[first])
    elif world.world_size > 1:
        _broadcast_text(str(problem), world, first)
    raise problem


def _broadcast_text(text, world, rank=0):
    """The text of this rank, on every rank."""
    data = f"{text}\n".encode()  # at least one byte
    size = torch.tensor([len(data)], device=world.device)
    dist.broadcast(size, src=rank)
    block = bytearray(data if world.rank == rank else size.item())
    letters = torch.frombuffer(block, dtype=torch.uint8).to(world.device)  # [size]
    dist.broadcast(letters, src=rank)
    return bytes(letters.cpu().numpy()).decode()[:-1]
