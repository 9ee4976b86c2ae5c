"""What residues that are near each other see of one another: distances, features, messages.

No gradient flows into coordinates. An edge carries nothing that a residue can carry, and most of
the work of ProteinMPNN, two products an edge and layer, is one autograd function here.

S sequences on a backbone of L residues, K neighbours of each, H hidden.
"""

import functools

import torch
from torch import nn
from torch.nn import functional

MOST_APART = 32  # residues along the chain: further ones are all alike
OTHER_CHAIN = 2 * MOST_APART + 1  # the number in place of a distance along the chain
ATOMS = ["N", "CA", "C", "O", "CB"]
DISTANCES = (  # from this atom of the residue to that one of its neighbour: the order of W_e's rows
    "CA-CA N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB "
    "CB-C CB-O O-C N-CA C-CA O-CA CB-CA C-N O-N CB-N C-CB O-CB C-O"
)
BELLS = 16  # radial basis functions of a distance, centred 2 to 22 Angstrom
WIDTH = 20 / BELLS  # Angstrom
POSITIONAL = 16  # features of the distance along the chain
IN_CACHE = 1536  # edges that a CPU has in hand at once


# --- geometry ------------------------------------------------------------------------------------


def nearest(alphas, mask, most):
    """The K <= `most` nearest CA of each: [L, 3], [L] -> indices and validity [L, K].

    A structure with fewer residues than K has invalid neighbours, so that it gives the same alone
    as beside a longer one. (The official code lets them take part in the decoder.)
    """
    # exact differences: the fast way, by products, is wrong by 0.01 Angstrom
    apart = torch.cdist(alphas, alphas, compute_mode="donot_use_mm_for_euclid_dist")  # [L, L]
    apart = apart.masked_fill_(~mask.bool(), torch.inf)
    apart, neighbours = apart.topk(min(most, len(mask)), largest=False)
    return neighbours, apart.isfinite() * mask[:, None]


def distances(coords, neighbours):
    """25 distances of each edge, in Angstrom: [L, 4, 3], [L, K] -> [L, K, 25]."""
    n, alpha, c, _ = coords.unbind(1)
    b = alpha - n
    a = c - alpha
    beta = -0.58273431 * b.cross(a, dim=-1) + 0.56802827 * b - 0.54067466 * a + alpha
    atoms = torch.cat([coords, beta[:, None]], 1)  # [L, 5, 3]
    across = rows(atoms.flatten(1), neighbours).unflatten(-1, (5, 3))  # [L, K, 5, 3]
    here, there = ends(coords.device)
    squared = across.new_zeros(*neighbours.shape, len(here))
    for axis in range(3):  # [L, K, 25, 3] would be the largest tensor of all
        squared += (atoms[:, None, here, axis] - across[..., there, axis]).square_()
    return squared.add_(1e-6).sqrt_()


@functools.cache
def ends(device):
    """Return the atoms [25] at both ends of each distance, copied to the device once."""
    ids = [[ATOMS.index(atom) for atom in pair.split("-")] for pair in DISTANCES.split()]
    return torch.tensor(ids, device=device).unbind(1)


def rows(table, indices):
    """Rows [N, H] at indices [...] -> [..., H]."""
    # index_select: its backward is much faster than that of table[indices]
    return table.index_select(0, indices.flatten()).unflatten(0, indices.shape)


# --- layers --------------------------------------------------------------------------------------


class Features(nn.Module):
    """Geometry -> edges [L, K, H]. No gradient flows into coordinates."""

    def __init__(self, hidden):
        super().__init__()
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(OTHER_CHAIN + 1, POSITIONAL)})
        width = POSITIONAL + BELLS * len(DISTANCES.split())
        self.edge_embedding = nn.Linear(width, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    def forward(self, coords, residue_idx, chain_encoding, neighbours):
        with torch.no_grad():
            apart = residue_idx[:, None] - residue_idx[neighbours]
            apart = (apart + MOST_APART).clamp(0, 2 * MOST_APART)
            alien = chain_encoding[:, None] != chain_encoding[neighbours]
            apart = apart.masked_fill(alien, OTHER_CHAIN)  # [L, K]
            centres = torch.linspace(2.0, 22.0, BELLS, device=coords.device) / WIDTH
            between = distances(coords, neighbours)[..., None] / WIDTH  # [L, K, 25, 1]
            # exp(-80) is 0 to all that follows; less is a denormal, with which all is slow
            squared = (between - centres).square_().clamp_(max=80)
            bells = squared.neg_().exp_().flatten(-2)  # [L, K, 400]
        place, radial = self.edge_embedding.weight.split([POSITIONAL, bells.shape[-1]], 1)
        steps = self.embeddings["linear"]
        table = functional.linear(steps.weight.T + steps.bias, place)  # [66, H]
        return self.norm_edges(functional.linear(bells, radial) + rows(table, apart))


class EdgeNetwork(torch.autograd.Function):
    """gelu(W2 gelu(first)) of every edge, summed over a residue's valid ones: most of the work.

    `first`, what W1 makes of an edge, is the sum of three shares: its own product, one of its
    residue and one of the neighbour, a row of a table. A few residues at a time, so that all
    products stay in the processor's cache; and nothing is kept but what gelu's derivative needs.
    """

    @staticmethod
    def forward(ctx, table, indices, edges, own, between, weight, bias, valid, keep):
        """Shares of neighbours [R, H] at indices [S, L, K], edges [L, K, H] and their part of W1,
        own shares [1 or S, L, H], W2, valid [L, K] -> sums [S, L, H].

        Without `valid` nothing is summed -> [S, L, K, H].
        """
        outputs = own.new_empty(indices.shape[: 2 if valid is not None else 3] + weight.shape[:1])
        ctx.kept = []
        for part in slices(indices):
            first = rows(table, indices[:, part])  # [S, l, K, H]
            first.add_(edges[part] @ between.T).add_(own[:, part, None])
            second = functional.linear(functional.gelu(first), weight, bias)
            message = functional.gelu(second)
            if valid is not None:
                message = message.mul_(valid[part, :, None]).sum(-2)
            outputs[:, part] = message
            if keep:
                ctx.kept.append((part, first, second))
        ctx.save_for_backward(table, indices, edges, own, between, weight, valid)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        table, indices, edges, own, between, weight, valid = ctx.saved_tensors
        to_table = torch.zeros_like(table)
        to_own = torch.zeros_like(own)
        to_edges = torch.empty_like(edges)
        to_between = torch.zeros_like(between)
        to_weight = torch.zeros_like(weight)
        to_bias = weight.new_zeros(len(weight))
        gelu_backward = torch.ops.aten.gelu_backward
        for part, first, second in ctx.kept:
            down = gradient[:, part]
            if valid is not None:
                down = down[..., None, :] * valid[part, :, None]
            down = gelu_backward(down, second).flatten(0, -2)  # [S * l * K, H]
            to_weight += down.T @ functional.gelu(first).flatten(0, -2)
            to_bias += down.sum(0)
            down = gelu_backward((down @ weight).view_as(first), first)
            to_table.index_add_(0, indices[:, part].flatten(), down.flatten(0, -2))
            to_own[:, part] = down.sum(-2).sum_to_size(to_own[:, part].shape)
            down = down.sum(0)  # [l, K, H]
            to_between += down.flatten(0, -2).T @ edges[part].flatten(0, -2)
            to_edges[part] = down @ between
        return to_table, None, to_edges, to_own, to_between, to_weight, to_bias, None, None


def slices(indices):
    """Residues of [S, L, K] edges by the handful on a CPU, whose cache is small; else all."""
    samples, length, most = indices.shape
    size = max(1, IN_CACHE // (samples * most)) if indices.device.type == "cpu" else length
    return [slice(start, start + size) for start in range(0, length, size)]


def network(second, table, indices, edges, own, between, valid=None):
    """Apply EdgeNetwork with the weight and bias of the layer `second`."""
    inputs = (table, indices, edges, own, between, second.weight, second.bias, valid)
    return EdgeNetwork.apply(*inputs, torch.is_grad_enabled())
