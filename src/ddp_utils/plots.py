"""Curves of a run, drawn from its metrics.jsonl: one picture for each kind of quantity."""

import contextlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.lib.stride_tricks import sliding_window_view

from ddp_utils import UserError, cli, data
from ddp_utils.terminal import METRICS, Metric


class Panel(NamedTuple):
    """One picture."""

    metrics: tuple[str, ...]  # those of ddp_utils.terminal.METRICS; the first one has its unit
    title: str = ""  # "": the name of the first metric
    base: str = ""  # the label of a horizontal line, if there is one
    height: float = 0.0  # of that line


REWARDS = "Rewards: beta x log-ratio to the reference"
FIGURES = {
    "loss": Panel(("loss", "loss/preference", "loss/sft")),
    "rewards": Panel(("rewards/chosen", "rewards/rejected"), REWARDS, "reference"),
    "margins": Panel(("rewards/margins",), base="reference"),
    "accuracies": Panel(("rewards/accuracies", "logps/accuracies"), "", "chance", 0.5),
    "accuracy": Panel(("accuracy",)),
    "in_context": Panel(("fraction_of_optimum",), "", "best", 1),
    "baking": Panel(("kl", "kl_base")),
    "share_baked": Panel(("share_baked",), base="all", height=1),
    "kept": Panel(("kept/kl",), base="base model"),
}
DRAWN = set().union(*(panel.metrics for panel in FIGURES.values()))
COUNTERS = {"split", "step", "epoch", "count"}  # which a line has besides its metrics
ENDS = ("_low", "_high")  # of a metric: its 95 % interval
SPLITS = {"train": "training", "val": "held out", "test": "held out: test data"}
STYLES: dict[str, dict[str, Any]] = {
    "train": {"ls": "-"},
    "val": {"ls": "--", "marker": "o"},
    "test": {"ls": "", "marker": "s", "markerfacecolor": "none", "markersize": 10},
}
# the unit of a loss, in the runs that have another metric
LOSSES = {"rewards/margins": "loss per pair", "accuracy": "nats per action", "": "nats per token"}


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


def panels_of(folder: Path) -> dict[str, Panel]:
    """Return the pictures of a run; the rewards of some methods are not relative to a reference."""
    method = ""
    with contextlib.suppress(UserError):
        method = data.read_json(folder / "config.json").get("method", "")
    if method not in cli.REFERENCE_FREE:
        return FIGURES
    rewards = Panel(FIGURES["rewards"].metrics, "Rewards: beta x log-prob per token")
    return FIGURES | {"rewards": rewards, "margins": Panel(FIGURES["margins"].metrics)}


def draw(folder: Path) -> None:
    """Draw the curves of a run as PNG files in its folder."""
    lines = read_metrics(folder)
    present = {""}.union(*lines)
    for name, panel in panels_of(folder).items():
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")  # readable on a phone
        axis = figure.subplots()
        metrics = [metric for metric in panel.metrics if metric in present]
        for number, metric in enumerate(metrics):
            draw_curve(axis, lines, metric, f"C{number}")
        if not axis.lines:
            continue
        shown, entries = METRICS[metrics[0]], []
        if len(metrics) > 1:
            for number, metric in enumerate(metrics):
                entries.append(Line2D([], [], color=f"C{number}", label=METRICS[metric].words))
        drawn = {row["split"] for row in lines if row.keys() & {*metrics}}
        color = "gray" if len(metrics) > 1 else "C0"
        for split, words in SPLITS.items():
            if split in drawn:
                entries.append(Line2D([], [], label=words, color=color, **STYLES[split]))
        if panel.base:
            label = f"{panel.base}: {panel.height:g}"
            entries.append(axis.axhline(panel.height, label=label, color="gray", ls=":"))
        unit = shown.unit or next(unit for metric, unit in LOSSES.items() if metric in present)
        axis.set(title=panel.title or capitalized(shown.words), xlabel="step", ylabel=unit)
        if unit.startswith("fraction"):
            axis.set_ylim(-0.02, 1.02)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        figure.legend(handles=entries, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(folder / f"{name}.png", dpi=200)
    draw_others(folder, lines)


def draw_others(folder: Path, lines: list[dict]) -> None:
    """Draw all other metrics, also those of a changed script, as small curves in others.png."""
    counts: Counter = Counter()
    for line in lines:
        counts.update(line.keys())
    others = sorted(counts.keys() - DRAWN - COUNTERS)
    names = [name for name in others if counts[name] > 1 and not name.endswith(ENDS)]
    if not names:
        return
    columns = 2
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.4 * columns, 1.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        draw_curve(axis, lines, name, "C0")
        words = METRICS.get(name, Metric(name))
        axis.set_title(words.words, fontsize="small", parse_math=False)  # it may contain $
        axis.set_ylabel(words.unit, fontsize="small")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        low, high = axis.dataLim.intervaly
        if 0 <= high - low < 1e-9 * abs(high):  # constant, except for rounding
            axis.set_ylim(high - abs(high) / 20, high + abs(high) / 20)
        axis.grid(alpha=0.3)
    for axis in axes[len(names) :]:
        axis.axis("off")
    figure.savefig(folder / "others.png", dpi=200)


def draw_curve(axis: Axes, lines: list[dict], metric: str, color: str) -> None:
    """Draw a metric: training values faint, their running mean strong, held-out values as markers.

    A held-out value with a 95 % interval has a vertical bar.
    """
    for split, style in STYLES.items():
        rows = [row for row in lines if row["split"] == split and row.get(metric) is not None]
        steps, values = [row["step"] for row in rows], [row[metric] for row in rows]
        if rows and split == "train":
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            window = max(1, len(values) // 20)
            parts = sliding_window_view(np.pad(values, (window - 1, 0)), window)
            counts = np.minimum(np.arange(1, len(values) + 1), window)
            values = (parts.sum(axis=1) / counts).tolist()
        if rows:
            (curve,) = axis.plot(steps, values, color=color, **style)
            if len(rows) == 1 and split == "train":
                curve.set_marker(".")
        for row in rows:
            low, high = row.get(f"{metric}_low"), row.get(f"{metric}_high")
            if low is not None and high is not None:
                axis.vlines(row["step"], low, high, color=color)


def capitalized(text: str) -> str:
    """Return the text with a capital letter at its beginning; the other letters stay."""
    return text[:1].upper() + text[1:]
