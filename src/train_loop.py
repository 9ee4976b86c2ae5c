"""Bake a system prompt into a LoRA: without the prompt, the model answers as if it had read it.

    ./run_distributed.sh 2 baking
    torchrun --nproc_per_node=2 src/train_loop.py --num_epochs 3 --batch_size 10 \\
        --learning_rate 1e-4 --lora_r 32
    python src/train_loop.py                             # one process, no launcher

The student is the model with the LoRA and without the prompt; the teacher is the same model without
the LoRA and with the prompt. The loss is KL(teacher || student) at every token of replies that the
teacher has sampled (Bhargava et al., Prompt Baking, 2024). Data: generate_data.py. Settings:
src/prompt_baking/train_config.py. Guide: docs/prompt_baking.md.
"""

import prompt_baking.train_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(settings.read)  # --help and mistakes end here, before torch is imported


import collections
import functools
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_utils import UserError, checks, distributed, sampler
from ddp_utils import data as data_files
from ddp_utils import policy as policies
from ddp_utils.distributed import World, to_device
from ddp_utils.metrics import Averages, peak_memory_mb, ratio
from ddp_utils.policy import Policy, Precision
from ddp_utils.run import Run, RunSpec, check
from lm import logps, model_files, models
from lm.chat_template import Encoder, date_of, truncation_warning
from lm.judge import ask_once, load_judge
from lm.settings import DEMO_MODEL, default_rate
from prompt_baking import replies, trajectories
from prompt_baking.distillation import Student, check_head, check_targets, own_replies
from prompt_baking.train_config import Config
from prompt_baking.trajectories import Trajectory

Data = dict[str, list[Trajectory]]  # "train" and "val" -> rows
Examples = Any  # row -> trajectory: a list of all rows, or a dictionary of some
DEMO_QUESTIONS = "data/demo/questions_test.jsonl"
DEMO_JUDGE = "data/demo/judge.py:capitals"

# --- settings and data ---------------------------------------------------------------------------


def complete_settings(config: Config) -> Config:
    """Return the settings with what they leave open: the first row of the data has it."""
    if config.resume_from:
        from lm import lora

        lora.inherit_config(config, config.resume_from)
    [first] = data_files.read(config.data_path, 1)
    config.model_name = config.model_name or data_files.text(first, "model")
    if not config.chat_template_kwargs and first.data.get("chat_template_kwargs"):
        config.chat_template_kwargs = data_files.text(first, "chat_template_kwargs")
    if config.chat_template == "auto" and "chat_template" in first.data:
        config.chat_template = data_files.text(first, "chat_template")
    if config.learning_rate is None:
        config.learning_rate = default_rate(config.model_name, "baking")
    if config.model_name == DEMO_MODEL and not config.questions:
        config.questions, config.judge = DEMO_QUESTIONS, config.judge or DEMO_JUDGE
        config.eval_every = config.eval_every or 10  # otherwise the curve would have one point
    if config.num_samples is None:  # a person reads some, an interval needs many
        config.num_samples = 100 if config.judge else 16
    return config


def lora_of(config: Config) -> models.LoraSpec:
    """Return the adapter of the settings."""
    shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
    return models.LoraSpec(*shape, config.resume_from)


def encoder_of(config: Config, world: World) -> Encoder:
    """Return what turns texts into token ids."""
    names = config.model_name, config.resume_from, config.chat_template
    tokenizer = models.load_tokenizer(*names)
    [first] = data_files.read(config.data_path, 1)  # replies are to prompts with their date
    date = first.data.get("template_date") or date_of(config.out_dir, config, world)
    kwargs, length = config.chat_template_kwargs, config.max_traj_len
    encoder = Encoder(tokenizer, config.chat_template, length, kwargs=kwargs, date=date)
    if first.data.get("template", encoder.template_digest) != encoder.template_digest:
        problem = f"{config.chat_template} is not the one with which {first.location} was sampled"
        raise UserError(f"--chat_template: {problem}; use that one, or sample again")
    return encoder


def read_data(config: Config, encoder: Encoder, world: World) -> tuple[Data, dict[str, dict]]:
    """Return the training and validation rows, and a report on each file."""
    data, reports = {}, {}
    for split, path in (("train", config.data_path), ("val", config.val_path)):
        data[split], reports[split] = trajectories.read(path, encoder, config.max_traj_len)
    if len({*reports["train"]["x0"], *reports["val"]["x0"]}) > 1:
        raise UserError("--val_path: more than one x0 in both files; bake one at a time")
    questions = {row.question for row in data["train"]}
    for row in data["val"]:
        if row.question in questions:
            raise UserError(f"{row.location}: question: it is also in data_path; split by question")
    sampler.check_enough_rows(config.data_path, data, world)
    return data, reports


def read_questions(config: Config, data: Data, encoder: Encoder) -> list[str]:
    """Return num_samples questions for the example replies; a short list is repeated."""
    questions = list(dict.fromkeys(row.question for row in data["val"] if not row.kept))
    if config.questions:
        questions = trajectories.read_questions(config.questions)
        trajectories.check_turns(config.questions, questions, encoder)
    return [questions[number % len(questions)] for number in range(config.num_samples or 0)]


# --- step ----------------------------------------------------------------------------------------


def loss_of(student: Any, batch: trajectories.Batch, config: Config) -> Tensor:
    """Return the loss of each reply [B], in nats, summed over its tokens.

    It is the divergence of the student from the teacher that --divergence names, by default
    KL(teacher || student). Validation always reports this KL, whatever is trained.
    """
    return student(batch._replace(divergence=config.divergence))[0]


def train_step(
    policy: Policy, step: int, rows: list[int], examples: Examples, config: Config, run: Run
) -> dict:
    """Run forward and backward for one global batch; return its means over all ranks."""
    student: Any = policy.scorer
    world = run.world
    averages = Averages(world, sizes={"loss": "tokens"})
    micro_batches = student.micro_batches(rows, examples, world, config.batch_size)
    tokens = sum(len(examples[row].reply) for row in rows)  # of the global batch
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = student.batch([examples[row] for row in micro_batch.index], world.device)
        costs = loss_of(policy, batch, config)  # [B]
        weight = to_device(micro_batch.weight, world.device)
        # DDP averages over ranks: times world_size / tokens is the mean over the global batch
        loss = (costs * weight).sum() * (world.world_size / tokens)
        policy.backward(loss)
        averages.add({"loss": costs, "tokens": batch.tokens}, weight)
    grad_norm = policy.clip_grad_norm(config.max_grad_norm)
    return run.reduce(averages, grad_norm) | {"tokens": tokens}


def check_step(
    policy: Policy,
    step: int,
    means: dict,
    rows: list[int],
    examples: list,
    config: Config,
    run: Run,
) -> None:
    """Stop before an update from a wrong start or with a loss that is not finite."""
    batch_rows = [examples[row] for row in rows]

    def score(baked: bool = True) -> Tensor:  # [global batch, 1]
        return kl_of_rows(policy.scorer, rows, examples, baked, config, run)[rows, :1]

    checks.check_step(policy, step, means, batch_rows, score, "lora")
    if step == 0 and not config.resume_from:
        base = score(baked=False)
        tokens = torch.tensor([len(row.reply) for row in batch_rows])
        locations = [row.location for row in batch_rows]
        checks.check_reference(score(), base, checks.noise(policy, tokens), locations)


# --- evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def kl_of_rows(
    student: Any,
    rows: list[int],
    examples: Examples,
    baked: bool,
    config: Config,
    run: Run,
    split: str = "",
) -> Tensor:
    """Return KL(teacher || student), summed over each reply, and its number of tokens.

    The table is float64 [N, 2] on the CPU, one row for each example; it is 0 except in `rows`.
    baked: with the LoRA, or without it. split: the name of an evaluation that can be stopped and
    continued; "": it cannot.
    """
    world = run.world
    micro_batches = student.micro_batches(rows, examples, world, config.batch_size)
    table = distributed.Table(len(examples), 2, world)
    if split:
        micro_batches = run.evaluation(split, micro_batches, table)
    with logps.dropout_off(student), student.adapter(baked):
        for micro_batch in micro_batches:
            batch = student.batch([examples[row] for row in micro_batch.index], world.device)
            table.add(micro_batch, torch.stack([student(batch)[0], batch.tokens], -1))
    return table.reduce().double().cpu()


def by_question(table: Tensor, rows: list[int], examples: Examples) -> tuple[Tensor, Tensor]:
    """Return the sums of both columns of the table over the rows of each question.

    Both are [Q], in the order of the first rows.
    """
    numbers: dict[str, int] = {}  # question -> its number
    index = [numbers.setdefault(examples[row].question, len(numbers)) for row in rows]
    sums = table.new_zeros(len(numbers), 2).index_add(0, torch.tensor(index), table[rows])
    return sums[:, 0], sums[:, 1]


def evaluate(
    student: Any,
    examples: list[Trajectory],
    config: Config,
    run: Run,
    base_kl: list | None = None,
) -> dict:
    """Return the KL of the validation rows, with 95 % intervals over their questions.

    base_kl: sums of the KL of the base model by question; None: evaluate the base model, and return
    them as `by_question`. Under each of other_prompts it is KL(base || baked); `kept/kl` is its
    mean over these prompts.
    """
    baked = base_kl is not None
    rows = [row for row, example in enumerate(examples) if baked or not example.kept]
    split = "val" if baked else "base"
    table = kl_of_rows(student, rows, examples, baked, config, run, split)
    rows_of = collections.defaultdict(list)  # name of the other prompt, "" for x0 -> rows
    for row in rows:
        rows_of[examples[row].kept].append(row)
    sums = {name: by_question(table, rows, examples) for name, rows in rows_of.items()}
    kl = {name: ratio("kl", *part) for name, part in sums.items()}
    values = {"count": len(rows_of[""]), **kl.pop("")}
    if not baked:
        return values | {"by_question": sums[""][0].tolist()}
    base = run.results["base"]["kl"]
    values |= {"kl_base": base, "share_baked": 1 - values["kl"] / max(base, 1e-12)}
    if "kl_low" in values and base_kl:  # of a run that an older version began, it is empty
        left = ratio("kl", sums[""][0], sums[""][0].new_tensor(base_kl))
        values |= {"share_baked_low": 1 - left["kl_high"], "share_baked_high": 1 - left["kl_low"]}
    if kl:
        means, halves = [], []
        for name, part in kl.items():
            values[f"kept/kl/{name}"] = part["kl"]
            means.append(part["kl"])
            halves.append(part.get("kl_high", math.nan) - part["kl"])
        values["kept/kl"] = mean = sum(means) / len(means)
        half = math.hypot(*halves) / len(means)  # the prompts are given, not drawn
        if math.isfinite(half):
            values |= {"kept/kl_low": mean - half, "kept/kl_high": mean + half}
    return values


def before(base: dict, examples: list[Trajectory]) -> dict:
    """Return what evaluate() returns before the first step, where the LoRA has no effect.

    base: of evaluate(), without the LoRA.
    """
    names = {example.kept: 0.0 for example in examples if example.kept}
    kept = {"kept/kl": 0.0} if names else {}
    kept |= {f"kept/kl/{name}": 0.0 for name in names}
    return base | {"kl_base": base["kl"], "share_baked": 0.0} | kept


# --- main ----------------------------------------------------------------------------------------


def describe_run(
    config: Config,
    data: Data,
    reports: dict[str, dict],
    encoder: Encoder,
    prompts: list[list[int]],
    judge: Any,
    plan: sampler.Plan,
) -> tuple[RunSpec, Any]:
    """Check model and data against each other, before a weight is read; describe the run.

    Return also the model on the meta device: its names and shapes, without weights. prompts: token
    ids to which example replies are sampled.
    """
    adapter, checkpointing = lora_of(config), config.use_gradient_checkpointing
    meta_model, notes = models.meta_model(config.model_name, adapter, checkpointing)
    check_targets(meta_model, config.lora_targets)
    reply = [0] * config.max_new_tokens
    asked = [Trajectory(ids, ids, reply, "questions", "") for ids in prompts]
    own = [row._replace(reply=reply) for row in data["train"]] if config.on_policy else []
    fits = functools.partial(models.check_fit, meta_model, encoder.tokenizer)
    fits(itertools.chain(*data.values()), "a smaller --max_traj_len")
    fits([*asked, *own], "a smaller --max_new_tokens")
    folders = {"model_name": config.model_name, "resume_from": config.resume_from}
    inputs = models.input_digests(data | {"questions": asked}, folders)
    inputs |= encoder.inputs
    inputs["global_batch"] = str(plan.global_batch)
    if judge:
        inputs["content of judge"] = judge.digest
    lines = []
    for split, report in reports.items():
        count = f"{len(report['cut'])} cut, {len(report['dropped'])} dropped"
        lines.append(f"{split}: {len(data[split])} replies of {report['file']}; {count}")
        too_long, rows = len(report["cut"]) + len(report["dropped"]), len(data[split])
        rows += len(report["dropped"])
        lines += truncation_warning(split, too_long, rows, "--max_traj_len")
        lines += model_files.describe_unknown(report["file"], report["unknown_tokens"])
    folder, save_best = Path(config.out_dir), config.save_best
    lines += notes + encoder.notes
    spec = RunSpec(
        folder, plan.steps, inputs, reports, lines, config.log_every, save_best=save_best
    )
    return spec, meta_model


def load_student(config: Config, data: Data, precision: Precision, run: Run) -> Student:
    """Load the base model with a fresh LoRA; without it, the model is the teacher."""
    world = run.world
    torch.manual_seed(config.seed)  # the same LoRA on every rank
    memory = {"gradient_checkpointing": config.use_gradient_checkpointing}
    memory["memory_efficient"] = config.lean
    adapter = lora_of(config)
    model = models.load_policy(config.model_name, adapter, precision, world.device, **memory)
    student = Student(model, precision.autocast).to(world.device)
    check_head(student, data["train"], run)
    return student


@cli.located()
@cli.located({"init_adapter": "--resume_from"})
def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = settings.read(argv)
    world = distributed.start(config)
    config = complete_settings(config)

    # data
    encoder = encoder_of(config, world)
    data, reports = read_data(config, encoder, world)
    x0 = reports["train"]["x0"][0]
    others = reports["val"]["kept"]
    columns = replies.columns_of(x0, others)
    questions = read_questions(config, data, encoder)
    pairs = itertools.product(columns, questions)
    prompts = [trajectories.prompt(encoder, column.system, text) for column, text in pairs]
    tried = [(question, "") for question in questions[:1] if world.is_main]
    judge = load_judge(config.judge, DEMO_JUDGE, tried) if config.judge else None
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    spec, meta_model = describe_run(config, data, reports, encoder, prompts, judge, plan)
    if config.check:
        return check(spec, config, world)

    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "lora", config.base_dtype, mixed)

    with Run(spec, config, world) as run:
        ranks, accumulation = world.world_size, config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, lora r={config.lora_r} {config.resume_from}",
            prompt=data_files.printable(x0.strip()),
            batch=f"{plan.global_batch} replies = {ranks} ranks x {accumulation} accumulation x "
            f"{config.batch_size}",
            steps=f"{plan.steps}, learning rate {config.learning_rate:.3g}",
            judge=config.judge or "none",
        )

        # model
        student = load_student(config, data, precision, run)
        policy = Policy(student, world)
        run.try_largest_steps(
            policy,
            plan,
            np.array([row.num_tokens for row in data["train"]]),
            lambda step, rows: train_step(policy, step, rows, data["train"], config, run),
        )
        shape = config.lr_scheduler, config.warmup_ratio, config.weight_decay
        rate = config.learning_rate or 0.0
        optimizer, schedule = policies.make_optimizer(policy, rate, plan.steps, *shape)
        done = run.restore(policy, optimizer, schedule)
        base = run.once("base", lambda: evaluate(student, data["val"], config, run))
        base_kl = base.pop("by_question", [])
        run.results["base"] = base
        run.say(f"base model without the prompt: kl {base['kl']:.4f} nats per token")

        def validate(step: int) -> None:
            is_due = plan.due(config.eval_every, step)

            def now() -> dict:
                is_base = step == 0 and not config.resume_from
                if is_base:
                    return before(base, data["val"])
                return evaluate(student, data["val"], config, run, base_kl)

            run.validate(step, is_due, now)

        # loop: one iteration is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            examples: Examples = data["train"]
            if config.on_policy:
                examples = own_replies(student, rows, data["train"], step, encoder, config, world)
            values = train_step(policy, step, rows, examples, config, run)
            check_step(policy, step, values, rows, data["train"], config, run)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            seconds = time.perf_counter() - start
            values |= {"epoch": plan.epoch(step + 1), "seconds": seconds}
            values["tokens_per_second"] = values.pop("tokens") / seconds
            values["peak_memory_mb"] = peak_memory_mb(world.device)
            run.log(step + 1, values)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        last = run.restore_best()
        models.save_policy(policy, meta_model, encoder, run.folder / "model", world)
        if questions:
            texts = replies.sample(student, last, columns, questions, encoder, config, run)
            means = {}
            if judge:
                asked = zip(questions * len(texts), sum(texts.values(), []), strict=True)
                judge = ask_once(run, "test", [*asked], judge)
                means = replies.judged(judge, columns, questions, texts)
            replies.write(run, questions, texts, means)
        replies.describe_kept(run, others)
    return 0


if __name__ == "__main__":
    distributed.run(main)
