"""Rows of conversations -> prompt, chosen, rejected; the formats are listed in preference_data."""

import re
from typing import Any

from ddp_utils import UserError, data
from ddp_utils.data import Record, Unusable
from lm import chat_template, message_texts
from lm.chat_template import (
    HUMAN,
    ROLES,
    THOUGHTS,
    Encoder,
    Prompt,
    Reply,
    check_text_only,
    system_of,
)

UNORDERED = "user and assistant do not alternate"
QUESTIONS = ("question", "instruction", "messages", "conversations", "query", "input")
TURN = re.compile(r"(?s)\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)")
FIRST_HUMAN = re.compile(r"\A\s*Human:")
# First letters of the roles, the last of which is the assistant's. Any other order than the usual
# one depends on the template: a system turn alone, the assistant first, two users in a row.
USUAL = "[sd]?(u(at+)*a)+"
POSSIBLE = "(?!a$)[sd]?u*(at+)*a(u+(at+)*a)*"
BASIC = {"role", "from", "content", "value", "name"}  # of a message
BASIC |= {*chat_template.WEIGHTS, *chat_template.MEDIA}
# what most templates show besides; function_call is read as tool_calls
MORE = {*THOUGHTS, "tool_calls", "tool_call_id", "function_call"}


def chat(record: Record, field: str, *sides: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a row of messages.

    A response that begins with the assistant continues the prompt, unless the last turn of the
    prompt is in it; any other one includes the prompt.
    """
    if field == "input":  # OpenAI's
        value: Any = record.data.get(field)
        check_text_only(record, "input", value)
        field = "input.messages"
        record = record._replace(data={**record.data, field: value.get("messages")})
    system = system_of(record)
    before = system
    if field != "prompt" or record.data.get(field) is not None:
        turns = with_system(record, messages_of(record, field, "user"))
        before = _without_weights(check_order(record, field, turns, "user"))
    last = before[len(system) :][-1:]  # the question, unless there is no prompt
    prompts = []
    replies = []
    for side in sides:
        turns = messages_of(record, side)
        is_whole = turns[0]["role"] != "assistant" or last and last[0] in turns
        turns = with_system(record, turns) if is_whole else before + turns
        if field == "prompt" and not last and not is_asked(turns):
            for name in filter(record.data.get, QUESTIONS):
                hint = f"use --columns prompt={name}"
                raise UserError(f"{record.location}: prompt: missing, but there is {name}; {hint}")
        *prompt, reply = check_order(record, side, turns, "assistant")
        if "weight" in reply:
            raise UserError(f"{record.location}: {side}: the weight of its reply must not be 0")
        prompts.append(_without_weights(prompt))
        replies.append(reply_of(reply))
    # a prompt that is one text repeats a turn of conversations that are complete
    stated = before if isinstance(record.data.get(field), list) else []
    text = "" if stated else str(record.data.get(field) or "").strip()
    is_lost = not any(text in (turn["content"] or "") for turn in prompts[0])
    begin_alike = prompts[0][: len(stated)] == prompts[1][: len(stated)] == stated
    if stated and begin_alike and prompts[0] != prompts[1]:
        raise Unusable("turns before the last reply differ")
    if prompts[0] != prompts[1] or not begin_alike or is_lost:
        raise Unusable("prompts differ")
    return prompts[0], replies[0], replies[1]


def with_system(record: Record, turns: list[dict]) -> list[dict]:
    """Return the turns of a row behind its system text; they may begin with the same text."""
    system = system_of(record)
    if system and turns and turns[0]["role"] == "system":
        if turns[0]["content"].strip() != system[0]["content"].strip():
            problem = "the messages begin with another system turn; remove one of them"
            raise UserError(f"{record.location}: system: {problem}")
        return turns
    return system + turns


def is_asked(prompt: list[dict]) -> bool:
    """Return whether a prompt has the turn of a user."""
    return any(turn["role"] == "user" for turn in prompt)


def _without_weights(turns: list[dict]) -> list[dict]:
    """Return the turns of a prompt, none of which is trained."""
    return [{name: turn[name] for name in turn if name != "weight"} for turn in turns]


def transcript(record: Record, *sides: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of two texts of turns."""
    conversations: dict = {turn["role"]: turn["content"] for turn in system_of(record)}
    prompt = str(record.data.get("prompt") or "")
    if prompt and not prompt.startswith(HUMAN):  # it repeats a turn of both
        conversations["prompt"] = prompt
    for side in sides:
        text = data.text(record, side, may_be_empty=True)
        if not text.strip():
            raise Unusable("empty response")
        text = FIRST_HUMAN.sub(HUMAN, text)
        if not text.startswith(HUMAN):
            text = prompt + text
        if not text.startswith(HUMAN):
            raise data.wrong_value(record, side, text, f"a text that begins with {HUMAN!r}")
        conversations[side] = [
            {"role": ROLES[role.lower()], "content": content.strip()}
            for role, content in TURN.findall(text)
        ]
    try:
        turns, *replies = chat(record._replace(data=conversations), "prompt", *sides)
    except UserError as error:  # a few rows of HH
        raise Unusable(UNORDERED) from error
    if isinstance(turns, list) and not re.fullmatch(USUAL, letters_of(turns) + "a"):
        raise Unusable(UNORDERED)
    return turns, replies[0], replies[1]


def with_known_fields(
    record: Record, fields: tuple[str, ...], shown: set[str]
) -> tuple[Record, set[str]]:
    """Return a record without the fields of messages that nobody reads, and the names of these.

    shown: fields of a message that the chat template shows.
    """
    unread: set[str] = set()

    def known(field: str, value: Any) -> Any:
        if isinstance(value, list):
            return [known(field, item) for item in value]
        if not isinstance(value, dict):
            return value
        if "messages" in value:
            return {**value, "messages": known(field, value["messages"])}
        others = value.keys() - BASIC - MORE - shown if value.keys() & BASIC else set()
        for name in others:
            if value[name] not in chat_template.EMPTY:
                unread.add(f"{field}[].{name}")
        return {name: value[name] for name in value if name not in others}

    values = dict(record.data)
    for name in record.data.keys() & {*fields}:
        values[name] = known(name, values[name])
    return record._replace(data=values), unread


def messages_of(record: Record, field: str, role: str = "assistant") -> list[dict]:
    """Return the messages in a field; a text is one of `role`.

    A message has "role", "content", "weight" if that is 0, and what else it has.
    """
    value = record.data.get(field)
    if field not in record.data or isinstance(value, str):
        content = data.text(record, field, may_be_empty=role == "assistant")
        return [{"role": role, "content": content}]
    value = [value] if isinstance(value, dict) else value
    if message_texts.is_parts(value):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise data.wrong_value(record, field, value, "a list of messages")
    if any(isinstance(item, dict) and item.get("tool_calls", "") is None for item in value):
        value = data.without_nulls(value)  # from a table, which adds the keys of other rows
    messages = []
    for number, message in enumerate(value, start=1):
        place = f"{field}[{number - 1}]"
        messages.append(_message(record, place, message, is_last=number == len(value)))
    return messages


def _message(record: Record, place: str, message: Any, is_last: bool) -> dict:
    is_trained = check_text_only(record, place, message, may_be_0=True)
    if message.get("function_call") and not message.get("tool_calls"):  # OpenAI's older form
        message = {**message, "tool_calls": [message["function_call"]]}
    message = {key: message[key] for key in message if key != "function_call"}
    name = "role" if message.get("from") is None else "from"
    role = ROLES.get(str(message.get(name)).lower())
    if str(message.get(name)).lower() == "function_call":  # of LLaMA-Factory: the text is the call
        key = "content" if message.get("value") is None else "value"
        field = f"{place}.{key}"
        text = data.text(Record(record.location, {field: message.get(key)}), field)
        calls = data.decode(text, f"{record.location}: {field}")
        message = {"tool_calls": calls if isinstance(calls, list) else [calls], "content": ""}
    if not role:
        expected = "system, developer, user, assistant or tool"
        raise data.wrong_value(record, f"{place}.{name}", message.get(name), expected)
    names = message.keys() - (BASIC - {"name"} if role == "tool" else BASIC)
    more = {key: message[key] for key in message if key in names and message[key]}
    for key in more.keys() & {*THOUGHTS}:
        data.text(Record(record.location, {f"{place}.{key}": more[key]}), f"{place}.{key}", True)
    if "tool_calls" in more:
        from lm import tool_calls

        more["tool_calls"] = tool_calls.read(record, f"{place}.tool_calls", more["tool_calls"])
    name = "content" if message.get("value") is None else "value"
    content = message.get(name)
    if content is None and more:
        content = ""
    if role != "tool":  # whose results may have this form
        content = message_texts.parts_in(content)
    if isinstance(content, list):
        content = "".join(_text_of_part(record, f"{place}.{name}", part) for part in content)
    may_be_empty = role != "user" and (role != "assistant" or is_last or bool(more))
    field = f"{place}.{name}"
    data.text(Record(record.location, {field: content}), field, may_be_empty)
    if not is_trained:
        more["weight"] = 0
    return {"role": role, "content": content, **more}


def _text_of_part(record: Record, place: str, part: Any) -> str:
    """Return the text of a part of a content, {"type": "text", "text": ...}."""
    is_text = isinstance(part, dict) and part.get("type") in message_texts.TEXT_TYPES
    if not is_text or not isinstance(part.get("text"), str):
        raise UserError(f"{record.location}: {place}: only text is supported; remove it")
    return part["text"]


def reply_of(turn: dict) -> Reply:
    """Return the text of a turn, or the turn if there is more to it."""
    return turn if turn.keys() - {"role", "content", "weight"} else turn["content"]


def check_order(record: Record, field: str, turns: list[dict], last: str) -> list[dict]:
    """Return the turns if the order of their roles is possible and the role `last` is last.

    A system or developer turn may be first; tools may answer an assistant, who then continues.
    """
    if not re.fullmatch(POSSIBLE, letters_of(turns) + ("a" if last == "user" else "")):
        expected = f"expected user and assistant alternately, {last} last; system may be first"
        problem = f"the roles are {roles_of(turns)} ({expected})"
        raise UserError(f"{record.location}: {field}: {problem}")
    return turns


def letters_of(turns: list[dict]) -> str:
    """Return the first letter of each role."""
    return "".join(turn["role"][0] for turn in turns)


def roles_of(turns: list[dict]) -> str:
    """Return the roles for a message."""
    return f"{', '.join(turn['role'] for turn in turns):.60}"


def check_accepted(encoder: Encoder, prompt: Prompt) -> None:
    """Raise UserError if the chat template does not accept the turns of a prompt, or omits one.

    Turns are looked for in the rendered text if there are results of tools, or if the order of the
    roles is unusual.
    """
    if isinstance(prompt, str):
        return
    letters = letters_of(prompt)
    is_usual = re.fullmatch(USUAL, letters + "a")
    if is_usual and "t" not in letters:
        return
    # a template may leave out the text beside a call
    texts = {n: f"@{n}@" for n, turn in enumerate(prompt) if "tool_calls" not in turn}
    marked = [{**turn, "content": texts.get(n, turn["content"])} for n, turn in enumerate(prompt)]
    try:
        text = encoder.text(marked)
    except UserError as error:
        if is_usual:  # the template expects a result of another form
            return
        problem = str(error)
    else:
        is_moved = letters[:2] == "sa" and "@0@\n\n@1@" in text  # system -> assistant
        if all(mark in text for mark in texts.values()) and not is_moved:
            return
        problem = "it leaves out a turn"
    problem = f"the chat template does not accept the roles {roles_of(prompt)} ({problem})"
    raise UserError(f"prompt: {problem}; change the turns, or use another --chat_template")
