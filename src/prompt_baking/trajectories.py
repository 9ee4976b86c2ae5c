"""What a model says under a system prompt x0: questions with and without it, and the replies.

B rows, T tokens of the longest row, N tokens of all replies.
"""

from typing import NamedTuple

import torch

from ddp_utils import UserError, jsonl

QUESTION = ("question", "prompt", "turns", "instruction")  # GSM8K, others, MT-Bench, Alpaca


class Trajectory(NamedTuple):
    """Token ids of a question without and with x0, and of the reply that was sampled with it."""

    student: list[int]
    teacher: list[int]
    reply: list[int]  # its end included, if it came to one
    where: str  # file:line
    question: str

    @property
    def row(self):
        """Tokens of the longer text."""
        return len(self.teacher) + len(self.reply)


class Batch(NamedTuple):
    """B rows as the student reads them and, unless it is known what it thinks, the teacher."""

    ids: torch.Tensor  # [B, T]
    where: torch.Tensor  # [N] places among the B * T hidden states: each predicts ...
    targets: torch.Tensor  # [N] ... this token
    rows: torch.Tensor  # [N] of this row
    tokens: torch.Tensor  # [B] tokens of each reply
    prompted: tuple  # ids and where of the same replies behind x0
    taught: torch.Tensor | None = None  # [N, D] the teacher's hidden states, or its logits [N, V]


def read_questions(path, limit=-1) -> list[str]:
    """The different questions of a .jsonl or .json file, or of a text file with one on each line.

    Raises UserError if there are fewer than `limit`.
    """
    if str(path).endswith(".txt"):
        questions = [line.strip() for line in jsonl.content(path).decode().split("\n")]
    else:
        questions = [_question(record) for record in jsonl.read(path)]
    questions = list(dict.fromkeys(text for text in questions if text))
    if not questions or len(questions) < limit:
        wanted = f"; --num_questions is {limit}; give -1 for all" if limit > 0 else ""
        raise UserError(f"{path}: {len(questions)} different questions{wanted}")
    return questions[:limit] if limit > 0 else questions


def _question(record):
    name = next((name for name in QUESTION if name in record.data), QUESTION[0])
    value = record.data.get(name)
    if isinstance(value, list):  # of a conversation the user's first turn
        turns = [turn if isinstance(turn, dict) else {"content": turn} for turn in value]
        contents = [turn.get("content") for turn in turns if turn.get("role") != "system"]
        record = jsonl.Record(record.where, {name: contents[0] if contents else None})
    return jsonl.text(record, name)


def prompts(encoder, x0, question):
    """Token ids (without x0, with x0): as a system turn, or in front of a plain text."""
    if not encoder.templated:
        return encoder.ids(question), encoder.ids(x0 + question)
    user = {"role": "user", "content": question}
    turns = [user], [{"role": "system", "content": x0.strip()}, user]
    return tuple(encoder.ids(encoder.render(turn, add_generation_prompt=True)) for turn in turns)


def read(path, encoder, max_length):
    """(trajectories, report) of a file that generate_data.py has written.

    Replies are cut where x0, question and reply pass max_length; rows without room are dropped.
    """
    trajectories = []
    report = {"file": str(path), "rows": 0, "cut": [], "dropped": []}
    known = {}  # x0 and question -> their ids
    for record in jsonl.read(path):
        key = tuple(jsonl.text(record, name) for name in ("x0", "question"))
        if key not in known:
            known[key] = prompts(encoder, *key)
        reply = record.data.get("tokens")
        if not isinstance(reply, list) or not all(type(t) is int and 0 <= t < 2**31 for t in reply):
            raise UserError(f"{record.where}: tokens: give a list of token ids (generate_data.py)")
        spelt = encoder.tokenizer.decode(reply, skip_special_tokens=True)
        if record.data.get("reply", spelt) != spelt:
            raise UserError(
                f"{record.where}: tokens: they spell {spelt!r:.40}, not the reply; they are of "
                "another model; give that as --model_name, or generate anew"
            )
        room = max_length - len(known[key][1])
        report["rows"] += 1
        if room < 1 or not reply:
            report["dropped"].append(record.where)
            continue
        if len(reply) > room:
            report["cut"].append(record.where)
        trajectories.append(Trajectory(*known[key], reply[:room], record.where, key[1]))
    report["x0"] = sorted({x0 for x0, _ in known})
    if not trajectories:
        raise UserError(f"{path}: 0 usable rows; --max_traj_len is {max_length}")
    return trajectories, report


def collate(rows, device) -> Batch:
    """B rows, padded on the right, where no token looks; a reply's last token is not fed."""
    ids, where = _padded([(row.student, row.reply) for row in rows], device)
    prompted = _padded([(row.teacher, row.reply) for row in rows], device)
    lengths = [len(row.reply) for row in rows]
    return Batch(
        ids,
        where,
        torch.tensor([token for row in rows for token in row.reply], device=device),
        torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device),
        torch.tensor(lengths, device=device),
        prompted,
    )


def _padded(texts, device):
    """Token ids [B, T] padded with 0, and the places that predict the replies [N]."""
    width = max(len(prompt) + len(reply) - 1 for prompt, reply in texts)
    ids = [[*p, *r[:-1], *[0] * (width + 1 - len(p) - len(r))] for p, r in texts]
    where = []
    for row, (prompt, reply) in enumerate(texts):
        first = row * width + len(prompt) - 1
        where += range(first, first + len(reply))
    return torch.tensor(ids, device=device), torch.tensor(where, device=device)
