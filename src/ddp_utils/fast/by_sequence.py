"""Attention of a packed row in one kernel, on CUDA in half precision: see shared_prefix.py.

Two sequences a pair: P + C queries see themselves; R queries see P + R keys.
T tokens of the row; H heads, K key heads, D wide.
"""

import itertools

import torch
from torch.nn.attention.varlen import varlen_attn

from ddp_utils.distributed import to_device


def sequences_of(packing):
    """Return the places of all keys in the row [keys], the prompt's twice, and varlen_attn's
    borders of queries and keys, each [sequences + 1], with the longest of both."""
    places = []
    queries = []
    keys = []
    start = 0
    for p, c, r in packing.spans:
        middle = start + p + c
        places += range(start, middle)
        queries.append(p + c)
        keys.append(p + c)
        if r:
            places += [*range(start, start + p), *range(middle, middle + r)]
            queries.append(r)
            keys.append(p + r)
        start = middle + r

    borders = []
    for sizes in (queries, keys):
        ends = [0, *itertools.accumulate(sizes)]
        borders.append(to_device(ends, packing.device, torch.int32))
    return to_device(places, packing.device), (*borders, max(queries), max(keys))


def attend_by_sequence(query, key, value, packing, scale, window):
    """[1, H, T, D] and keys and values [1, K, T, D] -> [1, T, H, D]."""
    if packing.sequences is None:
        packing.sequences = sequences_of(packing)
    places, borders = packing.sequences
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, H, D], [T, K, D]
    look_back = (-1 if window is None else window - 1, 0)  # to the right: nothing, so causal
    return varlen_attn(
        query,
        key[places],
        value[places],
        *borders,
        scale=scale,
        window_size=look_back,
        enable_gqa=True,
    )[None]
