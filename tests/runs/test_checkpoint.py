"""Checkpoints: what is written can be read, damage is detected, the newest intact one is found."""

import dataclasses
import errno
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from shlex import split as words

import pytest
import torch

import programs
from conftest import ROOT
from ddp_utils import UserError, WriteError, checkpoints, data
from ddp_utils.checkpoints import STATE
from ddp_utils.distributed import World
from ddp_utils.policy import Strategy

TENSORS = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "trained": torch.nn.Parameter(torch.ones(2)),
}


def write(folder, step, value=1.0):
    tensors = {"w": torch.full((50,), float(value))}
    return checkpoints.write(folder, step, tensors, {"loss": value})


def value_of(path):
    return checkpoints.read(path)[0]["w"][0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_can_be_read(tmp_path):
    path = checkpoints.write(tmp_path / "new/folder", 12, TENSORS, {"seed": 3, "names": ["é"]})
    assert path == tmp_path / "new/folder/step-00000012"
    assert names(path) == ["manifest.json", STATE]
    assert checkpoints.find_problem(path) is None
    found, manifest = checkpoints.read(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert (manifest["step"], manifest["seed"], manifest["names"]) == (12, 3, ["é"])
    content = (path / STATE).read_bytes()
    expected = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["files"] == {STATE: expected}


def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """A checkpoint counts once it is renamed: a power cut may come right after that."""
    synced, renamed, fsync, replace = set(), [], os.fsync, os.replace

    def spy_fsync(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def spy_replace(source, target):
        if os.path.isdir(source):
            inodes = {name: (Path(source) / name).stat().st_ino for name in [".", *names(source)]}
            renamed.append(sorted(inodes))
            assert set(inodes.values()) <= synced, renamed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    write(tmp_path, 1)
    assert renamed == [[".", "manifest.json", STATE]]
    assert tmp_path.stat().st_ino in synced  # the new name as well


def test_each_file_is_hashed_once(tmp_path, monkeypatch):
    """Hashing took a third of the time of a save."""
    hashed, sha256 = [], data.sha256
    monkeypatch.setattr(data, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    write(tmp_path, 1)
    assert hashed == [STATE]


def test_the_newest_has_the_highest_step(tmp_path):
    for older, newer in [(0, 1), (9, 10)]:
        write(tmp_path, newer, 1.0)
        path = write(tmp_path, newer, 2.0)  # again
        write(tmp_path, older)
        for name in (".tmp-step-999999999", "step-best", f"step-{newer}.old"):
            if not (tmp_path / name).exists():
                shutil.copytree(path, tmp_path / name)
        assert checkpoints.find_newest(tmp_path) == (path, []) and value_of(path) == 2.0


def flip(path):
    content = bytearray((path / STATE).read_bytes())
    content[-1] ^= 1
    (path / STATE).write_bytes(content)


def edit(path):
    """Change a number of the manifest by hand."""
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"loss": 1', '"loss": 3'))


DAMAGE = {
    "last_bit": (flip, f"{STATE} does not match its SHA-256"),
    "cut": (lambda path: os.truncate(path / STATE, 99), f"{STATE} does not match its SHA-256"),
    "no_data": (lambda path: (path / STATE).unlink(), f"{STATE}: No such file"),
    "no_manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json: No such file"),
    "binary_manifest": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff\x00"),
        "manifest.json does not match its SHA-256",
    ),
    "another_loss": (edit, "manifest.json does not match its SHA-256"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_is_found(tmp_path, kind):
    damage, message = DAMAGE[kind]
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    damage(bad)
    problem = checkpoints.find_problem(bad)
    assert problem.startswith(message)
    assert checkpoints.find_newest(tmp_path) == (good, [(bad, problem)])


def full_disk(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("module", "call"), [(checkpoints, "save_file"), (data, "sha256"), (data, "fsync")]
)
def test_a_failed_write_leaves_nothing_and_keeps_the_old_one(tmp_path, monkeypatch, module, call):
    old = write(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, call, full_disk)
        for step in (1, 2):
            with pytest.raises(WriteError, match="No space"):
                write(tmp_path, step, 2.0)
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.find_newest(tmp_path) == (old, []) and value_of(old) == 1.0


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in (1, 2, 3, 4, 9):  # the run has done 4 steps: 9 is damaged
        write(tmp_path, step)
    checkpoints.remove_old(tmp_path, 2, 4, best=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


# where and how often something is written or printed, how long it may take, the length of the run,
# which weights are kept, and how the ranks split the work
MAY_CHANGE = words(
    "check debug restart log_every save_every keep_checkpoints result_dir out_dir output_dir "
    "cache_dir stop_after_minutes timeout_minutes config deepspeed report_to bucket_mb "
    "ckpt_interval eval_interval gen_interval summary_interval test_batch_size sample_batch_size "
    "max_steps num_epochs train_timesteps save_best judge num_samples "
    "strategy use_fsdp fsdp_config use_deepspeed deepspeed_config sharding_config"
)


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOLCK, UserError), (errno.ENOSYS, UserError), (errno.ENOSPC, OSError)],
)
def test_a_disk_without_locks_is_one_line_and_a_full_one_is_a_full_one(
    number, error, monkeypatch, tmp_path
):
    def acquire(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoints.FileLock, "acquire", acquire)
    with pytest.raises(error, match="no locks of files" if error is UserError else "No space left"):
        checkpoints.lock(tmp_path)


SETTINGS = ["config", "train_config", "prompt_baking.train_config", "dpo_inv.config", "ad.config"]


@pytest.mark.parametrize("module", SETTINGS)
def test_an_unfinished_run_cannot_be_resumed_with_any_other_setting(module, tmp_path):
    settings = dataclasses.asdict(importlib.import_module(module).Config())
    settings = json.loads(json.dumps(settings))  # no tuples
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for name in ("environment", "summary"):
        (tmp_path / f"{name}.json").write_text("{}")
    facts = {"shard_layout": "", "metrics_bytes": 0}
    checkpoints.write(tmp_path / "checkpoints", 4, {"w": torch.ones(1)}, facts)
    spec = checkpoints.RunSpec(tmp_path, 9, {})
    code = {"code": {}}
    assert checkpoints.inspect(spec, settings, code).action == "resume"
    for name in settings.keys() - {"result_dir", "out_dir", "output_dir"}:
        changed = settings | {name: "another"}
        if name in MAY_CHANGE:
            assert checkpoints.inspect(spec, changed, code).action == "resume", name
        else:
            with pytest.raises(UserError, match=f"unfinished run .* {name}: .* -> another;"):
                checkpoints.inspect(spec, changed, code)
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert checkpoints.inspect(spec, settings, code).action == "finished"
    assert checkpoints.inspect(spec, settings | {"seed": 7}, code).action == "move aside"


def unfinished(folder, facts, layout=""):
    """Make the folder of a run that was killed after step 4; return its RunSpec."""
    contents = {"config": {"seed": 1}, "environment": facts, "summary": {}}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    manifest = {"shard_layout": layout, "metrics_bytes": 0}
    checkpoints.write(folder / "checkpoints", 4, {"w": torch.ones(1)}, manifest)
    return checkpoints.RunSpec(folder, 9, {})


def test_checkpoints_without_settings_are_not_resumed(tmp_path):
    spec = unfinished(tmp_path, {})
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="has checkpoints but no config.json; use another folder"):
        checkpoints.inspect(spec, {"seed": 1}, {"code": {}})


def test_restart_counts_once_for_all_starts_of_a_launcher(tmp_path):
    spec = unfinished(tmp_path, {"started_by": "n1 7 99", "job": "5"})
    for started_by, job, restarts, action in (
        ("n1 7 99", None, 0, "resume"),
        ("n1 7 101", None, 0, "move aside"),  # another process with this number
        (None, None, 0, "move aside"),
        (None, "5", 0, "move aside"),  # another command of the job
        (None, "5", 1, "resume"),  # Slurm runs the job again
        (None, "6", 1, "move aside"),
    ):
        facts = {"code": {}, "started_by": started_by, "job": job, "job_restarts": restarts}
        assert checkpoints.inspect(spec, {"seed": 1}, facts, restart=True).action == action


def test_a_launcher_is_its_process_whatever_its_launches_are_called(monkeypatch):
    """torchrun --master_port calls each of them "none"; a shell is no launcher."""
    started = """if True:
        import json, os
        from ddp_utils import checkpoints
        for _ in "12":
            if not os.fork():
                print(json.dumps(checkpoints.start_facts()), flush=True)
                os._exit(0)
            os.wait()
    """
    env = programs.environment() | {"PYTHONPATH": f"{ROOT}/src"}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", started]
        options = {"env": env | {"TORCHELASTIC_RUN_ID": "none"}, "text": True, "check": True}
        lines = subprocess.run(command, stdout=subprocess.PIPE, **options).stdout.splitlines()
        found += [json.loads(line) for line in lines]
    assert checkpoints.is_started_again(found[0], found[1])
    assert checkpoints.is_started_again(found[2], found[3])
    assert not checkpoints.is_started_again(found[0], found[2])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    expected = {"started_by": None, "job": "5", "job_restarts": 2}
    assert checkpoints.start_facts() == expected
    for kind in ("JOB_ID", "RESTART_COUNT"):
        monkeypatch.delenv(f"SLURM_{kind}")
    for name, value in {"PBS_JOBID": "5", "PBS_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    assert checkpoints.start_facts() == expected


def test_a_new_run_does_not_move_its_own_input_aside(tmp_path):
    """The model of the earlier run, with the default folder for the new one."""
    folder = tmp_path / "run"
    folder.mkdir()
    spec = unfinished(folder, {})
    (folder / "summary.json").write_text('{"status": "finished"}')
    model, other = folder / "model", tmp_path / "model"
    model.mkdir()
    other.mkdir()
    problem = f"--model_name: {model} is in {folder}, which would be renamed; use another folder"
    with pytest.raises(UserError, match=problem):
        checkpoints.inspect(spec, {"seed": 2, "model_name": str(model)}, {"code": {}})
    now = {"seed": 2, "model_name": str(other), "output_dir": str(model)}
    assert checkpoints.inspect(spec, now, {"code": {}}).action == "move aside"


def test_a_script_of_another_name_is_changed_code(tmp_path):
    spec = unfinished(tmp_path, {"code": {"main_distributed.py": "a", "ddp_utils/run.py": "b"}})
    now = {"my_dpo.py": "a", "ddp_utils/run.py": "b"}
    lines = checkpoints.inspect(spec, {"seed": 1}, {"code": now}).lines
    assert lines[0].endswith("the code has changed since the last start: main_distributed.py")


LAYOUTS = [  # of the checkpoint and of the run -> whether it can be read
    ("", "FSDP FULL_SHARD on 2 processes", True),
    ("", "ZeRO-3 on 2 processes", False),
    ("ZeRO-3 on 2 processes", "ZeRO-3 on 2 processes", True),
    ("ZeRO-3 on 2 processes", "ZeRO-3 on 4 processes", False),
    ("FSDP FULL_SHARD on 2 processes", "", False),
]


def test_the_nodes_of_hybrid_shard_count():
    """A rank has a part of what its node has: 2 x 4 and 4 x 2 processes have different parts."""
    world, names = World(0, 8, 0, 4), {}
    for name in ("FSDP FULL_SHARD", "FSDP HYBRID_SHARD", "ZeRO-3"):
        strategy = Strategy(name.partition(" ")[0].lower(), name, saves_shards=True)
        names[name] = strategy.shard_layout("full", world)
    assert names == {
        "FSDP FULL_SHARD": "FSDP FULL_SHARD on 8 processes",
        "FSDP HYBRID_SHARD": "FSDP HYBRID_SHARD on 8 processes, 4 per node",
        "ZeRO-3": "ZeRO-3 on 8 processes",
    }


@pytest.mark.parametrize(("saved", "now", "is_readable"), LAYOUTS)
def test_how_ranks_have_split_a_checkpoint(saved, now, is_readable, tmp_path):
    spec = unfinished(tmp_path, {}, saved)._replace(shard_layout=now)
    if is_readable:
        assert checkpoints.inspect(spec, {"seed": 1}, {"code": {}}).action == "resume"
    else:
        line = f"parts of a checkpoint: {saved or 'one file'} -> {now or 'one file'}"
        with pytest.raises(UserError, match=line):
            checkpoints.inspect(spec, {"seed": 1}, {"code": {}})


def test_a_folder_below_a_broken_link_is_one_line(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="run folder: .*link is a link to .*nowhere, which does"):
        checkpoints.check_writable("run folder", tmp_path / "link/run")
