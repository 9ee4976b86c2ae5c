"""Attention of a packed row in one kernel, on CUDA in half precision: see shared_prefix.py.

A pair is two sequences: P + C queries that see themselves, and R queries that see P + R keys.
T tokens of the row, H heads, K key heads, D head size.
"""

import inspect
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from ddp_utils.distributed import to_device

# torch 2.11 supports fewer key heads than heads without this argument
HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if HAS_GQA_FLAG else {}


class Sequences(NamedTuple):
    """The sequences of a packed row as arguments of varlen_attn."""

    key_index: Tensor  # positions of all keys in the row; the prompt's occur twice
    query_bounds: Tensor  # [sequences + 1]
    key_bounds: Tensor  # [sequences + 1]
    max_queries: int
    max_keys: int


def find_sequences(spans: Iterable[tuple[int, int, int]], device: torch.device) -> Sequences:
    """Return the sequences of a row with pairs of (P, C, R) tokens."""
    key_index: list[int] = []
    num_queries = []
    num_keys = []
    start = 0
    for p, c, r in spans:
        middle = start + p + c
        key_index += range(start, middle)
        num_queries.append(p + c)
        num_keys.append(p + c)
        if r:
            key_index += [*range(start, start + p), *range(middle, middle + r)]
            num_queries.append(r)
            num_keys.append(p + r)
        start = middle + r

    def bounds(sizes: list[int]) -> Tensor:
        return to_device([0, *itertools.accumulate(sizes)], device, torch.int32)

    lengths = bounds(num_queries), bounds(num_keys), max(num_queries), max(num_keys)
    return Sequences(to_device(key_index, device), *lengths)


def attend_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, packing: Any, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention [1, T, H, D] of queries [1, H, T, D] to keys and values [1, K, T, D].

    packing: a shared_prefix.Packing.
    """
    if packing.sequences is None:
        packing.sequences = find_sequences(packing.spans, packing.device)
    sequences: Sequences = packing.sequences
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, H, D], [T, K, D]
    # number of visible tokens to the left and to the right; -1: all. None to the right is causal
    look_back = (-1 if window is None else window - 1, 0)
    # not key[index]: its backward sorts the index and adds up one key after the other
    key = key.index_select(0, sequences.key_index)
    value = value.index_select(0, sequences.key_index)
    bounds: Any = sequences[1:]
    options: dict[str, Any] = {"scale": scale, "window_size": look_back} | GROUPED
    output: Any = varlen_attn(query, key, value, *bounds, **options)  # [T, H, D]
    return output[None]
