"""Rows of token ids in a file: whatever happens to it, a start reads what the data file says."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import runs
from ddp_utils import UserError, preference_data
from ddp_utils import data as data_module
from ddp_utils.chat_template import Encoder
from ddp_utils.data import DataFile
from ddp_utils.models import load_tokenizer
from ranks import ranks
from sft import instruction_data

COUNT = 8  # rows of runs.PAIRS


def encoder(**options):
    return Encoder(load_tokenizer("data/demo/model"), **options)


def read(source, reader=preference_data, **options):
    """(rows, report, how many rows were tokenized) of a start."""
    made = []
    maker = encoder(**options)
    encode = maker.encode
    maker.encode = lambda *texts: made.append(1) or encode(*texts)
    rows, report = reader.read(source, maker)
    return [*rows], report, len(made)


@pytest.fixture
def data(tmp_path):
    return shutil.copy(runs.PAIRS, tmp_path / "data.jsonl")


def test_a_second_start_maps_what_the_first_one_made(data, tmp_path):
    for reader in (preference_data, instruction_data):
        source = DataFile(str(data), tmp_path / "cache")
        first, report, made = read(source, reader)
        assert made == len(first) == COUNT and first[2].location == f"{data}:3"
        again, same, made = read(source, reader)
        assert (again, made) == (first, 0)
        assert json.loads(json.dumps(report)) == same
        (tmp_path / "moved").mkdir(exist_ok=True)
        moved = str(shutil.copy(data, tmp_path / "moved"))
        rows, same, made = read(source._replace(path=moved), reader)
        assert (rows[2].location, same["file"], made) == (f"{moved}:3", moved, 0)
        assert rows[2]._replace(location=first[2].location) == first[2]


def test_a_row_is_what_the_encoder_makes_of_its_texts(data, tmp_path):
    rows, _, _ = read(DataFile(str(data), tmp_path))
    for line, row in zip(Path(data).read_text().splitlines(), rows, strict=True):
        texts = json.loads(line)
        alone = encoder().encode(row.location, *texts.values()).pair
        assert row == alone


def test_whatever_token_ids_depend_on_makes_them_anew(data, tmp_path):
    source = DataFile(str(data), tmp_path / "cache")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}")
    chatty = {"chat_template": str(template)}
    changes = [
        ({}, {}),
        ({}, {"max_length": 500}),
        ({}, {"truncation": "keep_start"}),
        ({}, {"chat_template": "none"}),
        ({}, chatty),
        ({}, {**chatty, "kwargs": '{"x": "y"}'}),
        ({"limit": 7}, {}),
        ({"on_bad_record": "skip"}, {}),
        ({"columns": "system=story"}, {}),
    ]
    for fields, options in changes:
        assert read(source._replace(**fields), **options)[2] in (7, COUNT), (fields, options)
        assert read(source._replace(**fields), **options)[2] == 0
    with open(data, "a") as file:
        file.write(Path(data).read_text().splitlines()[0].replace("a", "e") + "\n")
    assert read(source)[2] == COUNT + 1
    assert len([*(tmp_path / "cache").glob("*.safetensors")]) == len(changes) + 1


def test_a_deleted_file_is_made_again_and_a_damaged_one_is_one_line(data, tmp_path):
    source = DataFile(str(data), tmp_path / "cache")
    first, report, _ = read(source)
    [file] = (tmp_path / "cache").glob("*.safetensors")
    file.unlink()
    assert read(source) == (first, report, COUNT)
    os.truncate(file, 200)
    with pytest.raises(UserError, match="safetensors: damaged; delete it and start again"):
        read(source)


def killed(source, call):
    """A start that is killed at its call-th call of what writes, or makes a row."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [call]
    for owner, name in (
        (Encoder, "encode"),
        (data_module, "save_file"),
        (data_module, "fsync"),
        (os, "replace"),
    ):
        setattr(owner, name, dying(getattr(owner, name), left))
    read(source)
    os._exit(0)


def dying(function, left):
    def call(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


def test_killed_while_it_is_made_the_next_start_makes_it(data, tmp_path):
    """8 rows, then save_file, fsync, replace."""
    first, report, _ = read(DataFile(str(data), tmp_path / "whole"))
    for call in range(1, COUNT + 4):
        source = DataFile(str(data), tmp_path / f"killed at {call}")
        assert killed(source, call) == -signal.SIGKILL
        assert read(source) == (first, report, COUNT)
        assert read(source)[2] == 0
        assert len([*source.cache.iterdir()]) == 2  # no litter
    assert killed(DataFile(str(data), tmp_path / "not killed"), COUNT + 4) == 0


def read_beside_others(path, cache):
    encode = Encoder.encode
    Encoder.encode = lambda *arguments: time.sleep(0.1) or encode(*arguments)
    rows, _, made = read(DataFile(path, cache))
    return rows, made


def test_of_starts_at_once_one_makes_the_rows(data, tmp_path):
    results = ranks(4, read_beside_others, str(data), str(tmp_path / "cache"))
    assert sorted(made for _, made in results) == [0, 0, 0, COUNT]
    assert all(rows == results[0][0] for rows, _ in results)


def test_the_files_have_the_mode_that_the_umask_says(data, tmp_path):
    before = os.umask(0o027)
    try:
        read(DataFile(str(data), tmp_path / "cache"))
    finally:
        os.umask(before)
    for file in (tmp_path / "cache").glob("*.s*"):
        assert file.stat().st_mode & 0o777 == 0o640, file


def test_a_folder_that_cannot_be_written_is_one_line(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--cache_dir: .*/file cannot be written: .*; use another"):
        read(DataFile(str(data), tmp_path / "file"))
