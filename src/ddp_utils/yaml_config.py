"""Settings files: YAML into a dataclass, strictly and into plain data."""

import argparse
import contextlib
import dataclasses
import json
import typing

from ruamel import yaml

from ddp_utils import UserError, cli, data


def under_flags(config_class, file_class, argv, console):
    """Return the settings of flags over the YAML file that `--config` names, and their places.

    file_class: the dataclass of the file; its sections, if it has any, are put side by side.
    places: setting -> `path:line: section.name`, or the flag that gave it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=config_class.config)
    options, flags = parser.parse_known_args(argv)
    values = {}
    in_file = {}
    if options.config:
        for name, value in vars(from_yaml(file_class, options.config, in_file)).items():
            values |= vars(value) if dataclasses.is_dataclass(value) else {name: value}
    default = config_class(**values | {"config": options.config})
    config = cli.parse(config_class, argv, console=console, default=default)
    places = {name.rpartition(".")[2]: place for name, place in in_file.items()}
    for word in flags:
        flag = word.partition("=")[0].replace("-", "_")
        if flag.startswith("__"):
            name = flag[2:].removeprefix("no_")
            places[name] = f"--{name}"
    return config, places


def from_yaml(config_class, path, places):
    """Fill a dataclass (nested once or not) from a YAML 1.2 file.

    places: a dict that gets `section.name` -> `path:line: section.name` of what the file says.
    Raises UserError with file and line for an unknown or double key, a wrong type, an alias or tag.
    """
    text = data.content(path)
    reader = yaml.YAML(typ="safe", pure=True)
    depth = 0
    with located(path, text):
        for event in reader.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            # a few bytes of aliases can unfold to gigabytes
            if getattr(event, "anchor", None) or getattr(event, "tag", None) or depth > 20:
                says = "no aliases (&name, *name), no tags (!name), no more than 20 levels"
                raise UserError(f"{path}:{event.start_mark.line + 1}: {says}; write plain values")
        return _fill(config_class, reader.compose(text), "", reader.constructor, path, places)


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


def _fill(config_class, node, prefix, constructor, path, places):
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node else 1
        what = prefix.rstrip(".") or "the file"
        raise UserError(f"{path}:{line}: {what} must hold `name: value` lines")
    hints = typing.get_type_hints(config_class)
    values = {}
    seen = {}
    for name, value in node.value:
        key = str(name.value)
        location = f"{path}:{name.start_mark.line + 1}: {prefix}"
        if key not in hints:
            raise UserError(location + cli.unknown(key, list(hints)))
        if seen.setdefault(key, name) is not name:
            first = seen[key].start_mark.line + 1
            raise UserError(f"{location}{key} is a duplicate key, see line {first}")
        if dataclasses.is_dataclass(hints[key]):
            value.start_mark = name.start_mark  # an empty one's is the next line
            section = f"{prefix}{key}."
            values[key] = _fill(hints[key], value, section, constructor, path, places)
            continue
        try:
            values[key] = constructor.construct_object(value, deep=True)
        except ValueError as error:  # no such day, too many digits
            raise UserError(f"{location}{key}: {str(error).partition(';')[0]}") from error
        if key.endswith("_kwargs") and isinstance(values[key], dict):
            values[key] = json.dumps(values[key], default=str)  # as it is on a command line
        places[prefix + key] = location + key
        cli.check_type(location + key, hints[key], values[key])
    return config_class(**values)
