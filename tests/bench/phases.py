"""Where the time of a run goes that is no training step: from the command to its last line.

    python tests/bench/phases.py --rounds 3 [--json FILE] -- flags of main_distributed.py

The functions below are timed in the process of the script, a new one for each round; a function
that calls another one is not charged for it. "start" is everything before main(): the interpreter,
and the imports. "rest" is main() without these functions. Prints medians in seconds.
"""

import argparse
import functools
import inspect
import json
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHASES = {  # a phase -> its functions: module, and name
    "read and tokenize data": ["main_distributed.read_data", "lm.chat_template.Encoder.of"],
    "check data against the model": ["main_distributed.describe_run"],
    "load the model": ["main_distributed.load_policy"],
    "try the largest step": ["ddp_utils.run.Run.try_largest_steps"],
    "score the reference": ["main_distributed.score_reference"],
    "generate replies": ["main_distributed.generate_replies"],
    "training steps": ["main_distributed.train_step"],
    "check the first step": ["main_distributed.check_pairs"],
    "validation and test": ["main_distributed.evaluate"],
    "checkpoints": ["ddp_utils.run.Run.save"],
    "save the model": ["lm.models.save_policy"],
    "report and curves": ["ddp_utils.run.Run.__exit__"],
}


def timed(phase, function, seconds, running):
    """Add the seconds of each call to a phase; those of a phase inside it are not added twice."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        start = time.perf_counter()
        running.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            whole = time.perf_counter() - start
            seconds[phase] = seconds.get(phase, 0.0) + whole - running.pop()
            if running:
                running[-1] += whole

    return call


def run_one(started, output, flags):
    """Run main_distributed.py in this process and write the seconds of each phase."""
    import main_distributed  # timed as a part of "start"

    seconds, running = {"start": time.time() - started}, [0.0]
    for phase, names in PHASES.items():
        for name in names:
            owner, _, attribute = name.rpartition(".")
            place = pkgutil.resolve_name(owner)
            function = timed(phase, getattr(place, attribute), seconds, running)
            is_bound = inspect.ismethod(getattr(place, attribute))  # of a class
            setattr(place, attribute, staticmethod(function) if is_bound else function)
    start = time.perf_counter()
    code = main_distributed.main(flags)
    seconds["rest"] = time.perf_counter() - start - running[0]
    seconds["cpu"] = time.process_time()
    Path(output).write_text(json.dumps(seconds))
    return code


def main():
    if sys.argv[1] == "--one":
        return run_one(float(sys.argv[2]), sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for the numbers")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            flags = [*options.flags, "--result_dir", f"{folder}/run"]
            one = [sys.executable, __file__, "--one", str(time.time()), f"{folder}/seconds", *flags]
            start = time.time()
            subprocess.run(one, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds = json.loads(Path(folder, "seconds").read_text())
            seconds["whole"] = time.time() - start
            rounds.append(seconds)
    for phase in ("start", *PHASES, "rest", "whole", "cpu"):
        values = sorted(seconds.get(phase, 0.0) for seconds in rounds)
        spread = f"[{values[0]:.2f}, {values[-1]:.2f}]"
        print(f"| {phase} | {statistics.median(values):.2f} {spread} |")
    if options.json:
        Path(options.json).write_text(json.dumps(rounds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
