"""Checkpoints as folders of safetensors and JSON; files only, no process group.

A folder counts once it has its final name and a manifest whose hashes match: a flipped bit loads
silently, from safetensors as from pickle, so sha256 is the only check.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

MANIFEST, STATE = "manifest.json", "state.safetensors"


def write(folder, step, tensors, meta, shares=None) -> Path:
    """Write folder/step-N: temporary folder, data, manifest last, fsync, rename, verify.

    tensors: name -> tensor; meta: plain data; shares: names and hashes of what write_share() has
    put there already, instead. Raises OSError and leaves no litter if it cannot.
    """
    target = path(folder, step)
    temporary = _temporary(folder, step)
    with writing(target, temporary, fresh=not shares):
        files = shares or {STATE: _put(temporary / STATE, tensors)}
        manifest = {**meta, "step": step, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for name in files:  # safetensors lets the owner alone read its files
            shutil.copymode(temporary / MANIFEST, temporary / name)
        for name in (MANIFEST, "."):
            _fsync(temporary / name)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        _fsync(target.parent)
    if problem := verify(target):
        raise OSError(f"{target}: written, but {problem}")
    return target


def write_share(folder, step, tensors, rank, world_size):
    """A rank's part of a checkpoint, which write() completes: its name and hash.

    Rank 0 has called clear() before.
    """
    target, temporary = path(folder, step), _temporary(folder, step)
    name = STATE.replace(".", f"-{rank:05d}-of-{world_size:05d}.")
    with writing(target, temporary, fresh=False):
        return name, _put(temporary / name, tensors)


def clear(folder, step):
    """An empty place for the parts of a checkpoint."""
    with writing(path(folder, step), _temporary(folder, step)):
        _temporary(folder, step).mkdir(parents=True)


def _temporary(folder, step):
    return path(folder, step).with_name(f".tmp-{path(folder, step).name}")


def _put(file, tensors):
    """Write safetensors to the disk, past all caches; returns its hash."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, file)
    _fsync(file)
    return _sha256(file)


@contextlib.contextmanager
def writing(target, temporary, fresh=True):
    """What is written to `temporary` first leaves no litter; errors of the disk name the target.

    fresh: whatever is there already goes.
    """
    if fresh:
        shutil.rmtree(temporary, ignore_errors=True)
    if temporary.is_symlink():  # rmtree leaves it, and what is written would go where it leads
        temporary.unlink()
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        number = getattr(error, "errno", None) or re.search(r"os error (\d+)|$", str(error))[1]
        if not number:
            raise
        raise OSError(int(number), os.strerror(int(number)), str(target)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def path(folder, step) -> Path:
    """Where the checkpoint of this step is, or would be."""
    return Path(folder) / f"step-{step:08d}"


def verify(path):
    """None if the checkpoint is whole, else what is wrong with it."""
    path = Path(path)
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name, digest in files.items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name}, which is not in its folder"
            if _sha256(path / name) != digest:
                return f"{name} does not match its sha256"
        if not files:
            return f"{MANIFEST} does not name {STATE}"
        for name in files:
            with safe_open(path / name, framework="pt"):  # reads the header
                pass
    except SafetensorError:
        return f"{name} is not a safetensors file"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def find(folder):
    """(newest checkpoint that verifies or None, [(path, why it was skipped), ...])."""
    skipped = []
    for path in sorted(_numbered(folder), key=number, reverse=True):
        problem = verify(path)
        if problem is None:
            return path, skipped
        skipped.append((path, problem))
    return None, skipped


def read(path, rank=0):
    """(tensors, manifest) of a checkpoint; the tensors are mapped, not yet in memory.

    rank: whose part, where each has its own.
    """
    meta = manifest(path)
    return load_file(Path(path) / sorted(meta["files"])[rank if meta.get("shares") else 0]), meta


def manifest(path) -> dict:
    """What is known of a checkpoint beside its tensors."""
    return json.loads((Path(path) / MANIFEST).read_text())


def mark(path) -> str:
    """What names this checkpoint's content: the sha256 of its manifest, which holds the others."""
    return _sha256(Path(path) / MANIFEST)


def rotate(folder, keep, step, spared=None):
    """Remove all but the newest `keep` checkpoints up to `step`, and what killed writes have left.

    Later ones were left out as damaged. spared: a step whose checkpoint stays.
    """
    found = sorted(_numbered(folder), key=lambda path: (number(path) <= step, number(path)))
    old = [path for path in found[:-keep] if number(path) != spared]
    for path in (*old, *Path(folder).glob(".tmp-step-*")):
        shutil.rmtree(path, ignore_errors=True)


def _numbered(folder):
    return [path for path in Path(folder).glob("step-*") if path.name[5:].isdecimal()]


def number(path) -> int:
    """The steps done at a checkpoint."""
    return int(path.name[5:])


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
