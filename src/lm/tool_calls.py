"""Tools and their calls: in rows of data, and in the form that a chat template renders.

This module is imported only for rows and templates that have them.
"""

import json
from collections.abc import Callable
from typing import Any

from ddp_utils import data
from ddp_utils.data import Record


def template_arguments(record: Record, check: Callable[[Any, str], dict]) -> dict:
    """Return a row's arguments for the chat template: its tools and chat_template_kwargs.

    check: chat_template.Encoder.check_arguments, for arguments and the place where they are.
    """
    tools, arguments = tools_of(record), record.data.get("chat_template_kwargs")
    place = f"{record.location}: chat_template_kwargs"
    arguments = check(arguments or {}, place)
    place = f"{record.location}: tools"
    if isinstance(tools, str):
        tools = data.decode(tools, place) if tools.strip() else None
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools and not is_list:
        raise data.wrong_value(record, "tools", tools, "a list of objects")
    arguments |= check({"tools": tools} if tools else {}, place)
    check_finite(record, "tools or chat_template_kwargs", arguments)
    return arguments


def tools_of(record: Record) -> Any:
    """Return the tools of a row as its file has them; None if there are none."""
    source = record.data.get("input")
    return (source if isinstance(source, dict) else record.data).get("tools")  # input: of openai


def without_nulls_of_tables(record: Record) -> Record:
    """Return a record without nulls in its objects, if its tools show that it is from a table.

    The library datasets gives each row the keys of all rows, also in the JSON that it writes.
    """
    if not is_of_table(tools_of(record)):
        return record
    return record._replace(data={k: data.without_nulls(v) for k, v in record.data.items()})


def is_of_table(schema: Any) -> bool:
    """Return whether there is a null where a JSON schema has none."""
    if isinstance(schema, list):
        return any(map(is_of_table, schema))
    if not isinstance(schema, dict):
        return False
    for key, value in schema.items():
        if is_of_table(value) or value is None and key not in ("default", "const"):
            return True
    return False


# other names of the arguments of a call: LangChain, Llama, Anthropic
ARGUMENTS = {"args": "arguments", "parameters": "arguments", "input": "arguments"}


def read(record: Record, place: str, calls: Any) -> list[dict]:
    """Return the calls of a message; their arguments are objects or, as in OpenAI's, JSON texts."""
    check_finite(record, place, calls)
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            expected = '[{"function": {"name": ..., "arguments": {...}}}]'
            raise data.wrong_value(record, place, calls, expected)
        function = {ARGUMENTS.get(name, name): value for name, value in function.items()}
        call = call if "function" in call else function
        others = function.keys() - {"name", "arguments", "id", "type", "index", "description"}
        if "arguments" not in function and any(map(function.get, others)):
            raise data.wrong_value(record, place, calls, 'calls with "arguments"')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):  # the chat template may need it decoded
            data.decode(arguments, f"{record.location}: {place}")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def with_arguments(call: dict, as_text: bool) -> dict:
    """Return a call whose arguments are a JSON text (as_text) or an object."""
    arguments = call["function"]["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def check_finite(record: Record, field: str, value: Any) -> None:
    """Raise UserError if NaN, infinity or half a surrogate pair is somewhere in a value."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        expected = "without NaN, infinity and half surrogate pairs"
        raise data.wrong_value(record, field, value, expected) from error
