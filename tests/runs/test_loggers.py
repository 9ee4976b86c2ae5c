"""--report_to: TensorBoard, Weights & Biases offline, or files alone."""

import sys
from unittest.mock import Mock

import pytest

import programs
import runs
from conftest import ROOT
from ddp_utils import UserError, loggers
from ranks import ranks

TINY = runs.words("--max_rows 8 --batch_size 4 --max_steps 2 --num_samples 0 --result_dir run")
TINY += ["--max_eval_rows", "8"]
TINY += runs.words("--train_data data/demo/preferences_train.jsonl")


def start(folder, *flags, code=0, **env):
    command = [sys.executable, ROOT / "src/main_distributed.py", *TINY, *flags]
    return programs.process(command, code=code, cwd=folder, **env)


@pytest.mark.show
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
    assert not (tmp_path / "run/tensorboard").exists()


def test_weights_and_biases_gets_the_step_beside_the_numbers(tmp_path, monkeypatch):
    """As a metric: W&B's own step may not decrease, but after a kill some steps come again."""
    wandb = pytest.importorskip("wandb")
    run = Mock()
    monkeypatch.setattr(wandb, "init", lambda **options: run)
    [logger] = loggers.make("wandb", tmp_path, 0, {})
    for step, loss in ((1, 0.5), (2, 0.25), (2, 0.25)):
        logger.log("train", step, {"loss": loss})
    logged = [call.args[0] for call in run.log.call_args_list]
    assert logged == [{"step": s, "train/loss": loss} for s, loss in ((1, 0.5), *[(2, 0.25)] * 2)]
    run.define_metric.assert_called_once_with("*", step_metric="step")


def test_without_a_key_it_is_one_line_and_nothing_of_a_run_is_there(tmp_path):
    pytest.importorskip("wandb")
    env = {"WANDB_API_KEY": "", "WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": "none"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text('{"status": "finished"}')  # an earlier run
    for name in ("config", "environment"):
        (tmp_path / f"run/{name}.json").write_text("{}")
    done = start(tmp_path, "--report_to", "wandb", "--restart", code=2, **env)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --report_to wandb: ") and "WANDB_MODE=offline" in line
    assert (tmp_path / "run/config.json").read_text() == "{}" and "moved to" not in done.stdout
    assert not (tmp_path / "run.1").exists()


def modules_after(folder, name):
    runs.train(folder, runs.words(f"--report_to {name} --max_rows 8 --max_steps 2"))
    return sorted({"wandb", "tensorboard"} & sys.modules.keys())


def test_what_is_not_asked_for_is_not_imported(tmp_path):
    for name, modules in (("none", []), ("tensorboard", ["tensorboard"])):
        assert ranks(1, modules_after, str(tmp_path / name), name) == [modules]
        assert (tmp_path / name / "run/tensorboard").exists() == (name == "tensorboard")


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_logger_that_cannot_be_imported_is_one_line(is_installed, tmp_path, monkeypatch):
    """It is absent, or one of its own packages does not fit."""
    if is_installed:
        (tmp_path / "wandb.py").write_text("raise ImportError('protobuf')\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="^--report_to wandb: run pip install wandb$"):
        loggers.check("wandb")
