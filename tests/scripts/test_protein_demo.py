"""The protein demo: its files are what make_protein.py makes, and hold what it says of them.

The geometry is measured on the PDB files themselves, read here column by column.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch

from conftest import ROOT
from ddp_utils.distributed import World
from dpo_inv import batches, inference, mpnn, structure
from dpo_inv import pairs as pairs_
from dpo_inv.config import DesignConfig, PairSettings

INPUT = ROOT / "data/input"
STRUCTURES = sorted(INPUT.glob("structures/*.pdb"))
MODEL = ROOT / "data/demo/protein_model.pt"
CORE, SURFACE = "AILVFM", "EKRQDST"


@pytest.fixture(scope="module")
def make():
    path = ROOT / "data/demo/make_protein.py"
    spec = importlib.util.spec_from_file_location("make_protein", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=STRUCTURES, ids=lambda path: path.stem)
def residues(request):
    """{(chain, number): {atom: place, "name": ...}} of a file, by the columns of the format."""
    found = {}
    for line in request.param.read_text().splitlines():
        if line.startswith("ATOM"):
            place = np.array([float(line[at : at + 8]) for at in (30, 38, 46)])
            residue = found.setdefault((line[21], int(line[22:26])), {"name": line[17:20]})
            residue[line[12:16].strip()] = place
            assert line[76:78].strip() == line[13]
    return found


def items(name):
    return json.loads((INPUT / f"test_data_{name}.json").read_text())


def points_inwards(coords):
    """The rule of the demo, with the CB that the model computes: [L, 4, 3] -> [L]."""
    n, alpha, c, _ = np.moveaxis(coords, 1, 0)
    b, a = alpha - n, c - alpha
    beta = -0.58273431 * np.cross(b, a) + 0.56802827 * b - 0.54067466 * a + alpha
    return np.linalg.norm(beta[:, :2], axis=1) - np.linalg.norm(alpha[:, :2], axis=1)


def test_the_files_are_what_the_script_makes(make, tmp_path):
    make.make_structures(tmp_path)
    make.make_pairs(tmp_path)
    made = {path.relative_to(tmp_path / "input") for path in tmp_path.rglob("*.*")}
    assert made == {path.relative_to(INPUT) for path in INPUT.rglob("*.*")} and len(made) == 14
    for name in made:
        assert (tmp_path / "input" / name).read_bytes() == (INPUT / name).read_bytes(), name
    files = [MODEL, *(INPUT / name for name in made)]
    assert sum(path.stat().st_size for path in files) < 1e6


def test_the_model_has_begun_to_learn_the_rule():
    """On a validation bundle: how many of the letters that are drawn at 0.5 follow it."""
    config = DesignConfig()
    task = inference.read_task(INPUT / "structures/bundle_09.pdb", config)
    model = mpnn.ProteinMPNN.load(MODEL)
    letters, _ = inference.sample(model, task, torch.full((20,), 0.5), config)
    core, surface = (np.isin(letters, mpnn.encode(kind)) for kind in (CORE, SURFACE))
    wanted = np.where(points_inwards(task.structure.coords) < 0, core, surface)  # [S, L]
    assert 0.4 <= wanted.mean() <= 0.6  # 0.33 by chance
    found, _ = pairs_.read(INPUT / "test_data_val.json", {}, PairSettings())
    logps = batches.score(batches.Scorer(model), found, PairSettings(), World())
    assert 0.7 <= (logps[:, 0] > logps[:, 1]).float().mean() <= 0.85  # so training can gain


@pytest.mark.parametrize("name, count", [("real", 400), ("val", 60)])
def test_the_preferred_sequence_follows_the_rule_where_the_two_differ(name, count):
    found = items(name)
    assert len(found) == count
    for item in found:
        chain = item.get("chain_id") or item["design_chains"][0]
        backbone = structure.read(INPUT / item["pdb_file"], chain)
        depth = points_inwards(backbone.coords[backbone.observed])
        sides = item["preferred_seq"], item["unpreferred_seq"]
        differ = [at for at, (a, b) in enumerate(zip(*sides, strict=True)) if a != b]
        assert 3 <= len(differ) <= 8 and len(depth) == len(sides[0])
        assert item["description"].startswith(f"{len(differ)} residues")
        numbers = [at + 1 for at in differ]  # such bundles have no gaps
        assert {*numbers} <= {*item.get("mutable_positions", numbers)}
        for at in differ:
            if abs(depth[at]) > 0.02:
                wanted, other = (CORE, SURFACE) if depth[at] < 0 else (SURFACE, CORE)
                assert sides[0][at] in wanted and sides[1][at] in other


def test_every_kind_of_item_is_there_and_no_backbone_is_in_both_files():
    train, val = items("real"), items("val")
    assert not {i["pdb_file"] for i in train} & {i["pdb_file"] for i in val}
    assert len({i["pdb_file"] for i in train + val}) == len(STRUCTURES) == 12
    for found in (train, val):
        for key in ("chain_id", "design_chains", "fixed_chains", "mutable_positions"):
            assert any(key in item for item in found)
    gaps = [path for path in STRUCTURES if not structure.read(path).observed.all()]
    assert len(gaps) == 3


def test_all_pairs_are_read_without_a_remark():
    for name, count in (("real", 400), ("val", 60)):
        found, report = pairs_.read(INPUT / f"test_data_{name}.json", {}, PairSettings())
        assert len(found) == count and not report["dropped"] and not report["notes"]
