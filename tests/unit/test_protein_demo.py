"""The protein demo: its files are what make_protein.py makes, and hold what it says of them.

The geometry is measured on the PDB files themselves, read here column by column.
"""

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT
from dpo_inv import mpnn, structure
from dpo_inv import pairs as pairs_

INPUT = ROOT / "data/input"
STRUCTURES = sorted(INPUT.glob("structures/*.pdb"))
MODEL = ROOT / "data/demo/protein_model.pt"
CORE, SURFACE = {*"AILVFM"}, {*"EKRQDST"}


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


def test_the_model_is_small_and_in_the_official_format():
    held = torch.load(MODEL, weights_only=True)
    assert held.keys() == {"num_edges", "noise_level", "model_state_dict"}
    model = mpnn.ProteinMPNN.load(MODEL)
    assert (model.neighbours, len(model.encoder_layers), len(model.decoder_layers)) == (16, 1, 1)
    assert model.W_e.weight.shape == (32, 32)
    assert MODEL.stat().st_size < 250_000


def test_the_model_half_knows_the_rule(make, capsys):
    make.measure(mpnn.ProteinMPNN.load(MODEL), ROOT / "data", 0.5)
    assert 0.7 <= float(capsys.readouterr().out.split()[2]) <= 0.9


def test_bonds_are_those_of_a_protein(residues):
    for residue in residues.values():
        for first, second, length in (("N", "CA", 1.46), ("CA", "C", 1.525), ("C", "O", 1.23)):
            apart = np.linalg.norm(residue[first] - residue[second])
            assert apart == pytest.approx(length, abs=0.02)
    joined = 0
    for (chain, number), residue in residues.items():
        after = residues.get((chain, number + 1))
        apart = after and np.linalg.norm(after["N"] - residue["C"])
        if apart and apart < 2:  # else another helix begins
            joined += 1
            assert apart == pytest.approx(1.33, abs=0.02)
            assert np.linalg.norm(after["CA"] - residue["CA"]) == pytest.approx(3.8, abs=0.02)
            # a flat peptide: O is on the far side of the next CA
            assert np.linalg.norm(after["N"] - residue["O"]) == pytest.approx(2.25, abs=0.05)
    assert len(residues) - 4 <= joined <= len(residues) - 2  # two to four helices
    assert 30 <= len(residues) <= 70


def helices(residues):
    """[L, 3] of CA for each run of joined residues."""
    runs, last = [], None
    for residue in residues.values():
        if last is None or np.linalg.norm(residue["N"] - last["C"]) > 2:
            runs.append([])
        runs[-1].append(residue["CA"])
        last = residue
    return [np.array(run) for run in runs]


def test_helices_are_right_handed_rise_as_alpha_does_and_lie_side_by_side(residues):
    runs = helices(residues)
    assert all(12 <= len(run) <= 20 for run in runs)
    ups = []
    for run in runs:
        steps = np.diff(run, axis=0)
        rises = steps[:, 2]
        assert np.abs(rises) == pytest.approx(1.5, abs=0.1)
        assert (np.sign(rises) == np.sign(rises[0])).all()
        turns = np.cross(steps[:-1], steps[1:])[:, 2]  # about z: with the rise, if right-handed
        assert (np.sign(turns) == np.sign(rises[0])).all()
        ups.append(bool(rises[0] > 0))
    assert ups == [place % 2 == 0 for place in range(len(runs))]
    # the mean of 11 residues, three turns of 3.67, is on the axis but for a little
    centres = [run[:11, :2].mean(0) for run in runs]
    nearest = [
        min(np.linalg.norm(one - other) for other in centres if other is not one) for one in centres
    ]
    assert nearest == pytest.approx([9.5] * len(runs), abs=0.8)


def test_a_native_sequence_follows_the_rule(residues):
    coords = np.array(
        [[residue[atom] for atom in ("N", "CA", "C", "O")] for residue in residues.values()]
    )
    depth = points_inwards(coords)
    for place, residue in zip(depth, residues.values(), strict=True):
        if abs(place) > 0.02:  # by another CB, as far as 0.01 Angstrom away
            assert structure.STANDARD[residue["name"]] in (CORE if place < 0 else SURFACE)
    assert 0.2 <= (depth < 0).mean() <= 0.6


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
        assert {*differ} <= {*item.get("mutable_positions", differ)}
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
    config = SimpleNamespace(max_length=500, max_rows=-1, on_bad_record="error", cache="")
    config.mutable_positions = config.mutable_ranges = ()
    for name, count in (("real", 400), ("val", 60)):
        found, report = pairs_.read(INPUT / f"test_data_{name}.json", {}, config)
        assert len(found) == count and not report["dropped"] and not report["notes"]
