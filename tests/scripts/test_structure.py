"""Reading backbones: which residues and atoms count, worked out by hand on a few lines.

A residue that is written at x has N at (x, 0, 0), CA at (x + 1.5, 0, 0), C at (x + 1.5, 1.5, 0)
and O at (x + 2.5, 2, 0).
"""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils import UserError
from dpo_inv import structure

ATOMS = {"N": (0, 0, 0), "CA": (1.5, 0, 0), "C": (1.5, 1.5, 0), "O": (2.5, 2, 0)}


def line(atom="CA", name="ALA", chain="A", number=1, x=0.0, **more):
    """One ATOM line; `more`: altloc, icode, record, serial."""
    get = {"altloc": " ", "icode": " ", "record": "ATOM", "serial": 1} | more
    dx, dy, dz = ATOMS.get(atom, (9, 9, 9))
    start = f"{get['record']:6}{get['serial']:>5}  {atom:3}{get['altloc']}{name:>3} {chain}"
    place = f"{x + dx:8.3f}{dy:8.3f}{dz:8.3f}"
    return f"{start}{number:>4}{get['icode']}   {place}  1.00  0.00\n"


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

    def write_and_read(text, chains=(), name="f.pdb", **options):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return structure.read(tmp_path / name, chains, **options)

    return write_and_read


def refused(read, *args, **options):
    """The one line that is said of a text, after the file's name."""
    with pytest.raises(UserError) as caught:
        read(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and message.isprintable()
    return message.partition(": ")[2]


def xs(backbone):
    """x of each row's CA."""
    return backbone.coords[:, 1, 0].tolist()


def test_two_chains_by_hand(read):
    text = pdb(("GLY", 5), ("MET", 6), chain="B") + pdb(("TRP", 1), ("LYS", 3), chain="A")
    backbone = read(text, ["A", "B"])
    assert backbone.chains == ("A", "B")
    assert backbone.sequence == "WXKGM"
    assert backbone.mask.tolist() == [1, 0, 1, 1, 1]
    assert backbone.observed.tolist() == [True, False, True, True, True]
    assert backbone.chain_encoding.tolist() == [1, 1, 1, 2, 2]
    assert backbone.residue_idx.tolist() == [0, 1, 2, 103, 104]
    assert backbone.numbering.tolist() == [0, 1, 2, 3, 4]
    assert backbone.coords[2].tolist() == [[4, 0, 0], [5.5, 0, 0], [5.5, 1.5, 0], [6.5, 2, 0]]
    assert not backbone.coords[1].any()
    kinds = [getattr(backbone, name).dtype for name in structure.Structure._fields[:4]]
    assert kinds == [np.float32, np.float32, np.int64, np.int64]
    swapped = read(text, ["B", "A"])
    assert (swapped.sequence, swapped.chains) == ("GMWXK", ("B", "A"))
    assert swapped.residue_idx.tolist() == [0, 1, 102, 103, 104]


def test_the_first_model_alone_is_read(read):
    models = "".join(f"MODEL     {n}\n{residue(x=float(n))}ENDMDL\n" for n in (1, 2, 3))
    assert xs(read(models)) == [2.5]


GAPS = [
    ([-2, -1, 1], "AAXA", [0, 1, 2, 3]),  # there is a number 0
    ([10, 13], "AXXA", [0, 1, 2, 3]),
    ([1, 33], "A" + 31 * "X" + "A", list(range(33))),
    ([1, 34], "AA", [0, 33]),  # 32 are missing: a jump of 33
    ([1, 1001, 1002, 5], "AAAA", [0, 1000, 1001, 1002]),  # a step back is the next one
]


def test_gaps_in_the_numbers(read):
    for numbers, letters, numbering in GAPS:
        backbone = read(pdb(*(("ALA", n) for n in numbers)))
        assert backbone.sequence == letters
        assert backbone.numbering.tolist() == backbone.residue_idx.tolist() == numbering
        assert [letter == "A" for letter in letters] == backbone.observed.tolist()
    moved = read(pdb(("ALA", 1), ("ALA", 101)) + pdb(("ALA", 1), chain="B"), "AB")
    assert moved.residue_idx.tolist() == [0, 100, 100 + 101]  # the jump moves the next chain, too


STANDARD = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
DYNAMICS = "HIE HID HSP CYX LYN"  # names of molecular dynamics
LATE = residue("GLY", 9999, serial=99999) + residue("ALA", "A000", serial="A0000")
LIGAND = residue("GLU", 9, record="HETATM", x=30.0)  # a free amino acid
MSE = residue("GLY", 1) + residue("MSE", 2, record="HETATM", x=4.0) + residue("TRP", 3, x=8.0)
TWO = residue("GLY", 1) + residue("ALA", 2)
SEQUENCES = [
    (pdb(*((name, n) for n, name in enumerate(STANDARD.split()))), "ACDEFGHIKLMNPQRSTVWY"),
    (pdb(*((name, n) for n, name in enumerate(DYNAMICS.split()))), "HHHCK"),
    # insertion codes before their number
    (residue("GLY", 1, icode="X") + residue("ALA", 2, icode="X") + residue("TRP", 1), "GAW"),
    (LATE + residue("TRP", "A002", serial="*****"), "GAXW"),  # hybrid 36: 9999, 10000, 10002
    (residue("GLY", 1) + residue("ALA", 2, x=50.0), "GA"),  # a break without a gap
    (MSE, "GMW"),
    (residue("GLY", 1) + "TER\n" + LIGAND, "G"),
    (residue("GLY", 1) + LIGAND, "G"),
    (residue("GLY", 1) + "TER\n" + LIGAND.replace("GLU", "SEP"), "G"),
    (residue("GLY", 1) + "TER\n" + residue("ALA", 2), "GA"),
    (residue("GLY", 1) + residue("ALA", 1, "B") + residue("TRP", 2), "GW"),  # A in two parts
    # water, calcium, zinc, glycerol, a cap, a nucleotide
    (TWO + line("O", "HOH", number=9, record="HETATM"), "GA"),
    (TWO + line("CA", "CA", number=9, record="HETATM"), "GA"),
    (TWO + line("CA", "CA", number=9), "GA"),
    (TWO + line("ZN", " ZN", number=9, record="HETATM"), "GA"),
    (TWO + line("C1", "GOL", number=9, record="HETATM"), "GA"),
    (TWO + line("C", "ACE", number=0) + line("O", "ACE", number=0), "GA"),
    (TWO + line("P", " DA", number=9) + line("C", " DA", number=9), "GA"),
]


def test_which_residues_come_out(read):
    for text, sequence in SEQUENCES:
        assert read(text).sequence == sequence, text
        if text.startswith(TWO):
            assert read(TWO + "TER\n" + text.removeprefix(TWO)).sequence == "GA", text
    modified = "SEP CSO PCA DAL Q1Z"
    for record, names in (("HETATM", modified), ("ATOM", f"{modified} SEC PYL UNK ASX")):
        for name in names.split():
            backbone = read(residue("GLY", 1) + residue(name, 2, record=record, x=4.0) + "TER\n")
            assert backbone.sequence == "GX" and backbone.mask.all() and xs(backbone) == [1.5, 5.5]


def het(name, number, x=None):
    return residue(name, number, record="HETATM", x=4.0 * number - 4 if x is None else x)


PROTEIN = pdb(("GLY", 1), ("ALA", 2)).removesuffix("TER\n")
READ_WHOLE = [  # a file, its letters, and what the note says of it
    *(
        (
            PROTEIN + het(name, 3) + residue("TRP", 4, x=12.0),
            f"GA{letter}W",
            f"{name} A3 read as {letter}",
        )
        for name, letter in (("SEC", "X"), ("UNK", "X"), ("GLY", "G"), ("PYL", "X"), ("CSO", "X"))
    ),
    (PROTEIN + het("MSE", 3) + het("SEC", 4) + "TER\n", "GAMX", "SEC A4 read as X"),
    (
        PROTEIN + het("SEC", 3),
        "GAX",
        "SEC A3 read as X",
    ),  # without a TER, at the distance of a neighbor
    (PROTEIN + "TER\n" + het("SEC", 3), "GA", "SEC A3 skipped"),
    (PROTEIN + LIGAND, "GA", "GLU A9 skipped"),
    # two molecules in one chain, with and without a TER, and with a modified residue in the second
    (PROTEIN + "TER\n" + residue("TRP", 31, x=40.0) + "TER\n", "GAW", ""),
    (
        PROTEIN + residue("TRP", 31, x=40.0) + het("SEP", 32, 44.0) + "TER\n",
        "GAWX",
        "SEP A32 read as X",
    ),
    (
        PROTEIN + "TER\n" + het("SEP", 31, 40.0) + residue("TRP", 32, x=44.0),
        "GAXW",
        "SEP A31 read as X",
    ),
    # protein and DNA in one chain, caps, other names of histidine, and a step back
    (residue(" DA", 1, atoms=("P", "C")) + residue("GLY", 2), "G", "DA A1 skipped"),
    (
        line("C", "ACE", number=0) + PROTEIN + line("N", "NH2", number=3),
        "GA",
        "ACE A0 skipped, NH2 A3",
    ),
    (PROTEIN + residue("HID", 3), "GAH", "HID A3 read as H"),
    (residue("TRP", 31, x=40.0) + PROTEIN, "WGA", "chain A in file order, not by number"),
]


def test_every_amino_acid_of_the_protein_is_read(read):
    for text, letters, note in READ_WHOLE:
        backbone = read(text)
        assert "".join(np.array([*backbone.sequence])[backbone.observed]) == letters, text
        assert backbone.mask.sum() == backbone.observed.sum() == len(letters)
        assert note in backbone.note and bool(note) == bool(backbone.note), text


def test_what_looks_like_a_second_residue_but_is_none(read):
    """Conformers in blocks, one behind the other, and two side-chain atoms of one name."""
    serines = residue("SER", 2, x=4.0, altloc="B") + residue("SER", 3, x=8.0, altloc="B")
    first = residue("ALA", 2, x=4.0, altloc="A") + residue("ALA", 3, x=8.0, altloc="A")
    blocks = residue("GLY", 1) + first + serines + residue("TRP", 4, x=12.0) + "TER\n"
    assert read(blocks).sequence == "GAAW"
    doubled = residue("GLY", 1) + residue("ALA", 2, x=4.0) + 2 * line("HB", "ALA", number=2)
    assert read(doubled + "TER\n").sequence == "GA"


def test_a_protein_ends_with_mse_or_its_last_close_residue(read):
    """Without a TER at its end, behind a gap, and if all records are HETATM."""
    text = residue("GLY", 1) + residue("ALA", 2, x=4.0)
    assert read(text + residue("MSE", 9, x=40.0, record="HETATM")).observed.sum() == 3
    assert read(THREE.replace("ATOM  ", "HETATM").replace("TER\n", "")).sequence == "GAW"


def test_a_number_that_occurs_twice_is_an_error(read):
    """gemmi merges both residues if their names are equal."""
    for again in (PROTEIN, PROTEIN.replace("ALA", "SER"), "TER\n" + PROTEIN):
        said = refused(read, PROTEIN + residue("TRP", 3, x=9.0) + again)
        assert said.startswith("residue 1 occurs twice in one chain; use different chain names"), (
            said
        )


def test_the_first_conformer_of_each_atom_is_taken(read):
    """As in the official parser; a second name of one number is a conformer, too."""
    for letters in ("AB", " B", "21"):
        text = residue("SER", 1, altloc=letters[0]) + residue("THR", 1, altloc=letters[1], x=0.2)
        backbone = read(text + residue("GLY", 2, x=4.0))
        assert backbone.sequence == "SG" and xs(backbone) == [1.5, 5.5]
    both = "".join(line(atom, altloc=k, x=float(k == "B")) for atom in ATOMS for k in "AB")
    assert read(both).coords[0, :, 0].tolist() == [0, 1.5, 1.5, 2.5]


def test_labels_are_the_files_own_numbers(read):
    text = residue("GLY", 5) + residue("ALA", 5, x=4.0, icode="A") + residue("TRP", 7, x=12.0)
    assert read(text).labels == ("5", "5A", "", "7")


def test_a_residue_without_one_atom_stays_and_is_masked(read):
    for row, missing in enumerate(ATOMS):
        atoms = [atom for atom in ATOMS if atom != missing]
        text = residue("GLY", 1) + residue("ALA", 2, x=4.0, atoms=atoms) + residue("TRP", 3)
        backbone = read(text)
        assert backbone.sequence == "GAW" and backbone.mask.tolist() == [1, 0, 1]
        assert backbone.observed.all() and np.isfinite(backbone.coords).all()
        assert backbone.coords[1, row].tolist() == [0, 0, 0]


TAGS = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
TAGS += "label_entity_id label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy "
TAGS += "auth_seq_id auth_asym_id pdbx_PDB_model_num"
ENTITIES = "1 polymer 2 water 3 polymer 4 non-polymer"


def cif(*rows):
    """An mmCIF file of rows (name, auth number, auth chain, label chain, entity, model, x)."""
    text = f"data_test\nloop_\n_entity.id\n_entity.type\n{ENTITIES}\nloop_\n"
    text += "".join(f"_atom_site.{tag}\n" for tag in TAGS.split())
    for name, number, auth, label, entity, model, x in rows:
        for atom, (dx, dy, dz) in ATOMS.items():
            text += f"{'HETATM' if entity in (2, 4) or name == 'MSE' else 'ATOM'} 1 {atom[0]} "
            text += f"{atom} . {name} {label} {entity} 1 ? {x + dx} {dy} {dz} 1.0 {number} "
            text += f"{auth} {model}\n"
    return text


ROWS = (("GLY", 7, "H", "A", 1, 1, 0), ("MSE", 9, "H", "A", 1, 1, 4))
ROWS += (("TRP", -3, "L", "B", 3, 1, 0), ("TYR", -2, "L", "B", 3, 1, 0))
ROWS += (("HOH", 1, "H", "C", 2, 1, 9), ("GLU", 50, "L", "D", 4, 1, 8))


def test_mmcif_whatever_its_name(read):
    for name in ("f.cif", "f.pdb", "f"):
        backbone = read(cif(*ROWS), "HL", name)
        assert backbone.chains == ("H", "L") and backbone.sequence == "GXMWY"
        assert backbone.residue_idx.tolist() == [0, 1, 2, 103, 104] and backbone.mask.sum() == 4
        assert xs(backbone)[2] == 5.5
    swapped = cif(("GLY", 1, "A", "B", 1, 1, 0), ("TRP", 1, "B", "A", 3, 1, 0))
    assert read(swapped, ["A"]).sequence == "G"  # the author's name
    assert read(cif(("GLY", 1, "A", "A", 1, 1, 0), ("TRP", 1, "A", "A", 1, 2, 0))).sequence == "G"


NO_STRUCTURE = "not a PDB or mmCIF file: "
BAD = [
    (b"", NO_STRUCTURE),
    (b"data_x\n", NO_STRUCTURE),
    (cif(*ROWS)[:-30], NO_STRUCTURE),
    (THREE[: 4 * 67] + THREE[:40], NO_STRUCTURE),  # a line that was cut
    ("MODEL 1\n" + THREE + "MODEL 2\n", NO_STRUCTURE),
    (line("P", " DA") + line("C", " DA"), "no protein chain; use a file with one"),
    (THREE.replace(THREE.splitlines()[5][30:38], "********"), "backbone atoms of ALA "),
    (line() + line(number=2), "no residue has N, CA, C and O; use a file with all four atoms"),
]


def test_a_file_that_is_no_backbone(read):
    for text, says in BAD:
        said = refused(read, text)
        assert said.startswith(says), (text, said)
    text = pdb(("GLY", 1), chain="b") + THREE
    for name in "Q", "a", "D", "A" * 99:
        message = refused(read, text, ["A", name])
        assert message.startswith(f"no protein chain {name!r:.40}, ")
        assert message.endswith("its chains are ['b', 'A']")
    assert "no protein chain 'A', or it is named twice" in refused(read, text, ["A", "b", "A"])


def test_windows_line_ends_gzip_and_a_bom_change_nothing(read):
    plain = read(THREE)
    windows = THREE.replace("\n", "\r\n").encode()
    for raw in (windows, b"\xef\xbb\xbf" + windows, gzip.compress(windows)):
        for left, right in zip(plain, read(raw, name="f.ent")._replace(name="f.pdb"), strict=True):
            assert np.array_equal(left, right)


SAMPLES = [THREE.encode(), cif(*ROWS).encode()]
PIECES = [b"", b"\n", b"\0", b"****", b"nan", b"TER\n", b"END\n", b"ENDMDL\n", b"MODEL\n", b"?"]
PIECES += [b"'", b";", b"loop_\n", b"data_\n", b"-", b"\r", b"\t", b"\xe2\x80\xa8", b"A", b"9"]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_edit_of_pdb_lines_or_of_mmcif_is_taken_or_refused(data, tmp_path_factory):
    raw = data.draw(st.sampled_from(SAMPLES))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        piece = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        raw = raw[:at] + piece + raw[at + data.draw(st.integers(0, 90)) :]
    file = tmp_path_factory.getbasetemp() / "edited"
    file.write_bytes(raw)
    try:
        backbone = structure.read(file)
    except UserError as error:
        said = str(error).replace(str(file), "FILE")
        assert said.startswith("FILE:") and said.splitlines() == [said] and len(said) < 300
        assert said.isprintable()
    else:
        assert len(backbone.sequence) == len(backbone.coords) == len(backbone.in_design)
        assert (np.diff(backbone.numbering) > 0).all()
