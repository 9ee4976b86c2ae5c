"""Mistakes of the user, each one line, found before a model is loaded, nothing written."""

import json
import subprocess
import sys

import pytest

import main_distributed
from conftest import ROOT
from ddp_utils import UserError

GOOD = {"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}
CASES = {  # flags -> what the line says; DATA stands for a file of good rows
    "--beta 0": "--beta: 0.0 is out of range; give a value above 0",
    "--beta nan": "--beta: nan is not a valid float",
    "--learning_rate -1e-4": "--learning_rate: -0.0001 is out of range",
    "--batch_size 0": "--batch_size: 0 is out of range",
    "--num_epochs 0": "--num_epochs: 0.0 is out of range",
    "--max_steps -2": "--max_steps: -2 is out of range",
    "--warmup_ratio 1.5": "--warmup_ratio: 1.5 is out of range; give a value from 0 to 1",
    "--lora_r 0": "--lora_r: 0 is out of range",
    "--lora_dropout 1.0": "--lora_dropout: 1.0 is out of range",
    "--label_smoothing 0.1": "--label_smoothing: dpo does not use it; it belongs to cdpo, robust",
    "--method robust --label_smoothing 0.5": "--label_smoothing: 0.5 is out of range",
    "--method ipo --length_average": "--length_average: ipo fixes how its log-probs are summed",
    "--method simpo --reference_model x": "--reference_model: simpo has no reference",
    "--fine_tuning full --base_dtype bf16": "--base_dtype bf16: full fine-tuning trains fp32",
    "--top_p 0": "--top_p: 0.0 is out of range",
    "--model_name ./nothing": "--model_name: there is no folder ./nothing",
    "--model_name no-such-model-here": "--model_name: no tokenizer at no-such-model-here",
    "--train_data nothing.jsonl": "nothing.jsonl: no such file",
    "--train_data .": ".: not a regular file",
    "--chat_template nothing.jinja": "--chat_template: no file nothing.jinja",
    "--judge nothing.py:score": "--judge: 'nothing.py:score' is not file.py:function",
    "--train_data DATA --judge data/demo/judge.py:score --test_data DATA": (
        "--judge: data/demo/judge.py:score on 'Who?': not a question of the demo"
    ),
    "--fine_tuning lora --lora_targets q_prj": "--lora_targets: no layer q_prj; there are",
    "--fine_tuning lora --init_adapter .": "--init_adapter: no adapter at .",
    "--output_dir DIR": "--output_dir: DIR is not empty",
    "--backend nccl --check": "--backend nccl needs a cuda device, this machine has none",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder beside one with a file of good rows."""
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(GOOD)] * 3))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").write_text("precious")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(main_distributed.dist, "_count", lambda kind: 0)  # on any machine
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


ROWS = {  # the third of three rows -> what the line says
    '{"prompt": "p", "chosen": "a"': ":3:30: not JSON: Expecting ',' delimiter",
    '{"prompt": "p", "chosen": "a", "rejekted": "b"}': ":3: ",
    '{"prompt": "p", "chosen": null, "rejected": "b"}': ":3: chosen",
    '{"prompt": "", "chosen": "a", "rejected": "b"}': ":3: prompt",
    '{"prompt": "p", "chosen": NaN, "rejected": "b"}': ":3: not JSON: NaN is not a JSON number",
    '{"prompt": "p", "prompt": "q", "chosen": "a", "rejected": "b"}': ":3: not JSON: field",
    '["p", "a", "b"]': ":3: not a JSON object",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_row_costs_one_line_with_its_number_or_is_skipped(row, folder):
    path = folder / "bad.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), json.dumps(GOOD), row, json.dumps(GOOD)]))
    flags = ["--train_data", str(path), "--val_data", str(folder / "data.jsonl"), "--check"]
    with pytest.raises(UserError) as caught:
        main_distributed.main(flags)
    assert str(caught.value).startswith(f"{path}{ROWS[row]}")
    assert main_distributed.main([*flags, "--on_bad_record", "skip"]) == 0
    assert list((folder / "empty").iterdir()) == []


def test_a_long_row_for_a_short_model_names_the_row_and_the_flag(folder):
    path = folder / "long.jsonl"
    path.write_text(json.dumps({**GOOD, "chosen": "word " * 700}))
    flags = ["--train_data", str(path), "--val_data", str(folder / "data.jsonl")]
    with pytest.raises(UserError, match=r"long.jsonl:1: \d+ tokens, the model has 512 positions"):
        main_distributed.main(flags)


def test_plain_python_prints_the_line_alone_and_ends_with_2(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "src/main_distributed.py", "--train_data", "nothing.jsonl"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr.startswith("error: nothing.jsonl: no such file")
        and done.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []
