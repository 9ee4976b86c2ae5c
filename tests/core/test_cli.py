"""Settings: every field is a flag with help, wrong values are refused, YAML fills a dataclass."""

import dataclasses
import sys
from dataclasses import dataclass

import pytest
from torch.distributed.run import get_args_parser

from config import Config
from ddp_utils import UserError, cli, yaml_config

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
SWITCHES = [name for name, field in FIELDS.items() if type(field.default) is bool]


def changed(*flags):
    """The settings that differ from the file's."""
    values = dataclasses.asdict(cli.parse(Config, flags))
    return {name: value for name, value in values.items() if value != FIELDS[name].default}


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


def test_every_field_is_a_flag():
    for name in FIELDS:
        words, value = other_value(name)
        if value == FIELDS[name].default:  # the last choice is the default
            value = FIELDS[name].type.__args__[0]
            words[1] = value
        assert changed(*words) == {name: value}
    for name in SWITCHES:
        for word, value in [(f"--{name}", True), (f"--no_{name}", False)]:
            assert getattr(cli.parse(Config, [word]), name) is value


READ = [
    (["--beta=0.5"], {"beta": 0.5}),
    (["--learning_rate", "1e-5"], {"learning_rate": 1e-5}),
    (["--learning-rate=1e-5", "--batch_size", "+4"], {"learning_rate": 1e-5, "batch_size": 4}),
    (["--max_rows", "-1", "--max_steps", "-1"], {}),
    (["--train_data", ""], {"train_data": ""}),
    (["--output_dir=--x"], {"output_dir": "--x"}),
    (["--label_smoothing", "0"], {"label_smoothing": 0.0}),
    (["--result_dir=~/x", "--judge", "~x"], {"result_dir": "/home/me/x", "judge": "~x"}),
    *(([flag], {"check": True}) for flag in ("--check", "--validate_only", "--validate-only")),
    *(([flag], {"check": True}) for flag in ("--dry_run", "--dry-run")),
]


def test_flags_are_read_as_their_type(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")  # which no shell puts into --flag=~/x
    for flags, settings in READ:
        assert changed(*flags) == settings
    for words in (["--local-rank=1"], ["--local_rank=1"]):
        for place in (0, 2):  # what launchers append is swallowed
            flags = ["--beta", "0.7", "--no_shuffle"]
            flags[place:place] = words
            assert changed(*flags) == {"beta": 0.7, "shuffle": False}


def test_without_flags_the_file_counts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    assert cli.parse(Config) == Config()
    monkeypatch.setattr(sys, "argv", ["script.py", "--beta", "0.3"])
    assert cli.parse(Config) == Config(beta=0.3)
    aliases = {"--lr": "--learning_rate"}
    assert cli.parse(Config, ["--lr", "1"], aliases=aliases).learning_rate == 1
    assert cli.parse(Config, ["--dry_run"], aliases=aliases).check


def test_an_abbreviation_is_no_flag_and_only_the_main_rank_says_so(capsys):
    """More wrong flags: tests/core/corpus/flags/box.txt."""
    for flag in ("--model", "--bet", "--gradient_acc", "--chec"):
        for console in (True, False):
            with pytest.raises(SystemExit) as caught:
                cli.parse(Config, [flag, "1"], console=console)
            assert caught.value.code == 2
            said = capsys.readouterr()
            assert flag in said.err if console else said == ("", "")


def test_torchruns_own_parser_lets_every_flag_through():
    """argparse takes --n for --nnodes, even after the script."""
    for name in FIELDS:
        words = ["script.py", f"--{name}", "1", f"--{name}=1", f"--no_{name}"]
        parsed = get_args_parser().parse_args(words)
        assert [parsed.training_script, *parsed.training_script_args] == words


# --- types and ranges ----------------------------------------------------------------------------


def edited(name, value):
    """The settings with another default, as after an edit of the file."""
    return dataclass(
        type("Config", (Config,), {name: value, "__annotations__": {name: FIELDS[name].type}})
    )


WRONG = {
    "learning_rate": ["1e-4"],
    "beta": [None, True, float("nan")],
    "batch_size": [16.0, True],
    "shuffle": ["no", 1],
    "method": ["ppo", None],
    "model_name": [3, None],
    "label_smoothing": ["0.1"],
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_wrong_type_in_an_edited_file_is_one_line(capsys, name):
    for value in WRONG[name]:
        with pytest.raises(UserError) as caught:
            cli.parse(edited(name, value), [])
        message = str(caught.value)
        assert message.startswith(f"--{name}: ") and repr(value) in message and "\n" not in message
        assert capsys.readouterr() == ("", "")


def test_yaml_that_is_not_there_is_one_line(tmp_path):
    """What is in it: tests/core/corpus; sections: tests/scripts/test_train_config.py."""
    for name in ("nofile.yaml", "."):
        with pytest.raises(UserError, match="nofile|directory"):
            yaml_config.from_yaml(Config, tmp_path / name, {})
