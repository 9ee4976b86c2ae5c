"""Sample a model's replies under a system prompt x0, for train_loop.py to bake into a LoRA.

Some of them are sampled under other prompts: what the model answers to these is to be kept.

    ./run_distributed.sh 2 baking
    torchrun --nproc_per_node=2 src/generate_data.py --num_questions 88 --batch_size 38 \\
        --num_sequences_per_question 25
    python src/generate_data.py --model_name Qwen/Qwen3-0.6B --x0_file x0.txt \\
        --question_dataset questions.jsonl                       # one process, no launcher

Guide: docs/prompt_baking.md. The rows are the same for any number of processes; a run that was
stopped or killed goes on with the same command.
"""

import prompt_baking.generate_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        settings.read
    )  # --help and mistakes in the settings end here, before torch is imported


import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from ddp_utils import (
    Stop,
    UserError,
    data,
    distributed,
    loggers,
    logps,
    lora,
    models,
    sampling,
)
from ddp_utils.chat_template import Encoder
from ddp_utils.checkpoints import check_writable, lock, move_aside
from ddp_utils.policy import Precision
from ddp_utils.run import code_digests
from ddp_utils.sampler import order
from prompt_baking import trajectories

TOGETHER = 16  # batches between two writes: a number of its own, for batches hang on nothing else
MEASURED = 2  # replies to each held-out question under each of other_prompts


def read_other_prompts(config, encoder, x0):
    """Return retain_prompts and other_prompts, name -> text; the latter are never trained on."""
    if trajectories.prompt(encoder, x0, "?") == trajectories.prompt(encoder, "", "?"):
        raise UserError(f"{config.x0_file}: the chat template does not show it; give another one")
    retained = {}
    if config.retain_prompts and config.retain_share:
        baked = {"the prompt that is baked": x0}
        path = config.retain_prompts
        retained = trajectories.read_prompts("--retain_prompts", path, encoder, baked)
    others = {}
    if config.other_prompts:
        used = {"the prompt that is baked": x0}
        used |= {f"{name} of retain_prompts": text for name, text in retained.items()}
        path = config.other_prompts
        others = trajectories.read_prompts("--other_prompts", path, encoder, used)
    return retained, others


def held_out(config, questions):
    """Return the part of some questions that is not trained on."""
    count = min(len(questions) - 1, max(1, round(config.val_split * len(questions))))
    numbers = order(len(questions), config.seed, "held out")[:count].tolist()
    return {questions[number]: None for number in numbers}  # a set in an order


def plan_rows(config, questions, unrelated, retained, others):
    """Return the rows of both files, without their replies, in the order of sampling.

    Of the rows to train on the share retain_share is sampled under one of `retained` instead of x0:
    these have the field `kept`, and the prompt as `system`. Rows under `others` go to the held-out
    questions alone. unrelated: what is asked under `retained`, and without any prompt; or [].
    """
    val = held_out(config, questions)
    val_of_unrelated = held_out(config, unrelated) if unrelated else []
    unrelated = [question for question in unrelated if question not in val_of_unrelated]
    retained = {**retained, **({"no prompt": ""} if unrelated else {})}
    names = [*retained] if config.retain_share else []
    rows = []
    count = 0  # of rows to train on
    replaced = 0  # of these
    for number, question in enumerate(questions):
        for sequence in range(config.num_sequences_per_question):
            row = {"question": question, "number": number, "sequence": sequence}
            row["held_out"] = question in val
            count += not row["held_out"]
            if names and not row["held_out"] and int(count * config.retain_share) > replaced:
                turn, name = divmod(replaced, len(names))
                row |= {"kept": names[name], "system": retained[names[name]]}
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


def mark_of(config, rows, prompts, model_config) -> str:
    """Hash what the rows depend on, the code included; not on the number of processes."""
    names = "batch_size max_sequence_length temperature top_p seed"
    names += " use_mixed_precision base_dtype chat_template_kwargs"
    facts = [getattr(config, name) for name in names.split()]
    facts += [models.digest_of_model(config.model_name, model_config), rows, prompts]
    facts += [torch.__version__]
    facts += sorted(code_digests().items())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def mark_in(path):
    """Return the mark of the first row of a file, None if there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path) as file:
        return json.loads(file.readline())["mark"]


def check_files(config, mark):
    """Raise Stop if a run with this mark has made both, UserError if they cannot be written."""
    paths = {"--traj_out_file": config.traj_out_file, "--val_out_file": config.val_out_file}
    train, val = map(Path, paths.values())
    if train.resolve() == val.resolve():
        raise UserError(f"--val_out_file: {val} is traj_out_file, too; give another name")
    if mark_in(train) == mark_in(val) == mark:
        raise Stop(f"{train} holds these replies already", 0)
    for flag, path in paths.items():
        check_writable(flag, Path(f"{path}.parts"))
        if os.path.isdir(path) or os.path.islink(path):
            raise UserError(f"{flag}: {path} is a folder or a link; give the name of a file")


class Parts:
    """What is sampled so far, group by group, in a folder beside the file that it will become."""

    def __init__(self, file, mark):
        self.folder = Path(f"{file}.{mark}.parts")
        self.file = self.folder / "replies.jsonl"
        self.mark = mark
        self.groups = []

    def open(self) -> int:
        """Lock the folder and take over the whole groups of a stopped run; return their number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        text = self.file.read_text() if self.file.exists() else ""
        text = text[: text.rfind("\n") + 1]  # a kill may cut the last line
        self.groups = [json.loads(line) for line in text.splitlines()]
        data.write_text(self.file, text)
        return len(self.groups)

    def add(self, replies):
        self.groups.append(replies)
        with open(self.file, "a") as file:
            file.write(json.dumps(replies) + "\n")


def sample(scorer, prompts, ends, config, world, bar, parts, done):
    """Sample a reply to each prompt but those of `done` groups; rank 0 keeps them in `parts`."""
    limits = config.max_sequence_length, config.batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    size = TOGETHER * config.batch_size  # prompts of a group
    starts = range(0, len(prompts), size)
    finished = min(done * size, len(prompts))
    if done and world.is_main:
        bar.say(f"goes on after {finished} of {len(prompts)} replies")
    bar.begin("Generating", len(starts), done)

    def poll():
        asked = torch.tensor([float(distributed.stop_requested(config.stop_after_minutes))])
        if distributed.all_sum(asked.to(world.device), world).item():
            after = f"stopped after {finished} of {len(prompts)} replies"
            raise Stop(f"{after}; the same command goes on", 85)

    for start in starts[done:]:
        begin = time.perf_counter()
        group = prompts[start : start + size]
        replies = sampling.generate(
            scorer, group, ends, world, spec, poll, first=start, keep_end=True
        )
        distributed.on_main(world, lambda replies=replies: parts.add(replies))
        finished += len(group)
        tokens = sum(map(len, replies))
        bar.advance(tokens_per_second=tokens / (time.perf_counter() - begin))
    poll()  # a launcher that was told to stop will not report what comes now
    bar.close()


def write(config, x0, rows, parts, tokenizer):
    """Write both files, each whole or not at all; return the lines to print."""
    texts = {False: [], True: []}  # whether held out -> lines
    for row, tokens in zip(rows, itertools.chain(*parts.groups), strict=True):
        reply = tokenizer.decode(tokens, skip_special_tokens=True)
        fields = row | {"x0": x0, "reply": reply, "tokens": tokens, "model": config.model_name}
        fields |= {"mark": parts.mark, "chat_template_kwargs": config.chat_template_kwargs}
        is_held_out = fields.pop("held_out")
        texts[is_held_out].append(json.dumps(fields) + "\n")
    lines = []
    # the training file last: check_files() looks at its mark
    for path, is_held_out in ((config.val_out_file, True), (config.traj_out_file, False)):
        with data.write_file(path) as file:
            file.write_text("".join(texts[is_held_out]))
            if Path(path).exists():  # of other settings, or someone else's
                lines.append(f"{path} was there: moved to {move_aside(Path(path))}")
        lines.append(f"{len(texts[is_held_out])} replies -> {path}")
    shutil.rmtree(parts.folder)
    return lines


def read_questions(config, path, limit=-1):
    """Return the questions of a file, 2 or more."""
    questions = trajectories.read_questions(
        path, limit, functools.partial(data.read, columns=config.columns)
    )
    if len(questions) < 2:
        raise UserError(f"{path}: one is held out; give 2 questions or more")
    return questions


def main(argv=None) -> int:
    world = distributed.whoami(argv=sys.argv)
    config = settings.read(argv)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)
    x0 = data.content(config.x0_file)
    if not x0.strip():
        raise UserError(f"{config.x0_file}: it is empty; give the prompt that is to be baked")
    path = config.question_dataset
    questions = read_questions(config, path, config.num_questions)
    unrelated = []
    if config.retain_questions:
        unrelated = read_questions(config, config.retain_questions)
        for question in set(questions) & set(unrelated):
            raise UserError(f"--retain_questions: {question!r:.60} is in {path}, too; leave it out")
    tokenizer = models.load_tokenizer(config.model_name)
    encoder = Encoder(tokenizer, config.chat_template, kwargs=config.chat_template_kwargs)
    retained, others = read_other_prompts(config, encoder, x0)
    rows = plan_rows(config, questions, unrelated, retained, others)
    prompt = functools.cache(functools.partial(trajectories.prompt, encoder))
    prompts = [prompt(row.get("system", x0), row["question"]) for row in rows]
    meta_model = lora.load(config.model_name, "auto", models.META)
    reply = [0] * config.max_sequence_length
    fed = [trajectories.Trajectory(ids, ids, reply, path, "") for ids in prompts]
    models.check_fit(meta_model, fed)
    mark = mark_of(config, rows, prompts, meta_model.config)
    parts = Parts(config.traj_out_file, mark)
    samples = config.num_sequences_per_question
    about = f"{len(questions) * samples} replies = {len(questions)} questions x {samples}"
    to_keep = sum("kept" in row and not row["held_out"] for row in rows)
    other = f"{to_keep} of them under {len(retained)} other prompts; "
    other += f"{len(rows) - len(questions) * samples} more to measure {len(others)} others"
    if config.check:
        distributed.choose_device(world, config.backend)
        check_files(config, mark)
        if world.is_main:
            print(about, other, f"run folder: {parts.folder}", sep="\n")
        return 0

    distributed.on_main(world, lambda: check_files(config, mark))
    done = distributed.on_main(world, parts.open)
    start = time.perf_counter()
    bar = loggers.Bar(world.is_main)
    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "none", config.base_dtype, mixed)
    model = lora.load(config.model_name, precision.weights, world.device)
    scorer = logps.Scorer(model, precision.autocast)
    ranks = f"{world.world_size} x {world.device.type}"
    header = {"ranks": ranks, "model": config.model_name, "prompt": x0.strip()}
    header |= {"replies": about, "retain": other}
    for name, text in header.items():
        if world.is_main:
            bar.say(loggers.row(name, data.printable(text)))
    try:
        sample(scorer, prompts, encoder.ends, config, world, bar, parts, done)
        lines = distributed.on_main(world, lambda: write(config, x0, rows, parts, tokenizer))
    finally:
        if world.is_main:
            parts.lock.release()
    if world.is_main:
        seconds = time.perf_counter() - start
        tokens = sum(map(len, itertools.chain(*parts.groups)))
        lines.append(f"{tokens} tokens, {seconds:.0f} s, {tokens / seconds:.0f} a second")
        sampled = [*itertools.chain(*parts.groups)]
        for row, reply in [*zip(rows, sampled, strict=True)][: 3 * samples : samples]:
            text = " ".join(tokenizer.decode(reply, skip_special_tokens=True).split())
            lines += [data.printable(row["question"])[:80], data.printable(f"  {text}")[:80]]
        print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    distributed.run(main)
