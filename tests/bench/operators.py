"""Where the CPU time of a DPO step's gradient goes: the share of each operator, on one thread.

    python tests/bench/operators.py -- --model_name data/smollm2 --train_data data/manners.json

The flags behind -- are those of main_distributed.py. The first step is dropped, and the optimizer
is not measured. An operator that calls another one is not charged for it. Each gradient is computed
twice, and timed without the profiler first, whose own time is part of that between the operators.
The last line divides the time of the products, as long as they take within the step with weights
that are in no cache yet, by that of the step without the profiler.
"""

import argparse
import collections
import importlib
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

PYTHON = "between operators (Python, autograd)"
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm"}
ATTENTION = "aten::_scaled_dot_product_"  # beginning of the names of its kernels
LEAST = 0.01  # share of an operator that has a line of its own


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flags", nargs="*")
    flags = parser.parse_args().flags
    torch.set_num_threads(1)
    script = importlib.import_module("main_distributed")
    train_step = script.train_step
    spent = collections.Counter()  # operator -> CPU us
    plain = []  # CPU seconds of each step without the profiler

    def recorded(policy, step, *arguments):
        start = time.process_time()
        values = train_step(policy, step, *arguments)
        if step:
            plain.append(time.process_time() - start)
            with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(PYTHON):
                train_step(policy, step, *arguments)
            spent.update({e.key: e.self_cpu_time_total for e in profiler.key_averages()})
        return values

    script.train_step = recorded
    with tempfile.TemporaryDirectory() as folder:
        script.main(["--result_dir", f"{folder}/run", *flags])
    whole = spent.total()
    products = sum(spent[name] for name in spent if name in PRODUCTS)
    attention = sum(spent[name] for name in spent if name.startswith(ATTENTION))
    small = [name for name in spent if spent[name] < LEAST * whole]
    spent[f"{len(small)} others"] = sum(map(spent.pop, small))
    for name, microseconds in spent.most_common():
        print(f"| {name} | {microseconds / whole:.1%} |")
    seconds, profiled = sum(plain), whole / 1e6
    print(f"{seconds / len(plain):.3f} s per step, {profiled / len(plain):.3f} with the profiler")
    print(f"products {products / 1e6 / seconds:.1%}, attention {attention / 1e6 / seconds:.1%}")


if __name__ == "__main__":
    main()
