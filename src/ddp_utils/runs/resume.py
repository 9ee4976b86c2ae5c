"""A run folder that exists: finished, to be continued, to be moved aside, or not to be touched."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ddp_utils import UserError
from ddp_utils.runs import checkpoint

# settings that change no number, so that they may change between two lives of a run
FREE = {"check", "debug", "restart", "same_code", "reference_logps"}
FREE |= {"log_every", "save_every", "keep_checkpoints"}
FREE |= {"result_dir", "out_dir", "output_dir", "stop_after_minutes", "timeout_minutes"}
FREE |= {"config", "deepspeed", "report_to", "bucket_mb", "num_workers"}
FREE |= {"ckpt_interval", "eval_interval", "gen_interval", "summary_interval"}
# length, strategy and which model is kept may change too, and it is said
SAID = {"max_steps", "num_epochs", "train_timesteps", "save_best"}
SAID |= {"strategy", "use_fsdp", "fsdp_config", "use_deepspeed", "deepspeed_config"}
SAID |= {"content of fsdp_config", "content of deepspeed_config"}


class RunSpec(NamedTuple):
    """What a run will do, known before a model is loaded."""

    folder: Path
    flag: str  # that names the folder
    steps: int  # optimizer steps of the whole run
    inputs: dict  # name -> digest, of all that it reads
    bytes_needed: int  # that it will write at the least
    report: dict = {}  # of the data, for data_report.json
    lines: list = []  # on the data, for people
    model_folder: Path | None = None  # for the model, if not in the run folder
    save_best: bool | None = None  # whether the best weights are kept; None: the script sees to it
    tensorboard: bool = True
    shares: str = ""  # of a checkpoint, as Strategy.shares() says


class FolderState(NamedTuple):
    """What a run folder means for a run that is about to start in it."""

    verdict: str  # new, continue, aside (move it), or finished
    lines: list = []  # to say
    checkpoint: Path | None = None  # to continue from


def inspect(spec, settings, code, restart=False, same_code=False) -> FolderState:
    """Look at the folder of a run with these settings; nothing is written.

    settings: config.json as it would be written; code: file -> digest, of the project. Raises
    UserError for a place that cannot be written, a run that is going on, an unfinished one with
    other settings or of other code, and one whose checkpoints are all damaged.
    """
    folder = spec.folder
    checkpoint.check_place(spec.flag, folder, spec.bytes_needed)
    state = _verdict(folder, settings, spec.inputs, {} if same_code else code, restart)
    if spec.model_folder and state.verdict != "finished":
        check_output(spec.model_folder, folder, state.verdict == "continue")
    if state.checkpoint and checkpoint.number(state.checkpoint) > spec.steps:
        done = checkpoint.number(state.checkpoint)
        raise UserError(
            f"--max_steps: {folder} has done {done} steps already, more than {spec.steps}"
        )
    return state


def check_output(output, folder, continued):
    """Raise UserError if the model, which replaces what is in `output`, would replace more."""
    checkpoint.check_place("--output_dir", output)
    model, place, run = (path.resolve() for path in (folder / "model", output, folder))
    if place != model and (run.is_relative_to(place) or place.is_relative_to(run)):
        raise UserError(f"--output_dir: {output} holds the run, or is in it; give another folder")
    before = checkpoint.read_json(folder / "config.json").get("output_dir") if continued else None
    if (before is None or Path(before) != output) and any(output.glob("*")):
        raise UserError(f"--output_dir: {output} is not empty; give another folder")


def _verdict(folder, settings, inputs, code, restart):
    checkpoints = folder / "checkpoints"
    if not (folder / "config.json").exists():
        if checkpoints.exists():
            raise UserError(f"{folder}: has checkpoints and no config.json; give another folder")
        return FolderState("new")
    if (folder / ".lock").exists():
        lock(folder).release()
    # where these count per process, their product with the world size is among the inputs
    split = {"batch_size", "micro_batch_size", "train_batch_size", "gradient_accumulation_steps"}
    split = split if "global_batch" in inputs else set()
    changed = differences(checkpoint.read_json(folder / "config.json"), settings, FREE | split)
    before = checkpoint.read_json(folder / "environment.json")
    changed += differences(before.get("inputs", {}), inputs)
    edited = [line.partition(":")[0] for line in differences(before.get("code", {}), code)]
    finished = read_json(folder).get("status") == "finished"
    if restart or (finished and (changed or edited)):
        return FolderState("aside")
    if finished:
        return FolderState("finished")
    path, skipped = checkpoint.find(checkpoints)
    lines = [f"warning: {bad} is left out: {why}" for bad, why in skipped]
    if not path and skipped:
        raise UserError(
            f"{skipped[0][0]}: {skipped[0][1]}, and no other checkpoint is whole; "
            "--restart moves this run aside and begins a new one"
        )
    if not path:  # nothing would be lost
        return FolderState("aside" if changed or edited else "continue", lines)
    if edited:
        raise UserError(
            f"{folder} holds an unfinished run of other code: {', '.join(edited)} changed; "
            "--restart begins anew, --same_code goes on, if the change moves no number"
        )
    refused = [line for line in changed if line.split(":")[0] not in SAID]
    if refused:
        raise UserError(
            f"{folder} holds an unfinished run with other settings: {', '.join(refused)}; "
            "give the old ones to go on, --restart to begin anew, or another folder"
        )
    return FolderState("continue", lines + [f"{line}, from here on" for line in changed], path)


def read_json(folder, name="summary.json") -> dict:
    """The object in summary.json, or in another file of the folder; or nothing."""
    with contextlib.suppress(UserError):
        return checkpoint.read_json(Path(folder) / name)
    return {}


def lock(folder):
    """Hold the folder for this process; freed by its death, however that comes."""
    held = FileLock(Path(folder) / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise UserError(going_on(folder)) from None
    return held


def move_aside(folder) -> Path:
    """Rename the folder to the first free of NAME.1, NAME.2, ..."""
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def going_on(folder) -> str:
    """Whose run holds the folder."""
    who = "another run"
    if (Path(folder) / "environment.json").exists():
        run = checkpoint.read_json(Path(folder) / "environment.json")
        who = f"a run on {run.get('host')} (process {run.get('pid')}, since {run.get('start')})"
    return f"{folder} is in use by {who}; wait for it, or give another folder"


def differences(saved, now, free=frozenset()):
    """`name: saved -> now` of all that differ; a setting that is new is no difference."""
    names = [name for name in saved if name in now and name not in free]
    return [f"{name}: {saved[name]} -> {now[name]}" for name in names if saved[name] != now[name]]
