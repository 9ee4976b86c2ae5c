"""Loggers of metrics beside metrics.jsonl: each has log(split, step, values) and close()."""

import importlib.util
from typing import Literal

from ddp_utils import UserError


class Files:
    """No logger: metrics.jsonl and the pictures alone.

    folder: of the run; step: those done by earlier starts; settings: without tokens.
    """

    def __init__(self, folder, step, settings):
        pass

    def log(self, split, step, values):
        pass

    def close(self):
        pass


class TensorBoard:
    """Event files in the run folder; lines behind `step` steps of an earlier start are dropped."""

    def __init__(self, folder, step, settings):
        from torch.utils.tensorboard import SummaryWriter  # of one rank alone, 0.16 s

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, split, step, values):
        for name, value in values.items():
            if name != "count":
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self):
        self.writer.close()


def weights_and_biases(folder, _step, settings):
    """Return a logger of Weights & Biases, whose package is imported here alone."""
    from ddp_utils.runs.wandb_logger import WandB

    return WandB(folder, settings)


LOGGERS = {"tensorboard": TensorBoard, "wandb": weights_and_biases, "none": Files}
Name = Literal[tuple(LOGGERS)]  # one of these names


def check(name):
    """Raise UserError if a logger is not installed."""
    if name == "wandb" and not importlib.util.find_spec("wandb"):
        raise UserError("--report_to wandb: it is not installed; pip install wandb")
