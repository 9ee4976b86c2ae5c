"""Progress bars of rank 0, on a terminal only: one of the run, or one part after another."""

import os
import sys
import threading

from tqdm import tqdm

NUMBERS = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class Bar:
    """The bar that is shown now; where none is, all of this does nothing."""

    def __init__(self, shown):
        tqdm.set_lock(threading.RLock())  # its default is a semaphore, which os._exit would leak
        self.shown = shown and sys.stderr.isatty()
        self.in_parts = False
        self.now = None
        if not self.shown and "transformers" in sys.modules:  # not imported for distillation
            sys.modules["transformers"].utils.logging.disable_progress_bar()  # of weights

    def of_run(self, steps, done):
        """One bar from the first step to the last: see `reach`."""
        if self.now is not None:
            self.now.close()
        self.in_parts = False
        self.now = tqdm(total=steps, initial=done, unit="step", disable=not self.shown)

    def reach(self, step):
        """So many steps of the run are done."""
        if self.now is not None and not self.in_parts:
            self.now.update(step - self.now.n)

    def begin(self, title, total, done=0):
        """From here on a bar for this part of the run, and no lines of steps: see `advance`."""
        self.in_parts = True
        if self.shown:
            self.now.leave &= self.now.n > 0
            self.now.close()
            self.now = tqdm(total=total, initial=done, desc=title, bar_format=NUMBERS)

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
        return self.shown and self.in_parts

    def say(self, line):
        """One line above the bar."""
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # | head: who reads no more has not asked it to stop
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def close(self):
        self.now.close()
