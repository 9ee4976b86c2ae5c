"""Fine-tune a language model as a YAML file says: SFT or DPO, on DDP, FSDP or DeepSpeed ZeRO.

    python src/train.py --config config.yaml             # one process, no launcher
    torchrun --standalone --nproc_per_node=4 src/train.py --config config.yaml
    deepspeed --num_gpus 4 src/train.py --config config.yaml --deepspeed config/ds_config.json

Each setting of the file is a flag, too: --learning_rate 1e-4. Guide: docs/strategies.md.
"""

import ddp_utils.runs.startup  # noqa: F401  before torch, whose import takes seconds

import sys
import time

import torch

import train_config
from ddp_utils import (
    UserError,
    cli,
    distributed,
    files,
    logps,
    lora,
    losses,
    models,
    optim,
    sampler,
)
from ddp_utils import preference_data as pairs_
from ddp_utils.encoder import Encoder, Pair, load_tokenizer
from ddp_utils.fast import memory_efficient, self_test
from ddp_utils.metrics import Meter, Totals
from ddp_utils.runs import checks, environment, preemption
from ddp_utils.runs import reference as reference_
from ddp_utils.runs.run import Run
from sft import instruction_data

RATES = {  # objective and kind of fine-tuning -> learning rate from 10 M parameters on
    ("sft", "lora"): 2e-4,
    ("sft", "full"): 2e-5,
    ("dpo", "lora"): 1e-5,
    ("dpo", "full"): 1e-6,
}

# --- data ----------------------------------------------------------------------------------------


def read_data(config, encoder, world):
    """{"train": rows, "val": rows}, each a Text or a Pair, and their reports."""
    fields = (config.prompt_field, config.response_field) if config.prompt_field else ()

    def read(path, limit=-1):
        if config.objective == "dpo":
            return pairs_.read(path, encoder, limit, config.on_bad_record)
        return instruction_data.read(
            path, encoder, config.format, fields, limit, config.on_bad_record
        )

    train, report = read(config.train_data, config.max_rows)
    data, reports = {"train": train, "val": []}, {"train": report}
    if config.val_data:
        data["val"], reports["val"] = read(config.val_data)
    elif config.val_share:
        shares = (1 - config.val_share, config.val_share)
        data = dict(zip(data, pairs_.split_by_prompt(train, config.seed, shares), strict=True))
        report["split"] = {name: len(rows) for name, rows in data.items()}
    if config.save_best and not data["val"]:
        raise UserError("--save_best: there is no validation data; give val_data or val_share")
    if len(data["train"]) < world.world_size:
        raise UserError(
            f"{config.train_data}: {len(data['train'])} usable rows for {world.world_size} "
            f"processes; start at most {len(data['train'])}"
        )
    return data, reports


def as_pairs(rows):
    """Rows that the self-test can try a model on."""
    if isinstance(rows[0], Pair):
        return rows
    return [Pair(row.prompt, row.reply, row.reply, row.where, row.text) for row in rows]


# --- step ----------------------------------------------------------------------------------------


def size(rows, config):
    """What a loss over these rows is divided by: pairs, or tokens that are trained."""
    return len(rows) if config.objective == "dpo" else sum(row.trained for row in rows)


def row_losses(policy, batch, reference, config):
    """B rows -> losses [B] and metrics, each [B]; reference: log-probs [B, 2] of pairs."""
    if config.objective == "sft":
        (found,) = policy(batch)  # [B]: summed over the trained tokens
        return -found, {"loss": -found, "size": batch.tokens[0]}
    chosen, rejected = policy(batch)  # [B], [B]: summed over the response
    sides = losses.LogPs(chosen, rejected, *reference.unbind(-1), *batch.tokens)
    noise = checks.noise(policy.precision, sides.chosen_tokens)
    per_row, metrics = losses.preference(sides, config, noise)
    if config.sft_weight:
        metrics |= {"loss/preference": per_row, "loss/sft": losses.sft(sides)}
        per_row = per_row + config.sft_weight * metrics["loss/sft"]
    return per_row, {"loss": per_row, "size": torch.ones_like(per_row), **metrics}


def means_of(totals):
    """Means over rows, the loss as it is divided: over pairs or tokens."""
    means = totals.means()
    return means | {"loss": means["loss"] / means.pop("size")}


def train_step(policy, step, rows, data, reference, config, world):
    """Forward and backward of one global batch -> its exact means, gradient ready for the step."""
    train, totals, found = data["train"], Totals(world), []
    scorer, count = policy.scorer, size([data["train"][row] for row in rows], config)
    parts = scorer.share(rows, train, world, config.micro_batch_size)
    for turn, part in enumerate(parts):
        torch.manual_seed(sampler.seed_of(config.seed, step, turn, world.rank))  # for dropout
        policy.sync_gradients(part is parts[-1])
        batch = scorer.collate([train[row] for row in part.index], world.device)
        known = reference["train"][part.index] if reference else None
        per_row, metrics = row_losses(policy, batch, known, config)
        weight = torch.tensor(part.weight, device=world.device)
        # gradients are averaged over ranks: times world_size / global count is the global mean
        loss = (per_row * weight).sum() * (world.world_size / count)
        policy.backward(loss)
        totals.add(metrics, weight)
        sides = [metrics["logps/chosen"], metrics["logps/rejected"]] if reference else []
        found.append(torch.stack([per_row, *sides], -1).detach())  # [B, 1 or 3]
    norm = policy.clip_grad_norm(config.max_grad_norm)
    means = {**means_of(totals), "grad_norm": norm.item()}
    wheres = [train[row].where for row in rows]

    def scores():
        return distributed.by_row(len(train), parts, found, world)[rows]  # [global batch, 1 or 3]

    checks.check_step(policy, step, means, lambda: scores()[:, 0], wheres, config.fine_tuning)
    if step == 0 and reference and not no_closed_form(config):
        tokens = [max(len(train[row].chosen), len(train[row].rejected)) for row in rows]
        sides = scores()[:, 1:], reference["train"][rows], torch.tensor(tokens), wheres
        checks.check_first_step(policy, *sides, means, losses.at_reference(config))
    return means


def no_closed_form(config):
    """Runs whose first loss is not known beforehand: only their gradients are checked."""
    adapter_with_dropout = config.lora_dropout and config.init_adapter
    return config.objective == "sft" or config.method == "simpo" or bool(adapter_with_dropout)


@torch.no_grad()
def evaluate(policy, rows, reference, config, run):
    """Exact means over all rows: each counted once, whatever the number of ranks."""
    totals, scorer, world = Totals(run.world), policy.scorer, run.world
    with logps.dropout_off(scorer):
        for part in scorer.share(range(len(rows)), rows, world, config.micro_batch_size):
            run.poll()
            batch = scorer.collate([rows[row] for row in part.index], world.device)
            known = reference["val"][part.index] if reference else None
            _, metrics = row_losses(scorer, batch, known, config)
            totals.add(metrics, torch.tensor(part.weight, device=world.device))
    return means_of(totals)


def validate(step, plan, policy, data, reference, config, run):
    """The validation that is due after `step` steps, unless the run has done it already."""
    new = run.validated < step or plan.steps == 0
    if data["val"] and plan.due(config.eval_every, step) and new:
        run.results["val"] = evaluate(policy, data["val"], reference, config, run)
        run.log(step, run.results["val"], "val")


# --- main ----------------------------------------------------------------------------------------


def choose_numbers(config, outline, world):
    """What hangs on model and device: learning rate, precision, DeepSpeed's "auto"."""
    if config.learning_rate is None:
        small = sum(p.numel() for p in outline.parameters()) < 10e6
        config.learning_rate = 1e-3 if small else RATES[config.objective, config.fine_tuning]
    if config.mixed_precision == "auto":
        chosen = optim.precision(config, world.device)[1]
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        config.mixed_precision = names.get(chosen, "no")
    if config.mixed_precision == "fp16" and world.device.type == "cpu":
        raise UserError("--mixed_precision fp16: a CPU is slow at it; give bf16, or no")
    if config.use_deepspeed:
        from ddp_utils.sharding import deepspeed

        width = outline.config.get_text_config().hidden_size
        config.sharding = deepspeed.filled(config.sharding, config, world, width)
    if config.use_fsdp:
        from ddp_utils.sharding import fsdp

        fsdp.layers_of(outline, config.sharding)


def strategy_of(config):
    """How the ranks share the work; what shards nothing is DDP."""
    kind, options = config.strategy, config.sharding
    nothing = kind == "fsdp" and options.strategy == "NO_SHARD"
    if nothing or (kind == "deepspeed" and not options.get("zero_optimization", {}).get("stage")):
        kind = "ddp"
    return optim.Strategy(kind, options, config.grad_reduce_dtype, config.bucket_mb)


def load(config, data, world, run):
    """The policy, tried out, and for DPO its log-probs of all pairs before step 0."""
    torch.manual_seed(config.seed)  # the same fresh LoRA on every rank
    model, autocast = models.load_policy(config, world.device)
    if config.lean:
        memory_efficient.apply(model)
    policy = optim.wrap(logps.Scorer(model, autocast), world, strategy_of(config))
    scorer = policy.scorer
    with policy.gathered():
        for line in self_test.self_test(scorer, as_pairs(data["train"]), config.layout, world):
            run.say(line)
    if config.objective == "sft":
        return policy, None
    names = config.model_name, config.init_adapter

    def score(pairs):
        return logps.score(scorer, pairs, world, config.micro_batch_size, run.poll)

    return policy, reference_.log_probs(scorer, data, names, score, run)


def main(argv=None) -> int:
    world = distributed.whoami(argv=sys.argv)
    config = train_config.read(argv, world)
    with cli.naming(config.places):
        return fine_tune(config, world)


def fine_tune(config, world) -> int:
    # setup
    lora.carry_on(config)
    world = distributed.choose_device(world, config.backend)
    if not config.check:
        world = distributed.meet(world, config.backend)

    # data: before there is a group, so that no rank waits in a collective while another one reads
    tokenizer = load_tokenizer(config.model_name)
    shape = config.max_length, config.truncation, config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, *shape)
    data, reports = read_data(config, encoder, world)
    outline = models.outline(config)
    models.check_fit(outline, data)
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    inputs = reference_.inputs(config, data, outline) | {"global_batch": str(plan.global_batch)}
    if config.sharding:  # as the JSON has it, before its "auto" is filled in
        digest = files.digest_of_files([], config.sharding)
        inputs[f"content of {config.strategy}_config"] = digest
    choose_numbers(config, outline, world)
    needed = optim.bytes_to_write(outline, config)
    described = [pairs_.describe(split, report) for split, report in reports.items()]
    if config.num_workers:
        described.append("num_workers: not needed: rows are tokenised once, there is no loader")
    if config.check:
        would = Run.would(config.output_dir, config, plan.steps, inputs, needed)
        if world.is_main:
            print(*described, *would, sep="\n")
        return 0

    world = distributed.join(world, config.timeout_minutes)
    optim.check_same_precision(config, world)
    if config.use_fsdp:
        from ddp_utils.sharding import fsdp

        fsdp.check_nodes(config.sharding, world)
    environment.prepare(config)

    strategy = strategy_of(config)
    shares = strategy.shares(config.fine_tuning, world.world_size)
    with Run(config.output_dir, config, world, plan.steps, inputs, needed, shares) as run:
        run.say(
            f"world_size={world.world_size} device={world.device} {strategy.name} "
            f"precision={config.mixed_precision} global_batch={plan.global_batch} = "
            f"{world.world_size} ranks x {config.gradient_accumulation_steps} accumulation x "
            f"{config.micro_batch_size} learning_rate={config.learning_rate:.3g} steps={plan.steps}"
        )
        run.write_json("data_report.json", environment.redacted(reports))
        for line in described:
            run.say(line)
        if config.use_fsdp and (line := fsdp.layers_of(outline, config.sharding)[1]):
            run.say(line)

        # model
        policy, reference = load(config, data, world, run)
        optimizer, schedule = optim.make_optimizer(policy, config, config.learning_rate, plan.steps)
        displacement = losses.Displacement(config)
        meter = Meter(policy.scorer, world)
        done = run.restore(policy, optimizer, schedule)
        validate(done, plan, policy, data, reference, config, run)

        # loop: one turn is one optimiser step
        for step in range(done, plan.steps):
            start, rows = time.perf_counter(), plan.batch(step)
            values = train_step(policy, step, rows, data, reference, config, world)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule)
            values["epoch"] = plan.epoch(step + 1)
            seconds = time.perf_counter() - start
            values |= meter.read([data["train"][row] for row in rows], seconds)
            run.log(step + 1, values, echo=(step + 1) % config.log_every == 0)
            if reference and (line := displacement.seen(values["rewards/chosen"])):
                run.say(line)
            validate(step + 1, plan, policy, data, reference, config, run)
            run.end_step(due=plan.due(config.save_every, step + 1))

        # results
        run.back_to_best()
        model, weights = policy.scorer.model, policy.full_weights()
        distributed.on_main(
            world, lambda: models.save(model, tokenizer, run.folder / "model", weights)
        )
    return 0


if __name__ == "__main__":
    preemption.run(main)
