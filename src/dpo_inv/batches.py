"""Choose the pairs of each step and the decoding orders of their residues, and score pairs.

Pairs of one backbone stay together, so that the backbone is encoded once for all of them.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import gemmi
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ddp_utils import distributed, sampler
from ddp_utils.distributed import World, to_device
from ddp_utils.policy import ScorerModule
from ddp_utils.sampler import MicroBatch, seed_of
from ddp_utils.terminal import Phase
from dpo_inv.config import PairSettings
from dpo_inv.mpnn import ProteinMPNN, encode
from dpo_inv.pairs import Pair, text_of
from dpo_inv.structure import Structure

# Most pairs of a backbone that follow each other in an epoch, and that are scored together. It is a
# constant, because neither the order of the data nor the list of a listwise loss may depend on
# batch_size or on the number of processes.
GROUP_SIZE = 8


def decoding_orders(pair: Pair, settings: PairSettings) -> np.ndarray:
    """Return the decoding orders [M, T, C] of a pair, the same in all epochs.

    order[t] are the tied positions that are decoded at time t. The context comes first, then the
    designed positions; `mutated_last` ends with the positions that differ. Orders depend on the
    backbone and the seed only, so pairs of one backbone have the same ones.
    """
    tied = pair.backbone.tied
    stage = pair.designed.astype(int)  # [L] positions of a later stage are decoded later
    if settings.decoding_order == "mutated_last":
        stage = stage + pair.mutated
    stage = stage[tied].max(-1)  # [T]
    orders = []
    for number in range(settings.num_orders):
        generator = np.random.default_rng(seed_of(settings.seed, pair.name, number))
        orders.append(tied[np.lexsort((generator.random(len(stage)), stage))])
    return np.stack(orders)


def chains_of(pairs: Iterable[Pair]) -> dict[int, list[str]]:
    """Return the known letters of the designed chains of each backbone, by its number."""
    chains = {}
    for number, backbone in {pair.number: pair.backbone for pair in pairs}.items():
        text = text_of(encode(backbone.sequence), backbone).replace("X", "")
        chains[number] = [chain for chain in text.split("/") if chain]
    return chains


def is_similar(first: str, second: str) -> bool:
    """Return whether two sequences may be homologous: 30 % of the shorter one are identical.

    The alignment is global (Needleman-Wunsch) with BLOSUM62, and a gap costs 15. A short sequence
    finds many equal letters in a long one by chance, so the score must also be 0.5 per letter.
    """
    scoring = gemmi.AlignmentScoring("b")
    scoring.gapo = scoring.bad_gapo = -15
    scoring.gape = 0
    query = gemmi.expand_one_letter_sequence(first, gemmi.ResidueKind.AA)
    target = gemmi.expand_one_letter_sequence(second, gemmi.ResidueKind.AA)
    aligned = gemmi.align_string_sequences(query, target, [], scoring)
    length = min(len(first), len(second))
    return aligned.match_count >= 0.3 * length and aligned.score >= 0.5 * length


def family(number: int, chains: Mapping[int, list[str]]) -> list[int]:
    """Return a backbone and those with a similar chain, those similar to these, and so on.

    chains: see `chains_of`.
    """
    members = [number]
    for member in members:  # the list grows
        for other in sorted(chains.keys() - {*members}):
            if any(itertools.starmap(is_similar, itertools.product(chains[member], chains[other]))):
                members.append(other)
    return members


def split(pairs: Sequence[Pair], seed: int, is_main: bool = False) -> tuple[list[Pair], list[Pair]]:
    """Return training and validation pairs: up to a tenth of the pairs, whole families at random.

    If there are two or more families of similar proteins, at least one, the smallest, is for
    validation; of a single family, the smallest backbone. The time grows with the square of the
    number of backbones. is_main: show a progress bar.
    """
    sizes = Counter(pair.number for pair in pairs)
    chains = chains_of(pairs)
    generator = torch.Generator().manual_seed(seed_of(seed, "split"))
    backbones = sorted(sizes)
    held_out: list[int] = []
    families: list[list[int]] = []

    def size(members: list[int]) -> int:
        return sum(sizes[number] for number in members)

    shuffled = torch.randperm(len(backbones), generator=generator).tolist()
    bar = {"disable": None if is_main else True, "leave": False}  # None: only on a terminal
    for index in tqdm(shuffled, "Holding out similar proteins", **bar):
        number = backbones[index]
        is_full = held_out and size([number, *held_out]) > 0.1 * len(pairs)
        if is_full or any(number in members for members in families):
            continue
        families.append(family(number, chains))
        if size(held_out + families[-1]) <= 0.1 * len(pairs):
            held_out += families[-1]
    if not held_out and len(backbones) > 1:
        groups = families if len(families) > 1 else [[number] for number in backbones]
        held_out = min(groups, key=size)
    numbers = {*held_out}
    train = [pair for pair in pairs if pair.number not in numbers]
    return train, [pair for pair in pairs if pair.number in numbers]


def group_by_backbone(rows: Iterable[int], pairs: Sequence[Pair], size: int) -> list[list[int]]:
    """Return rows of `pairs` in groups of at most `size` with the same backbone, in their order."""
    by_backbone = defaultdict(list)
    for row in rows:
        by_backbone[pairs[row].number].append(row)
    groups = []
    for same in by_backbone.values():
        groups += [same[start : start + size] for start in range(0, len(same), size)]
    return groups


def epoch_order(
    pairs: Sequence[Pair], count: int, seed: int, epoch: int, shuffle: bool
) -> np.ndarray:
    """Return the order of an epoch, as sampler.order, which shuffles groups of GROUP_SIZE pairs."""
    if not shuffle:
        return np.arange(count)
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    shuffled = torch.randperm(count, generator=generator).tolist()
    groups = group_by_backbone(shuffled, pairs, GROUP_SIZE)
    visit = torch.randperm(len(groups), generator=generator).tolist()
    return np.concatenate([groups[index] for index in visit])


def micro_batches(
    rows: Iterable[int], pairs: Sequence[Pair], size: int, world: World
) -> list[MicroBatch]:
    """Return this rank's micro-batches of the rows: at most `size` pairs of one backbone each."""
    groups = group_by_backbone(rows, pairs, size)
    costs = [len(pairs[group[0]].preferred) * (1 + len(group)) for group in groups]
    assigned = sampler.assign_micro_batches(range(len(groups)), costs, world, 1)
    return [MicroBatch(groups[index], weight * len(groups[index])) for [index], weight in assigned]


class Batch(NamedTuple):
    """B pairs of one backbone of L positions with M decoding orders each: S = 2 B M sequences."""

    structure: list[Tensor]  # coords [L, 4, 3], mask, residue_idx, chain_encoding [L]
    sequences: Tensor  # [S, L]: all preferred ones, then all unpreferred ones
    orders: Tensor  # [S, T, C], or [S / 2, T, C] if both halves have the same log-probs
    tied: Tensor  # [T, C] positions that share a letter
    tied_weights: Tensor  # [L] see Structure.tied_weights
    targets: Tensor  # [B, T] the letters whose log-probs are summed
    margins: Tensor  # [B] kcal/mol
    signs: Tensor  # [B] see Pair.sign

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return the number of summed log-probs of each preferred, unpreferred sequence, [B]."""
        residues = self.targets.sum(-1)
        return residues, residues


def structure_tensors(backbone: Structure, device: torch.device | str) -> list[Tensor]:
    """Return coords, mask, residue_idx and chain_encoding, the arguments of ProteinMPNN.encode."""
    return [to_device(array, device) for array in backbone[:4]]


def collate(pairs: Sequence[Pair], settings: PairSettings, device: torch.device | str) -> Batch:
    """Return pairs of one backbone as one batch."""
    backbone = pairs[0].backbone
    orders = np.concatenate([decoding_orders(pair, settings) for pair in pairs])  # [S / 2, T, C]
    sequences = np.stack([p.preferred for p in pairs] + [p.unpreferred for p in pairs])  # [2 B, L]
    sequences = sequences.repeat(len(orders) // len(pairs), axis=0)  # [S, L]
    # No residue sees the letter that is decoded last: where only that one differs, both sequences
    # have the same log-probs.
    differ_once = all(pair.mutated[backbone.tied].any(-1).sum() == 1 for pair in pairs)
    halves = 1 if differ_once and settings.decoding_order == "mutated_last" else 2
    orders = np.concatenate([orders] * halves)
    targets = np.stack([pair.targets for pair in pairs])
    margins = np.array([pair.margin for pair in pairs])
    signs = np.array([pair.sign for pair in pairs])
    arrays = sequences, orders, backbone.tied, backbone.tied_weights, targets
    tensors = [to_device(array, device) for array in (*arrays, margins, signs)]
    return Batch(structure_tensors(backbone, device), *tensors)


class Scorer(ScorerModule):
    """A ProteinMPNN that returns summed log-probs of pairs; the module that DDP wraps.

    temperature: divides the log-probs before they are normalized again.
    """

    autocast = None

    def __init__(self, model: ProteinMPNN, temperature: float = 1.0):
        super().__init__()
        self.model: ProteinMPNN = model
        self.temperature = temperature

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log p of the preferred and of the unpreferred sequences, [B] each, in nats.

        They are summed over the targets and averaged over the decoding orders.
        """
        encoded = self.model.encode(*batch.structure)  # once for all sequences
        decoded = batch.sequences[: len(batch.orders)]
        log_probs = self.model.decode(encoded, decoded, batch.orders)
        log_probs = log_probs.repeat(len(batch.sequences) // len(log_probs), 1, 1)  # [S, L, 21]
        has_copies = batch.tied.shape[1] > 1
        if has_copies:  # the letter of tied positions: the softmax of the mean of their log-probs
            log_probs = (log_probs * batch.tied_weights[:, None])[:, batch.tied].sum(2)  # [S, T,21]
        if self.temperature != 1 or has_copies:
            log_probs = (log_probs / self.temperature).log_softmax(-1)
        letters = batch.sequences[:, batch.tied[:, 0], None]  # [S, T, 1]
        picked = log_probs.gather(-1, letters).squeeze(-1)  # [S, T]
        picked = picked.view(2, len(batch.targets), -1, picked.shape[-1])  # [2, B, M, T]
        sums = (picked * batch.targets[:, None]).sum(-1).mean(-1)  # [2, B]
        return sums[0], sums[1]

    def example(self, device: torch.device) -> Batch:
        """Return a made-up backbone of four residues, for the unused first pass of Policy."""
        coords = torch.arange(48.0, device=device).view(4, 4, 3)
        ones = torch.ones(4, device=device)
        letters = torch.arange(4, device=device).expand(2, 4)
        structure = [coords, ones, letters[0], ones.long()]
        tied = letters[0, :, None], ones, ones.bool()[None]
        return Batch(structure, letters, letters, *tied, ones[:1], ones[:1])


@torch.no_grad()
def score(
    scorer: Scorer,
    pairs: Sequence[Pair],
    settings: PairSettings,
    world: World,
    rows: Sequence[int] | None = None,
    phase: Phase | None = None,
) -> Tensor:
    """Return the log-probs of all pairs, [N, 2]; the ranks split the work.

    rows: score only these rows; others are NaN.
    """
    rows = list(range(len(pairs)) if rows is None else rows)
    table = torch.full((len(pairs), 2), torch.nan, device=world.device)
    if not rows:
        return table
    assigned = micro_batches(rows, pairs, GROUP_SIZE, world)
    log_probs = distributed.Table(len(pairs), 2, world)
    for micro_batch in (phase or Phase()).each(assigned):
        batch = collate([pairs[row] for row in micro_batch.index], settings, world.device)
        log_probs.add(micro_batch, torch.stack(scorer(batch), -1))  # [B, 2]
    table[rows] = log_probs.reduce()[rows]
    return table
