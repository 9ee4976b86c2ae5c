"""--help of a settings dataclass: its comments are the text, one line for each setting."""

import dataclasses
import inspect
import re
import shlex
import sys
import typing

FIELD = re.compile(r"    (\w+): .*?(?:  # (.*))?")
COMMENT = re.compile(r"    # (.*)")
WIDTH = 34  # of the flags' column
KINDS = {str: "TEXT", int: "INT", float: "NUMBER"}


def text(config_class, default, command) -> str:
    """Usage, what the class or the program says of itself, and the settings in their groups.

    A comment line above fields names their group; the one behind a field, or above one that has
    none behind it, is its help. Of a field that is defined twice the first definition is shown.
    Defaults are those of `default`, an instance, where it is given.
    """
    about = inspect.getdoc(config_class)
    if about.startswith(f"{config_class.__name__}("):  # what dataclass() writes itself
        about = (sys.modules["__main__"].__doc__ or "").strip()
    hints = typing.get_type_hints(config_class, include_extras=True)
    comments = _comments(config_class)
    words = [name for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated]
    lines = [" ".join(["usage:", command, *words, "[settings]"]), "", about]
    lines += ["", "Each setting with its default; of several words the first one is it."]
    for field in dataclasses.fields(config_class):
        group, description = comments[field.name]
        if group not in lines:
            lines += ["", group]
        value = getattr(default, field.name, field.default)
        lines.append(f"  {_flag(field.name, hints[field.name], value):<{WIDTH}}  {description}")
    return "\n".join(lines)


def _comments(config_class):
    """Setting -> its group and its help, in the order of the source."""
    comments = {}
    for part in reversed(config_class.__mro__[:-1]):
        group = "settings"
        above = ""
        for line in inspect.getsource(part).splitlines():
            comment = COMMENT.fullmatch(line)
            field = FIELD.fullmatch(line)
            if comment:
                above = comment[1]
            elif field:
                name, behind = field.groups()
                group = above if above and behind else group
                comments.setdefault(name, (group, behind or above))
                above = ""
    return comments


def _flag(name, hint, value) -> str:
    """--beta 0.1, --strategy ddp|fsdp, --[no_]shuffle on, --val_data TEXT."""
    if typing.get_origin(hint) is typing.Annotated:  # a word of its own, without a flag
        return f"{name} {value}" if isinstance(value, str) else name
    if hint is bool:
        return f"--[no_]{name} {'on' if value else 'off'}"
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"--{name} {'|'.join([value, *(other for other in choices if other != value)])}"
    if isinstance(value, float):
        return f"--{name} {value:g}"
    if value in (None, "", ()):
        kind = KINDS[choices[0] if choices else hint]
        return f"--{name} {kind}{' ...' if value == () else ''}"
    return f"--{name} {shlex.join(map(str, value if isinstance(value, tuple) else [value]))}"
