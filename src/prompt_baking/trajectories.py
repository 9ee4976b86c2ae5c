"""Replies of a model under a system prompt x0, and the questions with and without x0.

B rows, N tokens of all replies, D width, V vocabulary size.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ddp_utils import UserError, data, logps
from ddp_utils.chat_template import Encoder

QUESTION = ("question", "prompt", "turns", "instruction")  # GSM8K, others, MT-Bench, Alpaca


class Trajectory(NamedTuple):
    """Token ids of a question and its reply. It is a logps.Example, whose input is the student's.

    The student reads the question without x0, the teacher with x0. In a retention row both read it
    with another prompt, under which the model should not change.
    """

    student: list[int]
    teacher: list[int]
    reply: list[int]  # with the end-of-turn token, unless it was cut
    location: str  # file:line
    question: str
    kept: str = ""  # the name of the other prompt

    @property
    def num_tokens(self) -> int:
        return len(self.teacher) + len(self.reply)

    @property
    def prompt(self) -> list[int]:
        return self.student

    @property
    def responses(self) -> list[list[int]]:
        return [self.reply]

    @property
    def targets(self) -> list[Sequence[int]]:
        return [range(len(self.reply))]

    def num_forward_tokens(self, shared: bool) -> int:
        """Return the tokens of the longer input, the teacher's: padding is by its length."""
        return self.num_tokens - 1


class Batch(NamedTuple):
    """B rows as inputs of the student and of the teacher."""

    student: logps.Batch
    teacher: logps.Batch  # with the same replies
    taught: Any = None  # [N, D] the teacher's hidden states, or its logits [N, V]; once computed
    divergence: str = "kl"  # see kl_loss.py

    @property
    def tokens(self) -> torch.Tensor:
        """Numbers of tokens of the replies [B]."""
        return self.student.tokens[0]


def read_questions(
    path: str, limit: int = -1, read: Callable[[str], Iterable[data.Record]] = data.read
) -> list[str]:
    """Return the different questions in a file of records, or in a .txt file with one per line.

    read: returns the records of a path. Raises UserError if there are fewer than `limit`.
    """
    if str(path).endswith(".txt"):
        questions = [line.strip() for line in data.content(path).split("\n")]
    else:
        questions = [_question(record) for record in read(path)]
    questions = list(dict.fromkeys(text for text in questions if text))
    if not questions or len(questions) < limit:
        expected = f" (expected {limit}); use --num_questions -1 for all" if limit > 0 else ""
        raise UserError(f"{path}: {len(questions)} different questions{expected}")
    return questions[:limit] if limit > 0 else questions


def _question(record: data.Record) -> str:
    name = next((name for name in QUESTION if name in record.data), QUESTION[0])
    value = record.data.get(name)
    if isinstance(value, list) and value:  # the first one of several turns
        record = data.Record(record.location, {name: value[0]})
    return data.text(record, name)


def prompt(encoder: Encoder, system: str, question: str) -> list[int]:
    """Return the token ids of a question under a system prompt; "": without one.

    Without a chat template, the system prompt is written in front of the question.
    """
    if not encoder.templated:
        return encoder.ids(system + question)[0]
    turns = [{"role": "user", "content": question}]
    if system:
        turns = [{"role": "system", "content": system.strip()}, *turns]
    return encoder.ids(encoder.render(turns, add_generation_prompt=True))[0]


def read_prompts(flag: str, path: str, encoder: Encoder, used: dict[str, str]) -> dict[str, str]:
    """Return the system prompts of a file by name: a JSON object, or one prompt per line.

    Raises UserError for a prompt that is one of `used` (name -> text), or that the chat template
    adds by itself.
    """
    if str(path).endswith(".json"):
        texts = data.read_json(path)
    else:
        lines = enumerate(data.content(path).split("\n"), start=1)
        texts = {f"line {number}": line for number, line in lines if line.strip()}
    if not texts:
        raise UserError(f"{flag}: {path}: 0 prompts (expected one per line, or a JSON object)")
    system_prompts = {}
    for name in texts:
        text = data.text(data.Record(str(path), texts), name).strip()
        for other, other_text in used.items():
            if text == other_text.strip():
                raise UserError(f"{flag}: {path}: {name}: it is also {other}; remove it")
        if prompt(encoder, text, "?") == prompt(encoder, "", "?"):
            problem = "it has no effect in the chat template"
            raise UserError(f"{flag}: {path}: {name}: {problem}; remove it")
        system_prompts[name] = f"{text}\n"
    return system_prompts


def read(path: str, encoder: Encoder, max_length: int) -> tuple[list[Trajectory], dict[str, Any]]:
    """Return the trajectories in a file of generate_data.py, and a report.

    Replies are cut so that prompt, question and reply have at most max_length tokens. Rows whose
    prompt and question are as long as that are dropped.
    """
    trajectories = []
    report: dict[str, Any] = {"file": str(path), "cut": [], "dropped": [], "kept": {}}
    cached_prompt = functools.cache(functools.partial(prompt, encoder))
    x0s = set()
    for record in data.read(path):
        x0, question = data.text(record, "x0"), data.text(record, "question")
        x0s.add(x0)
        name, read_by = "", ("", x0)  # by student and teacher
        if "kept" in record.data:
            name, system = data.text(record, "kept"), record.data.get("system")
            if not isinstance(system, str):
                raise UserError(
                    f"{record.location}: system: the text of prompt {name!r} is missing"
                )
            report["kept"][name] = system
            read_by = (system, system)
        student, teacher = (cached_prompt(system, question) for system in read_by)
        reply = read_reply(record, encoder)
        available = max_length - len(teacher)
        if available < 1 or not reply:
            report["dropped"].append(record.location)
            continue
        if len(reply) > available:
            report["cut"].append(record.location)
        row = Trajectory(student, teacher, reply[:available], record.location, question, name)
        trajectories.append(row)
    report["x0"] = sorted(x0s)
    if not trajectories:
        raise UserError(f"{path}: 0 usable rows; --max_traj_len is {max_length}")
    return trajectories, report


def read_reply(record: data.Record, encoder: Encoder) -> list[int]:
    """Return the token ids of a reply; raise UserError if they are not those of its text."""
    reply = record.data.get("tokens")
    if not isinstance(reply, list) or not all(type(t) is int and 0 <= t < 2**31 for t in reply):
        raise UserError(f"{record.location}: tokens: expected a list of token ids")
    text = encoder.tokenizer.decode(reply, skip_special_tokens=True)
    if record.data.get("reply", text) != text:
        raise UserError(
            f"{record.location}: tokens: their text is {text!r:.40}, not the reply; use the model "
            "that made them as --model_name, or generate them again"
        )
    return reply


def collate(rows: list[Trajectory], device: torch.device, shared: bool = False) -> Batch:
    """Return the batch of these trajectories; shared: as packed rows (see logps.collate)."""
    prompted = [row._replace(student=row.teacher) for row in rows]
    return Batch(logps.collate(rows, device, shared), logps.collate(prompted, device, shared))
