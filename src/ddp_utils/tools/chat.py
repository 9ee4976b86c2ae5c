"""Chat with a trained model; an empty line starts a new conversation, Ctrl-D ends.

python -m ddp_utils.tools.chat results/dpo
python -m ddp_utils.tools.chat results/dpo --before   # the model before training
echo "Where is the cat?" | python -m ddp_utils.tools.chat results/dpo --temperature 0
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import TextStreamer

from ddp_utils import SettingError, cli, data, distributed, lora, models


@dataclass
class Settings:
    folder: str  # run folder such as results/dpo, or model folder
    before: bool = False  # chat with the model before training
    system: str = ""  # system prompt
    temperature: float = 1.0  # sampling temperature; 0: greedy decoding
    max_new_tokens: int = 256  # maximum tokens per reply
    seed: int = 0  # random seed of the replies
    debug: bool = False  # show a traceback for user errors


def load(folder: str, before: bool, device: torch.device) -> tuple[Any, Any]:
    """Return the model of a run, or of a model folder, and its tokenizer."""
    run = data.resolve(folder)
    result = run / "model" if (run / "model").is_dir() else run
    base, adapter = str(result), ""
    if before:
        settings = data.read_json(run / "config.json")
        if "model_name" not in settings:
            problem = f"{folder} is not a run of a language model; leave it out"
            raise SettingError("before", problem)
        base = settings["model_name"]
        adapter = settings.get("init_adapter") or settings.get("resume_from", "")
    elif (result / "adapter_config.json").exists():
        base, adapter = lora.adapter_settings(result).base_model_name_or_path, str(result)
    with cli.located({"model_name": "folder"}):
        model = lora.load(base, "auto", device)
    tokenizer = models.load_tokenizer(adapter or base)
    return (lora.with_adapter(model, adapter) if adapter else model).eval(), tokenizer


def prompt_of(messages: list[dict[str, str]], tokenizer: Any) -> torch.Tensor:
    """Return the token ids [1, T] of a conversation; without a chat template, of its texts."""
    text = "\n".join(message["content"] for message in messages)
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise SettingError("system", f"{models.first_line(error)}; leave it out") from error
    special = not tokenizer.chat_template
    return tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids


def main(argv: list[str] | None = None) -> int:
    settings = cli.parse(Settings, argv)
    cli.check_ranges(settings)
    device = distributed.choose_device(distributed.World(), "auto").device
    model, tokenizer = load(settings.folder, settings.before, device)
    options = {"max_new_tokens": settings.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    if settings.temperature:
        options |= {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    else:
        options |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    first = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = [*first]
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(__doc__.splitlines()[0])
    torch.manual_seed(settings.seed)
    while True:
        print("> ", end="", flush=True)
        question = sys.stdin.readline()
        if not question:
            print()
            return 0
        if not is_terminal:
            print(question, end="")
        if not question.strip():  # a small model may be trained on single questions only
            messages = [*first]
            continue
        messages.append({"role": "user", "content": question.strip()})
        ids = prompt_of(messages, tokenizer).to(device)
        reply = model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options
        )
        text = tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text.strip()})


if __name__ == "__main__":
    distributed.run(main)
