"""--help: every setting on one line, in its group, with what the source says of it."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import shlex
import sys
import typing

import pytest

import config as dpo_config
import programs
import train_config
from ad import config as ad_config
from ad import evaluate_config
from conftest import ROOT
from ddp_utils import cli, plots
from ddp_utils.tools import chat, merge
from dpo_inv import config as protein_config
from dpo_inv import evaluate, inference_config
from prompt_baking import generate_config
from prompt_baking import train_config as bake_config

sys.path.append(str(ROOT / "scripts"))
distributed_setup = importlib.import_module("distributed_setup")

CLASSES = {
    "main_distributed": dpo_config.Config,
    "train": train_config.Config,
    "generate_data": generate_config.Config,
    "train_loop": bake_config.Config,
    "run_dpo_ddp": protein_config.Config,
    "inference": inference_config.Config,
    "evaluate": evaluate.Config,
    "ad/train": ad_config.Config,
    "ad/evaluate": evaluate_config.Config,
    "plots": plots.Settings,
    "chat": chat.Settings,
    "merge": merge.Settings,
    **{name: flags for name, (flags, *_) in distributed_setup.COMMANDS.items()},
}


def settings(config_class):
    """The lines of settings in --help, without the description above them."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit, match="0"):
        cli.parse(config_class, ["--help"])
    lines = output.getvalue().splitlines()
    head = "Each setting with its default; of several words the first one is it."
    assert max(map(len, lines)) <= 100
    return [line for line in lines[lines.index(head) :] if line.startswith("  ")]


def test_each_setting_has_a_line_that_ends_with_its_comment():
    """Comments as another reader finds them: the syntax tree, first definition first."""
    for config_class in CLASSES.values():
        comments = {}
        for part in reversed(config_class.__mro__[:-1]):
            source = inspect.getsource(part)
            lines = source.splitlines()
            for node in ast.parse(source).body[0].body:
                if isinstance(node, ast.AnnAssign):
                    behind = lines[node.end_lineno - 1].partition("  # ")[2]
                    above = lines[node.lineno - 2].strip().removeprefix("# ")
                    comments.setdefault(node.target.id, behind or above)
        lines = settings(config_class)
        assert len(lines) == len(comments) > 1
        for line, field in zip(lines, dataclasses.fields(config_class), strict=True):
            assert re.match(r"  (?:--)?(?:\[no_\])?(\w+)", line)[1] == field.name
            assert comments[field.name] and line.endswith(f"  {comments[field.name]}")


def test_the_defaults_that_are_shown_are_the_defaults():
    """Given back as flags they change nothing."""
    for config_class in CLASSES.values():
        hints = typing.get_type_hints(config_class, include_extras=True)
        words = []
        for line in settings(config_class):
            switch = re.match(r"  --\[no_\](\w+) (on|off)  ", line)
            setting = re.match(r"  --(\w+) (.+?)  ", line)
            if switch:
                words.append(f"--{switch[1]}" if switch[2] == "on" else f"--no_{switch[1]}")
            elif setting and not setting[2].startswith(("TEXT", "INT", "NUMBER")):
                words += [f"--{setting[1]}", *shlex.split(setting[2].partition("|")[0])]
        needed = [name for name in hints if getattr(config_class, name, None) is None]
        needed = [name for name in needed if typing.get_origin(hints[name]) is typing.Annotated]
        assert words
        assert cli.parse(config_class, [*needed, *words]) == cli.parse(config_class, needed)


PROGRAMS = {  # and a value that it refuses
    "src/main_distributed.py": "--label_smoothing 0.1",
    "src/train.py": "--micro_batch_size 0",
    "src/generate_data.py": "--val_split 1",
    "src/train_loop.py": "--max_traj_len 1",
    "-m dpo_inv.run_dpo_ddp": "--temperature 0",
    "-m dpo_inv.run_dpo": "--beta nan",
    "-m dpo_inv.inference": "--num_samples 1",
    "src/ad/train.py": "--grid_size 1",
    "src/ad/evaluate.py": "--eval_copies 0",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_wrong_settings_need_no_torch(program, tmp_path):
    """Here the import of torch or transformers ends a process."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(77)\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, *program.split()]
    shown = programs.process([*command, "--help"], **env)
    assert "usage: python " in shown.stdout and not shown.stderr
    assert shown.stdout.splitlines()[2].endswith(".")  # what the program does, in a sentence
    refused = programs.process([*command, *PROGRAMS[program].split()], 2, **env)
    assert re.fullmatch(r"error: --\w+: .+\n", refused.stderr) and not refused.stdout
    assert "Unrecognized options" in programs.process([*command, "--x"], 2, **env).stderr
    only = env | {"FLAGS_ONLY": "1", "WORLD_SIZE": "2"}
    programs.process([*command, "--x"], 2, **only)
    valid = [*command, "--pdb_file", "a.pdb"] if program.endswith("inference") else command
    assert programs.process([*valid, "--debug"], **only).stdout == ""
    programs.process(valid, **only)
    for variable in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):  # a rank leaves it to main()
        programs.process([*command, "--x"], 77, **env | {variable: "2"})
    programs.process([*command, "--debug", "--x"], 77, **env)  # for its traceback
