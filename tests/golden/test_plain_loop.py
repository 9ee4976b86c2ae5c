"""Four steps of each script against a plain loop in float64 that shares no line with src/.

Model, LoRA, template and tokens are those of transformers and peft themselves. Log-softmax, losses,
clipping, AdamW, warm-up and schedule are written out below. Batches: 4, 4, 3 and 4 of eleven rows.
"""

import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from ad import evaluate, windows
from ad.config import read as read_settings
from ad.model import Model
from conftest import ROOT
from dpo_inv import batches, mpnn, pairs, structure
from dpo_inv.config import PairSettings
from ranks import ranks

MODEL = str(ROOT / "data/demo/model")
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
    "train sft": ([], "micro_batch_size"),
    "main_distributed dpo": ([*PREFERENCE, "--lr_scaling=none", "--num_samples=0"], "batch_size"),
    "train_loop kl": (["--num_samples", "0"], "batch_size"),
}
SPLITS = "train", "val"
FILES = {"train_loop": ("--data_path", "--val_path", "--out_dir")}
FILES["train"] = "--train_data", "--val_data", "--output_dir"
FILES["main_distributed"] = "--train_data", "--val_data", "--result_dir"
KIND = {"train": "--type", "main_distributed": "--fine_tuning"}


class Plain:
    """The demo model in float64, and what each row costs: (sum of the losses, divided by what)."""

    def __init__(self, kind, folder=None):
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        if kind != "full":
            torch.manual_seed(0)
            targets = ["q_proj", "v_proj"]
            settings = LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM")
            model = get_peft_model(model, settings)
        if kind == "adapter":  # one that has been trained: B is not 0
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(std=0.1)
            model.save_pretrained(folder)
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
            student, _ = self.log_probs(question, chosen, row.get("system"))
            with torch.no_grad(), self.model.disable_adapter():
                teacher, _ = self.log_probs(question, chosen, row.get("system", SYSTEM))
            return (teacher.exp() * (teacher - student)).sum(), size
        logps = [self.logp(question, reply) for reply in (chosen, rejected)]
        first = self.reference.setdefault(question, [logp.detach() for logp in logps])
        margin = BETA * ((logps[0] - first[0]) - (logps[1] - first[1]))
        return (1 + (-margin).exp()).log() - SFT_WEIGHT * logps[0] / size, 1

    def loss(self, objective, rows):
        costs, sizes = zip(*(self.cost(objective, row) for row in rows), strict=True)
        return sum(costs) / sum(sizes)

    def weights(self):
        named = self.model.state_dict()
        return {name.replace(".default", ""): value.clone() for name, value in named.items()}


def plain_training(model, loss_of, rates, clip, decay=DECAY, betas=(0.9, 0.999)):
    """Take the steps with AdamW; returns loss, gradient norm and learning rate of each."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    lines = []
    for step, rate in enumerate(rates):
        loss = loss_of(step)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = [torch.zeros(1) if g is None else g for g in gradients]
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        assert norm > clip  # it is clipped
        lines.append((loss.item(), norm, rate))
        with torch.no_grad():
            for p, g, (m, v) in zip(parameters, gradients, moments, strict=True):
                g = g * clip / norm
                m.mul_(betas[0]).add_((1 - betas[0]) * g)
                v.mul_(betas[1]).add_((1 - betas[1]) * g * g)
                if p.ndim == 2:  # not norms and biases
                    p.sub_(rate * decay * p)
                p.first_moment = m
                mean = m / (1 - betas[0] ** (step + 1))
                square = v / (1 - betas[1] ** (step + 1))
                p.sub_(rate * mean / (square.sqrt() + 1e-8))
    return lines


def assert_trained_alike(saved, after, before):
    """Weights that a run has saved against the plain loop's, rounded to the same dtype."""
    moved = sum((after[name] - before[name]).square().sum() for name in saved).sqrt()
    apart = torch.tensor(0.0, dtype=torch.double)
    for name, tensor in saved.items():
        apart += (after[name].to(tensor.dtype).double() - tensor.double()).square().sum()
    apart = apart.sqrt()
    assert apart < 3e-2 * moved  # a gradient of 1e-9 may have either sign: one element, one step


@pytest.fixture(scope="module")
def rows():
    """Eleven rows to train on, three others."""
    lines = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:14]]


def run(script, flags):
    runs.hurry()
    return importlib.import_module(script).main(flags)


OTHERS = {
    "farmer": "You are a farmer.\n",
    "robot": "Reply as a robot would.\n",
    "neutral": "You are a helpful assistant.\n",
}


def keeping(name):
    """What a row has whose reply is kept under another prompt."""
    return {"kept": name, "system": OTHERS[name]}


def start(case, rows, world_size, folder, flags):
    """A run on `world_size` processes; returns its folder."""
    (script, objective), (own, size) = case.split(), FLAGS[case]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    paths = [folder / "train.jsonl", folder / "val.jsonl", folder / "run"]
    for path, part in zip(paths, (rows[:11], rows[11:]), strict=False):
        if objective == "kl":
            part = [row | {"question": row["prompt"], "reply": row["chosen"]} for row in part]
            for row in part:
                row["tokens"] = [*tokenizer(row["reply"]).input_ids, tokenizer.eos_token_id]
                row["x0"] = SYSTEM
            if path == paths[1]:  # these prompts are measured, and not trained on
                part += [row | keeping(name) for row in part for name in ("robot", "neutral")]
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
    names = FILES[script]
    rows_of_a_forward = 2 if script == "main_distributed" else 2 // world_size
    files = [f"{name}={path}" for name, path in zip(names, paths, strict=True)]
    ranks(world_size, run, script, [*COMMON, *own, *flags, *files, f"--{size}={rows_of_a_forward}"])
    return folder / "run"


COMPARED = [
    ("train sft", "full", 2),
    ("train sft", "lora", 1),
    ("main_distributed dpo", "full", 1),
    ("main_distributed dpo", "lora", 2),
    ("train_loop kl", "lora", 1),
    ("train_loop kl", "lora", 2),
]


@pytest.mark.parametrize(("case", "kind", "world_size"), COMPARED)
def test_four_steps_equal_a_plain_loop(case, kind, world_size, rows, tmp_path):
    compare(case, kind, world_size, rows, tmp_path)


ZERO = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
SHARDED = {
    "fsdp": ("full", "--use_fsdp --fsdp_config", {"fsdp_state_dict_type": "FULL_STATE_DICT"}),
    "zero2": ("lora", "--deepspeed", ZERO),
    "zero3": ("lora", "--deepspeed", {**ZERO, "zero_optimization": {"stage": 3}}),
}


@pytest.mark.parametrize("strategy", SHARDED)
def test_four_sharded_steps_equal_a_plain_loop(strategy, rows, tmp_path):
    """The demo's weights are bf16, what is trained and what travels between ranks is fp32."""
    if strategy != "fsdp":
        pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")
    kind, flags, settings = SHARDED[strategy]
    (tmp_path / "sharding.json").write_text(json.dumps(settings))
    compare("train sft", kind, 2, rows, tmp_path, *flags.split(), f"{tmp_path}/sharding.json")


def compare(case, kind, world_size, rows, tmp_path, *more):
    """Losses, gradient norms, rates, validation, weights and first moments of four steps."""
    (script, objective), plain = case.split(), Plain(kind)
    if objective == "kl":  # some rows keep what the base model does
        rows = [row | keeping("farmer") if n in (3, 7) else row for n, row in enumerate(rows)]
    flags = [f"--max_steps={STEPS}", f"--max_grad_norm={CLIP[kind]}"]
    flags += LORA if kind == "lora" else []
    flags += [*([KIND[script], kind] if script in KIND else []), *more]
    folder = start(case, rows, world_size, tmp_path, flags)
    before = plain.weights()
    with torch.no_grad():
        plain.loss(objective, rows)  # the reference
        base = plain.loss(objective, rows[11:]).item()
    batches = [rows[:4], rows[4:8], rows[8:11], rows[:4]]
    rates = [PEAK / 3, PEAK * 2 / 3, PEAK, PEAK / 2]  # warm-up: 0.3 x 4 steps, rounded up
    expected = plain_training(
        plain.model, lambda step: plain.loss(objective, batches[step]), rates, CLIP[kind]
    )
    lines = runs.lines(folder, "train")
    ours_of = [(line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines]
    for ours, theirs in zip(ours_of, expected, strict=True):
        # With SSE, AVX2 and AVX-512 losses differ by at most 3.8e-6, and norms by 1.0e-4: AdamW
        # moves a weight by the rate even if the sign of its gradient is a matter of rounding.
        assert (ours[0], ours[2]) == pytest.approx((theirs[0], theirs[2]), rel=2e-5)
        assert ours[1] == pytest.approx(theirs[1], rel=5e-4)
    [val] = runs.lines(folder, "val")[-1:]
    with torch.no_grad():
        loss = plain.loss(objective, rows[11:]).item()
    assert val["kl" if objective == "kl" else "loss"] == pytest.approx(loss, rel=2e-5)
    if objective == "kl":
        assert val["kl_base"] == pytest.approx(base, rel=1e-4)
        assert val["share_baked"] == pytest.approx(1 - loss / base, abs=1e-4)
        for name in ("robot", "neutral"):
            with torch.no_grad():
                loss = plain.loss(objective, [row | keeping(name) for row in rows[11:]]).item()
            assert val[f"kept/kl/{name}"] == pytest.approx(loss, abs=1e-6)
    [file] = (folder / "model").glob("*.safetensors")
    assert_trained_alike(load_file(file), plain.weights(), before)
    trained = [(n, p) for n, p in plain.model.named_parameters() if p.requires_grad]
    total = sum(p.first_moment.square().sum() for _, p in trained)
    states = [load_file(file) for file in (folder / "checkpoints/step-00000004").glob("state*")]
    if len(states) > 1:  # DeepSpeed saves flat shards of all matrices
        moments = torch.cat([state["exp_avg/0"] for state in states])
        assert float(moments.norm() / total.sqrt()) == pytest.approx(1, abs=1e-3)
        return
    apart = sum((states[0][f"exp_avg/{n}"] - p.first_moment).square().sum() for n, p in trained)
    assert apart.sqrt() < 1e-3 * total.sqrt()  # 1.8e-4 with AVX2


@pytest.mark.parametrize("case", FLAGS)
def test_validation_has_no_dropout(case, rows, tmp_path):
    (script, objective), plain = case.split(), Plain("adapter", tmp_path / "adapter")
    name = "--resume_from" if script == "train_loop" else "--init_adapter"
    # behind a step that moves nothing: before the first one DPO's log-probs are the reference's
    flags = ["--max_steps=1", "--learning_rate=1e-30", "--lora_dropout=0.5"]
    flags += [name, str(tmp_path / "adapter")]
    flags += [KIND[script], "lora"] if script in KIND else []
    folder = start(case, rows, 1, tmp_path, flags)
    with torch.no_grad():
        loss = plain.loss(objective, rows[11:]).item()
    val = json.loads(Path(folder, "summary.json").read_text())["val"]
    assert val["kl" if objective == "kl" else "loss"] == pytest.approx(loss, rel=2e-5)
    if objective == "kl":  # a LoRA whose B is 0 is the base model
        with torch.no_grad():
            base = Plain("lora").loss(objective, rows[11:]).item()
        assert val["kl_base"] == pytest.approx(base, rel=1e-5)


@pytest.mark.parametrize("case", FLAGS)
def test_each_step_has_a_dropout_of_its_own(case, rows, tmp_path):
    """Of one row over and over, at a rate that moves nothing."""
    script, name = case.split()[0], "--init_adapter"
    name = "--resume_from" if script == "train_loop" else name
    Plain("adapter", tmp_path / "adapter")
    flags = ["--max_steps=4", "--lora_dropout=0.5", name, str(tmp_path / "adapter")]
    flags += [*([KIND[script], "lora"] if script in KIND else []), "--learning_rate=1e-12"]
    folder = start(case, [rows[0]] * 11 + rows[11:], 1, tmp_path, flags)
    losses = sorted(runs.losses(runs.lines(folder)))
    assert min(b - a for a, b in itertools.pairwise(losses)) > 1e-5, losses


AD = """grid_size=5 horizon=4 n_stream=3 total_source_timesteps=60 train_n_stream=3 tf_n_embd=8
train_source_timesteps=20 n_transit=12 tf_n_layer=1 train_timesteps=4 num_warmup_steps=1 lr=2e-2
summary_interval=1 eval_interval=0 gen_interval=0 eval_episodes=1 eval_copies=1 ckpt_interval=0
label_smoothing=0.3 weight_decay=2 max_grad_norm=0.01 beta1=0.8 beta2=0.95"""


def distil(words):
    runs.hurry()
    evaluate.write = lambda *_: None  # its picture
    return importlib.import_module("ad.train").main(words)


@pytest.mark.parametrize("world_size", [1, 2])
def test_four_steps_of_distillation_equal_a_plain_loop(world_size, tmp_path):
    """Windows and model are the project's own: tests/scripts/test_ad.py has them by hand."""
    config = read_settings(AD.split())
    windows.collect(config, tmp_path / "h.npz")
    words = [*AD.split(), f"train_batch_size={4 // world_size}", f"output_dir={tmp_path}/run"]
    ranks(world_size, distil, [*words, f"traj_file={tmp_path}/h.npz"])
    arrays = windows.read(tmp_path / "h.npz", config)
    data, others = (windows.Histories(arrays, part, config, "cpu") for part in config.tasks)
    torch.manual_seed(0)
    model = Model(config).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def log_probs_of(histories, picked):
        """Mean log-prob of all actions, and of those that were taken."""
        tokens, action = histories.batch(*picked)
        logits = model(tokens)
        log_probs = logits - logits.exp().sum(-1, keepdim=True).log()
        return log_probs.mean(), log_probs.gather(-1, action[..., None]).mean()

    def loss_of(step):
        anything, taken = log_probs_of(data, data.draw(0, step, 4))
        return -0.7 * taken - 0.3 * anything

    rates = [0.01, 0.02, 0.015, 0.005]  # then a cosine: (1 + cos(pi k / 3)) / 2
    expected = plain_training(model, loss_of, rates, 0.01, betas=(0.8, 0.95))
    lines = runs.lines(tmp_path / "run")
    train = [line for line in lines if line["split"] == "train"]
    for line, theirs in zip(train, expected, strict=True):
        ours = line["loss"], line["grad_norm"], line["learning_rate"]
        assert ours == pytest.approx(theirs, rel=1e-4)
    with torch.no_grad():
        val = -log_probs_of(others, others.all())[1].item()
    assert lines[-1]["loss"] == pytest.approx(val, rel=1e-5)  # without smoothing
    saved = load_file(tmp_path / "run/model/model.safetensors")
    assert_trained_alike(saved, model.state_dict(), before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_four_steps_of_protein_dpo_equal_a_plain_loop(world_size, tmp_path):
    """The model is the project's own: tests/golden/test_mpnn_official.py has it from elsewhere."""
    items = json.loads((ROOT / "data/input/test_data_real.json").read_text())
    items = [item for item in items if item.get("fixed_chains") and "mutable_positions" not in item]
    items = [{**item, "pdb_file": str(ROOT / "data/input" / item["pdb_file"])} for item in items]
    for name, part in zip(SPLITS, (items[:6], items[6:9]), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    words = f"--train_data {tmp_path}/train.json --val_data {tmp_path}/val.json --max_steps 4 "
    words += f"--base_model_name {ROOT}/data/demo/protein_model.pt --output_dir {tmp_path}/run "
    words += "--temperature 0.5 --num_orders 2 --decoding_order mutated_last --beta 0.5 "
    words += f"--no_shuffle --learning_rate {PEAK} --weight_decay {DECAY} --max_grad_norm 0.1 "
    words += "--lr_scheduler linear --warmup_ratio 0.3 --gradient_accumulation_steps 2 "
    words += f"--log_every 1000 --batch_size {2 // world_size}"
    ranks(world_size, run, "dpo_inv.run_dpo_ddp", words.split())
    model = mpnn.ProteinMPNN.load(ROOT / "data/demo/protein_model.pt").double()
    named = [pairs.read(tmp_path / f"{name}.json", {}, PairSettings())[0] for name in SPLITS]
    settings = PairSettings(decoding_order="mutated_last", num_orders=2)
    named, reference = sum(named, []), {}
    preferred, means = [], []  # log-probs of the preferred sequences of a batch, and their mean

    def logp(number, field):
        item, pair = items[number], named[number]
        backbone = structure.read(item["pdb_file"], ("B", "A"))
        arrays = [torch.from_numpy(array) for array in backbone[:4]]
        text = item[field] + backbone.sequence[len(item[field]) :]
        letters = torch.tensor([mpnn.ALPHABET.index(letter) for letter in text])
        sums = []
        for order in batches.decoding_orders(pair, settings)[..., 0]:
            assert set(order[-int(pair.mutated.sum()) :]) == {*pair.mutated.nonzero()[0]}
            encoded = model.encode(arrays[0].double(), *arrays[1:])
            scores = model.decode(encoded, letters[None], torch.tensor(order)[None])
            scores = scores[0].double() / 0.5  # [L, 21]
            scores = scores - scores.exp().sum(-1, keepdim=True).log()
            sums.append(scores[range(len(item[field])), letters[: len(item[field])]].sum())
        return sum(sums) / 2

    def loss_of(numbers):
        total = 0
        preferred.clear()
        for number in numbers:
            sides = [logp(number, field) for field in ("preferred_seq", "unpreferred_seq")]
            first = reference.setdefault(number, [side.detach() for side in sides])
            margin = BETA * ((sides[0] - first[0]) - (sides[1] - first[1]))
            total = total + (1 + (-margin).exp()).log() / len(numbers)
            preferred.append(sides[0].item())
        return total

    def step_of(step):
        loss = loss_of([range(4), range(4, 6)][step % 2])
        means.append(sum(preferred) / len(preferred))
        return loss

    with torch.no_grad():
        loss_of(range(9))
    expected = plain_training(model, step_of, [PEAK / 3, PEAK * 2 / 3, PEAK, PEAK / 2], 0.1)
    lines = runs.lines(tmp_path / "run", "train")
    for line, theirs, mean in zip(lines, expected, means, strict=True):
        ours = line["loss"], line["grad_norm"], line["learning_rate"], line["logps/chosen"]
        assert ours == pytest.approx((*theirs, mean), rel=5e-4)
    val = runs.lines(tmp_path / "run", "val")[-1]
    with torch.no_grad():
        assert val["loss"] == pytest.approx(loss_of(range(6, 9)).item(), rel=2e-3)
    each = [-preferred[n] / len(items[6 + n]["preferred_seq"]) for n in range(3)]
    assert val["nll"] == pytest.approx(sum(each) / 3, rel=1e-4)
