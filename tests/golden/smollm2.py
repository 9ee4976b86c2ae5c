"""Rows and the start of a LoRA for SmolLM2-135M-Instruct: make_smollm2.py and test_smollm2.py.

smollm2.jinja is the model's own chat template, except that the newline between two turns belongs to
the later one. With the model's template TRL also trains on the newline behind the last reply.
"""

import json
from pathlib import Path

import peft
import torch
from seeded import draw
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEMPLATE = HERE / "smollm2.jinja"
STEPS, ROWS = 12, 4  # per step


def read(name):
    return [json.loads(line) for line in (ROOT / "data/demo" / name).read_text().splitlines()]


def turn(role, content):
    return {"role": role, "content": content}


def pairs():
    """Preferences as messages; every third has a system turn of its own."""
    rows = []
    for number, row in enumerate(read("preferences_train.jsonl")[: STEPS * ROWS]):
        system = [turn("system", "You are a polite assistant.")] if number % 3 == 0 else []
        replies = {side: [turn("assistant", row[side])] for side in ("chosen", "rejected")}
        rows.append({"prompt": [*system, turn("user", row["prompt"])], **replies})
    return rows


def conversations():
    """Conversations of two questions and two replies; every third has a system turn of its own."""
    rows = []
    replies = [row["chosen"] for row in read("preferences_train.jsonl")]
    questions = [row["prompt"] for row in read("preferences_train.jsonl")]
    for number in range(STEPS * ROWS):
        messages = [turn("system", "You are a polite assistant.")] if number % 3 == 0 else []
        for row in (2 * number, 2 * number + 1):
            messages += [turn("user", questions[row]), turn("assistant", replies[row])]
        rows.append({"messages": messages})
    return rows


def write_adapter(model, folder):
    """Save a LoRA for all linear layers with drawn weights; neither of its matrices is zero."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    shape = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, shape)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            size = 0.05 if "lora_A" in name else 0.01
            parameter.data.copy_(size * draw(name, parameter.shape, 0))
    adapted.save_pretrained(folder)
