"""Load a causal language model and save it: files must be complete and must not execute code."""

import contextlib
import io
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PretrainedConfig
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

from ddp_utils import UserError, data, distributed
from ddp_utils.distributed import World
from ddp_utils.policy import Policy, Tensors, untied_state

logging.disable_progress_bar()  # a run has its own
logging.set_verbosity_error()  # check_complete() raises an error instead of a warning

Name = str | Path  # of a model: a folder, or a name on the hub
Dtype = torch.dtype | str | None
META = torch.device("meta")  # tensors on it have a name and a shape, and no content
# the exceptions of transformers, peft and the file readers for files that do not fit together
FAULTS: tuple[type[Exception], ...] = (ArithmeticError, AssertionError, AttributeError, ImportError)
FAULTS += (LookupError, OSError, RuntimeError, TypeError, ValueError)
FAULTS += (SafetensorError, StrictDataclassError, re.error)


# --- errors ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn an exception of a library that reads model files into a UserError of one line.

    place: the flag and its value.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        from ddp_utils import hub  # it is not needed for folders

        of_hub = hub.explain(place.rpartition(" ")[2], error)
        raise UserError(f"{place}: {of_hub or 'cannot be read: ' + first_line(error)}") from error


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
        raise UserError(f"{place}: {'; '.join(problems)}; {advice}")


def check_index(place: str, folder: Path) -> None:
    """Raise UserError if the index in a model's folder names files that are not safetensors."""
    index = folder / "model.safetensors.index.json"
    weight_map = data.read_json(index).get("weight_map", {}) if index.is_file() else {}
    if not all(str(file).endswith(".safetensors") for file in weight_map.values()):
        raise UserError(f"{place}: {index.name} names files that are not safetensors; convert them")


# --- loading --------------------------------------------------------------------------------------


def model_path(name: Name) -> str:
    """Return the absolute path of a folder, which is looked up as data are, or a hub name."""
    folder = data.resolve(name)
    if folder.is_dir():
        return str(folder.resolve())  # peft records it as the base of an adapter
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; use a folder or a hub name")
    from ddp_utils import hub  # it is not needed for folders

    hub.connect()
    return str(name)


def load_tokenizer(name: Name) -> Tokenizer:
    """Return the tokenizer in a folder or on the hub."""
    with reading(f"--model_name: no tokenizer at {name}"):
        return AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)


def load(
    name: Name, dtype: Dtype, device: torch.device, four_bits: torch.dtype | None = None
) -> Model:
    """Load a model from safetensors, without dropout, directly onto the device.

    device: META compares the names and shapes in the files with the model's and reads no weight.
    Such a model keeps the settings of its files, including dropout, for save().
    four_bits: keep the weights in 4 bits and compute in this dtype (needs bitsandbytes).
    Raises UserError for files that cannot be read, are not complete, or hold no causal model.
    """
    place = f"--model_name: {name}"
    check_index(place, Path(model_path(name)))
    kinds: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    kinds |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": four_bits}  # as in QLoRA
    with reading(place):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_path(name),
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=BitsAndBytesConfig(**kinds) if four_bits else None,
            ignore_mismatched_sizes=True,  # check_complete() raises an error for them
            output_loading_info=True,
        )
    model, report = loaded
    misshapen = [mismatch[0] for mismatch in report["mismatched_keys"]]
    check_complete(place, report["missing_keys"], report["unexpected_keys"], misshapen)
    is_encoder = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING  # BERT and its relatives
    if is_encoder and not getattr(model.config, "is_decoder", False):
        kind = model.config.model_type
        raise UserError(f"{place}: {kind} reads a text in both directions; use a causal model")
    return model if device == META else no_dropout(model)


def no_dropout(model: Model) -> Model:
    """Set the dropout of pre-training to 0, in modules and in the config that attention reads.

    The model stays in train(): eval() would silently disable gradient checkpointing.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name, value in vars(model.config).items():
        if ("dropout" in name or name.endswith(("pdrop", "layerdrop"))) and value:
            setattr(model.config, name, 0.0)
    return model.train()


def checkpoint_activations(model: Model) -> None:
    """Enable gradient checkpointing, non-reentrant: for frozen inputs and for DDP."""
    # transformers 5 renames the method
    old = getattr(model, "gradient_checkpointing_enable", None)
    enable: Any = getattr(model, "activation_checkpointing_enable", old)
    enable({"use_reentrant": False})


def check_fit(model: Model, rows: Iterable[Any], fix: str = "") -> None:
    """Raise UserError unless the model has an embedding for each token and enough positions.

    rows: examples, as in logps.Example. fix: the end of the message, "use ...".
    """
    embedding: Any = model.get_input_embeddings()
    vocabulary_size = embedding.weight.shape[0]
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # beyond these, the angles of a row depend on the other rows of its batch
        positions = min(positions, rope.get("original_max_position_embeddings") or positions)
    for row in rows:
        largest = max(map(max, row[:3]))
        if largest >= vocabulary_size:
            raise UserError(f"{row.location}: token id {largest}, model has {vocabulary_size}")
        if row.num_tokens > positions:
            problem = f"{row.num_tokens} tokens, the model has {positions} positions"
            fix = fix or f"--max_length {positions}"
            raise UserError(f"{row.location}: {problem}; use {fix}")


# --- what a run has read --------------------------------------------------------------------------


def digest_of_model(name: Name, config: PretrainedConfig) -> str:
    """Return a digest of the files in a folder, or of the hub commit that `config` is from."""
    files = sorted(file for file in Path(model_path(name)).glob("*") if file.is_file())
    commit = () if files else (name, config._commit_hash)
    return data.digest_of_files(files, *commit)


def input_digests(rows: dict, folders: dict[str, str], config: PretrainedConfig) -> dict[str, str]:
    """Return digests of what a run reads; a resumed run must read the same.

    rows: split -> rows of token ids; folders: setting -> folder or hub name of a model, or "";
    config: of the model.
    """
    digests = {f"content of {split}": data.digest_of_rows(part) for split, part in rows.items()}
    for name, folder in folders.items():
        if folder:
            digests[f"content of {name}"] = digest_of_model(folder, config)
    return digests


# --- saving ---------------------------------------------------------------------------------------


@torch.no_grad()
def round_weights(policy: Policy, base: Model) -> None:
    """Round the trained weights as save() does, so that the last replies are the result's."""
    dtypes = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    for name, parameter in policy.trainable().items():
        if name in dtypes:  # not the weights of an adapter, which stay fp32
            parameter.copy_(parameter.to(dtypes[name]))


def save(
    model: Any, base: Model, encoder: Any, folder: Path, weights: Tensors | None = None
) -> None:
    """Write a folder that transformers or peft loads: safetensors, config, tokenizer.

    The settings and the dtypes of all weights but an adapter's are those of the base model's files.

    base: on META, see load(); encoder: the chat_template.Encoder of the training; weights: name ->
    full tensor, if the model itself has only shards.
    """
    # where DeepSpeed is installed, transformers imports it here, and it prints
    silence = contextlib.redirect_stdout(io.StringIO())
    with data.write_folder(folder) as temporary, silence, warnings.catch_warnings():
        # peft also looks for the config of the base model, which may be the folder of a LoRA
        warnings.filterwarnings("ignore", "Unable to fetch|Could not find a config")
        if isinstance(model, Model):
            # merging an adapter may have untied the head from the embedding
            base.config.tie_word_embeddings = model.config.tie_word_embeddings
            dtypes = {name: tensor.dtype for name, tensor in base.state_dict().items()}
            weights = weights or untied_state(model)
            for name, weight in weights.items():
                weights[name] = weight.detach().to("cpu", dtypes[name])
            base.save_pretrained(temporary, state_dict=weights)
        else:
            model.save_pretrained(temporary, state_dict=weights)
            base.generation_config.save_pretrained(temporary)
        add_ends(temporary, encoder.ends)
        encoder.tokenizer.save_pretrained(temporary)
        (temporary / "README.md").unlink(missing_ok=True)  # peft's has no content


def all_ends(ends: Iterable[int], own: int | list[int] | None) -> list[int]:
    """Return the token ids that end a reply: `ends`, then the eos_token_id of a model's config."""
    own = own if isinstance(own, list) else [own] if own is not None else []
    return [*dict.fromkeys([*ends, *own])]


def add_ends(folder: Path, ends: Iterable[int]) -> None:
    """Add the token ids at which the run ended a reply to the config files of a saved model."""
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.exists():  # edited as JSON, since transformers does not save all that it loads
            settings = data.read_json(file)
            own = settings.get("eos_token_id")
            complete = all_ends(ends, own)
            if len(complete) > len(all_ends([], own)):
                settings["eos_token_id"] = complete if len(complete) > 1 else complete[0]
                data.write_json(file, settings)


def save_policy(policy: Policy, base: Model, encoder: Any, folder: Path, world: World) -> None:
    """Save what was trained, gathered from all ranks; all ranks must call this.

    base, encoder: as in save().
    """
    weights = policy.full_weights()
    distributed.on_main(world, lambda: save(policy.scorer.model, base, encoder, folder, weights))
