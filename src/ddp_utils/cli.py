"""Command lines: a dataclass defines the settings of a script, its flags and its --help text.

The comment behind a field is its help, and a comment line above fields is the heading of their
group. A field without a default is a positional argument.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import io
import os
import re
import reprlib
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ddp_utils import SettingError, UserError, data

ALIASES = {"--validate_only": "--check", "--dry_run": "--check"}
LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

# --- flags ---------------------------------------------------------------------------------------


def check_flags(read: Callable[[list[str]], object]) -> None:
    """Call read(flags), and exit for --help or a UserError, before a script imports torch.

    Of several processes on a node only the first one prints. With --debug, main() raises the error.
    """
    local_rank = next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name)), "0")
    prints = local_rank == "0"
    try:
        with contextlib.redirect_stdout(sys.stdout if prints else io.StringIO()):
            read(sys.argv[1:])
    except UserError as error:
        if "--debug" not in sys.argv:
            if prints:
                print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)


def parse(
    config_class: type,
    argv: Sequence[str] | None = None,
    aliases: dict[str, str] | None = None,
    command: str = "",
) -> Any:
    """Return an instance of the dataclass: its defaults, changed by the flags.

    aliases: other spelling -> flag, with or without a value; command: a word before the flags.
    Raises UserError for an unknown flag, or a flag or default of a wrong type.
    """
    return check_types(config_class(**given(config_class, argv, aliases, command)))


def given(
    config_class: type,
    argv: Sequence[str] | None = None,
    aliases: dict[str, str] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Return the values that the flags set; of several equal flags, the last one counts."""
    hints = typing.get_type_hints(config_class)
    spellings = {**ALIASES, **(aliases or {})}
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = f"--{name[2:].replace('-', '_')}"
        if name != "--local_rank":  # torch.distributed.launch and deepspeed append it
            words.append(spellings.get(name, name) + equals + value)
    namespace, stray = _parser(config_class, hints, command).parse_known_args(words)
    for word in stray:
        if word.startswith("--"):
            raise UserError(unknown(word.partition("=")[0], [f"--{name}" for name in hints]))
        raise UserError(f"{data.shown(word)} is not a flag; see --help")
    values = {name: _convert(text, hints[name]) for name, text in vars(namespace).items()}
    for name, value in values.items():
        check_type(f"--{name}", hints[name], value)
    return values


def _convert(value: Any, hint: Any) -> Any:
    """Return what the text of a flag means; check_type reports a text without a meaning."""
    if isinstance(value, list):
        return tuple(_convert(text, typing.get_args(hint)[0]) for text in value)
    if isinstance(hint, types.UnionType):
        return None if value == "None" else _convert(value, typing.get_args(hint)[0])
    if hint in (int, float):
        with contextlib.suppress(ValueError):
            return hint(value)
    if isinstance(value, str) and value.startswith("~/"):  # a shell leaves --flag=~/x as it is
        return os.path.expanduser(value)
    return value


# --- help ----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.removeprefix("argument "))


class _Switch(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string == f"--{self.dest}")


def _parser(config_class: type, hints: dict[str, Any], command: str) -> argparse.ArgumentParser:
    about = inspect.getdoc(config_class) or ""
    if about.startswith(f"{config_class.__name__}("):  # the text that dataclass() writes
        about = (sys.modules["__main__"].__doc__ or "").strip()
    fields = dataclasses.fields(config_class)
    positional = [field.name for field in fields if field.default is dataclasses.MISSING]
    parser = _Parser(
        usage=" ".join(["%(prog)s", *command.split(), *positional, "[settings]"]),
        description=about.replace("%", "%%"),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=80),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {}
    comments = _comments(config_class)
    for field in fields:
        heading, text = comments[field.name]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        add = groups[heading].add_argument
        hint = hints[field.name]
        kinds = typing.get_args(hint) or (hint,)
        if typing.get_origin(hint) is Literal:
            text += f"; one of {', '.join(kinds)}"
        if field.name in positional:
            add(field.name, help=text)
            continue
        default = field.default if isinstance(field.default, tuple) else [field.default]
        text = f"{text} (default: {shlex.join(map(str, default))})".replace("%", "%%")
        if hint is bool:
            add(f"--{field.name}", f"--no_{field.name}", action=_Switch, nargs=0, help=text)
        else:
            nargs = "*" if typing.get_origin(hint) is tuple else None
            metavar = {int: "INT", float: "NUMBER"}.get(kinds[0], "TEXT")
            add(f"--{field.name}", metavar=metavar, nargs=nargs, help=text)
    return parser


def _comments(config_class: type) -> dict[str, tuple[str, str]]:
    """Return field -> (heading of its group, help), from the source; a first definition counts."""
    comments: dict[str, tuple[str, str]] = {}
    for part in reversed(config_class.__mro__[:-1]):
        heading = "settings"
        for line in inspect.getsource(part).splitlines():
            field = re.fullmatch(r"    (\w+): .*?(?:  # (.*))?", line)
            if line.startswith("    # "):
                heading = line[6:]
            elif field:
                comments.setdefault(field[1], (heading, field[2] or ""))
    return comments


# --- checks --------------------------------------------------------------------------------------


def check_types(config: Any) -> Any:
    """Return the settings; raise UserError for a wrong type, which an edited file can have."""
    for name, hint in typing.get_type_hints(type(config)).items():
        check_type(f"--{name}", hint, getattr(config, name))
    return config


def check_type(place: str, hint: Any, value: Any) -> None:
    """Raise UserError, which begins with `place`, for a value that does not fit the type hint."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and isinstance(value, tuple):
        for part in value:
            check_type(place, args[0], part)
        return
    kinds = args or (hint,)
    expected = f"a valid {getattr(hint, '__name__', hint)}"
    fits = type(value) in kinds or (type(value) is int and float in kinds)
    if typing.get_origin(hint) is Literal:
        fits = value in args
        expected = " or ".join(map(repr, args))
    if isinstance(value, int | float) and not abs(value) < 2**63:  # NaN is not below it, either
        fits = False
    if not fits or data.CONTROL.search(str(value)):
        raise UserError(f"{place}: {reprlib.repr(value):.100} is not {expected}")


def unknown(name: str, known: Sequence[str]) -> str:
    """Return 'x is not a setting; did you mean y?'."""
    near = [other for other in known if other.startswith(name)]
    near += difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known):.200}"
    return f"{data.shown(name)} is not a setting; {hint}"


@contextlib.contextmanager
def located(places: dict[str, str]) -> Iterator[None]:
    """Within it, an error about a setting begins with the file and line, or flag, that set it."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for name, place in places.items():
            if re.match(f"--{name}\\b", text):
                error.args = (text.replace(f"--{name}", place, 1),)
        raise


Range = tuple[str, Callable[[Any], bool]]  # what a value must be, and whether it is
ABOVE_0: Range = ("> 0", lambda x: x > 0)
FROM_0: Range = (">= 0", lambda x: x >= 0)
POSITIVE = """beta learning_rate batch_size base_batch_size gradient_accumulation_steps num_epochs
lora_r lora_alpha lambda_shift keep_checkpoints max_new_tokens log_every"""
NOT_NEGATIVE = """seed weight_decay max_grad_norm eval_every save_every stop_after_minutes
num_samples temperature lambda_dpop simpo_gamma"""
RANGES: dict[str, Range] = {  # of settings that several scripts have
    **dict.fromkeys(POSITIVE.split(), ABOVE_0),
    **dict.fromkeys(NOT_NEGATIVE.split(), FROM_0),
    "timeout_minutes": ("> 0 and <= 100,000", lambda x: 0 < x <= 1e5),
    "top_p": ("> 0 and <= 1", lambda x: 0 < x <= 1),
    "max_steps": (">= -1", lambda x: x >= -1),
    "max_rows": ("-1 or >= 1", lambda x: x == -1 or x > 0),
    "columns": (
        "pairs such as prompt=question,chosen=response_j",
        lambda x: re.fullmatch(r"(\w+=[^=,]+(,\w+=[^=,]+)*)?", x) is not None,
    ),
    "label_smoothing": (">= 0 and < 0.5", lambda x: 0 <= x < 0.5),
    "lora_dropout": (">= 0 and < 1", lambda x: 0 <= x < 1),
    "warmup_ratio": (">= 0 and <= 1", lambda x: 0 <= x <= 1),
}


def check_ranges(config: Any, **ranges: Range) -> None:
    """Raise UserError for a field out of its range: one of RANGES, or of `beta=cli.ABOVE_0`."""
    for name, (expected, is_in_range) in {**RANGES, **ranges}.items():
        value = vars(config).get(name)
        if value is not None and not is_in_range(value):
            raise SettingError(name, f"{value} is out of range (expected {expected})")


# --- options of the losses -----------------------------------------------------------------------

METHODS: dict[str, dict[str, float]] = {  # loss of losses.py -> its options and their defaults
    "dpo": {},
    "cdpo": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.1},
    "ipo": {},
    "ipo_sum": {},
    "hinge": {},
    "dpop": {"lambda_dpop": 50.0},
    "dposhift": {"lambda_shift": 0.75},
    "dpopshift": {"lambda_dpop": 50.0, "lambda_shift": 0.75},
    "simpo": {"simpo_gamma": 0.5},
}
if typing.TYPE_CHECKING:
    Method = str
else:
    Method = Literal[tuple(METHODS)]  # one of these names
LOSS_OPTIONS = ("label_smoothing", "lambda_dpop", "lambda_shift", "simpo_gamma")
FIXED_LENGTH_METHODS = ("ipo", "ipo_sum", "simpo")  # they average or sum by definition


def loss_options(config: Any) -> dict[str, float]:
    """Return the options of config.method; raise UserError for one that the method does not use."""
    options = dict(METHODS.get(config.method, {}))  # a script may have methods of its own
    for name in LOSS_OPTIONS:
        value = getattr(config, name)
        if value is None:
            continue
        if name not in options:
            users = ", ".join(method for method, used in METHODS.items() if name in used)
            raise SettingError(name, f"{config.method} does not use it; it belongs to {users}")
        options[name] = value
    if config.length_average and config.method in FIXED_LENGTH_METHODS:
        problem = f"{config.method} fixes how its log-probs are summed; leave it out"
        raise SettingError("length_average", problem)
    return options
