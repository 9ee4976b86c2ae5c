"""Exact means over rows that are spread over ranks and micro-batches, and how sure they are."""

import math
import os
import platform
import resource
import sys
import time

import torch
from torch import nn

from ddp_utils import distributed


class Averages:
    """Exact means over the rows of all ranks: sums on the device, reduced once."""

    def __init__(self, world):
        self.world = world
        self.sums = None
        self.names = ()

    def add(self, values, weight):
        """Add name -> [B]; weight [B] is 0 for rows that only fill a micro-batch."""
        self.names = ("count", *values)
        rows = torch.stack([torch.ones_like(weight), *values.values()]).double()  # [names, B]
        # where, not a product: the NaN of a filler must not count
        sums = torch.where(weight > 0, rows, 0.0).sum(-1).detach()
        self.sums = sums if self.sums is None else self.sums + sums

    def reduce(self, summed=None, equal=None) -> dict:
        """Return the means over the rows of all ranks, and their `count`: one copy to the host.

        With them go `summed`, name -> number to be summed over the ranks, and `equal`, name ->
        tensor of one element that is the same on all of them.
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


def interval(mean, mean_of_squares, count):
    """95 % confidence interval of a mean of `count` values (normal approximation)."""
    if count < 2:
        return mean, mean
    deviation = math.sqrt(max(0.0, mean_of_squares - mean**2) * count / (count - 1))
    half = 1.96 * deviation / math.sqrt(count)
    return mean - half, mean + half


def wilson(wins, count, z=1.96):
    """Wilson's 95 % interval of a share (Wilson 1927); (None, None) without a decided pair."""
    if not count:
        return None, None
    share = wins / count
    spread = z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


# --- throughput -----------------------------------------------------------------------------------

# FLOP/s with half-precision and with fp32 operands, dense, from the makers' data sheets; of a
# Max 1550 ("PVC") one of its two tiles, which is what Aurora counts as a device
PEAKS = {
    "A100": (312e12, 19.5e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "Max 1550": (416e12, 26e12),
}


class Meter:
    """Seconds, tokens and mfu of a step.

    Tokens are those of both texts of a pair, prompt + chosen and prompt + rejected, however few
    of them go through the model: so tokens_per_second compares with other trainers'.

    mfu is the arithmetic that the pairs need at the least, over what the device could have done.
    Needed are 4 FLOP a token and frozen weight (forward, and backward to the input), 6 if it is
    trained; the prompt counts once, the head for responses only; attention is left out.
    """

    def __init__(self, scorer, world):
        backbone, head = scorer.parts()
        embeddings = {m.weight for m in backbone.modules() if isinstance(m, nn.Embedding)}
        # under ZeRO-3 a parameter is empty until it is asked for
        weights = [p for p in backbone.parameters() if p not in embeddings and _axes(p) > 1]
        known = head is not None and not any(_axes(p) > 2 for p in weights)  # no fused experts
        self.peak = known and peak_flops(world.device, scorer.precision)
        self.per_token = flops_per_token(weights)
        self.per_target = flops_per_token(head.parameters()) if known else 0
        self.world = world

    def read(self, pairs, seconds) -> dict:
        """The metrics of a step on these pairs, the global batch."""
        tokens = sum(p.num_forward_tokens(shared=False) + len(p.targets) for p in pairs)
        values = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "peak_memory_mb": peak_memory_mb(self.world.device),
        }
        if self.peak:
            needed = 0
            for pair in pairs:
                needed += pair.num_forward_tokens(shared=True) * self.per_token
                needed += sum(map(len, pair.targets)) * self.per_target
            values["mfu"] = needed / (seconds * self.peak * self.world.world_size)
        return values


def flops_per_token(parameters):
    """FLOP of forward and backward: 4 a frozen weight, 6 a trained one."""
    flops = 0
    for p in parameters:
        flops += getattr(p, "ds_numel", p.numel()) * (6 if p.requires_grad else 4)
    return flops


def _axes(parameter):
    return len(getattr(parameter, "ds_shape", parameter.shape))


def peak_flops(device, dtype):
    """FLOP/s of a device: the data sheet's; of a CPU what a matrix product reaches; else None."""
    if device.type != "cpu":
        for name, peaks in PEAKS.items():
            if name in device_name(device):
                return peaks[dtype == torch.float32]
        return None
    matrix = torch.ones(1024, 1024, dtype=dtype)
    seconds = []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)


def device_name(device):
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return getattr(torch, device.type).get_device_name(device)


def peak_memory_mb(device):
    """Peak memory of this process: allocated on the GPU, resident on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return getattr(torch, device.type).max_memory_allocated(device) / 2**20
