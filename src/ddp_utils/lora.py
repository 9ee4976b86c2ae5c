"""Load a causal language model, put a LoRA on it or not, save it."""

import math
import shutil
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig

from ddp_utils import UserError, checkpoint, environment, safely
from ddp_utils.safely import model_path

META = torch.device("meta")  # tensors on it have a name and a shape, and no content


def outline(config):
    """The model on the meta device, after all checks that loading it and its adapter will make.

    Names and shapes of the files' tensors are compared with the model's; no weight is read.
    Raises UserError as load() and with_adapter() do, or if a LoRA cannot be put on this model.
    """
    model = load(config.model_name, "auto", META)
    adapted = add_adapter(model, config)
    return model if adapted is model else adapted.unload()


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
    with safely.reading(f"--init_adapter: {path}"):
        settings = PeftConfig.from_pretrained(str(model_path(path)))
    if settings.peft_type != "LORA" or settings.megatron_config:
        raise UserError(f"--init_adapter: {path} is not a plain LoRA but {settings.peft_type}")
    start = settings.init_lora_weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        raise UserError(f"--init_adapter: {path} began with {start}, which changes the base model")
    settings.init_lora_weights = True  # all its tensors come from the file
    settings.lora_dropout = dropout
    settings.inference_mode = False
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


def load(name, dtype, device, four_bits=None, flag="--model_name"):
    """Read safetensors straight onto the device: a host never holds one copy per process.

    device: META compares the names and shapes in the files with the model's and reads no weight.
    four_bits: a dtype to compute in, with weights that are kept in 4 bits (needs bitsandbytes).
    flag: the setting that gave the name.
    Raises UserError for files that cannot be read, are not complete, or hold no causal model.
    """
    place = f"{flag}: {name}"
    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}  # as in QLoRA
    kinds |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": four_bits}
    with safely.reading(place, with_bars=device != META):
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
    safely.check_complete(place, report["missing_keys"], report["unexpected_keys"], misshapen)
    is_encoder = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING  # BERT and its relatives
    if is_encoder and not getattr(model.config, "is_decoder", False):
        kind = model.config.model_type
        raise UserError(f"{place}: {kind} reads a text in both directions; give a causal model")
    return no_dropout(model)


def with_adapter(model, path, dropout=0.0):
    """Put the LoRA of a folder on a model.

    Raises UserError unless its tensors are exactly those that its settings ask for on this model.
    """
    place = f"--init_adapter: {path}"
    with safely.reading(place):
        model = adapt(model, adapter_settings(path, dropout))
        tensors = load_peft_weights(str(model_path(path)), device="cpu")
        asked = get_peft_model_state_dict(model, save_embedding_layers=False)
    known = model.state_dict() | asked  # an adapter may bring an embedding of its own
    misshapen = [k for k in tensors if k in known and tensors[k].shape != known[k].shape]
    missing, unexpected = asked.keys() - tensors.keys(), tensors.keys() - known.keys()
    safely.check_complete(place, missing, unexpected, misshapen)
    if next(model.parameters()).device != META:
        set_peft_model_state_dict(model, tensors)
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


def load_policy(config, device):
    """The model to be trained: a LoRA (fresh, or `init_adapter` carried on) or all weights.

    The seed makes a fresh LoRA, so call torch.manual_seed first. Returns (model, autocast dtype).
    """
    dtype, autocast = environment.precision(config, device)
    if getattr(config, "strategy", "ddp") != "ddp":
        # mapped from its files, which all processes of a node share, until it is shared out
        device = torch.device("cpu")
        as_it_is = config.fine_tuning == "full" and not config.init_adapter
        dtype = "auto" if as_it_is else dtype
    four_bits = (autocast or dtype) if getattr(config, "type", "") == "qlora" else None
    model = load(config.model_name, dtype, device, four_bits)
    if config.use_gradient_checkpointing:
        checkpoint_activations(model)
    model = add_adapter(model, config)
    if config.init_adapter and config.fine_tuning == "full":
        model = model.merge_and_unload()
        model.requires_grad_(True)
    return model.train(), autocast


def add_adapter(model, config):
    """Put on a model the LoRA that is to be carried on or trained, if there is one."""
    if config.init_adapter:
        return with_adapter(model, config.init_adapter, config.lora_dropout)
    if config.fine_tuning == "lora":
        settings = fresh_adapter(model, config)
        with safely.reading(
            f"--model_name: {config.model_name}"
        ):  # peft does not know every architecture
            return adapt(model, settings)
    return model


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


def adapt(model, settings):
    """Put a LoRA with these settings on a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers 5 for a name that is going
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
