"""Preference rows that are conversations -> prompt, chosen, rejected: see preference_data."""

import functools
import itertools
import re

from ddp_utils import UserError, jsonl
from ddp_utils.preference_data import (
    HUMAN,
    SIDES,
    WEIGHTS,
    Unusable,
    error,
    response,
    system_of,
    text_only,
)

OUTPUTS = ("preferred_output", "non_preferred_output")
ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "user", "assistant")}
TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")


def _chat(record, field="prompt", sides=SIDES):
    """A side that begins with the assistant continues the prompt; any other has it in itself."""
    prompt = record.data.get(field)
    system = system_of(record)
    given = system
    if isinstance(prompt, list) or field != "prompt":
        given = in_order(record, field, system + turns_of(record, field), "user")
    elif prompt is not None:
        given = [*system, {"role": "user", "content": jsonl.text(record, field)}]
    whole = []
    for side in sides:
        turns = turns_of(record, side)
        if "weight" in turns[-1]:
            raise UserError(f"{record.where}: {side}: its reply has the weight 0; leave it out")
        turns = (given if turns[0]["role"] == "assistant" else system) + turns
        whole.append(in_order(record, side, turns, "assistant"))
    (*lead, chosen), (*other, rejected) = whole
    for turn in given + lead + other:
        turn.pop("weight", None)  # nothing of a prompt is trained
    # beside whole conversations, a prompt that is one text repeats one of their turns
    if lead != other or isinstance(prompt, list) and lead[: len(given)] != given:
        raise Unusable("prompts differ")
    return lead, chosen["content"], rejected["content"]


def _transcript(record):
    data = {}
    for side in SIDES:
        text = response(record, side)
        if not text.strip():
            raise Unusable("empty response")
        if not text.startswith(HUMAN):
            raise error(record, side, text, f"begin it with {HUMAN!r}")
        turns = TURN.findall(text)
        if turns[-1][0] == "Human":  # they differ in a human's turn, or were cut before the answer
            raise Unusable("prompts differ")
        data[side] = [{"role": ROLES[who.lower()], "content": what.strip()} for who, what in turns]
    if data["chosen"][:-1] != data["rejected"][:-1]:
        raise Unusable("prompts differ")
    pairs = itertools.pairwise(data["chosen"])  # their last turns are both the assistant's
    if any(before["role"] == after["role"] for before, after in pairs):
        raise Unusable("two turns of one side in a row")
    if not all(turn["content"] for turn in data["chosen"][:-1]):
        raise Unusable("empty turn")
    return _chat(jsonl.Record(record.where, data))


def _openai(record):
    given = text_only(record, "input", record.data.get("input"))
    data = record.data | {"input.messages": given.get("messages")}
    return _chat(jsonl.Record(record.where, data), "input.messages", OUTPUTS)


def turns_of(record, field):
    """The messages of a field; a text is the assistant's, whose last message may be empty."""
    value = record.data[field] if field in record.data else jsonl.text(record, field)
    if isinstance(value, str):
        value = {"role": "assistant", "content": response(record, field)}
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise error(record, field, value, "give a list of messages")
    turns = []
    for number, turn in enumerate(value):
        path = f"{field}[{number}]" if value is record.data[field] else field
        text_only(record, path, turn, weights=(None, 0, 1))
        who, what = ("from", "value") if "from" in turn else ("role", "content")
        role = ROLES.get(str(turn.get(who)))
        content = turn.get(what)
        if not role:
            raise error(record, f"{path}.{who}", turn.get(who), "give system, user or assistant")
        if not isinstance(content, str):
            raise error(record, f"{path}.{what}", content, "only text is read: give a string")
        text = response if role == "assistant" and number + 1 == len(value) else jsonl.text
        part = jsonl.Record(record.where, {f"{path}.{what}": content})
        turns.append({"role": role, "content": text(part, f"{path}.{what}")})
        if 0 in map(turn.get, WEIGHTS):
            turns[-1]["weight"] = 0
    return turns


def in_order(record, field, turns, last):
    """The turns, if user and assistant alternate behind an optional system and `last` is last."""
    roles = [turn["role"] for turn in turns]
    talk = roles[roles[:1] == ["system"] :]
    if talk[-1:] != [last] or talk != (["user", "assistant"] * len(talk))[: len(talk)]:
        hint = f"give user and assistant by turns, {last} last; system may be first"
        raise UserError(f"{record.where}: {field} has the roles {', '.join(roles):.60}; {hint}")
    return turns


FORMATS = {
    "messages": _chat,
    "sharegpt": functools.partial(_chat, field="conversations"),
    "transcript": _transcript,
    "openai": _openai,
}
