"""A LoRA on a model: fresh, or carried on from a folder."""

import warnings

from peft import LoraConfig, PeftConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

from ddp_utils import UserError, models


def inherit_config(config):
    """Give the settings rank, scale and targets of the LoRA in `init_adapter`.

    Raises UserError if others were asked for, or there is no such LoRA.
    """
    adapter = adapter_settings(config.init_adapter)
    inherited = {"lora_r": adapter.r, "lora_alpha": adapter.lora_alpha}
    if isinstance(adapter.target_modules, (list, set)):  # else a pattern, or peft's own choice
        inherited["lora_targets"] = ",".join(sorted(adapter.target_modules))
    for name, value in inherited.items():
        if getattr(config, name) not in (getattr(type(config), name), value):
            raise UserError(f"--{name}: the adapter that is carried on has {value}; leave it out")
        setattr(config, name, value)


def adapter_settings(path, dropout=0.0):
    """Of a plain LoRA, with another dropout: its own was that of the run which made it."""
    with models.reading(f"--init_adapter: {path}"):
        settings = PeftConfig.from_pretrained(str(models.model_path(path)))
    if settings.peft_type != "LORA" or settings.megatron_config:
        raise UserError(f"--init_adapter: {path} is not a plain LoRA but {settings.peft_type}")
    start = settings.init_lora_weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        raise UserError(f"--init_adapter: {path} began with {start}, which changes the base model")
    settings.init_lora_weights = True  # all its tensors come from the file
    settings.lora_dropout = dropout
    settings.inference_mode = False
    return settings


def fresh_adapter(model, config):
    """Settings of a new LoRA; UserError if one of lora_targets is not in the model."""
    targets = config.lora_targets
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",")]
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()} - {""}
        for target in targets:
            if target not in names:
                layers = sorted(n for n in names if n.endswith("proj")) or sorted(names)
                raise UserError(f"--lora_targets: no layer {target}; there are {', '.join(layers)}")
    return LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def add(model, config):
    """Put on a model the LoRA of `init_adapter`, or a fresh one."""
    if config.init_adapter:
        return with_adapter(model, config.init_adapter, config.lora_dropout)
    settings = fresh_adapter(model, config)
    with models.reading(f"--model_name: {config.model_name}"):  # peft does not know all of them
        return adapt(model, settings)


def with_adapter(model, path, dropout=0.0):
    """Put the LoRA of a folder on a model.

    Raises UserError unless its tensors are exactly those that its settings ask for on this model.
    """
    place = f"--init_adapter: {path}"
    with models.reading(place):
        model = adapt(model, adapter_settings(path, dropout))
        tensors = load_peft_weights(str(models.model_path(path)), device="cpu")
        asked = get_peft_model_state_dict(model, save_embedding_layers=False)
    known = model.state_dict() | asked  # an adapter may bring an embedding of its own
    misshapen = [k for k in tensors if k in known and tensors[k].shape != known[k].shape]
    missing, unexpected = asked.keys() - tensors.keys(), tensors.keys() - known.keys()
    models.check_complete(place, missing, unexpected, misshapen)
    if next(model.parameters()).device != models.META:
        set_peft_model_state_dict(model, tensors)
    return model


def fold(path, dtype, device, base="", scale=1.0, **options):
    """Return the base model of a LoRA with `scale` times the LoRA added to its weights.

    base: another one than the LoRA names; dtype, device, options: as of models.load().
    """
    base = base or adapter_settings(path).base_model_name_or_path
    if not base:
        raise UserError(f"--init_adapter: {path} does not name its base; give --base")
    model = with_adapter(models.load(base, dtype, device, **options), path)
    if device == models.META:  # which has no weights
        return model.unload()
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(scale)
    model = model.merge_and_unload()
    model.name_or_path = str(models.model_path(path).resolve())  # the base of what is trained on it
    return model


def adapt(model, settings):
    """Put a LoRA with these settings on a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers 5 for a name that is going
        return get_peft_model(model, settings)
