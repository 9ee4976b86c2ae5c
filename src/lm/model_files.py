"""Find the files of a model or adapter, and describe errors in them in one line.

A name is a folder, or a model on the Hugging Face hub.
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import cached_file

from ddp_utils import UserError, data

Name = str | Path  # of a model: a folder, or a name on the hub
META = torch.device("meta")  # tensors on it have a name and a shape, and no content
# the exceptions of transformers, peft and the file readers for files that do not fit together
FAULTS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError)
FAULTS += (LookupError, OSError, RuntimeError, TypeError, ValueError)
FAULTS += (SafetensorError, StrictDataclassError, re.error)
# the ends of tensors that only files of quantized weights have
PACKED = (".qweight", ".absmax", ".SCB", "_scale", "_scale_inv")


class LoraSpec(NamedTuple):
    """The adapter of a run: lora.py adds it to a model, and is imported only if there is one."""

    r: int = 16  # rank
    alpha: int = 32  # the adapter's output is multiplied by alpha / r
    dropout: float = 0.0
    targets: str = "all-linear"  # or names of layers and fused weights: q_proj,v_proj
    init_adapter: str = ""  # folder of a LoRA to start from, instead of a new one
    merge: bool = False  # merge init_adapter into the model, and train all weights

    @classmethod
    def of(cls, config: Any) -> "LoraSpec | None":
        """Return the adapter in a script's settings, or None if there is none."""
        merge = config.fine_tuning == "full"
        if merge and not config.init_adapter:
            return None
        shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
        return cls(*shape, config.init_adapter, merge)


# --- files ----------------------------------------------------------------------------------------


def model_folder(field: str, folder: str) -> Path:
    """Return the folder of the model that a run has saved, or the folder itself if it is no run.

    field: the setting, for errors. Raises UserError if there is no such folder or no model yet.
    """
    run = data.resolve(folder)
    if not run.is_dir():
        raise UserError(f"{field}: there is no folder {folder} (expected one such as results/dpo)")
    is_run = (run / "summary.json").exists()
    settings = data.read_json(run / "config.json") if is_run else {}
    own = "result_dir" in settings and settings.get("output_dir")  # of main_distributed.py
    model = data.resolve(own or run / "model")
    if is_run and not model.is_dir():
        summary = data.read_json(run / "summary.json")
        problem = f"is {summary.get('status')} after step {summary.get('step')} and has no model"
        raise UserError(f"{field}: the run {folder} {problem}; run its command again to finish it")
    return model if model.is_dir() else run


def model_path(name: Name) -> str:
    """Return the absolute path of a folder, which is looked up as data are, or a hub name."""
    folder = data.resolve(name)
    if folder.is_dir():
        return str(folder.resolve())  # peft records it as the base of an adapter
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; use a folder or a hub name")
    from ddp_utils import data_sets  # it is not needed for folders

    data_sets.connect()
    return str(name)


def find_file(name: Name, file: str) -> str | None:
    """Return the path of a file in a folder, or of a model on the hub; None if there is none."""
    errors = ("missing_entries", "connection_errors", "gated_repo")
    options: Any = {f"_raise_exceptions_for_{error}": False for error in errors}
    return cached_file(model_path(name), file, **options)


def is_adapter(name: Name) -> bool:
    """Return whether a folder, or a model on the hub, is an adapter."""
    with reading(f"--model_name: {name}"):
        return find_file(name, "adapter_config.json") is not None


def read_tokenizer(name: Name) -> Tokenizer:
    """Return the tokenizer in a folder or on the hub."""
    with reading(f"--model_name: no tokenizer at {name}"):
        return AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)


# --- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(place: str, problem: str = "cannot be read") -> Iterator[None]:
    """Turn an exception of a library that reads model files into a UserError of one line.

    place: the flag and its value; problem: what the user asked for.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        from ddp_utils import data_sets  # it is not needed for folders

        of_hub = data_sets.explain(place.rpartition(" ")[2], error)
        message = of_hub or f"{problem}: {first_line(error)}"
        if "custom code" in message:
            message = "it needs its own code, which is not run; use a model type of transformers"
        raise UserError(f"{place}: {message}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def check_complete(
    place: str, missing: Collection[str], unexpected: Collection[str], misshapen: Collection[str]
) -> None:
    """Raise UserError unless the files have exactly the tensors of the model.

    place: the flag and its value; missing, unexpected, misshapen: names of tensors.
    """
    kinds = {"are missing": missing, "have another shape": misshapen, "are unexpected": unexpected}
    problems = []
    for kind, names in kinds.items():
        if names:
            problems.append(f"{len(names)} tensors {kind} ({', '.join(sorted(names)[:3])})")
    if problems:
        advice = "use weights and config.json of the same model"
        if any(name.endswith(PACKED) for name in unexpected):
            advice = "its weights are quantized; use the original model"
        raise UserError(f"{place}: {'; '.join(problems)}; {advice}")


def set_untied(model: Any) -> None:
    """Record that the output layer has a weight of its own, for models.save() and others."""
    model.config.get_text_config().tie_word_embeddings = False
    model.config.tie_word_embeddings = False
