"""Curves of a run, drawn from its metrics.jsonl: one panel per kind of quantity.

python -m ddp_utils.tools.plots results/dpo                  # draw them again
python -m ddp_utils.tools.plots results/dpo results/dpo.1    # compare: compare_*.png and a table
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from ddp_utils import UserError, cli  # noqa: E402
from ddp_utils.runs import preemption, resume
from ddp_utils.tools.report import read_metrics  # noqa: E402

FIGURES = {  # file -> panels of (title, {metric: label})
    "loss.png": [("loss", {"loss": "loss"})],
    "rewards.png": [
        ("rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}),
        ("margins", {"rewards/margins": "margins"}),
    ],
    "accuracies.png": [("share of pairs ranked right", {"rewards/accuracies": "accuracies"})],
    "in_context.png": [
        ("share of the optimum in the last 10 episodes", {"fraction_of_optimum": "in context"})
    ],
    "baking.png": [
        ("KL to the prompted model, nats a token", {"kl": "kl"}),
        ("share baked", {"share_baked": "baked"}),
    ],
}
STYLES = {"train": "-", "val": "o--", "test": "s"}


def running_mean(values, window):
    """Mean of up to `window` values that end at each place."""
    means = []
    for end in range(1, len(values) + 1):
        means.append(sum(values[max(0, end - window) : end]) / min(end, window))
    return means


def draw(folder):
    """Write those of FIGURES for which there are numbers into the run folder."""
    _figures({"": read_metrics(folder)}, Path(folder))


def compare(folders):
    """Draw the curves of runs over one another, compare_*.png; return a table of differences."""
    runs = {str(folder): read_metrics(folder) for folder in folders}
    _figures(runs, Path(), "compare_")
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


def _figures(runs, folder, prefix=""):
    """runs: name -> lines. Of several runs each has a colour, of one run each metric."""
    present = set().union(*itertools.chain(*runs.values()))
    several = len(runs) > 1
    for file, panels in FIGURES.items():
        panels = [panel for panel in panels if present & panel[1].keys()]
        if not panels:
            continue
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6.4 * len(panels), 3.8), squeeze=False, layout="constrained"
        )
        for axis, (title, metrics) in zip(axes[0], panels, strict=True):
            for run, (name, lines) in enumerate(runs.items()):
                for turn, (metric, label) in enumerate(metrics.items()):
                    if several:
                        label = f"{name}, {label}"
                    look = (f"C{run % 10}", "-:"[turn]) if several else (f"C{turn}", "-")
                    _curve(axis, lines, metric, label, *look)
            limits = (-0.02, 1.02) if "share" in title else None
            axis.set(title=title, xlabel="step (circles: val, squares: test)", ylim=limits)
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
    preemption.run(main)
