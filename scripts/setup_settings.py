"""The JSON files of DeepSpeed and FSDP in guide 2, and the flags that change them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_utils import UserError

TEMPLATES = Path(__file__).with_name("templates")


@dataclass
class Common:
    # the file
    output: str = ""  # file to write; empty: the guide's name
    force: bool = False  # overwrite a file that this program did not write
    debug: bool = False  # tracebacks for user errors, too


@dataclass
class DeepSpeed(Common):
    """Settings of DeepSpeed: config/ds_config.json, for `src/train.py --deepspeed`."""

    # content of the file
    zero_stage: int = 2  # shards 1: optimizer states, 2: gradients too, 3: all; 0: none
    offload_optimizer: bool = False  # keep optimizer states in host memory
    offload_param: bool = False  # keep parameters in host memory, with stage 3
    bf16: bool = False  # without --bf16 and --fp16: mixed_precision of the YAML file
    fp16: bool = False  # for GPUs without bf16; the loss scale is dynamic


Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass
class Fsdp(Common):
    """Settings of FSDP: config/fsdp_config.json, for distributed.fsdp_config in the YAML file."""

    # content of the file
    sharding_strategy: Sharding = "FULL_SHARD"  # see docs/strategies.md
    mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO"] = "BFLOAT16"  # in forward and backward


def require(condition: object, message: str) -> None:
    """Raise a UserError unless the condition is true."""
    if not condition:
        raise UserError(message)


def template(name: str) -> str:
    """Return the text of a file in templates/."""
    return (TEMPLATES / name).read_text("utf-8")


def deepspeed(options: DeepSpeed) -> dict[str, Any]:
    """Return the guide's JSON without the parts that the flags do not select."""
    stage = options.zero_stage
    require(stage in range(4), f"--zero_stage: {stage} is out of range (expected 0, 1, 2 or 3)")
    require(not (options.bf16 and options.fp16), "--fp16: use only one of --bf16 and --fp16")
    require(stage == 3 or not options.offload_param, "--offload_param: needs --zero_stage 3")
    require(stage or not options.offload_optimizer, "--offload_optimizer: needs --zero_stage >= 1")
    settings = json.loads(template("deepspeed.json"))
    for kind, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if getattr(options, kind):
            settings[kind]["enabled"] = True
            del settings[other]
    zero = settings["zero_optimization"]
    zero["stage"] = stage
    for key in list(zero):
        is_disabled = key.startswith("offload_") and not getattr(options, key)
        if is_disabled or (key.startswith("stage3_") and stage != 3):
            del zero[key]
    return settings


def fsdp(options: Fsdp) -> dict[str, Any]:
    """Return the guide's JSON with the selected strategy and precision."""
    settings = json.loads(template("fsdp.json"))
    settings["fsdp_sharding_strategy"] = options.sharding_strategy
    settings["fsdp_mixed_precision"] = options.mixed_precision
    return settings
