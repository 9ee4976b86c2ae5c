"""Bad input of every class is one line and status 2, on one process and on two; good is read.

A folder holds the files of one class. A line of its expected.txt is a file and perhaps flags, a
tab, and how the error line begins; FILE is the path that was used. flags/ has no files. Each case
runs in the tests' process, and one of each class as two ranks as well.
"""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import transformers

import main_distributed
import programs
import reading
from config import Config
from conftest import ROOT
from ddp_utils import UserError, cli
from lm import models
from lm.chat_template import Encoder
from lm.models import load_tokenizer
from prompt_baking import trajectories
from ranks import run_ranks

HERE = Path(__file__).parent
SCRIPT = ROOT / "src/main_distributed.py"
GOOD = '{"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}\n'
GOOD_FILE, BAD_FILE = HERE / "accepted/bom.jsonl", HERE / "fields/null.jsonl"
# Python 3.13 reports where a trailing comma is, older versions what follows it
COMMAS = {"FILE:3:48: not JSON": "FILE:3:47: not JSON", "FILE:3:1: not JSON": "FILE:2:69: not JSON"}
NULL = f"{BAD_FILE}:3: chosen: must be a non-empty string, not None"


def listed(name):
    """Return {case: how its line begins} of one class."""
    lines = (HERE / name / "expected.txt").read_text().splitlines()
    return dict(line.split("\t") for line in lines)


def stored(name, flag="--train_data"):
    """Return {name of a case: (its flags, how its line begins)} of one class with files."""
    cases = {}
    for case, beginning in listed(name).items():
        file, *flags = case.split()
        path = str(HERE / name / file)
        if sys.version_info >= (3, 13) and "comma" in case and "without" not in case:
            beginning = COMMAS[beginning]
        cases[f"{name}/{file}"] = [flag, path, *flags], beginning.replace("FILE", path)
    return cases


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """Return an empty working folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def train(flags):
    """Run src/main_distributed.py, but fail if it loads a model."""

    def load(*args, device_map=None, **kwargs):
        if device_map != {"": models.META}:  # only names and shapes are read
            raise SystemError("LOADED")
        return original(*args, device_map=device_map, **kwargs)

    original = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        return main_distributed.main(flags)


def train_in(folder, flags):
    os.chdir(folder)
    return train(flags)


def error_of(function, *args):
    """Return the one line with which a function fails."""
    with pytest.raises(UserError) as caught:
        function(*args)
    message = str(caught.value)
    assert message.splitlines() == [message] and len(message) < 500
    return message


def log_of_two(folder, flags):
    """Return what two processes print that both end with status 2 and write nothing."""
    outcome = run_ranks(2, train_in, str(folder), flags)
    log = "".join(outcome.logs)
    assert outcome.codes == [2, 2], log
    assert "Traceback" not in log and "LOADED" not in log and not programs.left(folder)
    return log


# --- what is an error ----------------------------------------------------------------------------

CLASSES = [stored(name) for name in ("json", "encoding", "preference", "length", "fields")]
CLASSES.append(stored("template", "--chat_template"))
CLASSES.append({flags: (shlex.split(flags), text) for flags, text in listed("flags").items()})
CLASSES.append(
    {
        "validation": ([f"--train_data={GOOD_FILE}", f"--val_data={BAD_FILE}"], NULL),
        "test": ([f"--train_data={GOOD_FILE}", f"--test_data={BAD_FILE}"], NULL),
        "a folder": (["--train_data=/"], "/: neither a file nor a data set"),
        "stdin": (["--train_data=/dev/stdin"], "/dev/stdin: no such file (expected a regular file"),
        "escape sequence": (["--train_data=a\x1b[31mb"], "--train_data: '"),
    }
)
CASES = {name: case for cases in CLASSES for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line(case, cwd):
    flags, beginning = CASES[case]
    assert error_of(train, flags).startswith(beginning)
    assert not programs.left(cwd)


@pytest.mark.parametrize("case", [next(iter(cases)) for cases in CLASSES])
def test_bad_input_is_one_line_of_two_processes(case, cwd):
    flags, beginning = CASES[case]
    log = log_of_two(cwd, flags)
    assert log.startswith(f"error: {beginning}") and log.count("\n") == 1 and log.endswith("\n")


def test_bad_yaml_is_one_line():
    for (_, path), beginning in stored("yaml").values():
        assert error_of(cli.read_file, Config.__annotations__, path).startswith(beginning)


def test_each_bad_row_is_one_line_that_names_the_field(tmp_path):
    """A line of rows.txt: the reader, a part of its message, and the rows."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    readers = {
        "preference": lambda path: reading.pairs(path, encoder),
        "sft": lambda path: reading.texts(path, encoder),
        "baking": lambda path: trajectories.read(path, encoder, 64),
        "questions": trajectories.read_questions,
    }
    path = tmp_path / "rows.jsonl"
    for line in (HERE / "rows.txt").read_text().splitlines():
        reader, part, *rows = line.split("\t")
        path.write_text("\n".join(rows))
        message = error_of(readers[reader], path)
        assert message.startswith(f"{path}:") and part in message, line


def test_debug_prints_the_traceback(cwd):
    ended = programs.start(SCRIPT, "--train_data", BAD_FILE, "--debug", cwd=cwd)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 2 and lines[0].startswith("Traceback")
    assert "fields/null.jsonl:3: chosen: must be" in lines[-1]


def test_fewer_rows_than_processes_is_one_line(cwd):
    log = log_of_two(cwd, ["--train_data", str(GOOD_FILE), "--max_rows=1"])
    line = f"{GOOD_FILE}: 1 usable rows for 2 processes; start at most 1 processes"
    assert log == f"error: {line}\n"


def test_the_shell_script_prints_one_line_whatever_the_file_is_called(cwd, tmp_path):
    file = tmp_path / "$(touch PWNED); 'a b"
    file.write_text(GOOD * 2 + '{"prompt": "p", "chosen": null, "rejected": "b"}\n')
    command = [ROOT / "run_distributed.sh", "1", "--train_data", file]
    done = programs.process(command, code=2, cwd=cwd)
    line = "chosen: must be a non-empty string, not None; or use --on_bad_record skip"
    assert (done.stdout, done.stderr) == ("", f"error: {file}:3: {line}\n")
    assert not programs.left(cwd)


# --- tokenizer and model -------------------------------------------------------------------------


def model(folder, file, change):
    """Return flags for a copy of the demo's model, one of its JSON files changed."""
    shutil.copytree(ROOT / "data/demo/model", folder)
    content = json.loads((folder / file).read_text())
    text = change(content)
    (folder / file).write_text(json.dumps(content) if text is None else text)
    (folder / "rows.jsonl").write_text(GOOD * 20)
    return ["--model_name", str(folder), "--train_data", f"{folder}/rows.jsonl"]


def add_token(tokenizer):
    token = {"id": 2046, "content": "Dunno", "special": False, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(token)


def update(**changes):
    return lambda content: content.update(changes)


TOO_LONG = "FILE:1: 17 tokens, the model has 8 positions; use --max_length 8"
MODELS = {  # damage -> file, change of it, how the line begins
    "few embeddings": ("config.json", update(vocab_size=100), "--model_name: "),
    "an added token": ("tokenizer.json", add_token, "FILE:1: token id 2046, model has 2046"),
    "few positions": ("config.json", update(max_position_embeddings=8), TOO_LONG),
    "a template that fails": (
        "tokenizer_config.json",
        update(chat_template="{{ 1 / 0 }}"),
        "--chat_template: division by zero",
    ),
    "cut short": (
        "tokenizer.json",
        lambda content: json.dumps(content)[:5000],
        "--model_name: FOLDER: tokenizer.json is not complete or not JSON; download it again",
    ),
}


@pytest.mark.parametrize("damage", MODELS)
def test_a_model_that_does_not_fit_is_one_line(damage, cwd, tmp_path):
    *changes, beginning = MODELS[damage]
    message = error_of(train, model(tmp_path / "model", *changes))
    beginning = beginning.replace("FILE", f"{tmp_path}/model/rows.jsonl")
    assert message.startswith(beginning.replace("FOLDER", f"{tmp_path}/model"))
    assert not programs.left(cwd)


# --- what must be accepted -----------------------------------------------------------------------


def test_good_data_is_read_and_unusual_rows_are_counted(cwd, capfd):
    for flags, part in stored("accepted").values():
        assert train([*flags, "--check"]) == 0
        assert part in capfd.readouterr().out and not programs.left(cwd), flags


def test_a_tokenizer_needs_no_pad_token_end_token_or_template(cwd, tmp_path, capfd):
    """It may also pad with its end token: responses are masked by length, not by id."""
    changes = [{"pad_token": None}, {"eos_token": None}, {"chat_template": None}]
    changes += [{"pad_token": "<|im_end|>"}, {"eos_token": None, "chat_template": None}]
    for number, change in enumerate(changes):
        flags = model(tmp_path / str(number), "tokenizer_config.json", update(**change))
        assert train([*flags, "--check"]) == 0
        assert "20 used" in capfd.readouterr().out


YAML = {  # as YAML 1.2 reads it, where 1.1 reads something else
    "learning_rate: 1e-4": {"learning_rate": 0.0001},
    "batch_size: 010": {"batch_size": 10},
    "result_dir: no": {"result_dir": "no"},
    "result_dir: 12:30:00": {"result_dir": "12:30:00"},
    "result_dir: 2020-01-01": {"result_dir": "2020-01-01"},
    "\ufeffbeta: 1\r\nshuffle: false\r\n": {"beta": 1, "shuffle": False},
    'result_dir: "d\u00e4ten; $(touch PWNED)"': {"result_dir": "d\u00e4ten; $(touch PWNED)"},
}


def test_yaml_is_version_1_2(tmp_path):
    for text, settings in YAML.items():
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8", newline="")
        assert cli.read_file(Config.__annotations__, tmp_path / "c.yaml")[0] == settings
