"""Load a causal language model and save it: files must be complete and must not execute code."""

import contextlib
import copy
import io
import itertools
import math
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
)
from transformers import PreTrainedModel as Model
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from ddp_utils import UserError, data, distributed
from ddp_utils.distributed import World
from ddp_utils.policy import Policy, Precision, Tensors
from lm import model_files
from lm.model_files import FAULTS, META, LoraSpec, Name, is_adapter, one_line, reading
from lm.token_rows import digest_of_rows

logging.disable_progress_bar()  # a run has its own
logging.set_verbosity_error()  # model_files.check_complete() raises an error instead of a warning

Dtype = torch.dtype | str | None
# what a router calls its noise
NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
# quantizations of original models -> the settings of transformers that remove them
DEQUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


# --- checks of the files -------------------------------------------------------------------------


def check_kind(place: str, config: PretrainedConfig) -> None:
    """Raise UserError unless the config is of a model that can be trained to continue a text."""
    advice = None
    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING  # BERT and its relatives
    is_encoder = type(config) in encoders and not config.to_dict().get("is_decoder")
    quantization = quantization_of(config)
    if quantization:
        advice = f"its weights are quantized ({quantization}); use the original model (for an "
        advice += "adapter with --init_adapter ADAPTER), which --type qlora of train.py and "
        advice += "--fine_tuning lora --base_dtype 4bit of main_distributed.py quantize; if they "
        advice += "are not quantized, remove the quantization from config.json"
        if quantization in DEQUANTIZED:  # the original model is quantized as well
            settings = f"quantization_config=transformers.{DEQUANTIZED[quantization]}"
            advice = f"its weights are quantized ({quantization}); use a copy in bf16: "
            advice += f"from_pretrained(NAME, {settings}(dequantize=True)), then save_pretrained"
    elif is_encoder or config.is_encoder_decoder:
        advice = f"{config.model_type} reads a text in both directions; use a causal model"
    elif type(config) not in auto_class(config)._model_mapping:
        advice = f"{config.model_type} does not generate text; use a causal model"
    if advice:
        raise UserError(f"{place}: {advice}")


def quantization_of(config: PretrainedConfig) -> str:
    """Return how the weights in the files are quantized, such as "gptq"; "" if they are not."""
    for part in (config, config.get_text_config()):
        # the names that transformers, older compressed-tensors and MLX write
        for key in ("quantization_config", "compression_config", "quantization"):
            settings = getattr(part, key, None)
            if settings:
                return settings.get("quant_method", key)
    return ""


def auto_class(config: PretrainedConfig) -> Any:
    """Return what loads the model of a config; one that also reads images keeps all its parts."""
    if type(config) in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


# --- loading --------------------------------------------------------------------------------------


def load_tokenizer(
    name: Name, init_adapter: Name = "", chat_template: str = "auto", needs_weights: bool = True
) -> model_files.Tokenizer:
    """Return the tokenizer and chat template of a model, or of the adapter that it begins with.

    chat_template: the flag; if it is "auto", that of the adapter is used. needs_weights: False if
    the model is not loaded.
    Prints a warning if the adapter belongs to another model or has another chat template.
    """
    if is_adapter(name, needs_weights) or init_adapter:
        from lm import lora

        return lora.load_tokenizer(name, init_adapter, chat_template)
    return model_files.read_tokenizer(name)


def load(
    name: Name,
    dtype: Dtype,
    device: torch.device,
    quantization: Any = None,
    model_class: Any = None,
) -> Model:
    """Load a model from safetensors, without dropout, directly onto the device.

    The LoRA in a folder is merged into its base model.

    device: META compares the names and shapes in the files with the model's and reads no weight.
    Such a model keeps the settings of its files, including dropout, for save().
    quantization: of the loaded weights, transformers' settings. model_class: a class of one's own,
    with the weights' names of the model's.
    Raises UserError for files that cannot be read, are not complete, or hold no causal model.
    """
    if is_adapter(name):
        from lm import lora

        base = load(lora.base_of(name), dtype, device, quantization, model_class)
        return lora.merge(base, name)
    place = f"--model_name: {name}"
    with reading(place):
        config = AutoConfig.from_pretrained(model_files.model_path(name), trust_remote_code=False)
    check_kind(place, config)
    with reading(place):
        folder = model_files.model_path(name, with_weights=True)
        if device != META:
            model_files.read_ahead(name)
        loaded: Any = (model_class or auto_class(config)).from_pretrained(
            folder,
            dtype=dtype,
            return_dict=True,  # whatever the config says
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=quantization,
            ignore_mismatched_sizes=True,  # model_files.check_complete() raises an error for them
            output_loading_info=True,
        )
    model, report = loaded
    model.name_or_path = model.config._name_or_path = model_files.full_name(name)
    misshapen = [mismatch[0] for mismatch in report["mismatched_keys"]]
    model_files.check_complete(place, report["missing_keys"], report["unexpected_keys"], misshapen)
    if device == META:
        return model
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model_files.set_untied(model)  # two weights that differ, whatever the config says
    return no_dropout(model)


def check_4_bits(config: Any, setting: str) -> None:
    """Raise UserError if a LoRA would be merged into 4-bit weights, which `setting` selects."""
    if config.in_4_bits and is_adapter(config.model_name):
        advice = "merge it first: python -m lm.merge"
        raise UserError(f"--{setting}: a LoRA cannot be merged into 4-bit weights; {advice}")


def meta_model(
    name: str,
    adapter: LoraSpec | None,
    gradient_checkpointing: bool = False,
    model_class: Any = None,
) -> tuple[Model, list[str]]:
    """Return the model on the meta device, and lines to print, after all checks of load_policy().

    Names and shapes of the tensors in the files are checked; no weight is read.
    Raises UserError as load() does, or if the adapter does not fit the model.
    """
    model = load(name, "auto", META, model_class=model_class)
    if gradient_checkpointing:
        checkpoint_activations(model)
    prepared, lines = prepare(model, adapter)
    return prepared.unload() if hasattr(prepared, "unload") else prepared, lines


def load_policy(
    name: str,
    adapter: LoraSpec | None,
    precision: Precision,
    device: torch.device,
    *,
    sharded: bool = False,
    in_4_bits: bool = False,
    gradient_checkpointing: bool = False,
    memory_efficient: bool = True,
    model_class: Any = None,
) -> Model:
    """Load the model to be trained; a new LoRA is random, so call torch.manual_seed first.

    adapter: None to train all weights; sharded: for FSDP or DeepSpeed; in_4_bits: QLoRA, which
    needs bitsandbytes; memory_efficient: with a LoRA, see fast/memory_efficient.py; model_class: as
    of load().
    """
    dtype: Any = precision.weights
    if sharded:
        # mapped from files that all processes of a node share, until the weights are sharded
        device = torch.device("cpu")
        # without autocast, layers that a script freezes compute in fp32, too; a merge rounds
        if precision.autocast and not (adapter or is_adapter(name)):
            dtype = "auto"
    kinds: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    kinds |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": precision.autocast or dtype}
    quantization = BitsAndBytesConfig(**kinds) if in_4_bits else None
    model = load(name, dtype, device, quantization, model_class)
    if gradient_checkpointing:
        checkpoint_activations(model)
    prepared = prepare(model, adapter)[0]
    if not sharded and (adapter is None or adapter.merge):
        # weights that are not trained stay mapped: self-tests look at them if log-probs are NaN
        model_files.check_weights(prepared)
    if adapter and not adapter.merge and memory_efficient:
        from lm.fast import memory_efficient as layers

        layers.apply(prepared)
    return prepared.train()


def prepare(model: Any, adapter: LoraSpec | None) -> tuple[Any, list[str]]:
    """Add or merge the adapter, and freeze the parts of the model that no text reaches.

    Return the model, and lines to print about what is not trained.
    """
    parts = unreached(model)
    lines = []
    if parts:
        names = [part[:-1] for part in parts]
        names[3:] = [f"{len(names) - 3} more parts"] if len(names) > 3 else []
        lines.append(f"frozen, since no text reaches them: {', '.join(names)}")
    if adapter:
        from lm import lora

        model, more = lora.add(model, adapter, parts)
        lines += more
    for name, parameter in model.named_parameters():
        if (name.removeprefix("base_model.model.") + ".").startswith(parts):
            parameter.requires_grad_(False)
    return model, lines


def no_dropout(model: Model) -> Model:
    """Set dropout and a router's noise to 0, in modules and in the config that attention reads.

    The model stays in train(): eval() would silently disable gradient checkpointing.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in name or name in NOISE):
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
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        flag = "--use_gradient_checkpointing (gradient_checkpointing of train.py)"
        raise UserError(f"{flag}: {one_line(error)}; leave it out") from error


def check_fit(
    model: Model, tokenizer: Any, rows: Iterable[Any], fix: str = "", role: str = "model"
) -> None:
    """Raise UserError unless the model has an embedding for each token and enough positions.

    rows: examples, as in logps.Example. fix: the end of the message, "use ...". role: what the
    message calls the model.
    """
    embedding: Any = model.get_input_embeddings()
    vocabulary_size = embedding.weight.shape[0]
    text = model.config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    positions = min(filter(None, limits), default=math.inf)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # beyond these, the angles of a row depend on the other rows of its batch
        positions = min(positions, rope.get("original_max_position_embeddings") or positions)
    for row in rows:
        largest = max(map(max, row[:3]))
        if largest >= vocabulary_size:
            problem = f"token id {largest}, {role} has {vocabulary_size} tokens: it is "
            problem += f"{tokenizer.decode([largest])!r} of the tokenizer {tokenizer.name_or_path}"
            hint = "use its own tokenizer, or a model that was saved after resize_token_embeddings"
            raise UserError(f"{row.location}: {problem}; {hint}")
        if row.num_tokens > positions:
            problem = f"{row.num_tokens} tokens, the {role} has {positions} positions"
            fix = fix or f"--max_length {positions}"
            raise UserError(f"{row.location}: {problem}; use {fix}")


_unreached: dict[tuple, tuple[str, ...]] = {}  # class and tensors -> what unreached() returned


def unreached(model: Model) -> tuple[str, ...]:
    """Return the parts that no text reaches: name prefixes such as `model.vision_tower.`."""
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    key = type(model), *shapes
    if key not in _unreached:
        _unreached[key] = find_unreached(model)
    return _unreached[key]


def find_unreached(model: Model) -> tuple[str, ...]:
    """Return what unreached() returns, from the gradient of two tokens.

    A copy without weights computes it: parts without a gradient are not reached. Returns () if it
    cannot be computed without weights; then step 0 finds such parts.
    """
    with META:
        twin: Any = type(model)(copy.deepcopy(model.config))
        ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 1, 2, 2)
    parameters = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    try:
        twin.set_experts_implementation("batched_mm")  # the others read how tokens are routed
        logits = twin(input_ids=ids, attention_mask=mask, use_cache=False).logits
        gradients = torch.autograd.grad(logits.sum(), [*parameters.values()], allow_unused=True)
    except FAULTS:
        return ()
    gradient_of = dict(zip(parameters, gradients, strict=True))
    unused = [name for name, gradient in gradient_of.items() if gradient is None]
    parents: set[str] = set()  # the parts with something in them that is reached
    for name in parameters.keys() - set(unused):
        parents.update(prefixes(name))
    parts = []
    for name in unused:
        parts.append(next(prefix for prefix in prefixes(name) if prefix not in parents))
    return tuple(dict.fromkeys(parts))


def prefixes(name: str) -> list[str]:
    """Return the prefixes of a parameter's name: `a.`, `a.b.`, `a.b.c.` of `a.b.c`."""
    return [prefix + "." for prefix in itertools.accumulate(name.split("."), "{}.{}".format)]


# --- what a run has read --------------------------------------------------------------------------


def digest_of_model(name: Name) -> str:
    """Return a digest of the files in a folder, or of a name on the hub and its commit."""
    folder = Path(model_files.model_path(name))
    if model_files.is_on_hub(name):
        return data.digest_of_files([], name, folder.name)
    return data.digest_of_files(sorted(filter(Path.is_file, folder.glob("[!.]*"))))  # no .DS_Store


def input_digests(rows: dict, folders: dict[str, str]) -> dict[str, str]:
    """Return digests of what a run reads; a resumed run must read the same.

    rows: split -> rows of token ids; folders: setting -> folder or hub name of a model, or "".
    """
    digests = {f"content of {split}": digest_of_rows(part) for split, part in rows.items()}
    for name, folder in folders.items():
        if folder:
            digests[f"content of {name}"] = digest_of_model(folder)
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
    # transformers 5.5 does not save generation settings that contradict each other; those of the
    # base model are saved unchanged
    unchecked = mock.patch.object(GenerationConfig, "validate")
    with data.write_folder(folder) as temporary, silence, unchecked, warnings.catch_warnings():
        # peft also looks for the config of the base model, which may be the folder of a LoRA
        warnings.filterwarnings("ignore", "Unable to fetch|Could not find a config|Setting .save")
        if isinstance(model, Model):
            # merging an adapter may have untied the head from the embedding
            base.config.tie_word_embeddings = model.config.tie_word_embeddings
            dtypes = {name: tensor.dtype for name, tensor in base.state_dict().items()}
            weights = weights or untied_state(model)
            for name, weight in weights.items():
                weights[name] = weight.detach().to("cpu", dtypes[name])
            base.save_pretrained(temporary, state_dict=weights)
            copy_processor(base, temporary)
        else:
            model.save_pretrained(temporary, state_dict=weights)
            base.generation_config.save_pretrained(temporary)
        add_ends(temporary, encoder.ends)
        tokenizer = copy.copy(encoder.tokenizer)
        if not encoder.templated:  # other programs would use it, but the model has not seen it
            tokenizer.chat_template = None
            # null in the file: none at all, not that of the base model; see lora.own_tokenizer()
            tokenizer.init_kwargs = {**tokenizer.init_kwargs, "chat_template": None}
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").unlink(missing_ok=True)  # peft's has no content


def copy_processor(base: Model, folder: Path) -> None:
    """Copy the files that a multimodal model also needs, and that its tokenizer does not write."""
    if base.config is base.config.get_text_config():
        return
    for name in PROCESSOR:
        file = model_files.find_file(str(base.name_or_path), name)
        if file:
            shutil.copyfile(file, folder / name)


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
    weights = full_weights(policy, base)
    distributed.on_main(world, lambda: save(policy.scorer.model, base, encoder, folder, weights))


def full_weights(policy: Policy, base: Model) -> Tensors | None:
    """Return name -> full weight on rank 0: of an adapter, or all that a model's files contain.

    Each has its dtype in the files of the base model, so that the host need not hold all in fp32.
    Return None if the model is not sharded, and has them itself.
    """
    if not policy.is_sharded:
        return None
    named: Tensors = {**policy.trainable()}
    if not hasattr(policy.scorer.model, "peft_config"):
        named = untied_state(policy.scorer.model)  # with what is frozen
    dtypes = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    weights = {}
    for name, tensor in named.items():
        weight = policy.full_parameter(tensor)
        if distributed.is_first():
            weights[name] = weight.to("cpu", dtypes.get(name, weight.dtype))
    return weights


def untied_state(model: nn.Module) -> Tensors:
    """Return name -> parameter or saved buffer, each once: a tied weight under its first name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: named[name] for name in model.state_dict() if name in named}
