"""The Hugging Face hub, and what the library datasets reads: Parquet, Arrow, folders, the hub.

It is imported when a model or a data set is not in a file or folder that we read ourselves.
"""

import functools
import itertools
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, get_session, snapshot_download
from huggingface_hub.utils import logging

from ddp_utils import UserError, distributed

# Seconds for an answer of the hub
SECONDS = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 3)
IS_OFF = constants.HF_HUB_OFFLINE  # as the user has set it
HUB_ERRORS = (errors.HfHubHTTPError, ConnectionError, errors.LocalEntryNotFoundError)
LOADING_ERRORS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@functools.cache
def connect() -> None:
    """Ask the hub once whether it is there; if not, the libraries read only their cache.

    Otherwise they would ask for each file six times, for a minute. This waits for a thread, because
    the time-out of a connection does not include the search for the address of the host.
    """
    logging.set_verbosity_error()  # a warning for each attempt
    if constants.HF_HUB_OFFLINE:
        return
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(get_session().head, constants.ENDPOINT, timeout=SECONDS)
    wait([answer], SECONDS)
    pool.shutdown(wait=False)
    constants.HF_HUB_OFFLINE = not answer.done() or answer.exception() is not None


@functools.cache
def snapshot(name: str, patterns: tuple[str, ...], commit: str | None = None) -> Path:
    """Return the folder in the cache with the files of a model that match the patterns.

    All ranks must call this. Rank 0 asks the hub, by default for the newest commit. The first rank
    of another node asks only for files of this commit that its cache lacks, and no other rank asks.
    """

    def download(facts: dict[str, Any] | None) -> dict[str, Any]:
        """Make sure that this node has the files, and return their names and the commit."""
        revision = facts["commit"] if facts else commit
        if facts and not missing(name, facts):
            return facts
        connect()
        try:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
        except LOADING_ERRORS as error:
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            reason = explain(name, error) or first_line
            raise UserError(f"--model_name: {name}: {reason}") from error
        files = itertools.chain.from_iterable(map(folder.glob, patterns))
        names = sorted({*map(os.path.basename, files)})
        check_node(name, missing(name, facts) if facts else [])
        return {"commit": folder.name, "files": names}

    facts = distributed.on_first(f"hub {name} {patterns}", download)
    check_node(name, missing(name, facts))
    return folder_in_cache(name, facts["commit"])


def folder_in_cache(name: str, commit: str) -> Path:
    """Return the folder of a commit of a model in the cache of the hub, as the hub documents it."""
    return Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots", commit)


def missing(name: str, facts: dict[str, Any]) -> list[str]:
    """Return which files of rank 0 this node lacks."""
    folder = folder_in_cache(name, facts["commit"])
    return [file for file in facts["files"] if not (folder / file).exists()]


def check_node(name: str, files: list[str]) -> None:
    """Raise UserError if files that rank 0 has read are not on this node."""
    if files:
        problem = f"{platform.node()} lacks {files[0]}, which rank 0 has read"
        raise UserError(f"{name}: {problem}; share the cache, or copy it to the same folder")


def explain(name: str, error: BaseException | None, kind: str = "model") -> str:
    """Return what is wrong with a name on the hub, and how to fix it; "" for any other error.

    error: of a library, whose cause is an error of the hub; kind: model or dataset.
    """
    cause = None
    while error is not None:
        cause = error if isinstance(error, HUB_ERRORS) else cause
        error = error.__cause__ or error.__context__
    login = "run `hf auth login`, or export HF_TOKEN"
    if cause is None:
        return ""
    if isinstance(cause, errors.GatedRepoError):
        return f"is gated; accept its terms on {constants.ENDPOINT}/{name}, then {login}"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return (
            f"neither a folder nor a {kind} on the hub; check the name; if it is private, {login}"
        )
    if isinstance(cause, errors.HfHubHTTPError):
        return f"the hub answers {str(cause).splitlines()[0]}; if it denies access, {login}"
    problem = "HF_HUB_OFFLINE is set" if IS_OFF else f"{constants.ENDPOINT} does not answer"
    problem += "" if IS_OFF else f" within {SECONDS:g} s (HF_HUB_ETAG_TIMEOUT)"
    command, then = f"hf download {name}", "copy the cache, and export HF_HUB_OFFLINE=1"
    if kind == "dataset":  # offline, the library datasets finds only what it has loaded before
        command += " --type dataset --local-dir FOLDER"
        then = "copy FOLDER, and use it instead of the name"
    return (
        f"neither a folder nor in the cache {constants.HF_HUB_CACHE}, and {problem}; where there "
        f"is a network, run `{command}` (for a gated {kind} `hf auth login` before), {then}"
    )


def load(path: str, resolve: Callable[[str], Path]) -> Any:
    """Return the datasets.Dataset of a file, a folder or a name on the hub; see data.is_data_set().

    Raises UserError if the library is not installed, cannot read it, or finds no such split.
    """
    file = resolve(path.partition(":")[0])
    if file.is_dir():
        return _load(path, str(file))
    if file.exists():
        return _load(path, file.suffix[1:], data_files=str(file))
    files = arrow_files(path)
    datasets = _library(path)
    return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])


@functools.cache
def arrow_files(path: str) -> list[str]:
    """Return the files in the cache of a data set on the hub; see data.is_data_set().

    All ranks must call this. As in snapshot(), rank 0 asks the hub for the newest commit, and the
    first rank of another node asks for that one if its cache lacks it.
    """

    def download(files: list[str] | None) -> list[str]:
        if files and all(map(os.path.exists, files)):
            return files
        connect()  # before datasets is imported, which reads what this sets
        commit = Path(files[0]).parent.name if files else None
        data_set = _load(path, path.partition(":")[0], revision=commit)
        return [part["filename"] for part in data_set.cache_files]

    files = distributed.on_first(f"data set {path}", download)
    check_node(path, [file for file in files if not os.path.exists(file)])
    return files


def _load(path: str, place: str, **options: Any) -> Any:
    """Return the data set that the library finds at a place, or raise UserError.

    path: NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT; it is for errors, too.
    """
    datasets = _library(path)
    name, *more = path.split(":")
    split = more.pop() if more else "train"
    try:
        if ":" not in path and os.path.isfile(f"{place}/state.json"):  # of save_to_disk()
            return datasets.load_from_disk(place)
        return datasets.load_dataset(place, *more, **options, split=split)
    except (datasets.exceptions.DatasetsError, *LOADING_ERRORS) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"neither a file nor a data set: {reason}"
        hint = "if it is gated or private, run `hf auth login`; otherwise use a file"
        if reason.startswith("Config name is missing"):  # their names are in the next line
            names = str(error).partition("configs: ")[2].partition("\n")[0]
            problem = f"it has several configurations: {names}"
            hint = f"use {name}:CONFIGURATION:{split}"
        if reason.startswith("Unknown split"):
            names = reason.partition("one of ")[2].rstrip(".")
            problem = f"it has no split {split} (expected one of {names})"
            hint = f"use {':'.join([name, *more, 'SPLIT'])}"
        of_hub = explain(name, error, "dataset")
        raise UserError(f"{path}: {of_hub or f'{problem}; {hint}'}") from error


def _library(path: str) -> Any:
    """Return the library datasets; raise UserError if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        hint = "pip install -r requirements-data.txt, or use JSON"
        raise UserError(f"{path}: needs the library datasets; {hint}") from error
    datasets.disable_progress_bars()
    return datasets
