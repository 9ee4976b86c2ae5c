"""The folder of a run: whether it can be written, who holds it, and what run it has already."""

from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ddp_utils import UserError, loggers
from ddp_utils.runs import checkpoint


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
    shares: str = ""  # of a checkpoint, as Strategy.shares() says


class FolderState(NamedTuple):
    """What a run folder means for a run that is about to start in it."""

    verdict: str = "new"  # or continue, aside (move it), finished
    lines: list = []  # to say
    checkpoint: Path | None = None  # to continue from, and its manifest
    manifest: dict = {"step": 0, "metrics_bytes": 0}
    cached_files: dict = {}  # as resume.cached_files() returns them


def inspect(spec, settings, described, restart=False, same_code=False) -> FolderState:
    """Look at the folder of a run with these settings; nothing is written.

    settings: config.json as it would be written; described: environment.json, of which "code", file
    -> digest, must be there. Raises UserError for a place that cannot be written, and what
    resume.inspect() raises for a run that is there.
    """
    folder = spec.folder
    loggers.check(settings["report_to"])
    checkpoint.check_place(spec.flag, folder, spec.bytes_needed)
    state = FolderState()
    if (folder / "config.json").exists() or (folder / "checkpoints").exists():
        from ddp_utils.runs import resume

        state = resume.inspect(spec, settings, described, restart, same_code)
    if spec.model_folder and state.verdict != "finished":
        check_output(spec.model_folder, folder, state.verdict == "continue")
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


def lock(folder):
    """Hold the folder for this process; freed by its death, however that comes."""
    held = FileLock(Path(folder) / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise UserError(going_on(folder)) from None
    return held


def going_on(folder) -> str:
    """Whose run holds the folder."""
    who = "another run"
    if (Path(folder) / "environment.json").exists():
        run = checkpoint.read_json(Path(folder) / "environment.json")
        who = f"a run on {run.get('host')} (process {run.get('pid')}, since {run.get('start')})"
    return f"{folder} is in use by {who}; wait for it, or give another folder"


def move_aside(folder) -> Path:
    """Rename the folder to the first free of NAME.1, NAME.2, ..."""
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))
