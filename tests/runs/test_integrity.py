"""A run records its code, and flipped bits in its files are detected."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import faults
import programs
from config import Config
from conftest import ROOT
from ddp_utils import Stop, UserError, plots, run
from ddp_utils.distributed import World
from ddp_utils.tools import changes


def test_a_flipped_bit_changes_no_weight_or_is_one_line(tmp_path):
    """Single bits of any file of a run that was killed in step 12, with checkpoints 5 and 10.

    Each file is as likely as any other; printed are file, bit and what became of it.
    """
    mode = [*faults.MODES["lora"], "--num_samples", "2"]
    faults.finished(faults.start(1, tmp_path / "whole/run", *mode))
    killed = tmp_path / "killed/run"
    fault = faults.kill_in_backward, 0, 11
    assert faults.start(1, killed, *mode, fault=fault).codes == [-9]
    files = sorted(path.relative_to(killed) for path in killed.rglob("*") if path.is_file())
    files = [file for file in files if (killed / file).stat().st_size]
    assert {"reference_logps.safetensors", "parts/before.safetensors"} <= {str(f) for f in files}
    generator = random.Random(12)
    went_on = 0
    for number in range(4):
        folder = Path(shutil.copytree(killed, tmp_path / f"{number}/run"))
        file = generator.choice(files)
        content = bytearray((folder / file).read_bytes())
        bit = generator.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (folder / file).write_bytes(content)
        outcome = faults.start(1, folder, *mode)
        case = f"{file}, bit {bit}: {outcome.codes}\n{outcome.logs[0]}"
        if outcome.codes == [0]:
            assert faults.digest(folder) == faults.digest(tmp_path / "whole/run"), case
            plots.read_metrics(folder)  # which the curves and the report are made of
            went_on += 1
        else:
            line = outcome.logs[0]
            assert outcome.codes == [2] and line.startswith("error: "), case
            assert line.count("\n") == 1, case
        shutil.rmtree(folder)
    assert went_on


def test_the_code_of_a_run_is_its_script_and_all_that_it_may_import(tmp_path):
    """Attention over packed rows and the backward of a LoRA are imported when a run needs them."""
    script = tmp_path / "mine.py"
    code = "import json\nfrom ddp_utils import run\nprint(json.dumps(run.code_digests()))\n"
    env = programs.environment() | {"PYTHONPATH": f"{ROOT}/src"}
    digests = []
    for comment in ("# one", "# other"):
        script.write_text(f"{code}{comment}\n")
        command = [sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        digests.append(json.loads(done.stdout))
    one, other = digests
    modules = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/ddp_utils/**/*.py")}
    assert one.keys() == modules | {"mine.py"}
    assert {name for name in one if one[name] != other[name]} == {"mine.py"}
    # a script with language models: how much of them has been imported does not matter
    script.write_text(f"from lm import settings\n{code}")
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    files = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/lm/**/*.py")}
    assert json.loads(done.stdout).keys() == modules | files | {"mine.py"}


MAIN = ROOT / "src/main_distributed.py"


def test_a_script_that_differs_from_its_last_commit_is_named(monkeypatch):
    """Comments are no difference, and without git there is nothing to compare with."""
    text = MAIN.read_text()
    loss = "return losses.pair_losses("
    named = "main_distributed.py differs from the last commit in loss_of"
    for committed, expected in (
        (text.replace(loss, f"return 2 * {loss[7:]}"), named),
        (text.replace("# what a copy of this script", "# what it"), ""),
    ):
        assert committed != text
        monkeypatch.setattr(changes, "git", lambda *_, committed=committed: committed)
        assert changes.of_script(MAIN) == expected
    monkeypatch.setattr(changes, "git", lambda *_: None)
    assert changes.of_script(MAIN) == ""


def test_a_result_that_is_nan_is_read_again_by_the_next_start(tmp_path):
    """Otherwise no start of the run could end."""
    record = object.__new__(run.Run)
    record.folder, record.world = tmp_path, World()
    for made in (math.nan, 2.0):  # the second start makes none
        found = record.once("parts/test-step-00000003", lambda made=made: {"loss": made})
        assert math.isnan(found["loss"])
    (tmp_path / "parts/test-step-00000003.json").write_text('{"loss": Na}')
    with pytest.raises(UserError, match="not JSON"):
        record.once("parts/test-step-00000003", dict)


def test_a_run_that_is_stopped_in_an_evaluation_saves_when_that_has_ended():
    """Meanwhile a script may have exchanged its weights, and a checkpoint would have these."""
    record, order = object.__new__(run.Run), []
    record.world, record.step, record.results, record.must_save = World(), 3, {}, False
    record.is_asked, record.save = lambda: True, lambda: order.append("save")

    def evaluate():
        order.append("swap")
        try:
            record.stop_if_requested()
        finally:
            order.append("swap back")

    with pytest.raises(Stop, match="stopped after step 3; run the same"):
        record.evaluated(evaluate)
    assert order == ["swap", "swap back", "save"] and not record.is_evaluating


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_code_that_is_not_in_the_commit_is_dirty_data_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(changes.data, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").touch()
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    assert None not in [changes.git("init"), changes.git("add", ".")]
    assert changes.git(*author, "commit", "-m", "first") is not None
    found = []
    for path in ("mine.jsonl", "src/my_dpo.py"):
        (tmp_path / path).touch()
        found.append(run.environment(Config(), World())["git_dirty"])
    assert found == [False, True]


def test_a_copy_is_not_compared_with_another_copy(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    for name in ("main_distributed.py", "mine.py", "earlier.py"):
        changed = MAIN.read_text() + ("\nMORE = 2\n" if name != "main_distributed.py" else "")
        (tmp_path / "src" / name).write_text(changed)
    monkeypatch.setattr(changes, "SRC", tmp_path / "src")
    monkeypatch.setattr(changes.data, "ROOT", tmp_path)
    answers = {"ls-files": "src/main_distributed.py", "show": None}
    monkeypatch.setattr(changes, "git", lambda command, _: answers[command])
    found = changes.of_script(tmp_path / "src/mine.py")
    assert found == "mine.py differs from main_distributed.py in MORE"


def test_a_copied_script_is_compared_with_the_one_that_is_most_like_it(tmp_path):
    copy = tmp_path / "mine.py"
    text = MAIN.read_text()
    copy.write_text(text)
    assert changes.of_script(copy) == ""
    copy.write_text(text.replace("LOGGERS: list[Any] = []", "LOGGERS = [1]") + "\nMORE = 2\n")
    assert changes.of_script(copy) == "mine.py differs from main_distributed.py in LOGGERS, MORE"
    copy.write_text("print(1)\ndef loss_of():\n    return 0\n")
    assert changes.of_script(copy) == ""
    assert changes.of_script(tmp_path / "-c") == ""


def test_a_damaged_line_of_metrics_is_left_out(tmp_path):
    good = '{"split": "train", "step": 1, "loss": 0.5}\n'
    lines = good + good.replace("{", "z", 1) + good.replace('"step"', '"stop"') + "7\n" + good[:9]
    (tmp_path / "metrics.jsonl").write_bytes(lines.encode() + b'\n{"\xff": 1}\n')
    assert plots.read_metrics(tmp_path) == [{"split": "train", "step": 1, "loss": 0.5}]
