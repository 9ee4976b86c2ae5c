"""Which pairs a step trains on, and in which order their residues are decoded.

Pairs of one backbone stay together, since it is encoded once for all of them.
"""

import collections
from typing import NamedTuple

import numpy as np
import torch

from ddp_utils import distributed, sampler
from ddp_utils.distributed import to_device
from ddp_utils.policy import ScorerModule
from ddp_utils.sampler import MicroBatch, seed_of
from dpo_inv.pairs import Pair

# pairs of a backbone that follow each other, and that are scored at once; a number of its own:
# neither the order nor the list of a listwise loss may hang on batch_size or world_size
TOGETHER = 8


def orders(pair, kind, count, seed) -> np.ndarray:
    """Return decoding orders [count, T, C], the same in all epochs; order[t] comes at time t.

    Context first, designed positions last; `mutated_last` ends with the positions that differ.
    They depend on backbone and seed alone, so that pairs of one backbone share them.
    """
    last = pair.designed.astype(int)
    if kind == "mutated_last":
        last = last + pair.mutated
    tied = pair.backbone.tied
    last = last[tied].max(-1)  # [T]
    if kind == "sequential":
        return tied[None, np.argsort(last, kind="stable")]
    seeds = [seed_of(seed, pair.name, number) for number in range(count)]
    ties = np.stack([np.random.default_rng(drawn).random(len(last)) for drawn in seeds])  # [M, T]
    return tied[np.lexsort((ties, np.broadcast_to(last, ties.shape)))]


def split(pairs, seed) -> tuple[list[Pair], list[Pair]]:
    """Return (training, validation): whole backbones, drawn by the seed, up to a tenth of pairs.

    At least one, the smallest, if there are two.
    """
    sizes = collections.Counter(pair.number for pair in pairs)
    generator = torch.Generator().manual_seed(seed_of(seed, "split"))
    backbones = sorted(sizes)
    held = set()
    for index in torch.randperm(len(backbones), generator=generator).tolist():
        more = held | {backbones[index]}
        if sum(sizes[number] for number in more) <= 0.1 * len(pairs):
            held = more
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


def share(pairs, size, world) -> list[MicroBatch]:
    """Return this rank's micro-batches of some pairs, each of at most `size` of one backbone."""
    rows = groups(range(len(pairs)), pairs, size)
    costs = [len(pairs[group[0]].preferred) * (1 + len(group)) for group in rows]
    shared = sampler.assign_micro_batches(range(len(rows)), costs, world, 1)
    return [MicroBatch(rows[index], weight * len(rows[index])) for [index], weight in shared]


class Batch(NamedTuple):
    """B pairs of one backbone of L residues, M decoding orders each: S = 2 B M sequences."""

    structure: list  # coords [L, 4, 3], mask, residue_idx, chain_encoding [L]
    letters: torch.Tensor  # [S, L]: all preferred ones, then all unpreferred
    sequences: torch.Tensor  # [S, L] what is decoded, or [S / 2, L]: that of both halves
    orders: torch.Tensor  # [S or S / 2, T, C]
    tied: torch.Tensor  # [T, C] rows that share a letter
    shares: torch.Tensor  # [L] of Structure.shares
    targets: torch.Tensor  # [B, T] the letters whose log-probs are summed
    margins: torch.Tensor  # [B] kcal/mol
    signs: torch.Tensor  # [B] of Pair.sign


def tensors(backbone, device):
    """Return coords, mask, residue_idx and chain_encoding of a Structure."""
    return [to_device(array, device) for array in backbone[:4]]


def collate(pairs, config, device) -> Batch:
    """Return pairs of one backbone as one batch."""
    backbone = pairs[0].backbone
    options = (config.decoding_order, config.num_orders, config.seed)
    drawn = np.concatenate([orders(pair, *options) for pair in pairs])  # [S / 2, T, C]
    letters = np.stack([p.preferred for p in pairs] + [p.unpreferred for p in pairs])  # [2 * B, L]
    letters = letters.repeat(len(drawn) // len(pairs), axis=0)  # [S, L]
    # nobody sees the last letter: where only that one differs, one decoding is that of both
    is_one = all(pair.mutated[backbone.tied].any(-1).sum() == 1 for pair in pairs)
    halves = 1 if is_one and config.decoding_order == "mutated_last" else 2
    arrays = [letters, letters[: halves * len(drawn)], np.concatenate([drawn] * halves)]
    arrays += [backbone.tied, backbone.shares, np.stack([pair.targets for pair in pairs])]
    arrays += [[pair.margin for pair in pairs], [pair.sign for pair in pairs]]
    return Batch(tensors(backbone, device), *(to_device(array, device) for array in arrays))


class Scorer(ScorerModule):
    """Pairs -> summed log-probs of both sequences; what DDP wraps."""

    autocast = None

    def __init__(self, model, temperature=1.0):
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch):
        """(preferred [B], unpreferred [B]), in nats, averaged over the decoding orders."""
        encoded = self.model.encode(*batch.structure)  # once for all sequences
        scores = self.model.decode(encoded, batch.sequences, batch.orders)
        scores = scores.repeat(len(batch.letters) // len(scores), 1, 1)  # [S, L, 21]
        if batch.tied.shape[1] > 1:  # a letter of copies: the softmax of the mean of log-probs
            scores = (scores * batch.shares[:, None])[:, batch.tied].sum(2)  # [S, T, 21]
        if self.temperature != 1 or batch.tied.shape[1] > 1:
            scores = (scores / self.temperature).log_softmax(-1)
        letters = batch.letters[:, batch.tied[:, 0], None]  # [S, T, 1]
        picked = scores.gather(-1, letters).squeeze(-1)  # [S, T]
        picked = picked.view(2, len(batch.targets), -1, picked.shape[-1])  # [2, B, M, T]
        sums = (picked * batch.targets[:, None]).sum(-1).mean(-1)  # [2, B]
        return sums[0], sums[1]

    def example(self, device):
        """Return a backbone of four residues: for the throwaway pass of policy.Policy."""
        coords = torch.arange(48.0, device=device).view(4, 4, 3)
        ones = torch.ones(4, device=device)
        letters = torch.arange(4, device=device).expand(2, 4)
        structure = [coords, ones, letters[0], ones.long()]
        tied = letters[0, :, None], ones, ones.bool()[None]
        return Batch(structure, letters, letters, letters, *tied, ones[:1], ones[:1])


@torch.no_grad()
def score(scorer, pairs, config, world, poll=lambda: None):
    """Return the log-probs of all pairs, [N, 2]; each rank scores its share.

    poll: called before each forward.
    """
    micro_batches = share(pairs, TOGETHER, world)
    scores = []
    for micro_batch in micro_batches:
        poll()
        batch = collate([pairs[row] for row in micro_batch.index], config, world.device)
        scores.append(torch.stack(scorer(batch), -1))  # [B, 2]
    return distributed.gather_by_index(len(pairs), micro_batches, scores, world)
