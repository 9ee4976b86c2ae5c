"""Settings of src/main_distributed.py: edit src/config.py or give any as a flag: --beta 0.3."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError, cli, loggers


@dataclass
class Config:
    # what people change first
    model_name: str = "data/demo/model"  # folder or hub name
    train_data: str = "data/demo/preferences_train.jsonl"  # .jsonl or .json; see docs/dpo.md
    val_data: str = ""  # empty, as is test_data: 5 % of train_data's prompts
    test_data: str = ""  # and 10 % of them; the demo has files of its own
    result_dir: str = "results/dpo"  # curves, metrics, examples, checkpoints
    method: cli.Method = "dpo"  # the loss: docs/dpo.md
    beta: float = 0.1  # how tightly the policy is held to the reference
    learning_rate: float | None = None  # 1e-3 below 10 M parameters, else 1e-6 (full), 1e-5 (lora)
    batch_size: int = 16  # pairs of one forward over all GPUs; divided by their number
    num_epochs: float = 2.0  # passes over the data

    # model
    fine_tuning: Literal["full", "lora"] = "full"  # train all weights, or an adapter
    lora_r: int = 16  # rank
    lora_alpha: int = 32  # the adapter's output counts lora_alpha / lora_r
    lora_dropout: float = 0.0  # 0 keeps runs equal on any number of GPUs
    lora_targets: str = "all-linear"  # or layer names: q_proj,v_proj
    init_adapter: str = ""  # a LoRA to carry on from, such as one from SFT
    reference_model: str = ""  # another reference; empty: the policy before step 0
    output_dir: str = ""  # the fine-tuned model; empty: result_dir/model

    # data
    chat_template: str = "auto"  # auto: the tokenizer's, if it has one; none; or a .jinja file
    chat_template_kwargs: str = ""  # what the template takes, as JSON: {"enable_thinking": false}
    max_length: int = 1024  # tokens of prompt + response
    truncation: Literal["keep_end", "keep_start"] = "keep_end"  # which part of a long prompt stays
    max_rows: int = -1  # read only so many rows of train_data
    shuffle: bool = True  # a new order in every epoch
    on_bad_record: Literal["error", "skip"] = "error"  # what to do with a malformed row
    columns: str = ""  # fields under other names: prompt=question,chosen=response_j
    cache_dir: str = ""  # token ids, for later starts; empty: .tokens beside result_dir

    # loss
    label_smoothing: float | None = None  # cdpo, robust: share of labels that are wrong (0.1)
    lambda_dpop: float | None = None  # dpop, dpopshift: price of a falling chosen log-prob (50)
    lambda_shift: float | None = None  # dposhift, dpopshift: weight of the rejected one (0.75)
    simpo_gamma: float | None = None  # simpo: the margin it asks for (0.5)
    sft_weight: float | None = None  # adds this x -log-prob of the chosen per token; demo 1, else 0
    length_average: bool = False  # log-probs per token instead of summed

    # optimisation
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    max_steps: int = -1  # -1: by num_epochs; 0: evaluate only
    lr_scaling: Literal["linear", "sqrt", "world_size", "none"] = "linear"  # with the global batch
    base_batch_size: int = 16  # the global batch that learning_rate is meant for
    lr_scheduler: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up
    warmup_ratio: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.0  # AdamW, on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not

    # example replies, before and after training
    num_samples: int = 100  # prompts of validation and test data that are answered; 0: none
    max_new_tokens: int = 128  # of a reply
    temperature: float = 1.0  # 0: the most probable word each time
    top_p: float = 1.0  # draw from the smallest set of words with this much probability
    judge: str = ""  # file.py:function, (prompt, response) -> score or {name: score}

    # precision and hardware
    use_mixed_precision: bool = True  # bf16 where the GPU has it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # frozen weights under a LoRA
    layout: Literal["auto", "shared", "separate"] = "auto"  # prompt once, or once per response
    lean: bool = True  # LoRA: keep less for the backward, in the same numbers
    use_gradient_checkpointing: bool = False  # less memory, one more forward
    strategy: Literal["ddp", "fsdp"] = "ddp"  # a model on each GPU, or shared out over all of them
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others

    # run
    eval_every: int = 0  # steps between validations; 0: after each epoch
    save_every: int = 0  # steps between checkpoints; 0: each epoch and every 15 minutes
    keep_checkpoints: int = 2  # the newest ones; older ones are removed
    save_best: bool = False  # end with the weights of the lowest validation loss
    stop_after_minutes: float = 0.0  # save and end with status 85; 0: no limit
    restart: bool = False  # move an unfinished run aside instead of going on with it
    log_every: int = 1  # steps between printed lines; metrics.jsonl has all
    report_to: loggers.Name = "tensorboard"  # live curves, or files alone
    seed: int = 0  # order of the data, split, start of the LoRA
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too


def read(argv: list[str]) -> Config:
    """Return the flags over the defaults; raise UserError for a value out of its range."""
    config = cli.parse(Config, argv)
    check(config)
    return config


def check(config):
    """Raise UserError for a value out of its range, or two that do not go together."""
    cli.check_ranges(config, sft_weight=cli.FROM_0, max_length=(">= 8", lambda x: x >= 8))
    cli.loss_options(config)  # an option that the method does not use is refused
    if not config.result_dir:
        raise UserError("--result_dir: it is empty; give a folder for the run")
    if config.fine_tuning == "full" and config.base_dtype == "bf16":
        raise UserError("--base_dtype bf16: full fine-tuning trains fp32 weights; use auto or fp32")
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_targets"):
        if config.fine_tuning == "full" and getattr(config, name) != getattr(Config, name):
            raise UserError(f"--{name}: there is no adapter; give --fine_tuning lora, or leave it")
    if config.method == "simpo" and config.reference_model:
        raise UserError("--reference_model: simpo has no reference; leave it out")
