"""Preference files as people have them -> one Example per row; the fields tell the format.

prompt       {"prompt", "chosen", "rejected"}: texts, and perhaps a "system" text
instruction  {"instruction", "chosen", "rejected"}, and perhaps "input" and "system"
question     {"question", "chosen", "rejected"}, and perhaps "system"
messages     like prompt, but any of the three is a list of {"role", "content"}; chosen and rejected
             may hold the whole conversation, with or without a prompt (UltraFeedback)
sharegpt     {"conversations", "chosen", "rejected"} of {"from", "value"}, and perhaps "system"
transcript   {"chosen", "rejected"}: texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns (HH)
openai       {"input": {"messages"}, "preferred_output", "non_preferred_output"}
"""

import difflib
import functools
import re
from typing import NamedTuple

from ddp_utils import UserError, records

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS} | {  # what a row must have
    "sharegpt": ("conversations", *SIDES),
    "openai": ("input", "preferred_output", "non_preferred_output"),
}
ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "user", "assistant")}
NOT_TEXT = ("tools", "tool_calls", "function_call", "images")
HUMAN = "\n\nHuman:"


class Example(NamedTuple):
    """One preference, checked."""

    where: str  # file:line
    prompt: str | list  # plain text, or [{"role", "content"}, ...] that ends with a user's turn
    chosen: str
    rejected: str


class Unusable(Exception):
    """A well-formed row that teaches nothing; its text is the reason, to count such rows by."""


def find_format(record) -> str:
    """The name of the format that has the fields of this record."""
    data = record.data
    prompt, *sides = (data.get(field) for field in ("prompt", *SIDES))
    if data.keys() >= set(SIDES) and any(isinstance(value, list) for value in [prompt, *sides]):
        return "messages"
    for name, fields in FIELDS.items():
        if data.keys() >= set(fields):
            return name
    if any(isinstance(value, str) and value.startswith(HUMAN) for value in sides):
        return "transcript"
    found = [repr(key)[1:-1][:40] for key in data][:30]

    def likeness(fields):
        return sum(bool(difflib.get_close_matches(field, found, n=1)) for field in fields)

    nearest = max(FIELDS.values(), key=likeness)
    missing = next(field for field in nearest if field not in data)
    nearest = f"nearest is {', '.join(nearest)}: {missing} is missing"
    raise UserError(f"{record.where}: fields found: {', '.join(found) or '-'}; {nearest}")


def example(record, name) -> Example:
    """Read a record in the named format; UserError if malformed, Unusable if it teaches nothing."""
    prompt, chosen, rejected = FORMATS[name](record)
    if not chosen.strip() or not rejected.strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return Example(record.where, prompt, chosen, rejected)


# --- one function per kind: record -> prompt, chosen, rejected -----------------------------------


def _texts(field, record):
    prompt, system = records.text(record, field), _system(record)
    if field == "instruction" and _optional(record, "input"):
        prompt += "\n" + record.data["input"]
    if system:
        prompt = [*system, {"role": "user", "content": prompt}]
    return prompt, *(_response(record, side) for side in SIDES)


def _chat(field, sides, record):
    """A side that begins with the assistant continues the prompt; any other has it in itself."""
    _only_text(record, "", record.data)
    prompt, system = record.data.get(field), _system(record)
    given = system
    if isinstance(prompt, list) or field != "prompt":
        given = _in_order(record, field, system + _turns(record, field), "user")
    elif prompt is not None:
        given = [*system, {"role": "user", "content": records.text(record, field)}]
    whole = []
    for side in sides:
        turns = _turns(record, side)
        turns = (given if turns[0]["role"] == "assistant" else system) + turns
        whole.append(_in_order(record, side, turns, "assistant"))
    (*lead, chosen), (*other, rejected) = whole
    # beside whole conversations, a prompt that is one text repeats one of their turns
    if lead != other or isinstance(prompt, list) and lead[: len(given)] != given:
        raise Unusable("prompts differ")
    return lead, chosen["content"], rejected["content"]


def _openai(record):
    given = record.data.get("input")
    if not isinstance(given, dict):
        raise _error(record, "input", given, 'give {"messages": [...]}')
    _only_text(record, "input.", given)
    data = record.data | {"input.messages": given.get("messages")}
    return _chat("input.messages", FIELDS["openai"][1:], records.Record(record.where, data))


def _transcript(record):
    data = {}
    for side in SIDES:
        text = _response(record, side)
        if not text.strip():
            raise Unusable("empty response")
        if not text.startswith(HUMAN):
            raise _error(record, side, text, f"begin it with {HUMAN!r}")
        _, *parts = re.split(r"\n\n(Human|Assistant):", text)
        if parts[-2] == "Human":  # they differ in a human's turn, or were cut before the answer
            raise Unusable("prompts differ")
        turns = zip(parts[::2], parts[1::2], strict=True)
        data[side] = [{"role": who.lower(), "content": said.strip()} for who, said in turns]
    return _chat("prompt", SIDES, records.Record(record.where, data))


FORMATS = {name: functools.partial(_texts, name) for name in TEXTS} | {
    "messages": functools.partial(_chat, "prompt", SIDES),
    "sharegpt": functools.partial(_chat, "conversations", SIDES),
    "transcript": _transcript,
    "openai": _openai,
}


# --- what they are made of -----------------------------------------------------------------------


def _error(record, path, value, hint):
    return UserError(f"{record.where}: {path} is {value!r:.60}; {hint}")


def _only_text(record, path, data):
    for key in NOT_TEXT:
        if data.get(key):
            raise _error(record, path + key, data[key], "only text is read: remove it")


def _optional(record, field):
    """A text that may be absent: tables write null or "" where it is."""
    value = record.data.get(field)
    return "" if value is None or not str(value).strip() else records.text(record, field)


def _system(record):
    content = _optional(record, "system")
    return [{"role": "system", "content": content}] if content else []


def _response(record, field):
    """A text that may be empty: such a row is counted, not refused."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else records.text(record, field)


def _turns(record, field):
    """The messages of a field; a text is the assistant's, whose last message may be empty."""
    value = record.data[field] if field in record.data else records.text(record, field)
    if isinstance(value, str):
        value = {"role": "assistant", "content": _response(record, field)}
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise _error(record, field, value, "give a list of messages")
    turns = []
    for number, turn in enumerate(value):
        path = f"{field}[{number}]"
        if not isinstance(turn, dict):
            raise _error(record, path, turn, 'give {"role": ..., "content": ...}')
        _only_text(record, f"{path}.", turn)
        who, what = ("from", "value") if "from" in turn else ("role", "content")
        role, content = turn.get(who), turn.get(what)
        if not isinstance(role, str) or role not in ROLES:
            raise _error(record, f"{path}.{who}", role, "give system, user or assistant")
        if not isinstance(content, str):
            raise _error(record, f"{path}.{what}", content, "only text is read: give a string")
        may_be_empty = turn is value[-1] and ROLES[role] == "assistant"
        part = records.Record(record.where, {f"{path}.{what}": content})
        content = (_response if may_be_empty else records.text)(part, f"{path}.{what}")
        turns.append({"role": ROLES[role], "content": content})
    return turns


def _in_order(record, field, turns, last):
    """The turns, if user and assistant alternate behind an optional system and `last` is last."""
    roles = [turn["role"] for turn in turns]
    talk = roles[roles[:1] == ["system"] :]
    if talk[-1:] != [last] or talk != (["user", "assistant"] * len(talk))[: len(talk)]:
        hint = f"give user and assistant by turns, {last} last; system may be first"
        raise UserError(f"{record.where}: {field} has the roles {', '.join(roles):.60}; {hint}")
    return turns
