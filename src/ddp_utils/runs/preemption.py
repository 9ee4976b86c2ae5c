"""How a process is bound to its launcher, asked to stop, and how it ends.

Programs import this module first: it uses the standard library alone, since torch's import takes
seconds. What a launcher has started must end with it, or a run would outlive a launcher that was
killed, and go on writing. A run stops for SIGTERM, SIGUSR1, a time limit, Ctrl-C, or the death of
its launcher, and ends with one line or one traceback and one exit status.

Python runs a signal's handler between two of its own instructions, so never while it waits in a
collective for a rank that is gone. Here a thread hears the signals, and can end the process.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ddp_utils import Stop, UserError

# Each launcher sets one of these. What a shell starts may outlive it (nohup).
VARIABLES = "TORCHELASTIC_RUN_ID ACCELERATE_MIXED_PRECISION CROSS_SIZE PALS_RANKID PMI_RANK"
VARIABLES += " OMPI_COMM_WORLD_RANK SLURM_STEP_NUM_TASKS"
RANKS = ["RANK", "PMI_RANK", "PALS_RANKID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"]
GRACE = 20.0  # seconds from the signal to a hard exit, unless a checkpoint is being written
AGAIN = 1.0  # a launcher and a batch system may both send it: later than this is a second time

_start = time.monotonic()
_asked = threading.Event()
_saving = threading.Event()


# --- the launcher --------------------------------------------------------------------------------


def open_streams():
    """Open /dev/null for each closed standard stream (`>&-`): a file would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def find_launcher():
    """Return the launcher's process id, None without one, and have Linux end this process with it.

    Ends this process if the launcher is gone already.
    """
    if not any(map(os.environ.get, VARIABLES.split())):
        return None
    parent = os.getppid()
    # The signal comes when the *thread* that has started this process ends. torchrun's waits for
    # it; elsewhere it must be the main one, which lists its children (until it is killed itself).
    children = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    is_waited_for = "TORCHELASTIC_RUN_ID" in os.environ or str(os.getpid()) in children
    if is_waited_for and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # launch.py says who the parent is; elsewhere it may be who adopts orphans, not always 1
    expected = os.environ.pop("LAUNCHER_PID", str(parent))
    if str(os.getppid()) != expected or store_is_gone():
        end(1, "the launcher is gone")
    return parent


def store_is_gone(env=os.environ) -> bool:
    """Whether torchrun, which opens a store on its node before it starts a process, has ended."""
    if (env.get("TORCHELASTIC_USE_AGENT_STORE"), env.get("GROUP_RANK")) != ("True", "0"):
        return False
    try:
        socket.create_connection((env["MASTER_ADDR"], int(env["MASTER_PORT"])), timeout=5).close()
    except OSError as error:  # of any other init_process_group() tells
        return isinstance(error, ConnectionRefusedError)
    return False


def end(code, why):
    """End this process at once."""
    print(f"process {os.getpid()} ends: {why}", file=sys.stderr, flush=True)
    os._exit(code)


open_streams()
LAUNCHER = find_launcher()


# --- signals -------------------------------------------------------------------------------------


def asked(minutes=0.0) -> bool:
    """Whether this process was asked to stop, or has run for so many minutes (0: no limit)."""
    return _asked.is_set() or 0 < minutes * 60 <= time.monotonic() - _start


def saving():
    """All ranks have agreed to stop: from here on only a second signal ends them early."""
    _saving.set()


def listen():
    """Hear the signals from now on, and end when the launcher does, if there is one."""
    global _start
    _start = time.monotonic()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: _asked.set())
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours, theirs), daemon=True).start()


def _watch(ours, _theirs):
    first = None
    number = 0
    while True:
        heard = select.select([ours], [], [], 0.5)[0] and ours.recv(64)
        now = time.monotonic()
        for number in set(heard or ()) & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}:
            if first is not None and now - first > AGAIN:
                end(128 + number, "asked to stop twice")
            first = first or now
            if number != signal.SIGINT:  # that one is a KeyboardInterrupt, if Python gets to it
                _asked.set()
        if first is not None and not _saving.is_set() and now - first > GRACE:
            end(128 + number, f"asked to stop, and still busy after {GRACE:.0f} s")
        if LAUNCHER not in (None, os.getppid()):
            end(1, "the launcher is gone")


# --- the end of a process ------------------------------------------------------------------------


def read_early(read):
    """Call read(argv), so that --help and wrong settings end this process before it imports torch.

    Left to main() are ranks (a launcher, or an exported WORLD_SIZE), of which one speaks for all,
    --debug with its traceback, and a full disk. With FLAGS_ONLY in the environment, which
    the run_*.sh set before they start any rank, the process ends here in any case.
    """
    flags_only = "FLAGS_ONLY" in os.environ
    is_rank = LAUNCHER or "WORLD_SIZE" in os.environ
    if "--debug" not in sys.argv and (flags_only or not is_rank):
        try:
            read(sys.argv[1:])
        except SystemExit as stop:  # tyro: --help and wrong flags
            _exit(stop.code)
        except UserError as error:
            from ddp_utils.runs.environment import redact

            print(f"error: {redact(str(error))}", file=sys.stderr)
            _exit(error.exit_code)
        except OSError:  # there is no way to print: main() meets it, too
            pass
    if flags_only:
        _exit(0)
    is_first = next(filter(None, map(os.environ.get, RANKS)), "0") == "0"
    if is_first and sys.stdout.isatty():  # on a terminal it must not look dead
        with contextlib.suppress(OSError):
            print(f"{Path(sys.argv[0]).name}: loading torch", flush=True)


def _exit(code):
    with contextlib.suppress(BrokenPipeError):  # --help | head
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 2)


def run(main):
    """Run main() as this process: one line for a user's mistake, a traceback for ours, one exit.

    os._exit, because gloo's threads may still hold Python objects when the interpreter dies, and
    then abort the process after all its work is done (torch 2.13, Python 3.11).
    """
    from ddp_utils.distributed import exit_code, leave, write_error

    listen()
    code = 1
    try:
        code = main() or 0
        leave()
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        from ddp_utils.runs import failure

        error = write_error(error) or error
        code = exit_code(error)
        if isinstance(error, Stop) or (isinstance(error, UserError) and "--debug" not in sys.argv):
            failure.tell_user(error)
        elif not isinstance(error, KeyboardInterrupt):
            failure.tell_developer(error)
    finally:
        _exit(code)
