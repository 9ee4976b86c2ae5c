"""The JSON of FSDP and DeepSpeed: each key has its effect or is an error, and no "auto" is left.

The examples are the guide's, letter for letter; numbers that "auto" becomes are worked out by hand.
"""

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

import train_config
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils.distributed import World
from ddp_utils.policy import Precision
from lm import models
from lm.sharding import deepspeed, deepspeed_engine, fsdp, fsdp_policy

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


def read_all(module, content, name="j.json", **options):
    """The settings of a file, and what its warning says."""
    text = content if isinstance(content, str) else json.dumps(content, **options)
    Path(name).write_text(text)
    settings, notes = module.read(name)
    return settings, "".join(notes).removeprefix(f"warning: {name}: no effect here: ")


def read(module, content, **options):
    return read_all(module, content, **options)[0]


def error_of(module, content):
    """The error of a file in which each key has a line of its own, from line 2 on."""
    with pytest.raises(UserError) as caught:
        read(module, content, indent=1)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    return str(caught.value)


def test_what_is_no_json_object_is_an_error():
    for module in (fsdp, deepspeed):
        assert error_of(module, "[1]").startswith("j.json:1: expected an object, {...}")
        assert error_of(module, '{"a\\nb": 1}').startswith("j.json:1: 'a\\nb' is not a setting; ")


def test_the_guides_settings_are_read_as_written_and_without_a_file_everything_is_sharded():
    settings, unused = read_all(fsdp, FSDP)
    assert (settings.precision, settings.layers) == ("bf16", GUIDES)
    names = vars(settings).keys()
    written = {name: value for name, value in json.loads(FSDP).items() if name in names}
    assert vars(settings) == vars(fsdp.Settings()) | written and len(written) == 6
    assert unused == "fsdp_use_orig_params"  # the guide's is false; FSDP2 always uses them
    assert fsdp.read("") == (read(fsdp, {}), []) == (fsdp.Settings(), [])
    assert read(fsdp, {"fsdp_mixed_precision": "NO", WRAP: "A, B"}).layers == ["A", "B"]
    expected = json.loads(DEEPSPEED)
    del expected["zero_force_ds_cpu_optimizer"]  # AdamW is torch's
    assert read_all(deepspeed, DEEPSPEED) == (expected, "")


NOT_HERE = ": it is not supported, and would change the training; leave it out"
MISTAKES = [  # module, key (with a section: of an inner object), value, message
    (fsdp, "fsdp_shard_strategy", "x", " is not a setting; did you mean fsdp_sharding_strategy?"),
    (fsdp, "fsdp_sharding_strategy", "SHARDED", ": 'SHARDED' is not 'FULL_SHARD' or 'SHARD_GR"),
    (fsdp, "fsdp_offload_params", "on", ": 'on' is not a valid bool"),
    (fsdp, "fsdp_xla", True, ": TPUs are not supported; leave it out"),
    (fsdp, WRAP, 5, ": 5 is not a valid list | str | None"),
    (deepspeed, "amp", {"enabled": True}, NOT_HERE),
    (deepspeed, "zero_optimisation", {}, " is not a setting; did you mean zero_optimization?"),
    (deepspeed, "zero_optimization", 2, ": 2 is not a valid dict"),
    (deepspeed, "train_micro_batch_size_per_gpu", 1.5, ": 1.5 is not a valid int"),
    (deepspeed, "zero_optimization.stage", 4, ": 4 is not 0 or 1 or 2 or 3"),
]


@pytest.mark.parametrize(("module", "key", "value", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place(module, key, value, message):
    section, _, name = key.partition(".")
    first = {"fsdp_use_orig_params": False} if module is fsdp else {"wall_clock_breakdown": False}
    content = first | {section: {name: value} if name else value}
    line = 4 if name else 3
    assert error_of(module, content).startswith(f"j.json:{line}: {key}{message}")


ACCELERATE = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2  # of fsdp_config
  fsdp_offload_params: {}
  fsdp_sharding_strategy: {}
mixed_precision: bf16
"""


def test_accelerates_own_file_and_the_line_of_a_mistake_in_it():
    Path("a.yaml").write_text(ACCELERATE.format("true", 3))
    settings, notes = fsdp.read("a.yaml")
    assert (settings.precision, settings.fsdp_sharding_strategy) == ("bf16", "NO_SHARD")
    assert settings.fsdp_offload_params and "fsdp_offload_params has no effect" in notes[0]
    for words, says in (
        (("on", 1), "4: fsdp_offload_params: 'on' is not"),
        (("false", "''"), "5: fsdp_sharding_strategy: '' is not"),
    ):
        Path("a.yaml").write_text(ACCELERATE.format(*words))
        with pytest.raises(UserError, match=f"^a.yaml:{says} "):
            fsdp.read("a.yaml")


def test_named_layers_are_sharded_else_the_models_own():
    qwen, _ = models.meta_model("data/demo/model", None)
    for names, kind in (
        ([], "Qwen3DecoderLayer"),
        (GUIDES, "Qwen3DecoderLayer"),
        (["GemmaDecoderLayer", "Qwen3MLP"], "Qwen3MLP"),
    ):
        layers = fsdp_policy.layers_of(
            qwen, fsdp.Settings(fsdp_transformer_layer_cls_to_wrap=names)
        )
        assert [type(layer).__name__ for layer in layers] == [kind] * 4
    in_one_piece = read(fsdp, {"fsdp_auto_wrap_policy": "NO_WRAP", WRAP: GUIDES})
    assert fsdp_policy.layers_of(qwen, in_one_piece) == []
    with pytest.raises(UserError, match="use the class of its layers"):  # it names no layers
        fsdp_policy.layers_of(torch.nn.Linear(1, 1), read(fsdp, FSDP))


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [(None, None, None), (True, None, "bf16"), (None, True, "fp16"), ("auto", False, None)],
)
def test_an_enabled_section_sets_the_precision(bf16, fp16, expected):
    switches = {"bf16": bf16, "fp16": fp16}
    sections = {kind: {"enabled": on} for kind, on in switches.items() if on is not None}
    given = deepspeed.given(read(deepspeed, sections))
    assert given.get("mixed_precision", (None, None))[1] == expected


def settings(mixed_precision="no"):
    """The name of the file, and settings of a run: 3 rows x 16."""
    numbers = {"micro_batch_size": 3, "gradient_accumulation_steps": 16, "max_grad_norm": 0.3}
    return "j.json", numbers | {"mixed_precision": mixed_precision}


FILLED = {"train_batch_size": 96, "gradient_accumulation_steps": 16, "gradient_clipping": 0.3}
FILLED["train_micro_batch_size_per_gpu"] = 3  # of 2 ranks x 16 x 3


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
            content = deepspeed.read("j.json")[0]
            ready = deepspeed.filled(content, *settings(precision), World(world_size=2), 100)
            assert "auto" not in json.dumps(ready)
            assert ready | FILLED == ready
            enabled = {kind for kind in ("bf16", "fp16") if ready[kind]["enabled"]}
            assert enabled == {precision} - {"no"}
            if precision == "bf16":  # sums are fp32, as in DDP
                assert ready["data_types"] == {"grad_accum_dtype": "fp32"}
                assert ready["communication_data_type"] == "fp32"
            zero = ready["zero_optimization"]
            bucket = 10_000 if stage == 3 else 500_000_000  # 100^2, or the guide's
            assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, bucket)
            if stage == 3:  # 0.9 x 100^2, 10 x 100
                assert zero["stage3_prefetch_bucket_size"] == 9_000
                assert zero["stage3_param_persistence_threshold"] == 1_000
            for name, is_offloaded in (("optimizer", optimizer), ("param", param)):
                device = zero.get(f"offload_{name}", {}).get("device")
                assert device == ("cpu" if is_offloaded else None)


def test_a_file_that_changes_what_the_flags_left_open_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup.main(["deepspeed", "--output", "d.json", "--bf16"])
    setup.main(["fsdp", "--output", "f.json"])
    (tmp_path / "config.yaml").write_text("training:\n  max_grad_norm: 0.3\n")
    changes = "gradient_accumulation_steps from 1 to 16, mixed_precision from auto to bf16"
    found = train_config.read(["--deepspeed", "d.json"]).notes
    assert found == [f"d.json changes {changes}"]  # the YAML file says 0.3, too
    flags = ["--gradient_accumulation_steps", "16", "--mixed_precision", "bf16"]
    assert train_config.read(["--deepspeed", "d.json", *flags]).notes == []
    found = train_config.read(["--use_fsdp", "--fsdp_config", "f.json"]).notes[-1]
    assert found == "f.json changes mixed_precision from auto to bf16"


def test_checkpointing_and_buckets_beside_a_file_of_fsdp(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("training: {}\n")
    (tmp_path / "f.json").write_text('{"fsdp_activation_checkpointing": true}')
    flags = ["--use_fsdp", "--fsdp_config", "f.json"]
    config = train_config.read(flags)
    assert config.gradient_checkpointing
    assert config.notes == ["f.json changes gradient_checkpointing from False to True"]
    with pytest.raises(UserError, match="--gradient_checkpointing is False, but f.json:1: fsdp_a"):
        train_config.read([*flags, "--no_gradient_checkpointing"])
    # NO_SHARD is DDP, which has buckets
    for name, count in (("FULL_SHARD", 1), ("NO_SHARD", 0)):
        (tmp_path / "f.json").write_text(json.dumps({"fsdp_sharding_strategy": name}))
        train_config.read([*flags, "--bucket_mb", "10"])
        assert capsys.readouterr().out.count("fsdp has its own buckets") == count


def test_an_auto_bucket_is_what_a_square_matrix_holds():
    content = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    ready = deepspeed.filled(content, *settings(), World(), 100)
    assert ready["zero_optimization"] == {"reduce_bucket_size": 10_000}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train_batch_size": 512}, "3: train_batch_size is 512, but 2 ranks x 16 .* x 3 = 96;"),
        ({"fp16": {"enabled": True}}, "4: mixed_precision is bf16, which differs from fp16.ena"),
        ({"bf16": {"enabled": False}}, "4: mixed_precision is bf16, which differs from bf16.ena"),
    ],
)
def test_values_that_contradict_the_settings_are_an_error(content, message):
    ready = read(deepspeed, {"wall_clock_breakdown": False, **content}, indent=1)
    with pytest.raises(UserError, match=f"j.json:{message}"):
        deepspeed.filled(ready, *settings("bf16"), World(world_size=2), 100)


def test_the_batch_of_dpo_may_be_the_files_even_if_the_ranks_do_not_divide_it():
    """16 pairs on three ranks are at most 6 each, of which DeepSpeed needs the product."""
    path, numbers = settings()
    numbers |= {"micro_batch_size": 6, "gradient_accumulation_steps": 1, "batch_size": 16}
    for total in (16, 18):
        ready = read(deepspeed, {"train_batch_size": total}, indent=1)
        filled = deepspeed.filled(ready, path, numbers, World(world_size=3), 100)
        assert filled["train_batch_size"] == 18
    ready = read(deepspeed, {"train_batch_size": 17}, indent=1)
    with pytest.raises(UserError, match="train_batch_size is 17, but 3 ranks x 1 accumulation x 6"):
        deepspeed.filled(ready, path, numbers, World(world_size=3), 100)


@pytest.mark.parametrize(("size", "says"), [(3, "zero_hpz_partition_size 3 does not"), (8, "")])
def test_secondary_shards_of_zero_must_divide_the_ranks(size, says):
    ready = read(deepspeed, {"zero_optimization": {"zero_hpz_partition_size": size}}, indent=1)
    words = ready, *settings(), World(world_size=4), 100
    if not says:  # DeepSpeed uses min(size, ranks)
        assert deepspeed.filled(*words)["zero_optimization"] == {"zero_hpz_partition_size": 8}
    else:
        with pytest.raises(UserError, match=f"^j.json:3: {says} divide 4 ranks; use the number"):
            deepspeed.filled(*words)


@pytest.mark.parametrize(
    ("zero", "place", "says"),
    [
        ({"reduce_bucket_size": 0}, "3: zero_optimization.reduce_bucket_size", "be greater than 0"),
        (
            {"offload_param": None, "overlap_com": True},
            "4: zero_optimization.overlap_com",
            "no such setting",
        ),
        (
            {"offload_param": {"pin_memory": "on and on"}},
            "4: zero_optimization.offload_param.pin_memory",
            "valid boolean",
        ),
        (
            {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
            "2: zero_optimization",
            "deprecated parameter 'cpu_offload' and",
        ),
    ],
)
def test_deepspeeds_own_check_is_one_line(zero, place, says):
    pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")
    ready = read(deepspeed, {"zero_optimization": zero}, indent=1) | {"bf16": {}, "fp16": {}}
    with pytest.raises(UserError) as caught:
        deepspeed_engine.check_values(ready, "j.json", World())
    message = str(caught.value)
    assert message.startswith(f"j.json:{place}: ") and says in message and "\n" not in message


def test_without_deepspeed_it_is_one_line(monkeypatch):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install -r requirements-deepspeed.txt"):
        deepspeed.filled(read(deepspeed, DEEPSPEED), *settings("bf16"), World(), 100)
    deepspeed.filled({"zero_optimization": {"stage": 0}}, *settings(), World(), 100)  # is DDP


@pytest.mark.parametrize(("in_4_bits", "mixed"), [(True, "bf16"), (True, "fp16"), (False, "no")])
def test_qlora_loads_four_bits_and_lora_does_not(in_4_bits, mixed, monkeypatch):
    options = {}

    def load(name, **others):
        options.update(others)
        raise OSError("enough")

    monkeypatch.setattr(models, "BitsAndBytesConfig", dict)  # the real one needs bitsandbytes
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", load)
    precision = Precision.choose(torch.device("cpu"), "lora", mixed=mixed)
    words = ("data/demo/model", models.LoraSpec(), precision, torch.device("cpu"))
    with pytest.raises(UserError, match="enough"):
        models.load_policy(*words, in_4_bits=in_4_bits)
    four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    four_bits |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": precision.autocast}
    assert options["quantization_config"] == (four_bits if in_4_bits else None)
