"""Start a program in several processes of this node and end with the exit status of its ranks.

    python -m ddp_utils.launch 4 src/main_distributed.py --beta 0.3

The run_*.sh call it. With `auto` for the number, one process is started per GPU, at most two. If a
signal kills a rank, all ranks are restarted, up to MAX_RESTARTS times (3). Several nodes: export
NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT on each node; they are not restarted. --then
separates programs that run one after another.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time

from ddp_utils import UserError

FINAL = (2, 3, 4, 85, 130)  # exit statuses that another attempt would only repeat
STOP_SECONDS: dict[int, int] = {signal.SIGINT: 10, signal.SIGTERM: 300, signal.SIGUSR1: 300}
FAILURE_SECONDS = 30  # for the other ranks, after one has failed

received: list[int] = []  # signals that are forwarded to the ranks


def start(program: list[str], processes: int, nodes: int, attempt: int) -> list[subprocess.Popen]:
    """Start the ranks of this node."""
    common = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # no C++ frames if rank 0 ends first
    common |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), **os.environ}
    common |= {"WORLD_SIZE": str(nodes * processes), "LOCAL_WORLD_SIZE": str(processes)}
    common |= {"LAUNCHER_PID": str(os.getpid())}
    # torchrun's names, which also tell a restart from a new command
    common |= {"TORCHELASTIC_RUN_ID": str(os.getpid()), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    first = int(os.environ["NODE_RANK"]) * processes if nodes > 1 else 0
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:  # rank 0 accepts its connections
        if nodes == 1 and "MASTER_PORT" not in os.environ:
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
            common |= {"MASTER_LISTEN_FD": str(listener.fileno())}
        for local_rank in range(processes):
            env = common | {"RANK": str(first + local_rank), "LOCAL_RANK": str(local_rank)}
            files = [] if local_rank else [listener.fileno()]
            command = [sys.executable, "-u", *program]
            rank = subprocess.Popen(command, env=env, pass_fds=files, start_new_session=True)
            ranks.append(rank)
    return ranks


def wait(ranks: list[subprocess.Popen]) -> list[int]:
    """Forward signals to the ranks until all have ended; return their exit statuses."""
    deadline = math.inf
    forwarded = 0
    while any(rank.poll() is None for rank in ranks):
        seconds = [FAILURE_SECONDS] if any(rank.returncode for rank in ranks) else []
        for number in received[forwarded:]:
            forwarded += 1
            seconds.append(STOP_SECONDS[number])
            for rank in ranks:
                rank.send_signal(number)
        deadline = min([deadline, *(time.monotonic() + wait for wait in seconds)])
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)
    return [rank.returncode for rank in ranks]


def launch(program: list[str], processes: int, nodes: int, restarts: int) -> int:
    """Run a program, restarting its ranks after one was killed; return the exit status."""
    for attempt in range(restarts + 1):
        codes = wait(start(program, processes, nodes, attempt))
        final = [code for code in codes if code in FINAL]
        if final or received or min(codes) >= 0:
            break
        print(f"rank {codes.index(min(codes))} was killed by signal {-min(codes)}", file=sys.stderr)
    if final:
        return final[0]
    return 130 if signal.SIGINT in received else int(any(codes))


def number(name: str, text: str, lowest: int, highest: int) -> int:
    """Return the number in a text; raise UserError if it is out of its range."""
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise UserError(f"{name}: '{text}' must be a number from {lowest} to {highest}")
    return int(text)


def main(words: list[str]) -> int:
    """Check the number of processes and nodes, then run the programs."""
    if "--then" in words:
        at = words.index("--then")
        return main(words[:at]) or main([words[0], *words[at + 1 :]])
    count, *program = words
    if count == "auto":
        import torch

        count = str(min(torch.accelerator.device_count(), 2) or 2)
    nodes = number("NNODES", os.environ.get("NNODES", "1"), 1, 100000)
    restarts = number("MAX_RESTARTS", os.environ.get("MAX_RESTARTS", "3"), 0, 1000)
    if nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise UserError(f"{missing[0]}: must be set for several nodes")
        number("NODE_RANK", os.environ.get("NODE_RANK", ""), 0, nodes - 1)
    return launch(program, number("num_gpus", count, 1, 1024), nodes, restarts if nodes == 1 else 0)


if __name__ == "__main__":
    for signal_number in STOP_SECONDS:
        signal.signal(signal_number, lambda number, _frame: received.append(number))
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
