"""The shared prompt: several pairs in one row, each as [prompt | chosen | rejected].

Rejected tokens see the prompt and themselves, never chosen, and their positions follow the prompt.
The layers compute the same as for two rows, but the prompt is computed once.
P, C, R: numbers of prompt, chosen and rejected tokens of a pair (the last token of a response is
not an input); T tokens of the row, H heads, K key heads, D head size.
Idea: Wang & Hegde 2024, arXiv 2410.20305.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

NAME = "shared_prompt"  # among transformers' attention implementations


class Packing:
    """Where the pairs of a packed row are, for the attention of its layers."""

    def __init__(self, spans: Sequence[tuple[int, int, int]], device: torch.device):
        self.spans = spans  # (P, C, R) of each pair
        self.device = device
        self.cuts: list[int] = []  # lengths of [prompt | chosen] and of rejected of each pair
        for p, c, r in spans:
            self.cuts += [p + c, r]
        self.masks: dict[tuple, Tensor] = {}
        self.sequences: Any = None  # of by_sequence.py, which computes them once
        self.calls = 0  # of `attend`

    def mask(self, queries: int, keys: int, window: int | None) -> Tensor:
        """Return which keys the last `queries` of `keys` positions see, [queries, keys].

        window: a position sees so many positions, itself included; None: all before it.
        """
        if (queries, keys, window) not in self.masks:
            position = torch.arange(keys, device=self.device)
            back = position[-queries:, None] - position
            self.masks[queries, keys, window] = (back >= 0) & (back < (window or keys))
        return self.masks[queries, keys, window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Return the attention [1, T, H, D] of a packed row; called by transformers' layers.

    query: [1, H, T, D]; key, value: [1, K, T, D]. Raises NotImplementedError for options that
    neither kernel supports.
    """
    if packing is None:
        raise NotImplementedError("its layers do not pass on which tokens belong together")
    if dropout or softcap is not None or s_aux is not None:
        raise NotImplementedError("its attention has a soft-cap, sinks or dropout")
    packing.calls += 1
    device = query.device.type
    dtype = query.dtype
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
    # a CPU is faster, and more exact, in fp32: measured 5.1 instead of 6.7 ms at P + C = 319
    wide = torch.promote_types(half, torch.float32) if device == "cpu" else half
    tensors = [tensor.to(wide) for tensor in (query, key, value)]
    kernel: Any = _by_pair
    if device == "cuda" and wide.itemsize == 2:
        from lm.fast import by_sequence

        if by_sequence.is_supported(query.device, query.shape[-1]):
            kernel = by_sequence.attend_by_sequence
    with torch.autocast(device, enabled=False):
        return kernel(tensors, packing, scaling, sliding_window).to(half), None


def _by_pair(
    tensors: list[Tensor], packing: Packing, scale: float | None, window: int | None
) -> Tensor:
    """Call scaled dot-product attention twice per pair, on any device.

    tensors: queries, keys and values; arguments and result as in `attend`.
    """
    query, key, value = tensors
    heads_per_key = query.shape[1] // key.shape[1]
    if query.device.type == "cuda":  # its kernels for fp32 and wide heads cannot share keys
        key, value = (tensor.repeat_interleave(heads_per_key, 1) for tensor in (key, value))
    # split, not slices: the backward of each slice would fill a tensor as long as the row
    queries, keys, values = (tensor.split(packing.cuts, dim=2) for tensor in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    attention = functional.scaled_dot_product_attention
    outputs = []
    for number, (p, c, r) in enumerate(packing.spans):
        chosen, rejected = 2 * number, 2 * number + 1
        k, v = keys[chosen], values[chosen]  # of prompt and chosen
        visible: dict[str, Any] = {"is_causal": True}
        if window is not None and window < p + c:
            visible = {"attn_mask": packing.mask(p + c, p + c, window)}
        outputs.append(attention(queries[chosen], k, v, **visible, **options))
        if r:  # rejected sees the prompt and itself
            k = torch.cat([k[:, :, :p], keys[rejected]], 2)
            v = torch.cat([v[:, :, :p], values[rejected]], 2)
            mask = packing.mask(r, p + r, window)
            outputs.append(attention(queries[rejected], k, v, attn_mask=mask, **options))
    return torch.cat([output.transpose(1, 2) for output in outputs], 1)


AttentionInterface.register(NAME, attend)
