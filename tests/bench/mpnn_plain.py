"""ProteinMPNN the straightforward way, to measure against: same tensors, same names, same numbers.

What each edge is made of is laid side by side before each product, all 25 distances are made for
all pairs of residues, the order of decoding is a matrix of all pairs, and a DPO step is four full
passes: policy and reference, chosen and rejected. One structure at a time, no dropout.
"""

import torch
from torch import nn
from torch.nn import functional

PAIRS = "NN CC OO BB AN AC AO AB NC NO NB BC BO OC NA CA OA BA CN ON BN CB OB CO"  # A: CA, B: CB


class Features(nn.Module):
    def __init__(self, hidden, neighbors):
        super().__init__()
        self.neighbors = neighbors
        self.embeddings = nn.ModuleDict({"linear": nn.Linear(66, 16)})
        self.edge_embedding = nn.Linear(416, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    def forward(self, coords, mask, residue_idx, chain_encoding):
        """Edges [1, L, K, H] and whose they are [1, L, K]."""
        n, a, c, o = coords.unbind(2)  # [1, L, 3]
        normal = torch.cross(a - n, c - a, dim=-1)
        b = -0.58273431 * normal + 0.56802827 * (a - n) - 0.54067466 * (c - a) + a
        both = mask[:, :, None] * mask[:, None]  # [1, L, L]
        apart = both * pairwise(a, a)
        apart = apart + (1 - both) * apart.amax(-1, keepdim=True)
        nearest, where = apart.topk(min(self.neighbors, len(mask[0])), largest=False)
        atoms = {"N": n, "A": a, "C": c, "O": o, "B": b}
        radial = [bells(nearest)]
        for first, second in map(tuple, PAIRS.split()):
            radial.append(bells(pairwise(atoms[first], atoms[second]).gather(2, where)))
        offset = (residue_idx[:, :, None] - residue_idx[:, None]).gather(2, where)
        same = (chain_encoding[:, :, None] == chain_encoding[:, None]).gather(2, where)
        offset = (offset + 32).clamp(0, 64) * same + 65 * ~same
        place = self.embeddings["linear"](functional.one_hot(offset, 66).float())
        edges = self.edge_embedding(torch.cat([place, *radial], -1))
        return self.norm_edges(edges), where


def pairwise(here, there):
    return ((here[:, :, None] - there[:, None]) ** 2).sum(-1).add(1e-6).sqrt()


def bells(apart):
    centres = torch.linspace(2.0, 22.0, 16)
    return torch.exp(-(((apart[..., None] - centres) / 1.25) ** 2))


def neighbors_of(nodes, where):
    """[1, L, H], [1, L, K] -> [1, L, K, H]."""
    flat = where.flatten(1)[..., None].expand(-1, -1, nodes.shape[-1])
    return nodes.gather(1, flat).view(*where.shape, -1)


def beside(nodes, edges):
    """A node's own state in front of each of its edges: [1, L, K, H + ...]."""
    return torch.cat([nodes[:, :, None].expand(-1, -1, edges.shape[2], -1), edges], -1)


class Dense(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.W_in = nn.Linear(hidden, 4 * hidden)
        self.W_out = nn.Linear(4 * hidden, hidden)

    def forward(self, nodes):
        return self.W_out(functional.gelu(self.W_in(nodes)))


class Layer(nn.Module):
    def __init__(self, hidden, inputs, with_edges):
        super().__init__()
        self.W1 = nn.Linear(inputs * hidden, hidden)
        self.W2 = nn.Linear(hidden, hidden)
        self.W3 = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dense = Dense(hidden)
        if with_edges:
            self.W11 = nn.Linear(inputs * hidden, hidden)
            self.W12 = nn.Linear(hidden, hidden)
            self.W13 = nn.Linear(hidden, hidden)
            self.norm3 = nn.LayerNorm(hidden)

    def nodes(self, nodes, inputs, mask, attend=None):
        hidden = functional.gelu(self.W1(beside(nodes, inputs)))
        messages = self.W3(functional.gelu(self.W2(hidden)))  # [1, L, K, H]
        if attend is not None:
            messages = attend[..., None] * messages
        nodes = self.norm1(nodes + messages.sum(-2) / 30)
        return self.norm2(nodes + self.dense(nodes)) * mask[..., None]

    def edges(self, nodes, edges, where):
        inputs = beside(nodes, torch.cat([edges, neighbors_of(nodes, where)], -1))
        hidden = functional.gelu(self.W12(functional.gelu(self.W11(inputs))))
        return self.norm3(edges + self.W13(hidden))


class Plain(nn.Module):
    def __init__(self, hidden=128, layers=3, neighbors=48):
        super().__init__()
        self.features = Features(hidden, neighbors)
        self.W_e = nn.Linear(hidden, hidden)
        self.W_s = nn.Embedding(21, hidden)
        encoder = [Layer(hidden, 3, True) for _ in range(layers)]
        decoder = [Layer(hidden, 4, False) for _ in range(layers)]
        self.encoder_layers, self.decoder_layers = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.W_out = nn.Linear(hidden, 21)

    def forward(self, coords, mask, residue_idx, chain_encoding, sequence, decoding_order):
        """As ProteinMPNN.log_probs, one structure: [1, L, ...] -> [1, L, 21]."""
        edges, where = self.features(coords, mask, residue_idx, chain_encoding)
        edges, nodes = self.W_e(edges), edges.new_zeros(*mask.shape, edges.shape[-1])
        attend = mask[..., None] * neighbors_of(mask[..., None], where)[..., 0]
        for layer in self.encoder_layers:
            inputs = torch.cat([edges, neighbors_of(nodes, where)], -1)
            nodes = layer.nodes(nodes, inputs, mask, attend)
            edges = layer.edges(nodes, edges, where)
        letters = neighbors_of(self.W_s(sequence), where)  # [1, L, K, H]
        placed = functional.one_hot(decoding_order).float()  # [1, time, residue]
        earlier = 1 - torch.triu(torch.ones(len(mask[0]), len(mask[0])))  # [time, time]
        seen = torch.einsum("ij,biq,bjp->bqp", earlier, placed, placed).gather(2, where)
        seen, mask3 = seen[..., None], mask[..., None, None]
        known = torch.cat([edges, torch.zeros_like(letters), neighbors_of(nodes, where)], -1)
        known = mask3 * (1 - seen) * known
        for layer in self.decoder_layers:
            inputs = torch.cat([edges, letters, neighbors_of(nodes, where)], -1)
            nodes = layer.nodes(nodes, mask3 * seen * inputs + known, mask)
        return self.W_out(nodes).log_softmax(-1)


def dpo_step(policy, reference, optimizer, backbone, chosen, rejected, order, beta=0.1):
    """Loss of one optimiser step on one pair; chosen, rejected, order [1, L]."""

    def logp(model, sequence):
        log_probs = model(*backbone, sequence, order).gather(-1, sequence[..., None])
        return (log_probs.squeeze(-1) * backbone[1]).sum(-1)

    with torch.no_grad():
        known = logp(reference, chosen) - logp(reference, rejected)
    margin = logp(policy, chosen) - logp(policy, rejected) - known
    loss = -functional.logsigmoid(beta * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
