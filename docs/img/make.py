"""Draw docs/img/dpo.png: the demo with and without the SFT term, two CPU processes each.

python docs/img/make.py            # about a minute
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"plain DPO": ["--sft_weight", "0"], "DPO + sft_weight 1": []}
COLOURS = {"before": "tab:gray", "plain DPO": "tab:red", "DPO + sft_weight 1": "tab:blue"}
SCORES = {"courteous": "courteous", "right": "right answer", "well_formed": "well formed"}


def run(folder, flags):
    """Train the demo; -> (metrics of the steps, summary of the test questions)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(ROOT / "src/main_distributed.py")
    subprocess.run([*command, script, "--result_dir", folder, *flags], check=True)
    lines = list(map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines()))
    test = json.loads((Path(folder) / "summary.json").read_text())["test"]
    return [line for line in lines if line["split"] == "train"], test


def main():
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(f"{folder}/{name}", flags) for name, flags in RUNS.items()}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    bars = {}
    for name, (steps, test) in results.items():
        steps_done = [line["step"] for line in steps]
        for axis, metric in ((left, "rewards/margins"), (middle, "rewards/chosen")):
            axis.plot(steps_done, [s[metric] for s in steps], color=COLOURS[name], label=name)
        bars["before"] = []
        bars[name] = []
        for score in SCORES:
            bars["before"].append(test[f"judge/reference/{score}"])
            bars[name].append(test[f"judge/policy/{score}"])
        print(name, test)
    left.set(title="margins", xlabel="step")
    middle.set(title="rewards/chosen", xlabel="step")
    middle.axhline(0, color="black", linewidth=0.8)
    groups = np.arange(len(SCORES))
    for number, (name, heights) in enumerate(bars.items()):
        xs = groups + 0.27 * number
        drawn = right.bar(xs, heights, 0.25, color=COLOURS[name], label=name)
        right.bar_label(drawn, fmt="%.2f", fontsize=8)
    right.set(title="replies to 100 held-out questions", ylim=(0, 1.12))
    right.set_xticks(groups + 0.27, SCORES.values())
    right.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for axis in (left, middle):
        axis.grid(alpha=0.3)
    figure.savefig(ROOT / "docs/img/dpo.png", dpi=110)


if __name__ == "__main__":
    main()
