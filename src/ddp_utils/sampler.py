"""Choose the rows of each step and split them over ranks.

A step is a pure function of (seed, step): resuming needs no sampler state. The global batch is
computed for the whole data set and only then split, so it is the same for any number of processes.
B rows in a micro-batch.
"""

import functools
import hashlib
import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_utils import UserError
from ddp_utils.distributed import World

Lengths = Mapping[int, int] | Sequence[int]  # row -> number of tokens


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass on one rank. A filler row has weight 0."""

    index: list[int]  # type: ignore[assignment]  # [B] into the data set
    weight: list[float]  # [B]


def seed_of(*numbers: int | str) -> int:
    """Return one 63-bit seed for several numbers, such as (seed, step, micro_step, rank)."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def order(count: int, seed: int, epoch: int | str, shuffle: bool = True) -> np.ndarray:
    """Return the order in which an epoch visits `count` rows, [count]."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    visit = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
    return visit.numpy()


@functools.lru_cache(maxsize=2)  # for a million rows it takes longer than a small training step
def checked_order(
    order: Callable[..., np.ndarray], count: int, seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    """Return order(count, seed, epoch, shuffle); raise UserError if it is not a permutation."""
    visit = np.asarray(order(count, seed, epoch, shuffle))
    if not np.array_equal(np.sort(visit), np.arange(count)):
        expected = f"expected each number from 0 to {count - 1} once"
        raise UserError(f"Plan.order: rows are repeated or left out ({expected}); use argsort()")
    return visit


def assign_micro_batches(
    rows: Collection[int], lengths: Lengths, world: World, size: int, padded: bool = False
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a global batch; every rank gets the same number of them.

    In the backward pass all ranks wait for each other. A rank with too few rows gets a filler: the
    shortest row with weight 0.

    rows: the global batch; lengths: tokens of each row; size: most rows of a micro-batch; padded:
    the rows of a micro-batch will be padded to one length, so rows of similar length come together,
    otherwise micro-batches get about the same number of tokens.
    """
    ranks = world.world_size
    longest_first = sorted(rows, key=lambda row: (-lengths[row], row))
    micro_steps = math.ceil(math.ceil(len(longest_first) / ranks) / size)
    parts = []
    if padded:  # deal the rows to the ranks in turn
        own = longest_first[world.rank :: ranks]
        parts = [own[step * size : (step + 1) * size] for step in range(micro_steps)]
    else:
        bins = _fill_bins(longest_first, lengths, micro_steps * ranks, size)
        for step in range(micro_steps):
            of_step = bins[step * ranks : (step + 1) * ranks]
            # in alternating order, so that no rank always gets the bin with the most tokens
            parts.append(of_step[:: -1 if step % 2 else 1][world.rank])
    filler = MicroBatch(longest_first[-1:], [0.0])
    return [MicroBatch(part, [1.0] * len(part)) if part else filler for part in parts]


def _fill_bins(
    longest_first: list[int], lengths: Lengths, count: int, size: int
) -> list[list[int]]:
    """Put each row into the bin with the fewest tokens; return the bins, the fullest first."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]  # (tokens, number of the bin)
    for row in longest_first:
        tokens, number = heapq.heappop(heap)
        bins[number].append(row)
        if len(bins[number]) < size:
            heapq.heappush(heap, (tokens + lengths[row], number))
    return sorted(bins, key=lambda part: -sum(lengths[row] for row in part))


def check_enough_rows(
    path: str, data: Mapping[str, Sized], world: World, save_best: bool = False
) -> None:
    """Raise UserError for fewer training rows than processes, or no validation for save_best."""
    count = len(data["train"])
    if save_best and not data["val"]:
        raise UserError("--save_best: there is no validation data; use --val_data FILE")
    if count < world.world_size:
        problem = f"{count} usable rows for {world.world_size} processes"
        raise UserError(f"{path}: {problem}; start at most {count} processes")


class Plan(NamedTuple):
    """The global batches of a run. The last one of an epoch has the remaining rows."""

    rows: int  # in the data set
    global_batch: int
    seed: int
    shuffle: bool = True
    num_epochs: float = 1
    max_steps: int = -1
    order: Callable[..., np.ndarray] = order  # of the rows in an epoch; the first epoch is 0

    @classmethod
    def of(cls, config: Any, rows: int, ranks: int = 1) -> "Plan":
        """Return the plan of a script's settings.

        ranks: number of processes, for scripts whose batch_size counts rows per process.
        """
        global_batch = config.batch_size * ranks * config.gradient_accumulation_steps
        settings = config.seed, config.shuffle, config.num_epochs, config.max_steps
        return cls(rows, global_batch, *settings)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows / self.global_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        if self.max_steps >= 0:
            return self.max_steps
        # rounded first: 100 steps x 1.1 epochs is 110.00000000000001
        return math.ceil(round(self.steps_per_epoch * self.num_epochs, 6))

    def epoch(self, step: int) -> float:
        """Return the passes over the data after `step` steps."""
        return step / self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """Return the global batch of a step; the first step is 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self.global_batch
        visit = checked_order(self.order, self.rows, self.seed, epoch, self.shuffle)
        return visit[first : first + self.global_batch].tolist()

    def largest_steps(self, sizes: np.ndarray) -> list[int]:
        """Return the step with the most tokens and that with the longest row, often the same one.

        sizes: the tokens of each row, [rows].
        """
        totals = [sizes[self.batch(step)].sum() for step in range(self.steps)]
        longest = [np.max(sizes[self.batch(step)]) for step in range(self.steps)]
        return sorted({int(np.argmax(totals)), int(np.argmax(longest))})

    def rows_used(self) -> list[int]:
        """Return the rows that the run trains on, sorted."""
        if self.steps >= self.steps_per_epoch:  # an epoch visits all rows
            return list(range(self.rows))
        visit = checked_order(self.order, self.rows, self.seed, 0, self.shuffle)
        return sorted(visit[: self.steps * self.global_batch].tolist())

    def due(self, every: int, step: int) -> bool:
        """Return whether to act after `step` steps: each `every`, or epoch if 0, and at the end."""
        return step % (every or self.steps_per_epoch) == 0 or step == self.steps
