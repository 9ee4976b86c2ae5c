"""What a run folder has already: a run to continue or to move aside, this one's best weights.

Imported only where there is any.
"""

import contextlib
import os
from pathlib import Path

from ddp_utils import UserError, data, distributed
from ddp_utils.runs import checkpoint
from ddp_utils.runs.folder import FolderState, lock

# settings that change no number, so that they may change between two lives of a run
FREE = {"check", "debug", "restart", "same_code", "reference_logps"}
FREE |= {"log_every", "save_every", "keep_checkpoints", "cache_dir"}
FREE |= {"result_dir", "out_dir", "output_dir", "stop_after_minutes", "timeout_minutes"}
FREE |= {"config", "deepspeed", "report_to", "bucket_mb", "num_workers"}
FREE |= {"ckpt_interval", "eval_interval", "gen_interval", "summary_interval"}
# length, strategy and which model is kept may change too, and it is said
SAID = {"max_steps", "num_epochs", "train_timesteps", "save_best"}
SAID |= {"strategy", "use_fsdp", "fsdp_config", "use_deepspeed", "deepspeed_config"}
SAID |= {"content of fsdp_config", "content of deepspeed_config"}
# what may differ, too: the numbers of the run are then equal but for rounding
ROUNDING = ("world_size", "device", "threads", "versions")
# where these count per process, their product with the world size is among the inputs
PER_PROCESS = {"batch_size", "micro_batch_size", "train_batch_size", "gradient_accumulation_steps"}


def inspect(spec, settings, described, restart, same_code) -> FolderState:
    """Compare the run in a folder with one that is about to start; as folder.inspect().

    Raises UserError for a run that is going on, an unfinished one with other settings or of other
    code, or longer than this, and one whose checkpoints are all damaged.
    """
    folder = spec.folder
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: has checkpoints and no config.json; give another folder")
    if (folder / ".lock").exists():
        lock(folder).release()
    free = FREE | PER_PROCESS if "global_batch" in spec.inputs else FREE
    changed = differences(checkpoint.read_json(folder / "config.json"), settings, free)
    before = checkpoint.read_json(folder / "environment.json")
    changed += differences(before.get("inputs", {}), spec.inputs)
    code = {} if same_code else described["code"]
    edited = [line.partition(":")[0] for line in differences(before.get("code", {}), code)]
    summary = read_json(folder)
    finished = summary.get("status") == "finished"
    # a process that torchrun starts again has the same flags, and --restart was meant once
    is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_again = is_again and summary.get("run_id") == os.environ.get("TORCHELASTIC_RUN_ID")
    if (restart and not is_again) or (finished and (changed or edited)):
        return FolderState("aside")
    if finished:
        return FolderState("finished")
    path, skipped = checkpoint.find(folder / "checkpoints")
    lines = [f"warning: {bad} is left out: {why}" for bad, why in skipped]
    if not path and skipped:
        raise UserError(
            f"{skipped[0][0]}: {skipped[0][1]}, and no other checkpoint is whole; "
            "--restart moves this run aside and begins a new one"
        )
    if not path and (changed or edited):  # nothing is lost
        return FolderState("aside", lines)
    check_unchanged(folder, changed, edited)
    manifest = FolderState().manifest
    if path:
        manifest = checkpoint.read_manifest(path)
        check_length_and_shares(spec, path, manifest)
    lines += [f"{line}, from here on" for line in changed]
    for line in differences({name: before.get(name) for name in ROUNDING}, described):
        lines.append(f"{line}; equal but for rounding")
    kept, problem = cached_files(folder)
    lines.append(f"{folder} is not finished: goes on after step {manifest['step']}")
    return FolderState("continue", lines + problem, path, manifest, kept)


def check_unchanged(folder, changed, edited):
    """Raise UserError if an unfinished run is of other code, or has other settings that count."""
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


def check_length_and_shares(spec, path, manifest):
    """Raise UserError if the run cannot go on from this checkpoint."""
    done = manifest["step"]
    if done > spec.steps:
        raise UserError(
            f"--max_steps: {spec.folder} has done {done} steps already, more than {spec.steps}"
        )
    shares = manifest.get("shares")
    if shares and shares != spec.shares:
        raise UserError(
            f"{path}: each process has saved its share: {shares}; this is "
            f"{spec.shares or 'another strategy, or one process'}; start as many, in the same way"
        )


def differences(saved, now, free=frozenset()):
    """`name: saved -> now` of all that differ; a setting that is new is no difference."""
    names = [name for name in saved if name in now and name not in free]
    return [f"{name}: {saved[name]} -> {now[name]}" for name in names if saved[name] != now[name]]


def read_json(folder, name="summary.json") -> dict:
    """The object in summary.json, or in another file of the folder; or nothing."""
    with contextlib.suppress(UserError):
        return checkpoint.read_json(Path(folder) / name)
    return {}


def cached_files(folder):
    """Return name -> hash and fingerprint of what an earlier start has kept, and what is wrong."""
    try:
        return checkpoint.read_manifest(folder)["files"], []
    except ValueError as error:
        if not any(folder.glob("manifest.*")):
            return {}, []
        return {}, [f"warning: {folder}: {error}: what it names is made again"]


def restore(run):
    """Put the checkpoint of a run that goes on into its policy, optimizer and schedule."""
    path = checkpoint.path(run.checkpoints, run.done)
    if not path.exists() or checkpoint.manifest_hash(path) != run.manifest_hash:
        raise UserError(
            f"{path}: rank {run.world.rank} does not see the checkpoint that rank 0 sees; "
            "the run folder must be on a disk that all nodes share"
        )
    manifest = run.load(path, run.done)
    run.validated = manifest["validated"]
    run.results = manifest["results"] | run.results
    run.val_of_best = manifest["val_of_best"]
    run.start -= manifest["seconds"]
    run.save_seconds = manifest["save_seconds"]
    if run.spec.save_best is False:  # it may have been asked for before
        run.results.pop("best", None)
    if run.best not in (None, run.done):
        path_of_best(run)


def restore_best(run) -> int:
    """Load the weights of the lowest validation loss; return the steps that made them."""
    run.load(path_of_best(run), run.best)
    run.results["val"] = run.val_of_best
    loss = run.results["best"]["loss"]
    run.say(f"save_best: back to step {run.best}, validation loss {loss:.4f}")
    return run.best


def path_of_best(run) -> Path:
    """The checkpoint of the lowest validation loss; UserError if it is not whole."""
    path = checkpoint.path(run.checkpoints, run.best)
    problem = distributed.on_main(run.world, lambda: checkpoint.verify(path))
    if problem:
        raise UserError(f"{path}: {problem}; without --save_best the last model is kept")
    return path


def logps_of(folder, name, fingerprint) -> Path:
    """The reference's log-probs in another run folder, for --reference_logps.

    Raises UserError if they are not there, or are those of other data or another model.
    """
    flag = "--reference_logps"
    try:
        entry = checkpoint.read_manifest(folder)["files"][name]
    except (ValueError, KeyError) as error:
        raise UserError(f"{flag}: {folder}: {error}; give another run folder") from error
    for fact, value in fingerprint.items():
        if entry.get("fingerprint", {}).get(fact) != value:
            raise UserError(f"{flag}: {folder} has another {fact}; leave it out")
    path = Path(folder) / name
    if data.sha256(path) != entry["sha256"]:
        raise UserError(f"{flag}: {path} is damaged; leave it out")
    return path
