"""ProteinMPNN, after the paper (Dauparas et al., Science 378, 49, 2022): backbone -> sequence.

The same tensors under the same names as the official code, and the same numbers, so that official
checkpoints load and the official tools read what is saved here. What differs is the way: the
backbone is encoded once for all sequences that are scored on it, and an edge carries nothing that
a residue can carry. There is no dropout: it would tell the policy from its reference.

B backbones, S sequences on each, L residues (padded: mask 0), K neighbours of each, H hidden.
"""

import io
import os
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional

from ddp_utils import UserError, checkpoint, records

ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"  # X: unknown or missing
MOST_APART = 32  # residues along the chain: further ones are all alike
OTHER_CHAIN = 2 * MOST_APART + 1  # the number in place of a distance along the chain
SCALE = 30  # what a sum of messages is divided by, however many neighbours there are
ATOMS = ["N", "CA", "C", "O", "CB"]
DISTANCES = (  # from this atom of the residue to that one of its neighbour: the order of W_e's rows
    "CA-CA N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB "
    "CB-C CB-O O-C N-CA C-CA O-CA CB-CA C-N O-N CB-N C-CB O-CB C-O"
)
BELLS = 16  # radial basis functions of a distance, centred 2 to 22 Angstrom
WIDTH = 20 / BELLS  # Angstrom
POSITIONAL = 16  # features of the distance along the chain
IN_CACHE = 1536  # edges that a CPU has in hand at once
OFFICIAL = "give a full-backbone ProteinMPNN checkpoint such as v_48_020.pt"


def encode(text) -> list[int]:
    """Letters -> numbers 0..20; lower case is read as upper, what is not in ALPHABET raises.

    Raises UserError, which names the letter and its place.
    """
    for place, letter in enumerate(text.upper()):
        if letter not in ALPHABET:
            raise UserError(f"residue {place} is {letter!r}; the letters are {ALPHABET}")
    return [ALPHABET.index(letter) for letter in text.upper()]


class Encoded(NamedTuple):
    """What the decoder must know of B backbones."""

    nodes: torch.Tensor  # [B, L, H]
    edges: torch.Tensor  # [B, L, K, H]
    neighbours: torch.Tensor  # [B, L, K] the nearest first, each residue its own first
    valid: torch.Tensor  # [B, L, K] 1.0 where both residues are there, else 0.0
    mask: torch.Tensor  # [B, L] 1.0 where all four atoms are there


# --- geometry ------------------------------------------------------------------------------------


def nearest(alphas, mask, most):
    """The K <= `most` nearest CA of each: [B, L, 3], [B, L] -> indices and validity [B, L, K].

    A structure with fewer residues than K has invalid neighbours, so that it gives the same alone
    as beside a longer one. (The official code lets them take part in the decoder.)
    """
    # exact differences: the fast way, by products, is wrong by 0.01 Angstrom
    apart = torch.cdist(alphas, alphas, compute_mode="donot_use_mm_for_euclid_dist")  # [B, L, L]
    apart = apart.masked_fill_(~mask[:, None].bool(), torch.inf)
    apart, neighbours = apart.topk(min(most, mask.shape[1]), largest=False)
    return neighbours, apart.isfinite() * mask[..., None]


def distances(coords, neighbours):
    """25 distances of each edge, in Angstrom: [B, L, 4, 3], [B, L, K] -> [B, L, K, 25]."""
    n, alpha, c, _ = coords.unbind(2)
    b, a = alpha - n, c - alpha
    beta = -0.58273431 * b.cross(a, dim=-1) + 0.56802827 * b - 0.54067466 * a + alpha
    atoms = torch.cat([coords, beta[:, :, None]], 2)  # [B, L, 5, 3]
    across = take(atoms.flatten(2), neighbours).unflatten(-1, (5, 3))  # [B, L, K, 5, 3]
    pairs = [pair.split("-") for pair in DISTANCES.split()]
    here, there = ([ATOMS.index(pair[side]) for pair in pairs] for side in (0, 1))
    squared = across.new_zeros(*neighbours.shape, len(pairs))
    for axis in range(3):  # [B, L, K, 25, 3] would be the largest tensor of all
        squared += (atoms[:, :, None, here, axis] - across[..., there, axis]).square_()
    return squared.add_(1e-6).sqrt_()


def take(nodes, neighbours):
    """What the neighbours hold: [B, L, ...], [B, L, K] -> [B, L, K, ...]."""
    return rows(nodes.flatten(0, 1), flat(neighbours))


def flat(neighbours):
    """Where they are among all B * L residues: [B, L, K] -> [B, L, K]."""
    count, length, _ = neighbours.shape
    first = torch.arange(count, device=neighbours.device) * length
    return neighbours + first[:, None, None]


def rows(table, places):
    """Rows [N, H] at places [...] -> [..., H]."""
    # index_select: its backward is much faster than that of table[places]
    return table.index_select(0, places.flatten()).unflatten(0, places.shape)


# --- layers --------------------------------------------------------------------------------------


class Features(nn.Module):
    """Geometry -> edges [B, L, K, H]. No gradient flows into coordinates."""

    def __init__(self, hidden):
        super().__init__()
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(OTHER_CHAIN + 1, POSITIONAL)})
        width = POSITIONAL + BELLS * len(DISTANCES.split())
        self.edge_embedding = nn.Linear(width, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    def forward(self, coords, residue_idx, chain_encoding, neighbours):
        with torch.no_grad():
            apart = residue_idx[..., None] - take(residue_idx, neighbours)
            apart = (apart + MOST_APART).clamp(0, 2 * MOST_APART)
            alien = chain_encoding[..., None] != take(chain_encoding, neighbours)
            apart = apart.masked_fill(alien, OTHER_CHAIN)  # [B, L, K]
            centres = torch.linspace(2.0, 22.0, BELLS, device=coords.device) / WIDTH
            between = distances(coords, neighbours)[..., None] / WIDTH  # [B, L, K, 25, 1]
            bells = between.new_empty(*between.shape[:-1], BELLS)
            for part in slices(neighbours[:, None]):
                # exp(-80) is 0 to all that follows; less is a denormal, with which all is slow
                squared = (between[:, part] - centres).square_().clamp_(max=80)
                bells[:, part] = squared.neg_().exp_()
            bells = bells.flatten(-2)  # [B, L, K, 400]
        place, radial = self.edge_embedding.weight.split([POSITIONAL, bells.shape[-1]], 1)
        steps = self.embeddings["linear"]
        table = functional.linear(steps.weight.T + steps.bias, place)  # [66, H]
        return self.norm_edges(functional.linear(bells, radial) + rows(table, apart))


class FeedForward(nn.Module):
    """[..., H] -> [..., 4H] -> [..., H]."""

    def __init__(self, hidden):
        super().__init__()
        self.W_in = nn.Linear(hidden, 4 * hidden)
        self.W_out = nn.Linear(4 * hidden, hidden)

    def forward(self, nodes):
        return self.W_out(functional.gelu(self.W_in(nodes)))


class EdgeNetwork(torch.autograd.Function):
    """gelu(W2 gelu(first)) of every edge, summed over a residue's valid ones: most of the work.

    `first`, what W1 makes of an edge, is the sum of three shares: its own product, one of its
    residue and one of the neighbour, a row of a table. A few residues at a time, so that all
    products stay in the processor's cache; and nothing is kept but what gelu's derivative needs.
    """

    @staticmethod
    def forward(ctx, table, places, edges, own, between, weight, bias, valid, keep):
        """Shares of neighbours [R, H] at places [B, S, L, K], edges [B, L, K, H] and their part
        of W1, own shares [B, 1 or S, L, H], W2, valid [B, L, K] -> sums [B, S, L, H].

        Without `valid` nothing is summed -> [B, S, L, K, H].
        """
        outputs = own.new_empty(places.shape[: 3 if valid is not None else 4] + weight.shape[:1])
        ctx.kept = []
        for part in slices(places):
            first = rows(table, places[:, :, part])  # [B, S, l, K, H]
            first.add_((edges[:, part] @ between.T)[:, None]).add_(own[:, :, part, None])
            second = functional.linear(functional.gelu(first), weight, bias)
            message = functional.gelu(second)
            if valid is not None:
                message = message.mul_(valid[:, None, part, :, None]).sum(-2)
            outputs[:, :, part] = message
            if keep:
                ctx.kept.append((part, first, second))
        ctx.save_for_backward(table, places, edges, own, between, weight, valid)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        table, places, edges, own, between, weight, valid = ctx.saved_tensors
        to_table, to_own = torch.zeros_like(table), torch.zeros_like(own)
        to_edges = torch.empty_like(edges)
        # sums of many handfuls: in fp32 whatever the precision of the products
        to_between, to_weight = torch.zeros(2, *weight.shape, device=weight.device)
        to_bias = torch.zeros(len(weight), device=weight.device)
        gelu_backward = torch.ops.aten.gelu_backward
        for part, first, second in ctx.kept:
            down = gradient[:, :, part]
            if valid is not None:
                down = down[..., None, :] * valid[:, None, part, :, None]
            down = gelu_backward(down, second).flatten(0, -2)  # [B * S * l * K, H]
            to_weight += down.T @ functional.gelu(first).flatten(0, -2)
            to_bias += down.sum(0)
            down = gelu_backward((down @ weight).view_as(first), first)
            to_table.index_add_(0, places[:, :, part].flatten(), down.flatten(0, -2))
            to_own[:, :, part] = down.sum(-2).sum_to_size(to_own[:, :, part].shape)
            down = down.sum(1)  # [B, l, K, H]
            to_between += down.flatten(0, -2).T @ edges[:, part].flatten(0, -2)
            to_edges[:, part] = down @ between
        ours = (tensor.to(weight.dtype) for tensor in (to_between, to_weight, to_bias))
        return to_table, None, to_edges, to_own, *ours, None, None


def slices(places):
    """Residues of [B, S, L, K] edges by the handful on a CPU, whose cache is small; else all."""
    batch, samples, length, most = places.shape
    size = max(1, IN_CACHE // (batch * samples * most)) if places.device.type == "cpu" else length
    return [slice(start, start + size) for start in range(0, length, size)]


def network(second, table, places, edges, own, between, valid=None):
    """EdgeNetwork with this W2, in the precision that autocast gave to the products with W1."""
    tensors = (edges, own, between, second.weight, second.bias)
    tensors = [tensor.to(table.dtype) for tensor in tensors]
    valid = None if valid is None else valid.to(table.dtype)
    return EdgeNetwork.apply(table, places, *tensors, valid, torch.is_grad_enabled())


class Layer(nn.Module):
    """What both kinds of layers have: a message along each edge, then residue by residue."""

    def __init__(self, hidden, parts):
        super().__init__()
        self.W1 = nn.Linear(parts * hidden, hidden)
        self.W2 = nn.Linear(hidden, hidden)
        self.W3 = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dense = FeedForward(hidden)

    def update(self, nodes, summed, valid, mask):
        """Nodes [..., H] and the sum of their gelu(W2 ...) over valid edges -> nodes [..., H]."""
        # W3 after the sum: linear in the messages, and K times fewer of them
        message = functional.linear(summed, self.W3.weight)
        message = message + self.W3.bias * valid.sum(-1, keepdim=True)
        nodes = self.norm1(nodes + message / SCALE)
        return self.norm2(nodes + self.dense(nodes)) * mask[..., None]


class EncoderLayer(Layer):
    """Nodes, then edges; a message sees the node, the edge and the neighbour."""

    def __init__(self, hidden):
        super().__init__(hidden, parts=3)
        self.W11 = nn.Linear(3 * hidden, hidden)
        self.W12 = nn.Linear(hidden, hidden)
        self.W13 = nn.Linear(hidden, hidden)
        self.norm3 = nn.LayerNorm(hidden)

    def forward(self, nodes, edges, places, valid, mask):
        summed = self.along(self.W1, self.W2, nodes, edges, places, valid)[:, 0]
        nodes = self.update(nodes, summed, valid, mask)
        change = self.W13(self.along(self.W11, self.W12, nodes, edges, places)[:, 0])
        return nodes, self.norm3(edges + change)

    def along(self, linear, second, nodes, edges, places, valid=None):
        """The network on [node | edge | neighbour's node], which are not laid side by side.

        A node's products are made once, not once an edge.
        """
        mine, between, other = linear.weight.chunk(3, 1)
        table = functional.linear(nodes, other).flatten(0, 1)
        own = functional.linear(nodes, mine, linear.bias)[:, None]
        return network(second, table, places, edges, own, between, valid)


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

    hidden: width. neighbours: K, how many residues one sees. noise_level: Angstrom with which the
    weights were trained; only kept for the checkpoint. Weights are drawn at random; see `load`.
    """

    def __init__(
        self, hidden=128, encoder_layers=3, decoder_layers=3, neighbours=48, noise_level=0.0
    ):
        super().__init__()
        self.neighbours = neighbours
        self.noise_level = noise_level
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

    def encode(self, coords, mask, residue_idx, chain_encoding, noise=0.0) -> Encoded:
        """Backbones -> what `decode` needs; once for all sequences on them.

        coords [B, L, 4, 3] in Angstrom: N, CA, C, O. mask [B, L]: 1 where all four are known; what
        coords hold elsewhere does not matter. residue_idx [B, L]: numbers of which only
        differences within a chain count. chain_encoding [B, L]: the chain's number. noise: standard
        deviation in Angstrom of what is added to every coordinate; drawn anew at each call, so
        whoever compares two models adds it to coords before.
        """
        mask = mask.to(coords.dtype)
        coords = coords.where(mask[..., None, None].bool(), 0.0)
        if noise:
            coords = coords + noise * torch.randn_like(coords)
        neighbours, valid = nearest(coords[:, :, 1], mask, self.neighbours)
        edges = self.W_e(self.features(coords, residue_idx, chain_encoding, neighbours))
        nodes = edges.new_zeros(*mask.shape, edges.shape[-1])  # [B, L, H]
        places = flat(neighbours)[:, None]  # [B, 1, L, K]
        for layer in self.encoder_layers:
            nodes, edges = layer(nodes, edges, places, valid, mask)
        return Encoded(nodes, edges, neighbours, valid, mask)

    def decode(self, encoded, sequences, decoding_order):
        """Letters [B, S, L] on B backbones -> log-probs [B, S, L, 21] of all letters, in fp32.

        decoding_order [B, L], or [B, S, L] if each sequence has its own: [..., t] is the residue
        that is decoded at time t. A residue sees the letters of those before it alone.
        """
        ranks = torch.empty_like(decoding_order)
        times = torch.arange(ranks.shape[-1], device=ranks.device).expand_as(ranks)
        ranks = ranks.scatter_(-1, decoding_order, times)  # [B, L] or [B, S, L]
        ranks = ranks if ranks.dim() == 3 else ranks[:, None]
        around = take(ranks.transpose(1, 2), encoded.neighbours)  # [B, L, K, 1 or S]
        return self._decoded(encoded, sequences, around.movedim(-1, 1) < ranks[..., None])

    def unconditional(self, encoded):
        """Log-probs [B, L, 21] of every residue when no letter is known."""
        nobody = torch.zeros_like(encoded.neighbours, dtype=torch.bool)[:, None]
        letters = torch.zeros_like(encoded.neighbours[:, None, :, 0])  # seen by nobody
        return self._decoded(encoded, letters, nobody)[:, 0]

    def log_probs(self, coords, mask, residue_idx, chain_encoding, sequence, decoding_order):
        """`encode` and `decode` for one sequence [B, L] on each backbone -> [B, L, 21]."""
        encoded = self.encode(coords, mask, residue_idx, chain_encoding)
        return self.decode(encoded, sequence[:, None], decoding_order)[:, 0]

    forward = log_probs

    def _decoded(self, encoded, sequences, visible):
        """Letters [B, S, L], who sees whom [B, 1 or S, L, K] -> log-probs [B, S, L, 21]."""
        count, samples, _ = sequences.shape
        # all that can be seen is one table: B * S * L seen rows, then B * L unseen ones
        unseen = flat(encoded.neighbours)[:, None] + sequences.numel()
        seen = flat(encoded.neighbours.repeat_interleave(samples, 0)).unflatten(0, (count, samples))
        places = torch.where(visible, seen, unseen)  # [B, S, L, K]
        nodes = encoded.nodes[:, None]  # [B, 1, L, H], then [B, S, L, H]
        for layer in self.decoder_layers:
            table = layer.seen(nodes, sequences, self.W_s.weight)  # [B, S, L, H]
            table = torch.cat([table.flatten(0, 2), layer.unseen(encoded.nodes).flatten(0, 1)])
            shares = encoded.edges, layer.own(nodes), layer.split()[1]
            summed = network(layer.W2, table, places, *shares, encoded.valid)
            nodes = layer.update(nodes, summed, encoded.valid[:, None], encoded.mask[:, None])
        return self.W_out(nodes).float().log_softmax(-1)

    # sampling

    @torch.no_grad()
    def sample(self, encoded, decoding_order, choose):
        """S sequences on each backbone, letter by letter -> letters [B, S, L], log-probs [..., 21].

        decoding_order [B, S, L], as in `decode`. choose(residues [B, S], log_probs [B, S, 21]) ->
        letters [B, S]: there temperature, forbidden letters and fixed residues have their place.
        Each of the L steps computes one residue of each sequence and nothing twice: what others
        will see of it is kept, in place of what they saw before.
        """
        count, samples, length = decoding_order.shape
        batch = torch.arange(count, device=decoding_order.device)[:, None]  # [B, 1]
        each = torch.arange(samples, device=decoding_order.device)  # [S]
        sequences = torch.zeros_like(decoding_order)
        found = encoded.nodes.new_zeros(count, samples, length, len(ALPHABET), dtype=torch.float32)
        tables = [layer.unseen(encoded.nodes) for layer in self.decoder_layers]  # [B, L, H]
        tables = [table[:, None].repeat(1, samples, 1, 1) for table in tables]  # [B, S, L, H]
        for residues in decoding_order.unbind(-1):  # [B, S]
            around = encoded.neighbours[batch, residues]  # [B, S, K]
            valid, mask = encoded.valid[batch, residues], encoded.mask[batch, residues]
            nodes = [encoded.nodes[batch, residues]]  # [B, S, H], then each layer's
            edges = encoded.edges[batch, residues]  # [B, S, K, H]
            for layer, table in zip(self.decoder_layers, tables, strict=True):
                first = table[batch[..., None], each[:, None], around]
                first = first + functional.linear(edges, layer.split()[1])
                first = first + layer.own(nodes[-1])[..., None, :]
                summed = functional.gelu(layer.W2(functional.gelu(first))) * valid[..., None]
                nodes.append(layer.update(nodes[-1], summed.sum(-2), valid, mask))
            found[batch, each, residues] = self.W_out(nodes[-1]).float().log_softmax(-1)
            letters = choose(residues, found[batch, each, residues])
            sequences[batch, each, residues] = letters
            for layer, table, node in zip(self.decoder_layers, tables, nodes, strict=False):
                now = layer.seen(node, letters, self.W_s.weight)
                table[batch, each, residues] = now.to(table.dtype)
        return sequences, found

    # files

    @classmethod
    def load(cls, path):
        """The model in an official .pt or a .safetensors file, in fp32 on the CPU.

        Raises UserError, one line that names what is wrong, if it is not a ProteinMPNN.
        """
        tensors, about = _read(path)
        ca_only = tensors.keys() & {"W_v.weight", "features.node_embedding.weight"}
        if ca_only:
            raise UserError(f"{path}: {min(ca_only)}: a CA-only model; {OFFICIAL}")
        layers = [
            len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}_layers.")})
            for kind in ("encoder", "decoder")
        ]
        hidden = (*tensors.get("W_e.weight", torch.empty(0)).shape, 1)[0] or 1
        with torch.device("meta"):  # no memory is asked for before the shapes are known to fit
            model = cls(hidden, *layers, *about)
        expected = model.state_dict()
        # what is missing first: the width was taken from one of them
        for name in sorted(expected | tensors, key=lambda name: name in tensors):
            given = tensors.get(name)
            if name not in expected:
                problem = "is unknown"
            elif given is None:
                problem = "is missing"
            elif given.shape != expected[name].shape:
                problem = f"is {list(given.shape)}, expected {list(expected[name].shape)}"
            elif not given.is_floating_point() or not given.isfinite().all():
                problem = "does not hold finite numbers alone"
            else:
                continue
            raise UserError(f"{path}: tensor {records.shown(name)} {problem}; {OFFICIAL}")
        copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
        model.load_state_dict(copies, assign=True)
        return model

    def save(self, path):
        """Write what the official code reads (.pt), or safetensors, all or nothing.

        Raises UserError for another ending, OSError if it cannot be written.
        """
        path = Path(path)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.state_dict().items()}
        about = {"num_edges": self.neighbours, "noise_level": self.noise_level}
        if path.suffix == ".safetensors":
            content = safetensors.torch.save(tensors, {key: str(about[key]) for key in about})
        elif path.suffix == ".pt":
            archive = io.BytesIO()
            torch.save({**about, "model_state_dict": tensors}, archive)
            content = archive.getvalue()
        else:
            raise UserError(f"{path}: its name must end in .pt or .safetensors")
        temporary = path.with_name(f".tmp-{path.name}")
        with checkpoint.writing(path, temporary):
            temporary.mkdir()  # a folder: nothing is written where a link leads
            with open(temporary / path.name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary / path.name, path)
            temporary.rmdir()


def _read(path):
    """Tensors by name, (neighbours, noise level) of a file; UserError if it has no such thing."""
    file = records.resolve(path)
    if not file.is_file():
        raise UserError(f"{path}: no such file; {OFFICIAL}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
                about = content.metadata() or {}
        else:
            about = torch.load(file, map_location="cpu", weights_only=True)
            tensors = about["model_state_dict"]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError("model_state_dict holds something else than tensors")
        neighbours, noise_level = int(about["num_edges"]), float(about.get("noise_level", 0))
        if neighbours < 1 or not 0 <= noise_level < torch.inf:
            raise ValueError(f"num_edges {neighbours}, noise_level {noise_level}")
        return tensors, (neighbours, noise_level)
    except KeyError as error:
        raise UserError(f"{path}: {error} is missing; {OFFICIAL}") from error
    # torch's own name for the error of a file that holds more than tensors and numbers
    except (
        *(torch.serialization.pickle.UnpicklingError, SafetensorError, OSError, EOFError),
        *(AttributeError, IndexError, RuntimeError, TypeError, ValueError),
    ) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:100]
        raise UserError(f"{path}: not a ProteinMPNN checkpoint: {reason}; {OFFICIAL}") from error
