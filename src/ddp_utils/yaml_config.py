"""Settings files: YAML 1.2 for a dataclass, with the file and line of each mistake."""

import dataclasses
import json
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ruamel import yaml

from ddp_utils import UserError, cli, data

MAX_DEPTH = 20  # of lists and mappings inside each other


class Setting(NamedTuple):
    value: Any
    place: str  # `file:line: section.name`


class _Constructor(yaml.RoundTripConstructor):
    """Keeps dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)


def under_flags(
    config_class: Any, file_class: type, argv: Sequence[str] | None
) -> tuple[Any, dict]:
    """Return the settings of flags over the YAML file that `--config` names, and their places.

    file_class: the dataclass of the file; its sections have the fields of config_class.
    places: setting -> `file:line: section.name`, or the flag that set it.
    """
    flags = cli.given(config_class, argv)
    path = flags.get("config", config_class.config)
    in_file = read(file_class, path) if path else {}
    values = {name: setting.value for name, setting in in_file.items()}
    places = {name: setting.place for name, setting in in_file.items()}
    places |= {name: f"--{name}" for name in flags}
    return cli.check_types(config_class(**{**values, **flags, "config": path})), places


def read(config_class: type, path: str) -> dict[str, Setting]:
    """Return the settings in a YAML file for a dataclass, or for a dataclass of dataclasses.

    Raises UserError with file and line for an unknown or duplicate key, a wrong type, an alias or
    a tag.
    """
    text = data.content(path)
    reader = yaml.YAML(pure=True)
    reader.Constructor = _Constructor
    try:
        _check_events(reader.parse(text), path)
        return _section(config_class, reader.load(text), f"{path}:1: the file", path)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        problem = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        raise UserError(f"{path}:{line + 1}: {problem:.200}") from error


def _check_events(events: Iterable[Any], path: str) -> None:
    """Raise UserError for aliases, a few bytes of which can expand to gigabytes, and for tags."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        is_alias = getattr(event, "anchor", None) or getattr(event, "value", None) == "<<"
        if is_alias or getattr(event, "tag", None) or depth > MAX_DEPTH:
            problem = f"aliases (&name, *name, <<), tags (!name) and more than {MAX_DEPTH} levels"
            line = event.start_mark.line + 1
            raise UserError(f"{path}:{line}: {problem} are not supported; use plain values")


def _section(
    config_class: type, content: Any, place: str, path: str, prefix: str = ""
) -> dict[str, Setting]:
    if not isinstance(content, yaml.CommentedMap):
        raise UserError(f"{place} must contain `name: value` lines")
    hints = typing.get_type_hints(config_class)
    settings: dict[str, Setting] = {}
    for key, value in content.items():
        line = f"{path}:{content.lc.key(key)[0] + 1}: {prefix}"
        if key not in hints:
            raise UserError(line + cli.unknown(str(key), list(hints)))
        if dataclasses.is_dataclass(hints[key]):
            settings |= _section(hints[key], value, line + key, path, f"{key}.")
            continue
        if key.endswith("_kwargs") and isinstance(value, dict):
            value = json.dumps(value)  # as it is on a command line
        value = json.loads(json.dumps(value))  # a plain float instead of ruamel's ScalarFloat
        cli.check_type(line + key, hints[key], value)
        settings[key] = Setting(value, line + key)
    return settings
