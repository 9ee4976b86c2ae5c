"""Real structures: the arrays of the official parser, the awkward ones, those of the pairs.

Expected values come from ../shared/golden/protein, or from a reader of columns in this file.
"""

import collections
import gzip
import json
import time

import numpy as np
import pytest

from dpo_inv import structure

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
THREE = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
LETTERS = dict(zip([*THREE.split(), "MSE"], "ACDEFGHIKLMNPQRSTVWYM", strict=True))
NAMES = ("5L33", "6MRR", "3HTN", "4YOW")


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


# --- the official parser -------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_arrays_are_those_of_the_official_parser(shared, folder, name):
    golden = np.load(shared / f"golden/protein/struct_{name}.npz", allow_pickle=False)
    found = structure.read(folder / f"structures/{name}.pdb", altloc="first")
    # it keeps chains of DNA, four rows of X each
    kept = np.isin(golden["chain_letters"], found.chains)
    rows = kept[golden["chain_encoding"] - 1]
    assert set("".join(np.array([*str(golden["native_seq"])])[~rows])) <= {"X"}
    assert found.chains == tuple(golden["chain_letters"][kept])
    assert found.lengths == tuple(golden["chain_lengths"][kept])
    assert np.array_equal(found.coords, golden["X"][rows])
    assert np.array_equal(found.mask, golden["mask"][rows])
    letters = np.array([ALPHABET.index(letter) for letter in found.sequence])
    assert np.array_equal(letters, golden["S_native"][rows])
    if kept.all():
        assert found.sequence == str(golden["native_seq"])
        assert np.array_equal(found.residue_idx, golden["residue_idx"])
        assert np.array_equal(found.chain_encoding, golden["chain_encoding"])
    starts = np.cumsum([0, *found.lengths])[:-1]
    for first, length in zip(starts, found.lengths, strict=True):
        # the same distances along a chain
        mine, theirs = found.residue_idx, golden["residue_idx"][rows]
        span = slice(first, first + length)
        assert np.array_equal(mine[span] - mine[first], theirs[span] - theirs[first])


def test_designed_chains_come_first(shared, folder):
    golden = np.load(shared / "golden/protein/struct_3HTN_designA.npz", allow_pickle=False)
    order = [*golden["masked_chains"], *golden["visible_chains"]]
    found = structure.read(folder / "structures/3HTN.pdb", order, altloc="first")
    assert np.array_equal(found.coords, golden["X"])
    assert np.array_equal(found.residue_idx, golden["residue_idx"])
    turned = structure.read(folder / "structures/3HTN.pdb", ["C", "A"])
    assert turned.chains == ("C", "A") and turned.residue_idx[143] == 100 + 143
    assert np.array_equal(
        turned.coords[143:], structure.read(folder / "structures/3HTN.pdb", "A")[0]
    )


@pytest.mark.parametrize("name, atoms", [("5L33", 8), ("6MRR", 0), ("3HTN", 4), ("4YOW", 0)])
def test_highest_occupancy_moves_the_atoms_that_the_golden_data_name(shared, folder, name, atoms):
    one, other = (
        structure.read(folder / f"structures/{name}.pdb", altloc=altloc)
        for altloc in ("first", "occupancy")
    )
    assert (one.coords != other.coords).any(-1).sum() == atoms
    assert one.sequence == other.sequence and np.array_equal(one.mask, other.mask)


def test_the_oracle_of_the_trained_model(shared, folder):
    oracle = np.load(folder / "oracle/oracle_6MRR.npz", allow_pickle=False)
    found = structure.read(folder / "structures/6MRR.pdb")
    assert found.sequence == str(oracle["native_seq"])
    assert np.array_equal(found.coords, oracle["X"][0])
    assert np.array_equal(found.mask, oracle["mask"][0])
    assert np.array_equal(found.residue_idx, oracle["residue_idx"][0])


# --- awkward ones --------------------------------------------------------------------------------


def test_pdb_and_mmcif_of_one_entry_are_equal(folder):
    for altloc in ("occupancy", "first"):
        one = structure.read(folder / "structures/1A8O.pdb", altloc=altloc)
        other = structure.read(folder / "structures/1A8O.cif", altloc=altloc)
        for left, right in zip(one, other, strict=True):
            assert np.array_equal(left, right)
    assert one.lengths == (70,) and one.sequence[0] == "M" and one.mask.all()  # MSE 151


def test_the_first_of_38_models(folder):
    found = structure.read(folder / "structures/1l2y.pdb")
    assert found.sequence == "NLYIQWLKDGGPSSGRPPPS"
    assert found.coords[0, 1] == pytest.approx([-8.608, 3.135, -1.618])


def test_insertion_codes_in_file_order(folder):
    """Numbered 1X, 2X, 3X, 4X, 2, 3, ...: the official parser would mix them."""
    path = folder / "structures/1dix.pdb"
    by_hand = residues(path, "A")
    found = structure.read(path)
    assert list(by_hand)[:6] == ["1X", "2X", "3X", "4X", "2", "3"]
    assert found.sequence == "".join(LETTERS[atoms[0][3]] for atoms in by_hand.values())
    assert found.places.tolist() == list(range(208)) and found.observed.all()


def test_gzip_and_a_chain_that_starts_high(folder):
    path = folder / "structures/1dx5I.pdb.gz"
    found = structure.read(path)
    by_hand = residues(path, "I")
    assert found.chains == ("I",) and found.lengths == (118,)
    assert found.sequence == "".join(LETTERS[atoms[0][3]] for atoms in by_hand.values())


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


def test_reading_is_fast(folder):
    """Four of the six official examples, which should take 0.1 s; a busy machine is allowed 0.3."""
    files = [folder / f"structures/{name}.pdb" for name in NAMES]
    best = 9.0
    for _ in range(5):
        start = time.process_time()
        for file in files:
            structure.read(file)
        best = min(best, time.process_time() - start)
    print(f"{1000 * best:.0f} ms")
    assert best < 0.3
