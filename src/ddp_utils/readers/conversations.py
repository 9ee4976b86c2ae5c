"""Preference rows that are conversations -> prompt, chosen, rejected: see preference_data."""

import re

from ddp_utils import UserError, jsonl
from ddp_utils.readers import preference_data
from ddp_utils.readers.preference_data import HUMAN, SIDES, WEIGHTS, Unusable

ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "user", "assistant")}
TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")


def chat(record, field, *sides):
    """Return prompt, chosen and rejected of rows of messages.

    A side that begins with the assistant continues the prompt; any other has it in itself.
    """
    if field == "input":  # OpenAI's
        messages = record.data.get(field)
        preference_data.text_only(record, field, messages)
        field = "input.messages"
        record = record._replace(data={**record.data, field: messages.get("messages")})
    system = preference_data.system_of(record)
    before = system
    if field != "prompt" or record.data.get(field) is not None:
        before = in_order(record, field, system + turns_of(record, field, "user"), "user")
    prompts = []
    replies = []
    for side in sides:
        turns = turns_of(record, side)
        turns = (before if turns[0]["role"] == "assistant" else system) + turns
        *prompt, reply = in_order(record, side, turns, "assistant")
        if "weight" in reply:
            raise UserError(f"{record.location}: {side}: its reply has the weight 0; leave it out")
        prompts.append(prompt)
        replies.append(reply["content"])
    for turn in sum(prompts, before):
        turn.pop("weight", None)  # nothing of a prompt is trained
    # beside whole conversations, a prompt that is one text repeats one of their turns
    given = before if isinstance(record.data.get(field), list) else []
    if prompts[0] != prompts[1] or prompts[0][: len(given)] != given:
        raise Unusable("prompts differ")
    return prompts[0], *replies


def transcript(record):
    """Return prompt, chosen and rejected of texts of turns."""
    data = {}
    for side in SIDES:
        text = preference_data.response(record, side)
        if not text.strip():
            raise Unusable("empty response")
        if not text.startswith(HUMAN):
            raise preference_data.error(record, side, text, f"begin it with {HUMAN!r}")
        turns = []
        for role, content in TURN.findall(text):
            turns.append({"role": ROLES[role.lower()], "content": content.strip()})
        data[side] = turns
    if data["chosen"][:-1] != data["rejected"][:-1]:
        raise Unusable("prompts differ")
    try:
        return chat(record._replace(data=data), "prompt", *SIDES)
    except UserError as error:  # some of HH's rows
        raise Unusable("not a question and an answer by turns") from error


def turns_of(record, field, role="assistant"):
    """Return the messages of a field; a text is one of `role`."""
    value = record.data.get(field)
    if field not in record.data or isinstance(value, str):
        read = preference_data.response if role == "assistant" else jsonl.text
        return [{"role": role, "content": read(record, field)}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise preference_data.error(record, field, value, "give a list of messages")
    turns = []
    for number, turn in enumerate(value):
        path = f"{field}[{number}]"
        preference_data.text_only(record, path, turn, weights=(None, 0, 1))
        keys = ("from", "value") if "from" in turn else ("role", "content")
        role, content = map(turn.get, keys)
        if str(role) not in ROLES:
            hint = "give system, user or assistant"
            raise preference_data.error(record, f"{path}.{keys[0]}", role, hint)
        path = f"{path}.{keys[1]}"
        if not isinstance(content, str):
            raise preference_data.error(record, path, content, "only text is read: give a string")
        last = number + 1 == len(value)
        read = preference_data.response if ROLES[role] == "assistant" and last else jsonl.text
        read(jsonl.Record(record.location, {path: content}), path)
        turns.append({"role": ROLES[role], "content": content})
        if 0 in map(turn.get, WEIGHTS):
            turns[-1]["weight"] = 0
    return turns


def in_order(record, field, turns, last):
    """Return the turns if user and assistant alternate and `last` is last; system may be first."""
    roles = [turn["role"] for turn in turns]
    talk = roles[roles[0] == "system" :]
    if talk[-1:] != [last] or talk != (["user", "assistant"] * len(talk))[: len(talk)]:
        hint = f"give user and assistant by turns, {last} last; system may be first"
        raise UserError(f"{record.location}: {field} has the roles {', '.join(roles):.60}; {hint}")
    return turns
