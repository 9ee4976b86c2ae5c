"""Read a model from someone else: nothing in it is executed, and nothing of it is missing."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging

from ddp_utils import UserError, checkpoint, records

# what transformers, peft and the readers of files raise on what does not fit together
FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError)
FAULTS += (RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError, re.error)


@contextlib.contextmanager
def reading(place, with_bars=False):
    """Nothing but safetensors and JSON, and one line on what cannot be read.

    An index or an adapter can name a pickle, which transformers and peft would open.
    place: the flag and what it names; with_bars: let them show progress bars.
    """

    def refuse(*_arguments, **_options):
        raise UserError(f"{place}: the weights are a pickle, which can run code; give safetensors")

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # check_complete() says what its report says
    has_bars = logging.is_progress_bar_enabled()
    if not with_bars:
        logging.disable_progress_bar()
    try:
        with mock.patch.object(torch, "load", refuse):
            yield
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        raise UserError(f"{place}: cannot be read: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def first_line(error):
    """The first line of someone else's error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_complete(place, missing, unexpected, misshapen):
    """Raise UserError unless the tensors in the files are exactly those that the model asks for.

    missing, unexpected, misshapen: names of tensors.
    """
    kinds = {"are missing": missing, "have another shape": misshapen, "are not known": unexpected}
    problems = []
    for kind, names in kinds.items():
        if names:
            first = ", ".join([*sorted(names)[:3], *["..."] * (len(names) > 3)])
            problems.append(f"{len(names)} tensors {kind} ({first})")
    if problems:
        raise UserError(
            f"{place}: {'; '.join(problems)}; give weights and config.json of the same model"
        )


def model_path(name):
    """A folder, from the current one or the project's root, or else a name on the hub."""
    folder = records.resolve(name)
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; give a folder or a hub name")
    return name


def digest_of_model(name, settings) -> str:
    """By the files of a folder, or by the commit of the hub that `settings` came from."""
    files = sorted(file for file in Path(model_path(name)).glob("*") if file.is_file())
    return checkpoint.digest_of_files(files, *([] if files else [name, settings._commit_hash]))
