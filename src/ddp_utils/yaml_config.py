"""Settings files: YAML 1.2 for dataclasses, with the file and line of each mistake."""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ruamel import yaml

from ddp_utils import UserError, cli, data

MAX_DEPTH = 20  # of lists and mappings inside each other
Places = dict[str, str]  # setting -> `file:line: section.name`, or the flag that set it
Hints = dict[str, Any]  # setting -> its type, or section -> its dataclass


class _Constructor(yaml.RoundTripConstructor):
    """Keeps dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)


def under_flags(config_class: Any, hints: Hints, argv: Sequence[str] | None) -> tuple[Any, Places]:
    """Return the settings of flags over the YAML file that `--config` names, and their places."""
    flags = cli.given(config_class, argv)
    path = flags.get("config", config_class.config)
    values, places = read(hints, path) if path else ({}, {})
    config = cli.check_types(config_class(**(values | flags | {"config": path})))
    return config, places | {name: f"--{name}" for name in flags}


def read(hints: Hints, path: str) -> tuple[dict[str, Any], Places]:
    """Return the settings in a YAML file and their places.

    Raises UserError with file and line for an unknown or duplicate key, a wrong type, an alias or
    a tag.
    """
    values: dict[str, Any] = {}
    places: Places = {}
    homes: dict[str, str] = {}  # setting -> its section
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            homes |= dict.fromkeys(typing.get_type_hints(kind), name)

    def add(hints: Hints, content: Any, place: str, prefix: str = "") -> None:
        if not isinstance(content, yaml.CommentedMap):
            raise UserError(f"{place} must contain `name: value` lines")
        for key, value in content.items():
            line = f"{path}:{content.lc.key(key)[0] + 1}: {prefix}"
            if key not in hints:
                if key in homes:
                    raise UserError(f"{line}{key} belongs to section {homes[key]}; move it there")
                raise UserError(line + cli.unknown(str(key), list(hints)))
            if dataclasses.is_dataclass(hints[key]):
                add(typing.get_type_hints(hints[key]), value, line + key, f"{key}.")
                continue
            value = json.loads(json.dumps(value))  # a plain float instead of ruamel's ScalarFloat
            if key.endswith("_kwargs") and isinstance(value, dict):
                value = json.dumps(value)  # as it is on a command line
            cli.check_type(line + key, hints[key], value)
            values[key], places[key] = value, line + key

    with _errors_with_lines(path):
        add(hints, _parse(path), f"{path}:1: the file")
    return values, places


def load(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file as plain data; raise UserError with file and line."""
    with _errors_with_lines(path):
        content = json.loads(json.dumps(_parse(path)))
    if not isinstance(content, dict):
        raise UserError(f"{path}:1: the file must contain `name: value` lines")
    return content


def _parse(path: str) -> Any:
    text = data.content(path)
    reader = yaml.YAML(pure=True)
    reader.Constructor = _Constructor
    _check_events(reader.parse(text), path)
    return reader.load(text)


@contextlib.contextmanager
def _errors_with_lines(path: str) -> Iterator[None]:
    try:
        yield
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        position = getattr(error, "position", 0)
        line = mark.line if mark else data.content(path).count("\n", 0, position)
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
