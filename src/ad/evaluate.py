"""Let a distilled agent try held-out goals, learning in its context alone.

    python src/ad/evaluate.py --ckpt_dir runs/ad_demo

Writes eval_result.npy [goals, episodes], summary.json and returns.png into ckpt_dir/evaluation.
Guide: docs/algorithm_distillation.md.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import ddp_utils.runs.preemption as preemption  # before torch, whose import takes seconds

import ad.evaluate_config as settings

if __name__ == "__main__":  # --help, or a mistake in the settings, ends here
    preemption.read_early(settings.read)


import json
from dataclasses import asdict

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from ad import sources, windows
from ad.config import Config
from ad.darkroom import ACTIONS
from ad.model import NONE, Cache, Model, Tokens
from ddp_utils import UserError, distributed, jsonl
from ddp_utils.runs import checkpoint

LAST = 10  # episodes that count as what was learnt
LABELS = {"control_wiped": "context wiped", "control_zero_reward": "rewards hidden"}
CONTROLS = {"control_wiped": {"wiped": True}, "control_zero_reward": {"hide_rewards": True}}


@torch.no_grad()
def rollout(model, config, goals, episodes, seed, wiped=False, hide_rewards=False):
    """Return the returns [B, episodes] of sampled actions, one context for each goal [B].

    Two controls of what is learnt in context. wiped: each episode has a new context; hide_rewards:
    the model sees none of the rewards that it is paid.
    """
    room = config.room
    window = room.horizon if wiped else config.window
    rng = np.random.default_rng(seed)
    steps = torch.arange(episodes * room.horizon + 1, device=model.head.weight.device)
    cells = steps.new_zeros(len(goals), len(steps))
    place = windows.places(steps, config).expand_as(cells)
    tokens = Tokens(cells, torch.zeros_like(cells), torch.zeros_like(cells), place)
    returns = np.zeros((len(goals), episodes))
    cache = Cache(model, len(goals))
    begin = 0  # the context is [begin, time]
    for time in range(episodes * room.horizon):
        if time % room.horizon == 0:
            cell = np.full(len(goals), room.start)
        if time - begin == window:  # full: the oldest goes, the rest is read once more
            begin += min(window, config.dropped)
            cache.length = 0
        if cache.length == 0:  # nothing came before the first token
            tokens.action[:, begin] = NONE
            tokens.reward[:, begin] = 0
        tokens.cell[:, time] = torch.from_numpy(cell)
        unread = slice(begin + cache.length, time + 1)
        logits = model(Tokens(*(part[:, unread] for part in tokens)), cache)[:, -1]
        cumulative = logits.double().softmax(-1).cumsum(-1)[:, : ACTIONS - 1].cpu().numpy()
        action = (cumulative < rng.random((len(goals), 1))).sum(-1)
        cell, reward = room.step(cell, action, goals)
        tokens.action[:, time + 1] = torch.from_numpy(action)
        if not hide_rewards:
            tokens.reward[:, time + 1] = torch.from_numpy(reward)
        returns[:, time // room.horizon] += reward
    return returns


def assess(model, goals, run_config, config, controls=False):
    """Try these goals; returns (summary, returns [goals, episodes], those of each control).

    run_config: what the model was trained with; config: eval_episodes, eval_copies, seed.
    """
    size = len(goals), config.eval_copies, config.eval_episodes
    tried = np.repeat(goals, config.eval_copies)
    results = {}
    for name, control in {"": {}, **(CONTROLS if controls else {})}.items():
        returns = rollout(model, run_config, tried, config.eval_episodes, config.seed, **control)
        results[name] = returns.reshape(size).mean(1)
    returns = results.pop("")
    optimum = run_config.room.optimum(goals).mean()
    summary = {
        "count": len(tried),
        "return_first": returns[:, 0].mean(),
        "return_last10": returns[:, -LAST:].mean(),
        "optimum": optimum,
        "fraction_of_optimum": returns[:, -LAST:].mean() / optimum,
    }
    for name, others in results.items():
        summary[name] = others[:, -LAST:].mean() / optimum
    return summary, returns, results


def describe(summary):
    """Return what the numbers say, in one line."""
    line = (
        f"in context: return {summary['return_first']:.2f} in the first episode, "
        f"{summary['return_last10']:.2f} in the last {LAST}; optimum {summary['optimum']:.2f} "
        f"({summary['fraction_of_optimum']:.0%})"
    )
    for name, label in LABELS.items():
        if name in summary:
            line += f"; {label} {summary[name]:.0%}"
    return line


def write(folder, goals, returns, controls, config):
    """Write eval_result.npy and returns.png: the agent, its source, chance and the optimum."""
    np.save(folder / "eval_result.npy", returns)
    room = config.room
    optimum = room.optimum(goals)
    episodes = np.arange(1, returns.shape[1] + 1)
    alone = sources.single(room, goals, 32, len(episodes), config)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    curves.plot(episodes, returns.mean(0), color="tab:blue", linewidth=2, label="agent, in context")
    curves.plot(episodes, alone, color="tab:orange", label="its source, alone")
    for name, style in zip(controls, ("--", ":"), strict=False):
        curves.plot(episodes, controls[name].mean(0), style, color="tab:grey", label=LABELS[name])
    curves.axhline(optimum.mean(), color="tab:green", label="optimum")
    curves.axhline(room.chance(goals).mean(), color="tab:red", label="random")
    curves.set(title=f"mean return on {len(goals)} goals", xlabel="episode", ylim=(0, None))
    names = [str(divmod(goal, room.size)) for goal in goals.tolist()]
    last = returns[:, -LAST:].mean(1)
    bars.bar(names, optimum, color="tab:green", alpha=0.3, label="optimum")
    bars.bar(names, last, width=0.5, color="tab:blue", label=f"agent, last {LAST} episodes")
    bars.set(title="return of each goal", xlabel="goal (x, y)")
    for axis in (curves, bars):
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(folder / "returns.png", dpi=150)


def load(folder):
    """Return (model, settings) of a run; UserError if it is no finished run of train.py."""
    weights = folder / "model" / "model.safetensors"
    try:
        config = Config(**checkpoint.read_json(folder / "config.json"))
        tensors = load_file(weights)
    except (TypeError, UserError, FileNotFoundError):
        says = f"{folder} is no finished run of src/ad/train.py; give the folder of one"
        raise UserError(f"--ckpt_dir: {says}") from None
    model = Model(config).eval()
    model.load_state_dict(tensors)
    return model, config


def main(argv=None) -> int:
    trial = settings.read(argv)
    run_folder = jsonl.resolve(trial.ckpt_dir)
    model, config = load(run_folder)
    room = config.room
    _, goals = room.split(config.env_split_seed, config.train_env_ratio)
    folder = run_folder / "evaluation"
    checkpoint.check_place("--ckpt_dir", folder)
    model.to(distributed.choose_device(distributed.whoami(), "auto").device)
    summary, returns, controls = assess(model, goals, config, trial, controls=True)
    folder.mkdir(exist_ok=True)
    write(folder, goals, returns, controls, config)
    summary["settings"] = asdict(trial)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for goal, episodes in zip(goals.tolist(), returns, strict=True):
        print(
            f"goal {divmod(goal, room.size)}: mean {episodes.mean():.2f}, last {LAST} episodes "
            f"{episodes[-LAST:].mean():.2f} of {room.optimum(goal)}"
        )
    print(f"overall mean {returns.mean():.2f}\n{describe(summary)}\n-> {folder}/")
    return 0


if __name__ == "__main__":
    preemption.run(main)
