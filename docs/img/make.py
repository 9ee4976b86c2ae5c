"""Draw docs/img/dpo.png: the demo with and without the SFT term, two CPU processes each.

python docs/img/make.py            # about a minute
"""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from ddp_utils import plots

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"plain DPO": ("0", "tab:red"), "DPO + sft_weight 1": ("1", "tab:blue")}
SCORES = {"courteous": "courteous", "right": "right answer", "well_formed": "well formed"}


def main() -> None:
    """Run the demo twice, and draw the picture."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    bars = {}  # name -> color, and the judge's means
    for name, (weight, color) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--sft_weight", weight, "--result_dir", f"{folder}/run"]
            subprocess.run([ROOT / "run_distributed.sh", "2", *flags], check=True)
            steps = [row for row in plots.read_metrics(f"{folder}/run") if row["split"] == "train"]
            test = json.loads(Path(folder, "run/summary.json").read_text())["test"]
        for axis, metric in ((left, "rewards/margins"), (middle, "rewards/chosen")):
            axis.plot([row["step"] for row in steps], [row[metric] for row in steps], color=color)
            axis.set(title=metric, xlabel="step", ylabel="nats")
            axis.grid(alpha=0.3)
            axis.axhline(0, color="gray", linestyle="--", linewidth=1)  # the reference
        bars["before"] = "tab:gray", [test[f"judge/reference/{score}"] for score in SCORES]
        bars[name] = color, [test[f"judge/policy/{score}"] for score in SCORES]
    for number, (name, (color, heights)) in enumerate(bars.items()):
        drawn = right.bar(np.arange(3) + 0.27 * number, heights, 0.25, color=color, label=name)
        right.bar_label(drawn, fmt="%.2f", fontsize=8)
    right.set(title="100 held-out questions", ylabel="share of replies", ylim=(0, 1.12))
    right.set_xticks(np.arange(3) + 0.27, SCORES.values())
    right.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(ROOT / "docs/img/dpo.png", dpi=110)


if __name__ == "__main__":
    main()
