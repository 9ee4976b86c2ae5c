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
import torch

from conftest import ROOT, TESTS
from ranks import ranks

NEEDS_CUDA = {"fp16"}
NEEDS_TRL = {f"speed:{case}:{kind}" for case in ("long", "hh") for kind in ("trl", "trl defaults")}
PIECES = {"demo", "attention", "resume", "memory", "speed:long:ours", "speed:hh:ours", "kernels"}
PIECES |= {"generation", "sharding", "protein", "distillation", "baking"}


GROUP = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def start(folder):
    command = [sys.executable, str(ROOT / "tests/gpu/hour.py"), "--dry", "--out", str(folder)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def kill_after(process, name, folder):
    while name not in hour.read(folder) and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return hour.read(folder)


def test_the_list_goes_on_where_it_was_killed(tmp_path):
    done = kill_after(start(tmp_path), "demo", tmp_path)
    assert list(done) == ["demo"]
    results = kill_after(start(tmp_path), "attention", tmp_path)
    assert list(results) == ["demo", "attention"] and results["attention"]["status"] == "ok"
    assert results["demo"] == done["demo"]  # it was not done again


def do_piece(name, folder, pretended):
    """Do a piece with small models, on this CPU or as on a GPU; return its entry."""
    sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "bench"), str(ROOT)]
    sys.argv = [str(TESTS / "gpu/pieces.py"), *["--dry"] * (not pretended)]
    for variable in GROUP:  # a piece is no rank
        del os.environ[variable]
    if pretended:
        pretend.install(memory=True)
        code = "import pretend\npretend.install(memory=True)\n"
        Path(folder, "sitecustomize.py").write_text(code)  # of what it starts
    os.environ["PYTHONPATH"] = ":".join([folder, str(ROOT / "src"), str(TESTS), *sys.path])
    import pieces

    pieces.TINY = True
    profile = torch.profiler.profile
    if pretended:  # a CPU build has no profiler of CUDA
        torch.profiler.profile = lambda activities: profile(activities=activities[:1])
    pieces.FOLDER = Path(folder)
    pieces.main(*name.split(":"))
    return json.loads((Path(folder) / "entry.json").read_text()), pretend.record.faults


def test_the_list_is_sound(tmp_path, monkeypatch):
    """All pieces on this CPU, forked from a process that has imported what they need."""

    def run(piece, args, results, _env):
        folder = tmp_path / piece.name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(results))
        entry, _ = ranks(1, do_piece, piece.name, str(folder), False, timeout=600)[0]
        entry["machine"] |= {"commit": args.commit, "date": "today"}
        return entry | {"seconds": 1}

    out = tmp_path / "out"
    monkeypatch.setattr(hour, "run", run)
    monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(out)])
    assert hour.main() == 0
    results = hour.read(out)
    status = {name: entry["status"] for name, entry in results.items()}
    assert {name for name in status if status[name] == "ok"} - NEEDS_TRL == PIECES, results
    assert {name for name in status if status[name] == "skipped"} <= NEEDS_CUDA | NEEDS_TRL
    assert "needs CUDA" in results["fp16"]["reason"]
    page = (out / "gpu.md").read_text()
    assert all(f"\n| {name} |" in page for name in PIECES | NEEDS_CUDA | NEEDS_TRL)

    # of numbers those that are known without a run
    rows = {name: entry["rows"] for name, entry in results.items()}
    for row in rows["demo"]:
        assert row["first loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert [row["in"] for row in rows["demo"]] == ["fp32", "bf16"]
    assert rows["resume"][0]["exit statuses"] == [-9, 0, 0]
    assert [row["prompt"] for row in rows["attention"]] == ["separate", "shared"] * 10
    assert {row["head size"] for row in rows["attention"]} == {64, 128, 256}
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


ROWS = {"demo": 4, "attention": 20, "resume": 2, "fp16": 3, "memory": 4, "kernels": 1}
ROWS |= {"generation": 2, "sharding": 5, "protein": 2, "distillation": 1, "baking": 1}
ROWS |= dict.fromkeys(["speed:long:ours", "speed:hh:ours", *sorted(NEEDS_TRL)], 1)
FAST = {"attention", "generation"}  # and their code is not that of the rehearsal on a CPU
MARKED = [pytest.param(name, marks=() if name in FAST else pytest.mark.show) for name in ROWS]


@pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())
@pytest.mark.parametrize("name", MARKED)
def test_a_piece_ends_on_a_pretended_gpu(name, tmp_path):
    if name in NEEDS_TRL:
        pytest.importorskip("trl")
    pretend.build()
    (tmp_path / "results.json").write_text("{}")
    entry, faults = ranks(1, do_piece, name, str(tmp_path), True, timeout=600)[0]
    assert len(entry["rows"]) >= ROWS[name], entry
    assert entry["status"] == "ok" and not faults, (entry, faults)
