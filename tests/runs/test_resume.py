"""A killed run resumes bit-identically; without all of its state it would not."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

import faults
import main_distributed
import runs
from conftest import ROOT
from ddp_utils import checkpoints, run
from dpo_inv import run_dpo_ddp
from ranks import run_ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(kind, mode, world size) -> folder of a run, made once: undisturbed, or killed in step 12."""
    folders = {}

    def folder(kind, mode, size):
        if (kind, mode, size) not in folders:
            folders[kind, mode, size] = path = tmp_path_factory.mktemp("made") / "run"
            fault = (faults.kill_in_backward, 0, 11) if kind == "killed" else None
            outcome = faults.start(size, path, *faults.MODES[mode], fault=fault)
            assert outcome.codes[0] == (-9 if fault else 0), outcome.logs
        return folders[kind, mode, size]

    return folder


@pytest.fixture
def killed(made, tmp_path):
    """A copy of a killed run, to be continued."""

    def copy(mode, size):
        return Path(shutil.copytree(made("killed", mode, size), tmp_path / "copy/run"))

    return copy


MOMENTS = {  # call of the writer in its second save, of step 10 -> newest checkpoint afterwards
    "before the data": ("save_file", 2, 5),
    "after the data, before the manifest": ("write_manifest", 2, 5),
    "before the rename": ("contextlib.ExitStack.close", 2, 5),
    "after the rename": ("remove_old", 2, 10),
}


SOME = [
    pytest.param(moment, marks=pytest.mark.show if moment.endswith("the data") else ())
    for moment in MOMENTS
]


@pytest.mark.parametrize("moment", SOME)
def test_f2_f19_killed_while_saving(moment, made, tmp_path):
    call, number, newest = MOMENTS[moment]
    folder, flags = tmp_path / "run", faults.MODES["lora"]
    outcome = faults.start(1, folder, *flags, fault=(faults.kill_while_saving, call, number))
    assert outcome.codes == [-9]
    path = folder / f"checkpoints/step-{newest:08d}"
    assert checkpoints.find_newest(folder / "checkpoints") == (path, [])
    faults.finished(faults.start(1, folder, *flags))
    assert faults.is_equal(folder, made("undisturbed", "lora", 1))
    assert not list((folder / "checkpoints").glob(".*")) and len(faults.steps(folder)) == 2


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_f5_a_damaged_checkpoint_is_skipped_and_named(made, killed):
    """More kinds of damage: tests/runs/test_checkpoint.py."""
    folder = killed("lora", 1)
    flip(folder / "checkpoints/step-00000010/state.safetensors")
    for flags in (["--check"], []):  # which says the same beforehand
        outcome = faults.finished(faults.start(1, folder, *faults.MODES["lora"], *flags))
        log = " ".join(outcome.logs[0].split())  # the warning is wrapped
        problem = "step-00000010 is not used: state.safetensors does not match"
        assert f"{folder}/checkpoints/{problem}" in log and log.count("warning:") == 1
        assert "resumes after step 5" in outcome.logs[0]
    assert faults.is_equal(folder, made("undisturbed", "lora", 1))


def test_f5_without_any_whole_checkpoint_nothing_begins_anew_in_silence(killed):
    folder = killed("lora", 1)
    for path in folder.glob("checkpoints/*/state.safetensors"):
        flip(path)
    before = sorted(folder.rglob("*"))
    outcome = faults.start(1, folder, *faults.MODES["lora"])
    assert outcome.codes == [2]
    assert "no checkpoint is intact; use --restart" in outcome.logs[0]
    assert outcome.logs[0].count("\n") == 1 and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("saved_on", "goes_on_with"), [(2, 1), (2, 4)])
def test_f6_complaint_24_on_another_world_size_the_losses_are_the_same(
    saved_on, goes_on_with, made, killed
):
    folder = killed("full", saved_on)
    outcome = faults.finished(faults.start(goes_on_with, folder, *faults.MODES["full"]))
    assert (
        f"world_size: {saved_on} -> {goes_on_with}; results are equal up to rounding"
        in outcome.logs[0]
    )
    found, expected = runs.lines(folder), runs.lines(made("undisturbed", "full", saved_on))
    assert [(a["split"], a["step"]) for a in found] == [(b["split"], b["step"]) for b in expected]
    first = expected[0]["loss"]
    for a, b in zip(found, expected, strict=True):
        assert abs(a["loss"] - b["loss"]) <= 1e-5 * max(abs(b["loss"]), first), (a, b)


def times(folder):
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


OTHERS = {
    ("--learning_rate", "1e-4"): "learning_rate: 0.001 -> 0.0001",
    ("--max_rows", "39"): "max_rows: 40 -> 39, content of train: ",
}


def test_f7_nor_on_other_processes_if_the_learning_rate_is_that_of_their_number(
    monkeypatch, tmp_path
):
    inputs = []
    monkeypatch.setattr(main_distributed, "check", lambda spec, *_: inputs.append(spec.inputs))
    monkeypatch.setattr(run, "check", lambda spec, *_: inputs.append(spec.inputs))
    protein = ["--base_model_name", str(ROOT / "data/demo/protein_model.pt")]
    protein += ["--train_data", str(ROOT / "data/input/test_data_real.json"), "--max_rows", "4"]
    for main, flags in ((main_distributed.main, []), (run_dpo_ddp.main, protein)):
        for scaling in ("world_size", "none"):
            main([*flags, "--lr_scaling", scaling, "--check"])
        is_input = ["processes (lr_scaling)" in found for found in inputs[-2:]]
        assert is_input == [True, False] and len(inputs) in (2, 4)


@pytest.mark.parametrize("flags", OTHERS)
def test_f7_an_unfinished_run_does_not_go_on_with_other_settings(flags, killed):
    folder = killed("lora", 1)
    before = times(folder)
    outcome = faults.start(2, folder, *faults.MODES["lora"], *flags)
    assert outcome.codes == [2, 2]
    assert outcome.logs[1] == "" and outcome.logs[0].count("\n") == 1
    assert outcome.logs[0].startswith(f"error: {folder} has an unfinished run with other settin")
    assert OTHERS[flags] in outcome.logs[0]
    assert times(folder) == before


def test_f7_nor_with_other_data_or_another_model_under_the_same_name(tmp_path):
    """One letter of one row, one number of the weights."""
    data, model = tmp_path / "rows.jsonl", tmp_path / "model"
    rows = Path(runs.PAIRS).read_text()
    data.write_text(rows)
    shutil.copytree(ROOT / "data/demo/model", model)
    flags = [*faults.MODES["lora"], "--train_data", str(data), "--model_name", str(model)]
    folder = tmp_path / "runs/run"
    fault = (faults.kill_in_backward, 0, 7)
    assert faults.start(1, folder, *flags, fault=fault).codes == [-9]

    def refused():
        outcome = faults.start(1, folder, *flags)
        assert outcome.codes == [2]
        return outcome.logs[0]

    data.write_text(rows.replace("a", "e", 1))
    assert "content of train: " in refused() and "content of model_name" not in refused()
    data.write_text(rows)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-2] ^= 4
    (model / "model.safetensors").write_bytes(weights)
    assert "content of model_name: " in refused() and "content of train" not in refused()


def test_a_judge_that_fails_on_a_reply_costs_no_model_and_may_be_mended(tmp_path):
    """It was tried on the replies of the data, which have a full stop."""
    judge = tmp_path / "judge.py"
    judge.write_text("def score(prompt, reply): return 1 / reply.count('.')")
    flags = [*faults.MODES["lora"], "--judge", f"{judge}:score", "--max_steps", "2"]
    flags += runs.words("--num_samples 2 --max_new_tokens 2")
    outcome = faults.start(1, tmp_path / "run", *flags)
    assert outcome.codes == [1] and "ZeroDivisionError" in outcome.logs[0], outcome.logs
    assert (tmp_path / "run/model/adapter_model.safetensors").exists()
    judge.write_text("def score(prompt, reply): return reply.count('.')")
    [log] = faults.finished(faults.start(1, tmp_path / "run", *flags)).logs
    assert "resumes after step 2" in log and "content of judge: " in log, log
    assert faults.summary(tmp_path / "run")["test"]["ties"] == 2


def test_a_run_that_goes_on_with_another_output_dir_replaces_no_files(killed, tmp_path):
    """The setting may change between two lives; what lies there is someone else's."""
    folder, precious = killed("full", 2), tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    flags = [*faults.MODES["full"], "--output_dir"]
    outcome = faults.start(2, folder, *flags, str(precious))
    assert outcome.codes == [2, 2]
    assert f"error: --output_dir: {precious} is not empty; use another folder" in outcome.logs[0]
    assert (precious / "thesis.txt").read_text() == "years"
    for last in ("resumes after step", f"{folder}: this run is already finished"):
        outcome = faults.finished(faults.start(2, folder, *flags, str(tmp_path / "new")))
        assert last in outcome.logs[0]
    assert (tmp_path / "new/model.safetensors").exists()


def test_the_model_of_a_run_that_was_faster_is_not_replaced(tmp_path):
    """Both have one --output_dir; the slower one is resumed, or about to save its model."""
    models = tmp_path / "models"
    error = f"error: --output_dir: {models} is not empty; use another folder"

    def start(name, *more, output=models, fault=None):
        flags = [*faults.MODES["full"], "--output_dir", str(output), *more]
        return faults.start(1, tmp_path / name, *flags, fault=fault)

    assert start("slow", fault=(faults.kill_in_backward, 0, 7)).codes == [-9]
    faults.finished(start("fast", "--max_steps", "1"))
    model = (models / "model.safetensors").read_bytes()
    outcome = start("slow")
    assert outcome.codes == [2] and outcome.logs[0].startswith(error), outcome.logs
    assert (models / "model.safetensors").read_bytes() == model
    models.rename(tmp_path / "elsewhere")
    assert start("slow", fault=(faults.kill_before_saving_the_model,)).codes == [-9]
    (tmp_path / "elsewhere").rename(models)
    assert start("slow").logs[0].startswith(error)
    models.rename(tmp_path / "elsewhere")
    outcome = start("slow", fault=(faults.save_first, models))
    assert outcome.codes == [2] and error in outcome.logs[0], outcome.logs
    assert [path.name for path in models.iterdir()] == ["model.safetensors"]
    assert not (models / "model.safetensors").read_bytes()
    own = tmp_path / "own"
    assert start("slow", output=own, fault=(faults.kill_after_saving_the_model,)).codes == [-9]
    assert start("slow").logs[0].startswith(error)
    own.rename(tmp_path / "new")
    own = tmp_path / "new"
    (own / "model.safetensors").unlink()
    faults.finished(start("slow", output=own))
    assert (own / "model.safetensors").exists()


def edit(path, change):
    """Change the object in a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_a_resumed_run_names_the_code_that_has_changed(killed, made):
    """As if the saved digest of losses.py were that of another text."""

    def other(environment):
        assert environment["code"]["main_distributed.py"]
        environment["code"]["ddp_utils/losses.py"] = "0" * 16

    folder, mode = killed("lora", 1), faults.MODES["lora"]
    edit(folder / "environment.json", other)
    edit(folder / "environment.json", lambda before: before["versions"].update(torch="2.10.0"))
    log = faults.finished(faults.start(1, folder, *mode)).logs[0]
    warnings = [line for line in log.splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: the code has changed since the last start: ddp_utils/losses.py"]
    assert "versions: " in log and "'torch': '2.10.0'" in log and "threads: " not in log
    assert faults.is_equal(folder, made("undisturbed", "lora", 1))


def test_a_shorter_run_than_what_is_done_is_refused(killed):
    outcome = faults.start(1, killed("lora", 1), *faults.MODES["lora"], "--max_steps", "9")
    assert outcome.codes == [2] and "max_steps: 10 are done -> 9" in outcome.logs[0]


def test_a_finished_run_says_so_and_ends_with_0(made):
    folder = made("undisturbed", "lora", 2)
    before = times(folder)
    outcome = faults.start(2, folder, *faults.MODES["lora"])
    assert outcome.codes == [0, 0] and outcome.logs[1] == ""
    said = f"{folder}: this run is already finished (same settings and data)\n"
    assert outcome.logs[0] == said and times(folder) == before


def test_restart_moves_an_unfinished_run_aside(killed, made):
    folder = killed("lora", 1)
    outcome = faults.finished(faults.start(1, folder, *faults.MODES["lora"], "--restart"))
    assert f"has an earlier run: moved to {folder}.1" in outcome.logs[0]
    assert "resumes" not in outcome.logs[0]
    assert faults.is_equal(folder, made("undisturbed", "lora", 1))
    assert faults.steps(f"{folder}.1") == [5, 10]


def test_an_unfinished_run_without_a_checkpoint_begins_again_or_makes_way(tmp_path, made):
    """Nothing would be lost, whatever the settings."""
    folder, flags = tmp_path / "run", faults.MODES["lora"]
    assert faults.start(1, folder, *flags, fault=(faults.kill_in_backward, 0, 2)).codes == [-9]
    other = faults.start(1, folder, *flags, "--beta", "0.3", fault=(faults.kill_in_backward, 0, 2))
    assert f"moved to {folder}.1" in other.logs[0]
    again = faults.start(1, folder, *flags, "--beta", "0.3", "--max_steps", "11")
    log = faults.finished(again).logs[0]  # what the reference has scored is kept
    assert "max_steps: 12 -> 11, from here on" in log and "resumes after step 0" in log
    assert [line["step"] for line in runs.lines(folder, "train")] == list(range(1, 12))


def test_with_save_best_from_a_resumed_step_on_its_validation_counts(tmp_path):
    """Chosen and rejected are swapped in the validation data, so training makes it worse."""
    rows = [json.loads(line) for line in Path(runs.PAIRS).read_text().splitlines()]
    rows = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    (tmp_path / "swapped.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [*runs.FULL, *runs.words("--learning_rate 3e-3 --lr_scheduler constant --save_every 4")]
    flags += ["--val_data", str(tmp_path / "swapped.jsonl")]
    folder = tmp_path / "run"
    assert faults.start(1, folder, *flags, fault=(faults.kill_in_backward, 0, 5)).codes == [-9]
    faults.finished(faults.start(1, folder, *flags, "--save_best"))
    first, *later = [row["loss"] for row in runs.lines(folder, "val") if row["step"]]
    assert first < min(later)
    assert faults.summary(folder)["best"] == {"loss": first, "step": 4}


# --- ranks that were started by hand, with a command for each node -------------------------------


def on_its_own_node(folder, flags, own):
    """A rank of two nodes that share no disk; own: more flags of rank 1."""
    runs.hurry()
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(Path(folder) / rank)
    how = [*faults.STEPS, "--max_steps", "1", *flags, *(own if rank == "1" else ())]
    return main_distributed.main([*how, "--result_dir", "run"])


def test_nodes_that_were_started_differently_are_one_line(tmp_path):
    rows = Path(runs.PAIRS).read_text()
    for rank in "01":
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "rows.jsonl").write_text(rows.replace("e", "a", int(rank)))
    both = [str(tmp_path), ["--train_data", "rows.jsonl"], []]
    for arguments, says in (
        ([str(tmp_path), [], ["--beta", "0.5"]], "beta: 0.1 -> 0.5"),
        (both, r"content of train: \w+ -> \w+"),
    ):
        outcome = run_ranks(2, on_its_own_node, *arguments)
        assert outcome.codes == [2, 2], outcome.logs
        says = rf"error: rank 1 differs from rank 0: .*{says}.*; use one command, and the same"
        assert outcome.logs[0] == "" and re.search(says, outcome.logs[1]), outcome.logs
        assert not (tmp_path / "0/run").exists()


def test_a_run_folder_that_one_node_alone_sees_is_a_warning(tmp_path):
    """The run itself needs no other; what a rank prints or caches may differ."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    own = ["--log_every", "7", "--cache_dir", "mine"]
    log = faults.finished(run_ranks(2, on_its_own_node, str(tmp_path), [], own)).logs[0]
    says = "warning: not all nodes see run: a stopped run needs a folder that all nodes can read"
    assert says in " ".join(log.split())
    assert (tmp_path / "0/run/model").exists() and not (tmp_path / "1/run").exists()
