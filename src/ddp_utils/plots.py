"""Curves of a run, drawn from its metrics.jsonl: one panel per kind of quantity."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

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
COLOURS = ("tab:blue", "tab:orange")
STYLES = {"train": "-", "val": "o--", "test": "s"}


def read_metrics(folder):
    """The lines of metrics.jsonl as dicts."""
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]  # a kill may cut the last line


def mean_of(folder, name, after, until):
    """Mean over the pairs of some training steps: those above `after`, up to `until`."""
    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    lines = [line for line in lines if after < line["step"] <= until]
    return sum(x[name] * x["count"] for x in lines) / sum(x["count"] for x in lines)


def running_mean(values, window):
    """Mean of up to `window` values that end at each place."""
    return [
        sum(values[max(0, end - window) : end]) / min(end, window)
        for end in range(1, len(values) + 1)
    ]


def draw(folder):
    """Write those of FIGURES for which there are numbers into the run folder."""
    lines = read_metrics(folder)
    there = set().union(*lines)
    for name, panels in FIGURES.items():
        if not any(there & metrics.keys() for _, metrics in panels):
            continue
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6.4 * len(panels), 3.8), squeeze=False, layout="constrained"
        )
        for axis, (title, metrics) in zip(axes[0], panels, strict=True):
            for colour, (metric, label) in zip(COLOURS, metrics.items(), strict=False):
                _curve(axis, lines, metric, label, colour)
            limits = (-0.02, 1.02) if "share" in title else None
            axis.set(title=title, xlabel="step", ylim=limits)
            axis.grid(alpha=0.3)
            if there & metrics.keys():
                axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        figure.savefig(Path(folder) / name, dpi=150)
        plt.close(figure)


def _curve(axis, lines, metric, label, colour):
    """Training: raw values faint, running mean strong. Validation and test: markers."""
    for split, style in STYLES.items():
        found = [line for line in lines if line["split"] == split]
        points = [(p["step"], p[metric]) for p in found if p.get(metric) is not None]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        if split == "train":
            axis.plot(steps, values, style, color=colour, alpha=0.25, linewidth=1)
            window = max(1, len(values) // 20)
            axis.plot(steps, running_mean(values, window), style, color=colour, label=label)
        else:
            shade = "black" if split == "test" else colour
            axis.plot(
                steps, values, style, color=shade, markerfacecolor=colour, label=f"{label}, {split}"
            )


if __name__ == "__main__":  # python -m ddp_utils.plots results/dpo
    for argument in sys.argv[1:]:
        draw(argument)
