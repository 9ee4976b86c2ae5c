"""Modules that the training scripts share: everything except the training loops."""

import ctypes
import errno
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

LOCAL_RANKS = ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"]
LOCAL_RANKS += ["PALS_LOCAL_RANKID"]
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# of CUDA; of cuBLAS and cuDNN, on whose handles torch raises a plain RuntimeError; of XPU
MEMORY_ERROR = re.compile("out of memory|STATUS_ALLOC_FAILED|OUT_OF_DEVICE_MEMORY")

# GNU OpenMP reads this when torch is imported: a thread that waits for others checks 10,000 times,
# and then sleeps. By default it checks 300,000 times. With this default, the demo took 1.5 to 2.7
# times as long beside other programs on the same CPUs, and as long without them.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


class UserError(Exception):
    """A mistake that the user can fix: one line on stderr, no traceback, exit status 2."""

    exit_code = 2


class NonFiniteError(UserError):
    """The loss or the gradient is NaN or infinite: every rank stops before the step."""

    exit_code = 3


class WriteError(UserError):
    """A file could not be written: the disk is full or read-only, or a quota is used up."""

    exit_code = 4


class Stop(UserError):
    """A normal end, one line on stdout: 0 for nothing left to do, 85 for stopped and saved."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def parse_number(name: str, text: str, lowest: int = 0, highest: int = 2**31) -> int:
    """Return the number in a text, such as an environment variable.

    Raises UserError if it is not a whole number from lowest to highest.
    """
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise UserError(f"{name}: '{text}' must be a whole number from {lowest} to {highest}")
    return int(text)


def save_seconds() -> int:
    """Return how many seconds a run has to save when it must end: DDP_SAVE_SECONDS, or 120."""
    return parse_number("DDP_SAVE_SECONDS", os.environ.get("DDP_SAVE_SECONDS") or "120", 1)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to save and end.

    SIGHUP means that the terminal is closed; nohup lets a program ignore it.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGUSR1] + ([] if is_ignored else [signal.SIGHUP])


def cpus() -> int:
    """Return the number of CPUs that this process may use: a job may have some of a node's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_of(process: int) -> float:
    """Return when a process was started, in seconds since the system was; 0 if that is unknown.

    The seconds of a suspended system count, as in CLOCK_BOOTTIME.
    """
    try:  # the 22nd field, in ticks since the system was started
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def end_with_parent() -> None:
    """Let Linux kill this process when the one that has started it ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def is_first_of_node() -> bool:
    """Return whether this is the first process of its node, by the launcher's variables."""
    local_ranks = [os.environ[name] for name in LOCAL_RANKS if os.environ.get(name)]
    return local_ranks[:1] in ([], ["0"])


def exit_with(error: UserError) -> NoReturn:
    """End with the exit status of an error; the first process of a node prints it."""
    if is_first_of_node():
        print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def exit_code(error: BaseException | None) -> int:
    """Return the exit status for an exception, or for None."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return getattr(user_error(error), "exit_code", 1) if error else 0


def user_error(error: BaseException) -> BaseException:
    """Return a UserError for a full disk or device; any other error as it is."""
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        place = f"{error.filename}: " if error.filename else ""
        advice = "free some space and run the same command to resume"
        known: UserError = WriteError(f"{place}{error.strerror}; {advice}")
    elif reason := out_of_memory(error):
        advice = "see in nvidia-smi or xpu-smi whether another program uses it; otherwise use a "
        advice += "smaller batch size or max_length, gradient checkpointing, or more GPUs"
        known = UserError(f"{reason}; {advice}; --debug shows where it happened")
    else:
        return error
    return known.with_traceback(error.__traceback__)


def out_of_memory(error: BaseException) -> str:
    """Return the first sentences of a GPU's error that it is out of memory, "" for other errors."""
    line = (str(error).splitlines() or [""])[0]
    if not isinstance(error, RuntimeError) or not MEMORY_ERROR.search(line):
        return ""
    return re.split(r"\.? (?:Process|Including|Of the) ", line)[0].rstrip(".")


def open_standard_streams() -> None:
    """Open standard input, output and error as /dev/null if they are closed, as in a daemon.

    Otherwise the next file or socket would get their number, and with it all that is printed. In
    an old locale, characters that its encoding lacks are printed as escape sequences.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


# --- two clones, one environment ------------------------------------------------------------------


def clone_of_program() -> Path | None:
    """Return the clone of the project that this program belongs to, if any.

    It is the clone of the script, or for `python -m` the one that a run_*.sh names, otherwise the
    one of the current folder.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) or ""
    is_script = script.endswith(".py") and main.__spec__ is None  # `python -m` sets __spec__
    places = [script] if is_script else []
    places += [os.environ.get("DDP_PROJECT") or "", os.getcwd()]
    for path in [Path(place).resolve() for place in places if place]:
        for folder in (path, *path.parents):
            if os.path.isfile(folder / "src/ddp_utils/__init__.py"):
                return folder
    return None


def check_clone() -> None:
    """End this program if it belongs to another clone of the project than this package.

    An environment has one clone installed, whose code `python -m` would run in any other clone.
    Every program calls this under __main__, through check_flags() or run() of cli, or
    distributed.run().
    """
    try:
        clone = clone_of_program()
    except OSError as error:
        exit_with(UserError(f"the current folder cannot be used ({error.strerror}); use another"))
    source = Path(__file__).resolve().parents[1]
    if clone and (clone / "src").resolve() != source:
        problem = f"{source}: this package belongs to another clone (expected {clone}/src)"
        fix = f"export PYTHONPATH={shlex.quote(f'{clone}/src')}"
        exit_with(UserError(f"{problem}; to use {clone}, run: {fix}"))
