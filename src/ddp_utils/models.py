"""Load a causal language model, and save it: nothing in its files is executed or missing."""

import contextlib
import math
import re
import shutil
import warnings
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, modeling_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

from ddp_utils import UserError, distributed
from ddp_utils.data import digest_of_files, digest_of_rows, resolve, writing

logging.disable_progress_bar()  # a run has its own
logging.set_verbosity_error()  # check_complete() says what the report of a load says

META = torch.device("meta")  # tensors on it have a name and a shape, and no content
# what transformers, peft and the readers of files raise on what does not fit together
FAULTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError)
FAULTS += (RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError, re.error)


@contextlib.contextmanager
def reading(place):
    """Nothing but safetensors and JSON, and one line on what cannot be read.

    An index or an adapter can name a pickle, which transformers and peft would open.
    place: the flag and what it names.
    """

    def refuse(*_arguments, **_options):
        raise UserError(f"{place}: the weights are a pickle, which can run code; give safetensors")

    try:
        with mock.patch.object(torch, "load", refuse):
            yield
    except torch.OutOfMemoryError:
        raise
    except FAULTS as error:
        says = first_line(error)
        if "huggingface.co" in says or "gated" in says:
            says += " Fetch it with hf download, a gated one after hf auth login"
        raise UserError(f"{place}: cannot be read: {says}") from error


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
    folder = resolve(name)
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise UserError(f"--model_name: there is no folder {name}; give a folder or a hub name")
    return name


def load_tokenizer(name):
    """The model's tokenizer; UserError if there is none at that path or hub name."""
    with reading(f"--model_name: no tokenizer at {name}"):
        return AutoTokenizer.from_pretrained(str(model_path(name)), trust_remote_code=False)


def digest_of_model(name, settings) -> str:
    """By the files of a folder, or by the commit of the hub that `settings` came from."""
    parts = sorted(file for file in Path(model_path(name)).glob("*") if file.is_file())
    return digest_of_files(parts, *([] if parts else [name, settings._commit_hash]))


def input_digests(data, folders, settings) -> dict:
    """Return what a run reads, by content; a continued run must read the same.

    data: split -> rows of token ids; folders: setting -> folder or hub name of a model, or "";
    settings: the config of the model.
    """
    digests = {}
    for split, rows in data.items():
        digests[f"content of {split}"] = digest_of_rows(rows)
    for name, folder in folders.items():
        if folder:
            digests[f"content of {name}"] = digest_of_model(folder, settings)
    return digests


def load(name, dtype, device, four_bits=None, flag="--model_name"):
    """Read safetensors straight onto the device: a host never holds one copy per process.

    device: META compares the names and shapes in the files with the model's and reads no weight.
    four_bits: a dtype to compute in, with weights that are kept in 4 bits (needs bitsandbytes).
    flag: the setting that gave the name.
    Of the folder of a LoRA it is the base model with that folded in.
    Raises UserError for files that cannot be read, are not complete, or hold no causal model.
    """
    place = f"{flag}: {name}"
    if Path(model_path(name), "adapter_config.json").exists():
        from ddp_utils import lora

        return lora.fold(name, dtype, device, four_bits=four_bits, flag=flag)
    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # as in QLoRA
    kinds |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": four_bits}
    with reading(place):
        model, report = AutoModelForCausalLM.from_pretrained(
            str(model_path(name)),
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=BitsAndBytesConfig(**kinds) if four_bits else None,
            ignore_mismatched_sizes=True,  # they are reported, with the others
            output_loading_info=True,
        )
    misshapen = [mismatch[0] for mismatch in report["mismatched_keys"]]
    check_complete(place, report["missing_keys"], report["unexpected_keys"], misshapen)
    is_encoder = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING  # BERT and its relatives
    if is_encoder and not getattr(model.config, "is_decoder", False):
        kind = model.config.model_type
        raise UserError(f"{place}: {kind} reads a text in both directions; give a causal model")
    return no_dropout(model)


def add_adapter(model, config):
    """Put on a model the LoRA that is to be carried on or trained, if there is one."""
    if config.fine_tuning == "full" and not config.init_adapter:
        return model
    from ddp_utils import lora  # and peft, for those alone who use it

    return lora.add(model, config)


def inherit_adapter_config(config):
    """Give the settings rank, scale and targets of the LoRA in `init_adapter`, if it is trained on.

    Raises UserError if others were asked for, or there is no such LoRA.
    """
    if config.init_adapter and config.fine_tuning == "lora":  # else it is merged
        from ddp_utils import lora

        lora.inherit_config(config)


def meta_model(config):
    """The model on the meta device, after all checks that loading it and its adapter will make.

    Names and shapes of the files' tensors are compared with the model's; no weight is read.
    Raises UserError as load() and lora.with_adapter() do, or if a LoRA cannot be put on this model.
    """
    model = load(config.model_name, "auto", META)
    adapted = add_adapter(model, config)
    return model if adapted is model else adapted.unload()


def load_policy(config, device, precision, sharded=False, in_4_bits=False):
    """Load the model to be trained: with a LoRA (fresh, or `init_adapter`), or all its weights.

    The seed makes a fresh LoRA, so call torch.manual_seed first. sharded: by FSDP or DeepSpeed;
    in_4_bits: QLoRA. config.lean: see fast/memory_efficient.py.
    """
    dtype = precision.weights
    if sharded:
        # mapped from its files, which all processes of a node share, until it is shared out
        device = torch.device("cpu")
        dtype = "auto" if config.fine_tuning == "full" and not config.init_adapter else dtype
    four_bits = (precision.autocast or dtype) if in_4_bits else None
    model = load(config.model_name, dtype, device, four_bits)
    if config.use_gradient_checkpointing:
        checkpoint_activations(model)
    model = add_adapter(model, config)
    if config.init_adapter and config.fine_tuning == "full":
        model = model.merge_and_unload()
        model.requires_grad_(True)
    model.train()
    if config.lean and config.fine_tuning == "lora":
        from ddp_utils.fast import memory_efficient

        memory_efficient.apply(model)
    return model


def no_dropout(model):
    """Switch the pre-training's dropout off in modules and in the config, which attention reads.

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


def checkpoint_activations(model):
    """Gradient checkpointing, non-reentrant: it works with frozen inputs and with DDP."""
    old = getattr(model, "gradient_checkpointing_enable", None)  # transformers 5's two names
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})


def check_fit(model, rows):
    """The model has an embedding for every token and a position for every row."""
    words = model.get_input_embeddings().weight.shape[0]
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # beyond these a row's angles, and its log-probs, would hang on the others in its batch
        positions = min(positions, rope.get("original_max_position_embeddings") or positions)
    for pair in rows:
        largest = max(map(max, pair[:3]))
        if largest >= words:
            raise UserError(f"{pair.location}: token id {largest}, model has {words}")
        if pair.num_tokens > positions:
            raise UserError(
                f"{pair.location}: {pair.num_tokens} tokens, the model has {positions} positions; "
                f"give --max_length {positions}"
            )


def save(model, tokenizer, folder, weights=None):
    """Write a folder that transformers or peft loads: safetensors, config, tokenizer.

    It appears whole or not at all. weights: name -> tensor, where the model has shares only.
    """
    folder = Path(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    # it has no wrapper: looking for one imports DeepSpeed where that is installed, for seconds
    no_wrapper = mock.patch.object(modeling_utils, "unwrap_model", lambda model, **_: model)
    with writing(folder, temporary), no_wrapper, warnings.catch_warnings():
        # peft looks for the config of a base that is a folder of a LoRA, too
        warnings.filterwarnings("ignore", "Unable to fetch|Could not find a config")
        model.save_pretrained(temporary, **({"state_dict": weights} if weights else {}))
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").unlink(missing_ok=True)  # peft's is empty; the report writes one
        for file in temporary.glob("*.safetensors"):  # by themselves readable to their owner alone
            shutil.copymode(temporary / "tokenizer_config.json", file)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)


def save_policy(policy, tokenizer, folder, world):
    """Save what was trained, gathered from all ranks, which must all call this."""
    weights = policy.full_weights()
    distributed.on_main(world, lambda: save(policy.scorer.model, tokenizer, folder, weights))
