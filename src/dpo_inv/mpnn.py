"""ProteinMPNN (Dauparas et al., Science 378, 49, 2022): sequences that fold into a backbone.

Parameters have the names and shapes of the official code, and outputs are the same: official
checkpoints load here, and official tools read the checkpoints that are saved here. Two things
differ: the backbone is encoded once for all sequences that are scored on it, and nothing is stored
per edge that can be computed per residue. There is no dropout, because the policy must equal its
reference at the start.

S sequences on a backbone of L residues with K neighbors each; H hidden features.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddp_utils import UserError, data
from dpo_inv.edges import Features, edge_network, gather_rows, nearest

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # X: unknown or missing
UNKNOWN = ALPHABET.index("X")
SCALE = 30  # divides each sum of messages, whatever the number of neighbors

UNREADABLE: tuple[type[Exception], ...] = (  # what torch.load and `load` raise for other files
    torch.serialization.pickle.UnpicklingError,  # for a file with more than tensors and numbers
    *(OSError, EOFError, LookupError, AttributeError, RuntimeError, TypeError, ValueError),
)


def encode(text: str) -> np.ndarray:
    """Return the letters of a sequence as indices into ALPHABET, [L]."""
    return np.array([ALPHABET.index(letter) for letter in text], dtype=np.int64)


class Encoded(NamedTuple):
    """An encoded backbone: the inputs of the decoder."""

    nodes: Tensor  # [L, H]
    edges: Tensor  # [L, K, H]
    neighbors: Tensor  # [L, K] indices; the first neighbor of a residue is the residue itself
    valid: Tensor  # [L, K] 1.0 where both residues are known, otherwise 0.0
    mask: Tensor  # [L] 1.0 where all four atoms are known


# --- layers --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """The parts that encoder and decoder layers share: W1 to W3, and the update of the nodes.

    inputs: number of H-dimensional vectors that a message is computed from.
    """

    def __init__(self, hidden: int, inputs: int):
        super().__init__()
        self.W1 = nn.Linear(inputs * hidden, hidden)
        self.W2 = nn.Linear(hidden, hidden)
        self.W3 = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dense = nn.ModuleDict({"W_in": nn.Linear(hidden, 4 * hidden)})
        self.dense["W_out"] = nn.Linear(4 * hidden, hidden)

    def update(self, nodes: Tensor, table: Tensor, indices: Tensor, encoded: Encoded) -> Tensor:
        """Return the new nodes [S, L, H].

        table: the terms of all neighbors in messages, [R, H]; indices: of the neighbors in it,
        [S, L, K]; encoded: its nodes and neighbors are not used.
        """
        layers = self.W1, self.W2
        summed = edge_network(*layers, encoded.valid, nodes, table, indices, encoded.edges)
        # W3 is linear, so it is applied after the sum, to K times fewer vectors
        message = functional.linear(summed, self.W3.weight)
        message = message + self.W3.bias * encoded.valid.sum(-1, keepdim=True)
        nodes = self.norm1(nodes + message / SCALE)
        widened = functional.gelu(self.dense["W_in"](nodes))
        return self.norm2(nodes + self.dense["W_out"](widened)) * encoded.mask[..., None]


class EncoderLayer(Layer):
    """Update nodes, then edges; a message depends on the node, the edge and the neighbor."""

    def __init__(self, hidden: int):
        super().__init__(hidden, inputs=3)
        self.W11 = nn.Linear(3 * hidden, hidden)
        self.W12 = nn.Linear(hidden, hidden)
        self.W13 = nn.Linear(hidden, hidden)
        self.norm3 = nn.LayerNorm(hidden)

    def forward(self, encoded: Encoded) -> Encoded:
        """Return the backbone with new nodes and edges."""
        indices = encoded.neighbors[None]
        table = functional.linear(encoded.nodes, self.W1.weight.chunk(3, 1)[2])
        nodes = self.update(encoded.nodes[None], table, indices, encoded)  # [1, L, H]
        table = functional.linear(nodes[0], self.W11.weight.chunk(3, 1)[2])
        layers = self.W11, self.W12
        messages = edge_network(*layers, None, nodes, table, indices, encoded.edges)[0]
        edges = self.norm3(encoded.edges + self.W13(messages))
        return encoded._replace(nodes=nodes[0], edges=edges)


class DecoderLayer(Layer):
    """Update nodes; a message depends on the node, the edge and the neighbor.

    The neighbor's letter and node are used if it is decoded before the node, otherwise its node
    from the encoder.
    """

    def __init__(self, hidden: int):
        super().__init__(hidden, inputs=4)

    def undecoded_term(self, encoder_nodes: Tensor) -> Tensor:
        """Return the terms of residues in messages to those decoded before them, [..., H]."""
        return functional.linear(encoder_nodes, self.W1.weight.chunk(4, 1)[3])

    def decoded_term(self, nodes: Tensor, letters: Tensor, embedding: Tensor) -> Tensor:
        """Return the terms of residues in messages to those decoded after them, [..., H].

        nodes: [..., H]; letters: [...]; embedding: of the letters, [21, H].
        """
        of_letter = functional.linear(embedding, self.W1.weight.chunk(4, 1)[2])  # [21, H]
        return gather_rows(of_letter, letters) + self.undecoded_term(nodes)


# --- model ---------------------------------------------------------------------------------------


class ProteinMPNN(nn.Module):
    """log p(sequence | backbone), autoregressive in any decoding order.

    hidden: H; layers: number in the encoder and in the decoder; neighbors: K. The weights are
    random; see `load`.
    """

    def __init__(self, hidden: int = 128, layers: int = 3, neighbors: int = 48):
        super().__init__()
        self.neighbors = neighbors
        self.noise_level = 0.0  # Angstrom, in the training of the weights; kept for the checkpoint
        self.base: dict[str, str] = {}  # name and digest of the model that was fine-tuned
        self.features = Features(hidden)
        self.W_e = nn.Linear(hidden, hidden)
        self.W_s = nn.Embedding(len(ALPHABET), hidden)
        self.encoder_layers: Any = nn.ModuleList(EncoderLayer(hidden) for _ in range(layers))
        self.decoder_layers: Any = nn.ModuleList(DecoderLayer(hidden) for _ in range(layers))
        self.W_out = nn.Linear(hidden, len(ALPHABET))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    # scoring

    def encode(
        self, coords: Tensor, mask: Tensor, residue_idx: Tensor, chain_encoding: Tensor
    ) -> Encoded:
        """Encode a backbone, once for all sequences on it.

        coords: N, CA, C, O in Angstrom, [L, 4, 3]. mask: 1 where all four are known, [L]; other
        coordinates are ignored. residue_idx: residue numbers, [L]; only differences within a chain
        matter. chain_encoding: the number of the chain, [L].
        """
        mask = mask.to(coords.dtype)
        coords = coords.where(mask[..., None, None].bool(), 0.0)
        neighbors, valid = nearest(coords[:, 1], mask, self.neighbors)
        edges = self.W_e(self.features(neighbors, coords, residue_idx, chain_encoding))
        nodes = edges.new_zeros(len(mask), edges.shape[-1])  # [L, H]
        encoded = Encoded(nodes, edges, neighbors, valid, mask)
        for layer in self.encoder_layers:
            encoded = layer(encoded)
        return encoded

    def decode(self, encoded: Encoded, sequences: Tensor, decoding_order: Tensor) -> Tensor:
        """Return the log-probs of all letters at each position of given sequences, [S, L, 21].

        sequences: [S, L]. decoding_order: [1 or S, L], where [..., t] is the residue that is
        decoded at time t, or [1 or S, T, C] with C tied residues. A position sees only the letters
        of positions that are decoded before it.
        """
        tied = decoding_order.reshape(*decoding_order.shape[:2], -1)  # [1 or S, T, C]
        ranks = torch.empty_like(sequences[: len(decoding_order)])
        times = torch.arange(tied.shape[1], device=ranks.device)[:, None].expand_as(tied)
        ranks = ranks.scatter_(-1, tied.flatten(1), times.flatten(1))  # [1 or S, L]
        is_decoded = ranks[:, encoded.neighbors] < ranks[..., None]  # [1 or S, L, K]
        # one table has the terms of all neighbors: first S * L decoded ones, then L undecoded ones
        starts = torch.arange(0, sequences.numel(), sequences.shape[-1], device=ranks.device)  # [S]
        decoded = encoded.neighbors + starts[:, None, None]
        undecoded = encoded.neighbors + sequences.numel()
        indices = torch.where(is_decoded, decoded, undecoded)  # [S, L, K]
        nodes = encoded.nodes[None]  # [1, L, H], then [S, L, H]
        for layer in self.decoder_layers:
            table = layer.decoded_term(nodes, sequences, self.W_s.weight)  # [S, L, H]
            table = torch.cat([table.flatten(0, 1), layer.undecoded_term(encoded.nodes)])
            nodes = layer.update(nodes, table, indices, encoded)
        return self.W_out(nodes).log_softmax(-1)

    # sampling

    @torch.no_grad()
    def sample(
        self, encoded: Encoded, decoding_order: Tensor, choose: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Draw S sequences letter by letter; return letters [S, L] and log-probs [S, L, 21].

        decoding_order: [S, T, C], C tied residues at each of T times, which do not see one another;
        every residue occurs, and an untied one C times. choose(residues [S, C], log_probs
        [S, C, 21]) returns letters [S, C]; it applies temperature, biases and fixed residues.
        The terms of neighbors are cached, and replaced when a residue is decoded.
        """
        length = len(encoded.nodes)
        starts = torch.arange(len(decoding_order), device=decoding_order.device) * length  # [S]
        sequences = decoding_order.new_zeros(len(starts) * length)
        log_probs = encoded.nodes.new_zeros(len(sequences), len(ALPHABET))
        layers = self.decoder_layers
        tables = [layer.undecoded_term(encoded.nodes).repeat(len(starts), 1) for layer in layers]
        for residues in decoding_order.unbind(1):  # [S, C]
            rows = (residues + starts[:, None]).flatten()  # [S C] of the tables, [S L, H]
            decoded = Encoded(*(tensor[residues.flatten()] for tensor in encoded))
            indices = decoded.neighbors.unflatten(0, residues.shape) + starts[:, None, None]
            nodes = [decoded.nodes[None]]  # [1, S C, H], then those of each layer
            for layer, table in zip(layers, tables, strict=True):
                nodes.append(layer.update(nodes[-1], table, indices.flatten(0, 1)[None], decoded))
            log_probs[rows] = self.W_out(nodes[-1][0]).log_softmax(-1)
            letters = choose(residues, log_probs[rows].unflatten(0, residues.shape)).flatten()
            sequences[rows] = letters
            for layer, table, node in zip(layers, tables, nodes, strict=False):
                table[rows] = layer.decoded_term(node[0], letters, self.W_s.weight)
        return sequences.view(-1, length), log_probs.view(-1, length, len(ALPHABET))

    # files

    @classmethod
    def load(cls, file: str | Path) -> "ProteinMPNN":
        """Return the model in an official .pt file, in fp32 on the CPU.

        Raises UserError if it is not a full-backbone ProteinMPNN.
        """
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            tensors = saved["model_state_dict"]
            layers = sum("decoder_layers" in name and ".W1.weight" in name for name in tensors)
            model = cls(len(tensors["W_e.weight"]), layers, int(saved["num_edges"]))
            model.noise_level = float(saved.get("noise_level", 0))
            model.base = {key: str(text) for key, text in saved.get("base", {}).items()}
            model.load_state_dict(tensors)
        except UNREADABLE as error:
            problem = f"{file}: not a ProteinMPNN checkpoint: {' '.join(str(error).split()):.200}"
            raise UserError(f"{problem}; use a full-backbone one such as v_48_020.pt") from error
        return model

    def save(self, file: str | Path) -> None:
        """Write a checkpoint that `load` and the official code read, atomically."""
        content: dict[str, Any] = {"num_edges": self.neighbors, "noise_level": self.noise_level}
        if self.base:
            content["base"] = self.base
        content["model_state_dict"] = {name: x.cpu() for name, x in self.state_dict().items()}
        archive = io.BytesIO()  # torch.save to a full disk raises an error without an errno
        torch.save(content, archive)
        with data.write_file(file) as temporary:
            temporary.write_bytes(archive.getvalue())
