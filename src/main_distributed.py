"""Fine-tune a language model on preference pairs with DPO, on any number of processes.

    ./run_distributed.sh 4
    torchrun --standalone --nproc_per_node=4 src/main_distributed.py --beta 0.3
    python src/main_distributed.py                       # one process, no launcher

Settings: src/config.py. Results: results/dpo/ (see results/README.md).
"""

import config as settings
from ddp_utils import cli

if __name__ == "__main__":  # --help and mistakes in the settings end here, before torch is imported
    cli.check_flags(settings.read)

import gc
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_utils import distributed, losses, sampler
from ddp_utils.data import DataFile, digest_of_files
from ddp_utils.distributed import World, to_device
from ddp_utils.metrics import Averages
from ddp_utils.policy import Policy, Precision, Strategy, learning_rate, make_optimizer, rate_text
from ddp_utils.run import Run, RunSpec, check
from lm import logps, model_files, models, parallel, sampling
from lm import preference_data as preferences
from lm.chat_template import Encoder, date_of
from lm.checks import check_pairs
from lm.meter import Meter
from lm.settings import default_rate

if TYPE_CHECKING:
    from lm.judge import Judge

# what a copy of this script may replace without a change of the lines below
MODEL_CLASS: Any = None  # class of policy and reference; None: transformers chooses it
ROW_READER: Any = None  # function: record -> prompt, chosen, rejected; None: docs/data.md
LOGGERS: list[Any] = []  # objects with log(split, step, values) and close(), besides --report_to

Tables = dict[str, Tensor]  # split -> log-probs of chosen and rejected, [pairs, 2]
INTERVALS = ("loss", "rewards/margins", "rewards/accuracies")  # with a 95 % interval in evaluation

# --- settings and data ---------------------------------------------------------------------------


def complete_settings(config: settings.Config) -> None:
    """Fill in the settings of init_adapter, which may be on the hub, and the learning rate."""
    if config.init_adapter:
        from lm import lora

        lora.inherit_config(config, config.init_adapter)
    if config.learning_rate is None:
        config.learning_rate = default_rate(config.model_name, "dpo", config.fine_tuning)
    models.check_4_bits(config, "base_dtype")


def read_data(config: settings.Config, encoder: Encoder, world: World) -> tuple[dict, dict]:
    """Return {"train": pairs, "val": pairs, "test": pairs}, and a report on each file."""
    cache = config.cache_dir or Path(config.result_dir).parent / ".tokens"
    paths = {"train": config.train_data, "val": config.val_data, "test": config.test_data}
    data: dict[str, Any] = dict.fromkeys(paths, [])
    report = {}
    for split in [split for split in paths if paths[split] or split == "train"]:
        limit = config.max_rows if split == "train" else -1
        how = config.on_bad_record, config.columns, config.extra_fields
        file = DataFile(paths[split], cache, limit, *how)
        data[split], report[split] = preferences.read(file, encoder, ROW_READER)
    if not config.val_data and not config.test_data:
        parts = preferences.split_by_prompt(data["train"], config.seed)
        data = dict(zip(data, parts, strict=True))
        report["train"]["split"] = {split: len(pairs) for split, pairs in data.items()}
    for split in ("val", "test"):
        if data[split]:
            data[split] = data[split].first(config.max_eval_rows)
    preferences.note_repeated_prompts(data, report)
    sampler.check_enough_rows(config.train_data, data, world, config.save_best)
    return data, report


# --- step ----------------------------------------------------------------------------------------


def micro_batch_size(config: settings.Config, world: World) -> int:
    """Return the largest number of pairs per forward of one rank."""
    return math.ceil(config.batch_size / world.world_size)


def loss_of(
    scorer: Any, batch: logps.Batch, ref_logps: Tensor, pairs: Sequence[logps.Pair], config: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair [B] and its metrics, name -> [B].

    This is the only place where a loss is computed, in training, in validation and in the check
    before the first step. scorer(batch) returns the summed log-probs of the chosen and the rejected
    responses, [B] each; ref_logps: those of the reference, [B, 2]; pairs: the rows of the batch.
    The metrics are those of losses.pair_losses() and any others; the loss is added to them.

    By default it is DPO (Rafailov et al. 2023), -log sigmoid(beta (log-ratio of chosen - log-ratio
    of rejected)), where a log-ratio is log pi(y|x) - log pi_ref(y|x).
    """
    return losses.pair_losses(scorer, batch, ref_logps, losses.LossSpec.of(config))


def train_step(
    policy: Policy, step: int, rows: list, data: dict, ref_logps: Tables, config: Any, run: Run
) -> dict[str, float]:
    """Compute the gradient of one global batch, clipped, and return the exact means of its pairs.

    rows: of the training data; ref_logps: split -> log-probs of the reference, [pairs, 2].
    """
    world = run.world
    pairs = data["train"]
    averages = Averages(world)
    size = micro_batch_size(config, world)
    micro_batches = policy.scorer.micro_batches(rows, pairs, world, size)
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        examples = [pairs[row] for row in micro_batch.index]
        batch = policy.scorer.collate(examples, world.device)
        known = ref_logps["train"][to_device(micro_batch.index, world.device)]  # [B, 2]
        per_pair, metrics = loss_of(policy, batch, known, examples, config)
        weight = to_device(micro_batch.weight, world.device)  # [B]; 0 for padding pairs
        # DDP averages over ranks: times world_size / global count is the mean of the global batch
        loss = (per_pair * weight).sum() * (world.world_size / len(rows))
        policy.backward(loss)
        averages.add(losses.checked_metrics(per_pair, metrics), weight)
    grad_norm = policy.clip_grad_norm(config.max_grad_norm)
    return run.reduce(averages, grad_norm)


def is_own_reference(config: settings.Config) -> bool:
    """Return whether policy and reference are equal before the first step."""
    return config.method not in cli.REFERENCE_FREE and not config.reference_model


@torch.no_grad()
def evaluate(
    policy: Policy, split: str, data: dict, ref_logps: Tables, config: Any, run: Run
) -> dict[str, float]:
    """Return exact means over a split: every pair counts once, on any number of ranks.

    Before the first step, nothing is scored if the log-probs are those of the reference.
    """
    pairs = data[split]
    is_reference = run.step == 0 and is_own_reference(config)
    world = run.world
    averages = Averages(world, INTERVALS)
    scorer = policy.scorer  # without DDP, which would wait for gradients
    size = micro_batch_size(config, world)
    with logps.dropout_off(scorer):
        micro_batches = scorer.micro_batches(range(len(pairs)), pairs, world, size)
        for micro_batch in run.evaluation(split, micro_batches, averages):
            examples = [pairs[row] for row in micro_batch.index]
            batch = scorer.collate(examples, world.device)
            known = ref_logps[split][to_device(micro_batch.index, world.device)]  # [B, 2]
            source = losses.Known(known, scorer.precision) if is_reference else scorer
            per_pair, metrics = loss_of(source, batch, known, examples, config)
            metrics = losses.checked_metrics(per_pair, metrics)
            averages.add(metrics, to_device(micro_batch.weight, world.device))
    means = averages.reduce()
    if is_reference:  # all pairs are ties
        for end in ("", "_low", "_high"):
            del means[f"rewards/accuracies{end}"]
    return means


# --- example replies -----------------------------------------------------------------------------


def generate_replies(
    policy: Policy, name: str, data: dict, encoder: Encoder, config: settings.Config, run: Run
) -> dict[str, list[str]]:
    """Return split -> replies to its first prompts, the same on all ranks; name: of their file."""
    limits = config.max_new_tokens, config.sample_batch_size, config.seed
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits)
    ends = sampling.ends_of(policy.scorer, encoder)
    val, test = (data[split][: config.num_samples] for split in ("val", "test"))
    prompts = [pair.prompt for pair in val + test]  # together, since large batches are faster
    if not prompts:
        return {}
    path = run.folder / f"parts/{name}.safetensors"
    phase = partial(run.phase, f"sampling {len(prompts)} replies")
    with policy.gathered():
        how = policy.scorer, prompts, ends, run.world, spec, phase
        ids = sampling.generate_once(path, *how)
    texts = encoder.texts(ids)
    replies = {"val": texts[: len(val)], "test": texts[len(val) :]}
    return {split: texts for split, texts in replies.items() if texts}


def load_judge(config: settings.Config, data: dict, is_main: bool) -> "Judge":
    """Return the judge of replies, after a trial on a pair of each split if this is rank 0."""
    from lm.judge import load_judge

    pairs = data["val"][:1] + data["test"][:1]
    tried = [(pair.text, pair.expected) for pair in pairs if is_main]
    return load_judge(config.judge, settings.DEMO_JUDGE, tried)


# --- models --------------------------------------------------------------------------------------


def precision_of(config: settings.Config, device: torch.device) -> Precision:
    """Return the dtypes of weights and computation."""
    mixed = config.mixed_precision if config.use_mixed_precision else "no"
    return Precision.choose(device, config.fine_tuning, config.base_dtype, mixed)


def strategy_of(config: settings.Config) -> Strategy:
    """Return how the ranks split the work; a strategy that shards nothing is DDP."""
    return parallel.choose(config.strategy, config.sharding, config.grad_reduce_dtype)


def prepare(model: Any, config: Any, data: dict, run: Run, trained: bool = True) -> Policy:
    """Distribute a model over the ranks."""
    pairs = data["train"].extremes()
    scorer = logps.Scorer(model, precision_of(config, run.world.device).autocast)
    return parallel.prepare(scorer, strategy_of(config), pairs, config.layout, run, trained)


def load_policy(config: settings.Config, data: dict, run: Run) -> Policy:
    """Load the model to be trained, on all ranks."""
    torch.manual_seed(config.seed)  # the same new LoRA on every rank
    model = models.load_policy(
        config.model_name,
        models.LoraSpec.of(config),
        precision_of(config, run.world.device),
        run.world.device,
        sharded=config.strategy != "ddp",
        in_4_bits=config.in_4_bits,
        gradient_checkpointing=config.use_gradient_checkpointing,
        memory_efficient=config.lean,
        model_class=MODEL_CLASS,
    )
    return prepare(model, config, data, run)


def load_reference(config: settings.Config, data: dict, run: Run) -> Policy:
    """Load another reference model, on all ranks."""
    device, host = run.world.device, torch.device("cpu")
    precision = precision_of(config, device)
    dtype: Any = precision.weights
    if config.strategy == "ddp":
        host = device
    elif precision.autocast:  # every rank reads all weights, which the forward casts
        dtype = "auto"
    model = models.load(config.reference_model, dtype, host, model_class=MODEL_CLASS)
    model.requires_grad_(False)  # weights that are trained would become fp32
    return prepare(model, config, data, run, trained=False)


def score_reference(
    policy: Policy, plan: sampler.Plan, data: dict, config: Any, run: Run
) -> Tables:
    """Return the log-probs of a policy before its first step; NaN for pairs that are not used."""
    if config.method in cli.REFERENCE_FREE:
        return losses.no_reference(data, run.world.device)
    size = micro_batch_size(config, run.world)
    score = partial(logps.score, policy.scorer, world=run.world, micro_batch_size=size)
    numerics = policy.scorer.numerics(run.world.device)
    return run.reference_logps(numerics, data, {"train": plan.rows_used()}, score)


# --- main ----------------------------------------------------------------------------------------


def describe_run(
    config: settings.Config,
    data: dict,
    report: dict,
    encoder: Encoder,
    plan: sampler.Plan,
    judge: Any,
    world: World,
) -> tuple[RunSpec, Any]:
    """Check models and data against each other, before a weight is read; describe the run.

    Return also the model on the meta device: its names and shapes, without weights.
    """
    adapter, checkpointing = models.LoraSpec.of(config), config.use_gradient_checkpointing
    how = adapter, checkpointing, MODEL_CLASS
    meta_model, notes = models.meta_model(config.model_name, *how)
    for pairs in filter(None, data.values()):
        models.check_fit(meta_model, encoder.tokenizer, pairs.extremes())
    reply = [0] * config.max_new_tokens
    asked = data["val"][: config.num_samples] + data["test"][: config.num_samples]
    sampled = [pair._replace(chosen=reply, rejected=reply) for pair in asked]
    fix = "a smaller --max_new_tokens or --max_length"
    models.check_fit(meta_model, encoder.tokenizer, sampled, fix)
    if config.reference_model:
        with cli.located({"model_name": "--reference_model"}):
            reference = models.load(
                config.reference_model, "auto", models.META, model_class=MODEL_CLASS
            )
            for pairs in filter(None, data.values()):
                longest = pairs.extremes()
                models.check_fit(reference, encoder.tokenizer, longest, role="reference model")
            model_files.check_same_tokens(config.reference_model, encoder.tokenizer)
    folders = {"model_name": config.model_name, "init_adapter": config.init_adapter}
    folders["reference_model"] = config.reference_model
    inputs = models.input_digests(data, folders) | encoder.inputs
    if judge:
        inputs["content of judge"] = judge.digest
    if config.sharding_config:  # as in the file, before its "auto" is replaced
        inputs[f"content of {config.strategy}_config"] = digest_of_files([], config.sharding)
    if config.lr_scaling == "world_size":
        inputs["processes (lr_scaling)"] = str(world.world_size)
    parallel.check(strategy_of(config), meta_model)
    size, precision = micro_batch_size(config, world), precision_of(config, world.device)
    parallel.complete(config, size, precision, meta_model, world)
    spec = RunSpec(
        folder=Path(config.result_dir),
        steps=plan.steps,
        log_every=config.log_every,
        inputs=inputs,
        report=report,
        lines=preferences.describe_all(report, data) + config.notes + notes + encoder.notes,
        model_folder=Path(config.output_dir) if config.output_dir else None,
        save_best=config.save_best,
        shard_layout=strategy_of(config).shard_layout(config.fine_tuning, world),
    )
    return spec, meta_model


@cli.located()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = settings.read(argv)
    world = distributed.start(config)
    complete_settings(config)

    # data
    encoder = Encoder.of(config, date_of(config.result_dir, config, world))
    data, report = read_data(config, encoder, world)
    judge = load_judge(config, data, world.is_main) if config.judge else None
    plan = sampler.Plan.of(config, len(data["train"]))
    spec, meta_model = describe_run(config, data, report, encoder, plan, judge, world)
    if config.check:
        return check(spec, config, world)

    scaling = config.lr_scaling, plan.global_batch / config.base_batch_size, world.world_size
    peak_rate = learning_rate(config.learning_rate or 0.0, *scaling)
    loss = losses.LossSpec.of(config)
    strategy = strategy_of(config)
    sharding = "" if strategy.kind == "ddp" else f", {strategy.name}"

    with Run(spec, config, world, LOGGERS) as run:
        run.describe(
            model=f"{config.model_name}, {config.fine_tuning}{sharding}",
            loss=f"{config.method}, beta {config.beta:g}, sft_weight {loss.sft_weight:g}",
            steps=f"{plan.steps} of {plan.global_batch} pairs, {rate_text(peak_rate, config)}",
            files=" ".join(filter(None, (config.train_data, config.val_data, config.test_data))),
        )

        # model
        if config.reference_model:  # scored, and freed before the policy is loaded
            reference = load_reference(config, data, run)
            ref_logps = score_reference(reference, plan, data, config, run)
            reference.release()
            del reference
            gc.collect()
        policy = load_policy(config, data, run)
        unscored = {"train": torch.zeros(len(data["train"]), 2, device=world.device)}
        run.try_largest_steps(
            policy,
            plan,
            data["train"].num_forward_tokens(policy.scorer.shared),
            lambda step, rows: train_step(policy, step, rows, data, unscored, config, run),
        )
        if not config.reference_model:  # the reference is the policy before step 0
            ref_logps = score_reference(policy, plan, data, config, run)

        sources = data, encoder, config, run
        before = generate_replies(policy, "before", *sources)
        has_other_dropout = bool(config.lora_dropout and config.init_adapter)
        has_known_loss = is_own_reference(config) and not has_other_dropout
        optim = (config.lr_scheduler, config.warmup_ratio, config.weight_decay)
        optimizer, schedule = make_optimizer(policy, peak_rate, plan.steps, *optim)
        displacement = losses.Displacement(config.method, config.sft_weight)
        meter = Meter(policy.scorer, world)
        size = micro_batch_size(config, world)
        own_loss = partial(loss_of, config=config)
        done = run.restore(policy, optimizer, schedule)

        def evaluate_split(split: str = "val") -> dict[str, float]:
            return evaluate(policy, split, data, ref_logps, config, run)

        def validate(step: int) -> None:
            is_due = bool(data["val"]) and plan.due(config.eval_every, step)
            run.validate(step, is_due, evaluate_split)

        # loop: one turn is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            values = train_step(policy, step, rows, data, ref_logps, config, run)
            pairs = data["train"].select(rows)
            known = ref_logps["train"][rows] if step == 0 and has_known_loss else None
            kind = config.fine_tuning
            check_pairs(policy, step, values, pairs, known, own_loss, kind, world, size)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            values["epoch"] = plan.epoch(step + 1)
            values |= meter.read(pairs, time.perf_counter() - start)
            run.log(step + 1, values)
            run.warn(displacement.seen(values["rewards/chosen"]))
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        last = run.restore_best()
        for split in ("val", "test"):
            if data[split] and split not in run.results:  # the last step has evaluated val
                name = f"parts/{split}-step-{last:08d}"
                run.results[split] = run.once(name, partial(evaluate_split, split))
                run.log(last, run.results[split], split)
        models.round_weights(policy, meta_model)
        from lm.judge import write_examples

        after = generate_replies(policy, f"after-step-{last:08d}", *sources)
        run.save_model(lambda path: models.save_policy(policy, meta_model, encoder, path, world))
        write_examples(run, data, before, after, judge)  # a judge of the user's may fail
    return 0


if __name__ == "__main__":
    distributed.run(main)
