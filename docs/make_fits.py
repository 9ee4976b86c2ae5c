"""Write the tables of docs/fits.md: which model fits on which GPUs, as memory_plan.py predicts.

python docs/make_fits.py
"""

import functools
import itertools
import types
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

import main_distributed
from config import Config
from lm import memory_plan
from lm.logps import Pair
from lm.memory_plan import GIB
from lm.meter import PEAKS

PAGE = Path(__file__).with_name("fits.md")
MARK = "<!-- python docs/make_fits.py writes {} -->\n"

# the numbers of the models' config.json: width, MLP, layers, heads, key heads, vocabulary, tied
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, tuple] = {
    "Qwen3-0.6B": (Qwen3Config, (1024, 3072, 28, 16, 8, 151936, True), {}),
    "Qwen3-4B": (Qwen3Config, (2560, 9728, 36, 32, 8, 151936, True), {}),
    "Qwen3-8B": (Qwen3Config, (4096, 12288, 36, 32, 8, 151936, False), {}),
    "Qwen3-32B": (Qwen3Config, (5120, 25600, 64, 64, 8, 151936, False), {}),
    "Llama-3-70B": (LlamaConfig, (8192, 28672, 80, 64, 8, 128256, False), {}),
    "Qwen3-30B-A3B": (Qwen3MoeConfig, (2048, 6144, 48, 32, 4, 151936, False), EXPERTS),
}
METHODS = ("lora", "full")
CARDS = {"T4": 14.6, "24 GB": 22, "40 GB": 39.4, "80 GB": 79.1, "141 GB": 139.7}  # GiB for torch
PAIR = Pair([5] * 512, [5] * 512, [5] * 512, "", "")  # prompt, chosen, rejected
PAIRS = 60_000
# the cheapest first: strategy, name in the table
WAYS = [("DDP", "DDP"), ("FSDP SHARD_GRAD_OP", "ZeRO-2"), ("FSDP FULL_SHARD", "FSDP")]
OFFLOADED = ("FSDP offloaded", "offload")


def config_of(model: str, layers: int | None = None) -> Any:
    """Return the configuration of a model, with its own number of layers or another one."""
    kind, sizes, more = MODELS[model]
    shape = dict(zip(SIZES, sizes, strict=True)) | more
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    return kind(**shape, head_dim=128, max_position_embeddings=4096, dtype=torch.bfloat16)


@functools.cache
def need_of(model: str, method: str, checkpointing: bool, rows: int = 1) -> Any:
    """Return memory_plan.need() of a pair, from the same model with two and with three layers.

    All layers of these models are equal, so that sizes and peaks grow linearly with their number.
    """
    config = Config(fine_tuning=method, use_gradient_checkpointing=checkpointing)
    precision = main_distributed.precision_of(config, memory_plan.GPU)
    loss_of = functools.partial(main_distributed.loss_of, pairs=[PAIR] * rows, config=config)
    sizes = []
    for layers in (2, 3):
        shape = config_of(model, layers)
        need = memory_plan.need(config, precision, shape, [PAIR] * rows, loss_of, "cuda")
        sizes.append(vars(need))
    two, three = sizes
    more = config_of(model).num_hidden_layers - 2
    values = {name: two[name] + more * (three[name] - two[name]) for name in two}
    return types.SimpleNamespace(**values)


def cell(model: str, method: str, gpus: int, memory: float) -> str:
    """Return the cheapest way that fits into GPUs of so many GiB, with the GiB that it needs."""
    tries = itertools.product(WAYS if gpus > 1 else WAYS[:1], (False, True))
    for (strategy, name), checkpointing in [*tries, (OFFLOADED, True)]:
        n = need_of(model, method, checkpointing)
        total = sum(memory_plan.share(n, strategy, gpus)) + memory_plan.RUNTIME
        if total <= memory_plan.USABLE * memory * GIB:
            return f"{name}{' c' if checkpointing else ''}, {total / GIB:.0f}"
    return "no"


def row_of_fits(model: str, method: str) -> str:
    """Return a line of the table of GPUs."""
    machines = itertools.product((1, 8), CARDS.values())
    cells = itertools.starmap(functools.partial(cell, model, method), machines)
    return f"| {model}, {method} | " + " | ".join(cells) + " |"


def row_of_disk(model: str, method: str) -> str:
    """Return a line of the table of disks and hosts."""
    n = need_of(model, method, True)
    checkpoint = 3 * n.gradients / 1e9
    loading, saving = memory_plan.on_host(n, "FSDP FULL_SHARD", 8)
    offloaded = memory_plan.on_host(n, "FSDP offloaded", 8)[1]
    numbers = [n.saved / 1e9, checkpoint, loading / GIB, saving / GIB, offloaded / GIB]
    flops = 2 * n.active * PAIRS * PAIR.num_forward_tokens(shared=True)
    for gpu in ("A100", "H100"):
        numbers.append(flops / (memory_plan.MFU * PEAKS[gpu] * 8) / 3600)
    return f"| {model}, {method} | " + " | ".join(map(rounded, numbers)) + " |"


def rounded(number: float) -> str:
    """Return a number as a reader of a table needs it."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 0.05 else "0"


def table(head: list[str], row_of: Any) -> str:
    """Return a Markdown table with a row for each model and method."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *itertools.starmap(row_of, itertools.product(MODELS, METHODS))])


def page() -> str:
    """Return docs/fits.md as it should be: its own text, and both tables after their marks."""
    text = PAGE.read_text()
    fits = ["model"]
    for gpus, card in itertools.product((1, 8), CARDS):
        fits.append(f"{gpus} x {card}")
    disk = ["model", "model, GB", "checkpoint, GB", "load, GiB", "save, GiB", "offload, GiB"]
    disk += ["reference, h, A100", "H100"]
    for name, head, row_of in (("GPUs", fits, row_of_fits), ("disk", disk, row_of_disk)):
        before, mark, after = text.partition(MARK.format(name))
        rest = after[after.index("\n\n") :] if "\n\n" in after else "\n"
        text = before + mark + table(head, row_of) + rest
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
