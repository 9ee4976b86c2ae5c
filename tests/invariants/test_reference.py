"""The reference is scored once per run, and read again only if nothing has changed."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import main_distributed
import runs
from ddp_utils import UserError, logps
from ddp_utils import run as run_
from ddp_utils.fast import self_test
from ddp_utils.run import REFERENCE, facts_of
from ranks import ranks

FLAGS = [*runs.QUIET, *runs.words("--max_rows 12 --batch_size 4 --max_steps 2")]


def train(folder, *flags):
    """(pairs that were scored for the reference, lines of metrics)."""
    write_report, score, scored = run_.write_report, logps.score, []

    def counted(scorer, pairs, *rest):
        rows = rest[3] if len(rest) > 3 else pairs
        scored.append(len(rows))
        return score(scorer, pairs, *rest)

    run_.write_report, logps.score = lambda *_, **__: ("", ""), counted
    try:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", str(folder)]) == 0
    finally:
        run_.write_report, logps.score = write_report, score
    return sum(scored), runs.lines(folder) if os.environ.get("RANK", "0") == "0" else None


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_is_scored_once_per_run(world_size, tmp_path):
    for scored, _ in ranks(world_size, train, str(tmp_path / "a")):
        assert scored == 8 + 8 + 4  # used train and test pairs, and the check of the first batch
    first = load_file(tmp_path / "a" / REFERENCE)
    assert {name: table.shape for name, table in first.items()} == {
        "train": (12, 2),
        "test": (8, 2),
    }
    is_scored = torch.isfinite(first["train"]).all(-1)
    assert is_scored.sum() == 8  # two steps of four pairs
    assert torch.isnan(first["train"][~is_scored]).all()
    unfinished(tmp_path / "a")
    for scored, _ in ranks(world_size, train, str(tmp_path / "a")):
        assert scored == 4
    second = load_file(tmp_path / "a" / REFERENCE)
    for split in first:
        torch.testing.assert_close(first[split], second[split], rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("reference") / "made"
    train(folder)
    return folder


def test_damaged_log_probs_are_computed_again(made, tmp_path):
    """One bit of the table."""
    folder = Path(shutil.copytree(made, tmp_path / "a"))
    table = bytearray((folder / REFERENCE).read_bytes())
    table[-2] ^= 1
    (folder / REFERENCE).write_bytes(table)
    unfinished(folder)
    assert train(folder)[0] == 20


def unfinished(folder):
    """As if it had been killed before its first checkpoint."""
    shutil.rmtree(folder / "checkpoints")
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "failed"))


def test_log_probs_of_another_version_are_computed_again(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "a"))
    unfinished(folder)
    file = facts_of(folder / REFERENCE)
    facts = json.loads(file.read_text())
    facts["fingerprint"]["torch"] = "2.0"
    file.write_text(json.dumps(facts))
    assert train(folder)[0] == 20


def test_a_table_that_is_not_of_this_policy_is_an_error_at_step_0(made, tmp_path):
    """The last line of defense if its SHA-256 was changed as well."""
    folder = Path(shutil.copytree(made, tmp_path / "a"))
    unfinished(folder)
    tables = {name: table + 0.01 for name, table in load_file(folder / REFERENCE).items()}
    save_file(tables, folder / REFERENCE)
    file = facts_of(folder / REFERENCE)
    digest = hashlib.sha256((folder / REFERENCE).read_bytes()).hexdigest()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sha256": digest}))
    with pytest.raises(UserError, match="differs from the reference's by 0.01"):
        train(folder)


def test_a_layout_that_cannot_be_had_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "check_layout", lambda *_: "the prompt cannot be shared (windy)")
    with pytest.raises(UserError, match="--layout shared: the prompt cannot be shared"):
        train(tmp_path / "a", "--layout", "shared")
    train(tmp_path / "b")
    assert capsys.readouterr().out.count("the prompt cannot be shared (windy)") == 1
    assert Path(tmp_path / "b/summary.json").exists()


def one_rank_refuses(folder):
    check = self_test.check_layout

    def windy(scorer, pairs, device):
        line = check(scorer, pairs, device)
        if os.environ["RANK"] == "1":
            scorer.set_layout(shared=False)
            return "windy"
        return line

    self_test.check_layout = windy
    seen, set_layout = [], logps.Scorer.set_layout

    def watch(scorer, shared):
        set_layout(scorer, shared)
        seen.append(shared)

    logps.Scorer.set_layout = watch
    train(folder)
    return seen[-1]


def test_one_rank_that_cannot_share_is_everyones_layout(tmp_path):
    assert ranks(2, one_rank_refuses, str(tmp_path / "a"), timeout=60) == [False, False]
