"""Settings files: YAML into a dataclass, JSON into a dictionary, strictly and into plain data."""

import contextlib
import dataclasses
import json
import typing

from ruamel import yaml

from ddp_utils import UserError, cli, jsonl


def from_yaml(config_class, path, places=None):
    """Fill a dataclass (nested once or not) from a YAML 1.2 file.

    places: a dict that gets `section.name` -> `path:line: section.name` of what the file says.
    Raises UserError with file and line for an unknown or double key, a wrong type, an alias or tag.
    """
    return from_text(config_class, jsonl.content(path).decode(), path, places)


def from_text(config_class, text, path, places=None):
    """The same of a text; path: what errors call it."""
    reader = yaml.YAML(typ="safe", pure=True)
    depth = 0
    with located(path, text):
        for event in reader.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            alias = getattr(event, "anchor", None) or getattr(event, "value", None) == "<<"
            if alias or getattr(event, "tag", None) or depth > 20:
                # a few bytes of aliases can unfold to gigabytes
                says = "no aliases (&name, *name, <<), no tags (!name), no more than 20 levels"
                raise UserError(f"{path}:{event.start_mark.line + 1}: {says}; write plain values")
        places = {} if places is None else places
        hints = typing.get_type_hints(config_class).items()
        sections = {}
        for key, part in hints:
            if dataclasses.is_dataclass(part):
                sections |= dict.fromkeys(typing.get_type_hints(part), key)
        node = reader.compose(text)
        return _fill(config_class, node, "", reader.constructor, path, sections, places)


@contextlib.contextmanager
def located(path, text):
    """Within it an error of the YAML in this text says where it is, in one line."""
    try:
        yield
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no such day, too deep
        mark = getattr(error, "problem_mark", None)
        line = mark.line if mark else text.count("\n", 0, getattr(error, "position", 0))
        says = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        raise UserError(f"{path}:{line + 1}: {says:.200}") from error


def _fill(config_class, node, prefix, constructor, path, sections, places):
    """sections: setting -> where it belongs, for one that stands elsewhere."""
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node else 1
        what = prefix.rstrip(".") or "the file"
        raise UserError(f"{path}:{line}: {what} must hold `name: value` lines")
    hints = typing.get_type_hints(config_class)
    values = {}
    seen = {}
    for name, value in node.value:
        key = str(name.value)
        where = f"{path}:{name.start_mark.line + 1}: {prefix}"
        if key not in hints:
            if key in sections:
                raise UserError(f"{where}{key} is no setting here; it belongs to {sections[key]}")
            raise UserError(where + cli.unknown(key, list(hints)))
        if seen.setdefault(key, name) is not name:
            first = seen[key].start_mark.line + 1
            raise UserError(f"{where}{key} is a duplicate key, see line {first}")
        if dataclasses.is_dataclass(hints[key]):
            value.start_mark = name.start_mark  # an empty one's is the next line
            rest = constructor, path, sections, places
            values[key] = _fill(hints[key], value, f"{prefix}{key}.", *rest)
            continue
        try:
            values[key] = constructor.construct_object(value, deep=True)
        except ValueError as error:  # no such day, too many digits
            raise UserError(f"{where}{key}: {str(error).partition(';')[0]}") from error
        if key.endswith("_kwargs") and isinstance(values[key], dict):
            values[key] = json.dumps(values[key], default=str)  # as it is on a command line
        places[prefix + key] = where + key
        cli.check_type(where + key, hints[key], values[key])
    return config_class(**values)
