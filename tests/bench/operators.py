"""Where the CPU time of a DPO step's gradient goes: the share of each operator, on one thread.

    python tests/bench/operators.py -- --model_name data/smollm2 --train_data data/manners.json

The flags behind -- are those of main_distributed.py. The first step is dropped, and the optimizer
is not measured. An operator that calls another one is not charged for it. The profiler's own time
is part of that between the operators.
"""

import argparse
import collections
import importlib
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

PYTHON = "between operators (Python, autograd)"
LEAST = 0.01  # share of an operator that has a line of its own


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flags", nargs="*")
    flags = parser.parse_args().flags
    torch.set_num_threads(1)
    script = importlib.import_module("main_distributed")
    train_step = script.train_step
    spent = collections.Counter()  # operator -> CPU us

    def recorded(policy, step, *arguments):
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(PYTHON):
            values = train_step(policy, step, *arguments)
        if step:
            spent.update({e.key: e.self_cpu_time_total for e in profiler.key_averages()})
        return values

    script.train_step = recorded
    with tempfile.TemporaryDirectory() as folder:
        script.main(["--result_dir", f"{folder}/run", *flags])
    whole = spent.total()
    small = [name for name in spent if spent[name] < LEAST * whole]
    spent[f"{len(small)} others"] = sum(map(spent.pop, small))
    for name, microseconds in spent.most_common():
        print(f"| {name} | {microseconds / whole:.1%} |")


if __name__ == "__main__":
    main()
