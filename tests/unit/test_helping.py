"""--help: every setting on one line, in its group, with what the source says of it."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import re
import sys
import typing

import pytest

import config as dpo_config
import generate_data
import programs
import train_config
import train_loop
from ad import collect, evaluate
from ad import config as ad_config
from conftest import ROOT
from ddp_utils import cli, helping, merge, plots
from dpo_inv import config as protein_config
from dpo_inv import inference, weights

sys.path.append(str(ROOT / "scripts"))
distributed_setup = importlib.import_module("distributed_setup")

CLASSES = {
    "main_distributed": dpo_config.Config,
    "train": train_config.Config,
    "generate_data": generate_data.Config,
    "train_loop": train_loop.Config,
    "run_dpo_ddp": protein_config.Config,
    "inference": inference.Config,
    "weights": weights.Settings,
    "ad/train": ad_config.Config,
    "ad/collect": collect.Collect,
    "ad/evaluate": evaluate.Settings,
    "plots": plots.Settings,
    "merge": merge.Settings,
    **{name: flags for name, (flags, *_) in distributed_setup.COMMANDS.items()},
}
HEAD = "Each setting with its default; of several words the first one is it."
scripts = pytest.mark.parametrize("config_class", CLASSES.values(), ids=CLASSES)


def printed(config_class):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as stop:
        cli.parse(config_class, ["--help"])
    assert stop.value.code == 0
    return said.getvalue().splitlines()


def settings(config_class):
    """The lines of settings, without the description above them."""
    lines = printed(config_class)
    return lines[
        lines.index("Each setting with its default; of several words the first one is it.") :
    ]


@scripts
def test_one_line_of_at_most_100_columns_for_each_setting(config_class):
    lines = [line for line in settings(config_class) if line.startswith("  ")]
    names = [re.match(r"  (?:--)?(?:\[no_\])?(\w+)", line)[1] for line in lines]
    assert names == [field.name for field in dataclasses.fields(config_class)]
    assert [line for line in printed(config_class) if len(line) > 100] == []


@scripts
def test_the_line_ends_with_the_comment_of_the_source(config_class):
    """Comments as another reader finds them: the syntax tree, first definition first."""
    comments = {}
    for part in reversed(config_class.__mro__[:-1]):
        source = inspect.getsource(part)
        (tree,), lines = ast.parse(source).body, source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.AnnAssign):
                behind = lines[node.end_lineno - 1].partition("  # ")[2]
                above = lines[node.lineno - 2].strip().removeprefix("# ")
                comments.setdefault(node.target.id, behind or above)
    shown = [line for line in settings(config_class) if line.startswith("  ")]
    assert len(shown) == len(comments) > 1
    for line, field in zip(shown, dataclasses.fields(config_class), strict=True):
        comment = comments[field.name]
        assert comment and line.endswith(f"  {comment}")


@scripts
def test_the_defaults_that_are_shown_are_the_defaults(config_class):
    """Given back as flags they change nothing."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    words = []
    for line in settings(config_class):
        switch = re.match(r"  --\[no_\](\w+) (on|off)  ", line)
        setting = re.match(r"  --(\w+) (.+?)  ", line)
        if switch:
            words.append(f"--{switch[1]}" if switch[2] == "on" else f"--no_{switch[1]}")
        elif setting and not setting[2].startswith(("TEXT", "INT", "NUMBER")):
            words += [f"--{setting[1]}", *setting[2].partition("|")[0].split()]
    needed = [name for name in hints if getattr(config_class, name, None) is None]
    needed = [name for name in needed if typing.get_origin(hints[name]) is typing.Annotated]
    parsed = cli.parse(config_class, [*needed, *words])
    assert parsed == cli.parse(config_class, needed)
    assert words


def test_groups_stand_above_their_settings():
    lines = settings(train_config.Config)
    blocks = [list(block) for filled, block in itertools.groupby(lines, bool) if filled][1:]
    heads = {name.split()[0].lstrip("-[no_]"): block[0] for block in blocks for name in block[1:]}
    assert all(len(block) > 1 for block in blocks)
    assert heads["model_name"] == "section model" and heads["lora_r"] == "section fine_tuning"
    assert heads["beta"] == "section training, objective dpo"
    assert blocks[-1][0] == "flags alone: they belong to a start, not to a run"
    titles = [block[0] for block in blocks]
    assert len(titles) == len({*titles})


def test_defaults_of_a_file_are_shown_in_place_of_the_scripts(tmp_path):
    said = helping.text(dpo_config.Config, dpo_config.Config(beta=0.25, strategy="fsdp"))
    assert "  --beta 0.25 " in said and "  --strategy fsdp|ddp " in said


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["src/main_distributed.py"], "python src/main_distributed.py [settings]"),
        (["-m", "ddp_utils.merge"], "python -m ddp_utils.merge adapter folder [settings]"),
    ],
)
def test_usage_is_what_was_typed(words, usage):
    done = programs.start(*words, "-h", cwd=ROOT)
    assert done.stdout.splitlines()[0] == f"usage: {usage}"
    assert (done.returncode, done.stderr) == (0, "")
