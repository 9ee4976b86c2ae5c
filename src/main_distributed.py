"""Fine-tune a language model on preference pairs with DPO, on any number of processes.

    ./run_distributed.sh 4
    torchrun --standalone --nproc_per_node=4 src/main_distributed.py --beta 0.3
    python src/main_distributed.py                       # one process, no launcher

Settings: src/config.py. Results: results/dpo/ (see results/README.md).
"""

import ddp_utils.runs.startup  # noqa: F401  before torch, whose import takes seconds

import dataclasses
import gc
import math
import os
import sys
import time
from pathlib import Path

import torch

from config import Config, check
from ddp_utils import (
    UserError,
    cli,
    distributed,
    jsonl,
    logps,
    lora,
    losses,
    models,
    optim,
    sampler,
    sampling,
)
from ddp_utils import preference_data as pairs_
from ddp_utils.encoder import Encoder, load_tokenizer
from ddp_utils.fast import memory_efficient, self_test
from ddp_utils.metrics import Meter, Totals, interval
from ddp_utils.runs import checks, environment, preemption
from ddp_utils.runs import reference as reference_
from ddp_utils.runs.run import Run

DEMO = Path("data/demo")  # its model and train_data are the defaults of src/config.py
DEMO_JUDGE = str(DEMO / "judge.py:score")

# --- settings ------------------------------------------------------------------------------------


def read_settings(argv, world):
    """Flags over src/config.py, checked before anything is read."""
    config = cli.parse(Config, argv, console=world.is_main)
    check(config)
    lora.carry_on(config)
    if config.batch_size * config.gradient_accumulation_steps < world.world_size:
        raise UserError(
            f"--batch_size: {config.batch_size} pairs for {world.world_size} processes; "
            f"give at least {world.world_size}"
        )
    demo = config.train_data == Config.train_data
    if demo and not (config.val_data or config.test_data):
        val, test = (str(DEMO / f"preferences_{split}.jsonl") for split in ("val", "test"))
        judge = config.judge or DEMO_JUDGE
        config = dataclasses.replace(config, val_data=val, test_data=test, judge=judge)
    if config.sft_weight is None:  # plain DPO makes the demo's replies gibberish: docs/dpo.md
        config = dataclasses.replace(config, sft_weight=1.0 if demo else 0.0)
    return config


# --- data ----------------------------------------------------------------------------------------


def read_data(config, encoder, world):
    """{"train": pairs, "val": pairs, "test": pairs} and their reports."""
    bad = config.on_bad_record
    train, report = pairs_.read(config.train_data, encoder, config.max_rows, bad)
    data, reports = {"train": train, "val": [], "test": []}, {"train": report}
    for split in ("val", "test"):
        if path := getattr(config, f"{split}_data"):
            data[split], reports[split] = pairs_.read(path, encoder, on_bad_record=bad)
    if not config.val_data and not config.test_data:
        data = dict(zip(data, pairs_.split_by_prompt(train, config.seed), strict=True))
        report["split"] = {name: len(rows) for name, rows in data.items()}
    if config.save_best and not data["val"]:
        raise UserError("--save_best: there is no validation data; give --val_data")
    seen = {pair.text for pair in data["train"]}
    for split in reports.keys() - {"train"}:
        shared = [pair.where for pair in data[split] if pair.text in seen]
        reports[split]["prompts also in train_data"] = shared
    if len(data["train"]) < world.world_size:
        raise UserError(
            f"{config.train_data}: {len(data['train'])} usable rows for {world.world_size} "
            f"processes; start at most {len(data['train'])}"
        )
    return data, reports


# --- step ----------------------------------------------------------------------------------------


def pair_losses(policy, batch, reference, config):
    """B pairs and their reference log-probs [B, 2] -> losses [B] and metrics, each [B]."""
    chosen, rejected = policy(batch)  # [B], [B]: summed over the response
    sides = losses.LogPs(chosen, rejected, *reference.unbind(-1), *batch.tokens)
    noise = checks.noise(policy.precision, sides.chosen_tokens)
    per_pair, metrics = losses.preference(sides, config, noise)
    if config.sft_weight:
        metrics |= {"loss/preference": per_pair, "loss/sft": losses.sft(sides)}
        per_pair = per_pair + config.sft_weight * metrics["loss/sft"]
    return per_pair, {"loss": per_pair, **metrics}


def train_step(policy, step, rows, data, reference, config, world):
    """Forward and backward of one global batch -> its exact means, gradient ready for the step."""
    pairs, totals, found = data["train"], Totals(world), []
    budget = math.ceil(config.batch_size / world.world_size)
    parts = policy.scorer.share(rows, pairs, world, budget)
    for turn, part in enumerate(parts):
        torch.manual_seed(sampler.seed_of(config.seed, step, turn, world.rank))  # for dropout
        policy.sync_gradients(part is parts[-1])
        batch = policy.scorer.collate([pairs[i] for i in part.index], world.device)
        per_pair, metrics = pair_losses(policy, batch, reference["train"][part.index], config)
        weight = torch.tensor(part.weight, device=world.device)
        # DDP averages over ranks: times world_size / global count is the mean of the global batch
        loss = (per_pair * weight).sum() * (world.world_size / len(rows))
        policy.backward(loss)
        totals.add(metrics, weight)
        scores = metrics["logps/chosen"], metrics["logps/rejected"], per_pair
        found.append(torch.stack(scores, -1).detach())  # [B, 3]
    norm = policy.clip_grad_norm(config.max_grad_norm)
    means = {**totals.means(), "grad_norm": norm.item()}
    batch_pairs = [pairs[i] for i in rows]
    wheres = [pair.where for pair in batch_pairs]

    def scores():
        return distributed.by_row(len(pairs), parts, found, world)[rows]  # [global batch, 3]

    checks.check_step(policy, step, means, lambda: scores()[:, 2], wheres, config.fine_tuning)
    if step == 0 and not no_closed_form(config):
        tokens = [max(len(pair.chosen), len(pair.rejected)) for pair in batch_pairs]
        sides = scores()[:, :2], reference["train"][rows], torch.tensor(tokens), wheres
        checks.check_first_step(policy, *sides, means, losses.at_reference(config))
    return means


def no_closed_form(config):
    """Runs whose first loss is not known beforehand: only their gradients are checked."""
    adapter_with_dropout = config.lora_dropout and config.init_adapter
    return config.method == "simpo" or bool(config.reference_model or adapter_with_dropout)


@torch.no_grad()
def evaluate(policy, split, data, reference, config, world, poll=lambda: None):
    """Exact means over all pairs of a split: each counted once, whatever the number of ranks."""
    pairs, totals = data[split], Totals(world)
    scorer = policy.scorer  # DDP would only wait for gradients
    budget = math.ceil(config.batch_size / world.world_size)
    with logps.dropout_off(scorer):
        for part in scorer.share(range(len(pairs)), pairs, world, budget):
            poll()
            batch = scorer.collate([pairs[i] for i in part.index], world.device)
            _, metrics = pair_losses(scorer, batch, reference[split][part.index], config)
            metrics["squares"] = metrics["rewards/margins"].double() ** 2
            totals.add(metrics, torch.tensor(part.weight, device=world.device))
    values = totals.means()
    low, high = interval(values["rewards/margins"], values.pop("squares"), values["count"])
    return {**values, "rewards/margins_low": low, "rewards/margins_high": high}


def validate(step, plan, policy, data, reference, config, run):
    """The validation that is due after `step` steps, unless the run has done it already."""
    if data["val"] and plan.due(config.eval_every, step) and run.validated < step:
        values = evaluate(policy, "val", data, reference, config, run.world, run.poll)
        run.results["val"] = values
        run.log(step, values, "val")


# --- examples ------------------------------------------------------------------------------------


def answer(policy, data, encoder, config, run):
    """Replies to the first prompts of validation and test data: split -> texts, on all ranks."""
    replies = {}
    for split in ("val", "test"):
        prompts = [pair.prompt for pair in data[split][: config.num_samples]]
        if prompts:
            spec = sampling.SampleSpec.of(config)
            scorer, tokenizer = policy.scorer, encoder.tokenizer
            with policy.gathered():
                ids = sampling.generate(
                    scorer, prompts, encoder.ends, run.world, spec, poll=run.poll
                )
            replies[split] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return replies


def write_examples(run, data, before, after, judge):
    """Replies side by side, for people and as data; the judge's summary into the results."""
    examples = {}
    for split, replies in after.items():
        pairs = data[split][: len(replies)]
        rows = [pair.text for pair in pairs], before[split], replies, [p.expected for p in pairs]
        examples[split], summary = sampling.side_by_side(*rows, judge)
        text = sampling.as_text(examples[split], summary)
        run.write_text(f"distributed_output_{split}.txt", text)
        run.results[split] |= summary
    run.write_json("examples.json", examples)


# --- main ----------------------------------------------------------------------------------------


def strategy_of(config):
    """How the ranks share the work."""
    return optim.Strategy(config.strategy)


def load_scored(config, data, world, run):
    """The policy, and the reference's log-probs of every split: the policy before step 0.

    Another reference model is loaded, scored and freed before the policy is loaded.
    """

    def reference_of(policy, *names):
        scorer = policy.scorer
        budget = math.ceil(config.batch_size / world.world_size)  # pairs a rank at a time

        def score(pairs):
            return logps.score(scorer, pairs, world, budget, run.poll)

        with policy.gathered():
            for line in self_test.self_test(scorer, data["train"], config.layout, world):
                run.say(line)
        if known is None:
            return reference_.log_probs(scorer, data, names, score, run)

    known, strategy = None, strategy_of(config)
    if config.reference_model:
        dtype, autocast = optim.precision(config, world.device)
        host = torch.device("cpu") if config.strategy == "fsdp" else world.device
        model = models.load(config.reference_model, dtype, host)
        other = optim.wrap(logps.Scorer(model, autocast), world, strategy, trained=False)
        known = reference_of(other, config.reference_model)
        del model, other
        gc.collect()
    torch.manual_seed(config.seed)  # the same fresh LoRA on every rank
    model, autocast = models.load_policy(config, world.device)
    if config.lean:
        memory_efficient.apply(model)
    policy = optim.wrap(logps.Scorer(model, autocast), world, strategy)
    return policy, reference_of(policy, config.model_name, config.init_adapter) or known


def main(argv=None) -> int:
    # setup
    world = distributed.whoami(argv=sys.argv)
    config = read_settings(argv, world)
    if not config.check:
        world = distributed.meet(world, config.backend)

    # data: before there is a group, so that no rank waits in a collective while another one reads
    tokenizer = load_tokenizer(config.model_name)
    shape = config.max_length, config.truncation, config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, *shape)
    data, reports = read_data(config, encoder, world)
    outline = models.outline(config)
    if config.reference_model:
        models.load(config.reference_model, "auto", models.META, flag="--reference_model")
    models.check_fit(outline, data)
    if config.learning_rate is None:
        small = sum(p.numel() for p in outline.parameters()) < 10e6
        rate = 1e-3 if small else {"full": 1e-6, "lora": 1e-5}[config.fine_tuning]
        config = dataclasses.replace(config, learning_rate=rate)
    plan = sampler.Plan.of(config, len(data["train"]))
    inputs = reference_.inputs(config, data, outline)
    needed = optim.bytes_to_write(outline, config)
    # a judge is executed: the demo's is the project's own, whatever the current folder holds
    root = jsonl.ROOT if config.judge == DEMO_JUDGE else None
    judge = sampling.load_judge(config.judge, root) if config.judge else None
    if judge:
        inputs["content of judge"] = judge.digest
        for pair in data["val"][:1] + data["test"][:1]:
            judge(pair.text, pair.expected)  # one that does not know these prompts says so now
    described = [pairs_.describe(split, report) for split, report in reports.items()]
    if config.check:
        distributed.choose_device(world, config.backend)
        would = Run.would(config.result_dir, config, plan.steps, inputs, needed)
        if world.is_main:
            print(*described, *would, sep="\n")
        return 0

    world = distributed.join(world, config.timeout_minutes)
    optim.check_same_precision(config, world)
    environment.prepare(config)
    peak = optim.learning_rate(config, plan.global_batch, world.world_size)

    shares = strategy_of(config).shares(config.fine_tuning, world.world_size)
    with Run(config.result_dir, config, world, plan.steps, inputs, needed, shares) as run:
        run.say(
            f"world_size={world.world_size} device={world.device} "
            f"global_batch={plan.global_batch} = "
            f"{config.batch_size} pairs over {world.world_size} ranks x "
            f"{config.gradient_accumulation_steps} accumulation learning_rate={peak:.3g} "
            f"steps={plan.steps}"
        )
        if world.device.type == "cpu" and world.local_size > os.cpu_count():
            run.say(f"warning: {world.local_size} processes share {os.cpu_count()} cores")
        run.write_json("data_report.json", environment.redacted(reports))
        for line in described:
            run.say(line)
        if no_closed_form(config):
            run.say("step 0: no closed form is known beforehand, only gradients are checked")

        # model
        policy, reference = load_scored(config, data, world, run)
        before = run.once("reference_replies", lambda: answer(policy, data, encoder, config, run))
        optimizer, schedule = optim.make_optimizer(policy, config, peak, plan.steps)
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
            if line := displacement.seen(values["rewards/chosen"]):
                run.say(line)
            validate(step + 1, plan, policy, data, reference, config, run)
            run.end_step(due=plan.due(config.save_every, step + 1))

        # results
        at = run.back_to_best()
        for split in ("val", "test"):
            if data[split] and split not in run.results:  # the last step has done val
                found = evaluate(policy, split, data, reference, config, world, run.poll)
                run.results[split] = found
                run.log(at, found, split)
        write_examples(run, data, before, answer(policy, data, encoder, config, run), judge)
        folder = Path(config.output_dir or run.folder / "model")
        model, weights = policy.scorer.model, policy.full_weights()
        distributed.on_main(world, lambda: models.save(model, tokenizer, folder, weights))
    return 0


if __name__ == "__main__":
    preemption.run(main)
