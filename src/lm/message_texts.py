"""Messages, or the parts of a content, that a row holds as text, as the columns of tables do."""

import contextlib
import re
from typing import Any

from ddp_utils import UserError, data
from ddp_utils.data import Record
from lm.chat_template import ROLES

# how a text begins that is the text of messages, or of the parts of a content, and what it has: a
# role and a text or a call, or a type and a text
OPENING = re.compile(r"""\s*(?:(?:array\(|[\[(])\s*)*\{\s*["']\w+["']\s*:""")
ROLE = rf"""["'](?:role|from)["']\s*:\s*["'](?i:{"|".join(ROLES)})["']"""
OF_MESSAGE = [re.compile(ROLE)]
OF_MESSAGE += [re.compile(r"""["'](?:content|value|tool_calls)["']\s*:\s*["'\[Nn]""")]
OF_PART = [re.compile(r"""["']type["']\s*:\s*["'](?:input_|output_)?text["']""")]
OF_PART += [re.compile(r"""["']text["']\s*:\s*["']""")]
NAMES = [({"role", "from"}, {"content", "value", "tool_calls"}), ({"type"},)]
EXCEL = 32_767  # Excel keeps so many characters of a cell


def messages_in(value: Any) -> Any:
    """Return the messages, or parts, whose JSON text a value is; any other value as it is.

    The text may be encoded twice.
    """
    decoded: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        is_encoded_twice = isinstance(value, str) and value.startswith(('"[', '"{'))
        text = data.ROWS.decode(value) if is_encoded_twice else value
        decoded = data.ROWS.decode(text) if is_text_of_messages(text) else None
    first = decoded.get("messages", decoded) if isinstance(decoded, dict) else decoded
    while first and isinstance(first, list):
        first = first[0]
    keys = {*first} if isinstance(first, dict) else set()
    return decoded if any(all(names & keys for names in shape) for shape in NAMES) else value


def is_text_of_messages(value: Any) -> bool:
    """Return whether a value is a text that looks like messages or parts, or like one of them."""
    is_text = isinstance(value, str) and OPENING.match(value)
    is_whole = is_text and (value.rstrip()[-1] in "]})" or len(value) >= EXCEL)
    return bool(is_whole) and any(
        all(part.search(value) for part in shape) for shape in (OF_MESSAGE, OF_PART)
    )


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
