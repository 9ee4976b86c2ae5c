"""Command lines: a dataclass defines the settings of a script, its flags and its --help text.

The comment behind a field is its help, and a comment line above fields is the heading of their
group. A field without a default is a positional argument.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gc
import inspect
import json
import os
import re
import shlex
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

from ddp_utils import (
    UserError,
    check_clone,
    data,
    exit_code,
    exit_with,
    is_first_of_node,
    open_standard_streams,
    user_error,
)

# other spelling -> flag, with or without a value, in programs that have only the second setting
ALIASES = {"--validate_only": "--check", "--dry_run": "--check", "--no_cuda": "--backend=gloo"}
ALIASES |= {"--lr": "--learning_rate", "--r": "--lora_r", "-r": "--lora_r"}
ALIASES |= {"--use_fsdp": "--strategy=fsdp", "--use_deepspeed": "--strategy=deepspeed"}
ALIASES |= dict.fromkeys(
    ("--fsdp_config", "--deepspeed_config", "--deepspeed"), "--sharding_config"
)
# settings of other programs that are accepted without an effect -> why they have none
LOADER = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
IGNORED = dict.fromkeys((*LOADER, *(f"dataloader_{x}" for x in LOADER)), "there is no data loader")
IGNORED |= {"flash_attn": "PyTorch selects the attention kernel"}
IGNORED |= {"dynamics": "only actions are predicted"}
# what `accelerate launch` can be configured for; it sets ACCELERATE_USE_FSDP, ...
ACCELERATE = ["use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config"]
ACCELERATE += ["in_tpu_pod", "dynamo_backend"]
OFF = ("no", "false", "0")
ONLY_FLAGS = "CHECK_FLAGS_ONLY"  # variable with which a script ends after reading its flags
# settings that name what a program writes
OUTPUTS = ["output", "output_dir", "result_dir", "out_dir", "cache_dir"]
OUTPUTS += ["traj_out_file", "val_out_file"]
Places = dict[str, str]  # setting -> `file:line: section.name`, or the flag that set it
Hints = dict[str, Any]  # setting -> its type, or section -> its dataclass
latest_places: Places = {}  # of parse_with_file()

# --- flags ---------------------------------------------------------------------------------------


def check_flags(read: Callable[[list[str]], object]) -> None:
    """Call read(flags), and exit for --help or a UserError, before a script imports torch.

    Of several processes on a node only the first one prints an error. With --debug, it is left to
    main(), which raises it with a traceback.
    """
    check_clone()
    try:
        read(sys.argv[1:])
    except UserError as error:
        if "--debug" in sys.argv:
            return
        exit_with(error)
    if os.environ.get(ONLY_FLAGS):
        sys.exit(0)
    gc.disable()  # it would take a fifth of the import time; distributed.run() enables it again


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run the main() of a program that needs no torch, and exit; see distributed.run()."""
    open_standard_streams()
    check_clone()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as error:
        known = user_error(error)
        if isinstance(known, UserError) and "--debug" not in sys.argv:
            exit_with(known)
        traceback.print_exception(error)
        sys.exit(exit_code(error))


def parse(config_class: type, argv: Sequence[str] | None = None) -> Any:
    """Return an instance of the dataclass: its defaults, changed by the flags.

    Raises UserError for an unknown flag, or a flag or default of a wrong type.
    """
    return with_outputs(check_types(config_class(**given(config_class, argv))))


def given(config_class: type, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values that the flags set; of several equal flags, the last one counts."""
    hints = typing.get_type_hints(config_class)
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = f"--{name[2:].replace('-', '_')}"
        alias = ALIASES.get(name, "")
        if name[2:] not in hints and alias[2:].partition("=")[0] in hints:
            name = alias
        if name != "--local_rank":  # torch.distributed.launch and deepspeed append it
            words.append(name + equals + value)
    values, rest = _parser(config_class, hints).parse_known_args(words)
    if rest:
        raise UserError(unknown(rest[0].partition("=")[0], [f"--{name}" for name in hints]))
    result = {}
    for name, value in vars(values).items():
        if name not in hints:
            note_ignored(f"--{name}", name, value)
        else:
            result[name] = tuple(value) if isinstance(value, list) else value
    return result


def parse_with_file(
    config_class: Any, argv: Sequence[str] | None = None, sections: Hints | None = None
) -> tuple[Any, Places]:
    """Return the settings of flags over the YAML file that `--config` names, and their places.

    The settings have the places as an attribute, too, for the report of a run. sections: of the
    file, name -> dataclass; None: it has no sections. Raises UserError as parse() and read_file()
    do.
    """
    global latest_places
    latest_places = {}
    flags = given(config_class, argv)
    path = flags.get("config", config_class.config)
    values: dict[str, Any] = {}
    places: Places = {}
    if path:
        hints = sections or typing.get_type_hints(config_class)
        hints = {name: hint for name, hint in hints.items() if name != "config"}
        values, places = read_file(hints, path)
    config = with_outputs(check_types(config_class(**(values | flags | {"config": path}))))
    config.places = latest_places = places | {name: f"--{name}" for name in flags}
    return config, config.places


def read_file(hints: Hints, path: str) -> tuple[dict[str, Any], Places]:
    """Return the settings in a YAML file and their places.

    Raises UserError with file and line for an unknown or duplicate key, a wrong type, an alias or
    a tag.
    """
    from ddp_utils import yaml_config  # a package that takes a while to import

    values: dict[str, Any] = {}
    places: Places = {}
    homes: dict[str, str] = {}  # setting -> its section
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            homes |= dict.fromkeys(typing.get_type_hints(kind), name)

    def add(hints: Hints, content: Any, place: str, prefix: str = "") -> None:
        if not isinstance(content, dict):
            raise UserError(f"{place} must contain `name: value` lines")
        lines: Any = content
        for key, value in content.items():
            line = f"{path}:{lines.lc.key(key)[0] + 1}: {prefix}"
            if key not in hints:
                if key in IGNORED:
                    note_ignored(line + key, key, value)
                    continue
                if key in homes:
                    raise UserError(f"{line}{key} belongs to section {homes[key]}; move it there")
                raise UserError(line + unknown(str(key), list(hints)))
            if dataclasses.is_dataclass(hints[key]):
                add(typing.get_type_hints(hints[key]), value, line + key, f"{key}.")
                continue
            value = json.loads(json.dumps(value))  # a plain float instead of ruamel's ScalarFloat
            if key.endswith("_kwargs") and isinstance(value, dict):
                value = json.dumps(value)  # as it is on a command line
            check_type(line + key, hints[key], value)
            values[key], places[key] = value, line + key

    with yaml_config.errors_with_lines(path):
        add(hints, yaml_config.parse(path), f"{path}:1: the file")
    return values, places


def with_outputs(config: Any) -> Any:
    """Return the settings, whose outputs are not inside src/ or scripts/: see data.output_path."""
    for name in OUTPUTS:
        if vars(config).get(name):
            setattr(config, name, str(data.output_path(getattr(config, name))))
    return config


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message.removeprefix("argument "))


class _Switch(argparse.Action):  # argparse's own switches have dashes: --no-x
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string == f"--{self.dest}")


def _text(word: str) -> str:
    """Return the text of a flag; a shell leaves --flag=~/x as it is."""
    return os.path.expanduser(word) if word.startswith("~/") else word


def _parser(config_class: type, hints: dict[str, Any]) -> argparse.ArgumentParser:
    fields = dataclasses.fields(config_class)
    positional = [field.name for field in fields if field.default is dataclasses.MISSING]
    module = sys.modules["__main__"].__spec__  # of `python -m`
    parser = _Parser(
        prog=f"python -m {module.name}" if module else None,
        usage=" ".join(["%(prog)s", *positional, "[settings]"]),
        description=(sys.modules["__main__"].__doc__ or "").strip().replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    # -5-10 is a range of residues, as for argparse itself from Python 3.14 on; no flag has a digit
    parser._negative_number_matcher = re.compile(r"-\.?\d")
    groups: dict[str, Any] = {}
    comments = comments_of(config_class)
    for field in fields:
        heading, comment = comments[field.name]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        add = groups[heading].add_argument
        default = field.default if isinstance(field.default, tuple) else [field.default]
        text = f"{comment} (default: {shlex.join(map(str, default))})".replace("%", "%%")
        hint = hints[field.name]
        kinds = typing.get_args(hint) or (hint,)
        if field.name in positional:
            add(field.name, help=comment)
        elif kinds[0] is bool:
            add(f"--{field.name}", f"--no_{field.name}", action=_Switch, nargs=0, help=text)
        elif typing.get_origin(hint) is Literal:
            add(f"--{field.name}", choices=kinds, help=text)
        else:
            kind = _text if kinds[0] is str else kinds[0]
            nargs = "*" if typing.get_origin(hint) is tuple else None
            metavar = kinds[0].__name__.upper()
            add(f"--{field.name}", type=kind, nargs=nargs, metavar=metavar, help=text)
    for name in IGNORED.keys() - hints.keys():
        parser.add_argument(f"--{name}", f"--no_{name}", nargs="?", help=argparse.SUPPRESS)
    return parser


@functools.cache  # flags are read twice, and getsource() parses a whole file
def comments_of(config_class: type) -> dict[str, tuple[str, str]]:
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
    kinds = typing.get_args(hint) or (hint,)
    is_choice = typing.get_origin(hint) is Literal
    is_list = typing.get_origin(hint) is tuple
    for part in value if is_list and isinstance(value, tuple) else [value]:
        fits = part in kinds if is_choice else type(part) in kinds
        fits |= type(part) is int and float in kinds
        fits &= isinstance(value, tuple) or not is_list
        is_huge = isinstance(part, int | float) and not abs(part) < 2**63  # NaN is not below it
        if not fits or is_huge or data.CONTROL.search(str(part)):
            of_type = f"a valid {getattr(hint, '__name__', hint)}"
            expected = " or ".join(map(repr, kinds)) if is_choice else of_type
            raise UserError(f"{place}: {part!r:.100} is not {expected}")


noted: list[str] = []  # warnings about settings, which a run keeps with its results


def note(problem: str) -> None:
    """Print a warning once, on the first process of a node: flags are read twice."""
    line = f"warning: {problem}"
    if line not in noted:
        noted.append(line)
        if is_first_of_node():
            print(line, flush=True)


def note_ignored(place: str, name: str, value: Any) -> None:
    """Print a warning for a setting of IGNORED, unless its value is what happens in any case."""
    if str(value).lower() not in ("0", "false"):
        note(f"{place} has no effect: {IGNORED[name]}")


def check_accelerate(strategy: str = "", reads_precision: bool = False) -> None:
    """Raise UserError for what `accelerate launch` is configured for, and this script does not do.

    strategy: "ddp", "fsdp" or "deepspeed", in scripts that have a choice. reads_precision: the
    script has taken over its mixed_precision; otherwise a warning says that it has no effect.
    """
    for name in ACCELERATE:
        is_set = os.environ.get(f"ACCELERATE_{name.upper()}", "no").lower() not in OFF
        if is_set and name != f"use_{strategy}":
            has_own = strategy and name in ("use_fsdp", "use_deepspeed")
            own = f" and --{name} of this script" if has_own else ""
            fix = f"use no in accelerate config{own}"
            raise UserError(f"accelerate: {name} is not supported; {fix}")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in OFF and not reads_precision:
        note(f"accelerate's mixed_precision {precision} has no effect; use this script's settings")


def note_unused(config: Any, reason: str, *names: str) -> None:
    """Print a warning that it has no effect for each of these settings that is not at its default.

    Names that the script does not have are left out.
    """
    for name in names:
        if vars(config).get(name) != getattr(type(config), name, None):
            note(f"--{name} has no effect: {reason}")


def unknown(name: str, known: Sequence[str]) -> str:
    """Return 'x is not a setting; did you mean y?'."""
    near = [other for other in known if other.startswith(name)]
    near += difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    names = ", ".join(known)
    names = names if len(names) < 200 else names[:200].rpartition(", ")[0] + ", ..."
    hint = f"did you mean {near[0]}?" if near else f"expected one of {names}"
    return f"{data.shown(name)} is not a setting; {hint}"


@contextlib.contextmanager
def located(places: Places | None = None) -> Iterator[None]:
    """Within it, an error about a setting begins with the file and line, or flag, that set it.

    places: None: as parse_with_file() has returned them last.
    """
    try:
        yield
    except UserError as error:
        name = re.match(r"--(\w+)", str(error))
        known = latest_places if places is None else places
        if name and name[1] in known:
            error.args = (known[name[1]] + str(error)[name.end() :],)
        raise


Range = tuple[str, Callable[[Any], Any]]  # what a value must be, and whether it is
COLUMNS = re.compile(r"(\w+=[^=,]+(,\w+=[^=,]+)*)?")
ABOVE_0: Range = ("> 0", lambda x: x > 0)
COUNT: Range = ("-1 or >= 1", lambda x: x == -1 or x > 0)
FROM_0: Range = (">= 0", lambda x: x >= 0)
FOLDER: Range = ("a folder for the run", bool)
POSITIVE = """beta learning_rate batch_size base_batch_size gradient_accumulation_steps num_epochs
lora_r lora_alpha lambda_shift keep_checkpoints max_new_tokens"""
NOT_NEGATIVE = """seed weight_decay max_grad_norm eval_every save_every log_every stop_after_minutes
num_samples temperature lambda_dpop simpo_gamma"""
RANGES: dict[str, Range] = {  # of settings that several scripts have
    **dict.fromkeys(POSITIVE.split(), ABOVE_0),
    **dict.fromkeys(NOT_NEGATIVE.split(), FROM_0),
    "timeout_minutes": ("> 0 and <= 100,000", lambda x: 0 < x <= 1e5),
    "top_p": ("> 0 and <= 1", lambda x: 0 < x <= 1),
    "max_steps": (">= -1", lambda x: x >= -1),
    "max_rows": COUNT,
    "max_eval_rows": COUNT,
    "columns": ("pairs such as prompt=question,chosen=response_j", COLUMNS.fullmatch),
    "extra_fields": ("names such as importance,source", re.compile(r"([^,]+(,[^,]+)*)?").fullmatch),
    "label_smoothing": (">= 0 and < 0.5", lambda x: 0 <= x < 0.5),
    "lora_dropout": (">= 0 and < 1", lambda x: 0 <= x < 1),
    "warmup_ratio": (">= 0 and <= 1", lambda x: 0 <= x <= 1),
}


def check_ranges(config: Any, **ranges: Range) -> None:
    """Raise UserError for a field out of its range: one of RANGES, or of `beta=cli.ABOVE_0`.

    Raise it also for a base_batch_size that lr_scaling does not use. Print a warning for settings
    of sampling that have no effect.
    """
    for name, (expected, is_in_range) in {**RANGES, **ranges}.items():
        value = vars(config).get(name)
        if value is not None and not is_in_range(value):
            raise UserError(f"--{name}: {value!r} is out of range (expected {expected})")
    scaling, size = vars(config).get("lr_scaling"), "base_batch_size"
    if scaling in ("world_size", "none") and getattr(config, size) != getattr(type(config), size):
        raise UserError(f"--{size}: lr_scaling {scaling} does not use it; use linear or sqrt")
    if vars(config).get("num_samples") == 0 and not vars(config).get("on_policy"):
        names = "judge", "sample_batch_size", "max_new_tokens", "temperature", "top_p"
        note_unused(config, "num_samples is 0", *names)
    elif vars(config).get("temperature") == 0:
        note_unused(config, "temperature 0 is greedy decoding", "top_p")


# --- options of the losses: they are here since losses.py imports torch ---------------------------

Method = Literal[
    "dpo", "cdpo", "robust", "ipo", "ipo_sum", "hinge",
    "dpop", "dposhift", "dpopshift", "simpo", "orpo",
]  # fmt: skip
METHODS = typing.get_args(Method)
REFERENCE_FREE = ("simpo", "orpo")
LOSS_OPTIONS = {  # option -> its default, and the methods that use it
    "label_smoothing": (0.1, ("cdpo", "robust")),
    "lambda_dpop": (50.0, ("dpop", "dpopshift")),
    "lambda_shift": (0.75, ("dposhift", "dpopshift")),
    "simpo_gamma": (0.5, ("simpo",)),
}
FIXED_LENGTH_METHODS = ("ipo", "ipo_sum", *REFERENCE_FREE)  # they average or sum by definition


def loss_options(config: Any) -> dict[str, float]:
    """Return the options of config.method; raise UserError for one that the method does not use."""
    options = {}
    for name, (default, users) in LOSS_OPTIONS.items():
        value = getattr(config, name)
        if config.method in users:
            options[name] = default if value is None else value
        elif value is not None:
            problem = f"{config.method} does not use it; it belongs to {', '.join(users)}"
            raise UserError(f"--{name}: {problem}")
    if config.length_average and config.method in FIXED_LENGTH_METHODS:
        raise UserError(f"--length_average: {config.method} fixes how its log-probs are summed")
    return options
