"""Exact means over rows on all ranks, confidence intervals, and the memory of a process."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_utils import UserError, distributed
from ddp_utils.distributed import World

Tensors = dict[str, Tensor]
Values = dict[str, float]

EQUAL = 1e-2  # two losses that differ by less, as in bf16, count as equal
PRODUCTS = ("squares of ", "products of ", "squared sizes of ")  # before the name of a metric
Z = 1.96  # half the width of a 95 % confidence interval, in standard deviations


class Averages:
    """Exact means over the rows of all ranks: sums on the device, reduced once.

    intervals: names of metrics with a 95 % interval; of `.../accuracies` that of a fraction.
    sizes: metric -> the one by whose sum its sum is divided, instead of by the number of rows. An
    example is a loss per token: {"loss": "tokens"}.
    """

    def __init__(
        self, world: World, intervals: Sequence[str] = (), sizes: Mapping[str, str] | None = None
    ):
        self.world = world
        self.intervals = intervals
        self.sizes = sizes or {}
        self.sums: Any = None  # [names], in float64
        self.names: list[str] = []

    def add(self, values: Tensors, weight: Tensor) -> None:
        """Add name -> [B]; weight [B] is 0 for rows that only fill up a micro-batch.

        Raises UserError for a metric of another shape.
        """
        for name, value in values.items():
            if value.shape != weight.shape:
                problem = f"its shape is {[*value.shape]} (expected {[*weight.shape]})"
                raise UserError(f"metric {name}: {problem}; return one value for each row")
        for name in self.intervals:
            value = values[name].double()
            size = values[self.sizes[name]].double() if name in self.sizes else value.new_ones(())
            products = value * value, value * size, (size * size).expand_as(value)
            names = [f"{part}{name}" for part in PRODUCTS]
            values = values | dict(zip(names, products, strict=True))
        self.names = ["count", *values]
        rows = torch.stack([torch.ones_like(weight), *values.values()]).double()  # [names, B]
        # not a product with the weight: a row of weight 0 may be NaN
        sums = torch.where(weight > 0, rows, 0.0).sum(-1).detach()
        self.sums = sums if self.sums is None else self.sums + sums

    def reduce(self, summed: Values | None = None, equal: Tensors | None = None) -> dict[str, Any]:
        """Return the means over the rows of all ranks and their `count`, in one collective.

        summed: further numbers to be summed over the ranks; equal: tensors of one element that
        are equal on all ranks. Both are returned as well, with one copy to the host for all.
        """
        extra, others = summed or {}, equal or {}
        device = self.sums.device
        numbers = distributed.to_device([float(value) for value in extra.values()], device)
        sums = distributed.all_sum(torch.cat([self.sums, numbers]), self.world)
        tensors = [value.double().view(1).to(device) for value in others.values()]
        names = [*self.names, *extra, *others]
        values = dict(zip(names, torch.cat([sums, *tensors]).tolist(), strict=True))
        for name in self.names[1:]:
            values[name] /= values["count"]
        for name, size in self.sizes.items():
            values[size] = values[size] or math.nan  # of tasks in which no return is possible
            values[name] /= values[size]
        count = int(values["count"])
        for name in self.intervals:
            square, product, squared_size = (values.pop(f"{part}{name}") for part in PRODUCTS)
            is_fraction = name.endswith("accuracies")
            mean, per_row = values[name], values[self.sizes[name]] if name in self.sizes else 1.0
            # delta method: a ratio of sums varies like the mean of (value - mean * size) / E[size]
            variance = (square - 2 * mean * product + mean**2 * squared_size) / per_row**2
            moments = mean, mean**2 + variance, count
            ends = wilson_of_fraction(mean, count) if is_fraction else interval(*moments)
            if count > 1 or is_fraction:  # one row has no spread
                values |= dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True))
        for size in {*self.sizes.values()}:
            del values[size]
        return values | {"count": count}


def ratio(name: str, values: Tensor, sizes: Tensor) -> Values:
    """Return the sum of values [N] divided by that of sizes [N], with its 95 % interval.

    N: independent units, such as questions or tasks. There is no interval of a single one.
    """
    averages = Averages(World(), [name] if len(values) > 1 else [], {name: "size"})
    averages.add({name: values, "size": sizes}, torch.ones_like(values))
    means = averages.reduce()
    del means["count"]
    return means


def interval(mean: float, mean_of_squares: float, count: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean of `count` values (normal approximation)."""
    if count < 2:
        return mean, mean
    deviation = math.sqrt(max(0.0, mean_of_squares - mean**2) * count / (count - 1))
    half = Z * deviation / math.sqrt(count)
    return mean - half, mean + half


def wilson(wins: float, count: float) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a fraction (Wilson 1927); (None, None) if `count` is 0."""
    return wilson_of_fraction(wins / count, count) if count else (None, None)


def wilson_of_fraction(fraction: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a fraction of `count` > 0 trials (Wilson 1927)."""
    spread = Z**2 / count
    middle = (fraction + spread / 2) / (1 + spread)
    variance = fraction * (1 - fraction) / count
    half = Z * math.sqrt(variance + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def worse(before: Values, after: Values) -> str:
    """Return how the held-out loss is above that before training, "" if it is not."""
    names = [name for name in ("loss/preference", "loss", "kl") if name in before and name in after]
    if not names or after[names[0]] <= before[names[0]] + EQUAL:
        return ""
    numbers = f"{after[names[0]]:.4f} is above {before[names[0]]:.4f}"
    return f"held-out {names[0]} {numbers}, that of the model before training"


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or "cpu"."""
    return "cpu" if device.type == "cpu" else getattr(torch, device.type).get_device_name(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return getattr(torch, device.type).max_memory_allocated(device) / 2**20
