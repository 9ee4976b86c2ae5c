"""Predicted against measured peak memory: eight settings drawn once, 10 to 300 M parameters.

Measured is the peak of a rank in three steps minus its memory before there was a model; malloc
returns freed memory at once. A smaller model of the same kind is trained first, so that what the
libraries load with their first step does not count.
"""

import dataclasses
import functools
import gc
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[1])]

import programs
import train as script
from ddp_utils import distributed, losses
from ddp_utils.policy import make_optimizer
from lm import logps, memory_plan, models, parallel
from lm.logps import Pair
from lm.sharding import fsdp, fsdp_policy
from train_config import Config

WITHIN = 0.15
LOSS = losses.LossSpec()
CASES = [  # fine-tuning, strategy, ranks; model, its sizes; lengths of a pair's parts, pairs
    ("lora", "DDP", 1, "llama", (512, 2048, 8, 8, 4096, True), (29, 32, 56), 4),
    ("full", "FSDP FULL_SHARD", 2, "llama", (256, 768, 16, 4, 4096, True), (45, 21, 71), 4),
    ("full", "DDP", 1, "llama", (1280, 2560, 14, 20, 4096, True), (56, 92, 38), 4),
    ("full", "DDP", 2, "qwen3", (768, 1536, 17, 12, 4096, True), (66, 18, 36), 2),
    ("lora", "DDP", 2, "llama", (768, 2304, 11, 12, 32768, False), (27, 89, 79), 2),
    ("lora", "FSDP FULL_SHARD", 2, "llama", (384, 1536, 14, 6, 32768, True), (28, 92, 90), 3),
    ("full", "FSDP SHARD_GRAD_OP", 2, "llama", (384, 1536, 15, 6, 16384, False), (23, 28, 25), 2),
    ("lora", "DDP", 1, "qwen3", (1024, 2048, 8, 16, 4096, False), (87, 27, 58), 3),
]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("vocab_size", "tie_word_embeddings")
TINY = (64, 128, 2, 2, 512, True)
TIDY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def settings_of(kind, sizes):
    shape = dict(zip(SIZES, sizes, strict=True))
    heads = shape["num_attention_heads"]
    shape |= {"num_key_value_heads": heads // 2, "head_dim": shape["hidden_size"] // heads}
    make = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
    return make(**shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def config_of(case, folder):
    is_fsdp = case[1] != "DDP"
    return dataclasses.replace(Config(), model_name=str(folder), type=case[0], use_fsdp=is_fsdp)


def rows_of(case, vocabulary):
    dice = random.Random(0)
    ids = [[dice.randrange(vocabulary) for _ in range(size)] for size in case[5]]
    return [Pair(*ids, "", "")] * case[6]


# --- measured, in processes of their own ---------------------------------------------------------


def memory(field):
    """Return the MiB of this process: VmRSS now, VmHWM at the peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def train(case, config, rows, world):
    """Train three steps as src/train.py does."""
    precision = script.precision_of(config, world.device)
    adapter, sharded = models.LoraSpec.of(config), config.strategy != "ddp"
    model = models.load_policy(config.model_name, adapter, precision, world.device, sharded=sharded)
    scorer = logps.Scorer(model, precision.autocast)
    scorer.set_layout(shared=True)
    options = fsdp.Settings(fsdp_sharding_strategy=case[1].split()[-1])
    policy = parallel.wrap(scorer, world, parallel.choose(config.strategy, options))
    optimizer, schedule = make_optimizer(policy, 1e-4, 3, "constant", 0.0, 0.0)
    for _ in range(3):
        batch = scorer.collate(rows, world.device)
        reference = torch.zeros(len(rows), 2)
        per_pair = losses.pair_losses(policy, batch, reference, LOSS)[0]
        policy.backward(per_pair.mean())
        del per_pair
        policy.step(optimizer, schedule, policy.clip_grad_norm(1.0).item())


def measure(number, folder):
    """Print the peak memory of a rank of this case."""
    case = CASES[number]
    torch.set_num_threads(1)
    fsdp_policy.return_freed_memory = lambda: None  # its threshold is higher than that of TIDY
    world = distributed.init_process_group(distributed.whoami(), timeout_minutes=5)
    train(case, config_of(case, folder / "tiny"), rows_of(case, 512), world)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    train(case, config_of(case, folder / "model"), rows_of(case, case[4][4]), world)
    print(f"held {memory('VmHWM') - before}", flush=True)
    return 0


def measured(number, folder):
    """Return the MiB of the rank that needs most."""
    _, _, ranks, kind, sizes, *_ = CASES[number]
    for name, shape in (("tiny", TINY), ("model", sizes)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(settings_of(kind, shape))
        model.save_pretrained(folder / name)
    command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", __file__, number, folder]
    done = programs.process(command, **TIDY, **QUIET)
    peaks = [float(peak) for peak in re.findall(r"held ([\d.]+?)(?=held|\s)", done.stdout)]
    assert len(peaks) == ranks
    return max(peaks)


def predicted(number, folder):
    """Return the MiB that memory_plan.py predicts."""
    case = CASES[number]
    config = config_of(case, folder / "model")
    precision = script.precision_of(config, torch.device("cpu"))
    row_losses = functools.partial(losses.pair_losses, spec=LOSS)
    rows, model_config = rows_of(case, case[4][4]), settings_of(*case[3:5])
    need = memory_plan.need(config, precision, model_config, rows, row_losses)
    return sum(memory_plan.share(need, *case[1:3])) / 2**20


@pytest.mark.show
@pytest.mark.parametrize("number", range(len(CASES)))
def test_predicted_memory_is_within_15_percent_of_measured(number, tmp_path):
    real = measured(number, tmp_path)
    plan = predicted(number, tmp_path)
    print(f"{CASES[number]}: {plan:.0f} MiB, measured {real:.0f}: {plan / real - 1:+.1%}")
    assert plan == pytest.approx(real, rel=WITHIN)


if __name__ == "__main__":
    distributed.run(lambda: measure(int(sys.argv[1]), Path(sys.argv[2])))
