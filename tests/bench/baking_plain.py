"""Prompt baking the straightforward way, to measure against: a peft model, the logits of teacher
and student in full, the teacher at every step.

    python tests/bench/baking_plain.py            # prints the table of all cases
    python tests/bench/baking_plain.py plain demo # one side of one case, as JSON
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))

SHAPES = {  # hidden, layers, vocabulary; tokens of x0, of the question and of a reply
    "demo": (128, 4, 2046, 12, 16, 12),  # as data/demo/model
    "long x0": (256, 6, 8192, 200, 30, 60),
    "51k words": (256, 4, 51200, 60, 30, 60),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROWS, STEPS = 16, {"51k words": 4}


def make(shape, folder):
    """A random model in `folder` and the rows of a step."""
    hidden, layers, words, x0, question, reply = SHAPES[shape]
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    settings = Qwen3Config(vocab_size=words, tie_word_embeddings=True, **shape)
    Qwen3ForCausalLM(settings).save_pretrained(folder)
    draw = torch.randint(3, words, (ROWS, x0 + question + reply)).tolist()
    return [(row[x0 : x0 + question], row[: x0 + question], row[x0 + question :]) for row in draw]


def plain_loop(folder, rows):
    """What people write: pad on the right, both logits, kl_div over the reply's places."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = LoraConfig(r=32, lora_alpha=64, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    student = torch.tensor([s + r for s, _, r in rows])
    teacher = torch.tensor([t + r for _, t, r in rows])
    first, length = (len(rows[0][0]), len(rows[0][1])), len(rows[0][2])

    def step():
        with torch.no_grad(), model.disable_adapter():
            wanted = model(input_ids=teacher).logits[:, first[1] - 1 : -1].log_softmax(-1)
        given = model(input_ids=student).logits[:, first[0] - 1 : -1].log_softmax(-1)
        loss = functional.kl_div(given, wanted, log_target=True, reduction="sum")
        loss = loss / (len(rows) * length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def our_loop(folder, rows):
    """Return the step of train_loop.py."""
    import train_loop
    from ddp_utils import distributed
    from ddp_utils.policy import Policy, Precision, make_optimizer
    from lm import models
    from prompt_baking import distillation, trajectories
    from prompt_baking.train_config import Config

    config = Config(model_name=str(folder), batch_size=ROWS)
    torch.manual_seed(0)
    precision = Precision.choose(torch.device("cpu"), "lora")
    adapter = models.LoraSpec(config.lora_r, config.lora_alpha, 0.0, config.lora_targets)
    model = models.load_policy(str(folder), adapter, precision, torch.device("cpu"))
    student = distillation.Student(model)
    world = distributed.World()
    data = {"train": [trajectories.Trajectory(*row, "", "") for row in rows]}
    run = SimpleNamespace(world=world)
    run.reduce = lambda averages, norm: averages.reduce(equal={"grad_norm": norm})
    policy = Policy(student, world)
    optimizer, schedule = make_optimizer(policy, 3e-3, 1000, "constant", 0.0, config.weight_decay)

    def step():
        everything = range(len(rows))
        found = train_loop.train_step(policy, 1, everything, data["train"], config, run)
        policy.step(optimizer, schedule, found["grad_norm"])
        return found["loss"]

    return step


def measure(side, shape):
    """CPU seconds of each step but the first, losses, and MiB at the most, weights included."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = make(shape, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loops = {"plain": plain_loop, "ours": our_loop}
        step = loops[side](folder, rows)
        losses, seconds = [], []
        for _ in range(STEPS.get(shape, 6)):
            start = time.process_time()
            losses.append(step())
            seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds[1:], "losses": losses, "mib": peak / 1024}


def measured(side, shape):
    """What measure() returns in a process of its own."""
    command = [sys.executable, __file__, side, shape]
    output = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    return json.loads(output.splitlines()[-1])


def compare(shape, turns=5):
    """Ratios plain / ours of CPU time, one for each turn, and of memory."""
    ratios, memory = [], []
    for _ in range(turns):
        plain, other = measured("plain", shape), measured("ours", shape)
        for a, b in zip(plain["losses"], other["losses"], strict=True):
            assert abs(a - b) <= 1e-4 * plain["losses"][0], (plain["losses"], other["losses"])
        medians = [statistics.median(side["seconds"]) for side in (plain, other)]
        ratios.append(medians[0] / medians[1])
        memory.append((plain["mib"], other["mib"]))
    return ratios, memory


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:])))
        sys.exit()
    for shape in SHAPES:
        ratios, memory = compare(shape)
        shown = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        mib = " against ".join(f"{statistics.median(m):.0f}" for m in zip(*memory, strict=True))
        print(f"{shape}: {shown} times less CPU; MiB, weights included: {mib}")
