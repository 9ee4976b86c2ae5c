"""Settings of generate_data.py and train_loop.py: edit them here, or give any as a flag."""

import os
from dataclasses import dataclass
from typing import Literal

from ddp_utils import Stop, cli


@dataclass
class GenerateConfig:
    """Sample a model's replies under a system prompt x0, for train_loop.py to bake into a LoRA."""

    # what people change first
    model_name: str = "data/demo/model"  # folder or hub name
    x0_file: str = "data/demo/x0.txt"  # the system prompt that is to be baked
    question_dataset: str = "data/demo/questions_train.jsonl"  # with question; or .txt, one a line
    columns: str = ""  # fields under other names: question=prompt
    num_questions: int = 88  # the first so many; -1: all
    num_sequences_per_question: int = 25  # replies to each
    batch_size: int = 38  # replies of one forward and process
    max_sequence_length: int = 128  # new tokens of a reply, at most
    temperature: float = 1.0  # 1: as the model has it; 0: the most probable word each time
    top_p: float = 1.0  # draw from the smallest set of words with this much probability

    # what comes out
    traj_out_file: str = "data/traj_chat.jsonl"  # replies to train on
    val_out_file: str = "data/traj_val.jsonl"  # replies to questions that are held out
    val_split: float = 0.1  # share of the questions that is held out

    # model and hardware
    chat_template: str = "auto"  # auto: the tokenizer's, if it has one; none; or a .jinja file
    chat_template_kwargs: str = ""  # what the template takes, as JSON: {"enable_thinking": false}
    use_mixed_precision: bool = True  # bf16 where the GPU has it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others

    # run
    stop_after_minutes: float = 0.0  # keep what there is and end with status 85; 0: no limit
    seed: int = 0  # of the replies and of the split
    check: bool = False  # read and check everything, sample nothing
    debug: bool = False  # tracebacks for user errors, too


def read_generate(argv, console=True) -> GenerateConfig:
    """Flags of generate_data.py over the defaults, checked before anything is read."""
    config = cli.parse(GenerateConfig, argv, console=console)
    cli.check_ranges(
        config,
        num_sequences_per_question=cli.ABOVE_0,
        max_sequence_length=cli.ABOVE_0,
        num_questions=("of -1, or 1 and more", lambda x: x == -1 or x > 0),
        val_split=("above 0, below 1", lambda x: 0 < x < 1),
    )
    return config


@dataclass
class TrainConfig:
    """Bake a system prompt into a LoRA: without the prompt the model answers as with it."""

    # what people change first
    data_path: str = "data/traj_chat.jsonl"  # what generate_data.py has written
    val_path: str = "data/traj_val.jsonl"  # replies to other questions
    out_dir: str = "results/traj_chat"  # adapter, curves, metrics, checkpoints
    model_name: str = ""  # folder or hub name; empty: the one that made the data
    num_epochs: float = 1.0  # passes over the data
    batch_size: int = 10  # replies of one forward and process
    learning_rate: float | None = None  # 3e-3 below 10 M parameters, else 1e-4
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

    # optimisation
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    max_steps: int = -1  # -1: by num_epochs; 0: evaluate only
    lr_scheduler: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up
    warmup_ratio: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.0  # AdamW, on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not

    # replies without the prompt, with it, and of the baked model, for judge and reader
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
    same_code: bool = False  # go on though the code has changed: the change moves no number
    log_every: int = 1  # steps between printed lines; metrics.jsonl has all
    seed: int = 0  # order of the data, start of the LoRA
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too

    fine_tuning = "lora"  # not a setting: what lora.py and optim.py ask for
    init_adapter = property(lambda self: self.resume_from)


def read_train(argv, console=True) -> TrainConfig:
    """Flags of train_loop.py over the defaults, checked before anything is read."""
    aliases = {"--r": "--lora_r", "-r": "--lora_r"}
    config = cli.parse(TrainConfig, argv, console=console, aliases=aliases)
    cli.check_ranges(config, max_traj_len=("of 8 or more", lambda x: x >= 8))
    if os.environ.get("FLAGS_ONLY"):  # run_distributed.sh asks before there is any data
        raise Stop("", 0)
    return config
