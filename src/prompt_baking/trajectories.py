"""Replies of a model under a system prompt x0, and the questions with and without x0.

B rows, N tokens of all replies, D width, V vocabulary size.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_utils import UserError, data
from lm import chat_template, logps, message_texts, model_files
from lm.chat_template import Encoder

QUESTION = ("question", "prompt", "turns", "instruction")  # GSM8K, others, MT-Bench, Alpaca
MORE = ("context", "history", *chat_template.SYSTEMS)  # of a question, in Dolly and others


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
    teacher_states: Any = None  # [N, D] hidden states, or logits [N, V]; None: not computed yet
    divergence: str = "kl"  # see kl_loss.py

    @property
    def tokens(self) -> torch.Tensor:
        """Numbers of tokens of the replies [B]."""
        return self.student.tokens[0]


def collate(rows: Sequence[Trajectory], device: Any, shared: bool = False) -> Batch:
    """Return the batch of these trajectories; shared: as packed rows (see logps.collate)."""
    prompted = [row._replace(student=row.teacher) for row in rows]
    return Batch(logps.collate(rows, device, shared), logps.collate(prompted, device, shared))


# --- questions and prompts -----------------------------------------------------------------------


def read_questions(path: str, limit: int = -1, columns: str = "") -> list[str]:
    """Return the different questions in a file of records, or in a .txt file with one per line.

    limit: use at most so many; -1: all. columns: see data.read().
    """
    if str(path).endswith(".txt"):
        questions = [line.strip() for line in data.content(path).split("\n")]
    else:
        questions = [_question(record) for record in data.read(path, columns=columns)]
    questions = list(dict.fromkeys(filter(None, questions)))
    if not questions:
        raise UserError(f"{path}: 0 questions (expected at least one)")
    return questions[:limit] if limit > 0 else questions


def _question(record: data.Record) -> str:
    name = next((name for name in QUESTION if name in record.data), "")
    if not name:
        problem = f"none of the fields {', '.join(QUESTION)} is among {data.names_of(record)}"
        hint = "rename one to question (in generate_data.py: --columns question=NAME)"
        raise UserError(f"{record.location}: {problem}; {hint}")
    for field in filter(record.data.get, MORE):
        problem = f"{record.location}: {field}: it may belong to the question"
        hint = f"in generate_data.py: --columns ignored_{field}={field}"
        raise UserError(f"{problem}; write it there, or remove it ({hint})")
    more = chat_template.optional_text(record, "input") if name == "instruction" else []
    record = record._replace(data={name: _first_turn(record, name)})
    return "\n".join([data.text(record, name), *more])


def _first_turn(record: data.Record, name: str) -> Any:
    """Return the value of a field; of several turns or messages, the first one of the user."""
    from lm import conversations

    message_texts.check_not_python(record, name)
    value = message_texts.messages_in(record.data[name])
    if name == "turns" and isinstance(value, str) and value.startswith("["):  # from CSV
        value = data.decode(value, f"{record.location}: {name}")
    if isinstance(value[0] if isinstance(value, list) and value else value, dict):
        turns = conversations.messages_of(record._replace(data={name: value}), name)
        value = [turn["content"] for turn in turns if turn["role"] == "user"]
    return value[0] if isinstance(value, list) and value else value


def check_turns(path: str, texts: Iterable[str], encoder: Encoder, role: str = "user") -> None:
    """Raise UserError for a text that a chat template has rendered, if there is a template."""
    for text in texts if encoder.templated else ():
        encoder.check_turn(f"{path}: {data.shown(text)}", text, role, is_first=role == "user")


def prompt(encoder: Encoder, system: str, question: str) -> list[int]:
    """Return the token ids of a question under a system prompt; "": without one.

    Without a chat template, the system prompt is written in front of the question.
    """
    if not encoder.templated:
        return encoder.prompt_ids(system + question)
    turns = [{"role": "user", "content": question}]
    if system:
        turns = [{"role": "system", "content": system.strip()}, *turns]
    return encoder.prompt_ids(turns)


def read_prompts(path: str, encoder: Encoder, used: dict[str, str]) -> dict[str, str]:
    """Return the system prompts of a file by name: a JSON object, or one prompt per line.

    Raises UserError for a prompt that is one of `used` (name -> text), or that the chat template
    adds by itself.
    """
    kind = Path(path).suffix
    if kind == ".json":
        texts = data.read_json(path)
    elif kind not in (".txt", ""):
        expected = "expected .txt with one prompt per line, or .json with an object"
        raise UserError(f"{path}: a {kind} file has no prompts that are read ({expected})")
    else:
        lines = enumerate(data.content(path).split("\n"), start=1)
        texts = {f"line {number}": line for number, line in lines if line.strip()}
    if not texts:
        raise UserError(f"{path}: 0 prompts (expected one per line, or a JSON object)")
    names = {text.strip(): name for name, text in used.items()}
    prompts = {}
    for name in texts:
        text = data.text(data.Record(str(path), texts), name).strip()
        check_turns(path, [text], encoder, "system")
        if text in names:
            raise UserError(f"{path}: {name}: it is also {names[text]}; remove it")
        if prompt(encoder, text, "?") == prompt(encoder, "", "?"):
            raise UserError(f"{path}: {name}: it has no effect in the chat template; remove it")
        prompts[name] = f"{text}\n"
    return prompts


# --- replies -------------------------------------------------------------------------------------


def read(path: str, encoder: Encoder, max_length: int) -> tuple[list[Trajectory], dict[str, Any]]:
    """Return the trajectories in a file of generate_data.py, and a report.

    Replies are cut so that prompt, question and reply have at most max_length tokens. Rows whose
    prompt and question are as long as that are dropped.
    """
    rows = []
    longest = 0  # of the prompts with x0
    report: dict[str, Any] = {"file": str(path), "x0": [], "cut": [], "dropped": [], "kept": {}}
    ids_of = functools.cache(functools.partial(prompt, encoder))
    for record in data.read(path):
        x0, question = data.text(record, "x0"), data.text(record, "question")
        if x0 not in report["x0"]:
            report["x0"].append(x0)
        name, without, system = "", "", x0  # what the student and the teacher read
        if "kept" in record.data:
            name, given = data.text(record, "kept"), record.data.get("system")
            if not isinstance(given, str):
                raise data.wrong_value(record, "system", given, f"the prompt {name!r}")
            without = system = given
        student, teacher = ids_of(without, question), ids_of(system, question)
        reply = read_reply(record, encoder)
        available = max_length - len(teacher)
        longest = longest if name else max(longest, len(teacher))
        if available < 1 or not reply:
            report["dropped"].append(record.location)
            continue
        if name:
            report["kept"][name] = system
        if len(reply) > available:
            report["cut"].append(record.location)
        reply = reply[:available]
        rows.append(Trajectory(student, teacher, reply, record.location, question, name))
    if all(row.kept for row in rows):
        limit = f"--max_traj_len is {max_length}, x0 and a question have up to {longest} tokens"
        raise UserError(f"{path}: 0 usable rows with x0; {limit}")
    texts = [*report["x0"], *dict.fromkeys(row.question for row in rows)]
    report["unknown_tokens"] = model_files.unknown(encoder.tokenizer, texts[:1000])
    return rows, report


def read_reply(record: data.Record, encoder: Encoder) -> list[int]:
    """Return the token ids of a reply; raise UserError if they are not those of its text."""
    reply = record.data.get("tokens")
    if not isinstance(reply, list) or not all(type(t) is int and 0 <= t < 2**31 for t in reply):
        raise UserError(f"{record.location}: tokens: expected a list of token ids")
    [text] = encoder.texts([reply])
    if record.data.get("reply", text) != text:
        problem = f"their text is {text!r:.40}, not the reply; use the model that made them"
        raise UserError(f"{record.location}: tokens: {problem} as --model_name")
    return reply
