"""DeepSpeed's JSON for ZeRO, stages 1 to 3: read, checked, and completed from other settings.

DeepSpeed is optional (pip install -r requirements-deepspeed.txt), and not imported here: settings
are checked before libraries that take seconds to import.
"""

from importlib.util import find_spec
from typing import Any, Literal

from ddp_utils import UserError
from ddp_utils.distributed import World
from ddp_utils.sharding import json_settings

BUCKETS = {  # what transformers replaces "auto" with; width: of the hidden states
    "reduce_bucket_size": lambda width: width**2,
    "allgather_bucket_size": lambda width: width**2,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width**2),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
OFFLOAD = {"device": Literal["cpu", "none"], "pin_memory": bool}
FP16 = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
SIZES = "sub_group_size stage3_max_live_parameters stage3_max_reuse_distance"
SWITCHES = """contiguous_gradients overlap_comm reduce_scatter allgather_partitions
round_robin_gradients stage3_gather_16bit_weights_on_model_save"""
# DeepSpeed itself ignores an unknown key at the top, or raises an exception without its line
KEYS: dict[str, Any] = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "steps_per_print": float,
    "wall_clock_breakdown": bool,
    "zero_allow_untested_optimizer": bool,
    "zero_force_ds_cpu_optimizer": Literal[False],  # AdamW is torch's
    "communication_data_type": Literal["fp32", "bf16", "fp16"],
    **dict.fromkeys(("data_types", "comms_logger", "flops_profiler"), dict),
    "bf16": {"enabled": bool, "check_grad_overflow": bool},
    "fp16": {"enabled": bool, **dict.fromkeys(FP16.split(), float)},
    "zero_optimization": {
        "stage": Literal[0, 1, 2, 3],
        **dict.fromkeys([*BUCKETS, *SIZES.split()], float),
        **dict.fromkeys(SWITCHES.split(), bool),
        **dict.fromkeys(("offload_optimizer", "offload_param"), OFFLOAD),
    },
    "optimizer": "src/train.py makes the optimizer, AdamW",
    "scheduler": "src/train.py makes the schedule: training.lr_scheduler",
}
SAME = {  # key of the JSON -> setting of src/train.py
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
MAY_BE_AUTO = {"train_batch_size", "enabled", *SAME, *BUCKETS}


def read(path: str) -> dict[str, Any]:
    """Return DeepSpeed's settings; raise UserError for a key that is unknown or not supported."""
    return json_settings.read(path, KEYS, MAY_BE_AUTO)


def stage(settings: dict[str, Any]) -> int:
    """Return the ZeRO stage; stage 0 shards nothing, as DDP."""
    return settings.get("zero_optimization", {}).get("stage", 0)


def given(settings: dict[str, Any]) -> dict[str, tuple]:
    """Return the settings of src/train.py in the JSON: name -> (key, value or "auto")."""
    values = {name: (key, settings.get(key, "auto")) for key, name in SAME.items()}
    for kind in ("fp16", "bf16"):
        if settings.get(kind, {}).get("enabled") is True:
            values["mixed_precision"] = (f"{kind}.enabled", kind)
    return values


def total_batch_size(settings: dict[str, Any], config: Any, world_size: int) -> int:
    """Return the rows of a step; raise UserError if the JSON has another number."""
    accumulation, size = config.gradient_accumulation_steps, config.micro_batch_size
    product = world_size * accumulation * size
    total = settings.get("train_batch_size", "auto")
    if total not in ("auto", product):
        line = json_settings.line_of("train_batch_size", config.deepspeed_config)
        factors = f"{world_size} ranks x {accumulation} accumulation x {size} = {product}"
        problem = f"train_batch_size is {total}, but {factors}"
        raise UserError(f'{line}: {problem}; use that, or "auto"')
    return product


def filled(settings: dict[str, Any], config: Any, world: World, width: int) -> dict[str, Any]:
    """Return the settings without any "auto".

    config: of src/train.py; width: of the model's hidden states. Raises UserError if batch sizes or
    precision differ from those of `config`, or if DeepSpeed is not installed.
    """
    if stage(settings) and not find_spec("deepspeed"):
        raise UserError("DeepSpeed is not installed; pip install -r requirements-deepspeed.txt")
    ready: dict[str, Any] = {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    ready["zero_force_ds_cpu_optimizer"] = False
    if config.mixed_precision == "bf16":  # sums over micro-batches and ranks in fp32, as in DDP
        ready["data_types"] = {"grad_accum_dtype": "fp32"}
        ready["communication_data_type"] = "fp32"
    ready |= settings
    ready |= {key: getattr(config, name) for key, name in SAME.items()}
    ready["train_batch_size"] = total_batch_size(settings, config, world.world_size)
    zero = ready["zero_optimization"] = dict(settings.get("zero_optimization", {}))
    for key, value in zero.items():
        if value == "auto":
            zero[key] = BUCKETS[key](width)
    for kind in ("bf16", "fp16"):
        ready[kind] = precision_section(settings.get(kind, {}), kind, config)
    return ready


def precision_section(section: dict[str, Any], kind: str, config: Any) -> dict[str, Any]:
    """Return the section `bf16` or `fp16`; raise UserError if mixed_precision differs from it."""
    is_enabled = config.mixed_precision == kind
    if section.get("enabled", "auto") not in ("auto", is_enabled):
        line = json_settings.line_of(f"{kind}.enabled", config.deepspeed_config)
        problem = f"mixed_precision is {config.mixed_precision}, which differs from {kind}.enabled"
        raise UserError(f"{line}: {problem}; make them equal")
    if not is_enabled:
        return {"enabled": False}
    # a bf16 step whose gradient is not finite is skipped; fp16 has a loss scale for that
    default = {"check_grad_overflow": True} if kind == "bf16" else {}
    return default | section | {"enabled": True}
