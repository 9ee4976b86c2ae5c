"""How the cost of a DPO step grows with rows, ranks, the prompt's length and the vocabulary.

    python tests/bench/growth.py [--picture docs/img/growth.png] [--json FILE]

Rows and ranks: CPU ms that one rank spends on choosing its rows of a step, with the functions that
the scripts use; 512 ranks need no 512 processes for it, since a rank computes its part alone.
Prompt and vocabulary: CPU seconds of a LoRA step of a small Qwen3 with random weights, and those of
its matrix products and attention alone (limit.py), which are what it cannot cost less than.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import limit
import torch
import transformers
from cases import SMALL
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ddp_utils import distributed, sampler
from lm import logps, token_rows
from lm.fast import memory_efficient, self_test

ROWS = (1_000, 10_000, 100_000, 1_000_000)
RANKS = (1, 2, 4, 8, 64, 512)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
VOCABULARIES = (8_192, 16_384, 32_768, 65_536, 151_936)
RESPONSE, PAIRS = 64, 2
ROUNDS = 5


def spread(function, rounds=ROUNDS):
    """Return the median, the smallest and the largest CPU seconds of some calls, after one more."""
    function()
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), min(seconds), max(seconds)


def choosing(rows, ranks, per_rank=4, steps=20):
    """Return the CPU ms per step in which one rank chooses its micro-batches.

    The order of an epoch is made once; its time is divided by the steps of the epoch.
    """
    world = distributed.World(rank=ranks - 1, world_size=ranks)
    plan = sampler.Plan(rows=rows, global_batch=per_rank * ranks, seed=0)
    lengths = random.Random(0).choices(range(1, 10), k=rows)  # the time does not depend on them
    pairs = (logps.Pair([0], [0] * length, [0], "", "") for length in lengths)
    scorer = SimpleNamespace(shared=True)

    def order():
        sampler.checked_order.cache_clear()
        plan.batch(0)

    def batches():
        for step in range(steps):
            batch = plan.batch(step % plan.steps_per_epoch)
            logps.Scorer.micro_batches(scorer, batch, data, world, per_rank)

    with tempfile.TemporaryDirectory() as folder:
        token_rows.write_rows(file := Path(folder) / "rows", pairs, {})
        data = token_rows.Rows(logps.Pair, file)
        of_order = [value / plan.steps_per_epoch for value in spread(order)]
        of_batch = [value / steps for value in spread(batches)]
    return [1000 * (first + second) for first, second in zip(of_order, of_batch, strict=True)]


def step_of(vocabulary, prompt):
    """Return CPU seconds of a step, and of its products alone, each with its spread."""
    torch.manual_seed(0)
    sizes = SMALL | {"num_hidden_layers": 2, "vocab_size": vocabulary}
    config = transformers.Qwen3Config(**sizes, max_position_embeddings=16384)
    model = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    dice = random.Random(0)
    pairs = []
    for _ in range(PAIRS):
        ids = [dice.randrange(vocabulary) for _ in range(prompt + 2 * RESPONSE)]
        responses = ids[prompt : prompt + RESPONSE], ids[prompt + RESPONSE :]
        pairs.append(logps.Pair(ids[:prompt], *responses, "", ""))
    scorer = logps.Scorer(model)
    self_test.choose_head_and_layout(scorer, pairs, "shared", distributed.World())
    memory_efficient.apply(model)

    def step():
        model.zero_grad()
        chosen, rejected = scorer(scorer.collate(pairs, "cpu"))
        (-functional.logsigmoid(0.1 * (chosen - rejected)).mean()).backward()

    with limit.Products() as products:
        step()
    return spread(step, 3), limit.seconds(products.as_list())


def draw(tables, path):
    """Draw the four tables as curves, with the products alone where they were measured."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    titles = {
        "rows": "Choosing rows, by size of the data",
        "ranks": "Choosing rows, by number of processes",
        "prompt": "A step, by tokens of the prompt",
        "vocabulary": "A step, by size of the vocabulary",
    }
    for axis, (name, table) in zip(axes.flat, tables.items(), strict=True):
        unit = "CPU ms per step" if name in ("rows", "ranks") else "CPU s per step"
        sizes = [row[0] for row in table]
        middle = [row[1] for row in table]
        errors = [[row[1] - row[2] for row in table], [row[3] - row[1] for row in table]]
        axis.errorbar(sizes, middle, errors, marker="o", capsize=3, label="measured")
        if len(table[0]) > 4:
            axis.plot(sizes, [row[4] for row in table], "--", label="its matrix products alone")
        axis.set(title=titles[name], xlabel=name, ylabel=unit, xscale="log", yscale="log")
        low, high = axis.get_ylim()  # at least a decade, so that noise does not look like growth
        axis.set_ylim(low, max(high, 10 * low))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", help="a file for the curves")
    parser.add_argument("--json", help="a file for the numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables = {
        "rows": [[rows, *choosing(rows, 2)] for rows in ROWS],
        "ranks": [[ranks, *choosing(100_000, ranks)] for ranks in RANKS],
        "prompt": [],
        "vocabulary": [],
    }
    for prompt in PROMPTS:
        measured, products = step_of(8_192, prompt)
        tables["prompt"].append([prompt, *measured, products])
    for vocabulary in VOCABULARIES:
        measured, products = step_of(vocabulary, 256)
        tables["vocabulary"].append([vocabulary, *measured, products])
    for name, table in tables.items():
        print(f"\n| {name} | median [smallest, largest] | products |")
        for size, middle, low, high, *products in table:
            bound = f"{products[0]:.3f}" if products else "-"
            print(f"| {size} | {middle:.3f} [{low:.3f}, {high:.3f}] | {bound} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(tables, file, indent=1)
    if options.picture:
        draw(tables, options.picture)


if __name__ == "__main__":
    main()
