"""Load a causal language model, put a LoRA on it or not, save it."""

import math
import shutil
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from ddp_utils import UserError, checkpoint, dist, safely
from ddp_utils.pairs import model_path

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def outline(config):
    """The model without its weights, on the meta device: names and shapes in a second.

    Raises UserError if there is no such model, or the LoRA's targets are not in it.
    """
    try:
        settings = AutoConfig.from_pretrained(
            str(model_path(config.model_name)), trust_remote_code=False
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except (ImportError, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"--model_name: no model at {config.model_name}: {reason}") from error
    fresh = config.fine_tuning == "lora" and not config.init_adapter
    if fresh and config.lora_targets != "all-linear":
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()} - {""}
        for target in _targets(config):
            if target not in names:
                found = sorted(n for n in names if n.endswith("proj")) or sorted(names - {""})
                raise UserError(f"--lora_targets: no layer {target}; there are {', '.join(found)}")
    return model


def _targets(config):
    return [name.strip() for name in config.lora_targets.split(",")]


def carry_on(config):
    """Give the settings rank, scale and targets of the LoRA that init_adapter names, if any.

    Raises UserError if others were asked for, or there is no such LoRA.
    """
    its = adapter_settings(config.init_adapter) if config.init_adapter else None
    if its is None or config.fine_tuning == "full":  # where it is merged, and none is trained
        return
    own = {"lora_r": its.r, "lora_alpha": its.lora_alpha}
    if isinstance(its.target_modules, (list, set)):  # else a pattern, or peft's own choice
        own["lora_targets"] = ",".join(sorted(its.target_modules))
    for name, value in own.items():
        if getattr(config, name) not in (getattr(type(config), name), value):
            raise UserError(f"--{name}: the adapter that is carried on has {value}; leave it out")
        setattr(config, name, value)


def adapter_settings(path, dropout=0.0):
    """Of a plain LoRA, with another dropout: its own was that of the run which made it."""
    try:
        settings = PeftConfig.from_pretrained(str(model_path(path)))
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(f"--init_adapter: no adapter at {path}: {reason}") from error
    if settings.peft_type != "LORA" or settings.megatron_config:
        raise UserError(f"--init_adapter: {path} is not a plain LoRA but {settings.peft_type}")
    settings.lora_dropout = dropout
    return settings


def check_fit(model, data):
    """The model has an embedding for every token and a position for every pair."""
    words = model.get_input_embeddings().weight.shape[0]
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # beyond these a row's angles, and its log-probs, would hang on the others in its batch
        positions = min(positions, rope.get("original_max_position_embeddings") or positions)
    for pair in (pair for split in data.values() for pair in split):
        if max(map(max, pair[:3])) >= words:
            raise UserError(f"{pair.where}: token id {max(map(max, pair[:3]))}, model has {words}")
        if pair.row > positions:
            raise UserError(
                f"{pair.where}: {pair.row} tokens, the model has {positions} positions; "
                f"give --max_length {positions}"
            )


def precision(config, device):
    """(dtype of the weights that are loaded, dtype of autocast or None).

    Trainable weights are always fp32: at a learning rate of 5e-7 an update of a bf16 weight is
    below half the distance to its neighbour, and 99 % of them would never move.
    """
    # None for auto
    wanted = torch.float32 if config.fine_tuning == "full" else DTYPES.get(config.base_dtype)
    autocast = DTYPES.get(getattr(config, "mixed_precision", "auto"))
    if autocast is None and device.type != "cpu" and config.use_mixed_precision:
        has_bf16 = device.type == "xpu" or torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = torch.bfloat16 if has_bf16 else torch.float16
    if wanted == torch.bfloat16 and config.use_mixed_precision:
        autocast = wanted  # on a CPU that was asked for it
    frozen = torch.bfloat16 if autocast == torch.bfloat16 else torch.float32
    return wanted or frozen, autocast


def check_same_precision(config, world):
    """All ranks must train in one precision: gradients with and without a loss scale do not mix."""
    has_bf16 = precision(config, world.device)[1] == torch.bfloat16
    votes = dist.all_sum(torch.tensor([float(has_bf16)], device=world.device), world).item()
    if 0 < votes < world.world_size:
        raise UserError(
            f"{votes:.0f} of {world.world_size} GPUs have bf16; "
            "give --no_use_mixed_precision, or leave the others out"
        )


def load(name, dtype, device, four_bits=None):
    """Read safetensors straight onto the device: a host never holds one copy per process.

    four_bits: a dtype to compute in, with weights that are kept in 4 bits (needs bitsandbytes).
    """
    placement = None if device.type == "cpu" else {"": device}
    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # as in QLoRA
    kinds |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": four_bits}
    with safely.reading(name):
        model = AutoModelForCausalLM.from_pretrained(
            str(model_path(name)),
            dtype=dtype,
            device_map=placement,
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=BitsAndBytesConfig(**kinds) if four_bits else None,
        )
    return no_dropout(model)


def with_adapter(model, path, is_trainable=False, dropout=0.0):
    options = {"is_trainable": is_trainable, "config": adapter_settings(path, dropout)}
    with safely.reading(path):
        return PeftModel.from_pretrained(model, str(model_path(path)), **options)


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


def load_policy(config, device):
    """The model to be trained: a LoRA (fresh, or `init_adapter` carried on) or all weights.

    The seed makes a fresh LoRA, so call torch.manual_seed first. Returns (model, autocast dtype).
    """
    dtype, autocast = precision(config, device)
    if getattr(config, "strategy", "ddp") != "ddp":
        # mapped from its files, which all processes of a node share, until it is shared out
        device = torch.device("cpu")
        as_it_is = config.fine_tuning == "full" and not config.init_adapter
        dtype = "auto" if as_it_is else dtype
    four_bits = (autocast or dtype) if getattr(config, "type", "") == "qlora" else None
    model = load(config.model_name, dtype, device, four_bits)
    if config.use_gradient_checkpointing:
        checkpoint_activations(model)
    if config.init_adapter:
        trains = config.fine_tuning == "lora"
        model = with_adapter(model, config.init_adapter, trains, config.lora_dropout)
        if config.fine_tuning == "full":
            model = model.merge_and_unload()
            model.requires_grad_(True)
    elif config.fine_tuning == "lora":
        model = adapt(model, config)
    return model.train(), autocast


def adapt(model, config, settings=None):
    """Put a fresh LoRA on a model; settings: another's than the config's."""
    targets = config.lora_targets
    settings = settings or LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets if targets == "all-linear" else _targets(config),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft asks transformers 5 for a name that is going
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, settings)


def save(model, tokenizer, folder, weights=None):
    """Write a folder that transformers or peft loads: safetensors, config, tokenizer.

    It appears whole or not at all. weights: name -> tensor, where the model has shares only.
    """
    folder = Path(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    with checkpoint.writing(folder, temporary):
        model.save_pretrained(temporary, **({"state_dict": weights} if weights else {}))
        tokenizer.save_pretrained(temporary)
        for file in temporary.glob("*.safetensors"):  # by themselves readable to their owner alone
            shutil.copymode(temporary / "tokenizer_config.json", file)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
