"""Histories on the disk and in memory, and the windows of a step.

A history is what a source did while it learnt; a window is a stretch of it that begins with an
episode. The windows of a step are a pure function of (seed, step). H histories of T steps.

One .npz of three bytes a transition: state (what is seen of it), action, reward [H, T], n_stream
histories of each task; meta (JSON). So all histories stay on the device.
"""

import json
import math
import zipfile
import zlib

import numpy as np
import torch
from torch.nn import functional as F

from ad import sources
from ad.model import EPISODE, INSIDE, REGION, Tokens
from ddp_utils import UserError
from ddp_utils.data import write_file
from ddp_utils.distributed import to_device
from ddp_utils.runs import checkpoint

ANCHORED = 0.2  # share of the windows that begin where their history does
ARRAYS = ("state", "action", "reward")


def collect(config, path):
    """Write the histories of all tasks into a new file; returns the mean return of each episode.

    The file appears whole or not at all.
    """
    checkpoint.check_place("--traj_file", path)
    tasks = config.environment.tasks(config.n_task)
    size = config.n_stream, config.source_steps
    state, action, reward = sources.histories(config.environment, tasks, *size, config)
    meta = np.array(json.dumps(config.source_settings()))
    with write_file(path) as file, open(file, "wb") as stream:
        np.savez(stream, state=state, action=action, reward=reward, meta=meta)
    return reward.reshape(len(reward), -1, config.horizon).sum(-1).mean(0)


def read(path, settings):
    """Return the arrays of a file by name; settings: those that its histories depend on.

    Raises UserError if the file is damaged, another one, or collected with other settings.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
            collected = json.loads(str(file["meta"]))
    except (EOFError, zipfile.BadZipFile, zlib.error, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged, or no file of histories; remove it") from error
    for name, value in settings.items():
        if collected.get(name) != value:
            other = f"{path} has {name} {collected.get(name)}, these settings {value}"
            raise UserError(f"--traj_file: {other}; give its own, or another name to collect anew")
    return arrays


def places(time, config):
    """Return for each step whether it begins a region, begins an episode, or is inside."""
    place = torch.where(time % config.horizon == 0, EPISODE, INSIDE)
    if config.use_compressed_context:
        place = torch.where(time % config.compress_interval == 0, REGION, place)
    return place


class Histories:
    """The histories of some tasks, on a device, and windows of them."""

    def __init__(self, arrays, tasks, config, device):
        number, stream = divmod(np.arange(len(arrays["state"])), config.n_stream)
        is_wanted = np.isin(config.environment.tasks(config.n_task), tasks)[number]
        rows = np.flatnonzero(is_wanted & (stream < config.train_n_stream))
        steps = config.train_source_timesteps
        data = np.stack([arrays[name][rows, :steps] for name in ARRAYS])
        self.data = torch.from_numpy(data).to(device)  # [3, H, T]
        self.config = config
        self.count = len(rows)
        self.starts = (steps - config.window) // config.unit + 1  # in one history

    def draw(self, seed, step, count):
        """Return history and first step [count] of each window in a training step's batch."""
        rng = np.random.default_rng([seed, step])
        history = rng.integers(self.count, size=count)
        start = rng.integers(self.starts, size=count) * self.config.unit
        return history, np.where(rng.random(count) < ANCHORED, 0, start)

    def all(self):
        """Return history and first step of windows that overlap nowhere, for the validation."""
        unit = self.config.unit
        apart = math.ceil(self.config.window / unit) * unit  # each begins with an episode
        starts = np.arange(0, self.config.train_source_timesteps - self.config.window + 1, apart)
        return np.repeat(np.arange(self.count), len(starts)), np.tile(starts, self.count)

    def batch(self, history, start):
        """Return Tokens and the actions to predict, each [B, T]."""
        device = self.data.device
        history = to_device(history[:, None], device)
        start = to_device(start[:, None], device)
        time = start + torch.arange(self.config.window, device=device)  # [B, T]
        cell, action, reward = self.data[:, history, time].long()
        none = self.config.environment.actions
        action_before = F.pad(action[:, :-1], (1, 0), value=none)
        reward_before = F.pad(reward[:, :-1], (1, 0))
        place = places(time, self.config)
        return Tokens(cell, action_before, reward_before, place), action
