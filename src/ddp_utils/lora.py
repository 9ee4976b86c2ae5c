"""Load the model that is trained: all its weights, or a LoRA on them.

peft takes seconds to import, and is imported only where an adapter is used.
"""

import re
import warnings
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ddp_utils import UserError, cli, data, distributed, models
from ddp_utils.models import Dtype, Name, Tokenizer
from ddp_utils.policy import Precision, Tensors

ALL_LINEAR = "all-linear"  # in LoraSpec.targets: every linear layer but the output layer
# types of models that read the weights of out_proj and dt_proj, past a LoRA, as Mamba's kernels do
FUSED_OUT_PROJ = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


class LoraSpec(NamedTuple):
    """The adapter of a run."""

    r: int = 16  # rank
    alpha: int = 32  # the adapter's output is multiplied by alpha / r
    dropout: float = 0.0
    targets: str = ALL_LINEAR  # or names of layers and fused weights: q_proj,v_proj
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


def inherit_config(config: Any, init_adapter: str) -> None:
    """Set lora_r, lora_alpha and lora_targets of `config` to those of an existing adapter.

    Raises UserError if they were set to other values, or if there is no such LoRA.
    """
    with cli.located({"model_name": "--init_adapter"}):
        adapter = adapter_settings(init_adapter)
    inherited = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha}
    if isinstance(adapter.target_modules, list | set):  # else a pattern, or peft's own choice
        targets = {*adapter.target_modules, *(adapter.target_parameters or [])}
        inherited["lora_targets"] = ",".join(sorted(targets))
    for name, value in inherited.items():
        if getattr(config, name) not in (getattr(type(config), name), value):
            raise UserError(f"--{name}: the adapter in init_adapter has {value}; leave it out")
        setattr(config, name, value)


# --- the tokenizer of a run -----------------------------------------------------------------------


def load_tokenizer(name: Name, init_adapter: Name = "", chat_template: str = "auto") -> Tokenizer:
    """Return the tokenizer and chat template of a model, or of the adapter that it begins with.

    chat_template: the flag; if it is "auto", that of the adapter is used.
    Prints a warning if the adapter belongs to another model or has another chat template.
    """
    if is_adapter(name):
        tokenizer = own_tokenizer(name, load_tokenizer(base_of(name)))
    else:
        tokenizer = models.load_tokenizer(name)
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
        differences.append("its chat template, not the model's, is used without --chat_template")
    warn(init_adapter, differences)
    return own


def own_tokenizer(adapter: Name, base: Tokenizer) -> Tokenizer:
    """Return the tokenizer of an adapter; what its folder lacks is that of the base model."""
    settings, values = adapter_settings(adapter), read_settings(adapter)
    ignored = [name for name in values if values[name] and not hasattr(settings, name)]
    warn(adapter, [f"{name}: peft ignores it; a newer peft may not" for name in ignored])
    if models.find_file(adapter, "tokenizer_config.json") is None:
        return base
    own = models.load_tokenizer(adapter)
    own.chat_template = own.chat_template or base.chat_template
    return own


def warn(adapter: Name, problems: list[str]) -> None:
    """Print the problems with an adapter, if there are any, in one line on rank 0."""
    if problems:
        distributed.warn(f"warning: adapter {adapter}: {'; '.join(problems)}")


# --- the model of a run ---------------------------------------------------------------------------


def is_adapter(name: Name) -> bool:
    """Return whether a folder, or a model on the hub, is an adapter."""
    with models.reading(f"--model_name: {name}"):
        return models.find_file(name, "adapter_config.json") is not None


def base_of(adapter: Name) -> str:
    """Return the base model that an adapter names."""
    base = adapter_settings(adapter).base_model_name_or_path
    if not base:
        raise UserError(f"--init_adapter: {adapter} does not name its base model; use --base")
    return base


def load(
    name: Name, dtype: Dtype, device: torch.device, four_bits: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a model as models.load() does; the LoRA in a folder is merged into its base model."""
    if is_adapter(name):
        return load_merged(name, dtype, device, four_bits=four_bits)
    return models.load(name, dtype, device, four_bits=four_bits)


def meta_model(
    name: str, adapter: LoraSpec | None, gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model on the meta device, and lines to print, after all checks of load_policy().

    Names and shapes of the tensors in the files are checked; no weight is read.
    Raises UserError as load() and with_adapter() do, or if the adapter does not fit the model.
    """
    model = load(name, "auto", models.META)
    if gradient_checkpointing:
        models.checkpoint_activations(model)
    model, lines = prepare(model, adapter)
    if adapter and not adapter.merge and is_adapter(name):
        merge = f"python -m ddp_utils.tools.merge {name} merged"
        problem = f"only this project can open a LoRA on {name}, which is an adapter"
        lines.append(f"warning: {problem}; for other programs, run {merge} first")
    return model.unload() if adapter and not adapter.merge else model, lines


def prepare(model: Any, adapter: LoraSpec | None) -> tuple[Any, list[str]]:
    """Add or merge the adapter, and freeze the parts of the model that no text reaches.

    Return the model, and lines to print about what is not trained.
    """
    parts = models.unreached(model)
    lines = []
    if parts:
        names = [part[:-1] for part in parts]
        names[3:] = [f"{len(names) - 3} more parts"] if len(names) > 3 else []
        lines.append(f"frozen, since no text reaches them: {', '.join(names)}")
    if adapter:
        linear, fused = models.linear_layers(model, parts), models.fused_weights(model, parts)
        model = add(model, adapter, parts)
        if not adapter.init_adapter:
            lines += describe_targets(model, adapter.targets, linear, fused)
    for name, parameter in model.named_parameters():
        if (name.removeprefix("base_model.model.") + ".").startswith(parts):
            parameter.requires_grad_(False)
    return model, lines


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
) -> PreTrainedModel:
    """Load the model to be trained; a new LoRA is random, so call torch.manual_seed first.

    adapter: None to train all weights; sharded: for FSDP or DeepSpeed; in_4_bits: QLoRA;
    memory_efficient: with a LoRA, see fast/memory_efficient.py.
    """
    dtype: Any = precision.weights
    if sharded:
        # mapped from files that all processes of a node share, until the weights are sharded
        device = torch.device("cpu")
        dtype = dtype if adapter or is_adapter(name) else "auto"  # a merge rounds
    four_bits = (precision.autocast or dtype) if in_4_bits else None
    model = load(name, dtype, device, four_bits)
    if gradient_checkpointing:
        models.checkpoint_activations(model)
    prepared = prepare(model, adapter)[0]
    if adapter and not adapter.merge and memory_efficient:
        from ddp_utils.fast import memory_efficient as layers

        layers.apply(prepared)
    return prepared.train()


def load_merged(
    path: Name, dtype: Dtype, device: torch.device, base: str = "", scale: float = 1.0, **more: Any
) -> PreTrainedModel:
    """Load the base model of a LoRA and add `scale` times the LoRA to its weights.

    base: use this one instead of the one that the LoRA names; more: for models.load().
    """
    model = load(base or base_of(path), dtype, device, **more)
    size = vocabulary_size(model)
    adapted = with_adapter(model, path)
    others = more_than_lora(adapted, size)
    if adapted.peft_config["default"].use_dora:
        others.append("use_dora")
    if scale != 1 and others:
        raise UserError(f"--scale: {path} is more than B A ({', '.join(others)}); leave it out")
    for layer in adapted.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(scale)
    model = fold(adapted, path)
    model.name_or_path = models.model_path(path)  # the base model of a later LoRA
    return model


def fold(adapted: Any, path: Name) -> PreTrainedModel:
    """Merge an adapter into the weights of its base model, which is returned.

    An output layer that shares the weight of the embedding gets its own if the adapter changes only
    one of them. Raises UserError if log-probs of a text change by more than rounding.
    """
    place = f"--init_adapter: {path}"
    adapted.eval()
    if adapted.peft_config["default"].layer_replication:
        raise UserError(f"{place}: layer_replication: layers with common weights cannot be merged")
    is_meta = adapted.device == models.META  # peft's own errors are raised there, too
    expected: Any = None if is_meta else log_probs_of_a_text(adapted)
    model = adapted.get_base_model()
    tie_word_embeddings = model.config.tie_word_embeddings
    was_tied = untie(model)
    with models.reading(place, "cannot be merged"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft prints that the layers were tied
        model = adapted.merge_and_unload().requires_grad_(True)  # peft has frozen the base model
    if is_meta:
        return model.train()
    layers: Any = model.get_input_embeddings(), model.get_output_embeddings()
    if was_tied and torch.equal(layers[0].weight, layers[1].weight):
        model.config.tie_word_embeddings = tie_word_embeddings  # peft has changed it
        model.tie_weights()
    elif was_tied:
        models.set_untied(model)
    gap = (log_probs_of_a_text(model) - expected).abs().mean().item()
    # measured on a model of 135 M parameters: 8e-6 in fp32, 0.1 in bf16, whose weights are rounded
    bound = 5e-4 if model.dtype == torch.float32 else 0.5
    if not gap <= bound:
        problem = f"it cannot be merged: log-probs change by {gap:.2g} nats (at most {bound:g})"
        raise UserError(f"{place}: {problem}; merge it with the program that trained it")
    return model.train()


def untie(model: PreTrainedModel) -> bool:
    """Copy what the output layer shares with the embedding; return whether that is anything."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    was_tied = False
    for module in head.modules() if head else []:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if any(parameter is other for other in embedding.parameters()):
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
                was_tied = True
    return was_tied


@torch.no_grad()
def log_probs_of_a_text(model: Any) -> Tensor:
    """Return the log-probs [31] of the tokens of a text from all parts of the vocabulary."""
    ids = torch.linspace(0, vocabulary_size(model) - 1, 32, device=model.device).long()
    logits = model(input_ids=ids[None]).logits[0, :-1].float()  # [31, V]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


# --- adapters -------------------------------------------------------------------------------------


def add(model: PreTrainedModel, spec: LoraSpec, unreached: tuple[str, ...] = ()) -> Any:
    """Return a peft model with the LoRA of `spec.init_adapter`, or with a new one.

    unreached: parts without a LoRA, see models.unreached().
    Raises UserError if the model has no layer of a name in `spec.targets`.
    """
    from peft import LoraConfig

    if spec.init_adapter:
        size = vocabulary_size(model)
        adapted = with_adapter(model, spec.init_adapter, spec.dropout)
        if spec.merge:
            return fold(adapted, spec.init_adapter)
        path, more = spec.init_adapter, more_than_lora(adapted, size)
        if more:
            problem = f"{path} has more than a LoRA ({', '.join(more)})"
            command = f"python -m ddp_utils.tools.merge {path} merged --base {model.name_or_path}"
            raise UserError(f"--init_adapter: {problem}; use {command}, then --model_name merged")
        return adapted
    targets = [name.strip() for name in spec.targets.split(",")]
    fused = models.fused_weights(model, unreached)
    layers = {ALL_LINEAR}
    if ALL_LINEAR not in targets:
        paths = [p for p, _ in model.named_modules() if not f"{p}.".startswith(unreached)]
        layers = {path.rpartition(".")[2] for path in paths} - {""}
    unknown = set(targets) - layers - fused
    if unknown:
        projections = [name for name in layers | fused if name.endswith("proj")]
        names = ", ".join(sorted(projections or layers))
        raise UserError(f"--lora_targets: no layer {min(unknown)} (expected {names})")
    weights = [name for name in targets if name in fused]
    if weights and spec.dropout:
        raise UserError(f"--lora_dropout: the LoRA of {weights[0]} has no dropout; use 0")
    modules: Any = ALL_LINEAR if ALL_LINEAR in targets else [t for t in targets if t in layers]
    shape: Any = {"r": spec.r, "lora_alpha": spec.alpha, "lora_dropout": spec.dropout}
    excluded = [re.escape(part[:-1]) + r"(\..*)?" for part in unreached]
    for path, module in model.named_modules():
        # the routers of Llama 4 and Phi-MoE are linear layers that return tuples
        if isinstance(module, torch.nn.Linear) and type(module).__name__.endswith("Router"):
            excluded.append(re.escape(path))
    if ALL_LINEAR in targets and model.config.model_type in FUSED_OUT_PROJ:
        excluded.append(r".*\.(?:out_proj|dt_proj)")
    if excluded:
        shape["exclude_modules"] = "|".join(excluded)
    if weights:
        shape["target_parameters"] = weights
    settings = LoraConfig(target_modules=modules, task_type="CAUSAL_LM", **shape)
    with models.reading(f"--lora_targets {spec.targets}"):  # peft does not support all models
        return _adapt(model, settings)


def more_than_lora(adapted: Any, vocabulary: int) -> list[str]:
    """Return what an adapter adds to the base model besides LoRA matrices.

    vocabulary: number of tokens of the base model.
    """
    settings = adapted.peft_config["default"]
    names = ("modules_to_save", "trainable_token_indices", "bias")
    more = [name for name in names if getattr(settings, name) not in (None, [], {}, "none")]
    if vocabulary_size(adapted) != vocabulary:
        more.append("new tokens")
    elif adapted.has_own_embedding:
        more.append("its own embedding")
    return more


def describe_targets(adapted: Any, targets: str, linear: set[str], fused: set[str]) -> list[str]:
    """Return lines to print about experts: peft may add them to `targets`, or leave layers out.

    linear: paths of the linear layers that a text reaches; fused: names of fused weights.
    """
    lines = []
    names = targets.split(",")
    weights = set(adapted.peft_config["default"].target_parameters or [])
    if weights:
        lines.append(f"LoRA also on the fused weights of experts: {', '.join(sorted(weights))}")
    modules = adapted.get_base_model().named_modules()
    missing = set()
    for path in linear - {path for path, module in modules if hasattr(module, "lora_A")}:
        if ALL_LINEAR in names or path.rpartition(".")[2] in names:
            missing.add(".".join(path.split(".")[-2:]))
    experts = fused - weights if ALL_LINEAR in names else set()
    if missing | experts:
        line = f"{targets} does not reach {', '.join(sorted(missing | experts))}: they stay frozen"
        flag = f"; for all experts, use --lora_targets {','.join([targets, *sorted(experts)])}"
        lines.append(line + flag * bool(experts))
    return lines


def read_settings(path: Name) -> dict[str, Any]:
    """Return the content of an adapter's adapter_config.json."""
    with models.reading(f"--init_adapter: {path}"):
        file = models.find_file(path, "adapter_config.json")
        if file is None and not data.resolve(path).is_dir():
            cached_file(path, "adapter_config.json")  # raises what is wrong with the hub
    if file is None:
        raise UserError(f"--init_adapter: {path}: no adapter_config.json (expected that of a LoRA)")
    return data.read_json(file)


def adapter_settings(path: Name, dropout: float = 0.0) -> Any:
    """Return the peft settings of a plain LoRA, with the dropout of this run."""
    from peft import PeftConfig

    values = read_settings(path)
    kind = values.get("peft_type")
    for name in ("megatron_config", "alora_invocation_tokens"):
        kind = name if values.get(name) else kind
    if kind != "LORA":
        problem = f"is not a plain LoRA but {kind}; use a LoRA, or merge it with peft first"
        raise UserError(f"--init_adapter: {path} {problem}")
    with models.reading(f"--init_adapter: {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # own_tokenizer() prints what peft ignores
        settings: Any = PeftConfig.from_pretrained(models.model_path(path))
    start = settings.init_lora_weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        raise UserError(f"--init_adapter: {path} began with {start}, which changes the base model")
    settings.init_lora_weights = True  # all tensors are read from the file
    settings.lora_dropout = dropout
    settings.inference_mode = False
    return settings


def with_adapter(model: PreTrainedModel, path: Name, dropout: float = 0.0) -> Any:
    """Return a peft model with the LoRA in a folder.

    Raises UserError unless its tensors are exactly those that its settings ask for on this model.
    """
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    place = f"--init_adapter: {path}"
    settings = adapter_settings(path, dropout)
    with models.reading(place):
        file = models.find_file(path, "adapter_model.safetensors")
        if file is None:  # perhaps there is a pickle
            raise UserError(f"{place}: no adapter_model.safetensors; save it with a current peft")
        tensors = load_file(file)
        resize_vocabulary(model, tensors)
        adapted = _adapt(model, settings)
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # an adapter may contain its own embedding
    allowed = {k.replace(".default", ""): v for k, v in adapted.state_dict().items()} | expected
    misshapen = [k for k in tensors if k in allowed and tensors[k].shape != allowed[k].shape]
    # peft saves it again only if it has a LoRA, as `base_layer`, or another size
    own = tensors.keys() - expected.keys()
    adapted.has_own_embedding = bool(own) and not any(".base_layer." in name for name in own)
    missing = expected.keys() - tensors.keys()
    models.check_complete(place, missing, tensors.keys() - allowed.keys(), misshapen)
    if next(adapted.parameters()).device != models.META:
        set_peft_model_state_dict(adapted, tensors)
    return adapted


def resize_vocabulary(model: PreTrainedModel, tensors: Tensors) -> None:
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


def _adapt(model: PreTrainedModel, settings: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses a name that transformers 5 deprecates
        return get_peft_model(model, settings)
