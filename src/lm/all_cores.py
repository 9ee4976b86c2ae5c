"""Call a function for many rows on all CPU cores of this node."""

import collections
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from ddp_utils import UserError, cpus, end_with_parent

ALONE = 1000  # number of first items that this process computes: starting others takes time
BLOCK = 128  # items that are sent to a process at once
MOST = 16  # processes; this process, which reads and writes the rows, could not keep up with more

function: Callable[[Any], Any] = bool  # is called by the processes, which are forks of this one


def map_on_all_cores(function_of_item: Callable[[Any], Any], items: Iterable) -> Iterator:
    """Yield function_of_item(item) of each item, in their order, as the built-in map does.

    The function must return errors instead of raising them. Its side effects are lost.
    Raises UserError if one of the processes is killed.
    """
    global function
    items = iter(items)
    yield from map(function_of_item, itertools.islice(items, ALONE))
    block = [*itertools.islice(items, BLOCK)]
    processes = min(cpus(), MOST)
    if not block or processes == 1:
        yield from map(function_of_item, itertools.chain(block, items))
        return
    function = function_of_item
    # forks must not use the threads of a tokenizer that this process has used
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    forks = multiprocessing.get_context("fork")
    results: collections.deque[Future] = collections.deque()
    with ProcessPoolExecutor(processes, forks, _begin) as pool:
        try:
            while block:
                results.append(pool.submit(_call, block))
                if len(results) > 2 * processes:  # more would only need memory
                    yield from results.popleft().result()
                block = [*itertools.islice(items, BLOCK)]
            for result in results:
                yield from result.result()
        except BrokenProcessPool as error:
            for process in multiprocessing.active_children():  # they ignore SIGTERM
                process.kill()
            problem = "a process that encodes rows was killed, for example because memory ran out"
            raise UserError(f"{problem}; for one process, use taskset -c 0") from error


def _begin() -> None:
    """Ignore signals, which the parent process handles, and end when the parent ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def _call(block: list) -> list:
    return [function(item) for item in block]
