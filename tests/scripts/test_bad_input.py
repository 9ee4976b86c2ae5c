"""User errors, one line each: all kinds of them, settings that conflict, and damaged models.

Many more bad values and data files are in tests/core/corpus.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import generate_data
import main_distributed
import programs
import train
import train_loop
from ddp_utils import UserError
from lm import merge

GOOD = {"prompt": "Who?", "chosen": "Me, of course.", "rejected": "Dunno."}
ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "tests/golden/demo_adapter"
MODEL = ROOT / "data/demo/model"
JUDGE = "data/demo/judge.py:score"
YAML = f"--config {ROOT}/config.yaml"
LORA, INIT = "--fine_tuning lora", "--init_adapter "
USER_ERRORS = {  # kind -> flags, and how the line begins; DIR is a folder with the files below
    "flag": ("--learing_rate 1", "--learing_rate is not a setting; did you mean --learning_rate?"),
    "choice": ("--method DPO", "--method: invalid choice: 'DPO' (choose from "),
    "file": ("--train_data no.jsonl", "no.jsonl: no such file (expected a regular file in "),
    "row": ("--train_data DIR/bad.jsonl", "DIR/bad.jsonl:2: chosen: must be a non-empty string"),
    "model": ("--model_name ./nothing", "--model_name: there is no folder ./nothing"),
    "model on the hub": ("--model_name no-such", "--model_name: no-such: neither"),
    "adapter": (f"{LORA} --init_adapter .", "--init_adapter: .: no adapter_config.json (expected"),
    "no adapter": (f"{LORA} {INIT}./nothing", "--init_adapter: there is no folder ./nothing"),
    "rank of an adapter": (f"{LORA} {INIT}{ADAPTER} --lora_r 8", "--lora_r: the adapter in init_"),
    "template": ("--chat_template DIR/t.jinja", "--chat_template: 'question' is undefined"),
    "device": (
        "--backend nccl --check",
        "--backend nccl needs a cuda device, this machine has none",
    ),
    "judge": (f"--judge {JUDGE} --test_data DIR/good.jsonl", f"--judge: {JUDGE} on 'Who?': not a"),
    "output": ("--output_dir DIR/full", "--output_dir: DIR/full is not empty"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with data files; the working folder is an empty one in it."""
    rows = [json.dumps(GOOD)] * 3
    (tmp_path / "good.jsonl").write_text("\n".join(rows))
    (tmp_path / "bad.jsonl").write_text(rows[0] + "\n" + json.dumps({**GOOD, "chosen": None}))
    (tmp_path / "t.jinja").write_text("{{ question.text }}")
    (tmp_path / "full/file").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("ddp_utils.distributed.device_count", lambda kind: 0)  # on any machine
    return tmp_path


@pytest.mark.parametrize("kind", USER_ERRORS)
def test_a_user_error_is_one_line_on_stderr_and_status_2(kind, folder):
    flags, beginning = (text.replace("DIR", str(folder)) for text in USER_ERRORS[kind])
    ended = programs.start(ROOT / "src/main_distributed.py", *flags.split(), cwd=folder / "empty")
    assert ended.returncode == 2, ended
    assert ended.stderr.startswith(f"error: {beginning}"), ended.stderr
    assert ended.stderr.count("\n") == 1 and "Traceback" not in ended.stdout + ended.stderr
    assert programs.left(folder / "empty") == []


def error_of(main, flags, folder):
    """Return the one line with which a program ends, before anything is written."""
    with pytest.raises(UserError) as caught:
        main(flags)
    assert "\n" not in str(caught.value)
    assert programs.left(folder / "empty") == []
    return str(caught.value)


def test_only_an_adapter_can_be_merged(tmp_path):
    nameless, run, merged = (tmp_path / name for name in ("nameless", "run", "merged"))
    shutil.copytree(ADAPTER, run / "model")
    edit(nameless, ADAPTER, "adapter_config.json", base_model_name_or_path=None)
    for source, target, says in (
        (MODEL, merged, r"^adapter: .*data/demo/model: it is a full model \(expected a LoRA\)$"),
        (tmp_path / "no", merged, "^adapter: there is no folder .*/no "),
        (nameless, merged, "adapter: .*/nameless does not name its base model; use --base"),
        (MODEL, run, "^folder: .*/run exists; use another folder"),
    ):
        with pytest.raises(UserError, match=says):
            merge.merge(source, target)
    assert not merged.exists()
    for source, target in ((run, merged), (run / "model", tmp_path / "same")):  # each is accepted
        merge.merge(source, target, base=str(MODEL))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("merged", "same")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0] | weights[1])


DAMAGE = {  # what happens to the tensors of a file -> what the line says
    "a layer is missing": (lambda t: {k: t[k] for k in t if ".2." not in k}, "tensors are missing"),
    "one tensor too many": (lambda t: t | {"extra": torch.ones(1)}, "tensors are unexpected (ext"),
    "half of it": (lambda t: dict(sorted(t.items())[::2]), "tensors are missing"),
    "of a wider base": (lambda t: {k: torch.cat([v] * 2) for k, v in t.items()}, "another shape"),
}


def damaged(source, folder, how):
    """Return a copy of a model's or an adapter's folder, with other tensors in it."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*model.safetensors")
    tensors = DAMAGE[how][0](load_file(file))
    save_file({k: v.clone() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def replies(tmp_path_factory):
    """Return flags of train_loop.py for a few rows of replies."""
    folder = tmp_path_factory.mktemp("replies")
    for name in ("train", "val"):
        row = {"question": name, "x0": "Shout.", "reply": "#$", "tokens": [5, 6]}
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
    return f"--data_path {folder}/train.jsonl --val_path {folder}/val.jsonl"


@pytest.mark.parametrize("how", DAMAGE)
def test_every_program_rejects_weights_that_do_not_fit_the_model(how, folder, replies, capfd):
    model = damaged(MODEL, folder / "model", how)
    adapter = damaged(ADAPTER, folder / "adapter", how)
    programs = {
        main_distributed: [
            f"--model_name {model}",
            f"--reference_model {model}",
            f"{LORA} {INIT}{adapter}",
            f"--fine_tuning full --init_adapter {adapter}",
        ],
        train: [f"{YAML} --model_name {model}", f"{YAML} {INIT}{adapter}"],
        train_loop: [
            f"--model_name {model} {replies}",
            f"--model_name {MODEL} --resume_from {adapter} {replies}",
        ],
        generate_data: [f"--model_name {model}"],
        merge: [f"{ADAPTER} merged --base {model}", f"{adapter} merged --base {MODEL}"],
    }
    for program, lines in programs.items():
        for flags in lines:
            line = error_of(program.main, flags.split(), folder)
            place = adapter if adapter in flags else model
            assert f": {place}: " in line and DAMAGE[how][1] in line, (program, flags)
    assert capfd.readouterr().err == ""


def test_a_setting_that_fails_after_reading_is_located_in_its_yaml(folder, replies):
    """The model is looked for long after the file was read; a flag has no line."""
    (folder / "c.yaml").write_text("\nseed: 3\nmodel_name: ./nothing\n")
    (folder / "adapter.yaml").write_text("resume_from: ./nothing\n")
    asked = f"--question_dataset {ROOT}/data/demo/questions_test.jsonl"
    place = "../c.yaml:3: model_name: there is no folder"
    for program, flags, begins in (
        (main_distributed, "--config ../c.yaml", place),
        (generate_data, f"--config ../c.yaml {asked}", place),
        (train_loop, f"--config ../c.yaml {replies}", place),
        (
            train_loop,
            f"--config ../adapter.yaml {replies}",
            "../adapter.yaml:1: resume_from: there is",
        ),
        (main_distributed, "--model_name ./nothing", "--model_name: there is no folder"),
    ):
        assert error_of(program.main, flags.split(), folder).startswith(begins), flags


def edit(folder, source, file, **changes):
    """Return a copy of a folder, one of its JSON files with other values."""
    shutil.copytree(source, folder)
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(values))
    return str(folder)


ODD = [  # a model's config.json, or an adapter's settings, that cannot be used
    ("config.json", {"hidden_size": -1}),
    ("config.json", {"model_type": "perpetuum"}),
    ("adapter_config.json", {"bias": "perhaps"}),
    ("adapter_config.json", {"target_modules": ["nowhere"]}),
    ("adapter_config.json", {"init_lora_weights": "pissa"}),
]


def test_settings_that_make_no_model_are_one_line(folder):
    for number, (file, changes) in enumerate(ODD):
        is_adapter = file == "adapter_config.json"
        place = edit(folder / str(number), ADAPTER if is_adapter else MODEL, file, **changes)
        flags = f"{LORA} {INIT}" if is_adapter else "--model_name "
        assert place in error_of(main_distributed.main, [*flags.split(), place, "--check"], folder)


def test_an_architecture_that_cannot_be_trained_so_is_one_line(folder):
    small = dict(hidden_size=32, num_hidden_layers=2, vocab_size=512)
    heads = dict(num_attention_heads=2, intermediate_size=32)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**small, **heads))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**small, d_model=32, d_ff=32)
    )
    vit = transformers.ViTModel(
        transformers.ViTConfig(**heads, hidden_size=32, num_hidden_layers=2)
    )
    expected = {
        "bert": (bert, "full", "bert reads a text in both directions; use a causal model"),
        "t5": (t5, "lora", "t5 reads a text in both directions; use a causal model"),
        "vit": (vit, "lora", "vit does not generate text; use a causal model"),
    }
    for name, (model, fine_tuning, says) in expected.items():
        model.save_pretrained(folder / name)
        for file in MODEL.glob("*token*"):
            shutil.copy(file, folder / name)
        flags = ["--model_name", str(folder / name), "--fine_tuning", fine_tuning, "--check"]
        line = error_of(main_distributed.main, flags, folder)
        assert line.startswith(f"--model_name: {folder / name}: {says}")
