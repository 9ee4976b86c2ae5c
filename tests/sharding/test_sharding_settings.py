"""The JSON of FSDP and DeepSpeed: each key has its effect or is refused, and no "auto" is left.

The examples are the guide's, letter for letter; numbers that "auto" becomes are worked out by hand.
"""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from ddp_utils import UserError, lora, models
from ddp_utils.distributed import World
from ddp_utils.policy import Precision
from ddp_utils.sharding import deepspeed, fsdp

sys.path.append(str(ROOT / "scripts"))
setup = importlib.import_module("distributed_setup")

FSDP = (ROOT / "tests/data/guide_fsdp.json").read_text()
DEEPSPEED = (ROOT / "tests/data/guide_deepspeed.json").read_text()
GUIDES = ["LlamaDecoderLayer", "MistralDecoderLayer", "GemmaDecoderLayer"]
WRAP = "fsdp_transformer_layer_cls_to_wrap"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: True)  # itself it is not needed
    return tmp_path


def read(module, content, **options):
    text = content if isinstance(content, str) else json.dumps(content, **options)
    Path("j.json").write_text(text)
    return module.read("j.json")


def refused(module, content):
    """The one line that refuses a file; in it each key has a line of its own, from line 2 on."""
    with pytest.raises(UserError) as caught:
        read(module, content, indent=1)
    message = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in message and len(message) < 300
    return message


def test_what_is_no_json_object_is_refused():
    for module in (fsdp, deepspeed):
        assert refused(module, "[1]").startswith("j.json:1: expected an object, {...}")
        assert refused(module, '{"a\\nb": 1}').startswith("j.json:1: 'a\\nb' is not a setting; ")


def test_the_guides_settings_are_read_as_written_and_without_a_file_everything_is_sharded():
    settings = read(fsdp, FSDP)
    assert (settings.precision, settings.layers) == ("bf16", GUIDES)
    assert vars(settings) == vars(fsdp.Settings()) | json.loads(FSDP)
    assert fsdp.read("") == read(fsdp, {}) == fsdp.Settings()
    assert read(deepspeed, DEEPSPEED) == json.loads(DEEPSPEED)


def test_what_the_keys_of_fsdp_say():
    for key, value, name, wanted in (
        ("fsdp_mixed_precision", "FLOAT16", "precision", "fp16"),
        ("fsdp_mixed_precision", "NO", "precision", "no"),
        ("fsdp_mixed_precision", None, "precision", None),
        (WRAP, "A, B", "layers", ["A", "B"]),
        (WRAP, None, "layers", []),
    ):
        assert getattr(read(fsdp, {key: value}), name) == wanted


def test_what_fsdp_cannot_do_is_refused():
    for key, value, says in (
        ("fsdp_shard_strategy", "x", " is not a setting; did you mean fsdp_sharding_strategy?"),
        ("fsdp_sharding_strategy", "SHARDED", ": 'SHARDED' is not 'FULL_SHARD' or 'SHARD_GRAD_OP'"),
        ("fsdp_mixed_precision", "BF16", ": 'BF16' is not 'BFLOAT16' or 'FLOAT16' or 'NO'"),
        ("fsdp_offload_params", "true", ": 'true' is not a valid bool"),
        (WRAP, 5, ": 5 is not a valid list | str | None"),
    ):
        message = refused(fsdp, {"fsdp_use_orig_params": False, key: value})
        assert message.startswith(f"j.json:3: {key}{says}")


def test_what_deepspeed_cannot_be_given_is_refused():
    for path, value, says in (
        ("optimizer", {}, "optimizer: src/train.py makes the optimizer, AdamW; leave it out"),
        ("zero_optimisation", {}, "zero_optimisation is not a setting; did you mean zero_optimiz"),
        ("zero_optimization", 2, "zero_optimization: 2 is not a valid dict"),
        ("train_micro_batch_size_per_gpu", 1.5, "train_micro_batch_size_per_gpu: 1.5 is not a val"),
        ("zero_optimization.stage", 4, "zero_optimization.stage: 4 is not 0 or 1 or 2 or 3"),
        ("zero_optimization.reduce_bucket_sze", 5, "did you mean reduce_bucket_size?"),
        ("zero_optimization.overlap_comm", "auto", ".overlap_comm: 'auto' is not a valid bool"),
    ):
        section, _, key = path.partition(".")
        content = {section: {key: value} if key else value}
        message = refused(deepspeed, {"wall_clock_breakdown": False, **content})
        assert message.startswith("j.json:4: " if key else f"j.json:3: {section}")
        assert says in message


def test_named_layers_are_sharded_else_the_models_own():
    qwen = lora.meta_model("data/demo/model", None)
    for names, kind in (
        ([], "Qwen3DecoderLayer"),
        (GUIDES, "Qwen3DecoderLayer"),
        (["GemmaDecoderLayer", "Qwen3MLP"], "Qwen3MLP"),
    ):
        layers = fsdp.layers_of(qwen, fsdp.Settings(fsdp_transformer_layer_cls_to_wrap=names))
        assert [type(layer).__name__ for layer in layers] == [kind] * 4
    in_one_piece = read(fsdp, {"fsdp_auto_wrap_policy": "NO_WRAP", WRAP: GUIDES})
    assert fsdp.layers_of(qwen, in_one_piece) == []
    with pytest.raises(UserError, match="use the class of its layers"):  # it names no layers
        fsdp.layers_of(torch.nn.Linear(1, 1), read(fsdp, FSDP))


def test_precision_is_what_the_sections_say():
    for bf16, fp16, wanted in (
        (None, None, None),
        (True, None, "bf16"),
        (None, True, "fp16"),
        ("auto", "auto", None),
        (False, False, None),
        (False, True, "fp16"),
        ("auto", False, None),
    ):
        switches = {"bf16": bf16, "fp16": fp16}
        sections = {kind: {"enabled": on} for kind, on in switches.items() if on is not None}
        given = deepspeed.given(read(deepspeed, sections))
        assert given.get("mixed_precision", (None, None))[1] == wanted


def settings(mixed_precision="no", micro=3, steps=16):
    """As the settings of a run: 3 rows x 16."""
    numbers = {"micro_batch_size": micro, "gradient_accumulation_steps": steps}
    more = {"max_grad_norm": 0.3, "deepspeed_config": "j.json"}
    return SimpleNamespace(**numbers, **more, mixed_precision=mixed_precision)


def test_every_auto_of_a_generated_file_is_filled_in():
    """Of each stage, precision and offloading that distributed_setup.py knows."""
    for stage, half, optimizer, param in itertools.product(
        range(4), (None, "bf16", "fp16"), (False, True), (False, True)
    ):
        if (optimizer and not stage) or (param and stage < 3):
            continue
        flags = f"deepspeed --output j.json --zero_stage {stage}" + (f" --{half}" if half else "")
        flags += " --offload_optimizer" * optimizer + " --offload_param" * param
        setup.main(flags.split())
        for precision in [half] if half else ["no", "bf16", "fp16"]:
            config = settings(precision)
            ready = deepspeed.filled(deepspeed.read("j.json"), config, World(world_size=2), 100)
            assert "auto" not in json.dumps(ready)
            assert ready["train_batch_size"] == 96  # 2 ranks x 16 x 3
            assert ready["train_micro_batch_size_per_gpu"] == 3
            assert ready["gradient_accumulation_steps"] == 16 and ready["gradient_clipping"] == 0.3
            on = {kind: ready[kind]["enabled"] for kind in ("bf16", "fp16")}
            assert on == {"bf16": precision == "bf16", "fp16": precision == "fp16"}
            if precision == "bf16":  # sums are fp32, as in DDP
                assert ready["data_types"] == {"grad_accum_dtype": "fp32"}
                assert ready["communication_data_type"] == "fp32"
            parts = ready["zero_optimization"]
            assert parts["stage"] == stage and parts["reduce_bucket_size"] == 500_000_000
            if stage == 3:  # 0.9 x 100^2, 10 x 100
                assert parts["stage3_prefetch_bucket_size"] == 9_000
                assert parts["stage3_param_persistence_threshold"] == 1_000
            offloaded = [parts.get(f"offload_{name}") for name in ("optimizer", "param")]
            on_host = {"device": "cpu", "pin_memory": True}
            assert offloaded == [on_host if asked else None for asked in (optimizer, param)]


def test_an_auto_bucket_is_what_a_square_matrix_holds():
    content = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    ready = deepspeed.filled(content, settings(), World(), 100)
    assert ready["zero_optimization"] == {"reduce_bucket_size": 10_000}


def test_a_product_that_is_not_right_is_refused():
    content = read(deepspeed, {"wall_clock_breakdown": False, "train_batch_size": 512}, indent=1)
    with pytest.raises(UserError) as caught:
        deepspeed.filled(content, settings(micro=3, steps=4), World(world_size=2), 100)
    says = "train_batch_size is 512, but 2 ranks x 4 accumulation x 3 = 24"
    assert str(caught.value) == f'j.json:3: {says}; use that, or "auto"'


def test_a_precision_that_is_switched_off_or_not_the_only_one_is_refused():
    for bf16, fp16, says in (
        (True, True, "j.json:6: mixed_precision is bf16, which differs from fp16.enabled"),
        (False, "auto", "j.json:3: mixed_precision is bf16, which differs from bf16.enabled"),
    ):
        content = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}
        with pytest.raises(UserError, match=says):
            deepspeed.filled(read(deepspeed, content, indent=1), settings("bf16"), World(), 100)


def test_without_deepspeed_it_is_one_line_before_anything_begins(monkeypatch):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install -r requirements-deepspeed.txt"):
        deepspeed.filled(read(deepspeed, DEEPSPEED), settings("bf16"), World(), 100)
    deepspeed.filled({"zero_optimization": {"stage": 0}}, settings(), World(), 100)  # is DDP


def test_qlora_asks_for_four_bits_and_lora_does_not(monkeypatch):
    asked = {}

    def load(name, **options):
        asked.update(options)
        raise OSError("enough")

    monkeypatch.setattr(models, "BitsAndBytesConfig", dict)  # itself it asks for bitsandbytes
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", load)
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    four_bits["bnb_4bit_use_double_quant"] = True
    for kind, autocast, wanted in (
        ("qlora", "bf16", four_bits | {"bnb_4bit_compute_dtype": torch.bfloat16}),
        ("qlora", "fp16", four_bits | {"bnb_4bit_compute_dtype": torch.float16}),
        ("lora", "no", None),
    ):
        cpu = torch.device("cpu")
        precision = Precision.choose(cpu, "lora", mixed=autocast)
        with pytest.raises(UserError, match="enough"):
            is_4_bits = kind == "qlora"
            model = "data/demo/model"
            lora.load_policy(model, lora.LoraSpec(), precision, cpu, in_4_bits=is_4_bits)
        assert asked["quantization_config"] == wanted
