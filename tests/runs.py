"""Short real runs of src/main_distributed.py for the tests: flags in, metrics out."""

import json
import os
from pathlib import Path
from shlex import split as words

import torch

import main_distributed
from ddp_utils import metrics, optim, sampler
from ddp_utils.runs import run as run_

# what a comparison to the letter needs; the demo model is the default
PAIRS = str(Path(__file__).parent / "data/pairs.jsonl")  # eight of the demo's test pairs
QUIET = words("--log_every 1000 --lr_scaling none --warmup_ratio 0 --sft_weight 0 --num_samples 0")
QUIET += ["--test_data", PAIRS]
FULL = words("--fine_tuning full --learning_rate 3e-4")
LORA = words("--fine_tuning lora --learning_rate 1e-3")


def hurry():
    """Leave out of the runs of this process what their tests do not look at."""
    run_.write_report = lambda *_, **__: ""  # a second
    metrics.peak_flops = lambda device, dtype: None  # 0.2 s: what a matrix product reaches, for mfu
    torch.set_num_threads(1)


def main(flags):
    hurry()
    return main_distributed.main(flags)


def train(folder, *flags_of_runs):
    """Run main() once per list of flags in this rank's group -> list of lines per run."""
    hurry()
    results = []
    for number, flags in enumerate(flags_of_runs):
        # a parent of its own: runs beside each other share the reference's log-probs
        run = Path(folder) / f"{os.environ.get('WORLD_SIZE', 1)}-{number}" / "run"
        assert main_distributed.main([*QUIET, *flags, "--result_dir", str(run)]) == 0
        results.append(lines(run) if os.environ.get("RANK", "0") == "0" else None)
    return results


def lines(folder, split=None):
    """metrics.jsonl of a run, of one split or all."""
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if split in (None, line["split"])]


def losses(run):
    return [line["loss"] for line in run if line["split"] == "train"]


def first_gradients(folder, *flags_of_runs):
    """The gradient of step 0 of each run, all parameters in one float64 vector."""
    found, step = [], optim.Policy.step

    def spy(policy, *rest):
        parameters = policy.trainable().values()
        found.append(torch.cat([p.grad.flatten().double() for p in parameters]))
        step(policy, *rest)

    optim.Policy.step = spy
    once = words("--max_steps 1 --max_grad_norm 0")
    train(folder, *([*flags, *once] for flags in flags_of_runs))
    return found


def mean_of_means():
    """The classic mistake, for tests that must see it: each rank averages over its own rows."""
    backward = optim.Policy.backward
    share = sampler.share
    factor = []

    def watch(rows, lengths, world, budget, padded=False):
        parts = share(rows, lengths, world, budget, padded)
        own = max(1, sum(sum(part.weight) for part in parts))
        factor[:] = [len(rows) / (world.world_size * own)]
        return parts

    sampler.share = watch
    optim.Policy.backward = lambda policy, loss: backward(policy, loss * factor[0])
