"""The check of a training step on preference pairs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddp_utils import checks
from ddp_utils.distributed import World
from ddp_utils.policy import Policy
from lm import logps
from lm.logps import Pair


def check_pairs(
    policy: Policy,
    step: int,
    means: dict[str, float],
    pairs: Sequence[Pair],
    ref_logps: Tensor | None,
    config: Any,
    world: World,
    micro_batch_size: int,
) -> None:
    """Check a step on preference pairs: check_step() and, with ref_logps, check_first_step().

    ref_logps: [B, 2] of the global batch at step 0, if the first loss is known.
    """

    def score() -> Tensor:
        return logps.score(policy.scorer, pairs, world, micro_batch_size)

    checks.check_step(policy, step, means, pairs, score, config.fine_tuning)
    if ref_logps is not None:
        tokens = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
        checks.check_first_step(policy, means, score(), ref_logps, tokens, pairs, config)
