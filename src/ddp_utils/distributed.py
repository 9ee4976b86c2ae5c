"""Process groups: start under any launcher, reduce over ranks, end with one message.

A script calls start() after it has read its settings, and run(main) under __main__. With one
process on a CPU there is no group, and every function here still works.
"""

import contextlib
import gc
import glob
import json
import math
import os
import platform
import re
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_utils import (
    Stop,
    UserError,
    check_clone,
    exit_code,
    open_standard_streams,
    parse_number,
    save_seconds,
    start_of,
    stop_signals,
    user_error,
)

# The names in which each launcher stores the rank, the world size, the rank on the node and the
# number of processes on the node, then names that only this launcher sets. All but the fourth must
# be set: users export WORLD_SIZE by hand, and the batch step of Slurm has SLURM_PROCID but no
# SLURM_STEP_NUM_TASKS. PALS documents the ranks but not the size: any of three names is read.
RANKS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
LAUNCHERS = {
    "accelerate": f"{RANKS} ACCELERATE_MIXED_PRECISION",
    "deepspeed": f"{RANKS} CROSS_SIZE",
    "torchrun": f"{RANKS} TORCHELASTIC_RUN_ID",  # and ddp_utils/launch.py
    "environment": RANKS,
    "pals": "PALS_RANKID PMI_SIZE|PALS_SIZE|WORLD_SIZE PALS_LOCAL_RANKID "
    "PALS_LOCAL_SIZE|LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpiexec": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
}
# numbers of processes of flux, MVAPICH and jsrun
OTHER_SIZES = ("FLUX_JOB_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")
COMPLETE = {"environment", "pals", "mpirun"}  # set all of their names, or none
SHELLS = {"bash", "csh", "fish", "sh", "tcsh", "zsh"}  # `srun --pty bash` is a job of this name
BINDERS = {"pals", "mpirun", "mpiexec", "srun"}  # may show each process one GPU of its own
# "ccl" was the name of Intel's backend before torch had its own
BACKENDS = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "xpu": "xpu", "gloo": "cpu"}
JOB_ENDS = ("DDP_JOB_END", "SLURM_JOB_END_TIME")
NVIDIA_GPUS = "/dev/nvidia[0-9]*"
Device = torch.device | str


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


def whoami(env: Mapping[str, str] = os.environ) -> World:
    """Return the place of this process as its launcher describes it; start nothing.

    Raises UserError for variables of processes that do not exist: a program may inherit some from
    an earlier group, or run in a shell that srun has started.
    """
    problem = ""
    for launcher, all_names in LAUNCHERS.items():
        names = [next(filter(env.get, either.split("|")), "") for either in all_names.split()]
        one_process = f"for one process run: unset {names[0]}"
        if all(names[:3] + names[4:]):
            rank, world_size, local_rank = (parse_number(name, env[name]) for name in names[:3])
            if rank >= world_size:
                problem = f"{names[0]}: {rank} must be less than {names[1]}, which is {world_size}"
                raise UserError(f"{problem}; {one_process}")
            is_job = env.get("SLURM_STEP_ID", "0") == "0"  # not a later step that a shell starts
            is_pty = "SLURM_PTY_PORT" in env or "SLURM_STEP_ID" not in env
            is_shell = is_job and is_pty and env.get("SLURM_JOB_NAME") in SHELLS or os.isatty(0)
            if launcher == "srun" and world_size > 1 and is_shell:
                many = f"for {world_size} run: srun --job-name=mine python ..."
                raise UserError(f"srun has started {world_size} shells; {one_process}; {many}")
            # Slurm writes "5,2(x3)": five tasks on the first node, two on each of three others
            sizes = []
            for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get(names[3], "")):
                sizes += [int(size)] * int(times or 1)
            node = parse_number("SLURM_NODEID", env.get("SLURM_NODEID") or "0")
            local_size = sizes[min(node, len(sizes) - 1)] if sizes else local_rank + 1
            # the ranks after this one are an upper bound: `mpiexec -n 8 -ppn 5` places 5 and 3, and
            # the user has exported 5
            local_size = min(local_size, world_size - rank + local_rank)
            return World(rank, world_size, local_rank, local_size, launcher)
        is_alone = bool(names[1]) and env[names[1]] == "1"  # some platforms set no local rank then
        if launcher in COMPLETE and names[0] and not is_alone:
            missing = all_names.split()[names.index("")].replace("|", " or ")
            problem = f"{names[0]} is set, but {missing} is not; export it, or {one_process}"
    for name in OTHER_SIZES:
        if env.get(name, "1") != "1":
            problem = f"{name} is {env[name]}, but no supported launcher has set it; use srun, "
            problem += f"mpiexec or torchrun, or for one process run: unset {name}"
    if problem:
        raise UserError(problem)
    return World()


# --- device --------------------------------------------------------------------------------------


def start(config: Any) -> World:
    """Return this process among all; connect to the others, unless it only checks the settings.

    A script calls this after it has read its settings, of which backend, timeout_minutes and check
    are used. Raises UserError as choose_device() and init_process_group() do.
    """
    if config.check:
        return choose_device(whoami(), config.backend)
    return init_process_group(whoami(), config.backend, config.timeout_minutes)


def choose_device(world: World, backend: str = "auto") -> World:
    """Add device and backend to a world: `auto` selects the best device of the machine.

    Raises UserError if the backend's device is absent, or if there are more processes than devices.
    """
    kind = BACKENDS.get(backend, "cpu")
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if backend == "auto" and not use_cpu:
        kind = next(filter(device_count, ("cuda", "xpu")), "cpu")
        if kind == "cpu":
            check_no_gpu_is_lost()
    world = world._replace(backend=dist.get_default_backend_for_device(kind))
    if kind == "cpu":
        return world._replace(device=torch.device("cpu"))
    count = device_count(kind)
    if count == 0:
        absent = f"needs a {kind} device, this machine has none"
        raise UserError(f"--backend {backend} {absent}; use auto")
    launchers = {world.launcher}
    if world.launcher == "environment":  # the user may have exported what another one has set
        launchers = set()
        for name in BINDERS:  # a batch script of Slurm has some of the names of srun
            names = LAUNCHERS[name].split()[:3]
            if all(any(map(os.environ.get, either.split("|"))) for either in names):
                launchers.add(name)
    has_own = count == 1 and bool(launchers & BINDERS)  # it shows each process its own
    processes = max(world.local_size, world.local_rank + 1)
    if processes > count and not has_own:
        problem = f"{processes} processes on a node with {count} {kind} devices"
        on_cpu = "or --backend gloo for processes on the CPU"
        raise UserError(f"{problem}; start at most {count} per node, {on_cpu}")
    # cuDNN's attention, which torch prefers on some GPUs, builds a plan for each new shape: 0.44 s
    # per forward on a B200 (github.com/modelscope/FunASR/issues/3704). Here almost every batch of
    # separate rows, and every generated token, has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # packed batches have ever new lengths, for which the allocator's blocks of fixed size fragment
    # (not on Intel GPUs, where collectives can fail: github.com/intel/torch-xpu-ops/issues/4427)
    if kind == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its old name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return world._replace(device=torch.device(kind, 0 if has_own else world.local_rank))


def check_no_gpu_is_lost() -> None:
    """Raise UserError if this process may use an NVIDIA GPU that PyTorch cannot use.

    Otherwise the run would silently train on the CPU, for example with an old driver. A build of
    PyTorch without CUDA was chosen for the CPU.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or is_hidden:
        return
    gpus, denied = glob.glob(NVIDIA_GPUS), 0
    for gpu in gpus:
        try:
            os.close(os.open(gpu, os.O_RDWR))
        except OSError as error:  # otherwise the driver does not answer
            denied += isinstance(error, PermissionError)
    if denied == len(gpus):  # there is none, or this is a job without a GPU on a node that has some
        return
    try:
        torch.cuda.init()
        problem = "no device"
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0].partition(". Please ")[0]
    hint = "update the driver or install a PyTorch for it, or use --backend gloo for the CPU"
    raise UserError(f"this machine has an NVIDIA GPU, but PyTorch cannot use it: {problem}; {hint}")


def device_count(kind: str) -> int:
    """Return the number of devices of a kind, "cuda" or "xpu", that this process can see."""
    backend = getattr(torch, kind)
    return backend.device_count() if backend.is_available() else 0


# --- the process group ---------------------------------------------------------------------------

_store: dist.Store | None = None  # through which the ranks found each other


def init_process_group(world: World, backend: str = "auto", timeout_minutes: float = 30.0) -> World:
    """Choose the device and connect to the other processes.

    Raises UserError if they cannot be reached within DDP_JOIN_SECONDS (50 s, on several nodes
    600 s), or if the port is in use.
    """
    global _store, _world
    warnings.clear()
    world = choose_device(world, backend)
    is_cpu = world.device.type == "cpu"
    if not is_cpu:
        torch.accelerator.set_device_index(world.device)
    if world.world_size == 1:
        return world
    if world.is_one_node and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no need to resolve the host name
    if is_cpu and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        set_level: Any = dist.set_debug_level  # typed without an argument in torch 2.10
        set_level(dist.DebugLevel.INFO)  # DDP crashes with DETAIL on gloo (torch 2.13)
    address, port = meeting_point(world)
    timeout = timedelta(minutes=timeout_minutes)
    options: dict[str, Any] = {"rank": world.rank, "world_size": world.world_size}
    options["device_id"] = None if is_cpu else world.device
    try:
        _store = _open_store(world, address, port)
        _store.set_timeout(timeout)
        store: Any = _store  # whose types lack append()
        if world.local_rank == 0:
            store.append("nodes", f"{world.rank}@{platform.node()} ")
        with without_gloos_line():
            dist.init_process_group(world.backend, store=_store, timeout=timeout, **options)
            if is_cpu:
                dist.barrier()  # a rank that ends while others still connect would break theirs
        if world.local_rank == 0 and not world.is_main:
            print(joined(world, _store.get("nodes").decode().split()), file=sys.stderr, flush=True)
    except (RuntimeError, OSError) as error:
        reason, _, of_nccl = str(error).partition("Last error:")  # which NCCL writes at the end
        if of_nccl.strip():
            problem = f"rank {world.rank}: {world.backend}: {of_nccl.strip().splitlines()[0]}"
            raise UserError(f"{problem}; for more about it export NCCL_DEBUG=INFO") from error
        reason = reason.splitlines()[0]
        raise UserError(
            f"rank {world.rank} could not connect to the {world.world_size} processes at "
            f"{address}:{port} ({reason}); export a MASTER_ADDR that all can reach and a free "
            "MASTER_PORT; for several networks GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, for "
            "nodes that start slowly DDP_JOIN_SECONDS; for one process unset the variables of "
            f"{world.launcher}, such as {LAUNCHERS[world.launcher].split()[0]}"
        ) from error
    _world = world
    return world


def joined(world: World, names: list[str]) -> str:
    """Return the line that the first rank of another node prints.

    It is printed on stderr, because stdout may have to be JSON.
    names: RANK@HOST of the first rank of each node.
    """
    hosts = {int(rank): host for rank, _, host in (name.partition("@") for name in names)}
    ranks = sorted(hosts)
    processes = f"{world.local_size} process" + "es" * (world.local_size > 1)
    line = f"Node {ranks.index(world.rank)} of {len(ranks)} joined: {processes}"
    return f"{line}; the log is printed by node 0 ({hosts[ranks[0]]})"


@contextlib.contextmanager
def without_gloos_line() -> Iterator[None]:
    """Connect a group whose Gloo prints a line on stdout, as in torch 2.10, and drop the line.

    C++ writes it to the file descriptor. With `check_gpu.py --bench --json` it would not be JSON.
    """
    if torch.__version__ >= "2.11":
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return address and port of rank 0's store; on one node neither need be exported."""
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and not world.is_one_node:
        raise UserError("MASTER_ADDR: not set; export the host of rank 0, and a free MASTER_PORT")
    # the processes of one node have the same parent; those of srun may have wrappers of their own
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    group = zlib.crc32(step.encode()) if world.launcher == "srun" else os.getppid()
    port = port or (str(20000 + group % 10000) if world.is_one_node else "29500")
    return address or "127.0.0.1", parse_number("MASTER_PORT", port, 1, 65535)


def _open_store(world: World, address: str, port: int) -> dist.Store:
    """Return the key-value store of the group: the launcher's if it has one, or rank 0's.

    init_method="env://" would open one as well, but a server of one node would listen on every
    network, and the caller could not ask it which rank has failed first.
    """
    patience = "50" if world.is_one_node else "600"  # the imports of another node may be slow
    seconds = parse_number("DDP_JOIN_SECONDS", os.environ.get("DDP_JOIN_SECONDS") or patience, 1)
    is_server = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"is_master": is_server, "timeout": timedelta(seconds=seconds)}
    if is_server and world.is_one_node:
        opened = os.environ.get("MASTER_LISTEN_FD")  # by launch.py
        family = socket.getaddrinfo(address, port)[0][0]
        listener = opened or socket.create_server((address, port), family=family).detach()
        options["master_listen_fd"] = int(listener)
    store = dist.TCPStore(address, port, world.world_size, **options)
    # an agent keeps its store for all attempts
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


# --- collectives ---------------------------------------------------------------------------------


def to_device(values: Any, device: Device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers to a device, without waiting for the copy."""
    device = torch.device(device)
    tensor = torch.as_tensor(values, dtype=dtype)
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def all_sum(tensor: Tensor, world: World) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def is_first() -> bool:
    """Return whether this is rank 0, of the group or, without one, of the launcher."""
    return dist.get_rank() == 0 if dist.is_initialized() else _world.is_main


def warn(line: str) -> None:
    """Print a warning on rank 0, where a run keeps it with its results; see also Run.warn()."""
    if is_first() and line not in warnings:
        warnings.append(line)
        print(line, flush=True)


class Table:
    """A table [N, K], in float32, of which each rank computes some rows."""

    def __init__(self, rows: int, columns: int, world: World):
        self.world = world
        self.sums = torch.zeros(rows, columns, device=world.device)  # rows of other ranks are 0

    def add(self, micro_batch: Any, values: Tensor) -> None:
        """Write the rows of a micro-batch of this rank; values: [B, K]."""
        if any(micro_batch.weight):
            self.sums[to_device(micro_batch.index, self.world.device)] = values.float()

    def reduce(self) -> Tensor:
        """Return the table on all ranks; one rank has written each row, so the sum is exact."""
        return all_sum(self.sums, self.world)


def on_main(world: World, fn: Callable[[], Any]) -> Any:
    """Call fn on rank 0 and return its result, plain data, on every rank.

    If it raises a UserError, all ranks end with its exit status, and rank 0 prints it.
    """
    result = on_each(world, lambda: fn() if world.is_main else None)
    if world.world_size == 1:
        return result
    text = torch.tensor([*json.dumps(result).encode()], dtype=torch.uint8, device=world.device)
    size = all_sum(torch.tensor(len(text) if world.is_main else 0, device=world.device), world)
    text = text if world.is_main else text.new_zeros(int(size))
    return json.loads(bytes(all_sum(text, world).tolist()))


def on_each(world: World, fn: Callable[[], Any]) -> Any:
    """Call fn on every rank; if it raises a UserError on one of them, all ranks end."""
    result = problem = None
    try:
        result = fn()
    except (UserError, OSError) as error:
        problem = user_error(error)
    code = torch.tensor(-1 if problem is None else exit_code(problem), device=world.device)
    if world.world_size > 1:
        dist.all_reduce(code, dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if code >= 0:
        raise SystemExit(int(code))  # the rank that has failed prints why
    return result


def on_first(key: str, fn: Callable[[Any], Any]) -> Any:
    """Call fn(None) on rank 0, then fn(its result) on the first rank of every other node.

    Return the result of rank 0, plain data, on every rank. All ranks must call this, once per key.
    They wait in the store, which has no time limit as a collective has: fn may download for hours.
    If it raises a UserError, all ranks end with its exit status, and that rank prints it.
    """
    store = _store
    if store is None:  # one process, or a --check
        return fn(None)
    result = problem = None
    try:
        if _world.is_main:
            result = fn(None)
            store.set(key, json.dumps(result))
        elif _world.local_rank == 0:
            result = json.loads(_wait_for(store, key))
            if result is not None:  # rank 0 has not failed
                fn(result)
    except (UserError, OSError) as error:
        problem = user_error(error)
        store.set(key, "null")
    code = 0 if problem is None else exit_code(problem)
    if code or store.add(f"{key}/done", 1) == _world.world_size:
        store.set(f"{key}/code", str(code))
    if problem is not None:
        raise problem
    code = int(_wait_for(store, f"{key}/code"))
    if code:
        raise SystemExit(code)
    return json.loads(_wait_for(store, key))


def _wait_for(store: dist.Store, key: str) -> bytes:
    """Return the value of a key of the store, as soon as another rank has set it."""
    store.wait([key], timedelta(days=7))
    return store.get(key)


# --- how a process ends --------------------------------------------------------------------------

_started = time.monotonic()  # of this process, or of the launcher that restarts ranks
_launcher_pid: int | None = None
_world = World()
warnings: list[str] = []  # of this script
_signals: list[int] = []  # each of stop_signals() that this process has received
_asks = False  # whether the script calls stop_requested(), as it does once it can save


def run(main: Callable[[], int | None], saves: bool = True) -> NoReturn:
    """Run a script's main() and end this process with its exit status.

    A UserError is printed as one line, any other exception with its traceback, by the rank that
    fails first. The process ends with os._exit: threads of gloo may abort the interpreter while it
    shuts down, after all work is done (torch 2.13, Python 3.11).

    saves: stop_signals() ask main() to save and end; without it, they end the program at once.
    """
    global _launcher_pid, _started, _world
    code = 1
    open_standard_streams()
    check_clone()
    gc.freeze()  # what the imports created lives to the end, so no collection need look at it
    gc.enable()
    try:
        for number in stop_signals() if saves else ():
            signal.signal(number, _receive)
        with contextlib.suppress(UserError):  # main() raises it, unless it needs no other rank
            _world = whoami()
        if _world.launcher not in ("python", "environment"):  # a shell may end before
            _launcher_pid = os.getppid()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # it may have started these ranks again
            start = start_of(os.getppid())
            if start:  # while a system is suspended, time.monotonic() stands still
                _started = time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start)
        code = main() or 0
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        code = exit_code(error)
        report(user_error(error))
    finally:
        with contextlib.suppress(OSError, AttributeError):  # stdout is closed
            sys.stdout.flush()
        os._exit(code)


def _receive(number: int, _frame: object) -> None:
    """Keep a signal for stop_requested(); end at once if the script has not asked for one yet.

    SystemExit passes through all that handles errors of rows and of templates.
    """
    _signals.append(number)
    if not _asks:
        raise SystemExit(85)


def stop_requested(minutes: float = 0.0, last_save: float = 0.0) -> bool:
    """Return whether this process should save and stop.

    The reason is a signal, a time limit in minutes (0: none), that the launcher has ended, or that
    the job is about to end; last_save: seconds that the last checkpoint took.
    """
    global _asks
    _asks = True
    is_late = 0 < minutes * 60 <= time.monotonic() - _started or job_is_ending(last_save)
    return bool(_signals) or is_late or _launcher_pid not in (None, os.getppid())


def job_is_ending(last_save: float = 0.0) -> bool:
    """Return whether so little time is left of the job that the run must save now.

    That is DDP_SAVE_SECONDS or twice the last save, but at most half of the job. Slurm exports when
    the job ends, in seconds since 1970, and for PBS our job scripts do.
    """
    end = next(filter(None, map(os.environ.get, JOB_ENDS)), "")
    left = int(end) - time.time() if end.isdecimal() else math.inf
    total = left + time.monotonic() - _started  # below 0 if the variable is that of an earlier job
    return total > 0 and left < min(max(save_seconds(), 2 * last_save), total / 2)


def report(error: BaseException) -> None:
    """Print why this process ends, unless another rank of the group does."""
    if isinstance(error, Stop) and _world.is_main:  # all ranks stop together
        print(error)
    is_early = isinstance(error, SystemExit) and _signals and not _asks and _world.is_main
    if is_early and _is_first_to_fail(error, lost_peer=False):
        print("stopped before the first step; run the same command again")
    is_silent = isinstance(error, (Stop, SystemExit, KeyboardInterrupt))
    lost_peer = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    if is_silent or not _is_first_to_fail(error, lost_peer):
        pass
    elif isinstance(error, UserError) and "--debug" not in sys.argv:
        print(f"error: {error}", file=sys.stderr)
    elif lost_peer:
        line = "lost the connection to another rank, which has ended or does not answer"
        reason = str(error).splitlines()[0]
        print(f"error: rank {_world.rank} {line} ({reason})", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if _store is not None and _world.is_main:
        time.sleep(1)  # the others ask the store of this rank whether they are the first


def _is_first_to_fail(error: BaseException, lost_peer: bool) -> bool:
    """Return whether this rank is the first of its group, or of its node without a group."""
    if _store is None:
        return _world.local_rank == 0 or not isinstance(error, UserError)
    try:
        return _store.add("failed", 1) == 1
    except RuntimeError:  # rank 0, which keeps the store, has ended
        return not lost_peer and not isinstance(error, UserError)
