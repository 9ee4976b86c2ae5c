"""Edges between neighboring residues: geometry, features, and the network that passes messages.

Nothing is stored per edge that can be computed per residue. Most of the work of ProteinMPNN, two
matrix products per edge and layer, is in one autograd function. No gradient flows into coordinates.

S sequences on a backbone of L residues with K neighbors each; H hidden features.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_OFFSET = 32  # residues along the chain; larger offsets are treated alike
OTHER_CHAIN = 2 * MAX_OFFSET + 1  # the code for a neighbor in another chain
ATOMS = ["N", "CA", "C", "O", "CB"]
DISTANCES = (  # from an atom of the residue to one of its neighbor, in the order of the weights
    "CA-CA N-N C-C O-O CB-CB CA-N CA-C CA-O CA-CB N-C N-O N-CB "
    "CB-C CB-O O-C N-CA C-CA O-CA CB-CA C-N O-N CB-N C-CB O-CB C-O"
)
NUM_RBF = 16  # radial basis functions per distance, with centers from 2 to 22 Angstrom
RBF_WIDTH = 20 / NUM_RBF  # Angstrom
POSITIONAL = 16  # features of the offset along the chain
EDGES_IN_CACHE = 1536  # edges that a CPU processes at once


# --- geometry ------------------------------------------------------------------------------------


def nearest(alphas: Tensor, mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return indices and validity, [L, K], of the K <= `most` nearest residues of each residue.

    alphas: CA coordinates, [L, 3]; mask: [L]. If a structure has fewer residues than K, the rest of
    its neighbors is invalid, so padding never changes a result. (In the official code such
    neighbors take part in the decoder.)
    """
    # the fast mode, by matrix products, has errors of 0.01 Angstrom
    apart = torch.cdist(alphas, alphas, compute_mode="donot_use_mm_for_euclid_dist")  # [L, L]
    apart = apart.masked_fill_(~mask.bool(), torch.inf)
    apart, neighbors = apart.topk(min(most, len(mask)), largest=False)
    return neighbors, apart.isfinite() * mask[:, None]


def distances(coords: Tensor, neighbors: Tensor) -> Tensor:
    """Return the 25 distances of each edge in Angstrom, [L, K, 25].

    coords: [L, 4, 3] of N, CA, C, O; neighbors: [L, K].
    """
    n, alpha, c, _ = coords.unbind(1)
    b = alpha - n
    a = c - alpha
    beta = -0.58273431 * b.cross(a, dim=-1) + 0.56802827 * b - 0.54067466 * a + alpha
    atoms = torch.cat([coords, beta[:, None]], 1)  # [L, 5, 3]
    across = gather_rows(atoms.flatten(1), neighbors).unflatten(-1, (5, 3))  # [L, K, 5, 3]
    here, there = _distance_ends(coords.device)
    squared = across.new_zeros(*neighbors.shape, len(here))
    for axis in range(3):  # one axis at a time: [L, K, 25, 3] would be the largest tensor of all
        squared += (atoms[:, None, here, axis] - across[..., there, axis]).square_()
    return squared.add_(1e-6).sqrt_()


@functools.cache
def _distance_ends(device: torch.device) -> tuple[Tensor, ...]:
    """Return the two atoms of each distance, [25] each; they are copied to a device only once."""
    ids = [[ATOMS.index(atom) for atom in pair.split("-")] for pair in DISTANCES.split()]
    return torch.tensor(ids, device=device).unbind(1)


def gather_rows(table: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of a table [N, H] at indices [...], [..., H]."""
    # the backward of index_select is much faster than that of table[indices]
    return table.index_select(0, indices.flatten()).unflatten(0, indices.shape)


# --- layers --------------------------------------------------------------------------------------


class Features(nn.Module):
    """Compute edge features [L, K, H] from the geometry."""

    def __init__(self, hidden: int):
        super().__init__()
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(OTHER_CHAIN + 1, POSITIONAL)})
        width = POSITIONAL + NUM_RBF * len(DISTANCES.split())
        self.edge_embedding = nn.Linear(width, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    def forward(self, neighbors: Tensor, coords: Tensor, numbers: Tensor, chain: Tensor) -> Tensor:
        """Return the features of the edges to the neighbors; see ProteinMPNN.encode."""
        with torch.no_grad():
            offset = numbers[:, None] - numbers[neighbors]
            offset = (offset + MAX_OFFSET).clamp(0, 2 * MAX_OFFSET)
            in_other_chain = chain[:, None] != chain[neighbors]
            offset = offset.masked_fill(in_other_chain, OTHER_CHAIN)  # [L, K]
            centers = torch.linspace(2.0, 22.0, NUM_RBF, device=coords.device) / RBF_WIDTH
            scaled = distances(coords, neighbors)[..., None] / RBF_WIDTH  # [L, K, 25, 1]
            # exp(-80) counts as 0; smaller results would be denormal numbers, which are slow
            squared = (scaled - centers).square_().clamp_(max=80)
            rbf = squared.neg_().exp_().flatten(-2)  # [L, K, 400]
        positional, radial = self.edge_embedding.weight.split([POSITIONAL, rbf.shape[-1]], 1)
        weight, bias = self.embeddings["linear"].parameters()
        of_offset = functional.linear(weight.T + bias, positional)  # [66, H]
        return self.norm_edges(functional.linear(rbf, radial) + gather_rows(of_offset, offset))


class EdgeNetwork(torch.autograd.Function):
    """Compute gelu(W2 gelu(first)) of every edge, summed over the valid edges of each residue.

    `first`, the output of W1, is the sum of three terms: of the edge, of its residue, and of the
    neighbor. A few residues are processed at a time, so that all products stay in the CPU cache;
    only the inputs of gelu are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, valid: Tensor | None, keep: bool, *inputs: Tensor) -> Tensor:
        """Return the sums [S, L, H], or without `valid` the messages themselves, [S, L, K, H].

        valid: [L, K]; keep: whether there will be a backward pass; inputs: the terms of
        `edge_network`, the products of the nodes, [1 or S, L, H], the columns of W1 for edges, and
        the weight and the bias of W2.
        """
        table, indices, edges, own, edge_weight, weight, bias = inputs
        outputs = own.new_empty(indices.shape[: 2 if valid is not None else 3] + weight.shape[:1])
        ctx.parts = _blocks(indices)
        kept = []
        for part in ctx.parts:
            first = gather_rows(table, indices[:, part])  # [S, l, K, H]
            first.add_(edges[part] @ edge_weight.T).add_(own[:, part, None])
            second = functional.linear(functional.gelu(first), weight, bias)
            message = functional.gelu(second)
            if valid is not None:
                message = message.mul_(valid[part, :, None]).sum(-2)
            outputs[:, part] = message
            if keep:
                kept += [first, second]
        ctx.save_for_backward(valid, *inputs, *kept)  # which backward() frees
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        valid, table, indices, edges, own, edge_weight, weight, bias, *kept = ctx.saved_tensors
        to_table, to_edges, to_own = map(torch.zeros_like, (table, edges, own))
        to_edge_weight, to_weight, to_bias = map(torch.zeros_like, (edge_weight, weight, bias))
        gelu_backward = torch.ops.aten.gelu_backward
        for part, first, second in zip(ctx.parts, kept[::2], kept[1::2], strict=True):
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
            to_edge_weight += down.flatten(0, -2).T @ edges[part].flatten(0, -2)
            to_edges[part] = down @ edge_weight
        to_inputs = to_table, None, to_edges, to_own, to_edge_weight, to_weight, to_bias
        return None, None, *to_inputs


def _blocks(indices: Tensor) -> list[slice]:
    """Return which of the L residues of [S, L, K] edges to process together: all, on a GPU."""
    samples, length, neighbors = indices.shape
    size = length
    if indices.device.type == "cpu":
        size = max(1, EDGES_IN_CACHE // (samples * neighbors))
    return [slice(start, start + size) for start in range(0, length, size)]


def edge_network(
    first: nn.Linear, second: nn.Linear, valid: Tensor | None, nodes: Tensor, *terms: Tensor
) -> Tensor:
    """Apply EdgeNetwork with W1 = `first` and W2 = `second`.

    The input of W1 begins with the node and the edge. They are not concatenated, because the
    products of nodes are computed once per residue. nodes: [1 or S, L, H]; terms: the table with
    the products of the neighbors, [R, H]; the neighbors' rows in it, [S, L, K]; edges, [L, K, H].
    """
    for_node, for_edge, *_ = first.weight.split(first.out_features, 1)
    own = functional.linear(nodes, for_node, first.bias)
    parameters = for_edge, second.weight, second.bias
    return EdgeNetwork.apply(valid, torch.is_grad_enabled(), *terms, own, *parameters)
