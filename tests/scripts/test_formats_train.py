"""Conversations train a Llama whose tokenizer begins with a BOS and pads with its EOS."""

import json

import torch
from test_pairs import LLAMA3, chat_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import main_distributed
import runs
from ddp_utils.runs import run as run_

FLAGS = "--train_data tests/data/formats/openai.jsonl --max_steps 3 --batch_size 2 --num_samples 1"
FLAGS += " --max_new_tokens 8 --max_length 200 --fine_tuning lora --learning_rate 1e-4"


def test_conversations_train_a_llama(tmp_path, monkeypatch):
    monkeypatch.setattr(run_, "write_report", lambda *_, **__: "")
    tokenizer = chat_tokenizer(LLAMA3)
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = ["--model_name", str(tmp_path), "--result_dir", str(tmp_path / "run")]
    assert main_distributed.main([*runs.words(FLAGS), *flags]) == 0
    assert len(runs.lines(tmp_path / "run", "train")) == 3
    report = json.loads((tmp_path / "run/data_report.json").read_text())["train"]
    assert (report["format"], report["rows"], report["used"]) == ("openai", 3, 2)
