"""Let a distilled agent try held-out tasks, learning in its context alone.

    python src/ad/evaluate.py --ckpt_dir runs/ad_demo

Writes eval_result.npy [tasks, episodes], summary.json and returns.png into ckpt_dir/evaluation.
Guide: docs/algorithm_distillation.md.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where nothing is installed

import ad.evaluate_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        settings.read
    )  # --help and mistakes in the settings end here, before torch is imported


import dataclasses
import json

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file

from ad import sources, windows
from ad.config import Config
from ad.model import Cache, Model, Tokens
from ddp_utils import UserError, data, distributed
from ddp_utils.runs import checkpoint

LAST = 10  # episodes that count as what was learnt
LINES = {  # who or what was tried: what it is called, colour and style of its curve
    "agent": ("agent, in its context", "tab:blue", "-"),
    "teacher": ("its teacher", "tab:orange", "-"),
    "shared": ("Q-learners with one table", "tab:purple", "-"),
    "single": ("one Q-learner", "tab:brown", "-"),
    "control_wiped": ("context wiped", "tab:grey", "--"),
    "control_zero_reward": ("rewards hidden", "tab:grey", ":"),
    "control_zero_action": ("actions hidden", "tab:grey", ":"),
}


@torch.no_grad()
def rollout(model, config, tasks, episodes, seed, wiped=False, hide=""):
    """Return the returns [B, episodes] of sampled actions, one context for each task [B].

    Two controls of what is learnt in context. wiped: each episode has a new context; hide: the
    model sees no "reward", or no "action". config: the run's settings.
    """
    environment = config.environment
    horizon = environment.horizon
    window = horizon if wiped else config.window
    rng = np.random.default_rng(seed)
    steps = torch.arange(episodes * horizon + 1, device=model.head.weight.device)
    cells = steps.new_zeros(len(tasks), len(steps))
    none = torch.full_like(cells, environment.actions)
    place = windows.places(steps, config).expand_as(cells)
    tokens = Tokens(cells, none, torch.zeros_like(cells), place)
    returns = np.zeros((len(tasks), episodes))
    cache = Cache(model, len(tasks))
    begin = 0  # the context is [begin, time]
    for time in range(episodes * horizon):
        if time % horizon == 0:
            state = np.full(len(tasks), environment.start)
        if time - begin == window:  # full: the oldest goes, the rest is read once more
            begin += min(window, config.dropped)
            cache.length = 0
        if cache.length == 0:  # nothing came before the first token
            tokens.action[:, begin] = environment.actions
            tokens.reward[:, begin] = 0
        tokens.cell[:, time] = torch.from_numpy(environment.seen[state])
        unread = slice(begin + cache.length, time + 1)
        logits = model(Tokens(*(part[:, unread] for part in tokens)), cache)[:, -1]  # [B, A]
        is_rewarded = tokens.reward[:, begin : time + 1].any(-1, keepdim=True)  # [B, 1]
        temperatures = config.eval_temperature, config.eval_explore_temperature
        temperature = torch.where(is_rewarded, *temperatures)
        probabilities = (logits.double() / temperature).softmax(-1)
        cumulative = probabilities.cumsum(-1)[:, :-1].cpu().numpy()
        action = (cumulative < rng.random((len(tasks), 1))).sum(-1)
        state, reward = environment.step(state, action, tasks)
        if hide != "action":
            tokens.action[:, time + 1] = torch.from_numpy(action)
        if hide != "reward":
            tokens.reward[:, time + 1] = torch.from_numpy(reward)
        returns[:, time // horizon] += reward
    return returns


def assess(model, config, compare=False):
    """Try the held-out tasks G; return a summary, and returns [G, episodes] by name.

    config: the run's settings, with eval_episodes E, eval_copies, temperatures and seed. compare:
    with controls, and with the learners of others().
    """
    environment = config.environment
    _, tasks = config.tasks
    optimum = environment.optimum(tasks).mean()
    controls = {"agent": {}}
    if compare:
        hidden = environment.differ
        controls |= {"control_wiped": {"wiped": True}, f"control_zero_{hidden}": {"hide": hidden}}
    tried = np.repeat(tasks, config.eval_copies)
    returns = {}
    for name, control in controls.items():
        result = rollout(model, config, tried, config.eval_episodes, config.seed, **control)
        returns[name] = result.reshape(len(tasks), config.eval_copies, -1).mean(1)
    agent = returns["agent"]
    summary = {
        "count": len(tried),
        "return_first": agent[:, 0].mean(),
        "return_last10": agent[:, -LAST:].mean(),
        "optimum": optimum,
        "fraction_of_optimum": agent[:, -LAST:].mean() / optimum,
        **progress_of(agent, optimum),
    }
    for name in controls.keys() - {"agent"}:
        summary[name] = returns[name][:, -LAST:].mean() / optimum
    if compare:
        learners = others(environment, tasks, config)
        for name, result in learners.items():
            is_alone = name == "single" or (name, config.source) == ("teacher", "posterior")
            summary[f"{name}_streams"] = 1 if is_alone else config.n_stream
            summary |= progress_of(result, optimum, f"{name}_")
        returns |= learners
    return summary, returns


def progress_of(returns, optimum, prefix=""):
    """Return the area under the mean curve of returns [G, E], and when it passes each share.

    Both in parts of the optimum; episodes count from 1, None where a share is never passed.
    """
    mean = returns.mean(0) / optimum  # [E]
    values = {f"{prefix}area": mean.mean()}
    for share in (60, 80, 90):
        passed = np.flatnonzero(mean >= share / 100)
        values[f"{prefix}episodes_to_{share}"] = int(passed[0]) + 1 if len(passed) else None
    return values


def others(environment, tasks, config):
    """Return by name the returns [G, E] of algorithms that learn these tasks.

    "teacher": the source of the histories. "shared": Q-learners whose streams share a table, if
    the teacher is another algorithm. Both stay as they are at the end of the histories. "single":
    a Q-learner with a table and a stream alone.
    """
    episodes = config.eval_episodes
    q_learning = dataclasses.replace(config, source="q_learning")
    size = config.n_stream, config.source_steps
    learners = {"teacher": sources.returns(environment, tasks, *size, config)}
    if config.source != "q_learning":
        learners["shared"] = sources.returns(environment, tasks, *size, q_learning)
    for name, returns in learners.items():
        learners[name] = np.pad(returns, ((0, 0), (0, episodes)), "edge")[:, :episodes]
    size = config.n_stream, episodes * environment.horizon
    learners["single"] = sources.returns(environment, tasks, *size, q_learning, shared=False)
    return learners


def describe(summary):
    """Return what the numbers say, in one line."""
    line = (
        f"in context: return {summary['return_first']:.2f} in the first episode, "
        f"{summary['return_last10']:.2f} in the last {LAST}; optimum {summary['optimum']:.2f} "
        f"({summary['fraction_of_optimum']:.0%})"
    )
    line += f"; 80 % in episode {summary['episodes_to_80'] or 'none'}"
    for name, (label, _, _) in LINES.items():
        if name in summary:
            line += f"; {label} {summary[name]:.0%}"
        if f"{name}_area" in summary:
            line += f", {label} in {summary[f'{name}_episodes_to_80'] or 'none'}"
            streams = summary[f"{name}_streams"]
            line += f" of {streams} streams each" if streams > 1 else ""
    return line


def write(folder, summary, returns, config):
    """Write eval_result.npy [tasks, episodes], and returns.png."""
    np.save(folder / "eval_result.npy", returns["agent"])
    _, tasks = config.tasks
    limits = config.environment.optimum(tasks), config.environment.chance(tasks)
    draw(folder / "returns.png", summary, returns, *limits)


def draw(file, summary, returns, optimum, chance):
    """Draw returns [G, E] by name, per episode of a stream and per episode spent on a task.

    optimum, chance: [G]. Bands: 95 % intervals over tasks of the mean distance to the optimum, for
    how far tasks differ in that is no error.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    curves, spent = figure.subplots(1, 2, sharey=True)
    for name, (label, color, style) in LINES.items():
        if name in returns:
            streams = summary.get(f"{name}_streams", 1)
            label += f", {streams} streams" if streams > 1 else ""
            mean = returns[name].mean(0)  # [E]
            spread = 1.96 * (optimum[:, None] - returns[name]).std(0) / len(optimum) ** 0.5
            episodes = np.arange(1, len(mean) + 1)
            curves.plot(episodes, mean, style, color=color, label=label)
            curves.fill_between(episodes, mean - spread, mean + spread, color=color, alpha=0.15)
            if "control" not in name:
                spent.plot(episodes * streams, mean, style, color=color)
    for axis in (curves, spent):
        axis.axhline(optimum.mean(), color="tab:green", label="optimum")
        axis.axhline(chance.mean(), color="tab:red", label="random actions")
        axis.grid(alpha=0.3)
    curves.set(ylabel=f"mean return on {len(optimum)} held-out tasks", ylim=(0, None))
    curves.set_xlabel("episode of a stream")
    spent.set(xlabel="episodes spent on a task, by all streams", xscale="log")
    figure.legend(*curves.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(file, dpi=150)


def load(folder):
    """Return (model, settings) of a run; UserError if it is no finished run of train.py."""
    try:
        config = Config(**checkpoint.read_json(folder / "config.json"))
        model = Model(config).eval()
        model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    except (TypeError, UserError, FileNotFoundError, RuntimeError):
        says = f"{folder} is no finished run of src/ad/train.py; give the folder of one"
        raise UserError(f"--ckpt_dir: {says}") from None
    return model, config


def main(argv=None) -> int:
    trial = settings.read(argv)
    run_folder = data.resolve(trial.ckpt_dir)
    given = {name: x for name, x in vars(trial).items() if name != "ckpt_dir" and x is not None}
    model, config = load(run_folder)
    config = dataclasses.replace(config, **given)
    folder = run_folder / "evaluation"
    checkpoint.check_place("--ckpt_dir", folder)
    model.to(distributed.choose_device(distributed.whoami(), "auto").device)
    summary, returns = assess(model, config, compare=True)
    folder.mkdir(exist_ok=True)
    write(folder, summary, returns, config)
    summary["settings"] = given
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _, tasks = config.tasks
    optimum = config.environment.optimum(tasks)
    for task, episodes, most in zip(tasks, returns["agent"], optimum, strict=True):
        last = f"last {LAST} episodes {episodes[-LAST:].mean():.2f} of {most:.2f}"
        print(f"task {config.environment.names[task]}: mean {episodes.mean():.2f}, {last}")
    print(f"overall mean {returns['agent'].mean():.2f}\n{describe(summary)}\n-> {folder}/")
    return 0


if __name__ == "__main__":
    distributed.run(main)
