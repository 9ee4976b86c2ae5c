"""Sample a model's replies under a system prompt x0, for train_loop.py to bake into a LoRA.

    ./run_distributed.sh 2 baking
    torchrun --nproc_per_node=2 src/generate_data.py --num_questions 88 --batch_size 38 \\
        --num_sequences_per_question 25
    python src/generate_data.py --model_name Qwen/Qwen3-0.6B --x0_file x0.txt \\
        --question_dataset questions.jsonl                       # one process, no launcher

Some replies are sampled under other prompts, for which the model should not change. The rows are
the same for any number of processes. To resume a run that was stopped or killed, run the same
command again. Settings: src/prompt_baking/generate_config.py. Guide: docs/prompt_baking.md.
"""

import prompt_baking.generate_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(settings.read)  # --help and mistakes end here, before torch is imported


import functools
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from ddp_utils import Stop, UserError, data, distributed, logps, lora, models, sampling, terminal
from ddp_utils.chat_template import Encoder
from ddp_utils.checkpoints import check_writable, lock, move_aside
from ddp_utils.distributed import World
from ddp_utils.policy import Precision
from ddp_utils.sampler import order
from prompt_baking import trajectories
from prompt_baking.generate_config import Config

GROUP = 16  # batches between two writes; it does not change the replies
MEASURED = 2  # replies to each held-out question under each of other_prompts
Prompts = dict[str, str]  # name -> system prompt
Replies = list[list[int]]  # token ids

# --- settings and data ---------------------------------------------------------------------------


def read_questions(config: Config, path: str, limit: int = -1) -> list[str]:
    """Return at least two different questions, of which one will be held out."""
    read = functools.partial(data.read, columns=config.columns)
    questions = trajectories.read_questions(path, limit, read)
    if len(questions) < 2:
        raise UserError(f"{path}: one question (expected at least 2, since one is held out)")
    return questions


def read_unrelated_questions(config: Config, questions: list[str]) -> list[str]:
    """Return the questions for the retained prompts, if they have their own."""
    if not config.retain_questions:
        return []
    unrelated = read_questions(config, config.retain_questions)
    for question in set(questions) & set(unrelated):
        problem = f"{question!r:.60} is in question_dataset, too"
        raise UserError(f"--retain_questions: {problem}; remove it")
    return unrelated


def read_other_prompts(config: Config, encoder: Encoder, x0: str) -> tuple[Prompts, Prompts]:
    """Return retain_prompts and other_prompts; the latter are never trained on."""
    if trajectories.prompt(encoder, x0, "?") == trajectories.prompt(encoder, "", "?"):
        problem = "the chat template ignores this system prompt"
        raise UserError(f"{config.x0_file}: {problem}; use another one, or another template")
    used = {"the prompt that is baked": x0}
    retained: Prompts = {}
    others: Prompts = {}
    read = trajectories.read_prompts
    if config.retain_prompts and config.retain_share:
        retained = read("--retain_prompts", config.retain_prompts, encoder, used)
        used |= {f"{name} of retain_prompts": text for name, text in retained.items()}
    if config.other_prompts:
        others = read("--other_prompts", config.other_prompts, encoder, used)
    return retained, others


def held_out(config: Config, questions: list[str]) -> list[str]:
    """Return the questions that are not trained on: the fraction val_split, at least one."""
    count = min(len(questions) - 1, max(1, round(config.val_split * len(questions))))
    numbers = order(len(questions), config.seed, "held out")[:count].tolist()
    return [questions[number] for number in numbers]


def plan_rows(
    config: Config, questions: list[str], unrelated: list[str], retained: Prompts, others: Prompts
) -> list[dict]:
    """Return the rows of both files, without their replies, in the order of sampling.

    The fraction retain_share of the training rows is sampled under one of `retained` instead of x0;
    these have the field `kept` (the prompt's name) and the prompt as `system`. The held-out
    questions are also asked under `others`. unrelated: if there are any, they are asked under
    `retained`, and without a prompt.
    """
    val = held_out(config, questions)
    val_of_unrelated = held_out(config, unrelated) if unrelated else []
    unrelated = [question for question in unrelated if question not in val_of_unrelated]
    if unrelated:
        retained = {**retained, "no prompt": ""}
    names = [*retained] if config.retain_share else []
    rows = []
    trained = 0  # rows so far
    replaced = 0  # of these
    for number, question in enumerate(questions):
        for sequence in range(config.num_sequences_per_question):
            row: dict[str, Any] = {"question": question, "number": number, "sequence": sequence}
            row["held_out"] = question in val
            trained += not row["held_out"]
            is_due = int(trained * config.retain_share) > replaced
            if names and is_due and not row["held_out"]:
                turn, index = divmod(replaced, len(names))
                row |= {"kept": names[index], "system": retained[names[index]]}
                if unrelated:
                    row["question"] = unrelated[turn % len(unrelated)]
                replaced += 1
            rows.append(row)
    measured = [(question, others) for question in val]
    measured += [(question, {"no prompt": ""}) for question in val_of_unrelated]
    for question, prompts in measured:
        for name, system in prompts.items():
            for sequence in range(MEASURED):
                row = {"question": question, "sequence": sequence, "held_out": True}
                rows.append(row | {"kept": name, "system": system})
    return rows


# --- replies that are sampled so far -------------------------------------------------------------


def hash_of(config: Config, rows: list[dict], prompts: Replies, model_config: Any) -> str:
    """Return a hash of everything that the replies depend on, except the number of processes."""
    limits = config.batch_size, config.max_sequence_length
    facts: list[Any] = [*limits, config.temperature, config.top_p]
    facts += [config.seed, config.use_mixed_precision, config.base_dtype]
    facts += [config.chat_template_kwargs, rows, prompts, torch.__version__]
    facts += [models.digest_of_model(config.model_name, model_config)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def hash_in(path: Path) -> str | None:
    """Return the hash in the first row of a file, None if there is none."""
    try:
        with open(path) as file:
            return json.loads(file.readline())["settings_hash"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_files(config: Config, settings_hash: str) -> None:
    """Raise Stop if both files are finished, UserError if they cannot be written."""
    train, val = Path(config.traj_out_file), Path(config.val_out_file)
    if train.resolve() == val.resolve():
        raise UserError(f"--val_out_file: {val} is also the traj_out_file; use another name")
    if hash_in(train) == hash_in(val) == settings_hash:
        raise Stop(f"{train}: these replies are already finished (same settings and data)", 0)
    for flag, path in (("--traj_out_file", train), ("--val_out_file", val)):
        check_writable(flag, Path(f"{path}.parts"))
        if path.is_dir() or path.is_symlink():
            raise UserError(f"{flag}: {path} is a folder or a link; use the name of a file")


def read_groups(file: Path) -> list[Replies]:
    """Return the complete groups, one per line, and remove a line that was cut by a kill."""
    text = file.read_text() if file.exists() else ""
    text = text[: text.rfind("\n") + 1]
    data.write_text(file, text)
    return [json.loads(line) for line in text.splitlines()]


def append_group(file: Path, group: Replies) -> None:
    """Add a group of replies to the file of complete groups."""
    with open(file, "a") as stream:
        stream.write(json.dumps(group) + "\n")


# --- sampling ------------------------------------------------------------------------------------


def sample(
    scorer: logps.Scorer, prompts: Replies, ends: Any, config: Config, world: World, file: Path
) -> Replies:
    """Return a reply to each prompt; file: of the groups that are complete."""
    limits = config.max_sequence_length, config.batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    size = GROUP * config.batch_size
    starts = range(0, len(prompts), size)
    groups = distributed.on_main(world, lambda: read_groups(file))
    replies: Replies = sum(groups, [])
    bar = terminal.Bar(world.is_main)
    if groups and world.is_main:
        bar.say(f"resumed after {len(replies)} of {len(prompts)} replies")
    bar.begin("Generating", len(starts), len(groups))

    def poll() -> None:
        vote = torch.tensor([float(distributed.stop_requested(config.stop_after_minutes))])
        if distributed.all_sum(vote.to(world.device), world).item():
            state = f"stopped after {len(replies)} of {len(prompts)} replies"
            raise Stop(f"{state}; run the same command to resume", 85)

    for start in starts[len(groups) :]:
        begin = time.perf_counter()
        part = prompts[start : start + size]
        group = sampling.generate(scorer, part, ends, world, spec, poll, start, keep_end=True)
        distributed.on_main(world, functools.partial(append_group, file, group))
        replies += group
        bar.advance(tokens_per_second=sum(map(len, group)) / (time.perf_counter() - begin))
    poll()
    bar.close()
    return replies


def write(path: str, is_held_out: bool, rows: list[dict]) -> None:
    """Write the rows that are held out, or those that are not, and print their number."""
    if Path(path).exists():  # from other settings, or not from this script
        print(f"{path} already exists: moved to {move_aside(Path(path))}")
    lines = []
    for row in rows:
        fields = dict(row)
        if fields.pop("held_out") == is_held_out:
            lines.append(json.dumps(fields) + "\n")
    data.write_text(path, "".join(lines))
    print(f"{len(lines)} replies -> {path}")


# --- main ----------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    # setup
    world = distributed.whoami()
    config = settings.read(argv)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    x0 = data.content(config.x0_file)
    if not x0.strip():
        raise UserError(f"{config.x0_file}: the file is empty (expected a system prompt)")
    questions = read_questions(config, config.question_dataset, config.num_questions)
    unrelated = read_unrelated_questions(config, questions)
    tokenizer = models.load_tokenizer(config.model_name)
    encoder = Encoder(tokenizer, config.chat_template, kwargs=config.chat_template_kwargs)
    retained, others = read_other_prompts(config, encoder, x0)
    rows = plan_rows(config, questions, unrelated, retained, others)
    prompt = functools.cache(functools.partial(trajectories.prompt, encoder))
    prompts = [prompt(row.get("system", x0), row["question"]) for row in rows]
    meta_model = lora.load(config.model_name, "auto", models.META)
    longest = [0] * config.max_sequence_length
    path = config.question_dataset
    examples = [trajectories.Trajectory(ids, ids, longest, path, "") for ids in prompts]
    models.check_fit(meta_model, examples)
    settings_hash = hash_of(config, rows, prompts, meta_model.config)
    folder = Path(f"{config.traj_out_file}.{settings_hash}.parts")
    samples = config.num_sequences_per_question
    count = len(questions) * samples
    kept = sum("kept" in row and not row["held_out"] for row in rows)
    about = f"{count} replies = {len(questions)} questions x {samples}"
    retain = f"{kept} of them under {len(retained)} other prompts; "
    retain += f"{len(rows) - count} more to measure {len(others)} others"
    if config.check:
        distributed.choose_device(world, config.backend)
        check_files(config, settings_hash)
        if world.is_main:
            print(about, retain, sep="\n")
        return 0

    def begin() -> None:
        check_files(config, settings_hash)
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(lock(folder))
        header = {"ranks": f"{world.world_size} x {world.device.type}", "model": config.model_name}
        header |= {"prompt": x0.strip(), "replies": about, "retain": retain}
        for name, text in header.items():
            print(terminal.row(name, data.printable(text)), flush=True)

    locks: list[Any] = []  # of rank 0
    distributed.on_main(world, begin)

    # model
    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "none", config.base_dtype, mixed)
    model = lora.load(config.model_name, precision.weights, world.device)
    scorer = logps.Scorer(model, precision.autocast)

    # loop
    try:
        replies = sample(scorer, prompts, encoder.ends, config, world, folder / "replies.jsonl")
    finally:
        for held in locks:
            held.release()

    # results
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    for row, reply, tokens in zip(rows, texts, replies, strict=True):
        row |= {"x0": x0, "reply": reply, "tokens": tokens, "model": config.model_name}
        row["settings_hash"] = settings_hash
        row["chat_template_kwargs"] = config.chat_template_kwargs

    def finish() -> None:
        write(config.val_out_file, True, rows)
        write(config.traj_out_file, False, rows)
        shutil.rmtree(folder)
        for row in rows[: 3 * samples : samples]:
            print(data.printable(f"{row['question']} -> {' '.join(row['reply'].split())}")[:80])

    distributed.on_main(world, finish)
    return 0


if __name__ == "__main__":
    distributed.run(main)
