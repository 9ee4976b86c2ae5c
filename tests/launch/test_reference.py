"""The reference is scored once: a run beside it with the same fingerprint reads its log-probs."""

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import main_distributed
import runs
from ddp_utils import logps, plots, records, reference, selftest
from ranks import ranks

FLAGS = [*runs.QUIET, *runs.words("--max_rows 12 --batch_size 4 --max_steps 2")]


def train(folder, *flags):
    """(pairs that were scored for the reference, lines of metrics)."""
    draw, score, scored = plots.draw, reference.score, []

    def counted(scorer, pairs, *rest):
        scored.append(len(pairs))
        return score(scorer, pairs, *rest)

    plots.draw, reference.score = lambda folder: None, counted
    try:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", str(folder)]) == 0
    finally:
        plots.draw, reference.score = draw, score
    return sum(scored), runs.lines(folder) if os.environ.get("RANK", "0") == "0" else None


def twice(folder):
    return train(f"{folder}/a"), train(f"{folder}/b", "--beta", "0.3")


def numbers(lines):
    """What does not hang on the clock."""
    clock = {"seconds", "tokens_per_second", "peak_memory_mb", "mfu"}
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_run_scores_nothing(world_size, tmp_path):
    for first, second in ranks(world_size, twice, str(tmp_path)):
        assert first[0] == 12 + 8  # train and test pairs
        assert second[0] == 0
    a, b = (load_file(tmp_path / name / reference.FILE) for name in "ab")
    assert {split: table.shape for split, table in a.items()} == {"train": (12, 2), "test": (8, 2)}
    assert all(torch.equal(a[split], b[split]) for split in a)


def test_numbers_are_the_same_to_the_bit(tmp_path):
    _, first = train(tmp_path / "run")
    count, again = train(tmp_path / "run", "--restart")  # the first is moved to run.1
    assert count == 0
    assert numbers(again) == numbers(first)


CHANGES = {
    "rows": ["--max_rows", "11"],
    "layout": ["--layout", "separate"],
    "weights": ["--fine_tuning", "lora", "--base_dtype", "bf16"],
    "tokens": ["--max_length", "24"],
    "adapter": ["--init_adapter", str(Path(__file__).parents[1] / "golden/demo_adapter")],
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_log_probs_hang_on_is_in_the_fingerprint(what, tmp_path):
    train(tmp_path / "a")
    assert train(tmp_path / "b", *CHANGES[what])[0] > 0


def test_another_model_under_the_same_name_is_scored_anew(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for file in records.resolve("data/demo/model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    flags = ["--model_name", str(model)]
    assert train(tmp_path / "runs/a", *flags)[0] > 0
    assert train(tmp_path / "runs/b", *flags)[0] == 0
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v * 1.5 for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(time.time_ns(),) * 2)
    assert train(tmp_path / "runs/c", *flags)[0] > 0


def test_half_a_file_of_a_killed_run_is_passed_over(tmp_path):
    train(tmp_path / "a")
    kept = tmp_path / "a" / reference.FILE
    kept.write_bytes(kept.read_bytes()[:40])
    assert train(tmp_path / "b")[0] == 20


def test_a_table_that_is_not_this_policys_is_refused_at_step_0(tmp_path):
    """The last line of defence, should a fingerprint ever deceive."""
    train(tmp_path / "a")
    kept = tmp_path / "a" / reference.FILE
    with reference.safe_open(kept, framework="pt") as file:
        mark = file.metadata()
    save_file({k: v + 0.01 for k, v in load_file(kept).items()}, kept, metadata=mark)
    with pytest.raises(reference.UserError, match="differs from the reference's by 0.01"):
        train(tmp_path / "b")


def test_a_layout_that_cannot_be_had_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "check_layout", lambda *_: "the prompt cannot be shared (windy)")
    with pytest.raises(reference.UserError, match="--layout shared: the prompt cannot be shared"):
        train(tmp_path / "a", "--layout", "shared")
    train(tmp_path / "b")
    assert capsys.readouterr().out.count("the prompt cannot be shared (windy)") == 1
    assert Path(tmp_path / "b/summary.json").exists()


def one_rank_refuses(folder):
    check = selftest.check_layout

    def windy(scorer, pairs, device):
        line = check(scorer, pairs, device)
        if os.environ["RANK"] == "1":
            scorer.lay_out(shared=False)
            return "windy"
        return line

    selftest.check_layout = windy
    seen, lay_out = [], logps.Scorer.lay_out

    def watch(scorer, shared):
        lay_out(scorer, shared)
        seen.append(shared)

    logps.Scorer.lay_out = watch
    train(folder)
    return seen[-1]


def test_one_rank_that_cannot_share_is_everyones_layout(tmp_path):
    assert ranks(2, one_rank_refuses, str(tmp_path / "a"), timeout=60) == [False, False]
