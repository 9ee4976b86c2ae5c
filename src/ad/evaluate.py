"""Evaluate a distilled agent on held-out tasks; it learns only in its context.

    python src/ad/evaluate.py --ckpt_dir runs/ad_demo

Writes eval_result.npy [G, E], summary.json and returns.png into ckpt_dir/evaluation. Guide:
docs/algorithm_distillation.md. G held-out tasks, E episodes, B parallel rollouts, A actions.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of this clone

import ad.evaluate_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(settings.read)  # --help and mistakes end here, before torch is imported


import dataclasses
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ad import sources, windows
from ad.config import Config
from ad.model import Cache, Model, Tokens
from ddp_utils import UserError, data, distributed
from ddp_utils.checkpoints import check_writable
from ddp_utils.metrics import Z, ratio

Array = np.ndarray
Returns = dict[str, Array]  # what is evaluated -> mean return of each task and episode [G, E]
LAST = 10  # the last episodes of a rollout, in which the agent has learned what it can
CURVES = {  # what is evaluated -> label, color and line style
    "agent": ("agent, in its context", "tab:blue", "-"),
    "teacher": ("its teacher", "tab:orange", "-"),
    "shared": ("Q-learners with one table", "tab:purple", "-"),
    "single": ("one Q-learner", "tab:brown", "-"),
    "control_wiped": ("context wiped", "tab:gray", "--"),
    "control_zero_reward": ("rewards hidden", "tab:gray", ":"),
    "control_zero_action": ("actions hidden", "tab:gray", ":"),
}

# --- rollouts ------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(
    model: Model, config: Config, tasks: Array, wiped: bool = False, hide: str = ""
) -> Array:
    """Sample actions in one context per task [B]; return the returns [B, E].

    wiped: start each episode with an empty context; hide: do not show the model any "reward" or
    any "action". Both are controls of what it learns in context.
    """
    environment = config.environment
    episodes, horizon = config.eval_episodes, config.horizon
    window = horizon if wiped else config.window
    rng = np.random.default_rng(config.seed)
    steps = torch.arange(episodes * horizon + 1, device=model.head.weight.device)
    cells = steps.new_zeros(len(tasks), len(steps))
    no_action = torch.full_like(cells, environment.actions)
    place = windows.places(steps, config).expand_as(cells)
    tokens = Tokens(cells, no_action, torch.zeros_like(cells), place)
    returns = np.zeros((len(tasks), episodes))
    cache = Cache(model, len(tasks))
    begin = 0  # the context is the steps from `begin` to `time`
    for time in range(episodes * horizon):
        if time % horizon == 0:
            state = np.full(len(tasks), environment.start)
        if time - begin == window:  # full: drop the oldest steps and compute the others again
            begin += min(window, config.dropped)
            cache.length = 0
        if cache.length == 0:  # the first token of a context has no action and reward before it
            tokens.action[:, begin] = environment.actions
            tokens.reward[:, begin] = 0
        tokens.cell[:, time] = torch.from_numpy(environment.observation[state])
        new = slice(begin + cache.length, time + 1)
        logits = model(Tokens(*(part[:, new] for part in tokens)), cache)[:, -1]  # [B, A]
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


def evaluate_agent(model: Model, config: Config, compare: bool = False) -> tuple[dict, Returns]:
    """Evaluate on the held-out tasks; return a summary and the returns.

    config: of the run. compare: also evaluate the controls and the baselines.
    """
    environment = config.environment
    _, tasks = config.tasks
    optima = environment.optimum(tasks)  # [G]
    optimum = optima.mean()
    repeated = np.repeat(tasks, config.eval_copies)

    def mean_returns(**control: Any) -> Array:  # [G, E]
        result = rollout(model, config, repeated, **control)
        return result.reshape(len(tasks), config.eval_copies, -1).mean(1)

    returns = {"agent": mean_returns()}
    agent = returns["agent"]
    first, last = agent[:, 0], agent[:, -LAST:].mean(1)  # [G]
    once = np.ones(len(tasks))
    summary = {
        "count": len(repeated),
        **ratio("return_first", *map(torch.from_numpy, (first, once))),
        **ratio("return_last10", *map(torch.from_numpy, (last, once))),
        "optimum": optimum,
        **ratio("fraction_of_optimum", *map(torch.from_numpy, (last, optima))),
        **learning_speed(agent, optimum),
    }
    if compare:
        hidden = environment.varies
        controls = {"control_wiped": mean_returns(wiped=True)}
        controls[f"control_zero_{hidden}"] = mean_returns(hide=hidden)
        summary |= {name: controls[name][:, -LAST:].mean() / optimum for name in controls}
        returns |= controls
        for name, (result, streams) in baselines(config, tasks).items():
            returns[name] = result
            summary[f"{name}_streams"] = streams
            summary |= learning_speed(result, optimum, f"{name}_")
    return summary, returns


def learning_speed(returns: Array, optimum: float, prefix: str = "") -> dict:
    """Return the area under the mean curve of returns [G, E], and the episodes to each level.

    The area and the levels (60, 80 and 90 %) are fractions of the optimum. Episodes count from 1;
    None: the level is never reached.
    """
    mean = returns.mean(0) / optimum  # [E]
    values: dict[str, Any] = {f"{prefix}area": mean.mean()}
    for percent in (60, 80, 90):
        reached = np.flatnonzero(mean >= percent / 100)
        values[f"{prefix}episodes_to_{percent}"] = int(reached[0]) + 1 if len(reached) else None
    return values


def baselines(config: Config, tasks: Array) -> dict[str, tuple[Array, int]]:
    """Run other algorithms on the tasks; return name -> (returns [G, E], streams that cooperate).

    "teacher": the source of the histories, unless they were imported. "shared": Q-learners whose
    streams share a table, if they are not the teacher. After the end of the histories both keep
    their last return. "single": one Q-learner with its own table.
    """
    episodes, steps = config.eval_episodes, config.source_steps
    shared = dataclasses.replace(config, source="q_learning", share_table=True)
    learners = {} if config.source == "imported" else {"teacher": config}
    if config != shared:
        learners["shared"] = shared
    results = {}
    for name, learner in learners.items():
        returns = sources.returns(learner, tasks, config.n_stream, steps)
        returns = np.pad(returns, ((0, 0), (0, episodes)), "edge")[:, :episodes]
        cooperate = learner.source == "q_learning" and learner.share_table
        results[name] = returns, config.n_stream if cooperate else 1
    single = dataclasses.replace(shared, share_table=False)
    returns = sources.returns(single, tasks, config.n_stream, episodes * config.horizon)
    return results | {"single": (returns, 1)}


# --- results -------------------------------------------------------------------------------------


def describe(summary: dict) -> str:
    """Return the summary as one line of text, with 95 % intervals over the tasks."""

    def shown(name: str, digits: str = ".2f") -> str:
        low, high = summary.get(f"{name}_low"), summary.get(f"{name}_high")
        spread = "" if low is None else f" [{low:{digits}}, {high:{digits}}]"
        return f"{summary[name]:{digits}}{spread}"

    text = f"return {shown('return_first')} in the first episode, {shown('return_last10')} in the "
    text += f"last {LAST}; optimum {summary['optimum']:.2f} ({shown('fraction_of_optimum', '.0%')})"
    controls = [f"; {CURVES[name][0]} {summary[name]:.0%}" for name in CURVES if name in summary]
    return text + "".join(controls)


def write(folder: Path, summary: dict, returns: Returns, config: Config) -> None:
    """Write eval_result.npy [tasks, episodes] and returns.png."""
    np.save(folder / "eval_result.npy", returns["agent"])
    _, tasks = config.tasks
    environment = config.environment
    bounds = environment.optimum(tasks), environment.random_return(tasks)
    draw(folder / "returns.png", summary, returns, *bounds)


def draw(file: Path, summary: dict, returns: Returns, optimum: Array, random: Array) -> None:
    """Draw returns per episode of a stream, and per episode spent on a task.

    optimum, random: returns [G] of the best and of random actions. Bands: 95 % intervals over tasks
    of the mean distance to the optimum, which excludes the differences between the optima.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 7.6), layout="constrained")  # readable on a phone
    per_stream, per_task = figure.subplots(2, 1, sharey=True)
    for name in returns:
        label, color, style = CURVES[name]
        streams = summary.get(f"{name}_streams", 1)
        label += f", {streams} streams" if streams > 1 else ""
        mean = returns[name].mean(0)  # [E]
        distance = optimum[:, None] - returns[name]  # [G, E]
        spread = Z * distance.std(0) / max(1, len(optimum) - 1) ** 0.5  # as metrics.interval
        episodes = np.arange(1, len(mean) + 1)
        per_stream.plot(episodes, mean, style, color=color, label=label)
        per_stream.fill_between(episodes, mean - spread, mean + spread, color=color, alpha=0.15)
        if "control" not in name:
            per_task.plot(episodes * streams, mean, style, color=color)
    for axis in (per_stream, per_task):
        axis.axhline(optimum.mean(), color="tab:green", label="optimum")
        axis.axhline(random.mean(), color="tab:red", label="random actions")
        axis.grid(alpha=0.3)
    figure.suptitle(f"Return on {len(optimum)} held-out tasks, with 95 % intervals")
    per_stream.set(xlabel="episode of a stream", ylabel="mean return", ylim=(0, None))
    per_task.set(xlabel="episodes spent on a task, by all streams", ylabel="mean return")
    per_task.set_xscale("log")
    legend = per_stream.get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(file, dpi=200)


# --- main ----------------------------------------------------------------------------------------


def load(folder: Path) -> tuple[Model, Config]:
    """Return the model and the settings of a run; raise UserError if the run has not finished."""
    problem = f"--ckpt_dir: {folder} is not a finished run of src/ad/train.py"
    not_finished = UserError(f"{problem}; use the output_dir of such a run")
    try:
        saved = data.read_json(folder / "config.json")
    except (UserError, FileNotFoundError):
        raise not_finished from None
    try:
        config = Config(**{k: v for k, v in saved.items() if k not in cli.IGNORED})  # of old runs
        model = Model(config).eval()  # UserError if the package of the environment is missing
        model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    except (TypeError, FileNotFoundError, RuntimeError, SafetensorError):
        raise not_finished from None
    return model, config


def main(argv: list[str] | None = None) -> int:
    """Evaluate a run with these flags, or with those of the command line; return 0."""
    flags = vars(settings.read(argv))
    run_folder = data.resolve(flags.pop("ckpt_dir"))
    changed = {name: value for name, value in flags.items() if value is not None}
    model, config = load(run_folder)
    config = dataclasses.replace(config, **changed)
    folder = run_folder / "evaluation"
    check_writable("--ckpt_dir", folder)
    model.to(distributed.choose_device(distributed.whoami(), "auto").device)
    summary, returns = evaluate_agent(model, config, compare=True)
    folder.mkdir(exist_ok=True)
    write(folder, summary, returns, config)
    used = {name: getattr(config, name) for name in flags}
    data.write_json(folder / "summary.json", summary | {"settings": used})
    print(f"overall mean {returns['agent'].mean():.2f}\n{describe(summary)}\n-> {folder}/")
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
