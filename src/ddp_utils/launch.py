"""Start a program in several processes of this node and end with the exit status of its ranks.

    python -m ddp_utils.launch 4 src/main_distributed.py --beta 0.3

The run_*.sh call it instead of torchrun, which ends with status 1 whatever the ranks end with. If a
signal kills a rank, all ranks are restarted, up to MAX_RESTARTS times (3). Several nodes: export
NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each node; they are not restarted. After a signal
the ranks have DDP_SAVE_SECONDS (120) to save and end. --then separates programs that run one after
another.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from ddp_utils import cli, cpus, end_with_parent, parse_number, save_seconds, stop_signals

END_SECONDS = 30  # after one rank has ended with an error, for the others, which may wait for it

ranks: list[subprocess.Popen] = []  # the processes of this node
received: list[int] = []  # signals


def forward(signal_number: int, _frame: FrameType | None) -> None:
    """Send a signal that this process has received to the ranks."""
    received.append(signal_number)
    for rank in ranks:
        rank.send_signal(signal_number)


def start(program: tuple[str, ...], processes: int, nodes: int, node: int, attempt: int) -> None:
    """Start the ranks of this node; what the user has exported keeps its value."""
    threads = max(1, cpus() // processes)
    env = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    env |= {"WORLD_SIZE": str(nodes * processes), "LOCAL_WORLD_SIZE": str(processes)}
    env |= {"TORCHELASTIC_RUN_ID": str(os.getpid()), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    command = [sys.executable, "-u", *program]
    options: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent}
    ranks.clear()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # rank 0 accepts its connections
        if nodes == 1 and "MASTER_PORT" not in os.environ:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
            env["MASTER_LISTEN_FD"] = str(listener.fileno())
            options["pass_fds"] = [listener.fileno()]
        for local_rank in range(processes):
            env |= {"RANK": str(node * processes + local_rank), "LOCAL_RANK": str(local_rank)}
            ranks.append(subprocess.Popen(command, env=env, **options))


def wait(seconds_to_save: int) -> list[int]:
    """Wait for the ranks; return their exit statuses, -9 for a rank that was killed.

    A rank that the launcher has to kill, because another one has ended, counts as ended with 1.
    seconds_to_save: after a signal, for all ranks to save and end.
    """
    deadline = math.inf
    late: list[subprocess.Popen] = []
    while None in [rank.poll() for rank in ranks]:  # each of them is asked in every turn
        if received:
            deadline = min(deadline, time.monotonic() + seconds_to_save)
        elif any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + END_SECONDS)
        if time.monotonic() > deadline:
            late = [rank for rank in ranks if rank.poll() is None]
            for rank in late:
                rank.kill()
                rank.wait()
        time.sleep(0.1)
    return [1 if rank in late else rank.returncode for rank in ranks]


def main(count: str, *program: str) -> int:
    """Run the programs one after another; return the exit status of the first that fails."""
    if "--then" in program:
        at = program.index("--then")
        status = main(count, *program[:at])
        if received:  # perhaps when the first program had just ended
            return status or (130 if signal.SIGINT in received else 85)
        return status or main(count, *program[at + 1 :])
    processes = parse_number("num_gpus", count, 1, 1024)
    nodes = parse_number("NNODES", os.environ.get("NNODES", "1"), 1, 100000)
    node = os.environ.get("NODE_RANK", "") if nodes > 1 else "0"
    restarts = parse_number("MAX_RESTARTS", os.environ.get("MAX_RESTARTS", "3"), 0, 1000)
    seconds_to_save = save_seconds()
    for attempt in range(restarts + 1):
        start(program, processes, nodes, parse_number("NODE_RANK", node, 0, nodes - 1), attempt)
        codes = wait(seconds_to_save)
        if received:  # a rank may still import, and cannot handle it
            codes = [85 if -code in received else code for code in codes]
        # 1 is a bug or the loss of another rank; any status above would only come again
        status = next((code for code in codes if code > 1), int(any(codes)))
        if status != 1 or received or nodes > 1 or min(codes) >= 0:
            break
        print(f"rank {codes.index(min(codes))} was killed by signal {-min(codes)}", file=sys.stderr)
    return 130 if signal.SIGINT in received else status


def launch(words: list[str]) -> int:
    """Print the help, or forward signals and run the programs; return the exit status."""
    if len(words) < 2:
        is_help = words in (["-h"], ["--help"])
        print(__doc__, end="", file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    for number in (signal.SIGINT, *stop_signals()):
        signal.signal(number, forward)
    return main(*words)


if __name__ == "__main__":
    cli.run(lambda: launch(sys.argv[1:]))
