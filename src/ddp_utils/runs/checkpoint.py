"""Checkpoints as folders of safetensors and JSON; files only, no process group.

A folder counts once it has its final name and a manifest whose hashes match: a flipped bit loads
silently, from safetensors as from pickle, so sha256 is the only check. The manifest's own hash
stands beside it.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from ddp_utils import UserError
from ddp_utils.data import fsync, sha256, write_text, writing

MANIFEST = "manifest.json"
STATE = "state.safetensors"
SEAL = "manifest.sha256"  # as sha256sum writes it


def write(folder, step, tensors, meta, shares=None) -> Path:
    """Write folder/step-N: temporary folder, data, manifest last, fsync, rename, verify.

    tensors: name -> tensor; meta: plain data; shares: names and hashes of what the ranks
    have put there already, instead. Raises OSError and leaves no litter if it cannot.
    """
    target = path(folder, step)
    temporary = temporary_of(folder, step)
    with writing(target, temporary, fresh=not shares):
        files = shares or {STATE: put(temporary / STATE, tensors)}
        write_manifest(temporary, {**meta, "step": step, "files": files})
        for name in files:  # safetensors lets the owner alone read its files
            shutil.copymode(temporary / MANIFEST, temporary / name)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
        fsync(target.parent)
    problem = verify(target)
    if problem:
        raise OSError(f"{target}: written, but {problem}")
    return target


def temporary_of(folder, step):
    return path(folder, step).with_name(f".tmp-{path(folder, step).name}")


def put(file, tensors):
    """Write safetensors to the disk, past all caches; returns its hash."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, file)
    fsync(file)
    return sha256(file)


def path(folder, step) -> Path:
    """Where the checkpoint of this step is, or would be."""
    return Path(folder) / f"step-{step:08d}"


def write_manifest(folder, content):
    """Write plain data as the manifest of a folder, and its hash beside it."""
    text = json.dumps(content, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(Path(folder) / MANIFEST, text)
    write_text(Path(folder) / SEAL, f"{digest}  {MANIFEST}\n")
    fsync(folder)


def read_manifest(folder) -> dict:
    """The manifest of a folder; ValueError says what is wrong with it."""
    for name in (MANIFEST, SEAL):
        if not (Path(folder) / name).is_file():
            raise ValueError(f"{name} is missing")
    text = (Path(folder) / MANIFEST).read_bytes()
    seal = (Path(folder) / SEAL).read_bytes()
    if seal != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
        raise ValueError(f"{MANIFEST} does not match its sha256")
    return json.loads(text)


def verify(path):
    """None if the checkpoint is whole, else what is wrong with it."""
    path = Path(path)
    try:
        content = read_manifest(path)
        if content["step"] != number(path):
            return f"it is of step {content['step']}, whatever its name says"
        for name, digest in content["files"].items():
            if Path(name).name != name:
                return f"{MANIFEST} names {name}, which is not in its folder"
            if sha256(path / name) != digest:
                return f"{name} does not match its sha256"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    return None


def find(folder):
    """(newest checkpoint that verifies or None, [(path, why it was skipped), ...])."""
    skipped = []
    for path in sorted(numbered(folder), key=number, reverse=True):
        problem = verify(path)
        if problem is None:
            return path, skipped
        skipped.append((path, problem))
    return None, skipped


def read(path, rank=0):
    """(tensors, manifest) of a checkpoint; the tensors are mapped, not yet in memory.

    rank: whose part, where each has its own.
    """
    meta = read_manifest(path)
    file = sorted(meta["files"])[rank if meta.get("shares") else 0]
    return load_file(Path(path) / file), meta


def manifest_hash(path) -> str:
    """What names this checkpoint's content: the sha256 of its manifest, which holds the others."""
    return sha256(Path(path) / MANIFEST)


def rotate(folder, keep, step, spared=None):
    """Remove all but the newest `keep` checkpoints up to `step`, and what killed writes have left.

    Later ones were left out as damaged. spared: a step whose checkpoint stays.
    """
    ordered = sorted(numbered(folder), key=lambda path: (number(path) <= step, number(path)))
    old = [path for path in ordered[:-keep] if number(path) != spared]
    for path in (*old, *Path(folder).glob(".tmp-step-*")):
        shutil.rmtree(path, ignore_errors=True)


def numbered(folder):
    return [path for path in Path(folder).glob("step-*") if path.name[5:].isdecimal()]


def number(path) -> int:
    """The steps done at a checkpoint."""
    return int(path.name[5:])


def read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    except (OSError, ValueError):
        pass
    raise UserError(f"{path}: cannot be read; move {path.parent} away, or give another folder")


def check_place(flag, folder, needed=0):
    """Raise UserError if `needed` bytes cannot be written into a folder that may yet be made."""
    # where others may write, a link could lead what we write to the user's own files
    try:
        links = [path for path in (folder, *folder.glob("*")) if path.is_symlink()]
    except OSError as error:  # too long, or not to be read
        named = f"{flag}: {str(folder)[:80]}"
        raise UserError(f"{named}: {error.strerror}; give another folder") from error
    if links:
        raise UserError(f"{flag}: {links[0]} is a symbolic link; give a folder without any")
    place = folder
    while not (place.exists() or place.is_symlink()):
        place = place.parent
    if not place.is_dir():
        raise UserError(f"{flag}: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{flag}: {place} cannot be written; give another folder")
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{flag}: {free >> 20} MiB are free at {place}, checkpoints and model need "
            f"{needed >> 20}; a smaller --keep_checkpoints, or another folder"
        )
