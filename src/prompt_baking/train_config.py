"""Settings of src/train_loop.py: edit the defaults here, or use flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_utils import cli


@dataclass
class Config:
    # most used settings
    data_path: str = "data/traj_chat.jsonl"  # training replies of generate_data.py
    val_path: str = "data/traj_val.jsonl"  # replies to held-out questions
    out_dir: str = "results/traj_chat"  # folder for adapter, metrics, plots and checkpoints
    model_name: str = ""  # folder or Hugging Face name; empty: the model that wrote the replies
    num_epochs: float = 1.0  # passes over the training data
    batch_size: int = 10  # replies per forward pass and process
    learning_rate: float | None = None  # peak learning rate; None: 1e-3
    lora_r: int = 32  # rank of the LoRA; without torchrun, --r and -r are aliases
    judge: str = ""  # file.py:function that maps (question, reply) to a score or {name: score}

    # adapter
    lora_alpha: int = 64  # the output of the LoRA is scaled by lora_alpha / lora_r
    lora_dropout: float = 0.0  # dropout in the LoRA; 0 gives equal results on any number of GPUs
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj"  # layers with a LoRA, or all-linear
    resume_from: str = ""  # LoRA to continue from, such as results/traj_chat/model

    # data
    max_traj_len: int = 1024  # maximum tokens of system prompt + question + reply
    chat_template: str = "auto"  # auto: the tokenizer's, if any; or none, a .jinja file, or a name
    chat_template_kwargs: str = ""  # template arguments as JSON; empty: as in the data
    shuffle: bool = True  # shuffle the data in every epoch

    # objective
    divergence: Literal["kl", "reverse_kl", "jsd"] = "kl"  # KL(teacher || student), reverse, or JSD
    on_policy: bool = False  # train on replies that the student samples in each step; slower

    # optimization
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    max_steps: int = -1  # optimizer steps; -1: from num_epochs; 0: evaluate only
    lr_scheduler: Literal["constant", "linear", "cosine"] = "linear"  # schedule after the warm-up
    warmup_ratio: float = 0.1  # fraction of the steps for the linear warm-up
    weight_decay: float = 0.0  # AdamW weight decay of weight matrices
    max_grad_norm: float = 1.0  # clip the gradient norm at this value; 0: no clipping

    # example replies with the system prompt, without it, and of the baked model
    questions: str = ""  # file of questions to answer; empty: the questions of val_path
    num_samples: int | None = None  # replies of each model; None: 16, with a judge 100; 0: none
    max_new_tokens: int = 128  # maximum tokens per reply
    sample_batch_size: int | None = None  # replies per forward pass; None: as many as fit, up to 64
    temperature: float = 0.7  # sampling temperature; 0: greedy decoding
    top_p: float = 1.0  # nucleus sampling: smallest set of tokens with this probability

    # precision and hardware
    use_mixed_precision: bool = True  # bf16 if the GPU supports it, else fp16; fp32 on a CPU
    base_dtype: Literal["auto", "fp32", "bf16"] = "auto"  # precision of frozen weights
    lean: bool = True  # store fewer activations for LoRA; results are unchanged
    use_gradient_checkpointing: bool = False  # recompute activations to save memory; slower
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
    seed: int = 0  # random seed of data order and LoRA initialization
    deterministic: bool = False  # use deterministic kernels; slower
    config: str = ""  # YAML file of settings, `name: value` lines; flags override its values
    check: bool = False  # read and check everything, then exit without training
    debug: bool = False  # show a traceback for user errors


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the settings: flags over the YAML file over the defaults.

    Raises UserError for values that cannot be used.
    """
    config, places = cli.parse_with_file(Config, argv)
    with cli.located(places):
        cli.check_ranges(config, max_traj_len=(">= 8", lambda x: x >= 8))
    cli.check_accelerate()
    return config
