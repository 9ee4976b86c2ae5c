"""Bake a system prompt into a LoRA: without the prompt the model answers as with it.

    ./run_distributed.sh 2 baking
    torchrun --nproc_per_node=2 src/train_loop.py --num_epochs 3 --batch_size 10 \\
        --learning_rate 1e-4 --lora_r 32
    python src/train_loop.py                             # one process, no launcher

Student: the model with the LoRA, without the prompt. Teacher: the same model without the LoRA, with
the prompt. Loss: KL(teacher || student) at every token of replies that the teacher has sampled
(Bhargava et al., Prompt Baking, 2024). Data: generate_data.py. Guide: docs/prompt_baking.md.
"""

import prompt_baking.train_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        settings.read
    )  # --help and mistakes in the settings end here, before torch is imported


import collections
import contextlib
import itertools
import sys
import time
from pathlib import Path

import torch

from ddp_utils import (
    UserError,
    checks,
    cli,
    distributed,
    loggers,
    logps,
    lora,
    models,
    sampler,
    sampling,
)
from ddp_utils import data as data_files
from ddp_utils.chat_template import Encoder
from ddp_utils.distributed import to_device
from ddp_utils.judge import as_text, load_judge
from ddp_utils.metrics import Averages, peak_memory_mb
from ddp_utils.policy import Policy, Precision, bytes_to_write, check_same_precision, make_optimizer
from ddp_utils.run import Run, RunSpec, check
from prompt_baking import distillation
from prompt_baking import trajectories as trajectories_

MIN_OBEYED = 0.9  # of the base model's own rate, under another prompt
MAX_KEPT_KL = 0.1  # nats a token, where no judge says whether a prompt is obeyed
DEMO_QUESTIONS, DEMO_JUDGE = "data/demo/questions_test.jsonl", "data/demo/judge.py:capitals"

# --- settings ------------------------------------------------------------------------------------


def read_settings(argv, world):
    """Flags over the defaults, checked before anything is read."""
    config = settings.read(argv)
    if config.resume_from:
        with cli.located({"init_adapter": "--resume_from"}):
            lora.inherit_config(config, config.resume_from)
    [first] = data_files.read(config.data_path, 1)
    config.model_name = config.model_name or data_files.text(first, "model")
    if not config.chat_template_kwargs and first.data.get("chat_template_kwargs"):
        config.chat_template_kwargs = data_files.text(first, "chat_template_kwargs")
    if config.model_name == "data/demo/model" and not config.questions:
        config.questions, config.judge = DEMO_QUESTIONS, config.judge or DEMO_JUDGE
        config.eval_every = config.eval_every or 10  # its one epoch would be one dot
    return config


def read_data(config, encoder, world):
    """{"train": trajectories, "val": trajectories} and their reports."""
    data = {}
    reports = {}
    for split, path in (("train", config.data_path), ("val", config.val_path)):
        data[split], reports[split] = trajectories_.read(path, encoder, config.max_traj_len)
    if len({*reports["train"]["x0"], *reports["val"]["x0"]}) > 1:
        raise UserError("--val_path: data_path and it hold more than one x0; bake one at a time")
    seen = {row.question for row in data["train"]}
    for row in data["val"]:
        if row.question in seen:
            raise UserError(f"{row.location}: its question is in data_path, too; split by question")
    sampler.check_enough_rows(config.data_path, len(data["train"]), world)
    return data, reports


# --- step ----------------------------------------------------------------------------------------


def train_step(policy, step, rows, trajectories, teacher, ends, config, run):
    """Forward and backward of one global batch; return its exact means. The gradient is ready."""
    world = run.world
    if config.on_policy:
        given = policy.scorer, rows, trajectories, step, ends, config, world
        trajectories = distillation.own_replies(*given)
    averages = Averages(world)
    micro_batches = policy.scorer.micro_batches(rows, trajectories, world, config.batch_size)
    tokens = sum(len(trajectories[row].reply) for row in rows)  # of the global batch
    for micro_step, micro_batch in enumerate(micro_batches):
        torch.manual_seed(sampler.seed_of(config.seed, step, micro_step, world.rank))  # for dropout
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = teacher("train", micro_batch.index, trajectories)
        (costs,) = policy(batch._replace(divergence=config.divergence))  # [B]
        weight = to_device(micro_batch.weight, world.device)
        # DDP averages over ranks: times world_size / tokens is the mean of the global batch
        loss = (costs * weight).sum() * (world.world_size / tokens)
        policy.backward(loss)
        averages.add({"cost": costs, "tokens": batch.tokens}, weight)
    norm = policy.clip_grad_norm(config.max_grad_norm)
    means = run.reduce(averages, norm)
    means["loss"] = means.pop("cost") / means.pop("tokens")
    return means | {"tokens": tokens}


def check_step(policy, step, means, rows, trajectories, teacher, config, world):
    """Stop before an update that a NaN or a wrong start would spoil."""
    batch_rows = [trajectories[row] for row in rows]

    @torch.no_grad()
    def score(baked=True):  # [global batch, 1]
        micro_batches = policy.scorer.micro_batches(rows, trajectories, world, config.batch_size)
        costs = []
        with logps.dropout_off(policy.scorer), adapter_of(policy.scorer, baked):
            for micro_batch in micro_batches:
                costs.append(policy.scorer(teacher("train", micro_batch.index))[0][:, None])
        return distributed.gather_by_index(len(trajectories), micro_batches, costs, world)[rows]

    checks.check_step(policy, step, means, batch_rows, score, "lora")
    if step == 0 and not config.resume_from:
        locations = [row.location for row in batch_rows]
        base = score(baked=False)
        tokens = torch.tensor([len(row.reply) for row in batch_rows], device=world.device)
        checks.check_reference(score(), base, checks.noise(policy.precision, tokens), locations)


def adapter_of(student, baked):
    """The context in which the model has its LoRA, or not."""
    return contextlib.nullcontext() if baked else student.model.disable_adapter()


@torch.no_grad()
def evaluate(student, trajectories, teacher, config, run, baked=True):
    """KL(teacher || student) per token over the validation rows; not `baked`: of the base model.

    Under each of other_prompts it is KL(base || baked): `kept/kl` is its mean over these prompts.
    """
    rows_of = collections.defaultdict(list)  # the name of another prompt, "" for x0 -> rows
    for row, trajectory in enumerate(trajectories):
        rows_of[trajectory.kept].append(row)
    kl = {}
    with logps.dropout_off(student), adapter_of(student, baked):
        for name, rows in rows_of.items() if baked else [("", rows_of[""])]:
            averages = Averages(run.world)
            for micro_batch in student.micro_batches(
                rows, trajectories, run.world, config.batch_size
            ):
                run.stop_if_requested()
                batch = teacher("val", micro_batch.index)
                weight = to_device(micro_batch.weight, run.world.device)
                averages.add({"kl": student(batch)[0], "tokens": batch.tokens}, weight)
            means = averages.reduce()
            kl[name] = means["kl"] / means["tokens"]
    values = {"count": len(rows_of[""]), "kl": kl.pop("")}
    if baked:
        base = run.results["base"]["kl"]
        values |= {"kl_base": base, "share_baked": 1 - values["kl"] / max(base, 1e-12)}
    if kl:
        values["kept/kl"] = sum(kl.values()) / len(kl)
        values |= {f"kept/kl/{name}": value for name, value in kl.items()}
    return values


# --- replies -------------------------------------------------------------------------------------


def answer(student, prompts, encoder, config, run, baked):
    """Replies to prompts (token ids) of what is trained, or of the base model."""
    limits = (config.max_new_tokens, config.batch_size)
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    poll = run.stop_if_requested
    with adapter_of(student, baked):
        replies = sampling.generate(student, prompts, encoder.ends, run.world, spec, poll)
    texts = encoder.tokenizer.batch_decode(replies, skip_special_tokens=True)
    return [text.strip() for text in texts]


def columns_of(x0, others):
    """Return whose replies stand side by side: title, system prompt, whether with the LoRA.

    others: the other prompts, name -> text.
    """
    columns = [("base", "", False), ("prompted", x0, False), ("baked", "", True)]
    for name, system in others.items():
        columns += [(f"{name}, base", system, False), (f"{name}, baked", system, True)]
    return columns


def write_examples(run, questions, replies, judge, others):
    """Write replies side by side, for people and as data; the judge's means into the results.

    replies: title of columns_of() -> texts. A judge's score that has the name of another prompt
    says whether a reply obeys that prompt.
    """
    rows = []
    scores = collections.defaultdict(list)
    for question, *texts in zip(questions, *replies.values(), strict=True):
        rows.append({"question": question, **dict(zip(replies, texts, strict=True))})
        for title, text in zip(replies, texts, strict=True):
            name, _, who = title.rpartition(", ")  # name: of another prompt, or ""
            of_base = "_base" if who == "base" else ""
            for score, value in judge(question, text).items() if judge else ():
                if name and score == name:
                    scores[f"kept/obeyed{of_base}/{name}"].append(value)
                elif name and score not in others:
                    scores[f"kept/{score}{of_base}/{name}".replace("//", "/")].append(value)
                elif score not in others:
                    scores[f"judge/{who}/{score}".rstrip("/")].append(value)
    means = {name: sum(values) / len(values) for name, values in scores.items()}
    for score in ("kept/obeyed", "kept/obeyed_base"):
        of_prompts = [means[f"{score}/{name}"] for name in others if f"{score}/{name}" in means]
        if of_prompts:
            means[score] = sum(of_prompts) / len(of_prompts)
    run.write_json("examples.json", {"test": rows})
    run.write_text("distributed_output_test.txt", as_text(rows, means))
    run.results["test"] = {"count": len(questions), **means}
    for who in ("base", "prompted", "baked"):
        texts = []
        for name, value in means.items():
            if name.startswith(f"judge/{who}"):
                texts.append(f"{name.removeprefix(f'judge/{who}')[1:]} {value:.2f}".strip())
        if texts:
            run.say(loggers.row("judge", f"{who}: {', '.join(texts)}"))


def describe_kept(run, others):
    """Say what is left of the base model under each of the other prompts, and what is lost."""
    test = run.results.get("test", {})
    for name, system in others.items():
        texts = []
        for metric, value in test.items():
            score = metric.removeprefix("kept/").removesuffix(f"/{name}")
            base = test.get(f"kept/{score}_base/{name}")
            if metric == f"kept/{score}/{name}" and base is not None:
                texts.append(f"{score} {value:.2f} (base {base:.2f})")
        kl = run.results["val"][f"kept/kl/{name}"]
        run.say(loggers.row("kept", ", ".join([f"{name}: kl {kl:.4f}", *texts])))
        lost = kl > MAX_KEPT_KL
        if f"kept/obeyed/{name}" in test:
            lost = test[f"kept/obeyed/{name}"] < MIN_OBEYED * test[f"kept/obeyed_base/{name}"]
        if lost:
            mend = "generate the data with a larger --retain_share"
            run.say(loggers.row("warning", f"{system.strip()!r:.50} is obeyed no more; {mend}"))


def begins(config):
    """Say what an adapter that is carried on turns into."""
    if not config.resume_from:
        return {}
    teacher = "the teacher is the base model without it, so what else it has learned goes"
    return {"begins": f"{config.resume_from}; {teacher}"}


# --- main ----------------------------------------------------------------------------------------


def main(argv=None) -> int:
    # setup
    world = distributed.whoami(argv=sys.argv)
    config = read_settings(argv, world)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    tokenizer = models.load_tokenizer(config.model_name)
    arguments = config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, config.max_traj_len, kwargs=arguments)
    data, reports = read_data(config, encoder, world)
    x0 = reports["train"]["x0"][0]
    others = {name: text for name, text in reports["val"]["kept"].items() if text}
    columns = columns_of(x0, others)
    questions = list(dict.fromkeys(row.question for row in data["val"] if not row.kept))
    if config.questions:
        questions = trajectories_.read_questions(config.questions)
    questions = [questions[turn % len(questions)] for turn in range(config.num_samples)]
    shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
    adapter = lora.LoraSpec(*shape, config.resume_from)
    meta_model = lora.meta_model(config.model_name, adapter)
    asked = {}  # system prompt -> the questions under it, as token ids
    for _, system, _ in columns:
        asked[system] = [trajectories_.prompt(encoder, system, text) for text in questions]
    room = [0] * config.max_new_tokens
    rows = {}  # different questions only
    for ids in itertools.chain(*asked.values()):
        rows[tuple(ids)] = trajectories_.Trajectory(ids, ids, room, "questions", "")
    rows_read = data | {"questions": [*rows.values()]}
    longest = [row._replace(reply=room) for row in data["train"]] if config.on_policy else []
    models.check_fit(meta_model, itertools.chain(*rows_read.values(), longest))
    if config.learning_rate is None:
        small = sum(p.numel() for p in meta_model.parameters()) < 10e6
        config.learning_rate = 1e-3 if small else 1e-4
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    folders = {"model_name": config.model_name, "resume_from": config.resume_from}
    inputs = models.input_digests(rows_read, folders, meta_model.config)
    inputs["global_batch"] = str(plan.global_batch)
    # a judge is executed: the demo's is the project's own, whatever the current folder holds
    root = data_files.ROOT if config.judge == DEMO_JUDGE else None
    judge = load_judge(config.judge, root) if config.judge else None
    if judge:
        inputs["content of judge"] = judge.digest
        for question in questions[:1]:
            judge(question, "")  # one that does not know these questions says so now
    described = []
    for split, report in reports.items():
        count = f"{len(report['cut'])} cut, {len(report['dropped'])} dropped"
        described.append(f"{split}: {len(data[split])} replies of {report['file']}; {count}")
    checkpoints = config.keep_checkpoints + 1 + config.save_best
    spec = RunSpec(
        folder=Path(config.out_dir),
        flag="--out_dir",
        steps=plan.steps,
        inputs=inputs,
        bytes_needed=bytes_to_write(meta_model, checkpoints, config.lora_r),
        report=reports,
        lines=described,
        save_best=config.save_best,
    )
    if config.check:
        distributed.choose_device(world, config.backend)
        return check(spec, config, world)

    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "lora", config.base_dtype, mixed)
    check_same_precision(precision, world)

    with Run(spec, config, world) as run:
        accumulation = config.gradient_accumulation_steps
        run.describe(
            model=f"{config.model_name}, lora r={config.lora_r}",
            prompt=data_files.printable(x0.strip()),
            batch=f"{plan.global_batch} replies = {world.world_size} ranks x {accumulation} "
            f"accumulation x {config.batch_size}",
            steps=f"{plan.steps}, learning rate {config.learning_rate:.3g}",
            **begins(config),
            judge=config.judge or "none",
        )

        # model
        torch.manual_seed(config.seed)  # the same fresh LoRA on every rank
        model = lora.load_policy(
            config.model_name,
            adapter,
            precision,
            world.device,
            gradient_checkpointing=config.use_gradient_checkpointing,
            memory_efficient=config.lean,
        )
        student = distillation.Student(model, precision.autocast).to(world.device)
        for line in distillation.check_head(student, data["train"], world, config.cache_teacher):
            run.say(line)
        teacher = distillation.Teacher(student, data, config, run)
        base = run.once("base", lambda: evaluate(student, data["val"], teacher, config, run, False))
        run.say(f"base model without the prompt: kl {base['kl']:.4f} nats a token")
        policy = Policy(student, world)
        optimizer, schedule = make_optimizer(
            policy,
            config.learning_rate,
            plan.steps,
            config.lr_scheduler,
            config.warmup_ratio,
            config.weight_decay,
        )
        done = run.restore(policy, optimizer, schedule)
        run.results["base"] = base

        def validate(step):
            is_due = plan.due(config.eval_every, step)
            run.validate(step, is_due, lambda: evaluate(student, data["val"], teacher, config, run))

        # loop: one turn is one optimizer step
        validate(done)
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = plan.batch(step)
            given = rows, data["train"], teacher
            values = train_step(policy, step, *given, encoder.ends, config, run)
            check_step(policy, step, values, *given, config, world)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            seconds = time.perf_counter() - start
            values |= {"epoch": plan.epoch(step + 1), "seconds": seconds}
            values["tokens_per_second"] = values.pop("tokens") / seconds
            values["peak_memory_mb"] = peak_memory_mb(world.device)
            run.log(step + 1, values, echo=(step + 1) % config.log_every == 0)
            validate(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))

        # results
        run.restore_best()
        models.save_policy(policy, tokenizer, run.folder / "model", world)
        if questions:
            replies = {}
            for title, system, baked in columns:
                replies[title] = answer(student, asked[system], encoder, config, run, baked)
            write_examples(run, questions, replies, judge, others)
        describe_kept(run, others)
    return 0


if __name__ == "__main__":
    distributed.run(main)
