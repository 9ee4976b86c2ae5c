"""Compare how fast preference pairs become token ids: this project, and TRL's DPOTrainer.

    python tests/bench/tokenization.py --trl_python trlenv/bin/python --model data/smollm2

Both get the same generated conversations and the tokenizer and chat template of the model. TRL runs
the method of DPOTrainer that prepares its data, with one process per core (dataset_num_proc). The
sides alternate. Time is that of this part alone, without imports, and CPU time includes that of
child processes. The digest of our token ids must not depend on the number of cores.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
WORDS = 250, 125, 125  # of a prompt, of each response


def write_pairs(path, rows):
    """Write pairs of random words of the demo, as messages."""
    words = (ROOT / "data/demo/preferences_train.jsonl").read_text().split()
    words = sorted({word.strip('",{}\\n:') for word in words} - {""})
    dice = random.Random(0)

    def message(role, count):
        return [{"role": role, "content": " ".join(dice.choices(words, k=count))}]

    with open(path, "w") as file:
        for _ in range(rows):
            prompt, chosen, rejected = map(message, ("user", "assistant", "assistant"), WORDS)
            pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(pair) + "\n")


def cpu_seconds():
    return sum(os.times()[:4])  # user and system, of this process and of its children


def ours(path, model, _cores, folder):
    sys.path.insert(0, str(ROOT / "src"))
    from ddp_utils.data import DataFile
    from lm import preference_data, token_rows
    from lm.chat_template import Encoder
    from lm.models import load_tokenizer

    encoder = Encoder(load_tokenizer(model))
    yield
    rows, report = preference_data.read(DataFile(path, Path(folder)), encoder)
    yield
    mean = sum(report["mean_tokens"].values())
    yield {"tokens": mean, "rows": len(rows), "digest": token_rows.digest_of_rows(rows)}


def trl(path, model, cores, folder):
    os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
    import datasets
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    processes = cores if cores > 1 else None
    config = DPOConfig(output_dir=folder, dataset_num_proc=processes, use_cpu=True)
    yield
    data = datasets.load_dataset("json", data_files=path, split="train")
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    data = DPOTrainer._prepare_dataset(trainer, data, tokenizer, config, "train")
    yield
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    tokens = sum(len(ids) for column in columns for ids in data[column])
    yield {"tokens": tokens / len(data), "rows": len(data)}


def work(side, path, model, cores):
    """Prepare the data in this process on so many cores, and print what was measured."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    with tempfile.TemporaryDirectory() as folder:
        steps = globals()[side](path, model, int(cores), folder)
        next(steps)
        start, cpu = time.perf_counter(), cpu_seconds()
        next(steps)
        spent = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
        found = next(steps) | spent
    print(json.dumps(found))


def main():
    if sys.argv[1] == "--work":
        return work(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl_python", help="of an environment with trl; none: ours alone")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sides = {"ours": sys.executable} | ({"trl": options.trl_python} if options.trl_python else {})
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/pairs.jsonl"
        write_pairs(path, options.rows)
        for cores in options.cores:
            runs = {side: [] for side in sides}
            for _ in range(options.rounds):
                for side, python in sides.items():
                    model = str(Path(options.model).resolve())
                    command = [python, __file__, "--work", side, path, model, str(cores)]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            for side, found in runs.items():
                digests |= {run["digest"] for run in found if "digest" in run}
                print(f"| {cores} | {side} |", end="")
                for unit in ("wall", "cpu"):
                    seconds = sorted(run[unit] for run in found)
                    spread = f"[{seconds[0]:.1f}, {seconds[-1]:.1f}]"
                    rate = found[0]["rows"] / statistics.median(seconds)
                    print(f" {statistics.median(seconds):.1f} {spread} s, {rate:.0f}/s |", end="")
                print(f" {found[0]['tokens']:.1f} tokens |", flush=True)
    return int(len(digests) != 1)


if __name__ == "__main__":
    sys.exit(main())
