"""Read the JSON of FSDP and DeepSpeed: every key must be known, and every value have its type."""

from collections.abc import Collection
from typing import Any

from ddp_utils import UserError, cli, data


def read(path: str, hints: dict[str, Any], may_be_auto: Collection[str] = ()) -> dict[str, Any]:
    """Return the object in a JSON file.

    hints: key -> type of its value, as in a dataclass; for an object a dict of its own; for a key
    that is not supported the reason. may_be_auto: keys that may be "auto" instead.
    Raises UserError with file and line for an unknown key, or a value of another type.
    """
    settings = data.read_json(path)
    _check(settings, hints, may_be_auto, path, "")
    return settings


def _check(
    settings: dict, hints: dict[str, Any], may_be_auto: Collection[str], path: str, prefix: str
) -> None:
    for key, value in settings.items():
        name = prefix + key
        line = line_of(name, path)
        hint: Any = hints.get(key)
        if key not in hints:
            raise UserError(f"{line}: {cli.unknown(key, list(hints))}")
        if isinstance(hint, str):
            raise UserError(f"{line}: {name}: {hint}; leave it out")
        if value == "auto" and key in may_be_auto:
            continue
        is_section = isinstance(hint, dict)
        cli.check_type(f"{line}: {name}", dict if is_section else hint, value)
        if is_section:
            _check(value, hint, may_be_auto, path, f"{name}.")


def set_from_json(config: Any, values: dict[str, Any], path: str, places: dict[str, str]) -> None:
    """Set settings to their values in the JSON; flags and YAML must have the same.

    values: setting -> (key, value) in the JSON; places: setting -> file and line, or flag.
    """
    for name, (key, value) in values.items():
        if value in (None, "auto"):
            continue
        place = f"{line_of(key, path)}: {key}"
        other = getattr(config, name)
        if name in places and other not in ("auto", value):
            conflict = f"{places[name]} is {other}, but {place} is {value}"
            raise UserError(f"{conflict}; make them equal, or leave one of them out")
        setattr(config, name, value)
        places[name] = place


def line_of(name: str, path: str) -> str:
    """Return `path:line` of a key in a JSON file; a dotted name is a key of an inner object."""
    text = data.content(path)
    position = 0
    for key in name.split("."):
        position = max(position, text.find(f'"{key}"', position))
    return f"{path}:{1 + text.count(chr(10), 0, position)}"
