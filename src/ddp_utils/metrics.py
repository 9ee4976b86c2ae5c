"""Exact means over rows on all ranks, confidence intervals, and the throughput of a step."""

import math
import resource
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_utils import distributed
from ddp_utils.distributed import World


class Averages:
    """Exact means over the rows of all ranks: sums on the device, reduced once."""

    def __init__(self, world: World):
        self.world = world
        self.sums: Any = None  # [names], in float64
        self.names: list[str] = []

    def add(self, values: dict[str, Tensor], weight: Tensor) -> None:
        """Add name -> [B]; weight [B] is 0 for rows that only fill up a micro-batch."""
        self.names = ["count", *values]
        rows = torch.stack([torch.ones_like(weight), *values.values()]).double()  # [names, B]
        # not a product with the weight: a row of weight 0 may be NaN
        sums = torch.where(weight > 0, rows, 0.0).sum(-1).detach()
        self.sums = sums if self.sums is None else self.sums + sums

    def reduce(
        self, summed: dict[str, float] | None = None, equal: dict[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Return the means over the rows of all ranks and their `count`, in one collective.

        summed: further numbers to be summed over the ranks; equal: tensors of one element that
        are equal on all ranks. Both are returned as well, with one copy to the host for all.
        """
        summed = summed or {}
        equal = equal or {}
        device = self.sums.device
        extra = distributed.to_device([float(value) for value in summed.values()], device)
        sums = distributed.all_sum(torch.cat([self.sums, extra]), self.world)
        others = [value.double().view(1).to(device) for value in equal.values()]
        numbers = torch.cat([sums, *others]).tolist()
        values = dict(zip([*self.names, *summed, *equal], numbers, strict=True))
        for name in self.names[1:]:
            values[name] /= numbers[0]
        return values | {"count": int(numbers[0])}


def interval(mean: float, mean_of_squares: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean of `count` values (normal approximation)."""
    if count < 2:
        return mean, mean
    deviation = math.sqrt(max(0.0, mean_of_squares - mean**2) * count / (count - 1))
    half = 1.96 * deviation / math.sqrt(count)
    return mean - half, mean + half


def wilson(wins: float, count: float, z: float = 1.96) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a fraction (Wilson 1927); (None, None) if `count` is 0."""
    if not count:
        return None, None
    fraction = wins / count
    spread = z**2 / count
    middle = (fraction + spread / 2) / (1 + spread)
    variance = fraction * (1 - fraction) / count
    half = z * math.sqrt(variance + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


# --- throughput -----------------------------------------------------------------------------------

# FLOP/s of dense half-precision products, from the data sheets; for a Max 1550 of one of its two
# tiles, which is what Aurora counts as a device
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "Max 1550": 416e12}


class Meter:
    """Measure seconds, tokens and MFU of a step.

    Tokens are those of both texts of a pair, prompt + chosen and prompt + rejected, even if the
    model processes fewer: so tokens_per_second is comparable with other trainers.

    mfu is the least arithmetic that the pairs need, divided by what the GPU could have done: 4 FLOP
    per token and frozen weight (forward, and backward to the input), 6 if it is trained. The prompt
    counts once, the head for responses only; attention is left out. There is none in fp32, nor
    on a device that is not in PEAKS.
    """

    def __init__(self, scorer: Any, world: World):
        self.world = world
        backbone, head = scorer.backbone_and_head()
        embeddings = {m.weight for m in backbone.modules() if isinstance(m, nn.Embedding)}
        weights = [p for p in backbone.parameters() if p not in embeddings and _ndim(p) > 1]
        has_fused_experts = any(_ndim(p) > 2 for p in weights)  # not all of them are used
        self.peak = None
        if head is not None and not has_fused_experts:
            self.peak = peak_flops(world.device, scorer.precision)
            self.per_token = flops_per_token(weights)
            self.per_target = flops_per_token(head.parameters())

    def read(self, rows: Sequence[Any], seconds: float) -> dict[str, float]:
        """Return the metrics of a step on these rows, the global batch (see logps.Example)."""
        tokens = sum(row.num_forward_tokens(shared=False) + len(row.targets) for row in rows)
        values = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mb": peak_memory_mb(self.world.device),
        }
        if self.peak:
            flops = 0
            for row in rows:
                flops += row.num_forward_tokens(shared=True) * self.per_token
                flops += sum(map(len, row.targets)) * self.per_target
            values["mfu"] = flops / (seconds * self.peak * self.world.world_size)
        return values


def flops_per_token(parameters: Iterable[Any]) -> int:
    """Return the FLOP of forward and backward: 4 per frozen weight, 6 per trained one."""
    flops = 0
    for parameter in parameters:
        # under ZeRO-3 a parameter is empty until it is used
        size = getattr(parameter, "ds_numel", parameter.numel())
        flops += size * (6 if parameter.requires_grad else 4)
    return flops


def _ndim(parameter: Any) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s in a GPU's data sheet; None in fp32 or for another device."""
    name = device_name(device)
    peaks = [peak for gpu, peak in PEAKS.items() if gpu in name and dtype != torch.float32]
    return peaks[0] if peaks else None


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return getattr(torch, device.type).get_device_name(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return getattr(torch, device.type).max_memory_allocated(device) / 2**20
