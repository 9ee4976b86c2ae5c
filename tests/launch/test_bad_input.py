"""Settings that do not go together, each one line; single values and data: tests/corpus."""

import json
import shutil
from pathlib import Path

import pytest

import main_distributed
from ddp_utils import UserError, merge

GOOD = {"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}
ADAPTER = Path(__file__).parents[1] / "golden/demo_adapter"
CARRY_ON = f"--fine_tuning lora --init_adapter {ADAPTER} --check"
CASES = {  # flags -> what the line says; DATA stands for a file of good rows
    "--method ipo --length_average": "--length_average: ipo fixes how its log-probs are summed",
    "--method simpo --reference_model x": "--reference_model: simpo has no reference",
    "--fine_tuning full --base_dtype bf16": "--base_dtype bf16: full fine-tuning trains fp32",
    "--model_name ./nothing": "--model_name: there is no folder ./nothing",
    "--model_name no-such-model-here": "--model_name: no tokenizer at no-such-model-here",
    "--chat_template nothing.jinja": "--chat_template: no file nothing.jinja",
    '--chat_template_kwargs {"a":1}': "--chat_template_kwargs: no chat template takes a; leave",
    "--judge nothing.py:score": "--judge: 'nothing.py:score' is not file.py:function",
    "--train_data DATA --judge data/demo/judge.py:score --test_data DATA": (
        "--judge: data/demo/judge.py:score on 'Who?': not a question of the demo"
    ),
    "--fine_tuning lora --init_adapter .": "--init_adapter: no adapter at .",
    "--output_dir DIR": "--output_dir: DIR is not empty",
    "--result_dir a/b --output_dir a/b": "--output_dir: a/b holds the run, or is in it",
    "--result_dir a/b --output_dir a": "--output_dir: a holds the run, or is in it",
    "--result_dir a/b --output_dir .": "--output_dir: . holds the run, or is in it",
    "--result_dir a/b --output_dir a/b/checkpoints": "--output_dir: a/b/checkpoints holds the run",
    f"{CARRY_ON} --lora_r 8": "--lora_r: the adapter that is carried on has 3; leave it out",
    f"{CARRY_ON} --lora_targets q_proj": "--lora_targets: the adapter that is carried on has down_",
    "--backend nccl --check": "--backend nccl needs a cuda device, this machine has none",
    "--lora_r 8 --check": "--lora_r: there is no adapter; give --fine_tuning lora, or leave it",
    "--backend ccl --check": "--backend ccl needs a xpu device, this machine has none",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder beside one with a file of good rows."""
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(GOOD)] * 3))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").write_text("precious")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("ddp_utils.world._count", lambda kind: 0)  # on any machine
    return tmp_path


def fill(text, folder):
    return text.replace("DATA", str(folder / "data.jsonl")).replace("DIR", str(folder / "full"))


@pytest.mark.parametrize("flags", CASES)
def test_a_bad_setting_costs_one_line_and_writes_nothing(flags, folder):
    with pytest.raises(UserError) as caught:
        main_distributed.main(fill(flags, folder).split())
    assert str(caught.value).startswith(fill(CASES[flags], folder))
    assert "\n" not in str(caught.value)
    assert list((folder / "empty").iterdir()) == []


def test_what_is_no_adapter_is_not_merged(tmp_path):
    with pytest.raises(UserError, match="data/demo/model is a whole model already"):
        merge.merge("data/demo/model", tmp_path / "merged")
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/adapter_config.json").write_text("{}")
    (tmp_path / "unfinished").mkdir()
    for name in ("config.json", "environment.json"):
        (tmp_path / "unfinished" / name).write_text("{}")
    with pytest.raises(UserError, match="/unfinished is a run folder; give the folder of its LoRA"):
        merge.merge(tmp_path / "unfinished", tmp_path / "merged")
    nameless = tmp_path / "nameless"
    shutil.copytree(ADAPTER, nameless)
    settings = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": None})
    )
    with pytest.raises(UserError, match="adapter: .*/nameless does not name its base; give --base"):
        merge.merge(nameless, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(UserError, match="/run is a run folder; give .*/run/model"):
        merge.merge(tmp_path / "run", tmp_path / "merged")
    with pytest.raises(UserError, match="run is there already; give another folder"):
        merge.merge("data/demo/model", tmp_path / "run")
    assert not (tmp_path / "merged").exists()
