"""Attention of a packed row in one kernel, on CUDA in half precision: see shared_prefix.py.

Two sequences a pair: P + C queries see themselves; R queries see P + R keys.
T tokens of the row; H heads, K key heads, D wide.
"""

import inspect
import itertools

import torch
from torch.nn.attention.varlen import varlen_attn

from ddp_utils.distributed import to_device

# torch 2.11 takes fewer key heads than heads without being told
IS_TOLD = "enable_gqa" in inspect.signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if IS_TOLD else {}


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
    # not key[places]: its backward sorts the places and adds up one after the other
    key = key.index_select(0, places)
    value = value.index_select(0, places)
    options = {"scale": scale, "window_size": look_back} | GROUPED
    return varlen_attn(query, key, value, *borders, **options)[None]
