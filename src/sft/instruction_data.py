"""Texts for supervised fine-tuning -> token ids and which of them are trained.

alpaca      {"instruction", "output"}, optionally "input" and "history", [[question, answer], ...]
sharegpt    {"conversations"} of {"from", "value"}
messages    {"messages"} of {"role", "content"}
custom      two fields that hold texts: the prompt and the reply
preference  a row of any format of preference_data.py: its prompt and its chosen reply

Each may have a "system" text. In a conversation every reply is trained, with the token that ends
it: the same tokens as if each reply were a row of its own.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_utils import UserError, conversations, data, preference_data
from ddp_utils.chat_template import Encoder, Prompt, Reply, common_prefix, plain_text, reply_text
from ddp_utils.data import DataFile, Record, Rows
from ddp_utils.preference_data import Shape, Unusable

SHAPES = [  # the first one whose two fields (or one) a row has
    Shape("custom", ("prompt", "completion")),
    Shape("alpaca", ("instruction", "output", "input", "history")),
    Shape("sharegpt", ("conversations",)),
    Shape("messages", ("messages",)),
    Shape("custom", ("prompt", "response")),
    Shape("custom", ("question", "answer")),
]


class Text(NamedTuple):
    """Token ids of one text, a logps.Example: the prompt, and a reply that is trained in part."""

    prompt: list[int]  # everything before the first trained token; at least one token
    reply: list[int]  # the rest
    scored: list[int]  # [len(reply)] 1: trained, 0: only read (later user turns, template text)
    location: str  # file:line
    text: str  # the first question as the data file has it: rows are split by it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.reply)

    @property
    def trained(self) -> int:
        """Return the number of tokens over which the loss is averaged."""
        return sum(self.scored)

    @property
    def lengths(self) -> dict[str, int]:
        """Return the numbers of tokens whose means are in the data report."""
        return {"prompt": len(self.prompt), "reply": len(self.reply), "trained": self.trained}

    @property
    def responses(self) -> list[list[int]]:
        return [self.reply]

    @property
    def targets(self) -> list[Sequence[int]]:
        return [[index for index, on in enumerate(self.scored) if on]]

    def num_forward_tokens(self, shared: bool) -> int:
        return self.num_tokens - 1


class Encoded(NamedTuple):
    """A Text, and what the data report counts: "truncated", ..."""

    text: Text
    notes: set[str]


def read(source: DataFile, encoder: Encoder) -> tuple[Rows, dict]:
    """Return the usable texts of a file, and the report on it.

    Rows without a reply are dropped and counted. Malformed rows raise UserError; with
    on_bad_record="skip" they are dropped and counted, too.
    """

    def encode_row(record: Record, shape: Shape, encoder: Encoder) -> Encoded:
        prompt, reply = prompt_and_reply(record, shape)
        return encode(encoder, record.location, prompt, reply, only_last=bool(shape.preference))

    def texts(report):
        return preference_data.encode_rows(report, source, encoder, find_shape, encode_row)

    code = data.digest_of_files([Path(__file__)])
    return data.cached_rows(Text, source, [*encoder.facts(), code], texts)


# --- record -> prompt and reply ------------------------------------------------------------------


def find_shape(record: Record) -> Shape:
    """Return the Shape of a row; the error for an unknown one names the nearest."""
    with contextlib.suppress(UserError):
        return preference_data.find_shape(record)._replace(name="preference")
    for shape in SHAPES:
        if record.data.keys() >= set(shape.fields[:2]):
            return shape
    known = [shape.fields[:2] for shape in SHAPES]
    raise preference_data.unknown_format(record, [*known, *preference_data.FIELDS.values()])


def prompt_and_reply(record: Record, shape: Shape) -> tuple[Prompt, Reply]:
    """Return the prompt and the reply of a row; raise Unusable if it has no reply."""
    preference_data.check_text_only(record, "", record.data)
    if shape.preference:
        prompt, reply, _ = preference_data.prompt_and_responses(record, shape.preference)
    elif shape.name in ("sharegpt", "messages"):
        prompt, reply = _conversation(record, shape.fields[0])
    else:
        history = _history(record) if shape.name == "alpaca" else []
        prompt = preference_data.question(record, shape.fields[0], history)
        reply = preference_data.response(record, shape.fields[1])
    if not reply_text(reply).strip():
        raise Unusable("empty response")
    return prompt, reply


def _conversation(record: Record, field: str) -> tuple[Prompt, Reply]:
    """Return the turns before the last trained reply, and that reply."""
    turns = preference_data.system_of(record) + conversations.messages_of(record, field)
    turns = conversations.check_order(record, field, turns, "assistant")
    while turns and (turns[-1]["role"] != "assistant" or "weight" in turns[-1]):
        turns.pop()
    if not turns:
        raise Unusable("no reply to train")
    *prompt, reply = turns
    return prompt, conversations.reply_of(reply)


def _history(record: Record) -> list[dict]:
    """Return the turns of [[question, answer], ...]; there are none if it is null or []."""
    history = record.data.get("history") or []
    turns = []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise data.wrong_value(record, "history", history, "[[question, answer], ...]")
        for role, value in zip(("user", "assistant"), exchange, strict=True):
            content = data.text(record._replace(data={"history": value}), "history")
            turns.append({"role": role, "content": content})
    return turns


# --- prompt and reply -> tokens ------------------------------------------------------------------


def encode(
    encoder: Encoder, location: str, prompt: Prompt, reply: Reply, only_last: bool = False
) -> Encoded:
    """Return the Text of a prompt and its reply; replies in the prompt are trained, too.

    A conversation that is too long loses its oldest exchanges, but keeps its system turn; the rest
    is truncated like a pair. Raises Unusable if no trained token is left.
    only_last: train only the last reply.
    """
    notes: set[str] = set()
    opening = prompt  # until the first question
    if isinstance(prompt, list) and not only_last:
        opening = prompt[: _questions(prompt)[0] + 1]
        ended, notes = _with_ends(encoder, prompt)
        prompt = _drop_exchanges(encoder, ended, reply)
        if prompt != ended:
            notes.add("truncated")
    pair, pair_notes = encoder.encode(location, prompt, reply, reply)
    ids = pair.prompt + pair.chosen
    scored = [0] * len(pair.prompt) + [1] * len(pair.chosen)
    if isinstance(prompt, list) and not only_last:
        spans, span_notes = _earlier_replies(encoder, prompt, ids)
        for start, stop in spans:
            scored[start:stop] = [1] * (stop - start)
        notes |= span_notes
    if 1 not in scored:
        raise Unusable("no trained token left")
    first = scored.index(1)
    text = Text(ids[:first], ids[first:], scored[first:], location, plain_text(opening))
    return Encoded(text, notes | pair_notes)


def _with_ends(encoder: Encoder, turns: list[dict]) -> tuple[list[dict], set[str]]:
    """Return turns whose replies have one end token, or none if the template adds it, and notes."""
    end = _end_text(encoder)
    ended = []
    notes = set()
    for turn in turns:
        if turn["role"] == "assistant":
            reply = turn["content"].removesuffix(end)
            if reply != turn["content"]:
                notes.add("end token in the text")
            turn = {**turn, "content": reply if encoder.templated else reply + end}
        ended.append(turn)
    return ended, notes


def _drop_exchanges(encoder: Encoder, prompt: list[dict], reply: Reply) -> list[dict]:
    """Return the prompt without as many of its first exchanges as are too long with the reply."""
    first, *later = _questions(prompt)
    fitted = prompt
    for index in later:
        text = encoder.text_with_reply(fitted, reply, encoder.text(fitted))
        if len(encoder.ids(text)[0]) < encoder.max_length:  # the end of the reply is a token, too
            break
        fitted = prompt[:first] + prompt[index:]
    return fitted


def _questions(prompt: list[dict]) -> list[int]:
    """Return the indices of the user's turns."""
    return [index for index, turn in enumerate(prompt) if turn["role"] == "user"]


def _earlier_replies(
    encoder: Encoder, prompt: list[dict], ids: list[int]
) -> tuple[list[tuple[int, int]], set[str]]:
    """Return the (start, stop) of each reply of a prompt in its ids, and notes for the report.

    There is none if the template renders a reply differently, except for white space, when it is
    not the last one: that is not what the model should generate.
    """
    full_text = encoder.text(prompt)
    spans = []
    notes = set()
    end = _end_text(encoder) if encoder.templated else ""  # without a template replies have it
    for number, turn in enumerate(prompt):
        if turn["role"] != "assistant" or "weight" in turn:
            continue
        before = encoder.text(prompt[:number])
        reply = conversations.reply_of(turn)
        as_last = encoder.text_with_reply(prompt[:number], reply, before) + end
        stop = len(as_last)
        if not full_text.startswith(as_last):
            content = turn["content"].strip()
            stop = full_text.find(content, len(before)) + len(content)
            stop = full_text.find(end, stop) + len(end)
        if _without_space(full_text[:stop]) != _without_space(as_last):
            return [], {"only the last reply is trained"}
        ids_before, ids_with_reply = encoder.ids(before, full_text[:stop])
        start = common_prefix(ids_before, ids)
        if start < len(ids_before):
            notes.add("merged at the seam")
        start = max(start, 1)  # nothing would predict a first token
        spans.append((start, common_prefix(ids_with_reply, ids)))
    return spans, notes


def _end_text(encoder: Encoder) -> str:
    """Return the text of the token that ends a reply, or ""."""
    return "" if encoder.end is None else encoder.tokenizer.decode([encoder.end])


def _without_space(text: str) -> str:
    return "".join(text.split())
