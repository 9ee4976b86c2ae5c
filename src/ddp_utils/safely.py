"""Read a model from someone else: nothing in it is executed."""

import contextlib
from unittest import mock

import torch
from safetensors import SafetensorError

from ddp_utils import UserError


@contextlib.contextmanager
def reading(name):
    """Nothing but safetensors and JSON, and one line on what cannot be read.

    An index or an adapter can name a pickle, which transformers and peft would open.
    """

    def refuse(*_arguments, **_options):
        raise UserError(f"{name}: the weights are a pickle, which can run code; give safetensors")

    try:
        with mock.patch.object(torch, "load", refuse):
            yield
    except (ImportError, OSError, LookupError, SafetensorError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"{name}: cannot be read: {reason}") from error
