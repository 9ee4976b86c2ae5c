"""The DPO family as pure functions of summed log-probs. B pairs; every argument and result is [B].

log-ratio of a response   log pi(y|x) - log pi_ref(y|x)         `chosen - ref_chosen`
z                         beta * (chosen log-ratio - rejected log-ratio)

dpo         -log sigma(z)                                       Rafailov et al. 2023, eq. 7
cdpo        -(1-e) log sigma(z) - e log sigma(-z)               Mitchell 2023, eq. 3
robust      (-(1-e) log sigma(z) + e log sigma(-z)) / (1-2e)    Chowdhury et al. 2024, eq. 9
ipo         (z/beta - 1/(2 beta))^2, log-probs per token        Azar et al. 2023, eq. 17
ipo_sum     the same with summed log-probs
hinge       max(0, 1 - z)                                       Zhao et al. 2023 (SLiC)
dpop        -log sigma(z - beta * lambda_dpop * max(0, -chosen log-ratio))
                                                                Pal et al. 2024 (Smaug), eq. 3
dposhift    dpo with the rejected log-ratio times lambda_shift  Yang et al. 2025, eq. 5
dpopshift   both of these
simpo       -log sigma(beta * (chosen - rejected) - simpo_gamma), log-probs per token, no
            reference                                           Meng et al. 2024, eq. 6

Their names and options are in cli.py, which no settings have to import torch for.
"""

import collections
import math
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from ddp_utils import cli


class LogPs(NamedTuple):
    """What a loss is made of, each [B]: summed log-probs and how many tokens were summed."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor


def preference(logps: LogPs, config, noise=1e-3):
    """Losses [B] of one method, without the SFT term, and metrics, each [B].

    `noise` is how far, in nats, two scorings of the same response may differ: dpop's penalty
    starts there, or its factor of 50 would turn rounding into a loss.
    """
    used = cli.loss_options(config)
    chosen_ratio = logps.chosen - logps.ref_chosen
    rejected_ratio = logps.rejected - logps.ref_rejected
    rewards = config.beta * chosen_ratio, config.beta * rejected_ratio
    if config.method == "simpo":
        chosen_ratio = logps.chosen / logps.chosen_tokens
        rejected_ratio = logps.rejected / logps.rejected_tokens
        rewards = config.beta * chosen_ratio, config.beta * rejected_ratio
    elif config.method == "ipo" or config.length_average:
        chosen_ratio = chosen_ratio / logps.chosen_tokens
        rejected_ratio = rejected_ratio / logps.rejected_tokens

    z = config.beta * (chosen_ratio - used.get("lambda_shift", 1.0) * rejected_ratio)
    if "lambda_dpop" in used:
        fell = logps.ref_chosen - logps.chosen > noise
        z = z - config.beta * used["lambda_dpop"] * torch.where(fell, -chosen_ratio, 0.0)

    if config.method == "cdpo":
        e = used["label_smoothing"]
        losses = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
    elif config.method == "robust":
        e = used["label_smoothing"]
        losses = (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)
    elif config.method in ("ipo", "ipo_sum"):
        losses = (chosen_ratio - rejected_ratio - 1 / (2 * config.beta)) ** 2
    elif config.method == "hinge":
        losses = torch.relu(1 - z)
    else:
        losses = -logsigmoid(z - used.get("simpo_gamma", 0.0))
    return losses, _metrics(logps, *rewards)


def _metrics(logps, chosen_rewards, rejected_rewards):
    """The names that the DPO paper's code and TRL print."""
    margins = chosen_rewards - rejected_rewards
    return {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }


def sft(logps: LogPs):
    """Negative log-likelihood per token of the chosen response, [B] (TRL's rpo_alpha term)."""
    return -logps.chosen / logps.chosen_tokens


def pair_losses(policy, batch, ref_logps, config):
    """Score B pairs with the policy; return losses [B] and metrics, name -> [B].

    ref_logps: the reference's log-probs, [B, 2]. config.sft_weight adds the SFT term.
    """
    chosen, rejected = policy(batch)  # [B], [B]: summed over the response
    logps = LogPs(chosen, rejected, *ref_logps.unbind(-1), *batch.tokens)
    losses, metrics = preference(logps, config, noise(policy.precision, logps.chosen_tokens))
    if config.sft_weight:
        metrics |= {"loss/preference": losses, "loss/sft": sft(logps)}
        losses = losses + config.sft_weight * metrics["loss/sft"]
    return losses, {"loss": losses, **metrics}


def noise(dtype, tokens):
    """How far, in nats, two exact scorings of `tokens` tokens [B] may differ by rounding alone.

    fp32: 1e-3 a response. bf16 and fp16 round logits of about 10 to 2^-6; errors of many tokens
    add up like their square root. Measured in bf16 on 20 real and 100 demo pairs on a CPU, alone
    against in a batch: at most 0.2 of this.
    """
    if dtype == torch.float32:
        return torch.full_like(tokens, 1e-3, dtype=torch.float32)
    return 0.05 * tokens.float().sqrt()


def at_reference(config):
    """The preference loss where policy = reference, or None where there is no closed form."""
    if config.method == "simpo" or config.method not in cli.METHODS:
        return None
    if config.method in ("ipo", "ipo_sum"):
        return 1 / (4 * config.beta**2)
    return 1.0 if config.method == "hinge" else math.log(2)


class Displacement:
    """Notices, once, that the chosen responses have become less likely than at the start."""

    def __init__(self, config, rows="responses", mend="--sft_weight 1 or --method dpop"):
        self.rows = rows
        self.mend = mend
        self.watch = config.method != "simpo"
        self.recent = collections.deque(maxlen=10)

    def seen(self, reward):
        """A warning once `rewards/chosen`, mean of five to ten steps, is below -0.01, else None."""
        self.recent.append(reward)
        if not self.watch or len(self.recent) < 5 or sum(self.recent) > -0.01 * len(self.recent):
            return None
        self.watch = False
        return (
            f"warning: the chosen {self.rows} have become less likely than under the reference "
            f"(likelihood displacement: DPO may push both sides down); {self.mend} holds them up"
        )
