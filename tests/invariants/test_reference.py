"""The reference is scored once per run, and read again only if nothing has changed."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import faults
import main_distributed
import runs
from ddp_utils import UserError, run
from ddp_utils.distributed import World
from ddp_utils.run import REFERENCE, load_tables, save_tables
from lm import logps, sampling
from lm.fast import self_test
from ranks import ranks, run_ranks

FLAGS = [*runs.QUIET, *runs.words("--max_rows 12 --batch_size 4 --max_steps 2")]


def train(folder, *flags):
    """main() -> how many pairs were scored."""
    score, counts = logps.score, []

    def counted(scorer, pairs, world, micro_batch_size, rows=None, phase=None):
        counts.append(len(pairs if rows is None else rows))
        return score(scorer, pairs, world, micro_batch_size, rows, phase)

    no_report = mock.patch.object(run, "write_report", lambda *_, **__: "")
    with mock.patch.object(logps, "score", counted), no_report:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", str(folder)]) == 0
    return sum(counts)


def unfinished(folder):
    """As if it had been killed before its first checkpoint."""
    shutil.rmtree(folder / "checkpoints")
    runs.as_if_killed(folder)
    return folder


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.show), 2])
def test_the_reference_is_scored_once_per_run(world_size, tmp_path):
    folder = tmp_path / "a"
    # used train and test pairs, and the check of the first batch
    assert ranks(world_size, train, folder) == [8 + 8 + 4] * world_size
    first = load_file(folder / REFERENCE)
    assert {name: list(table.shape) for name, table in first.items()} == {
        "train": [12, 2], "test": [8, 2],
    }  # fmt: skip
    is_scored = torch.isfinite(first["train"]).all(-1)
    assert is_scored.sum() == 8  # two steps of four pairs
    assert torch.isnan(first["train"][~is_scored]).all()
    assert ranks(world_size, train, unfinished(folder)) == [4] * world_size
    second = load_file(folder / REFERENCE)
    for split in first:
        torch.testing.assert_close(first[split], second[split], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["simpo", "orpo"])
def test_a_method_without_a_reference_scores_none(method, tmp_path):
    assert train(tmp_path / "a", "--method", method) == 0
    assert not (tmp_path / "a" / REFERENCE).exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run that was killed before its first checkpoint."""
    folder = tmp_path_factory.mktemp("reference") / "made"
    train(folder)
    return unfinished(folder)


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "a"))


def test_damaged_log_probs_are_computed_again(folder):
    table = bytearray((folder / REFERENCE).read_bytes())
    table[-2] ^= 1  # one bit
    (folder / REFERENCE).write_bytes(table)
    assert train(folder) == 20


def facts_of(folder):
    with safe_open(folder / REFERENCE, "pt") as file:
        return json.loads(file.metadata()["facts"])


def test_log_probs_of_another_version_are_computed_again(folder):
    facts = facts_of(folder)
    tables = load_tables(folder / REFERENCE, facts)
    assert tables.keys() == {"train", "test"}
    save_tables(folder / REFERENCE, tables, facts | {"torch": "2.0"})
    assert train(folder) == 20


def test_a_table_that_is_not_of_this_policy_is_an_error_at_step_0(folder):
    """The last line of defense if its SHA-256 was changed as well."""
    tables = {name: table + 0.01 for name, table in load_file(folder / REFERENCE).items()}
    save_tables(folder / REFERENCE, tables, facts_of(folder))
    with pytest.raises(UserError, match="differs from the reference's by 0.01"):
        train(folder)


def test_a_file_of_parts_is_written_in_a_twentieth_of_the_time(tmp_path, monkeypatch):
    """100 parts of 1 s; a write of 1 s is due at the first one, 20 s after it began, and last."""
    clock, written = [0.0], []

    def save(_, tables, __):
        written.append(int(tables["a"].isfinite().sum()))
        clock[0] += 1

    def compute(_, missing):
        for [row] in missing:
            clock[0] += 1
            yield torch.full((100, 1), torch.nan).index_fill(0, torch.tensor([row]), 0.0)

    monkeypatch.setattr(run, "save_tables", save)
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock[0])
    run.in_parts(tmp_path / "a", {}, {"a": [[row] for row in range(100)]}, compute, World())
    assert written == [1, 21, 41, 61, 81, 100]


def in_parts(folder, name="", number=0):
    """main() in parts of 3 rows and 2 replies per rank, stopped at a part of a file.

    After rank 0 has stored so many parts, it gets the signal of a time limit: at once, or while it
    samples the first token of the next part.
    """
    run.PART, run.SAVE_FRACTION = 3, math.inf  # each part is stored
    save, sample_tokens, left = run.save_tables, sampling.sample_tokens, [number, 0]

    def stop():
        os.kill(os.getpid(), signal.SIGUSR1)
        left[1] += 1

    def count(path, *rest):
        save(path, *rest)
        left[0] -= path.name.startswith(name)
        if left[0] == 0 and path.name == REFERENCE and not left[1]:
            stop()

    def token(logits, uniform, spec):
        if spec.max_new_tokens == 8:  # not that of the self-test
            print("token" if not left[1] else "token after the signal")
            if left[0] == 0 and number:
                stop()
        return sample_tokens(logits, uniform, spec)

    run.save_tables, sampling.sample_tokens = count, token
    flags = "--num_samples 8 --sample_batch_size 2 --max_new_tokens 8 --keep_checkpoints 9"
    train(folder, *runs.words(flags))


def test_a_run_continues_after_the_last_part_that_was_stored(tmp_path):
    """Stopped three times while it scores 8 + 8 rows, and while it samples; as if undisturbed."""
    whole, folder = tmp_path / "whole", tmp_path / "parts"
    [log, _] = faults.finished(run_ranks(2, in_parts, whole)).logs
    lives = [(REFERENCE, 1), (REFERENCE, 1), (REFERENCE, 2), ("before", 1), ("after", 1)]
    lines = ["8 of 12 pairs of train", "5 of 12 pairs", "2 of 12 pairs", "5 of 8 pairs of test"]
    sampled = 0
    for number, life in enumerate(lives):
        outcome = run_ranks(2, in_parts, folder, *life)
        assert outcome.codes == [85, 85], outcome.logs
        assert f"scoring {lines[number]}" in outcome.logs[0] if number < 4 else True
        assert "after the signal" not in outcome.logs[0]  # the batch ends at once
        sampled += outcome.logs[0].splitlines().count("token")
    last = faults.finished(run_ranks(2, in_parts, folder)).logs[0].splitlines()
    # of the two parts in which it was stopped, one token each is sampled again
    assert sampled + last.count("token") == log.splitlines().count("token") + 2
    assert faults.is_equal(folder, whole)
    name = "distributed_output_test.txt"
    assert (folder / name).read_text() == (whole / name).read_text()
    files = [path.relative_to(whole) for path in whole.rglob("*.safetensors")]
    assert len(files) == 5  # log-probs, replies before and after, a checkpoint, the model
    for file in files:
        tables = load_file(folder / file), load_file(whole / file)
        torch.testing.assert_close(*tables, rtol=0, atol=0, equal_nan=True)


def test_a_layout_that_is_not_supported_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "check_layout", lambda *_: "the prompt cannot be shared (windy)")
    with pytest.raises(UserError, match="--layout shared: the prompt cannot be shared"):
        train(tmp_path / "a", "--layout", "shared")
    train(tmp_path / "b")
    assert capsys.readouterr().out.count("the prompt cannot be shared (windy)") == 1


def layout_of_a_run(folder):
    """main() on ranks of which one does not support the shared layout -> the layout used."""
    check, set_layout, layouts = self_test.check_layout, logps.Scorer.set_layout, []

    def windy(scorer, pairs, device):
        problem = check(scorer, pairs, device)
        if os.environ["RANK"] == "1":
            scorer.set_layout(shared=False)
            problem = "windy"
        return problem

    def watch(scorer, shared):
        set_layout(scorer, shared)
        layouts.append(shared)

    self_test.check_layout, logps.Scorer.set_layout = windy, watch
    train(folder)
    return layouts[-1]


def test_if_one_rank_cannot_share_prompts_none_does(tmp_path):
    assert ranks(2, layout_of_a_run, tmp_path / "a") == [False, False]
