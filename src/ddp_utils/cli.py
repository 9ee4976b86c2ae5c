"""One dataclass is a script's settings, its flags and its --help; a YAML file can fill it too."""

import dataclasses
import difflib
import math
import sys
import types
import typing
import warnings

import tyro
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

from ddp_utils import UserError

ALIASES = {"--validate_only": "--check", "--dry_run": "--check"}


def parse(config_class, argv=None, console=True, aliases=None):
    """Read flags over the dataclass's defaults; tyro prints its own box and exits 2 on a wrong one.

    `--local-rank`, which torch.distributed.launch and deepspeed append, is swallowed.
    """
    names = {key.replace("-", "_"): name for key, name in {**ALIASES, **(aliases or {})}.items()}
    words, argv = [], list(sys.argv[1:] if argv is None else argv)
    while argv:
        word = argv.pop(0)
        if word.replace("_", "-") == "--local-rank":
            del argv[:1]
        elif not word.replace("_", "-").startswith("--local-rank="):
            words.append(names.get(word.replace("-", "_"), word))
    with warnings.catch_warnings():  # of defaults of a wrong type: check_types says it in one line
        warnings.simplefilter("ignore")
        config = tyro.cli(config_class, args=words, use_underscores=True, console_outputs=console)
    return check_types(config)


def check_types(config):
    """Refuse values of another type, which an edited config file can hold, and NaN or infinity."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        _check_type(f"--{field.name}", hints[field.name], getattr(config, field.name))
    return config


def _check_type(name, hint, value):
    if typing.get_origin(hint) is typing.Literal:
        fits = value in typing.get_args(hint)
    else:
        allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        fits = type(value) in allowed or (type(value) is int and float in allowed)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        name_of = getattr(hint, "__name__", str(hint))
        choices = " or ".join(map(repr, typing.get_args(hint)))
        wanted = choices if typing.get_origin(hint) is typing.Literal else f"a valid {name_of}"
        raise UserError(f"{name}: {value!r} is not {wanted}")


def check_ranges(config, **rules):
    """Each rule is (description, predicate) for one field: `beta=("above 0", lambda x: x > 0)`."""
    for name, (description, fits) in rules.items():
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise UserError(f"--{name}: {value} is out of range; give a value {description}")


def unknown(name, known):
    """'x is not a setting; did you mean y?'"""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"{name} is not a setting; {hint}"


def from_yaml(config_class, path):
    """Fill a dataclass (nested once or not) from a YAML 1.2 file.

    Raises UserError with file and line for an unknown or double key, a wrong type or an alias.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        depth = 0
        for event in YAML(pure=True).parse(text):
            line = event.start_mark.line + 1
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if isinstance(event, AliasEvent) or getattr(event, "value", None) == "<<":
                # a few bytes of aliases can unfold to gigabytes
                raise UserError(f"{path}:{line}: no aliases (*name, <<); repeat the value")
            if depth > 20:
                raise UserError(f"{path}:{line}: nested deeper than any setting")
        marked = YAML(typ="rt", pure=True).load(text)  # knows the lines
        plain = YAML(typ="safe", pure=True).load(text)  # knows nothing but plain data
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = (error.problem or error.context).splitlines()[0]
        raise UserError(f"{path}:{mark.line + 1}: {reason}") from error
    except (OSError, ValueError, KeyError, RecursionError, YAMLError) as error:
        raise UserError(f"{path}: {type(error).__name__} {str(error)[:160]!r}") from error
    return _fill(config_class, plain, marked, path, "")


def _fill(config_class, plain, marked, path, prefix):
    if not isinstance(plain, dict):
        raise UserError(f"{path}: {prefix.rstrip('.') or 'the file'} must hold `name: value` lines")
    hints, values = typing.get_type_hints(config_class), {}
    for key, value in plain.items():
        where = f"{path}:{marked.lc.key(key)[0] + 1}"
        if key not in hints:
            raise UserError(f"{where}: {prefix}{unknown(str(key), list(hints))}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _fill(hints[key], value, marked[key], path, f"{prefix}{key}.")
        else:
            _check_type(f"{where}: {prefix}{key}", hints[key], value)
            values[key] = value
    return config_class(**values)
