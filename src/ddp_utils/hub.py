"""The Hugging Face hub: whether it can be reached, and what to do about its errors.

It is imported when a model or a data set is not in a folder of this machine.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor, wait

from huggingface_hub import constants, errors, get_session
from huggingface_hub.utils import logging

# Seconds for an answer of the hub
SECONDS = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 3)
IS_OFF = constants.HF_HUB_OFFLINE  # as the user has set it
HUB_ERRORS = (errors.HfHubHTTPError, ConnectionError, errors.LocalEntryNotFoundError)


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
        return f"the hub answers {str(cause).splitlines()[0][:150]}; if it denies access, {login}"
    problem = "HF_HUB_OFFLINE is set" if IS_OFF else f"{constants.ENDPOINT} does not answer"
    problem += "" if IS_OFF else f" within {SECONDS:g} s (HF_HUB_ETAG_TIMEOUT)"
    return (
        f"neither a folder nor in the cache {constants.HF_HUB_CACHE}, and {problem}; where there "
        f"is a network, run `hf download {name} --type {kind}` (for a gated {kind} `hf auth login` "
        "before), copy the cache, and export HF_HUB_OFFLINE=1"
    )
