"""Four steps of each script against a plain loop in float64 that shares no line with src/.

Model, LoRA, template and tokens are those of transformers and peft themselves. Log-softmax, losses,
clipping, AdamW, warm-up and schedule are written out below. Batches are 4, 4, 2 and 4 of ten rows.
"""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from conftest import ROOT
from ranks import ranks

MODEL = str(ROOT / "data/demo/model")
ADAPTER = str(ROOT / "tests/golden/demo_adapter")
SYSTEM = "Answer in capital letters."
PEAK, DECAY, STEPS, BETA, SFT_WEIGHT = 1e-3, 2.0, 4, 0.5, 0.3
CLIP = {"full": 0.1, "lora": 0.004}  # every gradient is longer
COMMON = runs.words(
    f"--model_name {MODEL} --no_shuffle --learning_rate {PEAK} --weight_decay {DECAY} "
    "--lr_scheduler linear --warmup_ratio 0.3 --log_every 1000 "
    "--gradient_accumulation_steps 2"
)
LORA = runs.words("--lora_r 4 --lora_alpha 12 --lora_targets q_proj,v_proj")
PREFERENCE = runs.words(f"--beta {BETA} --sft_weight {SFT_WEIGHT}")
FLAGS = {  # of each script and objective: its own flags, and the name of the rows of one forward
    "train sft": (["--objective", "sft"], "micro_batch_size"),
    "train dpo": (["--objective", "dpo", *PREFERENCE], "micro_batch_size"),
    "main_distributed dpo": ([*PREFERENCE, "--lr_scaling=none", "--num_samples=0"], "batch_size"),
    "train_loop kl": (["--num_samples", "0"], "batch_size"),
}
FILES = {"train_loop": ("--data_path", "--val_path", "--out_dir")}
KIND = {"train": "--type", "main_distributed": "--fine_tuning"}


class Plain:
    """The demo model in float64, and what each row costs: (sum of the losses, divided by what)."""

    def __init__(self, kind):
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        if kind == "lora":
            torch.manual_seed(0)
            targets = ["q_proj", "v_proj"]
            settings = LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM")
            model = get_peft_model(model, settings)
        elif kind == "adapter":
            model = PeftModel.from_pretrained(model, ADAPTER)
        self.model = model.double().eval()
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.reference = {}  # reply -> its log-prob before the first step

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def log_probs(self, question, reply, system=None):
        """Of all words at each token of a reply [N, V], and the tokens [N]."""
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": question})
        prompt = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        prompt, reply = self.ids(prompt), [*self.ids(reply), self.tokenizer.eos_token_id]
        logits = self.model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        logits = logits.double()
        return logits - logits.exp().sum(-1, keepdim=True).log(), torch.tensor(reply)

    def logp(self, question, reply):
        table, tokens = self.log_probs(question, reply)
        return table[range(len(tokens)), tokens].sum()

    def cost(self, objective, row):
        question, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
        size = len(self.ids(chosen)) + 1
        if objective == "sft":
            return -self.logp(question, chosen), size
        if objective == "kl":
            student, _ = self.log_probs(question, chosen)
            with torch.no_grad(), self.model.disable_adapter():
                teacher, _ = self.log_probs(question, chosen, SYSTEM)
            return (teacher.exp() * (teacher - student)).sum(), size
        logps = [self.logp(question, reply) for reply in (chosen, rejected)]
        first = self.reference.setdefault(question, [logp.detach() for logp in logps])
        margin = BETA * ((logps[0] - first[0]) - (logps[1] - first[1]))
        return (1 + (-margin).exp()).log() - SFT_WEIGHT * logps[0] / size, 1

    def loss(self, objective, rows):
        costs, sizes = zip(*(self.cost(objective, row) for row in rows), strict=True)
        return sum(costs) / sum(sizes)

    def train(self, objective, rows, clip):
        """Take the steps; returns loss, gradient norm and learning rate of each."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        lines = []
        for step, batch in enumerate([rows[:4], rows[4:8], rows[8:], rows[:4]]):
            loss = self.loss(objective, batch)
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
            assert norm > clip
            rate = PEAK * [1 / 3, 2 / 3, 1, 1 / 2][step]  # warm-up: 0.3 x 4 steps, rounded up
            lines.append((loss.item(), norm, rate))
            with torch.no_grad():
                for p, g, (m, v) in zip(parameters, gradients, moments, strict=True):
                    g = g * clip / norm
                    m.mul_(0.9).add_(0.1 * g)
                    v.mul_(0.999).add_(0.001 * g * g)
                    if p.ndim == 2:  # not norms and biases
                        p.sub_(rate * DECAY * p)
                    mean, square = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
                    p.sub_(rate * mean / (square.sqrt() + 1e-8))
        return lines

    def weights(self):
        named = self.model.state_dict()
        return {name.replace(".default", ""): value.clone() for name, value in named.items()}


@pytest.fixture(scope="module")
def rows():
    """Ten rows to train on, four others."""
    lines = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:14]]


def run(script, flags):
    runs.hurry()
    return importlib.import_module(script).main(flags)


def start(case, rows, world_size, folder, flags):
    """A run on `world_size` processes; returns its folder."""
    (script, objective), (own, size) = case.split(), FLAGS[case]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    paths = [folder / "train.jsonl", folder / "val.jsonl", folder / "run"]
    for path, part in zip(paths, (rows[:10], rows[10:]), strict=False):
        if objective == "kl":
            part = [{"question": row["prompt"], "reply": row["chosen"]} for row in part]
            for row in part:
                row["tokens"] = [*tokenizer(row["reply"]).input_ids, tokenizer.eos_token_id]
                row["x0"] = SYSTEM
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    names = FILES.get(script)
    if names is None:
        names = (
            "--train_data",
            "--val_data",
            "--output_dir" if script == "train" else "--result_dir",
        )
    rows_of_a_forward = 2 if script == "main_distributed" else 2 // world_size
    files = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    ranks(world_size, run, script, [*COMMON, *own, *flags, *files, f"--{size}={rows_of_a_forward}"])
    return folder / "run"


@pytest.mark.parametrize(
    ("case", "kind", "world_size"),
    [
        ("train sft", "full", 2),
        ("train sft", "lora", 1),
        ("train dpo", "lora", 2),
        ("main_distributed dpo", "full", 1),
        ("main_distributed dpo", "lora", 2),
        ("train_loop kl", "lora", 1),
        ("train_loop kl", "lora", 2),
    ],
)
def test_four_steps_equal_a_plain_loop(case, kind, world_size, rows, tmp_path):
    (script, objective), plain = case.split(), Plain(kind)
    flags = [
        f"--max_steps={STEPS}",
        f"--max_grad_norm={CLIP[kind]}",
        *(LORA if kind == "lora" else []),
    ]
    flags += [KIND[script], kind] if script in KIND else []
    folder = start(case, rows, world_size, tmp_path, flags)
    before = plain.weights()
    with torch.no_grad():
        plain.loss(objective, rows)  # the reference
    expected = plain.train(objective, rows[:10], CLIP[kind])
    lines = runs.lines(folder, "train")
    found = [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    [val] = runs.lines(folder, "val")[-1:]
    with torch.no_grad():
        loss = plain.loss(objective, rows[10:]).item()
    assert val["kl" if objective == "kl" else "loss"] == pytest.approx(loss, rel=1e-4)
    after = plain.weights()
    [file] = (folder / "model").glob("*.safetensors")
    saved = load_file(file)
    moved = sum((after[name] - before[name]).square().sum() for name in saved).sqrt()
    apart = sum((after[name] - saved[name]).square().sum() for name in saved).sqrt()
    assert apart < 2e-2 * moved  # a gradient of 1e-9 may have either sign: one element, one step


@pytest.mark.parametrize("case", FLAGS)
def test_validation_has_no_dropout(case, rows, tmp_path):
    (script, objective), plain = case.split(), Plain("adapter")
    name = "--resume_from" if script == "train_loop" else "--init_adapter"
    flags = ["--max_steps=0", "--lora_dropout=0.5", name, ADAPTER]
    flags += [KIND[script], "lora"] if script in KIND else []
    folder = start(case, rows, 1, tmp_path, flags)
    with torch.no_grad():
        loss = plain.loss(objective, rows[10:]).item()
    val = json.loads(Path(folder, "summary.json").read_text())["val"]
    assert val["kl" if objective == "kl" else "loss"] == pytest.approx(loss, rel=1e-5)
