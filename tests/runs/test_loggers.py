"""--report_to: TensorBoard, Weights & Biases offline, or files alone."""

import json
import struct
import sys

import pytest

import programs
import runs
from conftest import ROOT
from ddp_utils import UserError, loggers
from ranks import ranks

TINY = runs.words("--max_rows 8 --batch_size 4 --max_steps 2 --num_samples 0 --result_dir run")
TINY += runs.words("--train_data data/demo/preferences_train.jsonl")


def start(folder, *flags, code=0, **env):
    command = [sys.executable, ROOT / "src/main_distributed.py", *TINY, *flags]
    return programs.process(command, code=code, cwd=folder, **env)


def records(data, block=32768):
    """Records of LevelDB's log format: in each block crc, length, type (1: whole, 4: the last)."""
    at, record = 7, b""  # behind W&B's own header
    while at + 7 <= len(data):
        if block - at % block < 7:  # too short for a record
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def history(folder):
    """(step, training loss) of what W&B has kept, in the order of logging."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for path in sorted((folder / "run/wandb").glob("offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {}
            for item in record.history.item:
                items[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if "train/loss" in items:
                steps.append((items["step"], items["train/loss"]))
    return steps


def test_weights_and_biases_offline_in_two_starts(tmp_path):
    """All steps of a run that was continued, under one id; nothing leaves the machine."""
    pytest.importorskip("wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_API_KEY": ""}
    flags = ["--report_to", "wandb", "--save_every", "1"]
    first = start(tmp_path, *flags, "--max_steps", "1", **offline)
    runs.as_if_killed(tmp_path / "run")
    assert first.stderr == "" and "wandb" not in first.stdout
    number = (tmp_path / "run/wandb/id.txt").read_text()
    start(tmp_path, *flags, **offline)
    assert (tmp_path / "run/wandb/id.txt").read_text() == number
    kept = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in kept} == {f"run-{number}"}
    lines = runs.lines(tmp_path / "run", "train")
    assert history(tmp_path) == [(line["step"], line["loss"]) for line in lines]
    assert [line["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "run/tensorboard").exists()


def test_without_a_key_it_is_one_line_and_nothing_of_a_run_is_there(tmp_path):
    pytest.importorskip("wandb")
    env = {"WANDB_API_KEY": "", "WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": "none"}
    done = start(tmp_path, "--report_to", "wandb", code=2, **env)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --report_to wandb: ") and "WANDB_MODE=offline" in line
    assert not (tmp_path / "run/config.json").exists()


def modules_after(folder, name):
    runs.train(folder, runs.words(f"--report_to {name}"))
    return sorted({"wandb", "tensorboard"} & sys.modules.keys())


def test_what_is_not_asked_for_is_not_imported(tmp_path):
    for name, modules in (("none", []), ("tensorboard", ["tensorboard"])):
        assert ranks(1, modules_after, str(tmp_path / name), name) == [modules]
        assert (tmp_path / name / "run/tensorboard").exists() == (name == "tensorboard")


def test_a_logger_that_is_not_there(tmp_path, monkeypatch):
    """A package that cannot be imported costs one line."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="^--report_to wandb: run pip install wandb$"):
        loggers.make("wandb", tmp_path, 0, {})
