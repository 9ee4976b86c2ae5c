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
from ddp_utils import UserError, models
from ddp_utils.distributed import World
from ddp_utils.sharding import deepspeed as zero
from ddp_utils.sharding import fsdp

sys.path.append(str(ROOT / "scripts"))
setup = importlib.import_module("distributed_setup")

FSDP = (ROOT / "tests/data/guide_fsdp.json").read_text()
DEEPSPEED = (ROOT / "tests/data/guide_deepspeed.json").read_text()
GUIDES = ("LlamaDecoderLayer", "MistralDecoderLayer", "GemmaDecoderLayer")
WRAP = "fsdp_transformer_layer_cls_to_wrap"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zero, "find_spec", lambda name: True)  # DeepSpeed itself is not needed
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


@pytest.mark.parametrize("module", [fsdp, zero])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "j.json:1:1: not JSON"),
        ('{\n "a": 1,\n}', "j.json:3:1: not JSON"),
        ("{'a': 1}", "j.json:1:2: not JSON"),
        ("[1]", "j.json:1: give an object, {...}"),
        ('{"bf16": NaN}', "j.json:1: not JSON: NaN"),
        ('{"bf16": {}, "bf16": {}}', "j.json:1: not JSON: field 'bf16' stands twice"),
        ('{"a\\nb": 1}', "j.json:1: 'a\\nb' is not a setting; known: "),
    ],
)
def test_what_is_no_json_object_is_refused(module, text, says):
    assert refused(module, text).startswith(says)


def test_the_guides_settings_are_read_as_written_and_without_a_file_everything_is_sharded():
    assert read(fsdp, FSDP) == fsdp.Settings("FULL_SHARD", "bf16", GUIDES)
    assert fsdp.read("") == read(fsdp, {}) == fsdp.Settings("FULL_SHARD", None, ())
    assert read(zero, DEEPSPEED) == json.loads(DEEPSPEED)


@pytest.mark.parametrize(
    ("key", "value", "effect"),
    [
        ("fsdp_sharding_strategy", "SHARD_GRAD_OP", {"strategy": "SHARD_GRAD_OP"}),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", {"strategy": "HYBRID_SHARD"}),
        ("fsdp_sharding_strategy", "NO_SHARD", {"strategy": "NO_SHARD"}),
        ("fsdp_mixed_precision", "FLOAT16", {"precision": "fp16"}),
        ("fsdp_mixed_precision", "NO", {"precision": "no"}),
        (WRAP, "A, B", {"layers": ("A", "B")}),
        (WRAP, ["A"], {"layers": ("A",)}),
        (WRAP, None, {}),
        ("fsdp_auto_wrap_policy", "NO_WRAP", {"whole": True}),
        ("fsdp_offload_params", True, {"offload": True}),
        ("fsdp_activation_checkpointing", True, {"checkpointing": True}),
        ("fsdp_forward_prefetch", True, {"prefetch": True}),
        ("fsdp_state_dict_type", "FULL_STATE_DICT", {"one_file": True}),
        ("fsdp_version", 2, {}),
    ],
)
def test_each_key_of_fsdp_has_its_effect(key, value, effect):
    assert read(fsdp, {key: value}) == fsdp.Settings()._replace(**effect)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fsdp_shard_strategy", "x", "fsdp_shard_strategy is not a setting; did you mean fsdp_sh"),
        ("fsdp_sharding_strategy", "SHARDED", '"SHARDED"; FSDP2 has "FULL_SHARD", "SHARD_GRAD_OP"'),
        ("fsdp_mixed_precision", "BF16", 'is "BF16"; FSDP2 has "BFLOAT16", "FLOAT16", "NO"'),
        ("fsdp_cuda_graphs", True, "is true; FSDP2 has false"),
        ("fsdp_offload_params", "true", 'is "true"; FSDP2 has false, true'),
        ("fsdp_version", 1, "is 1; FSDP2 has 2"),
        (WRAP, 5, f"{WRAP}: give a list of class names"),
        (WRAP, [None], f"{WRAP}: give a list of class names"),
    ],
)
def test_what_fsdp_cannot_do_is_refused(key, value, says):
    message = refused(fsdp, {"fsdp_use_orig_params": False, key: value})
    assert message.startswith(f"j.json:3: {key}") and says in message


@pytest.fixture(scope="module")
def qwen():
    """The demo's model without its weights: four layers."""
    settings = {"model_name": "data/demo/model", "fine_tuning": "full", "init_adapter": ""}
    return models.outline(SimpleNamespace(**settings))


@pytest.mark.parametrize(
    ("layers", "kind", "count", "says"),
    [
        ((), "Qwen3DecoderLayer", 4, None),
        (GUIDES, "Qwen3DecoderLayer", 4, f"no {', '.join(GUIDES)}; it has Qwen3DecoderLayer"),
        (("GemmaDecoderLayer", "Qwen3MLP"), "Qwen3MLP", 4, None),
        (("Embedding",), "Embedding", 1, None),
    ],
)
def test_named_layers_are_sharded_else_the_models_own(qwen, layers, kind, count, says):
    found, line = fsdp.layers_of(qwen, fsdp.Settings(layers=layers))
    assert [type(layer).__name__ for layer in found] == [kind] * count
    assert line is None if says is None else says in line


def test_no_wrap_shards_all_in_one_piece_and_a_model_that_does_not_say_its_layers_is_refused(qwen):
    assert fsdp.layers_of(qwen, fsdp.Settings(layers=GUIDES, whole=True)) == ([], None)
    with pytest.raises(UserError, match="give their class"):
        fsdp.layers_of(torch.nn.Linear(1, 1), fsdp.Settings(layers=GUIDES))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("optimizer", {}, "optimizer: src/train.py makes the optimizer, AdamW; leave it out"),
        ("scheduler", {}, "scheduler: src/train.py makes the schedule"),
        ("zero_optimisation", {}, "zero_optimisation is not a setting; did you mean zero_optimiz"),
        ("zero_optimization", 2, "zero_optimization is 2; give an object, {...}"),
        ("zero_force_ds_cpu_optimizer", True, "is true; give false, AdamW is torch's"),
        ("gradient_clipping", -1, "gradient_clipping is -1; give a number of 0 or more"),
        ("train_micro_batch_size_per_gpu", 1.5, "is 1.5; give a whole number"),
        ("zero_optimization.stage", 4, "stage is 4; give 0, 1, 2 or 3"),
        ("zero_optimization.reduce_bucket_sze", 5, "did you mean reduce_bucket_size?"),
        ("zero_optimization.reduce_bucket_size", -5, "is -5; give a whole number"),
        ("zero_optimization.overlap_comm", "auto", 'is "auto"; give true or false'),
        ("bf16.enabled", "yes", 'is "yes"; give true or false'),
    ],
)
def test_what_deepspeed_cannot_be_given_is_refused(path, value, says):
    section, _, key = path.partition(".")
    content = {section: {key: value} if key else value}
    message = refused(zero, {"wall_clock_breakdown": False, **content})
    start = "j.json:4: " if key else f"j.json:3: {section}"
    assert message.startswith(start) and says in message


def test_only_what_is_sharded_can_be_offloaded():
    for stage, name, device, says in (
        (2, "offload_param", "cpu", "offload_param: only with stage 3 and up"),
        (0, "offload_optimizer", "cpu", "offload_optimizer: only with stage 1 and up"),
        (3, "offload_optimizer", "nvme", 'device is "nvme"; give "cpu" or "none"'),
        (2, "offload_param", "none", None),
        (3, "offload_param", "cpu", None),
    ):
        content = {"zero_optimization": {"stage": stage, name: {"device": device}}}
        if says:
            assert says in refused(zero, content)
        else:
            assert read(zero, content) == content


def test_precision_is_what_the_sections_say():
    for bf16, fp16, wanted in (
        (None, None, None),
        (True, None, "bf16"),
        (None, True, "fp16"),
        ("auto", "auto", None),
        (False, False, "no"),
        (False, None, "no"),  # what DeepSpeed makes of it
        (False, True, "fp16"),
        ("auto", False, None),
    ):
        given = {"bf16": bf16, "fp16": fp16}
        found = {kind: {"enabled": value} for kind, value in given.items() if value is not None}
        assert zero.precision(read(zero, found)) == wanted


def settings(mixed_precision="no", micro=3, steps=16):
    """As the settings of a run: 3 rows x 16."""
    numbers = {"batch_size": micro, "gradient_accumulation_steps": steps, "max_grad_norm": 0.3}
    more = {"mixed_precision": mixed_precision, "deepspeed_config": "j.json"}
    return SimpleNamespace(**numbers, **more)


GENERATED = [
    (stage, half, optimizer, param)
    for stage, half, optimizer, param in itertools.product(
        range(4), (None, "bf16", "fp16"), (False, True), (False, True)
    )
    if (stage or not optimizer) and (stage == 3 or not param)
]


@pytest.mark.parametrize(("stage", "half", "optimizer", "param"), GENERATED)
def test_every_auto_of_a_generated_file_is_filled_in(stage, half, optimizer, param):
    flags = f"deepspeed --output j.json --zero_stage {stage}" + (f" --{half}" if half else "")
    flags += " --offload_optimizer" * optimizer + " --offload_param" * param
    setup.main(flags.split())
    for precision in [half] if half else ["no", "bf16", "fp16"]:
        found = zero.filled(zero.read("j.json"), settings(precision), World(world_size=2), 100)
        assert "auto" not in json.dumps(found)
        assert found["train_batch_size"] == 96  # 2 ranks x 16 x 3
        assert found["train_micro_batch_size_per_gpu"] == 3
        assert found["gradient_accumulation_steps"] == 16 and found["gradient_clipping"] == 0.3
        on = {kind: found[kind]["enabled"] for kind in ("bf16", "fp16")}
        assert on == {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        if precision == "bf16":  # sums are fp32, as in DDP
            assert found["data_types"] == {"grad_accum_dtype": "fp32"}
            assert found["communication_data_type"] == "fp32"
        parts = found["zero_optimization"]
        assert parts["stage"] == stage and parts["reduce_bucket_size"] == 500_000_000
        if stage == 3:  # 0.9 x 100^2, 10 x 100
            assert parts["stage3_prefetch_bucket_size"] == 9_000
            assert parts["stage3_param_persistence_threshold"] == 1_000
        offloaded = [parts.get(f"offload_{name}") for name in ("optimizer", "param")]
        on_host = {"device": "cpu", "pin_memory": False}
        assert offloaded == [on_host if asked else None for asked in (optimizer, param)]


def test_the_guides_bucket_of_5e8_becomes_an_integer_and_a_gpu_keeps_pinned_memory():
    gpu = World(device=torch.device("cuda", 0))
    parts = zero.filled(read(zero, DEEPSPEED), settings("bf16"), gpu, 100)["zero_optimization"]
    buckets = [parts[f"{name}_bucket_size"] for name in ("reduce", "allgather")]
    assert str(buckets) == "[500000000, 500000000]"
    assert parts["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    # an "auto" bucket is what a square matrix holds
    sizes = dict.fromkeys(["reduce_bucket_size", "allgather_bucket_size"], "auto")
    found = zero.filled({"zero_optimization": sizes}, settings(), World(), 100)
    assert {*found["zero_optimization"].values()} == {10_000}


def test_a_product_that_is_right_is_taken():
    filled = zero.filled({"train_batch_size": 24}, settings(steps=4), World(world_size=2), 100)
    assert filled["train_batch_size"] == 24  # 2 ranks x 4 x 3


def test_a_product_that_is_not_right_is_refused():
    found = read(zero, {"wall_clock_breakdown": False, "train_batch_size": 512}, indent=1)
    with pytest.raises(UserError) as caught:
        zero.filled(found, settings(micro=3, steps=4), World(world_size=2), 100)
    says = "train_batch_size is 512, but 2 ranks x 4 accumulation x 3 = 24"
    assert str(caught.value) == f'j.json:3: {says}; or write "auto"'


def test_a_precision_that_is_switched_off_or_not_the_only_one_is_refused():
    for bf16, fp16, says in (
        (True, True, "j.json:6: fp16.enabled is true, but mixed_precision is bf16"),
        (False, "auto", "j.json:3: bf16.enabled is false, but mixed_precision is bf16"),
    ):
        found = read(zero, {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}, indent=1)
        with pytest.raises(UserError, match=says):
            zero.filled(found, settings("bf16"), World(), 100)


def test_without_deepspeed_it_is_one_line_before_anything_begins(monkeypatch):
    monkeypatch.setattr(zero, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install -r requirements-deepspeed.txt"):
        zero.filled(read(zero, DEEPSPEED), settings("bf16"), World(), 100)
    zero.filled({"zero_optimization": {"stage": 0}}, settings(), World(), 100)  # is DDP


@pytest.mark.parametrize(
    ("kind", "autocast"), [("qlora", "bf16"), ("qlora", "fp16"), ("lora", "no")]
)
def test_qlora_asks_for_four_bits_and_lora_does_not(monkeypatch, kind, autocast):
    asked = {}

    def load(name, **options):
        asked.update(options)
        raise OSError("enough")

    monkeypatch.setattr(models, "BitsAndBytesConfig", dict)  # itself it asks for bitsandbytes
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", load)
    config = {"model_name": "data/demo/model", "type": kind, "fine_tuning": "lora"}
    config |= {"base_dtype": "auto", "mixed_precision": autocast, "use_mixed_precision": True}
    with pytest.raises(UserError, match="enough"):
        models.load_policy(SimpleNamespace(**config), torch.device("cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast)
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    wanted = wanted | {"bnb_4bit_compute_dtype": dtype} if kind == "qlora" else None
    assert asked["quantization_config"] == wanted
