"""Preference rows that are conversations -> prompt, chosen, rejected: see preference_data."""

import re

from ddp_utils import UserError, data, preference_data
from ddp_utils.preference_data import HUMAN, MORE, SIDES, WEIGHTS, Unusable

ROLES = {"human": "user", "gpt": "assistant"}
ROLES |= {name: name for name in ("system", "developer", "user", "assistant", "tool")}
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
        replies.append(reply_of(reply))
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
        read = preference_data.response if role == "assistant" else data.text
        return [{"role": role, "content": read(record, field)}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise preference_data.error(record, field, value, "give a list of messages")
    turns = []
    for number, turn in enumerate(value):
        path = f"{field}[{number}]"
        preference_data.text_only(record, path, turn, weights=(None, 0, 1))
        name = "from" if "from" in turn else "role"
        role = str(turn.get(name))
        if role not in ROLES:
            hint = "give system, developer, user, assistant or tool"
            raise preference_data.error(record, f"{path}.{name}", turn.get(name), hint)
        keys = (*MORE, "name") if role == "tool" else MORE
        more = {key: turn[key] for key in keys if turn.get(key)}
        if "tool_calls" in more:
            more["tool_calls"] = _calls(record, f"{path}.tool_calls", more["tool_calls"])
        name = "value" if "value" in turn else "content"
        content = _text(record, f"{path}.{name}", turn.get(name), more)
        last = number + 1 == len(value)
        may_be_empty = ROLES[role] == "assistant" and (last or more)
        read = preference_data.response if may_be_empty else data.text
        read(data.Record(record.location, {f"{path}.{name}": content}), f"{path}.{name}")
        turns.append({"role": ROLES[role], "content": content, **more})
        if 0 in map(turn.get, WEIGHTS):
            turns[-1]["weight"] = 0
    return turns


def _text(record, path, content, more):
    """Return the text of a message, or of its parts; "" where it has tool calls or a thought."""
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise preference_data.error(record, path, part, "only text is read: cut it")
            texts.append(part["text"])
        return "".join(texts)
    if content is None and more:
        return ""
    if not isinstance(content, str):
        raise preference_data.error(record, path, content, "only text is read: give a string")
    return content


def _calls(record, path, calls):
    """Return tool calls whose arguments are objects, as templates want them; OpenAI's are texts."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            hint = 'give [{"function": {"name": ..., "arguments": {...}}}]'
            raise preference_data.error(record, path, calls, hint)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = data.decode(arguments, f"{record.location}: {path}")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def reply_of(turn):
    """Return the text of a turn, or the turn if there is more to it."""
    return turn if turn.keys() & {*MORE} else turn["content"]


def in_order(record, field, turns, last):
    """Return the turns if user and assistant alternate and `last` is last.

    System, or developer, may be first; tools may answer an assistant, who then goes on.
    """
    roles = [turn["role"] for turn in turns]
    letters = "".join(role[0] for role in roles) + ("a" if last == "user" else "")
    if not re.fullmatch("[sd]?(u(at+)*a)+", letters):
        hint = f"give user and assistant by turns, {last} last; system may be first"
        raise UserError(f"{record.location}: {field} has the roles {', '.join(roles):.60}; {hint}")
    return turns
