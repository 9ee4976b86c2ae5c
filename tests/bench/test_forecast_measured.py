"""Predicted against measured peak memory: eight settings drawn by a seed, 10 to 300 M parameters.

Measured is the most that a rank holds in three steps above what it held before there was a model,
in processes in which malloc gives back at once what is freed; a smaller model of the same kind
comes first, so that what the libraries load with their first step does not count.
"""

import dataclasses
import gc
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]

import main_distributed
from config import Config
from conftest import ROOT
from ddp_utils import distributed, logps, models, optim
from ddp_utils.encoder import Pair
from ddp_utils.fast import memory_efficient
from ddp_utils.runs import preemption
from ddp_utils.sharding import fsdp
from ddp_utils.tools import dryrun, forecast
from ranks import free_port

SEED = 20
WITHIN = 0.15
KINDS = [  # fine-tuning, strategy, ranks
    ("lora", "DDP", 1),
    ("full", "FSDP FULL_SHARD", 2),
    ("full", "DDP", 1),
    ("full", "DDP", 2),
    ("lora", "DDP", 2),
    ("lora", "FSDP FULL_SHARD", 2),
    ("full", "FSDP SHARD_GRAD_OP", 2),
    ("lora", "DDP", 1),
]
TIDY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def drawn(number):
    """A case: what the model, the rows and the settings are."""
    dice = random.Random(SEED + number)
    fine_tuning, strategy, ranks = KINDS[number]
    most = 300e6 if fine_tuning == "lora" else 200e6 / ranks  # weights, if each takes 16 bytes
    wanted = 10e6 * (3 if number in (0, 1) else most / 10e6) ** dice.random()
    size = 0
    while not 0.8 * wanted < size < 1.25 * wanted:
        heads = dice.choice((4, 6, 8, 12, 16, 20))
        model = {
            "hidden_size": 64 * heads,
            "intermediate_size": 64 * heads * dice.choice((2, 3, 4)),
        }
        model |= {"num_hidden_layers": dice.randint(3, 20), "num_attention_heads": heads}
        model |= {
            "num_key_value_heads": heads // 2,
            "vocab_size": dice.choice((4096, 16384, 32768)),
        }
        model |= {"tie_word_embeddings": dice.random() < 0.5}
        kind = dice.choice(("llama", "qwen3"))
        size = sum(p.numel() for p in outline_of(kind, model).parameters())
    sizes = [dice.randint(16, 96) for _ in range(3)]  # prompt, chosen, rejected
    case = {"kind": kind, "model": model, "sizes": sizes, "pairs": dice.randint(1, 4)}
    case |= {"fine_tuning": fine_tuning, "strategy": strategy, "ranks": ranks}
    return case | {"use_gradient_checkpointing": dice.random() < 0.25}


def settings_of(kind, model):
    same = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    same["head_dim"] = model["hidden_size"] // model["num_attention_heads"]
    make = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    return make(**model, **same)


def outline_of(kind, model):
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(settings_of(kind, model))


def config_of(case, folder):
    tool, *sharding = case["strategy"].lower().split()
    config = dataclasses.replace(
        Config(),
        model_name=str(folder),
        fine_tuning=case["fine_tuning"],
        use_gradient_checkpointing=case["use_gradient_checkpointing"],
        strategy=tool,
        sft_weight=0.0,
    )
    case["options"] = fsdp.Settings(sharding[0].upper()) if sharding else None
    return config


def rows_of(case, vocabulary):
    dice = random.Random(0)
    ids = [[dice.randrange(vocabulary) for _ in range(size)] for size in case["sizes"]]
    return [Pair(*ids, "", "")] * case["pairs"]


# --- measured, in processes of their own ---------------------------------------------------------


def memory(field):
    """MiB of this process: VmRSS now, VmHWM at the most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def train(case, config, rows, world):
    """Three steps as main_distributed.py takes them."""
    model, autocast = models.load_policy(config, world.device)
    scorer = logps.Scorer(model, autocast)
    memory_efficient.apply(model)
    scorer.set_layout(shared=True)
    policy = optim.wrap(scorer, world, optim.Strategy(config.strategy, case["options"]))
    optimizer, schedule = optim.make_optimizer(policy, config, 1e-4, 3)
    for _ in range(3):
        batch = scorer.collate(rows, world.device)
        found = main_distributed.pair_losses(policy, batch, torch.zeros(len(rows), 2), config)
        policy.backward(found[0].mean())
        del found
        policy.clip_grad_norm(1.0)
        policy.step(optimizer, schedule)


def measure(case, folder):
    """What a rank of this case holds at the most, to standard output."""
    torch.set_num_threads(1)
    world = distributed.join(distributed.meet(distributed.whoami()), timeout_minutes=5)
    train(case, config_of(case, folder / "tiny"), rows_of(case, TINY["vocab_size"]), world)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    rows = rows_of(case, case["model"]["vocab_size"])
    train(case, config_of(case, folder / "model"), rows, world)
    print(f"held {memory('VmHWM') - before}", flush=True)
    return 0


def measured(case, folder):
    """MiB: the most that one of the ranks holds."""
    for name, shape in (("tiny", TINY), ("model", case["model"])):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(settings_of(case["kind"], shape))
        model.save_pretrained(folder / name)
    del model
    gc.collect()
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    names |= {"WORLD_SIZE": str(case["ranks"]), "LOCAL_WORLD_SIZE": str(case["ranks"])}
    command = [sys.executable, __file__, json.dumps(case), str(folder)]
    running = []
    for rank in range(case["ranks"]):
        env = os.environ | TIDY | QUIET | names | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        running.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        )
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * case["ranks"]
    return max(float(text.rpartition("held ")[2]) for text in said)


def predicted(case, folder):
    """MiB, by forecast.py."""
    config = config_of(case, folder / "model")

    def losses(*arguments):
        return main_distributed.pair_losses(*arguments, config)

    rows = rows_of(case, case["model"]["vocab_size"])
    need = dryrun.need(config, outline_of(case["kind"], case["model"]), rows, losses)
    return forecast.share(need, case["strategy"], case["ranks"]).device / 2**20


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.show) for n in range(len(KINDS))],
)
def test_predicted_memory_is_within_15_percent_of_measured(number, tmp_path):
    case = drawn(number)
    there = measured(case, tmp_path)
    here = predicted(case, tmp_path)
    millions = sum(p.numel() for p in outline_of(case["kind"], case["model"]).parameters()) / 1e6
    print(f"seed {SEED}, case {number}: {millions:.0f} M, {case}")
    print(f"predicted {here:.0f} MiB, measured {there:.0f}: {here / there - 1:+.1%}")
    assert math.isclose(here, there, rel_tol=WITHIN)


if __name__ == "__main__":
    preemption.run(lambda: measure(json.loads(sys.argv[1]), Path(sys.argv[2])))
