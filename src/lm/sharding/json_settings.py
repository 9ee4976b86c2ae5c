"""Read the settings files of DeepSpeed and accelerate: each key has its effect, or is reported."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from ddp_utils import UserError, cli, data, yaml_config

OFF: tuple = (None, False, 0, "auto", "no", "NO", [])


class Fixed(NamedTuple):
    """A key that changes nothing here; with another value than `here` it is reported."""

    here: Any = False  # what applies here in any case
    instead: str = ""  # the setting of ours that has this effect
    error: str = ""  # why the key cannot be ignored; empty: a warning is enough


def fixed(names: str, *details: Any, **more: Any) -> dict[str, Any]:
    """Return {name: Fixed(...)} for names separated by blanks."""
    return dict.fromkeys(names.split(), Fixed(*details, **more))


def load(path: str) -> dict[str, Any]:
    """Return the object in a JSON file, or in a YAML file."""
    return yaml_config.load(path) if path.endswith((".yaml", ".yml")) else data.read_json(path)


def read(
    path: str, settings: dict[str, Any], hints: dict[str, Any], may_be_auto: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that have an effect, and a warning about the others, if there are any.

    hints: key -> type of its value, as in a dataclass; for an object a dict of its own; Fixed for a
    key that has no effect. The hint of "*" is for all other keys; object fits any value.
    may_be_auto: keys that may be "auto" instead.
    Raises UserError with file and line for an unknown key, a value of another type, or a key that
    is not supported.
    """
    unused: dict[str, list[str]] = {}  # setting to use instead -> keys

    def check(settings: dict[str, Any], hints: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        kept = {}
        for key, value in settings.items():
            if key.startswith("_") or key == "comment":
                continue
            name = prefix + key
            line = line_of(name, path)
            hint: Any = hints.get(key, hints.get("*"))
            if hint is None:
                raise UserError(f"{line}: {cli.unknown(key, list(hints))}")
            if value is None or isinstance(hint, Fixed) and is_here(value, hint):
                continue
            if isinstance(hint, Fixed):
                if hint.error:
                    raise UserError(f"{line}: {name}: {hint.error}; leave it out")
                unused.setdefault(hint.instead, []).append(name)
            elif isinstance(hint, dict):
                cli.check_type(f"{line}: {name}", dict, value)
                kept[key] = check(value, hint, f"{name}.")
            else:
                if hint is not object and not (value == "auto" and key in may_be_auto):
                    cli.check_type(f"{line}: {name}", hint, value)
                kept[key] = value
        return kept

    kept = check(settings, hints)
    groups = []
    for instead, names in unused.items():
        groups.append(", ".join(names) + (f" (use {instead})" if instead else ""))
    return kept, [f"warning: {path}: no effect here: {'; '.join(groups)}"] if groups else []


def is_here(value: Any, hint: Fixed) -> bool:
    """Return whether a value asks for what applies in any case."""
    return value in ("auto", hint.here) or hint.here is False and is_off(value)


def is_off(value: Any) -> bool:
    """Return whether the value of a key switches a feature off, also as {"enabled": false}."""
    if isinstance(value, dict):
        return all(map(is_off, [value["enabled"]] if "enabled" in value else value.values()))
    return value in OFF


def set_from_json(
    config: Any, values: dict[str, Any], path: str, places: dict[str, str]
) -> list[str]:
    """Set settings to their values in the JSON; flags and YAML must have the same.

    Return a line about those whose default it replaces. values: setting -> (key, value) in the
    JSON; places: setting -> file and line, or flag.
    """
    changes = []
    for name, (key, value) in values.items():
        if value in (None, "auto"):
            continue
        place = f"{line_of(key, path)}: {key}"
        other = getattr(config, name)
        if name in places and other not in ("auto", value):
            conflict = f"{places[name]} is {other}, but {place} is {value}"
            raise UserError(f"{conflict}; make them equal, or leave one of them out")
        if other not in (None, value) and name not in places:
            changes.append(f"{name} from {other} to {value}")
        setattr(config, name, value)
        places[name] = place
    return [f"{path} changes {', '.join(changes)}"] if changes else []


def line_of(name: str, path: str) -> str:
    """Return `path:line` of a key in a file; a dotted name is a key of an inner object."""
    text = data.content(path)
    position = 0
    for key in name.split("."):
        word = re.escape(key.removeprefix("fsdp_"))  # transformers writes FSDP's keys without it
        match = re.compile(rf"\b(fsdp_)?{word}\b[\"']?\s*:").search(text, position)
        position = match.start() if match else position
    return f"{path}:{1 + text.count(chr(10), 0, position)}"
