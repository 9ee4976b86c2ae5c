"""Policies that shard weights, gradients or optimizer states, imported only when they are used."""

from ddp_utils.policy import DDP, Policy


def wrap(scorer, world, strategy=DDP, trained=True) -> Policy:
    """Return the policy of a scorer under a Strategy; all ranks must call this, and its methods.

    trained: False for a reference model, which only scores.
    """
    if strategy.kind == "deepspeed":
        from ddp_utils.sharding.deepspeed_engine import ZeroPolicy

        return ZeroPolicy(scorer, world, strategy)
    if strategy.kind == "fsdp" and world.world_size > 1:
        from ddp_utils.sharding.fsdp import FsdpPolicy

        return FsdpPolicy(scorer, world, strategy, trained)
    return Policy(scorer, world, strategy, trained)
