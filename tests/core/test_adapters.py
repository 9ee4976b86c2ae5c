"""Adapters of other tools: merged, continued with, or rejected, and compared with plain peft."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from test_layouts import EIGHT, EXPERTS, OLD, WIDE
from transformers import AutoModelForCausalLM, AutoTokenizer

import main_distributed
import runs
import train
import train_loop
from ddp_utils import UserError, lora, models

DEMO = Path(__file__).parents[2] / "data/demo/model"
CPU = torch.device("cpu")
IDS = torch.tensor([[3, 5, 50, 6, 7, 89, 41, 5]])
ONE_WEIGHT = dict(tie_word_embeddings=True)
BASES = {
    "untied": transformers.LlamaConfig(**WIDE),
    "tied": transformers.LlamaConfig(**WIDE, **ONE_WEIGHT),
    "biases": transformers.LlamaConfig(**WIDE, attention_bias=True),
    "scaled embedding": transformers.GemmaConfig(**EIGHT, **ONE_WEIGHT),
    "gpt-2": transformers.GPT2Config(**OLD, n_embd=32, n_positions=64),
    "experts": transformers.Qwen3MoeConfig(**EIGHT, **EXPERTS),
}
EXPERT = "mlp.experts.gate_up_proj"
MERGED = {  # name of the base, options of the LoRA -> is the result tied?
    "plain": ("untied", {}, False),
    "plain, tied": ("tied", {}, True),
    "output layer": ("tied", dict(target_modules=["q_proj", "lm_head"]), False),
    "embedding": ("tied", dict(target_modules=["q_proj", "embed_tokens"]), False),
    "both": ("tied", dict(target_modules=["embed_tokens", "lm_head"]), False),
    "both alike": ("tied", dict(target_modules=["embed_tokens"], ensure_weight_tying=True), True),
    "gemma": ("scaled embedding", dict(target_modules=["q_proj", "lm_head"]), False),
    "saved embedding": ("tied", dict(modules_to_save=["embed_tokens"]), False),
    "saved output layer": ("tied", dict(modules_to_save=["lm_head"]), False),
    "tokens": ("tied", dict(trainable_token_indices=[5, 6]), True),
    "tokens, untied": ("untied", dict(trainable_token_indices={"embed_tokens": [5, 6]}), False),
    "trained biases": ("biases", dict(bias="all"), False),
    "lora bias": ("biases", dict(lora_bias=True), False),
    "dora": ("untied", dict(use_dora=True), False),
    "dora, embedding": ("tied", dict(use_dora=True, target_modules=["embed_tokens"]), False),
    "rslora": ("untied", dict(use_rslora=True), False),
    "patterns": (
        "untied",
        dict(
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"down_proj": 2},
            alpha_pattern={"v_proj": 32},
        ),
        False,
    ),
    "one layer": ("untied", dict(layers_to_transform=[1]), False),
    "conv1d": ("gpt-2", dict(target_modules=["c_attn", "c_proj"]), True),
    "conv1d, all": ("gpt-2", dict(target_modules=["c_fc", "wte", "lm_head"]), False),
    "experts": ("experts", dict(target_parameters=[EXPERT]), False),
}


def base(folder, name, seed=0):
    """Save a random model with its tokenizer; return the folder."""
    if not folder.exists():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(BASES[name])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1) if parameter.ndim > 1 else parameter.add_(0.1)
        model.save_pretrained(folder)
    return folder


def adapter(folder, model, dtype=torch.float32, **options):
    """Save a LoRA that has been trained: none of its tensors is 0; return it with its model."""
    torch.manual_seed(1)
    options = {
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.2,
    } | options
    if options.get("target_parameters"):
        options["lora_dropout"] = 0.0  # peft supports none there
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.to(dtype).save_pretrained(folder)
    return made.float().eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MERGED)
def test_a_merged_model_equals_base_and_adapter(kind, tmp_path):
    name, options, is_tied = MERGED[kind]
    start = base(tmp_path / "base", name)
    with torch.random.fork_rng():
        adapter(tmp_path / "lora", AutoModelForCausalLM.from_pretrained(start), **options)
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    expected = logits(PeftModel.from_pretrained(plain, tmp_path / "lora"))
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(start))).abs().max() > 0.01
    merged = lora.load(str(tmp_path / "lora"), torch.float32, CPU)
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    assert merged.training and (embedding.weight is head.weight) == is_tied
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    merged.save_pretrained(tmp_path / "merged")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reopened.config.tie_word_embeddings == is_tied
    torch.testing.assert_close(logits(reopened), expected, atol=1e-4, rtol=0)


def with_tokens(folder, count):
    """Save the LoRA of a tied model with so many tokens; return plain peft's logits."""
    start = AutoModelForCausalLM.from_pretrained(base(folder / "base", "tied"))
    start.resize_token_embeddings(count, mean_resizing=False)
    options = dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    return logits(adapter(folder / "lora", start, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [99, 97, 90])
def test_the_vocabulary_of_an_adapter_is_that_of_the_merged_model(count, tmp_path):
    expected = with_tokens(tmp_path, count)
    assert lora.load(str(tmp_path / "lora"), "auto", models.META).vocab_size == count
    merged = lora.load(str(tmp_path / "lora"), torch.float32, CPU)
    merged.save_pretrained(tmp_path / "merged")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reopened.config.vocab_size == expected.shape[-1] == count
    torch.testing.assert_close(logits(reopened), expected, atol=1e-4, rtol=0)


def demo_adapter(folder, template=None, base=DEMO, **options):
    """Save a trained LoRA of the demo model; with a template, its tokenizer, too."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    made = adapter(folder, plain, **options)
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(folder)
    return made


TOO_MUCH = {
    "modules_to_save": dict(modules_to_save=["lm_head"]),
    "trainable_token_indices": dict(trainable_token_indices=[5, 6]),
    "bias": dict(bias="all"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_more_than_a_lora_is_rejected_with_the_way_out(name, tmp_path):
    row = json.dumps({"question": "a", "x0": "Shout.", "reply": "#$", "tokens": [5, 6]})
    (tmp_path / "train.jsonl").write_text(row)
    (tmp_path / "val.jsonl").write_text(row.replace('"a"', '"b"'))
    replies = f"--model_name {DEMO} --data_path {tmp_path}/train.jsonl "
    replies += f"--val_path {tmp_path}/val.jsonl"
    demo_adapter(tmp_path / "lora", **TOO_MUCH[name])
    line = f"{tmp_path}/lora has more than a LoRA ({name}); use --model_name {tmp_path}/lora"
    start = f"--fine_tuning lora --init_adapter {tmp_path}/lora --result_dir {tmp_path}/run "
    for main, flags in {
        main_distributed.main: start,
        train.main: f"--init_adapter {tmp_path}/lora --output_dir {tmp_path}/run",
        train_loop.main: f"--resume_from {tmp_path}/lora --out_dir {tmp_path}/run {replies}",
    }.items():
        flag = "--resume_from" if main is train_loop.main else "--init_adapter"
        for check in ([], ["--check"]):
            with pytest.raises(UserError) as caught:
                main([*runs.words(flags), *check])
            assert str(caught.value).startswith(f"{flag}: {line}, which merges it"), caught.value
    flags = f"--model_name {tmp_path}/lora --fine_tuning lora --check --result_dir {tmp_path}/run"
    assert main_distributed.main(runs.words(flags)) == 0
    assert not (tmp_path / "run").exists()
