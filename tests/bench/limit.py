"""The limit of a step on a CPU: its matrix products alone, each timed by itself at its own shape.

    with Products() as products:
        step()
    seconds(products.as_list())  # of the same products and nothing else
    flops(products.as_list())

What a program spends above that is everything else: norms, softmax, copies, Python. Products
that a program computes twice count twice. Attention is the exception: two products of its forward
and four of its backward pass count, and only for pairs of tokens that are not masked.
"""

import collections
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm"}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"  # and its _backward
MEASURED = 0.05  # CPU seconds of one product, at least, in each of three repetitions


def shape_and_strides(tensor):
    return tuple(tensor.shape), tensor.stride()


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


class Products(TorchDispatchMode):
    """Counts the matrix products within it: (left, right, dtype) -> how often, or a share of it."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        name = function._schema.name
        if name in PRODUCTS:
            left, right = args[-2:]
            self.counts[shape_and_strides(left), shape_and_strides(right), name_of(left.dtype)] += 1
        elif name.startswith(ATTENTION):
            names = [argument.name for argument in function._schema.arguments]
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.attention(named, 4 if name.endswith("backward") else 2)
        return function(*args, **(kwargs or {}))

    def attention(self, named, products):
        """Count products of query [B, H, Q, D] and key [B, K, S, D] that no mask hides."""
        batch, heads, queries, width = named["query"].shape
        keys = named["key"].shape[2]
        share = 1.0
        if named.get("is_causal"):
            share = (queries + 1) / (2 * keys)
        elif named.get("attn_mask") is not None:
            mask = named["attn_mask"]
            share = (mask if mask.dtype == torch.bool else mask == 0).float().mean().item()
        left = (batch * heads, queries, width), (queries * width, width, 1)
        right = (batch * heads, width, keys), (keys * width, 1, width)
        self.counts[left, right, name_of(named["query"].dtype)] += products * share

    def as_list(self):
        """Return (left, right, dtype, how often) of each, left and right as shape and strides."""
        return [[*product, count] for product, count in self.counts.items()]


def random(shape, strides, dtype):
    """Return a random tensor of this shape; with a stride of 0 one number stands for many."""
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    numbers = torch.randn(last + 1)
    return numbers.to(dtype).as_strided(shape, strides)


def flops(products):
    """Return their floating-point operations: a multiplication and its addition are two."""
    return sum(
        2 * count * torch.Size(left[0]).numel() * right[0][-1] for left, right, _, count in products
    )


def seconds(products):
    """Return the CPU seconds of all of them: each shape the fastest of three repetitions."""
    total = 0.0
    for left, right, dtype, count in products:
        a = random(*left, getattr(torch, dtype))
        b = random(*right, getattr(torch, dtype))
        out = torch.matmul(a, b)
        repetitions = []
        for _ in range(3):
            done = 0
            start = time.process_time()
            while time.process_time() - start < MEASURED:
                torch.matmul(a, b, out=out)
                done += 1
            repetitions.append((time.process_time() - start) / done)
        total += count * min(repetitions)
    return total
