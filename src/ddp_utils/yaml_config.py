"""YAML 1.2 as plain data, with the file and line of each mistake."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ruamel import yaml

from ddp_utils import UserError, data

MAX_DEPTH = 20  # of lists and mappings inside each other


class _Constructor(yaml.RoundTripConstructor):
    """Keeps dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _Constructor.construct_yaml_str)


def load(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file as plain data; raise UserError with file and line."""
    with errors_with_lines(path):
        content = json.loads(json.dumps(parse(path)))
    if not isinstance(content, dict):
        raise UserError(f"{path}:1: the file must contain `name: value` lines")
    return content


def parse(path: str) -> Any:
    """Return ruamel.yaml's content of a file, in which each mapping knows its lines."""
    text = data.content(path)
    reader = yaml.YAML(pure=True)
    reader.Constructor = _Constructor
    _check_events(reader.parse(text), path)
    return reader.load(text)


@contextlib.contextmanager
def errors_with_lines(path: str) -> Iterator[None]:
    """Within it, an error of the syntax or of a value is a UserError with its file and line."""
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
