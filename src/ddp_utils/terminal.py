"""What a run prints: lines that fit a terminal of 80 columns, and a progress bar."""

import os
import sys
import textwrap
import threading
import time

from tqdm import tqdm

WIDTH = 80  # columns of a printed line
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


class Bar:
    """A progress bar on a terminal; in a pipe and on other ranks it shows nothing."""

    def __init__(self, is_main: bool):
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which os._exit would leak
        self.is_shown = is_main and sys.stdout.isatty() and sys.stderr.isatty()
        self.is_of_run = True
        self.now = tqdm(disable=True)

    def begin(self, title: str, total: int, done: int = 0, seconds: float = 0.0) -> None:
        """Replace the bar by one for a part of the run, or with title "" for the full run.

        done, seconds: steps and time of earlier starts.
        """
        self.now.close()
        self.is_of_run = not title
        self.now = tqdm(
            desc=title,
            total=total,
            initial=done,
            leave=bool(title),
            bar_format=SHAPE,
            dynamic_ncols=True,
            disable=not self.is_shown,
        )
        self.now.start_t = time.time() - seconds

    def advance(self, **values: float) -> None:
        """Move the bar of a part by one, and show these numbers behind it."""
        self.now.set_postfix_str(", ".join(f"{k}={v:.4f}" for k, v in values.items()), False)
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
