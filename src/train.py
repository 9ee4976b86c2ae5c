"""Fine-tune a language model on instructions, as a YAML file says: DDP, FSDP or DeepSpeed ZeRO.

    python src/train.py --config config.yaml             # one process, no launcher
    torchrun --standalone --nproc_per_node=4 src/train.py --config config.yaml
    deepspeed --num_gpus 4 src/train.py --config config.yaml --deepspeed config/ds_config.json

Each setting of the file is also a flag: --learning_rate 1e-4. For preference pairs use
main_distributed.py. Guide: docs/strategies.md.
"""

import train_config
from ddp_utils import cli

if __name__ == "__main__":  # --help and mistakes in the settings end here, before torch is imported
    cli.check_flags(train_config.read)

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_utils import checks, distributed, sampler
from ddp_utils import policy as policies
from ddp_utils import run as runs
from ddp_utils.data import DataFile, digest_of_files
from ddp_utils.distributed import World, to_device
from ddp_utils.metrics import Averages
from ddp_utils.policy import Policy, Precision
from ddp_utils.run import Run
from lm import instruction_data, logps, models, parallel
from lm import preference_data as preferences
from lm.chat_template import Encoder, date_of
from lm.checks import warn_of_guessing
from lm.logps import Pair
from lm.meter import Meter
from lm.settings import default_rate
from train_config import Config

PER_TOKEN = {"loss": "size"}  # the loss is divided by the trained tokens, its size

# --- data ----------------------------------------------------------------------------------------


def read_data(config: Config, encoder: Encoder, world: World) -> tuple[dict, dict]:
    """Return {"train": rows, "val": rows}, each a Text, and a report on each file."""
    cache = config.cache_dir or Path(config.output_dir).parent / ".tokens"

    def read_file(path: str, limit: int = -1) -> tuple[Any, dict]:
        file = DataFile(path, cache, limit, config.on_bad_record, config.columns)
        return instruction_data.read(file, encoder)

    train, report = read_file(config.train_data, config.max_rows)
    data = {"train": train, "val": []}
    reports = {"train": report}
    if config.val_data:
        data["val"], reports["val"] = read_file(config.val_data)
    elif config.val_share:
        fractions = (1 - config.val_share, config.val_share)
        data["train"], data["val"] = preferences.split_by_prompt(train, config.seed, fractions)
        report["split"] = {split: len(rows) for split, rows in data.items()}
    if data["val"]:
        data["val"] = data["val"].first(config.max_eval_rows)
    preferences.note_repeated_prompts(data, reports)
    sampler.check_enough_rows(config.train_data, data, world, config.save_best)
    return data, reports


# --- step ----------------------------------------------------------------------------------------


def loss_of(policy: Any, batch: logps.Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of each row [B] and other metrics, name -> [B].

    This is the only place where a loss is computed, in training and in validation. It is summed
    over the trained tokens of the row.
    """
    (summed,) = policy(batch)  # [B]
    return -summed, {}


def train_step(
    policy: Policy, step: int, rows: list, data: dict, config: Config, run: Run
) -> dict[str, float]:
    """Compute the gradient of one global batch, clipped, and return the exact means of its rows.

    rows: of the training data.
    """
    world = run.world
    train = data["train"]
    averages = Averages(world, sizes=PER_TOKEN)
    scorer = policy.scorer
    trained = int(train.select(rows).num_targets.sum())  # tokens of the global batch
    micro_batches = scorer.micro_batches(rows, train, world, config.micro_batch_size)
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = scorer.collate([train[row] for row in micro_batch.index], world.device)
        per_row, metrics = loss_of(policy, batch)
        weight = to_device(micro_batch.weight, world.device)  # [B]; 0 for padding rows
        # gradients are averaged over ranks: times world_size / global count is the global mean
        loss = (per_row * weight).sum() * (world.world_size / trained)
        policy.backward(loss)
        averages.add(metrics | {"loss": per_row, "size": batch.tokens[0]}, weight)
    grad_norm = policy.clip_grad_norm(config.max_grad_norm)
    return run.reduce(averages, grad_norm)


@torch.no_grad()
def evaluate(
    policy: Policy, rows: Any, config: Config, run: Run, split: str = ""
) -> dict[str, float]:
    """Return exact means over rows: each counts once, on any number of ranks.

    split: its name, if the run may stop within it.
    """
    world = run.world
    averages = Averages(world, ["loss"], PER_TOKEN)
    scorer = policy.scorer
    size = config.micro_batch_size
    with logps.dropout_off(scorer):
        micro_batches = scorer.micro_batches(range(len(rows)), rows, world, size)
        if split:
            micro_batches = run.evaluation(split, micro_batches, averages)
        for micro_batch in micro_batches:
            batch = scorer.collate([rows[row] for row in micro_batch.index], world.device)
            per_row, metrics = loss_of(scorer, batch)
            weight = to_device(micro_batch.weight, world.device)
            averages.add(metrics | {"loss": per_row, "size": batch.tokens[0]}, weight)
    return averages.reduce()


def check_first_loss(policy: Policy, loss: float, rows: Any, config: Config, run: Run) -> None:
    """Check, in fp32, that the loss of the first step is that of validation for the same rows.

    Raises UserError with both losses.
    """
    warn_of_guessing(loss, policy.scorer.unwrap())
    has_dropout = config.lora_dropout and config.init_adapter  # B of a new LoRA is 0
    if policy.precision == torch.float32 and not has_dropout:
        expected = evaluate(policy, rows, config, run)["loss"]
        checks.check_loss(policy, loss, expected, "for the same rows")


# --- models --------------------------------------------------------------------------------------


def precision_of(config: Config, device: torch.device) -> Precision:
    """Return the dtypes of weights and computation."""
    kinds = (config.fine_tuning, config.base_dtype, config.mixed_precision)
    return Precision.choose(device, *kinds)


def strategy_of(config: Config) -> policies.Strategy:
    """Return how the ranks split the work; a strategy that shards nothing is DDP."""
    communication = (config.grad_reduce_dtype, config.bucket_mb)
    return parallel.choose(config.strategy, config.sharding, *communication)


def load_policy(config: Config, data: dict, run: Run) -> Policy:
    """Load the model to be trained, on all ranks."""
    torch.manual_seed(config.seed)  # the same new LoRA on every rank
    precision = precision_of(config, run.world.device)
    model = models.load_policy(
        config.model_name,
        models.LoraSpec.of(config),
        precision,
        run.world.device,
        sharded=config.strategy != "ddp",
        in_4_bits=config.in_4_bits,
        gradient_checkpointing=config.gradient_checkpointing,
        memory_efficient=config.lean,
    )
    rows = data["train"].extremes()
    # fast scoring is tried on pairs
    pairs = [Pair(row.prompt, row.reply, row.reply, row.location, row.text) for row in rows]
    scorer = logps.Scorer(model, precision.autocast)
    return parallel.prepare(scorer, strategy_of(config), pairs, config.layout, run, True)


# --- main ----------------------------------------------------------------------------------------


def describe_run(
    config: Config, data: dict, report: dict, encoder: Encoder, plan: sampler.Plan, world: World
) -> tuple[runs.RunSpec, Any]:
    """Check model and data against each other, before a weight is read; describe the run.

    Return also the model on the meta device: its names and shapes, without weights.
    """
    adapter, checkpointing = models.LoraSpec.of(config), config.gradient_checkpointing
    meta_model, notes = models.meta_model(config.model_name, adapter, checkpointing)
    for rows in filter(None, data.values()):
        models.check_fit(meta_model, encoder.tokenizer, rows.extremes())
    folders = {"model_name": config.model_name, "init_adapter": config.init_adapter}
    inputs = models.input_digests(data, folders) | encoder.inputs
    inputs["global_batch"] = str(plan.global_batch)
    parallel.check(strategy_of(config), meta_model)
    lines = preferences.describe_all(report, data) + config.notes + notes + encoder.notes
    if config.sharding:  # as in the JSON, before its "auto" is filled in
        inputs[f"content of {config.strategy}_config"] = digest_of_files([], config.sharding)
    precision = precision_of(config, world.device)
    parallel.complete(config, config.micro_batch_size, precision, meta_model, world)
    spec = runs.RunSpec(
        folder=Path(config.output_dir),
        steps=plan.steps,
        log_every=config.log_every,
        inputs=inputs,
        report=report,
        lines=lines,
        save_best=config.save_best,
        shard_layout=strategy_of(config).shard_layout(config.fine_tuning, world),
    )
    return spec, meta_model


@cli.located()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = train_config.read(argv)
    world = distributed.start(config)
    if config.init_adapter and config.fine_tuning == "lora":  # it may be on the hub
        from lm import lora

        lora.inherit_config(config, config.init_adapter)
    models.check_4_bits(config, "type")
    if config.learning_rate is None:
        config.learning_rate = default_rate(config.model_name, "sft", config.fine_tuning)

    # data
    encoder = Encoder.of(config, date_of(config.output_dir, config, world))
    data, report = read_data(config, encoder, world)
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    spec, meta_model = describe_run(config, data, report, encoder, plan, world)
    if config.check:
        return runs.check(spec, config, world)

    with Run(spec, config, world) as run:
        accumulation = config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, {config.fine_tuning}",
            loss=config.objective,
            strategy=f"{strategy_of(config).name}, mixed precision {config.mixed_precision}",
            batch=f"{plan.global_batch} rows = {world.world_size} ranks x {accumulation} "
            f"accumulation x {config.micro_batch_size}",
            steps=f"{plan.steps}, learning rate {config.learning_rate:.3g}",
        )

        # model
        policy = load_policy(config, data, run)
        run.try_largest_steps(
            policy,
            plan,
            data["train"].num_forward_tokens(policy.scorer.shared),
            lambda step, rows: train_step(policy, step, rows, data, config, run),
        )
        optim = (config.lr_scheduler, config.warmup_ratio, config.weight_decay)
        rate = config.learning_rate or 0.0  # it is set
        optimizer, schedule = policies.make_optimizer(policy, rate, plan.steps, *optim)
        meter = Meter(policy.scorer, world)
        done = run.restore(policy, optimizer, schedule)

        def validate(step: int) -> None:
            is_due = bool(data["val"]) and plan.due(config.eval_every, step)
            run.validate(step, is_due, lambda: evaluate(policy, data["val"], config, run, "val"))

        # loop: one turn is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            examples = data["train"].select(rows)
            values = train_step(policy, step, rows, data, config, run)
            score = partial(logps.score, policy.scorer, examples, world, config.micro_batch_size)
            checks.check_step(policy, step, values, examples, score, config.fine_tuning)
            if step == 0:
                check_first_loss(policy, values["loss"], examples, config, run)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            values["epoch"] = plan.epoch(step + 1)
            values |= meter.read(examples, time.perf_counter() - start)
            run.log(step + 1, values)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        run.restore_best()
        models.save_policy(policy, meta_model, encoder, run.folder / "model", world)
    return 0


if __name__ == "__main__":
    distributed.run(main)
