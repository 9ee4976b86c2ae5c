"""Metrics to Weights & Biases, for --report_to wandb."""

import os
import uuid

import wandb

from ddp_utils import UserError


class WandB:
    """A run of Weights & Biases, continued by later starts; the WANDB_* variables steer it."""

    def __init__(self, folder, settings):
        id_file = folder / "wandb/id.txt"
        id_file.parent.mkdir(exist_ok=True)
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        project = os.environ.get("WANDB_PROJECT", "ddp-scripts")
        names = {"project": project, "name": folder.name, "id": id_file.read_text()}
        quiet = wandb.Settings(silent=True, console="off")
        options = {"dir": folder, "config": settings, "settings": quiet, "resume": "allow"}
        try:
            self.run = wandb.init(**names, **options)
        except wandb.errors.Error as error:
            mend = "wandb login, or export WANDB_MODE=offline"
            raise UserError(f"--report_to wandb: {str(error).splitlines()[0]}; {mend}") from error
        self.run.define_metric("*", step_metric="step")  # after a kill, steps come again

    def log(self, split, step, values):
        named = {f"{split}/{name}": value for name, value in values.items() if name != "count"}
        self.run.log({"step": step, **named})

    def close(self):
        self.run.finish()
