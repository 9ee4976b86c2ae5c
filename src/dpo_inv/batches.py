"""Which pairs a step trains on, and in which order their residues are decoded.

Pairs of one backbone stay together, since it is encoded once for all of them.
"""

import collections
from typing import NamedTuple

import numpy as np
import torch

from ddp_utils.distributed import to_device
from ddp_utils.sampler import seed_of
from dpo_inv.pairs import Pair

TOGETHER = 8  # a number of its own: the order must not hang on batch_size or world_size


def orders(pair, kind, count, seed) -> np.ndarray:
    """Return decoding orders [count, L], the same in all epochs; order[t] is decoded at time t.

    Context first, designed positions last; `mutated_last` ends with the positions that differ.
    They depend on backbone and seed alone, so that pairs of one backbone share them.
    """
    last = pair.designed.astype(int)
    if kind == "mutated_last":
        last = last + pair.mutated
    if kind == "sequential":
        return np.argsort(last, kind="stable")[None]
    drawn = []
    for number in range(count):
        ties = np.random.default_rng(seed_of(seed, pair.name, number)).random(len(last))
        drawn.append(np.lexsort((ties, last)))
    return np.stack(drawn)


def split(pairs, seed) -> tuple[list[Pair], list[Pair]]:
    """Return (training, validation): whole backbones, drawn by the seed, up to a tenth of pairs.

    At least one, the smallest, if there are two.
    """
    sizes = collections.Counter(pair.number for pair in pairs)
    generator = torch.Generator().manual_seed(seed_of(seed, "split"))
    backbones = sorted(sizes)
    held = set()
    count = 0
    for index in torch.randperm(len(backbones), generator=generator).tolist():
        size = sizes[backbones[index]]
        if count + size <= 0.1 * len(pairs):
            held.add(backbones[index])
            count += size
    if not held and len(backbones) > 1:
        held.add(min(backbones, key=sizes.get))
    train = [pair for pair in pairs if pair.number not in held]
    return train, [pair for pair in pairs if pair.number in held]


def groups(rows, pairs, size) -> list[list[int]]:
    """Return the rows by backbone, in their order, at most `size` each."""
    by_backbone = collections.defaultdict(list)
    for row in rows:
        by_backbone[pairs[row].number].append(row)
    cut = []
    for same in by_backbone.values():
        cut += [same[start : start + size] for start in range(0, len(same), size)]
    return cut


def batch(plan, pairs, step) -> list[int]:
    """Return the rows of a step, as sampler.Plan.batch, but pairs of a backbone stay together.

    An epoch is shuffled in chunks of up to TOGETHER of them.
    """
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    rows = list(range(len(pairs)))
    if plan.shuffle:
        generator = torch.Generator().manual_seed(seed_of(plan.seed, epoch))
        rows = torch.randperm(len(pairs), generator=generator).tolist()
        chunks = groups(rows, pairs, TOGETHER)
        rows = []
        for index in torch.randperm(len(chunks), generator=generator).tolist():
            rows += chunks[index]
    return rows[step_of_epoch * plan.global_batch : (step_of_epoch + 1) * plan.global_batch]


class Batch(NamedTuple):
    """B pairs of one backbone of L residues, M decoding orders each: S = 2 B M sequences."""

    structure: list  # coords [L, 4, 3], mask, residue_idx, chain_encoding [L]
    sequences: torch.Tensor  # [S, L]: all preferred ones, then all unpreferred
    orders: torch.Tensor  # [S, L]
    targets: torch.Tensor  # [B, L] the positions that are summed


def tensors(backbone, device):
    """Return coords, mask, residue_idx and chain_encoding of a Structure."""
    return [to_device(array, device) for array in backbone[:4]]


def collate(pairs, config, device) -> Batch:
    """Return pairs of one backbone as one batch."""
    options = (config.decoding_order, config.num_orders, config.seed)
    drawn = np.concatenate([orders(pair, *options) for pair in pairs])  # [B * M, L]
    letters = np.stack([p.preferred for p in pairs] + [p.unpreferred for p in pairs])  # [2 * B, L]
    letters = letters.repeat(len(drawn) // len(pairs), axis=0)  # [S, L]
    return Batch(
        structure=tensors(pairs[0].backbone, device),
        sequences=to_device(letters, device),
        orders=to_device(np.concatenate([drawn, drawn]), device),
        targets=to_device(np.stack([pair.targets for pair in pairs]), device),
    )
