"""What a run prints: lines that fit a terminal of 80 columns, and a progress bar."""

import errno
import io
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

WIDTH = 80  # columns of a printed line
PAUSE = 600  # seconds between two lines of a phase in a pipe
PAIRS, NATS, PER_TOKEN = "fraction of pairs", "nats", "nats per token"
OPTIMUM = "fraction of the optimum"


class Metric(NamedTuple):
    """The names of a metric for people."""

    words: str  # in curves
    unit: str = ""
    column: str = ""  # in the lines of steps and validations; "": it is not printed there
    result: str = ""  # in the closing lines


# The names of metrics.jsonl -> those for people. Metrics that a script adds keep their own names.
METRICS = {
    "loss": Metric("loss", "", "loss", "loss"),  # its unit depends on the script
    "loss/preference": Metric("preference term"),
    "loss/sft": Metric("SFT term", PER_TOKEN),
    "rewards/chosen": Metric("reward of chosen", NATS, "chosen"),
    "rewards/rejected": Metric("reward of rejected", NATS),
    "rewards/margins": Metric("margin between chosen and rejected", NATS, "margin"),
    "kl": Metric("KL from the model with the prompt", PER_TOKEN, "kl", "kl"),
    "kl_base": Metric("the same of the base model", PER_TOKEN, "kl_base"),
    "rewards/accuracies": Metric("accuracy: chosen preferred", PAIRS, "accuracy", "accuracy"),
    "logps/accuracies": Metric("chosen more likely", PAIRS, "", "likelier"),
    "accuracy": Metric("accuracy: action predicted", "fraction of actions", "accuracy", "accuracy"),
    "share_baked": Metric("KL removed", "fraction", "share_baked", "share baked"),
    "kept/kl": Metric("KL from the base model, other prompts", PER_TOKEN, "", "kept: kl"),
    "fraction_of_optimum": Metric("return of the last 10 episodes", OPTIMUM, "of_optimum"),
    "return_first": Metric("return of the first episode"),
    "return_last10": Metric("return of the last 10 episodes"),
    "optimum": Metric("optimal return"),
    "area": Metric("mean return of all episodes", OPTIMUM),
    "episodes_to_60": Metric("episodes to 60 % of optimum"),
    "episodes_to_80": Metric("episodes to 80 % of optimum"),
    "episodes_to_90": Metric("episodes to 90 % of optimum"),
    "logps/chosen": Metric("log-prob of chosen", NATS),
    "logps/rejected": Metric("log-prob of rejected", NATS),
    "nll": Metric("NLL of preferred", "nats per residue"),
    "perplexity": Metric("perplexity"),
    "count": Metric("rows"),
    "win_rate": Metric("win rate"),
    "grad_norm": Metric("gradient norm before clipping"),
    "learning_rate": Metric("learning rate"),
    "tokens_per_second": Metric("speed", "tokens/s"),
    "seconds": Metric("time of a step", "s"),
    "peak_memory_mb": Metric("peak memory", "MiB"),
    "mfu": Metric("model FLOPs utilization", "fraction"),
}
SHAPE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# options of tqdm for a phase
ON_TERMINAL = {"bar_format": "{l_bar}{bar}| [{elapsed}<{remaining}]", "dynamic_ncols": True}
IN_PIPE = {"bar_format": "{desc}: about {remaining} left", "mininterval": 10}
T = TypeVar("T")


class Bar:
    """A progress bar on a terminal; in a pipe and on other ranks it shows nothing."""

    def __init__(self, is_main: bool):
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which os._exit would leak
        self.is_main = is_main
        self.is_shown = is_main and sys.stdout.isatty() and sys.stderr.isatty()
        self.is_of_run = True
        self.losses: list[float] = []  # of this part
        self.now = self.phase = tqdm(disable=True)

    def begin(self, title: str, total: int, done: int = 0, seconds: float = 0.0) -> None:
        """Replace the bar by one for a part of the run, or with title "" for the full run.

        The bar of a part stays visible at its end. done, seconds: steps and time of earlier starts.
        """
        self.now.close()
        self.losses = []
        self.is_of_run = not title
        size = {"desc": title, "total": total, "initial": done, "leave": bool(title)}
        self.now = tqdm(**size, bar_format=SHAPE, dynamic_ncols=True, disable=not self.is_shown)
        self.now.start_t = time.time() - seconds

    def advance(self, losses: Sequence[float]) -> None:
        """Move the bar of a part by one; show the last of these losses and the mean of the part."""
        self.losses += losses
        mean = sum(self.losses) / len(self.losses)
        self.now.set_postfix_str(f"loss={self.losses[-1]:.4f}, avg_loss={mean:.4f}", False)
        self.now.update()

    def reach(self, step: int, text: str = "") -> None:
        """Move the bar of the full run to a step; the bar of a part stays."""
        if self.is_of_run:
            if text:
                self.now.set_postfix_str(text, refresh=False)
            self.now.update(step - self.now.n)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # the reader has ended, as `| head` does, or the terminal is closed; the run continues
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """End the bar, and that of a phase which an error has interrupted."""
        self.phase.close()
        self.now.refresh()  # it shows the time at the end, as the line that follows does
        self.now.close()


@dataclass
class Phase:
    """The progress of a part of a run that takes many forwards, such as scoring or sampling.

    On a terminal it is a bar, in place of that of the run. In a pipe it is a line with the time
    left, after 10 seconds and then every 10 minutes. Without a Bar, or on other ranks, nothing is
    shown.
    """

    title: str = ""
    bar: Bar = field(default_factory=lambda: Bar(False))
    stop_if_requested: Callable[[], None] = lambda: None  # called before each micro-batch
    is_asked: Callable[[], bool] = lambda: False  # to stop, within a micro-batch of this rank
    parts: int = 1  # calls of each() in the complete phase
    done: int = 0  # those that have ended, including those of earlier starts
    now: Any = None  # the bar of tqdm, which each() makes

    def each(self, batches: Sequence[T], units: int = 1) -> Iterator[T]:
        """Yield the micro-batches of one part. units: calls of advance() in each of them, at most.

        All ranks call it with the same number of micro-batches, although these may differ.
        """
        if self.now is None:
            size = {"desc": self.title, "total": self.parts, "initial": self.done}
            where = ON_TERMINAL if self.bar.is_shown else IN_PIPE | {"file": io.StringIO()}
            how = {"position": 0, "leave": False, "miniters": 0, "smoothing": 0}
            self.now = tqdm(**size, **where, **how, disable=not self.bar.is_main)
            self.bar.phase = self.now
        self.unit = 1 / max(1, len(batches)) / units
        for number, batch in enumerate(batches):
            self.stop_if_requested()
            self.advance(self.done + number / len(batches) - self.now.n)
            yield batch
        self.done += 1
        if self.done == self.parts:
            self.now.close()
            self.bar.now.refresh()

    def advance(self, by: float | None = None) -> None:
        """Show that one more unit of a micro-batch is done."""
        is_due = self.now.update(self.unit if by is None else by)
        if is_due and not self.bar.is_shown:
            self.now.mininterval = PAUSE
            self.bar.say(str(self.now))


def columns(values: dict[str, float], omitted: Sequence[str] = ()) -> list[str]:
    """Return the name and the number of each metric that has a column, except for some."""
    texts = []
    for metric, name in METRICS.items():
        if metric in values and name.column and metric not in omitted:
            digits = ".4f" if abs(values[metric]) < 100 else ".4g"
            texts.append(f"{name.column} {values[metric]:7{digits}}")
    return texts


def row(name: str, text: str) -> str:
    """Return a name and its text, wrapped to the width of a terminal."""
    text = f"{name:<9} {text}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)


def wrapped(line: str) -> str:
    """Return a warning wrapped to the width of a terminal; other lines unchanged."""
    if not line.startswith("warning: "):
        return line
    whole: Any = {"break_on_hyphens": False, "break_long_words": False}  # a path can be copied
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 9, **whole)
