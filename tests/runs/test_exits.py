"""How a group of processes ends: exit statuses, the one line or traceback, and no orphans."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import cluster
import programs
from conftest import LIMIT, ROOT
from ddp_utils import NonFiniteError, UserError, distributed, launch
from ranks import free_port, ranks, run_ranks


def ddp_steps(failing):
    """The shape that aborts at exit without os._exit: DDP, all-reduces, the end."""
    world = distributed.init_process_group(distributed.whoami())
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(3):
        model(torch.ones(2, 64)).sum().backward()
        if step == 1 and world.rank == failing:
            raise ValueError("the weights fell off")
    print("done", world.rank)


def test_groups_in_a_row_end_with_status_0_and_complete_logs():
    for _ in range(15):
        outcome = run_ranks(2, ddp_steps, None)
        assert outcome.codes == [0, 0], outcome.logs
        assert outcome.logs == ["done 0\n", "done 1\n"]


def test_an_exception_on_rank_1_ends_with_its_traceback_alone():
    for _ in range(9):
        outcome = run_ranks(2, ddp_steps, 1)
        assert outcome.codes == [1, 1]
        assert outcome.logs[0] == ""  # it only lost the connection to rank 1
        assert outcome.logs[1].rstrip().endswith("ValueError: the weights fell off")


# --- the launcher --------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {attempt} rank {rank} process {os.getpid()}\\n", end="", flush=True)
"""
ENDS = [  # what a rank does, exit status of the launcher, number of attempts
    ("sys.exit([1, 3][rank])", 3, 1),
    ("os.kill(os.getpid(), 9 * (rank == 1 and attempt == 0))", 0, 2),
    ("os.kill(os.getpid(), 11)", 1, 3),
    ("sys.exit(1)", 1, 1),
]


def launcher(tmp_path, line, *options, **env):
    """Start two processes of PROGRAM and a line."""
    (tmp_path / "program.py").write_text(PROGRAM + line)
    command = [sys.executable, "-m", "ddp_utils.launch", "2", tmp_path / "program.py", *options]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MAX_RESTARTS": "2", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("line", "status", "attempts"), ENDS, ids=["3", "-9", "always -11", "1"])
def test_the_launcher_ends_with_the_status_of_its_ranks(line, status, attempts, tmp_path):
    """Only killed ranks are restarted: a bug would come again."""
    process = launcher(tmp_path, line)
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == status, output
    assert output.count("attempt ") == 2 * attempts


def test_a_rank_that_is_still_saving_is_not_disturbed(tmp_path):
    process = launcher(tmp_path, "time.sleep(2 * rank)\nprint('saved')\nsys.exit(85)")
    output = process.communicate(timeout=LIMIT)[0]
    assert (process.returncode, output.count("saved")) == (85, 2)


@pytest.mark.parametrize("dead", [0, 1])
def test_ranks_that_wait_for_a_dead_one_are_killed(dead, monkeypatch):
    """Whichever rank died: it may be the one that the launcher asks last."""
    monkeypatch.setattr(launch, "END_SECONDS", 1)
    monkeypatch.setattr(launch, "ranks", [subprocess.Popen(["sleep", "100"]) for _ in range(2)])
    launch.ranks[dead].kill()
    assert launch.wait(120) == [-signal.SIGKILL if rank == dead else 1 for rank in range(2)]


def test_a_bug_is_not_repeated_because_the_launcher_killed_the_rank_that_waited(tmp_path):
    """Rank 0 ends with 1; rank 1 waits for it inside a kernel, where it ignores all signals."""
    line = "if rank:\n    signal.signal(15, signal.SIG_IGN)\n    time.sleep(900)\nsys.exit(1)"
    (tmp_path / "program.py").write_text(PROGRAM + line)
    code = "import sys\nfrom ddp_utils import launch\nlaunch.END_SECONDS = 1\n"
    code += f"sys.exit(launch.main('2', {str(tmp_path / 'program.py')!r}))"
    done = programs.process([sys.executable, "-c", code], code=1, PYTHONPATH=f"{ROOT}/src")
    assert done.stdout.count("attempt 0 ") == 2 and "attempt 1" not in done.stdout
    assert "killed" not in done.stderr


def test_a_time_to_save_that_is_no_number_is_one_line_and_starts_nothing(tmp_path):
    process = launcher(tmp_path, "", DDP_SAVE_SECONDS="soon")
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 2
    assert output == "error: DDP_SAVE_SECONDS: 'soon' must be a whole number from 1 to 2147483648\n"


def test_threads_are_those_of_the_cpus_that_the_job_may_use(tmp_path):
    (tmp_path / "program.py").write_text("import os\nprint(os.environ['OMP_NUM_THREADS'])")
    cpu = min(os.sched_getaffinity(0))
    code = f"import os, sys\nos.sched_setaffinity(0, {{{cpu}}})\nfrom ddp_utils import launch\n"
    code += "os.environ.pop('OMP_NUM_THREADS', 0)\nassert launch.cpus() == 1\n"
    code += f"sys.exit(launch.main('1', {str(tmp_path / 'program.py')!r}))"
    done = programs.process([sys.executable, "-c", code], PYTHONPATH=f"{ROOT}/src")
    assert done.stdout == "1\n"


SAVES = """
def stop(*_):
    time.sleep(0.5 * rank)
    os._exit(85)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
try:
    print("ready", flush=True)
    time.sleep(900)
except KeyboardInterrupt:
    sys.exit(130)
"""


def signalled(process, number):
    """What a launcher prints after a signal that it gets when both of its ranks are ready."""
    seen = ""
    while seen.count("ready") < 2:
        seen += process.stdout.readline()
    process.send_signal(number)
    return process.communicate(timeout=LIMIT)[0]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGINT, 130)],
    ids=["TERM", "USR1", "INT"],
)
def test_signals_reach_all_ranks(number, status, tmp_path):
    process = launcher(tmp_path, SAVES, "--then", tmp_path / "program.py")
    rest = signalled(process, number)
    assert process.returncode == status
    assert "attempt" not in rest  # neither a restart nor the next program


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_a_signal_before_the_ranks_can_save_is_no_failure(number, status, tmp_path):
    """They are still importing, and the signal kills them: a job is queued again."""
    line = "signal.signal(2, signal.SIG_DFL)\nprint('ready', flush=True)\ntime.sleep(900)"
    process = launcher(tmp_path, line)
    signalled(process, number)
    assert process.returncode == status


def test_the_time_of_a_run_begins_with_the_launcher_that_restarts_its_ranks(tmp_path):
    line = """
from ddp_utils import distributed, start_of
begin = time.monotonic()
def main():
    assert abs(distributed._started - start_of(os.getppid())) < 1, distributed._started
    assert 0 < begin - start_of(os.getpid()) < 900 and start_of(2**30) == 0
    if attempt == 0:
        os.kill(os.getpid(), 9)
    assert begin - distributed._started > 1
time.sleep(1)
del os.environ["WORLD_SIZE"]  # no group is needed
distributed.run(main)"""
    process = launcher(tmp_path, line)
    output = process.communicate(timeout=LIMIT)[0]
    assert (process.returncode, output.count("attempt 1")) == (0, 2), output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_a_signal_in_the_last_moments_of_a_program_starts_no_other(number, status, tmp_path):
    """It has done all of its work, and ends with 0; the next one has not been signalled."""
    body = SAVES.replace("_exit(85)", "_exit(0)").replace("exit(130)", "exit(0)")
    process = launcher(tmp_path, body, "--then", tmp_path / "program.py")
    rest = signalled(process, number)
    assert process.returncode == status and "ready" not in rest, rest


def test_programs_run_one_after_another_until_one_fails(tmp_path):
    process = launcher(tmp_path, "sys.exit(3 * attempt)", "--then", tmp_path / "program.py")
    assert process.communicate(timeout=LIMIT)[0].count("attempt 0 ") == 4
    process = launcher(tmp_path, "sys.exit(3)", "--then", tmp_path / "program.py")
    assert process.communicate(timeout=LIMIT)[0].count("attempt 0 ") == 2
    assert process.returncode == 3


RANK = "from ddp_utils import distributed\ndistributed.run(lambda: time.sleep(900))"


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 3.0, 6.0])
def test_a_launcher_that_is_killed_leaves_no_orphan(seconds, tmp_path):
    """Whether its ranks are starting, importing torch, or working."""
    process = launcher(tmp_path, RANK)
    lines = [process.stdout.readline() for _ in range(2)]
    pids = [int(line.split()[-1]) for line in lines]
    time.sleep(seconds)
    process.kill()
    cluster.wait(lambda: not cluster.alive(pids), limit=90)  # long before they end by themselves


# --- a group that cannot connect -----------------------------------------------------------------

WRONG = [  # environment of one of two processes -> its message
    ({"MASTER_ADDR": "no-such-host.invalid"}, "could not connect to the 2 processes at no-such"),
    ({"RANK": "1", "LOCAL_RANK": "0"}, "export a MASTER_ADDR that all can reach"),
    ({"MASTER_PORT": "taken"}, "ddress already in use); export a MASTER_ADDR"),
    ({"DDP_JOIN_SECONDS": "soon"}, "error: DDP_JOIN_SECONDS: 'soon' must be a whole number"),
]


@pytest.mark.parametrize(("env", "message"), WRONG, ids=str)
def test_a_group_that_cannot_connect_ends_with_one_line_and_no_traceback(env, message):
    """Above it may be what torch itself prints about its attempts."""
    code = "from ddp_utils import distributed as d\n"
    code += "d.run(lambda: d.init_process_group(d.whoami()) and 0)"
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    ranks |= {"MASTER_PORT": str(free_port()), "DDP_JOIN_SECONDS": "2", **env}
    with socket.create_server(("", 0)) as taken:
        if env == {"MASTER_PORT": "taken"}:
            ranks["MASTER_PORT"] = str(taken.getsockname()[1])
        done = programs.process([sys.executable, "-c", code], 2, cwd=ROOT / "src", **ranks)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr


# --- errors on one rank --------------------------------------------------------------------------


PROBLEMS = {  # exception -> exit status of all ranks, beginning and end of the only log
    "mistake": (3, "error: a mistake\n", "a mistake\n"),
    "full": (4, "error: somewhere/file: No space left on device; free some space and run ", "\n"),
    "bug": (1, "Traceback", "ZeroDivisionError: the weights fell off\n"),
}


def on_one(rank, problem):
    """on_main() or on_each(), where one rank fails."""
    world = distributed.init_process_group(distributed.whoami())

    def only_here():
        if world.rank == rank:
            if problem == "mistake":
                raise NonFiniteError("a mistake")
            if problem == "full":
                raise OSError(28, "No space left on device", "somewhere/file")
            if problem == "bug":
                raise ZeroDivisionError("the weights fell off")
        return {"text": "é", "numbers": [1, 2.5, None]}

    return (distributed.on_main if rank == 0 else distributed.on_each)(world, only_here)


def test_the_result_of_rank_0_is_returned_on_all():
    assert ranks(3, on_one, 0, "none") == [{"text": "é", "numbers": [1, 2.5, None]}] * 3


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("rank", [0, 2])
def test_if_one_rank_fails_all_end_with_its_status_and_it_alone_prints(problem, rank):
    code, first, last = PROBLEMS[problem]
    outcome = run_ranks(3, on_one, rank, problem)
    assert outcome.codes == [code] * 3
    log = outcome.logs[rank]
    assert log.startswith(first) and log.endswith(last), outcome.logs
    assert [log for log in outcome.logs if log] == [log]


def mistake_on_all(with_group):
    if with_group:
        distributed.init_process_group(distributed.whoami())
    raise UserError("--beta: must be > 0")


@pytest.mark.parametrize("with_group", [False, True])
def test_a_mistake_on_all_ranks_is_printed_once(with_group):
    outcome = run_ranks(3, mistake_on_all, with_group)
    assert outcome.codes == [2, 2, 2]
    assert "".join(outcome.logs) == "error: --beta: must be > 0\n"
