"""How a process is asked to stop, and how it ends.

It stops for SIGTERM, SIGUSR1, a time limit, Ctrl-C, or the death of its launcher, and ends with one
line or one traceback, of the rank that failed first, and one exit status.

Python runs a signal's handler between two of its own instructions, so never while it waits in a
collective for a rank that is gone. Here a thread hears the signals, and can end the process.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time

from ddp_utils import Stop, UserError
from ddp_utils.distributed import exit_code, leave, write_error
from ddp_utils.runs import startup

GRACE = 20.0  # seconds from the signal to a hard exit, unless a checkpoint is being written
AGAIN = 1.0  # a launcher and a batch system may both send it: later than this is a second time

_start = time.monotonic()
_asked = threading.Event()
_saving = threading.Event()


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
    first, number = None, 0
    while True:
        heard = select.select([ours], [], [], 0.5)[0] and ours.recv(64)
        now = time.monotonic()
        for number in set(heard or ()) & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}:
            if first is not None and now - first > AGAIN:
                startup.end(128 + number, "asked to stop twice")
            first = first or now
            if number != signal.SIGINT:  # that one is a KeyboardInterrupt, if Python gets to it
                _asked.set()
        if first is not None and not _saving.is_set() and now - first > GRACE:
            startup.end(128 + number, f"asked to stop, and still busy after {GRACE:.0f} s")
        if startup.LAUNCHER not in (None, os.getppid()):
            startup.end(1, "the launcher is gone")


# --- the end of a process ------------------------------------------------------------------------


def run(main):
    """Run main() as this process: one line for a user's mistake, a traceback for ours, one exit.

    os._exit, because gloo's threads may still hold Python objects when the interpreter dies, and
    then abort the process after all its work is done (torch 2.13, Python 3.11).
    """
    listen()
    code = 1
    try:
        code = main() or 0
        leave()
    except SystemExit as stop:  # tyro: --help and wrong flags
        code = stop.code if isinstance(stop.code, int) else 2
    except BaseException as error:
        from ddp_utils.runs import failure

        error = write_error(error) or error
        code = exit_code(error)
        if isinstance(error, Stop) or (isinstance(error, UserError) and "--debug" not in sys.argv):
            failure.tell_user(error)
        elif not isinstance(error, KeyboardInterrupt):
            failure.tell_developer(error)
    finally:
        with contextlib.suppress(BrokenPipeError):  # --help | head
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
