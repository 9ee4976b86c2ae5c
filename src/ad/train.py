"""Distil how an algorithm learns into a transformer that then learns in its context alone.

    accelerate launch src/ad/train.py                                     # the demo
    accelerate launch --multi_gpu --num_processes 2 src/ad/train.py --config config/model/ad_dr.yaml
    torchrun --nproc_per_node=2 src/ad/train.py train_batch_size=256 lr=1e-3
    python src/ad/train.py                                                # one process

Loss: cross-entropy of the source's action at every step of a window of its learning history
(Laskin et al., In-context Reinforcement Learning with Algorithm Distillation, 2022). Histories are
collected first if there are none. Guide: docs/algorithm_distillation.md. Results: output_dir.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where nothing is installed

from ad.config import read
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(read)  # --help and mistakes in the settings end here, before torch is imported


import math
import os
import time

import torch
from safetensors.torch import save_file

from ad import evaluate, windows
from ad.model import Distiller, Model
from ddp_utils import (
    NonFiniteError,
    UserError,
    checks,
    distributed,
    metrics,
    sampler,
)
from ddp_utils import run as run_
from ddp_utils.data import digest_of_files, resolve
from ddp_utils.policy import Policy, Precision, bytes_to_write, check_same_precision, make_optimizer
from ddp_utils.run import Run
from ddp_utils.runs import progress
from ddp_utils.runs.folder import RunSpec


def banner(config, world, autocast):
    """Return what the guide prints, to the letter."""
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


# --- step ----------------------------------------------------------------------------------------


def train_step(policy, step, data, config, run):
    """Forward and backward of one global batch; return its exact means. The gradient is ready."""
    world = run.world
    size = config.train_batch_size
    accumulation = config.gradient_accumulation_steps
    count = size * accumulation * world.world_size
    history, start = data.draw(config.seed, step, count)
    averages = metrics.Averages(world)
    for micro_step in range(accumulation):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        first = (micro_step * world.world_size + world.rank) * size
        rows = slice(first, first + size)
        policy.sync_gradients(micro_step == accumulation - 1)
        losses, correct = policy(data.batch(history[rows], start[rows]))  # [B], [B]
        # DDP averages over ranks: times world_size / count is the mean of the global batch
        policy.backward(losses.sum() * (world.world_size / count))
        averages.add({"loss": losses, "accuracy": correct}, torch.ones_like(losses))
    norm = policy.clip_grad_norm(config.max_grad_norm)
    values = run.reduce(averages, norm)
    if step == 0:
        check_first_step(policy, values["loss"], config.environment.actions)
    if not math.isfinite(values["loss"]):
        raise NonFiniteError(f"step {step + 1}: the loss is not finite; lower --lr")
    return values


def check_first_step(policy, loss, actions):
    """A head of zeros gives every action the same odds: the first loss is ln A, or a bug's."""
    bound = 1e-6 if policy.scorer.autocast is None else 1e-2
    if abs(loss - math.log(actions)) > bound:
        raise UserError(f"before the first step the loss is {loss:.6f}, not ln {actions}")
    checks.check_gradients(policy, "full")


# --- evaluation, on the main process -------------------------------------------------------------


@torch.no_grad()
def test(distiller, data, config):
    """Return mean loss and accuracy on windows of held-out tasks that overlap nowhere."""
    history, start = data.all()
    averages = metrics.Averages(distributed.World())  # of this process alone
    for first in range(0, len(history), config.test_batch_size):
        rows = slice(first, first + config.test_batch_size)
        losses, correct = distiller(data.batch(history[rows], start[rows]))
        averages.add({"loss": losses, "accuracy": correct}, torch.ones_like(losses))
    return averages.reduce()


def validate(step, policy, data, config, run):
    """Evaluate what is due after `step` steps, if the run has not yet; everything at the end."""
    last = step == config.train_timesteps
    if not run.world.is_main or run.validated >= step > 0 or not (step or last):
        return
    policy.scorer.eval()
    values = {}
    if last or (config.eval_interval and step % config.eval_interval == 0):
        values = test(policy.scorer, data, config)
        run.results["val"] = values
    if last or (config.gen_interval and step % config.gen_interval == 0):
        summary, returns = evaluate.assess(policy.scorer.model, config, compare=last)
        run.say(progress.row("agent", evaluate.describe(summary)))
        run.results["test"] = summary
        values |= {name: value for name, value in summary.items() if value is not None}
        if last:
            evaluate.write(run.folder, summary, returns, config)
    if values:
        run.log(step, values, "val")
    policy.scorer.train()


def save(model, folder):
    """Write the weights under their own names; config.json of the run says what they belong to."""
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")


# --- main ----------------------------------------------------------------------------------------


def main(argv=None) -> int:
    # setup
    world = distributed.whoami(argv=sys.argv)
    config = read(sys.argv[1:] if argv is None else argv, world.is_main)
    if config.check:
        world = distributed.choose_device(world, config.backend)
    else:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)
    precision = Precision.choose(world.device, mixed=config.mixed_precision)
    autocast = precision.autocast
    if autocast == torch.float16 and world.device.type == "cpu":
        raise UserError("--mixed_precision: fp16 does not train on a CPU; give no, or bf16")
    path = resolve(config.traj_file)
    if path.exists():
        windows.read(path, config.source_settings())  # else they are collected when all have met
    torch.manual_seed(config.seed)  # the same start on every rank
    model = Model(config)
    counts = config.train_batch_size, config.gradient_accumulation_steps, world.world_size
    global_batch = math.prod(counts)
    inputs = {"global_batch": str(global_batch)}
    lines = [f"histories: {path}{'' if path.exists() else ', to be collected'}"]
    if config.num_workers:
        lines.append("num_workers: not needed: windows are cut on the device, there is no loader")
    # accelerate's launcher of one process sets these two, the second if it was asked for more
    is_alone = "ACCELERATE_USE_CPU" in os.environ and world.world_size == 1
    if is_alone and "MASTER_ADDR" in os.environ:
        lines.append("accelerate: one process; more need --multi_gpu as well, on CPUs, too")
    spec = RunSpec(
        folder=Path(config.output_dir),
        flag="--output_dir",
        steps=config.train_timesteps,
        inputs=inputs,
        bytes_needed=bytes_to_write(model, config.keep_checkpoints + 1),
        lines=lines,
    )
    if config.check:
        return run_.check(spec, config, world)

    check_same_precision(precision, world)
    returns = distributed.on_main(
        world, lambda: [] if path.exists() else [*windows.collect(config, path)]
    )
    arrays = distributed.on_each(world, lambda: windows.read(path, config.source_settings()))
    tasks = config.tasks
    data, held_out = (windows.Histories(arrays, part, config, world.device) for part in tasks)
    inputs["content of traj_file"] = digest_of_files([path])
    steps = config.train_timesteps

    with Run(spec, config, world) as run:
        run.say(banner(config, world, autocast))
        if returns:
            run.say(f"collected {path}: return {returns[0]:.2f}, at the end {returns[-1]:.2f}")
        run.describe(
            model=f"transformer, {sum(p.numel() for p in model.parameters()):,} parameters",
            tasks=f"{config.env}: {len(tasks[0])}, {len(tasks[1])} held out; {data.count} streams",
            batch=f"{global_batch} windows of {config.window} steps = {world.world_size} ranks x "
            f"{counts[1]} accumulation x {counts[0]}",
            steps=f"{steps}, learning rate {config.lr:.3g}",
        )

        # model
        betas = config.beta1, config.beta2
        policy = Policy(Distiller(model, autocast, config.label_smoothing), world)
        optimizer, schedule = make_optimizer(
            policy, config.lr, steps, "cosine", config.warmup_ratio, config.weight_decay, betas
        )
        done = run.restore(policy, optimizer, schedule)
        validate(done, policy, held_out, config, run)

        # loop: one turn is one optimiser step
        then, before = time.perf_counter(), done
        for step in range(done, steps):
            now = step + 1
            values = train_step(policy, step, data, config, run)
            rate = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            run.bar.reach(now)
            if step == 0 or now % config.summary_interval == 0 or now == steps:
                seconds = (time.perf_counter() - then) / (now - before)
                values |= {"learning_rate": rate, "seconds": seconds}
                values["tokens_per_second"] = global_batch * config.window / seconds
                values["peak_memory_mb"] = metrics.peak_memory_mb(world.device)
                run.log(now, values)
                then, before = time.perf_counter(), now
            paused = time.perf_counter()
            validate(now, policy, held_out, config, run)
            due = now == steps or (config.ckpt_interval and now % config.ckpt_interval == 0)
            run.step = now
            run.save_if_due(bool(due))
            then += time.perf_counter() - paused  # neither counts as a step's time

        # result
        distributed.on_main(world, lambda: save(model, run.folder / "model"))
    return 0


if __name__ == "__main__":
    distributed.run(main)
