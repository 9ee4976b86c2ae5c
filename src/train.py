"""Fine-tune a language model according to a YAML file: SFT or DPO, on DDP, FSDP or DeepSpeed ZeRO.

    python src/train.py --config config.yaml             # one process, no launcher
    torchrun --standalone --nproc_per_node=4 src/train.py --config config.yaml
    deepspeed --num_gpus 4 src/train.py --config config.yaml --deepspeed config/ds_config.json

Each setting of the file is also a flag: --learning_rate 1e-4. Guide: docs/strategies.md.
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

from ddp_utils import UserError, distributed, losses, sampler
from ddp_utils import policy as policies
from ddp_utils import run as runs
from ddp_utils.data import DataFile, digest_of_files
from ddp_utils.distributed import World, to_device
from ddp_utils.metrics import Averages
from ddp_utils.policy import Policy, Precision
from ddp_utils.run import Run
from lm import instruction_data, logps, models, parallel
from lm import preference_data as preferences
from lm.chat_template import Encoder
from lm.checks import check_pairs
from lm.logps import Pair
from lm.meter import Meter
from train_config import Config

Tables = dict[str, Tensor]  # split -> log-probs of chosen and rejected, [pairs, 2]

# --- data ----------------------------------------------------------------------------------------


def encoder_of(config: Config) -> Encoder:
    """Return what turns texts into token ids."""
    names = config.model_name, config.init_adapter, config.chat_template
    tokenizer = models.load_tokenizer(*names)
    shape = config.max_length, config.truncation, config.chat_template_kwargs, config.keep_thoughts
    return Encoder(tokenizer, config.chat_template, *shape)


def read_data(config: Config, encoder: Encoder, world: World) -> tuple[dict, dict]:
    """Return {"train": rows, "val": rows}, each a Text or a Pair, and a report on each file."""
    cache = config.cache_dir or Path(config.output_dir).parent / ".tokens"
    read = preferences.read if config.objective == "dpo" else instruction_data.read

    def read_file(path: str, limit: int = -1) -> tuple[Any, dict]:
        file = DataFile(path, cache, limit, config.on_bad_record, config.columns)
        return read(file, encoder)

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


def row_losses(
    policy: Any, batch: logps.Batch, ref_logps: Tensor, config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each row [B] and its metrics, each [B].

    ref_logps: log-probs of the reference, [B, 2]. The metric "size" of a row is what the loss is
    divided by: 1 for a pair, the number of trained tokens for a text.
    """
    if config.objective == "sft":
        (summed,) = policy(batch)  # [B]: log-probs summed over the trained tokens
        return -summed, {"loss": -summed, "size": batch.tokens[0]}
    per_row, metrics = losses.pair_losses(policy, batch, ref_logps, losses.LossSpec.of(config))
    return per_row, {**metrics, "size": torch.ones_like(per_row)}


def divide_loss(means: dict[str, float]) -> dict[str, float]:
    """Return the means over rows, with the loss per pair or per trained token."""
    return means | {"loss": means["loss"] / means.pop("size")}


def train_step(
    policy: Policy, step: int, rows: list, data: dict, ref_logps: Tables, config: Config, run: Run
) -> dict[str, float]:
    """Compute the gradient of one global batch, clipped, and return the exact means of its rows.

    rows: of the training data.
    """
    world = run.world
    train = data["train"]
    averages = Averages(world)
    scorer = policy.scorer
    count = len(rows)  # what the loss is divided by: pairs, or trained tokens
    if config.objective == "sft":
        count = sum(train[row].trained for row in rows)
    micro_batches = scorer.micro_batches(rows, train, world, config.micro_batch_size)
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = scorer.collate([train[row] for row in micro_batch.index], world.device)
        known = ref_logps["train"][to_device(micro_batch.index, world.device)]  # [B, 2]
        per_row, metrics = row_losses(policy, batch, known, config)
        weight = to_device(micro_batch.weight, world.device)  # [B]; 0 for padding rows
        # gradients are averaged over ranks: times world_size / global count is the global mean
        loss = (per_row * weight).sum() * (world.world_size / count)
        policy.backward(loss)
        averages.add(metrics, weight)
    grad_norm = policy.clip_grad_norm(config.max_grad_norm)
    return divide_loss(run.reduce(averages, grad_norm))


@torch.no_grad()
def evaluate(
    policy: Policy, rows: Any, ref_logps: Tensor, config: Config, run: Run
) -> dict[str, float]:
    """Return exact means over validation rows: each counts once, on any number of ranks.

    Before the first step, nothing is scored if the log-probs are those of the reference.
    """
    world = run.world
    averages = Averages(world)
    scorer = policy.scorer
    size = config.micro_batch_size
    is_reference = run.step == 0 and config.has_reference
    with logps.dropout_off(scorer):
        micro_batches = scorer.micro_batches(range(len(rows)), rows, world, size)
        for micro_batch in run.phase("evaluating val").each(micro_batches):
            batch = scorer.collate([rows[row] for row in micro_batch.index], world.device)
            known = ref_logps[to_device(micro_batch.index, world.device)]  # [B, 2]
            source = losses.Known(known, scorer.precision) if is_reference else scorer
            _, metrics = row_losses(source, batch, known, config)
            averages.add(metrics, to_device(micro_batch.weight, world.device))
    means = averages.reduce()
    if is_reference:
        del means["rewards/accuracies"]  # all pairs are ties
    return divide_loss(means)


# --- models --------------------------------------------------------------------------------------


def precision_of(config: Config, device: torch.device) -> Precision:
    """Return the dtypes of weights and computation."""
    kinds = (config.fine_tuning, config.base_dtype, config.mixed_precision)
    return Precision.choose(device, *kinds)


def strategy_of(config: Config) -> policies.Strategy:
    """Return how the ranks split the work; a strategy that shards nothing is DDP."""
    communication = (config.grad_reduce_dtype, config.bucket_mb)
    return parallel.choose(config.strategy, config.sharding, *communication)


def fill_in_settings(config: Config, meta_model: Any, world: World) -> Precision:
    """Set what depends on model and device, also "auto" in DeepSpeed's JSON; return the dtypes."""
    if config.learning_rate is None:
        kind = config.objective, config.fine_tuning
        config.learning_rate = policies.default_rate(config.model_name, *kind)
    precision = precision_of(config, world.device)
    if config.mixed_precision == "auto":
        names: dict[Any, Any] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config.mixed_precision = names.get(precision.autocast, "no")
    if config.mixed_precision == "fp16" and world.device.type == "cpu":
        raise UserError("--mixed_precision fp16: slow on a CPU; use no")
    is_cpu_ddp = strategy_of(config).kind == "ddp" and world.device.type == "cpu"
    if config.grad_reduce_dtype == "bf16" and is_cpu_ddp:
        raise UserError("--grad_reduce_dtype bf16: DDP supports it on GPUs only; use fp16 or fp32")
    if config.use_deepspeed:
        from lm.sharding import deepspeed

        width = meta_model.config.get_text_config().hidden_size
        config.sharding = deepspeed.filled(config.sharding, config, world, width)
        if deepspeed.stage(config.sharding):
            from lm.sharding import deepspeed_engine

            deepspeed_engine.check_values(config.sharding, config.deepspeed_config, world)
    return precision


def load_policy(config: Config, precision: Precision, data: dict, run: Run) -> Policy:
    """Load the model to be trained, on all ranks."""
    torch.manual_seed(config.seed)  # the same new LoRA on every rank
    model = models.load_policy(
        config.model_name,
        models.LoraSpec.of(config),
        precision,
        run.world.device,
        sharded=config.strategy != "ddp",
        in_4_bits=config.type == "qlora",
        gradient_checkpointing=config.gradient_checkpointing,
        memory_efficient=config.lean,
    )
    pairs = data["train"].extremes()
    if config.objective == "sft":  # fast scoring is tried on pairs
        pairs = [Pair(row.prompt, row.reply, row.reply, row.location, row.text) for row in pairs]
    scorer = logps.Scorer(model, precision.autocast)
    return parallel.prepare(scorer, strategy_of(config), pairs, config.layout, run, True)


def score_reference(
    policy: Policy, plan: sampler.Plan, data: dict, config: Config, run: Run
) -> Tables:
    """Return the log-probs of a policy before its first step; NaN for pairs that are not used.

    They are 0 if the loss has no reference.
    """
    if not config.has_reference:
        return losses.no_reference(data, run.world.device)
    size = config.micro_batch_size
    score = partial(logps.score, policy.scorer, world=run.world, micro_batch_size=size)
    numerics = policy.scorer.numerics(run.world.device)
    return run.reference_logps(numerics, data, {"train": plan.rows_used()}, score)


# --- main ----------------------------------------------------------------------------------------


def describe_run(
    config: Config, data: dict, report: dict, plan: sampler.Plan, world: World
) -> tuple[runs.RunSpec, Any, Precision]:
    """Check model and data against each other, before a weight is read; describe the run.

    Return also the model on the meta device: its names and shapes, without weights.
    """
    adapter, checkpointing = models.LoraSpec.of(config), config.gradient_checkpointing
    meta_model, notes = models.meta_model(config.model_name, adapter, checkpointing)
    for rows in filter(None, data.values()):
        models.check_fit(meta_model, rows.extremes())
    folders = {"model_name": config.model_name, "init_adapter": config.init_adapter}
    inputs = models.input_digests(data, folders, meta_model.config)
    inputs["global_batch"] = str(plan.global_batch)
    parallel.check(strategy_of(config), meta_model)
    lines = preferences.describe_all(report, data) + config.notes + notes
    if config.sharding:  # as in the JSON, before its "auto" is filled in
        inputs[f"content of {config.strategy}_config"] = digest_of_files([], config.sharding)
    precision = fill_in_settings(config, meta_model, world)
    spec = runs.RunSpec(
        folder=Path(config.output_dir),
        steps=plan.steps,
        inputs=inputs,
        report=report,
        lines=lines,
        save_best=config.save_best,
        shard_layout=strategy_of(config).shard_layout(config.fine_tuning, world.world_size),
    )
    return spec, meta_model, precision


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    world = distributed.whoami()
    config = train_config.read(argv)
    with cli.located(config.places):  # an error about a setting names the line of the YAML file
        return fine_tune(config, world)


def fine_tune(config: Config, world: World) -> int:
    """Train as the settings say; return 0."""
    # setup
    if config.init_adapter and config.fine_tuning == "lora":
        from lm import lora

        lora.inherit_config(config, config.init_adapter)
    if config.type == "qlora" and models.is_adapter(config.model_name):
        advice = "merge it first: python -m lm.merge"
        raise UserError(f"--type: a LoRA cannot be merged into 4-bit weights; {advice}")
    world = distributed.choose_device(world, config.backend)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    encoder = encoder_of(config)
    data, report = read_data(config, encoder, world)
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    spec, meta_model, precision = describe_run(config, data, report, plan, world)
    if config.check:
        return runs.check(spec, config, world)

    with Run(spec, config, world) as run:
        accumulation = config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, {config.fine_tuning}",
            loss=f"{config.method}, beta {config.beta:g}" if config.objective == "dpo" else "sft",
            strategy=f"{strategy_of(config).name}, mixed precision {config.mixed_precision}",
            batch=f"{plan.global_batch} rows = {world.world_size} ranks x {accumulation} "
            f"accumulation x {config.micro_batch_size}",
            steps=f"{plan.steps}, learning rate {config.learning_rate:.3g}",
        )

        # model
        policy = load_policy(config, precision, data, run)
        ref_logps = score_reference(policy, plan, data, config, run)
        has_other_dropout = bool(config.lora_dropout and config.init_adapter)
        has_known_loss = config.has_reference and not has_other_dropout
        optim = (config.lr_scheduler, config.warmup_ratio, config.weight_decay)
        rate = config.learning_rate or 0.0  # it is set
        optimizer, schedule = policies.make_optimizer(policy, rate, plan.steps, *optim)
        displacement = losses.Displacement(config.method, config.sft_weight)
        meter = Meter(policy.scorer, world)
        done = run.restore(policy, optimizer, schedule)

        def validate(step: int) -> None:
            is_due = bool(data["val"]) and plan.due(config.eval_every, step)
            rows, known = data["val"], ref_logps["val"]
            run.validate(step, is_due, lambda: evaluate(policy, rows, known, config, run))

        # loop: one turn is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            examples = [data["train"][row] for row in rows]
            values = train_step(policy, step, rows, data, ref_logps, config, run)
            known = ref_logps["train"][rows] if step == 0 and has_known_loss else None
            size = config.micro_batch_size
            check_pairs(policy, step, values, examples, known, config, world, size)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            values["epoch"] = plan.epoch(step + 1)
            values |= meter.read(examples, time.perf_counter() - start)
            run.log(step + 1, values, echo=(step + 1) % config.log_every == 0)
            if config.objective == "dpo":
                warning = displacement.seen(values["rewards/chosen"])
                if warning:
                    run.warn(warning)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        run.restore_best()
        models.save_policy(policy, meta_model, encoder, run.folder / "model", world)
    return 0


if __name__ == "__main__":
    distributed.run(main)
