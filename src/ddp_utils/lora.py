"""Load the model that is trained: all its weights, or a LoRA on them.

peft takes seconds to import, and is imported only where an adapter is used.
"""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ddp_utils import UserError, models
from ddp_utils.models import Dtype, Name
from ddp_utils.policy import Precision


class LoraSpec(NamedTuple):
    """The adapter of a run."""

    r: int = 16  # rank
    alpha: int = 32  # the adapter's output is multiplied by alpha / r
    dropout: float = 0.0
    targets: str = "all-linear"  # or layer names: q_proj,v_proj
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
    adapter = adapter_settings(init_adapter)
    inherited = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha}
    if isinstance(adapter.target_modules, list | set):  # else a pattern, or peft's own choice
        inherited["lora_targets"] = ",".join(sorted(adapter.target_modules))
    for name, value in inherited.items():
        if getattr(config, name) not in (getattr(type(config), name), value):
            raise UserError(f"--{name}: the adapter in init_adapter has {value}; leave it out")
        setattr(config, name, value)


# --- the model of a run ---------------------------------------------------------------------------


def load(
    name: Name, dtype: Dtype, device: torch.device, four_bits: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a model as models.load() does; the LoRA in a folder is merged into its base model."""
    if Path(models.model_path(name), "adapter_config.json").exists():
        return load_merged(name, dtype, device, four_bits=four_bits)
    return models.load(name, dtype, device, four_bits=four_bits)


def meta_model(name: str, adapter: LoraSpec | None) -> PreTrainedModel:
    """Return the model on the meta device, after all checks of load_policy().

    Names and shapes of the tensors in the files are checked; no weight is read.
    Raises UserError as load() and with_adapter() do, or if the adapter does not fit the model.
    """
    model = load(name, "auto", models.META)
    return add(model, adapter).unload() if adapter else model


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
        dtype = dtype if adapter else "auto"
    four_bits = (precision.autocast or dtype) if in_4_bits else None
    model = load(name, dtype, device, four_bits)
    if gradient_checkpointing:
        models.checkpoint_activations(model)
    if not adapter:
        return model.train()
    adapted = add(model, adapter)
    if adapter.merge:
        return adapted.merge_and_unload().requires_grad_(True).train()
    if memory_efficient:
        from ddp_utils.fast import memory_efficient as layers

        layers.apply(adapted)
    return adapted.train()


def load_merged(
    path: Name, dtype: Dtype, device: torch.device, base: str = "", scale: float = 1.0, **more: Any
) -> PreTrainedModel:
    """Load the base model of a LoRA and add `scale` times the LoRA to its weights.

    base: use this one instead of the one that the LoRA names; more: for models.load().
    """
    base = base or adapter_settings(path).base_model_name_or_path
    if not base:
        raise UserError(f"--init_adapter: {path} does not name its base model; use --base")
    adapted = with_adapter(load(base, dtype, device, **more), path)
    if device == models.META:  # there are no weights to be merged
        return adapted.unload()
    for layer in adapted.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(scale)
    model = adapted.merge_and_unload()
    model.name_or_path = models.model_path(path)  # the base model of a later LoRA
    return model


# --- adapters -------------------------------------------------------------------------------------


def add(model: PreTrainedModel, spec: LoraSpec) -> Any:
    """Return a peft model with the LoRA of `spec.init_adapter`, or with a new one.

    Raises UserError if the model has no layer of a name in `spec.targets`.
    """
    from peft import LoraConfig

    if spec.init_adapter:
        return with_adapter(model, spec.init_adapter, spec.dropout)
    targets: Any = spec.targets
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
        unknown = set(targets) - names
        if unknown:
            projections = [name for name in names if name.endswith("proj")]
            layers = ", ".join(sorted(projections or names))
            raise UserError(f"--lora_targets: no layer {min(unknown)} (expected {layers})")
    shape: Any = {"r": spec.r, "lora_alpha": spec.alpha, "lora_dropout": spec.dropout}
    settings = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", **shape)
    with models.reading(f"--model_name: {model.name_or_path}"):  # peft does not support all models
        return _adapt(model, settings)


def adapter_settings(path: Name, dropout: float = 0.0) -> Any:
    """Return the peft settings of a plain LoRA, with the dropout of this run."""
    from peft import PeftConfig

    with models.reading(f"--init_adapter: {path}"):
        settings: Any = PeftConfig.from_pretrained(models.model_path(path))
    if settings.peft_type != "LORA" or settings.megatron_config:
        raise UserError(f"--init_adapter: {path} is not a plain LoRA but {settings.peft_type}")
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
    with models.reading(place):
        adapted = _adapt(model, adapter_settings(path, dropout))
        # peft's own reader would also open a pickle
        file: Any = cached_file(models.model_path(path), "adapter_model.safetensors")
        tensors = load_file(file)
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    allowed = adapted.state_dict() | expected  # an adapter may contain its own embedding
    misshapen = [k for k in tensors if k in allowed and tensors[k].shape != allowed[k].shape]
    missing = expected.keys() - tensors.keys()
    models.check_complete(place, missing, tensors.keys() - allowed.keys(), misshapen)
    if next(adapted.parameters()).device != models.META:
        set_peft_model_state_dict(adapted, tensors)
    return adapted


def _adapt(model: PreTrainedModel, settings: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses a name that transformers 5 deprecates
        return get_peft_model(model, settings)
