"""Models whose parts are not all text and nn.Linear: what is trained, and the printed messages."""

import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers
from peft import PeftModel
from test_layouts import IMAGES, MODELS, OLD
from test_logps import build, by_hand, some_pairs
from torch import nn

from conftest import need
from ddp_utils import UserError, cli
from ddp_utils.distributed import World
from ddp_utils.policy import Precision
from lm import logps, models, parallel
from lm.fast import self_test

PAIRS = some_pairs((7, 5, 9), (11, 8, 6))


def load(folder, model, adapter):
    """Save a model; return the policy of a run, and the lines that --check prints."""
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')
    torch.manual_seed(1)
    lines = models.meta_model(str(folder), adapter)[1]
    precision = Precision(torch.float32, None)
    return models.load_policy(str(folder), adapter, precision, torch.device("cpu")), lines


def train(policy):
    """Train two steps: the gradient of A is 0 as long as B is; return names of what has one."""
    scorer = logps.Scorer(policy)
    self_test.check_head(scorer, PAIRS, torch.device("cpu"))  # transformers 5.5: full logits
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        sum(map(torch.sum, scorer(scorer.collate(PAIRS, "cpu")))).backward()
        optimizer.step()
    return {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}


@torch.no_grad()
def assert_reopens(model, policy, folder):
    """Plain transformers and peft make the trained model from the saved result."""
    base = models.load(folder, "auto", models.META)
    models.save(policy, base, mock.Mock(ends=[]), folder / "result")
    plain = type(model).from_pretrained(
        folder if hasattr(policy, "peft_config") else folder / "result"
    )
    if hasattr(policy, "peft_config"):
        plain = PeftModel.from_pretrained(plain, folder / "result")
    found, expected, before = (
        torch.stack([by_hand(each.eval(), pair, torch.float32) for pair in PAIRS])
        for each in (plain, policy, model)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
    assert (expected - before).abs().max() > 0.01


def reached(model):
    """Return what a text reaches: what has a gradient in plain transformers."""
    model.zero_grad()
    model(torch.tensor([PAIRS[0].prompt])).logits.sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


CROSS = dict(num_hidden_layers=3, cross_attention_layers=[1])
TOWERS = {  # model -> parts that no text reaches
    IMAGES: "model.vision_tower, model.multi_modal_projector",
    "llava": "model.vision_tower, model.multi_modal_projector",
    "qwen3-vl": "model.visual",
}


@pytest.mark.parametrize("fine_tuning", ["full", "all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("name", TOWERS)
def test_parts_that_no_text_reaches_stay_frozen_and_the_result_reopens(name, fine_tuning, tmp_path):
    if name == IMAGES:
        need("transformers", "5.8", IMAGES)
    model = build(MODELS[name][0])
    adapter = None if fine_tuning == "full" else models.LoraSpec(4, targets=fine_tuning)
    policy, [line] = load(tmp_path, model, adapter)
    assert line == f"frozen, since no text reaches them: {TOWERS[name]}"
    names = reached(model)
    if adapter:
        targets = fine_tuning.split(",")
        head = model.get_output_embeddings()
        for path, module in [*model.named_modules()][1:]:
            is_target = "all-linear" in targets or path.rpartition(".")[2] in targets
            is_layer = isinstance(module, nn.Linear) and module is not head and is_target
            is_expected = is_layer and f"{path}.weight" in names
            adapted = policy.get_submodule(f"base_model.model.{path}")
            assert hasattr(adapted, "lora_A") == is_expected, path
        names = {name for name, _ in policy.named_parameters() if "lora_" in name}
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == names
    assert set() < train(policy) <= names
    assert_reopens(model, policy, tmp_path)
    if not adapter:
        assert (tmp_path / "result/preprocessor_config.json").exists()


def test_what_no_text_reaches_is_computed_once_per_model(tmp_path, monkeypatch):
    asked, find = [], models.find_unreached
    monkeypatch.setattr(models, "_unreached", {})
    monkeypatch.setattr(models, "find_unreached", lambda model: asked.append(1) or find(model))
    for number, name in enumerate(("llava", "qwen3-vl"), start=1):
        _, [line] = load(tmp_path / name, build(MODELS[name][0]), models.LoraSpec(4))
        assert line.endswith(TOWERS[name]) and len(asked) == number


AUDIO = dict(d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=64)
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
TEXT |= dict(num_key_value_heads=2, vocab_size=97)


def test_an_audio_tower_with_a_constant_stays_frozen(tmp_path):
    """Whisper's positions are a parameter without a gradient."""
    config = transformers.Qwen2AudioConfig(
        text_config=transformers.Qwen2Config(**TEXT).to_dict(), audio_config=AUDIO
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    policy, [line] = load(tmp_path, model, None)
    assert re.match(r"frozen, since no text reaches them: (model\.)?audio_tower", line)
    assert train(policy) == {name for name in reached(model) if "audio" not in name}


def test_a_router_that_returns_two_tensors_gets_no_lora(tmp_path):
    model = build(transformers.PhimoeConfig(**TEXT, num_local_experts=4, pad_token_id=0))
    policy, lines = load(tmp_path, model, models.LoraSpec(4))
    assert not any("router" in name and "lora" in name for name, _ in policy.named_parameters())
    assert any("router: they stay frozen" in line for line in lines)


ALSO = "LoRA also on the fused weights of experts: down_proj, gate.weight, gate_up_proj"
FROZEN = (
    "all-linear does not reach down_proj, gate_up_proj: they stay frozen; "
    "for all experts, use --lora_targets all-linear,down_proj,gate_up_proj"
)
DENSE = (  # peft gives these names to the experts
    "all-linear does not reach mlp.down_proj, mlp.gate_proj, mlp.up_proj, shared_experts.down_proj,"
    " shared_experts.gate_proj, shared_experts.up_proj: they stay frozen"
)
EXPERTS = {  # what all-linear does, which peft changes for some architectures
    "qwen3-moe": [ALSO],
    "mixtral": [ALSO],
    "deepseek-3": [ALSO, DENSE],
    "gpt-oss": [FROZEN],
    "granite-moe": [FROZEN],
}


@pytest.mark.parametrize("name", EXPERTS)
def test_a_line_says_what_all_linear_leaves_out_and_experts_can_be_targeted(name, tmp_path):
    if name in ("deepseek-3", "granite-moe"):
        need("transformers", "5.17", f"a LoRA on the experts of {name}")
    model = build(MODELS[name][0])
    policy, lines = load(tmp_path, model, models.LoraSpec(4))
    assert lines == EXPERTS[name]
    assert any("experts." in name for name in train(policy)) == (ALSO in lines)
    for targets in ("all-linear,down_proj,gate_up_proj", "down_proj,gate_up_proj"):
        policy, [line, *_] = load(tmp_path, model, models.LoraSpec(4, targets=targets))
        assert line.startswith("LoRA also on the fused weights of experts: down_proj, gate")
        trained = {n for n, p in policy.named_parameters() if p.requires_grad}
        assert train(policy) == trained
        assert_reopens(model, policy, tmp_path)
        merged = models.load(str(tmp_path / "result"), torch.float32, torch.device("cpu"))
        expected = torch.stack([by_hand(policy, pair, torch.float32) for pair in PAIRS])
        found = torch.stack([by_hand(merged.eval(), pair, torch.float32) for pair in PAIRS])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


def test_mistakes_in_the_names_of_targets_are_one_line(tmp_path):
    cases = [
        (
            "qwen3-moe",
            "gate_up",
            0.0,
            "--lora_targets: no layer gate_up (expected down_proj, gate_u",
        ),
        (
            "qwen3-moe",
            "all-linear,q",
            0.0,
            "--lora_targets: no layer q (expected down_proj, gate_u",
        ),
        (
            "qwen3-moe",
            "all-linear,lm_head",
            0.0,
            "--lora_targets: lm_head beside all-linear is not supported for mixtures of experts",
        ),
        ("llava", "out_proj", 0.0, "--lora_targets: no layer out_proj (expected down_proj, gate_p"),
        ("qwen3-moe", "down_proj", 0.1, "--lora_dropout: the LoRA of down_proj has no dropout; "),
    ]
    for name, targets, dropout, says in cases:
        build(MODELS[name][0]).save_pretrained(tmp_path / name)
        spec = models.LoraSpec(4, dropout=dropout, targets=targets)
        with pytest.raises(UserError, match="^" + says.replace("(", r"\(")):
            models.meta_model(str(tmp_path / name), spec)


EIGHT = dict(load_in_8bit=True, load_in_4bit=False)
QUANTIZED = {  # what the line says -> what config.json has: GPTQ, ..., older ones, MLX
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": True}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes"} | EIGHT},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4"}},
    "compressed-tensors": {"compression_config": {"quant_method": "compressed-tensors"}},
    "quantization": {"quantization": {"group_size": 64, "bits": 8}},
}


@pytest.mark.parametrize("how", QUANTIZED)
def test_a_quantized_model_is_one_line_that_names_the_way_out(how, tmp_path):
    build(MODELS["llama"][0]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | QUANTIZED[how]))
    # gpt-oss and DeepSeek-V3 have no other original
    way = r"use a copy in bf16: .*\(dequantize=True\)\), then save_pretrained$"
    way = way if how in ("fp8", "mxfp4") else r"use the original model \(for an adapter "
    says = rf"its weights are quantized \({how}\); {way}"
    with pytest.raises(UserError, match=f"^--model_name: {tmp_path}: {says}"):
        models.meta_model(str(tmp_path), None)


def test_a_model_without_gradient_checkpointing_is_one_line(tmp_path):
    config = transformers.OpenAIGPTConfig(**OLD, n_embd=32, n_positions=64)
    build(config).save_pretrained(tmp_path)
    assert models.meta_model(str(tmp_path), None)[1] == []
    with pytest.raises(UserError, match="^--use_gradient_checkpointing .* does not support"):
        models.meta_model(str(tmp_path), None, gradient_checkpointing=True)


def test_a_model_that_fsdp_cannot_shard_is_found_before_it_is_loaded():
    with pytest.raises(UserError, match="^fsdp_transformer_layer_cls_to_wrap: the model has none"):
        parallel.check(parallel.choose("fsdp"), nn.Linear(1, 1))
    parallel.check(parallel.choose("ddp"), nn.Linear(1, 1))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_without_autocast_all_weights_to_be_sharded_are_fp32(autocast):
    """The demo's files are bf16: layers that a script freezes would compute in it."""
    precision, device = Precision(torch.float32, autocast), torch.device("cpu")
    policy = models.load_policy("data/demo/model", None, precision, device, sharded=True)
    kinds = {parameter.dtype for parameter in policy.parameters()}
    assert kinds == {torch.bfloat16 if autocast else torch.float32}


def test_fsdp_in_one_process_says_that_it_has_no_effect(monkeypatch):
    """With --check it is silent: that is how one tries a job's settings on another machine."""
    monkeypatch.setattr(cli, "noted", [])
    config = SimpleNamespace(
        strategy="fsdp", sharding=None, mixed_precision="no", grad_reduce_dtype="fp32", check=False
    )
    precision = Precision(torch.float32, None)
    parallel.complete(config, 1, precision, None, World(world_size=2))
    config.check = True
    parallel.complete(config, 1, precision, None, World())
    assert cli.noted == []
    config.check = False
    parallel.complete(config, 1, precision, None, World())
    [line] = cli.noted
    assert line.startswith("warning: FSDP has no effect: one process neither shards nor offloads")


@pytest.mark.parametrize("name", ["mamba", "mamba-2", "falcon-mamba", "jamba"])
def test_every_part_of_a_lora_on_mamba_learns(name, tmp_path):
    policy, [line] = load(tmp_path, build(MODELS[name][0]), models.LoraSpec(4))
    missing = "mixer.out_proj" if name == "mamba-2" else "mixer.dt_proj, mixer.out_proj"
    if name == "jamba":  # which has experts, too
        missing = "down_proj, gate_up_proj, mamba.dt_proj, mamba.out_proj"
        line = line.partition(";")[0]
    assert line == f"all-linear does not reach {missing}: they stay frozen"
    assert train(policy) == {n for n, p in policy.named_parameters() if p.requires_grad}
