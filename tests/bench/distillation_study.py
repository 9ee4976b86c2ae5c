"""Try finished runs of distillation on their held-out tasks; pool them, print and draw.

    python tests/bench/distillation_study.py docs/img/ad_returns.png runs/a runs/b runs/c

Runs that differ in env_split_seed alone: a line for each and for each learner, with 95 % intervals
over the tasks of all runs.
"""

import sys
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from ad import evaluate
from ddp_utils import metrics


def interval(values):
    """Return the mean of values [G] with its 95 % interval, as text."""
    low, high = metrics.interval(values.mean(), (values**2).mean(), len(values))
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main(picture, folders):
    parts = []  # returns by name, optimum and chance of each run
    for folder in folders:
        model, config = evaluate.load(Path(folder))
        summary, returns = evaluate.evaluate_agent(model, config, compare=True)
        _, tasks = config.tasks
        environment = config.environment
        parts.append((returns, environment.optimum(tasks), environment.random_return(tasks)))
        numbers = [f"{name} {summary[name]:.3f}" for name in summary if "control" in name]
        print(
            f"{folder}: last ten {summary['fraction_of_optimum']:.3f}, area {summary['area']:.3f}, "
            f"to 60/80/90 {summary['episodes_to_60']} {summary['episodes_to_80']} "
            f"{summary['episodes_to_90']}, {', '.join(numbers)}"
        )
    returns_of, optimum, chance = zip(*parts, strict=True)
    optimum, chance = np.concatenate(optimum), np.concatenate(chance)  # [G]
    pooled = {}
    for name in returns_of[0]:
        pooled[name] = np.concatenate([returns[name] for returns in returns_of])  # [G, E]
        found = evaluate.learning_speed(pooled[name], optimum.mean())
        to_80 = found["episodes_to_80"]
        spent = summary.get(f"{name}_streams", 1) * to_80 if to_80 else None
        print(
            f"{name}: last ten {interval(pooled[name][:, -10:].mean(-1) / optimum.mean())}, "
            f"area {interval(pooled[name].mean(-1) / optimum.mean())}, to 60/80/90 "
            f"{found['episodes_to_60']} {to_80} {found['episodes_to_90']}, spent to 80 {spent}"
        )
    more = (pooled["agent"] - pooled["single"]).mean(-1) / optimum.mean()  # [G]
    print(f"area of the agent above that of one Q-learner: {interval(more)}")
    evaluate.draw(picture, summary, pooled, optimum, chance)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
