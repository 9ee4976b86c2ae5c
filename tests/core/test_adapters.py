"""Adapters of other tools: merged, continued with, or rejected, and compared with plain peft."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_layouts import EIGHT, EXPERTS, OLD, WIDE
from transformers import AutoModelForCausalLM, AutoTokenizer

import main_distributed
import runs
import train
import train_config
import train_loop
from conftest import need
from ddp_utils import UserError, distributed
from ddp_utils.policy import Precision
from lm import chat, lora, merge, models, sampling
from lm.chat_template import Encoder
from lm.fast import self_test
from lm.logps import Pair, Scorer
from ranks import ranks

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
    "mixtral": transformers.MixtralConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
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
        save_random(folder, AutoModelForCausalLM.from_config(BASES[name]), 0.1)
    return folder


@torch.no_grad()
def save_random(folder, model, spread):
    """Save a model with random weights and a tokenizer; return it."""
    for parameter in model.parameters():
        parameter.normal_(0, spread) if parameter.ndim > 1 else parameter.add_(0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return model


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


def test_a_head_of_its_own_is_kept_whatever_the_config_says(tmp_path):
    need("transformers", "5.17", "a head that the config calls tied")
    start = base(tmp_path / "base", "tied")
    encoder = Encoder(models.load_tokenizer(DEMO))
    tensors = load_file(start / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    model = models.load(str(start), "auto", CPU)
    assert not model.config.tie_word_embeddings
    models.save(model, models.load(str(start), "auto", models.META), encoder, tmp_path / "saved")
    saved = tmp_path / "saved"
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
    assert load_file(saved / "model.safetensors").keys() == tensors.keys()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(saved)), logits(model))


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
    spec = models.LoraSpec(init_adapter=str(tmp_path / "lora"), merge=True)
    full = models.load_policy(str(start), spec, Precision(torch.float32, None), CPU)
    for merged in (full, models.load(str(tmp_path / "lora"), torch.float32, CPU)):
        embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        assert merged.training and (embedding.weight is head.weight) == is_tied
        assert all(parameter.requires_grad for parameter in merged.parameters())
        torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    merge.merge(tmp_path / "lora", tmp_path / "merged")
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
    assert models.load(str(tmp_path / "lora"), "auto", models.META).vocab_size == count
    merge.merge(tmp_path / "lora", tmp_path / "merged")
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reopened.config.vocab_size == expected.shape[-1] == count
    torch.testing.assert_close(logits(reopened), expected, atol=1e-4, rtol=0)


def demo_adapter(folder, template=None, vocabulary=None, embedding=False, **options):
    """Save a trained LoRA of the demo model; with a template, or "", its tokenizer, too."""
    plain = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    if vocabulary:
        plain.resize_token_embeddings(vocabulary)
    made = adapter(folder, plain, **options)
    if embedding:
        made.save_pretrained(folder, save_embedding_layers=True)
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(DEMO)
        tokenizer.chat_template = template or None
        if not template:
            tokenizer.init_kwargs.pop("chat_template", None)
        tokenizer.save_pretrained(folder)
    return made


TOO_MUCH = {
    "modules_to_save": dict(modules_to_save=["lm_head"]),
    "trainable_token_indices": dict(trainable_token_indices=[5, 6]),
    "bias": dict(bias="all"),
    "new tokens": dict(vocabulary=2048),
    "its own embedding": dict(embedding=True),
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
    line = f"{tmp_path}/lora has more than a LoRA ({name}); use python -m lm.merge "
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
            assert str(caught.value).startswith(f"{flag}: {line}"), caught.value
    command = re.search("lm.merge (.*), then --model_name merged$", str(caught.value))[1]
    merge.main(runs.words(command.replace(" merged ", f" {tmp_path}/merged ")))
    flags = f"--fine_tuning lora --check --result_dir {tmp_path}/run --model_name "
    for model in ("lora", "merged"):
        assert main_distributed.main([*runs.words(flags), str(tmp_path / model)]) == 0
    assert not (tmp_path / "run").exists()


OTHER = ["IA3", "LOHA", "PREFIX_TUNING", "FANCY", "alora_invocation_tokens"]


@pytest.mark.parametrize("kind", OTHER)
@pytest.mark.parametrize("flag", ["--model_name", "--init_adapter"])
def test_another_kind_of_adapter_is_one_line(kind, flag, tmp_path):
    settings = {"peft_type": kind, "base_model_name_or_path": str(DEMO)}
    if kind.islower():
        settings |= {"peft_type": "LORA", kind: [5]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    flags = [flag, str(tmp_path), "--fine_tuning", "full", "--check"]
    with pytest.raises(UserError, match=f"{tmp_path} is not a plain LoRA but {kind}; use a LoRA, "):
        main_distributed.main(flags)


def test_a_base_model_of_another_revision_is_one_line(tmp_path):
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "revision": "step3000"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError) as caught:
        lora.base_of(str(tmp_path))
    hint = "hf download org/base --revision step3000 --local-dir FOLDER"
    assert f"is revision step3000 of org/base; run `{hint}`, and use --model_name" in str(
        caught.value
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"revision": "main"}))
    assert lora.base_of(str(tmp_path)) == "org/base"


NOT_MERGED = {
    "layer_replication": (dict(layer_replication=[[0, 2], [1, 2]]), 1.0, "layers with common wei"),
    "lora_bias": (dict(lora_bias=True), 1.0, "cannot be merged: .* the base layer has no bias"),
    "modules_to_save": (
        dict(modules_to_save=["norm"]),
        0.5,
        "--scale: .*more than B A .modules",
    ),
    "use_dora": (dict(use_dora=True), 0.5, "--scale: .*more than B A .use_dora"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_MERGED)
@pytest.mark.parametrize("device", [CPU, models.META])
def test_what_cannot_be_merged_is_one_line_also_without_weights(kind, device, tmp_path):
    options, scale, line = NOT_MERGED[kind]
    demo_adapter(tmp_path / "lora", **options)
    with pytest.raises(UserError, match=line):
        lora.merge(models.load(DEMO, "auto", device), tmp_path / "lora", scale)


def test_a_merge_that_changes_the_model_is_an_error(tmp_path, monkeypatch):
    demo_adapter(tmp_path / "lora")
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", peft.LoraModel.unload)
    with pytest.raises(UserError, match=r"lora: it cannot be merged: log-probs change by \S+ nats"):
        models.load(str(tmp_path / "lora"), torch.float32, CPU)


def test_a_lora_is_not_merged_into_4_bits(tmp_path, monkeypatch):
    demo_adapter(tmp_path / "lora")
    monkeypatch.setattr(train_config.settings, "find_spec", lambda name: True)
    flags = ["--type", "qlora", "--model_name", str(tmp_path / "lora"), "--check"]
    with pytest.raises(UserError, match="--type: a LoRA cannot be merged into 4-bit weights"):
        train.main(flags)


def test_the_number_format_of_a_merge_is_printed_and_can_be_chosen(tmp_path, capsys):
    """In fp32 it is W + alpha / r B A to the last digit, which bf16, that of the demo, rounds."""
    demo_adapter(tmp_path / "lora")
    expected = models.load(str(tmp_path / "lora"), torch.float32, CPU).state_dict()
    for dtype, kind in (("auto", "bfloat16"), ("fp32", "float32"), ("fp16", "float16")):
        folder = tmp_path / dtype
        assert merge.main([f"{tmp_path}/lora", str(folder), "--dtype", dtype]) == 0
        source = "that of the base model" if dtype == "auto" else "as --dtype says"
        line = f"{folder}: {kind}, {source}; load it with from_pretrained\n"
        assert capsys.readouterr().out == line
        made = AutoModelForCausalLM.from_pretrained(folder)
        assert made.dtype == getattr(torch, kind)
        for name, weight in made.state_dict().items():
            rounding = {"atol": 0, "rtol": 0} if dtype == "fp32" else {"atol": 1e-6, "rtol": 1e-2}
            torch.testing.assert_close(weight.float(), expected[name], **rounding)


# --- names of other programs ----------------------------------------------------------------------


def renamed(folder, rename, without=""):
    """Give the tensors of an adapter other names; leave those out that contain `without`."""
    file = folder / "adapter_model.safetensors"
    tensors = {rename(k): v for k, v in load_file(file).items() if not without or without not in k}
    save_file(tensors, file, {"format": "pt"})


def named(name):
    """Return a function that puts an adapter's own name into the name of a tensor."""
    pattern = r"(lora_(?:embedding_)?[AB]|lora_magnitude_vector)"
    return lambda key: re.sub(pattern, rf"\1.{name}", key)


START = "base_model.model."
NAMES = {  # name of the base, options of the LoRA, name of a tensor -> name in the file
    "no prefix": ("untied", {}, lambda key: key.removeprefix(START)),
    "no prefix at all": ("untied", {}, lambda key: key.removeprefix(f"{START}model.")),
    "prefix twice": ("untied", {}, lambda key: START + key),
    "ddp": ("untied", {}, lambda key: f"module.{key}"),
    "compiled": ("untied", {}, lambda key: key.replace(START, f"{START}_orig_mod.")),
    "compiled layers": ("untied", {}, lambda key: re.sub(r"(s\.\d)", r"\1._orig_mod", key)),
    "fsdp": ("untied", {}, lambda key: re.sub(r"(s\.\d)", r"\1._fsdp_wrapped_module", key)),
    "checkpoint": ("untied", {}, lambda key: key.replace(".m", "._checkpoint_wrapped_module.m")),
    "own name": ("untied", {}, named("default")),
    "another name, ddp": ("untied", {}, lambda key: "module." + named("sft")(key)),
    "a layer's name": ("untied", {}, named("model")),
    "dora": ("untied", dict(use_dora=True), named("default")),
    "embedding": ("tied", dict(target_modules=["q_proj", "embed_tokens"]), named("default")),
    "saved layer": (
        "untied",
        dict(modules_to_save=["lm_head"]),
        lambda key: re.sub(r"(lm_head\.)weight", r"\1modules_to_save.default.weight", key),
    ),
    "paths": (
        "untied",
        dict(
            target_modules=["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"],
            alpha_pattern={"model.layers.1.self_attn.q_proj": 32},
        ),
        lambda key: key.replace("model.layers", "layers"),
    ),
    "gpt-2": (
        "gpt-2",
        dict(target_modules=["c_attn"]),
        lambda key: key.replace("transformer.", ""),
    ),
    "experts": ("experts", dict(target_parameters=[EXPERT]), lambda key: key.removeprefix(START)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NAMES)
def test_an_adapter_under_other_names_is_that_under_its_own(kind, tmp_path, capsys):
    name, options, rename = NAMES[kind]
    start = base(tmp_path / "base", name)
    with torch.random.fork_rng():
        adapter(tmp_path / "lora", AutoModelForCausalLM.from_pretrained(start), **options)
    plain = AutoModelForCausalLM.from_pretrained(start)
    before = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, tmp_path / "lora"))
    assert (expected - before).abs().max() > 0.01
    renamed(tmp_path / "lora", rename)
    distributed.warnings.clear()
    made = lora.with_adapter(models.load(str(start), "auto", CPU), tmp_path / "lora")
    torch.testing.assert_close(logits(made), expected, atol=1e-5, rtol=0)
    assert re.fullmatch(r"warning: adapter \S+: \S+ is read as \S+\n", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")
def test_the_patterns_of_an_adapter_may_name_wrapped_layers(tmp_path):
    """As torch.compile wraps them: the scale of a layer is that of its own pattern."""
    start = base(tmp_path / "base", "untied")
    layer = "model.layers.1.self_attn.q_proj"
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_pretrained(start)
        adapter(tmp_path / "lora", model, target_modules=[layer], alpha_pattern={layer: 320})
    expected = logits(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "lora")
    )
    renamed(tmp_path / "lora", lambda key: key.replace("layers.1.", "layers.1._orig_mod."))
    file = tmp_path / "lora/adapter_config.json"
    file.write_text(
        file.read_text().replace(f'"{layer}": 320', f'"{layer[:14]}._orig_mod{layer[14:]}": 320')
    )
    assert "_orig_mod" in file.read_text()
    made = lora.with_adapter(models.load(str(start), "auto", CPU), tmp_path / "lora")
    torch.testing.assert_close(logits(made), expected, atol=1e-5, rtol=0)


VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
WITH_IMAGES = dict(vision_config=VISION | dict(image_size=28, patch_size=14), image_token_index=93)
LLAVA = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**WIDE), **WITH_IMAGES)
FULL = "model.layers.1.self_attn.q_proj"
TEXT_CLASS = {  # options of the LoRA of the text class, name of a tensor -> name in the file
    "a layer that the tower has, too": (dict(target_modules=["q_proj", "v_proj"]), None),
    "paths": (dict(target_modules=[FULL, "model.layers.0.mlp.up_proj"]), None),
    "pattern": (dict(target_modules=r"model\.layers\.\d\.self_attn\.[qv]_proj"), None),
    "exclusion": (dict(target_modules=["q_proj"], exclude_modules=[FULL]), None),
    "alpha and rank": (
        dict(target_modules=["q_proj"], alpha_pattern={FULL: 32}, rank_pattern={FULL: 2}),
        None,
    ),
    "one layer": (dict(target_modules=["q_proj"], layers_to_transform=[1]), None),
    "saved embedding": (dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), None),
    "transformers 4": (
        dict(target_modules=["q_proj", "lm_head"]),
        lambda key: key.replace(START, f"{START}language_model."),
    ),
}


def texts_of(model):
    """Return the text class with the weights of a multimodal model."""
    text = AutoModelForCausalLM.from_config(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    return text


def with_images(folder):
    """Save a random LLaVA with its tokenizer; return it."""
    torch.manual_seed(0)
    return save_random(folder, transformers.LlavaForConditionalGeneration(LLAVA), 0.3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TEXT_CLASS)
def test_an_adapter_of_the_text_class_is_read_by_the_multimodal_one(kind, tmp_path):
    options, rename = TEXT_CLASS[kind]
    with torch.random.fork_rng():
        text = texts_of(with_images(tmp_path / "base"))
        before = logits(text)
        expected = logits(adapter(tmp_path / "lora", text, **options))
    assert (expected - before).abs().max() > 0.01
    if rename:
        renamed(tmp_path / "lora", rename)
    made = lora.with_adapter(models.load(tmp_path / "base", "auto", CPU), tmp_path / "lora")
    torch.testing.assert_close(logits(made), expected, atol=1e-5, rtol=0)
    assert not any("vision" in name for name, _ in made.named_parameters() if "lora_" in name)


@pytest.mark.filterwarnings("ignore")
def test_each_command_opens_an_adapter_of_the_text_class(tmp_path):
    """Expected values are those of transformers and peft, which open it as the text class."""
    need("transformers", "5.20", "Qwen3.5")
    sizes = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    sizes |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    text = EIGHT | sizes | dict(layer_types=["linear_attention", "full_attention"])
    text["vocab_size"] = len(AutoTokenizer.from_pretrained(DEMO))
    text["max_position_embeddings"] = 512
    vision = dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=32, patch_size=4)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForMultimodalLM.from_config(config).save_pretrained(tmp_path / "base")
        AutoTokenizer.from_pretrained(DEMO).save_pretrained(tmp_path / "base")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert type(plain).__name__ == "Qwen3_5ForCausalLM"
        adapter(tmp_path / "lora", plain, target_modules="all-linear")
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "lora"))
    spec = models.LoraSpec(init_adapter=str(tmp_path / "lora"))
    begun = models.load_policy(str(tmp_path / "base"), spec, Precision(torch.float32, None), CPU)
    opened = models.load(str(tmp_path / "lora"), "auto", CPU)
    merge.merge(tmp_path / "lora", tmp_path / "merged")
    merged = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged")
    for model in (begun, opened, merged, chat.load(str(tmp_path / "lora"), False, CPU)[0]):
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)
    flags = f"--model_name {tmp_path}/base --fine_tuning lora --init_adapter {tmp_path}/lora "
    flags += f"--check --result_dir {tmp_path}/run"
    assert main_distributed.main(runs.words(flags)) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["experts", "mixtral"])
def test_an_adapter_whose_experts_are_not_fused_is_read_as_peft_does(name, tmp_path):
    """As transformers 4 had them; the files of the base still have each expert by itself."""
    start, alpha = base(tmp_path / "base", name), 8
    weights = load_file(start / "model.safetensors")
    torch.manual_seed(1)
    tensors = {}
    for key in [key for key in weights if ".experts." in key]:
        layer = f"base_model.model.{key.removesuffix('.weight')}"
        for part, shape in {"A": (4, weights[key].shape[1]), "B": (len(weights[key]), 4)}.items():
            tensors[f"{layer}.lora_{part}.weight"] = torch.randn(shape) * 0.1
        both = [tensors[f"{layer}.lora_{part}.weight"] for part in "BA"]
        weights[key] = weights[key] + alpha / 4 * both[0] @ both[1]
    targets = sorted({key.split(".")[-3] for key in tensors})
    settings = LoraConfig(r=4, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    settings.base_model_name_or_path = str(start)
    settings.save_pretrained(tmp_path / "lora")
    save_file(tensors, tmp_path / "lora/adapter_model.safetensors", {"format": "pt"})
    made = lora.with_adapter(models.load(start, "auto", CPU), tmp_path / "lora")
    save_file(weights, start / "model.safetensors", {"format": "pt"})  # merged by hand
    expected = logits(AutoModelForCausalLM.from_pretrained(start))
    torch.testing.assert_close(logits(made), expected, atol=1e-4, rtol=0)


UNFIT = {  # change of a folder -> what the line says
    "another layer": (
        lambda folder: renamed(folder, lambda key: key.replace("self_attn", "attention")),
        f"expected names that begin with {START}model.layers.0.self_attn, the files have "
        f"{START}model.layers.0.attention; use the base model {DEMO}",
    ),
    "a tensor is missing": (
        lambda folder: renamed(folder, named("default"), "layers.0.self_attn.q_proj.lora_B"),
        f"1 tensors are missing ({START}model.layers.0.self_attn.q_proj.lora_B.weight); use the ",
    ),
    "a layer is missing": (
        lambda folder: renamed(folder, named("default"), "layers.0.self_attn.q_proj"),
        f"2 tensors are missing ({START}model.layers.0.self_attn.q_proj.lora_A.weight, ",
    ),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_an_adapter_that_does_not_fit_names_what_was_expected(kind, tmp_path):
    change, line = UNFIT[kind]
    demo_adapter(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError) as caught:
        models.load(str(tmp_path), "auto", models.META)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_two_adapters_in_one_file_are_one_line(tmp_path):
    demo_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    both = [{named(name)(k): v.clone() for k, v in tensors.items()} for name in ("policy", "old")]
    save_file(both[0] | both[1], file, {"format": "pt"})
    with pytest.raises(UserError, match=r"\d+ tensors are unexpected .*lora_A.old.weight"):
        models.load(str(tmp_path), "auto", models.META)


def test_all_layers_of_a_text_class_are_needed(tmp_path):
    with torch.random.fork_rng():
        text = texts_of(with_images(tmp_path / "base"))
        adapter(tmp_path / "lora", text, target_modules=["q_proj", "v_proj"])
    renamed(tmp_path / "lora", str, without="layers.1.self_attn.v_proj")
    with pytest.raises(UserError, match=r"2 tensors are missing .*language_model.layers.1.self_a"):
        lora.with_adapter(models.load(tmp_path / "base", "auto", CPU), tmp_path / "lora")


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_value_that_is_not_finite_is_found_when_an_adapter_is_loaded(value, check, tmp_path):
    demo_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[max(tensors)][0, 0] = value
    save_file(tensors, file, {"format": "pt"})
    flags = ["--fine_tuning", "lora", "--init_adapter", str(tmp_path), "--result_dir"]
    with pytest.raises(UserError) as caught:
        main_distributed.main([*flags, str(tmp_path / "run"), *check])
    problem = f"adapter_model.safetensors: {max(tensors)}: not all values are finite; use another"
    assert f"--init_adapter: {tmp_path}: {problem}" in str(caught.value)


def test_a_base_that_is_not_finite_is_named_when_an_adapter_is_merged(tmp_path):
    start, name = base(tmp_path / "base", "untied"), "model.layers.1.mlp.up_proj.weight"
    adapter(tmp_path / "lora", AutoModelForCausalLM.from_pretrained(start))
    weights = load_file(start / "model.safetensors")
    weights[name][0, 0] = float("nan")
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"--model_name: {start}: {name}: not all values are fini"):
        models.load(str(tmp_path / "lora"), "auto", CPU)


@pytest.mark.parametrize("kind", ["full", "lora", "replies"])
def test_a_model_that_is_not_finite_is_named_before_it_is_used(kind, tmp_path):
    """What is trained when it is loaded, other weights when the first log-probs are computed."""
    start, name = base(tmp_path / "base", "untied"), "model.layers.1.mlp.up_proj.weight"
    weights = load_file(start / "model.safetensors")
    weights[name][0, 0] = float("inf")
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    world = distributed.World()
    spec = models.LoraSpec(4) if kind == "lora" else None
    with pytest.raises(UserError, match=rf"^--model_name: {start}: {name}: not all values are fin"):
        if kind == "replies":
            sampling.choose_way(Scorer(models.load(start, "auto", CPU)), [[3, 5, 6]], 4, world)
        model = models.load_policy(str(start), spec, Precision(torch.float32, None), CPU)
        pairs = [Pair([3, 5], [6, 7], [8], "a", ""), Pair([3, 9], [6], [8, 7], "b", "")]
        self_test.choose_head_and_layout(Scorer(model), pairs, "auto", world)


# --- tokenizer, template and base -----------------------------------------------------------------

END = "<|im_end|>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]END{{ m.content }}END{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]END{% endif %}"
TEMPLATE = TEMPLATE.replace("END", END)
CHATS = AutoTokenizer.from_pretrained(DEMO).chat_template
WARNINGS = {  # template of the adapter's tokenizer, change of its folder -> template, warning
    "no tokenizer": (None, {}, CHATS, ""),
    "no template": ("", {}, CHATS, ""),
    "trained without one": ("", {}, None, "it was trained without a chat template, and"),
    "same": (CHATS, {}, CHATS, ""),
    "other template": (TEMPLATE, {}, TEMPLATE, "its chat template, not the model's, is used"),
    "other base": (
        None,
        {"base_model_name_or_path": "x/y"},
        CHATS,
        "it was trained on x/y, not",
    ),
    "no base": (None, {"base_model_name_or_path": None}, CHATS, ""),
    "newer peft": (None, {"use_magic": True, "other": None}, CHATS, "use_magic: peft ignores it"),
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_an_adapter_brings_its_tokenizer_and_template(kind, tmp_path, capsys):
    template, change, expected, line = WARNINGS[kind]
    distributed.warnings.clear()
    demo_adapter(tmp_path, template)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if kind == "trained without one":
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": None}))
    with pytest.MonkeyPatch.context() as inside:
        inside.chdir(DEMO.parents[2])  # a relative and an absolute path are the same base
        assert models.load_tokenizer("data/demo/model", tmp_path).chat_template == expected
    printed = capsys.readouterr().out
    distributed.warnings.clear()  # each warning is printed once per script
    models.load_tokenizer(DEMO, tmp_path, "my.jinja")  # no warning about what has been chosen
    is_chosen = not line or kind in ("other template", "trained without one")
    assert capsys.readouterr().out.startswith("warning") != is_chosen
    distributed.warnings.clear()
    merge.merge(tmp_path, tmp_path / "merged", base=str(DEMO))
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == expected
    assert capsys.readouterr().out.count("\n") == printed.count("\n")
    assert printed.count("\n") == bool(line) and line in printed
    assert printed.startswith(f"warning: adapter {tmp_path}: " if line else "")


def test_other_tokens_are_counted(tmp_path, capsys):
    demo_adapter(tmp_path, CHATS)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(tmp_path)
    size = len(AutoTokenizer.from_pretrained(DEMO))
    assert len(models.load_tokenizer(DEMO, tmp_path)) == size + 2
    assert "its tokenizer has 2 other tokens than the model's" in capsys.readouterr().out


def log_prob(model, prompt, reply):
    """Return the log-prob of a reply after the template's text, by plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    start = f"[user]{END}{prompt}{END}[assistant]{END}"
    count = len(tokenizer(start).input_ids)
    ids = torch.tensor([tokenizer(f"{start}{reply}{END}").input_ids])
    with torch.no_grad():
        logs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logs[count - 1 :].sum().item()


def test_dpo_continues_on_the_template_of_the_adapter(tmp_path):
    made = demo_adapter(tmp_path / "sft", TEMPLATE)
    rows = [json.loads(row) for row in Path(runs.PAIRS).read_text().splitlines()]
    flags = ["--init_adapter", str(tmp_path / "sft"), "--fine_tuning", "lora", "--max_steps", "1"]
    flags += ["--train_data", runs.PAIRS, "--batch_size", "8"]
    first = ranks(1, runs.train, str(tmp_path), flags)[0][0]
    for side in ("chosen", "rejected"):
        scores = [log_prob(made, row["prompt"], row[side]) for row in rows]
        assert first[f"logps/{side}"] == pytest.approx(sum(scores) / 8, abs=1e-3)
    assert (tmp_path / "run/model/chat_template.jinja").read_text() == TEMPLATE
    # --before is the adapter on the model of the run, also where the adapter names another
    path = tmp_path / "sft/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "x/y"}))
    before = chat.load(str(tmp_path / "run"), True, CPU)[0].float()
    torch.testing.assert_close(logits(before), logits(made), atol=0.2, rtol=0)  # merged in bf16


def test_layers_beside_all_linear_have_a_lora_too():
    """peft knows all-linear only alone: lm_head and the embedding were left out in silence."""
    cpu = torch.device("cpu")
    kinds = set()
    for targets in ("all-linear", "all-linear,lm_head", "embed_tokens, all-linear"):
        model = models.load(str(DEMO), torch.float32, cpu)
        adapted, lines = lora.add(model, models.LoraSpec(2, targets=targets))
        names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
        kinds.add(frozenset(re.findall(r"(\w+)\.lora_", " ".join(names))))
        assert lines == []
    linear = frozenset(f"{name}_proj" for name in ["q", "k", "v", "o", "gate", "up", "down"])
    assert kinds == {linear, linear | {"lm_head"}, linear | {"embed_tokens"}}


def test_a_rank_that_is_given_is_that_of_the_adapter_even_if_it_is_the_default(tmp_path):
    demo_adapter(tmp_path / "lora")
    flags = ["--fine_tuning=lora", f"--init_adapter={tmp_path}/lora", "--check"]
    with pytest.raises(UserError, match="--lora_r: the adapter in init_adapter has 4; leave it"):
        main_distributed.main([*flags, "--lora_r=16"])
    again = ["--lora_r=4", "--lora_targets=all-linear"]  # its file has the names of the layers
    main_distributed.main([*flags, *again, f"--result_dir={tmp_path}/run"])
