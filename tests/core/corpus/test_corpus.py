"""Bad input of every class costs one line and status 2, on one process and on two; good is read.

A folder holds the files of one class. A line of its expected.txt is a file and perhaps flags, a
tab, and how the error line begins; FILE stands for the path that was given. In flags/ there are
no files. Each case runs in the tests' process, and one of each class as two ranks as well.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import main_distributed
import programs
import reading
from config import Config
from conftest import ROOT
from ddp_utils import UserError, models, yaml_config
from ddp_utils.chat_template import Encoder
from ddp_utils.models import load_tokenizer
from prompt_baking import trajectories
from ranks import run_ranks

HERE = Path(__file__).parent
SCRIPT = str(ROOT / "src/main_distributed.py")
GOOD = '{"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}\n'
GOOD_FILE, BAD_FILE = HERE / "accepted/bom.jsonl", HERE / "fields/null.jsonl"
NULL = f"{BAD_FILE}:3: chosen: must be a non-empty string, not None"


def expected(name):
    """{case: what the line says} of one class, or of another list in its folder."""
    file = HERE / name if name.endswith(".txt") else HERE / name / "expected.txt"
    return dict(line.split("\t") for line in file.read_text().splitlines())


def stored(name, flag="--train_data"):
    """name of a case -> its flags and what the line says, of one class."""
    cases = {}
    for case, says in expected(name).items():
        file, *flags = case.split()
        path = str(HERE / name / file)
        cases[f"{name}/{file}"] = [flag, path, *flags], says.replace("FILE", path)
    return cases


@pytest.fixture(scope="module", autouse=True)
def nothing_is_written():
    before = {path: path.lstat().st_mtime_ns for path in HERE.rglob("*.*")}
    yield
    assert before == {path: path.lstat().st_mtime_ns for path in HERE.rglob("*.*")}


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    """An empty working folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def train(flags):
    """What src/main_distributed.py does, told on if it loads a model."""

    def load(*args, device_map=None, **kwargs):
        if device_map != {"": models.META}:  # where names and shapes are looked at
            raise SystemError("LOADED")
        return original(*args, device_map=device_map, **kwargs)

    original = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        return main_distributed.main(flags)


def refused(flags, says, cwd):
    with pytest.raises(UserError) as caught:
        train(flags)
    message = str(caught.value)
    assert message.startswith(says)
    assert message.splitlines() == [message] and not programs.left(cwd)


def on_two(folder, flags):
    """What two processes print, each of which ends with status 2 and writes nothing."""
    outcome = run_ranks(2, train_in, str(folder), flags)
    log = "".join(outcome.logs)
    assert outcome.codes == [2, 2], log
    assert "Traceback" not in log and "LOADED" not in log and not programs.left(folder)
    return log


def train_in(folder, flags):
    os.chdir(folder)
    return train(flags)


# --- what is refused -----------------------------------------------------------------------------

CLASSES = [stored(name) for name in ("json", "encoding", "preference", "length", "fields")]
CLASSES.append(stored("template", "--chat_template"))
CLASSES.append({flags: (shlex.split(flags), says) for flags, says in expected("flags").items()})
CLASSES.append(
    {
        "validation": ([f"--train_data={GOOD_FILE}", f"--val_data={BAD_FILE}"], NULL),
        "test": ([f"--train_data={GOOD_FILE}", f"--test_data={BAD_FILE}"], NULL),
        "absent": (["--train_data=x"], "x: no such file (expected a regular file in "),
        "a folder": (["--train_data=/"], "/: neither a file nor a data set"),
        "stdin": (["--train_data=/dev/stdin"], "/dev/stdin: no such file (expected a regular file"),
        "escape sequence": (["--train_data=a\x1b[31mb"], "--train_data: '"),
    }
)
CASES = {name: case for cases in CLASSES for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line(case, cwd):
    refused(*CASES[case], cwd)


@pytest.mark.parametrize("case", [next(iter(cases)) for cases in CLASSES])
def test_bad_input_is_one_line_of_two_processes(case, cwd):
    flags, says = CASES[case]
    log = on_two(cwd, flags)
    assert log.startswith(f"error: {says}") and log.count("\n") == 1 and log.endswith("\n")


def test_bad_yaml_is_one_line():
    for (_, path), says in stored("yaml").values():
        with pytest.raises(UserError) as caught:
            yaml_config.read(Config.__annotations__, path)
        message = str(caught.value)
        assert message.startswith(says) and message.splitlines() == [message]


def test_each_bad_row_is_one_line_that_names_the_field(tmp_path):
    """A line of rows.txt: the reader, what it says somewhere in its line, and the rows."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    readers = {
        "preference": lambda path: reading.pairs(path, encoder),
        "sft": lambda path: reading.texts(path, encoder),
        "baking": lambda path: trajectories.read(path, encoder, 64),
        "questions": trajectories.read_questions,
    }
    path = tmp_path / "rows.jsonl"
    for line in (HERE / "rows.txt").read_text().splitlines():
        reader, says, *rows = line.split("\t")
        path.write_text("\n".join(rows))
        with pytest.raises(UserError) as caught:
            readers[reader](path)
        message = str(caught.value)
        assert message.startswith(f"{path}:") and says in message, line
        assert "\n" not in message and len(message) < 400


def debug(folder, flags):
    sys.argv.append("--debug")
    return train_in(folder, flags)


def test_debug_gives_the_traceback(cwd):
    outcome = run_ranks(1, debug, str(cwd), ["--train_data", str(BAD_FILE)])
    assert outcome.codes == [2]
    assert outcome.logs[0].startswith("Traceback")
    assert "fields/null.jsonl:3: chosen: must be" in outcome.logs[0].splitlines()[-1]


def test_fewer_rows_than_processes_is_one_line(cwd):
    output = on_two(cwd, ["--train_data", str(GOOD_FILE), "--max_rows=1"])
    expected = f"{GOOD_FILE}: 1 usable rows for 2 processes; start at most 1 processes"
    assert output == f"error: {expected}\n"


# --- tokenizer and model -------------------------------------------------------------------------


def model(data, file, change):
    """Flags for a copy of the demo's model, one of its JSON files changed."""
    shutil.copytree(ROOT / "data/demo/model", data)
    content = json.loads((data / file).read_text())
    text = change(content)
    (data / file).write_text(json.dumps(content) if text is None else text)
    (data / "rows.jsonl").write_text(GOOD * 20)
    return ["--model_name", str(data), "--train_data", f"{data}/rows.jsonl"]


def add_token(tokenizer):
    token = {"id": 2014, "content": "Dunno", "special": False, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(token)


MODELS = {  # which file, what becomes of it -> what the line says
    "fewer embeddings than tokens": (
        "config.json",
        lambda content: content.update(vocab_size=100),
        "--model_name: ",
    ),
    "an added token and no embedding": (
        "tokenizer.json",
        add_token,
        "FILE:1: token id 2014, model has 2014",
    ),
    "fewer positions than tokens": (
        "config.json",
        lambda content: content.update(max_position_embeddings=8),
        "FILE:1: 17 tokens, the model has 8 positions; use --max_length 8",
    ),
    "a template of the model's own that fails": (
        "tokenizer_config.json",
        lambda content: content.update(chat_template="{{ 1 / 0 }}"),
        "--chat_template: division by zero",
    ),
    "cut short": (
        "tokenizer.json",
        lambda content: json.dumps(content)[:5000],
        "--model_name: no tokenizer at ",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_does_not_fit_is_one_line(what, cwd, tmp_path):
    *changes, says = MODELS[what]
    flags = model(tmp_path / "model", *changes)
    refused(flags, says.replace("FILE", f"{tmp_path}/model/rows.jsonl"), cwd)


# --- what must be accepted -----------------------------------------------------------------------


def test_good_data_is_read_and_what_is_odd_in_it_is_counted(cwd, capfd):
    for flags, says in stored("accepted").values():
        assert train([*flags, "--check"]) == 0
        assert says in capfd.readouterr().out and not programs.left(cwd), flags


def test_tokenizers_without_pad_end_or_template_are_taken(cwd, tmp_path, capfd):
    """And one that pads with its end of text: responses are masked by length, not by id."""
    changes = [{"pad_token": None}, {"eos_token": None}, {"chat_template": None}]
    changes += [{"pad_token": "<|im_end|>"}, {"eos_token": None, "chat_template": None}]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        flags = model(folder, "tokenizer_config.json", lambda content, c=change: content.update(c))
        assert train([*flags, "--check"]) == 0
        assert "20 used" in capfd.readouterr().out


YAML = {  # as YAML 1.2 reads it, where 1.1 reads something else
    "learning_rate: 1e-4": {"learning_rate": 0.0001},
    "learning_rate: 5E-5": {"learning_rate": 0.00005},
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
        assert yaml_config.read(Config.__annotations__, tmp_path / "c.yaml")[0] == settings


# --- the real thing ------------------------------------------------------------------------------


def real(command, cwd):
    """Stderr of a command of the documentation, started in an empty folder."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and not programs.left(cwd)
    return done.stderr


SHELL = [ROOT / "run_distributed.sh", "2"]


@pytest.mark.parametrize("start", [[sys.executable, SCRIPT], SHELL], ids=["python", "shell"])
def test_the_real_thing_says_one_line(start, cwd, tmp_path):
    file = tmp_path / "$(touch PWNED); 'a b"
    file.write_text(GOOD * 2 + '{"prompt": "p", "chosen": null, "rejected": "b"}\n')
    hint = "or use --on_bad_record skip"
    line = f"error: {file}:3: chosen: must be a non-empty string, not None; {hint}\n"
    assert real([*start, "--train_data", file], cwd) == line
    line = "error: --learing_rate is not a setting; did you mean --learning_rate?\n"
    assert real([*start, "--learing_rate", "1e-4"], cwd) == line
