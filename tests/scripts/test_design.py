"""Letters that dpo_inv.inference samples: omitted, biased and tied ones; its output files."""

import itertools
import json
import shutil
from dataclasses import replace

import gemmi
import numpy as np
import pytest
import torch

from conftest import ROOT
from ddp_utils import UserError, data
from dpo_inv import batches, config, inference, mpnn, pairs

MODEL = ROOT / "data/demo/protein_model.pt"
BUNDLE = ROOT / "data/input/structures/bundle_00.pdb"
MONOMER = config.DesignConfig(mutable_positions=("6",))
DIMER = config.DesignConfig(design_chains=("A", "B"), homo_oligomer=True)


def copies(file, *lacking):
    """Write the bundle's chain several times, 12 Angstrom apart, each without its last residues."""
    structure = gemmi.read_structure(str(BUNDLE))
    chain = structure[0][0].clone()
    del structure[0][0]
    for number, count in enumerate(lacking):
        copy = chain.clone()
        copy.name = "ABC"[number]
        for residue in copy:
            for atom in residue:
                atom.pos += gemmi.Position(12 * number, 0, 0)
        for _ in range(count):
            del copy[len(copy) - 1]
        structure[0].add_chain(copy)
    structure.write_pdb(str(file))
    return file


@pytest.fixture(scope="module")
def model():
    return mpnn.ProteinMPNN.load(MODEL)


@pytest.fixture(scope="module")
def dimer(tmp_path_factory):
    return copies(tmp_path_factory.mktemp("dimer") / "dimer.pdb", 0, 1)


def assert_drawn_from(letters, log_probs):
    """Check that letters [N] fit a distribution [20]: a chi-square test."""
    expected = len(letters) * log_probs.double().softmax(-1)
    counts = torch.bincount(letters, minlength=20).double()
    assert (counts[expected == 0] == 0).all()
    terms = ((counts - expected) ** 2 / expected)[expected > 0]
    freedom = torch.tensor((len(terms) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, terms.sum() / 2) > 1e-3


def last(model, task, *rows):
    """Return log-probs [20] of rows[0], which sees all residues but the others in `rows`."""
    native = torch.from_numpy(mpnn.encode(task.structure.sequence))
    order = [row for row in range(len(native)) if row not in rows] + [*rows]
    encoded = model.encode(*batches.structure_tensors(task.structure, "cpu"))
    with torch.no_grad():
        return model.decode(encoded, native[None], torch.tensor(order)[None])[0, rows[0], :20]


BIAS = {"L": 1.25, "A": 1.0, "W": -0.5}
BIASED = {"omit_AA": "CMDE", "bias_AA": [f"{letter}:{value}" for letter, value in BIAS.items()]}


@pytest.mark.parametrize("options", [{}, BIASED])
def test_a_letter_is_drawn_from_the_softmax_at_its_temperature(options, model):
    """Only residue 6 is designed, from softmax((log-probs + biases) / T)."""
    config = replace(MONOMER, **options)
    task = inference.read_task(BUNDLE, config)
    letters, log_probs = inference.sample(model, task, torch.full((800,), 2.0), config)
    scores = last(model, task, 5)
    torch.testing.assert_close(log_probs[0, 5, :20], scores, atol=1e-4, rtol=0)
    native = inference.native_letters(task.structure)
    others = [row for row in range(len(native)) if row != 5]
    assert (letters[:, others] == native[others]).all()
    biases = {**BIAS, **dict.fromkeys(BIASED["omit_AA"], -torch.inf)} if options else {}
    for letter, value in biases.items():
        scores[mpnn.ALPHABET.index(letter)] += value
    assert_drawn_from(letters[:, 5], scores / 2)


def test_copies_get_one_letter_from_the_mean_of_their_log_probs(dimer, model):
    """Of the two copies of residue 6, neither sees the other's letter."""
    length = len(inference.read_task(dimer, DIMER).structure.sequence) // 2 + 1  # of chain A
    config = replace(DIMER, mutable_positions=("A6", "B6"))
    task = inference.read_task(dimer, config)
    letters, log_probs = inference.sample(model, task, torch.full((800,), 2.0), config)
    assert (letters[:, 5] == letters[:, length + 5]).all()
    first = last(model, task, 5, length + 5)
    second = last(model, task, length + 5, 5)
    assert (first - second).abs().max() > 1e-3  # otherwise the mean is no test
    torch.testing.assert_close(log_probs[0, 5, :20], first, atol=1e-4, rtol=0)
    assert_drawn_from(letters[:, 5], (first + second) / 2 / 2)


def test_each_copy_counts_once_in_the_mean(tmp_path):
    """Of three, one or two of which lack the last residues; drawn at a temperature near 0."""
    config = replace(DIMER, design_chains=("A", "B", "C"))
    task = inference.read_task(copies(tmp_path / "trimer.pdb", 0, 1, 2), config)
    tables = torch.randn(20, len(task.designed), 21, generator=torch.Generator().manual_seed(0))
    steps = []

    class Model:
        def encode(self, *_):
            pass

        def sample(self, _encoded, order, choose):
            for rows, table in itertools.product(order.unbind(1), tables):
                letters = choose(rows, table[rows])[0].tolist()
                steps.append((rows[0].tolist(), table, letters))

    inference.sample(Model(), task, torch.tensor([1e-6]), config)
    assert {len({*rows}) for rows, *_ in steps} == {1, 2, 3}
    for rows, table, letters in steps:
        assert letters == [table[[*{*rows}], :20].mean(0).argmax()] * 3


@pytest.mark.parametrize("flags", [{}, {"homo_oligomer": False, "tied_positions": ("A6=B6",)}])
def test_a_copy_without_all_atoms_gets_the_letter_of_the_others(flags, dimer, tmp_path, model):
    """Residue 6 of chain B lacks its O; the letter comes from chain A's log-probs alone."""
    structure = gemmi.read_structure(str(dimer))
    structure[0]["B"][5].remove_atom("O", "\0")
    structure.write_pdb(str(tmp_path / "part.pdb"))
    config = replace(DIMER, mutable_positions=("A6",), **flags)
    task = inference.read_task(tmp_path / "part.pdb", config)
    assert np.flatnonzero(task.designed).tolist() == [5]
    letters, _ = inference.sample(model, task, torch.full((800,), 2.0), config)
    length = len(task.structure.sequence) // 2 + 1
    assert (letters[:, 5] == letters[:, length + 5]).all() and len({*letters[:, 5].tolist()}) > 5
    assert_drawn_from(letters[:, 5], last(model, task, 5, length + 5) / 2)


@pytest.mark.parametrize("numbering", ["pdb", "sequence", "gapped"])
@pytest.mark.parametrize("tied", [(), ("3=10",), ("A3=A10",), ("10=1",), ("2-5=10-13",)])
def test_ties_do_not_change_what_a_number_means(numbering, tied):
    """The residues of bundle_00 are 1 to 36, so all three numberings are the same."""
    options = {"tied_positions": tied, "numbering": numbering}
    for number in (12, 20):
        copies_of_12 = {4, 12} if tied == ("2-5=10-13",) else {12}
        expected = sorted(copies_of_12 if number == 12 else {20})
        one = replace(MONOMER, mutable_positions=(str(number),), **options)
        designed = inference.read_task(BUNDLE, one).designed
        assert (np.flatnonzero(designed) + 1).tolist() == expected
        others = config.DesignConfig(fixed_residues=(str(number),), **options)
        designed = inference.read_task(BUNDLE, others).designed
        assert (np.flatnonzero(~designed) + 1).tolist() == expected


def test_a_modified_residue_has_no_score_until_it_has_a_letter(tmp_path, capsys):
    """Its native letter is unknown; nothing that is written is NaN."""
    structure = gemmi.read_structure(str(BUNDLE))
    structure[0][0][8].name = "SEP"
    structure.write_pdb(str(tmp_path / "sep.pdb"))
    flags = [f"--model_path={MODEL}", f"--pdb_file={tmp_path}/sep.pdb", "--mutable_positions=9"]
    assert inference.main([*flags, "--num_samples=2", f"--output_dir={tmp_path}/out"]) == 0
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("sep.pdb: 2 seq")]
    assert ", perplexity " in line and line.endswith(", no recovery")
    result = data.read_json(tmp_path / "out/sep_sequences.json")  # which is strict
    native, *others = result["native"], *result["details"]
    assert [native[name] for name in ("score", "perplexity", "recovery")] == [None] * 3
    assert all(entry["score"] > 0 and entry["recovery"] is None for entry in others)
    heads = (tmp_path / "out/sep_sequences.fasta").read_text().splitlines()[::2]
    assert heads[0] == ">sep_native seed=0"
    assert heads[1] == f">sep_sample_0 score={others[0]['score']:.4f} T=0.1 seed=0"


def test_ranges_may_begin_below_zero(tmp_path, monkeypatch, capsys):
    """As those of a tag before the first residue; a flag cannot begin with a digit."""
    structure = gemmi.read_structure(str(BUNDLE))
    for number, residue in enumerate(structure[0][0], start=-5):
        residue.seqid = gemmi.SeqId(number, " ")
    structure.write_pdb(str(tmp_path / "tag.pdb"))
    flags = [f"--model_path={MODEL}", f"--pdb_file={tmp_path}/tag.pdb", "--check"]
    for words, count in (
        (["--mutable_positions", "-3"], 1),
        (["--mutable_ranges", "-5-10"], 16),
        (["--fixed_residues", "-5--1", "3"], 30),
        (["--mutable_positions", "7", "--tied_positions", "-3=7"], 2),
    ):
        assert inference.main([*flags, *words]) == 0
        assert f"chains A, {count} residues are designed" in capsys.readouterr().out


def test_all_residues_tied_decode_to_what_was_sampled(dimer, model):
    task = inference.read_task(dimer, DIMER)
    letters, log_probs = inference.sample(model, task, torch.tensor([0.5, 2.0] * 3), DIMER)
    length = len(task.structure.sequence) // 2 + 1
    assert letters.shape == (6, 2 * length - 1)
    assert (letters[:, : length - 1] == letters[:, length:]).all()
    order = inference.random_orders(task, 6, 0)
    assert order.shape == (6, length, 2)
    encoded = model.encode(*batches.structure_tensors(task.structure, "cpu"))
    with torch.no_grad():
        forced = model.decode(encoded, letters, order)
    torch.testing.assert_close(log_probs, forced, atol=1e-4, rtol=0)


def test_files_contain_temperatures_and_the_native_sequence(tmp_path, model):
    flags = ["--model_path", str(MODEL), "--pdb_file", str(BUNDLE), "--mutable_positions", "6"]
    flags += ["--temperature", "0.5", "2", "--num_samples", "3", "--output_dir", str(tmp_path)]
    assert inference.main(flags) == 0
    lines = (tmp_path / "bundle_00_sequences.fasta").read_text().splitlines()
    native, *others = [line for line in lines if "=" in line]
    assert native.startswith(">bundle_00_native score=") and "T=" not in native
    assert native.endswith("recovery=1.0000")
    assert [line.split("T=")[1].split()[0] for line in others] == ["0.5"] * 3 + ["2"] * 3
    (result,) = json.loads((tmp_path / "all_results.json").read_text())
    assert [entry["temperature"] for entry in result["details"]] == [0.5] * 3 + [2.0] * 3
    task = inference.read_task(BUNDLE, MONOMER)
    score = -last(model, task, 5)[mpnn.ALPHABET.index(task.structure.sequence[5])].item()
    assert result["native"]["score"] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--omit_AA", "CZ"], "--omit_AA: 'CZ' is out of range (expected some, but not all, of"),
        (["--omit_AA", mpnn.ALPHABET[:20]], "--omit_AA: "),
        (["--bias_AA", "A"], "--bias_AA: ('A',) is out of range (expected such as A:0.5 G:-1)"),
        (["--bias_AA", "AC:1"], "--bias_AA: "),
        (["--bias_AA", "A:nan"], "--bias_AA: "),
        (["--bias_AA", "A:1", "G:1", "A:-1"], "--bias_AA: A has two values, or is in --omit_AA"),
        (["--bias_AA", "A:1", "--omit_AA", "CA"], "--bias_AA: A has two values, or is in --omit_A"),
        (["--fixed_residues", "1-36"], "fixed_residues: they are all residues of bundle_00.pdb"),
        (
            ["--mutable_positions", "3", "5-9", "--fixed_residues", "1-4"],
            "mutable_positions: 3 is in fixed_residues, too; use one of them",
        ),
        (["--homo_oligomer"], "--homo_oligomer needs --design_chains of copies"),
        (
            ["--tied_positions", "A3-5"],
            "--tied_positions: ('A3-5',) is out of range (expected such",
        ),
        (
            ["--homo_oligomer", "--tied_positions", "A3=A5"],
            "--tied_positions: --homo_oligomer ties",
        ),
    ],
)
def test_a_mistake_costs_one_line(flags, problem, tmp_path, monkeypatch):
    shutil.copy(BUNDLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        inference.main(["--model_path", str(MODEL), "--pdb_file", "bundle_00.pdb", *flags])
    message = str(caught.value)
    assert problem in message and message.splitlines() == [message]
    assert not (tmp_path / "outputs").exists()


# --- tied copies in the loss ---------------------------------------------------------------------


def read_pairs(folder, content, **options):
    """Return the pairs of a file with one item (JSON), or of a text (CSV)."""
    is_table = isinstance(content, str)
    file = folder / ("pairs.csv" if is_table else "pairs.json")
    file.write_text(content if is_table else json.dumps([content]))
    settings = config.Config(homo_oligomer=True, **options)
    return pairs.read(str(file), {}, settings)[0], settings


def tied_log_likelihood(model, pair, letters, order):
    """Return the sum over tied residues of the log-softmax of the mean of the copies' log-probs.

    Each copy has a decoding of its own, in which it sees only earlier groups.
    """
    encoded = model.encode(*batches.structure_tensors(pair.backbone, "cpu"))
    letters = torch.from_numpy(letters)
    total = 0.0
    for time, group in enumerate(order):
        before = [row for earlier in order[:time] for row in dict.fromkeys(earlier)]
        scores = []
        for row in dict.fromkeys(group):
            later = sorted({*range(len(letters))} - {row, *before})
            alone = torch.tensor([[*before, row, *later]])
            scores.append(model.decode(encoded, letters[None], alone)[0, row])
        mean = torch.stack(scores).double().mean(0)
        if pair.designed[group[0]]:
            total += mean.log_softmax(-1)[letters[group[0]]].item()
    return total


def item_of(dimer, changed=9):
    """Return a pair of the dimer, whose sequences differ in one letter of each chain."""
    task = inference.read_task(dimer, replace(DIMER, homo_oligomer=False))
    text = pairs.text_of(mpnn.encode(task.structure.sequence), task.structure)
    other = []
    for chain in text.split("/"):
        letter = "W" if chain[changed] != "W" else "G"
        other.append(chain[:changed] + letter + chain[changed + 1 :])
    item = {"pdb_file": str(dimer), "design_chains": ("A", "B")}
    return item | {"preferred_seq": text, "unpreferred_seq": "/".join(other)}


def renumbered(dimer, file, numbers):
    """Write the dimer with these functions of the residue numbers of its chains."""
    structure = gemmi.read_structure(str(dimer))
    for chain, number in zip(structure[0], numbers, strict=True):
        for residue in chain:
            residue.seqid = gemmi.SeqId(number(residue.seqid.num), " ")
    structure.write_pdb(str(file))
    return file


def test_copies_whose_numbers_continue_are_tied_by_place(tmp_path, model):
    """As by the official make_tied_positions_dict.py; a gap in both chains is a row in both."""
    length = len(inference.read_task(BUNDLE, MONOMER).structure.sequence)
    dimer = copies(tmp_path / "dimer.pdb", 0, 0)
    numbers = {  # of chain A, chain B, and rows of each chain
        "same": (lambda n: n, lambda n: n, length),
        "continued": (lambda n: n, lambda n: n + length, length),
        "gap": (lambda n: n + 5 * (n > 9), lambda n: n + 5 * (n > 9) + 100, length + 5),
    }
    for name, (*functions, rows) in numbers.items():
        file = renumbered(dimer, tmp_path / f"{name}.pdb", functions)
        backbone = inference.read_task(file, DIMER).structure
        pairs_of_rows = [[row, row + rows] for row in range(rows) if backbone.observed[row]]
        assert backbone.tied[backbone.observed[backbone.tied[:, 0]]].tolist() == pairs_of_rows, name
    shorter = renumbered(copies(dimer, 0, 1), tmp_path / "s.pdb", numbers["continued"][:2])
    with pytest.raises(
        UserError,
        match="residue 1 is . in 1 chains; --homo_oligomer needs .* copies, with the same",
    ):
        inference.read_task(shorter, DIMER)


@pytest.mark.parametrize("kind", ["random", "mutated_last"])
@torch.no_grad()
def test_the_loss_of_copies_is_that_of_one_letter_each(dimer, tmp_path, model, kind):
    (pair,), settings = read_pairs(tmp_path, item_of(dimer), decoding_order=kind)
    length = pair.backbone.tied.shape[0]
    assert pair.backbone.tied.shape == (length, 2) and 2 * length - 1 == len(pair.preferred)
    assert pair.targets.sum() == length and pair.mutated.sum() == 2
    batch = batches.collate([pair], settings, "cpu")
    # one decoding is that of both sequences where only the last letter differs
    assert len(batch.orders) == (1 if kind == "mutated_last" else 2)
    sums = batches.Scorer(model)(batch)
    (order,) = batches.decoding_orders(pair, settings)
    for value, letters in zip(sums, (pair.preferred, pair.unpreferred), strict=True):
        expected = tied_log_likelihood(model, pair, letters, order.tolist())
        assert value.item() == pytest.approx(expected, rel=2e-6)


def test_a_mutation_or_mutable_position_of_one_copy_is_that_of_all(dimer, tmp_path):
    item = item_of(dimer)
    letter = item["preferred_seq"][9]
    text = f"pdb_file,design_chains,mutation,ddg\n{dimer},AB,{letter}10W,1.5\n"
    (pair,), _ = read_pairs(tmp_path, text)
    rows = np.flatnonzero(pair.mutated)
    assert [pair.backbone.labels[row] for row in rows] == ["10", "10"]
    assert {*pair.unpreferred[rows]} == {mpnn.ALPHABET.index("W")} and pair.margin == 1.5
    (same,), _ = read_pairs(tmp_path, text.replace("10W", f"A10W:{letter}B10W"))
    assert (same.unpreferred == pair.unpreferred).all()
    with pytest.raises(UserError, match="B10Y: residue 10 has two mutations; use one per residue"):
        read_pairs(tmp_path, text.replace("10W", f"A10W:{letter}B10Y"))
    (pair,), _ = read_pairs(tmp_path, item | {"mutable_positions": [10]})
    assert (np.flatnonzero(pair.designed) == rows).all() and pair.targets.sum() == 1
    first, second = item["unpreferred_seq"].split("/")
    item["unpreferred_seq"] = f"{first}/{item['preferred_seq'].split('/')[1]}"
    with pytest.raises(UserError, match=r"pairs.json\[0\]: the copies of --homo_oligomer differ"):
        read_pairs(tmp_path, item)


def test_a_residue_that_is_modified_in_one_copy_has_the_letter_of_the_other(dimer, tmp_path):
    structure = gemmi.read_structure(str(dimer))
    native = gemmi.find_tabulated_residue(structure[0]["A"][2].name).one_letter_code
    structure[0]["A"][2].name = "SEP"
    structure.write_pdb(str(tmp_path / "modified.pdb"))
    letter = item_of(dimer)["preferred_seq"][9]
    for name in (f"{letter}10W", f"{native}3W"):
        text = f"pdb_file,design_chains,mutation,ddg\n{tmp_path}/modified.pdb,AB,{name},1.5\n"
        (pair,), _ = read_pairs(tmp_path, text)
        (same,), _ = read_pairs(tmp_path, text.replace(f"{tmp_path}/modified.pdb", str(dimer)))
        assert (pair.preferred == same.preferred).all() and pair.sign == same.sign == -1
        assert (pair.unpreferred == same.unpreferred).all() and pair.mutated.sum() == 2


def test_probabilities_given_all_other_letters_and_given_none(model, tmp_path):
    """By decoding the residue last, and first, with any letters at the others."""
    config = replace(DIMER, homo_oligomer=False, output_dir=str(tmp_path))
    task = inference.read_task(copies(tmp_path / "two.pdb", 0, 1), config)
    count = len(task.structure.sequence)
    conditional, unconditional = (
        inference.probabilities(model, task, kind, "cpu")
        for kind in ("conditional", "unconditional")
    )
    encoded = model.encode(*batches.structure_tensors(task.structure, "cpu"))
    for row in (0, 5, count - 1):
        assert torch.allclose(conditional[row, :20], last(model, task, row), atol=1e-5)
        order = [row, *[other for other in range(count) if other != row]]
        letters = torch.randint(20, (1, count), generator=torch.Generator().manual_seed(row))
        with torch.no_grad():
            first = model.decode(encoded, letters, torch.tensor([order]))[0, row]
        assert torch.allclose(unconditional[row], first, atol=1e-5)
    assert not torch.allclose(conditional, unconditional, atol=0.01)
    one = inference.probabilities(
        model, task._replace(designed=np.arange(count) == 5), "conditional", "cpu"
    )
    assert torch.equal(one[5], conditional[5]) and one.isfinite().all(-1).tolist().count(True) == 1
    config.probabilities = "unconditional"
    inference.write_probabilities(model, task, config, "cpu")
    lines = (tmp_path / "two_probabilities.csv").read_text().splitlines()
    assert lines[0] == "residue,native," + ",".join(mpnn.ALPHABET)
    rows = [line.split(",") for line in lines[1:]]
    assert [row[1] for row in rows] == [*task.structure.sequence]
    assert (rows[0][0], rows[-1][0]) == ("A1", f"B{count // 2}")
    assert float(rows[5][2]) == pytest.approx(unconditional[5, 0].exp().item(), abs=1e-6)


def test_tied_positions_of_several_states_get_one_letter(model, tmp_path):
    """Three states of one sequence: as homo_oligomer if all is tied; here residues 3 to 5 and 7."""
    file = copies(tmp_path / "states.pdb", 0, 0, 0)
    states = replace(DIMER, design_chains=("A", "B", "C"))
    copied = inference.read_task(file, states).structure.tied
    size = len(copied)
    states.homo_oligomer = False
    states.tied_positions = (f"A1-{size}=B1-{size}=C1-{size}",)
    tied = inference.read_task(file, states).structure.tied
    assert sorted(tied.tolist()) == sorted(copied.tolist())
    states.tied_positions = ("A3-5=B3-5=C3-5", "A7=C7")
    task = inference.read_task(file, states)
    rows = {frozenset(row) for row in task.structure.tied.tolist()}
    groups = [[row, size + row, 2 * size + row] for row in (2, 3, 4)] + [[6, 2 * size + 6]]
    free = set(range(3 * size)) - set(itertools.chain(*groups))
    assert rows == {*map(frozenset, groups), *(frozenset([row]) for row in free)}
    # an even mean: each entry of a row counts, and 6 occurs twice in the row of three
    weights = task.structure.tied_weights
    assert weights[[2, 6, 2 * size + 6, 0]] == pytest.approx([1 / 3, 1 / 4, 1 / 2, 1 / 3])
    letters, _ = inference.sample(model, task, torch.full((50,), 2.0), states)
    for group in groups:
        assert (letters[:, group] == letters[:, group[:1]]).all()
    assert (letters[:, 0] != letters[:, size]).any()
    for words, message in {
        ("A3-5=B3-6",): "A3-5=B3-6: its ranges must have the same number of residues",
        ("A3=B3", "B3=C3"): "a residue is tied twice",
    }.items():
        states.tied_positions = words
        with pytest.raises(UserError, match=f"^--tied_positions: {message}"):
            inference.read_task(file, states)
