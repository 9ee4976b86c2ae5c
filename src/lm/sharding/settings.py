"""The file of a strategy: it sets what neither flags nor a YAML file set."""

from typing import Any

from lm.sharding import deepspeed, fsdp, json_settings


def read(config: Any, kind: str, path: str, places: dict[str, str]) -> list[str]:
    """Set config.sharding to what a file of FSDP or DeepSpeed contains; return lines about it.

    Settings of the script that the file has as well are set, too. kind: fsdp or deepspeed; places:
    setting -> file and line, or flag. Raises UserError for a key that is unknown or not supported,
    or a setting that has another value in the script's own settings.
    """
    if kind == "fsdp":
        config.sharding, notes = fsdp.read(path)
        checkpointing = config.sharding.fsdp_activation_checkpointing or None
        given: dict[str, tuple] = {
            "mixed_precision": ("fsdp_mixed_precision", config.sharding.precision),
            "gradient_checkpointing": ("fsdp_activation_checkpointing", checkpointing),
            "use_gradient_checkpointing": ("fsdp_activation_checkpointing", checkpointing),
        }
    else:
        config.sharding, notes = deepspeed.read(path)
        given = deepspeed.given(config.sharding)
    given = {name: value for name, value in given.items() if hasattr(config, name)}
    return notes + json_settings.set_from_json(config, given, path, places)


def shards(kind: str, options: Any) -> bool:
    """Return whether a strategy with the settings in its file shards anything; else it is DDP."""
    if kind == "fsdp":
        return (options or fsdp.Settings()).fsdp_sharding_strategy != "NO_SHARD"
    return kind == "deepspeed" and deepspeed.stage(options) > 0
