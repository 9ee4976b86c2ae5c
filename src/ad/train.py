"""Train a transformer to imitate a learning algorithm, so that it learns in its context.

    accelerate launch src/ad/train.py                                     # the demo
    accelerate launch --multi_gpu --num_processes 2 src/ad/train.py --config config/model/ad_dr.yaml
    torchrun --nproc_per_node=2 src/ad/train.py train_batch_size=256 lr=1e-3
    python src/ad/train.py                                                # one process

Loss: cross-entropy of the source's action at every step of a window of its learning history
(Laskin et al., In-context Reinforcement Learning with Algorithm Distillation, 2022). If the file of
histories does not exist, they are collected first. Settings: src/ad/config.py. Results: output_dir.
Guide: docs/algorithm_distillation.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of this clone

from ad.config import read
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(read)  # --help and mistakes in the settings end here, before torch is imported


import collections
import math
import os
import time
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from ad import evaluate, windows
from ad.config import Config
from ad.model import Distiller, Model
from ad.windows import Histories
from ddp_utils import NonFiniteError, UserError, checks, distributed, metrics, sampler, terminal
from ddp_utils.checkpoints import check_writable, target_of
from ddp_utils.data import digest_of_files, resolve, write_file
from ddp_utils.distributed import World
from ddp_utils.policy import Policy, Precision, make_optimizer
from ddp_utils.run import Run, RunSpec, check

# --- settings and data ---------------------------------------------------------------------------


def banner(config: Config, world: World, autocast: torch.dtype | None) -> str:
    """Return the configuration as the guide prints it."""
    kinds = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU", "xpu": "MULTI_XPU"}
    precisions = {None: "no", torch.float16: "fp16", torch.bfloat16: "bf16"}
    rule = "=" * 60
    return f"""{rule}
Multi-GPU Training Configuration
{rule}
Number of processes: {world.world_size}
Distributed type: DistributedType.{kinds[world.device.type] if world.world_size > 1 else "NO"}
Mixed precision: {precisions[autocast]}
Gradient accumulation steps: {config.gradient_accumulation_steps}
Main process device: {world.device}
{rule}"""


def describe_data(config: Config, world: World, path: Path) -> list[str]:
    """Return lines about the histories, and about processes that accelerate has not started."""
    collected = "" if path.exists() else ", to be collected" if config.check else ", collected now"
    lines = [f"histories: {path}{collected}"]
    # accelerate sets both for one process, the second one only if several were requested
    is_single = "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ
    if is_single and world.world_size == 1:
        lines.append("accelerate: only one process; add --multi_gpu to start several, on CPUs too")
    return lines


def load_histories(config: Config, path: Path, world: World) -> list[Histories]:
    """Return the histories of the training and the held-out tasks; collect them if needed."""

    def collect() -> None:
        if path.exists() or config.source == "imported":
            return
        check_writable("--traj_file", path)
        check_writable("run folder", target_of(Path(config.output_dir)))  # before it takes a while
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock")):  # of runs that are started together
            if not path.exists():
                returns = windows.collect(config, path)
                print(f"collected {path}: return {returns[0]:.2f}, at the end {returns[-1]:.2f}")

    distributed.on_main(world, collect)
    arrays = distributed.on_each(world, lambda: windows.read(path, config))
    return [Histories(arrays, part, config, world.device) for part in config.tasks]


# --- step ----------------------------------------------------------------------------------------


def loss_of(distiller: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each window [B] and its metrics, name -> [B], as model.py computes them.

    This is the only place where a loss is computed, in training and in validation. It is the
    cross-entropy of the actions of a window; accuracy is the fraction that is predicted right.
    """
    losses, correct = distiller(batch)  # [B], [B]
    return losses, {"accuracy": correct}


def train_step(policy: Policy, step: int, data: Histories, config: Config, run: Run) -> dict:
    """Run forward and backward for one global batch; return its means over all ranks."""
    world = run.world
    size, accumulation = config.train_batch_size, config.gradient_accumulation_steps
    count = size * accumulation * world.world_size
    history, start = data.draw(config.seed, step, count)
    averages = metrics.Averages(world)
    for micro_step in range(accumulation):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        first = (micro_step * world.world_size + world.rank) * size
        rows = slice(first, first + size)
        policy.sync_gradients(micro_step == accumulation - 1)
        losses, values = loss_of(policy, data.batch(history[rows], start[rows]))  # [B]
        # DDP averages over ranks: times world_size / count is the mean over the global batch
        policy.backward(losses.sum() * (world.world_size / count))
        averages.add(values | {"loss": losses}, torch.ones_like(losses))
    return run.reduce(averages, policy.clip_grad_norm(config.max_grad_norm))


def check_step(policy: Policy, step: int, means: dict, config: Config) -> None:
    """Stop before an update from a wrong start, or with a loss or gradient that is not finite."""
    loss = means["loss"]
    if not math.isfinite(loss):
        raise NonFiniteError(f"step {step + 1}: the loss is not finite; lower --lr")
    if step == 0:
        # the head is zero, so that all actions have the same probability
        expected = math.log(config.environment.actions)
        bound = 1e-6 if policy.scorer.autocast is None else 1e-2
        if abs(loss - expected) > bound:
            raise UserError(f"before the first step the loss is {loss:.6f}, not {expected:.6f}")
    checks.check_gradient(policy, step, means, "full")


# --- evaluation, on the main process -------------------------------------------------------------


@torch.no_grad()
def held_out_loss(distiller: Distiller, data: Histories, config: Config) -> dict:
    """Return the mean loss and accuracy on all non-overlapping windows of held-out tasks.

    Their 95 % intervals are over tasks: windows of one task are alike.
    """
    history, start = data.all()  # the windows of a task follow each other
    parts = collections.defaultdict(list)  # metric -> [B] of each batch
    for first in range(0, len(history), config.test_batch_size):
        rows = slice(first, first + config.test_batch_size)
        losses, values = loss_of(distiller, data.batch(history[rows], start[rows]))
        for name, value in (values | {"loss": losses}).items():
            parts[name].append(value.double())
    result: dict[str, float] = {"count": len(history)}
    for name, batches in parts.items():
        of_task = torch.cat(batches).view(data.tasks, -1).mean(-1)  # [G]
        result |= metrics.ratio(name, of_task, torch.ones_like(of_task))
    return result


def is_due(interval: int, step: int, config: Config) -> bool:
    """Return whether something is due after `step` steps: at multiples, and after the last one."""
    return step == config.train_timesteps or (step > 0 and interval > 0 and step % interval == 0)


def validate(step: int, policy: Policy, data: Histories, config: Config, run: Run) -> None:
    """Evaluate what is due after `step` steps, unless it was done before a restart."""
    if not run.world.is_main or run.validated >= step:
        return
    distiller: Any = policy.scorer
    distiller.eval()
    values = {}
    if step == 0 < config.train_timesteps:  # the head is zero, see check_step()
        values = run.results["before"] = {"loss": math.log(config.environment.actions)}
    if is_due(config.eval_interval, step, config):
        values = run.results["val"] = held_out_loss(distiller, data, config)
    if is_due(config.gen_interval, step, config):
        is_last = step == config.train_timesteps
        summary, returns = evaluate.evaluate_agent(distiller.model, config, compare=is_last)
        run.say(terminal.row("agent", evaluate.describe(summary)))
        run.results["test"] = summary
        values = values | {name: value for name, value in summary.items() if value is not None}
        if is_last:
            evaluate.write(run.folder, summary, returns, config)
    if values:
        run.log(step, values, "val")
    distiller.train()


# --- main ----------------------------------------------------------------------------------------


def save_model(model: Model, folder: Path) -> None:
    """Write the weights; config.json of the run describes the architecture."""
    with write_file(folder / "model.safetensors") as file:
        save_file(model.state_dict(), file)


@cli.located()
def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = read(argv)
    world = distributed.start(config)
    precision = Precision.choose(world.device, mixed=config.mixed_precision)
    if precision.autocast == torch.float16 and world.device.type == "cpu":
        raise UserError("--mixed_precision: fp16 is not supported on a CPU; use no")
    path = resolve(config.traj_file)
    if path.exists() or config.source == "imported":  # find a mistake before others are waited for
        windows.read(path, config)
    torch.manual_seed(config.seed)  # the same initial weights on every rank
    model = Model(config)
    accumulation, steps = config.gradient_accumulation_steps, config.train_timesteps
    global_batch = config.train_batch_size * accumulation * world.world_size
    inputs = {"global_batch": str(global_batch)}
    lines = describe_data(config, world, path)
    spec = RunSpec(Path(config.output_dir), steps, inputs, lines=lines)
    if config.check:
        return check(spec, config, world)

    # data
    data, held_out = load_histories(config, path, world)
    inputs["content of traj_file"] = digest_of_files([path])

    with Run(spec, config, world) as run:
        run.say(banner(config, world, precision.autocast))
        run.describe(
            model=f"transformer, {sum(p.numel() for p in model.parameters()):,} parameters",
            tasks=f"{config.env}: {data.tasks}, {held_out.tasks} held out; {data.count} streams",
            batch=f"{global_batch} windows of {config.window} steps = {world.world_size} ranks x "
            f"{accumulation} accumulation x {config.train_batch_size}",
            steps=f"{steps}, learning rate {config.lr:.3g}",
        )

        # model
        distiller = Distiller(model, precision.autocast, config.label_smoothing)
        policy = Policy(distiller, world)
        decay = config.warmup_ratio, config.weight_decay
        betas = config.beta1, config.beta2
        optimizer, schedule = make_optimizer(
            policy, config.lr, steps, "cosine", *decay, betas=betas
        )
        done = run.restore(policy, optimizer, schedule)
        validate(done, policy, held_out, config, run)

        # loop: one iteration is one optimizer step
        seconds = []  # of the steps since the last line of metrics
        for step in range(done, steps):
            start = time.perf_counter()
            values = train_step(policy, step, data, config, run)
            check_step(policy, step, values, config)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            seconds.append(time.perf_counter() - start)
            run.bar.reach(step + 1)
            if step == 0 or is_due(config.summary_interval, step + 1, config):
                values["seconds"] = sum(seconds) / len(seconds)
                values["tokens_per_second"] = global_batch * config.window / values["seconds"]
                values["peak_memory_mb"] = metrics.peak_memory_mb(world.device)
                run.log(step + 1, values)
                seconds = []
            run.step = step + 1
            run.save_if_due(is_due(config.ckpt_interval, step + 1, config))
            validate(step + 1, policy, held_out, config, run)  # takes a while, and cannot stop

        # results
        distributed.on_main(world, lambda: save_model(model, run.folder / "model"))
    return 0


if __name__ == "__main__":
    distributed.run(main)
