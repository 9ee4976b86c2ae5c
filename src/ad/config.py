"""Settings of Algorithm Distillation: a YAML file, flags and key=value words; the guide's names."""

import argparse
import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ad.darkroom import ACTIONS, Darkroom
from ad.sources import SOURCES
from ddp_utils import UserError, cli, jsonl
from ddp_utils.readers import yaml_config

# keys of the original's files: those that have one value here, none, or no effect any more
FIXED = {"env": "darkroom", "model": "AD", "dynamics": False, "predict_compress": False}
FIXED |= {"dim_states": 2, "dim_actions": 1, "num_actions": ACTIONS}
REFUSED = "max_reward dynamics_strength policy n_steps batch_size n_epochs device"
NOT_NEEDED = {
    "num_workers": "windows are cut on the device, there is no loader",
    "n_process": "all histories are collected at once, in seconds",
    "flash_attn": "PyTorch takes the fastest attention that it has",
}


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

    # task and source
    grid_size: int = 9  # cells to a side
    horizon: int = 20  # steps of an episode
    alg: str = "q_learning"  # whose learning is distilled; or actor_critic, noise
    alg_seed: int = 42  # what the source tries
    source_lr: float | None = None  # the source's learning rate; empty: its own
    n_stream: int = 40  # histories of each goal; they share what they learn
    total_source_timesteps: int = 19200  # of each goal, all its streams together

    # which histories
    env_split_seed: int = 0  # which goals are held out
    train_env_ratio: float = 0.9  # share of the goals to train on
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
    eval_interval: int = 500  # steps between losses on held-out goals; 0: at the end
    gen_interval: int = 500  # steps between tries on them; 0: at the end
    eval_episodes: int = 60  # of one try, in one context
    eval_copies: int = 8  # tries of each goal

    # hardware
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    timeout_minutes: float = 30.0  # how long a rank waits for the others

    # run
    summary_interval: int = 50  # steps between lines of metrics
    ckpt_interval: int = 1000  # steps between checkpoints; 0: at the end, and every 15 minutes
    keep_checkpoints: int = 2  # the newest ones; older ones are removed
    stop_after_minutes: float = 0.0  # save and end with status 85; 0: no limit
    restart: bool = False  # move an unfinished run aside instead of going on with it
    same_code: bool = False  # go on though the code has changed: the change moves no number
    seed: int = 0  # order of the windows, start of the model
    deterministic: bool = False  # deterministic kernels, slower
    check: bool = False  # read and check everything, train nothing
    debug: bool = False  # tracebacks for user errors, too

    room = property(lambda self: Darkroom(self.grid_size, self.horizon))
    source_steps = property(lambda self: self.total_source_timesteps // self.n_stream)
    # what Run and optim ask for
    lr_scheduler = "cosine"
    base_dtype = "auto"
    save_every = property(lambda self: self.ckpt_interval)
    warmup_ratio = property(lambda self: self.num_warmup_steps / max(1, self.train_timesteps))

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

    def source(self):
        """Return the settings that the histories depend on."""
        names = ("grid_size", "horizon", "alg", "alg_seed", "source_lr", "n_stream")
        return {name: getattr(self, name) for name in (*names, "total_source_timesteps")}


VALUE = bool | int | float | str | None
ORIGINAL = [(name, VALUE, None) for name in (*FIXED, *REFUSED.split(), *NOT_NEEDED)]
File = dataclasses.make_dataclass("File", [("include", str, ""), *ORIGINAL], bases=(Config,))
POSITIVE = """lr train_batch_size test_batch_size tf_n_embd tf_n_layer tf_n_head n_transit horizon
n_stream compress_interval train_n_stream train_source_timesteps eval_episodes eval_copies
summary_interval total_source_timesteps source_lr"""
NOT_NEGATIVE = "train_timesteps num_warmup_steps eval_interval gen_interval ckpt_interval alg_seed"
SHARES = "tf_dropout tf_attn_dropout beta1 beta2 label_smoothing train_env_ratio"
SHARE = ("from 0 up to, not including, 1", lambda x: 0 <= x < 1)
RANGES = dict.fromkeys(POSITIVE.split(), cli.ABOVE_0) | dict.fromkeys(SHARES.split(), SHARE)
RANGES |= dict.fromkeys(NOT_NEGATIVE.split(), cli.FROM_0)
RANGES |= {"env_split_seed": cli.FROM_0}
RANGES["grid_size"] = ("from 2 to 16", lambda x: 2 <= x <= 16)  # a cell is one byte


def check(config):
    """Raise UserError for a value out of its range, or two that do not go together."""
    cli.check_ranges(config, **RANGES)
    if config.alg not in SOURCES:
        reason = "PPO took hours for each goal; " if config.alg == "PPO" else ""
        raise UserError(f"--alg: {config.alg!r} is no source; {reason}give {' or '.join(SOURCES)}")
    if config.alg == "noise" and config.source_lr is not None:
        raise UserError("--source_lr: noise does not learn; leave it out")
    if config.total_source_timesteps % (config.n_stream * config.horizon):
        episodes = f"{config.n_stream} streams of episodes of {config.horizon} steps"
        raise UserError(f"--total_source_timesteps: give a multiple of {episodes}")
    if not config.output_dir:
        raise UserError("--output_dir: it is empty; give a folder for the run")
    if config.tf_n_embd % (2 * config.tf_n_head):
        raise UserError("--tf_n_embd: give an even multiple of tf_n_head")
    train_goals, held_out = config.room.split(config.env_split_seed, config.train_env_ratio)
    if not (len(train_goals) and len(held_out)):
        raise UserError("--train_env_ratio: no goal is left on one of the two sides")
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


def read(argv, console):
    """Return (settings, lines for the user); flags over key=value words over the YAML file.

    What `accelerate launch --mixed_precision` says stands above all. Raises UserError, naming file
    and line, for what is no setting or has a wrong type, before any data is read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="")
    argv = [f"--{word}" if word.startswith("config=") else word for word in argv]
    options, flags = parser.parse_known_args(argv)
    words = {"include": json.dumps(options.config)} if options.config else {}
    for word in list(flags):
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            words[name] = value  # the last one counts, as with flags
            flags.remove(word)
    text = "\n".join(f"{name}: {value}" for name, value in words.items())
    try:
        values, locations = read_yaml(text or "{}", "")
    except UserError as error:  # a word has no file and line
        raise UserError(re.sub(r"^:\d+: ", "", str(error))) from error
    locations = {name: re.sub(r"^:\d+: ", "", place) for name, place in locations.items()}
    lines = check_original_keys(values, locations)
    names = {field.name for field in dataclasses.fields(Config)} & values.keys()
    default = Config(**{name: values[name] for name in names} | {"config": options.config})
    config = cli.parse(Config, flags, console=console, default=default)
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launcher_precision != "no":  # accelerate says "no" where its user has said nothing
        config.mixed_precision = launcher_precision
    for flag in flags:
        locations.pop(flag.partition("=")[0].removeprefix("--"), None)
    with cli.naming(locations):
        check(cli.check_types(config))
    return config, lines


def read_yaml(text, path, depth=0):
    """Return values and locations by name, those of the text over those of the file it includes."""
    locations = {}
    file = yaml_config.from_text(File, text, path, locations)
    values = {name: getattr(file, name) for name in locations}
    if not file.include:
        return values, locations
    if depth > 8:
        raise UserError(f"{locations['include']}: it includes itself; leave one of them out")
    included = jsonl.resolve(Path(path).parent / file.include)
    content = jsonl.content(included).decode()
    more_values, more_locations = read_yaml(content, included, depth + 1)
    return more_values | values, more_locations | locations


def check_original_keys(values, locations):
    """Refuse keys of the original that would have no effect; return lines on those not needed."""
    for name, value in values.items():
        if value != FIXED.get(name, value):
            raise UserError(f"{locations[name]}: {value!r} is not {FIXED[name]!r}; leave it out")
        if name in REFUSED.split():
            raise UserError(f"{locations[name]}: it has no effect here; leave it out")
    return [f"{name}: not needed: {why}" for name, why in NOT_NEEDED.items() if name in values]
