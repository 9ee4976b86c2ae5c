"""What a model says under a system prompt x0: questions with and without it, and the replies.

B rows, N tokens of all replies.
"""

from typing import NamedTuple

import torch

from ddp_utils import UserError, jsonl, logps

QUESTION = ("question", "prompt", "turns", "instruction")  # GSM8K, others, MT-Bench, Alpaca


class Trajectory(NamedTuple):
    """Token ids of a question without and with x0, and of the reply that was sampled with it."""

    student: list[int]
    teacher: list[int]
    reply: list[int]  # its end included, if it came to one
    location: str  # file:line
    question: str

    @property
    def row(self):
        """Tokens of the longer text."""
        return len(self.teacher) + len(self.reply)

    def num_forward_tokens(self, shared):
        """Tokens that go through the model: of the longer text, since padding is by its length."""
        return self.row - 1

    @property
    def targets(self):
        """The tokens that are predicted, as the one side that a row has."""
        return [self.reply]

    def rows(self):
        """As the student's row of a padded batch: what is fed, and the index before each target."""
        first = len(self.student) - 1
        return [(self.student + self.reply[:-1], range(first, first + len(self.reply)))]

    def packed_row(self):
        """As one stretch of a packed row: fed ids, positions, span (P, C, R), hidden index."""
        [(ids, hidden_index)] = self.rows()
        return ids, [*range(len(ids))], (len(ids), 0, 0), [hidden_index]


class Batch(NamedTuple):
    """B rows as the student and as the teacher reads them."""

    student: logps.Batch
    teacher: logps.Batch  # the same replies behind x0
    taught: torch.Tensor | None = None  # [N, D] the teacher's hidden states, or its logits [N, V]

    @property
    def tokens(self):
        """Tokens of each reply [B]."""
        return self.student.tokens[0]


def read_questions(path, limit=-1, read=jsonl.read) -> list[str]:
    """Return the different questions in a file of records, or in a .txt with one a line.

    read: yields the records of a path. Raises UserError if there are fewer than `limit`.
    """
    if str(path).endswith(".txt"):
        questions = [line.strip() for line in jsonl.content(path).decode().split("\n")]
    else:
        questions = [_question(record) for record in read(path)]
    questions = list(dict.fromkeys(text for text in questions if text))
    if not questions or len(questions) < limit:
        wanted = f"; --num_questions is {limit}; give -1 for all" if limit > 0 else ""
        raise UserError(f"{path}: {len(questions)} different questions{wanted}")
    return questions[:limit] if limit > 0 else questions


def _question(record):
    if isinstance(record.data, UserError):
        raise record.data
    name = next((name for name in QUESTION if name in record.data), QUESTION[0])
    value = record.data.get(name)
    if isinstance(value, list) and value:  # turns: the first one
        record = jsonl.Record(record.location, {name: value[0]})
    return jsonl.text(record, name)


def prompts(encoder, x0, question):
    """Return token ids without x0, and with it: as a system turn, or in front of a plain text."""
    if not encoder.templated:
        return encoder.ids(question, x0 + question)
    user = {"role": "user", "content": question}
    turns = [user], [{"role": "system", "content": x0.strip()}, user]
    return encoder.ids(*(encoder.render(turn, add_generation_prompt=True) for turn in turns))


def read(path, encoder, max_length):
    """Return the trajectories of a file that generate_data.py has written, and a report.

    Replies are cut where x0, question and reply pass max_length; rows without room are dropped.
    """
    trajectories = []
    report = {"file": str(path), "rows": 0, "cut": [], "dropped": []}
    ids = {}  # x0 and question -> their token ids
    for record in jsonl.read(path):
        key = (jsonl.text(record, "x0"), jsonl.text(record, "question"))
        if key not in ids:
            ids[key] = prompts(encoder, *key)
        student, teacher = ids[key]
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
        trajectories.append(Trajectory(student, teacher, reply[:room], record.location, key[1]))
    report["x0"] = sorted({x0 for x0, _ in ids})
    if not trajectories:
        raise UserError(f"{path}: 0 usable rows; --max_traj_len is {max_length}")
    return trajectories, report


def collate(rows, device, shared=False) -> Batch:
    """Return the batch of these trajectories; a reply's last token is not fed."""
    prompted = [row._replace(student=row.teacher) for row in rows]
    return Batch(logps.collate(rows, device, shared), logps.collate(prompted, device, shared))
