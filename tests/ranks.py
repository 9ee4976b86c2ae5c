"""ranks(world_size, fn, *args): run fn on real processes that form a gloo group, in 0.2 s.

A fork server has imported the scripts and their packages (preloaded.py), so that a rank starts in
milliseconds instead of seconds. Each rank ends through dist.run, as a script does.
"""

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import psutil

from conftest import LIMIT, ROOT
from ddp_utils import distributed

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as ddp_utils/launch.py
CONTEXT = multiprocessing.get_context("forkserver")
# by the first name with the path of the tests, which Python passes on from 3.13; else by the second
PRELOADED = ["preloaded", "tests.preloaded"]
CONTEXT.set_forkserver_preload(PRELOADED)


class Outcome(NamedTuple):
    """How a group ended: one entry per rank."""

    codes: list  # exit status; -9 for a rank that was killed
    results: list  # what fn returned, None if it did not
    logs: list  # stdout and stderr
    seconds: float


def ranks(world_size, fn, *args, timeout=LIMIT) -> list:
    """Results of fn(*args) on each rank; if a rank fails, the test fails with all logs."""
    outcome = run_ranks(world_size, fn, *args, timeout=timeout)
    assert outcome.codes == [0] * world_size, "\n".join(
        f"--- rank {rank}: exit {code}\n{log}"
        for rank, (code, log) in enumerate(zip(outcome.codes, outcome.logs, strict=True))
    )
    return outcome.results


def run_ranks(world_size, fn, *args, timeout=LIMIT, env=None) -> Outcome:
    """The same for groups that may fail: nothing is asserted, everything is returned."""
    start_server()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(env or {})}
        names |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        processes, pipes = [], []
        for rank in range(world_size):
            names |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            receiver, sender = CONTEXT.Pipe(duplex=False)
            log = f"{folder}/{rank}.log"
            process = CONTEXT.Process(target=_rank, args=(log, {**names}, sender, fn, args))
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        results = [_receive(pipe, start + timeout) for pipe in pipes]
        for process in processes:
            process.join(max(0.0, start + timeout - time.perf_counter()))
        for process in processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
        logs = [Path(folder, f"{rank}.log").read_text() for rank in range(world_size)]
        codes = [process.exitcode for process in processes]
    return Outcome(codes, results, logs, time.perf_counter() - start)


@functools.cache
def start_server():
    """Start the fork server in the folder of the project, where its ranks start, too."""
    folder = os.getcwd()
    os.chdir(ROOT)
    forkserver.ensure_running()
    os.chdir(folder)


def slowness() -> float:
    """Return how many times longer than 0.5 s a rank takes to start and end now, at least 1."""
    run_ranks(1, float)  # the first group of a test process also starts the fork server
    return max(1.0, run_ranks(1, float).seconds / 0.5)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def addresses(pid=None):
    """Local IP address of every TCP socket of a process; None: of this one."""
    sockets = psutil.Process(pid).net_connections("tcp")
    return {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets}


def _receive(pipe, deadline):
    with contextlib.suppress(EOFError):  # the rank ended without a result
        if pipe.poll(max(0.0, deadline - time.perf_counter())):
            return pickle.loads(pipe.recv_bytes())
    return None


def _rank(log, env, sender, fn, args):
    """Run one rank, from the fork server to os._exit."""
    assert sys.modules.keys() & PRELOADED, "the fork server could not import preloaded.py"
    os.setpgid(0, 0)  # a process group, which is killed with all processes that it has started
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    distributed._started = time.monotonic()  # the fork server may be older than a time limit
    import torch

    torch.set_num_threads(1)

    def main():
        # plain bytes: a tensor would otherwise be shared with a process that is about to end
        sender.send_bytes(pickle.dumps(fn(*args)))
        return 0

    distributed.run(main)
