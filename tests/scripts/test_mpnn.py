"""ProteinMPNN on generated backbones: which positions see which, padding, rejected inputs."""

import gc

import pytest
import torch

from ddp_utils import UserError
from dpo_inv.edges import edge_network
from dpo_inv.mpnn import ProteinMPNN


def model(**sizes):
    torch.manual_seed(0)
    made = ProteinMPNN(**{"hidden": 32, "layers": 2, **sizes})
    for parameter in made.parameters():  # gains and biases are 1 and 0 at first
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def backbone(length, seed=0, chains=1):
    """A wound-up walk: coords, mask, residue_idx, chain_encoding, each [L, ...]."""
    dice = torch.Generator().manual_seed(seed)
    steps = torch.randn(length, 3, generator=dice)
    alphas = 3.8 * torch.nn.functional.normalize(steps, dim=-1).cumsum(0) * 0.7
    coords = alphas[:, None] + torch.randn(length, 4, 3, generator=dice)
    chain = torch.arange(length) * chains // length
    return coords, torch.ones(length), torch.arange(length) + 100 * chain, chain + 1


def letters(*shape, seed=0):
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(seed))


def order_of(length, seed=0):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("length", [20, 61, 106])
def test_missing_residues_change_nothing(length):
    """Whatever stands in their coordinates, and with fewer residues than neighbors, too."""
    mpnn, parts, sequences = model(neighbors=48), backbone(length), letters(2, 120)
    order = torch.cat([order_of(length), torch.arange(length, 120)])[None]
    alone = mpnn.decode(mpnn.encode(*parts), sequences[:, :length], order[:, :length])
    padded = [torch.cat([x, x[:1].repeat_interleave(120 - length, 0)]) for x in parts]
    padded[0][length:] = torch.nan
    padded[1][length:] = 0
    beside = mpnn.decode(mpnn.encode(*padded), sequences, order)
    torch.testing.assert_close(beside[:, :length], alone, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 13, 29])
def test_a_letter_changes_only_what_is_decoded_later(place):
    mpnn, order, sequence = model(neighbors=30), order_of(30), letters(30)
    encoded = mpnn.encode(*backbone(30))
    other = sequence.clone()
    other[order[place]] = (other[order[place]] + 1) % 20
    here, there = mpnn.decode(encoded, torch.stack([sequence, other]), order[None])
    changed = (here != there).any(-1)[order]  # by time
    assert not changed[: place + 1].any()
    assert changed[place + 1 :].all()  # each residue is everyone's neighbour here


def changed(**changes):
    """A checkpoint with some tensors replaced; None removes one."""
    tensors = model(hidden=8, neighbors=4).state_dict()
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    return {"num_edges": 4, "noise_level": 0.1, "model_state_dict": tensors}


BAD = [
    (changed(W_v__weight=torch.zeros(8, 8)), "W_v.weight"),  # membrane or CA-only
    (changed(features__node_project_down__weight=torch.zeros(8, 8)), "node_project_down"),
    (changed(W_s__weight=None), "W_s.weight"),
    (changed(W_e__weight=None), "W_e.weight"),
    (changed(W_out__bias=torch.zeros(20)), "W_out.bias"),
    ({"num_edges": 4, "noise_level": 0.1}, "model_state_dict"),
    (changed() | {"noise_level": "much"}, "much"),
    ({"model_state_dict": print}, "Weights only load failed"),
]


def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path):
    for content, says in BAD:
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(UserError) as caught:
            ProteinMPNN.load(tmp_path / "weights.pt")
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}/weights.pt: not a ProteinMPNN checkpoint: ")
        assert says in message and "\n" not in message and "v_48_020.pt" in message


def test_half_a_file_is_never_left(tmp_path, monkeypatch):
    path = tmp_path / "weights.pt"
    model(hidden=8).save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left") as caught:
        model(hidden=16).save(path)
    assert caught.value.filename == str(path) and path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["weights.pt"]


def test_a_backward_pass_frees_what_it_needed_unless_the_graph_is_retained():
    """The outputs of a batch live until the forward pass of the next one has ended."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(24, 8), torch.nn.Linear(8, 8)
    nodes, edges, table = torch.randn(1, 5, 8), torch.randn(5, 3, 8), torch.randn(5, 8)
    indices = torch.randint(5, (1, 5, 3))
    loss = edge_network(first, second, torch.ones(5, 3), nodes, table, indices, edges).sum()

    def activations():
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return [tensor for tensor in tensors if tensor.shape == (1, 5, 3, 8)]

    loss.backward(retain_graph=True)
    once = second.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(second.weight.grad, 2 * once)
    assert once.any() and activations() == []
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
