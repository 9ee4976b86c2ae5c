"""The one loader of FSDP's and DeepSpeed's JSON: each key is known, and each value has its type."""

from ddp_utils import UserError, cli, data


def read(path, hints, may_be_auto=()) -> dict:
    """Return the object that a JSON file holds.

    hints: name -> type, as of a field of settings; for an object a dict of its own; for a key that
    is refused the reason. may_be_auto: keys that may hold "auto" instead.
    Raises UserError with file and line for an unknown key, or a value of another type.
    """
    settings = data.read_json(path)
    _check(settings, hints, may_be_auto, path, "")
    return settings


def _check(settings, hints, may_be_auto, path, prefix):
    for key, value in settings.items():
        name = prefix + key
        line = line_of(name, path)
        if key not in hints:
            raise UserError(f"{line}: {cli.unknown(key, list(hints))}")
        hint = hints[key]
        if isinstance(hint, str):
            raise UserError(f"{line}: {name}: {hint}; leave it out")
        if isinstance(hint, dict):
            cli.check_type(f"{line}: {name}", dict, value)
            _check(value, hint, may_be_auto, path, f"{name}.")
        elif value != "auto" or key not in may_be_auto:
            cli.check_type(f"{line}: {name}", hint, value)


def take(config, given, path, places):
    """Take settings from the JSON, name -> (key, value); flags and YAML must give the same."""
    for name, (key, value) in given.items():
        if value in (None, "auto"):
            continue
        place = f"{line_of(key, path)}: {key}"
        ours = getattr(config, name)
        if name in places and ours not in ("auto", value):
            both = f"{places[name]} is {ours}, {place} says {value}"
            raise UserError(f"{both}; make them equal, or leave one of them open")
        setattr(config, name, value)
        places[name] = place


def line_of(name, path) -> str:
    """Return `path:line` of a key in a JSON file; a dotted name is a key inside others."""
    text = data.content(path)
    at = 0
    for key in name.split("."):
        at = max(at, text.find(f'"{key}"', at))
    return f"{path}:{1 + text.count(chr(10), 0, at)}"
