"""Losses of protein pairs: the DPO family, and losses on the size of a measured ddG.

The margin of a pair is |ddG| in kcal/mol: by how much the preferred sequence is more stable. B
pairs of one backbone.
"""

import torch
from torch import Tensor

from ddp_utils.losses import Known, LossSpec
from ddp_utils.losses import pair_losses as preference_losses
from ddp_utils.policy import Policy
from dpo_inv.batches import Batch, Scorer
from dpo_inv.config import MEASURED_METHODS, Config

KT = 0.593  # kcal/mol at 298 K


def pair_losses(
    scorer: Policy | Scorer | Known, batch: Batch, ref_logps: Tensor, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score B pairs; return their losses [B] and metrics, name -> [B].

    ref_logps: log-probs of the reference, [B, 2].
    """
    spec = LossSpec.of(config)
    without_sft = spec._replace(sft_weight=0.0)  # its term is added below, to any loss
    losses, metrics = preference_losses(scorer, batch, ref_logps, without_sft)
    gaps = metrics["logps/chosen"] - metrics["logps/rejected"]  # [B]
    if config.method in MEASURED_METHODS:
        loss = {"ddg": ddg, "listwise": listwise}[config.method]
        losses = loss(gaps, batch.margins, batch.signs)
    # the preference of the policy itself, whatever that of the reference is
    metrics["logps/accuracies"] = (gaps > 0).float()
    metrics["nll"] = -metrics["logps/chosen"] / batch.tokens[0]
    if spec.sft_weight or config.weighting == "margin":
        metrics["loss/preference"] = losses
        if config.weighting == "margin":
            losses = losses * batch.margins
        losses = losses + spec.sft_weight * metrics["nll"]
    return losses, {**metrics, "loss": losses}


def ddg(gaps: Tensor, margins: Tensor, signs: Tensor) -> Tensor:
    """Return (kT (log p(preferred) - log p(unpreferred)) - margin)^2 in (kcal/mol)^2, [B].

    By Boltzmann's law the log-odds of a mutation are its ddG in units of kT. There is no reference.

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
