"""DeepSpeed's JSON for ZeRO, stages 1 to 3: read, checked, and completed from other settings.

DeepSpeed is optional (pip install -r requirements-deepspeed.txt), and not imported here: settings
are checked before libraries that take seconds to import.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from ddp_utils import UserError
from lm.sharding import json_settings
from lm.sharding.json_settings import Fixed, fixed

if TYPE_CHECKING:
    from ddp_utils.distributed import World

BUCKETS = {  # what transformers replaces "auto" with; width: of the hidden states
    "reduce_bucket_size": lambda width: width**2,
    "allgather_bucket_size": lambda width: width**2,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width**2),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
BUCKETS |= {name.removeprefix("stage3_"): size for name, size in BUCKETS.items()}
OTHER_TRAINING = "it is not supported, and would change the training"
FP32_ADAMW = "AdamW updates fp32 weights here, in the host's memory if they are offloaded"
# Checkpoints are written by the run. round_robin_gradients: DeepSpeed then looks for gradients and
# weights in the wrong shards. The others fail where weights are gathered around a part of a model.
ZERO_WITHOUT_EFFECT = """elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint
save_muon_momentum_buffer_in_memory round_robin_gradients stage3_module_granularity_threshold
module_granularity_threshold enable_sanity_checks"""
ALWAYS_ON = """stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save compute_grad_norm"""
ZERO_NOT_SUPPORTED = """zero_quantized_weights zero_quantized_nontrainable_weights zenflow
zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather"""
WITHOUT_EFFECT = """wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger
comms_config timers log_level aio checkpoint nebula datastates_checkpointing autotuning compile
hybrid_engine prescale_gradients gradient_predivide_factor disable_allgather disable_python_gc
dataloader_drop_last vocabulary_size seq_parallel_communication_data_type sparse_gradients
graph_harvesting zero_force_ds_cpu_optimizer use_data_before_expert_parallelism
managed_gradient_accumulation"""
NOT_SUPPORTED = """amp torch_autocast fp8 compression_training quantize_training elasticity
weight_quantization eigenvalue sparse_attention progressive_layer_drop curriculum_learning
data_efficiency tensor_parallel sequence_parallel expert_parallel pipeline zenflow"""
OFFLOAD = {
    "device": Literal["cpu", "none"],
    **fixed("nvme_path buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init"),
    "ratio": Fixed(1, error=FP32_ADAMW),
    "super_offload": Fixed(error=FP32_ADAMW),
    "*": object,
}
MASTER = "bf16_master_weights_and_grads bf16_optimizer_states fp16_master_weights_and_grads"
FP16 = {
    "enabled": bool,
    **fixed("auto_cast immediate_grad_update"),
    **fixed(MASTER, error=FP32_ADAMW),
    "*": object,
}
LOSS_SCALE = "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
# DeepSpeed's models check other keys of inner objects, "*"; it ignores other keys at the top
KEYS: dict[str, Any] = {
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "zero_allow_untested_optimizer": bool,
    "communication_data_type": Literal["fp32", "bf16", "fp16"],
    "gradient_allreduce_op": Literal["mean"],
    "data_types": {"grad_accum_dtype": Literal["fp32"]},
    "bf16": FP16 | fixed(LOSS_SCALE),  # which bf16 does not need
    "fp16": FP16,
    "zero_optimization": {
        "stage": Literal[0, 1, 2, 3],
        **dict.fromkeys(("offload_optimizer", "offload_param"), OFFLOAD),
        "zero_hpz_partition_size": int,
        **fixed(ALWAYS_ON, True),
        **fixed(ZERO_WITHOUT_EFFECT),
        **fixed(ZERO_NOT_SUPPORTED, error=OTHER_TRAINING),
        "*": object,
    },
    "optimizer": {
        "type": Literal["AdamW", "Adam", "adamw", "adam"],
        "params": {
            "lr": float,
            "weight_decay": float,
            "betas": Fixed([0.9, 0.999]),
            "eps": Fixed(1e-8),
            "adam_w_mode": Literal[True],
            **fixed("torch_adam bias_correction fused", True),
            "max_grad_norm": Fixed(error="DeepSpeed does not read it here; use gradient_clipping"),
        },
        "legacy_fusion": Fixed(),
    },
    "scheduler": Fixed(None, instead="lr_scheduler and warmup_ratio"),
    "steps_per_print": Fixed(instead="log_every"),
    **fixed("tensorboard wandb csv_monitor comet monitor_config", instead="report_to"),
    "activation_checkpointing": Fixed(instead="gradient_checkpointing"),
    **fixed(WITHOUT_EFFECT),
    **fixed(NOT_SUPPORTED, error=OTHER_TRAINING),
}
SAME = {  # key of the JSON -> setting of ours
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
IN_OPTIMIZER = {"lr": "learning_rate", "weight_decay": "weight_decay"}
MAY_BE_AUTO = {"train_batch_size", "enabled", *SAME, *IN_OPTIMIZER}


def read(path: str) -> tuple[dict[str, Any], list[str]]:
    """Return DeepSpeed's settings, and a warning about keys without an effect.

    Raises UserError for a key that is unknown or not supported.
    """
    settings = json_settings.load(path)
    if "distributed_type" in settings:
        problem = "this is accelerate's file; use a file of DeepSpeed's own settings"
        raise UserError(f"{path}: {problem}: scripts/distributed_setup.py deepspeed --zero_stage 3")
    if "bfloat16" in settings:  # its name in old files
        settings["bf16"] = settings.pop("bfloat16")
    kept, notes = json_settings.read(path, settings, KEYS, MAY_BE_AUTO)
    for part, needed in {"offload_param": 3, "offload_optimizer": 1}.items():
        is_used = kept.get("zero_optimization", {}).get(part, {}).get("device") == "cpu"
        if is_used and stage(kept) < needed:
            notes.append(f"warning: {path}: {part} has no effect (use stage {needed})")
    return kept, notes


def stage(settings: dict[str, Any]) -> int:
    """Return the ZeRO stage; stage 0 shards nothing, as DDP."""
    return settings.get("zero_optimization", {}).get("stage", 0)


def given(settings: dict[str, Any]) -> dict[str, tuple]:
    """Return our settings that are in the JSON: name -> (key, value or "auto")."""
    values = {name: (key, settings.get(key, "auto")) for key, name in SAME.items()}
    params = settings.get("optimizer", {}).get("params", {})
    for key, name in IN_OPTIMIZER.items():
        values[name] = (f"optimizer.params.{key}", params.get(key, "auto"))
    for kind in ("fp16", "bf16"):
        if settings.get(kind, {}).get("enabled") is True:
            values["mixed_precision"] = (f"{kind}.enabled", kind)
    return values


def filled(
    settings: dict[str, Any], path: str, values: dict[str, Any], world: "World", width: int
) -> dict[str, Any]:
    """Return the settings in a file without any "auto".

    values: of the script, the names in SAME and mixed_precision; width: of the model's hidden
    states. Raises UserError if the file has other batch sizes or another precision, or if DeepSpeed
    is not installed.
    """
    if stage(settings) and not find_spec("deepspeed"):
        raise UserError("DeepSpeed is not installed; pip install -r requirements-deepspeed.txt")
    ready: dict[str, Any] = {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    if values["mixed_precision"] == "bf16":  # micro-batches and ranks are summed in fp32, as in DDP
        ready["data_types"] = {"grad_accum_dtype": "fp32"}
        ready["communication_data_type"] = "fp32"
    ready |= settings | {"zero_force_ds_cpu_optimizer": False}  # AdamW is torch's
    ready.pop("optimizer", None)
    accumulation, size = values["gradient_accumulation_steps"], values["micro_batch_size"]
    factors = f"{world.world_size} ranks x {accumulation} accumulation x {size}"
    expected = {key: values[name] for key, name in SAME.items()}
    expected["train_batch_size"] = world.world_size * accumulation * size
    for key, value in expected.items():
        accepted = ["auto", value]
        if key == "train_batch_size" and values.get("batch_size"):
            accepted.append(values["batch_size"])  # of DPO: the ranks may not divide it
        if settings.get(key, "auto") not in accepted:
            line = json_settings.line_of(key, path)
            here = f"{factors} = {value}" if key == "train_batch_size" else f"here it is {value}"
            raise UserError(f'{line}: {key} is {settings[key]}, but {here}; use that, or "auto"')
        ready[key] = value
    zero = ready["zero_optimization"] = dict(settings.get("zero_optimization", {}))
    for key, value in zero.items():  # DeepSpeed has defaults for other keys that are "auto"
        if value == "auto" and key in BUCKETS:
            zero[key] = BUCKETS[key](width)
    for kind in ("bf16", "fp16"):
        section = settings.get(kind, {})
        ready[kind] = precision_section(section, kind, path, values["mixed_precision"])
    group_size = min(zero.get("zero_hpz_partition_size", 1), world.world_size)
    if group_size > 1 and world.world_size % group_size:
        line = json_settings.line_of("zero_hpz_partition_size", path)
        problem = f"zero_hpz_partition_size {group_size} does not divide {world.world_size} ranks"
        raise UserError(f"{line}: {problem}; use the number of GPUs of a node")
    return ready


def precision_section(
    section: dict[str, Any], kind: str, path: str, mixed_precision: str
) -> dict[str, Any]:
    """Return the section `bf16` or `fp16`; raise UserError if mixed_precision differs from it."""
    is_enabled = mixed_precision == kind
    if section.get("enabled", "auto") not in ("auto", is_enabled):
        line = json_settings.line_of(f"{kind}.enabled", path)
        problem = f"mixed_precision is {mixed_precision}, which differs from {kind}.enabled"
        raise UserError(f"{line}: {problem}; make them equal")
    if not is_enabled:
        return {"enabled": False}
    # a bf16 step whose gradient is not finite is skipped; fp16 has a loss scale for that
    default = {"check_grad_overflow": True} if kind == "bf16" else {}
    return default | section | {"enabled": True}
