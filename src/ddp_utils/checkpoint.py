"""Checkpoints as folders of safetensors and JSON; files only, no process group.

A folder counts once it has its final name and a manifest whose hashes match: a flipped bit loads
silently, from safetensors as from pickle, so sha256 is the only check.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

MANIFEST, STATE = "manifest.json", "state.safetensors"


def write(folder, step, tensors, meta) -> Path:
    """Write folder/step-N: temporary folder, data, manifest last, fsync, rename, verify.

    tensors: name -> tensor; meta: plain data. Raises OSError and leaves no litter if it cannot.
    """
    target = Path(folder) / f"step-{step:08d}"
    temporary = target.with_name(f".tmp-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        plain = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file(plain, temporary / STATE)
        files = {STATE: _sha256(temporary / STATE)}
        manifest = {**meta, "step": step, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for name in (*files, MANIFEST, "."):
            _fsync(temporary / name)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if problem := verify(target):
        raise OSError(f"{target}: written, but {problem}")
    return target


def verify(path):
    """None if the checkpoint is whole, else what is wrong with it."""
    path = Path(path)
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name, digest in files.items():
            if _sha256(path / name) != digest:
                return f"{name} does not match its sha256"
        if STATE not in files:
            return f"{MANIFEST} does not name {STATE}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


def find(folder):
    """(newest checkpoint that verifies or None, [(path, why it was skipped), ...])."""
    skipped = []
    found = (path for path in Path(folder).glob("step-*") if path.name[5:].isdecimal())
    for path in sorted(found, key=lambda path: int(path.name[5:]), reverse=True):
        problem = verify(path)
        if problem is None:
            return path, skipped
        skipped.append((path, problem))
    return None, skipped


def read(path):
    """(tensors, manifest) of a checkpoint."""
    manifest = json.loads((Path(path) / MANIFEST).read_text())
    return load_file(Path(path) / STATE), manifest


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
