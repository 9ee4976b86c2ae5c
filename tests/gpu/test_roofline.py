"""The counts of roofline.py against a closed form and against the memory plan."""

import functools
import json
import os
import subprocess
import sys

import pretend
import pytest
import torch
from cases import LARGE

import main_distributed
from config import Config
from conftest import ROOT, TESTS
from ddp_utils import losses
from lm import memory_plan
from lm.logps import Pair

pytestmark = pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())

PAIRS = [(512, 256, 256), (40, 30, 90)]  # tokens of prompt, chosen, rejected
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192}
PROGRAM = f"""
import json, roofline
pairs = [roofline.Pair(*([5] * n for n in lengths), "", "") for lengths in {PAIRS}]
counts = {{}}
shapes = {{"2 layers": roofline.qwen3(2), "3 layers": roofline.qwen3(3)}}
shapes["small"] = roofline.qwen3(4, **{SMALL})
for name, shape in shapes.items():
    counter = roofline.count_step("ours", shape, pairs)
    counts[name] = roofline.summarize([counter], ["H100"]) | {{"reads": counter.reads}}
print(json.dumps(counts))
"""


def python(*words):
    paths = [ROOT / "src", TESTS / "bench", TESTS / "gpu"]
    env = os.environ | {"PYTHONPATH": ":".join(map(str, paths))}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def counts():
    return json.loads(python("-W", "ignore", "-c", PROGRAM).stdout)


def test_flops_equal_the_closed_form(counts):
    """Frozen weights: forward, and gradient of the input, which the first layer's q, k, v lack."""
    D, E, H, V, R = 4096, 12288, 32 * 128, 151936, 16
    tokens = sum(p + (c - 1) + (r - 1) for p, c, r in PAIRS)
    attention = 0
    for p, c, r in ((p, c - 1, r - 1) for p, c, r in PAIRS):
        attention += (p + c) * (p + c + 1) // 2 + p * r + r * (r + 1) // 2
    key = LARGE["num_key_value_heads"] * 128
    first = [(D, H), (D, key), (D, key)]
    shapes = [*first, (H, D), (D, E), (D, E), (E, D)]

    def per_token(shapes, lora):
        """x W' and gradient W; x A', low B', gradient B, and the gradients of A, B and x."""
        return sum(2 * (2 * a * b) + lora * 2 * R * (a + b) for a, b in shapes)

    layer = tokens * per_token(shapes, lora=3) + (4 + 10) * attention * H
    without = tokens * sum(2 * a * b + 2 * R * a for a, b in first)
    head = sum(c + r for _, c, r in PAIRS) * 2 * (2 * D * V)
    assert counts["2 layers"]["TFLOP"] == pytest.approx(
        (2 * layer - without + head) / 1e12, rel=1e-3
    )
    more = counts["3 layers"]["TFLOP"] - counts["2 layers"]["TFLOP"]
    assert more == pytest.approx(layer / 1e12, rel=1e-3)


def test_the_peak_of_memory_is_that_of_the_plan(counts):
    """memory_plan.py uses torch's MemTracker and fake tensors of the CPU."""
    from transformers import Qwen3Config

    config = Config(fine_tuning="lora", sft_weight=0.0)
    precision = main_distributed.precision_of(config, memory_plan.GPU)
    rows = [Pair(*([5] * n for n in lengths), "", "") for lengths in PAIRS]
    row_losses = functools.partial(losses.pair_losses, spec=losses.LossSpec.of(config))
    shape = Qwen3Config(**SMALL, num_hidden_layers=4, tie_word_embeddings=False)
    need = memory_plan.need(config, precision, shape, rows, row_losses, "cuda")
    plan = sum(memory_plan.share(need, "DDP", 1)) / 2**30
    assert counts["small"]["peak GiB"] == pytest.approx(plan, rel=0.1)


def test_a_layer_launches_at_most_so_many_kernels_and_no_read(counts):
    assert counts["3 layers"]["launches"] - counts["2 layers"]["launches"] <= 151
    assert counts["3 layers"]["reads"] == 0


@pytest.mark.show
def test_the_table_lacks_what_is_not_installed():
    flags = ["--layers", "1", "--cases", "short", "--sides", "ours", "trl", "--gpus", "A100"]
    done = python("-W", "ignore", str(TESTS / "gpu/roofline.py"), *flags)
    head, _, *rows = done.stdout.splitlines()
    assert "A100 ms" in head and "H100 ms" not in head
    assert rows[0].startswith("| short | ours | ours |")
    try:
        import trl  # noqa: F401
    except ImportError:
        assert len(rows) == 1 and done.stderr.count("TRL is not installed") == 1
    else:
        assert len(rows) == 2
    assert torch.version.cuda is None  # nothing is pretended in this process
