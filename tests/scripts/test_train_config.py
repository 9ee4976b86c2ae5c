"""Settings of src/train.py: flags over YAML over JSON, and the one line of error of a mistake.

main() runs in this process with --check, in an empty folder, to which it must add nothing, and
must not load a model. JSON files are written with one key per line.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from test_sharding_settings import DEEPSPEED, FSDP

import main_distributed
import programs
import train
import train_config
from conftest import ROOT
from ddp_utils import UserError
from lm import models
from lm.sharding import deepspeed, deepspeed_engine

TINY = "dataset: {max_rows: 40}\n"  # of the demo, the default
ZERO, FULLY = ["--deepspeed", "j.json"], ["--use_fsdp", "--fsdp_config", "j.json"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    def load(name, dtype, device, *rest, **options):
        assert device == models.META, "a model was loaded"
        return original(name, dtype, device, *rest, **options)

    original = models.load
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: True)  # DeepSpeed itself is not needed
    monkeypatch.setattr(deepspeed_engine, "check_values", lambda *_: None)


def write(text, json_file):
    Path("c.yaml").write_text(text)
    if json_file is not None:
        Path("j.json").write_text(json.dumps(json_file, indent=1))


def error_of(text, *flags, json_file=None):
    """Return the one line of error for YAML, flags and JSON; nothing is written."""
    write(text, json_file)
    before = programs.left(Path())
    with pytest.raises(UserError) as caught:
        train.main(["--config", "c.yaml", *flags, "--check"])
    message = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in message and len(message) < 400
    assert programs.left(Path()) == before
    return message


def accepted(text, *flags, json_file=None, monkeypatch):
    """Return the settings that main() uses."""
    found = []
    monkeypatch.setattr(train.runs, "check", lambda spec, config, world: found.append(config) or 0)
    write(text, json_file)
    assert train.main(["--config", "c.yaml", *flags, "--check"]) == 0
    return found[0]


RATES = {  # measured on SmolLM2-135M-Instruct: docs/recipes.md
    (train, "--type lora"): 2e-4,  # QLoRA's for 7 B and 13 B
    (train, "--type full"): 2e-5,  # Alpaca's
    (main_distributed, "--fine_tuning lora"): 2e-4,
    (main_distributed, "--fine_tuning full"): 5e-6,
}


def test_the_default_learning_rates(tmp_path_factory, monkeypatch):
    """As docs/settings.md has them; the demo's model, under its name in the settings, has 1e-3."""
    seen = []
    copy = shutil.copytree(ROOT / "data/demo/model", tmp_path_factory.mktemp("copy") / "model")
    for (script, flags), rate in RATES.items():
        check = lambda spec, config, world: seen.append(config.learning_rate) or 0  # noqa: E731
        monkeypatch.setattr(script.runs if script is train else script, "check", check)
        name = "instructions" if script is train else "preferences_train"
        data = ["--train_data", f"data/demo/{name}.jsonl", "--max_rows", "40", "--check"]
        config = ["--config", str(ROOT / "config.yaml")] if script is train else []
        for model, expected in ((copy, rate), ("data/demo/model", 1e-3)):
            words = [*config, *flags.split(), *data, "--model_name", str(model)]
            assert script.main(words) == 0
            assert seen.pop() == expected, flags


MISTAKES = [  # YAML, and the error; mistakes in a flat file: tests/core/corpus/yaml
    # found while settings are read
    ("modle: {}", ":1: modle is not a setting; did you mean model?"),
    ("micro_batch_size: 4", ":1: micro_batch_size belongs to section training; move it there"),
    ("training:\n  report_to: none", ":2: training.report_to belongs to section output; move it"),
    ("mine: {}", ":1: mine is not a setting; expected one of model, fi"),
    ("\noutput:\n\n  save_evry: 2", ":4: output.save_evry is not a setting; did you mean sa"),
    ("training:\n  micro_batch_size: '4'", ":2: training.micro_batch_size: '4' is not a valid"),
    ("training:\n  seed: 1\n  micro_batch_size: 0", ":3: training.micro_batch_size: 0 is out"),
    ("output:\n  output_dir: ''", ":2: output.output_dir: '' is out of range (expected a fol"),
    ("training:\n  method: hinge", ":2: training.method: DPO is another script; use src/main_dis"),
    ("training:\n  batch_size: 8", ":2: training.batch_size is not a setting; "),
    ("training:\n  objective: dpo", ":2: training.objective: DPO is another script; use src/main"),
    ("dataset:\n  columns: a", ":2: dataset.columns: 'a' is out of range (expected pairs such"),
    ("model: {base_dtype: bf16}\nfine_tuning: {type: full}", ":1: model.base_dtype: full fi"),
    ("distributed:\n  use_deepspeed: true", ":2: distributed.use_deepspeed: set deepspeed_con"),
    ("distributed:\n  fsdp_config: j.json", ":2: distributed.fsdp_config: it has no effect w"),
    # found with data, model and the folder of the run
    ("model:\n  model_name: nowhere", ":2: model.model_name: nowhere: neither a "),
    ("model:\n\n  init_adapter: nowhere", ":3: model.init_adapter: nowhere"),
    ("fine_tuning: {lora_targets: q}", ":1: fine_tuning.lora_targets: no layer q (expected"),
    ("training:\n  mixed_precision: fp16", ":2: training.mixed_precision fp16: slow on a CPU"),
    ("distributed: {backend: nccl}", ":1: distributed.backend nccl needs a cuda device, this"),
]
FLAGS = [  # YAML, flags, and the error
    ("distributed: {use_fsdp: true}", ZERO, "c.yaml:1: distributed.use_fsdp: --deepspeed is"),
    (TINY, [*ZERO, "--use_fsdp"], "--use_fsdp: --deepspeed is set, too"),
    (TINY, ["--use_deepspeed"], "--use_deepspeed: set deepspeed_config, too"),
    (TINY, FULLY[1:], "--fsdp_config: it has no effect without use_fsdp"),
    ("training: {learning_rate: 1e-4}", ["--learning_rate=0"], "--learning_rate: 0.0 is out"),
    (TINY, ["--mixed_precision", "fp16"], "--mixed_precision fp16: slow on a CPU"),
    (TINY, ["--grad_reduce_dtype=bf16"], "--grad_reduce_dtype bf16: DDP supports it on GPUs only"),
    (TINY, ["--type=qlora", *FULLY], "--type: fsdp cannot shard 4-bit weights; use lora"),
    (TINY, ["--type=qlora", *ZERO], "--type: deepspeed cannot shard 4-bit weights; use lora"),
]
JSON = [  # a number in DeepSpeed's file, and the error
    ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: 0 is out of ran"),
    ({"gradient_clipping": -1}, "gradient_clipping: -1 is out of range"),
    ({"train_batch_size": 512}, "train_batch_size is 512, but 1 ranks x 1 accumulation x 4 ="),
]


def test_a_mistake_names_the_line_or_the_flag():
    for text, message in MISTAKES:
        assert error_of(text).startswith(f"c.yaml{message}"), text
    for text, flags, message in FLAGS:
        assert error_of(text, *flags, json_file={}).startswith(message), flags
    for content, message in JSON:
        assert error_of(TINY, *ZERO, json_file=content).startswith(f"j.json:2: {message}")


def test_the_file_of_a_strategy_that_is_switched_off_is_ignored(monkeypatch):
    text = TINY + "distributed:\n  deepspeed_config: none.json\n"
    for more, flags in (("  use_deepspeed: false\n", []), ("", ["--no_use_deepspeed"])):
        assert accepted(text + more, *flags, monkeypatch=monkeypatch).strategy == "ddp"


def test_different_values_in_yaml_or_a_flag_and_in_json_are_an_error_that_names_both():
    for name, value, content, line, key in (
        ("micro_batch_size", 4, {"train_micro_batch_size_per_gpu": 2}, 2, ""),
        ("max_grad_norm", 1.0, {"gradient_clipping": 0.3}, 2, ""),
        ("learning_rate", 0.1, {"optimizer": {"params": {"lr": 0.2}}}, 4, ".params.lr"),
        ("mixed_precision", "bf16", {"fp16": {"enabled": True}}, 3, ".enabled"),
        ("mixed_precision", "no", {"fsdp_mixed_precision": "BFLOAT16"}, 2, ""),
    ):
        [first] = content
        flags = FULLY if first.startswith("fsdp") else ZERO
        for text, more, place in (
            (f"training:\n  seed: 1\n  {name}: {value}", [], f"c.yaml:3: training.{name}"),
            (TINY, [f"--{name}", str(value)], f"--{name}"),
        ):
            message = error_of(text, *flags, *more, json_file=content)
            assert message.startswith(f"{place} is {value}, but j.json:{line}: {first}{key} is ")
            assert message.endswith("; make them equal, or leave one of them out")


def test_template_arguments_are_a_mapping_in_yaml_and_json_on_the_command_line(monkeypatch):
    """The demo's template uses none: each one is an error that names its place."""
    yaml = TINY.replace("}", ", chat_template_kwargs: {enable_thinking: false, day: 2026-01-02}}")
    says = "c.yaml:1: dataset.chat_template_kwargs: the chat template does not use "
    assert error_of(yaml).startswith(says)
    flags = ["--chat_template_kwargs", '{"bos": 1}']
    says = "--chat_template_kwargs: the chat template does not use bos; remove it, or use another "
    says += "--chat_template"
    assert error_of(yaml, *flags) == says
    Path("t.jinja").write_text("{{ messages[-1].content }}{{ enable_thinking }}{{ day }}")
    config = accepted(yaml, "--chat_template", "t.jinja", monkeypatch=monkeypatch)
    wanted = {"enable_thinking": False, "day": "2026-01-02"}
    assert json.loads(config.chat_template_kwargs) == wanted


def test_flags_over_yaml_over_json_over_defaults(monkeypatch):
    text = TINY + "training: {micro_batch_size: 2, max_steps: 7, learning_rate: 0.1}\n"
    content = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 16}
    content |= {"gradient_clipping": 0.3, "zero_optimization": {"stage": 2}}
    content["optimizer"] = {"type": "Adam", "params": {"lr": "auto", "weight_decay": 0.07}}
    flags = [*ZERO, "--micro_batch_size", "3", "--learning_rate=0.2"]
    config = accepted(text, *flags, json_file=content, monkeypatch=monkeypatch)
    assert config.weight_decay == 0.07 and "optimizer" not in config.sharding
    assert (config.micro_batch_size, config.learning_rate, config.max_steps) == (3, 0.2, 7)
    assert (config.gradient_accumulation_steps, config.max_grad_norm) == (16, 0.3)
    assert config.sharding["train_micro_batch_size_per_gpu"] == 3
    assert config.sharding["train_batch_size"] == 48  # 1 x 3 x 16
    # zero stays zero
    config = accepted(TINY + "training: {max_grad_norm: 0}\n", monkeypatch=monkeypatch)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (4, 1)
    assert config.max_grad_norm == 0 and config.mixed_precision == "no"  # on a CPU
    assert accepted(TINY, monkeypatch=monkeypatch).max_grad_norm == 1
    equal = {"gradient_clipping": 0, "bf16": {"enabled": "auto"}}
    text = "training: {max_grad_norm: 0}"
    config = accepted(text, *ZERO, json_file=equal, monkeypatch=monkeypatch)
    assert config.sharding["gradient_clipping"] == 0 and not config.sharding["bf16"]["enabled"]


YAML = {  # of the guide
    "deepspeed": """
distributed:
  use_deepspeed: true
  deepspeed_config: "config/ds_config.json"
  gradient_accumulation_steps: 16
""",
    "fsdp": """
distributed:
  use_fsdp: true
  fsdp_config: "config/fsdp_config.json"
  use_deepspeed: false
""",
}
PRECISION = """
training:
  mixed_precision: "bf16"  # Options: "no", "fp16", "bf16"
"""


def test_the_guides_settings_fit_its_yaml(monkeypatch):
    Path("config").mkdir()
    Path("config/ds_config.json").write_text(DEEPSPEED)
    Path("config/fsdp_config.json").write_text(FSDP)
    for more in ("", PRECISION):
        for strategy, text in YAML.items():
            config = accepted(TINY + text + more, monkeypatch=monkeypatch)
            assert (config.strategy, config.mixed_precision) == (strategy, "bf16")
            if strategy == "fsdp":
                assert config.sharding.fsdp_sharding_strategy == "FULL_SHARD"
            else:
                assert (config.gradient_accumulation_steps, config.max_grad_norm) == (16, 0.3)
                assert "auto" not in json.dumps(config.sharding)


def test_config_yaml_has_the_defaults():
    shipped = train_config.read(["--config", str(ROOT / "config.yaml")])
    assert dataclasses.replace(shipped, config="config.yaml") == train_config.Config()


def test_qlora_needs_bitsandbytes(monkeypatch):
    monkeypatch.setattr(train_config.settings, "find_spec", lambda name: None)
    assert error_of("fine_tuning:\n  type: qlora").startswith(
        "c.yaml:2: fine_tuning.type: qlora needs"
    )
    monkeypatch.setattr(train_config.settings, "find_spec", lambda name: True)
    assert train_config.read(["--config", "c.yaml"]).fine_tuning == "lora"
