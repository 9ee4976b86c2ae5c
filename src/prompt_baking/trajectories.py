"""What a model says under a system prompt x0: questions with and without it, and the replies.

B rows, N tokens of all replies.
"""

from typing import NamedTuple

import torch

from ddp_utils import UserError, data, logps
from ddp_utils.logps import ModelInput, PackedInput, pack_single

QUESTION = ("question", "prompt", "turns", "instruction")  # GSM8K, others, MT-Bench, Alpaca


class Trajectory(NamedTuple):
    """Token ids of a question as student and teacher read it, and of the reply to the teacher's.

    It is a logps.Example, whose input is the student's.

    Without and with x0 where x0 is baked; where another prompt is to be kept, both with that one.
    """

    student: list[int]
    teacher: list[int]
    reply: list[int]  # its end included, if it came to one
    location: str  # file:line
    question: str
    kept: str = ""  # the name of the other prompt

    @property
    def num_tokens(self) -> int:
        return len(self.teacher) + len(self.reply)

    @property
    def targets(self) -> list[list[int]]:
        return [self.reply]

    def num_forward_tokens(self, shared: bool) -> int:
        """Return the tokens of the longer input, the teacher's: padding is by its length."""
        return self.num_tokens - 1

    def to_padded(self) -> list[ModelInput]:
        """Return the student's sequence of a padded batch."""
        first = len(self.student) - 1
        hidden_index = range(first, first + len(self.reply))
        return [ModelInput(self.student + self.reply[:-1], hidden_index)]

    def to_packed(self) -> PackedInput:
        return pack_single(self.to_padded()[0])


class Batch(NamedTuple):
    """B rows as the student and as the teacher reads them."""

    student: logps.Batch
    teacher: logps.Batch  # the same replies behind x0
    taught: torch.Tensor | None = None  # [N, D] the teacher's hidden states, or its logits [N, V]
    divergence: str = "kl"  # see kl_loss.py

    @property
    def tokens(self):
        """Tokens of each reply [B]."""
        return self.student.tokens[0]


def read_questions(path, limit=-1, read=data.read) -> list[str]:
    """Return the different questions in a file of records, or in a .txt with one a line.

    read: yields the records of a path. Raises UserError if there are fewer than `limit`.
    """
    if str(path).endswith(".txt"):
        questions = [line.strip() for line in data.content(path).split("\n")]
    else:
        questions = [_question(record) for record in read(path)]
    questions = list(dict.fromkeys(text for text in questions if text))
    if not questions or len(questions) < limit:
        wanted = f"; --num_questions is {limit}; give -1 for all" if limit > 0 else ""
        raise UserError(f"{path}: {len(questions)} different questions{wanted}")
    return questions[:limit] if limit > 0 else questions


def _question(record):
    name = next((name for name in QUESTION if name in record.data), QUESTION[0])
    value = record.data.get(name)
    if isinstance(value, list) and value:  # turns: the first one
        record = data.Record(record.location, {name: value[0]})
    return data.text(record, name)


def prompt(encoder, system, question):
    """Return token ids of a question under a system prompt, "" for none.

    It is a system turn of the chat template, or without one stands in front of the question.
    """
    if not encoder.templated:
        return encoder.ids(system + question)[0]
    turns = [{"role": "user", "content": question}]
    if system:
        turns = [{"role": "system", "content": system.strip()}, *turns]
    return encoder.ids(encoder.render(turns, add_generation_prompt=True))[0]


def read_prompts(flag, path, encoder, baked) -> dict:
    """Return the system prompts of a file, by name: a JSON object, or one a line.

    baked: the prompts, name -> text, that they must differ from. Raises UserError for one that does
    not, or that the chat template inserts by itself.
    """
    if str(path).endswith(".json"):
        texts = data.read_json(path)
    else:
        lines = data.content(path).split("\n")
        texts = {f"line {number}": line for number, line in enumerate(lines, start=1)}
        texts = {name: line for name, line in texts.items() if line.strip()}
    if not texts:
        raise UserError(f"{flag}: {path}: 0 prompts; one a line, or a JSON object of them")
    system_prompts = {}
    for name in texts:
        text = data.text(data.Record(str(path), texts), name).strip()
        for other, known in baked.items():
            if text == known.strip():
                raise UserError(f"{flag}: {path}: {name} is {other}, too; leave it out")
        if prompt(encoder, text, "?") == prompt(encoder, "", "?"):
            raise UserError(
                f"{flag}: {path}: {name} changes nothing in the chat template; leave it out"
            )
        system_prompts[name] = f"{text}\n"
    return system_prompts


def read(path, encoder, max_length):
    """Return the trajectories of a file that generate_data.py has written, and a report.

    Replies are cut where prompt, question and reply pass max_length; rows without room are dropped.
    """
    trajectories = []
    report = {"file": str(path), "rows": 0, "cut": [], "dropped": [], "kept": {}}
    ids = {}  # system prompt and question -> their token ids
    x0s = set()
    for record in data.read(path):
        x0, question = data.text(record, "x0"), data.text(record, "question")
        x0s.add(x0)
        name = ""
        read_by = ("", x0)  # student, teacher
        if "kept" in record.data:
            name, system = data.text(record, "kept"), record.data.get("system")
            if not isinstance(system, str):
                raise UserError(f"{record.location}: system: give the prompt of {name!r} as text")
            report["kept"][name] = system
            read_by = (system, system)
        for system in read_by:
            if (system, question) not in ids:
                ids[system, question] = prompt(encoder, system, question)
        student, teacher = (ids[system, question] for system in read_by)
        reply = record.data.get("tokens")
        if not isinstance(reply, list) or not all(type(t) is int and 0 <= t < 2**31 for t in reply):
            raise UserError(f"{record.location}: tokens: give a list of token ids")
        text = encoder.tokenizer.decode(reply, skip_special_tokens=True)
        if record.data.get("reply", text) != text:
            raise UserError(
                f"{record.location}: tokens: they spell {text!r:.40}, not the reply; they are of "
                "another model; give that as --model_name, or generate anew"
            )
        room = max_length - len(teacher)
        report["rows"] += 1
        if room < 1 or not reply:
            report["dropped"].append(record.location)
            continue
        if len(reply) > room:
            report["cut"].append(record.location)
        row = Trajectory(student, teacher, reply[:room], record.location, question, name)
        trajectories.append(row)
    report["x0"] = sorted(x0s)
    if not trajectories:
        raise UserError(f"{path}: 0 usable rows; --max_traj_len is {max_length}")
    return trajectories, report


def collate(rows, device, shared=False) -> Batch:
    """Return the batch of these trajectories; a reply's last token is not fed."""
    prompted = [row._replace(student=row.teacher) for row in rows]
    return Batch(logps.collate(rows, device, shared), logps.collate(prompted, device, shared))
