"""Process groups: start under any launcher, reduce over ranks, end with one message.

A script calls whoami() and init_process_group() at its start, and run(main) under __main__. With
one process on a CPU there is no group, and every function here still works.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ddp_utils import Stop, UserError, WriteError, parse_number

# The names in which each launcher stores the rank, the world size, the rank on the node and the
# number of processes on the node. A launcher is only recognized if the first three are set: users
# export WORLD_SIZE by hand, and the batch step of Slurm has SLURM_PROCID but no
# SLURM_STEP_NUM_TASKS. PALS documents the ranks but not the size: any of three names is read.
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
# "ccl" was the name of Intel's backend before torch had its own
BACKENDS = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu", "gloo": "cpu"}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
LOST_PEER = re.compile(
    r"gloo|nccl|xccl|connection (closed|reset|refused)|broken pipe|timed out", re.I
)


class World(NamedTuple):
    """The place of one process among all; the same fields for one process and for a thousand."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    device: torch.device = torch.device("cpu")
    backend: str = "none"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that prints and writes."""
        return self.rank == 0

    @property
    def is_one_node(self) -> bool:
        """Whether all processes run on this machine."""
        return self.local_size == self.world_size


def whoami(env: Mapping[str, str] = os.environ, argv: Sequence[str] = ()) -> World:
    """Return the place of this process as its launcher describes it; start nothing."""
    for launcher, all_names in LAUNCHERS.items():
        names = [_first_set(env, either.split("|")) for either in all_names.split()]
        if all(names[:3]):
            rank, world_size, local_rank = (parse_number(name, env[name]) for name in names[:3])
            # Slurm writes "2(x3)": two tasks on each of three nodes
            local = re.match(r"\d+", env.get(names[3], ""))
            local_size = int(local.group()) if local else local_rank + 1
            if launcher == "torchrun":
                launcher = _who_set_rank(env, argv)
            return World(rank, world_size, local_rank, local_size, launcher)
    return World()


def _first_set(env: Mapping[str, str], names: list[str]) -> str:
    return next((name for name in names if env.get(name)), "")


def _who_set_rank(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return which launcher set RANK: several use the names of torchrun."""
    if "LAUNCHER_PID" in env:
        return "run_distributed"  # ddp_utils/launch.py
    if "ACCELERATE_MIXED_PRECISION" in env:
        return "accelerate"
    if "CROSS_SIZE" in env:
        return "deepspeed"
    if any(word.startswith("--local-rank") for word in argv):
        return "torch.distributed.launch"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"


# --- device --------------------------------------------------------------------------------------


def choose_device(world: World, backend: str = "auto") -> World:
    """Add device and backend to a world: `auto` selects the best device of the machine.

    Raises UserError if the backend's device is absent, or if there are more processes than devices.
    """
    kind = BACKENDS.get(backend, "cpu")
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if backend == "auto" and not use_cpu:
        kind = next((kind for kind in ("cuda", "xpu") if device_count(kind)), "cpu")
    name = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}[kind]
    if kind == "cpu":
        return world._replace(device=torch.device("cpu"), backend=name)
    index = device_index(world, kind, device_count(kind), backend)
    return world._replace(device=torch.device(kind, index), backend=name)


def device_index(world: World, kind: str, count: int, backend: str) -> int:
    """Return which of this node's `count` devices belongs to this process."""
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


def device_count(kind: str) -> int:
    """Return the number of devices of a kind, "cuda" or "xpu", that this process can see."""
    backend = getattr(torch, kind)
    return backend.device_count() if backend.is_available() else 0


# --- the process group ---------------------------------------------------------------------------

_store: dist.Store | None = None  # through which the ranks found each other


def init_process_group(world: World, backend: str = "auto", timeout_minutes: float = 30.0) -> World:
    """Choose the device and connect to the other processes: the first thing that a script does.

    Raises UserError within a minute if they cannot be reached, or if the port is in use.
    """
    global _store
    world = choose_device(world, backend)
    if world.device.type != "cpu":
        torch.accelerator.set_device_index(world.device)
    if world.world_size == 1 or dist.is_initialized():
        return world
    address, port = meeting_point(world)
    if world.is_one_node and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no need to resolve the host name
    # With DETAIL, gloo gets a wrapper on which DDP crashes (torch 2.13): the group is created one
    # level lower, and DDP's own checks stay at DETAIL.
    level = dist.get_debug_level()
    if world.backend == "gloo" and level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    timeout = timedelta(minutes=timeout_minutes)
    try:
        _store = _open_store(world, address, port)
        _store.set_timeout(timeout)
        dist.init_process_group(
            world.backend,
            store=_store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=None if world.device.type == "cpu" else world.device,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise UserError(_why_not_connected(error, world, address, port)) from error
    dist.set_debug_level(level)
    return world


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return address and port of rank 0's store: exported ones, or derived from the job."""
    address = env.get("MASTER_ADDR")
    if not address and not world.is_one_node:
        raise UserError(
            f"MASTER_ADDR is not set and {world.launcher} started {world.world_size} processes on "
            "several nodes; export MASTER_ADDR=<host of rank 0> and a free MASTER_PORT"
        )
    # without a port: the same number on every rank, and another one for every job
    job = (env.get("SLURM_JOB_ID") or env.get("PBS_JOBID") or "").split(".")[0]
    parent = os.getppid() if world.is_one_node else 9500
    seed = int(re.sub(r"\D", "", job) or parent)
    port = env.get("MASTER_PORT") or str(20000 + seed % 10000)
    return address or "127.0.0.1", parse_number("MASTER_PORT", port, 1, 65535)


def _open_store(world: World, address: str, port: int) -> dist.Store:
    """Return the key-value store of the group: the launcher's if it has one, or rank 0's."""
    seconds = parse_number("DDP_JOIN_SECONDS", os.environ.get("DDP_JOIN_SECONDS") or "50", 1)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    options: dict[str, Any] = {"is_master": world.is_main and not has_agent}
    if options["is_master"] and "MASTER_LISTEN_FD" in os.environ:  # launch.py opened the port
        options["master_listen_fd"] = int(os.environ["MASTER_LISTEN_FD"])
    elif options["is_master"]:  # for this machine only, unless there are several nodes
        family = socket.getaddrinfo(address, port)[0][0]
        host = address if world.is_one_node else ""
        options["master_listen_fd"] = socket.create_server((host, port), family=family).detach()
    _wait_for_listener(address, port, seconds)
    timeout = timedelta(seconds=seconds)
    store = dist.TCPStore(address, port, world.world_size, timeout=timeout, **options)
    # an agent keeps its store for all attempts
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _wait_for_listener(address: str, port: int, seconds: float) -> None:
    """Wait until a process listens on a port: TCPStore itself prints C++ frames while it waits."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address, port), timeout=5).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _why_not_connected(error: Exception, world: World, address: str, port: int) -> str:
    if "in use" in str(error):
        host = socket.gethostname()
        return f"MASTER_PORT: {port} is in use on {host}; export another MASTER_PORT"
    reason = str(error).splitlines()[0][:160]
    return (
        f"rank {world.rank} could not connect to the {world.world_size} processes at "
        f"{address}:{port} ({reason}); check MASTER_ADDR, MASTER_PORT and firewall; with several "
        "networks export GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, for nodes that start slowly "
        "DDP_JOIN_SECONDS"
    )


# --- collectives ---------------------------------------------------------------------------------


def to_device(
    values: Any, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy numbers to a device, without waiting for the copy."""
    device = torch.device(device)
    tensor = torch.as_tensor(values, dtype=dtype)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def all_sum(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def is_first() -> bool:
    """Return whether this is rank 0 of the group, or there is none."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_by_index(
    count: int, micro_batches: Sequence[Any], values: Sequence[torch.Tensor], world: World
) -> torch.Tensor:
    """Return a table [count, K] of the values that all ranks have computed, on all ranks.

    micro_batches: those of this rank; values: [B, K] for each of them. One rank writes each row, so
    that the sum over ranks is exact; rows without a micro-batch stay 0.
    """
    table = torch.zeros(count, values[0].shape[-1], device=world.device)
    for micro_batch, scores in zip(micro_batches, values, strict=True):
        if any(micro_batch.weight):
            table[micro_batch.index] = scores.float()
    return all_sum(table, world)


def on_main(world: World, fn: Callable[[], Any]) -> Any:
    """Call fn on rank 0 and return its result, plain data, on every rank.

    If it raises a UserError, all ranks end with its exit status, and rank 0 prints it.
    """
    result = on_each(world, lambda: fn() if world.is_main else None)
    if world.world_size == 1:
        return result
    return json.loads(_broadcast_text(json.dumps(result), world, 0))


def on_each(world: World, fn: Callable[[], Any]) -> Any:
    """Call fn on every rank; if it raises a UserError on one of them, all ranks end."""
    result = problem = None
    try:
        result = fn()
    except (UserError, OSError) as error:
        problem = user_error(error)
    codes = torch.zeros(world.world_size, device=world.device)
    if problem is not None:
        codes[world.rank] = 1 + exit_code(problem)  # the status of a Stop may be 0
    failed = all_sum(codes, world).nonzero().flatten().tolist()
    if not failed:
        return result
    if problem is not None and failed[0] == world.rank:
        raise problem
    raise Stop("", int(codes[failed[0]]) - 1)  # that rank prints why


def _broadcast_text(text: str, world: World, rank: int) -> str:
    """Return the text of one rank on all ranks."""
    data = f"{text}\n".encode()  # at least one byte
    size = torch.tensor([len(data)], device=world.device)
    dist.broadcast(size, src=rank)
    block = bytearray(data if world.rank == rank else int(size))
    characters = torch.frombuffer(block, dtype=torch.uint8).to(world.device)  # [size]
    dist.broadcast(characters, src=rank)
    return bytes(characters.cpu().numpy()).decode()[:-1]


# --- how a process ends --------------------------------------------------------------------------

_started = time.monotonic()
_launcher_pid: int | None = None
_signals: list[int] = []  # each SIGTERM and SIGUSR1 that this process has received


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main() and end this process with its exit status.

    A UserError is printed as one line, any other exception with its traceback, by the rank that
    fails first. The process ends with os._exit: threads of gloo may abort the interpreter while it
    shuts down, after all work is done (torch 2.13, Python 3.11).
    """
    global _started
    _started = time.monotonic()
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _frame: _signals.append(number))
        _end_with_launcher(whoami().launcher)
        code = main() or 0
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as error:
        code = exit_code(error)
        report(user_error(error))
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: the stream was closed
            with contextlib.suppress(OSError):  # the reader of the pipe has ended
                stream.flush()
        os._exit(code)


def _end_with_launcher(launcher: str) -> None:
    """Let Linux kill this process when its launcher ends, so that no rank is left behind."""
    global _launcher_pid
    if launcher in ("python", "environment"):
        return  # a process that was started by a shell may outlive it
    _launcher_pid = os.getppid()
    # The signal comes when the thread that started this process ends: for other launchers this may
    # be a thread that ends early.
    if launcher not in BINDERS and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.environ.get("LAUNCHER_PID", str(_launcher_pid)) != str(os.getppid()):
        os._exit(1)  # launch.py has ended already


def stop_requested(minutes: float = 0.0) -> bool:
    """Return whether this process should save and stop.

    The reason is a signal, a time limit in minutes (0: none), or that the launcher has ended.
    """
    is_late = 0 < minutes * 60 <= time.monotonic() - _started
    return bool(_signals) or is_late or _launcher_pid not in (None, os.getppid())


def exit_code(error: BaseException | None) -> int:
    """Return the exit status for an exception, or for None."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(user_error(error), "exit_code", 1)


def user_error(error: BaseException) -> BaseException:
    """Return a WriteError for an OSError of a full or read-only disk, any other error as it is."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return error
    place = f"{error.filename}: " if error.filename else ""
    advice = "free some space and run the same command to resume"
    problem = WriteError(f"{place}{error.strerror}; {advice}")
    problem.__cause__ = error
    return problem


def report(error: BaseException) -> None:
    """Print why this process ends, unless another rank of the group does."""
    is_mistake = isinstance(error, UserError)
    is_silent = isinstance(error, KeyboardInterrupt) or (is_mistake and not str(error))
    if _store is None:
        prints = whoami().local_rank == 0 or not is_mistake
    else:
        prints = _is_first_to_fail(_store, is_silent)
    if isinstance(error, Stop):  # all ranks stop together
        prints = whoami().is_main
    if is_silent or not prints:
        pass
    elif isinstance(error, Stop):
        print(error)
    elif is_mistake and "--debug" not in sys.argv:
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, RuntimeError) and LOST_PEER.search(f"{type(error)} {error}"):
        reason = str(error).splitlines()[0][:160]
        line = "lost the connection to another rank, which has ended or does not answer"
        print(f"error: rank {whoami().rank} {line} ({reason})", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if _store is not None and whoami().is_main:
        deadline = time.monotonic() + 5  # this rank keeps the store: the others need it, too
        while time.monotonic() < deadline and _store.add("ended", 0) < whoami().world_size:
            time.sleep(0.05)


def _is_first_to_fail(store: dist.Store, is_silent: bool) -> bool:
    """Return whether no other rank has failed before; those that follow only lost a peer."""
    try:
        _wait_for_listener(*meeting_point(whoami()), seconds=0)  # without it, C++ frames
        is_first = not is_silent and store.add("printed", 1) == 1
        store.add("ended", 1)
        return is_first
    except (OSError, RuntimeError):  # rank 0, which keeps the store, has ended
        return False
