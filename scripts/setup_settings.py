"""What the YAML file of src/train.py says, and the JSON of DeepSpeed and FSDP that goes with it."""

from dataclasses import dataclass
from typing import Literal

from ruamel import yaml

from ddp_utils import UserError, cli, jsonl
from ddp_utils.readers import yaml_config


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
    reduce_bucket_size: float = 5e8  # elements reduced at a time
    allgather_bucket_size: float = 5e8  # elements gathered at a time
    config: str = ""  # settings of src/train.py, to take numbers from
    concrete: bool = False  # their numbers in place of "auto"


@dataclass
class Fsdp(Common):
    """Settings of FSDP: config/fsdp_config.json, for distributed.fsdp_config in the YAML file."""

    # see docs/strategies.md
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = (
        "FULL_SHARD"
    )
    mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO"] = "BFLOAT16"  # in forward and backward


# --- the YAML file -------------------------------------------------------------------------------


def refuse(wrong, says):
    if wrong:
        raise UserError(says)


def read(path):
    """A JSON or YAML file as plain data; src/train.py checks what it holds."""
    if path.endswith(".json"):
        return jsonl.read_object(path)
    text = jsonl.content(path).decode()
    with yaml_config.located(path, text):
        values = yaml.YAML(typ="safe", pure=True).load(text) or {}
    refuse(not isinstance(values, dict), f"{path}:1: the file must hold names and values")
    return values


def setting(found, path, name):
    """What the YAML says of `name`, in training or distributed; None if nothing."""
    parts = [(part, found.get(part)) for part in ("training", "distributed")]
    parts = {part: v[name] for part, v in parts if isinstance(v, dict) and name in v}
    said = " and ".join(f"{part}.{name} is {value!r:.60}" for part, value in parts.items())
    refuse(len({*map(repr, parts.values())}) > 1, f"{path}: {said}; say it once")
    return next(iter(parts.values()), None)


def whole(value, path, name):
    """A whole number above 0; None for what is "auto" or not given."""
    if value in (None, "auto"):
        return None
    fits = type(value) in (int, float) and value >= 1 and value % 1 == 0
    refuse(not fits, f"{path}: {name} is {value!r:.60}; give a whole number above 0")
    return int(value)


# --- the JSON files ------------------------------------------------------------------------------


def deepspeed(options):
    """The guide's JSON; with a YAML file its numbers, with --concrete no "auto" is left."""
    check_deepspeed(options)
    micro, steps, clip, precision = numbers(options)
    kinds = {"bf16": {}, "fp16": {"loss_scale": 0}}  # 0: it finds one
    kinds = {kind: more for kind, more in kinds.items() if precision in (None, kind)}
    return {
        "train_micro_batch_size_per_gpu": micro if options.concrete else "auto",
        "gradient_accumulation_steps": steps or 16,
        "gradient_clipping": 0.3 if clip is None else clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **{kind: {"enabled": bool(precision) or "auto", **more} for kind, more in kinds.items()},
        "zero_optimization": zero_optimization(options),
    }


def check_deepspeed(options):
    """The flags by themselves."""
    stage, bucket = options.zero_stage, ("that is whole, above 0", lambda x: x >= 1 and x % 1 == 0)
    buckets = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    cli.check_ranges(options, zero_stage=("from 0 to 3", lambda x: 0 <= x <= 3), **buckets)
    refuse(options.bf16 and options.fp16, "--fp16: --bf16 is given too; give one of them")
    refuse(options.offload_param and stage != 3, "--offload_param: only with --zero_stage 3")
    only = "--offload_optimizer: only with --zero_stage 1, 2 or 3"
    refuse(options.offload_optimizer and stage == 0, only)
    says = "--concrete: no settings to take numbers from; give --config"
    refuse(options.concrete and not options.config, says)


def numbers(options):
    """Batch size, accumulation, clipping and precision of flags and YAML; None: not settled."""
    concrete, path = options.concrete, options.config
    found = read(path) if path else {}
    names = "micro_batch_size", "gradient_accumulation_steps", "max_grad_norm", "mixed_precision"
    micro, steps, clip, precision = (setting(found, path, name) for name in names)
    micro, steps = whole(micro, path, names[0]), whole(steps, path, names[1])
    fits = clip is None or (type(clip) in (int, float) and 0 <= clip < 1e9)
    refuse(not fits, f"{path}: max_grad_norm is {clip!r:.60}; give a number of 0 or more")
    precision = None if precision == "auto" else precision
    asked = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    both = f"--{asked}: {path} says mixed_precision {precision!r:.60}; make them equal"
    refuse(asked and precision not in (None, asked), both)
    for name, value in zip(names, [micro, steps, 0.3, asked or precision], strict=True):
        says = f"--concrete: {path} gives no {name}; write it there, under training"
        refuse(concrete and value is None, says)
    asked = asked or (precision if concrete else None)
    says = f"{path}: mixed_precision is {asked!r:.60}; give bf16, fp16 or no"
    refuse(asked not in (None, "bf16", "fp16", "no"), says)
    return micro, steps, clip, asked


def zero_optimization(options):
    part = {"contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
    part = {"stage": options.zero_stage, **part}
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        part[name] = int(getattr(options, name))  # 5e8 would be no integer
    if options.zero_stage == 3:  # without the last one saved models are empty
        part["stage3_prefetch_bucket_size"] = 50_000_000 if options.concrete else "auto"
        part["stage3_param_persistence_threshold"] = 100_000 if options.concrete else "auto"
        part["stage3_gather_16bit_weights_on_model_save"] = True
    for name in ("offload_optimizer", "offload_param"):
        if getattr(options, name):
            part[name] = {"device": "cpu", "pin_memory": True}
    return part


def fsdp(options):
    """The guide's JSON."""
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
