"""Talk to a model that was trained here; an empty line begins anew, Ctrl-D ends.

python -m ddp_utils.tools.chat results/dpo
python -m ddp_utils.tools.chat results/dpo --before   # what the run began with
echo "Where is the cat?" | python -m ddp_utils.tools.chat results/dpo --temperature 0
"""

import sys
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from transformers import TextStreamer

from ddp_utils import UserError, cli, data, distributed, lora, models
from ddp_utils.checkpoints import read_json


@dataclass
class Settings:
    folder: str  # of a run, such as results/dpo, or of a model
    before: bool = False  # talk to the model that the run began with
    system: str = ""  # a system prompt
    temperature: float = 1.0  # 0: the most probable word each time
    max_new_tokens: int = 256  # of a reply
    seed: int = 0  # of the replies
    debug: bool = False  # tracebacks for user errors, too


def load(folder, before, device):
    """Return the model of a run, or of a model folder, and its tokenizer."""
    run = data.resolve(folder)
    result = run / "model" if (run / "model").is_dir() else run
    base, adapter = str(result), ""
    if before:
        settings = read_json(run / "config.json")
        if "model_name" not in settings:
            raise UserError(f"--before: {folder} is no run of a language model; leave it out")
        base = settings["model_name"]
        adapter = settings.get("init_adapter") or settings.get("resume_from", "")
    elif (result / "adapter_config.json").exists():
        base, adapter = lora.adapter_settings(result).base_model_name_or_path, str(result)
    model = lora.load(base, "auto", device, flag="folder")
    tokenizer = models.load_tokenizer(adapter or base)
    return (lora.with_adapter(model, adapter) if adapter else model).eval(), tokenizer


def prompt_of(messages, tokenizer):
    """Return the token ids [1, T] of a conversation; without a chat template its bare texts."""
    text = "\n".join(message["content"] for message in messages)
    if tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise UserError(f"--system: {models.first_line(error)}; leave it out") from error
    special = not tokenizer.chat_template
    return tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids


def main(argv=None) -> int:
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
        if not question.strip():  # a small model may know single questions only
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
