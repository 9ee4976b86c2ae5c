"""Attention of a packed row in one kernel, on CUDA in half precision: see shared_prefix.py.

A pair is two sequences: P + C queries that see themselves, and R queries that see P + R keys.
T tokens of the row, H heads, K key heads, D head size.
"""

import functools
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, int32
from torch.nn.attention.varlen import varlen_attn

from ddp_utils.distributed import to_device

OPTIONS = inspect.signature(varlen_attn).parameters
# torch 2.11 supports fewer key heads than heads without this argument
GROUPED = {"enable_gqa": True} if "enable_gqa" in OPTIONS else {}


@functools.cache
def is_supported(device: torch.device, head_size: int) -> bool:
    """Return whether varlen_attn has the arguments used here (torch >= 2.11) and a kernel.

    Flash attention needs compute capability 8.0, that of Ampere, and heads of at most 256 numbers;
    the global layers of Gemma 4 have 512.
    """
    has_kernel = torch.cuda.get_device_capability(device) >= (8, 0)
    return "window_size" in OPTIONS and has_kernel and head_size <= 256 and head_size % 8 == 0


def find_sequences(packing: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the sequences of a shared_prefix.Packing as arguments of varlen_attn.

    These are the positions of all keys in the row, where the prompt's occur twice; and the bounds
    of queries and of keys, [sequences + 1] each, and their largest numbers.
    """
    key_index: list[int] = []
    num_queries = [tokens for tokens in packing.cuts if tokens]
    num_keys = []
    start = 0
    for p, c, r in packing.spans:
        middle = start + p + c
        key_index += range(start, middle)
        num_keys.append(p + c)
        if r:
            key_index += [*range(start, start + p), *range(middle, middle + r)]
            num_keys.append(p + r)
        start = middle + r

    def bounds(sizes: list[int]) -> Tensor:
        return to_device([0, *itertools.accumulate(sizes)], packing.device, int32)

    lengths = bounds(num_queries), bounds(num_keys), max(num_queries), max(num_keys)
    return to_device(key_index, packing.device), lengths


def attend_by_sequence(
    tensors: list[Tensor], packing: Any, scale: float | None, window: int | None
) -> Tensor:
    """Return the attention [1, T, H, D] of queries [1, H, T, D] to keys and values [1, K, T, D]."""
    if packing.sequences is None:
        packing.sequences = find_sequences(packing)
    key_index, lengths = packing.sequences
    # not tensor[0]: its backward fills a tensor with zeros and copies into it
    query, key, value = (tensor.transpose(1, 2).squeeze(0) for tensor in tensors)  # [T, H, D]
    # not key[index]: its backward sorts the index and adds up one key after the other
    key = key.index_select(0, key_index)
    value = value.index_select(0, key_index)
    # number of visible tokens to the left and to the right; -1: all. None to the right is causal
    look_back = (-1 if window is None else window - 1, 0)
    options: dict[str, Any] = {"scale": scale, "window_size": look_back} | GROUPED
    output: Any = varlen_attn(query, key, value, *lengths, **options)  # [T, H, D]
    return output.unsqueeze(0)
