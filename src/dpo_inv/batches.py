"""Which pairs a step trains on, and in which order their residues are decoded.

Pairs of one backbone stay together, since it is encoded once for all of them.
"""

import collections
from typing import NamedTuple

import numpy as np
import torch

from ddp_utils.sampler import seed_of
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
    """(training, validation): whole backbones, drawn by the seed, up to a share of the pairs.

    At least one, the smallest, if there are two.
    """
    sizes = collections.Counter(pair.backbone for pair in pairs)
    generator = torch.Generator().manual_seed(seed_of(seed, "split"))
    files, held = sorted(sizes), set()
    for place in torch.randperm(len(files), generator=generator).tolist():
        if sum(sizes[file] for file in {*held, files[place]}) <= share * len(pairs):
            held.add(files[place])
    if not held and len(files) > 1:
        held.add(min(files, key=lambda file: (sizes[file], file)))
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


class Batch(NamedTuple):
    """B pairs of one backbone of L residues, M decoding orders each: S = 2 B M sequences."""

    structure: tuple  # coords [1, L, 4, 3], mask, residue_idx, chain_encoding [1, L]
    sequences: torch.Tensor  # [1, S, L]: all preferred ones, then all unpreferred
    orders: torch.Tensor  # [1, S, L]
    targets: torch.Tensor  # [B, L] the positions that are summed
    tokens: torch.Tensor  # [2, B] how many these are


def collate(pairs, structures, config, device) -> Batch:
    """Pairs of one backbone as one batch."""
    found = structures[pairs[0].backbone]
    arrays = found.coords, found.mask, found.residue_idx, found.chain_encoding
    drawn = np.stack(
        [orders(p, config.decoding_order, config.num_orders, config.seed) for p in pairs]
    )  # [B, M, L]
    sides = np.stack([[p.preferred for p in pairs], [p.unpreferred for p in pairs]])  # [2, B, L]
    sides = np.repeat(sides[:, :, None], drawn.shape[1], axis=2)  # [2, B, M, L]
    both = np.broadcast_to(drawn, sides.shape)
    targets = torch.from_numpy(np.stack([pair.targets for pair in pairs]))  # [B, L]
    length = sides.shape[-1]
    return Batch(
        tuple(torch.from_numpy(array)[None].to(device) for array in arrays),
        torch.from_numpy(sides.reshape(1, -1, length)).to(device),
        torch.from_numpy(both.reshape(1, -1, length).copy()).to(device),
        targets.to(device),
        targets.sum(-1).expand(2, -1).to(device),
    )
