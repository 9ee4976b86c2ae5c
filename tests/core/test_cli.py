"""Command lines: each field is a flag, mistakes are one line, help shows comments and defaults."""

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import sys
import typing
from dataclasses import dataclass

import pytest
from torch.distributed.run import get_args_parser

import config as dpo_config
import programs
import train_config
from ad import config as ad_config
from ad import evaluate_config
from config import Config
from conftest import ROOT
from ddp_utils import UserError, cli
from dpo_inv import config as protein_config
from dpo_inv import evaluate
from lm import settings as commands
from prompt_baking import generate_config
from prompt_baking import train_config as bake_config

sys.path.append(str(ROOT / "scripts"))
distributed_setup = importlib.import_module("distributed_setup")

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
CONFIGS = [Config, train_config.Config, ad_config.Config, evaluate_config.Config]
CONFIGS += [protein_config.Config, protein_config.DesignConfig, evaluate.Config]
CONFIGS += [generate_config.Config, bake_config.Config]
CONFIGS += [commands.Chat, commands.Merge]
CONFIGS += [flags for flags, *_ in distributed_setup.COMMANDS.values()]


def changed(*flags):
    """Return the settings that differ from the defaults."""
    values = dataclasses.asdict(cli.parse(Config, flags))
    return {name: value for name, value in values.items() if value != FIELDS[name].default}


# --- flags ---------------------------------------------------------------------------------------


def other_value(name):
    """Return the words of a flag and their value, which is not the default."""
    default, hint = FIELDS[name].default, FIELDS[name].type
    if hint is bool:
        return [f"--no_{name}" if default else f"--{name}"], not default
    value = "3" if hint in (int, float, int | None, float | None) else "some thing"
    if typing.get_origin(hint) is typing.Literal:
        [value, *_] = [choice for choice in typing.get_args(hint) if choice != default]
    return [f"--{name}", value], 3 if value == "3" else value


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag(name):
    words, value = other_value(name)
    assert changed(*words) == {name: value}
    if FIELDS[name].type is bool:
        assert [getattr(cli.parse(Config, [f"--{no}{name}"]), name) for no in ("", "no_")] == [1, 0]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--beta=0.5", {"beta": 0.5}),
        ("--learning-rate=1e-5 --batch_size +4", {"learning_rate": 1e-5, "batch_size": 4}),
        ("--max_rows -1 --max_steps -1 --train_data ''", {"train_data": ""}),
        ("--output_dir=--x", {"output_dir": "--x"}),
        ("--label_smoothing 0", {"label_smoothing": 0.0}),
        ("--beta 1 --beta 2 --no_shuffle --shuffle", {"beta": 2.0}),
        ("--result_dir=~/x --judge ~x", {"result_dir": "/home/me/x", "judge": "~x"}),
        ("--validate_only", {"check": True}),
        ("--dry-run", {"check": True}),
        ("--lr=1 -r 4 --no-cuda", {"learning_rate": 1.0, "lora_r": 4, "backend": "gloo"}),
        (
            "--use_deepspeed --deepspeed_config z.json",  # flags of train.py
            {"strategy": "deepspeed", "sharding_config": "z.json"},
        ),
        ("--use-fsdp --deepspeed a", {"strategy": "fsdp", "sharding_config": "a"}),
        ("--local-rank=1 --beta 0.7 --no_shuffle", {"beta": 0.7, "shuffle": False}),
        ("--beta 0.7 --local_rank=1 --no_shuffle", {"beta": 0.7, "shuffle": False}),
    ],
)
def test_flags_become_values_of_their_type(flags, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = shlex.split(flags)
    assert changed(*words) == expected
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    assert cli.parse(Config) == Config(**expected)


def test_lists_positional_arguments_and_a_setting_with_the_name_of_an_alias():
    words = "--temperature 0.1 1 --mutable_positions 3 -4 --fixed_chains --seed 5"
    settings = cli.parse(protein_config.DesignConfig, words.split())
    assert (settings.temperature, settings.mutable_positions) == ((0.1, 1.0), ("3", "-4"))
    assert (settings.fixed_chains, settings.seed) == ((), 5)
    with pytest.raises(UserError, match="the following arguments are required: folder"):
        cli.parse(commands.Chat, ["--before"])
    assert cli.parse(ad_config.Config, ["--lr", "0.1"]).lr == 0.1
    with pytest.raises(UserError, match="--use_fsdp is not a setting"):  # nor is --strategy
        cli.parse(ad_config.Config, ["--use_fsdp"])


def test_torchruns_own_parser_lets_every_flag_through():
    """argparse reads --n as --nnodes, even after the script."""
    for name in FIELDS:
        words = ["script.py", f"--{name}", "1", f"--{name}=1", f"--no_{name}"]
        parsed = get_args_parser().parse_args(words)
        assert [parsed.training_script, *parsed.training_script_args] == words


# --- mistakes; of single flags: tests/core/corpus/flags/expected.txt -----------------------------


@dataclass
class Edited(Config):
    beta: float = "0.1"  # type: ignore[assignment]


WRONG = {
    "learning_rate": ["1e-4"],
    "beta": [None, True, float("nan"), float("-inf"), 2.0**63],
    "batch_size": [16.0, True, -(2**63)],
    "shuffle": ["no", 1],
    "method": ["ppo", None],
    "model_name": [3, None, "a\nb", "\ud800"],
    "label_smoothing": ["0.1"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_in_an_edited_file_is_one_line(name):
    for value in WRONG[name]:
        with pytest.raises(UserError) as caught:
            cli.check_types(dataclasses.replace(Config(), **{name: value}))
        message = str(caught.value)
        assert message.startswith(f"--{name}: {value!r} is not ") and "\n" not in message
    assert cli.check_types(Config(beta=1)).beta == 1
    with pytest.raises(UserError, match="--beta: '0.1' is not a valid float"):
        cli.parse(Edited, [])


def test_a_mistake_names_the_place_of_its_setting():
    places = {"beta": "c.yaml:3: training.beta", "bet": "wrong"}
    with pytest.raises(UserError) as caught, cli.located(places):
        cli.check_ranges(Config(beta=0))
    assert str(caught.value) == "c.yaml:3: training.beta: 0 is out of range (expected > 0)"
    with pytest.raises(UserError, match="^--seed: -1 is out of range"), cli.located(places):
        cli.check_ranges(Config(seed=-1))


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", CONFIGS)
def test_help_shows_the_comment_and_the_default_of_each_field(config_class, capsys):
    """Comments as another reader finds them: the syntax tree, first definition first."""
    comments, headings = {}, []
    for part in reversed(config_class.__mro__[:-1]):
        source = inspect.getsource(part)
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                comment = lines[node.end_lineno - 1].partition("  # ")[2]
                comments.setdefault(node.target.id, comment)
                above = re.fullmatch("    # (.*)", lines[node.lineno - 2])
                headings += [above[1]] if above else []
    with pytest.raises(SystemExit, match="0"):
        cli.parse(config_class, ["-h"])
    shown = capsys.readouterr().out
    positions = [shown.index(f"\n{heading}:\n") for heading in dict.fromkeys(headings)]
    assert positions == sorted(positions)
    shown = " ".join(shown.split()).replace("- ", "-")
    words, positional = [], []
    for field in dataclasses.fields(config_class):
        comment = comments[field.name].replace("- ", "-")
        assert comment
        if field.default is dataclasses.MISSING:
            positional.append("word")
            assert f" {field.name} {comment}" in shown
            continue
        values = field.default if isinstance(field.default, tuple) else [field.default]
        assert f"{comment} (default: {shlex.join(map(str, values))})" in shown
        if field.type is bool:
            assert f" --{field.name}, --no_{field.name} {comment}" in shown
            words.append(f"--{field.name}" if field.default else f"--no_{field.name}")
        elif field.default is not None:
            words += [f"--{field.name}", *map(str, values)]
    # passed as flags, the defaults change nothing
    assert cli.parse(config_class, positional + words) == cli.parse(config_class, positional)


OWN_DATA = {  # what the demo's data set, as it is for other data
    "config": {"val_data": "", "test_data": "", "judge": "", "sft_weight": None, "num_samples": 16},
    "dpo_inv.config": {
        "val_data": "",
        "base_model_name": "v_48_020",
        "learning_rate": 1e-4,
        "num_epochs": 2.0,
    },
}


@pytest.mark.parametrize("name", OWN_DATA)
def test_an_edited_default_of_train_data_is_not_the_demo(name, monkeypatch):
    module = importlib.import_module(name)
    read = module.read_settings if name == "dpo_inv.config" else module.read
    demo = read([])
    assert not any(getattr(demo, field) == value for field, value in OWN_DATA[name].items())
    for path in (f"./{demo.train_data}", str(ROOT / demo.train_data)):
        assert read(["--train_data", path]) == dataclasses.replace(demo, train_data=path)

    @dataclass
    class Edited(module.Config):
        train_data: str = "mine.json"

    monkeypatch.setattr(module, "Config", Edited)
    edited = read([])
    assert {field: getattr(edited, field) for field in OWN_DATA[name]} == OWN_DATA[name]
    assert edited.train_data == "mine.json"


PROGRAMS = {  # and a value that is out of range
    "src/main_distributed.py": "--label_smoothing 0.1",
    "src/train.py": "--micro_batch_size 0",
    "src/generate_data.py": "--val_split 1",
    "src/train_loop.py": "--max_traj_len 1",
    "-m dpo_inv.run_dpo_ddp": "--temperature 0",
    "-m dpo_inv.run_dpo": "--beta nan",
    "-m dpo_inv.inference": "--num_samples 1",
    "src/ad/train.py": "--grid_size 1",
    "src/ad/evaluate.py": "--eval_copies 0",
    "-m lm.chat folder": "--temperature -1",
    "-m lm.merge adapter folder": "--scale -1",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_wrong_settings_need_no_torch(program, tmp_path):
    """Here the import of torch or transformers ends a process."""
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(77)\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    command = [sys.executable, *program.split()]
    shown = programs.process([*command, "--help"], **env)
    command_line = f"python {program}" if program[0] == "-" else program.rpartition("/")[2]
    command_line = re.sub("run_dpo$", "run_dpo_ddp", command_line)  # the older name
    usage = f"usage: {command_line} [settings]\n"
    assert usage in shown.stdout and not shown.stderr
    assert shown.stdout.splitlines()[2].endswith(".")  # what the program does, in a sentence
    wrong = programs.process([*command, *PROGRAMS[program].split()], 2, **env)
    assert re.fullmatch(r"error: --\w+: .+\n", wrong.stderr) and not wrong.stdout
    programs.process([*command, "--debug", "--x"], 77, **env)  # main() raises it, with a traceback
    for rank, line in (("0", "error: --x is not a setting; "), ("1", "")):
        done = programs.process([*command, "--x"], 2, **env, LOCAL_RANK=rank)
        assert not done.stdout and done.stderr.startswith(line) and bool(done.stderr) == bool(line)


# --- YAML files ----------------------------------------------------------------------------------

READERS = [dpo_config.read, generate_config.read, bake_config.read, protein_config.read_settings]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__module__)
def test_a_yaml_file_sets_what_flags_do_not_set(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("\nseed: 7\ntimeout_minutes: 5\n")
    config = read(["--config", "c.yaml", "--timeout_minutes", "6"])
    assert (config.seed, config.timeout_minutes) == (7, 6.0)


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__module__)
def test_a_mistake_in_a_yaml_file_is_one_line_with_its_place(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistakes = {
        "sede: 7": "c.yaml:2: sede is not a setting; did you mean seed?",
        "seed: a": "c.yaml:2: seed: 'a' is not a valid int",
        "seed: -1": "c.yaml:2: seed: -1 is out of range (expected >= 0)",
        "config: d.yaml": "c.yaml:2: config is not a setting; ",
    }
    for line, message in mistakes.items():
        (tmp_path / "c.yaml").write_text(f"\n{line}\n")
        with pytest.raises(UserError) as caught:
            read(["--config", "c.yaml"])
        assert str(caught.value).startswith(message), line


def test_strategies_of_dpo_and_what_they_exclude(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{\n"bf16": {\n"enabled": true}}')
    mistakes = {
        "--strategy deepspeed": "--strategy: deepspeed needs a file, too",
        "--sharding_config ds.json": "--sharding_config: it needs --strategy fsdp or deepspeed",
        "--base_dtype 4bit": "--base_dtype: full fine-tuning trains fp32 weights",
        "--base_dtype 4bit --fine_tuning lora --strategy fsdp": "--base_dtype: fsdp cannot shard",
        "--no_use_mixed_precision --strategy deepspeed --sharding_config ds.json": (
            "--use_mixed_precision is no, but ds.json:3: bf16.enabled is bf16; make them equal"
        ),
    }
    for flags, message in mistakes.items():
        with pytest.raises(UserError) as caught:
            dpo_config.read(flags.split())
        assert str(caught.value).startswith(message), flags
    flags = "--strategy deepspeed --sharding_config ds.json"
    assert dpo_config.read(flags.split()).mixed_precision == "bf16"


# --- settings without an effect ------------------------------------------------------------------

EVERY = [dpo_config.read, train_config.read, protein_config.read_settings, ad_config.read]
EVERY += [generate_config.read, bake_config.read]
OF_AD = "--config config/model/ad_dr_compressed.yaml"
UNUSED = {  # flags -> the warnings that they cause
    (ad_config.read, OF_AD): "",
    (ad_config.read, f"{OF_AD} n_transit=160"): "n_transit",
    (ad_config.read, "compress_interval=40 share_table=false"): "compress_interval share_table",
    (ad_config.read, "source=q_learning source_noise=0.1 share_table=false"): "source_noise",
    (dpo_config.read, "--num_samples 0 --judge a.py:f --top_p 0.9"): "judge top_p",
    (dpo_config.read, "--temperature 0 --top_p 0.9"): "top_p",
    (bake_config.read, "--num_samples 0 --on_policy --top_p 0.9"): "",
    (generate_config.read, "--retain_share 0 --retain_prompts x"): "retain_prompts",
    (generate_config.read, "--retain_share 0.2 --retain_prompts="): "retain_share",
    (train_config.read, "--type full --lora_r 8"): "lora_r",
    (train_config.read, "--val_data x --val_share 0.1 --bucket_mb 9"): "val_share",
    (train_config.read, "--use_fsdp --val_share 0 --bucket_mb 9 --eval_every 2"): (
        "bucket_mb eval_every"
    ),
    (protein_config.read_design_settings, "--pdb_file x --fasta y --omit_AA C"): "omit_AA",
}


def warned(capsys):
    """Return the settings in the warnings that were printed, in alphabetical order."""
    lines = capsys.readouterr().out.splitlines()
    return sorted(
        re.fullmatch(r"warning: (?:--|.*[:.] ?)(\w+) has no effect: .+", x)[1] for x in lines
    )


def test_a_setting_without_an_effect_beside_others_is_a_warning(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for (read, flags), names in UNUSED.items():
        cli.noted.clear()
        read(flags.split())
        assert " ".join(warned(capsys)) == names, flags


@pytest.mark.parametrize("read", EVERY, ids=lambda read: read.__module__)
def test_settings_of_a_data_loader_are_accepted_with_a_warning(read, tmp_path, monkeypatch, capsys):
    """In flags and YAML, once, on the first process of a node; 0 workers are what happens."""
    cli.noted.clear()
    monkeypatch.chdir(tmp_path)
    section, indent = ("training:\n", "  ") if read is train_config.read else ("", "")
    (tmp_path / "c.yaml").write_text(f"{section}{indent}num_workers: 4\n{indent}seed: 3\n")
    flags = ["--dataloader-pin-memory", "--no_persistent_workers", "--seed", "7", "--config=c.yaml"]
    for _ in range(2):
        assert read(flags).seed == 7
    assert warned(capsys) == ["dataloader_pin_memory", "num_workers", "persistent_workers"]
    assert read(["--num_workers", "0", "--seed=7"]).seed == 7
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read(["--num_workers=2", "--seed=7"]).seed == 7
    assert warned(capsys) == []


# --- accelerate -----------------------------------------------------------------------------------

READERS = {  # script -> how it reads its settings, flags with which it does what accelerate says
    "main_distributed": (dpo_config.read, ["--strategy=fsdp"]),
    "train": (train_config.read, ["--use_fsdp"]),
    "train_loop": (bake_config.read, None),
    "dpo_inv.run_dpo_ddp": (protein_config.read_settings, None),
}


@pytest.mark.parametrize("script", READERS)
def test_what_accelerate_is_configured_for_is_done_or_refused(script, monkeypatch, capsys):
    """With the variables of `accelerate launch --use_fsdp`, as it sets them."""
    read, same = READERS[script]
    monkeypatch.setattr(cli, "noted", [])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    hint = " and --use_fsdp of this script" if same else ""
    message = f"accelerate: use_fsdp is not supported; use no in accelerate config{hint}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        read([])
    if same:
        assert read(same).strategy == "fsdp"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    read([])
    assert "accelerate" not in capsys.readouterr().out
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    read([])
    assert "warning: accelerate's mixed_precision bf16 has no effect" in capsys.readouterr().out
