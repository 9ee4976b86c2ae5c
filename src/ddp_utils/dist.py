"""Who am I, meet, join, reduce, leave: a group under any launcher, none for one process."""

import contextlib
import os
import re
import socket
import sys
import traceback
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ddp_utils import UserError

# How each launcher tells a process its rank, the world size, its rank on the node and how many
# processes the node has. It counts only when the first three are set: people export WORLD_SIZE by
# hand, and the batch step of Slurm has a SLURM_PROCID but no SLURM_STEP_NUM_TASKS.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "pals": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
BINDERS = {"pals", "mpirun", "mpiexec", "srun"}  # may show each process one GPU of its own
BACKENDS = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "gloo": "cpu"}
JOBS = ("SLURM_JOB_ID", "PBS_JOBID")


class World(NamedTuple):
    """One process's place among all of them; the same fields whether there is one or a thousand."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    store: object = None  # through which the others were met

    @property
    def is_main(self):
        return self.rank == 0


def whoami(env=os.environ, argv=()) -> World:
    """Read the launcher's environment; nothing is started and no device is touched."""
    for launcher, names in LAUNCHERS.items():
        if all(env.get(name) for name in names[:3]):
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
    if backend in ("auto", "xpu"):
        kinds = ("cuda", "xpu", "cpu") if backend == "auto" else ("xpu",)
        kind = next((kind for kind in kinds if kind == "cpu" or _count(kind)), "xpu")
        backend = {"cuda": "nccl", "xpu": _xpu_backend(), "cpu": "gloo"}[kind]
    kind = BACKENDS[backend]
    if kind == "cpu":
        return world._replace(device=torch.device("cpu"), backend=backend)
    index = device_index(world, kind, _count(kind), backend)
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


def _xpu_backend():
    """Since torch 2.8 Intel GPUs use xccl; before, ccl registers itself when it is imported."""
    if dist.is_xccl_available():
        return "xccl"
    with contextlib.suppress(ImportError):
        import oneccl_bindings_for_pytorch  # noqa: F401

        return "ccl"
    return "xccl"


def meet(world, backend="auto") -> World:
    """Choose the device and find the other processes: the first thing that a script does.

    Whatever takes long comes between meet() and join(), so that no collective waits for it.
    Raises UserError within a minute: wrong address, port in use, more processes than devices.
    """
    world = choose_device(world, backend)
    if world.device.type != "cpu":
        getattr(torch, world.device.type).set_device(world.device)
    if world.world_size == 1 or dist.is_initialized():
        return world
    address, port = meeting_point(world)
    # under torchrun the agent keeps the store
    mine = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = timedelta(seconds=float(os.environ.get("DDP_JOIN_SECONDS", 50)))
    try:
        store = dist.TCPStore(address, port, world.world_size, is_master=mine, timeout=seconds)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(_why_not_met(error, world, address, port)) from error
    # a restarted group must not read the addresses of the one that died
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return world._replace(store=dist.PrefixStore(f"try{attempt}", store))


def join(world, timeout_minutes=30) -> World:
    """Enter the process group of those who met; nothing to do for one process."""
    if world.world_size == 1 or dist.is_initialized():
        return world
    if world.local_size == world.world_size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: no need to resolve its name
    timeout = timedelta(minutes=timeout_minutes)
    world.store.set_timeout(timeout)
    try:
        with _debug_level_for(world.backend):
            dist.init_process_group(
                world.backend,
                store=world.store,
                rank=world.rank,
                world_size=world.world_size,
                timeout=timeout,
                device_id=None if world.device.type == "cpu" else world.device,
            )
    except (dist.DistError, RuntimeError) as error:
        raise UserError(_why_not_met(error, world, *meeting_point(world))) from error
    return world


@contextlib.contextmanager
def _debug_level_for(backend):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around gloo on which DDP dies (torch 2.13,
    SIGSEGV in its logger): the group is made one level lower, DDP's own checks stay at DETAIL."""
    level = dist.get_debug_level()
    if backend == "gloo" and level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)


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


def _why_not_met(error, world, address, port):
    reason = str(error).splitlines()[0]
    if "EADDRINUSE" in str(error):
        return (
            f"MASTER_PORT: {port} is in use on {socket.gethostname()}; export another MASTER_PORT"
        )
    return (
        f"rank {world.rank} could not meet the {world.world_size} processes at {address}:{port} "
        f"({reason[:160]}); check MASTER_ADDR, MASTER_PORT and firewall, for several networks "
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, for nodes that start slowly DDP_JOIN_SECONDS"
    )


def all_sum(tensor, world):
    """Sum a tensor over all ranks, in place; with one process it is already the sum."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def by_row(count, parts, values, world):
    """A table [count, K] of what each rank found for its rows, the same on all ranks.

    parts: this rank's micro-batches; values: [B, K] for each of them. Every row is written by
    one rank, so that the sum over ranks is exact; rows of no part, and fillers, stay 0.
    """
    table = torch.zeros(count, values[0].shape[-1], device=world.device)
    for part, found in zip(parts, values, strict=True):
        if any(part.weight):
            table[part.index] = found.float()
    return all_sum(table, world)


def leave():
    """Wait for the others, then close the group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(main):
    """Run main() as this process: one line for a user's mistake, a traceback for ours, one exit.

    os._exit, because gloo's threads may still hold Python objects when the interpreter dies, and
    then abort the process after all its work is done (torch 2.13, Python 3.11).
    """
    code = 1
    try:
        code = main() or 0
        leave()
    except SystemExit as stop:  # tyro: --help and wrong flags
        code = stop.code if isinstance(stop.code, int) else 2
    except UserError as error:
        code = error.exit_code
        if "--debug" in sys.argv:
            traceback.print_exc()
        elif _speaks() and _first_to_fail():
            print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        if _first_to_fail():
            traceback.print_exc()
            get_error_handler().record_exception(error)  # for torchrun's own report
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _speaks():
    """One process per node tells the user of his mistake: another node may have one of its own."""
    try:
        return whoami().local_rank == 0
    except UserError:  # the launcher's variables are the mistake
        return True


def _first_to_fail():
    """Whether this rank's exception is the cause, or only the loss of a peer that failed first."""
    if not dist.is_initialized():
        return True
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.add("failures", 1) == 1
    except RuntimeError:  # rank 0 kept the store and is gone
        print(f"rank {dist.get_rank()} stopped: rank 0 is gone", file=sys.stderr)
        return False
