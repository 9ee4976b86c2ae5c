"""Let a distilled agent try held-out goals, learning in its context alone.

    python src/ad/evaluate.py --ckpt_dir runs/ad_demo
    python src/ad/evaluate.py --ckpt_dir runs/ad_demo --goal_idx 3

Writes eval_result.npy [goals, episodes], summary.json and returns.png into ckpt_dir/evaluation.
Guide: docs/algorithm_distillation.md.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import ddp_utils.runs.preemption as preemption  # before torch, whose import takes seconds

import json
from dataclasses import asdict, dataclass

import matplotlib
import numpy as np
import torch
from safetensors.torch import load_file

from ad import sources, windows
from ad.config import Config, check
from ad.darkroom import ACTIONS
from ad.model import Cache, Model, Shape, Tokens
from ddp_utils import UserError, cli, distributed, jsonl
from ddp_utils.runs import checkpoint

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

LAST = 10  # episodes that count as what was learnt
CONTROLS = {"control_wiped": "context wiped", "control_zero_reward": "rewards hidden"}
HOW = {"control_wiped": {"wiped": True}, "control_zero_reward": {"zero_reward": True}}


@dataclass
class Settings:
    ckpt_dir: str = "runs/ad_demo"  # a run's folder
    goal_idx: int = -1  # one of the held-out goals; -1: all
    eval_episodes: int = 60  # of one try, in one context
    eval_copies: int = 8  # tries of each goal
    seed: int = 0  # of what it tries
    train_goals: bool = False  # goals of its training instead, as many: does it memorise?
    debug: bool = False  # tracebacks for user errors, too


@torch.no_grad()
def rollout(model, room, goals, episodes, cut, seed, wiped=False, zero_reward=False, cached=True):
    """Returns [B, episodes] of sampled actions, one context per goal [B].

    wiped: a new context in each episode; zero_reward: rewards are hidden: what stays is not learnt
    in context. cached: keys and values are kept, else computed anew at each step (equal, slower).
    """
    device, goals = model.head.weight.device, np.asarray(goals)
    training, rng = model.training, np.random.default_rng(seed)
    model.eval()
    steps = episodes * room.horizon
    cells = torch.zeros(len(goals), steps, dtype=torch.long, device=device)
    actions, rewards = torch.zeros_like(cells), torch.zeros_like(cells)
    returns = np.zeros((len(goals), episodes))
    begin, cache = 0, Cache(model, len(goals))  # the context is [begin, time]

    def seen(first, time):
        """Tokens of the steps from `first` to `time`, in a context that begins at `begin`."""
        tokens = windows.tokens_of(
            cells[:, begin : time + 1], actions[:, begin:time], rewards[:, begin:time]
        )
        span = torch.arange(begin, time + 1, device=device)
        place = cut.places(span, room.horizon).expand(len(goals), -1)
        return Tokens(*(part[:, first - begin :] for part in tokens._replace(place=place)))

    for time in range(steps):
        if time % room.horizon == 0:
            cell = np.full(len(goals), room.start)
        if wiped and time % room.horizon == 0:
            begin, cache.length = time, 0
        elif time - begin == cut.window:  # full: the oldest goes, the rest is read once more
            begin, cache.length = begin + cut.drop, 0
        cells[:, time] = torch.from_numpy(cell)
        first = begin + cache.length if cached else begin
        logits = model(seen(first, time), cache if cached else None)[:, -1]
        odds = logits.double().softmax(-1).cumsum(-1)[:, : ACTIONS - 1].cpu().numpy()
        action = (odds < rng.random((len(goals), 1))).sum(-1)
        actions[:, time] = torch.from_numpy(action)
        cell, reward = room.step(cell, action, goals)
        if not zero_reward:
            rewards[:, time] = torch.from_numpy(reward)
        returns[:, time // room.horizon] += reward
    model.train(training)
    return returns


def assess(model, room, goals, config, cut, controls=False):
    """Tries on these goals: (summary, returns [goals, episodes], those of the controls).

    config: eval_episodes, eval_copies, seed.
    """
    tried = np.repeat(goals, config.eval_copies)
    kinds = {"": {}} | (HOW if controls else {})
    found = {
        kind: rollout(model, room, tried, config.eval_episodes, cut, config.seed, **how)
        .reshape(len(goals), config.eval_copies, -1)
        .mean(1)
        for kind, how in kinds.items()
    }
    optimum, returns = room.optimum(goals).mean(), found.pop("")
    summary = {
        "count": len(tried),
        "return_first": returns[:, 0].mean(),
        "return_last10": returns[:, -LAST:].mean(),
        "optimum": optimum,
        "fraction_of_optimum": returns[:, -LAST:].mean() / optimum,
    }
    summary |= {kind: other[:, -LAST:].mean() / optimum for kind, other in found.items()}
    return {name: float(value) for name, value in summary.items()}, returns, found


def describe(summary):
    """What the numbers say, in one line."""
    line = (
        f"in context: return {summary['return_first']:.2f} in the first episode, "
        f"{summary['return_last10']:.2f} in the last {LAST}; optimum {summary['optimum']:.2f} "
        f"({summary['fraction_of_optimum']:.0%})"
    )
    said = [f"{label} {summary[name]:.0%}" for name, label in CONTROLS.items() if name in summary]
    return "; ".join([line, *said])


def write(folder, room, goals, returns, others, config):
    """eval_result.npy and returns.png: the agent beside its source, chance and the optimum."""
    np.save(folder / "eval_result.npy", returns)
    episodes = np.arange(1, returns.shape[1] + 1)
    source = config.alg, room, goals, 32, len(episodes), config.alg_seed, config.source_lr
    figure, (axis, each) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    axis.plot(episodes, returns.mean(0), color="tab:blue", linewidth=2, label="agent, in context")
    axis.plot(episodes, sources.single(*source), color="tab:orange", label="its source, alone")
    for (name, other), style in zip(others.items(), ("--", ":"), strict=False):
        axis.plot(episodes, other.mean(0), style, color="tab:grey", label=CONTROLS[name])
    axis.axhline(room.optimum(goals).mean(), color="tab:green", label="optimum")
    axis.axhline(room.chance(goals).mean(), color="tab:red", label="random")
    axis.set(title=f"mean return on {len(goals)} goals", xlabel="episode", ylim=(0, None))
    places, last = np.arange(len(goals)), returns[:, -LAST:].mean(1)
    each.bar(places, room.optimum(goals), color="tab:green", alpha=0.3, label="optimum")
    each.bar(places, last, width=0.5, color="tab:blue", label=f"agent, last {LAST} episodes")
    each.set_xticks(places, ["({}, {})".format(*divmod(goal, room.size)) for goal in goals])
    each.set(title="return of each goal", xlabel="goal (x, y)")
    for one in (axis, each):
        one.grid(alpha=0.3)
        one.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(folder / "returns.png", dpi=150)
    plt.close(figure)


def load(folder):
    """(model, settings) of a run: what it saved at its end, else its newest checkpoint.

    Raises UserError if it is no run of train.py, or has saved nothing yet.
    """
    folder = jsonl.resolve(folder)
    if not folder.is_dir():
        raise UserError(f"--ckpt_dir: no folder {folder}; give that of a run of src/ad/train.py")
    try:
        config = Config(**checkpoint.read_json(folder / "config.json"))
    except (TypeError, UserError):
        raise UserError(f"--ckpt_dir: {folder} is not a run of src/ad/train.py") from None
    check(config)
    model = Model(Shape.of(config))
    weights = folder / "model" / "model.safetensors"
    if weights.exists():
        tensors = load_file(weights)
    else:
        path, _ = checkpoint.find(folder / "checkpoints")
        if not path:
            raise UserError(f"--ckpt_dir: {folder} has no checkpoint yet; train it first")
        kind = "parameter/"
        saved = checkpoint.read(path)[0].items()
        tensors = {name.removeprefix(kind): t for name, t in saved if name.startswith(kind)}
    model.load_state_dict(tensors)
    return model, config


def main(argv=None) -> int:
    settings = cli.parse(Settings, argv)
    cli.check_ranges(settings, eval_episodes=cli.ABOVE_0, eval_copies=cli.ABOVE_0)
    model, config = load(settings.ckpt_dir)
    room = config.room
    train, held_out = room.split(config.env_split_seed, config.train_env_ratio)
    goals = train[: len(held_out)] if settings.train_goals else held_out
    if settings.goal_idx >= len(goals) or settings.goal_idx < -1:
        raise UserError(f"--goal_idx: {settings.goal_idx}; give -1, or 0 to {len(goals) - 1}")
    if settings.goal_idx >= 0:
        goals = goals[[settings.goal_idx]]
    name = "evaluation_train_goals" if settings.train_goals else "evaluation"
    folder = jsonl.resolve(settings.ckpt_dir) / name
    checkpoint.check_place("--ckpt_dir", folder)
    device = distributed.choose_device(distributed.whoami(), "auto").device
    summary, returns, others = assess(
        model.to(device), room, goals, settings, windows.Cut.of(config), controls=True
    )
    folder.mkdir(exist_ok=True)
    write(folder, room, goals, returns, others, config)
    summary["settings"] = asdict(settings)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for goal, mine in zip(goals, returns, strict=True):
        x, y = divmod(int(goal), room.size)
        print(
            f"goal ({x}, {y}): mean {mine.mean():.2f}, last {LAST} episodes "
            f"{mine[-LAST:].mean():.2f} of {room.optimum(goal)}"
        )
    print(f"overall mean {returns.mean():.2f}\n{describe(summary)}\n-> {folder}/")
    return 0


if __name__ == "__main__":
    preemption.run(main)
