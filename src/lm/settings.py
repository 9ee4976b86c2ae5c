"""What is checked before torch is imported: settings of merge.py and chat.py, and strategies."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from ddp_utils import UserError, cli

DEMO_MODEL = "data/demo/model"
DEFAULT_RATES = {  # objective, kind of fine-tuning -> learning rate; measured: docs/recipes.md
    ("dpo", "lora"): 2e-4,
    ("dpo", "full"): 5e-6,
    ("sft", "lora"): 2e-4,
    ("sft", "full"): 2e-5,
    ("baking", "lora"): 1e-3,
}


@dataclass
class Merge:
    adapter: str  # run folder, or folder of a LoRA
    folder: str  # folder for the merged model; it must not exist
    base: str = ""  # folder or Hugging Face name of the base model; empty: the LoRA's own
    scale: float = 1.0  # factor of the LoRA; 0 gives the base model
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # of the result; auto: as the base
    debug: bool = False  # show a traceback for user errors


@dataclass
class Chat:
    folder: str  # run folder such as results/dpo, or model folder
    before: bool = False  # chat with the model before training
    system: str = ""  # system prompt
    history: bool | None = None  # continue the conversation; None: unless it is the demo's model
    temperature: float | None = None  # sampling temperature; 0: greedy; None: as in the run, or 0.7
    top_p: float | None = None  # nucleus sampling; None: as in the run, or 1
    max_new_tokens: int | None = None  # maximum tokens per reply; None: as in the run, or 256
    dtype: Literal["auto", "fp32", "bf16"] = "auto"  # auto: as the files; fp32 where bf16 is slow
    seed: int = 0  # random seed of the replies
    stats: bool = False  # print the time to the first token and the tokens per second
    debug: bool = False  # show a traceback for user errors


def read_merge(argv: list[str] | None) -> Merge:
    """Return the settings of merge.py in the flags."""
    settings = cli.parse(Merge, argv)
    cli.check_ranges(settings, scale=cli.FROM_0)
    return settings


def read_chat(argv: list[str] | None) -> Chat:
    """Return the settings of chat.py in the flags."""
    settings = cli.parse(Chat, argv)
    cli.check_ranges(settings)
    return settings


def default_rate(model_name: str, objective: str, fine_tuning: str = "lora") -> float:
    """Return the learning rate of a setting that is left open; the demo's tiny model needs 1e-3."""
    return 1e-3 if model_name == DEMO_MODEL else DEFAULT_RATES[objective, fine_tuning]


def check_strategy(config: Any, setting: str, other: str) -> None:
    """Raise UserError for a strategy that does not support another setting.

    setting, other: which one selects 4-bit weights, and its value without them.
    """
    if config.in_4_bits:
        value = getattr(config, setting)
        if config.strategy != "ddp":
            problem = f"{config.strategy} cannot shard 4-bit weights"
            raise UserError(f"--{setting}: {problem}; use {other}")
        if not find_spec("bitsandbytes"):
            raise UserError(f"--{setting}: {value} needs bitsandbytes; install it, or use {other}")
    if config.strategy == "deepspeed" and config.grad_reduce_dtype != "fp32":
        raise UserError("--grad_reduce_dtype: use communication_data_type in DeepSpeed's JSON")
