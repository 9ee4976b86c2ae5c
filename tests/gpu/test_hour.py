"""The list for a GPU on this CPU: its order and time limits, what it needs, and each piece."""

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
PIECES |= {"commands", "generation", "sharding", "protein", "distillation", "baking"}


GROUP = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


# the order of worth; nine minutes are for the first five
WORTH = ["attention", "speed:long:ours", "speed:long:trl", "kernels", "sharding", "memory", "demo"]
WORTH += ["resume", "fp16", "generation", "speed:hh:ours", "commands", "protein", "distillation"]
WORTH += ["baking"]
MACHINE = {"device": "CPU", "driver": None, "versions": {}, "commit": "1", "date": "today"}
OK = {"status": "ok", "reason": "", "seconds": 1, "rows": [], "machine": MACHINE}


def start(folder):
    command = [sys.executable, str(ROOT / "tests/gpu/hour.py"), "--dry", "--out", str(folder)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def call(monkeypatch, tmp_path, capfd):
    """Return a function that runs the list without its pieces: names begun, and printed lines."""

    def call(*words, lacking=(), failing=(), pace=1.0):
        """Each piece takes `pace` times the seconds that hour.py expects."""
        begun = {}
        clock = [0.0]

        def run(piece, limit, *_):
            begun[piece.name] = limit
            clock[0] += pace * piece.seconds
            return OK | {"status": "failed" if piece.name in failing else "ok"}

        monkeypatch.setattr(hour, "run", run)
        monkeypatch.setattr(hour, "probe", lambda _env: ([*lacking], None))
        monkeypatch.setattr(hour.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(tmp_path), *words])
        hour.main()
        return begun, capfd.readouterr().out.splitlines()

    return call


def kill_after(process, name, folder):
    while name not in hour.read(folder) and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return hour.read(folder)


@pytest.mark.show
def test_the_list_goes_on_where_it_was_killed(tmp_path):
    quick = {"generation", "protein", "baking"}
    hour.write(
        tmp_path, {name: OK for name in PIECES | NEEDS_CUDA | NEEDS_TRL if name not in quick}
    )
    first = kill_after(start(tmp_path), "generation", tmp_path)
    assert first["generation"]["status"] == "ok" and "protein" not in first
    second = kill_after(start(tmp_path), "protein", tmp_path)
    assert second["protein"]["status"] == "ok"
    assert second["generation"] == first["generation"]  # it was not done again


def test_the_pieces_are_run_in_the_order_of_their_worth(call):
    begun, _ = call()
    assert [*begun][: len(WORTH)] == WORTH
    assert begun.keys() == PIECES | NEEDS_CUDA | NEEDS_TRL


def test_nine_minutes_are_enough_for_the_first_five_pieces(call):
    begun, lines = call("--minutes", "9", pace=1.05)
    assert [*begun][:5] == WORTH[:5]
    assert any(line.startswith("memory: not begun: it takes about 85 s, and") for line in lines)


def test_fifty_minutes_are_enough_for_all_pieces(call):
    begun, _ = call(pace=1.9)  # each is ended after twice as long
    assert len(begun) == len(hour.PIECES)


def test_no_piece_runs_longer_than_the_time_that_is_left(call):
    begun, _ = call("--minutes", "2")
    assert begun == {"attention": 120, "demo": 60, "protein": 24}


def test_trl_is_measured_only_after_ours(call):
    begun, lines = call(failing=["speed:hh:ours"])
    assert NEEDS_TRL & begun.keys() == {"speed:long:trl", "speed:long:trl defaults"}
    reason = "it is compared with speed:hh:ours, which is not measured"
    assert f"speed:hh:trl: not begun: {reason}" in lines
    begun, _ = call()  # once more, all are begun: first that which has failed
    assert [*begun] == ["speed:hh:ours", "speed:hh:trl", "speed:hh:trl defaults"]


def test_trl_is_not_compared_with_another_gpu(call, tmp_path):
    other = OK | {"machine": MACHINE | {"device": "NVIDIA H200"}}
    hour.write(tmp_path, {"speed:hh:ours": other})
    begun, lines = call("--only", "speed:hh:trl")
    assert not begun
    assert any(line.endswith("speed:hh:ours, measured on NVIDIA H200") for line in lines), lines


def test_several_pieces_can_be_named(call):
    call()
    begun, _ = call("--only", "demo", "attention")
    assert [*begun] == ["attention", "demo"]


def test_a_piece_whose_package_is_absent_is_skipped_with_its_name(call, tmp_path):
    begun, lines = call(lacking=["gemmi", "ruamel.yaml", "trl"])
    assert "protein: skipped (needs gemmi)" in lines
    assert "sharding: skipped (needs ruamel.yaml)" in lines
    assert "speed:long:trl: skipped (needs trl)" in lines
    assert begun.keys() == PIECES - {"protein", "sharding", "commands", "distillation"}
    page = hour.page(hour.read(tmp_path))
    assert "## protein\n\n*DPO of ProteinMPNN*\n\nState: skipped (needs gemmi).\n" in page
    begun, _ = call()  # with the packages, these are done
    later = {"protein", "sharding", "commands", "distillation"}
    assert begun.keys() == later | NEEDS_CUDA | NEEDS_TRL


def test_wheels_that_are_absent_or_wrong_cost_one_line(call, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        call("--wheels", str(tmp_path))
    assert ended.value.code == 2 and "no *.whl in this folder" in capfd.readouterr().err
    (tmp_path / "trl-1.16.0-cp27-none-any.whl").touch()
    with pytest.raises(SystemExit) as ended:
        call("--wheels", str(tmp_path))
    assert ended.value.code == 2 and "not a supported wheel" in capfd.readouterr().err


def test_the_probe_finds_what_is_absent_and_no_gpu(monkeypatch):
    names = ("json", "no_package", "no_package.inside")
    monkeypatch.setattr(hour, "PACKAGES", names)
    lacking, gpu = hour.probe(os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert {"no_package", "no_package.inside"} <= set(lacking) and "json" not in lacking
    assert gpu is None


def test_a_python_without_torch_costs_one_line(tmp_path):
    words = ["--dry", "--out", str(tmp_path / "out")]
    program = f"""  # the probe does not see what is installed here
import sys
sys.path.insert(0, {str(TESTS / "gpu")!r})
import hour
hour.PROBE = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]" + hour.PROBE
sys.argv = ["hour.py", *{words}]
sys.exit(hour.main())
"""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: {sys.executable}: torch, transformers, peft: not inst")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_help_names_a_wheel_of_every_package_that_a_piece_needs():
    names = set().union(*(piece.needs for piece in hour.PIECES))
    assert {"trl", "gemmi", "ruamel.yaml", "datasets", "dill", "multiprocess"} == names
    assert all(f" {name}==" in hour.__doc__ for name in names)


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


@pytest.mark.show
def test_the_list_is_sound(tmp_path, monkeypatch):
    """The pieces run on this CPU, forked from a process that has imported what they need.

    Two pieces that need a minute each are left out: attention has a test below, and
    speed:long:ours runs the code of speed:hh:ours on longer rows.
    """
    left_out = {"attention", "speed:long:ours"}

    def run(piece, _limit, args, results, _env):
        if piece.name in left_out:
            return OK
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
    assert all(f"\n## {name}\n" in page for name in PIECES | NEEDS_CUDA | NEEDS_TRL)

    # of numbers those that are known without a run
    rows = {name: entry["rows"] for name, entry in results.items()}
    for row in rows["demo"]:
        assert row["first loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert [row["in"] for row in rows["demo"]] == ["fp32", "bf16"]
    assert rows["resume"][0]["exit statuses"] == [-9, 0, 0]
    calls = {row["kernel"]: row["calls a step"] for row in rows["kernels"][1:]}
    assert calls["_Linear"] == 2 * 7  # LoRA on seven matrices of two layers
    assert [row.get("gap to DDP") for row in rows["sharding"]] == [0, 0, 0, None, None, None, None]


def test_what_hangs_or_dies_costs_only_itself(tmp_path, monkeypatch):
    pieces = tmp_path / "pieces.py"
    pieces.write_text("import sys, os, time; os.abort() if 'dies' in sys.argv else time.sleep(60)")
    monkeypatch.setattr(hour, "__file__", str(tmp_path / "hour.py"))
    monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(tmp_path)])
    args = hour.read_flags()
    results = {}
    for name, reason in (("dies", "exit status -6"), ("hangs", "no end after 1 s")):
        piece = hour.Piece(name, 1, "")
        results[name] = hour.run(piece, 1, args, results, dict(os.environ))
        assert (results[name]["status"], results[name]["reason"]) == ("failed", reason)


def test_the_committed_page_is_that_of_the_committed_results():
    assert (ROOT / "docs/gpu.md").read_text() == hour.page(hour.read(ROOT / "docs"))


def test_what_failed_comes_before_what_was_never_tried():
    tried = {"demo": {"status": "ok"}, "generation": {"status": "failed"}}
    names = [piece.name for piece in hour.missing(tried, only=None)]
    assert "demo" not in names and names[:2] == ["generation", "attention"]
    failed = ["speed:long:trl", "sharding", "generation"]  # as in the first hour on an H100
    tried = dict.fromkeys(WORTH, OK) | dict.fromkeys(failed, {"status": "failed"})
    names = [piece.name for piece in hour.missing(tried, only=None)]
    assert names[:4] == [*failed, "speed:hh:trl"]


def test_a_rehearsal_never_touches_the_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hour.py", "--dry", "--out", str(ROOT / "docs")])
    with pytest.raises(SystemExit):
        hour.main()
    assert "docs/gpu.md is for GPUs" in capsys.readouterr().err


def test_what_was_measured_is_next_to_its_prediction():
    """Rows that were not measured take no cell."""
    machine = {"device": "H100", "driver": "1", "versions": {}, "commit": "1", "date": "1"}
    entry = {"status": "ok", "reason": "", "seconds": 1, "machine": machine}
    entry["rows"] = [{"s a step": 0.25, "peak GiB": 31.5}]
    page = hour.page({"speed:long:ours": entry})
    (ours,) = (x for x in page.splitlines() if x.startswith("| 512, 256 | "))
    assert ours.startswith("| 512, 256 | ours | 275 | 250 | ") and ours.endswith(" | 31.5 |")
    assert "\n- `speed:long:trl`: " in page and "\n- `speed:long:ours`: " not in page
    assert page.lower().count("not been measured yet") == 1
    bare = hour.page({})
    assert "## speed" not in bare and "measured ms" not in bare


def test_a_row_out_of_bounds_is_visible_among_the_largest_differences():
    row = {"in": "float32", "prompt": "shared", "nats": 1e-7, "gradient": 3e-7, "ok": True}
    rows = [row, row | {"nats": 0.5, "ok": False}, row | {"prompt": "separate"}]
    page = hour.page({"attention": OK | {"rows": rows}})
    assert "| float32 | shared | 2 | 0.5 | 3e-07 | False |" in page
    assert "| float32 | separate | 1 | 1e-07 | 3e-07 | True |" in page


# --- on a pretended GPU ---------------------------------------------------------------------------


ROWS = {"demo": 4, "attention": 12, "resume": 2, "fp16": 3, "memory": 6, "kernels": 1}
ROWS |= {"generation": 2, "sharding": 7, "commands": 5, "protein": 2, "distillation": 1}
ROWS |= {"baking": 1}
ROWS |= dict.fromkeys(["speed:long:ours", "speed:hh:ours", *sorted(NEEDS_TRL)], 1)
FAST = {"generation"}  # and its code is not that of the rehearsal on a CPU
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
    if name == "attention":
        assert [row["prompt"] for row in entry["rows"]] == ["separate", "shared"] * 6
        assert {row["head size"] for row in entry["rows"]} == {64, 128, 256}
    assert entry["status"] == "ok" and not faults, (entry, faults)
