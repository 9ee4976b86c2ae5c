"""The epochs of a run: when they end, the models that are written then, and the printed summary."""

import math
from pathlib import Path

import numpy as np

from ddp_utils import distributed
from ddp_utils.run import Run
from ddp_utils.sampler import Plan
from dpo_inv import evaluate
from dpo_inv.mpnn import ProteinMPNN


def begin(step: int, plan: Plan, run: Run) -> None:
    """Print the number of the epoch that `step` belongs to, and start its progress bar."""
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    epochs = math.ceil(max(plan.num_epochs, plan.epoch(plan.steps)))
    run.say(f"\nEpoch {epoch + 1}/{epochs}")
    run.bar.begin("Training", plan.steps_per_epoch, step_of_epoch)


def end(step: int, plan: Plan, model: ProteinMPNN, values: dict[str, float], run: Run) -> None:
    """Write the models of the epoch that ends after `step` steps, and print and log its summary.

    values: of the validation; empty if there is no validation data.
    """
    epoch = math.ceil(plan.epoch(step))
    names = [f"checkpoint_epoch_{epoch}.pt", "latest_model.pt"]
    if values:
        run.results["val"] = values
        lowest = run.results.get("best", {"loss": math.inf})["loss"]
        if values["loss"] < lowest:
            run.results["best"] = {"loss": values["loss"], "step": step}
            names.append("best_model.pt")

    def write() -> None:
        for name in names:
            model.save(run.folder / name)
        loss = train_loss(run.folder, (epoch - 1) * plan.steps_per_epoch, step)
        run.say(f"\nEpoch {epoch} Summary:\n  Train Loss: {loss:.4f}")

    if step:
        distributed.on_main(run.world, write)
    if values:
        name = "rewards/accuracies"
        run.say(f"  Val Loss:   {values['loss']:.4f}")
        interval = f"[{values[f'{name}_low']:.4f}, {values[f'{name}_high']:.4f}]"
        run.say(f"  Val Accuracy: {values[name]:.4f} {interval}")
        run.say(evaluate.describe(values))
    run.log(step, values, "val", echo=False)


def train_loss(folder: Path, after: int, until: int) -> float:
    """Return the mean loss over the pairs of the steps after < step <= until, of all starts."""
    from ddp_utils.plots import read_metrics

    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    lines = [line for line in lines if after < line["step"] <= until]
    weights = [line["count"] for line in lines]
    return float(np.average([line["loss"] for line in lines], weights=weights))
