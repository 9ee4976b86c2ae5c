"""Settings of src/train.py: the sections of its YAML file; each setting is a flag, too."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from ddp_utils import UserError, cli, loggers, yaml_config


@dataclass
class Model:
    # section model
    model_name: str = "data/demo/model"  # folder or hub name
    init_adapter: str = ""  # a LoRA to carry on from
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # frozen weights under a LoRA


@dataclass
class FineTuning:
    # section fine_tuning
    type: Literal["lora", "full", "qlora"] = "lora"  # an adapter, all weights, or on 4-bit weights
    lora_r: int = 16  # rank
    lora_alpha: int = 32  # the adapter's output counts lora_alpha / lora_r
    lora_dropout: float = 0.0  # 0 keeps runs equal on any number of GPUs
    lora_targets: str = "all-linear"  # or layer names: q_proj,v_proj


@dataclass
class Training:
    # section training
    objective: Literal["sft", "dpo"] = "sft"  # imitate replies, or prefer one of two
    micro_batch_size: int = 4  # rows of one forward and process
    micro_batch_tokens: int = 0  # split these where they have more tokens; 0: do not
    num_epochs: float = 3.0  # passes over the data
    max_steps: int = -1  # -1: by num_epochs; 0: evaluate only
    learning_rate: float | None = None  # 1e-3 below 10 M parameters, else by objective and type
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    warmup_ratio: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.0  # AdamW, on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"  # auto: by the GPU; CPU: no
    gradient_checkpointing: bool = False  # less memory, one more forward
    lean: bool = True  # LoRA: keep less for the backward, in the same numbers
    layout: Literal["auto", "shared", "separate"] = "auto"  # rows without padding, or with
    seed: int = 0  # order of the data, split, start of the LoRA
    shuffle: bool = True  # a new order in every epoch
    deterministic: bool = False  # deterministic kernels, slower
    # section training, objective dpo
    method: cli.Method = "dpo"  # the loss: docs/dpo.md
    beta: float = 0.1  # how tightly the policy is held to the reference
    label_smoothing: float | None = None  # cdpo, robust: share of labels that are wrong (0.1)
    lambda_dpop: float | None = None  # dpop, dpopshift: price of a falling chosen log-prob (50)
    lambda_shift: float | None = None  # dposhift, dpopshift: weight of the rejected one (0.75)
    simpo_gamma: float | None = None  # simpo: the margin it asks for (0.5)
    sft_weight: float = 0.0  # adds this x -log-prob of the chosen per token
    length_average: bool = False  # log-probs per token instead of summed


@dataclass
class Dataset:
    # section dataset
    train_data: str = "data/demo/instructions.jsonl"  # .json or .jsonl
    val_data: str = ""  # empty: val_share of train_data
    val_share: float = 0.05  # of the prompts, if val_data is empty; 0: none
    chat_template: str = "auto"  # auto: the tokenizer's, if it has one; none; or a .jinja file
    chat_template_kwargs: str = ""  # what the template takes, as JSON: {"enable_thinking": false}
    max_length: int = 1024  # tokens of prompt + response
    truncation: Literal["keep_end", "keep_start"] = "keep_end"  # which part of a long prompt stays
    max_rows: int = -1  # read only so many rows of train_data
    on_bad_record: Literal["error", "skip"] = "error"  # what to do with a malformed row
    columns: str = ""  # fields under other names: prompt=question,chosen=response_j
    cache_dir: str = ""  # token ids, for later starts; empty: .tokens beside output_dir


@dataclass
class Distributed:
    # section distributed
    use_deepspeed: bool = False  # ZeRO, as deepspeed_config says
    deepspeed_config: str = ""  # JSON of scripts/distributed_setup.py deepspeed
    use_fsdp: bool = False  # FSDP2, as fsdp_config says
    fsdp_config: str = ""  # JSON of scripts/distributed_setup.py fsdp; empty: FULL_SHARD
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    bucket_mb: float = 25.0  # DDP: gradients that travel together
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # DDP, FSDP: in which they travel
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others


@dataclass
class Output:
    # section output
    output_dir: str = "results/train"  # model, curves, metrics, checkpoints
    report_to: loggers.Name = "tensorboard"  # live curves, or files alone
    eval_every: int = 0  # steps between validations; 0: after each epoch
    save_every: int = 0  # steps between checkpoints; 0: each epoch and every 15 minutes
    keep_checkpoints: int = 2  # the newest ones; older ones are removed
    save_best: bool = False  # end with the weights of the lowest validation loss
    log_every: int = 1  # steps between printed lines; metrics.jsonl has all
    stop_after_minutes: float = 0.0  # save and end with status 85; 0: no limit


@dataclass
class Sections:
    """The YAML file."""

    model: Model = field(default_factory=Model)
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    training: Training = field(default_factory=Training)
    dataset: Dataset = field(default_factory=Dataset)
    distributed: Distributed = field(default_factory=Distributed)
    output: Output = field(default_factory=Output)


@dataclass
class Config(Output, Distributed, Dataset, Training, FineTuning, Model):
    # flags alone: they belong to a start, not to a run
    config: str = "config.yaml"  # the YAML file; flags go before it
    deepspeed: str = ""  # as use_deepspeed with this deepspeed_config
    restart: bool = False  # move an unfinished run aside instead of going on with it
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too

    # not settings:
    sharding = None  # what FSDP or DeepSpeed is told
    places = {}  # setting -> file and line, or flag, that gave it
    reference_model = ""  # the policy before step 0
    # what lora.py and others ask for
    batch_size = property(lambda self: self.micro_batch_size)
    fine_tuning = property(lambda self: "full" if self.type == "full" else "lora")
    use_gradient_checkpointing = property(lambda self: self.gradient_checkpointing)

    @property
    def strategy(self):
        return "deepspeed" if self.use_deepspeed else "fsdp" if self.use_fsdp else "ddp"


def read(argv: list[str]) -> Config:
    """Return the checked settings: flags over the YAML file over DeepSpeed's or FSDP's JSON.

    Raises UserError for what is out of range, given twice and differently, or without effect.
    """
    config = merged(argv)
    with cli.located(config.places):
        check(config)
    return config


def merged(argv: list[str]) -> Config:
    """Return the settings of flags, YAML and JSON; other rules are not checked yet."""
    config, places = yaml_config.under_flags(Config, Sections, argv)
    config.places = places
    choose_sharding(config, places)
    return config


def choose_sharding(config, places):
    """Read the JSON of the strategy: it gives what neither flags nor YAML do.

    places: setting -> file and line, or flag, that gave it.
    """
    if config.deepspeed:
        config.use_deepspeed = True
        config.deepspeed_config = config.deepspeed
        places["use_deepspeed"] = "--deepspeed"
    for kind in ("deepspeed", "fsdp"):
        place = places.get(f"{kind}_config", "")
        # a file that waits beside `use_fsdp: false` is no mistake, a flag is
        is_waiting = f"use_{kind}" in places and not place.startswith("--")
        if place and not getattr(config, f"use_{kind}") and not is_waiting:
            raise UserError(f"{place} has no effect alone; give use_{kind}, too")
    if config.use_deepspeed and config.use_fsdp:
        both = f"{places['use_deepspeed']} and {places['use_fsdp']}"
        raise UserError(f"{both} exclude each other; leave one of them out")
    if config.use_fsdp:
        from ddp_utils.sharding import fsdp, json_settings

        config.sharding = fsdp.read(config.fsdp_config)
        config.gradient_checkpointing |= config.sharding.fsdp_activation_checkpointing
        given = {"mixed_precision": ("fsdp_mixed_precision", config.sharding.precision)}
        json_settings.take(config, given, config.fsdp_config, places)
    if config.use_deepspeed:
        from ddp_utils.sharding import deepspeed, json_settings

        if not config.deepspeed_config:
            raise UserError(f"{places['use_deepspeed']}: give deepspeed_config, too")
        config.sharding = deepspeed.read(config.deepspeed_config)
        given = deepspeed.given(config.sharding)
        json_settings.take(config, given, config.deepspeed_config, places)


def check(config):
    """Raise UserError for a value out of its range, or two that do not go together."""
    cli.check_ranges(
        config,
        micro_batch_size=cli.ABOVE_0,
        micro_batch_tokens=cli.FROM_0,
        bucket_mb=cli.ABOVE_0,
        max_length=(">= 8", lambda x: x >= 8),
        val_share=(">= 0 and <= 0.5", lambda x: 0 <= x <= 0.5),
        sft_weight=cli.FROM_0,
    )
    cli.loss_options(config)  # an option that the method does not use is refused
    if not config.output_dir:
        raise UserError("--output_dir: it is empty; give a path")
    if config.type == "full" and config.base_dtype == "bf16":
        raise UserError("--base_dtype bf16: full fine-tuning trains fp32 weights; use auto or fp32")
    if config.type == "qlora" and config.strategy != "ddp":
        raise UserError(f"--type: {config.strategy} cannot shard 4-bit weights; give lora")
    if config.type == "qlora":
        import torch

        if not (torch.cuda.is_available() and find_spec("bitsandbytes")):
            raise UserError("--type: qlora needs bitsandbytes and a CUDA device; give lora")
    if config.strategy == "deepspeed" and config.grad_reduce_dtype != "fp32":
        says = "DeepSpeed's is communication_data_type in its JSON; leave it out"
        raise UserError(f"--grad_reduce_dtype: {says}")
    for name, usual in (("method", "dpo"), ("sft_weight", 0), ("length_average", False)):
        if config.objective == "sft" and getattr(config, name) != usual:
            raise UserError(f"--{name}: it belongs to objective dpo; leave it out")
