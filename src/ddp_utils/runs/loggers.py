"""Loggers of metrics beside metrics.jsonl: each has log(split, step, values) and close()."""

import importlib.util
import json
import os
from typing import Literal

from ddp_utils import UserError


class Files:
    """No logger: metrics.jsonl and the pictures alone."""

    def __init__(self, folder, step):
        pass

    def log(self, split, step, values):
        pass

    def close(self):
        pass


class TensorBoard:
    """Event files in the run folder; lines behind `step` steps of an earlier start are dropped."""

    def __init__(self, folder, step):
        from torch.utils.tensorboard import SummaryWriter  # of one rank alone, 0.16 s

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log(self, split, step, values):
        for name, value in values.items():
            if name != "count":
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self):
        self.writer.close()


class WandB:
    """A run of Weights & Biases, continued by later starts; the WANDB_* variables steer it."""

    def __init__(self, folder, step):
        import wandb

        id_file = folder / "wandb/id.txt"
        id_file.parent.mkdir(exist_ok=True)
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id())
        project = os.environ.get("WANDB_PROJECT", "ddp-scripts")
        settings = json.loads((folder / "config.json").read_text())  # without tokens
        names = {"project": project, "name": folder.name, "id": id_file.read_text()}
        quiet = wandb.Settings(silent=True, console="off")
        self.run = wandb.init(**names, dir=folder, config=settings, settings=quiet, resume="allow")
        self.run.define_metric("*", step_metric="step")  # after a kill, steps come again

    def log(self, split, step, values):
        named = {f"{split}/{name}": value for name, value in values.items() if name != "count"}
        self.run.log({"step": step, **named})

    def close(self):
        self.run.finish()


LOGGERS = {"tensorboard": TensorBoard, "wandb": WandB, "none": Files}
Name = Literal[tuple(LOGGERS)]  # one of these names


def check(name):
    """Raise UserError if a logger is not installed."""
    if name == "wandb" and not importlib.util.find_spec("wandb"):
        raise UserError("--report_to wandb: it is not installed; pip install wandb")
