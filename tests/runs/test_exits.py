"""How a group ends: cleanly many times in a row, or with the one traceback that explains it."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import programs
from conftest import ROOT
from ddp_utils import NonFiniteError, distributed
from ranks import free_port, ranks, run_ranks


def ddp_steps(failing=-1):
    """The shape that aborts at exit without dist.run: DDP, all-reduces, the end."""
    world = distributed.init_process_group(distributed.whoami())
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(3):
        model(torch.ones(2, 64)).sum().backward()
        if step == 1 and world.rank == failing:
            raise ValueError("the weights fell off")
    print("done", world.rank)
    return world.rank


def as_program():
    distributed.run(lambda: ddp_steps(1))


def test_complaint_23_groups_in_a_row_end_with_status_0_and_complete_logs():
    for _ in range(15):
        outcome = run_ranks(2, ddp_steps)
        assert outcome.codes == [0, 0], outcome.logs
        assert outcome.logs == ["done 0\n", "done 1\n"]


def test_complaint_23_ten_exceptions_on_rank_1_end_with_that_traceback_alone():
    for _ in range(9):
        outcome = run_ranks(2, ddp_steps, 1)
        assert all(code not in (0, None) for code in outcome.codes)
        assert "Traceback" not in outcome.logs[0]  # it only lost its peer
        assert outcome.logs[1].rstrip().endswith("ValueError: the weights fell off")


def test_complaint_23_torchrun_reports_the_exception_of_rank_1_last(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text("import test_exits as t\nt.as_program()")
    path = f"{ROOT}/src:{ROOT}/tests:{ROOT}/tests/runs"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = programs.process([*command, script], 1, PYTHONPATH=path)
    last = done.stderr[done.stderr.rindex("Traceback (most recent call last)") :]
    assert "ValueError: the weights fell off" in last
    assert "onnection" not in done.stderr  # nor any gloo message of rank 0


PROGRAM = """
import os, signal, sys
if "--check" in sys.argv:
    print("run folder: here")
    sys.exit()
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"life {life} rank {rank}", flush=True)
"""
# rank 1 prints a signal that comes within a second
WRITES = """
signal.pthread_sigmask(signal.SIG_BLOCK, [15])
print(rank and signal.sigtimedwait([15], 1))
sys.exit(85)
"""
BUG = """
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write('{"message": "a bug"}')
sys.exit(1)
"""
ENDS = [  # what a rank does, exit status of the launcher, lives of the ranks
    ("sys.exit([1, 3][rank])", 3, 1),
    (WRITES, 85, 1),
    ("os.kill(os.getpid(), 9 * (rank == 1 and life == 0))", 0, 2),
    (BUG, 1, 1),
    ("sys.exit(1)", 1, 3),
]


def launcher(tmp_path, line, processes, **env):
    (tmp_path / "program.py").write_text(PROGRAM + line)
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_utils.launch", processes, tmp_path / "program.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MAX_RESTARTS": "2", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("line", "status", "lives"), ENDS, ids=["3", "85", "9", "bug", "1"])
def test_the_launcher_ends_with_the_status_of_its_ranks(line, status, lives, tmp_path):
    """Restarted is what a restart may mend; a rank that is at its last lines is left in peace."""
    process = launcher(tmp_path, line, "2")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == status, output
    assert output.count("life ") == 2 * lives and "sig" not in output and "torch" not in output


def test_the_launchers_of_all_nodes_end_with_one_status(tmp_path):
    """Rank 1 alone cannot write; rank 0 waits for it until it is asked to stop."""
    env = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = "sys.exit(4) if rank else signal.pause()"
    nodes = [launcher(tmp_path, line, "1", **env, NODE_RANK=node) for node in "01"]
    assert [(node.communicate(timeout=60), node.returncode)[1] for node in nodes] == [4, 4]


WRONG = [  # what one of two processes is told -> what its line says
    (
        {"MASTER_ADDR": "no-such-host.invalid"},
        "could not connect to the 2 processes at no-such-host",
    ),
    ({"RANK": "1", "LOCAL_RANK": "0"}, "check MASTER_ADDR"),
    ({"MASTER_PORT": "taken"}, " is in use on "),
]


@pytest.mark.parametrize(("env", "message"), WRONG, ids=str)
def test_a_group_that_cannot_meet_costs_one_line(env, message):
    """And no C++ frames, which TCPStore prints at each attempt."""
    code = "from ddp_utils import distributed as d\n"
    code += "d.run(lambda: d.init_process_group(d.whoami()) and 0)"
    told = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    told |= {"MASTER_PORT": str(free_port()), "DDP_JOIN_SECONDS": "2", **env}
    with socket.create_server(("", 0)) as taken:
        if env == {"MASTER_PORT": "taken"}:
            told["MASTER_PORT"] = str(taken.getsockname()[1])
        done = programs.process([sys.executable, "-c", code], 2, cwd=ROOT / "src", **told)
    assert message in done.stderr and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def on_main(how):
    world = distributed.init_process_group(distributed.whoami())

    def only_here():
        assert world.is_main
        if how == "mistake":
            raise NonFiniteError("a mistake")
        if how == "full":
            raise OSError(28, "No space left on device", "somewhere/file")
        if how == "bug":
            raise ZeroDivisionError("the weights fell off")
        return {"text": "é", "numbers": [1, 2.5, None]}

    return distributed.on_main(world, only_here)


def test_what_rank_0_finds_is_known_to_all():
    assert ranks(3, on_main, "fine") == [{"text": "é", "numbers": [1, 2.5, None]}] * 3


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("mistake", 3, "error: a mistake\n"),
        (
            "full",
            4,
            "error: somewhere/file: No space left on device; free some space and run the s",
        ),
    ],
)
def test_where_rank_0_fails_all_end_with_its_status_and_it_alone_speaks(how, code, line):
    outcome = run_ranks(3, on_main, how)
    assert outcome.codes == [code] * 3
    assert outcome.logs[0].startswith(line) and outcome.logs[1:] == ["", ""]


def test_a_bug_on_rank_0_keeps_its_traceback():
    outcome = run_ranks(2, on_main, "bug")
    assert outcome.codes == [1, 1] and "Traceback" not in outcome.logs[1]
    assert outcome.logs[0].rstrip().endswith("ZeroDivisionError: the weights fell off")
