"""Checkpoints, and whether a run can start or resume in a folder.

A checkpoint appears whole or not at all, and its damage is detected. It is a folder step-N with
safetensors and one manifest, which has the size and the SHA-256 of every file and of itself.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddp_utils import UserError, data, distributed, loggers
from ddp_utils.distributed import World

MANIFEST = "manifest.json"
STATE = "state.safetensors"
ALONE = World()

# settings that change no number, so that they may differ when a run is resumed
FREE = "check debug restart log_every save_every keep_checkpoints cache_dir result_dir out_dir"
FREE += " output_dir stop_after_minutes timeout_minutes config deepspeed report_to bucket_mb"
FREE += " num_workers ckpt_interval eval_interval gen_interval summary_interval"
# these may differ as well, and a line is printed
ANNOUNCED = "max_steps num_epochs train_timesteps save_best strategy use_fsdp fsdp_config"
ANNOUNCED += " use_deepspeed deepspeed_config"
# where these count per process, the inputs have their product with the number of processes
PER_PROCESS = "batch_size micro_batch_size train_batch_size gradient_accumulation_steps"
# parts of the environment that change numbers only by rounding
ROUNDING = ("world_size", "device", "threads", "versions")


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
        with data.write_file(path, target) as file:
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
    damaged: list[tuple[Path, str]] = []
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


# --- the folder of a run -------------------------------------------------------------------------


class RunSpec(NamedTuple):
    """What a run will do, before a model is loaded."""

    folder: Path
    flag: str  # the setting that names the folder
    steps: int  # optimizer steps of the full run
    inputs: dict[str, str]  # name -> digest of everything that the run reads
    bytes_needed: int  # on the disk, at least
    report: dict[str, Any] = {}  # on the data, for data_report.json
    lines: Sequence[str] = ()  # on the data, to print
    model_folder: Path | None = None  # for the model, if not in the run folder
    # keep the weights of the lowest validation loss; None: the script does so by itself
    save_best: bool | None = None
    shard_layout: str = ""  # how ranks split a checkpoint; "": rank 0 writes all of it


class FolderState(NamedTuple):
    """What a folder means for the run that is about to start in it."""

    action: Literal["start", "resume", "move aside", "finished"] = "start"
    lines: Sequence[str] = ()  # to print
    step: int = 0  # of the checkpoint to resume from
    metrics_bytes: int = 0  # size of metrics.jsonl at that checkpoint


def inspect(spec: RunSpec, settings: dict, facts: dict, restart: bool = False) -> FolderState:
    """Compare a folder with the run that is about to start in it; nothing is written.

    settings: as settings_of() returns them; facts: as environment() returns them.
    Raises UserError if the folder cannot be written, or holds a run that cannot be resumed.
    """
    folder = spec.folder
    loggers.check(settings["report_to"])
    check_writable(spec.flag, folder, spec.bytes_needed)
    state = FolderState()
    if (folder / "config.json").exists():
        state = inspect_earlier_run(spec, settings, facts, restart)
    elif (folder / "checkpoints").exists():
        raise UserError(f"{folder}: has checkpoints but no config.json; use another folder")
    if spec.model_folder and state.action != "finished":
        check_model_folder(spec.model_folder, folder, state.action == "resume")
    return state


def inspect_earlier_run(spec: RunSpec, settings: dict, facts: dict, restart: bool) -> FolderState:
    """Compare the run in a folder with one that is about to start; see inspect()."""
    folder = spec.folder
    if (folder / ".lock").exists():
        lock(folder).release()
    saved_facts = read_json(folder / "environment.json")
    summary_file = folder / "summary.json"
    summary = read_json(summary_file) if summary_file.exists() else {}
    free = f"{FREE} {PER_PROCESS}" if "global_batch" in spec.inputs else FREE
    changed = differences(read_json(folder / "config.json"), settings, free.split())
    changed += differences(saved_facts.get("inputs", {}), spec.inputs)
    is_finished = summary.get("status") == "finished"
    # a process that the launcher has started again has the same flags
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_again = is_again and summary.get("run_id") == os.environ.get("TORCHELASTIC_RUN_ID")
    if (restart and not is_again) or (is_finished and changed):
        return FolderState("move aside")
    if is_finished:
        return FolderState("finished")

    path, damaged = find_newest(folder / "checkpoints")
    if damaged and not path:
        raise UserError(
            f"{damaged[0][0]}: {damaged[0][1]}, and there is no intact checkpoint; "
            "use --restart to move this run aside and start from scratch"
        )
    if changed and not path:  # nothing is lost
        return FolderState("move aside")
    check_settings(folder, changed)
    manifest = read_manifest(path) if path else {"step": 0, "metrics_bytes": 0}
    check_length(spec, manifest)
    lines = [f"warning: {bad} is not used: {problem}" for bad, problem in damaged]
    lines += [f"{line}, from here on" for line in changed]
    for line in differences({name: saved_facts.get(name) for name in ROUNDING}, facts):
        lines.append(f"{line}; results are equal up to rounding")
    saved_code = saved_facts.get("code", {})
    edited = [name for name in saved_code if facts["code"].get(name) != saved_code[name]]
    if edited:
        lines.append(f"warning: the code has changed since the last start: {', '.join(edited)}")
    lines.append(f"{folder}: this run is not finished: resumes after step {manifest['step']}")
    return FolderState("resume", lines, manifest["step"], manifest["metrics_bytes"])


def differences(saved: dict, now: dict, free: Sequence[str] = ()) -> list[str]:
    """Return `name: saved -> now` for each value that differs; new names do not count."""
    names = [name for name in saved if name in now and name not in free]
    return [f"{name}: {saved[name]} -> {now[name]}" for name in names if saved[name] != now[name]]


def check_settings(folder: Path, changed: Sequence[str]) -> None:
    """Raise UserError if an unfinished run has other settings that change its numbers."""
    conflicts = []
    for line in changed:
        name = line.partition(":")[0].removeprefix("content of ")
        if name not in ANNOUNCED.split():
            conflicts.append(line)
    if conflicts:
        raise UserError(
            f"{folder} has an unfinished run with other settings: {', '.join(conflicts)}; "
            "use the old ones to resume it, --restart to start from scratch, or another folder"
        )


def check_length(spec: RunSpec, manifest: dict[str, Any]) -> None:
    """Raise UserError if a checkpoint is of a longer run, or of ranks that split it otherwise."""
    step = manifest["step"]
    if step > spec.steps:
        raise UserError(
            f"--max_steps: {spec.folder} has already done {step} steps, expected at most "
            f"{spec.steps}; use a larger number"
        )
    layout = manifest.get("shard_layout")
    if layout and layout != spec.shard_layout:
        raise UserError(
            f"{spec.folder}: each process has saved its own part: {layout}; this run is "
            f"{spec.shard_layout or 'another strategy, or one process'}; "
            "use the same strategy and the same number of processes"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run folder; raise UserError if that fails."""
    try:
        return data.read_json(path)
    except UserError as error:
        raise UserError(f"{error}; move {path.parent} away, or use another folder") from error


def check_writable(flag: str, folder: Path, needed: int = 0) -> None:
    """Raise UserError if `needed` bytes cannot be written to a folder, which may not exist yet.

    Symbolic links are not supported: where others may write, they could lead to other files.
    """
    try:
        has_links = folder.is_symlink() or any(path.is_symlink() for path in folder.glob("*"))
    except OSError as error:  # the name is too long, or the folder cannot be read
        reason = f"{str(folder)[:80]}: {error.strerror}"
        raise UserError(f"{flag}: {reason}; use another folder") from error
    if has_links:
        raise UserError(f"{flag}: {folder} is or has a symbolic link; use another folder")
    parent = folder
    while not (parent.exists() or parent.is_symlink()):
        parent = parent.parent
    if not parent.is_dir():
        raise UserError(f"{flag}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{flag}: {parent} cannot be written; use another folder")
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{flag}: {free >> 20} MiB are free at {parent}, checkpoints and model need "
            f"{needed >> 20}; use a smaller --keep_checkpoints, or another folder"
        )


def check_model_folder(output: Path, folder: Path, is_resumed: bool) -> None:
    """Raise UserError if writing the model to `output` would replace other files."""
    check_writable("--output_dir", output)
    model, target, run = (path.resolve() for path in (folder / "model", output, folder))
    if target != model and (run.is_relative_to(target) or target.is_relative_to(run)):
        raise UserError(f"--output_dir: {output} contains the run, or is in it; use another folder")
    saved = read_json(folder / "config.json").get("output_dir") if is_resumed else None
    if (saved is None or Path(saved) != output) and any(output.glob("*")):
        raise UserError(f"--output_dir: {output} is not empty; use another folder")


def lock(folder: Path) -> FileLock:
    """Lock a folder until this process ends; raise UserError if another process has locked it."""
    held = FileLock(Path(folder) / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise UserError(in_use(folder)) from None
    return held


def in_use(folder: Path) -> str:
    """Return a line that names the run which has locked a folder."""
    who = "another run"
    if (Path(folder) / "environment.json").exists():
        run = read_json(Path(folder) / "environment.json")
        who = f"a run on {run.get('host')} (process {run.get('pid')}, since {run.get('start')})"
    return f"{folder} is in use by {who}; wait until it ends, or use another folder"


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of NAME.1, NAME.2, ..."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.rename(path.with_name(f"{path.name}.{number}"))
