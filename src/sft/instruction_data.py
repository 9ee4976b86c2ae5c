"""Texts to imitate -> token ids and which of them are trained, and a report of what is in them.

alpaca      {"instruction", "output"}, and perhaps "input" and "history", [[question, answer], ...]
sharegpt    {"conversations"} of {"from", "value"}
messages    {"messages"} of {"role", "content"}
custom      two fields that hold texts: the prompt and the reply
preference  a row of any kind of preference_data.py: its prompt and its chosen reply

Each may have a "system" text. In a conversation every reply is trained with the token that ends it,
nothing else: the tokens that would be, if each reply were a row of its own.
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ddp_utils import UserError, chat_template, conversations, data, preference_data, tables
from ddp_utils.logps import ModelInput, PackedInput, pack_single
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
    def trained(self):
        """How many tokens the loss is a mean of."""
        return sum(self.scored)

    @property
    def lengths(self):
        """Tokens of each part, of which the data report has the means."""
        return {"prompt": len(self.prompt), "reply": len(self.reply), "trained": self.trained}

    @property
    def targets(self) -> list[list[int]]:
        return [[token for token, on in zip(self.reply, self.scored, strict=True) if on]]

    def num_forward_tokens(self, shared: bool) -> int:
        return self.num_tokens - 1

    def to_padded(self) -> list[ModelInput]:
        before = len(self.prompt) - 1
        hidden_index = [before + index for index, on in enumerate(self.scored) if on]
        return [ModelInput((self.prompt + self.reply)[:-1], hidden_index)]

    def to_packed(self) -> PackedInput:
        return pack_single(self.to_padded()[0])


def read(source, encoder):
    """Return the usable texts of a DataFile, as Rows, and its report.

    Rows without a reply are dropped and counted; malformed ones raise UserError, or with "skip"
    are counted, too.
    """

    def make(record, shape):
        prompt, reply = example(record, shape)
        return encode(encoder, record.location, prompt, reply, every=not shape.format)

    def texts(report):
        return preference_data.collect(report, source, encoder, find_shape, make)

    code = data.digest_of_files([Path(__file__)])
    return tables.read(Text, source, [*encoder.facts(), code], texts)


# --- record -> prompt and reply ------------------------------------------------------------------


def find_shape(record) -> Shape:
    """Return the Shape of a row; UserError names the nearest if none fits."""
    with contextlib.suppress(UserError):
        return preference_data.find_shape(record)._replace(kind="preference")
    for shape in SHAPES:
        if record.data.keys() >= set(shape.fields[:2]):
            return shape
    known = [shape.fields[:2] for shape in SHAPES]
    raise preference_data.unknown(record, [*known, *preference_data.FIELDS.values()])


def example(record, shape):
    """Return the prompt and the reply of a row; UserError if malformed, Unusable if it has none."""
    preference_data.text_only(record, "", record.data)
    if shape.format:
        prompt, reply, _ = preference_data.prompt_and_sides(record, shape.format)
    elif shape.kind in ("sharegpt", "messages"):
        [field] = shape.fields
        turns = preference_data.system_of(record) + conversations.turns_of(record, field)
        turns = conversations.in_order(record, field, turns, "assistant")
        # nothing behind the last trained reply matters
        while turns and (turns[-1]["role"] != "assistant" or "weight" in turns[-1]):
            turns.pop()
        if not turns:
            raise Unusable("no reply to train")
        *prompt, reply = turns
        reply = conversations.reply_of(reply)
    else:
        alpaca = shape.kind == "alpaca"
        history = _history(record) if alpaca else []
        prompt = preference_data.question(record, shape.fields[0], alpaca, history)
        reply = preference_data.response(record, shape.fields[1])
    if not chat_template.reply_text(reply).strip():
        raise Unusable("empty response")
    return prompt, reply


def _history(record):
    """Return the turns of [[question, answer], ...]; null or [] where there are none."""
    history = record.data.get("history") or []
    turns = []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise preference_data.error(
                record, "history", history, "give [[question, answer], ...]"
            )
        for role, value in zip(("user", "assistant"), exchange, strict=True):
            content = data.text(data.Record(record.location, {"history": value}), "history")
            turns.append({"role": role, "content": content})
    return turns


# --- prompt and reply -> tokens ------------------------------------------------------------------


def encode(encoder, location, prompt, reply, every=True):
    """Return the Text of a prompt and its reply; `every`: replies inside it are trained, too.

    What is too long loses whole exchanges first, the oldest before others, but keeps its system
    turn; then it is cut as a pair is. Raises Unusable if that leaves nothing to train.
    """
    opening = prompt
    several = every and isinstance(prompt, list)
    if several:
        opening = prompt[: _questions(prompt)[0] + 1]
        prompt = _fit(encoder, _ended(encoder, prompt), reply)
    pair = encoder.encode(preference_data.Example(location, prompt, reply, reply))
    ids = pair.prompt + pair.chosen
    scored = [0] * len(pair.prompt) + [1] * len(pair.chosen)
    for start, stop in _earlier(encoder, prompt, ids) if several else ():
        scored[start:stop] = [1] * (stop - start)
    if 1 not in scored:
        raise Unusable("no trained token left")
    first = scored.index(1)
    return Text(ids[:first], ids[first:], scored[first:], location, chat_template.plain(opening))


def _ended(encoder, turns):
    """Give replies no end token if a template writes one, else exactly one."""
    end = _end(encoder)
    ended = []
    for turn in turns:
        if turn["role"] == "assistant":
            reply = turn["content"].removesuffix(end)
            if reply != turn["content"]:
                encoder.notes.add("end token in the text")
            turn = {**turn, "content": reply if encoder.templated else reply + end}
        ended.append(turn)
    return ended


def _fit(encoder, prompt, reply):
    """Return the prompt without as few of its first exchanges as it takes to fit with its reply."""
    first, *later = _questions(prompt)
    fitted = prompt
    for place in later:
        whole = encoder.joined(fitted, reply, encoder.text(fitted))
        if len(encoder.ids(whole)[0]) < encoder.max_length:  # its end takes a token
            break
        encoder.notes.add("truncated")
        fitted = prompt[:first] + prompt[place:]
    return fitted


def _questions(prompt):
    """Return where the user's turns stand."""
    return [place for place, turn in enumerate(prompt) if turn["role"] == "user"]


def _earlier(encoder, prompt, ids):
    """Return where the replies inside a prompt stand in its ids: [(start, stop), ...].

    None if the template writes one of them, white space aside, otherwise than where it is the last:
    that is not what the model should say there.
    """
    whole = encoder.text(prompt)
    spans = []
    end = _end(encoder) if encoder.templated else ""  # or else the replies have it already
    for number, turn in enumerate(prompt):
        if turn["role"] != "assistant" or "weight" in turn:
            continue
        before = encoder.text(prompt[:number])
        as_last = encoder.joined(prompt[:number], conversations.reply_of(turn), before) + end
        stop = len(as_last)
        if not whole.startswith(as_last):
            reply = turn["content"].strip()
            stop = whole.find(reply, len(before)) + len(reply)
            stop = whole.find(end, stop) + len(end)
        if chat_template.without_space(whole[:stop]) != chat_template.without_space(as_last):
            encoder.notes.add("only the last reply is trained")
            return []
        asked, answered = encoder.ids(before, whole[:stop])
        start = chat_template.common_prefix(asked, ids)
        if start < len(asked):
            encoder.notes.add("merged at the seam")
        start = max(start, 1)  # nothing would predict a first token
        spans.append((start, chat_template.common_prefix(answered, ids)))
    return spans


def _end(encoder):
    """Return the text of the token that ends a reply, or ""."""
    return "" if encoder.end is None else encoder.tokenizer.decode([encoder.end])
