"""ProteinMPNN against numbers of the official code: log-probs, DPO losses, gradients, sampling.

The weights are drawn at random: std has the published size; small is small; smallp is small, with
biases and gains that are not 0 and 1. Seed 0 is the policy, seed 1 the reference.
"""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from bench import mpnn_plain
from dpo_inv.batches import Batch
from dpo_inv.config import Config
from dpo_inv.edges import distances
from dpo_inv.mpnn import ALPHABET, ProteinMPNN
from dpo_inv.run_dpo_ddp import Scorer, pair_losses

BACKBONE = ("X", "mask", "residue_idx", "chain_encoding")
LOGPS, LOSS = {"atol": 2e-5, "rtol": 0}, {"abs": 2e-4}
ORDERS = {"id": "order_identity", "rand": "order_random"}


@pytest.fixture(scope="module")
def golden(shared):
    return shared / "golden/protein"


@pytest.fixture(scope="module")
def models(golden):
    """The model of a configuration and a seed, each read once."""
    kept = {}

    def get(config, seed):
        if (config, seed) not in kept:
            path = golden / f"weights_{config}_seed{seed}.safetensors"
            kept[config, seed] = ProteinMPNN.load(path)
        return kept[config, seed]

    return get


def read(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def batched(data, *names):
    return [torch.from_numpy(data[name])[None] for name in names]


def decoded(model, data, order):
    """log-probs [2, L, 21] of the native and the mutated sequence."""
    sequences = torch.stack(batched(data, "S_native", "S_mut"), 1)  # [1, 2, L]
    encoded = model.encode(*batched(data, *BACKBONE))
    return model.decode(encoded, sequences, *batched(data, ORDERS[order]))[0], sequences[0]


def names_of(pattern, prefix):
    """Which golden files there are, without the fixture: parametrize runs before it."""
    from conftest import SHARED

    found = sorted((SHARED / "golden/protein").glob(pattern))
    return [path.stem.removeprefix(prefix) for path in found] or ["std_5L33"]


@pytest.mark.parametrize("name", names_of("logp_*.npz", "logp_"))
def test_log_probs_equal_the_official_ones(name, golden, models):
    config, _, structure = name.partition("_")
    expected, data = read(golden / f"logp_{name}.npz"), read(golden / f"struct_{structure}.npz")
    known = data["mask"] == 1
    compared = 0
    for seed in (0, 1):
        model = models(config, seed)
        for order in ORDERS:
            with torch.no_grad():
                found, sequences = decoded(model, data, order)
            picked = found.gather(-1, sequences[..., None]).squeeze(-1).numpy()
            for row, sequence in enumerate(("native", "mut")):
                stem = f"logp_{sequence}_{order}_seed{seed}"
                for key, mine in ((stem, found[row].numpy()), (f"{stem}_picked", picked[row])):
                    if key in expected:
                        np.testing.assert_allclose(mine[known], expected[key][known], **LOGPS)
                        compared += 1
    assert compared >= 8
    with torch.no_grad():
        mine = models(config, 0).unconditional(models(config, 0).encode(*batched(data, *BACKBONE)))
    np.testing.assert_allclose(
        mine[0].numpy()[known], expected["uncond_logp_seed0"][known], **LOGPS
    )


def losses():
    from conftest import SHARED

    path = SHARED / "golden/protein/dpo_golden.json"
    return list(json.loads(path.read_text())) if path.exists() else ["std/5L33/rand"]


def batch_of(data, order):
    """What the program trains on: native preferred to mutated, summed over the designed chains."""
    structure = tuple(batched(data, *BACKBONE))
    sequences = torch.stack(batched(data, "S_native", "S_mut"), 1)  # [1, 2, L]
    orders = batched(data, ORDERS[order])[0].expand_as(sequences)
    targets = torch.from_numpy(data["mask"] * data["chain_M"])[None] > 0
    return Batch(structure, sequences, orders, targets, targets.sum(-1).expand(2, -1))


def test_policy_equal_to_reference_is_ln_2_to_the_last_digit(golden, models):
    batch = batch_of(read(golden / "struct_3HTN_designA.npz"), "rand")
    model = Scorer(models("small", 0))
    reference = torch.stack(model(batch), -1).detach()
    loss, metrics = pair_losses(model, batch, reference, Config())
    assert loss.item() == np.float32(math.log(2)) and metrics["rewards/margins"].item() == 0


@pytest.mark.parametrize("name", losses())
def test_dpo_losses_and_gradients_equal_the_official_ones(name, golden, models):
    expected = json.loads((golden / "dpo_golden.json").read_text())[name]
    config, structure, order = name.split("/")
    data, policy = read(golden / f"struct_{structure}.npz"), models(config, 0)
    batch = batch_of(data, order)
    with torch.no_grad():
        reference = torch.stack(Scorer(models(config, 1))(batch), -1)  # [1, 2]
    policy.zero_grad()
    loss, metrics = pair_losses(Scorer(policy), batch, reference, Config(beta=expected["beta"]))
    loss.sum().backward()
    for row, side in enumerate(("chosen", "rejected")):
        mine = metrics[f"logps/{side}"].item()
        assert mine == pytest.approx(expected[f"policy_{side}_logp"], rel=2e-6)
        assert reference[0, row].item() == pytest.approx(expected[f"ref_{side}_logp"], rel=2e-6)
        reward = metrics[f"rewards/{side}"].item()
        assert reward == pytest.approx(expected[f"reward_{side}"], **LOSS)
    assert metrics["rewards/margins"].item() == pytest.approx(expected["logits"], **LOSS)
    assert loss.item() == pytest.approx(expected["loss"], **LOSS)
    gradients = {key: parameter.grad for key, parameter in policy.named_parameters()}
    norms = {key: gradient.norm().item() for key, gradient in gradients.items()}
    total = torch.tensor(list(norms.values())).norm().item()
    assert total == pytest.approx(expected["grad_norm"], rel=2e-4)
    assert norms == pytest.approx(expected["grad_norm_per_param"], rel=2e-3, abs=1e-5 * total)
    whole = golden / f"grad_{config}_{structure}_{order}.safetensors"
    if whole.exists():
        official = load_file(whole)
        assert official.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert (gradient - official[key]).norm() <= 1e-4 * official[key].norm(), key
    policy.zero_grad()


@pytest.mark.parametrize("config", ["std", "small", "smallp"])
def test_a_peptide_has_the_numbers_that_it_has_alone(config, golden, models):
    """Also beside a longer structure, where the official code is wrong by up to 2.2."""
    data, model = read(golden / "peptide_5L33_30_50.npz"), models(config, 0)
    coords, places, chains, order, letters = batched(
        data, "X", "residue_idx", "chain_encoding", "order", "S"
    )
    mask = torch.ones(1, 20)
    with torch.no_grad():
        alone = model.log_probs(coords, mask, places, chains, letters, order)[0].numpy()
        padded = [functional.pad(t, (0, 86)) for t in (mask, places, chains, letters)]
        order106 = torch.cat([order, torch.arange(20, 106)[None]], 1)
        coords106 = functional.pad(coords, (0, 0, 0, 0, 0, 86))
        beside = model.log_probs(coords106, *padded, order106)[0, :20].numpy()
        gap = mask.clone()
        gap[0, 7] = 0
        holed = model.log_probs(coords, gap, places, chains, letters, order)[0].numpy()
        rest = [i for i in range(20) if i != 7]
        shorter = torch.tensor([[rest.index(i) for i in order[0].tolist() if i != 7]])
        rows = [t[:, rest] for t in (coords, mask, places, chains, letters)]
        removed = model.log_probs(*rows, shorter)[0].numpy()
    np.testing.assert_allclose(alone, data[f"{config}_logp_alone"], **LOGPS)
    np.testing.assert_allclose(beside, data[f"{config}_logp_alone"], **LOGPS)
    # a missing residue is no neighbour of ours, but one of the official decoder's if k allows it
    np.testing.assert_allclose(holed[rest], removed, **LOGPS)
    assert np.abs(holed - data[f"{config}_logp_gap7"])[rest].max() < 0.1


@pytest.mark.parametrize("config", ["std", "small", "smallp"])
def test_intermediate_states_equal_the_official_ones(config, golden, models):
    expected, data = read(golden / "intermediate_5L33.npz"), read(golden / "struct_5L33.npz")
    model, rows = models(config, 0), torch.from_numpy(expected["edge_rows"])
    seen = {}

    def keep(name):
        return lambda _module, _inputs, output: seen.update({name: output})

    hooks = [model.features.register_forward_hook(keep("E"))]
    hooks += [
        layer.register_forward_hook(keep(f"enc{i}")) for i, layer in enumerate(model.encoder_layers)
    ]
    for i, layer in enumerate(model.decoder_layers):
        hooks.append(layer.norm2.register_forward_hook(keep(f"dec{i}_hV")))
    with torch.no_grad():
        encoded = model.encode(*batched(data, *BACKBONE))
        order, letters = batched(data, "order_random", "S_native")
        model.decode(encoded, letters[:, None], order)
    for hook in hooks:
        hook.remove()
    official = torch.from_numpy(expected[f"{config}/E_idx"])
    ours = encoded.neighbours[0]
    assert (ours.sort(-1).values == official.sort(-1).values).all()
    # of two that are equally far, either may be the first: edges are compared in official order
    turn = (ours[:, None, :] == official[..., None]).int().argmax(-1)[..., None]  # [L, K, 1]

    def check(mine, name, **tolerance):
        np.testing.assert_allclose(mine.numpy(), expected[f"{config}/{name}"], **tolerance)

    def edges(tensor):
        return tensor.take_along_dim(turn, 1)[rows]

    apart = edges(distances(batched(data, "X")[0], encoded.neighbours)[0])  # [5, K, 25]
    bells = torch.exp(-(((apart[..., None] - torch.linspace(2, 22, 16)) / 1.25) ** 2)).flatten(-2)
    radial = expected[f"{config}/edge_raw"][..., 16:]
    np.testing.assert_allclose(bells.numpy(), radial, rtol=0, atol=2e-5)
    check(edges(seen["E"][0]), "E", rtol=0, atol=5e-5)
    for i in range(len(model.encoder_layers)):
        check(seen[f"enc{i}"][0][0], f"enc{i}_hV", rtol=0, atol=5e-5)
        check(edges(seen[f"enc{i}"][1][0]), f"enc{i}_hE", rtol=0, atol=5e-5)
    for i in range(len(model.decoder_layers)):
        check(seen[f"dec{i}_hV"][0, 0], f"dec{i}_hV", rtol=0, atol=5e-5)


@pytest.mark.parametrize("temperature", ["0.1", "1.0"])
@pytest.mark.parametrize("config", ["std", "small", "smallp"])
def test_sampling_has_the_official_probabilities(config, temperature, golden, models):
    """The letters that the official code drew are drawn again; what they were drawn from agrees."""
    data, drawn = read(golden / "struct_5L33.npz"), read(golden / "sample_5L33.npz")
    stem, model = f"{config}_T{temperature}", models(config, 0)
    letters, order = batched(drawn, f"{stem}_S", f"{stem}_order")

    def choose(residues, _log_probs):
        return letters.gather(-1, residues)

    def probabilities(log_probs):
        log_probs = log_probs / float(temperature)
        log_probs[..., ALPHABET.index("X")] = -torch.inf
        return log_probs.softmax(-1).numpy()

    with torch.no_grad():
        encoded = model.encode(*batched(data, *BACKBONE))
        sequences, found = model.sample(encoded, order[:, None], choose)
        forced = model.decode(encoded, letters[:, None], order)
    assert (sequences[:, 0] == letters).all()
    expected = drawn[f"{stem}_probs"]
    np.testing.assert_allclose(probabilities(found)[0, 0], expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(probabilities(forced)[0, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("config", ["small", "std"])
def test_what_is_saved_is_what_was_loaded(config, ending, golden, tmp_path):
    given = ProteinMPNN.load(golden / f"weights_{config}_seed0.safetensors")
    given.save(tmp_path / f"weights{ending}")
    again = ProteinMPNN.load(tmp_path / f"weights{ending}")
    assert (again.neighbours, again.noise_level) == (given.neighbours, given.noise_level)
    official = load_file(golden / f"weights_{config}_seed0.safetensors")
    assert {name: t.shape for name, t in again.state_dict().items()} == {
        name: t.shape for name, t in official.items()
    }
    assert all(torch.equal(tensor, official[name]) for name, tensor in again.state_dict().items())
    if config == "small":
        both = golden / "weights_small_seed0.pt"
        pickled = ProteinMPNN.load(both).state_dict()
        assert all(torch.equal(tensor, official[name]) for name, tensor in pickled.items())
        if ending == ".pt":
            ours, theirs = (
                torch.load(file, map_location="cpu", weights_only=True)
                for file in (tmp_path / "weights.pt", both)
            )
            assert ours.keys() == theirs.keys() == {"num_edges", "noise_level", "model_state_dict"}
            for key in ("num_edges", "noise_level"):
                assert ours[key] == theirs[key] and type(ours[key]) is type(theirs[key])
            assert ours["model_state_dict"].keys() == theirs["model_state_dict"].keys()
    assert [path.name for path in tmp_path.iterdir()] == [f"weights{ending}"]


@pytest.mark.parametrize("order", ORDERS)
def test_the_plain_way_of_the_benchmark_gives_the_official_numbers(order, golden):
    """So that the benchmark is against an honest opponent."""
    for config, sizes in (("std", (128, 3, 3, 48)), ("smallp", (32, 1, 1, 16))):
        plain = mpnn_plain.Plain(*sizes)
        plain.load_state_dict(load_file(golden / f"weights_{config}_seed0.safetensors"))
        data = read(golden / "struct_5L33.npz")
        with torch.no_grad():
            found = plain(*batched(data, *BACKBONE, "S_native", ORDERS[order]))[0].numpy()
        expected = read(golden / f"logp_{config}_5L33.npz")[f"logp_native_{order}_seed0"]
        np.testing.assert_allclose(found, expected, **LOGPS)
