"""Arithmetic by hand; peaks by the data sheet."""

import tempfile

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import reading
from ddp_utils import distributed
from lm import logps, meter
from lm.logps import Pair

PAIR = Pair([1] * 10, [2] * 4, [3] * 6, "", "")
# q, o: 16 x 16, k, v: 16 x 8, gate, up, down: 16 x 32; two layers
LAYERS = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32)
HEAD = 16 * 50


def tiny_scorer(tied=False, rank=0):
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, vocab_size=50, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    return logps.Scorer(model)


def read(scorer):
    """Return the metrics of a step on two pairs in half a second."""
    world = distributed.World(device=torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        pairs = reading.mapped(f"{folder}/rows", [PAIR, PAIR])
        return meter.Meter(scorer, world).read(pairs, seconds=0.5)


@pytest.mark.parametrize("tied", [True, False])
def test_full_fine_tuning_by_hand(tied, monkeypatch):
    monkeypatch.setattr(meter, "peak_flops", lambda *_: 1e9)
    # a pair has 10 + 4 + 6 - 2 input tokens and 4 + 6 targets
    needed = 2 * 6 * (LAYERS * 18 + HEAD * 10)
    values = read(tiny_scorer(tied))
    assert values["mfu"] == pytest.approx(needed / (0.5 * 1e9), rel=1e-12)
    assert values["tokens_per_second"] == 2 * (2 * 10 + 4 + 6) / 0.5
    assert values["seconds"] == 0.5 and values["peak_memory_mb"] > 10


def test_lora_by_hand(monkeypatch):
    monkeypatch.setattr(meter, "peak_flops", lambda *_: 1e9)
    # A [2, in] and B [out, 2] on q, k, v, o, gate, up, down
    sizes = [(16, 16), (16, 8), (16, 8), (16, 16), (16, 32), (16, 32), (32, 16)]
    adapter = 2 * sum(2 * (i + o) for i, o in sizes)
    needed = 2 * ((4 * LAYERS + 6 * adapter) * 18 + 4 * HEAD * 10)
    assert read(tiny_scorer(rank=2))["mfu"] == pytest.approx(needed / 0.5e9, rel=1e-12)


PEAKS = {  # device -> FLOP/s in bf16
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "Intel(R) Data Center GPU Max 1550": 416e12,
    "Tesla T4": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_the_data_sheets(name, monkeypatch):
    monkeypatch.setattr(meter, "device_name", lambda device: name)
    assert meter.peak_flops(torch.device("cuda"), torch.bfloat16) == PEAKS[name]
    assert meter.peak_flops(torch.device("cuda"), torch.float32) is None


def test_a_cpu_has_no_mfu():
    assert "mfu" not in read(tiny_scorer())
