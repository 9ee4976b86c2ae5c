"""Settings: every field is a flag with help, wrong values are refused, YAML fills a dataclass."""

import ast
import dataclasses
import inspect
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
from torch.distributed.run import get_args_parser

import config as config_module
from config import Config
from ddp_utils import UserError, cli, conf

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
SWITCHES = [name for name, field in FIELDS.items() if type(field.default) is bool]


def changed(*flags):
    """The settings that differ from the file's."""
    found = dataclasses.asdict(cli.parse(Config, flags))
    return {name: value for name, value in found.items() if value != FIELDS[name].default}


def refused(capsys, *flags):
    """What a refused command line prints; it leaves with exit status 2."""
    with pytest.raises(SystemExit) as caught:
        cli.parse(Config, flags)
    assert caught.value.code == 2
    return capsys.readouterr().err


# --- flags ---------------------------------------------------------------------------------------


def other_value(name):
    """A flag's words and the value they stand for, unlike the default."""
    default, choices = FIELDS[name].default, FIELDS[name].type
    if type(default) is bool:
        return [f"--no_{name}" if default else f"--{name}"], not default
    if "Literal" in str(choices):
        value = choices.__args__[-1]
        return [f"--{name}", value], value
    if type(default) is str:
        return [f"--{name}", "some thing"], "some thing"
    return [f"--{name}", "3"], 3


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag(name):
    words, value = other_value(name)
    if value == FIELDS[name].default:  # the last choice is the default
        value = FIELDS[name].type.__args__[0]
        words[1] = value
    assert changed(*words) == {name: value}


def test_the_home_folder_is_meant_where_no_shell_says_so(monkeypatch):
    """A shell leaves --flag=~/x as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    assert changed("--result_dir=~/x", "--judge", "~x") == {
        "result_dir": "/home/me/x",
        "judge": "~x",
    }


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_flips_both_ways(name):
    for word, value in [(f"--{name}", True), (f"--no_{name}", False)]:
        assert getattr(cli.parse(Config, [word]), name) is value


def test_without_flags_the_file_counts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert cli.parse(Config) == Config()
    monkeypatch.setattr(sys, "argv", ["script.py", "--beta", "0.3"])
    assert cli.parse(Config) == Config(beta=0.3)


@pytest.mark.parametrize(
    "flags, settings",
    [
        (["--beta=0.5"], {"beta": 0.5}),
        (["--learning_rate", "1e-5"], {"learning_rate": 1e-5}),
        (["--max_rows", "-1", "--max_steps", "-1"], {}),
        (["--train_data", ""], {"train_data": ""}),
        (["--output_dir=--x"], {"output_dir": "--x"}),
        (["--label_smoothing", "0"], {"label_smoothing": 0.0}),
    ],
)
def test_values_are_read_as_their_type(flags, settings):
    assert changed(*flags) == settings


@pytest.mark.parametrize(
    "flags",
    [["--learn", "1"], ["--model", "x"], ["--bet", "1"], ["--gradient_acc", "2"], ["--chec"]],
)
def test_abbreviations_are_refused(capsys, flags):
    assert flags[0] in refused(capsys, *flags)


def test_an_unknown_flag_suggests_the_nearest(capsys):
    message = refused(capsys, "--learing_rate", "1")
    assert "--learing_rate" in message and "--learning_rate" in message


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch_size", "1.5"],
        ["--batch_size", "many"],
        ["--batch_size", "true"],
        ["--beta", "x"],
        ["--beta"],
        ["--method", "ppo"],
        ["--shuffle", "no"],
        ["stray"],
    ],
)
def test_a_wrong_value_names_its_flag(capsys, flags):
    message = refused(capsys, *flags)
    assert flags[-1 if flags[0] == "--shuffle" else 0] in message


def test_only_the_main_rank_prints(capsys):
    with pytest.raises(SystemExit):
        cli.parse(Config, ["--nonsense"], console=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["--local-rank=1"], ["--local_rank=1"], ["--local_rank", "1"]])
@pytest.mark.parametrize("place", [0, 2])
def test_what_launchers_append_is_swallowed(words, place):
    flags = ["--beta", "0.7", "--no_shuffle"]
    flags[place:place] = words
    assert changed(*flags) == {"beta": 0.7, "shuffle": False}


@pytest.mark.parametrize("flag", ["--check", "--validate_only", "--dry_run"])
def test_check_has_two_other_names(flag):
    assert changed(flag) == {"check": True}


@pytest.mark.parametrize("flag", ["--validate-only", "--dry-run"])
def test_the_other_names_of_check_take_dashes_like_any_flag(flag):
    assert changed(flag) == {"check": True}


def test_a_script_can_add_aliases_of_its_own():
    assert cli.parse(Config, ["--lr", "1"], aliases={"--lr": "--learning_rate"}).learning_rate == 1
    assert cli.parse(Config, ["--dry_run"], aliases={"--lr": "--learning_rate"}).check


@pytest.mark.parametrize("name", FIELDS)
def test_torchruns_own_parser_lets_every_flag_through(name):
    # argparse takes --n for --nnodes, even after the script
    words = ["script.py", f"--{name}", "1", f"--{name}=1", f"--no_{name}"]
    parsed = get_args_parser().parse_args(words)
    assert [parsed.training_script, *parsed.training_script_args] == words


# --- help ----------------------------------------------------------------------------------------


def comments():
    """Field -> the comment at the end of its last line."""
    source = inspect.getsource(config_module)
    lines, [body] = (
        source.splitlines(),
        [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)],
    )
    ends = {node.target.id: lines[node.end_lineno - 1] for node in body}
    return {name: line.partition("  # ")[2].strip() for name, line in ends.items()}


def test_every_field_has_a_comment():
    assert list(comments()) == list(FIELDS)
    assert all(comments().values())


# --- types and ranges ----------------------------------------------------------------------------


def edited(name, value):
    """The settings with another default, as after an edit of the file."""
    return dataclass(
        type("Config", (Config,), {name: value, "__annotations__": {name: FIELDS[name].type}})
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize("name", ["beta", "learning_rate", "label_smoothing", "sft_weight"])
def test_nan_and_infinity_are_refused(name, value):
    with pytest.raises(UserError, match=f"--{name}: "):
        cli.parse(Config, [f"--{name}={value}"])


@pytest.mark.parametrize(
    "name, value",
    [
        ("learning_rate", "1e-4"),
        ("beta", None),
        ("batch_size", 16.0),
        ("batch_size", True),
        ("seed", None),
        ("shuffle", "no"),
        ("shuffle", 1),
        ("method", "ppo"),
        ("method", None),
        ("model_name", None),
        ("model_name", 3),
        ("label_smoothing", "0.1"),
        ("beta", float("nan")),
        ("beta", True),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wrong_type_in_an_edited_file_is_one_line(capsys, name, value):
    with pytest.raises(UserError) as caught:
        cli.parse(edited(name, value), [])
    message = str(caught.value)
    assert message.startswith(f"--{name}: ") and repr(value) in message and "\n" not in message
    assert capsys.readouterr() == ("", "")


def test_a_whole_number_does_for_a_float():
    assert cli.check_types(Config(beta=1, label_smoothing=0)).beta == 1


def test_a_wrong_choice_lists_the_right_ones():
    with pytest.raises(UserError, match="keep_end.*keep_start"):
        cli.check_types(Config(truncation="left"))


def test_a_value_out_of_range_names_flag_value_and_range():
    rule = {"beta": ("above 0", lambda x: x > 0)}
    cli.check_ranges(Config(beta=0.1), **rule)
    with pytest.raises(UserError) as caught:
        cli.check_ranges(Config(beta=-1.5), **rule)
    assert str(caught.value) == "--beta: -1.5 is out of range; give a value above 0"


def test_an_option_that_was_not_given_has_no_range():
    rule = {"label_smoothing": ("below 0.5", lambda x: x < 0.5)}
    cli.check_ranges(Config(), **rule)
    with pytest.raises(UserError, match="--label_smoothing: 0.5 .* below 0.5"):
        cli.check_ranges(
            Config(label_smoothing=0.5), label_smoothing=("below 0.5", lambda x: x < 0.5)
        )


# --- YAML ----------------------------------------------------------------------------------------


@dataclass
class Inner:
    rank: int = 1
    name: str = "x"


@dataclass
class Outer:
    rate: float = 0.1
    count: int = 2
    on: bool = True
    title: str = "a"
    mode: Literal["x", "y"] = "x"
    limit: float | None = None
    inner: Inner = field(default_factory=Inner)


def load(folder, text):
    file = folder / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return conf.from_yaml(Outer, file)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("rate: 1e-4", Outer(rate=0.0001)),  # YAML 1.1 makes this a string
        ("rate: 5E-5", Outer(rate=0.00005)),
        ("rate: 1", Outer(rate=1)),
        ("count: 010", Outer(count=10)),  # and this 8
        ("title: no", Outer(title="no")),  # and this False
        ("title: 12:30:00", Outer(title="12:30:00")),  # and this 45000
        ("on: false", Outer(on=False)),
        ("limit: null", Outer()),
        ("limit: 0.5\nmode: y", Outer(limit=0.5, mode="y")),
        ("inner:\n  rank: 3\ncount: 4", Outer(count=4, inner=Inner(rank=3))),
        ("inner: {rank: 3, name: z}", Outer(inner=Inner(3, "z"))),
        ("{}", Outer()),
        (b"\xef\xbb\xbfcount: 4\r\non: true\r\n", Outer(count=4)),
    ],
)
def test_yaml_fills_the_dataclass(tmp_path, text, wanted):
    assert load(tmp_path, text) == wanted


@pytest.mark.parametrize("name", ["nofile.yaml", "."])
def test_a_yaml_file_that_cannot_be_opened_is_a_users_mistake(tmp_path, name):
    with pytest.raises(UserError, match="nofile|directory"):
        conf.from_yaml(Outer, tmp_path / name)


def test_no_python_runs_while_yaml_is_read(tmp_path):
    canary = tmp_path / "canary"
    with pytest.raises(UserError):
        load(tmp_path, f"title: !!python/object/apply:os.mkdir [{canary}]")
    assert not canary.exists()
