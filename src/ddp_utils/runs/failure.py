"""What a process that fails says: one line or one traceback, of the rank that failed first."""

import contextlib
import re
import sys
import time
import traceback

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ddp_utils import Stop, UserError
from ddp_utils.distributed import whoami
from ddp_utils.runs.environment import redact

# what gloo, NCCL and the store say when another rank is gone or silent
LOST = re.compile(r"gloo|nccl|xccl|connection (closed|reset|refused)|broken pipe|timed out", re.I)


def lost_a_peer(error) -> bool:
    """Whether it says no more than that another rank is gone or silent: a restart may mend it."""
    lost = isinstance(error, RuntimeError) and LOST.search(f"{type(error)} {error}")
    return bool(lost) and not _store_has("bug")


def tell_user(error):
    """One line on what the user, or the machine, has to mend; from one rank of those that fail."""
    with contextlib.suppress(UserError):  # the launcher's variables are the mistake
        if whoami(argv=sys.argv).local_rank != 0:  # one process per node tells him
            return
    if not str(error):
        return
    if isinstance(error, Stop):
        print(error)
    elif _first_to_fail():
        print(f"error: {redact(str(error))}", file=sys.stderr)


def tell_developer(error):
    """The traceback of the rank that failed first, or which rank the others have lost."""
    lost = lost_a_peer(error)
    if not lost and dist.is_initialized() and not isinstance(error, UserError):
        _store_has("bug", now=True)  # restarting would only repeat it
    if not _first_to_fail():
        _wait_for(["told"], 7 * (dist.get_rank() == 0))  # who may keep the store that is read below
        return
    names = [f"failed/{rank}" for rank in range(dist.get_world_size())] if lost else []
    silent = [key.split("/")[1] for key in _wait_for(names, 6)]
    if silent:
        says = f"is gone or does not answer; rank {dist.get_rank()} waited for it"
        words = str(error).splitlines()[0][:160]
        print(f"error: rank {', '.join(silent)} {says} ({words})", file=sys.stderr)
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
    while True:
        keys = [key for key in keys if not _store_has(key)]
        if not keys or time.monotonic() >= deadline:
            return keys
        time.sleep(0.05)
