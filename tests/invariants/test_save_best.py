"""save_best: results and model are of the lowest validation loss, as if it had ended there."""

import json
import signal
from pathlib import Path
from shlex import split as words

import pytest
import torch

import faults
import main_distributed
import runs
import train
from ddp_utils import UserError
from ranks import ranks

# validations after 4, 8 and 12 steps
FAST = words("--fine_tuning full --learning_rate 3e-3 --lr_scheduler constant --keep_checkpoints 1")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Of a run whose validation prefers what training does not: it gets worse from step to step."""
    path = tmp_path_factory.mktemp("data") / "val.jsonl"
    rows = [json.loads(line) for line in Path(runs.PAIRS).read_text().splitlines()]
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in swapped))
    return [*FAST, "--val_data", str(path)]


def validations(folder):
    return {line["step"]: line["loss"] for line in runs.lines(folder, "val")}


def lowest(folder):
    """The step of the lowest validation loss by metrics.jsonl: not the last one."""
    found = validations(folder)
    best = min(found, key=found.get)
    assert best < max(found), found
    return best


def test_it_ends_as_a_run_that_had_ended_there(flags, tmp_path):
    run, short = tmp_path / "a/run", tmp_path / "b/run"
    outcome = faults.finished(faults.start(2, run, *flags, "--save_best"))
    best = lowest(run)
    assert f"save_best: back to step {best}, " in outcome.logs[0]
    faults.finished(faults.start(2, short, *flags, "--max_steps", str(best)))
    assert faults.digest(run) == faults.digest(short)
    mine, expected = (faults.summary(folder) for folder in (run, short))
    assert mine["best"] == {"loss": validations(run)[best], "step": best} and mine["step"] == 12
    assert mine["val"] == expected["val"] and mine["test"] == expected["test"]
    assert runs.lines(run, "test")[0]["step"] == best


@pytest.mark.parametrize(("rank", "turn"), [(0, 2), (1, 9)])
def test_a_killed_run_still_knows_its_best(rank, turn, flags, tmp_path):
    """One checkpoint is kept beside the best one; the best may lie after the kill, or before it."""
    flags = [*flags, "--save_best"]
    faults.finished(faults.start(2, tmp_path / "a/run", *flags))
    run = tmp_path / "b/run"
    fault = faults.kill_in_backward, rank, turn
    assert faults.start(2, run, *flags, fault=fault).codes[rank] == -9
    faults.finished(faults.start(2, run, *flags))
    assert faults.is_equal(run, tmp_path / "a/run")
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (lowest(run), 12)]


def test_a_stop_within_a_validation_does_not_lose_it(flags, tmp_path):
    """The checkpoint of its step is older than it, and lacks its numbers."""
    flags = [*flags, "--save_best"]
    faults.finished(faults.start(1, tmp_path / "a/run", *flags))
    run = tmp_path / "b/run"
    fault = faults.signal_before, "main_distributed.evaluate", 1, signal.SIGTERM
    assert faults.start(1, run, *flags, fault=fault).codes == [85]
    faults.finished(faults.start(1, run, *flags))
    assert faults.is_equal(run, tmp_path / "a/run")
    assert faults.summary(run)["val"] == faults.summary(tmp_path / "a/run")["val"]


def test_a_damaged_best_is_told_before_the_training(flags, tmp_path):
    """One flipped bit would load silently. Without save_best the same run goes on to its end."""
    run = tmp_path / "run"
    fault = faults.signal_before, "main_distributed.train_step", 10, signal.SIGTERM
    assert faults.start(1, run, *flags, "--save_best", fault=fault).codes == [85]
    file = run / f"checkpoints/step-{lowest(run):08d}/state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-200_000] ^= 0x40
    file.write_bytes(raw)
    outcome = faults.start(1, run, *flags, "--save_best")
    assert outcome.codes == [2]
    assert outcome.logs[0].splitlines()[-1] == (
        f"error: {file.parent}: state.safetensors does not match its sha256; "
        "without --save_best the last model is kept"
    )
    outcome = faults.finished(faults.start(1, run, *flags))
    assert "save_best: True -> False, from here on" in outcome.logs[0]
    assert "best" not in faults.summary(run) and faults.summary(run)["step"] == 12


SFT = "--objective sft --type full --learning_rate 5e-3 --lr_scheduler constant --max_rows 60"
SFT += " --max_steps 12 --eval_every 3 --report_to none --micro_batch_size 4 --warmup_ratio 0"


def fine_tune(folder, *flags_of_runs):
    runs.hurry()
    torch.set_num_threads(1)
    for flags in flags_of_runs:
        assert train.main([*words(SFT), *flags]) == 0


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_shares_go_back_too(strategy, tmp_path):
    run, short = tmp_path / "a/run", tmp_path / "b/run"
    flags = ["--use_fsdp", "--output_dir"]
    if strategy == "zero3":
        pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")
        (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        flags = ["--deepspeed", str(tmp_path / "zero.json"), "--output_dir"]
    ranks(2, fine_tune, str(tmp_path), [*flags, str(run), "--save_best"])
    best = lowest(run)
    ranks(2, fine_tune, str(tmp_path), [*flags, str(short), "--max_steps", str(best)])
    assert faults.digest(run) == faults.digest(short)


def test_without_validation_data_it_is_refused(tmp_path):
    with pytest.raises(UserError, match="--save_best: there is no validation data"):
        main_distributed.main(["--save_best", "--test_data", runs.PAIRS, "--check"])
    with pytest.raises(UserError, match="save_best: there is no validation data"):
        train.main(["--save_best", "--val_share", "0", "--check"])


def test_the_baked_prompt_of_the_lowest_kl(tmp_path, monkeypatch):
    """A real prompt baking of a few steps, whose rate is too high at its end."""
    import generate_data
    import train_loop

    monkeypatch.chdir(Path(__file__).parents[2])
    files = [str(tmp_path / name) for name in ("train.jsonl", "val.jsonl")]
    made = "--num_questions 12 --num_sequences_per_question 2 --max_sequence_length 16"
    made += f" --traj_out_file {files[0]} --val_out_file {files[1]}"
    assert generate_data.main(words(made)) == 0
    flags = f"--data_path {files[0]} --val_path {files[1]} --num_samples 0 --learning_rate 0.1"
    flags += " --lr_scheduler constant --max_steps 4 --eval_every 1 --batch_size 4 --save_best"
    assert train_loop.main([*words(flags), "--out_dir", str(tmp_path / "run")]) == 0
    found = {line["step"]: line["kl"] for line in runs.lines(tmp_path / "run", "val")}
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    best = min(found, key=found.get)
    assert best < 4 and summary["best"] == {"loss": found[best], "step": best}
    assert summary["val"]["kl"] == found[best]
