"""Settings of Algorithm Distillation: a YAML file, flags and key=value words; the guide's names."""

import dataclasses
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ad.darkroom import ACTIONS, Darkroom
from ad.sources import SOURCES
from ddp_utils import UserError, cli, jsonl
from ddp_utils.readers import yaml_config

# keys of the original's files: those that have one value here, none, or no effect any more
FIXED = {
    "env": ("darkroom", "the only task here"),
    "dim_states": (2, "a cell is x and y"),
    "dim_actions": (1, "an action is one number"),
    "num_actions": (ACTIONS, "+x, -x, +y, -y and stay"),
    "model": ("AD", "the only model here"),
    "dynamics": (False, "the model predicts actions alone"),
    "predict_compress": (False, "regions end by the clock: see compress_interval"),
}
REFUSED = {
    "max_reward": "the optimum follows from grid_size and horizon; leave it out",
    "dynamics_strength": "the model predicts actions alone; leave it out",
    "policy": "the sources are tables, not networks; leave it out",
    "n_steps": "the sources learn at every step; leave it out",
    "batch_size": "it was PPO's; leave it out, or give train_batch_size",
    "n_epochs": "it was PPO's; leave it out, or give train_timesteps",
    "device": "the launcher chooses it; leave it out, or give --backend",
}
NOT_NEEDED = {
    "num_workers": "windows are cut on the device, there is no loader",
    "n_process": "all histories are collected at once, in seconds",
    "flash_attn": "PyTorch takes the fastest attention that it has",
}


@dataclass
class Source:
    # task and source
    grid_size: int = 9  # cells to a side
    horizon: int = 20  # steps of an episode
    alg: str = "q_learning"  # whose learning is distilled; or actor_critic, noise
    alg_seed: int = 42  # what the source tries
    source_lr: float | None = None  # the source's learning rate; empty: its own
    n_stream: int = 40  # histories of each goal; they share what they learn
    total_source_timesteps: int = 19200  # of each goal, all its streams together

    room = property(lambda self: Darkroom(self.grid_size, self.horizon))
    source_steps = property(lambda self: self.total_source_timesteps // self.n_stream)


@dataclass
class First:
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


@dataclass
class Config(Source, First):
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

    # what run.py, optim.py and lora.py ask for
    fine_tuning, lr_scheduler, base_dtype = "full", "cosine", "auto"
    save_every = property(lambda self: self.ckpt_interval)
    warmup_ratio = property(lambda self: self.num_warmup_steps / max(1, self.train_timesteps))
    use_mixed_precision = property(lambda self: self.mixed_precision != "no")


SCALAR = bool | int | float | str | None
OTHERS = FIXED | REFUSED | NOT_NEEDED
File = dataclasses.make_dataclass(
    "File", [("include", str, ""), *((name, SCALAR, None) for name in OTHERS)], bases=(Config,)
)


def read(argv, console, config_class=Config, env=os.environ):
    """(settings, lines to say): flags over key=value words over the YAML file over the defaults.

    What `accelerate launch --mixed_precision` says stands above all. Raises UserError before any
    data is read, naming file and line of what is wrong.
    """
    argv = [f"--{word}" if word.startswith("config=") else word for word in argv]
    words = [word for word in argv if not is_setting(word)]
    path = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    path += [value for word, value in itertools.pairwise(words) if word == "--config"]
    places = {}
    values = _of_file(path[-1], places) if path else {}
    for word in filter(is_setting, argv):  # the last one counts, as with flags
        if word.startswith("include="):
            raise UserError("include: it is a line of a YAML file; give --config FILE")
        values |= _of_word(word)
        places[word.partition("=")[0]] = word.partition("=")[0]
    lines = [line for name in OTHERS if name in values for line in _other(name, values, places)]
    known = {field.name for field in dataclasses.fields(config_class)}
    default = config_class(**{name: value for name, value in values.items() if name in known})
    config = cli.parse(config_class, words, console=console, default=default)
    # accelerate says "no" where its user has said nothing
    if (asked := env.get("ACCELERATE_MIXED_PRECISION", "no")) != "no" and "lr" in known:
        config.mixed_precision = asked
    flags = {word.partition("=")[0].removeprefix("--") for word in words}
    with cli.naming({name: place for name, place in places.items() if name not in flags}):
        check(cli.check_types(config))
    return config, lines


def is_setting(word):
    """key=value, as in `lr=1e-3`."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def _of_word(word):
    """{name: value} of key=value, read as a line of a YAML file."""
    name, _, text = word.partition("=")
    try:
        return _given(yaml_config.from_text(File, f"{name}: {text}", "", mine := {}), mine)
    except UserError as error:
        raise UserError(str(error).removeprefix(":1: ")) from error


def _given(found, places):
    return {name: getattr(found, name) for name in places if name != "include"}


def _of_file(path, places, depth=0):
    """Name -> value of a YAML file, over those of the file that it includes, beside it."""
    path = jsonl.resolve(path)
    found = yaml_config.from_yaml(File, path, mine := {})
    values = {}
    if found.include:
        if depth > 8:
            raise UserError(f"{mine['include']}: it includes itself; leave one of them out")
        values = _of_file(Path(path).parent / found.include, places, depth + 1)
    places |= mine
    return values | _given(found, mine)


def _other(name, values, places):
    """A key that the original has: refuse it, or say that it changes nothing."""
    value, place = values[name], places[name]
    if name in REFUSED:
        raise UserError(f"{place}: {REFUSED[name]}")
    if name in FIXED and value != FIXED[name][0]:
        raise UserError(f"{place}: {value!r} is not {FIXED[name][0]!r}: {FIXED[name][1]}")
    if name in NOT_NEEDED:
        yield f"{name}: not needed: {NOT_NEEDED[name]}"


def check(config):
    """Raise UserError for a value out of its range, or two that do not go together."""
    rules = {name: cli.ABOVE_0 for name in ("n_stream", "total_source_timesteps", "horizon")}
    rules |= {"grid_size": ("from 2 to 16", lambda x: 2 <= x <= 16), "alg_seed": cli.FROM_0}
    rules |= {"source_lr": cli.ABOVE_0}
    if isinstance(config, Config):
        counts = "lr train_batch_size test_batch_size tf_n_embd tf_n_layer tf_n_head n_transit "
        counts += "compress_interval train_n_stream train_source_timesteps eval_episodes "
        rules |= dict.fromkeys((counts + "eval_copies summary_interval").split(), cli.ABOVE_0)
        counts = "train_timesteps num_warmup_steps eval_interval gen_interval ckpt_interval "
        rules |= dict.fromkeys((counts + "env_split_seed").split(), cli.FROM_0)
        share = ("from 0 up to, not including, 1", lambda x: 0 <= x < 1)
        shares = ("tf_dropout", "tf_attn_dropout", "beta1", "beta2", "label_smoothing")
        rules |= dict.fromkeys(shares, share) | {"train_env_ratio": share}
    cli.check_ranges(config, **rules)
    if config.alg not in SOURCES:
        more = "PPO took hours for each goal; " if config.alg == "PPO" else ""
        raise UserError(f"--alg: {config.alg!r} is no source; {more}give {' or '.join(SOURCES)}")
    if config.alg == "noise" and config.source_lr is not None:
        raise UserError("--source_lr: noise does not learn; leave it out")
    if config.total_source_timesteps % (config.n_stream * config.horizon):
        each = f"{config.n_stream} streams of episodes of {config.horizon} steps"
        raise UserError(f"--total_source_timesteps: give a multiple of {each}")
    if isinstance(config, Config):
        _check_model(config)


def _check_model(config):
    if not config.output_dir:
        raise UserError("--output_dir: it is empty; give a folder for the run")
    if config.tf_n_embd % (2 * config.tf_n_head):
        raise UserError("--tf_n_embd: give an even multiple of tf_n_head")
    if not all(map(len, config.room.split(config.env_split_seed, config.train_env_ratio))):
        raise UserError("--train_env_ratio: no goal is left on one of the two sides")
    if config.train_n_stream > config.n_stream:
        raise UserError(f"--train_n_stream: there are {config.n_stream} (n_stream)")
    if config.train_source_timesteps > config.source_steps:
        each = f"total_source_timesteps / n_stream = {config.source_steps}"
        raise UserError(f"--train_source_timesteps: a history has {each}")
    if config.n_transit < config.horizon:
        raise UserError(f"--n_transit: give an episode ({config.horizon}) or more")
    if config.use_compressed_context:
        if config.compress_interval % config.horizon:
            raise UserError(f"--compress_interval: give whole episodes of {config.horizon} steps")
        if 2 * config.compress_interval > config.n_transit:
            regions = f"2 x compress_interval = {2 * config.compress_interval}"
            raise UserError(f"--n_transit: two regions do not fit; give {regions} or more")
    window = 2 * config.compress_interval if config.use_compressed_context else config.n_transit
    if window > config.train_source_timesteps:
        raise UserError(f"--train_source_timesteps: give a window ({window}) or more")
