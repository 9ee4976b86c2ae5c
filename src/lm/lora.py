"""LoRA adapters: the files of an existing one, a new one, and merging into the base model.

Only runs with an adapter import this module, since peft takes seconds to import.
"""

import itertools
import os.path
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists as is_target
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel as Model
from transformers.pytorch_utils import Conv1D

from ddp_utils import UserError, cli, data, distributed
from ddp_utils.policy import Tensors
from lm import model_files
from lm.model_files import META, LoraSpec, Name, Tokenizer, reading

ALL_LINEAR = "all-linear"  # in LoraSpec.targets: every linear layer but the output layer
# types of models that read the weights of out_proj and dt_proj, past a LoRA, as Mamba's kernels do
FUSED_OUT_PROJ = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "jamba", "bamba"}
FUSED_OUT_PROJ |= {"granitemoehybrid", "zamba2"}
PEFT = "base_model.model."  # the name of a tensor in a peft model begins with it
# what the file of an adapter may have in a name: this beginning and wrappers around it, wrappers of
# layers, and the adapter's own name, as in lora_A.default.weight
ADDED = re.compile(
    r"^.*\bbase_model\.model\.|\b_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
    r"|(\.lora_magnitude_vector)\..*|(?:(\.lora_\w+)|\.modules_to_save)\.(?!(?:weight|bias)$)[^.]+"
)


def inherit_config(config: Any, init_adapter: str) -> None:
    """Set lora_r, lora_alpha and lora_targets of `config` to those of an existing adapter.

    Raises UserError if a flag has another value, or a file one that is neither it nor the default,
    or if there is no such LoRA.
    """
    flags = vars(config).get("places", {}).values()
    adapter = adapter_settings(init_adapter)
    inherited = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha}
    if isinstance(adapter.target_modules, list | set):  # else a pattern, or peft's own choice
        targets = {*adapter.target_modules, *(adapter.target_parameters or [])}
        inherited["lora_targets"] = ",".join(sorted(targets))
    for name, value in inherited.items():
        own = getattr(config, name)
        # all-linear is a word for the names that the adapter's file has
        is_flag = f"--{name}" in flags and own != ALL_LINEAR
        if own != value and (is_flag or own != getattr(type(config), name)):
            raise UserError(f"--{name}: the adapter in init_adapter has {value}; leave it out")
        setattr(config, name, value)


# --- files of an adapter --------------------------------------------------------------------------


def read_settings(path: Name) -> dict[str, Any]:
    """Return the content of an adapter's adapter_config.json."""
    with cli.located({"model_name": "--init_adapter"}):
        file = model_files.find_file(path, "adapter_config.json")
    model_files.check_folder(f"--init_adapter: {path}", path, expects_adapter=file is None)
    if file is None:
        raise UserError(f"--init_adapter: {path}: no adapter_config.json (expected that of a LoRA)")
    return data.read_json(file)


def adapter_settings(path: Name, dropout: float = 0.0) -> Any:
    """Return the peft settings of a plain LoRA, with the dropout of this run."""
    values = read_settings(path)
    kind = values.get("peft_type")
    for name in ("megatron_config", "alora_invocation_tokens"):
        kind = name if values.get(name) else kind
    if "lora_parameters" in values:
        raise UserError(f"--init_adapter: {path} is an adapter of MLX; merge it with mlx_lm.fuse")
    if kind != "LORA":
        problem = f"is not a plain LoRA but {kind}; use a LoRA, or merge it with peft first"
        raise UserError(f"--init_adapter: {path} {problem}")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        problem = f"began with {start}, which changes the base model"
        hint = "merge it with peft, or convert it (path_initial_model_for_weight_conversion)"
        raise UserError(f"--init_adapter: {path} {problem}; {hint}")
    with reading(f"--init_adapter: {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # own_tokenizer() prints what peft ignores
        settings: Any = PeftConfig.from_pretrained(model_files.model_path(path))
    for field in ("rank_pattern", "alpha_pattern"):  # their keys may name wrappers
        pattern = getattr(settings, field)
        setattr(settings, field, {ADDED.sub("", key): value for key, value in pattern.items()})
    settings.init_lora_weights = True  # all tensors are read from the file
    settings.lora_dropout = dropout
    settings.inference_mode = False
    return settings


def base_of(adapter: Name) -> str:
    """Return the base model that an adapter names."""
    settings = adapter_settings(adapter)
    base = settings.base_model_name_or_path
    if not base:
        raise UserError(f"--init_adapter: {adapter} does not name its base model; use --base")
    # "unsloth" is not a revision but a mark of that program
    if settings.revision not in (None, "", "main", "unsloth") and not data.resolve(base).is_dir():
        problem = f"{adapter}: its base model is revision {settings.revision} of {base}"
        hint = f"hf download {base} --revision {settings.revision} --local-dir FOLDER"
        hint = f"run `{hint}`, and use --model_name FOLDER, or lm.merge with --base FOLDER"
        raise UserError(f"--init_adapter: {problem}; {hint}")
    is_path = base.startswith(("/", ".")) or "\\" in base or base.count("/") > 1
    if is_path and not data.resolve(base).is_dir():
        problem = f"{adapter}: its base model {base} is not on this machine"
        hint = f"use --model_name BASE --init_adapter {adapter}, or lm.merge with --base BASE"
        raise UserError(f"--init_adapter: {problem}; {hint}")
    return base


def load_tokenizer(name: Name, init_adapter: Name, chat_template: str) -> Tokenizer:
    """Return the tokenizer of `name`, which may be an adapter, or of `init_adapter`.

    See models.load_tokenizer().
    """
    if model_files.is_adapter(name):
        tokenizer = own_tokenizer(name, load_tokenizer(base_of(name), "", chat_template))
    else:
        tokenizer = model_files.read_tokenizer(name)
    if not init_adapter:
        return tokenizer
    own = own_tokenizer(init_adapter, tokenizer)
    differences = []
    base = adapter_settings(init_adapter).base_model_name_or_path
    if base and data.resolve(base).resolve() != data.resolve(name).resolve():
        differences.append(f"it was trained on {base}, not on {name}")
    tokens = own.get_vocab().items() ^ tokenizer.get_vocab().items()
    if tokens:
        differences.append(f"its tokenizer has {len(tokens)} other tokens than the model's")
    if chat_template == "auto" and own.chat_template != tokenizer.chat_template:
        used = "its chat template, not the model's, is used"
        if not own.chat_template:
            used = "it was trained without a chat template, and none is used"
        differences.append(f"{used} without --chat_template")
    warn(init_adapter, differences)
    return own


def own_tokenizer(adapter: Name, base: Tokenizer) -> Tokenizer:
    """Return the tokenizer of an adapter; what its folder lacks is that of the base model."""
    settings, values = adapter_settings(adapter), read_settings(adapter)
    model_files.check_folder(f"--init_adapter: {adapter}", adapter, expects_adapter=True)
    ignored = [name for name in values if values[name] and not hasattr(settings, name)]
    warn(adapter, [f"{name}: peft ignores it; a newer peft may not" for name in ignored])
    file = model_files.find_file(adapter, "tokenizer_config.json")
    if file is None:
        return base
    own = model_files.read_tokenizer(adapter)
    if data.read_json(file).get("chat_template", "") is not None:  # null: trained without one
        own.chat_template = own.chat_template or base.chat_template
    return own


def warn(adapter: Name, problems: list[str]) -> None:
    """Print the problems with an adapter, if there are any, in one line on rank 0."""
    if problems:
        distributed.warn(f"warning: adapter {adapter}: {'; '.join(problems)}")


# --- merging --------------------------------------------------------------------------------------


def merge(model: Model, path: Name, scale: float = 1.0) -> Model:
    """Add `scale` times the LoRA in a folder to its base model, and return that."""
    adapted = with_adapter(model, path)
    others = list(adapted.more_than_lora)
    if adapted.peft_config["default"].use_dora:
        others.append("use_dora")
    if scale != 1 and others:
        raise UserError(f"--scale: {path} is more than B A ({', '.join(others)}); leave it out")
    for layer in adapted.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(scale)
    model = merge_checked(adapted, path)
    model.name_or_path = model_files.full_name(path)  # the base model of a later LoRA
    return model


def merge_checked(adapted: Any, path: Name) -> Model:
    """Merge an adapter into its base model as peft does, compare log-probs, and return the model.

    An output layer that shares the weight of the embedding gets its own if the adapter changes only
    one of them. Raises UserError if log-probs of a text change by more than rounding.
    """
    place = f"--init_adapter: {path}"
    adapted.eval()
    if adapted.peft_config["default"].layer_replication:
        raise UserError(f"{place}: layer_replication: layers with common weights cannot be merged")
    is_meta = adapted.device == META  # peft's own errors are raised there, too
    expected: Any = None if is_meta else log_probs_of_a_text(adapted)
    model = adapted.get_base_model()
    if not is_meta and not expected.isfinite().all():
        model_files.check_weights(model)
    tie_word_embeddings = model.config.tie_word_embeddings
    was_tied = untie(model)
    with reading(place, "cannot be merged"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft prints that the layers were tied
        model = adapted.merge_and_unload().requires_grad_(True)  # peft has frozen the base model
    if is_meta:
        return model.train()
    layers: Any = model.get_input_embeddings(), model.get_output_embeddings()
    if was_tied and is_equal_up_to_rounding(layers[0].weight, layers[1].weight):
        model.config.tie_word_embeddings = tie_word_embeddings  # peft has changed it
        model.tie_weights()
    elif was_tied:
        model_files.set_untied(model)
    gap = (log_probs_of_a_text(model) - expected).abs().mean().item()
    # measured on a model of 135 M parameters: 8e-6 in fp32, 0.1 in bf16, whose weights are rounded
    bound = 5e-4 if model.dtype == torch.float32 else 0.5
    if not gap <= bound:
        problem = f"it cannot be merged: log-probs change by {gap:.2g} nats (at most {bound:g})"
        raise UserError(f"{place}: {problem}; merge it with the program that trained it")
    return model.train()


def untie(model: Model) -> bool:
    """Copy what the output layer shares with the embedding; return whether that is anything."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    was_tied = False
    for module in head.modules() if head else []:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if any(parameter is other for other in embedding.parameters()):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
                was_tied = True
    return was_tied


@torch.no_grad()
def is_equal_up_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two weights that were merged with the same LoRA are equal up to rounding.

    One of them was computed with A and B transposed, whose sums some CPUs round in another way.
    """
    bound = 4 * torch.finfo(one.dtype).eps * one.abs().max()
    return bool((one - other).abs().max() <= bound)


@torch.no_grad()
def log_probs_of_a_text(model: Any) -> Tensor:
    """Return the log-probs [31] of the tokens of a text from all parts of the vocabulary."""
    ids = torch.linspace(0, vocabulary_size(model) - 1, 32, device=model.device).long()
    logits = model(input_ids=ids[None]).logits[0, :-1].float()  # [31, V]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


# --- adding an adapter ----------------------------------------------------------------------------


def add(model: Model, spec: LoraSpec, unreached: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """Return a peft model with a new LoRA or that of `spec.init_adapter`, and lines to print.

    With `spec.merge`, return the base model, into which the adapter is merged.

    unreached: parts without a LoRA, see models.unreached().
    Raises UserError if the model has no layer of a name in `spec.targets`.
    """
    if not spec.init_adapter:
        return new(model, spec, unreached)
    path = spec.init_adapter
    adapted = with_adapter(model, path, spec.dropout)
    if spec.merge:
        return merge_checked(adapted, path), []
    if adapted.more_than_lora:
        problem = f"{path} has more than a LoRA ({', '.join(adapted.more_than_lora)})"
        command = f"python -m lm.merge {path} merged --base {model.name_or_path}"
        raise UserError(f"--init_adapter: {problem}; use {command}, then --model_name merged")
    return adapted, []


def new(model: Model, spec: LoraSpec, unreached: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Return a peft model with a new LoRA, and lines to print; see add()."""
    targets = [name.strip() for name in spec.targets.split(",")]
    linear, fused = linear_layers(model, unreached), fused_weights(model, unreached)
    paths = [p for p, _ in model.named_modules() if not f"{p}.".startswith(unreached)]
    layers = {path.rpartition(".")[2] for path in paths} - {""}
    unknown = set(targets) - layers - fused - {ALL_LINEAR}
    if unknown:
        projections = [name for name in layers | fused if name.endswith("proj")]
        names = ", ".join(sorted(projections or layers))
        raise UserError(f"--lora_targets: no layer {min(unknown)} (expected {names})")
    weights = [name for name in targets if name in fused]
    if weights and spec.dropout:
        raise UserError(f"--lora_dropout: the LoRA of {weights[0]} has no dropout; use 0")
    excluded = [re.escape(part[:-1]) + r"(\..*)?" for part in unreached]
    for path, module in model.named_modules():
        # the routers of Llama 4 and Phi-MoE are linear layers that return tuples
        if isinstance(module, nn.Linear) and type(module).__name__.endswith("Router"):
            excluded.append(re.escape(path))
    if ALL_LINEAR in targets and model.config.model_type in FUSED_OUT_PROJ:
        excluded.append(r".*\.(?:out_proj|dt_proj)")
    modules: Any = [name for name in targets if name in layers]
    if ALL_LINEAR in targets:  # for peft it is a word of its own, and no name in a list
        of_linear = {path.rpartition(".")[2] for path in linear}
        others = {*modules} - of_linear  # such as lm_head, or an embedding
        if others and fused:  # for these, peft makes more of the word than the linear layers
            problem = f"{min(others)} beside {ALL_LINEAR} is not supported for mixtures of experts"
            raise UserError(f"--lora_targets: {problem}; name all layers")
        modules = sorted(of_linear | others) if others else ALL_LINEAR
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=modules,
        target_parameters=weights or None,
        exclude_modules="|".join(excluded) or None,
    )
    with reading(f"--lora_targets {spec.targets}"):  # peft does not support all models
        adapted = adapt(model, settings)
    lines = describe_targets(adapted, targets, linear, fused)
    if model.name_or_path and model_files.is_adapter(model.name_or_path, needs_weights=False):
        problem = "the result is a LoRA on a LoRA, which only these scripts can load"
        lines.append(f"warning: {problem}; make a model of it with python -m lm.merge")
    return adapted, lines


def describe_targets(
    adapted: Any, targets: list[str], linear: set[str], fused: set[str]
) -> list[str]:
    """Return lines to print about experts: peft may add them to `targets`, or leave layers out.

    linear: paths of the linear layers that process text; fused: names of fused weights.
    """
    lines = []
    weights = set(adapted.peft_config["default"].target_parameters or [])
    if weights:
        lines.append(f"LoRA also on the fused weights of experts: {', '.join(sorted(weights))}")
    modules = adapted.get_base_model().named_modules()
    missing = set()
    for path in linear - {path for path, module in modules if hasattr(module, "lora_A")}:
        if ALL_LINEAR in targets or path.rpartition(".")[2] in targets:
            missing.add(".".join(path.split(".")[-2:]))
    experts = sorted(fused - weights) if ALL_LINEAR in targets else []
    if missing or experts:
        names = ", ".join(sorted([*missing, *experts]))
        line = f"{','.join(targets)} does not reach {names}: they stay frozen"
        if experts:
            line += f"; for all experts, use --lora_targets {','.join([*targets, *experts])}"
        lines.append(line)
    return lines


def linear_layers(model: Model, unreached: tuple[str, ...]) -> set[str]:
    """Return the paths of the linear layers that process text, without the output layer."""
    head = model.get_output_embeddings()
    paths = set()
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module is not head
        if is_linear and not f"{path}.".startswith(unreached):
            paths.add(path)
    return paths


def fused_weights(model: Model, unreached: tuple[str, ...] = ()) -> set[str]:
    """Return the short names of the weights [experts, in, out] that all-linear does not reach."""
    names = set()
    for path, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            if f"{path}.{key}.".startswith(unreached):
                continue
            if weight.ndim == 3 and weight.shape[0] > 1 and not isinstance(module, nn.Conv1d):
                layer = path.rpartition(".")[2]
                names.add(f"{layer}.weight" if key == "weight" else key)
    return names


def with_adapter(model: Model, path: Name, dropout: float = 0.0) -> Any:
    """Return a peft model with the LoRA in a folder.

    Its attribute `more_than_lora` lists what it adds to the base model besides LoRA matrices.
    Raises UserError unless its tensors are exactly those that its settings ask for on this model,
    under names that differ in prefixes at most, and all values are finite.
    """
    place = f"--init_adapter: {path}"
    settings = adapter_settings(path, dropout)
    size = vocabulary_size(model)
    with reading(place):
        file = model_files.find_file(path, "adapter_model.safetensors")
        if file is None:  # perhaps there is a pickle
            raise UserError(f"{place}: no adapter_model.safetensors; save it with a current peft")
        in_file = load_file(file)
        model_files.check_finite(f"{place}: {Path(file).name}", in_file)
        names = names_in_model(model, in_file)
        move_targets(settings, model, names)
        tensors = {names[name]: tensor for name, tensor in in_file.items()}
        resize_vocabulary(model, tensors)
        adapted = adapt(model, settings)
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if expected.keys() - tensors.keys():  # transformers 4 had each expert by itself
            from peft.utils.transformers_weight_conversion import (
                convert_peft_adapter_state_dict_for_transformers as fuse,
            )

            tensors = fuse(adapted, settings, tensors)
    # an adapter may contain its own embedding
    allowed = {k.replace(".default", ""): v for k, v in adapted.state_dict().items()} | expected
    misshapen = [k for k in tensors if k in allowed and tensors[k].shape != allowed[k].shape]
    missing = expected.keys() - tensors.keys()
    theirs = {ours: name for name, ours in names.items()}
    unexpected = [theirs.get(name, name) for name in tensors.keys() - allowed.keys()]
    base = read_settings(path).get("base_model_name_or_path") or "that it was trained on"
    advice = f"use the base model {base}, and the adapter_config.json that was saved with it"
    model_files.check_complete(place, missing, unexpected, misshapen, advice)
    warn(path, [f"{name} is read as {ours}" for name, ours in names.items() if name != ours][:1])
    fields = ("modules_to_save", "trainable_token_indices", "bias")
    more = [name for name in fields if getattr(settings, name) not in (None, [], {}, "none")]
    own = tensors.keys() - expected.keys()
    if vocabulary_size(adapted) != size:
        more.append("new tokens")
    elif own and not any(".base_layer." in name for name in own):
        # peft saves it again only if it has a LoRA, as `base_layer`, or another size
        more.append("its own embedding")
    adapted.more_than_lora = more
    if adapted.device != META:
        set_peft_model_state_dict(adapted, tensors)
    return adapted


def names_in_model(model: Model, names: Iterable[str]) -> dict[str, str]:
    """Return the name in a peft model of each tensor of an adapter's file.

    A tensor belongs to the layer whose path has the longest end in common with its name; if these
    are several, as in a model with a vision tower, to that of the text decoder. Names stay as they
    are if two of them would become one.
    """
    ends: dict[str, list[str]] = {}  # end of a path -> paths
    for path, _ in model.named_modules():
        parts = path.split(".")
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), []).append(path)
    decoder = decoder_of(model)
    renamed = {name: name for name in names}
    for name in renamed:
        parts = ADDED.sub(r"\1\2", name).split(".")
        spans = itertools.combinations(range(len(parts) + 1), 2)
        for start, end in sorted(spans, key=lambda span: (span[0] - span[1], -span[1])):
            layer = ".".join(parts[start:end])
            paths = ends.get(layer, [])
            texts = [path for path in paths if path.startswith(decoder)]
            paths = [layer] if layer in paths else texts or paths
            if len(paths) == 1:
                renamed[name] = PEFT + ".".join([*paths, *parts[end:]])
            if paths:
                break
    return renamed if len({*renamed.values()}) == len(renamed) else {name: name for name in renamed}


def decoder_of(model: Model) -> str:
    """Return the beginning of the names of the text decoder, such as "model.language_model."."""
    decoder: Any = model.get_decoder()
    paths = [path for path, part in model.named_modules() if part is decoder]
    return f"{paths[0]}." if any(paths) else ""


def move_targets(settings: Any, model: Model, names: dict[str, str]) -> None:
    """Adjust peft's settings of an adapter if its layers have other paths in the model.

    names: name of a tensor in the file -> name in the model. The settings select layers by their
    paths in the model of the training. Outside the text decoder, only layers with a tensor count.
    """
    decoder = decoder_of(model)
    pairs = [pair for pair in names.items() if pair[1].startswith(PEFT + decoder)] or [("", "")]
    theirs, ours = ADDED.sub(r"\1\2", pairs[0][0]), pairs[0][1].removeprefix(PEFT)
    end = len(os.path.commonprefix([theirs[::-1], ours[::-1]]))  # the length of what is common
    theirs, ours = theirs[: len(theirs) - end], ours[: len(ours) - end]
    if theirs == ours:
        return
    old = {path: theirs + path.removeprefix(ours) for path, _ in model.named_modules()}
    layers = {name.removeprefix(PEFT).partition(".lora_")[0] for name in names.values()}
    inside = [path for path in old if path.startswith(decoder) or path in layers]
    targets = {path for path in inside if is_target(settings, old[path])}
    targets = targets or {path for path in inside if is_target(settings, path)}
    if targets != {path for path in old if is_target(settings, path)}:
        settings.target_modules, settings.exclude_modules = targets, None
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(settings, field)
        keys = {path: get_pattern_key(pattern, old[path]) for path in targets}
        moved = {path: pattern[key] for path, key in keys.items() if key in pattern}
        setattr(settings, field, moved | pattern)


def resize_vocabulary(model: Model, tensors: Tensors) -> None:
    """Resize the embedding to the size of that which an adapter contains, if it does."""
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    names = [f"base_model.model.{name}." for name, part in model.named_modules() if part in layers]
    for key, tensor in tensors.items():
        is_own = key.startswith(tuple(names)) and key.endswith("weight") and "lora_" not in key
        if is_own and len(tensor) != vocabulary_size(model):
            model.resize_token_embeddings(len(tensor), mean_resizing=False)


def vocabulary_size(model: Any) -> int:
    """Return the number of rows of the embedding."""
    return model.get_input_embeddings().weight.shape[0]


def adapt(model: Model, settings: PeftConfig) -> Any:
    """Return a peft model with a new adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses a name that transformers 5 deprecates
        return get_peft_model(model, settings)
