"""Settings of src/train.py: flags over YAML over JSON, and the one line that a mistake costs.

main() runs in this process with --check, in an empty folder, to which it must add nothing; that
no model is loaded is seen to. JSON files are written a key a line.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from test_sharding_settings import DEEPSPEED, FSDP
from transformers import AutoConfig, AutoModelForCausalLM

import main_distributed
import programs
import train
import train_config
from conftest import ROOT
from ddp_utils import UserError, models
from ddp_utils.distributed import World
from ddp_utils.sharding import deepspeed as zero

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
    monkeypatch.setattr(zero, "find_spec", lambda name: True)  # DeepSpeed itself is not needed


def write(text, said):
    Path("c.yaml").write_text(text)
    if said is not None:
        Path("j.json").write_text(said if isinstance(said, str) else json.dumps(said, indent=1))


def refused(text, *flags, said=None):
    """The one line that refuses YAML, flags and JSON; nothing is written."""
    write(text, said)
    before = sorted(Path().rglob("*"))
    with pytest.raises(UserError) as caught:
        train.main(["--config", "c.yaml", *flags, "--check"])
    message = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in message and len(message) < 400
    assert sorted(Path().rglob("*")) == before
    return message


def accepted(text, *flags, said=None, monkeypatch):
    """The settings that main() ends up with."""
    found = []
    would = lambda folder, config, *more: [found.append(config) or f"run folder: {folder}"]  # noqa: E731
    monkeypatch.setattr(train.Run, "would", would)
    write(text, said)
    assert train.main(["--config", "c.yaml", *flags, "--check"]) == 0
    return found[0]


RATES = {  # of models from 10 M parameters on
    (train, "--objective sft --type lora"): 2e-4,  # QLoRA's for 7 B and 13 B
    (train, "--objective sft --type full"): 2e-5,  # Alpaca's
    (train, "--objective dpo --type lora"): 1e-5,
    (train, "--objective dpo --type full"): 1e-6,  # the DPO paper's
    (main_distributed, "--fine_tuning lora"): 1e-5,
    (main_distributed, "--fine_tuning full"): 1e-6,
}


def test_the_default_learning_rates(monkeypatch):
    """As docs/dpo.md has them for preferences."""
    seen, own = [], models.outline

    def wide(config):
        settings = AutoConfig.from_pretrained(ROOT / "data/demo/model", intermediate_size=8192)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings)  # 13 M

    for (script, flags), rate in RATES.items():
        would = lambda folder, config, *_: [seen.append(config.learning_rate) or ""]  # noqa: E731
        monkeypatch.setattr(script.Run, "would", would)
        name = (
            "preferences_train" if "dpo" in flags or script is main_distributed else "instructions"
        )
        data = ["--train_data", f"data/demo/{name}.jsonl", "--max_rows", "40", "--check"]
        config = ["--config", str(ROOT / "config.yaml")] if script is train else []
        for outline, expected in ((wide, rate), (own, 1e-3)):
            monkeypatch.setattr(models, "outline", outline)
            assert script.main([*config, *flags.split(), *data]) == 0
            assert seen.pop() == expected, flags
    assert "1e-3 for a model of less than 10 M parameters, else 1e-6 for all weights and 1e-5" in (
        ROOT / "docs/dpo.md"
    ).read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # what is found as it is read
        ("modle: {}", ":1: modle is not a setting; did you mean model?"),
        ("micro_batch_size: 4", ":1: micro_batch_size is no setting here; it belongs to training"),
        ("\noutput:\n\n  save_evry: 2", ":4: output.save_evry is not a setting; did you mean sa"),
        ("dataset:\n  max_rows: 1\n  max_rows: 2", ":3: dataset.max_rows is a duplicate key, see"),
        ("training:\n  micro_batch_size: '4'", ":2: training.micro_batch_size: '4' is not a valid"),
        ("distributed:\n  use_fsdp: yes", ":2: distributed.use_fsdp: 'yes' is not a valid bool"),
        ("fine_tuning: {type: lora2}", ":1: fine_tuning.type: 'lora2' is not 'lora' or 'full' or"),
        ("training:\n  seed: 1\n  micro_batch_size: 0", ":3: training.micro_batch_size: 0 is out"),
        (
            "distributed: {use_fsdp: true, bucket_mb: 30}",
            ":1: distributed.bucket_mb: it belongs to DDP, not to fsdp; leave it out",
        ),
        ("output:\n  output_dir: ''", ":2: output.output_dir: it is empty; give a path"),
        ("training:\n  method: hinge", ":2: training.method: it belongs to objective dpo; leave"),
        ("dataset:\n  response_field: a", ":2: dataset.response_field: give prompt_field and res"),
        ("training: {objective: dpo}\ndataset:\n  format: alpaca", ":3: dataset.format: of prefer"),
        ("fine_tuning:\n  type: full\nmodel:\n  base_dtype: bf16", ":4: model.base_dtype bf16: f"),
        ("distributed:\n  use_deepspeed: true", ":2: distributed.use_deepspeed: give deepspeed_c"),
        ("distributed:\n  fsdp_config: j.json", ":2: distributed.fsdp_config has no effect alone"),
        # what is found when data and model are looked at, and the place for the run
        ("model:\n  model_name: nowhere", ":2: model.model_name: no "),
        ("model:\n\n  init_adapter: nowhere", ":3: model.init_adapter: nowhere"),
        ("fine_tuning: {lora_targets: q}", ":1: fine_tuning.lora_targets: no layer q; there are"),
        ("training:\n  mixed_precision: fp16", ":2: training.mixed_precision fp16: a CPU is slow"),
        ("output:\n  output_dir: c.yaml", ":2: output.output_dir: c.yaml is not a folder"),
        ("distributed: {backend: nccl}", ":1: distributed.backend nccl needs a cuda device, this"),
    ],
)
def test_a_mistake_in_the_yaml_names_its_line(text, says):
    assert refused(text).startswith(f"c.yaml{says}")


def test_accumulation_may_stand_in_both_sections_if_it_is_equal(monkeypatch):
    text = "training:\n  {}: 2\ndistributed:\n  {}: {}\n"
    name = "gradient_accumulation_steps"
    config = accepted(TINY + text.format(name, name, 2), monkeypatch=monkeypatch)
    assert config.gradient_accumulation_steps == 2
    assert refused(text.format(name, name, 3)) == (
        f"c.yaml:4: distributed.{name} is 3, c.yaml:2: training.{name} is 2; say it once"
    )


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        (
            "distributed:\n  use_fsdp: true\n  use_deepspeed: true",
            [],
            "c.yaml:3: distributed.use_deepspeed and c.yaml:2: distributed.use_fsdp exclude each",
        ),
        ("distributed: {use_fsdp: true}", ZERO, "--deepspeed and c.yaml:1: distributed.use_fsdp"),
        (TINY, [*ZERO, "--use_fsdp"], "--deepspeed and --use_fsdp exclude each other"),
        (TINY, ["--use_deepspeed"], "--use_deepspeed: give deepspeed_config, too"),
        ("distributed: {use_fsdp: false}", FULLY[1:], "--fsdp_config has no effect alone"),
        ("training: {learning_rate: 1e-4}", ["--learning_rate=0"], "--learning_rate: 0.0 is out"),
        (TINY, ["--mixed_precision", "fp16"], "--mixed_precision fp16: a CPU is slow at it"),
    ],
)
def test_what_does_not_go_together_is_refused(text, flags, says):
    assert refused(text, *flags, said={}).startswith(says)


def test_a_file_waits_beside_a_strategy_that_is_switched_off(monkeypatch):
    text = TINY + "distributed:\n  deepspeed_config: none.json\n"
    for more, flags in (("  use_deepspeed: false\n", []), ("", ["--no_use_deepspeed"])):
        assert accepted(text + more, *flags, monkeypatch=monkeypatch).strategy == "ddp"


CONFLICTS = [
    ("micro_batch_size", 4, {"train_micro_batch_size_per_gpu": 2}),
    ("max_grad_norm", 1.0, {"gradient_clipping": 0.3}),
    ("mixed_precision", "bf16", {"fp16": {"enabled": True}}),
    ("mixed_precision", "no", {"fsdp_mixed_precision": "BFLOAT16"}),
]


@pytest.mark.parametrize(("name", "value", "said"), CONFLICTS)
def test_what_yaml_or_a_flag_and_json_say_differently_names_both(name, value, said):
    [(key, theirs)] = said.items()
    flags = FULLY if key.startswith("fsdp") else ZERO
    line, key = (3, f"{key}.enabled") if isinstance(theirs, dict) else (2, key)
    for text, more, place in (
        (f"training:\n  seed: 1\n  {name}: {value}", [], f"c.yaml:3: training.{name}"),
        (TINY, [f"--{name}", str(value)], f"--{name}"),
    ):
        message = refused(text, *flags, *more, said=said)
        assert message.startswith(f"{place} is {value}, j.json:{line}: {key} says ")
        assert message.endswith("; make them equal, or leave one of them open")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu: 0 is out of ran"),
        ({"gradient_clipping": 10**400}, "gradient_clipping: 100000"),
        ({"train_batch_size": 512}, "train_batch_size is 512, but 1 ranks x 1 accumulation x 4 ="),
    ],
)
def test_a_number_of_the_json_that_cannot_be_names_its_line(said, says):
    assert refused(TINY, *ZERO, said=said).startswith(f"j.json:2: {says}")


def test_template_arguments_are_a_mapping_in_yaml_and_json_on_the_command_line(monkeypatch):
    """The demo's template takes none: what it is given is refused, by its place."""
    yaml = TINY.replace("}", ", chat_template_kwargs: {enable_thinking: false, day: 2026-01-02}}")
    says = "c.yaml:1: dataset.chat_template_kwargs: no chat template takes "
    assert refused(yaml).startswith(says)
    flags = ["--chat_template_kwargs", '{"bos": 1}']
    says = "--chat_template_kwargs: no chat template takes bos; leave it out"
    assert refused(yaml, *flags) == says
    Path("t.jinja").write_text("{{ messages[-1].content }}{{ enable_thinking }}{{ day }}")
    config = accepted(yaml, "--chat_template", "t.jinja", monkeypatch=monkeypatch)
    found = json.loads(config.chat_template_kwargs)
    assert found == {"enable_thinking": False, "day": "2026-01-02"}


def test_flags_over_yaml_over_json(monkeypatch):
    text = TINY + "training: {micro_batch_size: 2, max_steps: 7, learning_rate: 0.1}\n"
    said = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 16}
    said |= {"gradient_clipping": 0.3, "zero_optimization": {"stage": 2}}
    flags = [*ZERO, "--micro_batch_size", "3", "--learning_rate=0.2"]
    config = accepted(text, *flags, said=said, monkeypatch=monkeypatch)
    assert (config.micro_batch_size, config.learning_rate, config.max_steps) == (3, 0.2, 7)
    assert (config.gradient_accumulation_steps, config.max_grad_norm) == (16, 0.3)
    assert config.sharding["train_micro_batch_size_per_gpu"] == 3
    assert config.sharding["train_batch_size"] == 48  # 1 x 3 x 16


def test_what_nobody_says_has_its_usual_value_and_zero_stays_zero(monkeypatch):
    config = accepted(TINY + "training: {max_grad_norm: 0}\n", monkeypatch=monkeypatch)
    assert (config.micro_batch_size, config.gradient_accumulation_steps) == (4, 1)
    assert config.max_grad_norm == 0 and config.mixed_precision == "no"  # on a CPU
    assert accepted(TINY, monkeypatch=monkeypatch).max_grad_norm == 1
    equal = {"gradient_clipping": 0, "bf16": {"enabled": "auto"}}
    config = accepted("training: {max_grad_norm: 0}", *ZERO, said=equal, monkeypatch=monkeypatch)
    assert config.sharding["gradient_clipping"] == 0 and not config.sharding["bf16"]["enabled"]


USE_DEEPSPEED = """
distributed:
  use_deepspeed: true
  deepspeed_config: "config/ds_config.json"
  gradient_accumulation_steps: 16
"""
USE_FSDP = """
distributed:
  use_fsdp: true
  fsdp_config: "config/fsdp_config.json"
  use_deepspeed: false
"""
PRECISION = """
training:
  mixed_precision: "bf16"  # Options: "no", "fp16", "bf16"
"""


@pytest.mark.parametrize("more", ["", PRECISION])
def test_the_guides_settings_fit_its_yaml(more, monkeypatch):
    Path("config").mkdir()
    Path("config/ds_config.json").write_text(DEEPSPEED)
    Path("config/fsdp_config.json").write_text(FSDP)
    config = accepted(TINY + USE_DEEPSPEED + more, monkeypatch=monkeypatch)
    assert (config.strategy, config.mixed_precision) == ("deepspeed", "bf16")
    assert (config.gradient_accumulation_steps, config.max_grad_norm) == (16, 0.3)
    assert "auto" not in json.dumps(config.sharding)
    config = accepted(TINY + USE_FSDP + more, monkeypatch=monkeypatch)
    assert (config.strategy, config.mixed_precision) == ("fsdp", "bf16")
    assert config.sharding.strategy == "FULL_SHARD"


def test_the_shipped_file_holds_the_defaults():
    found = train_config.read(["--config", str(ROOT / "config.yaml")], World())
    usual = train_config.Config(
        micro_batch_size=4, gradient_accumulation_steps=1, max_grad_norm=1.0
    )
    names = [field.name for field in dataclasses.fields(usual)]
    assert [name for name in names if getattr(found, name) != getattr(usual, name)] == ["config"]


@pytest.mark.parametrize(("there", "cuda"), [(False, True), (True, False)])
def test_qlora_needs_bitsandbytes_and_a_gpu(there, cuda, monkeypatch):
    monkeypatch.setattr(train_config, "find_spec", lambda name: there)
    monkeypatch.setattr(train_config.torch.cuda, "is_available", lambda: cuda)
    says = "qlora needs bitsandbytes and a CUDA device; give lora"
    assert refused("fine_tuning:\n  type: qlora") == f"c.yaml:2: fine_tuning.type: {says}"
    monkeypatch.setattr(train_config, "find_spec", lambda name: True)
    monkeypatch.setattr(train_config.torch.cuda, "is_available", lambda: True)
    assert train_config.read(["--config", "c.yaml"], World()).fine_tuning == "lora"


@pytest.mark.parametrize("flags", [FULLY, ZERO])
def test_4_bit_weights_are_not_sharded(flags):
    message = refused("fine_tuning:\n  type: qlora", *flags, said={})
    assert message.endswith("cannot shard 4-bit weights; give lora")


def test_check_says_where_the_run_would_go_and_writes_nothing(capsys):
    write(TINY + "output: {output_dir: my/run}\n", None)
    assert train.main(["--config", "c.yaml", "--check"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "run folder: my/run"
    assert [str(path) for path in Path().rglob("*")] == ["c.yaml"]


def test_the_program_itself_ends_with_2_and_one_line():
    write("training:\n  micro_batch_size: 0\n", None)
    says = "c.yaml:2: training.micro_batch_size: 0 is out of range; give a value above 0"
    done = programs.start(ROOT / "src/train.py", "--config", "c.yaml", env={"RANK": ""})
    assert done == (2, "", f"error: {says}\n")
    assert [str(path) for path in Path().rglob("*")] == ["c.yaml"]
