"""One dataclass is a script's settings, its flags and its --help."""

import contextlib
import difflib
import io
import os
import re
import reprlib
import sys
import types
import typing
import warnings

import tyro

from ddp_utils import UserError, data

ALIASES = {"--validate_only": "--check", "--dry_run": "--check"}
COLUMNS = re.compile(r"(\w+=[^=,]+(,\w+=[^=,]+)*)?")  # ours=theirs,ours=theirs
ABOVE_0 = ("above 0", lambda x: x > 0)
FROM_0 = ("of 0 or more", lambda x: x >= 0)
# what the settings of all scripts have in common: description, and who fits it
POSITIVE = "beta learning_rate batch_size base_batch_size gradient_accumulation_steps num_epochs "
POSITIVE += "lora_r lora_alpha lambda_shift keep_checkpoints max_new_tokens log_every"
NOT_NEGATIVE = "seed weight_decay max_grad_norm eval_every save_every stop_after_minutes "
NOT_NEGATIVE += "num_samples temperature lambda_dpop simpo_gamma"
RANGES = dict.fromkeys(POSITIVE.split(), ABOVE_0) | dict.fromkeys(NOT_NEGATIVE.split(), FROM_0)
RANGES |= {
    "timeout_minutes": ("above 0, up to 100,000", lambda x: 0 < x <= 1e5),
    "top_p": ("above 0, at most 1", lambda x: 0 < x <= 1),
    "max_steps": ("of -1 or more", lambda x: x >= -1),
    "max_rows": ("of -1, or 1 and more", lambda x: x == -1 or x > 0),
    "columns": ("such as prompt=question,chosen=response_j", COLUMNS.fullmatch),
    "label_smoothing": ("from 0 up to, not including, 0.5", lambda x: 0 <= x < 0.5),
    "lora_dropout": ("from 0 up to, not including, 1", lambda x: 0 <= x < 1),
    "warmup_ratio": ("from 0 to 1", lambda x: 0 <= x <= 1),
}

METHODS = {  # loss of losses.py -> its options and their defaults
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
Method = typing.Literal[tuple(METHODS)]  # one of these names
LOSS_OPTIONS = ("label_smoothing", "lambda_dpop", "lambda_shift", "simpo_gamma")
FIXED_LENGTH_METHODS = ("ipo", "ipo_sum", "simpo")  # averaged or summed by definition


LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def check_flags(read: typing.Callable[[list[str]], object]) -> None:
    """Call read(argv), so that --help and mistakes in the settings end this process quickly.

    Scripts call it before they import torch, which takes seconds. Of several processes on a node
    only the first one prints. With --debug, main() raises the error, with its traceback.
    """
    local_rank = next((os.environ[name] for name in LOCAL_RANKS if os.environ.get(name)), "0")
    prints = local_rank == "0"
    stdout = sys.stdout if prints else io.StringIO()
    stderr = sys.stderr if prints else io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            read(sys.argv[1:])
        except UserError as error:
            if "--debug" not in sys.argv:
                print(f"error: {error}", file=sys.stderr)
                sys.exit(error.exit_code)


def parse(config_class, argv=None, console=True, aliases=None, default=None, command=""):
    """Read flags over the dataclass's defaults, or over `default`, an instance of it.

    command: the word between the program and its flags, if it has several. tyro prints its own
    box and exits 2 on a wrong flag. `--local-rank=N`, which torch.distributed.launch and deepspeed
    append, is swallowed.
    """
    names = {key.replace("-", "_"): name for key, name in {**ALIASES, **(aliases or {})}.items()}
    command = f"{typed()} {command}".rstrip()
    words = []
    for word in sys.argv[1:] if argv is None else argv:
        name, equals, text = word.partition("=")
        if name.replace("-", "_") != "__local_rank":
            words.append(names.get(name.replace("-", "_"), name) + equals + text)
    if {"-h", "--help"} & {*words}:
        from ddp_utils.tools import help

        if console:
            with contextlib.suppress(BrokenPipeError):  # | head
                print(help.text(config_class, default, command))
        raise SystemExit(0)
    # tyro 1.0 prints its "Value error" even if it must not
    stderr = contextlib.redirect_stderr(sys.stderr if console else io.StringIO())
    with warnings.catch_warnings(), stderr:
        warnings.simplefilter("ignore")  # defaults of a wrong type: check_types says it in one line
        options = {"use_underscores": True, "console_outputs": console, "prog": command}
        options |= {"default": default} if default else {}
        config = tyro.cli(config_class, args=words, **options)
    for name, value in list(vars(config).items()):
        if isinstance(value, str) and value.startswith("~/"):  # no shell expands --flag=~/x
            setattr(config, name, os.path.expanduser(value))
    return check_types(config)


def typed() -> str:
    """What was typed: `python -m dpo_inv.run_dpo_ddp` or a file, from the current folder."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec else f"python {os.path.relpath(sys.argv[0] or '-')}"


def check_types(config):
    """Refuse values of another type, which an edited config file can hold, and NaN or infinity."""
    for name, hint in typing.get_type_hints(type(config)).items():
        check_type(f"--{name}", hint, getattr(config, name))
    return config


def check_type(name, hint, value):
    if typing.get_origin(hint) is tuple and isinstance(value, tuple):
        for part in value:
            check_type(name, typing.get_args(hint)[0], part)
        return
    is_choice = typing.get_origin(hint) is typing.Literal
    wanted = typing.get_args(hint) if is_choice or isinstance(hint, types.UnionType) else (hint,)
    kinds = {type(value), float} if type(value) is int else {type(value)}
    fits = value in wanted if is_choice else kinds & {*wanted}
    # NaN is not below what torch can hold, either
    fits = fits and not (isinstance(value, int | float) and not abs(value) < 2**63)
    if not fits or data.CONTROL.search(str(value)):
        valid = f"a valid {getattr(hint, '__name__', hint)}"
        choices = " or ".join(map(repr, wanted)) if is_choice else valid
        raise UserError(f"{name}: {reprlib.repr(value):.100} is not {choices}")


def check_ranges(config, **rules):
    """UserError for a field out of its range: RANGES, and `beta=("above 0", lambda x: x > 0)`."""
    known = {name: RANGES[name] for name in vars(config) if name in RANGES}
    for name, (description, fits) in (known | rules).items():
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise UserError(f"--{name}: {value} is out of range; give a value {description}")


def loss_options(config) -> dict:
    """Return the method's options, given or default; UserError for one that it does not use."""
    defaults = METHODS.get(config.method, {})  # a script may have more
    for name in LOSS_OPTIONS:
        if getattr(config, name) is not None and name not in defaults:
            users = ", ".join(method for method, used in METHODS.items() if name in used)
            raise UserError(f"--{name}: {config.method} does not use it; it belongs to {users}")
    if config.length_average and config.method in FIXED_LENGTH_METHODS:
        raise UserError(f"--length_average: {config.method} fixes how its log-probs are summed")
    given = {name: getattr(config, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def unknown(name, known):
    """'x is not a setting; did you mean y?'"""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known):.200}"
    return f"{data.shown(name)} is not a setting; {hint}"


@contextlib.contextmanager
def naming(places):
    """Within it an error that begins with a flag names the place that gave the setting instead."""
    try:
        yield
    except UserError as error:
        place = re.sub(r"^--(\w+)", lambda flag: places.get(flag[1], flag[0]), str(error))
        error.args = place, *error.args[1:]
        raise
