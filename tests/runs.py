"""Short real runs of src/main_distributed.py for the tests: flags in, metrics out."""

import json
import os
from pathlib import Path
from shlex import split as words

import torch

import main_distributed
from ddp_utils import run as run_
from lm import models
from lm.fast import self_test as self_test_

# what a comparison to the letter needs; the demo model is the default
PAIRS = str(Path(__file__).parent / "data/pairs.jsonl")  # eight of the demo's test pairs
QUIET = words("--log_every 1000 --lr_scaling none --warmup_ratio 0 --sft_weight 0 --num_samples 0")
QUIET += ["--test_data", PAIRS, "--report_to", "none"]
FULL = words("--fine_tuning full --learning_rate 3e-4")
LORA = words("--fine_tuning lora --learning_rate 1e-3")


def hurry(self_test=False):
    """Leave out of the runs of this process what their tests do not look at."""
    run_.write_report = lambda *_, **__: ""  # a second
    models.find_unreached = lambda _: ()  # half a second; no model of these runs has such parts
    if not self_test:
        self_test_._find_difference = _no_difference  # half a second
    torch.set_num_threads(1)


def _no_difference(scorer, *arguments, find=self_test_._find_difference):
    """In fp32 all ways agree on these models; in half precision their rounding is measured."""
    return None if scorer.precision == torch.float32 else find(scorer, *arguments)


def main(flags):
    hurry()
    return main_distributed.main(flags)


def train(folder, flags):
    """Run main() in this rank's group, to folder/run -> the lines of its metrics, on rank 0."""
    assert main([*QUIET, *flags, "--result_dir", f"{folder}/run"]) == 0
    return lines(f"{folder}/run") if os.environ.get("RANK", "0") == "0" else None


def lines(folder, split=None):
    """metrics.jsonl of a run, of one split or all."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if split in (None, line["split"])]


def as_if_killed(folder):
    """Let a finished run look like one that was killed behind its last checkpoint."""
    path = Path(folder) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running"}))


def losses(run):
    return [line["loss"] for line in run if line["split"] == "train"]
