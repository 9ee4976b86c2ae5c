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
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ddp_utils import Stop, UserError, data, distributed, terminal
from ddp_utils import checkpoints as files
from ddp_utils.distributed import World
from ddp_utils.policy import Precision
from ddp_utils.sampler import order
from lm import logps, model_files, models, sampling
from lm.chat_template import Encoder, today
from prompt_baking import trajectories
from prompt_baking.generate_config import Config

ANY_DAY = "2000-01-01"  # of prompts in the hash, which is the same on the day of a resumed start
MEASURED = 2  # replies to each held-out question under each of other_prompts
Prompts = dict[str, str]  # name -> system prompt
Replies = list[list[int]]  # token ids

# --- settings and data ---------------------------------------------------------------------------


def read_other_prompts(config: Config, encoder: Encoder, x0: str) -> tuple[Prompts, Prompts]:
    """Return retain_prompts and other_prompts; the latter are never trained on."""
    used = {"the prompt that is baked": x0}
    retained: Prompts = {}
    others: Prompts = {}
    if config.retain_prompts and config.retain_share:
        retained = trajectories.read_prompts(config.retain_prompts, encoder, used)
        used |= {f"{name} of retain_prompts": text for name, text in retained.items()}
    if config.other_prompts:
        others = trajectories.read_prompts(config.other_prompts, encoder, used)
    return retained, others


def held_out(config: Config, questions: list[str]) -> list[str]:
    """Return the questions that are not trained on: the fraction val_split, at least one."""
    count = min(len(questions) - 1, max(1, round(config.val_split * len(questions))))
    numbers = order(len(questions), config.seed, "held out")[:count].tolist()
    return [questions[number] for number in numbers]


def plan_rows(
    config: Config, questions: list[str], retained: Prompts, others: Prompts
) -> list[dict[str, Any]]:
    """Return the rows of both files, without their replies, in the order of sampling.

    The fraction retain_share of the training rows is sampled under one of `retained` instead of x0;
    these have the field `kept` (the prompt's name) and the prompt as `system`. The held-out
    questions are also asked under `others`.
    """
    val = dict.fromkeys(held_out(config, questions))
    names = [*retained]
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
                name = names[replaced % len(names)]
                row |= {"kept": name, "system": retained[name]}
                replaced += 1
            rows.append(row)
    for question in val:
        for name, system in others.items():
            for sequence in range(MEASURED):
                row = {"question": question, "sequence": sequence, "held_out": True}
                rows.append(row | {"kept": name, "system": system})
    return rows


def encode_prompts(encoder: Encoder, x0: str, rows: list[dict]) -> Replies:
    """Return the token ids of the prompt of each row."""
    prompt = functools.cache(functools.partial(trajectories.prompt, encoder))
    return [prompt(row.get("system", x0), row["question"]) for row in rows]


# --- files ---------------------------------------------------------------------------------------


def first_day(folder: Path) -> str:
    """Return the day on which sampling into a folder has begun; today if it begins now."""
    file = folder / "date.json"
    if not file.exists():
        data.write_json(file, today())
    return json.loads(file.read_text())


def hash_of(config: Config, rows: list[dict], prompts: Replies, encoder: Encoder) -> str:
    """Return a hash of everything that the replies depend on, except the number of processes."""
    limits = config.batch_size, config.max_sequence_length
    facts: list[Any] = [*limits, config.temperature, config.top_p]
    facts += [config.seed, config.use_mixed_precision, config.base_dtype]
    facts += [config.chat_template_kwargs, rows, prompts, torch.__version__]
    facts += [encoder.template_digest, encoder.ends]
    facts += [models.digest_of_model(config.model_name)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def is_finished(path: str, settings_hash: str) -> bool:
    """Return whether the first row of a file was made with these settings."""
    try:
        with open(path) as file:
            return json.loads(file.readline())["settings_hash"] == settings_hash
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_files(config: Config, settings_hash: str) -> None:
    """Raise Stop if both files are finished, UserError if they cannot be written."""
    paths = {"--traj_out_file": config.traj_out_file, "--val_out_file": config.val_out_file}
    train, val = paths.values()
    if Path(train).resolve() == Path(val).resolve():
        raise UserError(f"--val_out_file: {val} is also the traj_out_file; use another name")
    if is_finished(train, settings_hash) and is_finished(val, settings_hash):
        raise Stop(f"{train}: these replies are already finished (same settings and data)", 0)
    for flag, path in paths.items():
        if not path or Path(path).is_dir() or Path(path).is_symlink():
            raise UserError(f"{flag}: {path!r} is a folder or a link; use the name of a file")
        files.check_writable(flag, Path(f"{path}.parts"))


def write(path: str, is_held_out: bool, rows: list[dict]) -> None:
    """Write the rows that are held out, or those that are not, and print their number."""
    if Path(path).exists():  # from other settings, or not from this script
        print(f"{path} already exists: moved to {files.move_aside(Path(path))}")
    lines = []
    for row in rows:
        fields = dict(row)
        if fields.pop("held_out") == is_held_out:
            lines.append(json.dumps(fields) + "\n")
    data.write_text(path, "".join(lines))
    print(f"{len(lines)} replies -> {path}")


# --- main ----------------------------------------------------------------------------------------


def sample(
    scorer: logps.Scorer,
    prompts: Replies,
    encoder: Encoder,
    config: Config,
    world: World,
    folder: Path,
) -> Replies:
    """Return a reply to each prompt; each batch is stored in a file of the folder."""
    limits = config.max_sequence_length, config.batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    ends = sampling.ends_of(scorer, encoder)
    title = f"sampling {len(prompts)} replies"
    bar = terminal.Bar(world.is_main)

    def is_asked() -> bool:
        return distributed.stop_requested(config.stop_after_minutes)

    def phase_of(parts: int, done: int) -> terminal.Phase:
        def poll() -> None:
            vote = torch.tensor([float(is_asked())], device=world.device)
            if distributed.all_sum(vote, world).item():
                state = f"stopped after {phase.done} of {parts} parts"
                raise Stop(f"{state}; run the same command to resume", 85)

        if done and world.is_main:
            bar.say(f"resumed after {done} of {parts} parts")
        phase = terminal.Phase(title, bar, poll, is_asked, parts, done)
        return phase

    with contextlib.closing(bar):  # otherwise an error would be printed behind it
        path, how = folder / "replies.safetensors", (scorer, prompts, ends, world, spec)
        return sampling.generate_once(path, *how, phase_of, keep_end=True)


@cli.located()
def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = settings.read(argv)
    world = distributed.start(config)

    # data
    x0 = data.content(config.x0_file)
    if not x0.strip():
        raise UserError(f"{config.x0_file}: the file is empty (expected a system prompt)")
    x0 += "" if x0[-1].isspace() else "\n"  # without a template, the question follows it
    path = config.question_dataset
    questions = trajectories.read_questions(path, config.num_questions, config.columns)
    if len(questions) < 2:
        raise UserError(f"{path}: one question (expected at least 2, since one is held out)")
    tokenizer = models.load_tokenizer(config.model_name)
    kwargs = config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, kwargs=kwargs, date=ANY_DAY)
    trajectories.check_turns(config.x0_file, [x0], encoder, "system")
    trajectories.check_turns(path, questions, encoder)
    unknown = model_files.unknown(tokenizer, [x0, *questions[:1000]])
    for warning in model_files.describe_unknown(path, unknown):
        distributed.warn(warning)
    retained, others = read_other_prompts(config, encoder, x0)
    rows = plan_rows(config, questions, retained, others)
    prompts = encode_prompts(encoder, x0, rows)
    meta_model = models.load(config.model_name, "auto", models.META)
    longest = [0] * config.max_sequence_length
    examples = [trajectories.Trajectory(ids, ids, longest, path, "") for ids in prompts]
    models.check_fit(meta_model, tokenizer, examples, "a smaller --max_sequence_length")
    settings_hash = hash_of(config, rows, prompts, encoder)
    count = len(questions) * config.num_sequences_per_question
    kept = sum("kept" in row and not row["held_out"] for row in rows)
    about = f"{count} replies = {len(questions)} questions x {config.num_sequences_per_question}, "
    about += f"{kept} of them under {len(retained)} other prompts; "
    about += f"{len(rows) - count} more to measure {len(others)} others"
    if config.check:
        check_files(config, settings_hash)
        if world.is_main:
            print(about)
        return 0

    folder = Path(f"{config.traj_out_file}.{settings_hash}.parts")

    def begin() -> Any:
        if not world.is_main:
            return None
        check_files(config, settings_hash)
        folder.mkdir(parents=True, exist_ok=True)
        print(terminal.row("ranks", f"{world.world_size} x {world.device.type}"))
        print(terminal.row("prompt", data.printable(x0.strip())))
        print(terminal.row("replies", f"{about}; by {config.model_name}"), flush=True)
        return files.lock(folder)

    lock = distributed.on_each(world, begin)
    if encoder.date:
        encoder.date = distributed.on_main(world, lambda: first_day(folder))
        prompts = encode_prompts(encoder, x0, rows)
        distributed.on_main(world, lambda: print(*encoder.notes))

    # model
    mixed = "auto" if config.use_mixed_precision else "no"
    precision = Precision.choose(world.device, "none", config.base_dtype, mixed)
    model = models.load(config.model_name, precision.weights, world.device)
    scorer = logps.Scorer(model, precision.autocast)

    # replies
    def finish(replies: Replies) -> None:
        for row, reply, tokens in zip(rows, encoder.texts(replies), replies, strict=True):
            row |= {"x0": x0, "reply": reply, "tokens": tokens, "model": config.model_name}
            row["settings_hash"] = settings_hash
            row["chat_template_kwargs"] = config.chat_template_kwargs
            row |= {"chat_template": config.chat_template, "template": encoder.template_digest}
            if encoder.date:
                row["template_date"] = encoder.date
        ends = sampling.ends_of(scorer, encoder)
        cut = sum(tokens[-1] not in ends for tokens in replies)
        if 10 * cut > len(replies):
            problem = f"{cut} of {len(replies)} replies are cut at --max_sequence_length"
            distributed.warn(f"warning: {problem}; a larger value takes more time")
        write(config.val_out_file, True, rows)
        write(config.traj_out_file, False, rows)
        shutil.rmtree(folder)

    try:
        replies = sample(scorer, prompts, encoder, config, world, folder)
        distributed.on_main(world, lambda: finish(replies))
    finally:
        if lock:
            lock.release()
    return 0


if __name__ == "__main__":
    distributed.run(main)
