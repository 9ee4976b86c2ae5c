"""Messages, or the parts of a content, that a row holds as text, as the columns of tables do."""

import contextlib
import re
from typing import Any

from ddp_utils import UserError, data
from ddp_utils.data import Record
from lm.chat_template import ROLES

# how a text begins that is the text of messages, and what it has: a role, and a text or a call
OPENING = re.compile(r"""\s*(?:(?:array\(|[\[(])\s*)*\{\s*["']\w+["']\s*:""")
ROLE = rf"""["'](?:role|from)["']\s*:\s*["'](?i:{"|".join(ROLES)})["']"""
OF_MESSAGE = ({"role", "from"}, {"content", "value", "tool_calls"})
EXCEL = 32_767  # Excel keeps so many characters of a cell
PARTS = [re.compile(ROLE), re.compile(r"""["'](?:content|value|tool_calls)["']\s*:\s*["'\[Nn]""")]
TEXT_TYPES = (None, "text", "input_text", "output_text")  # of a part of a content


def messages_in(value: Any) -> Any:
    """Return the messages whose JSON text a value is, also of such a text; any other as it is."""
    decoded: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        is_encoded_twice = isinstance(value, str) and value.startswith(('"[', '"{'))
        text = data.ROWS.decode(value) if is_encoded_twice else value
        decoded = data.ROWS.decode(text) if is_text_of_messages(text) else None
    first = decoded.get("messages", decoded) if isinstance(decoded, dict) else decoded
    while first and isinstance(first, list):
        first = first[0]
    is_message = isinstance(first, dict) and all(names & first.keys() for names in OF_MESSAGE)
    return decoded if is_message else value


def parts_in(value: Any) -> Any:
    """Return the parts of a content whose JSON text a value is; any other value as it is."""
    decoded: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        is_list = isinstance(value, str) and value.lstrip().startswith("[")
        decoded = data.ROWS.decode(value) if is_list and OPENING.match(value) else None
    return decoded if is_parts(decoded) else value


def is_parts(value: Any) -> bool:
    """Return whether a value is a content in parts, [{"type": "text", "text": ...}, ...]."""
    return isinstance(value, list) and bool(value) and all(map(_is_text_part, value))


def _is_text_part(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.keys() == {"type", "text"}
    return is_part and isinstance(part["text"], str) and part["type"] in TEXT_TYPES


def is_text_of_messages(value: Any) -> bool:
    """Return whether a value is a text that looks like a list of messages, or like one of them."""
    is_text = isinstance(value, str) and OPENING.match(value)
    is_whole = is_text and (value.rstrip()[-1] in "]})" or len(value) >= EXCEL)
    return bool(is_whole and all(part.search(value) for part in PARTS))


def check_not_python(record: Record, name: str) -> None:
    """Raise UserError if a field is the text of messages in the notation of Python or numpy."""
    value: Any = record.data.get(name)
    if is_text_of_messages(value):
        try:
            data.ROWS.decode(value)
        except (ValueError, RecursionError) as error:
            problem = "a text of messages that is not JSON, such as str() writes in Python"
            if len(value) >= EXCEL:
                problem = f"a text of messages that is cut off; Excel keeps {EXCEL:,} characters"
            hint = "use json.dumps, or save the data as JSON Lines or Parquet"
            problem = f"{problem} (expected messages, or their JSON text); {hint}"
            raise UserError(f"{record.location}: {name}: {problem}") from error
