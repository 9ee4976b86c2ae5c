"""Each kind of preference file trains, with the demo model and with a Llama."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from unit.test_pairs import LLAMA3, chat_tokenizer

import main_distributed
import runs
from conftest import ROOT
from ddp_utils.runs import plots

FIXTURES = sorted((ROOT / "tests/data/formats").glob("*.json*"))
SHORT = runs.words("--max_steps 3 --batch_size 2 --num_samples 1 --max_new_tokens 8 --log_every 9")
SHORT += runs.words("--max_rows 24 --max_length 200 --fine_tuning lora --learning_rate 1e-4")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random tiny Llama; its tokenizer begins with a BOS and pads with its EOS."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = chat_tokenizer(LLAMA3)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model, data, folder, monkeypatch):
    monkeypatch.setattr(plots, "draw", lambda folder: None)
    flags = ["--model_name", str(model), "--train_data", str(data), "--result_dir", str(folder)]
    assert main_distributed.main([*SHORT, *flags]) == 0
    assert len(runs.lines(folder, "train")) == 3
    return json.loads((folder / "data_report.json").read_text())["train"]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_each_format_trains_the_demo_model_and_a_llama(path, tmp_path, monkeypatch, llama):
    for number, model in enumerate(("data/demo/model", llama)):
        report = train(model, path, tmp_path / str(number), monkeypatch)
        assert report["format"] == path.stem
        assert report["used"] == report["rows"] - sum(map(len, report["dropped"].values()))
