"""The JSON of DeepSpeed and FSDP, as guide 2 has it, and the flags that change it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_utils import UserError

TEMPLATES = Path(__file__).with_name("templates")
Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass
class Common:
    # the file
    output: str = ""  # file to write; empty: the guide's name
    force: bool = False  # overwrite a file that this program did not write
    debug: bool = False  # tracebacks for user errors, too


@dataclass
class DeepSpeed(Common):
    """Settings of DeepSpeed: config/ds_config.json, for `src/train.py --deepspeed`."""

    # what it says
    zero_stage: int = 2  # shards 1: optimizer states, 2: gradients too, 3: all; 0: none
    offload_optimizer: bool = False  # optimizer states in the host's memory
    offload_param: bool = False  # parameters in the host's memory, with stage 3
    bf16: bool = False  # without --bf16 and --fp16: as the YAML file's mixed_precision
    fp16: bool = False  # for GPUs that have no bf16; the loss scale is dynamic


@dataclass
class Fsdp(Common):
    """Settings of FSDP: config/fsdp_config.json, for distributed.fsdp_config in the YAML file."""

    # what it says
    sharding_strategy: Sharding = "FULL_SHARD"  # see docs/strategies.md
    mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO"] = "BFLOAT16"  # in forward and backward


def refuse(wrong, says):
    if wrong:
        raise UserError(says)


def template(name) -> str:
    """Return the text of a file in templates/."""
    return (TEMPLATES / name).read_text("utf-8")


def deepspeed(options) -> dict:
    """Return the guide's JSON: the template without what is not asked for."""
    stage = options.zero_stage
    refuse(stage not in range(4), f"--zero_stage: {stage} is out of range; give 0, 1, 2 or 3")
    refuse(options.bf16 and options.fp16, "--fp16: --bf16 is given too; give one of them")
    refuse(options.offload_param and stage != 3, "--offload_param: only with --zero_stage 3")
    refuse(options.offload_optimizer and not stage, "--offload_optimizer: not with --zero_stage 0")
    settings = json.loads(template("deepspeed.json"))
    for kind, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if getattr(options, kind):
            settings[kind]["enabled"] = True
            del settings[other]
    zero = settings["zero_optimization"]
    zero["stage"] = stage
    for key in list(zero):
        is_unasked = key.startswith("offload_") and not getattr(options, key)
        if is_unasked or (key.startswith("stage3_") and stage != 3):
            del zero[key]
    return settings


def fsdp(options) -> dict:
    """Return the guide's JSON."""
    settings = json.loads(template("fsdp.json"))
    settings["fsdp_sharding_strategy"] = options.sharding_strategy
    settings["fsdp_mixed_precision"] = options.mixed_precision
    return settings
