"""Real launchers, real kills: restarted by torchrun, stopped by signals, no process left behind."""

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import cluster
import faults
import programs
import runs
from conftest import LIMIT, ROOT
from ddp_utils import checkpoints
from ranks import addresses, slowness

LORA = faults.MODES["lora"]
BIN = str(Path(sys.executable).parent)
TORCHRUN = [f"{BIN}/torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
FAULTY, SCRIPT = str(ROOT / "tests/faults.py"), str(ROOT / "run_distributed.sh")


@contextlib.contextmanager
def launched(command, folder, *flags, **env):
    """A launcher in a session of its own, its output in a file; nothing of it is left after."""
    log = folder.with_name("log")
    env = programs.environment() | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"} | env
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [*command, *faults.STEPS, *LORA, *flags, "--result_dir", str(folder)],
            env=env,
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=ROOT,
        )
    process.log = log
    try:
        yield process
    finally:
        cluster.kill([process.pid, *cluster.descendants(process.pid)])
        process.wait()


def has_logged(folder, count):
    metrics = folder / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count


# --- restarts ------------------------------------------------------------------------------------


def test_f1_torchrun_restarts_a_killed_rank_and_the_weights_are_the_same(undisturbed, tmp_path):
    """Rank 0; without a new name for each meeting three in five restarts meet the dead rank."""
    folder = tmp_path / "run"
    with launched([*TORCHRUN, FAULTY], folder, FAULT="kill_in_backward 0 7") as process:
        assert process.wait(LIMIT) == 0, process.log.read_text()
    log = process.log.read_text()
    assert "is not finished: resumes after step 5" in log and "Traceback" not in log
    assert faults.is_equal(folder, undisturbed)


LONG = runs.words("--max_steps 40")  # so that a signal from outside comes in time


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Folder of an undisturbed run of 40 steps."""
    folder = tmp_path_factory.mktemp("long") / "run"
    faults.finished(faults.start(2, folder, *LORA, *LONG))
    return folder


def test_the_shell_script_does_not_restart_what_a_restart_cannot_mend(tmp_path):
    """The same fault in the real script: a learning rate that makes the loss infinite."""
    folder, flags = tmp_path / "run", runs.words("--learning_rate 9e18 --max_grad_norm 0")
    with launched([SCRIPT, "1"], folder, *flags) as process:
        assert process.wait(LIMIT) == 3, process.log.read_text()
    log = process.log.read_text()
    assert log.count("ranks     1 x cpu") == log.count("error: ") == 1 and "is not finite" in log
    assert "ChildFailedError" not in log
    assert (faults.summary(folder)["status"], faults.summary(folder)["exit_code"]) == ("failed", 3)


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.show
def test_f3_sigterm_to_the_shell_script_saves_and_ends_with_85(long_run, tmp_path):
    folder = tmp_path / "run"
    with launched([SCRIPT, "2"], folder, *LONG) as process:
        cluster.wait(has_logged(folder, 4))
        sockets = [addresses(pid) for pid in cluster.descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 85, process.log.read_text()
    assert set().union(*sockets) == {"127.0.0.1"}  # torchrun's too
    stopped = faults.summary(folder)
    assert stopped["status"] == "preempted" and 3 <= stopped["step"] < 40
    outcome = faults.finished(faults.start(2, folder, *LORA, *LONG))
    assert f"resumes after step {stopped['step']}" in outcome.logs[0]
    assert faults.is_equal(folder, long_run)
    with launched([SCRIPT, "2"], folder, *LONG) as process:  # finished: nothing is launched
        assert process.wait(LIMIT) == 0
    assert process.log.read_text().endswith("already finished (same settings and data)\n")


def test_f18_ctrl_c_ends_with_130_and_the_same_command_goes_on(tmp_path):
    """To which weights is shown in tests/runs/test_stop.py."""
    folder = tmp_path / "run"
    with launched([SCRIPT, "2"], folder, *LONG, "--save_every", "1") as process:
        cluster.wait(has_logged(folder, 4))
        ranks = cluster.descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        assert process.wait(LIMIT) == 130, process.log.read_text()
        cluster.wait(lambda: not cluster.alive(ranks))
    assert checkpoints.find_newest(folder / "checkpoints")[1] == []
    outcome = faults.finished(faults.start(2, folder, *LORA, *LONG))
    assert "is not finished: resumes after step" in outcome.logs[0]
    assert faults.summary(folder)["step"] == 40


# --- nothing is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("a rank has just started", marks=pytest.mark.show),  # it knows nothing yet
        "in training",
        pytest.param("any", marks=pytest.mark.show),
    ],
)
def test_a8_no_process_outlives_a_launcher_that_is_killed(moment, tmp_path):
    """The run would take hours, so that no rank ends because it is done."""
    program = [f"{ROOT}/src/main_distributed.py", "--num_epochs=1000", "--num_samples=0"]
    join_seconds = str(math.ceil(10 * slowness()))
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    env = {"MARK": mark, "PYTHONPATH": f"{ROOT}/src", "DDP_JOIN_SECONDS": join_seconds}
    command = [f"{BIN}/torchrun", "--nproc_per_node=2", *program, f"--result_dir={run}"]
    env = programs.environment() | env
    process = subprocess.Popen(command, env=env, start_new_session=True, cwd=ROOT)

    def left():
        return cluster.processes(lambda one: one.environ().get("MARK") == mark)

    try:
        if moment == "a rank has just started":
            cluster.wait(lambda: cluster.descendants(process.pid), 0.01)
        elif moment == "in training":
            cluster.wait(lambda: any(run.glob("metrics.jsonl")))
        else:
            seconds = random.uniform(0, 10)
            print(f"killed after {seconds:.3f} s")
            time.sleep(seconds)
        process.kill()
        process.wait()
        # a rank that waits for a group ends by itself after twice DDP_JOIN_SECONDS
        cluster.wait(lambda: not left())
    finally:
        cluster.kill(left())
