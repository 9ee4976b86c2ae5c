"""Settings of src/train.py: the sections of its YAML file; each setting is also a flag."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ddp_utils import UserError, cli
from lm import settings

# settings of DPO that this script had; others that it lacks have another name here
OF_DPO = {"method", "beta", "reference_model", "label_smoothing", "lambda_dpop", "lambda_shift"}
OF_DPO |= {"simpo_gamma", "sft_weight", "length_average", "judge"}


@dataclass
class Model:
    # section model
    model_name: str = "data/demo/model"  # folder or Hugging Face name of the model
    init_adapter: str = ""  # LoRA to continue from
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # precision of frozen weights under a LoRA


@dataclass
class FineTuning:
    # section fine_tuning
    type: Literal["lora", "full", "qlora"] = "lora"  # LoRA, all weights, or LoRA on 4-bit weights
    lora_r: int = 16  # rank of the LoRA
    lora_alpha: int = 32  # the output of the LoRA is scaled by lora_alpha / lora_r
    lora_dropout: float = 0.0  # dropout in the LoRA; 0 gives equal results on any number of GPUs
    lora_targets: str = "all-linear"  # layers with a LoRA: all-linear, or names: q_proj,v_proj


@dataclass
class Training:
    # section training
    objective: Literal["sft"] = "sft"  # supervised fine-tuning; for DPO: main_distributed.py
    micro_batch_size: int = 4  # rows per forward pass and process
    num_epochs: float = 3.0  # passes over the training data
    max_steps: int = -1  # optimizer steps; -1: from num_epochs; 0: evaluate only
    learning_rate: float | None = None  # peak; None: full 2e-5, LoRA 2e-4, demo's model 1e-3
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"  # schedule after the warm-up
    warmup_ratio: float = 0.1  # fraction of the steps for the linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay of weight matrices
    max_grad_norm: float = 1.0  # clip the gradient norm at this value; 0: no clipping
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"  # auto: by GPU; no on a CPU
    gradient_checkpointing: bool = False  # recompute activations to save memory; slower
    lean: bool = True  # store fewer activations for LoRA; results are unchanged
    layout: Literal["auto", "shared", "separate"] = "auto"  # rows packed without padding, or padded
    seed: int = 0  # random seed of data order, data split and LoRA initialization
    shuffle: bool = True  # shuffle the data in every epoch
    deterministic: bool = False  # use deterministic kernels; slower


@dataclass
class Dataset:
    # section dataset
    train_data: str = "data/demo/instructions.jsonl"  # training data; see docs/data.md
    val_data: str = ""  # validation data; empty: val_share of train_data
    val_share: float = 0.05  # fraction of the prompts held out if val_data is empty; 0: none
    chat_template: str = "auto"  # auto: the tokenizer's, if any; or none, a .jinja file, or a name
    chat_template_kwargs: str = ""  # template arguments as JSON, such as {"enable_thinking": false}
    keep_thoughts: bool = False  # keep thoughts in replies that the chat template would remove
    max_length: int = 1024  # maximum tokens of prompt + response
    truncation: Literal["keep_end", "keep_start"] = "keep_end"  # part of a long prompt that is kept
    max_rows: int = -1  # use only the first rows of train_data; -1: all
    max_eval_rows: int = -1  # evaluate only the first rows of validation data; -1: all
    on_bad_record: Literal["error", "skip"] = "error"  # stop at a malformed row, or skip it
    columns: str = ""  # other names of data fields, such as prompt=question,chosen=response_j
    cache_dir: str = ""  # cache of token ids; empty: the folder .tokens next to output_dir


@dataclass
class Distributed:
    # section distributed
    use_deepspeed: bool = False  # shard with DeepSpeed ZeRO, according to deepspeed_config
    deepspeed_config: str = ""  # JSON file from scripts/distributed_setup.py deepspeed
    use_fsdp: bool = False  # shard with FSDP2, according to fsdp_config
    fsdp_config: str = ""  # JSON file from scripts/distributed_setup.py fsdp; empty: FULL_SHARD
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    bucket_mb: float = 25.0  # DDP: size of a gradient bucket in MiB
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of sent gradients (DDP, FSDP)
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # auto: by device
    timeout_minutes: float = 30.0  # time limit of a collective operation


@dataclass
class Output:
    # section output
    output_dir: str = "results/train"  # folder for model, metrics, plots and checkpoints
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # logger besides the files
    eval_every: int = 0  # steps between validations; 0: after each epoch
    save_every: int = 0  # steps between checkpoints; 0: after each epoch and every 15 minutes
    keep_checkpoints: int = 2  # number of most recent checkpoints to keep
    save_best: bool = False  # save the weights with the lowest validation loss
    log_every: int = 0  # steps between printed lines; 0: about 30 lines in all
    stop_after_minutes: float = 0.0  # save and exit with status 85 after this time; 0: no limit


# the sections of the YAML file
SECTIONS = {"model": Model, "fine_tuning": FineTuning, "training": Training}
SECTIONS |= {"dataset": Dataset, "distributed": Distributed, "output": Output}


@dataclass
class Config(Output, Distributed, Dataset, Training, FineTuning, Model):
    # only flags, not in the YAML file
    config: str = "config.yaml"  # YAML file; flags override its values
    deepspeed: str = ""  # JSON file; sets use_deepspeed and deepspeed_config
    restart: bool = False  # start from scratch; the old run folder is renamed
    check: bool = False  # read and check everything, then exit without training
    debug: bool = False  # show a traceback for user errors

    # read() sets these: the JSON file of FSDP or DeepSpeed, warnings about its keys, and for each
    # setting its `file:line: section.name`, or the flag that set it
    sharding = cast(Any, None)
    notes = cast(list[str], [])
    places = cast(dict[str, str], {})

    @property
    def strategy(self) -> str:
        if self.use_deepspeed:
            return "deepspeed"
        return "fsdp" if self.use_fsdp else "ddp"

    @property
    def sharding_config(self) -> str:
        return self.deepspeed_config if self.use_deepspeed else self.fsdp_config

    @property
    def in_4_bits(self) -> bool:
        return self.type == "qlora"

    @property
    def fine_tuning(self) -> str:
        return "full" if self.type == "full" else "lora"

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the checked settings: flags over the YAML file over the JSON file.

    Raises UserError for values out of range, without effect, or different in two places, and for
    the settings of DPO that this script had.
    """
    # in src/, as the guide to Algorithm Distillation writes it
    if sys.argv == ["train.py"] and os.path.exists("ad/train.py"):
        here = "the train.py of this folder is supervised fine-tuning"
        fix = "for Algorithm Distillation use ad/train.py; for this one add --config config.yaml"
        raise UserError(f"train.py: {here}; {fix}")
    try:
        config, places = cli.parse_with_file(Config, argv, SECTIONS)
    except UserError as error:
        problem = "is not a setting|'dpo' is not|invalid choice: 'dpo'"
        of_dpo = re.match(rf"(.*?(\w+)):? ({problem})", str(error))
        if not of_dpo or not (of_dpo[2] in OF_DPO or "'dpo'" in of_dpo[3]):
            raise
        new = "src/main_distributed.py --strategy ddp, fsdp or deepspeed"
        raise UserError(f"{of_dpo[1]}: DPO is another script; use {new}") from error
    with cli.located(places):
        read_sharding(config)
        check(config)
    cli.check_accelerate(config.strategy)
    return config


def read_sharding(config: Config) -> None:
    """Read the JSON file of FSDP or DeepSpeed; it sets what neither flags nor YAML set."""
    if config.deepspeed:
        config.use_deepspeed = True
        config.deepspeed_config = config.deepspeed
        config.places["use_deepspeed"] = "--deepspeed"
    for kind in ("deepspeed", "fsdp"):  # in YAML `use_fsdp: false` keeps the file's name for later
        is_flag = config.places.get(f"{kind}_config", "").startswith("--")
        is_for_later = f"use_{kind}" in config.places and not is_flag
        is_used = getattr(config, f"use_{kind}") or is_for_later
        if getattr(config, f"{kind}_config") and not is_used:
            raise UserError(f"--{kind}_config: it has no effect without use_{kind}")
    if config.use_fsdp and config.use_deepspeed:
        raise UserError(f"--use_fsdp: {config.places['use_deepspeed']} is set, too; use one")
    if config.use_deepspeed and not config.deepspeed_config:
        raise UserError("--use_deepspeed: set deepspeed_config, too")
    if config.strategy != "ddp":
        from lm.sharding import settings as files

        config.notes = files.read(config, config.strategy, config.sharding_config, config.places)


def check(config: Config) -> None:
    """Raise UserError for a value out of its range, or for values that exclude each other."""
    cli.check_ranges(
        config,
        micro_batch_size=cli.ABOVE_0,
        bucket_mb=cli.ABOVE_0,
        max_length=(">= 8", lambda x: x >= 8),
        val_share=(">= 0 and <= 0.5", lambda x: 0 <= x <= 0.5),
        output_dir=cli.FOLDER,
    )
    if config.type == "full" and config.base_dtype == "bf16":
        raise UserError("--base_dtype: full fine-tuning trains fp32 weights; use auto or fp32")
    settings.check_strategy(config, "type", "lora")
    if config.type == "full":
        lora = "lora_r", "lora_alpha", "lora_dropout", "lora_targets"
        cli.note_unused(config, "type is full: there is no LoRA", *lora)
    if config.strategy != "ddp":
        from lm.sharding.settings import shards

        if shards(config.strategy, config.sharding):
            cli.note_unused(config, f"{config.strategy} has its own buckets", "bucket_mb")
    if config.val_data:
        cli.note_unused(config, "val_data is set", "val_share")
    elif not config.val_share:
        cli.note_unused(config, "there are no validation data", "eval_every", "max_eval_rows")
