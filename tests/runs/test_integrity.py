"""A run records its code, and flipped bits in its files are detected."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import faults
import programs
from conftest import ROOT
from ddp_utils import plots


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
    assert {"reference_logps.safetensors", "reference_replies.json"} <= {str(f) for f in files}
    generator = random.Random(12)
    went_on = 0
    for number in range(12):
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


def digests_of(script, folder, text):
    """Return the code digests of a run of a script that has this text."""
    (folder / "mine.py").write_text(text + script)
    command = [sys.executable, str(folder / "mine.py")]
    env = programs.environment() | {"PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_code_of_a_run_is_its_script_and_all_that_it_may_import(tmp_path):
    """Comments and blank lines do not count; a string with a # does.

    Attention over packed rows and the backward of a LoRA are imported when a run needs them.
    """
    script = "\nimport json\nfrom ddp_utils import run\nprint(json.dumps(run.code_digests()))\n"
    one, same, other = (
        digests_of(script, tmp_path, text)
        for text in ("x = '#1'", "# why\n\nx = '#1'  # one\n", "x = '#2'")
    )
    modules = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/ddp_utils/**/*.py")}
    assert one.keys() == {name for name in modules if "/tools/" not in name} | {"mine.py"}
    assert one == same
    assert {name for name in one if one[name] != other[name]} == {"mine.py"}


def test_a_damaged_line_of_metrics_is_left_out(tmp_path):
    good = '{"split": "train", "step": 1, "loss": 0.5}\n'
    lines = good + good.replace("{", "z", 1) + good.replace('"step"', '"stop"') + "7\n" + good[:9]
    (tmp_path / "metrics.jsonl").write_bytes(lines.encode() + b'\n{"\xff": 1}\n')
    assert plots.read_metrics(tmp_path) == [{"split": "train", "step": 1, "loss": 0.5}]
