"""Reading backbones: which residues and atoms count, worked out by hand on a few lines.

A residue that is written at x has N at (x, 0, 0), CA at (x + 1.5, 0, 0), C at (x + 1.5, 1.5, 0)
and O at (x + 2.5, 2, 0).
"""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils import UserError
from dpo_inv import structure

PLACES = {"N": (0, 0, 0), "CA": (1.5, 0, 0), "C": (1.5, 1.5, 0), "O": (2.5, 2, 0)}


def line(atom="CA", name="ALA", chain="A", number=1, x=0.0, **more):
    """One ATOM line; `more`: altloc, icode, record, serial, occupancy, place."""
    get = {"altloc": " ", "icode": " ", "record": "ATOM", "serial": 1, "occupancy": 1.0} | more
    dx, dy, dz = get.get("place") or PLACES[atom]
    padded = atom if len(atom) > 3 else f" {atom:3}"
    return (
        f"{get['record']:6}{get['serial']:>5} {padded}{get['altloc']}{name:>3} {chain}{number:>4}"
        f"{get['icode']}   {x + dx:8.3f}{dy:8.3f}{dz:8.3f}{get['occupancy']:6.2f}  0.00\n"
    )


def residue(name="ALA", number=1, chain="A", x=0.0, atoms=("N", "CA", "C", "O"), **more):
    return "".join(line(atom, name, chain, number, x, **more) for atom in atoms)


def pdb(*residues, chain="A"):
    """Residues (name, number) of one chain, 4 Angstrom apart, and TER."""
    text = "".join(residue(name, n, chain, 4.0 * k) for k, (name, n) in enumerate(residues))
    return text + "TER\n"


THREE = pdb(("GLY", 1), ("ALA", 2), ("TRP", 3))


@pytest.fixture
def read(tmp_path):
    """Write a text to a file and read that."""

    def write_and_read(text, chains=None, name="f.pdb", **options):
        raw = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(raw)
        return structure.read(tmp_path / name, chains, **options)

    return write_and_read


@pytest.fixture
def complaint(read, tmp_path):
    """What is said of a text after the file's name, one line."""

    def say(text, *args, name="f.pdb", **options):
        with pytest.raises(UserError) as caught:
            read(text, *args, name=name, **options)
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / name}:")
        assert len(message.splitlines()) == 1 and message.isprintable()
        return message.removeprefix(f"{tmp_path / name}")

    return say


def xs(found):
    """x of each row's CA."""
    return found.coords[:, 1, 0].tolist()


def test_two_chains_by_hand(read):
    text = pdb(("GLY", 5), ("MET", 6), chain="B") + pdb(("TRP", 1), ("LYS", 3), chain="A")
    found = read(text)
    assert found.chains == ("A", "B") and found.lengths == (3, 2)
    assert found.sequence == "WXKGM"
    assert found.mask.tolist() == [1, 0, 1, 1, 1]
    assert found.observed.tolist() == [True, False, True, True, True]
    assert found.chain_encoding.tolist() == [1, 1, 1, 2, 2]
    assert found.residue_idx.tolist() == [0, 1, 2, 103, 104]
    assert found.places.tolist() == [0, 1, 2, 3, 4]
    assert found.coords[2].tolist() == [[4, 0, 0], [5.5, 0, 0], [5.5, 1.5, 0], [6.5, 2, 0]]
    assert not found.coords[1].any()
    kinds = [getattr(found, name).dtype for name in ("coords", "mask", "residue_idx")]
    assert kinds == [np.float32, np.float32, np.int64]
    assert found.chain_encoding.dtype == np.int64 and found.observed.dtype == bool


def test_chains_come_in_the_order_asked_for(read):
    text = "".join(pdb((name, 1), chain=c) for c, name in zip("ABC", ("GLY", "ALA", "VAL")))  # noqa: B905
    found = read(text, ["C", "A"])
    assert (found.sequence, found.chains, found.lengths) == ("VG", ("C", "A"), (1, 1))
    assert found.residue_idx.tolist() == [0, 101] and found.chain_encoding.tolist() == [1, 2]
    assert read(text, "B").sequence == "A"
    assert read(text, []).chains == ("A", "B", "C")


def test_the_first_model_alone_is_read(read):
    models = "".join(f"MODEL     {n}\n{residue(x=float(n))}ENDMDL\n" for n in (1, 2, 3))
    assert xs(read(models)) == [2.5]
    assert xs(read(residue(x=7.0) + "ENDMDL\n" + "ATOM of a later model, which is not looked at"))


@pytest.mark.parametrize(
    "numbers, letters, places",
    [
        ([1, 2, 3], "AAA", [0, 1, 2]),
        ([-2, -1, 1], "AAXA", [0, 1, 2, 3]),  # there is a number 0
        ([10, 13], "AXXA", [0, 1, 2, 3]),
        ([1, 33], "A" + 31 * "X" + "A", list(range(33))),
        ([1, 34], "AA", [0, 33]),  # 32 are missing: a jump of 33
        ([1, 1001, 1002, 5], "AAAA", [0, 1000, 1001, 1002]),  # a step back is the next one
        ([9, 8, 7], "AAA", [0, 1, 2]),
    ],
)
def test_gaps_in_the_numbers(read, numbers, letters, places):
    found = read(pdb(*(("ALA", n) for n in numbers)))
    assert found.sequence == letters
    assert found.places.tolist() == found.residue_idx.tolist() == places
    assert found.observed.sum() == found.mask.sum() == len(numbers)
    assert [letter == "A" for letter in letters] == found.observed.tolist()


def test_a_jump_moves_the_chains_behind_it_too(read):
    found = read(pdb(("ALA", 1), ("ALA", 101)) + pdb(("ALA", 1), chain="B"))
    assert found.residue_idx.tolist() == [0, 100, 100 + 101]
    assert found.lengths == (2, 1)


STANDARD = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
DYNAMICS = "HIE HID HSP CYX LYN"  # names of molecular dynamics
LATE = residue("GLY", 9999, serial=99999) + residue("ALA", "A000", serial="A0000")
LIGAND = residue("GLU", 9, record="HETATM", x=30.0)  # a free amino acid
MSE = residue("GLY", 1) + residue("MSE", 2, record="HETATM", x=4.0) + residue("TRP", 3, x=8.0)
SEQUENCES = {
    "the twenty amino acids": (
        pdb(*((name, n) for n, name in enumerate(STANDARD.split()))),
        "ACDEFGHIKLMNPQRSTVWY",
    ),
    "molecular dynamics": (pdb(*((name, n) for n, name in enumerate(DYNAMICS.split()))), "HHHCK"),
    "insertion codes before their number": (
        residue("GLY", 1, icode="X") + residue("ALA", 2, icode="X") + residue("TRP", 1),
        "GAW",
    ),
    "hybrid 36": (LATE + residue("TRP", "A002", serial="*****"), "GAXW"),  # 9999, 10000, 10002
    "hybrid 36 in small letters": (residue("GLY", "ZZZZ") + residue("ALA", "a000"), "GA"),
    "a break without a gap in the numbers": (residue("GLY", 1) + residue("ALA", 2, x=50.0), "GA"),
    "selenomethionine": (MSE, "GMW"),
    "selenomethionine and an end": (MSE + "TER\n", "GMW"),
    "a ligand behind the chain": (residue("GLY", 1) + "TER\n" + LIGAND, "G"),
    "a ligand without an end": (residue("GLY", 1) + LIGAND, "G"),
    "a modified ligand": (residue("GLY", 1) + "TER\n" + LIGAND.replace("GLU", "SEP"), "G"),
    "an end in the middle": (residue("GLY", 1) + "TER\n" + residue("ALA", 2), "GA"),
    "two parts": (residue("GLY", 1) + residue("ALA", 1, "B") + residue("TRP", 2), "GWA"),
}


@pytest.mark.parametrize("what", SEQUENCES)
def test_which_residues_come_out(read, what):
    text, sequence = SEQUENCES[what]
    assert read(text).sequence == sequence


def conformers(*occupancies, letters="AB", name="SER"):
    """A residue all of whose atoms have a conformer for each occupancy, at x = 0, 0.1, ..."""
    return "".join(
        line(atom, name, altloc=letter, occupancy=occupancy, x=k / 10)
        for atom in PLACES
        for k, (letter, occupancy) in enumerate(zip(letters, occupancies, strict=False))
    )


@pytest.mark.parametrize(
    "occupancies, letters, x, first",
    [
        ((0.7, 0.3), "AB", 1.5, 1.5),
        ((0.3, 0.7), "AB", 1.6, 1.5),
        ((0.5, 0.5), "AB", 1.5, 1.5),  # of equal ones the first
        ((0.5, 0.5), "BA", 1.5, 1.5),
        ((0.2, 0.5, 0.3), "123", 1.6, 1.5),
        ((0.2, 0.8), " B", 1.6, 1.5),  # the first has no letter
        ((0.8, 0.2), " B", 1.5, 1.5),
        ((0.0, 0.0), "AB", 1.5, 1.5),
    ],
)
def test_the_conformer_of_the_highest_occupancy(read, occupancies, letters, x, first):
    text = conformers(*occupancies, letters=letters)
    assert xs(read(text)) == pytest.approx([x])
    assert xs(read(text, altloc="first")) == pytest.approx([first])
    assert read(text).sequence == "S" and read(text).mask.tolist() == [1]


def test_atoms_of_two_conformers_are_never_mixed(read):
    """CA of A and O of B have the most, yet all atoms are of B: 0.55 on the average."""
    occupancy = {"N": (0.4, 0.6), "CA": (0.7, 0.3), "C": (0.4, 0.6), "O": (0.3, 0.7)}
    text = "".join(
        line(atom, altloc="AB"[k], occupancy=occupancy[atom][k], x=float(k))
        for atom in PLACES
        for k in (0, 1)
    )
    assert read(text).coords[0, :, 0].tolist() == [1, 2.5, 2.5, 3.5]


def test_atoms_without_a_letter_belong_to_each_conformer(read):
    text = line("N") + line("CA", altloc="A", occupancy=0.4)
    text += line("CA", altloc="B", occupancy=0.6, x=0.1) + line("C") + line("O")
    found = read(text)
    assert found.coords[0, :, 0] == pytest.approx([0, 1.6, 1.5, 2.5]) and found.mask.all()
    assert read(text, altloc="first").coords[0, 1, 0] == 1.5


def test_a_conformer_that_lacks_an_atom_does_not_borrow_it(read):
    text = residue("GLY", 1) + residue("SER", 2, altloc="A", occupancy=0.7, atoms=("N", "CA", "C"))
    found = read(text + residue("SER", 2, altloc="B", occupancy=0.3))
    assert found.sequence == "GS" and found.mask.tolist() == [1, 0]
    assert found.coords[1, 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("letters", ["AB", " B"])
@pytest.mark.parametrize("most, letter, x", [(0.6, "S", 1.5), (0.5, "S", 1.5), (0.4, "T", 1.7)])
def test_two_names_at_one_place_are_conformers(read, letters, most, letter, x):
    text = residue("SER", 1, altloc=letters[0], occupancy=most)
    text += residue("THR", 1, altloc=letters[1], occupancy=1 - most, x=0.2)
    text += residue("GLY", 2, x=4.0)
    found, first = read(text), read(text, altloc="first")
    assert (found.sequence, first.sequence) == (letter + "G", "SG")
    assert xs(found) == pytest.approx([x, 5.5]) and xs(first) == [1.5, 5.5]


@pytest.mark.parametrize("record", ["ATOM", "HETATM"])
def test_other_modified_residues_are_x_with_coordinates(read, record):
    for name in ["SEP", "SEC", "PYL", "CSO", "PCA", "UNK", "DAL", "ASX", "Q1Z"]:
        found = read(residue("GLY", 1) + residue(name, 2, record=record, x=4.0) + "TER\n")
        assert found.sequence == "GX" and found.mask.all() and found.observed.all()
        assert xs(found) == [1.5, 5.5]


DROPPED = {
    "water": line("O", "HOH", number=9, record="HETATM"),
    "calcium": line("CA", "CA", number=9, record="HETATM", place=(9, 9, 9)),
    "calcium_as_atom": line("CA", "CA", number=9, place=(9, 9, 9)),
    "zinc": line("ZN", " ZN", number=9, record="HETATM", place=(9, 9, 9)),
    "glycerol": line("C1", "GOL", number=9, record="HETATM", place=(9, 9, 9)),
    "cap": line("C", "ACE", number=0) + line("O", "ACE", number=0),
    "nucleotide": line("P", " DA", number=9, place=(1, 1, 1)) + line("C", " DA", number=9),
    "ligand_without_o": residue("LIG", 9, record="HETATM", atoms=("N", "CA", "C")),
}


@pytest.mark.parametrize("what", DROPPED)
@pytest.mark.parametrize("end", ["", "TER\n"])
def test_what_is_no_amino_acid_is_dropped(read, what, end):
    found = read(residue("GLY", 1) + residue("ALA", 2) + end + DROPPED[what])
    assert found.sequence == "GA" and found.mask.all()


@pytest.mark.parametrize("missing", PLACES)
def test_a_residue_without_one_atom_stays_and_is_masked(read, missing):
    atoms = [atom for atom in PLACES if atom != missing]
    found = read(residue("GLY", 1) + residue("ALA", 2, x=4.0, atoms=atoms) + residue("TRP", 3))
    # the others have their N in the origin: it is there
    assert found.sequence == "GAW" and found.mask.tolist() == [1, 0, 1]
    assert found.observed.all()
    assert found.coords[1, list(PLACES).index(missing)].tolist() == [0, 0, 0]
    assert np.isfinite(found.coords).all() and found.coords[1].any(1).sum() == 3


TAGS = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
TAGS += "label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy "
TAGS += "auth_seq_id auth_asym_id pdbx_PDB_model_num"


def cif(*rows, entities="1 polymer 2 water 3 polymer"):
    """An mmCIF file of rows (name, auth number, auth chain, label chain, entity, model, x, record),
    of which the last two may be left out."""
    text = f"data_test\nloop_\n_entity.id\n_entity.type\n{entities}\n" if entities else "data_t\n"
    text += "loop_\n" + "".join(f"_atom_site.{tag}\n" for tag in TAGS.split())
    for name, number, auth, label, entity, model, *more in rows:
        x, record = (*more, 0.0, "ATOM")[:2] if len(more) < 2 else more
        for atom, (dx, dy, dz) in PLACES.items():
            text += f"{record} 1 {atom[0]} {atom} . {name} {label} {entity} 1 ? "
            text += f"{x + dx} {dy} {dz} 1.0 {number} {auth} {model}\n"
    return text


TWO = (("GLY", 7, "H", "A", 1, 1), ("MSE", 9, "H", "A", 1, 1, 4.0, "HETATM"))
TWO += (("TRP", -3, "L", "B", 3, 1), ("TYR", -2, "L", "B", 3, 1))
TWO += (("HOH", 1, "H", "C", 2, 1, 9.0, "HETATM"), ("GLU", 50, "L", "D", 4, 1, 8.0, "HETATM"))
ENTITIES = "1 polymer 2 water 3 polymer 4 non-polymer"


@pytest.mark.parametrize("name", ["f.cif", "f.mmcif", "f.pdb", "f"])
def test_mmcif_whatever_its_name(read, name):
    found = read(cif(*TWO, entities=ENTITIES), name=name)
    assert found.chains == ("H", "L") and found.sequence == "GXMWY"
    assert found.residue_idx.tolist() == [0, 1, 2, 103, 104] and found.mask.sum() == 4
    assert xs(found)[2] == 5.5


def test_mmcif_authors_name_first_model_and_no_entities(read):
    swapped = cif(("GLY", 1, "A", "B", 1, 1), ("TRP", 1, "B", "A", 3, 1))
    assert read(swapped, ["A"]).sequence == "G" and read(swapped, ["B"]).sequence == "W"
    rows = ("GLY", 1, "A", "A", 1, 1), ("TRP", 1, "A", "A", 1, 2)
    assert read(cif(*rows)).sequence == "G"
    assert read(cif(*TWO, entities="")).sequence == "GXMWY"  # GLU as HETATM is free


@pytest.mark.parametrize(
    "text, says",
    [
        ("data_x\n", ": no _atom_site with atoms; give the mmCIF file of a structure"),
        ("data_x\n_atom_site.id 1\n", ": no _atom_site with atoms"),
        ("data_x\nloop_\n_a.b\n_a.c\n1 2 3\n", ":2: not a PDB or mmCIF file: Wrong number"),
        ("data_x\n\n_a.b 'abc\n", ":3: not a PDB or mmCIF file: "),
        (cif(*TWO)[:-30], ":6: not a PDB or mmCIF file: Wrong number"),
        (cif(("GLY", "?", "A", "A", 1, 1)).replace("1 1 ? ", "1 . ? "), ": residue ? of chain 'A'"),
        (cif(TWO[0], TWO[0]), ": residue 7 of chain 'H' is there twice"),
        (cif(("HOH", 1, "A", "A", 2, 1)).replace(" CA ", " X "), ": no protein chain"),
    ],
)
def test_mmcif_that_is_no_structure(complaint, text, says):
    assert complaint(text, name="f.cif").startswith(says)


def spoilt(number, start, text):
    """THREE with other columns in one of its lines, counted from 1."""
    lines = THREE.splitlines()
    old = lines[number - 1]
    lines[number - 1] = old[: start - 1] + text + old[start - 1 + len(text) :]
    return "\n".join(lines) + "\n"


SPOILT = {
    13: ["\tCA "],
    22: ["é"],
    23: ["    ", "****", "1 2 ", "A0-0"],
    31: ["  xx.104", "********", "  1e3   ", "    -   "],
    39: ["     nan", "     inf", "1_000.00"],
    47: ["        ", "   1.2.3"],
}


@pytest.mark.parametrize("start", SPOILT)
def test_a_spoilt_atom_is_named_by_its_line(complaint, start):
    for text in SPOILT[start]:
        line = complaint("REMARK\n" + spoilt(6, start, text))
        assert line.startswith(":7: columns 23-54 of this atom hold ")
        assert line.endswith("; correct or complete the line")


@pytest.mark.parametrize("columns", [4, 20, 30, 31, 46, 53])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\nTER\n", ""])
def test_a_line_that_was_cut(complaint, columns, end):
    assert complaint(THREE[: 4 * 67] + THREE[:columns].rstrip() + end).startswith(":5: columns")


@pytest.mark.parametrize("shift, says", [(0.8, "2.30"), (-1.2, "0.30"), (98.5, "100.00")])
def test_n_and_ca_that_are_no_bond(complaint, shift, says):
    text = "REMARK\n" + spoilt(6, 31, f"{5.5 + shift:8.3f}")
    assert complaint(text) == (
        f":7: N and CA of ALA 2 are {says} Angstrom apart, 1.46 is usual; correct the coordinates, "
        "or take the residue out"
    )
    text = cif(*TWO, entities=ENTITIES).replace("1.5 0 0 1.0 -3", "1.5 9 0 1.0 -3")  # no lines
    assert complaint(text).startswith(": N and CA of TRP -3 are 9.12 Angstrom apart")


@pytest.mark.parametrize(
    "text, says",
    [
        (b"", ": no atoms; give a PDB or mmCIF file of a protein"),
        (DROPPED["nucleotide"], ": no protein chain; give a file with one"),
        (line() + line(number=2), ": no residue has N, CA, C and O; a backbone needs all four"),
        (THREE + "END\n" + residue("ALA", 4), ": 12 of 16 atoms were read; put END behind the"),
        (residue() + residue(), ": residue 1 of chain 'A' is there twice"),
        (residue() + residue("GLY"), ": residue 1 of chain 'A' is there twice"),
        (THREE + residue("SER", 1), ": residue 1 of chain 'A' is there twice"),
        (pdb(("GLY", 1), chain=" ") + pdb(("GLY", 1), chain=" "), ": residue 1 of chain '' is"),
        ("MODEL 1\n" + THREE + "MODEL 2\n", ": not a PDB or mmCIF file: MODEL without ENDMDL?"),
    ],
    ids=["empty", "dna", "ca", "end", "twice", "two_names", "apart", "two_blank_chains", "model"],
)
def test_a_file_that_is_no_backbone(complaint, text, says):
    assert says in complaint(text)


def test_a_chain_that_is_absent_lists_those_that_are_there(complaint):
    text = pdb(("GLY", 1), chain="b") + THREE + line("P", " DA", "D", 1, place=(9, 9, 9))
    for name in "Q", "a", "D", "AB", "A" * 99, "é":
        said = complaint(text, ["A", name])
        assert said == f": no protein chain {name!r:.40}; it has A, b"
    assert complaint(residue(chain=" "), ["A"]) == ": no protein chain 'A'; it has ' '"
    assert complaint(text, ["A", "b", "A"]) == ": chain 'A' is asked for twice; name it once"


def same(one, other):
    for name, left, right in zip(structure.Structure._fields, one, other, strict=True):
        assert type(left) is type(right), name
        assert np.array_equal(left, right), name
        assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
    return True


def test_windows_line_ends_gzip_and_a_bom_change_nothing(read):
    plain, windows = read(THREE), THREE.replace("\n", "\r\n").encode()
    assert same(plain, read(windows))
    assert same(plain, read(b"\xef\xbb\xbf" + windows))
    assert same(plain, read(gzip.compress(windows), name="f.ent.gz"))
    assert same(plain, read(gzip.compress(windows), name="f.pdb"))
    assert same(plain, read(THREE, name="f.cif"))


def test_files_that_cannot_be_read(complaint, tmp_path):
    whole = gzip.compress(THREE.encode() * 20, mtime=0)
    assert complaint(whole[: len(whole) // 2])
    assert complaint(bytes([*range(256)]) * 10).startswith(":2: byte 128 is not UTF-8")
    os.mkfifo(tmp_path / "pipe")  # it is not waited for
    for path in tmp_path / "absent.pdb", tmp_path, tmp_path / "pipe":
        with pytest.raises(UserError, match="no such file|not a regular file"):
            structure.read(path)


def test_the_cache_gives_what_was_read(read, tmp_path, monkeypatch):
    cache = tmp_path / "deep/cache"
    text = pdb(("GLY", 1), ("ALA", 3)) + pdb(("TRP", 1), chain="B") + residue(chain=" ")
    first = read(text, cache=cache)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(structure, "_structure", None)  # whoever calls it now fails
    assert same(first, read(text, cache=cache))
    assert same(first, read(text, cache=str(cache), name="another.pdb"))
    assert same(first, read(gzip.compress(text.encode()), cache=cache))


def test_another_content_option_or_version_is_another_entry(read, tmp_path, monkeypatch):
    text = conformers(0.3, 0.7) + pdb(("GLY", 1), chain="B")
    for options in ({}, {"altloc": "first"}, {"chains": "A"}, {"chains": ["B", "A"]}):
        assert same(read(text, **options), read(text, cache=tmp_path / "c", **options))
        assert same(read(text, **options), read(text, cache=tmp_path / "c", **options))
    read(text + "\n", cache=tmp_path / "c")
    monkeypatch.setattr(structure, "VERSION", "of tomorrow")
    read(text, cache=tmp_path / "c")
    assert len(list((tmp_path / "c").iterdir())) == 6


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_damaged_entry_is_written_anew_and_nothing_in_it_is_executed(read, tmp_path):
    cache = tmp_path / "cache"
    wanted = read(THREE, cache=cache)
    [file] = cache.iterdir()
    good = file.read_bytes()
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "other.npz", coords=np.ones(3))
    canary = np.array([Canary(tmp_path / "woken")], dtype=object)
    np.savez(tmp_path / "evil.npz", **dict.fromkeys(structure.Structure._fields, canary))
    others = [(tmp_path / name).read_bytes() for name in ("one.npy", "other.npz", "evil.npz")]
    flipped = [bytearray(good) for _ in range(0, len(good), 7)]
    for raw, at in zip(flipped, range(0, len(good), 7), strict=True):
        raw[at] ^= 0xFF
    for bad in [b"", b"PK", good[:-9], good[: len(good) // 2], *others, *map(bytes, flipped)]:
        file.write_bytes(bad)
        assert same(wanted, read(THREE, cache=cache))
    file.write_bytes(b"")
    read(THREE, cache=cache)
    assert same(wanted, structure._cached(file))
    assert list(cache.iterdir()) == [file]  # no litter
    assert not (tmp_path / "woken").exists()


def test_a_cache_that_cannot_be_written_is_done_without(read, tmp_path):
    (tmp_path / "precious").write_text("precious")
    assert read(THREE, cache=tmp_path / "precious").sequence == "GAW"
    folder = tmp_path / "folder"
    read(THREE, cache=folder)
    [entry] = folder.iterdir()
    entry.unlink()
    entry.symlink_to(tmp_path / "precious")  # nothing is written through a link
    read(THREE, cache=folder)
    assert (tmp_path / "precious").read_text() == "precious" and not entry.is_symlink()


def fuzz(count):
    """The same examples in every run: a test that fails today has failed yesterday."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file"


def taken(file: Path, raw):
    """Read it with both choices of conformers: whole, or refused in one short line."""
    file.write_bytes(raw)
    for altloc in ("occupancy", "first"):
        try:
            found = structure.read(file, altloc=altloc)
        except UserError as error:
            said = str(error).replace(str(file), "FILE")
            assert said.startswith("FILE:") and said.splitlines() == [said] and len(said) < 300
            assert said.isprintable()
        else:
            rows = {len(found.sequence), len(found.mask), len(found.coords), sum(found.lengths)}
            assert len(rows) == 1 and np.isfinite(found.coords).all()
            assert (np.diff(found.places) > 0).all()


SAMPLE = (
    THREE + conformers(0.3, 0.7).replace("  1 ", "  5 ") + pdb(("SER", 1), chain="B")
).encode()
pieces = st.sampled_from(
    [b"", b"\n", b"\0", b"****", b"nan", b"TER\n", b"END\n", b"ENDMDL\n", b"MODEL\n", b"\xc3\xa9"]
    + [b"?", b"'", b";", b"loop_\n", b"data_\n", b"-", b"\r", b"\t", b"\xe2\x80\xa8", b"A", b"9"]
)


@st.composite
def edits(draw, samples):
    """A sample with a few places overwritten, cut out, or doubled."""
    raw = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        piece = draw(pieces | st.binary(max_size=3))
        behind = draw(st.integers(0, 90)) if draw(st.booleans()) else len(piece)
        double = raw[at : at + 68] if draw(st.integers(0, 3)) == 0 else b""
        raw = raw[:at] + double + piece + raw[at + behind :]
    return raw


@fuzz(400)
@given(raw=edits([SAMPLE, cif(*TWO, entities=ENTITIES).encode()]))
def test_any_edit_of_pdb_lines_or_of_mmcif_is_taken_or_refused(file, raw):
    taken(file, raw)
