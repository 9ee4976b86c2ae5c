"""The list for a GPU, rehearsed on this CPU: killed after a piece, it continues with the next."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hour
import pretend
import pytest

from conftest import ROOT, TESTS
from ranks import ranks

NEEDS_CUDA = {"fp16"}
NEEDS_TRL = {f"speed:{case}:{kind}" for case in ("long", "hh") for kind in ("trl", "trl defaults")}
PIECES = {"demo", "attention", "resume", "memory", "speed:long:ours", "speed:hh:ours", "kernels"}
PIECES |= {"generation", "sharding", "protein", "distillation", "baking"}


def start(folder):
    command = [sys.executable, str(ROOT / "tests/gpu/hour.py"), "--dry", "--out", str(folder)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def test_the_list_is_sound_and_goes_on_where_it_was_killed(tmp_path):
    first = start(tmp_path)
    while not hour.read(tmp_path) and first.poll() is None:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    done = hour.read(tmp_path)
    assert list(done) == ["demo"] and first.wait() == -signal.SIGKILL
    assert start(tmp_path).wait() == 0
    results = hour.read(tmp_path)
    assert results["demo"] == done["demo"]  # it was not done again
    status = {name: entry["status"] for name, entry in results.items()}
    assert {name for name in status if status[name] == "ok"} - NEEDS_TRL == PIECES, results
    assert {name for name in status if status[name] == "skipped"} <= NEEDS_CUDA | NEEDS_TRL
    assert "needs CUDA" in results["fp16"]["reason"]
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"\n| {name} |" in page for name in PIECES | NEEDS_CUDA | NEEDS_TRL)

    # of numbers those that are known without a run
    rows = {name: entry["rows"] for name, entry in results.items()}
    for row in rows["demo"]:
        assert row["first loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert [row["in"] for row in rows["demo"]] == ["fp32", "bf16"]
    assert rows["resume"][0]["exit statuses"] == [-9, 0, 0]
    assert [row["prompt"] for row in rows["attention"]] == ["separate", "shared"] * 4
    calls = {row["kernel"]: row["calls a step"] for row in rows["kernels"][1:]}
    assert calls["_Linear"] == 2 * 7  # LoRA on seven matrices of two layers
    assert [row.get("gap to DDP") for row in rows["sharding"]] == [0, 0, 0, None, None]


def test_what_hangs_or_dies_costs_only_itself(tmp_path, monkeypatch):
    pieces = tmp_path / "pieces.py"
    pieces.write_text("import sys, os, time; os.abort() if 'dies' in sys.argv else time.sleep(60)")
    monkeypatch.setattr(hour, "__file__", str(tmp_path / "hour.py"))
    monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(tmp_path)])
    args = hour.read_flags()
    results = {}
    for name, reason in (("dies", "exit status -6"), ("hangs", "no end after 1 s")):
        piece = hour.Piece(name, 1, "")
        results[name] = hour.run(piece, args, results, dict(os.environ))
        assert (results[name]["status"], results[name]["reason"]) == ("failed", reason)


def test_the_committed_page_is_that_of_the_committed_results():
    assert (ROOT / "docs/gpu.md").read_text() == hour.page(hour.read(ROOT / "docs"))


def test_what_was_never_tried_comes_before_what_failed():
    tried = {"demo": {"status": "ok"}, "attention": {"status": "failed"}}
    names = [piece.name for piece in hour.missing(tried, only=None)]
    assert "demo" not in names and names[0] == "resume" and names[-1] == "attention"
    assert [piece.name for piece in hour.missing(tried, only="demo")] == ["demo"]


def test_a_rehearsal_never_touches_the_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(ROOT / "docs")])
    with pytest.raises(SystemExit):
        hour.main()
    assert "docs/gpu.md is for GPUs" in capsys.readouterr().err


def test_what_was_measured_is_next_to_its_prediction():
    machine = {"device": "H100", "driver": "1", "versions": {}, "commit": "1", "date": "1"}
    entry = {"status": "ok", "reason": "", "seconds": 1, "machine": machine}
    entry["rows"] = [{"s a step": 0.25, "peak GiB": 31.5}]
    lines = hour.page({"speed:long:ours": entry}).splitlines()
    ours, trl = (next(x for x in lines if f"| 512, 256 | {who}" in x) for who in ("ours", "TRL"))
    assert "| 250 | " in ours and ours.endswith("| 31.5 |")
    assert trl.count("not measured yet") == 2


# --- on a pretended GPU ---------------------------------------------------------------------------


def on_pretended_gpu(name, folder):
    """Do a piece as on a GPU, with a tiny model in place of the large ones; return its entry."""
    pretend.install()
    sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "bench"), str(ROOT)]
    sys.argv = [str(TESTS / "gpu/pieces.py")]
    import pieces

    shape, script = pieces.shape, pieces.script
    pieces.shape = lambda _sizes, _words=0, **more: shape(pieces.SMALL, 2048, **more)
    pieces.script = lambda name, words, run: script(name, words.replace("steps 40", "steps 3"), run)
    pieces.FOLDER = Path(folder)
    pieces.main(*name.split(":"))
    return json.loads((Path(folder) / "entry.json").read_text()), pretend.record.faults


@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
@pytest.mark.parametrize(
    "name", ["attention", pytest.param("fp16", marks=pytest.mark.show), "generation"]
)
def test_a_piece_ends_on_a_pretended_gpu(name, tmp_path):
    """Those whose code on a GPU is not that of the rehearsal on a CPU.

    fp16 has 3 steps instead of 40, too few for its bounds.
    """
    pretend.build()
    entry, faults = ranks(1, on_pretended_gpu, name, str(tmp_path), timeout=600)[0]
    assert len(entry["rows"]) == {"attention": 8, "fp16": 3, "generation": 2}[name], entry
    assert (entry["status"] == "ok" or name == "fp16") and not faults, entry
