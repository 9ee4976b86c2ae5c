"""Run a program in several processes of this node, and end with the exit status of its ranks.

    python -m ddp_utils.launch 4 src/main_distributed.py --beta 0.3

The shell scripts call it. One process checks settings, data and devices for all, so that a mistake
costs one line; then torch's elastic agent starts the ranks, with restarts. torchrun does so too,
but ends with 1 whatever its ranks ended with, and repeats what a restart cannot mend. For several
nodes NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT are set on each. --then separates programs that
run one after another.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ddp_utils import UserError, distributed

FINAL = {2, 3, 4, 85, 130}  # exit statuses that a restart would only repeat
STATUS_KEY = "exit_status"  # of the run, in the store that the agents of all nodes share


class Agent(LocalElasticAgent):
    """Torch's agent, which passes signals on to its ranks and reads their exit statuses."""

    signals = []  # that the ranks have not received yet
    status = 1  # of the ranks, if they fail

    def _start_workers(self, worker_group):
        self.first_end = None  # when the first rank ended
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self.signals.append(number))
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group):
        """Return the state of this node's ranks.

        When one has ended the others have time to end by themselves: rank 0 may still write how
        the run has ended, and a second SIGTERM would end it at once.
        """
        ranks = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        while self.signals:
            self._remaining_restarts = 0
            number = self.signals.pop(0)
            for rank in ranks:
                rank.send_signal(number)
        codes = {rank.poll() for rank in ranks}
        is_over = self._store.check([STATUS_KEY])  # on another node
        if is_over or codes - {None, 0}:
            self.first_end = self.first_end or time.monotonic()
            patience = 30 if codes & FINAL else 5
            if None in codes and time.monotonic() - self.first_end < patience:
                return RunResult(state=WorkerState.HEALTHY)
            self._pcontext.close()  # SIGTERM, and SIGKILL half a minute later
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._end_or_restart(result.failures, is_over)
        return result

    def _end_or_restart(self, failures, is_over):
        final = [failure.exitcode for failure in failures.values() if failure.exitcode in FINAL]
        if is_over:
            final.append(int(self._store.get(STATUS_KEY)))
        self.status = final[0] if final else 1
        # a rank with an exception of its own, not the loss of a peer, has recorded it
        if final or any(os.path.isfile(failure.error_file) for failure in failures.values()):
            self._remaining_restarts = 0
        if self._remaining_restarts:
            ends = ", ".join(f"rank {rank} with {failures[rank].exitcode}" for rank in failures)
            print(f"ended: {ends}; all processes start again", file=sys.stderr)
        else:
            self._store.set(STATUS_KEY, str(self.status))
            self._exit_barrier()  # until the other nodes have read it from the first one


def number(name, text, lowest, highest):
    """Return the number in a text; raise UserError if it is none, or not in its range."""
    if not re.fullmatch("[0-9]{1,9}", text) or not lowest <= int(text) <= highest:
        raise UserError(f"{name}: {text}; give a number from {lowest} to {highest}")
    return int(text)


def variable(name, default, lowest, highest):
    """Return the number in an environment variable, or the default; raise as number() does."""
    return number(name, os.environ.get(name) or default, lowest, highest)


def check(program, processes, nodes):
    """Run the program with --check, in one process; return the lines that it printed."""
    variables = ["RANK=0", "LOCAL_RANK=0", f"WORLD_SIZE={processes * nodes}"]
    command = ["env", *variables, f"LOCAL_WORLD_SIZE={processes}", sys.executable, *program]
    done = subprocess.run([*command, "--check"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.splitlines()


def meeting(nodes, folder):
    """Return the parameters of the rendezvous; raise UserError if node 0 cannot be met."""
    if nodes == 1:  # in a file: a store of the agent would listen to other machines
        options = {"local_addr": "127.0.0.1", "store_type": "file"}
        return RendezvousParameters("c10d", f"{folder}/store", uuid.uuid4().hex, 1, 1, **options)
    node = int(os.environ["NODE_RANK"])
    seconds = int(os.environ.get("DDP_JOIN_SECONDS") or 50)
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    try:
        if node == 0:
            socket.create_server(("", port)).close()
        else:
            distributed.wait_for_listener(address, port, time.monotonic() + seconds)
    except OSError as error:
        who = f"node {node} could not meet the {nodes} nodes"
        raise UserError(distributed.why_not_met(error, who, address, port)) from error
    options = {"rank": node, "timeout": seconds}
    return RendezvousParameters("static", f"{address}:{port}", "none", nodes, nodes, **options)


def launch(program, processes, nodes, restarts):
    """Start the ranks of this node; return their exit status."""
    with tempfile.TemporaryDirectory() as folder:
        spec = WorkerSpec(
            role="default",
            local_world_size=processes,
            entrypoint=sys.executable,
            args=("-u", *program),
            rdzv_handler=get_rendezvous_handler(meeting(nodes, folder)),
            max_restarts=restarts,
            master_addr=os.environ["MASTER_ADDR"] if nodes > 1 else "127.0.0.1",
            master_port=int(os.environ.get("MASTER_PORT") or 0),  # 0: a free one
        )
        agent = Agent(spec, DefaultLogsSpecs(folder), exit_barrier_timeout=60)
        try:
            return agent.status if agent.run().is_failed() else 0
        except DistError as error:
            print(f"error: a node is gone ({str(error).splitlines()[0][:160]})", file=sys.stderr)
            return 1


def main(processes="", *words) -> int:
    if "--then" in words:
        then = words.index("--then")
        return main(processes, *words[:then]) or main(processes, *words[then + 1 :])
    processes = number("num_gpus", processes, 1, 1024)
    nodes = variable("NNODES", "1", 1, 100000)
    restarts = variable("MAX_RESTARTS", "3", 0, 1000)
    variable("DDP_JOIN_SECONDS", "50", 1, 100000)
    variable("MASTER_PORT", "1", 1, 65535)
    if nodes > 1:
        names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            needs = "several nodes need NODE_RANK, MASTER_ADDR and MASTER_PORT"
            raise UserError(f"{missing[0]}: not set; {needs}")
        variable("NODE_RANK", "0", 0, nodes - 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    lines = check(words, processes, nodes)
    is_check = {"--check", "--validate_only", "--dry_run"} & set(words)
    if is_check or not any(line.startswith("run folder: ") for line in lines):
        print(*(lines if is_check else lines[-1:]), sep="\n", flush=True)  # nothing left to do
        return 0
    return launch(words, processes, nodes, restarts)


if __name__ == "__main__":
    os.environ["LAUNCHER_PID"] = str(os.getpid())  # for a rank that starts when this one is killed
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # others are passed on
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see meeting()
    logging.disable()  # the agent's: a user's mistake is one line
    try:
        sys.exit(main(*sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
