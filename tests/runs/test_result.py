"""A saved model, opened by plain transformers from another folder: it carries all that the run had.

Bases are copies of the demo's model whose files name other end tokens, dtypes and settings.
"""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, GenerationConfig

import main_distributed
import runs
from ddp_utils import run
from lm import chat, merge, models
from lm.chat_template import Encoder

DEMO = Path("data/demo/model")
END = 2  # <|im_end|>, which ends a reply in the demo's template
SETTINGS = {"attention_dropout": 0.1, "eos_token_id": 0, "use_cache": False}
# transformers loads these sampling settings, but would not save them after a change
GENERATION = {"eos_token_id": [0, 7], "do_sample": False, "temperature": 0.6}
ONE_STEP = runs.words("--max_steps 1 --max_rows 64 --learning_rate 3e-3 --warmup_ratio 0")
ONE_STEP += runs.words("--temperature 0 --num_samples 4 --max_new_tokens 30 --report_to none")


def edit(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def make_base(folder, dtype):
    """Write the demo's model as a base model whose own end of a text is <|endoftext|>."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype)
    for part in (model, AutoTokenizer.from_pretrained(DEMO)):
        part.save_pretrained(folder)
    edit(folder / "config.json", **SETTINGS)
    edit(folder / "generation_config.json", **GENERATION)
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")


def train(folder, kind, base):
    """Train one step, in the current folder -> the replies of the run, and its model's folder."""
    torch.set_num_threads(1)
    flags = [*ONE_STEP, "--fine_tuning", kind, "--model_name", str(base)]
    assert main_distributed.main([*flags, "--result_dir", str(folder)]) == 0
    examples = json.loads((folder / "examples.json").read_text())["test"]
    return {row["prompt"]: row["fine-tuned"] for row in examples}, folder / "model"


def reply_of(model, tokenizer, prompt):
    """Return the token ids that transformers generates by its own settings."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"]
    return model.generate(ids, do_sample=False, max_new_tokens=30)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_plain_transformers_generates_the_replies_of_the_run(kind, tmp_path, monkeypatch, capsys):
    """Each ends with the same token; from another folder, though the base's path was relative."""
    monkeypatch.setattr(run, "write_report", lambda *_, **__: "")  # a second
    make_base(tmp_path / "base", torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    replies, folder = train(tmp_path / "run", kind, "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = GenerationConfig.from_pretrained(folder)
    assert settings.eos_token_id == [END, 0, 7]
    options = {"dtype": torch.float32}  # in which the run has sampled
    if kind == "lora":  # transformers reads the settings of the base model only
        options["generation_config"] = settings
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(replies) == 4
    for prompt, reply in replies.items():
        ids = reply_of(model, tokenizer, prompt)
        assert tokenizer.decode(ids, skip_special_tokens=True) == reply
        assert ids[-1] == END
    prompt, reply = next(iter(replies.items()))  # far from a tie: chat computes in bf16
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
    chat.main([str(tmp_path / "run"), "--temperature", "0", "--max_new_tokens", "30"])
    assert capsys.readouterr().out.endswith(f"> {reply}\n> \n")
    if kind == "lora":
        merge.merge(folder, tmp_path / "merged")
        folder = tmp_path / "merged"
    assert_like_the_base(folder, tmp_path / "base")


def assert_like_the_base(folder, base):
    """The settings and dtypes are those of the base model's files, apart from the end tokens."""
    for name, end in {"config.json": [END, 0], "generation_config.json": [END, 0, 7]}.items():
        saved, original = (json.loads((path / name).read_text()) for path in (folder, base))
        assert saved == original | {"eos_token_id": end}
    saved, original = (load_file(path / "model.safetensors") for path in (folder, base))
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert saved[name].dtype == tensor.dtype == torch.bfloat16


def test_a_multimodal_result_has_the_settings_of_its_processors(tmp_path):
    base, result = tmp_path / "base", tmp_path / "result"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    text = sizes | {"head_dim": 8, "num_key_value_heads": 2, "vocab_size": 97}
    config = Gemma3Config(text_config=text, vision_config=sizes | {"image_size": 28})
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"image_processor_type": "x"}')
    model = models.load(base, torch.float32, torch.device("cpu"))
    encoder = Encoder(models.load_tokenizer(DEMO))
    models.save(model, models.load(base, "auto", models.META), encoder, result)
    name = "preprocessor_config.json"
    assert (result / name).read_bytes() == (base / name).read_bytes()
    assert not (result / "processor_config.json").exists()
