"""How a process is asked to stop, and how it ends.

It stops for SIGTERM, SIGUSR1, a time limit, Ctrl-C, or the death of its launcher, and ends with one
line or one traceback, of the rank that failed first, and one exit status.

Python runs a signal's handler between two of its own instructions, so never while it waits in a
collective for a rank that is gone. Here a thread hears the signals, and can end the process.
"""

import contextlib
import os
import re
import select
import signal
import socket
import sys
import threading
import time
import traceback

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ddp_utils import Stop, UserError, redact
from ddp_utils.distributed import exit_code, leave, whoami, write_error
from ddp_utils.runs import startup

GRACE = 20.0  # seconds from the signal to a hard exit, unless a checkpoint is being written
AGAIN = 1.0  # a launcher and a batch system may both send it: later than this is a second time

# what gloo, NCCL and the store say when another rank is gone or silent
LOST = re.compile(r"gloo|nccl|xccl|connection (closed|reset|refused)|broken pipe|timed out", re.I)

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
        told = write_error(error) or error
        code = exit_code(told)
        if isinstance(told, Stop) or (isinstance(told, UserError) and "--debug" not in sys.argv):
            _tell_user(told)
        elif not isinstance(told, KeyboardInterrupt):
            _tell_developer(told)
    finally:
        with contextlib.suppress(BrokenPipeError):  # --help | head
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def lost_a_peer(error) -> bool:
    """Whether it says no more than that another rank is gone or silent: a restart may mend it."""
    lost = isinstance(error, RuntimeError) and LOST.search(f"{type(error)} {error}")
    return bool(lost) and not _store_has("bug")


def _tell_user(error):
    with contextlib.suppress(UserError):  # the launcher's variables are the mistake
        if whoami(argv=sys.argv).local_rank != 0:  # one process per node tells him
            return
    if not str(error):
        return
    if isinstance(error, Stop):
        print(error)
    elif _first_to_fail():
        print(f"error: {redact(str(error))}", file=sys.stderr)


def _tell_developer(error):
    """The traceback of the rank that failed first, or which rank the others have lost."""
    lost = lost_a_peer(error)
    if not lost and dist.is_initialized() and not isinstance(error, UserError):
        _store_has("bug", now=True)  # restarting would only repeat it
    if not _first_to_fail():
        _wait_for(["told"], 4 * (dist.get_rank() == 0))  # who may keep the store that is read below
        return
    names = [f"failed/{rank}" for rank in range(dist.get_world_size())] if lost else []
    if silent := [key.split("/")[1] for key in _wait_for(names, 3)]:
        print(
            f"error: rank {', '.join(silent)} is gone or does not answer; rank "
            f"{dist.get_rank()} waited for it ({str(error).splitlines()[0][:160]})",
            file=sys.stderr,
        )
    else:
        traceback.print_exception(error)
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # for torchrun's report, and launch.py
    _store_has("told", now=True)


def _store_has(key, now=False):
    """Whether the group's store has this key; `now` puts it there."""
    if not dist.is_initialized():
        return False
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.set(key, "") is None if now else store.check([key])
    except RuntimeError:  # rank 0 kept it and is gone
        return False


def _first_to_fail():
    """Whether this rank's exception is the cause, or only the loss of a peer that failed first."""
    if not dist.is_initialized():
        return True
    _store_has(f"failed/{dist.get_rank()}", now=True)
    try:
        return dist.distributed_c10d._get_default_store().add("failures", 1) == 1
    except RuntimeError:
        print(f"rank {dist.get_rank()} stopped: rank 0 is gone", file=sys.stderr)
        return False


def _wait_for(keys, seconds):
    """The keys that the group's store still does not have after so many seconds."""
    deadline = time.monotonic() + seconds
    while (keys := [key for key in keys if not _store_has(key)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return keys
