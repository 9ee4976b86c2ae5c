"""Throughput of a training step: seconds, tokens, and the share of the GPU's arithmetic."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_utils.distributed import World
from ddp_utils.metrics import device_name, peak_memory_mb
from lm.token_rows import Rows

# FLOP/s of dense half-precision products, from the data sheets; for a Max 1550 of one of its two
# tiles, which is what Aurora counts as a device
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "Max 1550": 416e12}


class Meter:
    """Measure seconds, tokens and MFU of a step.

    Tokens are those of both texts of a pair, prompt + chosen and prompt + rejected, even if the
    model processes fewer: so tokens_per_second is comparable with other trainers.

    mfu is the least arithmetic that the pairs need, divided by what the GPU could have done: 4 FLOP
    per token and frozen weight (forward, and backward to the input), 6 if it is trained. The prompt
    counts once, the head for responses only; attention is left out. There is none in fp32, nor on
    a device that is not in PEAKS, nor for fused experts, of which a token uses only some.
    """

    def __init__(self, scorer: Any, world: World):
        self.world = world
        backbone, head = scorer.backbone_and_head()
        embeddings = {m.weight for m in backbone.modules() if isinstance(m, nn.Embedding)}
        weights = [p for p in backbone.parameters() if p not in embeddings and len(shape_of(p)) > 1]
        has_fused_experts = any(len(shape_of(p)) > 2 for p in weights)
        self.peak = None
        if head is not None and not has_fused_experts:
            self.peak = peak_flops(world.device, scorer.precision)
            self.per_token = sum(map(flops_of, weights))
            self.per_target = sum(map(flops_of, head.parameters()))

    def read(self, rows: Rows, seconds: float) -> dict[str, float]:
        """Return the metrics of a step on these rows, the global batch."""
        last_tokens = len(rows) * len(rows[0].targets)  # of the responses, which no forward reads
        tokens = int(rows.num_forward_tokens(shared=False).sum()) + last_tokens
        memory = peak_memory_mb(self.world.device)
        speed = tokens / seconds
        values = {"seconds": seconds, "tokens_per_second": speed, "peak_memory_mb": memory}
        if self.peak:
            flops = int(rows.num_forward_tokens(shared=True).sum()) * self.per_token
            flops += int(rows.num_targets.sum()) * self.per_target
            values["mfu"] = flops / (seconds * self.peak * self.world.world_size)
        return values


def shape_of(parameter: Any) -> Sequence[int]:
    """Return the full shape of a parameter; under ZeRO-3 it is empty until it is used."""
    return getattr(parameter, "ds_shape", parameter.shape)


def flops_of(parameter: nn.Parameter) -> int:
    """Return the FLOP per token, forward and backward: 4 per frozen weight, 6 per trained one."""
    return math.prod(shape_of(parameter)) * (6 if parameter.requires_grad else 4)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s in a GPU's data sheet; None in fp32 or for another device."""
    peaks = [peak for gpu, peak in PEAKS.items() if gpu in device_name(device)]
    return peaks[0] if peaks and dtype != torch.float32 else None
