"""What a run prints: lines that fit a terminal of 80 columns, and a progress bar."""

import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

WIDTH = 80  # columns of a printed line
SILENCE, PAUSE = 10, 600  # seconds of a phase before its first line in a pipe, and between two
COLUMNS = {  # metric -> its name in a printed line
    "loss": "loss",
    "rewards/chosen": "chosen",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "kl": "kl",
    "kl_base": "kl_base",
    "share_baked": "share_baked",
    "accuracy": "accuracy",
    "fraction_of_optimum": "of_optimum",
}
SHAPE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
PHASE_SHAPE = "{l_bar}{bar}| [{elapsed}<{remaining}]"
T = TypeVar("T")


class Bar:
    """A progress bar on a terminal; in a pipe and on other ranks it shows nothing."""

    def __init__(self, is_main: bool):
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which os._exit would leak
        self.is_main = is_main
        self.is_shown = is_main and sys.stdout.isatty() and sys.stderr.isatty()
        self.is_of_run = True
        self.losses: list[float] = []  # of this part
        self.now = tqdm(disable=True)

    def begin(self, title: str, total: int, done: int = 0, seconds: float = 0.0) -> None:
        """Replace the bar by one for a part of the run, or with title "" for the full run.

        done, seconds: steps and time of earlier starts.
        """
        self.now.close()
        self.losses = []
        self.is_of_run = not title
        self.now = self.make(title, total, done, SHAPE, leave=bool(title))
        self.now.start_t = time.time() - seconds

    def make(self, title: str, total: float, done: float, shape: str, **options: Any) -> tqdm:
        """Return a bar of tqdm, which is hidden where this one is."""
        size = {"desc": title, "total": total, "initial": done, "bar_format": shape}
        return tqdm(**size, dynamic_ncols=True, disable=not self.is_shown, **options)

    def advance(self, losses: Sequence[float]) -> None:
        """Move the bar of a part by one; show the last of these losses and the mean of the part."""
        self.losses += losses
        mean = sum(self.losses) / len(self.losses)
        self.now.set_postfix_str(f"loss={self.losses[-1]:.4f}, avg_loss={mean:.4f}", False)
        self.now.update()

    def reach(self, step: int, text: str = "") -> None:
        """Move the bar of the full run to a step; the bar of a part stays."""
        if self.is_of_run:
            self.now.set_postfix_str(text, refresh=False)
            self.now.update(step - self.now.n)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended, as `| head` does; the run continues
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def close(self) -> None:
        """Remove the bar of the full run; the bar of a part stays visible."""
        if self.is_of_run:
            self.now.refresh()  # it shows the time at the end, as the line that follows does
        self.now.close()


class Phase:
    """The progress of a part of a run that takes many forwards, such as scoring or sampling.

    On a terminal it is a bar, in place of that of the run; in a pipe a line with the time left if
    the part takes long. Nothing is shown without a Bar, or on other ranks.

    stop_if_requested: called by all ranks before each micro-batch. parts: number of calls of each()
    for the complete phase; done: those of earlier starts.
    """

    def __init__(
        self,
        title: str = "",
        bar: Bar | None = None,
        stop_if_requested: Callable[[], None] = lambda: None,
        parts: int = 1,
        done: int = 0,
    ):
        self.title = title
        self.bar = bar or Bar(False)
        self.stop_if_requested = stop_if_requested
        self.parts = parts
        self.first = self.fraction = done / parts  # of the phase
        self.start = time.time()
        self.due: float = SILENCE  # seconds from the start to the next line in a pipe
        self.shown = tqdm(disable=True)

    def each(self, batches: Sequence[T], units: int = 1) -> Iterator[T]:
        """Yield the micro-batches of one part. units: calls of advance() in each of them, at most.

        Ranks may have different micro-batches, but they have the same number of them.
        """
        before = self.fraction
        part = 1 / self.parts / max(1, len(batches))  # of one micro-batch
        self.unit = part / units
        self.shown = self.bar.make(
            self.title, 1.0, self.first, PHASE_SHAPE, leave=False, position=0, smoothing=0
        )
        self.shown.start_t = self.start
        self.shown.update(before - self.first)
        try:
            for number, batch in enumerate(batches):
                self.stop_if_requested()
                yield batch
                self.advance(before + (number + 1) * part - self.fraction)
        finally:
            self.shown.close()
            self.bar.now.refresh()

    def advance(self, by: float | None = None) -> None:
        """Show that one more unit of a micro-batch is done."""
        by = self.unit if by is None else by
        self.fraction += by
        self.shown.update(by)
        seconds = time.time() - self.start
        if seconds >= self.due and self.bar.is_main and not self.bar.is_shown:
            self.due = seconds + PAUSE
            left = seconds * (1 - self.fraction) / max(self.fraction - self.first, 1e-9)
            if left > SILENCE:
                self.bar.say(f"{self.title}: about {tqdm.format_interval(left)} left")


def columns(values: dict[str, float]) -> list[str]:
    """Return the name and the number of each metric that has a column."""
    texts = []
    for metric, name in COLUMNS.items():
        if metric in values:
            digits = ".4f" if abs(values[metric]) < 100 else ".4g"
            texts.append(f"{name} {values[metric]:7{digits}}")
    return texts


def row(name: str, text: str) -> str:
    """Return a name and its text, wrapped to the width of a terminal."""
    text = f"{name:<9} {text}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
