"""Settings of src/main_distributed.py: edit the defaults here, or use flags such as --beta 0.3."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ddp_utils import UserError, cli, data
from lm import settings

# constants, so that an edited default of train_data is not the demo
DEMO_TRAIN = "data/demo/preferences_train.jsonl"
DEMO_JUDGE = "data/demo/judge.py:score"  # of the replies to the demo's prompts


@dataclass
class Config:
    # most used settings
    model_name: str = "data/demo/model"  # folder or Hugging Face name of the model
    train_data: str = "data/demo/preferences_train.jsonl"  # preference pairs; see docs/data.md
    val_data: str = ""  # validation pairs; 5 % of train_data if val_data and test_data are empty
    test_data: str = ""  # test pairs; 10 % of train_data if val_data and test_data are empty
    result_dir: str = "results/dpo"  # folder for metrics, plots, example replies and checkpoints
    method: cli.Method = "dpo"  # loss function; see docs/dpo.md
    beta: float = 0.1  # strength of the KL penalty; higher keeps the policy closer to the reference
    learning_rate: float | None = None  # peak; None: full 5e-6, LoRA 2e-4, demo's model 1e-3
    batch_size: int = 16  # pairs per forward pass, summed over all processes
    num_epochs: float = 2.0  # passes over the training data

    # model
    fine_tuning: Literal["full", "lora"] = "full"  # train all weights or a LoRA adapter
    lora_r: int = 16  # rank of the LoRA
    lora_alpha: int = 32  # the output of the LoRA is scaled by lora_alpha / lora_r
    lora_dropout: float = 0.0  # dropout in the LoRA; 0 gives equal results on any number of GPUs
    lora_targets: str = "all-linear"  # layers with a LoRA: all-linear, or names: q_proj,v_proj
    init_adapter: str = ""  # LoRA to continue from, for example from supervised fine-tuning
    reference_model: str = ""  # reference model; empty: the policy before training
    output_dir: str = ""  # folder for the fine-tuned model; empty: result_dir/model

    # data
    chat_template: str = "auto"  # auto: the tokenizer's, if any; or none, a .jinja file, or a name
    chat_template_kwargs: str = ""  # template arguments as JSON, such as {"enable_thinking": false}
    keep_thoughts: bool = False  # keep thoughts in replies that the chat template would remove
    max_length: int = 1024  # maximum tokens of prompt + response
    truncation: Literal["keep_end", "keep_start"] = "keep_end"  # part of a long prompt that is kept
    max_rows: int = -1  # use only the first rows of train_data; -1: all
    max_eval_rows: int = -1  # evaluate only the first rows of val and test data; -1: all
    shuffle: bool = True  # shuffle the data in every epoch
    on_bad_record: Literal["error", "skip"] = "error"  # stop at a malformed row, or skip it
    columns: str = ""  # other names of data fields, such as prompt=question,chosen=response_j
    extra_fields: str = ""  # data fields for loss_of, in Pair.extra, such as importance,source
    cache_dir: str = ""  # cache of token ids; empty: the folder .tokens next to result_dir

    # loss options
    label_smoothing: float | None = None  # cdpo, robust: fraction of wrong labels (None: 0.1)
    lambda_dpop: float | None = None  # dpop, dpopshift: weight of the penalty (None: 50)
    lambda_shift: float | None = None  # dposhift, dpopshift: weight of rejected (None: 0.75)
    simpo_gamma: float | None = None  # simpo: target reward margin (None: 0.5)
    sft_weight: float | None = None  # weight of the NLL of chosen (None: 0; orpo, demo: 1)
    length_average: bool = False  # average log-probs over response tokens instead of summing

    # optimization
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    max_steps: int = -1  # optimizer steps; -1: from num_epochs; 0: evaluate only
    lr_scaling: Literal["linear", "sqrt", "world_size", "none"] = "linear"  # how the rate is scaled
    base_batch_size: int = 16  # global batch size for which learning_rate is meant
    lr_scheduler: Literal["constant", "linear", "cosine"] = "linear"  # schedule after the warm-up
    warmup_ratio: float = 0.1  # fraction of the steps for the linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay of weight matrices
    max_grad_norm: float = 1.0  # clip the gradient norm at this value; 0: no clipping

    # example replies before and after training
    num_samples: int | None = None  # prompts per split; None: 16, with a judge 100; 0: none
    max_new_tokens: int = 128  # maximum tokens per reply
    sample_batch_size: int | None = None  # replies per forward pass; None: as many as fit, up to 64
    temperature: float = 0.7  # sampling temperature; 0: greedy decoding
    top_p: float = 1.0  # nucleus sampling: smallest set of tokens with this probability
    judge: str = ""  # file.py:function that maps (prompt, response) to a score or {name: score}

    # precision and hardware
    use_mixed_precision: bool = True  # bf16 if the GPU supports it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16", "4bit"] = "auto"  # of frozen weights; 4bit: QLoRA
    layout: Literal["auto", "shared", "separate"] = "auto"  # compute a pair's prompt once, or twice
    lean: bool = True  # store fewer activations for LoRA; results are unchanged
    use_gradient_checkpointing: bool = False  # recompute activations to save memory; slower
    strategy: Literal["ddp", "fsdp", "deepspeed"] = "ddp"  # replicate the model, or shard it
    sharding_config: str = ""  # FSDP or DeepSpeed file; see scripts/distributed_setup.py
    grad_reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # of sent gradients (DDP, FSDP)
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # auto: by device
    timeout_minutes: float = 30.0  # time limit of a collective operation

    # run
    eval_every: int = 0  # steps between validations; 0: after each epoch
    save_every: int = 0  # steps between checkpoints; 0: after each epoch and every 15 minutes
    keep_checkpoints: int = 2  # number of most recent checkpoints to keep
    save_best: bool = False  # save the weights with the lowest validation loss
    stop_after_minutes: float = 0.0  # save and exit with status 85 after this time; 0: no limit
    restart: bool = False  # start from scratch; the old run folder is renamed
    log_every: int = 0  # steps between printed lines; 0: about 30 lines in all
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # logger besides the files
    seed: int = 0  # random seed of data order, data split and LoRA initialization
    deterministic: bool = False  # use deterministic kernels; slower
    config: str = ""  # YAML file of settings, `name: value` lines; flags override its values
    check: bool = False  # read and check everything, then exit without training
    debug: bool = False  # show a traceback for user errors

    # read() sets these: what sharding_config contains, lines about it, and the precision, which
    # that file can set, too
    sharding = cast(Any, None)
    notes = cast(list[str], [])
    mixed_precision = cast(str, "auto")

    @property
    def in_4_bits(self) -> bool:
        return self.base_dtype == "4bit"

    @property
    def gradient_checkpointing(self) -> bool:
        return self.use_gradient_checkpointing


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the settings: flags over the YAML file over the defaults, and the sharding_config.

    Raises UserError for values that cannot be used.
    """
    config, places = cli.parse_with_file(Config, argv)
    with cli.located(places):
        read_sharding(config, places)
        check(config)
    cli.check_accelerate(config.strategy)
    is_demo = data.is_same_file(config.train_data, DEMO_TRAIN)
    if is_demo and not (config.val_data or config.test_data):
        config.val_data = "data/demo/preferences_val.jsonl"
        config.test_data = "data/demo/preferences_test.jsonl"
        config.judge = config.judge or DEMO_JUDGE
    if is_demo and config.sft_weight is None:
        config.sft_weight = 1.0  # plain DPO spoils the replies: docs/displacement.md
    if config.num_samples is None:  # a person reads some, an interval needs many
        config.num_samples = 100 if config.judge else 16
    return config


def read_sharding(config: Config, places: cli.Places) -> None:
    """Read sharding_config; it sets what neither flags nor YAML set."""
    config.mixed_precision = "auto" if config.use_mixed_precision else "no"
    if not config.use_mixed_precision:
        places["mixed_precision"] = places.get("use_mixed_precision", "use_mixed_precision")
    if config.strategy == "ddp":
        if config.sharding_config:
            raise UserError("--sharding_config: it needs --strategy fsdp or deepspeed")
        return
    if config.strategy == "deepspeed" and not config.sharding_config:
        raise UserError("--strategy: deepspeed needs a file, too; set --sharding_config")
    from lm.sharding import settings as files

    config.notes = files.read(config, config.strategy, config.sharding_config, places)


def check(config: Config) -> None:
    """Raise UserError for a value out of its range, or for values that exclude each other."""
    at_least_8 = (">= 8", lambda x: x >= 8)
    cli.check_ranges(config, result_dir=cli.FOLDER, sft_weight=cli.FROM_0, max_length=at_least_8)
    cli.loss_options(config)
    if config.fine_tuning == "full" and config.base_dtype in ("bf16", "4bit"):
        raise UserError("--base_dtype: full fine-tuning trains fp32 weights; use auto or fp32")
    settings.check_strategy(config, "base_dtype", "auto")
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_targets"):
        if config.fine_tuning == "full" and getattr(config, name) != getattr(Config, name):
            raise UserError(f"--{name}: there is no LoRA; use --fine_tuning lora, or leave it out")
    if config.method in cli.REFERENCE_FREE and config.reference_model:
        raise UserError(f"--reference_model: {config.method} has no reference; leave it out")
