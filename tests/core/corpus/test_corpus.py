"""Bad input of every class costs one line and status 2, on one process and on two; good is read.

A folder holds the files of one class. A line of its expected.txt is a file and perhaps flags, a
tab, and how the error line begins; FILE stands for the path that was given. In flags/ there are
no files. What is too large or too odd to be stored is made below.
"""

import functools
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

import main_distributed
from config import Config
from conftest import ROOT
from ddp_utils import UserError, models, preference_data
from ddp_utils.encoder import Encoder, load_tokenizer
from ddp_utils.readers import yaml_config
from prompt_baking import trajectories
from ranks import run_ranks
from sft import instruction_data

HERE = Path(__file__).parent
SCRIPT = str(ROOT / "src/main_distributed.py")
GOOD = '{"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}\n'


def expected(name):
    """{case: what the line says} of one class, or of another list in its folder."""
    file = HERE / name if name.endswith(".txt") else HERE / name / "expected.txt"
    return dict(line.split("\t") for line in file.read_text().splitlines())


def files(name):
    """(file, more flags, what the line says) of each case of a class."""
    cases = [(*case.split(), says) for case, says in expected(name).items()]
    return [
        pytest.param(HERE / name / file, flags, says, id=f"{name}/{file}")
        for file, *flags, says in cases
    ]


# --- one case: a real process, then two ----------------------------------------------------------


def train(folder, flags):
    """What src/main_distributed.py does in an empty working folder, told on if it loads a model."""

    def load(*args, device_map=None, **kwargs):
        if device_map != {"": models.META}:  # where names and shapes are looked at
            raise SystemError("LOADED")
        return original(*args, device_map=device_map, **kwargs)

    original = transformers.AutoModelForCausalLM.from_pretrained
    transformers.AutoModelForCausalLM.from_pretrained = load
    os.chdir(folder)
    try:
        return main_distributed.main(flags)
    finally:
        assert time.process_time() < 5  # of this rank alone: other work of the machine is not its


def read_yaml(folder, path):
    os.chdir(folder)
    yaml_config.from_yaml(Config, path)


def tree(*folders):
    """Every file below the folders, with what tells that it was written to."""
    found = [path for folder in folders for path in Path(folder).rglob("*")]
    found = [path for path in found if "__pycache__" not in str(path)]  # of this file
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Its start, seconds of imports, counts for no case."""
    run_ranks(1, os.getpid)


@pytest.fixture
def cwd(tmp_path):
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def endings(cwd, fn, *args, data=HERE, sizes=(1, 2)):
    """The logs of one process and of two, each of which ended with status 2 and wrote nothing."""
    for world_size in sizes:
        before = tree(cwd, data)
        outcome = run_ranks(world_size, fn, str(cwd), *args)
        log = "".join(outcome.logs)  # stdout and stderr of all ranks
        assert outcome.codes == [2] * world_size, log
        assert "Traceback" not in log and "LOADED" not in log
        assert tree(cwd, data) == before and not list(cwd.iterdir())
        assert outcome.seconds < 30
        yield log


# two are refused no less than one: in the suite the cases of fields/ and flags/box.txt show it
on_two_by_hand = pytest.mark.parametrize(
    "sizes", [(1,), pytest.param((1, 2), marks=pytest.mark.show)], ids=["1", "1 and 2"]
)


def refused(cwd, says, fn, *args, **more):
    """One line in all, the same on one process and on two (`sizes` to save time)."""
    first, *others = endings(cwd, fn, *args, **more)
    assert first.startswith(f"error: {says}")
    assert first.count("\n") == 1 and first.endswith("\n")
    assert others in ([], [first])
    return first


# --- what is stored ------------------------------------------------------------------------------

DATA = ["json", "encoding", "preference", "length"]


@on_two_by_hand
@pytest.mark.parametrize(("file", "flags", "says"), [case for name in DATA for case in files(name)])
def test_bad_data_is_one_line(file, flags, says, cwd, sizes):
    flags = ["--train_data", str(file), *flags]
    refused(cwd, says.replace("FILE", str(file)), train, flags, sizes=sizes)


@pytest.mark.parametrize(("file", "flags", "says"), files("fields"))
def test_a_bad_field_is_one_line(file, flags, says, cwd):
    flags = ["--train_data", str(file), *flags]
    refused(cwd, says.replace("FILE", str(file)), train, flags, sizes=(2,))


@on_two_by_hand
@pytest.mark.parametrize(("file", "flags", "says"), files("template"))
def test_a_bad_template_is_one_line(file, flags, says, cwd, sizes):
    flags = ["--chat_template", str(file)]
    refused(cwd, says.replace("FILE", str(file)), train, flags, sizes=sizes)


@pytest.mark.parametrize(("file", "flags", "says"), files("yaml"))
def test_bad_yaml_is_one_line(file, flags, says, cwd):
    sizes = (1, 2) if file.name.startswith("d") else (1,)  # it does not ask how many there are
    refused(cwd, says.replace("FILE", str(file)), read_yaml, str(file), sizes=sizes)


def test_each_bad_row_is_one_line_that_names_the_field(tmp_path):
    """A line of rows.txt: the reader, what it says somewhere in its line, and the rows."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    readers = {
        "preference": lambda path: preference_data.read(path, encoder),
        "sft": lambda path: instruction_data.read(path, encoder),
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


@on_two_by_hand
@pytest.mark.parametrize("flags", expected("flags"))
def test_a_bad_value_is_one_line(flags, cwd, sizes):
    refused(cwd, expected("flags")[flags], train, shlex.split(flags), sizes=sizes)


@pytest.mark.parametrize("flags", expected("flags/box.txt"))
def test_a_flag_that_is_none_costs_one_box(flags, cwd):
    """tyro's own box has several lines and ends with where help is; it names the flag."""
    [log] = endings(cwd, train, shlex.split(flags), sizes=(2,))
    assert log.count("For full helptext") == 1 and "error:" not in log
    assert expected("flags/box.txt")[flags] in re.split(r"[\s,'\"]+", log)


@pytest.mark.parametrize("split", ["val_data", "test_data"])
def test_a_bad_row_of_other_data_is_found_as_well(split, cwd):
    bad, good = HERE / "fields/null.jsonl", HERE / "accepted/bom.jsonl"
    flags = ["--train_data", str(good), f"--{split}", str(bad)]
    refused(cwd, f"{bad}:3: chosen is None", train, flags)


def debug(folder, flags):
    sys.argv.append("--debug")
    return train(folder, flags)


def test_debug_gives_the_traceback(cwd):
    outcome = run_ranks(1, debug, str(cwd), ["--train_data", str(HERE / "fields/null.jsonl")])
    assert outcome.codes == [2]
    assert outcome.logs[0].startswith("Traceback")
    assert "fields/null.jsonl:3: chosen is None" in outcome.logs[0].splitlines()[-1]


# --- what is made: too large, or no file at all --------------------------------------------------

CONTENTS = {  # a whole file, made by a function, as each rank imports this one
    "100,000 brackets": (lambda: b"[" * 10**5, "FILE:1: not JSON: maximum recursion"),
    "half a gz": (lambda: gzip.compress(GOOD.encode() * 99)[:-20], "FILE: Compressed file ended"),
    "a damaged gz": (
        lambda: gzip.compress(GOOD.encode())[:-8] + bytes(8),
        "FILE: CRC check failed",
    ),
    "a gz of nothing": (lambda: gzip.compress(b""), "FILE: 0 records"),
}


@pytest.fixture
def data(tmp_path):
    """A folder for data of up to 9 GiB, most of it a hole, which goes with the test."""
    (tmp_path / "data").mkdir()
    yield tmp_path / "data"
    shutil.rmtree(tmp_path / "data")


@pytest.mark.parametrize("what", CONTENTS)
def test_a_monstrous_file_is_one_short_line(what, cwd, data):
    content, says = CONTENTS[what]
    file = data / "f.jsonl"
    file.write_bytes(content())
    flags = ["--train_data", str(file)]
    line = refused(cwd, says.replace("FILE", str(file)), train, flags, data=data, sizes=(1,))
    assert len(line) < 400


def hole(path, size, before=b""):
    path.write_bytes(before)
    os.truncate(path, size)
    return path


def fifo(path):
    os.mkfifo(path)
    return path


def link(path, target):
    path.symlink_to(target)
    return path


def named(path):
    path.write_text(GOOD)
    return path


NO_FILE = "FILE: not a regular file"
PATHS = {  # what --train_data is given -> what the line says
    "9 GiB": (lambda data: hole(data / "x", 9 * 2**30), "FILE: more than 8,589,934,592 bytes"),
    "absent": (lambda data: data / "x", "FILE: no such file; looked in "),
    "a folder": (lambda data: data, NO_FILE),
    "a pipe": (lambda data: fifo(data / "x"), NO_FILE),
    "stdin": (lambda data: "/dev/stdin", NO_FILE),
    "a link to itself": (lambda data: link(data / "x", "x"), "FILE: no such file"),
    "a pattern": (lambda data: named(data / "x").with_name("*"), "FILE: no such file"),
    "nothing": (lambda data: "", "'': no such file"),
    "an escape sequence": (lambda data: named(data / "a\x1b[31mb"), "--train_data: '"),
    "no such user": (lambda data: "~nobody_here/x", "FILE: no such file"),
}


@on_two_by_hand
@pytest.mark.parametrize("what", PATHS)
def test_a_path_that_cannot_be_read_is_one_line(what, cwd, data, sizes):
    make, says = PATHS[what]
    path = str(make(data))
    refused(
        cwd, says.replace("FILE", path), train, [f"--train_data={path}"], data=data, sizes=sizes
    )


# --- tokenizer and model -------------------------------------------------------------------------


def model(data, file, change):
    """A copy of the demo's model, one of its JSON files changed."""
    for source in (ROOT / "data/demo/model").iterdir():
        shutil.copy(source, data)
    content = json.loads((data / file).read_text())
    text = change(content)
    (data / file).write_text(json.dumps(content) if text is None else text)
    (data / "rows.jsonl").write_text(GOOD * 20)
    return ["--model_name", str(data), "--train_data", f"{data}/rows.jsonl"]


NO_TOKENIZER = "--model_name: no tokenizer at "


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
        "FILE:1: 17 tokens, the model has 8 positions; give --max_length 8",
    ),
    "a template of the model's own that fails": (
        "tokenizer_config.json",
        lambda content: content.update(chat_template="{{ 1 / 0 }}"),
        "--chat_template: division by zero",
    ),
    "no type": (
        "config.json",
        lambda content: content.pop("model_type") and None,
        "--model_name: ",
    ),
    "cut short": ("tokenizer.json", lambda content: json.dumps(content)[:5000], NO_TOKENIZER),
    "empty": ("tokenizer.json", lambda content: "{}", NO_TOKENIZER),
    "a list": ("tokenizer.json", lambda content: "[]", NO_TOKENIZER),
    "null": ("tokenizer_config.json", lambda content: "null", NO_TOKENIZER),
}


@on_two_by_hand
@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_does_not_fit_is_one_line(what, cwd, data, sizes):
    *changes, says = MODELS[what]
    flags = model(data, *changes)
    says = says.replace("FILE", f"{data}/rows.jsonl")
    refused(cwd, says, train, flags, data=data, sizes=sizes)


# --- fewer rows than processes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch_size", "1"], "--batch_size: 1 pairs for 2 processes; give at least 2"),
        (["--max_rows", "1"], "FILE: 1 usable rows for 2 processes; start at most 1"),
    ],
)
def test_fewer_rows_than_processes_is_one_line(flags, says, cwd):
    file = HERE / "accepted/bom.jsonl"
    outcome = run_ranks(2, train, str(cwd), ["--train_data", str(file), *flags])
    assert outcome.codes == [2, 2]
    assert "".join(outcome.logs) == f"error: {says}\n".replace("FILE", str(file))
    assert not list(cwd.iterdir())


# --- what must be accepted -----------------------------------------------------------------------


def accepted(cwd, fn, *args):
    """What one process says that ends with status 0 and writes nothing."""
    before = tree(HERE)
    outcome = run_ranks(1, fn, str(cwd), *args)
    assert outcome.codes == [0], outcome.logs
    assert tree(HERE) == before and not list(cwd.iterdir())
    return outcome.logs[0]


@pytest.mark.parametrize(("file", "flags", "says"), files("accepted"))
def test_good_data_is_read_and_what_is_odd_in_it_is_counted(file, flags, says, cwd):
    assert says in accepted(cwd, train, ["--train_data", str(file), "--check", *flags])


@pytest.mark.parametrize("name", ["f.jsonl", "f.json.gz", "f"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_gz_is_known_by_its_first_bytes(name, pack, cwd, data):
    (data / name).write_bytes(pack(GOOD.encode() * 7))
    said = accepted(cwd, train, ["--train_data", str(data / name), "--check"])
    assert said.startswith("train: 7 rows of prompt, 7 used")


NAMES = ["a b", "a'b", 'a"b', "a;touch PWNED", "$(touch PWNED)", "`touch PWNED`", "a&b", "a|b"]
NAMES += ["-a", "--beta", "~", "~x", "*", "[a]", "{a}", "#a", "a:b", "a=b", "a\\b", "%s", "$HOME"]
NAMES += ["d\u00e4ten \u65e5\u672c", "\u00a0a"]


def check_each(folder, names):
    os.chdir(folder)
    for name in names:
        for path in (f"./{name}", f"{folder}/{name}", f"{folder}/../data/{name}"):
            assert main_distributed.main([f"--train_data={path}", "--check"]) == 0
    assert main_distributed.main(["--train_data=-a", "--check"]) == 0


def test_odd_names_of_files_are_only_names(data):
    for name in NAMES:
        named(data / name)
    before = tree(data)
    outcome = run_ranks(1, check_each, str(data), NAMES)
    assert outcome.codes == [0], outcome.logs
    assert outcome.logs[0].count("train: 1 rows of prompt, 1 used") == 3 * len(NAMES) + 1
    assert tree(data) == before


def test_flags_that_are_spelt_otherwise_are_taken(cwd):
    flags = ["--learning-rate=1e-4", "--no-shuffle", "--batch_size", "+4", "--dry_run"]
    assert "train: 800 rows" in accepted(cwd, train, flags)


def check_models(folder, *all_flags):
    os.chdir(folder)
    for flags in all_flags:
        assert main_distributed.main([*flags, "--check"]) == 0


def test_tokenizers_without_pad_end_or_template_are_taken(cwd, tmp_path):
    """And one that pads with its end of text: responses are masked by length, not by id."""
    changes = [{"pad_token": None}, {"eos_token": None}, {"chat_template": None}]
    changes += [{"pad_token": "<|im_end|>"}, {"eos_token": None, "chat_template": None}]
    all_flags = []
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        all_flags.append(model(folder, "tokenizer_config.json", functools.partial(put, change)))
    assert accepted(cwd, check_models, *all_flags).count("20 used") == len(changes)


def put(change, content):
    content.update(change)


YAML = {  # as YAML 1.2 reads it, where 1.1 reads something else
    "learning_rate: 1e-4": {"learning_rate": 0.0001},
    "learning_rate: 5E-5": {"learning_rate": 0.00005},
    "batch_size: 010": {"batch_size": 10},
    "result_dir: no": {"result_dir": "no"},
    "result_dir: 12:30:00": {"result_dir": "12:30:00"},
    "\ufeffbeta: 1\r\nshuffle: false\r\n": {"beta": 1, "shuffle": False},
    'result_dir: "d\u00e4ten; $(touch PWNED)"': {"result_dir": "d\u00e4ten; $(touch PWNED)"},
}


@pytest.mark.parametrize("text", YAML)
def test_yaml_is_version_1_2(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8", newline="")
    assert yaml_config.from_yaml(Config, tmp_path / "c.yaml") == Config(**YAML[text])


# --- the real thing ------------------------------------------------------------------------------


def real(command, cwd):
    """Exit status and stderr of a command of the documentation, started in an empty folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr and not list(cwd.iterdir())
    return done.stderr


SHELL = [ROOT / "run_distributed.sh", "2"]


@pytest.mark.parametrize("start", [[sys.executable, SCRIPT], SHELL], ids=["python", "shell"])
def test_the_real_thing_says_one_line(start, cwd, data):
    file = data / "$(touch PWNED); 'a b"
    file.write_text(GOOD * 2 + '{"prompt": "p", "chosen": null, "rejected": "b"}\n')
    said = real([*start, "--train_data", file], cwd)
    mend = "give a non-empty string, or skip 1 of 3 rows: --on_bad_record skip"
    assert said == f"error: {file}:3: chosen is None; {mend}\n"


def test_the_real_thing_prints_one_box(cwd):
    said = real([*SHELL, "--learing_rate", "1e-4"], cwd)
    assert said.count("For full helptext") == 1 and "--learning_rate" in said
