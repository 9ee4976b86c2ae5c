"""Write down how an algorithm learns every goal of a Dark Room: what train.py distils.

    python src/ad/collect.py                                     # the demo's file
    python src/ad/collect.py --config config/model/ad_dr.yaml    # the file that this one names

One .npz of three bytes a transition: state (x * grid_size + y), action, reward [H, T]; goal [G],
history_goal [H], meta (JSON). Guide: docs/algorithm_distillation.md.
"""

import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where nothing is installed

from ad import sources
from ad.config import Source, read
from ddp_utils import UserError, files, jsonl
from ddp_utils.runs import checkpoint, preemption


@dataclass
class Collect(Source):
    config: str = ""  # YAML file with these settings among others; empty: the demo's
    traj_file: str = "data/ad/demo.npz"  # where to; it must not exist
    debug: bool = False  # tracebacks for user errors, too


def meta_of(config) -> dict:
    """What the histories hang on."""
    return {field.name: getattr(config, field.name) for field in fields(Source)}


def collect(config, path):
    """Collect the histories of all goals into a file that is not there yet; its mean returns.

    The file appears whole or not at all.
    """
    path, room, goals = Path(path), config.room, np.arange(config.room.cells)
    checkpoint.check_place("--traj_file", path)
    size, seed, rate = (config.n_stream, config.source_steps), config.alg_seed, config.source_lr
    state, action, reward = sources.histories(config.alg, room, goals, *size, seed, rate)
    arrays = {"state": state, "action": action, "reward": reward, "goal": goals}
    arrays["history_goal"] = np.repeat(goals, config.n_stream)
    with files.replacing(path) as file, open(file, "wb") as stream:
        np.savez(stream, **arrays, meta=np.array(json.dumps(meta_of(config))))
    episodes = reward.reshape(len(reward), -1, room.horizon).sum(-1)
    return episodes.mean(0)


def main(argv=None) -> int:
    config, lines = read(sys.argv[1:] if argv is None else argv, True, Collect)
    path = jsonl.resolve(config.traj_file)
    if path.exists():
        raise UserError(f"--traj_file: {path} exists; remove it, or give another name")
    start = time.process_time()
    returns = collect(config, path)
    optimum = config.room.optimum(np.arange(config.room.cells)).mean()
    print(
        *lines,
        f"{config.alg}: {config.room.cells} goals x {config.n_stream} histories x "
        f"{config.source_steps} steps in {time.process_time() - start:.1f} CPU seconds",
        f"mean return: first episode {returns[0]:.2f}, middle {returns[len(returns) // 2]:.2f}, "
        f"last {returns[-1]:.2f}; optimum {optimum:.2f}",
        f"-> {path}",
        sep="\n",
    )
    return 0


if __name__ == "__main__":
    preemption.run(main)
