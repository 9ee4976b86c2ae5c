"""Sample a model's replies under a system prompt x0, for train_loop.py to bake into a LoRA.

    ./run_distributed.sh 2 baking
    torchrun --nproc_per_node=2 src/generate_data.py --num_questions 88 --batch_size 38 \\
        --num_sequences_per_question 25
    python src/generate_data.py --model_name Qwen/Qwen3-0.6B --x0_file x0.txt \\
        --question_dataset questions.jsonl                       # one process, no launcher

Guide: docs/prompt_baking.md. The rows are the same for any number of processes; a run that was
stopped or killed goes on with the same command.
"""

import ddp_utils.runs.preemption as preemption  # before torch, whose import takes seconds

import prompt_baking.generate_config as settings

if __name__ == "__main__":  # --help, or a mistake in the settings, ends here
    preemption.read_early(settings.read)


import contextlib
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
    distributed,
    files,
    jsonl,
    logps,
    models,
    optim,
    sampling,
)
from ddp_utils.readers import Encoder
from ddp_utils.readers.tables import DataFile
from ddp_utils.runs import checkpoint, environment, folder, progress
from ddp_utils.sampler import order
from prompt_baking import trajectories

TOGETHER = 16  # batches between two writes: a number of its own, for batches hang on nothing else


def mark_of(config, prompts, model_config) -> str:
    """Hash what the rows depend on, the code included; not on the number of processes."""
    names = "num_sequences_per_question batch_size max_sequence_length temperature top_p seed"
    names += " val_split use_mixed_precision base_dtype chat_template_kwargs"
    facts = [getattr(config, name) for name in names.split()]
    facts += [models.digest_of_model(config.model_name, model_config), prompts, torch.__version__]
    code = environment.code_of(
        "generate_data.py", "ddp_utils/*.py", "prompt_baking/trajectories.py"
    )
    facts += sorted(code.items())
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
        checkpoint.check_place(flag, Path(f"{path}.parts"))
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
        self.lock = folder.lock(self.folder)
        text = self.file.read_text() if self.file.exists() else ""
        text = text[: text.rfind("\n") + 1]  # a kill may cut the last line
        self.groups = [json.loads(line) for line in text.splitlines()]
        files.write_text(self.file, text)
        return len(self.groups)

    def add(self, replies):
        self.groups.append(replies)
        with open(self.file, "a") as file:
            file.write(json.dumps(replies) + "\n")


def sample(scorer, prompts, ends, config, world, bar, parts, done):
    """Sample replies to all questions but those of `done` groups; rank 0 keeps them in `parts`."""
    limits = config.max_sequence_length, config.batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    samples = config.num_sequences_per_question
    size = max(1, TOGETHER * config.batch_size // samples)  # questions of a group
    starts = range(0, len(prompts), size)
    finished = min(done * size, len(prompts))
    if done and world.is_main:
        bar.say(f"goes on after {finished} of {len(prompts)} questions")
    bar.of_run(len(prompts), 0)
    bar.begin("Generating", len(starts), done)

    def poll():
        asked = torch.tensor([float(preemption.asked(config.stop_after_minutes))])
        if distributed.all_sum(asked.to(world.device), world).item():
            after = f"stopped after {finished} of {len(prompts)} questions"
            raise Stop(f"{after}; the same command goes on", 85)

    for start in starts[done:]:
        begin = time.perf_counter()
        group = prompts[start : start + size]
        replies = sampling.generate(
            scorer, group, ends, world, spec, samples, poll, first=start, keep_end=True
        )
        distributed.on_main(world, lambda replies=replies: parts.add(replies))
        finished += len(group)
        tokens = sum(map(len, replies))
        bar.advance(tokens_per_second=tokens / (time.perf_counter() - begin))
    poll()  # a launcher that was told to stop will not report what comes now
    bar.close()


def write(config, x0, questions, parts, tokenizer):
    """Write both files, each whole or not at all; return the lines to print."""
    count = min(len(questions) - 1, max(1, round(config.val_split * len(questions))))
    held_out = set(order(len(questions), config.seed, "held out")[:count].tolist())
    rows = {False: [], True: []}  # whether held out -> lines
    for index, tokens in enumerate(itertools.chain(*parts.groups)):
        number, sequence = divmod(index, config.num_sequences_per_question)
        row = {"question": questions[number], "x0": x0, "number": number, "sequence": sequence}
        row["reply"] = tokenizer.decode(tokens, skip_special_tokens=True)
        row |= {"tokens": tokens, "model": config.model_name, "mark": parts.mark}
        row["chat_template_kwargs"] = config.chat_template_kwargs
        rows[number in held_out].append(json.dumps(row) + "\n")
    lines = []
    # the training file last: check_files() looks at its mark
    for path, held in ((config.val_out_file, True), (config.traj_out_file, False)):
        with files.replacing(path) as file:
            file.write_text("".join(rows[held]))
            if Path(path).exists():  # of other settings, or someone else's
                lines.append(f"{path} was there: moved to {folder.move_aside(Path(path))}")
        lines.append(f"{len(rows[held])} replies -> {path}")
    shutil.rmtree(parts.folder)
    return lines


def main(argv=None) -> int:
    world = distributed.whoami(argv=sys.argv)
    config = settings.read(argv, world.is_main)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)
    x0 = jsonl.content(config.x0_file).decode()
    if not x0.strip():
        raise UserError(f"{config.x0_file}: it is empty; give the prompt that is to be baked")
    path = config.question_dataset
    questions = trajectories.read_questions(
        path, config.num_questions, lambda path: DataFile(path, columns=config.columns).records()
    )
    if len(questions) < 2:
        raise UserError(f"{path}: one is held out; give 2 questions or more")
    tokenizer = models.load_tokenizer(config.model_name)
    encoder = Encoder(tokenizer, config.chat_template, kwargs=config.chat_template_kwargs)
    prompts = [trajectories.prompts(encoder, x0, question)[1] for question in questions]
    meta_model = models.load(config.model_name, "auto", models.META)
    reply = [0] * config.max_sequence_length
    rows = [trajectories.Trajectory(ids, ids, reply, path, "") for ids in prompts]
    models.check_fit(meta_model, rows)
    mark = mark_of(config, prompts, meta_model.config)
    parts = Parts(config.traj_out_file, mark)
    samples = config.num_sequences_per_question
    about = f"{len(questions) * samples} replies = {len(questions)} questions x {samples}"
    if config.check:
        distributed.choose_device(world, config.backend)
        check_files(config, mark)
        if world.is_main:
            print(about, f"run folder: {parts.folder}", sep="\n")
        return 0

    distributed.on_main(world, lambda: check_files(config, mark))
    done = distributed.on_main(world, parts.open)
    start = time.perf_counter()
    bar = progress.Bar(world.is_main)
    mixed = "auto" if config.use_mixed_precision else "no"
    precision = optim.Precision.choose(world.device, "none", config.base_dtype, mixed)
    model = models.load(config.model_name, precision.weights, world.device)
    scorer = logps.Scorer(model, precision.autocast)
    ranks = f"{world.world_size} x {world.device.type}"
    rows = {"ranks": ranks, "model": config.model_name, "prompt": x0.strip(), "replies": about}
    for name, text in rows.items():
        if world.is_main:
            bar.say(progress.row(name, jsonl.printable(text)))
    try:
        sample(scorer, prompts, encoder.ends, config, world, bar, parts, done)
        lines = distributed.on_main(world, lambda: write(config, x0, questions, parts, tokenizer))
    finally:
        if world.is_main:
            parts.lock.release()
    if world.is_main:
        seconds = time.perf_counter() - start
        tokens = sum(map(len, itertools.chain(*parts.groups)))
        lines.append(f"{tokens} tokens, {seconds:.0f} s, {tokens / seconds:.0f} a second")
        sampled = itertools.islice(itertools.chain(*parts.groups), 0, None, samples)
        for question, reply in zip(questions[:3], sampled, strict=False):
            text = " ".join(tokenizer.decode(reply, skip_special_tokens=True).split())
            lines += [jsonl.printable(question)[:80], jsonl.printable(f"  {text}")[:80]]
        print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    preemption.run(main)
