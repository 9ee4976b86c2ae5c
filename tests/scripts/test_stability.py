"""Measured stabilities: reading mutations, the losses of ddG, and comparisons that cannot flatter.

Expected values are worked out by hand, by brute force, or read with gemmi alone.
"""

import csv
import functools
import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import gemmi
import numpy as np
import pytest
import torch

import runs
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils import run as run_
from ddp_utils.distributed import World
from ddp_utils.sampler import Plan
from dpo_inv import batches, evaluate, losses, mpnn, pairs, run_dpo_ddp
from dpo_inv.config import Config, PairSettings, read_settings
from ranks import ranks, run_ranks

BUNDLE = ROOT / "data/input/structures/bundle_00.pdb"
MODEL = str(ROOT / "data/demo/protein_model.pt")
NATIVE = "".join(
    gemmi.find_tabulated_residue(residue.name).one_letter_code
    for residue in gemmi.read_structure(str(BUNDLE))[0][0]
)


def other(letter):
    return "A" if letter != "A" else "G"


def mutation(place):
    """Of the place from 1 in bundle_00, whose file is numbered so, too."""
    return f"{NATIVE[place - 1]}{place}{other(NATIVE[place - 1])}"


COLUMNS = ("pdb", "chain", "mutation", "ddG")


def write(path, rows, names=COLUMNS):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return str(path)


def read(path, **settings):
    return pairs.read(str(path), {}, PairSettings(**settings))


def text(letters):
    return "".join(mpnn.ALPHABET[letter] for letter in letters)


# --- data ----------------------------------------------------------------------------------------


def test_a_table_of_mutations_becomes_pairs(tmp_path):
    rows = [[BUNDLE, "A", mutation(3), 1.5], [BUNDLE, "A", f"{mutation(3)}:{mutation(9)}", -0.5]]
    path = write(tmp_path / "a.csv", [*rows, [BUNDLE, "A", mutation(4), 0]])
    one, two = NATIVE[:2] + other(NATIVE[2]) + NATIVE[3:], None
    two = one[:8] + other(NATIVE[8]) + one[9:]
    found, report = read(path)
    texts = [(text(x.preferred), text(x.unpreferred)) for x in found]
    assert texts == [(NATIVE, one), (two, NATIVE)]
    assert [(x.margin, x.sign) for x in found] == [(1.5, -1), (0.5, 1)]
    assert report["dropped"] == {"a ddG of 0": 1}
    swapped, _ = read(path, stable_ddg="positive")
    assert [(text(x.preferred), x.margin) for x in swapped] == [(one, 1.5), (NATIVE, 0.5)]
    keys = ("pdb_file", "chain_id", "mutation", "ddg")
    as_json = [dict(zip(keys, map(str, row), strict=True)) for row in rows]
    (tmp_path / "a.json").write_text(json.dumps(as_json))
    assert [text(x.preferred) for x in read(tmp_path / "a.json")[0]] == [NATIVE, two]


def test_a_mutant_of_which_a_residue_cannot_be_scored_is_dropped(tmp_path):
    """Its ddG is that of both mutations; the log-odds would be those of one."""
    lines = BUNDLE.read_text().splitlines(True)
    gone = [line for line in lines if line[12:16].strip() == "O"][8]  # of residue 9
    (tmp_path / "b.pdb").write_text("".join(line for line in lines if line != gone))
    both = f"{mutation(3)}:{mutation(9)}"
    rows = [["b.pdb", "A", name, 1.5] for name in (mutation(3), both, mutation(9))]
    found, report = read(write(tmp_path / "a.csv", rows))
    assert [pair.mutation for pair in found] == [mutation(3)]
    assert [*report["dropped"].values()] == [1, 1]


def test_a_word_that_is_no_substitution_names_no_chain(tmp_path):
    rows = [[BUNDLE, name, 1.0] for name in (mutation(3), "WT", "A4del", "K2*")]
    _, report = read(write(tmp_path / "a.csv", rows, ("pdb", "mutation", "ddG")))
    assert report["dropped"] == {"not a substitution": 3}
    rows = [[BUNDLE, "Lys2Ala", 1.0]]  # ys2A are letter, chain, number and letter
    with pytest.raises(UserError, match="mutation: Lys2Ala is not a mutation"):
        read(write(tmp_path / "b.csv", rows, ("pdb", "mutation", "ddG")))


def table_of(path, *rows):
    """Write dictionaries as a CSV file; a row lacks the fields that only others have."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return write(path, [[row.get(name, "") for name in names] for row in rows], names)


# three formats of the field, as their authors publish them: the columns of a mutant, and one of the
# rows that are not used, with the reason; `stable` is the sign of a stabilizing ddG
FORMATS = {
    "ProteinDPO": (
        lambda name, place, letter, ddg: {
            "": place,
            "WT_name": f"{name}.pdb",
            "ddG": ddg,
            "wild_type": NATIVE[place - 1],
            "mutation": letter,
            "pdb_position": place,
            "aa_seq": NATIVE[: place - 1] + letter + NATIVE[place:],
            "mut_type": f"{NATIVE[place - 1]}{place}{letter}",
        },
        {"ddG": ""},
        "without a ddG",
        "a ddG above 0 destabilizes",
        -1,
    ),
    "ProteinDPO, as in its paper": (
        lambda name, place, letter, ddg: {
            "pdb_file": f"{name}.pdb",
            "WT_name": "another_name",
            "ddg": ddg,
            "mut_type": f"{NATIVE[place - 1]}{place}{letter}",
        },
        {"ddg": "0.0"},
        "a ddG of 0",
        "a ddG above 0 destabilizes",
        -1,
    ),
    "mega-scale": (
        lambda name, place, letter, ddg: {
            "name": f"{name}|run2.pdb_{NATIVE[place - 1]}{place}{letter}",
            "aa_seq": NATIVE[: place - 1] + letter + NATIVE[place:],
            "mut_type": f"{NATIVE[place - 1]}{place}{letter}",
            "WT_name": f"{name}|run2.pdb",  # the file has a colon
            "dG_ML": 3.1,
            "ddG_ML": ddg,
        },
        {"mut_type": "delK3", "ddG_ML": "0.4"},
        "not a substitution",
        "a ddG_ML above 0 stabilizes",
        1,
    ),
    "FireProtDB": (
        lambda name, place, letter, ddg: {
            "experiment_id": "LL000123",
            "pdb_id": f"{name}|1ABC",
            "chain": "A",
            "position": place,
            "wild_type": NATIVE[place - 1],
            "mutation": letter,
            "ddG": ddg,
            "dTm": -3.0,
            "pH": 7,
        },
        {"ddG": ""},
        "without a ddG",
        "a ddG above 0 destabilizes",
        -1,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flag", ["negative", "positive"])
def test_data_of_the_field_are_read_with_their_sign(tmp_path, name, flag):
    """A destabilizing mutant at 3 and a stabilizing one at 9; --stable_ddg is for other files."""
    row, unused, reason, sign, stable = FORMATS[name]
    for file_name in ("1xyz.pdb", "1xyz:run2.pdb"):
        shutil.copy(BUNDLE, tmp_path / file_name)
    rows = [row("1xyz", 3, "W", -stable * 1.5), row("1xyz", 9, "P", stable * 0.5)]
    rows.append(row("1xyz", 12, "G", 1) | unused)
    file = table_of(tmp_path / "data.csv", *rows)
    if flag == "positive" and stable == -1:
        wanted = [("W", 3, 1), ("P", 9, -1)]
    else:
        wanted = [("W", 3, -1), ("P", 9, 1)]
    (one, two), report = read(file, stable_ddg=flag)
    for pair, (letter, place, sign_of_mutant) in zip((one, two), wanted, strict=True):
        [row_of] = np.flatnonzero(pair.mutated)
        mutant = pair.preferred if sign_of_mutant == 1 else pair.unpreferred
        assert (row_of, pair.sign) == (place - 1, sign_of_mutant)
        assert mpnn.ALPHABET[mutant[row_of]] == letter
    assert (one.margin, two.margin) == (1.5, 0.5)
    assert one.backbone.name == ("1xyz:run2.pdb" if name == "mega-scale" else "1xyz.pdb")
    assert [*report["dropped"]] == [reason]
    [line] = pairs.describe({"train": report})
    if stable == 1 or flag == "negative":
        assert sign in line
    else:
        assert "a ddG above 0 stabilizes" in line


def test_a_table_may_have_pairs_and_mutations(tmp_path):
    """Each row fills the columns of one kind; a dash or an empty cell is no value."""
    worse = other(NATIVE[0]) + NATIVE[1:]
    rows = [
        {"pdb": BUNDLE, "preferred_seq": NATIVE, "unpreferred_seq": worse, "margin": "1.25"},
        {"pdb": BUNDLE, "preferred_seq": NATIVE, "unpreferred_seq": worse, "chain": "-"},
        {"pdb": BUNDLE, "chain": "A", "mutation": mutation(3), "ddG": 2},
    ]
    three, report = read(table_of(tmp_path / "a.csv", *rows))
    assert [pair.margin for pair in three] == [1.25, pytest.approx(math.nan, nan_ok=True), 2]
    assert [int(np.flatnonzero(pair.mutated)[0]) for pair in three] == [0, 0, 2]


def test_a_mutation_may_name_its_chain(tmp_path):
    """As in SKEMPI and FoldX: IB38A is I38A of chain B. Without a column, such chains are read."""
    structure = gemmi.read_structure(str(BUNDLE))
    copy = structure[0][0].clone()
    copy.name = "B"
    structure[0].add_chain(copy)
    structure.write_pdb(str(tmp_path / "ab.pdb"))
    letter = NATIVE[4]
    for column, name, chains, row in (
        ({}, f"{letter}B5W", ("B",), 4),
        ({"design_chains": "AB"}, f"{letter}B5w", ("A", "B"), len(NATIVE) + 4),
        ({"design_chains": "AB"}, f"{letter}A5W", ("A", "B"), 4),
        ({}, f"{letter}A5W:{letter}B5W", ("A", "B"), 4),
        ({}, f"{letter}A5W,{letter}B5W;", ("A", "B"), 4),  # a line of FoldX's individual_list.txt
        ({}, f"{letter}5W", ("A",), 4),
    ):
        item = {"pdb": "ab.pdb", "mutation": name, "ddG": 1, **column}
        [pair], _ = read(table_of(tmp_path / "a.csv", item))
        assert pair.backbone.chains == chains and np.flatnonzero(pair.mutated)[0] == row
        assert {*pair.unpreferred[pair.mutated]} == {mpnn.ALPHABET.index("W")}
    for column, name, says in (
        (
            {"design_chains": "AB"},
            f"{letter}5W",
            "2 residues 5 in ab.pdb; name the chain, as in A5",
        ),
        ({"chain": "A"}, f"{letter}B5W", "0 residues B5 in ab.pdb; --numbering is pdb"),
    ):
        item = {"pdb": "ab.pdb", "mutation": name, "ddG": 1, **column}
        with pytest.raises(UserError, match=says):
            read(table_of(tmp_path / "a.csv", item))


def test_both_numberings(tmp_path):
    """The file begins at 11, has an insertion 14A, and skips 20 to 24."""
    structure = gemmi.read_structure(str(BUNDLE))
    numbers = [*range(11, 15), (14, "A"), *range(15, 20), *range(25, 25 + len(NATIVE))]
    for residue, number in zip(structure[0][0], numbers, strict=False):
        number, icode = number if isinstance(number, tuple) else (number, " ")
        residue.seqid = gemmi.SeqId(number, icode)
    structure.write_pdb(str(tmp_path / "b.pdb"))
    for numbering, labels in (
        ("pdb", ("11", "14A", "25")),
        ("sequence", ("1", "5", "11")),
        ("gapped", ("1", "5", "16")),
    ):
        for label, place in zip(labels, (0, 4, 10), strict=True):
            name = f"{NATIVE[place]}{label}{other(NATIVE[place])}"
            path = write(tmp_path / "b.csv", [["b.pdb", "A", name, 1]])
            [pair], _ = read(path, numbering=numbering)
            [row] = np.flatnonzero(pair.mutated)
            assert pair.backbone.observed[:row].sum() == place
            assert mpnn.ALPHABET[pair.unpreferred[row]] == other(NATIVE[place])


def test_a_bad_mutation_is_one_line(tmp_path):
    wrong = other(NATIVE[4])
    for name, ddg, says in (
        ("5A", 1, "mutation: 5A is not a mutation (expected A23V, or A23V:L45F)"),
        ("A5X", 1, "mutation: A5X is not a mutation"),
        (f"{wrong}5W", 1, f"mutation: {wrong}5W: residue 5 is {NATIVE[4]}; --numbering is pdb"),
        (f"{NATIVE[4]}999W", 1, "999W: 0 residues 999 in bundle_00.pdb; --numbering is pdb"),
        (f"{mutation(5)}:{NATIVE[4]}5W", 1, "5W: residue 5 has two mutations; use one per residue"),
        (f"{NATIVE[4]}A5W {mutation(5)}", 1, f"mutation: {mutation(5)}: residue 5 has two mutat"),
        (mutation(5), "n/a", "ddg: must be a number, in kcal/mol, not 'n/a'"),
        (mutation(5), "nan", "ddg: must be a number, in kcal/mol, not 'nan'"),
        ("", 1, "mutation: missing; fields found: pdb_file, chain_id, ddg"),
    ):
        path = write(tmp_path / "a.csv", [[BUNDLE, "A", name, ddg]])
        with pytest.raises(UserError) as caught:
            read(path)
        message = str(caught.value)
        assert message.startswith(f"{path}:2: ") and says in message and "\n" not in message
    with pytest.raises(UserError, match=":2: expected 4 fields as in the first line"):
        read(write(tmp_path / "a.csv", [[BUNDLE, "A"]]))
    names = "pdb", "chain", "mutation", "ddG", "Ph"
    path = write(tmp_path / "a.csv", [[BUNDLE, "A", mutation(5), 1, 7]], names)
    assert [*read(path)[1]["notes"]] == ["not read: Ph", "a ddG above 0 destabilizes"]


@pytest.mark.parametrize(
    ("stabilizing", "flag", "warned"),
    [
        (7, "negative", "positive"),
        (7, "positive", ""),
        (1, "negative", ""),
        (1, "positive", "negative"),
    ],
)
def test_a_table_with_the_other_sign_is_recognized(tmp_path, stabilizing, flag, warned):
    """Of eight mutants; as in the mega-scale set, where a positive ddG is more stable."""
    rows = [[BUNDLE, "A", mutation(n), -1 if n <= stabilizing else 2] for n in range(1, 9)]
    found, report = read(write(tmp_path / "a.csv", rows), stable_ddg=flag)
    assert sum(text(pair.preferred) != NATIVE for pair in found) == (7 if warned else 1)
    *_, line = pairs.describe({"train": report})
    assert len(pairs.describe({"train": report})) == (2 if warned else 1)
    assert (
        line.startswith("train: ")
        if not warned
        else line
        == (
            "warning: 7 of 8 mutants are more stable than the wild type; "
            f"if ddG has the other sign here, use --stable_ddg {warned}"
        )
    )
    assert not read(write(tmp_path / "b.csv", rows[:3]), stable_ddg=flag)[1]["warnings"]  # too few


def test_pairs_that_contradict_each_other_are_counted(tmp_path):
    rows = [
        [BUNDLE, "A", mutation(n), ddg] for n, ddg in ((3, 1), (4, 1), (3, -0.5), (5, 2), (5, 1))
    ]
    first, second = read(write(tmp_path / "a.csv", [*rows, rows[1]]))[1]["warnings"]
    assert first.startswith("warning: 2 pairs contradict each other; ")
    assert second.startswith("warning: 2 pairs occur again (1 with another ddG); keep one row of ")


def test_what_is_dropped_from_a_file_is_counted_once(tmp_path):
    rows = [[BUNDLE, "A", mutation(place), 1] for place in range(3, 15)]
    other_file = shutil.copy(BUNDLE, tmp_path / "copy.pdb")
    rows += [[other_file, "A", mutation(3), 1], [BUNDLE, "A", mutation(20), 0]]
    config = Config(train_data=write(tmp_path / "a.csv", rows))
    data, reports = run_dpo_ddp.read_data(config, World())
    assert data["val"] and reports["train"]["dropped"] == {"a ddG of 0": 1}
    assert not reports["val"]["dropped"] and not reports["val"]["notes"]


def test_validation_pairs_that_are_trained_on_are_counted(tmp_path):
    """Also in the other order, or from a copy of the structure's file."""
    copy = tmp_path / "copy.pdb"
    shutil.copy(BUNDLE, copy)
    train = write(tmp_path / "a.csv", [[BUNDLE, "A", mutation(n), 1] for n in (3, 4)])
    held_out = [(BUNDLE, 3, 1), (copy, 4, -2), (BUNDLE, 5, 1), (copy, 6, 1)]
    val = write(tmp_path / "b.csv", [[name, "A", mutation(n), x] for name, n, x in held_out])
    config = Config(train_data=str(train), val_data=str(val))
    report = run_dpo_ddp.read_data(config, World())[1]["val"]
    assert report["notes"]["sequences also in train_data"] == 2
    assert report["notes"]["structures also in train_data"] == 4
    warning = "warning: 2 pairs have sequences also in train_data; remove them from one of the"
    assert report["warnings"][-1].startswith(warning)


def test_two_columns_of_a_mutation_must_agree(tmp_path):
    """In ProteinDPO's files, `mutation` is the new letter of mut_type."""
    row = {"pdb_file": BUNDLE, "mut_type": mutation(3), "ddg": 1}
    for text in (mutation(3)[-1], mutation(3)):
        [pair], _ = read(table_of(tmp_path / "a.csv", row | {"mutation": text}))
        assert pair.mutation == mutation(3)
    for text in (NATIVE[2], mutation(4)):
        with pytest.raises(UserError, match=f":2: mutation: {text} contradicts mut_type; leave o"):
            read(table_of(tmp_path / "a.csv", row | {"mutation": text}))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ("mutation", "DMS_score"),
            "ddg: neither this field nor preferred_seq is among pdb_file, ch",
        ),
        (
            ("mutation", "ddG_pred"),
            "mutation, ddG_pred; rename the field of the ddG in kcal/mol",
        ),
        (("mutant", "ddG"), "mutation: missing; fields found: pdb_file, chain_id, mutant, ddg"),
        (("ddG", "ddg"), "two names of one field, such as ddG and ddg"),
        (("ddG", "ddG_ML"), "two names of one field, such as ddG and ddg"),
    ],
)
def test_columns_of_other_tools_name_the_way_out(tmp_path, names, says):
    path = write(tmp_path / "a.csv", [[BUNDLE, "A", mutation(3), 1]], ("pdb", "chain", *names))
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and says in message and "\n" not in message


def test_margins_of_pairs_are_read_and_needed_where_they_count(tmp_path):
    item = {"pdb_file": str(BUNDLE), "preferred_seq": NATIVE, "chain_id": "A"}
    item["unpreferred_seq"] = other(NATIVE[0]) + NATIVE[1:]
    for more, margin in (({}, math.nan), ({"margin_kcal": 1.25}, 1.25), ({"margin": "2"}, 2.0)):
        (tmp_path / "p.json").write_text(json.dumps([item | more]))
        [pair], _ = read(tmp_path / "p.json")
        assert pair.margin == margin or math.isnan(margin) and math.isnan(pair.margin)
    (tmp_path / "p.json").write_text(json.dumps([item | {"ddG": 1}]))
    assert [*read(tmp_path / "p.json")[1]["notes"]] == ["not read: ddg"]
    (tmp_path / "p.json").write_text(json.dumps([item | {"margin_kcal": -1}]))
    with pytest.raises(UserError, match=r"margin_kcal: must be >= 0 \(or swap .*\), not -1"):
        read(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps([item]))
    [pair], _ = read(tmp_path / "p.json")
    for flags in ("--method ddg", "--method listwise", "--weighting margin"):
        config = read_settings(runs.words(f"--train_data p.json {flags}"))
        with pytest.raises(UserError, match=r"p.json\[0\]: no ddG, but --method .* needs one"):
            pairs.check_margins([pair], config.method, config.weighting)
    foreign = pair._replace(margin=1.0, preferred=(pair.unpreferred + 1) % 20)
    assert foreign.sign == 0
    pairs.check_margins([foreign], "ddg", "none")
    with pytest.raises(UserError, match="neither sequence is the structure's own"):
        pairs.check_margins([foreign], "listwise", "none")
    # each of two steps from the wild type is a mutation; the second one is not of the wild type
    own = mpnn.encode(pair.backbone.sequence)
    single, double = own.copy(), own.copy()
    single[0] = double[0] = (own[0] + 1) % 20
    double[1] = (own[1] + 1) % 20
    steps = [pair._replace(margin=1.0, preferred=single, unpreferred=own)]
    steps.append(pair._replace(margin=1.0, preferred=double, unpreferred=single))
    assert [step.sign for step in steps] == [1, 1]
    pairs.check_margins(steps, "ddg", "none")
    with pytest.raises(UserError, match="neither sequence is the wild type of the other pairs"):
        pairs.check_margins(steps, "listwise", "none")
    for flags, says in (
        ("--method ddg --length_average", "--length_average: ddg needs sums"),
        ("--method ddg --beta 1", "--beta: ddg does not use it; leave it out"),
        ("--method listwise --beta 3", "--beta: listwise does not use it; "),
    ):
        with pytest.raises(UserError, match=says):
            read_settings(runs.words(flags))


# --- losses --------------------------------------------------------------------------------------


def test_ddg_is_a_square_by_hand():
    preferred, unpreferred = torch.tensor([-10.0, -20.0]), torch.tensor([-12.0, -19.0])
    found = losses.ddg(preferred - unpreferred, torch.tensor([1.0, 0.5]), torch.tensor([1, -1]))
    expected = [(0.593 * 2 - 1) ** 2, (0.593 * -1 - 0.5) ** 2]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_listwise_is_the_chance_of_drawing_in_the_measured_order():
    """Of the wild type and three mutants, by brute force; of two it is DPO's sigma."""
    odds = {"wild": 0.0, "a": 1.3, "b": -0.4, "c": 0.2}  # log-odds of the mutants
    stabilities = {"wild": 0.0, "a": -1.0, "b": 0.8, "c": -2.5}

    def chance(order):
        left = [*order]
        result = 1.0
        for name in order:
            result *= math.exp(odds[name]) / sum(math.exp(odds[other]) for other in left)
            left.remove(name)
        return result

    assert sum(map(chance, itertools.permutations(odds))) == pytest.approx(1)
    signs = torch.tensor([1 if stabilities[name] > 0 else -1 for name in "abc"])
    gaps = torch.tensor([odds[name] for name in "abc"]) * signs
    margins = torch.tensor([abs(stabilities[name]) for name in "abc"])
    found = losses.listwise(gaps, margins, signs)
    measured = sorted(odds, key=stabilities.get, reverse=True)
    assert found.tolist() == pytest.approx([-math.log(chance(measured)) / 3] * 3, abs=1e-6)
    one = losses.listwise(gaps[:1], margins[:1], signs[:1])
    assert one.item() == pytest.approx(math.log1p(math.exp(-gaps[0].item())), abs=1e-6)


def test_where_one_letter_differs_one_decoding_is_that_of_both(tmp_path):
    rows = [[BUNDLE, "A", mutation(place), 1] for place in (3, 8)]
    single, _ = read(write(tmp_path / "a.csv", rows))
    double, _ = read(write(tmp_path / "b.csv", [[BUNDLE, "A", f"{mutation(3)}/{mutation(9)}", 1]]))
    scorer = batches.Scorer(mpnn.ProteinMPNN.load(MODEL))
    options = PairSettings(decoding_order="mutated_last", num_orders=2)
    once = batches.collate(single, options, "cpu")
    assert len(once.orders) == len(once.sequences) / 2 == 4
    twice = once._replace(orders=once.orders.repeat(2, 1, 1))
    for ours, plain in zip(scorer(once), scorer(twice), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    last = "mutated_last"
    for rows, order in ((double, last), (single, "random"), (single + double, last)):
        batch = batches.collate(rows, PairSettings(decoding_order=order), "cpu")
        assert len(batch.orders) == len(batch.sequences) == 2 * len(rows)


# --- comparisons ---------------------------------------------------------------------------------


def measured(*proteins):
    """Pairs of proteins with these ddG each, and stabilities as log-odds: a perfect model."""
    found = []
    for number, ddgs in enumerate(proteins):
        for ddg in ddgs:
            sign = -1 if ddg > 0 else 1  # the wild type is preferred, or the mutant
            found.append(SimpleNamespace(number=number, sign=sign, margin=abs(ddg)))
    odds = np.array([pair.margin for pair in found])  # of the preferred one
    return found, np.stack([odds, np.zeros(len(found))], -1)


def test_ranks_and_spearman_by_hand():
    assert evaluate.ranks(np.array([3.0, 1, 3, 9])).tolist() == [2.5, 1, 2.5, 4]
    x, y = np.arange(5.0), np.array([2.0, 1, 4, 3, 5])
    assert evaluate.spearman(x, y) == pytest.approx(1 - 6 * 4 / (5 * 24))  # sum of squares: 4
    assert evaluate.spearman(x, x**3) == pytest.approx(1)
    assert math.isnan(evaluate.spearman(x, np.ones(5)))


def test_a_model_that_has_not_moved_gains_exactly_nothing():
    found, _ = measured([1, 2, -1, 3, 0.5], [2, 1, 4, -2, 0.3, 1.1])
    logps = np.random.default_rng(0).normal(size=(11, 2))
    values = evaluate.compare(found, logps, logps.copy())
    gains = {name: value for name, value in values.items() if "gain" in name}
    assert len(gains) == 9 and set(gains.values()) == {0.0}


def test_a_perfect_model_has_every_rank_right():
    found, perfect = measured([1, 2, -1, 3, 0.5], [2, 1, 4, -2, 0.3, 1.1], [1, 2])
    values = evaluate.compare(found, -perfect, perfect)
    for name in ("own", "spearman", "spearman_per_protein"):
        low = 0 if name == "own" else -1
        assert values[f"{name}/before"] == pytest.approx(low)
        assert values[f"{name}/after"] == pytest.approx(1)
        assert values[f"{name}/gain_low"] == pytest.approx(1 - low)
        assert values[f"{name}/gain"] == values[f"{name}/after"] - values[f"{name}/before"]
    nothing = evaluate.compare(found[-2:], perfect[-2:], perfect[-2:])
    assert "spearman_per_protein/gain" not in nothing and "own/gain_low" not in nothing


def test_the_interval_is_over_proteins_not_over_pairs():
    """Of two proteins of 50 pairs one gains all and one nothing: 0 to 1, however many pairs."""
    found, perfect = measured([1.0] * 50, [1.0] * 50)
    before = perfect.copy()
    before[:50] *= -1
    values = evaluate.compare(found, before, perfect)
    assert values["own/gain"] == 0.5
    assert (values["own/gain_low"], values["own/gain_high"]) == (0, 1)


# --- whole runs ----------------------------------------------------------------------------------


def table(folder):
    """Twelve mutations of each of four bundles, with made-up ddG."""
    random = np.random.default_rng(0)
    rows = []
    for number in (0, 1, 2, 4):
        path = ROOT / f"data/input/structures/bundle_{number:02}.pdb"
        chain = gemmi.read_structure(str(path))[0][0]
        for index in random.choice(len(chain), 12, replace=False):
            letter = gemmi.find_tabulated_residue(chain[index].name).one_letter_code
            name = f"{letter}{chain[index].seqid}{other(letter)}"
            rows.append([path, chain.name, name, round(random.normal(1, 1), 2)])
    return write(folder / "ddg.csv", rows)


def train(data, folder, *flags):
    run_.write_report = lambda *_, **__: ""
    flags = [f"--train_data={data}", f"--base_model_name={MODEL}", f"--output_dir={folder}", *flags]
    flags += runs.words("--learning_rate 1e-3 --max_steps 5 --log_every 100 --num_orders 2")
    assert run_dpo_ddp.main(flags) == 0


ALIKE = pytest.param("--method ddg", marks=pytest.mark.show)


@pytest.mark.parametrize("flags", [ALIKE, "--method listwise --weighting margin"])
def test_the_same_on_one_two_and_four_processes(tmp_path, flags):
    data = table(tmp_path)
    flags = runs.words(f"{flags} --sft_weight 0.5 --decoding_order mutated_last")
    found = []
    for world_size in (1, 2, 4):
        folder = tmp_path / str(world_size)
        ranks(world_size, train, data, folder, *flags, f"--batch_size={8 // world_size}")
        lines = runs.lines(folder)
        assert [line["split"] for line in lines] == ["val", *["train"] * 5, "val"]
        summary = json.loads((folder / "summary.json").read_text())
        nll = np.mean(json.loads((folder / "natives.json").read_text())["nll"])
        assert summary["val"]["natives/nll/before"] == pytest.approx(nll, rel=1e-6)
        found.append(lines)
    for name in ("loss", "loss/preference", "nll", "own/before", "natives/nll/after"):
        numbers = [[line[name] for line in lines if name in line] for lines in found]
        assert numbers[0] and numbers[1] == pytest.approx(numbers[0], abs=2e-5), name
        assert numbers[2] == pytest.approx(numbers[0], abs=2e-5), name


def stopped_in_designs(data, folder, calls):
    """A signal when the natives are scored for the second time: after the last step."""
    natives = evaluate.natives

    def asked(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return natives(*arguments)

    evaluate.natives = asked
    train(data, folder)


def test_a_run_that_is_stopped_while_it_designs_keeps_its_steps(tmp_path):
    data, folder = table(tmp_path), tmp_path / "run"
    outcome = run_ranks(1, stopped_in_designs, data, folder, [])
    assert outcome.codes == [85], outcome.logs
    assert "stopped after step 5; run the same command to resume" in outcome.logs[0]
    assert not runs.lines(folder, "val")[1:]
    ranks(1, train, data, folder)
    ranks(1, train, data, tmp_path / "whole")
    assert runs.lines(folder, "val")[1] == runs.lines(tmp_path / "whole", "val")[1]


def test_the_losses_of_a_run_are_those_of_the_formula(tmp_path):
    """The first step's, from log-probs of each sequence alone, one decoding each."""
    data = table(tmp_path)
    flags = "--sft_weight 0.5 --weighting margin --batch_size 8 --method ddg --num_orders 1"
    ranks(1, train, data, tmp_path / "run", *runs.words(flags))
    first = runs.lines(tmp_path / "run", "train")[0]
    config = Config(num_orders=2)
    everything, _ = pairs.read(data, {}, config)
    kept, _ = batches.split(everything, 0)
    plan = Plan(len(kept), 8, seed=0, order=functools.partial(batches.epoch_order, kept))
    scorer = batches.Scorer(mpnn.ProteinMPNN.load(MODEL))
    expected = []
    for row in plan.batch(0):
        pair = kept[row]
        scores = scorer(batches.collate([pair], config, "cpu"))
        preferred, unpreferred = (float(score.detach()) for score in scores)
        square = (0.593 * (preferred - unpreferred) - pair.margin) ** 2
        expected.append(pair.margin * square - 0.5 * preferred / pair.targets.sum())
    assert first["loss"] == pytest.approx(np.mean(expected), abs=1e-4)


def test_evaluate_prints_a_gain_of_exactly_zero_for_the_base_itself(tmp_path, capsys):
    out = tmp_path / "numbers.json"
    flags = [f"--data={table(tmp_path)}", f"--output={out}", f"--base_model_name={MODEL}"]
    assert evaluate.main([*flags, f"--model_path={MODEL}"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("gain +0.0000") == 6
    numbers = json.loads(out.read_text())
    assert {value for name, value in numbers.items() if "gain" in name} == {0}
    for name in ("recovery", "diversity"):
        assert 0 < numbers[f"natives/{name}/before"] < 1
    model = mpnn.ProteinMPNN.load(MODEL)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.W_out.weight)
    model.save(tmp_path / "other.pt")
    assert evaluate.main([*flags, f"--model_path={tmp_path / 'other.pt'}"]) == 0
    assert "gain +0.0000" not in capsys.readouterr().out


def test_mutants_are_scored_without_a_ddg(tmp_path, capsys):
    """The table has the log-odds of each mutant, from one decoding of each sequence alone."""
    names = [mutation(3), f"{mutation(5)}:{mutation(9)}", mutation(12)]
    rows = [{"pdb": BUNDLE, "chain": "A", "mutation": name} for name in names]
    path = str(tmp_path / "a.csv")
    flags = [f"--mutants={path}", f"--model_path={MODEL}", f"--output={tmp_path}/scores.csv"]
    for more, column in (([], "ddG"), (["--stable_ddg=positive"], "ddG"), ([], "ddG_ML")):
        table_of(path, *rows[:2], rows[2] | {column: -1.0})  # it is not used
        assert evaluate.main([*flags, *more]) == 0
        assert "3 mutants of " in capsys.readouterr().out
        lines = [*csv.DictReader((tmp_path / "scores.csv").read_text().splitlines())]
        assert [line["mutation"] for line in lines] == names
        assert lines[0]["structure"] == "bundle_00.pdb A" and lines[0]["location"] == f"{path}:2"
        model = mpnn.ProteinMPNN.load(MODEL)
        for line, name in zip(lines, names, strict=True):
            item = {"pdb": BUNDLE, "chain": "A", "mutation": name, "ddG": 1}
            [pair], _ = read(table_of(tmp_path / "one.csv", item))
            order = batches.decoding_orders(pair, PairSettings(decoding_order="mutated_last"))
            encoded = model.encode(*batches.structure_tensors(pair.backbone, "cpu"))
            sums = []
            for letters in (pair.preferred, pair.unpreferred):  # the wild type, the mutant
                letters = torch.from_numpy(letters)[None]
                scores = model.decode(encoded, letters, torch.from_numpy(order))
                sums.append(scores.gather(-1, letters[..., None]).sum().item())
            assert float(line["score"]) == pytest.approx(sums[1] - sums[0], abs=2e-4)
    with pytest.raises(UserError, match="--output: .* is a folder; use the name of a file"):
        evaluate.main([*flags[:2], f"--output={tmp_path}"])


def test_a_mutant_that_is_not_scored_is_named(tmp_path, capsys):
    """Residue 3 has no O, residue 12 is a HETATM record, and a deletion is no substitution."""
    structure = gemmi.read_structure(str(BUNDLE))
    chain = structure[0][0]
    chain[2].remove_atom("O", "\0")
    chain[11].het_flag = "H"
    structure.write_pdb(str(tmp_path / "het.pdb"))
    names = [mutation(3), mutation(5), mutation(5), "del7"]
    path = write(tmp_path / "a.csv", [["het.pdb", "A", name] for name in names], COLUMNS[:3])
    flags = [f"--mutants={path}", f"--model_path={MODEL}", f"--output={tmp_path}/scores.csv"]
    assert evaluate.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"mutants: 2 pairs of {path}; 1 different only at residues that are unknown or lack "
        "backbone atoms; 1 not a substitution"
    )
    assert lines[1].startswith("warning: 1 pairs occur again (0 with another ddG)")
    assert lines[2].startswith("warning: 1 structures such as het.pdb: ") and "A12 read" in lines[2]
    assert lines[3].startswith(f"2 mutants of {path} -> ") and len(lines) == 4


def test_evaluate_compares_with_the_model_that_the_training_began_with(
    tmp_path, capsys, monkeypatch
):
    """A run that changes nothing gains nothing; its model names the base, wherever that lies."""
    data = table(tmp_path)
    base = tmp_path / "base.pt"
    base.write_bytes(Path(MODEL).read_bytes())
    flags = [f"--train_data={data}", f"--base_model_name={base}", f"--output_dir={tmp_path}/run"]
    monkeypatch.setattr(run_, "write_report", lambda *_, **__: "")
    ranks(1, run_dpo_ddp.main, [*flags, *runs.words("--max_steps 1 --learning_rate 1e-30")])
    model = tmp_path / "run/best_model.pt"
    same = [f"--data={data}", f"--model_path={model}"]
    assert evaluate.main(same) == 0
    printed = capsys.readouterr().out
    assert f"before: {base}\nafter: {model}\n" in printed and printed.count("gain +0.0000") == 6
    # another model, if it is wanted
    other = tmp_path / "other.pt"
    changed = mpnn.ProteinMPNN.load(base)
    assert changed.base == {}
    torch.manual_seed(0)
    torch.nn.init.normal_(changed.W_out.weight)
    changed.save(other)
    assert evaluate.main([*same, f"--base_model_name={other}"]) == 0
    printed = capsys.readouterr().out
    assert f"before: {other}\nafter: {model} (its training began with {base})\n" in printed
    assert "gain +0.0000" not in printed
    # a base that is not known, has changed, or is gone
    with pytest.raises(UserError, match=r"other.pt: does not name the model that its training"):
        evaluate.main([f"--data={data}", f"--model_path={other}"])
    changed.save(base)
    with pytest.raises(UserError, match=r"base.pt: not the file that the training of .*best_mod"):
        evaluate.main(same)
    base.unlink()
    with pytest.raises(UserError, match="base.pt: no such file; use a path, or one of v_48_002"):
        evaluate.main(same)
