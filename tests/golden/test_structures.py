"""Backbones: the arrays of the official parser on generated files; real files as an extra.

What make_mpnn.py had the official parser read is in the project. The extra needs ../shared: awkward
files of the PDB, and those of real pairs, against a reader of columns in this file.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import ROOT
from dpo_inv import mpnn, structure

HERE, BUNDLES = Path(__file__).parent, ROOT / "data/input/structures"
FILES = {  # what was read, and in which order its chains
    "gaps": (BUNDLES / "bundle_07.pdb", "A"),
    "complex": (BUNDLES / "bundle_03.pdb", "BA"),  # designed ones come first
    "awkward": (HERE / "awkward.pdb", "AB"),
}


@pytest.mark.parametrize("name", FILES)
def test_the_arrays_are_those_of_the_official_parser(name):
    """Negative numbers, gaps, an insertion code, missing atoms, conformers, MSE, water."""
    path, chains = FILES[name]
    official = load_file(HERE / "mpnn_official.safetensors")
    found = structure.read(path, [*chains], altloc="first")
    assert found.chains == (*chains,)
    assert mpnn.encode(found.sequence) == official[f"{name}/S"].tolist()
    fields = {"coords": "X", "mask": "mask", "residue_idx": "residue_idx"}
    for field, key in (fields | {"chain_encoding": "chain_encoding"}).items():
        assert np.array_equal(getattr(found, field), official[f"{name}/{key}"]), field
    # of two conformers the official parser takes the first; the second, of occupancy 0.6, is by
    # 0.4 Angstrom further along each axis
    moved = structure.read(path, [*chains]).coords - found.coords
    assert moved[moved != 0] == pytest.approx([0.4] * 12 * (name == "awkward"), abs=1e-3)
