"""DeepSpeed's JSON for ZeRO, stages 1 to 3: read, checked, and filled in from other settings.

DeepSpeed is an extra: pip install -r requirements-deepspeed.txt. Nothing here imports it.
"""

from importlib.util import find_spec
from typing import Literal

from ddp_utils import UserError
from ddp_utils.sharding import json_settings

BUCKETS = {  # "auto" as transformers fills it in, from what the matrices of a layer hold
    "reduce_bucket_size": lambda width: width**2,
    "allgather_bucket_size": lambda width: width**2,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width**2),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
FIRST_STAGE = {"offload_optimizer": 1, "offload_param": 3}  # that has what is offloaded
FP16 = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
SIZES = "sub_group_size stage3_max_live_parameters stage3_max_reuse_distance"
SWITCHES = "contiguous_gradients overlap_comm reduce_scatter allgather_partitions "
SWITCHES += "round_robin_gradients stage3_gather_16bit_weights_on_model_save"
KEYS = {  # others are refused: DeepSpeed meets them with a traceback, or passes them over
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
        **dict.fromkeys(FIRST_STAGE, {"device": Literal["cpu", "none"], "pin_memory": bool}),
    },
    "optimizer": "src/train.py makes the optimizer, AdamW",
    "scheduler": "src/train.py makes the schedule: training.lr_scheduler",
}
OURS = {  # key of the JSON -> the setting that it is
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
MAY_BE_AUTO = {"train_batch_size", "enabled", *OURS, *BUCKETS}


def read(path) -> dict:
    """Return DeepSpeed's settings; raise UserError for what is unknown, or not DeepSpeed's."""
    settings = json_settings.read(path, KEYS, MAY_BE_AUTO)
    zero = settings.get("zero_optimization", {})
    for key, first in FIRST_STAGE.items():
        if zero.get(key, {}).get("device") == "cpu" and stage(settings) < first:
            name = f"zero_optimization.{key}"
            line = json_settings.line_of(name, path)
            raise UserError(f"{line}: {name}: only with stage {first} and up")
    return settings


def stage(settings) -> int:
    """Return the ZeRO stage; at 0 nothing is sharded, and DDP does the same."""
    return settings.get("zero_optimization", {}).get("stage", 0)


def given(settings) -> dict:
    """Return the settings of src/train.py in the JSON: name -> (key, value), which may be auto."""
    values = {name: (key, settings.get(key, "auto")) for key, name in OURS.items()}
    sections = [kind for kind in ("bf16", "fp16") if kind in settings]
    switches = [settings[kind].get("enabled") for kind in sections]
    if True in switches:
        kind = sections[switches.index(True)]
        values["mixed_precision"] = (f"{kind}.enabled", kind)
    elif set(switches) == {False}:
        values["mixed_precision"] = ("bf16.enabled", "no")
    return values


def total_batch_size(settings, config, world_size):
    """Return the rows of a step; raise UserError if the JSON has another number."""
    product = world_size * config.gradient_accumulation_steps * config.micro_batch_size
    total = settings.get("train_batch_size", "auto")
    if total not in ("auto", product):
        line = json_settings.line_of("train_batch_size", config.deepspeed_config)
        factors = f"{config.gradient_accumulation_steps} accumulation x {config.micro_batch_size}"
        says = f"{total}, but {world_size} ranks x {factors} = {product}"
        raise UserError(f'{line}: train_batch_size is {says}; or write "auto"')
    return product


def filled(settings, config, world, width) -> dict:
    """Return the settings without any "auto". width: of the model's hidden states.

    Raises UserError if batch sizes or precision are not those of `config`, and if DeepSpeed is not
    installed: here rather than in its policy, where a run has begun.
    """
    if stage(settings) and not find_spec("deepspeed"):
        raise UserError("DeepSpeed is not installed; pip install -r requirements-deepspeed.txt")
    zero = dict(settings.get("zero_optimization", {}))
    for key, value in zero.items():
        if value == "auto":
            zero[key] = BUCKETS[key](width)
        elif type(value) is float:  # 5e8 is no integer
            zero[key] = int(value)
    ready = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    ready["steps_per_print"] = 10**9
    if config.mixed_precision == "bf16":  # sums over micro-batches and ranks as DDP makes them
        ready["data_types"] = {"grad_accum_dtype": "fp32"}
        ready["communication_data_type"] = "fp32"
    ready |= settings
    ready |= {key: getattr(config, name) for key, name in OURS.items()}
    ready["train_batch_size"] = total_batch_size(settings, config, world.world_size)
    ready["zero_optimization"] = zero
    for kind in ("bf16", "fp16"):
        enabled = config.mixed_precision == kind
        section = settings.get(kind, {})
        if section.get("enabled", "auto") not in ("auto", enabled):
            line = json_settings.line_of(f"{kind}.enabled", config.deepspeed_config)
            says = f"{str(not enabled).lower()}, but mixed_precision is {config.mixed_precision}"
            raise UserError(f"{line}: {kind}.enabled is {says}; choose one")
        # a bf16 step whose gradient is not finite is not taken; fp16 has a loss scale for it
        usual = {"check_grad_overflow": True} if kind == "bf16" else {}
        ready[kind] = usual | section | {"enabled": True} if enabled else {"enabled": False}
    return ready
