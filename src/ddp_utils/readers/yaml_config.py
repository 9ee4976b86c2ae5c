"""Settings files: YAML into a dataclass, strictly and into plain data."""

import contextlib
import dataclasses
import json
import typing

from ruamel import yaml

from ddp_utils import UserError, cli, jsonl


def from_yaml(config_class, path, locations=None):
    """Fill a dataclass, whose fields may be dataclasses, from a YAML 1.2 file.

    locations: a dict that gets `section.name` -> `path:line: section.name` for each setting of the
    file. Raises UserError with file and line for an unknown or double key, a wrong type, an alias
    or a tag.
    """
    return from_text(config_class, jsonl.content(path).decode(), path, locations)


def from_text(config_class, text, path, locations=None):
    """The same for a text. path: what errors call it; if empty, they name the setting alone."""
    locations = {} if locations is None else locations
    reader = yaml.YAML(typ="safe", pure=True)
    with located(path, text):
        _check_plain(reader.parse(text), path)
        sections = {}  # setting -> the section that it belongs to
        for section, hint in typing.get_type_hints(config_class).items():
            if dataclasses.is_dataclass(hint):
                sections |= dict.fromkeys(typing.get_type_hints(hint), section)
        node = reader.compose(text)
        return _fill(config_class, node, "", reader.constructor, path, sections, locations)


@contextlib.contextmanager
def located(path, text):
    """Turn errors of the YAML in this text into a UserError with path and line."""
    try:
        yield
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no such day, too deep
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        problem = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        raise UserError(f"{_location(path, line)}{problem:.200}") from error


def _location(path, line):
    return f"{path}:{line + 1}: " if path else ""


def _check_plain(events, path):
    """Raise UserError for aliases and tags, of which a few bytes can unfold to gigabytes."""
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        alias = getattr(event, "anchor", None) or getattr(event, "value", None) == "<<"
        if alias or getattr(event, "tag", None) or depth > 20:
            rule = "no aliases (&name, *name, <<), no tags (!name), no more than 20 levels"
            location = _location(path, event.start_mark.line)
            raise UserError(f"{location}{rule}; write plain values")


def _fill(config_class, node, prefix, constructor, path, sections, locations):
    if not isinstance(node, yaml.MappingNode):
        location = _location(path, node.start_mark.line if node else 0)
        name = prefix.rstrip(".") or "the file"
        raise UserError(f"{location}{name} must hold `name: value` lines")
    hints = typing.get_type_hints(config_class)
    values = {}
    first_lines = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line
        location = _location(path, line) + prefix
        if key not in hints and key in sections:
            raise UserError(f"{location}{key} is no setting here; it belongs to {sections[key]}")
        if key not in hints:
            raise UserError(location + cli.unknown(key, list(hints)))
        location += key
        if key in values:
            raise UserError(f"{location} is a duplicate key, see line {first_lines[key]}")
        first_lines[key] = line + 1
        if dataclasses.is_dataclass(hints[key]):
            value_node.start_mark = key_node.start_mark  # an empty one's is the next line
            shared = constructor, path, sections, locations
            values[key] = _fill(hints[key], value_node, f"{prefix}{key}.", *shared)
            continue
        try:
            values[key] = constructor.construct_object(value_node, deep=True)
        except ValueError as error:  # no such day, too many digits
            raise UserError(f"{location}: {str(error).partition(';')[0]}") from error
        if key.endswith("_kwargs") and isinstance(values[key], dict):
            values[key] = json.dumps(values[key], default=str)  # as it is on a command line
        locations[prefix + key] = location
        cli.check_type(location, hints[key], values[key])
    return config_class(**values)
