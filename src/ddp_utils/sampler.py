"""Which rows a step trains on: computed for the whole data set, and only then shared out.

A step is a pure function of (seed, step): resuming needs no sampler state, and the global batch
is the same for any number of processes. B rows in a micro-batch.
"""

import functools
import hashlib
import heapq
import math
from typing import NamedTuple

import torch

from ddp_utils import UserError


class MicroBatch(NamedTuple):
    """Rows of one forward and backward on one rank; a filler has weight 0."""

    index: list[int]  # [B] into the data set
    weight: list[float]  # [B]


def seed_of(*numbers) -> int:
    """One 63-bit seed from several numbers, such as (seed, step, micro_step, rank)."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@functools.lru_cache(maxsize=2)  # of a million rows it takes longer than a small step
def order(count, seed, epoch, shuffle=True):
    """The order in which an epoch visits `count` rows, [count], an array of numpy."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    visit = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
    return visit.numpy()


def share(rows, lengths, world, budget, padded=False, tokens=math.inf) -> list[MicroBatch]:
    """This rank's micro-batches of one global batch: at most `budget` rows and `tokens` each.

    Every rank gets the same number of them, since each is a forward that the others wait for;
    where its rows do not suffice, a filler repeats the shortest one with weight 0. A row of more
    than `tokens` is alone. lengths: row -> tokens. Micro-batches get equal shares of tokens; or, if
    their rows will be `padded` to one length, rows of like length. Ranks get equal shares of both.
    """
    longest_first = sorted(rows, key=lambda row: (-lengths[row], row))
    ranks = world.world_size
    if padded and longest_first and tokens < math.inf:  # each row takes the longest one's
        budget = max(1, min(budget, tokens // lengths[longest_first[0]]))
    micro_steps = math.ceil(math.ceil(len(longest_first) / ranks) / budget)
    filler = MicroBatch(longest_first[-1:], [0.0])
    own = longest_first[world.rank :: ranks]
    bins = [] if padded else _balanced(longest_first, lengths, micro_steps * ranks, budget)
    while any(len(rows) > 1 and sum(lengths[row] for row in rows) > tokens for rows in bins):
        micro_steps += 1
        bins = _balanced(longest_first, lengths, micro_steps * ranks, budget)
    micro_batches = []
    for step in range(micro_steps):
        if padded:
            index = own[step * budget : (step + 1) * budget]
        else:  # to and fro, so that no rank always gets the largest
            place = ranks - 1 - world.rank if step % 2 else world.rank
            index = bins[step * ranks + place]
        micro_batches.append(MicroBatch(index, [1.0] * len(index)) if index else filler)
    return micro_batches


def _balanced(longest_first, lengths, count, budget):
    """Put each row into the bin of `count` that has the fewest tokens; the fullest bin first."""
    bins = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]  # (tokens, number of the bin)
    for row in longest_first:
        tokens, number = heapq.heappop(heap)
        bins[number].append(row)
        if len(bins[number]) < budget:
            heapq.heappush(heap, (tokens + lengths[row], number))
    return sorted(bins, key=lambda rows: -sum(lengths[row] for row in rows))


def check_enough_rows(path, count, world):
    """Raise UserError if there are fewer rows than processes."""
    if count < world.world_size:
        says = f"{count} usable rows for {world.world_size} processes; start at most {count}"
        raise UserError(f"{path}: {says}")


class Plan(NamedTuple):
    """The global batches of a run; an epoch's last one is what is left of the rows."""

    rows: int  # in the data set
    global_batch: int
    seed: int
    shuffle: bool = True
    num_epochs: float = 1
    max_steps: int = -1

    @classmethod
    def of(cls, config, rows, ranks=1):
        """What the usual settings ask for; ranks: of them, where batch_size counts per process."""
        global_batch = config.batch_size * ranks * config.gradient_accumulation_steps
        settings = config.seed, config.shuffle, config.num_epochs, config.max_steps
        return cls(rows, global_batch, *settings)

    @property
    def steps_per_epoch(self):
        return math.ceil(self.rows / self.global_batch)

    @property
    def steps(self):
        """Optimiser steps of the whole run."""
        if self.max_steps >= 0:
            return self.max_steps
        # rounded first: 100 steps x 1.1 epochs is 110.00000000000001
        return math.ceil(round(self.steps_per_epoch * self.num_epochs, 6))

    def epoch(self, step) -> float:
        """Passes over the data after `step` steps."""
        return step / self.steps_per_epoch

    def batch(self, step) -> list[int]:
        """The global batch of a step; the first step is 0."""
        epoch, number = divmod(step, self.steps_per_epoch)
        first = number * self.global_batch
        visit = order(self.rows, self.seed, epoch, self.shuffle)
        return visit[first : first + self.global_batch].tolist()

    def due(self, every, step) -> bool:
        """Whether something is due after `step` steps: each `every`, or epoch if 0, and at last."""
        return step % (every or self.steps_per_epoch) == 0 or step == self.steps
