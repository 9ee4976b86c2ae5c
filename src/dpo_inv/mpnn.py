"""ProteinMPNN, after the paper (Dauparas et al., Science 378, 49, 2022): backbone -> sequence.

The same tensors under the same names as the official code, and the same numbers, so that official
checkpoints load and the official tools read what is saved here. What differs is the way: the
backbone is encoded once for all sequences that are scored on it, and an edge carries nothing that
a residue can carry. There is no dropout: it would tell the policy from its reference.

S sequences on a backbone of L residues, K neighbours of each, H hidden.
"""

import io
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ddp_utils import UserError, data
from dpo_inv.edges import Features, nearest, network, rows

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # X: unknown or missing
UNKNOWN = ALPHABET.index("X")
SCALE = 30  # what a sum of messages is divided by, however many neighbours there are
# what torch raises for a file of another kind; the first, which it does not export, for one that
# holds more than tensors and numbers
UNREADABLE = (torch.serialization.pickle.UnpicklingError, OSError, EOFError, LookupError)
UNREADABLE += (AttributeError, RuntimeError, TypeError, ValueError)


def encode(text) -> np.ndarray:
    """Return letters of ALPHABET as numbers 0..20, [L]."""
    return np.array([ALPHABET.index(letter) for letter in text], dtype=np.int64)


class Encoded(NamedTuple):
    """What the decoder must know of a backbone."""

    nodes: torch.Tensor  # [L, H]
    edges: torch.Tensor  # [L, K, H]
    neighbours: torch.Tensor  # [L, K] the nearest first, each residue its own first
    valid: torch.Tensor  # [L, K] 1.0 where both residues are there, else 0.0
    mask: torch.Tensor  # [L] 1.0 where all four atoms are there


# --- layers --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What both kinds of layers have: a message along each edge, then residue by residue."""

    def __init__(self, hidden, parts):
        super().__init__()
        self.W1 = nn.Linear(parts * hidden, hidden)
        self.W2 = nn.Linear(hidden, hidden)
        self.W3 = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dense = nn.ModuleDict({"W_in": nn.Linear(hidden, 4 * hidden)})
        self.dense["W_out"] = nn.Linear(4 * hidden, hidden)

    def update(self, nodes, summed, valid, mask):
        """Nodes [..., H] and the sum of their gelu(W2 ...) over valid edges -> nodes [..., H]."""
        # W3 after the sum: linear in the messages, and K times fewer of them
        message = functional.linear(summed, self.W3.weight)
        message = message + self.W3.bias * valid.sum(-1, keepdim=True)
        nodes = self.norm1(nodes + message / SCALE)
        widened = functional.gelu(self.dense["W_in"](nodes))
        return self.norm2(nodes + self.dense["W_out"](widened)) * mask[..., None]


class EncoderLayer(Layer):
    """Nodes, then edges; a message sees the node, the edge and the neighbour."""

    def __init__(self, hidden):
        super().__init__(hidden, parts=3)
        self.W11 = nn.Linear(3 * hidden, hidden)
        self.W12 = nn.Linear(hidden, hidden)
        self.W13 = nn.Linear(hidden, hidden)
        self.norm3 = nn.LayerNorm(hidden)

    def forward(self, nodes, edges, indices, valid, mask):
        summed = self.along(self.W1, self.W2, nodes, edges, indices, valid)[0]
        nodes = self.update(nodes, summed, valid, mask)
        change = self.W13(self.along(self.W11, self.W12, nodes, edges, indices)[0])
        return nodes, self.norm3(edges + change)

    def along(self, linear, second, nodes, edges, indices, valid=None):
        """The network on [node | edge | neighbour's node], which are not laid side by side.

        A node's products are made once, not once an edge.
        """
        to_node, between, to_neighbour = linear.weight.chunk(3, 1)
        table = functional.linear(nodes, to_neighbour)
        own = functional.linear(nodes, to_node, linear.bias)[None]
        return network(second, table, indices, edges, own, between, valid)


class DecoderLayer(Layer):
    """A message sees the node, the edge and, of those decoded before, the letter and the node.

    Of the others it sees the encoder's node.
    """

    def __init__(self, hidden):
        super().__init__(hidden, parts=4)

    def split(self):
        """W1's columns for the node, the edge, the neighbour's letter and the neighbour."""
        return self.W1.weight.chunk(4, 1)

    def own(self, nodes):
        """A node's share in the messages to itself: [..., H] -> [..., H]."""
        return functional.linear(nodes, self.split()[0], self.W1.bias)

    def unseen(self, nodes):
        """Its share in messages to those decoded before: encoder's nodes [..., H] -> [..., H]."""
        return functional.linear(nodes, self.split()[3])

    def seen(self, nodes, sequences, embedding):
        """Its share in messages to those decoded later: [..., H], letters [...] -> [..., H]."""
        letters = functional.linear(embedding, self.split()[2])  # [21, H]
        return rows(letters, sequences) + functional.linear(nodes, self.split()[3])


# --- model ---------------------------------------------------------------------------------------


class ProteinMPNN(nn.Module):
    """log p(sequence | backbone), one letter after the other, in any order.

    hidden: width. neighbours: K, how many residues one sees. Weights are drawn at random; see
    `load`.
    """

    def __init__(self, hidden=128, encoder_layers=3, decoder_layers=3, neighbours=48):
        super().__init__()
        self.neighbours = neighbours
        self.noise_level = 0.0  # Angstrom with which the weights were trained: for the checkpoint
        self.features = Features(hidden)
        self.W_e = nn.Linear(hidden, hidden)
        self.W_s = nn.Embedding(len(ALPHABET), hidden)
        self.encoder_layers = nn.ModuleList(EncoderLayer(hidden) for _ in range(encoder_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(hidden) for _ in range(decoder_layers))
        self.W_out = nn.Linear(hidden, len(ALPHABET))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    # scoring

    def encode(self, coords, mask, residue_idx, chain_encoding) -> Encoded:
        """A backbone -> what `decode` needs; once for all sequences on it.

        coords [L, 4, 3] in Angstrom: N, CA, C, O. mask [L]: 1 where all four are known; what
        coords hold elsewhere does not matter. residue_idx [L]: numbers of which only differences
        within a chain count. chain_encoding [L]: the chain's number.
        """
        mask = mask.to(coords.dtype)
        coords = coords.where(mask[..., None, None].bool(), 0.0)
        neighbours, valid = nearest(coords[:, 1], mask, self.neighbours)
        edges = self.W_e(self.features(coords, residue_idx, chain_encoding, neighbours))
        nodes = edges.new_zeros(len(mask), edges.shape[-1])  # [L, H]
        for layer in self.encoder_layers:
            nodes, edges = layer(nodes, edges, neighbours[None], valid, mask)
        return Encoded(nodes, edges, neighbours, valid, mask)

    def decode(self, encoded, sequences, decoding_order):
        """Letters [S, L] on a backbone -> log-probs [S, L, 21] of all letters.

        decoding_order [1 or S, L]: [..., t] is the residue that is decoded at time t, or the tied
        ones, [1 or S, T, C]. A residue sees the letters of those before it alone.
        """
        together = decoding_order.reshape(*decoding_order.shape[:2], -1)  # [1 or S, T, C]
        ranks = torch.empty_like(sequences[: len(decoding_order)])
        times = torch.arange(together.shape[1], device=ranks.device)[:, None].expand_as(together)
        ranks = ranks.scatter_(-1, together.flatten(1), times.flatten(1))  # [1 or S, L]
        visible = ranks[:, encoded.neighbours] < ranks[..., None]  # [1 or S, L, K]
        # all that can be seen is one table: S * L seen rows, then L unseen ones
        first = torch.arange(0, sequences.numel(), sequences.shape[-1], device=ranks.device)  # [S]
        seen = encoded.neighbours + first[:, None, None]
        indices = torch.where(visible, seen, encoded.neighbours + sequences.numel())  # [S, L, K]
        nodes = encoded.nodes[None]  # [1, L, H], then [S, L, H]
        for layer in self.decoder_layers:
            table = layer.seen(nodes, sequences, self.W_s.weight)  # [S, L, H]
            table = torch.cat([table.flatten(0, 1), layer.unseen(encoded.nodes)])
            shares = encoded.edges, layer.own(nodes), layer.split()[1]
            summed = network(layer.W2, table, indices, *shares, encoded.valid)
            nodes = layer.update(nodes, summed, encoded.valid, encoded.mask)
        return self.W_out(nodes).log_softmax(-1)

    # sampling

    @torch.no_grad()
    def sample(self, encoded, decoding_order, choose):
        """S sequences on a backbone, letter by letter -> letters [S, L], log-probs [S, L, 21].

        decoding_order [S, T, C]: at each of T times C tied residues, which do not see one another;
        all L are there, a single one C times. choose(residues [S, C], log_probs [S, C, 21]) ->
        letters [S, C]: there temperature, forbidden letters and fixed residues have their place.
        Nothing is computed twice: what others will see of a residue is kept, in place of what they
        saw before.
        """
        samples, length = len(decoding_order), len(encoded.nodes)
        each = torch.arange(samples, device=decoding_order.device)[:, None]  # [S, 1]
        sequences = decoding_order.new_zeros(samples, length)
        log_probs = encoded.nodes.new_zeros(samples, length, len(ALPHABET))
        layers = self.decoder_layers
        tables = [layer.unseen(encoded.nodes).repeat(samples, 1, 1) for layer in layers]
        for residues in decoding_order.unbind(1):  # [S, C]
            around = encoded.neighbours[residues]  # [S, C, K]
            valid = encoded.valid[residues]
            mask = encoded.mask[residues]
            nodes = [encoded.nodes[residues]]  # [S, C, H], then each layer's
            edges = encoded.edges[residues]  # [S, C, K, H]
            for layer, table in zip(layers, tables, strict=True):
                first = table[each[..., None], around] + functional.linear(edges, layer.split()[1])
                first = first + layer.own(nodes[-1])[..., None, :]
                summed = functional.gelu(layer.W2(functional.gelu(first))) * valid[..., None]
                nodes.append(layer.update(nodes[-1], summed.sum(-2), valid, mask))
            log_probs[each, residues] = self.W_out(nodes[-1]).log_softmax(-1)
            letters = choose(residues, log_probs[each, residues])
            sequences[each, residues] = letters
            for layer, table, node in zip(layers, tables, nodes, strict=False):
                table[each, residues] = layer.seen(node, letters, self.W_s.weight)
        return sequences, log_probs

    # files

    @classmethod
    def load(cls, file):
        """Return the model of an official .pt file, in fp32 on the CPU.

        Raises UserError if it is not a full-backbone ProteinMPNN.
        """
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            tensors = saved["model_state_dict"]
            if "features.node_project_down.weight" in tensors:
                raise ValueError("it is of LigandMPNN, which sees ligands, too")
            if "W_v.weight" in tensors:
                is_membrane = tensors["features.edge_embedding.weight"].shape[1] == 416
                raise ValueError(f"it is a {'membrane' if is_membrane else 'CA-only'} model")
            layers = [name for name in tensors if name.endswith(".W1.weight")]
            model = cls(
                hidden=len(tensors["W_e.weight"]),
                encoder_layers=sum("encoder" in name for name in layers),
                decoder_layers=sum("decoder" in name for name in layers),
                neighbours=int(saved["num_edges"]),
            )
            model.noise_level = float(saved.get("noise_level", 0))
            model.load_state_dict(tensors)
        except UNREADABLE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"{file}: not a ProteinMPNN checkpoint: {reason!r:.200}"
            raise UserError(f"{problem}; give a full-backbone one such as v_48_020.pt") from error
        return model

    def save(self, file):
        """Write what `load` and the official code read: all of it, or nothing."""
        content = {"num_edges": self.neighbours, "noise_level": self.noise_level}
        content["model_state_dict"] = {name: x.cpu() for name, x in self.state_dict().items()}
        archive = io.BytesIO()  # torch gives the error of a full disk no number
        torch.save(content, archive)
        with data.write_file(file) as temporary:
            temporary.write_bytes(archive.getvalue())
