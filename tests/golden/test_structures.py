"""Backbones: the arrays of the official parser on generated files; real files as an extra.

What make_mpnn.py had the official parser read is in the project. The extra needs ../shared: awkward
files of the PDB, and those of real pairs, against a reader of columns in this file.
"""

import collections
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from conftest import ROOT
from dpo_inv import mpnn, structure

THREE = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
LETTERS = dict(zip([*THREE.split(), "MSE"], "ACDEFGHIKLMNPQRSTVWYM", strict=True))
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


# --- an extra: real files ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "data/protein"


def lines(path):
    """(record, atom, altloc, name, chain, number with insertion code, place, occupancy) of each
    atom of the first model, by column."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    for line in text.split("ENDMDL")[0].split("\n"):
        if line.startswith(("ATOM", "HETATM")):
            place = [float(line[at : at + 8]) for at in (30, 38, 46)]
            names = [line[a:b].strip() for a, b in ((12, 16), (16, 17), (17, 20), (21, 22))]
            yield line[:6].strip(), *names, line[22:27].strip(), place, float(line[54:60])


def residues(path, chain):
    """{number: [its backbone lines]} of the residues with a letter, in file order."""
    found = collections.defaultdict(list)
    for line in lines(path):
        _, atom, _, name, of, number, _, _ = line
        if of == chain and name in LETTERS and atom in ("N", "CA", "C", "O"):
            found[number].append(line)
    return found


# --- awkward ones --------------------------------------------------------------------------------


def test_pdb_and_mmcif_of_one_entry_are_equal(folder):
    for altloc in ("occupancy", "first"):
        one = structure.read(folder / "structures/1A8O.pdb", altloc=altloc)
        other = structure.read(folder / "structures/1A8O.cif", altloc=altloc)
        for left, right in zip(one, other, strict=True):
            assert np.array_equal(left, right)
    assert one.lengths == (70,) and one.sequence[0] == "M" and one.mask.all()  # MSE 151


def test_insertion_codes_in_file_order(folder):
    """Numbered 1X, 2X, 3X, 4X, 2, 3, ...: the official parser would mix them."""
    path = folder / "structures/1dix.pdb"
    by_hand = residues(path, "A")
    found = structure.read(path)
    assert list(by_hand)[:6] == ["1X", "2X", "3X", "4X", "2", "3"]
    assert found.sequence == "".join(LETTERS[atoms[0][3]] for atoms in by_hand.values())
    assert found.places.tolist() == list(range(208)) and found.observed.all()


@pytest.mark.parametrize("name", ["3o5r", "5L33", "3HTN"])
@pytest.mark.parametrize("altloc", ["occupancy", "first"])
def test_conformers_by_an_independent_reader(folder, name, altloc):
    path = folder / f"structures/{name}.pdb"
    by_hand = residues(path, "A")
    found = structure.read(path, "A", altloc)
    chosen = []
    for atoms in by_hand.values():
        share = {letter: occupancy for _, _, letter, *_, occupancy in atoms if letter}
        best = max(share, key=share.get, default="")  # in these files one for all atoms of it
        place = {}
        for _, atom, letter, *_, where, _ in atoms:
            if altloc == "first":
                place.setdefault(atom, where)
            elif letter in ("", best):
                place[atom] = where
        chosen.append([place[atom] for atom in ("N", "CA", "C", "O")])
    assert np.array_equal(found.coords[found.observed], np.array(chosen, dtype=np.float32))
    if name == "3o5r":
        assert sum(atoms[0][2] != "" for atoms in by_hand.values()) > 10
        place = list(by_hand).index("48")  # MET 48: A 0.25, B 0.75
        wanted = [61.644, 21.720, 2.897] if altloc == "occupancy" else [61.685, 22.102, 2.887]
        assert found.coords[found.observed][place, 1] == pytest.approx(wanted)


# --- those of the pairs --------------------------------------------------------------------------


def test_every_item_fits_its_structure(folder):
    """A sequence has a letter for each residue, or for each but the modified ones (PCA, CSO)."""
    items = json.loads((folder / "fireprot_pairs_train.json").read_text())
    kept, without = {}, collections.Counter()
    for item in items:
        file, chain = key = item["pdb_file"], item["chain_id"]
        if key not in kept:
            kept[key] = structure.read(folder / file, chain)
        found, length = kept[key], len(item["preferred_seq"])
        known = np.array([*found.sequence]) != "X"
        rows = found.observed if length == found.observed.sum() else known
        assert length == rows.sum()
        without[file] += length < found.observed.sum()
        native = np.array([*found.sequence])[rows]  # is one of the two
        both = zip(native, item["preferred_seq"], item["unpreferred_seq"], strict=True)
        assert all(n in (p, u) for n, p, u in both)
    assert len(items) == 685
    assert +without == {"ddg_pdbs/1ONC.pdb": 4, "ddg_pdbs/2HPR.pdb": 3}


def test_all_structures_of_the_pairs_are_read(folder, tmp_path):
    files = sorted((folder / "ddg_pdbs").glob("*.pdb"))
    assert len(files) == 30
    for file in files:
        found = structure.read(file, cache=tmp_path)
        for chain, rows in zip(found.chains, np.split(found.mask, np.cumsum(found.lengths)[:-1])):  # noqa: B905
            by_hand = residues(file, chain)
            whole = sum(len({a[1] for a in atoms}) == 4 for atoms in by_hand.values())
            assert whole <= rows.sum() <= whole + 2  # and modified ones
        again = structure.read(file, cache=tmp_path)
        assert all(map(np.array_equal, found, again))
    assert len(list(tmp_path.iterdir())) == 30
