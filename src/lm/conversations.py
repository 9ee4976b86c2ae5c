"""Rows of conversations -> prompt, chosen, rejected; the formats are listed in preference_data."""

import re
from typing import Any

from ddp_utils import UserError, data
from ddp_utils.data import Record, Unusable
from lm.chat_template import HUMAN, THOUGHTS, Prompt, Reply, check_text_only, system_of

TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")
ROLES = {"human": "user", "gpt": "assistant"}
ROLES |= {name: name for name in ("system", "developer", "user", "assistant", "tool")}
MORE = (*THOUGHTS, "tool_calls", "tool_call_id")  # what a template may show of a message


def chat(record: Record, field: str, *sides: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a row of messages.

    A response that begins with the assistant continues the prompt; any other one includes it.
    """
    if field == "input":  # OpenAI's
        value: Any = record.data.get(field)
        check_text_only(record, "input", value)
        field = "input.messages"
        record = record._replace(data={**record.data, field: value.get("messages")})
    system = system_of(record)
    before = system
    if field != "prompt" or record.data.get(field) is not None:
        turns = system + messages_of(record, field, "user")
        before = _without_weights(check_order(record, field, turns, "user"))
    prompts = []
    replies = []
    for side in sides:
        turns = messages_of(record, side)
        turns = (before if turns[0]["role"] == "assistant" else system) + turns
        *prompt, reply = check_order(record, side, turns, "assistant")
        if "weight" in reply:
            raise UserError(f"{record.location}: {side}: the weight of its reply must not be 0")
        prompts.append(_without_weights(prompt))
        replies.append(reply_of(reply))
    # a prompt that is one text repeats a turn of conversations that are complete
    stated = before if isinstance(record.data.get(field), list) else []
    text = "" if stated else str(record.data.get(field) or "").strip()
    is_lost = not any(text in (turn["content"] or "") for turn in prompts[0])
    if prompts[0] != prompts[1] or prompts[0][: len(stated)] != stated or is_lost:
        raise Unusable("prompts differ")
    return prompts[0], replies[0], replies[1]


def _without_weights(turns: list[dict]) -> list[dict]:
    """Return the turns of a prompt, none of which is trained."""
    return [{name: turn[name] for name in turn if name != "weight"} for turn in turns]


def transcript(record: Record, *sides: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of two texts of turns."""
    conversations = {name: record.data[name] for name in ("system",) if record.data.get(name)}
    for side in sides:
        text = data.text(record, side, may_be_empty=True)
        if not text.strip():
            raise Unusable("empty response")
        if not text.startswith(HUMAN):
            text = str(record.data.get("prompt") or "") + text
        if not text.startswith(HUMAN):
            raise data.wrong_value(record, side, text, f"a text that begins with {HUMAN!r}")
        conversations[side] = [
            {"role": ROLES[role.lower()], "content": content.strip()}
            for role, content in TURN.findall(text)
        ]
    try:
        return chat(record._replace(data=conversations), "prompt", *sides)
    except UserError as error:  # a few rows of HH
        raise Unusable("user and assistant do not alternate") from error


def messages_of(record: Record, field: str, role: str = "assistant") -> list[dict]:
    """Return the messages in a field; a text is one of `role`.

    A message has "role", "content", "weight" if that is 0, and what it has of MORE.
    """
    value = record.data.get(field)
    if field not in record.data or isinstance(value, str):
        content = data.text(record, field, may_be_empty=role == "assistant")
        return [{"role": role, "content": content}]
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise data.wrong_value(record, field, value, "a list of messages")
    messages = []
    for number, message in enumerate(value, start=1):
        place = f"{field}[{number - 1}]"
        messages.append(_message(record, place, message, is_last=number == len(value)))
    return messages


def _message(record: Record, place: str, message: Any, is_last: bool) -> dict:
    is_trained = check_text_only(record, place, message, may_be_0=True)
    name = "from" if "from" in message else "role"
    role = ROLES.get(str(message.get(name)))
    if not role:
        expected = "system, developer, user, assistant or tool"
        raise data.wrong_value(record, f"{place}.{name}", message.get(name), expected)
    names = (*MORE, "name") if role == "tool" else MORE
    more = {key: message[key] for key in names if message.get(key)}
    if "tool_calls" in more:
        from lm import tool_calls

        more["tool_calls"] = tool_calls.read(record, f"{place}.tool_calls", more["tool_calls"])
    name = "value" if "value" in message else "content"
    content = message.get(name)
    if content is None and more:
        content = ""
    if isinstance(content, list):
        content = "".join(_text_of_part(record, f"{place}.{name}", part) for part in content)
    may_be_empty = role == "assistant" and (is_last or bool(more))
    field = f"{place}.{name}"
    data.text(Record(record.location, {field: content}), field, may_be_empty)
    if not is_trained:
        more["weight"] = 0
    return {"role": role, "content": content, **more}


def _text_of_part(record: Record, place: str, part: Any) -> str:
    """Return the text of a part of a content, {"type": "text", "text": ...}."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise UserError(f"{record.location}: {place}: only text is supported; remove it")
    return part["text"]


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
