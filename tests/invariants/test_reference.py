"""The reference is scored once per run, and read again only if nothing has changed."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import main_distributed
import runs
from ddp_utils import UserError, distributed, run
from ddp_utils.run import REFERENCE, load_tables, save_tables
from lm import logps
from lm.fast import self_test
from ranks import ranks, run_ranks

FLAGS = [*runs.QUIET, *runs.words("--max_rows 12 --batch_size 4 --max_steps 2")]


def train(folder, *flags):
    """main() -> how many pairs were scored."""
    score, counts = logps.score, []

    def counted(scorer, pairs, world, micro_batch_size, rows=None, phase=None):
        counts.append(len(pairs if rows is None else rows))
        return score(scorer, pairs, world, micro_batch_size, rows, phase)

    no_report = mock.patch.object(run, "write_report", lambda *_, **__: ("", ""))
    with mock.patch.object(logps, "score", counted), no_report:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", str(folder)]) == 0
    return sum(counts)


def unfinished(folder):
    """As if it had been killed before its first checkpoint."""
    shutil.rmtree(folder / "checkpoints")
    runs.as_if_killed(folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 2])
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


def scored_in_parts(folder, parts):
    """main() that stores the log-probs of each 3 rows, and is stopped after so many parts."""
    run.PART = 3
    save = run.save_tables
    written = []

    def count(*arguments):
        save(*arguments)
        written.append(1)

    run.save_tables = count  # only rank 0 writes, and its vote stops both
    distributed.stop_requested = lambda *_: len(written) == parts
    train(folder, "--keep_checkpoints", "9")


def test_scoring_continues_after_the_last_part_that_was_stored(tmp_path):
    """Stopped three times while it scores 8 + 8 rows in parts of 3; then as if undisturbed."""
    outcome = run_ranks(2, scored_in_parts, tmp_path / "whole", 99)
    assert outcome.codes == [0, 0], outcome.logs
    for parts, line in ((1, "8 of 12 pairs of train"), (1, "5 of 12 pairs"), (2, "2 of 12 pairs")):
        outcome = run_ranks(2, scored_in_parts, tmp_path / "parts", parts)
        assert outcome.codes == [85, 85], outcome.logs
        assert f"scoring {line}" in outcome.logs[0]
    outcome = run_ranks(2, scored_in_parts, tmp_path / "parts", 99)
    assert outcome.codes == [0, 0], outcome.logs
    assert "of train" not in outcome.logs[0] and "scoring 5 of 8 pairs of test" in outcome.logs[0]
    tables = [load_file(tmp_path / name / REFERENCE) for name in ("whole", "parts")]
    torch.testing.assert_close(*tables, rtol=0, atol=0, equal_nan=True)
    states = [
        load_file(tmp_path / name / "checkpoints/step-00000002/state.safetensors")
        for name in ("whole", "parts")
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)


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
