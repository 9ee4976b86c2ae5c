"""Draw docs/img/recipes.png: the runs of the first recipe in docs/recipes.md.

python docs/img/recipes.py results/manners results/manners_sft
"""

import sys
from pathlib import Path

from matplotlib import pyplot as plt

from ddp_utils import plots

RUNS = {"plain DPO": "tab:red", "DPO + sft_weight 1": "tab:blue"}
METRICS = {"rewards/margins": "margin", "rewards/chosen": "reward of the chosen answers"}


def main() -> None:
    """Draw margins and rewards of both runs."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, color), folder in zip(RUNS.items(), sys.argv[1:], strict=True):
        rows = plots.read_metrics(folder)
        for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
            steps = [row for row in rows if row["split"] == "train"]
            held_out = [row for row in rows if row["split"] == "test"]
            values = [row[metric] for row in steps]
            axis.plot([row["step"] for row in steps], values, color=color, label=name)
            values = [row[metric] for row in held_out]
            axis.plot([row["step"] for row in held_out], values, "o", color=color)
            axis.set(title=title, xlabel="step (dots: held-out pairs)", ylabel="nats")
    for axis in axes:
        axis.axhline(0, color="gray", linestyle="--", linewidth=1)  # the reference
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(Path(__file__).with_name("recipes.png"), dpi=100)


if __name__ == "__main__":
    main()
