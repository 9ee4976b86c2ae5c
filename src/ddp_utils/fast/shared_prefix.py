"""The shared prompt: a pair is one stretch [prompt | chosen | rejected] of a row of many.

Rejected tokens see the prompt and themselves, never chosen, and their positions go on from the
prompt. What the layers compute is what they compute for two rows; the prompt is computed once.
P, C, R: fed tokens of prompt, chosen, rejected; T tokens of the row; H heads, K key heads, D wide.
Idea: Wang & Hegde 2024, arXiv 2410.20305.
"""

import itertools

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ddp_utils import logps

NAME = "shared_prompt"  # among transformers' attention implementations


class Packing:
    """Where the stretches of a packed row lie, and what attention needs to know of them."""

    def __init__(self, spans, device):
        self.spans = spans  # (P, C, R) of each pair
        self.device = device
        self.cuts = []  # sum T
        for p, c, r in spans:
            self.cuts += [p + c, r]
        self.masks = {}
        self.sequences = None  # of by_sequence.py, made once
        self.calls = 0  # of attend

    def mask(self, queries, keys, window):
        """The last `queries` of `keys` positions look back at most `window`: [queries, keys]."""
        if (queries, keys, window) not in self.masks:
            place = torch.arange(keys, device=self.device)
            back = place[-queries:, None] - place
            self.masks[queries, keys, window] = (back >= 0) & (back < (window or keys))
        return self.masks[queries, keys, window]


def pack(pairs, device):
    """B pairs -> token ids [1, T], scored places [N], positions [T], and their Packing."""
    ids = []
    positions = []
    spans = []
    places_of_pairs = []
    for pair in pairs:
        fed, order, span, sides = pair.to_packed()
        shifted = []
        for places in sides:
            shifted.append([len(ids) + place for place in places])
        places_of_pairs.append(shifted)
        ids += fed
        positions += order
        spans.append(span)
    hidden_index = list(itertools.chain(*logps.by_side(places_of_pairs)))
    return [ids], hidden_index, positions, Packing(spans, device)


def attend(
    module, query, key, value, _mask, dropout=0.0, scaling=None, packing=None, softcap=None,
    s_aux=None, sliding_window=None, **_unused,
):  # fmt: skip
    """Attention of a packed row, called by transformers' layers: [1, H, T, D] -> [1, T, H, D].

    Raises NotImplementedError for what neither kernel can do.
    """
    if packing is None:
        raise NotImplementedError("its layers do not say which tokens belong together")
    if dropout or softcap is not None or s_aux is not None:
        raise NotImplementedError("its attention has a soft-cap, sinks or dropout")
    packing.calls += 1
    device = query.device.type
    dtype = query.dtype
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
    # a CPU is faster, and more exact, in fp32: measured 5.1 instead of 6.7 ms at P + C = 319
    wide = torch.promote_types(half, torch.float32) if device == "cpu" else half
    query, key, value = (tensor.to(wide) for tensor in (query, key, value))
    kernel = _by_pair
    if device == "cuda" and wide.itemsize == 2:
        from ddp_utils.fast.by_sequence import attend_by_sequence as kernel
    with torch.autocast(device, enabled=False):
        return kernel(query, key, value, packing, scaling, sliding_window).to(half), None


def _by_pair(query, key, value, packing, scale, window):
    """Two calls of scaled dot-product attention a pair, on any device."""
    options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    outputs = []
    # split, not slices: their backward would fill a tensor as long as the row for each of them
    queries = query.split(packing.cuts, dim=2)
    keys = key.split(packing.cuts, dim=2)
    values = value.split(packing.cuts, dim=2)
    for number, (p, c, r) in enumerate(packing.spans):
        q = queries[2 * number]  # of prompt and chosen
        k = keys[2 * number]
        v = values[2 * number]
        how = {"is_causal": True}
        if window is not None and window < p + c:
            how = {"attn_mask": packing.mask(p + c, p + c, window)}
        outputs.append(scaled_dot_product_attention(q, k, v, **how, **options).transpose(1, 2))
        if r:
            q = queries[2 * number + 1]  # of rejected, which sees the prompt and itself
            k = torch.cat([k[:, :, :p], keys[2 * number + 1]], 2)
            v = torch.cat([v[:, :, :p], values[2 * number + 1]], 2)
            how = {"attn_mask": packing.mask(r, p + r, window)}
            outputs.append(scaled_dot_product_attention(q, k, v, **how, **options).transpose(1, 2))
    return torch.cat(outputs, 1)


AttentionInterface.register(NAME, attend)
