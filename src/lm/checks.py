"""The check of a training step on preference pairs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_utils import checks, distributed
from ddp_utils.distributed import World
from ddp_utils.losses import Known
from ddp_utils.policy import Policy
from lm import logps
from lm.logps import Pair, Scorer

# (scorer, batch, log-probs of the reference [B, 2], pairs) -> losses [B], metrics
Loss = Callable[[Any, Any, Tensor, Sequence[Pair]], tuple[Tensor, dict[str, Tensor]]]


def check_pairs(
    policy: Policy,
    step: int,
    means: dict[str, float],
    pairs: Sequence[Pair],
    ref_logps: Tensor | None,
    loss_of: Loss,
    fine_tuning: str,
    world: World,
    micro_batch_size: int,
) -> None:
    """Check a step on preference pairs: check_step() and, with ref_logps, check_first_step().

    ref_logps: [B, 2] of the global batch at step 0, if policy and reference are equal; loss_of:
    the loss of the script.
    """

    def score() -> Tensor:
        return logps.score(policy.scorer, pairs, world, micro_batch_size)

    checks.check_step(policy, step, means, pairs, score, fine_tuning)
    if ref_logps is not None:
        pairs = [*pairs]  # as in training, the loss of the script gets a list
        nll = -ref_logps[:, 0].sum().item() / sum(len(pair.chosen) for pair in pairs)
        warn_of_guessing(nll, policy.scorer.unwrap())
        tokens = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
        expected = loss_at_reference(policy.scorer, pairs, ref_logps, loss_of)
        checks.check_first_step(policy, means, score(), ref_logps, tokens, pairs, expected)


def warn_of_guessing(nll: float, model: Any) -> None:
    """Print a warning if a model predicts texts worse than a guess before it is trained.

    nll: negative log-likelihood per token, in nats; that of a guess is ln(vocabulary size).
    """
    guess = math.log(model.config.get_text_config().vocab_size)
    if nll > 1.2 * guess:
        numbers = f"{nll:.2f} nats per token, a random guess {guess:.2f}"
        problem = f"before training, the model predicts the replies worse than a guess ({numbers})"
        hint = "use a model of their language and subject, its own tokenizer and intact weights"
        distributed.warn(f"warning: {problem}; {hint}")


@torch.no_grad()
def loss_at_reference(
    scorer: Scorer, pairs: Sequence[Pair], ref_logps: Tensor, loss_of: Loss
) -> float:
    """Return the mean loss of pairs if their log-probs are those of the reference, [pairs, 2]."""
    batch = scorer.collate(pairs, ref_logps.device)
    known = Known(ref_logps, scorer.precision)
    return loss_of(known, batch, ref_logps, pairs)[0].double().mean().item()
