"""Settings that do not go together, each one line; single values and data: tests/core/corpus."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import generate_data
import main_distributed
import train
import train_loop
from ddp_utils import UserError
from ddp_utils.tools import merge

GOOD = {"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}
ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "tests/golden/demo_adapter"
MODEL = ROOT / "data/demo/model"
CARRY_ON = f"--fine_tuning lora --init_adapter {ADAPTER} --check"
CASES = {  # flags -> what the line says; DATA stands for a file of good rows
    "--method ipo --length_average": "--length_average: ipo fixes how its log-probs are summed",
    "--method simpo --reference_model x": "--reference_model: simpo has no reference",
    "--fine_tuning full --base_dtype bf16": "--base_dtype bf16: full fine-tuning trains fp32",
    "--model_name ./nothing": "--model_name: there is no folder ./nothing",
    "--model_name no-such-model-here": "--model_name: no tokenizer at no-such-model-here",
    "--train_data DATA --judge data/demo/judge.py:score --test_data DATA": (
        "--judge: data/demo/judge.py:score on 'Who?': not a question of the demo"
    ),
    "--fine_tuning lora --init_adapter .": "--init_adapter: .: cannot be read: Can't find",
    "--output_dir DIR": "--output_dir: DIR is not empty",
    "--result_dir a/b --output_dir a": "--output_dir: a holds the run, or is in it",
    "--result_dir a/b --output_dir a/b/checkpoints": "--output_dir: a/b/checkpoints holds the run",
    f"{CARRY_ON} --lora_r 8": "--lora_r: the adapter that is carried on has 3; leave it out",
    f"{CARRY_ON} --lora_targets q_proj": "--lora_targets: the adapter that is carried on has down_",
    "--backend nccl --check": "--backend nccl needs a cuda device, this machine has none",
    "--lora_r 8 --check": "--lora_r: there is no adapter; give --fine_tuning lora, or leave it",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder beside one with a file of good rows."""
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(GOOD)] * 3))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.safetensors").write_text("precious")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("ddp_utils.distributed._count", lambda kind: 0)  # on any machine
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


def test_what_is_in_the_way_of_a_run_is_found_first(folder):
    """A file where a folder goes, or a folder where a file goes."""
    for name in ("tensorboard", "model", "checkpoints", "metrics.jsonl", "summary.json"):
        place = folder / f"run of {name}" / name
        place.parent.mkdir()
        place.mkdir() if "." in name else place.write_text("")
        with pytest.raises(UserError) as caught:
            flags = ["--train_data", str(folder / "data.jsonl"), "--result_dir", str(place.parent)]
            main_distributed.main([*flags, "--check"])
        kind = "file" if "." in name else "folder"
        wanted = f"--result_dir: {place} is in the way of a {kind}; move it elsewhere"
        assert str(caught.value) == wanted
        assert list(place.parent.iterdir()) == [place]


def test_what_is_no_adapter_is_not_merged(tmp_path):
    nameless, run, merged = (tmp_path / name for name in ("nameless", "run", "merged"))
    edit(nameless, ADAPTER, "adapter_config.json", base_model_name_or_path=None)
    (run / "model").mkdir(parents=True)
    (run / "model/adapter_config.json").write_text("{}")
    for source, target, says in (
        (MODEL, merged, "data/demo/model is a whole model already"),
        (nameless, merged, "adapter: .*/nameless does not name its base; give --base"),
        (run, merged, "/run is a run folder; give .*/run/model"),
        (MODEL, run, "run is there already; give another folder"),
    ):
        with pytest.raises(UserError, match=says):
            merge.merge(source, target)
    assert not merged.exists()


DAMAGE = {  # what happens to the tensors of a file -> what the line says
    "a layer is missing": (lambda t: {k: t[k] for k in t if ".2." not in k}, "tensors are missing"),
    "one tensor too many": (
        lambda t: t | {"extra": torch.ones(1)},
        "1 tensors are not known (extra",
    ),
    "half of it": (lambda t: dict(sorted(t.items())[::2]), "tensors are missing"),
    "of a wider base": (lambda t: {k: torch.cat([v] * 2) for k, v in t.items()}, "another shape"),
}


def damaged(source, folder, how):
    """A copy of a model's or an adapter's folder, with other tensors in it."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*model.safetensors")
    tensors = DAMAGE[how][0](load_file(file))
    save_file({k: v.clone() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def replies(tmp_path_factory):
    """Flags of train_loop.py for a few rows of replies."""
    rows = [
        json.dumps({"question": q, "x0": "Shout.", "reply": "#$", "tokens": [5, 6]}) for q in "ab"
    ]
    folder = tmp_path_factory.mktemp("replies")
    for name, row in zip(("train", "val"), rows, strict=True):
        (folder / f"{name}.jsonl").write_text(row + "\n")
    return ["--data_path", f"{folder}/train.jsonl", "--val_path", f"{folder}/val.jsonl"]


@pytest.mark.parametrize("how", DAMAGE)
def test_weights_that_are_not_the_models_are_refused_by_every_program(how, folder, replies, capfd):
    model = damaged(MODEL, folder / "model", how)
    adapter = damaged(ADAPTER, folder / "adapter", how)
    programs = [
        (main_distributed.main, ["--model_name", model], model),
        (main_distributed.main, ["--reference_model", model], model),
        (main_distributed.main, ["--fine_tuning", "lora", "--init_adapter", adapter], adapter),
        (main_distributed.main, ["--fine_tuning", "full", "--init_adapter", adapter], adapter),
        (train.main, ["--config", str(ROOT / "config.yaml"), "--model_name", model], model),
        (train.main, ["--config", str(ROOT / "config.yaml"), "--init_adapter", adapter], adapter),
        (train_loop.main, ["--model_name", model, *replies], model),
        (
            train_loop.main,
            ["--model_name", str(MODEL), "--resume_from", adapter, *replies],
            adapter,
        ),
        (generate_data.main, ["--model_name", model], model),
        (merge.main, [str(ADAPTER), "merged", "--base", model], model),
        (merge.main, [adapter, "merged", "--base", str(MODEL)], adapter),
    ]
    for main, flags, place in programs:
        with pytest.raises(UserError) as caught:
            main(flags)
        line = str(caught.value)
        assert f": {place}: " in line and "\n" not in line, (main.__module__, flags)
        assert DAMAGE[how][1] in line, (main.__module__, flags)
    assert list((folder / "empty").iterdir()) == []
    assert capfd.readouterr().err == ""


def edit(folder, source, file, **changes):
    """A copy of a folder, one of its JSON files with other values."""
    shutil.copytree(source, folder)
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(values))
    return str(folder)


ODD = {  # a model's config.json, or an adapter's settings, that nothing can be made of
    "negative width": ("config.json", {"hidden_size": -1}),
    "no such architecture": ("config.json", {"model_type": "perpetuum"}),
    "odd bias": ("adapter_config.json", {"bias": "perhaps"}),
    "no such layers": ("adapter_config.json", {"target_modules": ["nowhere"]}),
    "another base": ("adapter_config.json", {"init_lora_weights": "pissa"}),
}


@pytest.mark.parametrize("what", ODD)
def test_settings_that_make_no_model_are_one_line(what, folder):
    file, changes = ODD[what]
    is_adapter = file == "adapter_config.json"
    place = edit(folder / "odd", ADAPTER if is_adapter else MODEL, file, **changes)
    flags = ["--fine_tuning", "lora", "--init_adapter"] if is_adapter else ["--model_name"]
    with pytest.raises(UserError) as caught:
        main_distributed.main([*flags, place, "--check"])
    assert place in str(caught.value) and "\n" not in str(caught.value)
    assert list((folder / "empty").iterdir()) == []


def test_an_architecture_that_cannot_be_trained_so_is_one_line(folder):
    small = dict(hidden_size=32, num_hidden_layers=2, vocab_size=512)
    heads = dict(num_attention_heads=2, intermediate_size=32)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**small, **heads))
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))
    expected = {
        "bert": (bert, "full", "bert reads a text in both directions; give a causal model"),
        "mamba": (mamba, "lora", "cannot be read: "),
    }
    for name, (model, fine_tuning, says) in expected.items():
        model.save_pretrained(folder / name)
        for file in MODEL.glob("*token*"):
            shutil.copy(file, folder / name)
        flags = ["--model_name", str(folder / name), "--fine_tuning", fine_tuning, "--check"]
        with pytest.raises(UserError) as caught:
            main_distributed.main(flags)
        assert str(caught.value).startswith(f"--model_name: {folder / name}: {says}")
