"""Fine-tune a language model on preference pairs with DPO, on any number of processes.

    ./run_distributed.sh 4
    torchrun --standalone --nproc_per_node=4 src/main_distributed.py --beta 0.3
    python src/main_distributed.py                       # one process, no launcher

Settings: src/config.py. Results: results/dpo/ (see results/README.md).
"""

import config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        settings.read
    )  # --help and mistakes in the settings end here, before torch is imported


import dataclasses
import gc
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ddp_utils import (
    UserError,
    checks,
    distributed,
    logps,
    lora,
    losses,
    models,
    preference_data,
    sampler,
    sampling,
    sharding,
)
from ddp_utils.chat_template import Encoder
from ddp_utils.data import ROOT, DataFile
from ddp_utils.distributed import to_device
from ddp_utils.fast.self_test import choose_head_and_layout
from ddp_utils.judge import as_text, load_judge, side_by_side
from ddp_utils.losses import LossSpec
from ddp_utils.metrics import Averages, Meter, interval
from ddp_utils.policy import (
    Precision,
    bytes_to_write,
    check_same_precision,
    learning_rate,
    make_optimizer,
)
from ddp_utils.run import Run, RunSpec, check

DEMO = Path("data/demo")  # its model and train_data are the defaults of src/config.py
DEMO_JUDGE = str(DEMO / "judge.py:score")

# --- settings ------------------------------------------------------------------------------------


def read_settings(argv, world):
    """Flags over src/config.py, checked before anything is read."""
    config = settings.read(argv)
    if config.init_adapter and config.fine_tuning == "lora":
        lora.inherit_config(config, config.init_adapter)
    if config.batch_size * config.gradient_accumulation_steps < world.world_size:
        raise UserError(
            f"--batch_size: {config.batch_size} pairs for {world.world_size} processes; "
            f"give at least {world.world_size}"
        )
    demo = config.train_data == settings.Config.train_data
    if demo and not (config.val_data or config.test_data):
        val, test = (str(DEMO / f"preferences_{split}.jsonl") for split in ("val", "test"))
        judge = config.judge or DEMO_JUDGE
        config = dataclasses.replace(config, val_data=val, test_data=test, judge=judge)
    if config.sft_weight is None:  # plain DPO makes the demo's replies gibberish: docs/dpo.md
        config = dataclasses.replace(config, sft_weight=1.0 if demo else 0.0)
    return config


# --- data ----------------------------------------------------------------------------------------


def read_data(config, encoder, world):
    """{"train": pairs, "val": pairs, "test": pairs} and the report of each."""
    data = {"train": [], "val": [], "test": []}
    report = {}
    cache = config.cache_dir or Path(config.result_dir).parent / ".tokens"
    paths = {"train": config.train_data, "val": config.val_data, "test": config.test_data}
    for split, path in paths.items():
        if path or split == "train":
            limit = config.max_rows if split == "train" else -1
            source = DataFile(path, cache, limit, config.on_bad_record, config.columns)
            data[split], report[split] = preference_data.read(source, encoder)
    if not config.val_data and not config.test_data:
        parts = preference_data.split_by_prompt(data["train"], config.seed)
        data = dict(zip(data, parts, strict=True))
        report["train"]["split"] = {split: len(rows) for split, rows in data.items()}
    if config.save_best and not data["val"]:
        raise UserError("--save_best: there is no validation data; give --val_data")
    for split in report.keys() - {"train"}:
        shared = np.isin(data[split].prompts, data["train"].prompts).nonzero()[0]
        report[split]["prompts also in train_data"] = [data[split][row].location for row in shared]
    sampler.check_enough_rows(config.train_data, len(data["train"]), world)
    return data, report


def inputs_of(config, data, meta_model, judge):
    """Digests of all that the run reads."""
    names = ("model_name", "init_adapter", "reference_model")
    folders = {name: getattr(config, name) for name in names}
    if config.reference_model:  # its names and shapes, before there is a run folder
        lora.load(config.reference_model, "auto", models.META, flag="--reference_model")
    inputs = models.input_digests(data, folders, meta_model.config)
    if judge:
        inputs["content of judge"] = judge.digest
    return inputs


# --- step ----------------------------------------------------------------------------------------


def train_step(policy, step, rows, data, ref_logps, config, run):
    """Forward and backward of one global batch; return its exact means. The gradient is ready."""
    world = run.world
    pairs = data["train"]
    averages = Averages(world)
    micro_batches = policy.scorer.micro_batches(rows, pairs, world, rows_per_rank(config, world))
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = policy.scorer.collate([pairs[i] for i in micro_batch.index], world.device)
        known = ref_logps["train"][to_device(micro_batch.index, world.device)]  # [B, 2]
        per_pair, metrics = losses.pair_losses(policy, batch, known, LossSpec.of(config))
        weight = to_device(micro_batch.weight, world.device)
        # DDP averages over ranks: times world_size / global count is the mean of the global batch
        loss = (per_pair * weight).sum() * (world.world_size / len(rows))
        policy.backward(loss)
        averages.add(metrics, weight)
    norm = policy.clip_grad_norm(config.max_grad_norm)
    return run.reduce(averages, norm)


def rows_per_rank(config, world):
    """Pairs that one rank takes in one forward, at most."""
    return math.ceil(config.batch_size / world.world_size)


def check_step(policy, step, means, rows, data, ref_logps, config, world):
    """Stop before an update that a NaN or a wrong start would spoil."""
    pairs = [data["train"][row] for row in rows]

    def score():  # [global batch, 2]
        return logps.score(policy.scorer, pairs, world, rows_per_rank(config, world))

    checks.check_step(policy, step, means, pairs, score, config.fine_tuning)
    if step == 0 and not no_closed_form(config):
        tokens = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
        known = ref_logps["train"][rows]
        checks.check_first_step(policy, means, score(), known, tokens, pairs, config)


def no_closed_form(config):
    """Runs whose first loss is not known beforehand: only their gradients are checked."""
    adapter_with_dropout = config.lora_dropout and config.init_adapter
    return config.method == "simpo" or bool(config.reference_model or adapter_with_dropout)


@torch.no_grad()
def evaluate(policy, split, data, ref_logps, config, world, stop_if_requested=lambda: None):
    """Return exact means over all pairs of a split: each counted once, on any number of ranks."""
    pairs = data[split]
    averages = Averages(world)
    scorer = policy.scorer  # DDP would only wait for gradients
    with logps.dropout_off(scorer):
        micro_batches = scorer.micro_batches(
            range(len(pairs)), pairs, world, rows_per_rank(config, world)
        )
        for micro_batch in micro_batches:
            stop_if_requested()
            batch = scorer.collate([pairs[i] for i in micro_batch.index], world.device)
            known = ref_logps[split][to_device(micro_batch.index, world.device)]
            _, metrics = losses.pair_losses(scorer, batch, known, LossSpec.of(config))
            metrics["squares"] = metrics["rewards/margins"].double() ** 2
            averages.add(metrics, to_device(micro_batch.weight, world.device))
    values = averages.reduce()
    low, high = interval(values["rewards/margins"], values.pop("squares"), values["count"])
    return {**values, "rewards/margins_low": low, "rewards/margins_high": high}


# --- examples ------------------------------------------------------------------------------------


def answer(policy, data, encoder, config, run):
    """Replies to the first prompts of validation and test data: split -> texts, on all ranks."""
    replies = {}
    for split in ("val", "test"):
        prompts = [pair.prompt for pair in data[split][: config.num_samples]]
        if prompts:
            limits = (config.max_new_tokens, config.batch_size)
            spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
            with policy.gathered():
                ids = sampling.generate(
                    policy.scorer,
                    prompts,
                    encoder.ends,
                    run.world,
                    spec,
                    stop_if_requested=run.stop_if_requested,
                )
            replies[split] = encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return replies


def write_examples(run, data, before, after, judge):
    """Replies side by side, for people and as data; the judge's summary into the results."""
    examples = {}
    for split, replies in after.items():
        pairs = data[split][: len(replies)]
        prompts = [pair.text for pair in pairs]
        expected = [pair.expected for pair in pairs]
        examples[split], summary = side_by_side(prompts, before[split], replies, expected, judge)
        text = as_text(examples[split], summary)
        run.write_text(f"distributed_output_{split}.txt", text)
        run.results[split] |= summary
    run.write_json("examples.json", examples)


# --- main ----------------------------------------------------------------------------------------


def adapter_of(config) -> lora.LoraSpec | None:
    """Return the LoRA that is trained, or that is merged before all weights are trained."""
    merge = config.fine_tuning == "full"
    if merge and not config.init_adapter:
        return None
    shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
    return lora.LoraSpec(*shape, config.init_adapter, merge)


def strategy_of(config):
    """How the ranks share the work."""
    return sharding.choose(config.strategy)


def precision_of(config, device):
    """In which types the model computes."""
    mixed = "auto" if config.use_mixed_precision else "no"
    return Precision.choose(device, config.fine_tuning, config.base_dtype, mixed)


def load_scored(config, data, precision, run):
    """The policy, and the reference's log-probs of every split: the policy before step 0.

    Another reference model is loaded, scored and freed before the policy is loaded.
    """
    world = run.world
    strategy = strategy_of(config)
    known = None

    def reference_of(policy):
        """Try the model on real pairs, and score the reference with it unless that is done."""
        scorer = policy.scorer

        def score(pairs):
            return logps.score(
                scorer, pairs, world, rows_per_rank(config, world), run.stop_if_requested
            )

        with policy.gathered():
            for line in choose_head_and_layout(
                scorer, data["train"].extremes(), config.layout, world
            ):
                run.say(line)
        if known is None:
            facts = scorer.numerics(world.device)
            return run.reference_logps(facts, data, score)

    if config.reference_model:
        host = torch.device("cpu") if config.strategy == "fsdp" else world.device
        model = lora.load(config.reference_model, precision.weights, host)
        scorer = logps.Scorer(model, precision.autocast)
        other = sharding.wrap(scorer, world, strategy, trained=False)
        known = reference_of(other)
        del model, scorer, other
        gc.collect()
    torch.manual_seed(config.seed)  # the same fresh LoRA on every rank
    model = lora.load_policy(
        config.model_name,
        adapter_of(config),
        precision,
        world.device,
        sharded=config.strategy != "ddp",
        gradient_checkpointing=config.use_gradient_checkpointing,
        memory_efficient=config.lean,
    )
    policy = sharding.wrap(logps.Scorer(model, precision.autocast), world, strategy)
    return policy, reference_of(policy) or known


def main(argv=None) -> int:
    # setup
    world = distributed.whoami(argv=sys.argv)
    config = read_settings(argv, world)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    tokenizer = models.load_tokenizer(config.model_name)
    shape = config.max_length, config.truncation, config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, *shape)
    data, report = read_data(config, encoder, world)
    # a judge is executed: the demo's is the project's own, whatever the current folder holds
    root = ROOT if config.judge == DEMO_JUDGE else None
    judge = load_judge(config.judge, root) if config.judge else None
    if judge:
        for pair in data["val"][:1] + data["test"][:1]:
            judge(pair.text, pair.expected)  # one that does not know these prompts says so now

    # what the run will do, before a weight is read
    meta_model = lora.meta_model(config.model_name, adapter_of(config))
    for rows in filter(None, data.values()):
        models.check_fit(meta_model, rows.extremes())
    if config.learning_rate is None:
        small = sum(p.numel() for p in meta_model.parameters()) < 10e6
        rate = 1e-3 if small else {"full": 1e-6, "lora": 1e-5}[config.fine_tuning]
        config = dataclasses.replace(config, learning_rate=rate)
    plan = sampler.Plan.of(config, len(data["train"]))
    strategy = strategy_of(config)
    checkpoints = config.keep_checkpoints + 1 + config.save_best
    lora_r = config.lora_r if config.fine_tuning == "lora" else None
    spec = RunSpec(
        folder=Path(config.result_dir),
        flag="--result_dir",
        steps=plan.steps,
        inputs=inputs_of(config, data, meta_model, judge),
        bytes_needed=bytes_to_write(meta_model, checkpoints, lora_r),
        report=report,
        lines=[preference_data.describe(split, part) for split, part in report.items()],
        model_folder=Path(config.output_dir) if config.output_dir else None,
        save_best=config.save_best,
        shard_layout=strategy.shard_layout(config.fine_tuning, world.world_size),
    )
    if config.check:
        distributed.choose_device(world, config.backend)
        return check(spec, config, world)

    precision = precision_of(config, world.device)
    check_same_precision(precision, world)
    peak = learning_rate(
        config.learning_rate,
        config.lr_scaling,
        plan.global_batch / config.base_batch_size,
        world.world_size,
    )

    with Run(spec, config, world) as run:
        accumulation = config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, {config.fine_tuning}",
            loss=f"{config.method}, beta {config.beta:g}, sft_weight {config.sft_weight:g}",
            batch=f"{plan.global_batch} pairs = {config.batch_size} x {accumulation} accumulation",
            steps=f"{plan.steps}, learning rate {peak:.3g}",
            files=" ".join(filter(None, (config.train_data, config.val_data, config.test_data))),
            judge=config.judge or "none",
        )
        if no_closed_form(config):
            run.say("step 0: no closed form is known beforehand, only gradients are checked")

        # model
        policy, ref_logps = load_scored(config, data, precision, run)
        before = run.once("reference_replies", lambda: answer(policy, data, encoder, config, run))
        optimizer, schedule = make_optimizer(
            policy,
            peak,
            plan.steps,
            config.lr_scheduler,
            config.warmup_ratio,
            config.weight_decay,
        )
        displacement = losses.Displacement(config.method)
        meter = Meter(policy.scorer, world)
        done = run.restore(policy, optimizer, schedule)

        def evaluated(split):
            return evaluate(policy, split, data, ref_logps, config, world, run.stop_if_requested)

        def validate(step):
            is_due = bool(data["val"]) and plan.due(config.eval_every, step)
            run.validate(step, is_due, lambda: evaluated("val"))

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
            warning = displacement.seen(values["rewards/chosen"])
            if warning:
                run.say(warning)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        last = run.restore_best()
        for split in ("val", "test"):
            if data[split] and split not in run.results:  # the last step has done val
                run.results[split] = evaluated(split)
                run.log(last, run.results[split], split)
        write_examples(run, data, before, answer(policy, data, encoder, config, run), judge)
        models.save_policy(policy, tokenizer, spec.model_folder or run.folder / "model", world)
    return 0


if __name__ == "__main__":
    distributed.run(main)
