"""Texts to imitate -> token ids and which of them are trained, and a report of what is in them.

alpaca      {"instruction", "output"}, and perhaps "input" and "history", [[question, answer], ...]
sharegpt    {"conversations"} of {"from", "value"}
messages    {"messages"} of {"role", "content"}
custom      two fields that hold texts: the prompt and the reply
preference  a row of any kind that formats.py reads: its prompt and its chosen reply, as DPO does

Each may have a "system" text. In a conversation every reply is trained with the token that ends it,
nothing else: the tokens that would be, if each reply were a row of its own.
"""

import bisect
import contextlib
from typing import NamedTuple

from ddp_utils import UserError, jsonl, preference_data
from ddp_utils.encoder import common_prefix, plain
from ddp_utils.readers import conversations

SHAPES = {  # what a row must have -> its kind
    ("instruction", "output"): "alpaca",
    ("conversations",): "sharegpt",
    ("messages",): "messages",
    ("prompt", "completion"): "custom",
    ("prompt", "response"): "custom",
    ("question", "answer"): "custom",
}
NAMES = "prompt_field and response_field"


class Text(NamedTuple):
    """Token ids of one text: what is only read first, and the rest, some of which is trained."""

    prompt: list[int]  # everything before the first trained token; at least one token
    reply: list[int]  # the rest
    scored: list[int]  # [len(reply)] 1: trained, 0: only read (later user turns, template text)
    where: str  # file:line
    text: str  # the first question as the data file has it: rows are split by it

    @property
    def row(self):
        """Tokens of the whole text."""
        return len(self.prompt) + len(self.reply)

    tokens = row

    @property
    def trained(self):
        """How many tokens the loss is a mean of."""
        return sum(self.scored)

    @property
    def targets(self):
        """The trained tokens, as the one side that a text has."""
        return [[token for token, on in zip(self.reply, self.scored, strict=True) if on]]

    def fed(self, shared):
        """Tokens that go through the model: the last one is only a target."""
        return self.row - 1

    def rows(self):
        """As the row of a padded batch: what is fed, and the place before each target."""
        before = len(self.prompt) - 1
        places = [before + place for place, on in enumerate(self.scored) if on]
        return [((self.prompt + self.reply)[:-1], places)]

    def stretch(self):
        """As one stretch of a packed row: fed ids, positions, span (P, C, R), places."""
        [(ids, places)] = self.rows()
        return ids, [*range(len(ids))], (len(ids), 0, 0), [places]


def read(path, encoder, kind="auto", fields=(), limit=-1, on_bad_record="error"):
    """The usable texts of a data file and its report.

    kind: as the setting `format`; auto tells it by the fields of the first row. fields: of a
    custom row, the names of its prompt and its reply. Rows without a reply are dropped and
    counted; malformed ones raise UserError, or with "skip" are counted, too.
    """
    kind = "custom" if kind == "auto" and fields else kind
    if [bool(name) for name in fields] != [True] * (2 if kind == "custom" else 0):
        given = f"given: {', '.join(map(repr, fields)) or 'none':.100}"
        raise UserError(f"{path}: {NAMES} belong to the format custom, which needs both; {given}")
    shape, seen, unread = None, set(), set()

    def make(record, row):
        nonlocal shape
        shape = shape or find_shape(record, kind, tuple(fields))
        prompt, reply = example(record, *shape)
        text = encode(encoder, record.where, prompt, reply, every=shape[0] != "preference")
        if (plain(prompt), reply) in seen:
            encoder.counts["same as an earlier row"].append(row)
        seen.add((plain(prompt), reply))
        unread.update(_unread(record, *shape))
        return text

    texts, counted = preference_data.collect(path, encoder, make, limit, on_bad_record)
    parts = {part: [len(getattr(text, part)) for text in texts] for part in ("prompt", "reply")}
    parts["trained"] = [text.trained for text in texts]
    return texts, preference_data.report(path, shape[0], encoder, counted, unread, parts)


# --- record -> prompt and reply ------------------------------------------------------------------


def find_shape(record, kind="auto", fields=()):
    """(kind, its fields; of a preference, its format); UserError names the nearest if none fits."""
    if kind == "preference":
        return kind, (preference_data.find_format(record),)
    if kind == "auto":
        with contextlib.suppress(UserError):
            return "preference", (preference_data.find_format(record),)
    for names, known in SHAPES.items():
        if kind == known != "custom" or kind == "auto" and record.data.keys() >= set(names):
            return known, names
    if kind == "custom":
        return kind, fields
    nearest = preference_data.unknown(record, [*SHAPES, *preference_data.FIELDS.values()])
    raise UserError(f"{nearest}; or name yours: {NAMES}")


def example(record, kind, fields):
    """(prompt, reply) as in formats.Example; UserError if malformed, Unusable without a reply."""
    preference_data.text_only(record, "", record.data)
    if kind == "preference":
        prompt, reply, _ = preference_data.prompt_and_sides(record, fields[0])
    elif len(fields) == 2:
        history = _history(record) if kind == "alpaca" else []
        prompt = preference_data.question(record, fields[0], kind == "alpaca", history)
        reply = preference_data.response(record, fields[1])
    else:
        turns = preference_data.system_of(record) + conversations.turns_of(record, *fields)
        turns = conversations.in_order(record, *fields, turns, "assistant")
        while turns and "weight" in turns[-1]:  # nothing behind the last trained reply matters
            turns = turns[:-2]
        if len(turns) < 2:
            raise preference_data.Unusable("no reply to train")
        *prompt, last = turns
        reply = last["content"]
    if not reply.strip():
        raise preference_data.Unusable("empty response")
    return prompt, reply


def _history(record):
    """The turns of [[question, answer], ...]; null or [] where there are none."""
    history = record.data.get("history") or []
    turns = []
    if not isinstance(history, list) or not all(
        isinstance(exchange, list) and len(exchange) == 2 for exchange in history
    ):
        raise preference_data.error(record, "history", history, "give [[question, answer], ...]")
    for number, exchange in enumerate(history):
        path = f"history[{number}]"
        for role, value in zip(("user", "assistant"), exchange, strict=True):
            content = jsonl.text(jsonl.Record(record.where, {path: value}), path)
            turns.append({"role": role, "content": content})
    return turns


def _unread(record, kind, fields):
    if kind == "preference":
        return preference_data.unread(record, *fields)
    also = ("input", "history") if kind == "alpaca" else ()
    return preference_data.unread_paths(record, {*fields, *also, "system"})


# --- prompt and reply -> tokens ------------------------------------------------------------------


def encode(encoder, where, prompt, reply, every=True):
    """The Text of a prompt and its reply; `every`: the replies inside the prompt are trained, too.

    What is too long loses whole exchanges first, the oldest before others, but keeps its system
    turn; then it is cut as a pair is. Raises Unusable if that leaves nothing to train.
    """
    had = {what: len(rows) for what, rows in encoder.counts.items()}
    opening = prompt
    talk = every and isinstance(prompt, list)
    mended = set()
    if talk:
        system = prompt[: prompt[0]["role"] == "system"]
        opening = prompt[: len(system) + 1]
        turns = prompt[len(system) :]
        prompt = _fit(encoder, system, _ended(encoder, turns, mended), reply, mended)
    pair = encoder.encode(preference_data.Example(where, prompt, reply, reply))
    ids = pair.prompt + pair.chosen
    scored = [0] * len(pair.prompt) + [1] * len(pair.chosen)
    for start, stop in _earlier(encoder, prompt, ids, mended) if talk else ():
        scored[start:stop] = [1] * (stop - start)
    if 1 not in scored:
        raise preference_data.Unusable("no trained token left")
    for what in sorted(mended):
        if len(encoder.counts[what]) == had.get(what, 0):  # or else encoder.encode has counted it
            encoder.counts[what].append(where.rsplit(":", 1)[1])
    first = scored.index(1)
    return Text(ids[:first], ids[first:], scored[first:], where, plain(opening))


def _ended(encoder, turns, mended):
    """Replies without an end token of their own: a template writes one; without template, we do."""
    end = _end(encoder)
    ended = []
    for turn in turns:
        if turn["role"] == "assistant":
            reply = turn["content"].removesuffix(end)
            if reply != turn["content"]:
                mended.add("end token in the text")
            turn = {**turn, "content": reply if encoder.templated else reply + end}
        ended.append(turn)
    return ended


def _fit(encoder, system, turns, reply, mended):
    """The prompt without as few of its first exchanges as it takes to fit with its reply."""

    def fits(dropped):
        prompt = system + turns[2 * dropped :]
        whole = encoder.joined(prompt, reply, encoder.text(prompt))
        return len(encoder.ids(whole)) < encoder.max_length  # its end takes a token

    dropped = bisect.bisect_left(range(len(turns) // 2), True, key=fits)
    if dropped:
        mended.add("truncated")
    return system + turns[2 * dropped :]


def _earlier(encoder, prompt, ids, mended):
    """Where the replies inside a prompt stand in its ids: [(start, stop), ...].

    [] if the template writes one of them, white space aside, otherwise than where it is the last:
    that is not what the model should say there.
    """
    whole = encoder.text(prompt)
    spans = []
    end = _end(encoder) if encoder.templated else ""  # or else the replies have it already
    for number, turn in enumerate(prompt):
        if turn["role"] != "assistant" or "weight" in turn:
            continue
        before = encoder.text(prompt[:number])
        reply = turn["content"].strip()
        as_last = encoder.joined(prompt[:number], reply, before)[len(before) :] + end
        stop = whole.find(reply, len(before)) + len(reply)
        stop = whole.find(end, stop) + len(end)
        inside = "".join(whole[len(before) : stop].split())
        if not whole.startswith(before) or inside != "".join(as_last.split()):
            mended.add("only the last reply is trained")
            return []
        known = encoder.ids(before)
        start = common_prefix(known, ids)
        if start < len(known):
            mended.add("merged at the seam")
        start = max(start, 1)  # nothing would predict a first token
        spans.append((start, common_prefix(encoder.ids(whole[:stop]), ids)))
    return spans


def _end(encoder):
    """The text of the token that ends a reply, or ""."""
    return "" if encoder.end is None else encoder.tokenizer.decode([encoder.end])
