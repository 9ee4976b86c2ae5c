"""Settings of Algorithm Distillation: a YAML file, flags and key=value words; the guide's names."""

import functools
import os
from dataclasses import dataclass
from typing import Literal

from ad import environments
from ddp_utils import UserError, cli, loggers, yaml_config


@dataclass
class Config:
    # what people change first
    config: str = ""  # YAML file, such as config/model/ad_dr.yaml; empty: the demo
    traj_file: str = "data/ad/demo.npz"  # histories, collected if they are not there
    output_dir: str = "runs/ad_demo"  # model, curves, metrics, checkpoints
    train_timesteps: int = 1500  # optimiser steps; 0: evaluate only
    train_batch_size: int = 24  # windows of one forward and process
    lr: float = 8e-3  # the highest learning rate
    n_transit: int = 240  # steps that the model sees: 12 episodes
    use_compressed_context: bool = False  # see a whole region and the current one
    compress_interval: int = 80  # steps of a region

    # tasks and source
    env: str = "darkroom"  # or darkroom_permuted, key_to_door, FrozenLake-v1 of gymnasium
    grid_size: int = 9  # cells to a side
    horizon: int = 20  # steps of an episode
    n_task: int = 0  # tasks to draw of the environment's; 0: all
    source: Literal["posterior", "q_learning"] = "posterior"  # the algorithm to distil
    alg_seed: int = 42  # what the source tries
    source_lr: float = 0.5  # learning rate of Q-learning
    source_optimism: float = 0.0  # its values before it has tried anything
    source_noise: float = 0.2  # share of random actions of posterior sampling
    n_stream: int = 40  # histories of each task; Q-learning's share a table
    total_source_timesteps: int = 19200  # of each task, all its streams together

    # which histories
    env_split_seed: int = 0  # which tasks are held out
    train_env_ratio: float = 0.9  # share of the tasks to train on
    train_n_stream: int = 40  # histories of each of them
    train_source_timesteps: int = 480  # of each history

    # model
    tf_n_embd: int = 32  # width
    tf_n_layer: int = 3  # layers
    tf_n_head: int = 1  # attention heads of each
    tf_n_inner: int | None = None  # of the feed-forward networks; empty: 4 x tf_n_embd
    tf_dropout: float = 0.0  # of hidden states; 0 keeps runs equal on any number of GPUs
    tf_attn_dropout: float = 0.0  # of attention weights
    label_smoothing: float = 0.0  # share of each target spread over all actions

    # optimisation
    gradient_accumulation_steps: int = 1  # larger global batch, same memory
    num_warmup_steps: int = 75  # in which the learning rate rises; then it falls as a cosine
    beta1: float = 0.9  # of AdamW: how long gradients are remembered
    beta2: float = 0.99  # and their squares
    weight_decay: float = 0.01  # on matrices
    max_grad_norm: float = 1.0  # clip the gradient to this norm; 0: do not
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"  # by the GPU; CPU: no

    # evaluation, on the main process
    test_batch_size: int = 512  # windows of a forward
    eval_interval: int = 500  # steps between losses on held-out tasks; 0: at the end
    gen_interval: int = 500  # steps between tries on them; 0: at the end
    eval_episodes: int = 60  # of one try, in one context
    eval_copies: int = 8  # tries of each task
    eval_temperature: float = 0.4  # of the agent's actions: below 1 it keeps to likelier ones
    eval_explore_temperature: float = 1.0  # the same, until its context holds a reward

    # hardware
    num_workers: int = 0  # not needed: windows are cut on the device, there is no loader
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others

    # run
    summary_interval: int = 50  # steps between lines of metrics
    ckpt_interval: int = 1000  # steps between checkpoints; 0: at the end, and every 15 minutes
    keep_checkpoints: int = 2  # the newest ones; older ones are removed
    stop_after_minutes: float = 0.0  # save and end with status 85; 0: no limit
    restart: bool = False  # move an unfinished run aside instead of going on with it
    report_to: loggers.Name = "tensorboard"  # live curves, or files alone
    seed: int = 0  # order of the windows, start of the model
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too

    source_steps = property(lambda self: self.total_source_timesteps // self.n_stream)
    # what Run and policy ask for
    lr_scheduler = "cosine"
    base_dtype = "auto"
    save_every = property(lambda self: self.ckpt_interval)
    warmup_ratio = property(lambda self: self.num_warmup_steps / max(1, self.train_timesteps))

    @functools.cached_property
    def environment(self):
        """The tables of all tasks of this kind, made once."""
        return environments.make(self.env, self.grid_size, self.horizon)

    @property
    def tasks(self):
        """The tasks to train on and those held out."""
        return self.environment.split(self.n_task, self.env_split_seed, self.train_env_ratio)

    @property
    def unit(self):
        """Windows begin at multiples of it: a region or an episode."""
        return self.compress_interval if self.use_compressed_context else self.horizon

    @property
    def window(self):
        """Steps that the model sees: two regions, or n_transit."""
        return 2 * self.compress_interval if self.use_compressed_context else self.n_transit

    @property
    def dropped(self):
        """Steps that go when a window is full: the older region, or a quarter in whole episodes."""
        episodes = max(1, round(self.window / self.horizon / 4))
        return self.unit if self.use_compressed_context else episodes * self.horizon

    def source_settings(self):
        """Return the settings that the histories depend on."""
        names = """env grid_size horizon n_task source alg_seed source_lr source_optimism
        source_noise n_stream total_source_timesteps"""
        return {name: getattr(self, name) for name in names.split()}


POSITIVE = """lr train_batch_size test_batch_size tf_n_embd tf_n_layer tf_n_head n_transit horizon
n_stream compress_interval train_n_stream train_source_timesteps eval_episodes eval_copies
summary_interval total_source_timesteps source_lr eval_temperature
eval_explore_temperature"""
NOT_NEGATIVE = """train_timesteps num_warmup_steps eval_interval gen_interval ckpt_interval alg_seed
env_split_seed n_task source_optimism"""
SHARES = "tf_dropout tf_attn_dropout beta1 beta2 label_smoothing train_env_ratio source_noise"
SHARE = (">= 0 and < 1", lambda x: 0 <= x < 1)
RANGES = dict.fromkeys(POSITIVE.split(), cli.ABOVE_0) | dict.fromkeys(SHARES.split(), SHARE)
RANGES |= dict.fromkeys(NOT_NEGATIVE.split(), cli.FROM_0)
RANGES["grid_size"] = (">= 2 and <= 16", lambda x: 2 <= x <= 16)  # a cell is one byte

# what accelerate's configuration may ask for, as it tells a process in ACCELERATE_...
NOT_DONE = "use_fsdp use_deepspeed use_megatron_lm use_parallelism_config in_tpu_pod dynamo_backend"


def check(config):
    """Raise UserError for a value out of its range, or two that do not go together."""
    cli.check_ranges(config, **RANGES)
    if config.total_source_timesteps % (config.n_stream * config.horizon):
        episodes = f"{config.n_stream} streams of episodes of {config.horizon} steps"
        raise UserError(f"--total_source_timesteps: give a multiple of {episodes}")
    if not config.output_dir:
        raise UserError("--output_dir: it is empty; give a folder for the run")
    if config.tf_n_embd % (2 * config.tf_n_head):
        raise UserError("--tf_n_embd: give an even multiple of tf_n_head")
    if not all(map(len, config.tasks)):
        raise UserError("--train_env_ratio: no task is left on one of the two sides")
    if config.train_n_stream > config.n_stream:
        raise UserError(f"--train_n_stream: there are {config.n_stream} (n_stream)")
    if config.train_source_timesteps > config.source_steps:
        length = f"total_source_timesteps / n_stream = {config.source_steps}"
        raise UserError(f"--train_source_timesteps: a history has {length}")
    if config.n_transit < config.horizon:
        raise UserError(f"--n_transit: give an episode ({config.horizon}) or more")
    if config.use_compressed_context and config.compress_interval % config.horizon:
        raise UserError(f"--compress_interval: give whole episodes of {config.horizon} steps")
    if config.window > config.train_source_timesteps:
        raise UserError(f"--train_source_timesteps: give a window ({config.window}) or more")


def read(argv: list[str]):
    """Return the settings: flags and key=value words, of which the last counts, over the YAML file.

    What `accelerate launch --mixed_precision` and `--cpu` say stands above all. Raises UserError,
    naming file and line, for what is no setting or has a wrong type, before any data is read, and
    for what accelerate is configured to do and this script does not.
    """
    flags = [flag_of(word) for word in argv]
    config, places = yaml_config.under_flags(Config, Config, flags)
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launcher_precision != "no":  # accelerate says "no" where its user has said nothing
        config.mixed_precision = launcher_precision
    if os.environ.get("ACCELERATE_USE_CPU") == "True":
        config.backend = "gloo"
    for name in NOT_DONE.split():
        if os.environ.get(f"ACCELERATE_{name.upper()}", "no").lower() not in ("no", "false", "0"):
            raise UserError(f"accelerate: {name} is not done here; answer no in accelerate config")
    with cli.located(places):
        check(cli.check_types(config))
    return config


def flag_of(word):
    """Return the flag of a key=value word; other words stay as they are."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        return word
    switches = {"true": f"--{name}", "false": f"--no_{name}"}
    return switches.get(value, f"--{word}")
