"""ProteinMPNN against the official code: arrays, log-probs, DPO losses, gradients, sampling.

make_mpnn.py had them made on generated backbones. The weights are drawn by the rule of seeded.py,
biases and gains that are not 0 and 1 among them: std has the published size, small is small; seed 0
is the policy, seed 1 the reference.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from conftest import ROOT
from dpo_inv import inference, structure
from dpo_inv.batches import Batch, Scorer
from dpo_inv.config import Config, DesignConfig
from dpo_inv.mpnn import ALPHABET, ProteinMPNN, encode
from dpo_inv.run_dpo_ddp import loss_of
from golden import seeded

HERE = Path(__file__).parent
BACKBONE = ("X", "mask", "residue_idx", "chain_encoding")
LOGPS, LOSS = {"atol": 2e-5, "rtol": 0}, {"abs": 2e-4}
SIZES = {"std": (128, 3, 48), "small": (32, 1, 16)}
NUMBERS = json.loads((HERE / "mpnn_official.json").read_text())
BUNDLES = ROOT / "data/input/structures"
CHAINS = {  # what was read, and in which order its chains
    "gaps": (BUNDLES / "bundle_07.pdb", "A"),
    "complex": (BUNDLES / "bundle_03.pdb", "BA"),  # designed ones come first
    "awkward": (HERE / "awkward.pdb", "AB"),
}
CASES = [f"{config}/{name}" for config in SIZES for name in ("gaps", "complex", "awkward")]


@functools.cache
def tensors():
    return load_file(HERE / "mpnn_official.safetensors")


@functools.cache
def model_of(config, seed):
    return seeded.fill(ProteinMPNN(*SIZES[config]), seed)


def batched(structure, *names):
    """[L, ...] each."""
    found = [tensors()[f"{structure}/{name}"] for name in names]
    return [value if value.is_floating_point() else value.long() for value in found]


def same(ours, name, known, **tolerance):
    expected = tensors()[name].numpy()
    np.testing.assert_allclose(ours.numpy()[known], expected[known], **(tolerance or LOGPS))


@pytest.mark.parametrize("name", CHAINS)
def test_the_arrays_are_those_of_the_official_parser(name):
    """Negative numbers, gaps, an insertion code, missing atoms, conformers, MSE, water."""
    path, chains = CHAINS[name]
    found = structure.read(path, [*chains])
    assert found.chains == (*chains,)
    official = [tensors()[f"{name}/{key}"] for key in (*BACKBONE, "S")]
    for ours, theirs in zip((*found[:4], encode(found.sequence)), official, strict=True):
        assert np.array_equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_log_probs_equal_the_official_ones(name):
    config, structure = name.split("/")
    model, known = model_of(config, 0), tensors()[f"{structure}/mask"].numpy() == 1
    encoded = model.encode(*batched(structure, *BACKBONE))
    orders = torch.stack(batched(structure, "order_rand", "order_id"))  # [2, L]
    native, mutated = model.decode(encoded, torch.stack(batched(structure, "S", "S_mut")), orders)
    same(native, f"{name}/native_rand", known)
    same(mutated, f"{name}/mut_id", known)


def batch_of(structure):
    """What the program trains on: native preferred to mutated, summed over the designed chains."""
    sequences = torch.stack(batched(structure, "S", "S_mut"))  # [2, L]
    [order, mask, designed] = batched(structure, "order_rand", "mask", "chain_M")
    targets = (mask * designed > 0)[None]
    backbone = batched(structure, *BACKBONE)
    order = order.expand_as(sequences)
    tied = torch.arange(order.shape[1])[:, None], torch.ones(order.shape[1])
    return Batch(backbone, sequences, order, *tied, targets, None, None)


@pytest.mark.parametrize("name", CASES)
def test_dpo_losses_and_gradients_equal_the_official_ones(name):
    config, structure = name.split("/")
    expected, policy, batch = NUMBERS[name], model_of(config, 0), batch_of(structure)
    with torch.no_grad():
        reference = torch.stack(Scorer(model_of(config, 1))(batch), -1)  # [1, 2]
    policy.zero_grad()
    config = Config(beta=NUMBERS["beta"])
    loss, metrics = loss_of(Scorer(policy), batch, reference, [], config)
    loss.sum().backward()
    for row, side in enumerate(("chosen", "rejected")):
        mine = metrics[f"logps/{side}"].item()
        assert mine == pytest.approx(expected[f"logps_policy_{side}"], rel=2e-6)
        assert reference[0, row].item() == pytest.approx(
            expected[f"logps_reference_{side}"], rel=2e-6
        )
        reward = metrics[f"rewards/{side}"].item()
        assert reward == pytest.approx(expected[f"rewards_{side}"], **LOSS)
    assert loss.item() == pytest.approx(expected["loss"], **LOSS)
    gradients = {key: parameter.grad for key, parameter in policy.named_parameters()}
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert total == pytest.approx(expected["grad_norm"], rel=2e-4)
    assert gradients.keys() == expected["gradients"].keys()
    for key, (norm, *products) in expected["gradients"].items():
        found = [gradients[key].norm().item(), *seeded.along(key, gradients[key])]
        # what a difference of 1e-4 of the norm has as its product: five times its deviation
        bound = 5e-4 * norm + 1e-6 * total
        assert found == pytest.approx([norm, *products], rel=0, abs=bound), key
    policy.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("config", SIZES)
def test_a_peptide_has_the_numbers_that_it_has_alone(config):
    """Also beside a longer structure, where the official code is wrong by up to 2 nats."""
    model = model_of(config, 0)
    coords, mask, places, chains, letters, order = batched("peptide", *BACKBONE, "S", "order_id")
    rest = [place for place in range(20) if place != 7]

    def log_probs(letters, order, *backbone):
        return model.decode(model.encode(*backbone), letters[None], order[None])[0]

    alone = log_probs(letters, order, coords, mask, places, chains)
    padded = [functional.pad(t, (0, 86)) for t in (letters, order, mask, places, chains)]
    padded[1][20:] = torch.arange(20, 106)
    padded.insert(2, functional.pad(coords, (0, 0, 0, 0, 0, 86)))
    beside = log_probs(*padded)[:20]
    same(alone, f"{config}/peptide/whole", slice(20))
    same(beside, f"{config}/peptide/whole", slice(20))
    # a missing residue is nobody's neighbour, as if it were not in the file (in the official
    # decoder it is one if there are too few others)
    hole = mask.clone()
    hole[7] = 0
    holed = log_probs(letters, order, coords, hole, places, chains)
    same(holed[rest], f"{config}/peptide/shorter", slice(19))


@torch.no_grad()
@pytest.mark.parametrize("temperature", ["0.1", "1.0"])
@pytest.mark.parametrize("config", SIZES)
def test_sampling_has_the_official_probabilities(config, temperature):
    """The letters that the official code drew are drawn again; what they were drawn from agrees."""
    stem, model = f"{config}/complex/T{temperature}", model_of(config, 0)
    letters = tensors()[f"{stem}/S"].long()
    [order, designed] = batched("complex", "order_rand", "chain_M")
    designed = designed.numpy() == 1

    def choose(residues, _log_probs):
        return letters[residues]

    def probabilities(log_probs):
        log_probs = log_probs / float(temperature)
        log_probs[..., ALPHABET.index("X")] = -torch.inf
        return log_probs.softmax(-1)

    encoded = model.encode(*batched("complex", *BACKBONE))
    sequences, found = model.sample(encoded, order[None, :, None], choose)
    forced = model.decode(encoded, letters[None], order[None])
    assert (sequences[0] == letters).all()
    for log_probs in (found, forced):
        same(probabilities(log_probs)[0], f"{stem}/probs", designed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", ["0.1", "1.0"])
def test_the_program_draws_as_often_as_the_official_probabilities_say(temperature, monkeypatch):
    """The first letter of a design, whose context is the fixed chain alone: 4000 draws of it."""
    config = DesignConfig(design_chains=("B",), fixed_chains=("A",))
    task = inference.read_task(ROOT / "data/input/structures/bundle_03.pdb", config)
    fixed = ~torch.from_numpy(task.designed)
    for order in inference.random_orders(task, 9, seed=0):
        assert fixed[order[:, 0]].tolist() == sorted(
            fixed.tolist(), reverse=True
        )  # they come first
    [order, native] = batched("complex", "order_rand", "S")
    monkeypatch.setattr(inference, "random_orders", lambda *_: order[:, None].expand(4000, -1, -1))
    temperatures = torch.full((4000,), float(temperature))
    letters, _ = inference.sample(model_of("small", 0), task, temperatures, config)
    assert (letters[:, fixed] == native[fixed]).all()
    first = order[fixed.sum()]
    expected = tensors()[f"small/complex/T{temperature}/probs"][first]
    frequencies = letters[:, first].bincount(minlength=21) / 4000
    assert ((frequencies - expected).abs() <= 5 * (expected / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize("config", SIZES)
def test_what_is_saved_is_what_the_official_code_reads(config, tmp_path):
    given = model_of(config, 0)
    given.save(tmp_path / "weights.pt")
    again = ProteinMPNN.load(tmp_path / "weights.pt")
    assert (again.neighbors, again.noise_level) == (given.neighbors, given.noise_level)
    shapes = {name: str(list(tensor.shape)) for name, tensor in again.state_dict().items()}
    assert shapes == NUMBERS[f"{config}/shapes"]
    for name, tensor in given.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    # as in v_48_020.pt, as far as keys and types go
    saved = torch.load(tmp_path / "weights.pt", map_location="cpu", weights_only=True)
    assert saved.pop("model_state_dict").keys() == shapes.keys()
    kinds = {name: type(value) for name, value in saved.items()}
    assert kinds == {"num_edges": int, "noise_level": float}
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]
