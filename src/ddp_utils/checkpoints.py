"""Checkpoints: folders that appear whole or not at all, and whose damage is detected.

Each is a folder step-N with safetensors and one manifest, which has the size and the SHA-256 of
every file and of itself. A flipped bit loads silently otherwise.
"""

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddp_utils import UserError, data, distributed
from ddp_utils.distributed import World

MANIFEST = "manifest.json"
STATE = "state.safetensors"
ALONE = World()


def write(
    folder: str | Path,
    step: int,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    world: World = ALONE,
    is_sharded: bool = False,
) -> Path:
    """Write folder/step-N atomically; all ranks must call this.

    tensors: on rank 0 the full state; if it is sharded, on each rank its own part.
    facts: plain data for the manifest. On an error nothing is left behind.
    """
    target = path_of(folder, step)
    temporary = data.temporary_of(target)
    names = [STATE]
    if is_sharded:
        ranks = range(world.world_size)
        names = [f"state-{rank:05d}-of-{world.world_size:05d}.safetensors" for rank in ranks]

    def write_own_file() -> str:
        if world.rank >= len(names):
            return ""
        path = temporary / names[world.rank]
        with data.write_file(path) as file:
            save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, file)
        return data.sha256(path)

    # the folder is open on rank 0 until all ranks have written their files
    with contextlib.ExitStack() as stack:
        distributed.on_main(world, lambda: str(stack.enter_context(data.write_folder(target))))
        digest = distributed.on_each(world, write_own_file)
        digests = gather_digests(digest, world) if is_sharded else [digest]

        def finish() -> None:
            files = {}
            for name, digest in zip(names, digests, strict=True):
                size = (temporary / name).stat().st_size
                files[name] = {"size": size, "sha256": digest}
            write_manifest(temporary, {**facts, "step": step, "files": files})
            stack.close()

        distributed.on_main(world, finish)
    return target


def gather_digests(digest: str, world: World) -> list[str]:
    """Return the SHA-256 of every rank's file on all ranks."""
    table = torch.zeros(world.world_size, 32, device=world.device)
    table[world.rank] = torch.tensor([*bytes.fromhex(digest)], dtype=torch.float32)
    return [bytes(row).hex() for row in distributed.all_sum(table, world).byte().tolist()]


def path_of(folder: str | Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return Path(folder) / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write plain data and its own SHA-256 into a folder."""
    data.write_json(folder / MANIFEST, {**content, "sha256": digest_of(content)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder; raise ValueError if it is missing or damaged."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        content = json.loads(path.read_bytes())
        is_intact = content.pop("sha256") == digest_of(content)
    except (ValueError, KeyError, AttributeError, TypeError):  # not JSON, or not an object
        is_intact = False
    if not is_intact:
        raise ValueError(f"{MANIFEST} does not match its SHA-256")
    return content


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is intact."""
    try:
        manifest = read_manifest(path)
        if manifest["step"] != step_of(path):
            return f"it was written after step {manifest['step']} and renamed"
        for name, file in manifest["files"].items():
            if (path / name).stat().st_size != file["size"]:
                return f"{name} does not have its size"
            if data.sha256(path / name) != file["sha256"]:
                return f"{name} does not match its SHA-256"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    return None


def find_newest(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint, and newer ones with what is wrong with them."""
    damaged = []
    for path in sorted(all_in(folder), key=step_of, reverse=True):
        problem = find_problem(path)
        if problem is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def read(path: Path, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and its manifest.

    rank: whose file is read, if each rank has its own.
    """
    manifest = read_manifest(path)
    names = sorted(manifest["files"])
    return load_file(path / names[rank if len(names) > 1 else 0]), manifest


def remove_old(folder: Path, keep: int, step: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the one of the best step.

    step: the newest intact checkpoint; later ones are damaged and go first.
    """
    ordered = sorted(all_in(folder), key=lambda path: (step_of(path) <= step, step_of(path)))
    old = [path for path in ordered[:-keep] if step_of(path) != best]
    for path in (*old, *Path(folder).glob(".tmp-step-*")):
        shutil.rmtree(path, ignore_errors=True)


def all_in(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a folder, in no order."""
    paths = Path(folder).glob("step-*")
    return [path for path in paths if path.name.removeprefix("step-").isdecimal()]


def check_visible(path: Path, world: World) -> None:
    """Raise UserError unless this rank sees the checkpoint that rank 0 sees."""

    def read_own() -> str:
        manifest = path / MANIFEST
        return manifest.read_text(encoding="utf-8") if manifest.is_file() else ""

    if read_own() != distributed.on_main(world, read_own):
        raise UserError(
            f"{path}: rank {world.rank} does not see the checkpoint that rank 0 sees; "
            "the run folder must be on a disk that all nodes can read"
        )
