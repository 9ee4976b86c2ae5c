"""Curves of a run, drawn from its metrics.jsonl: a picture for each kind of quantity.

python -m ddp_utils.plots results/dpo                  # draw them again
python -m ddp_utils.plots results/dpo results/dpo.1    # compare: compare_*.png and a table
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from ddp_utils import UserError, cli, distributed  # noqa: E402
from ddp_utils.runs import resume
from ddp_utils.tools.report import read_metrics  # noqa: E402


class Panel(NamedTuple):
    """One picture."""

    title: str
    unit: str  # of the y axis
    metrics: dict  # metric -> its label
    base: str  # label of a horizontal line
    height: float | None = None  # of that line; None: base_line() knows


FIGURES = {
    "loss.png": Panel(
        "loss",
        "nats",
        {"loss": "loss", "loss/preference": "preference", "loss/sft": "SFT, a token"},
        "untrained",
    ),
    "rewards.png": Panel(
        "rewards: beta x log-ratio to the reference",
        "nats",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        "reference",
        0.0,
    ),
    "margins.png": Panel(
        "margin: reward of the chosen - of the rejected",
        "nats",
        {"rewards/margins": "margin"},
        "reference",
        0.0,
    ),
    "accuracies.png": Panel(
        "pairs ranked right",
        "share of pairs",
        {"rewards/accuracies": "by reward", "logps/accuracies": "by log-prob"},
        "chance",
        0.5,
    ),
    "accuracy.png": Panel(
        "actions predicted", "share of actions", {"accuracy": "accuracy"}, "chance", 0.2
    ),
    "in_context.png": Panel(
        "return of the last 10 episodes",
        "share of the optimum",
        {"fraction_of_optimum": "in context"},
        "optimum",
        1.0,
    ),
    "baking.png": Panel("KL to the prompted model", "nats a token", {"kl": "KL"}, "base model"),
    "share_baked.png": Panel("baked", "share of the KL", {"share_baked": "baked"}, "all", 1.0),
    "kept.png": Panel(
        "KL to the base model under other prompts", "nats a token", {"kept/kl": "KL"}, "kept", 0.0
    ),
}
STROKES = ("-", ":", "--")  # of several metrics, where the colour is that of a run
STYLES = {"train": "-", "val": "o--", "test": "s"}


def running_mean(values, window):
    """Mean of up to `window` values that end at each place."""
    means = []
    for end in range(1, len(values) + 1):
        means.append(sum(values[max(0, end - window) : end]) / min(end, window))
    return means


def base_line(panel, lines, config):
    """Return the height of a panel's line, or None: of an untrained model, chance, the optimum."""
    if panel.height is not None:
        return panel.height
    if "kl" in panel.metrics:
        return next((line["kl_base"] for line in lines if "kl_base" in line), None)
    if "n_transit" in config:  # distillation: five actions, equally likely
        return math.log(5)
    if config.get("objective") == "sft" or config.get("method") in (None, "simpo"):
        return None
    squared = 1 / (4 * config["beta"] ** 2)
    others = {"hinge": 1.0, "ipo": squared, "ipo_sum": squared}
    return others.get(config["method"], math.log(2))


def draw(folder):
    """Write those of FIGURES for which there are numbers into the run folder."""
    _figures({"": read_metrics(folder)}, Path(folder), resume.read_json(folder, "config.json"))


def compare(folders):
    """Draw the curves of runs over one another, compare_*.png; return a table of differences."""
    runs = {str(folder): read_metrics(folder) for folder in folders}
    _figures(runs, Path(), {}, "compare_")
    columns = []
    for folder in runs:
        texts = {}
        for name, value in resume.read_json(folder, "config.json").items():
            if name not in resume.FREE:
                texts[name] = str(value) or "-"
        for split, values in resume.read_json(folder).items():
            for name in values if isinstance(values, dict) else ():
                texts[f"{split} {name}"] = "-" if values[name] is None else f"{values[name]:.4g}"
        columns.append(texts)
    rows = [["", *runs]]
    for name in dict.fromkeys(itertools.chain(*columns)):
        texts = [column.get(name, "") for column in columns]
        if len({*texts}) > 1:
            rows.append([name, *texts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _figures(runs, folder, config, prefix=""):
    """runs: name -> lines. Of several runs each has a colour, of one run each metric.

    config: the settings of one run, for its base lines.
    """
    present = set().union(*itertools.chain(*runs.values()))
    several = len(runs) > 1
    for file, panel in FIGURES.items():
        if not present & panel.metrics.keys():
            continue
        figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for run, (name, lines) in enumerate(runs.items()):
            height = None if several else base_line(panel, lines, config)
            if height is not None:
                style = {"color": "gray", "linestyle": "--", "linewidth": 1}
                axis.axhline(height, label=f"{panel.base}: {height:.3g}", **style)
            for turn, (metric, label) in enumerate(panel.metrics.items()):
                if several:
                    label = f"{name}, {label}"
                colour = f"C{run % 10}" if several else f"C{turn}"
                _curve(axis, lines, metric, label, colour, STROKES[turn * several])
        limits = (-0.02, 1.02) if "share" in panel.unit else None
        names = {"title": panel.title, "ylabel": panel.unit, "ylim": limits}
        axis.set(xlabel="step (circles: val, squares: test)", **names)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        figure.savefig(folder / f"{prefix}{file}", dpi=150)
        plt.close(figure)


def _curve(axis, lines, metric, label, colour, line):
    """Training: raw values faint, running mean strong. Validation and test: markers."""
    for split, style in STYLES.items():
        points = []
        for row in lines:
            if row["split"] == split and row.get(metric) is not None:
                points.append((row["step"], row[metric]))
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if split == "train":
            axis.plot(steps, values, line, color=colour, alpha=0.25, linewidth=1)
            means = running_mean(values, max(1, len(values) // 20))
            axis.plot(steps, means, line, color=colour, label=label)
        else:
            edge = "black" if split == "test" else colour
            axis.plot(steps, values, style, color=edge, markerfacecolor=colour, label=label)
        label = "_"  # which a legend leaves out: one entry for all splits


@dataclass
class Settings:
    folders: tyro.conf.Positional[tuple[str, ...]]  # run folders: one, or several to compare
    debug: bool = False  # tracebacks for user errors, too


def main(argv=None) -> int:
    settings = cli.parse(Settings, argv)
    if not settings.folders:
        raise UserError("give one run folder to draw, or several to compare")
    if len(settings.folders) == 1:
        draw(settings.folders[0])
        return 0
    print(compare(settings.folders))
    print("-> compare_*.png")
    return 0


if __name__ == "__main__":
    distributed.run(main)
