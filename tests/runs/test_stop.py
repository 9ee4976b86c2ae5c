"""Signals, full disks, NaN and lost ranks: all ranks end together and no written file is lost."""

import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import faults
import runs
from ddp_utils import checkpoints
from ranks import slowness

LORA = faults.MODES["lora"]


def resumes(folder, expected, step, *flags):
    """Check that the same command finishes the run with the numbers of an undisturbed one."""
    outcome = faults.finished(faults.start(2, folder, *LORA, *flags))
    assert f"is not finished: resumes after step {step}" in outcome.logs[0]
    assert faults.is_equal(folder, expected)


# --- F3: asked to stop ---------------------------------------------------------------------------


PLACES = {  # the signal comes before this call -> its number, rank, steps that are saved
    "logps.score": (1, 1, 0),
    "main_distributed.evaluate": (3, 1, 8),
    "main_distributed.evaluate of the test": (5, 1, 12),
    "checkpoints.write": (1, 0, 6),  # of step 5; the ranks stop in the next step
}


SOME = [
    pytest.param(place, marks=pytest.mark.show if "evaluate" in place else ()) for place in PLACES
]


@pytest.mark.parametrize("place", SOME)
def test_f3_a_signal_stops_the_run_in(place, undisturbed, tmp_path):
    number, rank, step = PLACES[place]
    fault = (faults.signal_before, place.split()[0], number, signal.SIGTERM, rank)
    outcome = faults.start(2, tmp_path / "run", *LORA, fault=fault)
    assert outcome.codes == [85, 85], outcome.logs
    assert faults.summary(tmp_path / "run")["step"] == step
    resumes(tmp_path / "run", undisturbed, step)


def test_f3_a_time_limit_stops_and_saves(undisturbed, tmp_path):
    folder, limit = tmp_path / "run", runs.words("--stop_after_minutes 30")
    outcome = faults.start(2, folder, *LORA, *limit, fault=(faults.run_out_of_time, 1, 2))
    assert outcome.codes == [85, 85] and faults.steps(folder) == [3]
    resumes(folder, undisturbed, 3, *limit)


def test_f3_a_run_stops_before_its_job_ends_as_early_as_its_last_save_needs(tmp_path):
    """1000 s are left of 3000: enough for a save of 400 s, but not for one of 600 s."""
    for seconds, code, step in ((400, 0, 12), (600, 85, 6)):
        env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 1000)}
        fault = (faults.save_long, seconds)
        outcome = faults.start(2, tmp_path / f"{seconds}", *LORA, fault=fault, env=env)
        assert outcome.codes == [code] * 2, outcome.logs
        assert faults.summary(tmp_path / f"{seconds}")["step"] == step
        log = " ".join(outcome.logs[0].split())  # the warning is wrapped
        warning = r"warning: a checkpoint took (\d+) s of the 120 after a signal; export "
        warning += r"DDP_SAVE_SECONDS=(\d+), and write the job script with --lead (\d+) "
        ((took, *limits),) = re.findall(warning, log)
        assert seconds <= int(took) < seconds + 100  # a busy machine adds its own
        assert all(abs(int(limit) - 4 * int(took)) <= 4 for limit in limits)


# --- F4, F14: full and read-only disks -----------------------------------------------------------


def test_f4_a_file_that_cannot_grow_ends_with_4_and_no_temporary_file(undisturbed, tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(faults.limit_files, 2, 100_000))
    assert outcome.codes == [4, 4], outcome.logs
    file = folder / "checkpoints/step-00000010/state.safetensors"
    message = f"error: {file}: File too large; free some space"
    assert outcome.logs[0].count("error:") == outcome.logs[0].count(message) == 1
    assert "Traceback" not in outcome.logs[0] and outcome.logs[1] == ""
    assert (faults.summary(folder)["status"], faults.summary(folder)["exit_code"]) == ("failed", 4)
    assert faults.steps(folder) == [5] and not list((folder / "checkpoints").glob(".*"))
    resumes(folder, undisturbed, 5)


@pytest.fixture
def disk(tmp_path):
    """mount(options) -> a file system in memory."""
    place = tmp_path / "disk"

    def mount(options):
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def test_f14_a_folder_that_cannot_be_written_is_found_before_the_model_is_loaded(disk, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (disk("ro"), tmp_path / "file"):
        cache = ("--cache_dir", str(tmp_path / "cache"))
        outcome = faults.start(2, place / "deep/run", *LORA, *cache)
        assert outcome.codes == [2, 2] and outcome.logs[1] == ""
        line = f"error: run folder: {place} is not a folder that you can write; "
        assert outcome.logs[0].startswith(line)
        assert outcome.logs[0].count("\n") == 1


# --- F8: not finite ------------------------------------------------------------------------------


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("where", "value"), [("loss", NAN), ("gradient", INF)])
def test_f8_a_number_that_is_not_finite_stops_all_ranks_before_the_step(where, value, tmp_path):
    folder = tmp_path / "run"
    spoil = faults.spoil_loss if where == "loss" else faults.spoil_in_backward
    outcome = faults.start(2, folder, *LORA, fault=(spoil, 1, 6, value))
    assert outcome.codes == [3, 3], outcome.logs
    log = "".join(outcome.logs)  # one of the ranks prints it
    (line,) = [line for line in log.splitlines() if line.startswith("error:")]
    assert "step 7" in line and "no step was taken" in line
    assert ("preferences_train.jsonl:" in line) == (where == "loss")  # the row
    assert "run the same command to resume after step 5" in log
    summary = faults.summary(folder)
    assert (summary["status"], summary["exit_code"]) == ("failed", 3)
    assert faults.steps(folder) == [5]


def spoil_weights(step):
    """An update that makes a weight infinite, which the loss shows one step later."""
    original, turn = faults.Policy.step, [0]

    def faulty(policy, *rest):
        original(policy, *rest)
        turn[0] += 1
        if turn[0] == step:
            next(iter(policy.trainable().values())).data[0, 0] = INF

    faults.Policy.step = faulty


def test_f8_a_checkpoint_has_no_weight_that_is_not_finite(tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(spoil_weights, 10))
    assert outcome.codes == [3, 3] and "after step 10 parameter/" in "".join(outcome.logs)
    assert faults.steps(folder) == [5]


# --- F9, F10: a rank fails, hangs, leaves --------------------------------------------------------


def test_f9_an_exception_ends_the_other_ranks_which_print_nothing(undisturbed, tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(faults.fail_in_backward, 1, 6))
    assert outcome.codes == [1, 1]
    assert outcome.logs[1].count("Traceback") == 1 and "ZeroDivisionError" in outcome.logs[1]
    assert "Traceback" not in outcome.logs[0] and "error" not in outcome.logs[0]
    summary = faults.summary(folder)
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    resumes(folder, undisturbed, 5)


@pytest.mark.parametrize(
    "fault", [(faults.hang_in_backward, 1, 7), (faults.leave, 1, 7)], ids=["hangs", "leaves"]
)
def test_f10_a_rank_that_is_silent_costs_one_line(fault, tmp_path):
    folder = tmp_path / "run"
    minutes = 0.15 * slowness()
    flags = ["--timeout_minutes", str(minutes)]
    if fault[0] is faults.hang_in_backward:
        fault = (*fault, 120 * minutes)  # seconds
    outcome = faults.start(3, folder, *LORA, *flags, fault=fault)
    assert outcome.codes[0] == outcome.codes[2] == 1
    lines = [line for log in (outcome.logs[0], outcome.logs[2]) for line in log.splitlines()]
    assert len([line for line in lines if "lost the connection to another rank" in line]) == 1
    assert "Traceback" not in outcome.logs[0] + outcome.logs[2]
    assert faults.steps(folder) == [5]


# --- F15: two runs, one folder -------------------------------------------------------------------


def test_f15_a_second_run_in_the_folder_is_an_error(undisturbed, tmp_path):
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    runs.as_if_killed(folder)
    held = checkpoints.lock(folder)
    try:
        outcome = faults.start(2, folder, *LORA)
    finally:
        held.release()
    assert outcome.codes == [2, 2] and outcome.logs[1] == ""
    assert outcome.logs[0].startswith(f"error: {folder} is in use by another run; ")
    assert outcome.logs[0].endswith(f"if it has ended, remove {folder}/.lock\n")
    faults.finished(faults.start(2, folder, *LORA))  # and is free again


def test_f15_of_runs_that_start_together_one_trains(tmp_path):
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(faults.start, 1, tmp_path / "run", *LORA) for _ in range(3)]
        outcomes = [start.result() for start in starts]
    (trained,) = [outcome for outcome in outcomes if "ranks     1 x cpu" in outcome.logs[0]]
    assert trained.codes == [0]
    outcomes.remove(trained)
    for outcome in outcomes:  # too early or too late
        messages = {2: "is in use by", 0: "already finished"}
        assert messages[outcome.codes[0]] in outcome.logs[0]
