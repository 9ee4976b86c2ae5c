"""Which pairs a step trains on, and in which order their residues are decoded.

Pairs of one backbone stay together, since it is encoded once for all of them.
"""

import numpy as np
import torch

from ddp_utils.batching import seed_of
from dpo_inv.pairs import Pair

TOGETHER = 8  # a number of its own: the order must not hang on batch_size or world_size


def orders(pair, kind, count, seed) -> np.ndarray:
    """Decoding orders [count, L] of a pair, the same in all epochs; order[t] is decoded at time t.

    Context first, designed positions last. They hang on backbone and seed alone, so that pairs
    of one backbone share them; `mutated_last` ends with the positions that differ.
    """
    last = pair.designed.astype(int)
    if kind == "mutated_last":
        last = last + pair.mutated
    found = []
    for number in range(1 if kind == "sequential" else count):
        draw = np.random.default_rng(seed_of(seed, pair.name, number)).random(len(last))
        tie = np.arange(len(last)) if kind == "sequential" else draw
        found.append(np.lexsort((tie, last)))
    return np.stack(found)


def split(pairs, seed, share=0.1) -> tuple[list[Pair], list[Pair]]:
    """(training, validation): whole backbones, drawn by the seed, until a share of the pairs."""
    files = sorted({pair.backbone for pair in pairs})
    generator = torch.Generator().manual_seed(seed_of(seed, "split"))
    held, wanted = set(), share * len(pairs)
    for place in torch.randperm(len(files), generator=generator).tolist():
        size = sum(pair.backbone == files[place] for pair in pairs)
        taken = sum(pair.backbone in held for pair in pairs)
        if len(held) + 1 < len(files) and taken + size <= 1.5 * wanted:
            held.add(files[place])
    train = [pair for pair in pairs if pair.backbone not in held]
    return train, [pair for pair in pairs if pair.backbone in held]


def order_of_epoch(pairs, seed, epoch, shuffle=True) -> list[int]:
    """Rows of an epoch: shuffled, but up to TOGETHER pairs of one backbone stay together."""
    if not shuffle:
        return list(range(len(pairs)))
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    by_backbone = {}
    for row in torch.randperm(len(pairs), generator=generator).tolist():
        by_backbone.setdefault(pairs[row].backbone, []).append(row)
    chunks = [
        rows[start : start + TOGETHER]
        for rows in by_backbone.values()
        for start in range(0, len(rows), TOGETHER)
    ]
    mixed = torch.randperm(len(chunks), generator=generator).tolist()
    return [row for place in mixed for row in chunks[place]]


def batch(plan, pairs, step) -> list[int]:
    """The global batch of a step, as batching.Plan.batch, with an epoch's order of ours."""
    epoch, turn = divmod(step, plan.steps_per_epoch)
    visit = order_of_epoch(pairs, plan.seed, epoch, plan.shuffle)
    return visit[turn * plan.global_batch : (turn + 1) * plan.global_batch]


def groups(rows, pairs, size) -> list[list[int]]:
    """Rows of a global batch by backbone, at most `size` each: what one forward takes."""
    by_backbone = {}
    for row in sorted(rows):
        by_backbone.setdefault(pairs[row].backbone, []).append(row)
    return [
        found[start : start + size]
        for found in by_backbone.values()
        for start in range(0, len(found), size)
    ]
