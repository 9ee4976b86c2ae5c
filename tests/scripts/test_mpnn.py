"""ProteinMPNN on made-up backbones: who sees whom, what padding may change, what is refused."""

import pytest
import torch

from ddp_utils import UserError
from dpo_inv.mpnn import ProteinMPNN


def model(**sizes):
    torch.manual_seed(0)
    made = ProteinMPNN(**{"hidden": 32, "encoder_layers": 2, "decoder_layers": 2, **sizes})
    for parameter in made.parameters():  # gains and biases are 1 and 0 at first
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def backbone(length, seed=0, chains=1):
    """A wound-up walk: coords, mask, residue_idx, chain_encoding, each [1, L, ...]."""
    dice = torch.Generator().manual_seed(seed)
    steps = torch.randn(length, 3, generator=dice)
    alphas = 3.8 * torch.nn.functional.normalize(steps, dim=-1).cumsum(0) * 0.7
    coords = alphas[:, None] + torch.randn(length, 4, 3, generator=dice)
    chain = torch.arange(length) * chains // length
    idx = torch.arange(length) + 100 * chain
    return coords[None], torch.ones(1, length), idx[None], chain[None] + 1


def letters(*shape, seed=0):
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(seed))


def order_of(length, seed=0):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))[None]


def padded(structures, width):
    """Structures of any lengths as one batch; what stands in the padding must not matter."""
    batch = []
    for parts in structures:
        more = width - parts[1].shape[1]
        coords, mask, idx, chain = (torch.cat([t, t[:, :1].repeat_interleave(more, 1)], 1)
                                    for t in parts)  # fmt: skip
        mask[:, width - more :] = 0
        coords[:, width - more :] = torch.nan
        batch.append((coords, mask, idx, chain))
    return [torch.cat(parts) for parts in zip(*batch, strict=True)]


@torch.no_grad()
def test_a_structure_has_the_same_log_probs_alone_padded_and_beside_another():
    mpnn, lengths = model(neighbours=48), (20, 106, 61)
    structures = [backbone(n, n) for n in lengths]
    batch = mpnn.encode(*padded(structures, 106))
    sequences = letters(3, 2, 106)
    orders = [torch.cat([order_of(n), torch.arange(n, 106)[None]], 1)[None] for n in lengths]
    together = mpnn.decode(batch, sequences, torch.cat(orders))
    for row, (n, structure) in enumerate(zip(lengths, structures, strict=True)):
        for parts in (structure, padded([structure], 106)):
            encoded, length = mpnn.encode(*parts), parts[1].shape[1]
            alone = mpnn.decode(
                encoded, sequences[row, None, :, :length], orders[row][..., :length]
            )
            torch.testing.assert_close(together[row, :, :n], alone[0, :, :n], atol=1e-5, rtol=0)


def test_a_batch_has_the_gradient_of_its_structures():
    mpnn, lengths, sequences = model(neighbours=24), (15, 40), letters(2, 2, 40)
    structures = [backbone(n, n) for n in lengths]

    def total(parts, rows, length, n=None):
        encoded = mpnn.encode(*parts)
        found = mpnn.decode(encoded, sequences[rows, :, :length], order[rows, None, :length])
        found = found.gather(-1, sequences[rows, :, :length, None]).squeeze(-1) * parts[1][:, None]
        return found.sum()

    order = torch.cat([torch.cat([order_of(n), torch.arange(n, 40)[None]], 1) for n in lengths])
    whole = torch.autograd.grad(total(padded(structures, 40), slice(0, 2), 40), mpnn.parameters())
    parts = [total(s, slice(r, r + 1), lengths[r]) for r, s in enumerate(structures)]
    apart = torch.autograd.grad(sum(parts), mpnn.parameters())
    for (name, _), one, other in zip(mpnn.named_parameters(), whole, apart, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, name


@torch.no_grad()
@pytest.mark.parametrize("place", [0, 13, 29])
def test_a_letter_changes_only_what_is_decoded_later(place):
    mpnn, order, sequence = model(neighbours=30), order_of(30), letters(1, 30)
    encoded = mpnn.encode(*backbone(30))
    other = sequence.clone()
    other[0, order[0, place]] = (other[0, order[0, place]] + 1) % 20
    here, there = mpnn.decode(encoded, torch.stack([sequence, other], 1), order[None])[0]
    changed = (here != there).any(-1)[order[0]]  # by time
    assert not changed[: place + 1].any()
    assert changed[place + 1 :].all()  # each residue is everyone's neighbour here


def changed(**changes):
    """A checkpoint with some tensors replaced; None removes one."""
    tensors = model(hidden=8, neighbours=4).state_dict()
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    return {"num_edges": 4, "noise_level": 0.1, "model_state_dict": tensors}


BAD = [
    (changed(W_v__weight=torch.zeros(8, 8)), "W_v.weight"),  # a CA-only model
    (changed(W_s__weight=None), "W_s.weight"),
    (changed(W_e__weight=None), "W_e.weight"),
    (changed(W_out__bias=torch.zeros(20)), "W_out.bias"),
    (changed(W_e__weight=torch.full((8, 8), torch.nan)), "a tensor holds NaN or infinity"),
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
