"""Curves of a run, drawn from its metrics.jsonl: one picture for each kind of quantity."""

import contextlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddp_utils import UserError


class Panel(NamedTuple):
    """One picture."""

    title: str
    unit: str  # of the y axis
    metrics: dict[str, str]  # metric -> its label
    base: str = ""  # the label of a horizontal line, if there is one
    height: float = 0.0  # of that line


PAIRS, TOKENS, OPTIMUM = "fraction of pairs", "nats per token", "fraction of the optimum"
LOSSES = {"loss": "loss", "loss/preference": "preference", "loss/sft": "SFT, per token"}
REWARDS = {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}
ACCURACIES = {"rewards/accuracies": "by reward", "logps/accuracies": "by log-prob"}
FIGURES = {
    "loss": Panel("loss", "nats", LOSSES),
    "rewards": Panel("rewards: beta x log-ratio to the reference", "nats", REWARDS, "reference"),
    "margins": Panel("reward margin", "nats", {"rewards/margins": "margin"}, "reference"),
    "accuracies": Panel("pairs ranked correctly", PAIRS, ACCURACIES, "chance", 0.5),
    "accuracy": Panel("actions", "fraction of actions", {"accuracy": "accuracy"}, "chance", 0.2),
    "in_context": Panel("last 10 episodes", OPTIMUM, {"fraction_of_optimum": "return"}, "best", 1),
    "baking": Panel("KL to the prompted model", TOKENS, {"kl": "baked", "kl_base": "base model"}),
    "share_baked": Panel("baked", "fraction of the KL", {"share_baked": "baked"}, "all", 1),
    "kept": Panel("KL under other prompts", TOKENS, {"kept/kl": "KL"}, "base model"),
}
DRAWN = set().union(*(panel.metrics for panel in FIGURES.values()))
COUNTERS = {"split", "step", "epoch", "count"}  # which a line has besides its metrics
STYLES = {"train": "-", "val": "o--", "test": "s"}


def read_metrics(folder: str | Path) -> list[dict]:
    """Return the lines of metrics.jsonl; damaged lines are left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: no metrics.jsonl in this folder; use a run folder")
    lines = []
    for text in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"split", "step"} <= line.keys():
                lines.append(line)
    return lines


def draw(folder: Path) -> None:
    """Draw the curves of a run as PNG files in its folder."""
    lines = read_metrics(folder)
    for name, panel in FIGURES.items():
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axis = figure.subplots()
        for number, (metric, label) in enumerate(panel.metrics.items()):
            draw_curve(axis, lines, metric, label, f"C{number}")
        if not axis.lines:
            continue
        if panel.base:
            label = f"{panel.base}: {panel.height:g}"
            axis.axhline(panel.height, label=label, color="gray", ls="--")
        axis.set(title=panel.title, xlabel="step (circles: val, squares: test)", ylabel=panel.unit)
        if panel.unit.startswith("fraction"):
            axis.set_ylim(-0.02, 1.02)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        figure.savefig(folder / f"{name}.png", dpi=150)
    draw_others(folder, lines)


def draw_others(folder: Path, lines: list[dict]) -> None:
    """Draw all other metrics, also those of a changed script, as small curves in others.png."""
    counts: Counter = Counter()
    for line in lines:
        counts.update(line.keys())
    names = [name for name in sorted(counts) if counts[name] > 1 and name not in DRAWN | COUNTERS]
    if not names:
        return
    columns = 3
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        draw_curve(axis, lines, name, name, "C0")
        axis.set_title(name, fontsize="small")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in axes[len(names) :]:
        axis.axis("off")
    figure.savefig(folder / "others.png", dpi=100)


def draw_curve(axis: Axes, lines: list[dict], metric: str, label: str, color: str) -> None:
    """Draw a metric: training values faint, their running mean strong, other splits as markers."""
    for split, style in STYLES.items():
        rows = [row for row in lines if row["split"] == split and row.get(metric) is not None]
        steps, values = [row["step"] for row in rows], [row[metric] for row in rows]
        if rows and split == "train":
            axis.plot(steps, values, style, color=color, alpha=0.25, linewidth=1)
            window = max(1, len(values) // 20)
            parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
            values = [sum(part) / len(part) for part in parts]
        if rows:
            edge = "black" if split == "test" else color
            axis.plot(steps, values, style, color=edge, markerfacecolor=color, label=label)
            label = "_"  # the legend has one entry for all splits
