"""The run folder: settings, environment, metrics, curves and a summary, written by rank 0 alone."""

import dataclasses
import json
import math
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import peft
import torch
import transformers
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from ddp_utils import UserError, dist, plots, records

SECRET = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA\w{12,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
    r"|(?i:(?<=token=)|(?<=key=)|(?<=secret=)|(?<=password=))[^\s'\x22]+"
)
COLUMNS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


class Totals:
    """Weighted sums of per-pair values, kept on the device and reduced once."""

    def __init__(self, world):
        self.world = world
        self.sums = None
        self.names = ()

    def add(self, values, weight):
        """values: name -> [B]; weight [B], 0 for fillers."""
        self.names = ("count", *values)
        rows = torch.stack([torch.ones_like(weight), *values.values()]).double()  # [names, B]
        # where, not a product: a filler's NaN must not count
        part = torch.where(weight > 0, rows, 0.0).sum(-1).detach()
        self.sums = part if self.sums is None else self.sums + part

    def means(self) -> dict:
        """Means over the rows of all ranks, and their `count`."""
        count, *sums = dist.all_sum(self.sums, self.world).tolist()
        return {"count": int(count)} | {
            name: value / count for name, value in zip(self.names[1:], sums, strict=True)
        }


class Run:
    """One run folder. A context manager: leaving it says in summary.json how the run ended."""

    def __init__(self, folder, config, world, steps):
        self.folder = Path(folder)
        self.world = world
        self.start = time.perf_counter()
        self.results = {}
        self.step = 0
        self.bar = None
        self.board = None
        if not world.is_main or not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()  # of downloads and weights
        if not world.is_main:
            return
        self.run_id = os.environ.get("RUN_ID") or uuid.uuid4().hex
        self._make_folder()
        self._write("config.json", _redacted(dataclasses.asdict(config)))
        self._write("environment.json", environment(config, world))
        self.write_summary("running", 0)
        self.metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.board = SummaryWriter(self.folder / "tensorboard")
        tqdm.set_lock(threading.RLock())  # its default is a semaphore, which os._exit would leak
        self.bar = tqdm(total=steps, disable=not sys.stderr.isatty(), unit="step")

    def _make_folder(self):
        """A folder with an earlier run in it is moved aside, never written over."""
        if (self.folder / "config.json").exists():
            number = 1
            while (aside := self.folder.with_name(f"{self.folder.name}.{number}")).exists():
                number += 1
            self.folder.rename(aside)
            self.say(f"{self.folder} held an earlier run: moved to {aside}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--result_dir: {self.folder}: {error.strerror}") from error

    def say(self, line):
        """One line to the user, above the progress bar if there is one; silence elsewhere."""
        if self.world.is_main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def log(self, step, values, split="train", echo=True):
        """Append one line of metrics: file in full precision, TensorBoard, fixed columns."""
        self.step = step
        if not self.world.is_main:
            return
        self.metrics.write(json.dumps({"split": split, "step": step, **_finite(values)}) + "\n")
        self.metrics.flush()
        for name, value in values.items():
            if name != "count":
                self.board.add_scalar(f"{split}/{name}", value, step)
        if split == "train":
            self.bar.update(step - self.bar.n)
        if echo:
            shown = [(name.rsplit("/")[-1], values[name]) for name in COLUMNS if name in values]
            title = f"step {step:5d}" if split == "train" else f"{split:>10}"
            self.say(" | ".join([title, *(f"{name} {value:8.4f}" for name, value in shown)]))

    def write_json(self, name, data):
        """A file of plain data in the run folder."""
        if self.world.is_main:
            self._write(name, data)

    def write_text(self, name, text):
        """A text for people in the run folder."""
        if self.world.is_main:
            (self.folder / name).write_text(text, encoding="utf-8")

    def write_summary(self, status, code):
        """summary.json: how it stands, what it measured; the shell scripts read exit_code."""
        seconds = round(time.perf_counter() - self.start, 3)
        self._write(
            "summary.json",
            {
                "status": status,
                "exit_code": code,
                "run_id": self.run_id,
                "step": self.step,
                "world_size": self.world.world_size,
                "seconds": seconds,
                **self.results,
            },
        )

    def _write(self, name, data):
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / name)  # a reader never sees half a file

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _trace):
        if not self.world.is_main:
            return
        code = 0 if error is None else getattr(error, "exit_code", 1)
        self.write_summary("finished" if error is None else "failed", code)
        self.bar.close()
        self.board.close()
        self.metrics.close()
        if error is None:
            plots.draw(self.folder)
            self.say(f"{time.perf_counter() - self.start:.0f} s -> {self.folder}/")


def peak_memory_mb(device):
    """Peak memory of this process: allocated on the GPU, resident on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return getattr(torch, device.type).max_memory_allocated(device) / 2**20


def interval(mean, mean_of_squares, count):
    """95 % confidence interval of a mean of `count` values (normal approximation)."""
    if count < 2:
        return mean, mean
    deviation = math.sqrt(max(0.0, mean_of_squares - mean**2) * count / (count - 1))
    half = 1.96 * deviation / math.sqrt(count)
    return mean - half, mean + half


def environment(config, world) -> dict:
    """What one needs to run it again."""
    commit = subprocess.run(
        ["git", "-C", str(records.ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return {
        "command": SECRET.sub("<redacted>", shlex.join(sys.orig_argv)),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": device_name(world.device),
        "git_commit": commit.stdout.strip() or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        },
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def device_name(device):
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return getattr(torch, device.type).get_device_name(device)


def _redacted(settings):
    """The settings without anything that looks like a token or a password."""
    return json.loads(SECRET.sub("<redacted>", json.dumps(settings)))


def _finite(values):
    """JSON has no NaN: a value that is not finite is written as null."""
    return {k: v if math.isfinite(v) else None for k, v in values.items()}
