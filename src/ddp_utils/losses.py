"""The DPO family as pure functions of summed log-probs. Tensors are [B], one value per pair.

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
orpo        -beta * log sigma(log-odds of chosen - log-odds of rejected), log-odds =
            log(p / (1 - p)), log p per token, no reference     Hong et al. 2024, eq. 7
            with the SFT term of weight 1 by default            eq. 6

The names and options of the methods are in cli.py, so that reading settings does not import torch.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ddp_utils import UserError, cli
from ddp_utils.metrics import interval
from ddp_utils.policy import Policy, ScorerModule

# metrics that checks and results read, besides the loss itself
NEEDED = ["logps/chosen", "logps/rejected", "rewards/chosen", "rewards/margins"]
NEEDED += ["rewards/accuracies"]
LEAST_NOISE = 0.0125  # in nats: that of rounding a logit of about 10 to bf16


class LogPs(NamedTuple):
    """The inputs of a loss, each [B]: summed log-probs and the numbers of summed tokens."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


class LossSpec(NamedTuple):
    """The method and its options. The default of an option that no method uses has no effect."""

    method: str = "dpo"
    beta: float = 0.1
    length_average: bool = False  # divide each log-ratio by the tokens of its response
    sft_weight: float = 0.0  # of the SFT term, see `pair_losses`
    label_smoothing: float = 0.0
    lambda_dpop: float = 0.0
    lambda_shift: float = 1.0
    simpo_gamma: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "LossSpec":
        """Return the loss of a script's settings."""
        options: dict[str, Any] = {**cli.loss_options(config)}
        weight = config.sft_weight
        if weight is None:
            weight = 1.0 if config.method == "orpo" else 0.0
        return cls(config.method, config.beta, config.length_average, weight, **options)


def preference(
    logps: LogPs, spec: LossSpec, noise: float | Tensor = 1e-3
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, without the SFT term, and its metrics, each [B].

    noise: difference, in nats, that two computations of the same log-prob may have. The penalty of
    dpop starts there; otherwise its factor of 50 would turn rounding errors into a loss.
    """
    if spec.method in cli.REFERENCE_FREE:
        chosen_ratio = logps.chosen / logps.chosen_tokens
        rejected_ratio = logps.rejected / logps.rejected_tokens
    else:
        chosen_ratio = logps.chosen - logps.ref_chosen
        rejected_ratio = logps.rejected - logps.ref_rejected
    rewards = spec.beta * chosen_ratio, spec.beta * rejected_ratio
    if spec.method == "ipo" or spec.length_average:
        chosen_ratio = chosen_ratio / logps.chosen_tokens
        rejected_ratio = rejected_ratio / logps.rejected_tokens

    z = spec.beta * (chosen_ratio - spec.lambda_shift * rejected_ratio)
    if spec.lambda_dpop:
        has_fallen = logps.ref_chosen - logps.chosen > noise
        z = z - spec.beta * spec.lambda_dpop * torch.where(has_fallen, -chosen_ratio, 0.0)

    e = spec.label_smoothing
    if spec.method == "cdpo":
        losses = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
    elif spec.method == "robust":
        losses = (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)
    elif spec.method in ("ipo", "ipo_sum"):
        losses = (chosen_ratio - rejected_ratio - 1 / (2 * spec.beta)) ** 2
    elif spec.method == "orpo":
        losses = -spec.beta * logsigmoid(log_odds(chosen_ratio) - log_odds(rejected_ratio))
    elif spec.method == "hinge":
        losses = torch.relu(1 - z)
    else:
        losses = -logsigmoid(z - spec.simpo_gamma)
    chosen_rewards, rejected_rewards = rewards
    margins = chosen_rewards - rejected_rewards
    return losses, {  # under the names that the DPO paper's code and TRL use
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margins": margins,
        "rewards/accuracies": (margins > 0).float(),
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
    }


def log_odds(logps: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p, which rounding may bring to 0 or above it."""
    logps = logps.clamp(max=-1e-6)
    return logps - torch.log(-torch.expm1(logps))


class Known(NamedTuple):
    """Stands for a scorer before the first step, if its log-probs are those of the reference."""

    logps: Tensor  # [B, 2] of the only batch that it is called with
    precision: torch.dtype = torch.float32
    token_noise: float = 0.0  # both log-probs are the same numbers

    def __call__(self, batch: Any) -> tuple[Tensor, ...]:
        return self.logps.unbind(-1)


class PairBatch(Protocol):
    """A batch of B pairs: of texts (logps.Batch), or of proteins (dpo_inv.batches.Batch)."""

    @property
    def tokens(self) -> Tensor | Sequence[Tensor]:
        """Return the number of summed tokens of chosen and rejected responses, [B] each."""


def pair_losses(
    scorer: ScorerModule | Policy | Known, batch: PairBatch, ref_logps: Tensor, spec: LossSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score B pairs; return their losses [B] and metrics, name -> [B].

    The loss includes the SFT term: sft_weight times the negative log-likelihood per token of the
    chosen response (as rpo_alpha of TRL, which averages over all tokens of a batch).

    ref_logps: log-probs of the reference, [B, 2].
    """
    chosen, rejected = scorer(batch)  # [B], [B]
    logps = LogPs(chosen, rejected, *ref_logps.unbind(-1), *batch.tokens)
    # beyond 4 deviations one fall in 30,000 is rounding, which costs little; an error must be rarer
    limit = noise(scorer, logps.chosen_tokens, deviations=4.0)
    losses, metrics = preference(logps, spec, limit)
    if spec.sft_weight:
        metrics |= {"loss/preference": losses, "loss/sft": -chosen / logps.chosen_tokens}
        losses = losses + spec.sft_weight * metrics["loss/sft"]
    return losses, {"loss": losses, **metrics}


def checked_metrics(per_pair: Tensor, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics of a script's loss_of() with the loss itself, which is what is trained.

    Raises UserError if one is missing that checks and results need.
    """
    missing = ", ".join(name for name in NEEDED if name not in metrics)
    if missing:
        fix = "return those of losses.pair_losses() as well"
        raise UserError(f"loss_of: missing metrics: {missing}; {fix}")
    return metrics | {"loss": per_pair}


def no_reference(data: Mapping[str, Sequence[Any]], device: torch.device) -> dict[str, Tensor]:
    """Return zeros in place of the log-probs of a reference: split -> [pairs, 2]."""
    return {split: torch.zeros(len(pairs), 2, device=device) for split, pairs in data.items()}


def noise(scorer: ScorerModule | Policy | Known, tokens: Tensor, deviations: float = 8.0) -> Tensor:
    """Return the difference, in nats, that rounding may cause between two scorings, [B].

    tokens: [B] of each response. fp32: 1e-3 per response. In bf16 and fp16 the errors of tokens add
    up like the square root of their number; the self-test measures their standard deviation. With
    another order of summation in each product, 96 responses of SmolLM2-135M in bf16 had at most
    3.4 deviations, 1.2 in the root mean square.
    """
    if scorer.precision == torch.float32:
        return torch.full_like(tokens, 1e-3, dtype=torch.float32)
    return deviations * max(scorer.token_noise, LEAST_NOISE) * tokens.float().sqrt()


class Displacement:
    """Detect, once per run, that the chosen responses become less likely than at the start."""

    def __init__(self, method: str, sft_weight: float | None, chosen: str = "chosen responses"):
        self.method = method
        self.remedy = "a larger --sft_weight" if sft_weight else "--sft_weight 1"
        if method in cli.METHODS and not method.startswith("dpop"):
            self.remedy += " or --method dpop"
        self.chosen = chosen  # their name in the warning
        self.is_watching = method not in cli.REFERENCE_FREE
        self.recent: deque[float] = deque(maxlen=10)

    def seen(self, reward: float) -> str | None:
        """Return a warning if the last five to ten `rewards/chosen` are below -0.01.

        They are if the 95 % interval of their mean is.
        """
        self.recent.append(reward)
        count, squares = len(self.recent), [reward**2 for reward in self.recent]
        highest = interval(sum(self.recent) / count, sum(squares) / count, count)[1]
        if not self.is_watching or count < 5 or highest > -0.01:
            return None
        self.is_watching = False
        return (
            f"warning: the {self.chosen} have become less likely than under the reference "
            f"(likelihood displacement: {self.method} may lower both log-probabilities); "
            f"{self.remedy} prevents this"
        )
