"""The JSON of DeepSpeed and FSDP, as guide 2 has it, and the flags that change it."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError

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


def deepspeed(options):
    """Return the guide's JSON."""
    stage = options.zero_stage
    refuse(stage not in range(4), f"--zero_stage: {stage} is out of range; give 0, 1, 2 or 3")
    refuse(options.bf16 and options.fp16, "--fp16: --bf16 is given too; give one of them")
    refuse(options.offload_param and stage != 3, "--offload_param: only with --zero_stage 3")
    refuse(options.offload_optimizer and not stage, "--offload_optimizer: not with --zero_stage 0")
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 16,
        "gradient_clipping": 0.3,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    enabled = True if options.bf16 or options.fp16 else "auto"
    if not options.fp16:
        settings["bf16"] = {"enabled": enabled}
    if not options.bf16:
        settings["fp16"] = {"enabled": enabled, "loss_scale": 0}  # 0: it finds one
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    zero |= {"reduce_scatter": True, "reduce_bucket_size": 500_000_000}
    zero["allgather_bucket_size"] = 500_000_000
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = "auto"
        zero["stage3_param_persistence_threshold"] = "auto"
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # else saved models are empty
    for name in ("offload_optimizer", "offload_param"):
        if getattr(options, name):
            zero[name] = {"device": "cpu", "pin_memory": True}
    return settings | {"zero_optimization": zero}


def fsdp(options):
    """Return the guide's JSON."""
    models = ("Llama", "Mistral", "Gemma")
    return {
        "fsdp_transformer_layer_cls_to_wrap": [f"{model}DecoderLayer" for model in models],
        "fsdp_sharding_strategy": options.sharding_strategy,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cuda_graphs": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_mixed_precision": options.mixed_precision,
    }
