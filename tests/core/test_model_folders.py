"""What people have in the folder of a model or adapter: one line with the command that helps."""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate.commands import merge as accelerate_merge
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch.distributed import checkpoint
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import generate_data
import main_distributed
import reading
import train
import train_loop
from conftest import ROOT
from ddp_utils import UserError
from lm import chat, logps, lora, merge, model_files
from lm import models as loading
from lm.chat_template import Encoder

MODEL = ROOT / "data/demo/model"
ADAPTER = ROOT / "tests/golden/demo_adapter"
PAIRS = ROOT / "tests/data/pairs.jsonl"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 269060552\n"
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LORA, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
LFS = "is a pointer of Git LFS; run `git lfs pull`"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


# --- what happens to a folder --------------------------------------------------------------------


def pointer(*names):
    return lambda folder: [(folder / name).write_text(POINTER) for name in names]


def without(*names, add=()):
    def change(folder):
        for name in names:
            (folder / name).unlink()
        for name in add:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("x")

    return change


def only(*names):
    return lambda folder: without(*[x.name for x in folder.iterdir()], add=names)(folder)


def renamed(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def shortened(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1000])


def in_shards(*then):
    """Two files of weights and their index, and what else happens."""

    def change(folder):
        tensors = load_file(folder / WEIGHTS)
        names = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
        for shard in SHARDS:
            part = {name: tensors[name] for name in tensors if names[name] == shard}
            save_file(part, folder / shard, {"format": "pt"})
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        for step in (without(WEIGHTS), *then):
            step(folder)

    return change


def inside(name):
    """All files are in a folder of the folder, as those of a run or of a Trainer's checkpoints."""

    def change(folder):
        files = list(folder.iterdir())
        (folder / name).mkdir(parents=True)
        for file in files:
            file.rename(folder / name / file.name)
        (folder / "config.json").write_text('{"model_name": "m", "result_dir": "r"}')

    return change


def dangling(name):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/gone")

    return change


def empty_tensors(name):
    def change(folder):
        tensors = load_file(folder / name)
        save_file({key: torch.zeros(0) for key in tensors}, folder / name, {"format": "pt"})

    return change


def a_run_with_checkpoints(folder):
    """The folder of a finished run: model/ and a checkpoint."""
    inside("model")(folder)
    (folder / "checkpoints/step-00000009").mkdir(parents=True)
    (folder / "checkpoints/step-00000009/state.safetensors").touch()


def with_older_weights(folder):
    """As transformers leaves them if a model is saved again, in several files."""
    shutil.copy(MODEL / WEIGHTS, folder)


MODELS = {  # what happens to a folder of a model -> what the line says of it; FOLDER: its path
    "weights by git": (pointer(WEIGHTS), f"{WEIGHTS} {LFS}"),
    "tokenizer by git": (pointer("tokenizer.json"), f"tokenizer.json {LFS}"),
    "config by git": (pointer("config.json"), f"config.json {LFS}"),
    "a shard by git": (in_shards(pointer(SHARDS[1])), f"{SHARDS[1]} {LFS}"),
    "index by git": (in_shards(pointer(INDEX)), f"{INDEX} {LFS}"),
    "no shard": (
        in_shards(without(SHARDS[0])),
        f"1 of 2 files that {INDEX} names are missing ({SHARDS[0]}); download or copy them",
    ),
    "no index": (in_shards(without(INDEX)), f"their index is missing; copy {INDEX}"),
    "GGUF": (renamed(WEIGHTS, "m-Q4.gguf"), "m-Q4.gguf is a GGUF file, which cannot be trained"),
    "only GGUF": (only("m-Q4.gguf"), "m-Q4.gguf is a GGUF file, which cannot be trained; use the"),
    "Meta": (only("consolidated.00.pth", "params.json"), "use the version of the model with conf"),
    "TensorFlow": (renamed(WEIGHTS, "tf_model.h5"), "tf_model.h5 is not safetensors; convert it"),
    "DeepSpeed": (
        without(WEIGHTS, add=("zero_to_fp32.py", "latest", "global_step9/mp_rank_00.pt")),
        "`python -m deepspeed.utils.zero_to_fp32 FOLDER NEW --safe_serialization`",
    ),
    "DeepSpeed's own folder": (
        only("mp_rank_00_model_states.pt"),
        "`python -m deepspeed.utils.zero_to_fp32 FOLDER/.. NEW --safe_serialization`",
    ),
    "ZeRO-3": (empty_tensors(WEIGHTS), "train with stage3_gather_16bit_weights_on_model_save, or"),
    "verl": (only("model_world_size_8_rank_0.pt"), "verl.model_merger merge --backend fsdp --loc"),
    "our checkpoint": (only("state.safetensors"), "an unfinished run; run its command again"),
    "a run": (inside("model"), "the weights are in a folder of it; use FOLDER/model"),
    "a finished run": (
        a_run_with_checkpoints,
        "the weights are in a folder of it; use FOLDER/model",
    ),
    "older weights": (
        in_shards(with_older_weights),
        f"{WEIGHTS} is beside {INDEX}, which names other files; remove the older weights",
    ),
    "Trainer": (inside("checkpoint-9"), "a folder of it; use FOLDER/checkpoint-9"),
    "cache of the hub": (inside("snapshots/ab"), "a folder of it; use FOLDER/snapshots/ab"),
    "a cache without blobs": (dangling(WEIGHTS), f"{WEIGHTS} is a link to a file that is not here"),
    "cut weights": (shortened(WEIGHTS), f"{WEIGHTS} is not complete or not safetensors (Error"),
    "cut tokenizer": (shortened("tokenizer.json"), "tokenizer.json is not complete or not JSON; d"),
    "cut config": (
        lambda folder: (folder / "config.json").write_text('{"vocab_size": '),
        "config.json is not complete or not JSON; download it again",
    ),
    "another name": (renamed(WEIGHTS, "m.safetensors"), "m.safetensors has another name; rename"),
    "no weights": (without(WEIGHTS), f"no {WEIGHTS} beside config.json; download or copy the w"),
    "a Trainer's rest": (
        without(WEIGHTS, add=("optimizer.pt", "rng_state.pth", "training_args.bin")),
        f"no {WEIGHTS} beside config.json; download or copy the weights",
    ),
    "no config": (without("config.json"), f"no config.json beside {WEIGHTS}; copy it from"),
    "nothing": (only(), "no config.json (expected that of a model or LoRA)"),
}
ADAPTERS = {
    "adapter by git": (pointer(LORA), f"{LORA} {LFS}"),
    "settings by git": (pointer(SETTINGS), f"{SETTINGS} {LFS}"),
    "no weights": (without(LORA), f"no {LORA} beside {SETTINGS}; download or copy the weights"),
    "no settings": (without(SETTINGS), f"no {SETTINGS} beside {LORA}; copy it from the same"),
    "merged into it": (
        lambda folder: (
            [shutil.copy(x, folder) for x in MODEL.iterdir()] + [(folder / LORA).unlink()]
        ),
        f"{SETTINGS} is beside the weights of a full model; remove it",
    ),
    "a run": (inside("model"), "the weights are in a folder of it; use FOLDER/model"),
    "ZeRO-3": (empty_tensors(LORA), f"{LORA} has tensors without elements; train with stage3"),
    "nothing": (only(), f"no {SETTINGS} (expected that of a LoRA)"),
}


def changed(source, folder, change):
    folder = Path(shutil.copytree(source, folder))
    change(folder)
    return folder


def error_of(read, *arguments):
    """Return the error of a library's folder, which is one line."""
    with pytest.raises(UserError) as caught:
        read(*arguments)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_that_is_no_model_is_one_line_with_the_way_out(kind, tmp_path):
    """It is the first thing that is looked at, and the same for another model, as --base."""
    change, says = MODELS[kind]
    folder = changed(MODEL, tmp_path / "folder", change)
    line = error_of(loading.load_tokenizer, str(folder))
    assert line.startswith(f"--model_name: {folder}: ")
    assert says.replace("FOLDER", str(folder)) in line
    assert error_of(loading.load, str(folder), "auto", model_files.META) == line


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_folder_that_is_no_adapter_is_one_line_with_the_way_out(kind, tmp_path):
    change, says = ADAPTERS[kind]
    folder = changed(ADAPTER, tmp_path / "folder", change)
    line = error_of(loading.load_tokenizer, str(MODEL), str(folder))
    assert line.startswith(f"--init_adapter: {folder}: ")
    assert says.replace("FOLDER", str(folder)) in line
    as_model = error_of(loading.load_tokenizer, str(folder))
    assert says.replace("FOLDER", str(folder)) in as_model or kind == "nothing"


def test_a_model_where_an_adapter_is_expected_and_an_adapter_without_its_base(tmp_path):
    line = error_of(lora.adapter_settings, str(MODEL))
    assert line == f"--init_adapter: {MODEL}: it is a full model (expected a LoRA)"
    folder = Path(shutil.copytree(ADAPTER, tmp_path / "lora"))
    settings = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(settings | {"base_model_name_or_path": "/gone/m"}))
    for base in ("/gone/m", "./m", "outputs/sft/m", r"C:\models\m"):
        content = json.dumps(settings | {"base_model_name_or_path": base})
        (folder / SETTINGS).write_text(content)
        for read in (loading.load_tokenizer, lora.base_of):
            line = error_of(read, str(folder))
            says = f"--init_adapter: {folder}: its base model {base} is not on this machine; use "
            assert line.startswith(f"{says}--model_name BASE --init_adapter {folder}")


def test_names_of_tensors_as_torch_compile_leaves_them_are_one_line(tmp_path):
    folder = changed(MODEL, tmp_path / "folder", lambda _: None)
    tensors = {f"_orig_mod.{name}": x for name, x in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    line = error_of(loading.load, folder, "auto", loading.META)
    assert line.endswith(
        "; expected less, the files have _orig_mod; rename the tensors in the files"
    )


def test_a_mark_of_unsloth_is_no_revision_of_the_base(tmp_path):
    folder = Path(shutil.copytree(ADAPTER, tmp_path / "lora"))
    settings = json.loads((folder / SETTINGS).read_text())
    for base, revision in (("org/base", "unsloth"), (str(MODEL), "step3000")):
        more = {"base_model_name_or_path": base, "revision": revision}
        (folder / SETTINGS).write_text(json.dumps(settings | more))
        assert lora.base_of(str(folder)) == base


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"init_lora_weights": "pissa_niter_16"}, "began with pissa_niter_16, which changes the b"),
        ({"init_lora_weights": "loftq"}, "began with loftq, which changes the base model; merge"),
        ({"lora_parameters": {"rank": 8}, "peft_type": None}, "is an adapter of MLX; merge it w"),
    ],
)
def test_an_adapter_that_needs_another_program_is_one_line(more, says, tmp_path):
    folder = Path(shutil.copytree(ADAPTER, tmp_path / "lora"))
    settings = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(settings | more))
    assert says in error_of(lora.adapter_settings, str(folder))


@pytest.mark.skipif(importlib.util.find_spec("sentencepiece"), reason="sentencepiece is installed")
def test_a_tokenizer_of_sentencepiece_names_its_library(tmp_path):
    folder = changed(MODEL, tmp_path / "folder", without("tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    line = error_of(loading.load_tokenizer, str(folder))
    assert "tokenizer.model needs a library" in line
    assert line.endswith("; pip install sentencepiece protobuf")


def test_a_file_where_a_folder_is_expected(tmp_path):
    for file in (MODEL / WEIGHTS, tmp_path / "m.gguf"):
        file.exists() or file.write_text("GGUF")
        line = error_of(loading.load_tokenizer, str(file))
        assert line.startswith(f"--model_name: {file} is a file (expected the folder of a model")


def test_what_other_programs_leave_beside_a_model_is_no_error(tmp_path):
    """Pointers and pickles that nobody reads, two formats, and weights in shards."""
    beside = pointer("pytorch_model.bin", "consolidated.safetensors", "LICENSE.txt")
    for name, change in {"beside": beside, "shards": in_shards(pointer("m.gguf"))}.items():
        folder = changed(MODEL, tmp_path / name, change)
        loading.load_tokenizer(str(folder))
        loading.load(str(folder), "auto", model_files.META)


# --- the commands that lines name ----------------------------------------------------------------


def as_bin(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def as_adapter_bin(folder):
    torch.save(load_file(folder / LORA), folder / "adapter_model.bin")
    (folder / LORA).unlink()


def as_fsdp(folder):
    state = {"model": load_file(folder / WEIGHTS)}
    checkpoint.save(state, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    checkpoint.save({"x": torch.ones(1)}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    (folder / WEIGHTS).unlink()


def run_command(line):
    """Run the command between the backquotes of a line, in this process."""
    program, *words = shlex.split(re.search("`(.*)`", line)[1])
    if program == "python":
        exec(compile(words[1], "command", "exec"), {})  # noqa: S102
    else:
        assert (program, words.pop(0)) == ("accelerate", "merge-weights")
        parser = accelerate_merge.merge_command_parser()
        accelerate_merge.merge_command(parser.parse_args(words))


@pytest.mark.parametrize("kind", [as_bin, as_adapter_bin, as_fsdp])
def test_the_command_of_the_line_repairs_the_folder(kind, tmp_path, monkeypatch):
    is_adapter = kind is as_adapter_bin
    name = LORA if is_adapter else WEIGHTS
    source = ADAPTER if is_adapter else MODEL
    folder = changed(source, tmp_path / "folder", kind)
    monkeypatch.chdir(tmp_path)
    run_command(error_of(loading.load_tokenizer, str(folder)))
    expected = load_file(source / name)
    repaired = load_file((folder if is_adapter else tmp_path / "NEW") / name)
    assert expected.keys() == repaired.keys()
    assert all(torch.equal(expected[key], repaired[key]) for key in expected)


# --- tokenizers -----------------------------------------------------------------------------------

TINY = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
BARE = {  # types of models of which transformers makes a tokenizer without files, and one without
    "gemma3_text": transformers.Gemma3TextConfig,
    "qwen3": transformers.Qwen3Config,
    "gpt2": transformers.GPT2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "llama": transformers.LlamaConfig,
}


@pytest.mark.parametrize("kind", BARE)
def test_a_folder_without_a_tokenizer_is_one_line(kind, tmp_path):
    BARE[kind](vocab_size=512, **TINY).save_pretrained(tmp_path)
    shutil.copy(MODEL / WEIGHTS, tmp_path)
    says = f"--model_name: no tokenizer at {tmp_path}: it has no vocabulary; copy the tokenizer's"
    assert error_of(loading.load_tokenizer, str(tmp_path)).startswith(says)
    shutil.copy(MODEL / "tokenizer_config.json", tmp_path)  # it names special tokens
    assert error_of(loading.load_tokenizer, str(tmp_path)).startswith(says)


@pytest.mark.parametrize("content", [[], {"model_type": "qwen3", "hidden_size": "big"}])
def test_a_fault_of_config_json_is_not_one_of_the_tokenizer(content, tmp_path):
    folder = changed(MODEL, tmp_path / "folder", lambda _: None)
    (folder / "config.json").write_text(json.dumps(content))
    line = error_of(loading.load_tokenizer, str(folder))
    assert line.startswith(f"--model_name: {folder}: tokenizer or config.json cannot be read: ")
    assert ("'hidden_size'" in line) == bool(content)


def test_a_template_that_is_only_in_the_file_of_processors_is_read(tmp_path):
    folder = changed(MODEL, tmp_path / "folder", lambda _: None)
    expected = loading.load_tokenizer(str(folder)).chat_template
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": expected}))
    assert loading.load_tokenizer(str(folder)).chat_template == expected


def three_digits(folder, kind):
    """A tokenizer as OLMo's or Granite's: it splits numbers after each third digit.

    Numbers that are not split begin with the merge of the last two digits.
    """
    merges = [("4", "5"), ("3", "45"), ("1", "2"), ("12", "3")]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges))
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(folder)
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


KINDS = ["GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast", "GemmaTokenizerFast"]


@pytest.mark.parametrize("kind", [*KINDS, "PreTrainedTokenizerFast"])
def test_a_text_is_split_as_tokenizer_json_says(kind, tmp_path, capsys):
    three_digits(tmp_path, kind)
    read = loading.load_tokenizer(str(tmp_path), needs_weights=False)
    assert read.tokenize("12345") == ["123", "45"]
    assert (read.eos_token, read.chat_template) == ("</s>", "{{ messages }}")
    warning = f"warning: {tmp_path}: {kind.removesuffix('Fast')} of transformers splits texts"
    assert capsys.readouterr().out.startswith(warning) == (kind in KINDS)
    read.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").tokenize("12345") == ["123", "45"]


def test_a_space_before_words_is_where_tokenizer_json_has_it(tmp_path):
    """In the manner of Llama 2: before each part of a text, also behind a special token."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁xy"]
    inner = Tokenizer(
        models.BPE(
            {name: number for number, name in enumerate(names)},
            [],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    inner.add_special_tokens(["<unk>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(tmp_path)
    settings = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    read = model_files.read_tokenizer(tmp_path)
    assert read.tokenize("x</s>y  x") == ["▁", "x", "</s>", "▁", "y", "▁", "▁", "x"]


def test_a_regex_that_is_not_that_of_mistral_is_a_warning(tmp_path, capsys):
    vocabulary = {f"t{number}": number for number in range(100_001)}
    vocabulary |= {"</s>": 100_001, "[UNK]": 100_002}
    inner = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(tmp_path)
    config = {"model_type": "mistral", "transformers_version": "4.50.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_files.read_tokenizer(tmp_path)
    says = "tokenizer.json may split texts in another way than Mistral's own tokenizer"
    assert says in capsys.readouterr().out


def test_a_tokenizer_that_cannot_encode_an_unknown_letter_is_one_line(tmp_path):
    inner = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, "[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    says = "cannot be read: WordLevel error: Missing [UNK] token from the vocabulary"
    assert says in error_of(model_files.read_tokenizer, str(tmp_path))


def test_every_program_names_a_tokenizer_that_is_none(tmp_path):
    folder = changed(MODEL, tmp_path / "folder", without("tokenizer.json"))
    adapter = changed(ADAPTER, tmp_path / "lora", lambda lora: None)
    row = {"question": "q", "x0": "Shout.", "reply": "#$", "tokens": [5, 6]}
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | {"question": name}))
    replies = f"--data_path {tmp_path}/train.jsonl --val_path {tmp_path}/val.jsonl --check"
    flags = {
        main_distributed: f"--model_name {folder} --check",
        train: f"--config {ROOT}/config.yaml --model_name {folder} --check",
        train_loop: f"--model_name {folder} {replies}",
        generate_data: f"--model_name {folder} --check",
        chat: f"{folder}",
        merge: f"{adapter} {tmp_path}/merged --base {folder}",
    }
    for program, words in flags.items():
        line = error_of(program.main, words.split())
        assert f"no tokenizer at {folder}: it has no vocabulary" in line, program


WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def tokenizer(words, unk="[UNK]", normalizer=None):
    """A tokenizer with one token for each of these words, and one for any other word."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "</s>", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token=unk)


def letters(text):
    """A tokenizer that has only the letters of a text and drops others: it has no unknown token."""
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(text)}, []))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


LOWER = normalizers.BertNormalizer(lowercase=True)  # it removes accents, too
UNKNOWN = {  # tokenizer, texts, the fraction that it does not know, counted by hand
    "all": (tokenizer(WORDS), [" ".join(WORDS), "one two"], 0.0),
    "none": (tokenizer(["x"]), [" ".join(WORDS)], 1.0),
    "1 of 10": (tokenizer(WORDS[1:]), [" ".join(WORDS)], 0.1),
    "3 of 12": (
        tokenizer(WORDS[1:9]),
        ["one two three four five six seven eight nine ten", "one two"],
        3 / 12,
    ),
    "case and accents": (tokenizer(["ete", "ou"], normalizer=LOWER), ["ÉTÉ où", "Été"], 0.0),
    "white space": (tokenizer(WORDS), ["one\n\n two\t three "], 0.0),
    # one unknown token for 20 letters counts as 2, beside one that is known
    "one for many": (tokenizer(["x"]), ["x abcdefghijklmnopqrst"], 2 / 3),
    "dropped": (letters("abc"), ["abcd", "dd"], 3 / 6),
    "all dropped": (letters("abc"), ["语言模型"], 1.0),
    # i, j, l and m of 7 letters do not come back from "ab [UNK] [UNK]"
    "unknown to transformers": (tokenizer(["ab"], unk=None), ["ab ij klm"], 4 / 7),
    "nothing": (tokenizer(WORDS), [], 0.0),
    # it may be the end token, too; one of the two other words is unknown
    "its own text": (tokenizer(WORDS), ["one [UNK]", "zero [UNK][UNK]", "[UNK]"], 1 / 2),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_a_tokenizer_does_not_know_is_counted(kind):
    tokenizer, texts, expected = UNKNOWN[kind]
    result = model_files.unknown(tokenizer, texts)
    assert result["fraction"] == pytest.approx(expected, abs=1e-4)
    assert (" becomes " in result["example"]) == (expected > 0)


def rows_of(folder, *texts, **more):
    file = folder / "rows.jsonl"
    rows = [{"prompt": text, "chosen": text, "rejected": f"{text} {text}"} | more for text in texts]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("read", [reading.pairs, reading.texts])
def test_unknown_tokens_are_a_warning_above_5_percent_and_an_error_above_50(read, tmp_path):
    encoder = Encoder(tokenizer(WORDS), "none")
    cases = {0: None, 1: None, 2: 0.1, 10: 0.5, 11: 0.55, 20: 1.0}  # unknown ones of 20 words
    for count, fraction in cases.items():
        words = ["unknown"] * count + (WORDS * 2)[: 20 - count]
        file = rows_of(tmp_path, " ".join(words))
        if count > 10:
            line = error_of(read, file, encoder)
            share = f"{100 * fraction:.1f} %"
            assert line.startswith(f"{file}: {share} of the tokens are unknown to the tokenizer ('")
            assert "becomes '[UNK] " in line
            continue
        _, report = read(file, encoder)
        lines = reading.preference_data.describe_all({"train": report}, {"train": [], "val": [1]})
        warnings = [line for line in lines if "unknown to the tokenizer" in line]
        assert len(warnings) == (fraction is not None), (count, lines)
        if fraction:
            assert report["unknown_tokens"]["fraction"] == pytest.approx(fraction, abs=0.01)


def test_unknown_tokens_are_named_before_what_follows_from_them(tmp_path):
    """All rows are equal once they are token ids, and some have no token."""
    for known in (tokenizer(["x"]), letters("x")):
        file = rows_of(tmp_path, "abc", rejected="def")
        assert " 100.0 % of the tokens are unknown" in error_of(
            reading.pairs, file, Encoder(known, "none")
        )


def test_the_questions_of_baking_are_looked_at(tmp_path, capsys, monkeypatch):
    folder = changed(MODEL, tmp_path / "model", without("tokenizer.json"))
    tokenizer(WORDS).save_pretrained(folder)
    (tmp_path / "x0.txt").write_text("one two")
    flags = f"--model_name {folder} --x0_file {tmp_path}/x0.txt --check --other_prompts '' "
    flags += f"--retain_prompts '' --question_dataset {tmp_path}/questions.txt"
    for question, is_error in (("one zero", False), ("zero zero zero zero", True)):
        (tmp_path / "questions.txt").write_text(f"one\n{question}\n")
        if is_error:
            line = error_of(generate_data.main, shlex.split(flags))
            says = "questions.txt: 57.1 % of the tokens are unknown to the tokenizer ('zero "
            assert says in line  # 4 of 7, with the prompt's
        else:
            assert generate_data.main(shlex.split(flags)) == 0
            assert "warning: " in capsys.readouterr().out
    folder = str(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("zero zero\n"))
    assert chat.main([folder, "--max_new_tokens", "1"]) == 0
    assert "warning: this line: 100.0 % of the tokens are unknown" in capsys.readouterr().out


# --- lines ----------------------------------------------------------------------------------------


def test_an_id_beyond_the_embedding_names_row_token_and_tokenizer(tmp_path):
    folder = changed(MODEL, tmp_path / "model", lambda folder: None)
    own = loading.load_tokenizer(str(folder))
    own.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    own.save_pretrained(folder)
    own = loading.load_tokenizer(str(folder))
    model = loading.load(str(folder), "auto", model_files.META)
    size = model.config.vocab_size
    row = logps.Pair([1, size], [2], [3], "rows.jsonl:7", "")
    line = error_of(loading.check_fit, model, own, [row])
    assert line.startswith(
        f"rows.jsonl:7: token id {size}, model has {size} tokens: it is '<|new|>' of the "
        f"tokenizer {folder}; use its own tokenizer"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "one of: \n(1) a file, \n(2) a class. \nInstall it.",
            "one of: (1) a file, (2) a class. Install it.",
        ),
        ("", "ValueError"),
        ("Class 'validate':\n    ValueError: 3 is odd.", "Class 'validate': ValueError: 3 is odd."),
        (f"{'long ' * 100}end. Next.", f"{'long ' * 100}end."),
        (f"First, e.g. this. {'Long ' * 100}", "First, e.g. this."),
    ],
)
def test_a_message_of_a_library_is_one_line_of_whole_sentences(message, expected):
    assert model_files.one_line(ValueError(message)) == expected


def test_the_first_rank_of_a_node_lets_the_system_read_all_weights_ahead(tmp_path, monkeypatch):
    """In blocks, since Linux reads only the beginning of a longer request."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("only POSIX systems have it")
    shutil.copytree(ROOT / "data/demo/model", tmp_path / "model")
    size = (tmp_path / "model/model.safetensors").stat().st_size
    requests = []
    at_once = lambda target, daemon: SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr(model_files, "threading", SimpleNamespace(Thread=at_once))
    for local_rank, device, expected in (
        ("0", "cpu", [*range(0, size, 2**20)]),
        ("1", "cpu", []),
        ("0", "meta", []),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        fake = lambda file, *rest: requests.append((os.fstat(file).st_size, *rest))  # noqa: E731
        monkeypatch.setattr(os, "posix_fadvise", fake)
        loading.load(tmp_path / "model", torch.float32, torch.device(device))
        will_need = os.POSIX_FADV_WILLNEED
        assert requests == [(size, start, 2**20, will_need) for start in expected]
        requests.clear()
