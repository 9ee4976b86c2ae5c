"""The reference is scored once a run; another run's log-probs are read where a flag names it."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import main_distributed
import runs
from ddp_utils import UserError, data, fast, logps
from ddp_utils import run as run_
from ddp_utils.runs import checkpoint
from ddp_utils.runs.saving import REFERENCE
from ranks import ranks

FLAGS = [*runs.QUIET, *runs.words("--max_rows 12 --batch_size 4 --max_steps 2")]


def train(folder, *flags):
    """(pairs that were scored for the reference, lines of metrics)."""
    write_report, score, scored = run_.write_report, logps.score, []

    def counted(scorer, pairs, *rest):
        scored.append(len(pairs))
        return score(scorer, pairs, *rest)

    run_.write_report, logps.score = lambda *_, **__: ("", ""), counted
    try:
        assert main_distributed.main([*FLAGS, *flags, "--result_dir", str(folder)]) == 0
    finally:
        run_.write_report, logps.score = write_report, score
    return sum(scored), runs.lines(folder) if os.environ.get("RANK", "0") == "0" else None


def twice(folder):
    first = train(f"{folder}/a")
    return first, train(f"{folder}/b", "--beta", "0.3", "--reference_logps", f"{folder}/a")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_run_scores_nothing(world_size, tmp_path):
    for first, second in ranks(world_size, twice, str(tmp_path)):
        assert first[0] == 12 + 8 + 4  # train and test pairs, and the first batch's check
        assert second[0] == 4
    a, b = (load_file(tmp_path / name / REFERENCE) for name in "ab")
    assert {split: table.shape for split, table in a.items()} == {"train": (12, 2), "test": (8, 2)}
    assert all(torch.equal(a[split], b[split]) for split in a)


ADAPTER = Path(__file__).parents[1] / "golden/demo_adapter"
CHANGES = {  # flags -> what is another
    "--max_rows 11": "rows of train",
    "--layout separate": "prompt shared",
    "--fine_tuning lora --base_dtype bf16": "dtype",
    "--max_length 24": "rows of train",
    f"--init_adapter {ADAPTER}": "adapter",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run whose log-probs others may want to read."""
    folder = tmp_path_factory.mktemp("reference") / "made"
    train(folder)
    return folder


def test_log_probs_of_something_else_are_refused(made, tmp_path):
    for flags, what in CHANGES.items():
        says = f"--reference_logps: {made} has another {what}; leave it out"
        with pytest.raises(UserError, match=re.escape(says)):
            train(tmp_path / "b", *flags.split(), "--reference_logps", str(made))


def test_another_model_under_the_same_name_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(data.resolve("data/demo/model"), model)
    flags = ["--model_name", str(model)]
    assert train(tmp_path / "runs/a", *flags)[0] == 24
    flags += ["--reference_logps", str(tmp_path / "runs/a")]
    assert train(tmp_path / "runs/b", *flags)[0] == 4
    weights = model / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v * 1.5 for k, v in tensors.items()}, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="has another model; leave it out"):
        train(tmp_path / "runs/c", *flags)


def test_damaged_log_probs_are_never_read(made, tmp_path):
    """One bit of a table: refused from another run, scored again by its own."""
    folder = tmp_path / "a"
    shutil.copytree(made, folder)
    table = bytearray((folder / REFERENCE).read_bytes())
    table[-2] ^= 1
    (folder / REFERENCE).write_bytes(table)
    with pytest.raises(UserError, match=f"{REFERENCE} is damaged; leave it out"):
        train(tmp_path / "b", "--reference_logps", str(folder))
    unfinished(folder)
    assert train(folder)[0] == 24
    (folder / "manifest.sha256").unlink()
    with pytest.raises(UserError, match="a: manifest.sha256 is missing; give another run folder"):
        train(tmp_path / "b", "--reference_logps", str(folder))


def unfinished(folder):
    """As if it had been killed before its first checkpoint."""
    shutil.rmtree(folder / "checkpoints")
    summary = folder / "summary.json"
    summary.write_text(summary.read_text().replace("finished", "failed"))


def test_log_probs_of_another_version_are_made_again(made, tmp_path):
    folder = Path(shutil.copytree(made, tmp_path / "a"))
    unfinished(folder)
    assert train(Path(shutil.copytree(folder, tmp_path / "b")))[0] == 4
    files = checkpoint.read_manifest(folder)["files"]
    files[REFERENCE]["fingerprint"]["torch"] = "2.0"
    checkpoint.write_manifest(folder, {"files": files})
    assert train(folder)[0] == 24


def test_a_table_that_is_not_this_policys_is_refused_at_step_0(made, tmp_path):
    """The last line of defence, should the manifest ever deceive."""
    folder = tmp_path / "a"
    shutil.copytree(made, folder)
    tables = {k: v + 0.01 for k, v in load_file(folder / REFERENCE).items()}
    save_file(tables, folder / REFERENCE)
    entry = checkpoint.read_manifest(folder)["files"][REFERENCE]
    entry["sha256"] = data.sha256(folder / REFERENCE)
    checkpoint.write_manifest(folder, {"files": {REFERENCE: entry}})
    with pytest.raises(UserError, match="differs from the reference's by 0.01"):
        train(tmp_path / "b", "--reference_logps", str(folder))


def test_a_layout_that_cannot_be_had_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fast, "check_layout", lambda *_: "the prompt cannot be shared (windy)")
    with pytest.raises(UserError, match="--layout shared: the prompt cannot be shared"):
        train(tmp_path / "a", "--layout", "shared")
    train(tmp_path / "b")
    assert capsys.readouterr().out.count("the prompt cannot be shared (windy)") == 1
    assert Path(tmp_path / "b/summary.json").exists()


def one_rank_refuses(folder):
    check = fast.check_layout

    def windy(scorer, pairs, device):
        line = check(scorer, pairs, device)
        if os.environ["RANK"] == "1":
            scorer.set_layout(shared=False)
            return "windy"
        return line

    fast.check_layout = windy
    seen, set_layout = [], logps.Scorer.set_layout

    def watch(scorer, shared):
        set_layout(scorer, shared)
        seen.append(shared)

    logps.Scorer.set_layout = watch
    train(folder)
    return seen[-1]


def test_one_rank_that_cannot_share_is_everyones_layout(tmp_path):
    assert ranks(2, one_rank_refuses, str(tmp_path / "a"), timeout=60) == [False, False]
