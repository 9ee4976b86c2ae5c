"""The Hugging Face hub, and what the library datasets reads: Parquet, Arrow, folders, the hub.

It is imported when a model or a data set is not in a file or folder that we read ourselves.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from huggingface_hub import constants, errors, get_session
from huggingface_hub.utils import logging

from ddp_utils import UserError

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
    return (
        f"neither a folder nor in the cache {constants.HF_HUB_CACHE}, and {problem}; where there "
        f"is a network, run `hf download {name} --type {kind}` (for a gated {kind} `hf auth login` "
        "before), copy the cache, and export HF_HUB_OFFLINE=1"
    )


def load(path: str, resolve: Callable[[str], Path]) -> Any:
    """Return the datasets.Dataset of a file, a folder or a name on the hub, perhaps with :split.

    Raises UserError if the library is not installed, cannot read it, or finds no such split.
    """
    name, _, split = path.partition(":")
    file = resolve(name)
    if not file.exists():
        connect()  # before datasets is imported, which reads what this sets
    try:
        import datasets
    except ImportError as error:
        hint = "pip install -r requirements-data.txt, or use JSON"
        raise UserError(f"{path}: needs the library datasets; {hint}") from error
    datasets.disable_progress_bars()
    place: dict[str, Any] = {"path": str(file) if file.is_dir() else name}
    if file.suffix in (".parquet", ".arrow"):
        place = {"path": file.suffix[1:], "data_files": str(file)}
    try:
        return datasets.load_dataset(**place, split=split or "train")
    except (datasets.exceptions.DatasetsError, *LOADING_ERRORS) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem = f"neither a file nor a data set: {reason}"
        hint = "if it is gated or private, run `hf auth login`; otherwise use a file"
        of_hub = explain(name, error, "dataset")
        raise UserError(f"{path}: {of_hub or f'{problem}; {hint}'}") from error
