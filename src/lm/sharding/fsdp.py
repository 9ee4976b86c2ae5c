"""accelerate's settings of FSDP, in JSON or YAML: each key has its effect, or is reported.

They are checked before libraries that take seconds to import; fsdp_policy.py shards.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_origin, get_type_hints

from ddp_utils import UserError, cli
from lm.sharding import json_settings
from lm.sharding.json_settings import Fixed, fixed

# in this order accelerate also numbers them, from 1
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
Kind = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
QUOTED = {"true": True, "yes": True, "false": False, "no": False}  # booleans in quotation marks
PRECISIONS = {"BFLOAT16": "bf16", "FLOAT16": "fp16", "NO": "no"}
OTHER_PRECISIONS = {"BF16": "BFLOAT16", "FP16": "FLOAT16", "FP32": "NO"}


@dataclass
class Settings:
    """The settings of FSDP, with accelerate's names."""

    fsdp_sharding_strategy: Kind = "FULL_SHARD"
    fsdp_mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO", None] = None
    # classes to be sharded one by one, a list or separated by commas; empty: the model's own
    fsdp_transformer_layer_cls_to_wrap: list | str | None = None
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    fsdp_offload_params: bool = False  # keep all shards in the host's memory
    fsdp_activation_checkpointing: bool = False
    fsdp_forward_prefetch: bool = False  # gather the next layer while this one computes
    # checkpoints of full fine-tuning: a file per rank, or one file for any number of ranks
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "SHARDED_STATE_DICT"

    @property
    def precision(self) -> str | None:
        return PRECISIONS.get(self.fsdp_mixed_precision or "")

    @property
    def layers(self) -> list[str]:
        names = self.fsdp_transformer_layer_cls_to_wrap or []
        return names.replace(",", " ").split() if isinstance(names, str) else names


OTHER_NAMES = {
    "fsdp_reshard_after_forward": "fsdp_sharding_strategy",
    "fsdp_mixed_precision_policy": "fsdp_mixed_precision",
    "fsdp_cpu_offload": "fsdp_offload_params",
}
BY_LAUNCHER = """compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank
main_process_ip main_process_port main_training_function num_machines num_processes rdzv_backend
same_network use_cpu tpu_env tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands
dynamo_config dynamo_backend mpirun_config"""
OTHER_PARTS = """deepspeed_config parallelism_config tp_config ipex_config fp8_config
megatron_lm_config"""
HINTS: dict[str, Any] = get_type_hints(Settings) | {
    "fsdp_version": Fixed(2),
    **fixed("fsdp_backward_prefetch fsdp_backward_prefetch_policy", "BACKWARD_PRE"),
    # FSDP2 trains the original parameters; every rank maps the same weights from their files
    **fixed("fsdp_use_orig_params fsdp_sync_module_states fsdp_cpu_ram_efficient_loading", True),
    "fsdp_limit_all_gathers": Fixed(True),
    **fixed("fsdp_cuda_graphs fsdp_activation_checkpointing_offload fsdp_xla_fsdp_v2"),
    **fixed("fsdp_xla_fsdp_settings fsdp_xla_fsdp_grad_ckpt"),
    "fsdp_min_num_params": Fixed(instead="fsdp_transformer_layer_cls_to_wrap"),
    "fsdp_ignored_modules": Fixed(error="FSDP shards all modules here"),
    "fsdp_xla": Fixed(error="TPUs are not supported"),
    # of accelerate's file; its mixed_precision is fsdp_mixed_precision
    "distributed_type": Literal["FSDP"],
    **fixed(OTHER_PARTS, error="it is not supported"),
    **fixed(BY_LAUNCHER, instead="the options of the launcher"),
}
HINTS |= {name: HINTS[ours] for name, ours in OTHER_NAMES.items()}
HINTS |= {name.removeprefix("fsdp_"): hint for name, hint in HINTS.items()}  # as in transformers


def read(path: str) -> tuple[Settings, list[str]]:
    """Return the settings in a JSON or YAML file, and a warning about keys without an effect.

    The file has the keys of FSDP, or is accelerate's, which has them in its `fsdp_config`. Without
    a path, return the defaults. Raises UserError for a key or value that is not supported.
    """
    if not path:
        return Settings(), []
    content = json_settings.load(path)
    section = content.pop("fsdp_config", None) or {}
    cli.check_type(f"{path}: fsdp_config", dict, section)
    kept, notes = json_settings.read(path, normalized(content | section), HINTS)
    kept.pop("distributed_type", None)
    values: dict[str, Any] = {}
    for key, value in kept.items():
        name = "fsdp_" + key.removeprefix("fsdp_")
        name = OTHER_NAMES.get(name, name)
        if values.setdefault(name, value) != value:
            problem = f"{key} is {value}, but another key sets {values[name]}; use only one of them"
            raise UserError(f"{json_settings.line_of(key, path)}: {problem}")
    settings = Settings(**values)
    if settings.fsdp_offload_params and settings.fsdp_sharding_strategy == "NO_SHARD":
        notes.append(f"warning: {path}: fsdp_offload_params has no effect (use FULL_SHARD)")
    return settings, notes


def normalized(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with strategies by name, names in upper case, and real booleans."""
    result = {}
    for key, value in settings.items():
        hint = HINTS.get(key)
        is_strategy = hint is HINTS["fsdp_sharding_strategy"]
        if is_strategy or get_origin(hint) is not Literal:  # there "no" is a name
            value = QUOTED.get(str(value).lower(), value)
        if is_strategy and isinstance(value, bool):  # of fsdp_reshard_after_forward in FSDP2
            value = "FULL_SHARD" if value else "SHARD_GRAD_OP"
        elif is_strategy and str(value) in tuple("12345"):
            value = STRATEGIES[int(value) - 1]
        elif isinstance(value, str) and (isinstance(hint, Fixed) or get_origin(hint) is Literal):
            value = OTHER_PRECISIONS.get(value.upper(), value.upper())
        result[key] = value
    return result
