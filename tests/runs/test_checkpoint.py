"""Checkpoints: what is written comes back, damage is seen, the newest whole one is found."""

import dataclasses
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from shlex import split as words

import pytest
import torch

from ddp_utils import UserError
from ddp_utils.runs import checkpoint, folder

STATE = "state.safetensors"


def tensors(value=1.0):
    return {
        "weight": torch.arange(12.0).reshape(3, 4) * value,
        "half": torch.tensor([1.5, -2.0, 3e38], dtype=torch.bfloat16),
        "fp16": torch.tensor([0.1], dtype=torch.float16),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "step": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }


def write(folder, step, value=1.0):
    return checkpoint.write(folder, step, {"w": torch.full((50,), float(value))}, {"loss": value})


def value_of(path):
    return checkpoint.read(path)[0]["w"][0].item()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_comes_back(tmp_path):
    path = checkpoint.write(tmp_path / "new" / "folder", 12, tensors(), {"seed": 3, "names": ["é"]})
    assert path == tmp_path / "new/folder/step-00000012"
    assert checkpoint.verify(path) is None
    found, manifest = checkpoint.read(path)
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    assert (manifest["step"], manifest["seed"], manifest["names"]) == (12, 3, ["é"])


def test_all_of_it_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """A checkpoint counts once it is renamed: a power cut may come right after that."""
    synced, renamed, fsync, rename = set(), [], os.fsync, os.rename

    def spy_fsync(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def spy_rename(source, target):
        if os.path.isdir(source):
            renamed.append({name: (Path(source) / name).stat().st_ino for name in names_of(source)})
            assert set(renamed[-1].values()) <= synced, sorted(renamed[-1])
        rename(source, target)

    def names_of(folder):
        return [".", *os.listdir(folder)]

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    monkeypatch.setattr(os, "replace", spy_rename)
    write(tmp_path, 1)
    assert [sorted(inodes) for inodes in renamed] == [
        [".", "manifest.json", "manifest.sha256", STATE]
    ]
    assert tmp_path.stat().st_ino in synced  # the name, too


def test_the_manifest_holds_the_sha256_of_the_data_and_sha256sum_can_check_it(tmp_path):
    path = write(tmp_path, 1)
    digest = hashlib.sha256((path / STATE).read_bytes()).hexdigest()
    assert json.loads((path / "manifest.json").read_text())["files"] == {STATE: digest}
    assert names(path) == ["manifest.json", "manifest.sha256", STATE]
    check = ["sha256sum", "--check", "--status", "manifest.sha256"]
    assert subprocess.run(check, cwd=path).returncode == 0
    scribble(b"{}")(path)
    assert subprocess.run(check, cwd=path).returncode == 1


def test_the_newest_is_the_one_of_the_highest_step(tmp_path):
    for older, newer in [(0, 1), (9, 10), (99_999_999, 100_000_000)]:
        write(tmp_path, newer, 1.0)
        path = write(tmp_path, newer, 2.0)  # again
        later = time.time() + 1000
        os.utime(write(tmp_path, older), (later, later))
        for name in (".tmp-step-999999999", "step-best", f"step-{newer}.old"):
            if not (tmp_path / name).exists():
                shutil.copytree(path, tmp_path / name)
        assert checkpoint.find(tmp_path) == (path, []) and value_of(path) == 2.0


def flip(path, place=-1):
    data = bytearray((path / STATE).read_bytes())
    data[place] ^= 1
    (path / STATE).write_bytes(data)


def cut(path):
    os.truncate(path / STATE, (path / STATE).stat().st_size - 1)


def lose(name):
    return lambda path: (path / name).unlink()


def scribble(text):
    return lambda path: (path / "manifest.json").write_bytes(text)


def replace(old, new):
    """A manifest that is edited, as by hand: still JSON, perhaps with another number."""

    def damage(path):
        text = (path / "manifest.json").read_text()
        assert old in text
        (path / "manifest.json").write_text(text.replace(old, new))

    return damage


def rename(path):
    """A checkpoint of step 1 under the name of step 2."""
    shutil.rmtree(path)
    path.with_name("step-00000001").rename(path)
    write(path.parent, 1)


EDITED = "manifest.json does not match its sha256"
DAMAGE = {
    "last_bit": (flip, f"{STATE} does not match"),
    "cut": (cut, f"{STATE} does not match"),
    "no_data": (lose(STATE), f"{STATE}: No such file"),
    "no_manifest": (lose("manifest.json"), "manifest.json is missing"),
    "no_seal": (lose("manifest.sha256"), "manifest.sha256 is missing"),
    "binary_manifest": (scribble(b"\xff\x00"), EDITED),
    "another_loss": (replace('"loss": 1', '"loss": 3'), EDITED),
    "renamed": (rename, "it is of step 1, whatever its name says"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_is_found(tmp_path, kind):
    damage, says = DAMAGE[kind]
    good, bad = write(tmp_path, 1), write(tmp_path, 2)
    damage(bad)
    assert checkpoint.verify(bad).startswith(says)
    assert checkpoint.find(tmp_path) == (good, [(bad, checkpoint.verify(bad))])


def full_disk(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["save_file", "sha256", "fsync"])
def test_a_failed_write_leaves_no_litter_and_keeps_the_old_one(tmp_path, monkeypatch, call):
    old = write(tmp_path, 1, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, call, full_disk)
        for step in (1, 2):
            with pytest.raises(OSError, match="No space"):
                write(tmp_path, step, 2.0)
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.find(tmp_path) == (old, []) and value_of(old) == 1.0


def test_data_that_changed_on_the_way_to_the_disk_is_an_error(tmp_path, monkeypatch):
    rename = os.rename

    def rename_and_flip(source, target):
        rename(source, target)
        flip(target)

    monkeypatch.setattr(os, "rename", rename_and_flip)
    with pytest.raises(OSError, match=f"written, but {STATE} does not match"):
        write(tmp_path, 1)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in (1, 2, 3, 4, 9):  # the run has done 4 steps: 9 was left out as damaged
        write(tmp_path, step)
    checkpoint.rotate(tmp_path, 2, 4, spared=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]


# where and how often something is written or said, how long it may take; then, and it is said, how
# long the run is, which model is kept and what shares it out
MAY_CHANGE = words(
    "check debug restart same_code reference_logps log_every save_every keep_checkpoints "
    "result_dir out_dir output_dir cache_dir "
    "stop_after_minutes timeout_minutes config deepspeed report_to bucket_mb num_workers "
    "ckpt_interval eval_interval gen_interval summary_interval "
    "max_steps num_epochs train_timesteps save_best "
    "strategy use_fsdp fsdp_config use_deepspeed deepspeed_config"
)


SETTINGS = ["config", "train_config", "prompt_baking.train_config", "dpo_inv.config", "ad.config"]


@pytest.mark.parametrize("module", SETTINGS)
def test_every_other_setting_of_an_unfinished_run_is_refused(module, tmp_path):
    settings = dataclasses.asdict(importlib.import_module(module).Config())
    settings = json.loads(json.dumps(settings))  # no tuples
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "environment.json").write_text("{}")
    write(tmp_path / "checkpoints", 4)
    spec = folder.RunSpec(tmp_path, "--result_dir", 9, {}, 0)
    code = {"code": {}}
    assert folder.inspect(spec, settings, code).verdict == "continue"
    for name in settings.keys() - {"result_dir", "out_dir", "output_dir"}:
        changed = settings | {name: "another"}
        if name in MAY_CHANGE:
            assert folder.inspect(spec, changed, code).verdict == "continue", name
        else:
            with pytest.raises(UserError, match=f"unfinished run .* {name}: .* -> another;"):
                folder.inspect(spec, changed, code)
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert folder.inspect(spec, settings, code).verdict == "finished"
    assert folder.inspect(spec, settings | {"seed": 7}, code).verdict == "aside"
