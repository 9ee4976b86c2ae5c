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


import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from ddp_utils import Stop, UserError, distributed, loggers, logps, lora, models, sampling
from ddp_utils import data as data_files
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

# --- settings and data ---------------------------------------------------------------------------


def read_questions(config: Config, path: str, limit: int = -1) -> list[str]:
    """Return at least two different questions, of which one will be held out."""
    read = functools.partial(data_files.read, columns=config.columns)
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
        problem = f"{question!r:.60} is in {config.question_dataset}, too"
        raise UserError(f"--retain_questions: {problem}; remove it")
    return unrelated


def read_other_prompts(config: Config, encoder: Encoder, x0: str) -> tuple[Prompts, Prompts]:
    """Return retain_prompts and other_prompts; the latter are never trained on."""
    if trajectories.prompt(encoder, x0, "?") == trajectories.prompt(encoder, "", "?"):
        problem = "the chat template ignores this system prompt"
        raise UserError(f"{config.x0_file}: {problem}; use another one, or another template")
    used = {"the prompt that is baked": x0}
    retained = {}
    if config.retain_prompts and config.retain_share:
        path = config.retain_prompts
        retained = trajectories.read_prompts("--retain_prompts", path, encoder, used)
        used |= {f"{name} of retain_prompts": text for name, text in retained.items()}
    others = {}
    if config.other_prompts:
        path = config.other_prompts
        others = trajectories.read_prompts("--other_prompts", path, encoder, used)
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


def hash_of(config: Config, rows: list[dict], prompts: list[list[int]], model_config: Any) -> str:
    """Return a hash of everything that the replies depend on, except the number of processes."""
    facts: list[Any] = [
        config.batch_size,
        config.max_sequence_length,
        config.temperature,
        config.top_p,
    ]
    facts += [config.seed, config.use_mixed_precision, config.base_dtype]
    facts += [config.chat_template_kwargs, rows, prompts, torch.__version__]
    facts += [models.digest_of_model(config.model_name, model_config)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def hash_in(path: Path) -> str | None:
    """Return the hash in the first row of a file, None if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path) as file:
        return json.loads(file.readline())["settings_hash"]
    return None


def check_files(config: Config, settings_hash: str) -> None:
    """Raise Stop if both files are finished, UserError if they cannot be written."""
    paths = {"--traj_out_file": config.traj_out_file, "--val_out_file": config.val_out_file}
    train, val = map(Path, paths.values())
    if train.resolve() == val.resolve():
        raise UserError(f"--val_out_file: {val} is also the traj_out_file; use another name")
    if hash_in(train) == hash_in(val) == settings_hash:
        raise Stop(f"{train}: these replies are already finished (same settings and data)", 0)
    for flag, path in paths.items():
        check_writable(flag, Path(f"{path}.parts"))
        if os.path.isdir(path) or os.path.islink(path):
            raise UserError(f"{flag}: {path} is a folder or a link; use the name of a file")


class PartialReplies:
    """The replies so far, in groups, in a folder beside the file that they will become."""

    def __init__(self, path: str, settings_hash: str):
        self.folder = Path(f"{path}.{settings_hash}.parts")
        self.file = self.folder / "replies.jsonl"
        self.settings_hash = settings_hash
        self.groups: list[list[list[int]]] = []

    def open(self) -> int:
        """Lock the folder, and read the complete groups in it; return their number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        text = self.file.read_text() if self.file.exists() else ""
        text = text[: text.rfind("\n") + 1]  # the last line may be cut
        self.groups = [json.loads(line) for line in text.splitlines()]
        data_files.write_text(self.file, text)
        return len(self.groups)

    def append(self, group: list[list[int]]) -> None:
        """Add the token ids of a group of replies."""
        self.groups.append(group)
        with open(self.file, "a") as file:
            file.write(json.dumps(group) + "\n")

    def replies(self) -> list[list[int]]:
        """Return the token ids of all replies so far."""
        return [*itertools.chain(*self.groups)]


# --- sampling ------------------------------------------------------------------------------------


def sample(
    scorer: logps.Scorer,
    prompts: list[list[int]],
    ends: Any,
    config: Config,
    world: World,
    parts: PartialReplies,
    done: int,
) -> None:
    """Sample a reply to each prompt, except those of the first `done` groups, into `parts`."""
    limits = config.max_sequence_length, config.batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    size = GROUP * config.batch_size
    starts = range(0, len(prompts), size)
    finished = min(done * size, len(prompts))
    bar = loggers.Bar(world.is_main)
    if done and world.is_main:
        bar.say(f"resumed after {finished} of {len(prompts)} replies")
    bar.begin("Generating", len(starts), done)

    def poll() -> None:
        vote = torch.tensor([float(distributed.stop_requested(config.stop_after_minutes))])
        if distributed.all_sum(vote.to(world.device), world).item():
            state = f"stopped after {finished} of {len(prompts)} replies"
            raise Stop(f"{state}; run the same command to resume", 85)

    for start in starts[done:]:
        begin = time.perf_counter()
        group = prompts[start : start + size]
        replies = sampling.generate(
            scorer, group, ends, world, spec, poll, first=start, keep_end=True
        )
        distributed.on_main(world, functools.partial(parts.append, replies))
        finished += len(group)
        tokens = sum(map(len, replies))
        bar.advance(tokens_per_second=tokens / (time.perf_counter() - begin))
    poll()
    bar.close()


def write(
    config: Config, x0: str, rows: list[dict], parts: PartialReplies, tokenizer: Any
) -> list[str]:
    """Write both files atomically; return lines to print."""
    texts: dict[bool, list[str]] = {False: [], True: []}  # whether held out -> lines
    for row, tokens in zip(rows, parts.replies(), strict=True):
        reply = tokenizer.decode(tokens, skip_special_tokens=True)
        fields = row | {"x0": x0, "reply": reply, "tokens": tokens, "model": config.model_name}
        fields |= {"settings_hash": parts.settings_hash}
        fields |= {"chat_template_kwargs": config.chat_template_kwargs}
        is_held_out = fields.pop("held_out")
        texts[is_held_out].append(json.dumps(fields) + "\n")
    lines = []
    for path, is_held_out in ((config.val_out_file, True), (config.traj_out_file, False)):
        if Path(path).exists():  # from other settings, or not from this script
            lines.append(f"{path} already exists: moved to {move_aside(Path(path))}")
        data_files.write_text(path, "".join(texts[is_held_out]))
        lines.append(f"{len(texts[is_held_out])} replies -> {path}")
    shutil.rmtree(parts.folder)
    return lines


def examples(rows: list[dict], replies: list[list[int]], tokenizer: Any) -> list[str]:
    """Return some questions and their replies as lines of at most 80 characters."""
    lines = []
    for row, reply in zip(rows, replies, strict=True):
        text = " ".join(tokenizer.decode(reply, skip_special_tokens=True).split())
        for line in (row["question"], f"  {text}"):
            lines.append(data_files.printable(line)[:80])
    return lines


# --- main ----------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    # setup
    world = distributed.whoami()
    config = settings.read(argv)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    x0 = data_files.content(config.x0_file)
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
    reply = [0] * config.max_sequence_length
    path = config.question_dataset
    models.check_fit(
        meta_model, [trajectories.Trajectory(ids, ids, reply, path, "") for ids in prompts]
    )
    settings_hash = hash_of(config, rows, prompts, meta_model.config)
    parts = PartialReplies(config.traj_out_file, settings_hash)
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
            print(about, retain, f"run folder: {parts.folder}", sep="\n")
        return 0

    distributed.on_main(world, lambda: check_files(config, settings_hash))
    done = distributed.on_main(world, parts.open)
    start = time.perf_counter()
    header = {"ranks": f"{world.world_size} x {world.device.type}", "model": config.model_name}
    header |= {"prompt": x0.strip(), "replies": about, "retain": retain}
    if world.is_main:
        for name, text in header.items():
            print(loggers.row(name, data_files.printable(text)), flush=True)

    # model
    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "none", config.base_dtype, mixed)
    model = lora.load(config.model_name, precision.weights, world.device)
    scorer = logps.Scorer(model, precision.autocast)

    # loop, and results
    try:
        sample(scorer, prompts, encoder.ends, config, world, parts, done)
        lines = distributed.on_main(world, lambda: write(config, x0, rows, parts, tokenizer))
    finally:
        if world.is_main:
            parts.lock.release()
    if world.is_main:
        seconds = time.perf_counter() - start
        replies = parts.replies()
        tokens = sum(map(len, replies))
        lines.append(f"{tokens} tokens, {seconds:.0f} s, {tokens / seconds:.0f} tokens/s")
        shown = slice(0, 3 * samples, samples)
        print(*lines, *examples(rows[shown], replies[shown], tokenizer), sep="\n")
    return 0


if __name__ == "__main__":
    distributed.run(main)
