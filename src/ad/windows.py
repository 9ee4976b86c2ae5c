"""Histories in memory, and the windows of a step: a pure function of (seed, step).

A history is what a source did while it learnt; a window is a stretch of it that begins with an
episode. Three bytes a transition, so that all of them stay on the device. H histories of T steps.
"""

import json
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
import torch

from ad.darkroom import ACTIONS, Darkroom
from ad.model import EPISODE, INSIDE, NONE, REGION, Tokens
from ddp_utils import UserError

ANCHORED = 0.2  # share of the windows that begin where their history does
BROKEN = (OSError, EOFError, zipfile.BadZipFile, zlib.error)  # what a damaged file raises
ARRAYS = ("state", "action", "reward", "goal", "history_goal")


def read(path):
    """(arrays by name, what collect.py said of them); UserError for anything else than its file."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in ARRAYS}
            meta = json.loads(str(found["meta"]))
        room = Darkroom(meta["grid_size"], meta["horizon"])
        streams = meta["n_stream"]
        shape = room.cells * streams, meta["total_source_timesteps"] // streams
        for name, limit in (("state", room.cells), ("action", ACTIONS), ("reward", 2)):
            arrays[name] = check_range(name, arrays[name], shape, limit)
        goals = np.arange(room.cells)
        for name, expected in (("goal", goals), ("history_goal", np.repeat(goals, streams))):
            if not np.array_equal(arrays[name], expected):
                raise ValueError(f"{name} is not what its settings say")
        return arrays, meta
    except (*BROKEN, ValueError, KeyError, TypeError, ArithmeticError) as error:
        why = "" if "pickle" in str(error) else f" ({error})"  # numpy's advice is to read it anyway
        raise UserError(f"{path}: not a file of collect.py{why}; make it anew") from error


def check_range(name, array, shape, limit):
    """The array as uint8; ValueError unless it has this shape and whole numbers below limit."""
    if array.shape != shape:
        raise ValueError(f"{name} is {array.shape}, its settings say {shape}")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.uint8)  # changes NaN, fractions and what is below 0 or above 255
    if not np.array_equal(whole, array) or whole.max(initial=0) >= limit:
        raise ValueError(f"{name} holds other values than 0 to {limit - 1}")
    return whole


class Cut(NamedTuple):
    """How histories are cut into windows, and what is dropped when one is full."""

    window: int  # tokens
    unit: int  # windows begin at multiples of it
    region: int  # tokens from one marked region to the next; 0: none is marked
    drop: int  # tokens, whole episodes of them

    @classmethod
    def of(cls, config):
        """Plain: a quarter of the window is dropped. Compressed: the older of two regions."""
        if config.use_compressed_context:
            region = config.compress_interval
            return cls(2 * region, region, region, region)
        episodes = max(1, round(config.n_transit / config.horizon / 4))
        return cls(config.n_transit, config.horizon, 0, episodes * config.horizon)

    def places(self, time, horizon):
        """What the tokens of these steps are, as the model has it."""
        place = torch.where(time % horizon == 0, EPISODE, INSIDE)
        return torch.where(time % self.region == 0, REGION, place) if self.region else place


class Histories:
    """Some goals' histories, on a device, and windows of them."""

    def __init__(self, arrays, goals, horizon, cut, streams, steps, device):
        mine = np.flatnonzero(np.isin(arrays["goal"][arrays["history_goal"]], goals))
        each = len(arrays["history_goal"]) // len(arrays["goal"])
        mine = mine[mine % each < streams]
        self.data = torch.stack(
            [torch.from_numpy(arrays[name][mine, :steps]) for name in ARRAYS[:3]]
        ).to(device)  # [3, H, T]
        self.horizon, self.cut = horizon, cut
        self.count = self.data.shape[1]
        self.starts = (self.data.shape[2] - cut.window) // cut.unit + 1  # in one history

    def draw(self, seed, step, count):
        """History and first step [count] each: the global batch of a training step."""
        rng = np.random.default_rng([seed, step])
        history = rng.integers(self.count, size=count)
        start = rng.integers(self.starts, size=count) * self.cut.unit
        return history, np.where(rng.random(count) < ANCHORED, 0, start)

    def all(self):
        """History and first step of windows that overlap nowhere: for the test."""
        apart = -(-self.cut.window // self.cut.unit) * self.cut.unit  # each begins with an episode
        starts = np.arange(0, self.data.shape[2] - self.cut.window + 1, apart)
        return np.repeat(np.arange(self.count), len(starts)), np.tile(starts, self.count)

    def batch(self, history, start):
        """(Tokens, actions to predict), each [B, T]."""
        device = self.data.device
        history, start = (torch.from_numpy(part)[:, None].to(device) for part in (history, start))
        time = start + torch.arange(self.cut.window, device=device)  # [B, T]
        cell, action, reward = self.data[:, history, time].long()
        tokens = tokens_of(cell, action[:, :-1], reward[:, :-1])
        return tokens._replace(place=self.cut.places(time, self.horizon)), action


def tokens_of(cell, action, reward, place=None):
    """Cells [B, T] and what was done and paid between them [B, T - 1] -> Tokens of a window."""
    before = torch.full_like(cell, NONE), torch.zeros_like(cell)
    before[0][:, 1:], before[1][:, 1:] = action, reward
    return Tokens(cell, *before, place)
