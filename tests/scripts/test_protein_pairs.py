"""Preference items: every check of theirs, decoding orders, groups of one backbone; inference."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT
from ddp_utils import UserError
from ddp_utils.sampler import Plan
from dpo_inv import batches, inference, mpnn, pairs, structure
from dpo_inv.config import DesignConfig, PairSettings

INPUT = ROOT / "data/input"
MODEL = str(ROOT / "data/demo/protein_model.pt")
ITEMS = json.loads((INPUT / "test_data_real.json").read_text())
SINGLE = next(item for item in ITEMS if "fixed_chains" not in item)
COMPLEX = next(item for item in ITEMS if item.get("fixed_chains"))


def read(folder, *items, **settings):
    """The pairs of these items, written to a file of their own."""
    items = [{**item, "pdb_file": str(INPUT / item["pdb_file"])} for item in items]
    path = Path(folder) / "items.json"
    path.write_text(json.dumps(items))
    return pairs.read(str(path), {}, PairSettings(**settings))


def plain(**changes):
    """An item without positions: preferred and unpreferred may differ anywhere."""
    item = {k: v for k, v in SINGLE.items() if k not in ("mutable_positions", "mutable_ranges")}
    return {**item, **changes}


def test_sums_go_over_the_designed_chain_alone(tmp_path):
    (pair,), _ = read(tmp_path, COMPLEX)
    count = len(COMPLEX["preferred_seq"].replace("/", ""))
    assert pair.targets[:count].any() and not pair.targets[count:].any()
    assert not pair.designed[count:].any() and len(pair.preferred) > count
    assert (pair.preferred[count:] == pair.unpreferred[count:]).all()


def test_neither_a_missing_residue_nor_an_unknown_letter_is_scored(tmp_path):
    lines = (INPUT / SINGLE["pdb_file"]).read_text().splitlines(True)
    gone = [line for line in lines if line[12:16].strip() == "CA"][3]
    (tmp_path / "one.pdb").write_text("".join(line for line in lines if line != gone))
    item = plain(preferred_seq=TEXT[:5] + "X" + TEXT[6:], unpreferred_seq=OTHER)
    (pair,), _ = read(tmp_path, item | {"pdb_file": str(tmp_path / "one.pdb")})
    assert [*np.flatnonzero(~pair.designed)] == [3]
    assert [*np.flatnonzero(~pair.targets)] == [3, 5]


def test_score_and_recovery_are_of_the_designed_residues():
    config = DesignConfig(mutable_positions=("1", "A3"))
    task = inference.read_task(INPUT / SINGLE["pdb_file"], config)
    letters = torch.from_numpy(mpnn.encode(task.structure.sequence))[None]
    letters[0, 0] = (letters[0, 0] + 1) % 20
    scores = -torch.arange(1.0, letters.numel() + 1)[None, :, None].expand(1, -1, 21)
    [entry] = inference.summarize(task, ["one"], letters, scores)
    assert (entry["score"], entry["recovery"]) == (2, 0.5)  # of 1 and 3 nats


TEXT = SINGLE["preferred_seq"]
OTHER = ("A" if TEXT[0] != "A" else "L") + TEXT[1:]
REFUSED = [  # changes of an item, what the line says
    ({"pdb_file": "nothing.pdb"}, "nothing.pdb in FOLDER; or use"),
    ({"preferred_seq": TEXT[:-1]}, f"preferred_seq: {len(TEXT) - 1} letters, but the designed"),
    ({"preferred_seq": "U" + TEXT[1:-1] + "Z"}, "preferred_seq: 'U, Z' not in ACDEF"),
    ({"chain_id": "A", "design_chains": ["A"]}, "chain_id: design_chains is set, too; use only"),
    ({"design_chains": 1}, "design_chains: 1 (expected a list of chain names)"),
    ({"chain_id": "Q"}, "no protein chain 'Q', or it is named twice; its chains are ['A']"),
    ({"chain_id": "A", "fixed_chains": ["A"]}, "chain 'A', or it is named twice"),
    ({"unpreferred_seq": OTHER, "mutable_positions": [2]}, "differ at residue 1, which is fixed"),
    ({"unpreferred_seq": OTHER, "fixed_residues": "3 A1"}, "differ at residue 1, which is fixed"),
    ({"mutable_ranges": [[3, 999]]}, "mutable_ranges: 3-999: 0 residues 999 in bundle"),
    ({"mutable_ranges": ["9-3"]}, "mutable_ranges: 9-3: its end comes before its start; swap"),
    ({"mutable_positions": ["B3"]}, "mutable_positions: B3: 0 residues B3 in bundle"),
    ({"mutable_positions": 3}, "mutable_positions: 3 (expected a list of residues, such as"),
    ({"preferred_ddg": 1.5}, "preferred_ddg: not supported; put the better sequence first, or"),
    ({"score_preferred": 1}, "score_preferred: not supported; put the better sequence first, or"),
    ({"preference": 1}, "preference: not supported; put the better sequence first"),
    ({"mutable_positions": "x"}, "mutable_positions: 'x' is not a residue (expected 52, A52 or"),
    ({"mutable_positions": 0}, "mutable_positions: 0 (expected a list of residues, such as"),
    ({"mutable_positions": {"A": [3]}}, "mutable_positions: {'A': [3]} (expected a list of"),
    ({"mutable_ranges": [1, 9]}, "mutable_ranges: 1 is not a range (expected 6-17, or [6, 17]"),
    ({"mutable_ranges": ["A3-B9"]}, "A3-B9: from one chain to another; use a range of each"),
    (
        {"mutable_positions": [1, 3], "fixed_residues": "2-5"},
        "mutable_positions: 3 is in fixed_residues, too; use one of them",
    ),
    (
        {"mutable_ranges": [[1, 9], [3, 4]], "fixed_residues": "3-5"},
        "mutable_ranges: 3-4 is in fixed_residues, too; use one of them",
    ),
    ({"fixed_residues": f"1-{len(TEXT)}"}, "fixed_residues: they are all residues of bundle_00.p"),
    ({"chain_id": 0}, "chain_id: 0 (expected a list of chain names)"),
    ({"chain_id": [["A"]]}, "chain_id: [['A']] (expected a list of chain names)"),
    ({"chain_id": [""]}, "no protein chain '', or it is named twice"),
    ({"margin_kcal": [1]}, "margin_kcal: must be a number, in kcal/mol, not [1]"),
]


def test_an_item_that_does_not_fit_is_one_line(tmp_path):
    for changes, says in REFUSED:
        item = plain(**changes)
        with pytest.raises(UserError) as caught:
            read(tmp_path, item)
        says = says.replace("FOLDER", f"{tmp_path} or {Path.cwd()}")
        assert says in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).startswith(f"{tmp_path}/items.json[0]: ")
        found, report = read(tmp_path, SINGLE, item, on_bad_record="skip")
        assert len(found) == 1 and report["dropped"] == {"malformed": 1}


def test_a_ddg_beside_a_mutant_and_its_wild_type_fits_their_order(tmp_path):
    """Above 0 the mutant is less stable, so the wild type is preferred, unless that is set. A
    number above 0 may have lost its sign.
    """
    wild_type = structure.read(INPUT / SINGLE["pdb_file"]).sequence
    mutant = ("A" if wild_type[0] != "A" else "L") + wild_type[1:]
    first = plain(preferred_seq=wild_type, unpreferred_seq=mutant)
    second = plain(preferred_seq=mutant, unpreferred_seq=wild_type)
    for wrong, right, stable_ddg in ((first, second, "negative"), (second, first, "positive")):
        for ddg in (2, -2, "-2.0", "n/a", 0):
            assert read(tmp_path, {**right, "ddG": ddg}, stable_ddg=stable_ddg)[0][0].sign
        assert read(tmp_path, {**wrong, "ddG": 2}, stable_ddg=stable_ddg)[0][0].sign
        with pytest.raises(UserError, match=r"items.json\[0\]: ddg: .* swap the two, or remove it"):
            read(tmp_path, {**wrong, "ddG": "-2.0"}, stable_ddg=stable_ddg)
    assert read(tmp_path, {**SINGLE, "ddg": -3})[0]  # neither is the wild type


def test_the_sequences_of_two_chains_are_in_their_order(tmp_path):
    [chain], [context] = COMPLEX["design_chains"], COMPLEX["fixed_chains"]
    first = COMPLEX["preferred_seq"]
    second = structure.read(INPUT / COMPLEX["pdb_file"], [context]).sequence
    other = COMPLEX["unpreferred_seq"]
    item = {"pdb_file": COMPLEX["pdb_file"], "design_chains": [chain, context]}
    [pair], _ = read(
        tmp_path,
        item | {"preferred_seq": f"{first}/{second}", "unpreferred_seq": f"{other}/{second}"},
    )
    assert len(pair.preferred) == len(first) + len(second)
    turned = {"preferred_seq": f"{second}/{first}", "unpreferred_seq": f"{second}/{other}"}
    sizes = (
        f"the chains have [{len(second)}, {len(first)}] letters, but in this order [{len(first)}"
    )
    with pytest.raises(UserError) as caught:
        read(tmp_path, item | turned)
    assert sizes in str(caught.value) and len(first) != len(second)


def test_a_list_of_one_chain_is_that_chain(tmp_path):
    """As in the JSON files of ProteinMPNN; several names in one text are several chains."""
    texts = [COMPLEX["preferred_seq"], COMPLEX["unpreferred_seq"]]
    [chain], [context] = COMPLEX["design_chains"], COMPLEX["fixed_chains"]
    item = {"pdb_file": COMPLEX["pdb_file"], "preferred_seq": texts[0], "unpreferred_seq": texts[1]}
    other = structure.read(INPUT / COMPLEX["pdb_file"], [context]).sequence
    both = {"preferred_seq": texts[0] + other, "unpreferred_seq": texts[1] + other}
    for fields, chains in (
        ({"chain_id": [chain], "fixed_chains": [context]}, (chain, context)),
        ({"chain_id": chain, "fixed_chains": context}, (chain, context)),
        (both | {"chain_id": [chain, context]}, (chain, context)),
        (both | {"design_chains": f"{chain}, {context}"}, (chain, context)),
        (both | {"design_chains": f"{chain}{context}"}, (chain, context)),
    ):
        [pair], _ = read(tmp_path, item | fields)
        count = len(texts[0]) + len(other) * ("fixed_chains" not in fields)
        assert pair.backbone.chains == chains and pair.backbone.in_design.sum() == count


def test_a_residue_may_be_left_out_of_a_range(tmp_path):
    item = plain(unpreferred_seq=OTHER, mutable_ranges=[[1, 9]], fixed_residues=[3])
    [pair], _ = read(tmp_path, item)
    assert [*np.flatnonzero(pair.designed)] == [0, 1, 3, 4, 5, 6, 7, 8]


def test_what_occurs_again_is_counted(tmp_path):
    """One structure by two paths, and two structures of one name."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    shutil.copy(INPUT / SINGLE["pdb_file"], tmp_path / "a/same.pdb")
    shutil.copy(INPUT / COMPLEX["pdb_file"], tmp_path / "b/same.pdb")
    item = plain(unpreferred_seq=OTHER, chain_id="A")
    item.pop("design_chains", None)
    first, again = (item | {"pdb_file": f"{tmp_path}/{path}/same.pdb"} for path in ("a", "b/../a"))
    found, report = read(tmp_path, first, again)
    [line] = report["warnings"]
    assert line.startswith("warning: 1 pairs occur again (0 with another ddG); keep one row of ")
    assert {pair.number for pair in found} == {0}
    text = structure.read(tmp_path / "b/same.pdb").sequence
    changed = ("A" if text[0] != "A" else "L") + text[1:]
    sides = {"preferred_seq": text, "unpreferred_seq": changed}
    _, report = read(tmp_path, first, first | sides | {"pdb_file": f"{tmp_path}/b/same.pdb"})
    assert report["warnings"] == ["warning: 2 structures are named same.pdb A; rename the files"]


def test_what_teaches_nothing_is_dropped_and_counted(tmp_path):
    same = plain(unpreferred_seq=SINGLE["preferred_seq"], mutable_postions=[1])
    found, report = read(tmp_path, SINGLE, same)
    assert len(found) == 1 and report["dropped"] == {"the same sequence twice": 1}
    assert list(report["notes"]) == ["not read: mutable_postions"]
    with pytest.raises(UserError, match="0 usable rows of 1: 1 longer than max_length$"):
        read(tmp_path, SINGLE, max_length=10)


def test_lower_case_slashes_and_ranges_are_read(tmp_path):
    text = SINGLE["preferred_seq"].lower()  # in lines of ten, as pasted from a FASTA file
    text = "\r\n".join(text[at : at + 10] for at in range(0, len(text), 10)) + "\n"
    item = plain(preferred_seq=text, mutable_ranges=[[1, len(TEXT)]])
    (a,), (b,) = read(tmp_path, item)[0], read(tmp_path, SINGLE)[0]
    assert (a.preferred == b.preferred).all()


def test_letters_of_skipped_numbers_and_modified_residues_may_be_there_or_not(tmp_path):
    """Of 36 residues the fifth is left out, the ninth is modified: 35, 36 or 34 letters."""
    lines = (INPUT / SINGLE["pdb_file"]).read_text().splitlines(True)
    lines = [line.replace(line[17:20], "SEP") if line[22:26] == "   9" else line for line in lines]
    path = tmp_path / "gap.pdb"
    path.write_text("".join(line for line in lines if line[22:26] != "   5"))
    sides = []
    for cut in ([], [4], [4, 8]):
        texts = ["".join(c for at, c in enumerate(t) if at not in cut) for t in (TEXT, OTHER)]
        item = plain(pdb_file=str(path), preferred_seq=texts[0], unpreferred_seq=texts[1])
        (pair,), _ = read(tmp_path, item)
        sides.append(pair)
        assert [*np.flatnonzero(~pair.designed)] == [4]
    assert (sides[0].preferred == sides[1].preferred).all()
    assert [*np.flatnonzero(sides[1].preferred != sides[2].preferred)] == [8]


def test_orders_end_with_what_is_designed_and_are_shared_by_a_backbone(tmp_path):
    (a,), _ = read(tmp_path, COMPLEX)
    context = (~a.designed).sum()
    assert 0 < context < len(a.designed)

    def orders(pair, kind, count, seed):
        settings = PairSettings(decoding_order=kind, num_orders=count, seed=seed)
        return batches.decoding_orders(pair, settings)

    found = orders(a, "random", 3, 1)
    assert (np.sort(found[..., 0]) == [np.arange(len(a.designed))] * 3).all()
    assert not a.designed[found[:, :context]].any()
    assert (found == orders(a, "random", 3, 1)).all()
    assert (found != orders(a, "random", 3, 2)).any()
    b = a._replace(preferred=a.unpreferred)
    assert (found == orders(b, "random", 3, 1)).all()
    last = orders(a, "mutated_last", 1, 1)[0, -a.mutated.sum() :, 0]
    assert a.mutated[last].all()


def test_a_split_keeps_backbones_whole_and_an_epoch_visits_each_pair_once():
    found, _ = pairs.read(str(INPUT / "test_data_real.json"), {}, PairSettings())
    train, val = batches.split(found, seed=3)
    assert len(train) + len(val) == len(found) and 0.02 < len(val) / len(found) < 0.12
    assert not {p.number for p in train} & {p.number for p in val}
    order = functools.partial(batches.epoch_order, train)
    plan = Plan(len(train), len(train), seed=0, order=order)
    order, next_order = (plan.batch(step) for step in (0, 1))
    assert sorted(order) == list(range(len(train))) and order != next_order
    for group in batches.group_by_backbone(order[:32], train, 4):
        assert len({train[row].number for row in group}) == 1 and len(group) <= 4


def test_a_split_holds_out_a_tenth_or_the_smallest():
    # none fits into a tenth: the smallest; the two that fit together; there is but one
    for sizes, held in (([5, 30, 10], 1), ([90, 4, 6], 2), ([7], 0)):
        for seed in range(5):
            train, val = batches.split(pairs_of(zip("WKG", sizes, strict=False)), seed)
            assert len({p.number for p in val}) == held
            assert len(train) + len(val) == sum(sizes) and len(val) in (0, 5, 10)


def pairs_of(letters_and_sizes):
    """Pairs of backbones whose sequence is one letter 40 times, or the text; unrelated letters."""
    pair = pairs.Pair(*[None] * len(pairs.Pair._fields))
    found = []
    for number, (text, size) in enumerate(letters_and_sizes):
        text = text if len(text) > 1 else text * 40
        ones = np.ones(len(text), int)
        backbone = SimpleNamespace(
            sequence=text, in_design=ones > 0, observed=ones > 0, chain_encoding=ones
        )
        found += [pair._replace(number=number, backbone=backbone)] * size
    return found


LYSOZYME = {
    "human": (
        "KVFERCELARTLKRLGMDGYRGISLANWMCLAKWESGYNTRATNYNAGDRSTDYGIFQINSRYWCNDGKTPGAVNACHLS"
        "CSALLQDNIADAVACAKRVVRDPQGIRAWVAWRNRCQNRDVRQYVQGCGV"
    ),
    "hen": (
        "KVFGRCELAAAMKRHGLDNYRGYSLGNWVCAAKFESNFNTQATNRNTDGSTDYGILQINSRWWCNDGRTPGSRNLCNIPC"
        "SALLSSDITASVNCAKKIVSDGNGMNAWVAWRNRCKGTDVQAWIRGCRL"
    ),
}
GLOBIN = {
    "alpha": (
        "VLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAVAHVDDMPNAL"
        "SALSDLHAHKLRVDPVNFKLLSHCLLVTLAAHLPAEFTPAVHASLDKFLASVSTVLTSKYR"
    ),
    "beta": (
        "VHLTPEEKSAVTALWGKVNVDEVGGEALGRLLVVYPWTQRFFESFGDLSTPDAVMGNPKVKAHGKKVLGAFSDGLAHLDN"
        "LKGTFATLSELHCDKLHVDPENFRLLGNVLVCVLAHHFGKEFTPPVQAAYQKVVAGVANALAHKYH"
    ),
    "myoglobin": (
        "GLSDGEWQLVLNVWGKVEADIPGHGQEVLIRLFKGHPETLEKFDKFKHLKSEDEMKASEDLKKHGATVLTALGGILKKKG"
        "HHEAEIKPLAQSHATKHKIPVKYLEFISECIIQVLQSKHPGDFGADAQGAMNKALELFRKDMASNYKELGFQG"
    ),
}


def test_thirty_percent_of_identical_residues_make_two_proteins_similar():
    """Textbook values: lysozymes 60 %, hemoglobin's chains 43 %, myoglobin and a chain 25 %."""
    human, hen = LYSOZYME.values()
    alpha, beta, myoglobin = GLOBIN.values()
    for first, second, expected in (
        (human, hen, True),
        (alpha, beta, True),
        (alpha, myoglobin, False),
        (beta, myoglobin, False),
        (human, alpha, False),
        (human[40:90], human, True),  # a fragment
        (human[30:60], hen + alpha + beta, True),  # a domain of a larger protein
        ("ACDEFGHIKLMNPQRSTVWY", "ACDEFG" + "W" * 14, True),  # 7 of 20, by hand
        ("ACDEFGHIKLMNPQRSTVWY", "ACD" + "P" * 17, False),  # 4 of 20
    ):
        assert batches.is_similar(first, second) == expected == batches.is_similar(second, first)
    # by chance: a short sequence has many letters of a long one in its order
    random = np.random.default_rng(0)
    count = 0
    for _ in range(200):
        short, long = ("".join(random.choice([*human], size)) for size in (50, 400))
        count += batches.is_similar(short, long)
    assert count <= 6  # 30 % of the letters are equal in about 80 of them


def test_a_split_keeps_families_whole():
    """Three backbones in a row of similarity, of which the ends are not similar to each other."""
    chain = ["W" * 20 + "K" * 20, "K" * 20 + "G" * 20, "G" * 20 + "P" * 20]
    assert not batches.is_similar(chain[0], chain[2])
    # 10 of 100 pairs are of this family, 90 of one other protein
    found = pairs_of([*zip(chain, (3, 3, 4), strict=True), ("F", 90)])
    assert sorted(batches.family(2, batches.chains_of(found))) == [0, 1, 2]
    for seed in range(5):
        _, val = batches.split(found, seed)
        assert {pair.number for pair in val} == {0, 1, 2}
    # the family is larger than a tenth, the other protein is smaller
    for seed in range(5):
        _, val = batches.split(pairs_of([*zip(chain, (3, 30, 4), strict=True), ("F", 9)]), seed)
        assert {pair.number for pair in val} == {3}
    # there is no other family: the smallest backbone
    assert {pair.number for pair in batches.split(found[:10], 0)[1]} <= {0, 1}
    # one of the chains is enough, and its gaps do not count
    backbone = SimpleNamespace(
        sequence="F" * 40 + "W" * 10 + "X" * 9 + "W" * 10 + "K" * 20 + "P" * 40,
        in_design=np.arange(129) < 89,
        observed=np.ones(129, bool),
        chain_encoding=np.repeat([1, 2, 3], [40, 49, 40]),
    )
    found = [*pairs_of([(chain[0], 1), ("P", 1)]), found[0]._replace(number=2, backbone=backbone)]
    chains = batches.chains_of(found)
    assert chains[2] == ["F" * 40, chain[0]] and batches.family(2, chains) == [2, 0]


def test_a_fixed_chain_is_copied_and_x_is_never_drawn(tmp_path):
    flags = ["--model_path", MODEL, "--pdb_file", str(INPUT / COMPLEX["pdb_file"])]
    flags += ["--design_chains", *COMPLEX["design_chains"]]
    flags += ["--fixed_chains", *COMPLEX["fixed_chains"], "--mutable_positions", "1", "3"]
    flags += ["--num_samples", "4", "--temperature", "2", "--output_dir", str(tmp_path)]
    assert inference.main(flags) == 0
    (result,) = json.loads((tmp_path / "all_results.json").read_text())
    wanted = structure.read(INPUT / COMPLEX["pdb_file"], COMPLEX["design_chains"]).sequence
    for sequence in result["sequences"]:
        assert "X" not in sequence and len(sequence) == len(wanted)
        assert sequence[1] == wanted[1] and sequence[3:] == wanted[3:]
    assert len(set(result["sequences"])) > 1
    again = tmp_path / "again"
    inference.main([*flags[:-1], str(again)])
    text = (again / "all_results.json").read_text()
    assert text == (tmp_path / "all_results.json").read_text()  # the seed decides


def test_scores_of_sampled_sequences_are_read_back(tmp_path):
    flags = ["--model_path", MODEL, "--pdb_file", str(INPUT / SINGLE["pdb_file"])]
    inference.main([*flags, "--num_samples", "2", "--output_dir", str(tmp_path / "a")])
    (fasta,) = (tmp_path / "a").glob("*.fasta")
    inference.main([*flags, "--fasta", str(fasta), "--output_dir", str(tmp_path / "b")])
    found = [json.loads((tmp_path / x / "all_results.json").read_text())[0] for x in "ab"]
    assert found[0]["sequences"] == found[1]["sequences"][1:]  # the native one is the first
    a, b = ([entry["recovery"] for entry in one["details"]] for one in found)
    assert [1.0, *a] == b
    names = [line[1:] for line in fasta.read_text().splitlines() if line.startswith(">")]
    assert [entry["name"] for entry in found[1]["details"]] == names
    fasta.write_text("ACD\n")
    with pytest.raises(UserError, match="fasta:1: not a FASTA file .expected >"):
        inference.main([*flags, "--fasta", str(fasta), "--output_dir", str(tmp_path / "c")])


def test_a_check_of_inference_says_what_would_be_designed(tmp_path, capsys):
    """Structures and model are read, nothing is written."""
    flags = ["--model_path", MODEL, "--pdb_file", str(INPUT / SINGLE["pdb_file"]), "--output_dir"]
    assert inference.main([*flags, str(tmp_path / "new"), "--check"]) == 0
    name = Path(SINGLE["pdb_file"]).name
    assert capsys.readouterr().out == f"{name}: chains A, {len(TEXT)} residues are designed\n"
    assert not (tmp_path / "new").exists()
    two = ["--model_path", MODEL, "--pdb_file", str(INPUT / COMPLEX["pdb_file"]), "--check"]
    assert inference.main([*two, "--design_chains", *COMPLEX["design_chains"]]) == 0
    [chain] = COMPLEX["fixed_chains"]
    assert f"not read: chains {chain}; --fixed_chains makes" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output_dir: .*/file is not a folder"):
        inference.main([*flags, str(tmp_path / "file")])


def test_two_structures_of_one_name_are_an_error(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(INPUT / SINGLE["pdb_file"], tmp_path / folder / "same.A.pdb")
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{x}/same.A.pdb\n" for x in "ab"))
    with pytest.raises(UserError, match="same.A occurs twice; rename one of the files"):
        inference.main(["--model_path", MODEL, "--pdb_list", str(tmp_path / "list.txt")])
    (tmp_path / "list.txt").write_text("\n \n")
    with pytest.raises(UserError, match="list.txt:1: no structure .expected the path of one in"):
        inference.main(["--model_path", MODEL, "--pdb_list", str(tmp_path / "list.txt")])
