"""Protein DPO of a model of standard size with random weights, on pairs of the demo.

Each run's numbers are compared with scores of one sequence after the other, in float64.
"""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import programs
import runs
from conftest import ROOT
from ddp_utils.distributed import World
from ddp_utils.metrics import wilson
from dpo_inv import batches, mpnn, pairs, run_dpo_ddp
from dpo_inv.config import Config, PairSettings
from ranks import ranks

ACCURACY = "rewards/accuracies"


def with_paths(path):
    """All items; their structures are found from any folder."""
    items = json.loads(path.read_text())
    return [{**item, "pdb_file": str(path.parent / item["pdb_file"])} for item in items]


def write(folder, items):
    (folder / "pairs.json").write_text(json.dumps(items))
    return folder / "pairs.json"


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A file of four pairs at most of each of the eight shortest backbones, and a base model."""
    by_file = {}
    for item in with_paths(ROOT / "data/input/test_data_real.json"):
        by_file.setdefault(item["pdb_file"], []).append(item)
    shortest = sorted(by_file.values(), key=lambda items: len(items[0]["preferred_seq"]))[:8]
    folder = tmp_path_factory.mktemp("few")
    torch.manual_seed(0)
    model = mpnn.ProteinMPNN()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_660_485
    model.save(folder / "base.pt")
    return write(folder, [item for items in shortest for item in items[:4]])


@torch.no_grad()
def plain_logps(model, pairs, seed):
    """log p of preferred and unpreferred, one sequence after the other, in float64: [N, 2]."""
    logps = []
    for pair in pairs:
        encoded = model.encode(*batches.structure_tensors(pair.backbone, "cpu"))
        order = torch.from_numpy(batches.decoding_orders(pair, PairSettings(seed=seed)))
        for letters in (torch.from_numpy(pair.preferred), torch.from_numpy(pair.unpreferred)):
            scores = model.decode(encoded, letters[None], order)[0].double()
            logps.append(scores.gather(-1, letters[:, None])[pair.targets].sum().item())
    return np.reshape(logps, (-1, 2))


@pytest.mark.show
def test_two_processes_hold_out_backbones(few, tmp_path):
    """Through torchrun, as the user starts it."""
    split, _ = run_dpo_ddp.read_data(Config(train_data=str(few)), World())
    train, val = (Counter(p.name.split()[0] for p in split[side]) for side in ("train", "val"))
    assert train + val == Counter(Path(item["pdb_file"]).name for item in with_paths(few))
    assert train and val and not train.keys() & val.keys()
    run, base = tmp_path / "run", few.parent / "base.pt"
    command = ["torchrun", "--standalone", "--nproc_per_node=2", "-m", "dpo_inv.run_dpo_ddp"]
    flags = f"--train_data {few} --base_model_name {base} --output_dir {run} "
    flags += "--learning_rate 1e-4 --batch_size 2 --max_steps 2"
    programs.process([*command, *runs.words(flags)], PYTHONPATH=str(ROOT / "src"))
    # the run trained on what was read here
    inputs = json.loads((run / "environment.json").read_text())["inputs"]
    for side, rows in split.items():
        assert inputs[f"content of {side}"] == pairs.digest(rows)
    # the policy is its reference at first, and random weights are no better than a guess
    first = runs.lines(run, "train")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and math.exp(first["nll"]) > 20
    # each held-out pair counts once
    models = [mpnn.ProteinMPNN.load(path) for path in (base, run / "latest_model.pt")]
    before, after = (plain_logps(model, split["val"], 0) @ [1, -1] for model in models)
    count, accuracy = len(split["val"]), (after > before).mean()
    result = json.loads((run / "summary.json").read_text())["val"]
    assert (result["count"], result[ACCURACY]) == (count, pytest.approx(accuracy))
    assert result["rewards/margins"] == pytest.approx(0.1 * (after - before).mean(), abs=1e-4)
    bounds = result[f"{ACCURACY}_low"], result[f"{ACCURACY}_high"]
    assert bounds == pytest.approx(wilson(accuracy * count, count), abs=1e-4)


def test_few_pairs_can_be_learned_by_heart(few, tmp_path):
    """Eight pairs, which are the validation data, too."""
    data = write(tmp_path, with_paths(few)[:8])
    flags = f"--train_data {data} --val_data {data} --base_model_name {few.parent}/base.pt "
    flags += f"--num_epochs 3 --batch_size 4 --learning_rate 3e-4 --output_dir {tmp_path}/run"
    ranks(2, run_dpo_ddp.main, runs.words(flags))
    result = json.loads((tmp_path / "run/summary.json").read_text())["val"]
    assert result["count"] == 8 and result[ACCURACY] >= 0.95
