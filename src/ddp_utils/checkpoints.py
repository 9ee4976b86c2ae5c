"""Checkpoints, and whether a run can start or resume in a folder.

A checkpoint appears whole or not at all, and its damage is detected. It is a folder step-N with
safetensors and one manifest, which has the size and the SHA-256 of every file and of itself.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddp_utils import UserError, data, distributed, start_of
from ddp_utils.distributed import World

MANIFEST = "manifest.json"
STATE = "state.safetensors"
CLAIM = "parts/model.json"  # of a run that has saved its model in a folder of its own
ALONE = World()

# settings that change no number, so that they may differ when a run is resumed, and between ranks
LOCAL = """check debug restart log_every keep_checkpoints cache_dir result_dir out_dir output_dir
stop_after_minutes timeout_minutes config deepspeed report_to"""
# these must be equal on all ranks, which save, evaluate and sample together
FREE = f"""{LOCAL} save_every bucket_mb ckpt_interval eval_interval gen_interval summary_interval
test_batch_size sample_batch_size"""
# these may differ as well, and a line is printed
ANNOUNCED = """max_steps num_epochs train_timesteps save_best judge num_samples strategy
use_fsdp fsdp_config use_deepspeed deepspeed_config sharding_config"""
# where these count per process, the inputs have their product with the number of processes
PER_PROCESS = "batch_size micro_batch_size train_batch_size gradient_accumulation_steps"
# parts of the environment that change numbers only by rounding
ROUNDING = ("world_size", "device", "threads", "versions")


def write(
    folder: Path, step: int, tensors: dict[str, Tensor], facts: dict[str, Any], world: World = ALONE
) -> Path:
    """Write folder/step-N atomically; all ranks must call this.

    tensors: on rank 0 the full state, or on each rank its own part if there is a `shard_layout`.
    facts: plain data for the manifest. On an error nothing is left behind.
    """
    target = path_of(folder, step)
    temporary = data.temporary_of(target)
    names = [STATE]
    if facts.get("shard_layout"):
        ranks = range(world.world_size)
        names = [f"state-{rank:05d}-of-{world.world_size:05d}.safetensors" for rank in ranks]
    digests = torch.zeros(world.world_size, 32, device=world.device)  # SHA-256 of each rank's file

    def write_own_file() -> None:
        if world.rank < len(names):
            path = temporary / names[world.rank]
            with data.write_file(path) as file:
                save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, file)
            digests[world.rank] = torch.tensor([*bytes.fromhex(data.sha256(path))])

    # rank 0 creates the folder before all ranks write their files, and renames it afterwards
    with contextlib.ExitStack() as stack:
        distributed.on_main(world, lambda: str(stack.enter_context(data.write_folder(target))))
        distributed.on_each(world, write_own_file)
        gathered = distributed.all_sum(digests, world).byte().tolist()

        def finish() -> None:
            files = {}
            for name, digest in zip(names, gathered, strict=False):
                size = (temporary / name).stat().st_size
                files[name] = {"size": size, "sha256": bytes(digest).hex()}
            write_manifest(temporary, {**facts, "step": step, "files": files})
            stack.close()

        distributed.on_main(world, finish)
    return target


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of steps that were done when a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write plain data and its own SHA-256 into a folder."""
    data.write_json(folder / MANIFEST, {**content, "sha256": digest_of(content)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder; raise ValueError if it is damaged."""
    content = json.loads((folder / MANIFEST).read_bytes())
    if content.pop("sha256") != digest_of(content):
        raise ValueError
    return content


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_problem(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is intact."""
    try:
        files = read_manifest(path)["files"]
        with ThreadPoolExecutor() as pool:  # at once, since there may be one file per rank
            digests = [*pool.map(data.sha256, [path / name for name in files])]
        for name, digest in zip(files, digests, strict=True):
            if digest != files[name]["sha256"]:
                return f"{name} does not match its SHA-256"
    except (ValueError, KeyError, AttributeError, TypeError):  # not JSON, or other content
        return f"{MANIFEST} does not match its SHA-256"
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    return None


def find_newest(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest intact checkpoint, and newer ones with what is wrong with them."""
    damaged: list[tuple[Path, str]] = []
    for path in reversed(all_in(folder)):
        problem = find_problem(path)
        if problem is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def read(path: Path, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and its manifest.

    rank: whose file is read, if each rank has its own.
    """
    check_seen(path, rank)
    manifest = read_manifest(path)
    names = sorted(manifest["files"])
    return load_file(path / names[rank if len(names) > 1 else 0]), manifest


def check_alike(main: dict, own: dict, rank: int) -> None:
    """Raise UserError if a rank has other settings, data or code than rank 0, as on another node.

    main, own: name -> value, of rank 0 and of this rank.
    """
    lines = [*differences(main, own, LOCAL.split()).values()]
    if lines:
        problem = f"differs from rank 0: {', '.join(lines[:3])}"
        raise UserError(f"rank {rank} {problem}; use one command, and the same files, on all nodes")


def check_seen(path: Path, rank: int) -> None:
    """Raise UserError if this rank does not see a folder that rank 0 sees."""
    if not path.exists():
        problem = f"{path}: rank {rank} does not see the folder that rank 0 sees"
        raise UserError(f"{problem}; use a run folder on a disk that all nodes can read")


def remove_old(folder: Path, keep: int, step: int, best: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the one of the best step.

    step: the newest intact checkpoint; later ones are damaged and are removed as well.
    """
    paths = all_in(folder)
    kept = [path for path in paths if step_of(path) <= step][-keep:]
    old = [path for path in paths if path not in kept and step_of(path) != best]
    for path in (*old, *folder.glob(".tmp-step-*")):
        shutil.rmtree(path, ignore_errors=True)


def all_in(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a folder, the oldest first."""
    return sorted(folder.glob("step-" + 8 * "[0-9]"))


# --- the folder of a run -------------------------------------------------------------------------


class RunSpec(NamedTuple):
    """What a run will do, before a model is loaded."""

    folder: Path
    steps: int  # optimizer steps of the full run
    inputs: dict[str, str]  # name -> digest of everything that the run reads
    report: dict[str, Any] = {}  # on the data, for data_report.json
    lines: Sequence[str] = ()  # on the data, to print
    log_every: int = 1  # steps between printed lines; 0: about 30 lines in all
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
    folder = target_of(spec.folder)
    check_writable("run folder", folder)
    if not (folder / "config.json").exists():
        if (folder / "checkpoints").exists():
            raise UserError(f"{folder}: has checkpoints but no config.json; use another folder")
        check_model_folder(spec)
        return FolderState()
    saved = data.read_json(folder / "config.json")
    saved_facts = data.read_json(folder / "environment.json")
    free = FREE.split()
    if "global_batch" in spec.inputs:
        free += PER_PROCESS.split()
    changed = differences(saved, settings, free)
    changed |= differences(saved_facts.get("inputs", {}), spec.inputs)
    is_finished = data.read_json(folder / "summary.json").get("status") == "finished"
    is_new = restart and not is_started_again(saved_facts, facts)
    is_new = is_new or (is_finished and bool(changed))
    if is_finished and not is_new:
        line = f"{folder}: this run is already finished (same settings and data)"
        return FolderState("finished", [line])
    path, damaged = find_newest(folder / "checkpoints")
    problems = [f"{bad} is not used: {problem}" for bad, problem in damaged]
    conflicts = [line for name, line in changed.items() if name not in ANNOUNCED.split()]
    if is_new or (conflicts and not path and not damaged):
        check_inputs_stay(folder, settings)
        check_model_folder(spec)  # the earlier run is moved aside, but not its model
        return FolderState("move aside")
    if damaged and not path:
        raise UserError(f"{problems[0]}; no checkpoint is intact; use --restart to start again")
    if not has_claimed(spec):
        check_model_folder(spec)
    manifest = read_manifest(path) if path else {"step": 0, "metrics_bytes": 0}
    step, layout = manifest["step"], manifest.get("shard_layout")
    if step > spec.steps:
        conflicts.append(f"max_steps: {step} are done -> {spec.steps}")
    # FSDP can also read one file, DeepSpeed cannot
    has_parts = layout or (path and spec.shard_layout.startswith("ZeRO"))
    if has_parts and layout != spec.shard_layout:
        parts = f"{layout or 'one file'} -> {spec.shard_layout or 'one file'}"
        conflicts.append(f"parts of a checkpoint: {parts}")
    if conflicts:
        raise UserError(
            f"{folder} has an unfinished run with other settings: {', '.join(conflicts)}; "
            "use the old ones to resume it, --restart to start from scratch, or another folder"
        )
    lines = [f"warning: {problem}" for problem in problems]
    lines += [f"{line}, from here on" for line in changed.values()]
    for name, line in differences(saved_facts, facts).items():
        if name in ROUNDING:
            lines.append(f"{line}; results are equal up to rounding")
    saved_code = saved_facts.get("code", {})
    edited = [name for name in saved_code if facts["code"].get(name) != saved_code[name]]
    if edited:
        lines.append(f"warning: the code has changed since the last start: {', '.join(edited)}")
    lines.append(f"{folder}: this run is not finished: resumes after step {step}")
    return FolderState("resume", lines, step, manifest["metrics_bytes"])


def start_facts() -> dict[str, Any]:
    """Return what has started this process: its launcher, if that restarts ranks, and its job.

    A launcher's own name for a launch is often the same for all launches; its process is not.
    """
    started_by = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        started_by = f"{platform.node()} {parent} {start_of(parent)}"
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    # PBS has no such variable; the job scripts of this project export one
    restarts = os.environ.get("SLURM_RESTART_COUNT", os.environ.get("PBS_RESTART_COUNT", "0"))
    return {
        "started_by": started_by,
        "job": job,
        "job_restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def is_started_again(saved: dict, now: dict) -> bool:
    """Return whether a launcher, Slurm or PBS has started a run again, with the same flags.

    saved: start_facts() of its last start, with others, as in environment.json; now: of this one.
    """
    by_launcher = now.get("started_by") and saved.get("started_by") == now["started_by"]
    by_scheduler = now.get("job_restarts") and saved.get("job") == now["job"]
    return bool(by_launcher or by_scheduler)


def differences(saved: dict, now: dict, free: Sequence[str] = ()) -> dict[str, str]:
    """Return name -> `name: saved -> now` of each value that differs; new names do not count."""
    lines = {}
    for name, value in saved.items():
        if name in now and name not in free and value != now[name]:
            lines[name.removeprefix("content of ")] = f"{name}: {value} -> {now[name]}"
    return lines


def target_of(folder: Path) -> Path:
    """Return the folder that a symbolic link of this user leads to; any other path as it is.

    Clusters keep large files on a disk of their own, to which a run folder may be linked.
    """
    is_own = os.path.islink(folder) and folder.lstat().st_uid == os.getuid()
    return Path(os.path.realpath(folder)) if is_own else folder


def check_writable(place: str, folder: Path) -> None:
    """Raise UserError if a folder, which may not exist yet, cannot be written.

    Symbolic links are not supported: where others may write, they could lead to other files.
    place: what errors begin with, such as the flag that names the folder.
    """
    try:
        links = [path for path in (folder, *folder.glob("*")) if path.is_symlink()]
        parent = folder
        while not (parent.exists() or parent.is_symlink()):
            parent = parent.parent
    except OSError as error:  # the name is too long, or the folder cannot be read
        problem = f"{str(folder)[:80]}: {error.strerror}"
        raise UserError(f"{place}: {problem}; use another folder") from error
    if links:
        reason = "a symbolic link, which could lead to files of other people"
        raise UserError(f"{place}: {links[0]} is {reason}; use what it leads to, or another folder")
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = data.broken_link(parent) or f"{parent} is not a folder that you can write"
        raise UserError(f"{place}: {problem}; use another one")


def check_model_folder(spec: RunSpec) -> None:
    """Raise UserError if writing the model to its own folder would replace other files."""
    if not spec.model_folder:
        return
    output = spec.model_folder
    check_writable("--output_dir", output)
    model, target, run = (p.resolve() for p in (spec.folder / "model", output, spec.folder))
    if target != model and (run.is_relative_to(target) or target.is_relative_to(run)):
        raise UserError(f"--output_dir: {output} contains the run, or is in it; use another folder")
    if any(output.glob("*")):
        raise UserError(f"--output_dir: {output} is not empty; use another folder")


def has_claimed(spec: RunSpec) -> bool:
    """Return whether the model in the folder is that of an earlier start of this run."""
    path, folder = target_of(spec.folder) / CLAIM, spec.model_folder
    if folder is None or not folder.exists() or not path.exists():
        return False
    return data.read_json(path) == claim_of(folder)


def claim_of(folder: Path) -> dict[str, int]:
    """Return what identifies a saved model; a folder that replaces it may have the same name."""
    return {"inode": folder.stat().st_ino}


def check_inputs_stay(folder: Path, settings: dict) -> None:
    """Raise UserError if the new run reads files of the earlier run, which is moved aside."""
    for name, value in settings.items():
        is_inside = folder.resolve() in data.resolve(str(value)).resolve().parents
        if is_inside and name != "output_dir":  # which may be the folder `model` of the run
            problem = f"--{name}: {value} is in {folder}, which would be renamed"
            raise UserError(f"{problem}; use another folder for the new run")


def lock(folder: Path) -> FileLock:
    """Lock a folder until this process ends; raise UserError if another process has locked it."""
    held = FileLock(folder / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        where = f"its host and process are in {folder}/environment.json"
        fix = f"if it has ended, remove {folder}/.lock"  # left by a node without locks of files
        raise UserError(f"{folder} is in use by another run; {where}; {fix}") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # NFS without lockd
            raise
        problem = f"{folder}: this disk has no locks of files ({error.strerror})"
        raise UserError(f"{problem}; use a run folder on another disk") from error
    return held


def move_aside(path: Path) -> Path:
    """Rename a file or folder to the first free name of NAME.1, NAME.2, ..."""
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    target = path.with_name(f"{path.name}.{number}")
    try:
        return path.rename(target)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV):
            raise  # EBUSY: another disk is mounted there
        problem = f"cannot be moved to {target} ({error.strerror})"
        raise UserError(f"{path}: {problem}; use another folder") from error
