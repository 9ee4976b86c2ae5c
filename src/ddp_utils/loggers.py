"""Loggers besides metrics.jsonl: TensorBoard and Weights & Biases. Rank 0 imports this module."""

import os
import uuid
from pathlib import Path
from typing import Any

from ddp_utils import UserError


def check(kind: str) -> None:
    """Raise UserError if the package of a logger is missing."""
    if kind == "wandb":
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise UserError("--report_to wandb: run pip install wandb") from error


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, split: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
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
        named = {f"{split}/{name}": value for name, value in values.items()}
        self.run.log({"step": step, **named})

    def close(self) -> None:
        self.run.finish()


def make(name: str, folder: Path, step: int, settings: dict[str, Any]) -> list:
    """Return the logger of this name in a list, which is empty for `none`.

    step: the steps that earlier starts have done; settings: of the run.
    """
    if name == "tensorboard":
        return [TensorBoard(folder, step)]
    return [WandB(folder, settings)] if name == "wandb" else []
