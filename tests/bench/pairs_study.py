"""How many preference pairs does DPO need?

    python tests/bench/pairs_study.py outputs/demo --seeds 0 1 2
    python tests/bench/pairs_study.py outputs/real --data data/manners.json --seeds 0 1 2
    python tests/bench/pairs_study.py outputs/demo           # the table alone

Each run trains on the first N of a shuffled list of pairs, and is evaluated on the same 100 pairs,
whose prompts are in no training data. A run makes one pass over its pairs, or more until it has
made the least number of updates. The seed selects the pairs and their order. Without --data it is
the demo; with the file of docs/recipes.md it is a LoRA on SmolLM2-135M-Instruct. A folder with
finished runs is continued.
"""

import argparse
import json
import math
import random
import shutil
import time
from pathlib import Path

import numpy as np

import main_distributed

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 100
CHARACTERS = 220  # of a row of --data; longer ones are not used
SHARED = "--sft_weight 1 --temperature 0 --eval_every 9999 --save_every 9999 --report_to none"
DEMO = "--judge data/demo/judge.py:score"
REAL = "--model_name data/smollm2 --fine_tuning lora --lr_scaling none"
REAL += " --num_samples 8 --max_new_tokens 40"


def demo_rows() -> tuple[list[dict], list[dict]]:
    """Return the demo's test pairs and its training pairs."""
    files = [ROOT / f"data/demo/preferences_{split}.jsonl" for split in ("test", "train")]
    return tuple([json.loads(line) for line in file.read_text().splitlines()] for file in files)


def short_rows(file) -> tuple[list[dict], list[dict]]:
    """Return held-out and training rows: short ones whose answers differ, one per prompt."""
    rows = {}
    for row in json.loads(Path(file).read_text()):
        texts = [row[name] for name in ("instruction", "input", "chosen", "rejected")]
        if row["chosen"] != row["rejected"] and sum(map(len, texts)) <= CHARACTERS:
            rows.setdefault((row["instruction"], row["input"]), row)
    rows = list(rows.values())
    random.Random("held out").shuffle(rows)
    return rows[:HELD_OUT], rows[HELD_OUT:]


def run(folder, held_out, train, flags, size, updates, batch, seed):
    """Train on `size` rows; keep the summary, the replies and the CPU time in a JSON file."""
    file = folder / f"{size}.{seed}.json"
    if file.exists():
        return
    rows = random.Random(seed).sample(train, len(train))[:size]
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "train.json").write_text(json.dumps(rows))
    (out / "val.json").write_text(json.dumps(held_out))
    words = [*SHARED.split(), *flags.split(), "--batch_size", str(batch), "--seed", str(seed)]
    words += ["--train_data", str(out / "train.json"), "--val_data", str(out / "val.json")]
    words += ["--max_steps", str(max(updates, math.ceil(size / batch)))]
    start = time.process_time()
    assert main_distributed.main([*words, "--result_dir", str(out / "dpo")]) == 0
    result = json.loads((out / "dpo/summary.json").read_text())
    result["cpu_seconds"] = time.process_time() - start
    result["examples"] = json.loads((out / "dpo/examples.json").read_text())
    file.write_text(json.dumps(result))


def report(folder, sizes):
    """Print means over the seeds with the mean ends of the 95 % intervals over held-out pairs."""
    names = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
    judged = [f"judge/policy/{name}" for name in ("courteous", "right", "well_formed")]
    heads = ["pairs", "updates", "seeds", *names.values(), "preference loss", "NLL of chosen"]
    print("|", " | ".join([*heads, *judged, "CPU seconds"]), "|")
    for size in sizes:
        runs = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{size}.?.json"))]
        if not runs:
            continue
        values = [one["val"] for one in runs]
        cells = [size, runs[0]["step"], len(runs)]
        for name in names:
            ends = [np.mean([x[name + end] for x in values]) for end in ("", "_low", "_high")]
            each = ", ".join(f"{x[name]:.2f}" for x in values)
            cells.append("{:.2f} [{:.2f}, {:.2f}]".format(*ends) + f" ({each})")
        for name in ("loss/preference", "loss/sft", *judged):
            before = runs[0]["before"].get(name, values[0].get(name.replace("policy", "reference")))
            if name in values[0]:
                cells.append(f"{before:.3f} -> {np.mean([x[name] for x in values]):.3f}")
        cells.append(f"{np.mean([one['cpu_seconds'] for one in runs]):.0f}")
        print("|", " | ".join(map(str, cells)), "|")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", help="manners.json of docs/recipes.md")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--sizes", type=int, nargs="*", default=[30, 100, 300, 600])
    parser.add_argument("--updates", type=int, help="least number of optimizer steps")
    options = parser.parse_args()
    held_out, train = short_rows(options.data) if options.data else demo_rows()
    flags, updates, batch = (REAL, 32, 8) if options.data else (DEMO, 40, 16)
    updates = options.updates or updates
    for seed in options.seeds:
        for size in options.sizes:
            assert size <= len(train)
            run(options.folder.resolve(), held_out, train, flags, size, updates, batch, seed)
    report(options.folder, options.sizes)


if __name__ == "__main__":
    main()
