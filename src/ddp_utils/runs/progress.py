"""What rank 0 shows of a run: lines of at most 80 columns, and on a terminal a progress bar."""

import os
import sys
import textwrap
import threading

from tqdm import tqdm

WIDTH = 80  # columns
PARTS = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
STEPS = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
COLUMNS = {  # of a line: metric -> its name there
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


def columns(values):
    """Return the text of each of COLUMNS that there is a number for, four at most."""
    texts = []
    for metric, name in COLUMNS.items():
        if metric in values:
            value = values[metric]
            digits = 4 if abs(value) < 10 else 2
            number = f"{value:7.{digits}f}" if abs(value) < 1000 else f"{value:7.1e}"
            texts.append(f"{name} {number}")
    return texts


def row(name, text):
    """Return a name and its text behind it, wrapped."""
    options = {"width": WIDTH, "subsequent_indent": " " * 10, "break_on_hyphens": False}
    return textwrap.fill(f"{name:<9} {text}", **options)


class Bar:
    """The bar that is shown now; where none is, all of this does nothing."""

    def __init__(self, shown):
        tqdm.set_lock(threading.RLock())  # its default is a semaphore, which os._exit would leak
        self.shown = shown and sys.stderr.isatty()
        self.in_parts = False
        self.now = None

    def of_run(self, steps, done):
        """One bar from the first step to the last: see `reach`."""
        if self.now is not None:
            self.now.close()
        self.in_parts = False
        options = {"bar_format": STEPS, "dynamic_ncols": True, "disable": not self.shown}
        self.now = tqdm(total=steps, initial=done, **options)

    def reach(self, step, texts=()):
        """So many steps of the run are done, the last one with these texts of its numbers."""
        if self.now is not None and not self.in_parts:
            if texts:
                shown = [*texts[:1], *texts[-2:]] if len(texts) > 3 else texts
                self.now.set_postfix_str("  ".join(shown), refresh=False)
            self.now.update(step - self.now.n)

    def begin(self, title, total, done=0):
        """From here on a bar for this part of the run, and no lines of steps: see `advance`."""
        self.in_parts = True
        if self.shown:
            self.now.leave &= self.now.n > 0
            self.now.close()
            options = {"bar_format": PARTS, "dynamic_ncols": True}
            self.now = tqdm(total=total, initial=done, desc=title, **options)

    def advance(self, **values):
        """One further in this part, with these numbers behind the bar."""
        if self.shown:
            shown = ", ".join(f"{name}={value:.4f}" for name, value in values.items())
            self.now.set_postfix_str(shown, refresh=False)
            self.now.update()
            if self.now.n == self.now.total:
                self.now.close()  # what is said next comes below it

    @property
    def speaks(self):
        """Whether it shows the numbers of each step, so that no line has to."""
        return self.shown and (self.in_parts or sys.stdout.isatty())

    def say(self, line):
        """One line above the bar."""
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # | head: who reads no more has not asked it to stop
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def close(self):
        self.now.close()
