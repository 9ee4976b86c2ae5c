"""Protein DPO on the demo's bundles: the same numbers on 1, 2, 4 processes, killed or not."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import faults
import programs
import runs
from conftest import ROOT
from ddp_utils import run as run_
from dpo_inv import mpnn, pairs, run_dpo_ddp
from dpo_inv.config import PairSettings
from ranks import ranks, run_ranks
from scripts.test_protein_real import plain_logps

DATA = str(ROOT / "data/input/test_data_real.json")
VAL = str(ROOT / "data/input/test_data_val.json")
MODEL = str(ROOT / "data/demo/protein_model.pt")
FLAGS = ["--train_data", DATA, "--val_data", VAL, "--base_model_name", MODEL, "--log_every", "1000"]
FLAGS += runs.words("--learning_rate 1e-3 --max_rows 42 --max_steps 8")


def train(folder, *flags, fault=None):
    """One life of a run in this rank."""
    run_.write_report = lambda *_, **__: ""
    torch.set_num_threads(1)
    if fault:
        fault[0](*fault[1:])
    return run_dpo_ddp.main([*FLAGS, *flags, "--output_dir", str(folder)])


def batch(per_process, accumulation=1):
    return runs.words(f"--batch_size {per_process} --gradient_accumulation_steps {accumulation}")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run on one process, 8 pairs a step; the last step of an epoch has 2."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1, train, str(folder), *batch(8))
    return folder


def test_simpo_has_no_first_loss_to_be_checked(tmp_path):
    run = tmp_path / "run"
    ranks(2, train, str(run), *batch(4), "--method", "simpo", "--max_steps", "2")
    first = runs.lines(run, "train")[0]
    assert first["loss"] > 0 and first["grad_norm"] > 0


def test_decoding_orders_of_other_names_are_other_pairs():
    """They are drawn by the structure's name: log-probs of one may not be read for the other."""
    found, _ = pairs.read(DATA, {}, PairSettings(), 2)
    others = [pair._replace(name=f"other_{pair.name}") for pair in found]
    assert pairs.digest(found) != pairs.digest(others)


def test_a_run_that_diverges_has_no_perplexity(tmp_path):
    """exp of more than 709 is no number of Python's."""
    run = tmp_path / "run"
    flags = [*batch(4), "--max_rows", "4", "--max_steps", "3", "--learning_rate", "100"]
    ranks(1, train, str(run), *flags)
    assert any(line["perplexity"] is None for line in runs.lines(run, "val"))


def test_a_run_without_validation_data_is_resumed(tmp_path):
    """Too few pairs to hold some out; it ends a validation without results."""
    items = json.loads(Path(DATA).read_text())[:4]
    for item in items:
        item["pdb_file"] = str(Path(DATA).parent / item["pdb_file"])
    (tmp_path / "few.json").write_text(json.dumps(items))
    run, fault = tmp_path / "run", (faults.kill_in_backward, 0, 2)
    flags = [*batch(4), "--train_data", str(tmp_path / "few.json"), "--val_data", ""]
    flags += ["--max_steps", "3"]
    assert run_ranks(1, life, str(run), flags, fault).codes == [-9]
    ranks(1, train, str(run), *flags)
    assert faults.summary(run)["step"] == 3 and len(runs.lines(run, "train")) == 3


def test_a_continued_run_remembers_its_best_model(tmp_path):
    """The validation prefers what training does not: it is best after the first epoch."""
    items = json.loads(Path(VAL).read_text())[:8]
    for item in items:
        sides = item["preferred_seq"], item["unpreferred_seq"]
        item["unpreferred_seq"], item["preferred_seq"] = sides
        item["pdb_file"] = str(Path(VAL).parent / item["pdb_file"])
    (tmp_path / "val.json").write_text(json.dumps(items))
    flags = [*batch(4), "--val_data", str(tmp_path / "val.json"), "--max_rows", "8"]
    run, fault = tmp_path / "run", (faults.kill_in_backward, 0, 6)
    assert run_ranks(1, life, str(run), flags, fault).codes == [-9]
    assert run_ranks(1, life, str(run), flags, None).codes == [0]
    found = {line["step"]: line["loss"] for line in runs.lines(run, "val")}
    del found[0]  # before the first step
    first, *later = found
    assert min(found, key=found.get) == first and len(later) > 1
    assert faults.summary(run)["best"] == {"loss": found[first], "step": first}
    best, after = (run / name for name in ("best_model.pt", "checkpoint_epoch_1.pt"))
    best, after = (mpnn.ProteinMPNN.load(path).state_dict() for path in (best, after))
    assert all(torch.equal(best[name], after[name]) for name in best)


def life(folder, flags, fault):
    assert train(folder, *flags, fault=fault) == 0


def test_the_validation_is_exact(one):
    """Against the saved models, pair by pair, each alone and summed in float64."""
    found, _ = pairs.read(VAL, {}, PairSettings())
    models = [mpnn.ProteinMPNN.load(path) for path in (one / "latest_model.pt", MODEL)]
    after, before = (plain_logps(model, found, seed=0) for model in models)  # [N, 2]
    z = 0.1 * (after - before) @ [1, -1]
    last = runs.lines(one, "val")[-1]
    assert last["count"] == len(found)
    assert last["loss"] == pytest.approx(np.log1p(np.exp(-z)).mean(), rel=1e-6)
    # context cancels in the margin, not here
    assert last["logps/chosen"] == pytest.approx(after[:, 0].mean(), rel=1e-6)


LINES = r"""Initialized DDP: rank=0, world_size=4, local_rank=0
Using device: cpu
Loaded 8 training and 60 validation pairs
Batch size per GPU: 1, Total batch size: 4
Learning rate: 0\.001, .*
(?s:.*)
Epoch 1/1
(?s:.*)
Epoch 1 Summary:
  Train Loss: (\d\.\d{4})
  Val Loss:   (\d\.\d{4})
"""


def test_the_lines_of_the_guide_on_4_processes(tmp_path):
    """Through torchrun, as the guide starts it; without a terminal there are no bars."""
    command = ["torchrun", "--standalone", "--nproc_per_node=4", "-m", "dpo_inv.run_dpo_ddp"]
    command += [*FLAGS, *runs.words(f"--max_rows 8 --max_steps 2 --output_dir {tmp_path}/run")]
    said = programs.process(command, cwd=tmp_path, PYTHONPATH=str(ROOT / "src")).stdout
    assert said.count("Initialized DDP") == 1 and "Training:" not in said
    found = re.search(LINES, said)
    assert found, said
    train = [line["loss"] for line in runs.lines(tmp_path / "run", "train")]
    val = runs.lines(tmp_path / "run", "val")[-1]["loss"]
    assert [*map(float, found.groups())] == pytest.approx([np.mean(train), val], abs=6e-5)
