"""Choose how the ranks split the work, and distribute a model accordingly."""

from typing import Any

import torch

from ddp_utils import UserError, cli
from ddp_utils.distributed import World
from ddp_utils.policy import DDP, Policy, Precision, ScorerModule, Strategy
from ddp_utils.run import Run
from lm.fast.self_test import choose_head_and_layout
from lm.logps import Pair, Scorer


def choose(
    kind: str, options: Any = None, grad_reduce_dtype: str = "fp32", bucket_mb: float | None = None
) -> Strategy:
    """Return the Strategy of `ddp`, `fsdp` or `deepspeed`; it is DDP if nothing is sharded.

    options: for fsdp its Settings (None: the defaults), for deepspeed the object in its JSON file.
    """
    ddp = Strategy(grad_reduce_dtype=grad_reduce_dtype, bucket_mb=bucket_mb)
    if kind == "ddp":
        return ddp
    from lm.sharding import deepspeed, fsdp, settings

    if not settings.shards(kind, options):
        return ddp
    if kind == "deepspeed":
        return Strategy(kind, f"ZeRO-{deepspeed.stage(options)}", options, saves_shards=True)
    options = options or fsdp.Settings()
    name = f"FSDP {options.fsdp_sharding_strategy}"
    saves_shards = options.fsdp_state_dict_type == "SHARDED_STATE_DICT"
    return Strategy(kind, name, options, grad_reduce_dtype, None, saves_shards)


def check(strategy: Strategy, model: Any) -> None:
    """Raise UserError if a model, on the meta device, cannot be distributed like this."""
    if strategy.kind == "fsdp":
        from lm.sharding.fsdp_policy import layers_of

        layers_of(model, strategy.options)


def complete(
    config: Any, micro_batch_size: int, precision: Precision, model: Any, world: World
) -> None:
    """Replace "auto" in config.mixed_precision and in DeepSpeed's config.sharding.

    micro_batch_size: rows of one forward pass of a rank; model: on the meta device. Raises
    UserError for a precision that this device does not support, for settings that differ from those
    in DeepSpeed's file, and for values that DeepSpeed does not accept.
    """
    if config.mixed_precision == "fp16" and world.device.type == "cpu":
        raise UserError("--mixed_precision fp16: slow on a CPU; switch it off")
    if config.mixed_precision == "auto":
        vars(config).get("places", {}).pop("mixed_precision", None)  # the user has not chosen one
        names: dict[Any, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config.mixed_precision = names.get(precision.autocast, "no")
    is_ddp = choose(config.strategy, config.sharding).kind == "ddp"
    if config.grad_reduce_dtype == "bf16" and is_ddp and world.device.type == "cpu":
        raise UserError("--grad_reduce_dtype bf16: DDP supports it on GPUs only; use fp16 or fp32")
    if config.strategy == "fsdp" and world.world_size == 1 and not config.check:
        cause = "one process neither shards nor offloads; start several processes"
        cli.note(f"FSDP has no effect: {cause}, or use the strategy ddp")
    if config.strategy == "deepspeed":
        from lm.sharding import deepspeed

        names_of_both = ("gradient_accumulation_steps", "max_grad_norm", "mixed_precision")
        values = {name: getattr(config, name) for name in names_of_both}
        values["micro_batch_size"] = micro_batch_size
        values["batch_size"] = vars(config).get("batch_size")
        path, width = config.sharding_config, model.config.get_text_config().hidden_size
        config.sharding = deepspeed.filled(config.sharding, path, values, world, width)
        if deepspeed.stage(config.sharding):
            from lm.sharding import deepspeed_engine

            deepspeed_engine.check_values(config.sharding, path, world)


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

        if trained or ZeroPolicy.shards_weights(strategy):
            return ZeroPolicy(scorer, world, strategy, trained)
    if strategy.kind == "fsdp" and world.world_size > 1:
        from lm.sharding.fsdp_policy import FsdpPolicy

        return FsdpPolicy(scorer, world, strategy, trained)
    return Policy(scorer, world, strategy, trained)
