"""Learning histories on disk and in memory, and the windows of a training step.

A history records what a source did while it learned. A window is a stretch of a history that begins
with an episode. The windows of a step are a pure function of (seed, step). H histories of T steps,
B windows.

A file of histories is an .npz with the uint8 arrays state (the observation), action and reward,
each [H, T], n_stream histories for each task, and meta (JSON). It is small enough that all
histories stay on the device.
"""

import dataclasses
import json
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from ad import sources
from ad.config import Config
from ad.model import EPISODE, INSIDE, REGION, Tokens
from ddp_utils import UserError
from ddp_utils.data import write_file
from ddp_utils.distributed import to_device

Array = np.ndarray
Arrays = dict[str, Array]  # name -> [H, T]
ANCHORED = 0.2  # fraction of the windows that begin at the first step of their history
ARRAYS = ("state", "action", "reward")
# what numpy and json raise for other files; AttributeError: for a single array, in Python 3.10
NOT_HISTORIES = (EOFError, ValueError, KeyError, TypeError, AttributeError)


def collect(config: Config, path: Path) -> Array:
    """Write the histories of all tasks to a new file; return the mean return of each episode.

    The histories of held-out tasks are for the loss: a source that must know its tasks knows these.
    """
    tasks = config.environment.tasks(config.n_task)
    size = config.n_stream, config.source_steps
    histories = sources.histories(config, tasks, *size)
    if config.source == "posterior":
        is_held_out = ~np.isin(tasks, config.tasks[0])
        knows_all = dataclasses.replace(config, train_env_ratio=1.0)
        held_out = sources.histories(knows_all, tasks[is_held_out], *size)
        histories[:, np.repeat(is_held_out, config.n_stream)] = held_out
    state, action, reward = histories
    meta = np.array(json.dumps(config.source_settings()))
    with write_file(path) as file, open(file, "wb") as stream:
        np.savez(stream, state=state, action=action, reward=reward, meta=meta)
    return reward.reshape(len(reward), -1, config.horizon).sum(-1).mean(0)


def read(path: Path, config: Config) -> Arrays:
    """Return the arrays of a file.

    Raises UserError if the file is damaged, is not a file of histories, or was collected with
    other settings.
    """
    if config.source == "imported":
        return read_hdf5(path, config)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
            collected = json.loads(str(file["meta"]))
    except OSError as error:
        raise UserError(f"--traj_file: {path}: {error.strerror}; use another file") from error
    except (zipfile.BadZipFile, zlib.error, *NOT_HISTORIES) as error:
        problem = "is damaged or is not a file of histories"
        raise UserError(f"--traj_file: {path} {problem}; remove it to collect it again") from error
    for name, value in config.source_settings().items():
        if collected.get(name) != value:
            problem = f"{path} was collected with {name} {collected.get(name)} (expected {value})"
            raise UserError(f"--traj_file: {problem}; use {name} of the file, or another file name")
    return arrays


def read_hdf5(path: Path, config: Config) -> Arrays:
    """Return the histories of an HDF5 file of the original code.

    It has a group per task, with states [T, n_stream, 2], and actions and rewards [T, n_stream].
    Raises UserError if the file is too small, or if its steps are impossible in their task.
    """
    try:
        import h5py
    except ImportError:
        raise UserError("--source: imported needs h5py; use pip install h5py") from None
    environment, steps, streams = config.environment, config.source_steps, config.n_stream
    histories = []
    for task in environment.tasks(config.n_task):
        where = f"--traj_file: {path}: group {task}"
        try:
            with h5py.File(path) as file:
                state, action, reward = (file[f"{task}/{name}s"][:steps] for name in ARRAYS)
        except (OSError, KeyError) as error:
            raise UserError(f"{where}: {error} (expected states, actions and rewards)") from error
        if (
            state.shape != (steps, streams, 2)
            or not action.shape == reward.shape == state.shape[:2]
        ):
            problem = f"states are {[*state.shape]} (expected {[steps, streams, 2]})"
            raise UserError(f"{where}: {problem}; change n_stream or total_source_timesteps")
        state = state @ [config.grid_size, 1]
        inside = state.clip(0, config.grid_size**2 - 1), action.clip(0, environment.actions - 1)
        after, paid = environment.step(*inside, task)
        expected = np.roll(after, 1, 0)
        expected[:: config.horizon] = environment.start
        if (expected != state).any() or (inside[1] != action).any() or (paid != reward).any():
            raise UserError(f"{where}: a step is impossible; use grid_size and horizon of the file")
        histories.append((state.T, action.T, reward.T))
    return dict(zip(ARRAYS, np.concatenate(histories, 1).astype(np.uint8), strict=True))


def places(time: torch.Tensor, config: Config) -> torch.Tensor:
    """Return for each step of a history whether it begins a region, begins an episode, or not."""
    place = torch.where(time % config.horizon == 0, EPISODE, INSIDE)
    if config.use_compressed_context:
        place = torch.where(time % config.compress_interval == 0, REGION, place)
    return place


class Histories:
    """The histories of some tasks on a device, cut into windows."""

    def __init__(self, arrays: Arrays, tasks: Array, config: Config, device: torch.device):
        number, stream = divmod(np.arange(len(arrays["state"])), config.n_stream)
        is_selected = np.isin(config.environment.tasks(config.n_task), tasks)[number]
        rows = np.flatnonzero(is_selected & (stream < config.train_n_stream))
        steps = config.train_source_timesteps
        data = np.stack([arrays[name][rows, :steps] for name in ARRAYS])
        self.data = torch.from_numpy(data).to(device)  # [3, H, T]
        self.config = config
        self.tasks = len(tasks)
        self.count = len(rows)
        self.starts = (steps - config.window) // config.unit + 1  # per history

    def draw(self, seed: int, step: int, count: int) -> tuple[Array, Array]:
        """Return the history and the first step, [count] each, of the windows of a global batch."""
        rng = np.random.default_rng([seed, step])
        history = rng.integers(self.count, size=count)
        start = rng.integers(self.starts, size=count) * self.config.unit
        return history, np.where(rng.random(count) < ANCHORED, 0, start)

    def all(self) -> tuple[Array, Array]:
        """Return the history and the first step of all windows that do not overlap."""
        unit = self.config.unit
        apart = math.ceil(self.config.window / unit) * unit  # each begins with an episode
        starts = np.arange(0, self.config.train_source_timesteps - self.config.window + 1, apart)
        return np.repeat(np.arange(self.count), len(starts)), np.tile(starts, self.count)

    def batch(self, history: Array, start: Array) -> tuple[Tokens, torch.Tensor]:
        """Return the tokens of windows [B] and the actions to predict [B, T]."""
        device = self.data.device
        rows = to_device(history[:, None], device)
        time = to_device(start[:, None], device)
        time = time + torch.arange(self.config.window, device=device)  # [B, T]
        cell, action, reward = self.data[:, rows, time].long()
        no_action = self.config.environment.actions
        action_before = F.pad(action[:, :-1], (1, 0), value=no_action)
        reward_before = F.pad(reward[:, :-1], (1, 0))
        return Tokens(cell, action_before, reward_before, places(time, self.config)), action
