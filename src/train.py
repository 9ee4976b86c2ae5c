"""Fine-tune a language model as a YAML file says: SFT or DPO, on DDP, FSDP or DeepSpeed ZeRO.

    python src/train.py --config config.yaml             # one process, no launcher
    torchrun --standalone --nproc_per_node=4 src/train.py --config config.yaml
    deepspeed --num_gpus 4 src/train.py --config config.yaml --deepspeed config/ds_config.json

Each setting of the file is a flag, too: --learning_rate 1e-4. Guide: docs/strategies.md.
"""

import train_config
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        train_config.read
    )  # --help and mistakes in the settings end here, before torch is imported


import math
import sys
import time
from pathlib import Path

import torch

from ddp_utils import (
    UserError,
    checks,
    cli,
    distributed,
    logps,
    lora,
    losses,
    models,
    preference_data,
    sampler,
    sharding,
)
from ddp_utils.chat_template import Encoder
from ddp_utils.data import DataFile, digest_of_files
from ddp_utils.distributed import to_device
from ddp_utils.fast.self_test import choose_head_and_layout
from ddp_utils.logps import Pair
from ddp_utils.losses import LossSpec
from ddp_utils.metrics import Averages, Meter
from ddp_utils.policy import (
    Precision,
    bytes_to_write,
    check_same_precision,
    make_optimizer,
)
from ddp_utils.run import Run, RunSpec, check
from sft import instruction_data

RATES = {  # objective and kind of fine-tuning -> learning rate from 10 M parameters on
    ("sft", "lora"): 2e-4,
    ("sft", "full"): 2e-5,
    ("dpo", "lora"): 1e-5,
    ("dpo", "full"): 1e-6,
}

# --- data ----------------------------------------------------------------------------------------


def encoder_of(config):
    """What turns rows into token ids."""
    tokenizer = models.load_tokenizer(config.model_name)
    shape = config.max_length, config.truncation, config.chat_template_kwargs
    return Encoder(tokenizer, config.chat_template, *shape)


def read_data(config, encoder, world):
    """{"train": rows, "val": rows}, each a Text or a Pair, and their reports."""
    cache = config.cache_dir or Path(config.output_dir).parent / ".tokens"
    reader = preference_data if config.objective == "dpo" else instruction_data

    def read(path, limit=-1):
        source = DataFile(path, cache, limit, config.on_bad_record, config.columns)
        return reader.read(source, encoder)

    train, report = read(config.train_data, config.max_rows)
    data = {"train": train, "val": []}
    reports = {"train": report}
    if config.val_data:
        data["val"], reports["val"] = read(config.val_data)
    elif config.val_share:
        shares = (1 - config.val_share, config.val_share)
        parts = preference_data.split_by_prompt(train, config.seed, shares)
        data = {"train": parts[0], "val": parts[1]}
        report["split"] = {"train": len(parts[0]), "val": len(parts[1])}
    if config.save_best and not data["val"]:
        raise UserError("--save_best: there is no validation data; give val_data or val_share")
    sampler.check_enough_rows(config.train_data, len(data["train"]), world)
    return data, reports


def as_pairs(rows):
    """Rows that the self-test can try a model on."""
    if isinstance(rows[0], Pair):
        return rows
    return [Pair(row.prompt, row.reply, row.reply, row.location, row.text) for row in rows]


# --- step ----------------------------------------------------------------------------------------


def row_losses(policy, batch, ref_logps, config):
    """B rows -> losses [B] and metrics, each [B]; ref_logps: log-probs [B, 2] of pairs."""
    if config.objective == "sft":
        (token_sums,) = policy(batch)  # [B]: summed over the trained tokens
        return -token_sums, {"loss": -token_sums, "size": batch.tokens[0]}
    per_row, metrics = losses.pair_losses(policy, batch, ref_logps, LossSpec.of(config))
    return per_row, {**metrics, "size": torch.ones_like(per_row)}


def divided(means):
    """The means over rows with the loss as it is divided: over pairs or tokens."""
    return means | {"loss": means["loss"] / means.pop("size")}


def train_step(policy, step, rows, data, ref_logps, config, run):
    """Forward and backward of one global batch; return its exact means. The gradient is ready."""
    world = run.world
    train = data["train"]
    averages = Averages(world)
    scorer = policy.scorer
    count = len(rows)  # what the loss is divided by: pairs, or tokens that are trained
    if config.objective == "sft":
        count = sum(train[row].trained for row in rows)
    micro_batches = scorer.micro_batches(rows, train, world, config.micro_batch_size)
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = scorer.collate([train[row] for row in micro_batch.index], world.device)
        index = to_device(micro_batch.index, world.device)
        known = ref_logps["train"][index] if ref_logps else None  # [B, 2]
        per_row, metrics = row_losses(policy, batch, known, config)
        weight = to_device(micro_batch.weight, world.device)
        # gradients are averaged over ranks: times world_size / global count is the global mean
        loss = (per_row * weight).sum() * (world.world_size / count)
        policy.backward(loss)
        averages.add(metrics, weight)
    norm = policy.clip_grad_norm(config.max_grad_norm)
    return divided(run.reduce(averages, norm))


def check_step(policy, step, means, rows, data, ref_logps, config, world):
    """Stop before an update that a NaN or a wrong start would spoil."""
    batch_rows = [data["train"][row] for row in rows]

    def score():  # [global batch, sides]
        return logps.score(policy.scorer, batch_rows, world, config.micro_batch_size)

    checks.check_step(policy, step, means, batch_rows, score, config.fine_tuning)
    if step == 0 and ref_logps and not no_closed_form(config):
        tokens = [max(len(pair.chosen), len(pair.rejected)) for pair in batch_rows]
        known = ref_logps["train"][rows]
        checks.check_first_step(policy, means, score(), known, tokens, batch_rows, config)


def no_closed_form(config):
    """Runs whose first loss is not known beforehand: only their gradients are checked."""
    adapter_with_dropout = config.lora_dropout and config.init_adapter
    return config.objective == "sft" or config.method == "simpo" or bool(adapter_with_dropout)


@torch.no_grad()
def evaluate(policy, rows, ref_logps, config, run):
    """Return exact means over all rows: each counted once, whatever the number of ranks."""
    world = run.world
    averages = Averages(world)
    scorer = policy.scorer
    with logps.dropout_off(scorer):
        for micro_batch in scorer.micro_batches(
            range(len(rows)), rows, world, config.micro_batch_size
        ):
            run.stop_if_requested()
            batch = scorer.collate([rows[row] for row in micro_batch.index], world.device)
            index = to_device(micro_batch.index, world.device)
            known = ref_logps["val"][index] if ref_logps else None
            _, metrics = row_losses(scorer, batch, known, config)
            averages.add(metrics, to_device(micro_batch.weight, world.device))
    return divided(averages.reduce())


# --- main ----------------------------------------------------------------------------------------


def choose_numbers(config, meta_model, world):
    """Settle what hangs on model and device, DeepSpeed's "auto" too; return the Precision."""
    if config.learning_rate is None:
        small = sum(p.numel() for p in meta_model.parameters()) < 10e6
        config.learning_rate = 1e-3 if small else RATES[config.objective, config.fine_tuning]
    precision = precision_of(config, world.device)
    if config.mixed_precision == "auto":
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config.mixed_precision = names.get(precision.autocast, "no")
    if config.mixed_precision == "fp16" and world.device.type == "cpu":
        raise UserError("--mixed_precision fp16: a CPU is slow at it; give bf16, or no")
    if config.use_deepspeed:
        from ddp_utils.sharding import deepspeed

        width = meta_model.config.get_text_config().hidden_size
        config.sharding = deepspeed.filled(config.sharding, config, world, width)
    return precision


def precision_of(config, device):
    """In which types the model computes."""
    kinds = (config.fine_tuning, config.base_dtype, config.mixed_precision)
    return Precision.choose(device, *kinds)


def adapter_of(config) -> lora.LoraSpec | None:
    """Return the LoRA that is trained, or that is merged before all weights are trained."""
    merge = config.fine_tuning == "full"
    if merge and not config.init_adapter:
        return None
    shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
    return lora.LoraSpec(*shape, config.init_adapter, merge)


def strategy_of(config):
    """How the ranks share the work; what shards nothing is DDP."""
    return sharding.choose(
        config.strategy, config.sharding, config.grad_reduce_dtype, config.bucket_mb
    )


def load(config, plan, data, precision, run):
    """The policy, tried out, and for DPO the reference's log-probs: the policy before step 0."""
    world = run.world
    torch.manual_seed(config.seed)  # the same fresh LoRA on every rank
    model = lora.load_policy(
        config.model_name,
        adapter_of(config),
        precision,
        world.device,
        sharded=config.strategy != "ddp",
        in_4_bits=config.type == "qlora",
        gradient_checkpointing=config.gradient_checkpointing,
        memory_efficient=config.lean,
    )
    policy = sharding.wrap(logps.Scorer(model, precision.autocast), world, strategy_of(config))
    scorer = policy.scorer
    scorer.max_tokens = config.micro_batch_tokens or math.inf
    pairs = as_pairs(data["train"].extremes())
    with policy.gathered():
        for line in choose_head_and_layout(scorer, pairs, config.layout, world):
            run.say(line)
    if config.objective == "sft":
        return policy, None

    def score(pairs, rows):
        size = config.micro_batch_size
        return logps.score(scorer, pairs, world, size, run.stop_if_requested, rows)

    rows = {"train": plan.rows_used()}
    return policy, run.reference_logps(scorer.numerics(world.device), data, rows, score)


def main(argv=None) -> int:
    world = distributed.whoami(argv=sys.argv)
    config = train_config.read(argv)
    with cli.located(config.places):
        return fine_tune(config, world)


def fine_tune(config, world) -> int:
    # setup
    if config.init_adapter and config.fine_tuning == "lora":
        lora.inherit_config(config, config.init_adapter)
    world = distributed.choose_device(world, config.backend)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    encoder = encoder_of(config)
    data, report = read_data(config, encoder, world)
    lines = [preference_data.describe(split, part) for split, part in report.items()]

    # what the run will do, before a weight is read
    meta_model = lora.meta_model(config.model_name, adapter_of(config))
    for rows in filter(None, data.values()):
        models.check_fit(meta_model, rows.extremes())
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    folders = {"model_name": config.model_name, "init_adapter": config.init_adapter}
    inputs = models.input_digests(data, folders, meta_model.config)
    inputs["global_batch"] = str(plan.global_batch)
    if config.use_fsdp:
        from ddp_utils.sharding import fsdp

        remark = fsdp.layers_of(meta_model, config.sharding)[1]
        lines += [remark] if remark else []
    if config.sharding:  # as the JSON has it, before its "auto" is filled in
        digest = digest_of_files([], config.sharding)
        inputs[f"content of {config.strategy}_config"] = digest
    precision = choose_numbers(config, meta_model, world)
    strategy = strategy_of(config)
    checkpoints = config.keep_checkpoints + 1 + config.save_best
    lora_r = config.lora_r if config.fine_tuning == "lora" else None
    spec = RunSpec(
        folder=Path(config.output_dir),
        flag="--output_dir",
        steps=plan.steps,
        inputs=inputs,
        bytes_needed=bytes_to_write(meta_model, checkpoints, lora_r),
        report=report,
        lines=lines,
        save_best=config.save_best,
        shard_layout=strategy.shard_layout(config.fine_tuning, world.world_size),
    )
    if config.check:
        return check(spec, config, world)

    check_same_precision(precision, world)
    if config.use_fsdp:
        fsdp.check_nodes(config.sharding, world)

    with Run(spec, config, world) as run:
        accumulation = config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, {config.fine_tuning}",
            loss=f"{config.method}, beta {config.beta:g}" if config.objective == "dpo" else "sft",
            strategy=f"{strategy.name}, mixed precision {config.mixed_precision}",
            batch=f"{plan.global_batch} rows = {world.world_size} ranks x {accumulation} "
            f"accumulation x {config.micro_batch_size}",
            steps=f"{plan.steps}, learning rate {config.learning_rate:.3g}",
        )

        # model
        policy, ref_logps = load(config, plan, data, precision, run)
        optimizer, schedule = make_optimizer(
            policy,
            config.learning_rate,
            plan.steps,
            config.lr_scheduler,
            config.warmup_ratio,
            config.weight_decay,
        )
        displacement = losses.Displacement(config.method)
        meter = Meter(policy.scorer, world)
        done = run.restore(policy, optimizer, schedule)

        def validate(step):
            is_due = bool(data["val"]) and plan.due(config.eval_every, step)
            run.validate(
                step, is_due, lambda: evaluate(policy, data["val"], ref_logps, config, run)
            )

        # loop: one turn is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            values = train_step(policy, step, rows, data, ref_logps, config, run)
            check_step(policy, step, values, rows, data, ref_logps, config, world)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            values["epoch"] = plan.epoch(step + 1)
            seconds = time.perf_counter() - start
            values |= meter.read([data["train"][row] for row in rows], seconds)
            run.log(step + 1, values, echo=(step + 1) % config.log_every == 0)
            warning = displacement.seen(values["rewards/chosen"]) if ref_logps else None
            if warning:
                run.say(warning)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        run.restore_best()
        models.save_policy(policy, encoder.tokenizer, run.folder / "model", world)
    return 0


if __name__ == "__main__":
    distributed.run(main)
