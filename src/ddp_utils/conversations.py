"""Rows of conversations -> prompt, chosen, rejected; the formats are listed in preference_data."""

import re
from typing import Any

from ddp_utils import UserError, data, preference_data
from ddp_utils.chat_template import Prompt, Reply
from ddp_utils.data import Record
from ddp_utils.preference_data import HUMAN, SIDES, WEIGHTS, Unusable, unsupported

ROLES = {"human": "user", "gpt": "assistant"}
ROLES |= {name: name for name in ("system", "developer", "user", "assistant", "tool")}
TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")
MORE = ("reasoning_content", "tool_calls", "tool_call_id")  # what a template may show of a message


def chat(record: Record, field: str, *sides: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a row of messages.

    A response that begins with the assistant continues the prompt; any other one includes it.
    """
    if field == "input":  # OpenAI's
        value: Any = record.data.get(field)
        preference_data.check_text_only(record, field, value)
        field = "input.messages"
        record = record._replace(data={**record.data, field: value.get("messages")})
    system = preference_data.system_of(record)
    before = system
    if field != "prompt" or record.data.get(field) is not None:
        turns = system + messages_of(record, field, "user")
        before = check_order(record, field, turns, "user")
    prompts = []
    replies = []
    for side in sides:
        turns = messages_of(record, side)
        turns = (before if turns[0]["role"] == "assistant" else system) + turns
        *prompt, reply = check_order(record, side, turns, "assistant")
        if "weight" in reply:
            raise UserError(f"{record.location}: {side}: the weight of its reply must not be 0")
        prompts.append([_without_weight(turn) for turn in prompt])
        replies.append(reply_of(reply))
    # a prompt that is one text repeats a turn of conversations that are complete
    stated = before if isinstance(record.data.get(field), list) else []
    stated = [_without_weight(turn) for turn in stated]
    if prompts[0] != prompts[1] or prompts[0][: len(stated)] != stated:
        raise Unusable("prompts differ")
    return prompts[0], replies[0], replies[1]


def _without_weight(turn: dict) -> dict:
    """Return a turn of a prompt, of which nothing is trained."""
    return {name: value for name, value in turn.items() if name != "weight"}


def transcript(record: Record) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of two texts of turns."""
    conversations = {}
    for side in SIDES:
        text = preference_data.response(record, side)
        if not text.strip():
            raise Unusable("empty response")
        if not text.startswith(HUMAN):
            raise data.wrong_value(record, side, text, f"a text that begins with {HUMAN!r}")
        conversations[side] = [
            {"role": ROLES[role.lower()], "content": content.strip()}
            for role, content in TURN.findall(text)
        ]
    if conversations["chosen"][:-1] != conversations["rejected"][:-1]:
        raise Unusable("prompts differ")
    try:
        return chat(record._replace(data=conversations), "prompt", *SIDES)
    except UserError as error:  # a few rows of HH
        raise Unusable("user and assistant do not alternate") from error


def messages_of(record: Record, field: str, role: str = "assistant") -> list[dict]:
    """Return the messages in a field; a text is one of `role`.

    A message has "role", "content", "weight" if that is 0, and what it has of MORE.
    """
    value = record.data.get(field)
    if field not in record.data or isinstance(value, str):
        read = preference_data.response if role == "assistant" else data.text
        return [{"role": role, "content": read(record, field)}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise data.wrong_value(record, field, value, "a list of messages")
    messages = []
    for number, message in enumerate(value):
        is_last = number + 1 == len(value)
        messages.append(_message(record, f"{field}[{number}]", message, is_last))
    return messages


def _message(record: Record, path: str, message: Any, is_last: bool) -> dict:
    preference_data.check_text_only(record, path, message, weights=(None, 0, 1))
    name = "from" if "from" in message else "role"
    role = ROLES.get(str(message.get(name)))
    if not role:
        expected = "system, developer, user, assistant or tool"
        raise data.wrong_value(record, f"{path}.{name}", message.get(name), expected)
    names = (*MORE, "name") if role == "tool" else MORE
    more = {key: message[key] for key in names if message.get(key)}
    if "tool_calls" in more:
        more["tool_calls"] = _tool_calls(record, f"{path}.tool_calls", more["tool_calls"])
    name = f"{path}.value" if "value" in message else f"{path}.content"
    content = _content(record, name, message.get(name.removeprefix(f"{path}.")), more)
    may_be_empty = role == "assistant" and (is_last or more)
    read = preference_data.response if may_be_empty else data.text
    read(record._replace(data={name: content}), name)
    if any(message.get(key) == 0 for key in WEIGHTS):
        more["weight"] = 0
    return {"role": role, "content": content, **more}


def _content(record: Record, path: str, content: Any, more: dict) -> str:
    """Return the text of a message, or of its parts; "" where it has tool calls or a thought."""
    if content is None and more:
        return ""
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise unsupported(record, path)
            texts.append(part["text"])
        return "".join(texts)
    if not isinstance(content, str):
        raise data.wrong_value(record, path, content, "a string (only text is supported)")
    return content


def _tool_calls(record: Record, path: str, calls: Any) -> list[dict]:
    """Return tool calls whose arguments are objects, as templates need; OpenAI's are texts."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            expected = '[{"function": {"name": ..., "arguments": {...}}}]'
            raise data.wrong_value(record, path, calls, expected)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = data.decode(arguments, f"{record.location}: {path}")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def reply_of(turn: dict) -> Reply:
    """Return the text of a turn, or the turn if there is more to it."""
    return turn if turn.keys() & {*MORE} else turn["content"]


def check_order(record: Record, field: str, turns: list[dict], last: str) -> list[dict]:
    """Return the turns if user and assistant alternate and the role `last` is last.

    A system or developer turn may be first; tools may answer an assistant, who then continues.
    """
    roles = [turn["role"] for turn in turns]
    letters = "".join(role[0] for role in roles) + ("a" if last == "user" else "")
    if not re.fullmatch("[sd]?(u(at+)*a)+", letters):
        expected = f"expected user and assistant alternately, {last} last; system may be first"
        problem = f"the roles are {', '.join(roles):.60} ({expected})"
        raise UserError(f"{record.location}: {field}: {problem}")
    return turns
