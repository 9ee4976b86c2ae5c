"""Losses of protein pairs on the size of a measured ddG.

The margin of a pair is |ddG| in kcal/mol: by how much the preferred sequence is more stable. B
pairs of one backbone.
"""

import torch
from torch import Tensor

KT = 0.593  # kcal/mol at 298 K


def ddg(gaps: Tensor, margins: Tensor, signs: Tensor) -> Tensor:
    """Return (kT (log p(preferred) - log p(unpreferred)) - margin)^2 in (kcal/mol)^2, [B].

    By Boltzmann's law the log-odds of a mutation are the stability that it adds, in units of kT.
    There is no reference.

    gaps: log p(preferred) - log p(unpreferred), [B]; margins: [B].
    """
    return (KT * gaps - margins) ** 2


def listwise(gaps: Tensor, margins: Tensor, signs: Tensor) -> Tensor:
    """Return the negative log-likelihood of the measured order of stability, divided by B, [B].

    It is the probability of drawing the wild type and its mutants without replacement in this order
    (Plackett 1975, Luce 1959). There is no reference.

    gaps, margins: as in `ddg`; signs: [B], 1 if the mutant is preferred, -1 if the wild type is.
    """
    scores = torch.cat([gaps * signs, gaps.new_zeros(1)])  # [B + 1], the last is the wild type
    stabilities = torch.cat([margins * signs, margins.new_zeros(1)])
    scores = scores[stabilities.argsort(descending=True)]
    remaining = scores.flip(0).logcumsumexp(0).flip(0)  # [B + 1], over those not yet drawn
    return (remaining - scores).sum().expand(len(gaps)) / len(gaps)
