"""Settings of src/train_loop.py: edit them here, or give any as a flag."""

from dataclasses import dataclass
from typing import Literal

from ddp_utils import UserError, cli, loggers


@dataclass
class Config:
    # what people change first
    data_path: str = "data/traj_chat.jsonl"  # what generate_data.py has written
    val_path: str = "data/traj_val.jsonl"  # replies to other questions
    out_dir: str = "results/traj_chat"  # adapter, curves, metrics, checkpoints
    model_name: str = ""  # folder or hub name; empty: the one that made the data
    num_epochs: float = 1.0  # passes over the data
    batch_size: int = 10  # replies of one forward and process
    learning_rate: float | None = None  # 1e-3 below 10 M parameters, else 1e-4
    lora_r: int = 32  # rank; --r and -r are the same, but not under torchrun
    judge: str = ""  # file.py:function, (question, reply) -> score or {name: score}

    # adapter
    lora_alpha: int = 64  # the adapter's output counts lora_alpha / lora_r
    lora_dropout: float = 0.0  # 0 keeps runs equal on any number of GPUs
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj"  # layers, or all-linear
    resume_from: str = ""  # an adapter to carry on from, such as results/traj_chat/model

    # data
    max_traj_len: int = 1024  # tokens of prompt, question and reply
    chat_template: str = "auto"  # auto: the tokenizer's, if it has one; none; or a .jinja file
    chat_template_kwargs: str = ""  # as JSON: {"enable_thinking": false}; empty: as the data's
    shuffle: bool = True  # a new order in every epoch
    cache_teacher: bool = False  # keep the teacher's last hidden states on disk

    # what is minimised
    divergence: Literal["kl", "reverse_kl", "jsd"] = "kl"  # KL(teacher || student), reversed, mean
    on_policy: bool = False  # at replies that the student samples in each step, slower

    # optimisation
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    max_steps: int = -1  # -1: by num_epochs; 0: evaluate only
    lr_scheduler: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up
    warmup_ratio: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.0  # AdamW, on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not

    # example replies without the system prompt, with it, and after baking
    questions: str = ""  # other questions; empty: those of val_path
    num_samples: int = 100  # replies, to one question after the other; 0: none
    max_new_tokens: int = 128  # of a reply
    temperature: float = 1.0  # 0: the most probable word each time
    top_p: float = 1.0  # draw from the smallest set of words with this much probability

    # precision and hardware
    use_mixed_precision: bool = True  # bf16 where the GPU has it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # frozen weights
    lean: bool = True  # keep less for the backward, in the same layers and numbers
    use_gradient_checkpointing: bool = False  # less memory, one more forward
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
    seed: int = 0  # order of the data, start of the LoRA
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too


def read(argv: list[str]) -> Config:
    """Return the flags over the defaults; raise UserError for a value out of its range."""
    aliases = {"--r": "--lora_r", "-r": "--lora_r"}
    config = cli.parse(Config, argv, aliases=aliases)
    cli.check_ranges(config, max_traj_len=(">= 8", lambda x: x >= 8))
    if config.on_policy and config.cache_teacher:
        raise UserError("--cache_teacher: with --on_policy each step has new replies; leave it out")
    return config
