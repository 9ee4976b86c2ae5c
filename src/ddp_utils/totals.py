"""Exact means over rows that are spread over ranks and micro-batches, and how sure they are."""

import math

import torch

from ddp_utils import dist


class Totals:
    """Weighted sums of per-pair values, kept on the device and reduced once."""

    def __init__(self, world):
        self.world = world
        self.sums = None
        self.names = ()

    def add(self, values, weight):
        """values: name -> [B]; weight [B], 0 for fillers."""
        self.names = ("count", *values)
        rows = torch.stack([torch.ones_like(weight), *values.values()]).double()  # [names, B]
        # where, not a product: a filler's NaN must not count
        part = torch.where(weight > 0, rows, 0.0).sum(-1).detach()
        self.sums = part if self.sums is None else self.sums + part

    def means(self) -> dict:
        """Means over the rows of all ranks, and their `count`."""
        count, *sums = dist.all_sum(self.sums, self.world).tolist()
        return {"count": int(count)} | {
            name: value / count for name, value in zip(self.names[1:], sums, strict=True)
        }


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
    share_, spread = wins / count, z**2 / count
    middle = (share_ + spread / 2) / (1 + spread)
    half = z * math.sqrt(share_ * (1 - share_) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
