"""The example replies of a baked model: with and without prompts, side by side, and judged.

Other prompts are system prompts under which the baked model should remain the base model.
"""

import collections
import functools
from typing import Any, NamedTuple

from ddp_utils import terminal
from ddp_utils.run import Run
from lm import sampling
from lm.chat_template import Encoder
from lm.judge import Judge, as_text, difference
from prompt_baking import trajectories
from prompt_baking.distillation import Student
from prompt_baking.train_config import Config

FIX = "use a larger --retain_share, or more --retain_prompts like it"
MIN_OBEYED = 0.9  # of the base model's rate at which another prompt is obeyed
Texts = dict[str, list[str]]  # title of a column -> its replies


class Column(NamedTuple):
    """Replies to all questions from one model under one system prompt."""

    title: str
    system: str
    baked: bool  # with the LoRA
    other: str = ""  # name of the system prompt if it is one of other_prompts

    def metric(self, score: str) -> str:
        """Return the name of the mean of a judge's score."""
        if self.other:
            return f"kept/{score or 'score'}{'' if self.baked else '_base'}/{self.other}"
        return f"judge/{self.title}/{score}".rstrip("/")


def columns_of(x0: str, others: dict[str, str]) -> list[Column]:
    """Return the columns of the example replies; others: name -> system prompt."""
    columns = [Column("base", "", False), Column("prompted", x0, False), Column("baked", "", True)]
    for name, system in others.items():
        columns.append(Column(f"{name}, base", system, False, name))
        columns.append(Column(f"{name}, baked", system, True, name))
    return columns


def sample(
    student: Student,
    step: int,
    columns: list[Column],
    questions: list[str],
    encoder: Encoder,
    config: Config,
    run: Run,
) -> Texts:
    """Return the replies of all columns to the questions; step: of the weights."""
    limits = config.max_new_tokens, config.sample_batch_size
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits, config.seed)
    ends = sampling.ends_of(student, encoder)
    texts = {}
    for number, column in enumerate(columns):
        prompts = [trajectories.prompt(encoder, column.system, text) for text in questions]
        path = run.folder / f"parts/after-step-{step:08d}-{number}.safetensors"
        phase = functools.partial(run.phase, f"sampling {len(prompts)} replies: {column.title}")
        with student.adapter(column.baked):
            how = student, prompts, ends, run.world, spec, phase
            ids = sampling.generate_once(path, *how)
        texts[column.title] = [text.strip() for text in encoder.texts(ids)]
    return texts


def judged(
    judge: Judge, columns: list[Column], questions: list[str], replies: Texts
) -> dict[str, float]:
    """Return the judge's mean scores.

    A score with the name of another prompt measures whether replies obey that prompt.
    """
    others = {column.other for column in columns if column.other}
    values = collections.defaultdict(list)
    for column in columns:
        for question, text in zip(questions, replies[column.title], strict=True):
            for score, value in judge(question, text).items():
                name = "obeyed" if column.other and score == column.other else score
                if name not in others:
                    values[column.metric(name)].append(value)
    means = {name: sum(scores) / len(scores) for name, scores in values.items()}
    for name in ("kept/obeyed", "kept/obeyed_base"):
        of_prompts = [means[metric] for metric in means if metric.startswith(f"{name}/")]
        if of_prompts:
            means[name] = sum(of_prompts) / len(of_prompts)
    return means


def write(run: Run, questions: list[str], replies: Texts, means: dict[str, Any]) -> None:
    """Write the replies side by side, for people and as data, and print the judge's means."""
    rows = [{"question": question} for question in questions]
    for title, texts in replies.items():
        for row, text in zip(rows, texts, strict=True):
            row[title] = text
    run.write_json("examples.json", {"test": rows})
    run.write_text("distributed_output_test.txt", as_text(rows, means))
    run.results["test"] = {"count": len(questions), **means}
    for name, value in means.items():
        if name.startswith("judge/"):
            run.say(terminal.row("judge", f"{name.removeprefix('judge/')} {value:.2f}"))


def describe_kept(run: Run, others: dict[str, str]) -> None:
    """Print how well the base model is kept under each of other_prompts; warn if it is not."""
    test = run.results.get("test", {})
    for name in others:
        kl = run.results["val"][f"kept/kl/{name}"]
        text = f"{name}: kl {kl:.4f}"
        is_lost = False
        if f"kept/obeyed/{name}" in test:
            obeyed, by_base = test[f"kept/obeyed/{name}"], test[f"kept/obeyed_base/{name}"]
            text += f", obeyed {obeyed:.2f} (base {by_base:.2f})"
            if max(obeyed, by_base) <= 1:  # fractions; few replies prove little
                is_lost = difference(obeyed, by_base, test["count"], MIN_OBEYED)[1] < 0
        run.say(terminal.row("kept", text))
        if is_lost:
            problem = f"{name} is obeyed less often than by the base model"
            run.warn(f"warning: {problem} ({obeyed:.2f} of {by_base:.2f}); {FIX}")
