"""Settings of Algorithm Distillation: a YAML file, flags and key=value words."""

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ad import environments
from ddp_utils import cli

Source = Literal["posterior", "q_learning", "imported"]


@dataclass
class Config:
    # most used settings
    config: str = ""  # YAML file such as config/model/ad_dr.yaml; empty: the demo
    traj_file: str = "data/ad/demo.npz"  # learning histories; collected if the file does not exist
    output_dir: str = "runs/ad_demo"  # folder for model, metrics, plots and checkpoints
    train_timesteps: int = 1500  # optimizer steps; 0: evaluate the untrained model
    train_batch_size: int = 24  # windows per forward pass and process
    lr: float = 8e-3  # peak learning rate
    n_transit: int = 240  # context length in environment steps, without use_compressed_context
    use_compressed_context: bool = False  # two regions; if both are full, the older is dropped
    compress_interval: int = 80  # environment steps per region, with use_compressed_context

    # tasks and source algorithm
    env: str = "darkroom"  # darkroom, darkroom_permuted, key_to_door, or a gymnasium environment
    grid_size: int = 9  # width and height of the grid
    horizon: int = 20  # steps per episode
    n_task: int = 0  # number of tasks, drawn at random; 0: all
    source: Source = "posterior"  # algorithm to distill; imported: traj_file is an HDF5 file
    alg_seed: int = 42  # random seed of the source algorithm
    source_lr: float = 0.5  # Q-learning: learning rate of the values
    source_optimism: float = 0.0  # Q-learning: initial values of the table
    share_table: bool = True  # Q-learning: the histories of a task share one table of values
    source_noise: float = 0.2  # posterior sampling: fraction of random actions
    n_stream: int = 40  # histories per task
    total_source_timesteps: int = 19200  # environment steps per task, summed over its histories

    # training histories
    env_split_seed: int = 0  # random seed of the split into training and held-out tasks
    train_env_ratio: float = 0.9  # fraction of tasks for training
    train_n_stream: int = 40  # histories of each training task that are used
    train_source_timesteps: int = 480  # environment steps of each history that are used

    # model
    tf_n_embd: int = 32  # embedding size
    tf_n_layer: int = 3  # number of layers
    tf_n_head: int = 1  # attention heads per layer
    tf_n_inner: int | None = None  # size of the feed-forward layers; None: 4 x tf_n_embd
    tf_dropout: float = 0.0  # dropout of hidden states; 0 gives equal results on any number of GPUs
    tf_attn_dropout: float = 0.0  # dropout of attention weights
    label_smoothing: float = 0.0  # fraction of each target that is spread over all actions

    # optimization
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    num_warmup_steps: int = 75  # steps of linear warm-up; a cosine decay follows
    beta1: float = 0.9  # AdamW: decay rate of the first moment
    beta2: float = 0.99  # AdamW: decay rate of the second moment
    weight_decay: float = 0.01  # AdamW weight decay of weight matrices
    max_grad_norm: float = 1.0  # clip the gradient norm at this value; 0: no clipping
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"  # auto: by GPU; no on a CPU

    # evaluation, on the main process
    test_batch_size: int = 512  # windows per forward pass
    eval_interval: int = 500  # steps between evaluations of the held-out loss; 0: only at the end
    gen_interval: int = 500  # steps between trials on held-out tasks; 0: only at the end
    eval_episodes: int = 60  # episodes per trial, all in one context
    eval_copies: int = 8  # trials per task
    eval_temperature: float = 0.4  # sampling temperature of actions
    eval_explore_temperature: float = 1.0  # sampling temperature before the first reward

    # hardware
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # auto: by device
    timeout_minutes: float = 30.0  # time limit of a collective operation

    # run
    summary_interval: int = 50  # steps between lines of metrics
    ckpt_interval: int = 1000  # steps between checkpoints; 0: at the end and every 15 minutes
    keep_checkpoints: int = 2  # number of most recent checkpoints to keep
    stop_after_minutes: float = 0.0  # save and exit with status 85 after this time; 0: no limit
    restart: bool = False  # start from scratch; the old run folder is renamed
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"  # logger besides the files
    seed: int = 0  # random seed of window order and model initialization
    deterministic: bool = False  # use deterministic kernels; slower
    check: bool = False  # read and check everything, then exit without training
    debug: bool = False  # show a traceback for user errors

    source_steps = property(lambda self: self.total_source_timesteps // self.n_stream)
    save_every = property(lambda self: self.ckpt_interval)  # the name that Run reads
    warmup_ratio = property(lambda self: self.num_warmup_steps / max(1, self.train_timesteps))

    @functools.cached_property
    def environment(self) -> environments.Environment:
        """The tables of all tasks."""
        return environments.make(self.env, self.grid_size, self.horizon)

    @property
    def tasks(self) -> list[Any]:
        """The training tasks and the held-out tasks."""
        return self.environment.split(self.n_task, self.env_split_seed, self.train_env_ratio)

    @property
    def unit(self) -> int:
        """Windows begin at multiples of this number of steps: a region or an episode."""
        return self.compress_interval if self.use_compressed_context else self.horizon

    @property
    def window(self) -> int:
        """Context length in steps: two regions, or n_transit."""
        return 2 * self.compress_interval if self.use_compressed_context else self.n_transit

    @property
    def dropped(self) -> int:
        """Steps to remove from a full context: the older region, or a quarter of the episodes."""
        episodes = max(1, round(self.window / self.horizon / 4))
        return self.unit if self.use_compressed_context else episodes * self.horizon

    def source_settings(self) -> dict[str, Any]:
        """Return the settings that determine the histories."""
        names = SOURCE_SETTINGS.split()
        if self.source == "posterior":  # it knows the training tasks
            names += ["env_split_seed", "train_env_ratio"]
        if self.env not in environments.KINDS:  # it has a size of its own
            names.remove("grid_size")
        return {name: getattr(self, name) for name in names}


SOURCE_SETTINGS = """env grid_size horizon n_task source alg_seed source_lr source_optimism
share_table source_noise n_stream total_source_timesteps"""
POSITIVE = """lr train_batch_size test_batch_size tf_n_embd tf_n_layer tf_n_head tf_n_inner
n_transit horizon n_stream compress_interval train_n_stream train_source_timesteps eval_episodes
eval_copies summary_interval total_source_timesteps source_lr eval_temperature
eval_explore_temperature"""
NOT_NEGATIVE = """train_timesteps num_warmup_steps eval_interval gen_interval ckpt_interval alg_seed
env_split_seed n_task source_optimism"""
FRACTIONS = "tf_dropout tf_attn_dropout beta1 beta2 label_smoothing train_env_ratio source_noise"
RANGES = {
    **dict.fromkeys(POSITIVE.split(), cli.ABOVE_0),
    **dict.fromkeys(NOT_NEGATIVE.split(), cli.FROM_0),
    **dict.fromkeys(FRACTIONS.split(), (">= 0 and < 1", lambda x: 0 <= x < 1)),
    "grid_size": (">= 2 and <= 16", lambda x: 2 <= x <= 16),  # a cell is one byte
}


def check(config: Config) -> None:
    """Raise UserError for a value out of its range, or for values that exclude each other."""
    cli.check_ranges(config, output_dir=cli.FOLDER, **RANGES)
    horizon, window, steps = config.horizon, config.window, config.source_steps
    per_task = config.n_stream * horizon
    multiple = f"a multiple of n_stream x horizon ({per_task})"
    limits = f">= the context length ({window}) and <= total_source_timesteps / n_stream ({steps})"
    rules: dict[str, cli.Range] = {
        "total_source_timesteps": (multiple, lambda x: x % per_task == 0),
        "tf_n_embd": ("an even multiple of tf_n_head", lambda x: x % (2 * config.tf_n_head) == 0),
        "train_env_ratio": ("some tasks on each side", lambda _: all(map(len, config.tasks))),
        "train_n_stream": (f"<= n_stream ({config.n_stream})", lambda x: x <= config.n_stream),
        "train_source_timesteps": (limits, lambda x: window <= x <= steps),
    }
    if config.use_compressed_context:
        multiple = f"a multiple of horizon ({horizon})"
        rules["compress_interval"] = (multiple, lambda x: x % horizon == 0)
        cli.note_unused(config, f"the context has two regions, {window} steps", "n_transit")
    else:
        rules["n_transit"] = (f">= horizon ({horizon})", lambda x: x >= horizon)
        cli.note_unused(config, "use_compressed_context is off", "compress_interval")
    cli.check_ranges(config, **rules)
    if not config.environment.optimum(config.tasks[1]).any():
        cli.note(f"--horizon: no held-out task has a reward within {horizon} steps; use more")
    reason = f"source {config.source} does not use it"
    if config.source != "q_learning":
        cli.note_unused(config, reason, "share_table")
    if config.source != "posterior":
        cli.note_unused(config, reason, "source_noise")
    if config.env not in environments.KINDS:
        cli.note_unused(config, f"{config.env} has a size of its own", "grid_size")
    if 0 < config.train_timesteps < config.num_warmup_steps:
        share = config.train_timesteps / config.num_warmup_steps
        cli.note(f"--num_warmup_steps: more than the steps; lr ends at {share:.0%} of its peak")


def read(argv: Sequence[str] | None = None) -> Config:
    """Return the settings: flags and key=value words over the YAML file; the last one counts.

    `accelerate launch` overrides mixed_precision and backend. Raises UserError with file and line
    for an unknown setting or a wrong value, and for features of accelerate that are not supported.
    """
    words = [flag_of(word) for word in (sys.argv[1:] if argv is None else argv)]
    config, places = cli.parse_with_file(Config, words)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":  # "no" is also the value without --mixed_precision
        config.mixed_precision = precision
    if os.environ.get("ACCELERATE_USE_CPU") == "True":
        config.backend = "gloo"
    cli.check_accelerate(reads_precision=True)
    with cli.located(places):
        check(cli.check_types(config))
    return config


def flag_of(word: str) -> str:
    """Return the flag for a key=value word; other words are unchanged."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        return word
    switches = {"true": f"--{name}", "false": f"--no_{name}"}
    return switches.get(value, f"--{word}")
