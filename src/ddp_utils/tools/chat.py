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
from ddp_utils.chat_template import Encoder


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
    name = str(run / "model" if (run / "model").is_dir() else run)
    if before:
        settings = data.read_json(run / "config.json")
        if "model_name" not in settings:
            problem = f"{folder} is not a run of a language model; leave it out"
            raise SettingError("before", problem)
        adapter = settings.get("init_adapter") or settings.get("resume_from")
        name = adapter or settings["model_name"]
    with cli.located({"model_name": "folder", "init_adapter": "folder"}):
        model = lora.load(name, "auto", device)
    return model.eval(), models.load_tokenizer(name)


def prompt_of(messages: list[dict[str, str]], tokenizer: Any) -> torch.Tensor:
    """Return the token ids [1, T] of a conversation; without a chat template, of its texts."""
    if not tokenizer.chat_template:
        text = "\n".join(message["content"] for message in messages)
        return tokenizer(text, return_tensors="pt").input_ids
    try:
        options = {"add_generation_prompt": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(messages, **options)["input_ids"]
    except TemplateError as error:
        raise SettingError("system", f"{models.first_line(error)}; leave it out") from error


def main(argv: list[str] | None = None) -> int:
    settings = cli.parse(Settings, argv)
    cli.check_ranges(settings)
    device = distributed.choose_device(distributed.World(), "auto").device
    model, tokenizer = load(settings.folder, settings.before, device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ends = models.all_ends(Encoder(tokenizer).ends, model.generation_config.eos_token_id)
    options = {"max_new_tokens": settings.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    options["eos_token_id"] = ends or None
    options |= {"do_sample": settings.temperature > 0, "temperature": settings.temperature or None}
    options |= {"top_k": None, "top_p": None, "streamer": streamer}
    first = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = [*first]
    torch.manual_seed(settings.seed)
    print("> ", end="", flush=True)
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        if line.strip():
            ids = prompt_of(messages, tokenizer).to(device)
            reply = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            text = tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text.strip()})
        else:  # a small model may be trained on single questions only
            messages = [*first]
        print("> ", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    distributed.run(main)
