"""Asked to stop, starved, spoilt or hung: all ranks end together, and nothing written is lost."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import faults
import runs
from ddp_utils import checkpoints
from ddp_utils.checkpoints import lock

LORA = faults.MODES["lora"]
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


def goes_on(folder, expected, step, *flags):
    """The same command finishes the run, with the numbers of one that was never disturbed."""
    outcome = faults.finished(faults.start(2, folder, *LORA, *flags))
    assert f"is not finished: resumes after step {step}" in outcome.logs[0]
    return faults.is_equal(folder, expected)


# --- F3: asked to stop ---------------------------------------------------------------------------


PLACES = {  # call before which rank 1 gets the signal -> steps that are kept
    "the reference pass": ("logps.score", 1, 0),
    "an evaluation": ("main_distributed.evaluate", 2, 8),
    "the test": ("main_distributed.evaluate", 4, 12),
    "saving": ("checkpoints.write", 1, 5),
}


@pytest.mark.parametrize("place", PLACES)
def test_f3_a_signal_is_heard_in(place, undisturbed, tmp_path):
    name, number, step = PLACES[place]
    folder, rank = tmp_path / "run", 0 if place == "saving" else 1
    outcome = faults.start(2, folder, *LORA, fault=(faults.signal_before, name, number, TERM, rank))
    if place == "saving":  # heard at the next step
        step = 6
    assert outcome.codes == [85, 85], outcome.logs
    assert faults.summary(folder)["step"] == step
    assert goes_on(folder, undisturbed, step)


def test_f3_a_signal_is_heard_in_generation(tmp_path):
    """After the last step; the replies are those of an undisturbed run."""
    flags = [*LORA, *runs.words("--num_samples 4 --batch_size 2 --max_new_tokens 8 --max_steps 2")]
    fault = (faults.signal_before, "sampling._sample_batch", 3, TERM, 1)
    outcome = faults.start(2, tmp_path / "a/run", *flags, fault=fault)
    assert outcome.codes == [85, 85], outcome.logs
    assert (
        "resumes after step" in faults.finished(faults.start(2, tmp_path / "a/run", *flags)).logs[0]
    )
    faults.finished(faults.start(2, tmp_path / "b/run", *flags))
    name = "distributed_output_test.txt"
    assert (tmp_path / "a/run" / name).read_text() == (tmp_path / "b/run" / name).read_text()


def test_f3_a_time_limit_stops_and_saves(undisturbed, tmp_path):
    folder, limit = tmp_path / "run", runs.words("--stop_after_minutes 30")
    outcome = faults.start(2, folder, *LORA, *limit, fault=(faults.run_out_of_time, 1, 2))
    assert outcome.codes == [85, 85] and faults.steps(folder) == [3]
    assert goes_on(folder, undisturbed, 3, *limit)


# --- F4, F14: full and read-only disks -----------------------------------------------------------


def test_f4_a_file_that_cannot_grow_ends_with_4_and_no_litter(undisturbed, tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(faults.limit_files, 2, 100_000))
    assert outcome.codes == [4, 4], outcome.logs
    (line,) = [line for line in outcome.logs[0].splitlines() if line.startswith("error:")]
    file = folder / "checkpoints/step-00000010/state.safetensors"
    assert f"{file}: File too large; free some space" in line
    assert "Traceback" not in outcome.logs[0] and outcome.logs[1] == ""
    assert (faults.summary(folder)["status"], faults.summary(folder)["exit_code"]) == ("failed", 4)
    assert faults.steps(folder) == [5] and not list((folder / "checkpoints").glob(".*"))
    assert goes_on(folder, undisturbed, 5)


@pytest.fixture
def disk(tmp_path):
    """mount(options) -> a file system of its own."""
    mounted = []

    def mount(options):
        place = tmp_path / "disk"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
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
    if where == "loss":
        assert "preferences_train.jsonl:" in line  # the row
    assert "run the same command to resume after step 5" in log
    found = faults.summary(folder)
    assert (found["status"], found["exit_code"]) == ("failed", 3)
    path, skipped = checkpoints.find_newest(folder / "checkpoints")
    tensors, manifest = checkpoints.read(path)
    assert manifest["step"] == 5 and skipped == []
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def spoil_weights(step):
    """An update that makes weights infinite: the loss of the next step would tell, too late."""
    take, turn = faults.Policy.step, [0]

    def faulty(policy, *rest):
        take(policy, *rest)
        turn[0] += 1
        if turn[0] == step:
            next(iter(policy.trainable().values())).data[0, 0] = float("inf")

    faults.Policy.step = faulty


def test_f8_no_checkpoint_ever_holds_a_weight_that_is_not_finite(tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(spoil_weights, 10))
    assert outcome.codes == [3, 3] and "after step 10 parameter/" in "".join(outcome.logs)
    assert faults.steps(folder) == [5]


# --- F9, F10: a rank fails, hangs, leaves --------------------------------------------------------


def test_f9_an_exception_ends_the_others_and_stands_alone(undisturbed, tmp_path):
    folder = tmp_path / "run"
    outcome = faults.start(2, folder, *LORA, fault=(faults.fail_in_backward, 1, 6))
    assert outcome.codes == [1, 1]
    assert outcome.logs[1].count("Traceback") == 1 and "ZeroDivisionError" in outcome.logs[1]
    assert "Traceback" not in outcome.logs[0] and "error" not in outcome.logs[0]
    found = faults.summary(folder)
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert goes_on(folder, undisturbed, 5)


@pytest.mark.parametrize(
    "fault", [(faults.hang_in_backward, 1, 7, 20), (faults.leave, 1, 7)], ids=["hangs", "leaves"]
)
def test_f10_a_rank_that_is_silent_costs_one_line(fault, tmp_path):
    folder, flags = tmp_path / "run", runs.words("--timeout_minutes 0.15")
    outcome = faults.start(3, folder, *LORA, *flags, fault=fault)
    assert outcome.codes[0] == outcome.codes[2] == 1
    lines = [line for log in (outcome.logs[0], outcome.logs[2]) for line in log.splitlines()]
    assert len([line for line in lines if "lost the connection to another rank" in line]) == 1
    assert "Traceback" not in outcome.logs[0] + outcome.logs[2]
    assert faults.steps(folder) == [5]


# --- F15: two runs, one folder -------------------------------------------------------------------


def test_f15_a_second_run_in_the_folder_is_refused_and_told_whose_it_is(undisturbed, tmp_path):
    folder = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    runs.as_if_killed(folder)
    held = lock(folder)
    try:
        outcome = faults.start(2, folder, *LORA)
    finally:
        held.release()
    assert outcome.codes == [2, 2] and outcome.logs[1] == ""
    assert outcome.logs[0].startswith(f"error: {folder} is in use by another run; ")
    faults.finished(faults.start(2, folder, *LORA))  # and is free again


def test_f15_of_two_that_start_together_one_runs(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    folder = tmp_path / "run"
    with ThreadPoolExecutor() as pool:
        lives = [pool.submit(faults.start, 1, folder, *LORA) for _ in range(3)]
        ends = [life.result() for life in lives]
    (ran,) = [end for end in ends if "ranks     1 x cpu" in end.logs[0]]
    assert ran.codes == [0]
    for end in [end for end in ends if end is not ran]:  # refused, or too late to find it at work
        word, code = ("is in use by", 2) if end.codes == [2] else ("already finished", 0)
        assert end.codes == [code] and word in end.logs[0]
