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
import itertools
import re
import reprlib
from typing import NamedTuple

from ddp_utils import UserError, records

SIDES = ("chosen", "rejected")
OUTPUTS = ("preferred_output", "non_preferred_output")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> what a row must have
FIELDS |= {"sharegpt": ("conversations", *SIDES), "openai": ("input", *OUTPUTS)}
ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "user", "assistant")}
NOT_TEXT = ("tools", "tool_calls", "function_call", "image", "images")
NOT_TEXT += ("audio", "audios", "video", "videos")
WEIGHTS = ("weight", "loss_weight", "train", "loss", "label")  # of a row or message: 1, true or 0
READ_INSIDE = [(), *((key,) for key in ("role", "content", "from", "value", *WEIGHTS))]
HUMAN = "\n\nHuman:"
TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")


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
    raise unknown(record, FIELDS.values())


def unknown(record, shapes) -> UserError:
    """Says which fields a record has, and what it lacks to be of the nearest shape (its fields)."""
    names = [repr(key)[1:-1][:40] for key in record.data]
    known = sum(shapes, ())
    meant = set(sum((difflib.get_close_matches(name, known, n=1) for name in names), []))
    nearest = max(shapes, key=lambda fields: len(meant & set(fields)))
    missing = next(field for field in nearest if field not in record.data)
    nearest = f"nearest is {', '.join(nearest)}: {missing} is missing"
    return UserError(f"{record.where}: fields found: {', '.join(names) or '-':.200}; {nearest}")


def unread(record, name) -> set:
    """The dotted paths that nothing reads: extra fields, and misspelt `system`s."""
    read = {"messages": FIELDS["prompt"], "transcript": SIDES, **FIELDS}[name]
    also = ("system", "input") if name == "instruction" else ("system",)
    return unread_paths(record, {*read, *also})


def unread_paths(record, fields) -> set:
    """The dotted paths to what is neither in these fields nor in their messages, at any depth."""
    unread = set()
    waiting = [((), record.data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, "[]"), inner) for inner in value]
        elif value not in (None, ""):  # which tables write where there is nothing
            inside = tuple(key for key in path[1:] if key not in ("[]", "messages"))
            if path[0] not in {*fields, *WEIGHTS} or inside not in READ_INSIDE:
                unread.add(".".join(path).replace(".[]", "[]"))
    return unread


def example(record, name) -> Example:
    """Read a record in the named format; UserError if malformed, Unusable if it teaches nothing."""
    text_only(record, "", record.data)
    prompt, chosen, rejected = FORMATS[name](record)
    if not chosen.strip() or not rejected.strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return Example(record.where, prompt, chosen, rejected)


# --- one function per kind: record -> prompt, chosen, rejected -----------------------------------


def _texts(record, field):
    prompt = question(record, field, field == "instruction")
    return prompt, *(response(record, side) for side in SIDES)


def _chat(record, field="prompt", sides=SIDES):
    """A side that begins with the assistant continues the prompt; any other has it in itself."""
    prompt = record.data.get(field)
    system = system_of(record)
    given = system
    if isinstance(prompt, list) or field != "prompt":
        given = in_order(record, field, system + turns_of(record, field), "user")
    elif prompt is not None:
        given = [*system, {"role": "user", "content": records.text(record, field)}]
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
    return _chat(records.Record(record.where, data))


def _openai(record):
    given = text_only(record, "input", record.data.get("input"))
    data = record.data | {"input.messages": given.get("messages")}
    return _chat(records.Record(record.where, data), "input.messages", OUTPUTS)


FORMATS = {name: functools.partial(_texts, field=name) for name in TEXTS}
FORMATS |= {"messages": _chat, "sharegpt": functools.partial(_chat, field="conversations")}
FORMATS |= {"transcript": _transcript, "openai": _openai}


# --- what they are made of -----------------------------------------------------------------------


def error(record, path, value, hint):
    return UserError(f"{record.where}: {path} is {reprlib.repr(value):.100}; {hint}")


def text_only(record, path, value, weights=(None, 1)):
    """The value, if it is an object and holds nothing that training on text would ignore.

    weights: what it may say of how much it counts.
    """
    if not isinstance(value, dict):
        raise error(record, path, value, "give an object, {...}")
    for key in filter(value.get, NOT_TEXT):
        raise error(record, f"{path}.{key}".strip("."), value[key], "only text is read: cut it")
    for key in WEIGHTS:
        if value.get(key) not in weights:
            hint = "give rows that count 1 or true, of KTO those with label true"
            raise error(record, f"{path}.{key}".strip("."), value[key], hint)
    return value


def optional(record, field):
    """[text], or [] where it is absent: tables write null or "" there."""
    value = record.data.get(field)
    return [] if value is None or not str(value).strip() else [records.text(record, field)]


def system_of(record):
    return [{"role": "system", "content": text} for text in optional(record, "system")]


def question(record, field, has_input, history=()):
    """The prompt of a field: a text, or messages where something stands before it."""
    text = "\n".join([records.text(record, field), *(optional(record, "input") * has_input)])
    before = [*system_of(record), *history]
    return [*before, {"role": "user", "content": text}] if before else text


def response(record, field):
    """A text that may be empty: such a row is counted, not refused."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else records.text(record, field)


def turns_of(record, field):
    """The messages of a field; a text is the assistant's, whose last message may be empty."""
    value = record.data[field] if field in record.data else records.text(record, field)
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
        text = response if role == "assistant" and number + 1 == len(value) else records.text
        part = records.Record(record.where, {f"{path}.{what}": content})
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
