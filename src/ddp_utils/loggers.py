"""Where the numbers of a run are shown: the terminal, and TensorBoard or Weights & Biases."""

import importlib.util
import os
import sys
import textwrap
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from ddp_utils import UserError

Name = Literal["tensorboard", "wandb", "none"]  # the values of --report_to
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


# --- the terminal --------------------------------------------------------------------------------


class Bar:
    """A progress bar on a terminal; in a pipe and on other ranks it shows nothing."""

    def __init__(self, is_main: bool):
        tqdm.set_lock(threading.RLock())  # the default is a semaphore, which os._exit would leak
        self.is_shown = is_main and sys.stdout.isatty() and sys.stderr.isatty()
        self.begin("", 0)

    def begin(self, title: str, total: int, done: int = 0) -> None:
        """Replace the bar by one for a part of the run, or with title "" for the full run."""
        if hasattr(self, "now"):
            self.close()
        shape = "{l_bar}{bar}|" if title else "{bar}|"
        self.is_of_run = not title
        self.first = done
        self.now = tqdm(
            total=total,
            initial=done,
            desc=title,
            bar_format=shape + " {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            dynamic_ncols=True,
            disable=not self.is_shown,
        )

    def advance(self, **values: float) -> None:
        """Move the bar of a part by one, and show these numbers behind it."""
        self.now.set_postfix_str(", ".join(f"{k}={v:.4f}" for k, v in values.items()), False)
        self.now.update()

    def reach(self, step: int, texts: Sequence[str] = ()) -> None:
        """Move the bar of the full run to a step; the bar of a part stays."""
        if self.is_of_run:
            self.now.set_postfix_str("  ".join(texts), refresh=False)
            self.now.update(step - self.now.n)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has ended, as `| head` does; the run goes on
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def close(self) -> None:
        """Remove the bar; one that has moved stays visible."""
        self.now.leave = self.now.n > self.first
        self.now.close()


def columns(values: dict[str, float]) -> list[str]:
    """Return the name and the number of each metric that has a column."""
    texts = []
    for metric, name in COLUMNS.items():
        if metric in values:
            value = values[metric]
            digits = 4 if abs(value) < 10 else 2
            number = f"{value:7.{digits}f}" if abs(value) < 1000 else f"{value:7.1e}"
            texts.append(f"{name} {number}")
    return texts


def row(name: str, text: str) -> str:
    """Return a name and its text, wrapped to the width of a terminal."""
    text = f"{name:<9} {text}"
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)


# --- loggers besides metrics.jsonl ---------------------------------------------------------------


class NoLogger:
    """No logger: only metrics.jsonl and the pictures."""

    def log(self, split: str, step: int, values: dict[str, float]) -> None:
        """Log the numbers of one step."""

    def close(self) -> None:
        """Write everything that is still in memory."""


class TensorBoard(NoLogger):
    """Event files in the run folder."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, split: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name != "count":
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class WandB(NoLogger):
    """A run of Weights & Biases, configured by the WANDB_* variables; later starts continue it."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import wandb

        id_file = folder / "wandb/id.txt"
        id_file.parent.mkdir(exist_ok=True)
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "ddp-scripts"),
                name=folder.name,
                id=id_file.read_text(),
                resume="allow",
                dir=folder,
                config=settings,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"--report_to wandb: {reason}; run `wandb login`, or export WANDB_MODE=offline"
            ) from error
        # not W&B's own step, which may not decrease: after a kill some steps are logged again
        self.run.define_metric("*", step_metric="step")

    def log(self, split: str, step: int, values: dict[str, float]) -> None:
        named = {f"{split}/{name}": value for name, value in values.items() if name != "count"}
        self.run.log({"step": step, **named})

    def close(self) -> None:
        self.run.finish()


def check(name: str) -> None:
    """Raise UserError if the package of a logger is not installed."""
    if name == "wandb" and not importlib.util.find_spec("wandb"):
        raise UserError("--report_to wandb: it is not installed; run pip install wandb")


def make(name: str, folder: Path, step: int, settings: dict[str, Any]) -> NoLogger:
    """Return the logger of this name.

    step: the steps that earlier starts have done; settings: of the run.
    """
    if name == "tensorboard":
        return TensorBoard(folder, step)
    if name == "wandb":
        return WandB(folder, settings)
    return NoLogger()
