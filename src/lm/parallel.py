"""Choose how the ranks split the work, and distribute a model accordingly."""

from typing import Any

from ddp_utils.distributed import World
from ddp_utils.policy import DDP, Policy, ScorerModule, Strategy
from ddp_utils.run import Run
from lm.fast.self_test import choose_head_and_layout
from lm.logps import Pair, Scorer


def choose(
    kind: str, options: Any = None, grad_reduce_dtype: str = "fp32", bucket_mb: float | None = None
) -> Strategy:
    """Return the Strategy of `ddp`, `fsdp` or `deepspeed`; it is DDP if nothing is sharded.

    options: for fsdp its Settings (None: the defaults), for deepspeed the object in its JSON file.
    """
    if kind == "fsdp":
        from lm.sharding import fsdp

        settings = options or fsdp.Settings()
        name = settings.fsdp_sharding_strategy
        saves_shards = settings.fsdp_state_dict_type == "SHARDED_STATE_DICT"
        if name != "NO_SHARD":
            return Strategy(kind, f"FSDP {name}", settings, grad_reduce_dtype, None, saves_shards)
    if kind == "deepspeed":
        from lm.sharding import deepspeed

        stage = deepspeed.stage(options)
        if stage > 0:
            return Strategy(kind, f"ZeRO-{stage}", options, saves_shards=True)
    return Strategy(grad_reduce_dtype=grad_reduce_dtype, bucket_mb=bucket_mb)


def check(strategy: Strategy, model: Any) -> None:
    """Raise UserError if a model, on the meta device, cannot be distributed like this."""
    if strategy.kind == "fsdp":
        from lm.sharding import fsdp

        fsdp.layers_of(model, strategy.options)


def prepare(
    scorer: Scorer, strategy: Strategy, pairs: list[Pair], layout: str, run: Run, trained: bool
) -> Policy:
    """Distribute a scorer over the ranks, and try on pairs how fast it can compute.

    layout: as in choose_head_and_layout(); trained: False for a reference model.
    """
    policy = wrap(scorer, run.world, strategy, trained)
    with policy.gathered():
        for line in choose_head_and_layout(scorer, pairs, layout, run.world):
            run.say(line)
    return policy


def wrap(
    scorer: ScorerModule, world: World, strategy: Strategy = DDP, trained: bool = True
) -> Policy:
    """Return the policy of a scorer under a Strategy; all ranks must call this, and its methods.

    trained: False for a reference model, which only scores.
    """
    if strategy.kind == "deepspeed":
        from lm.sharding.deepspeed_engine import ZeroPolicy

        return ZeroPolicy(scorer, world, strategy, trained)
    if strategy.kind == "fsdp" and world.world_size > 1:
        from lm.sharding.fsdp import FsdpPolicy

        return FsdpPolicy(scorer, world, strategy, trained)
    return Policy(scorer, world, strategy, trained)
