"""Chat with a trained model; an empty line starts a new conversation, Ctrl-D ends the chat.

python -m lm.chat results/dpo
python -m lm.chat results/dpo --before   # the model before training
echo "What color is a banana?" | python -m lm.chat results/dpo --temperature 0
"""

from ddp_utils import cli
from lm import settings as commands

if __name__ == "__main__":
    cli.check_flags(commands.read_chat)  # --help and mistakes end here, before torch is imported

import io
import sys
import time
from typing import Any

import torch
from transformers import TextStreamer

from ddp_utils import UserError, data, distributed
from ddp_utils.policy import DTYPES, is_bf16_fast, warn_if_bf16_is_slow
from lm import lora, model_files, models, sampling
from lm.chat_template import PLAIN_TURNS, Encoder, date_in
from lm.logps import Pair, Scorer

# temperature 0.7 as for example replies; the reason is in docs/dpo.md
DEFAULTS: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "max_new_tokens": 256}


class Streamer(TextStreamer):
    """Prints each word as soon as it is complete, and measures when tokens come."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())  # of the prompt, then of each token
        super().put(value)

    def stats(self, start: float) -> str:
        """Return the time from `start` to the first token, and the speed after it."""
        first, last = self.times[1], self.times[-1]
        tokens = len(self.times) - 1
        speed = f", then {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 else ""
        self.times.clear()
        return f"[first token after {first - start:.2f} s{speed}, {tokens} tokens]"


def dtype_to_compute(dtype: str, device: torch.device) -> Any:
    """Return the dtype in which a model is loaded that is not trained.

    dtype: "fp32", "bf16", or "auto": as in the model's files, but fp32 on a CPU with slow bf16.
    """
    if dtype == "bf16" and device.type == "cpu":
        warn_if_bf16_is_slow()
    if dtype == "auto" and device.type == "cpu" and not is_bf16_fast():
        return torch.float32
    return DTYPES.get(dtype, "auto")


def load(
    folder: str, before: bool, device: torch.device, dtype: str = "auto"
) -> tuple[Any, Encoder, dict[str, Any]]:
    """Return the model of a run, or of a model folder, its encoder, and the run's settings.

    dtype: see dtype_to_compute().
    """
    name = result = str(model_files.model_folder("folder", folder))
    config = data.resolve(folder) / "config.json"
    run = data.read_json(config) if config.is_file() else {}
    if "model_name" not in run:  # config.json is that of a model
        run = {}
    adapter: Any = ""
    if before:
        if not run:
            problem = f"{folder} is not a run of a language model; leave it out"
            raise UserError(f"--before: {problem}")
        name = run["model_name"]
        adapter = run.get("init_adapter") or run.get("resume_from") or ""
    with cli.located({"model_name": "folder", "init_adapter": "folder"}):
        if not adapter and models.is_adapter(name):
            name, adapter = lora.base_of(name), name
        tokenizer = models.load_tokenizer(result)  # its chat template is that of the training
        model: Any = models.load(name, dtype_to_compute(dtype, device), device)
        if adapter:  # not merged, which would round a bf16 model
            model = lora.with_adapter(model, adapter)
    template = "none" if run.get("chat_template") == "none" else "auto"
    date = date_in(data.resolve(folder))
    kwargs = run.get("chat_template_kwargs", "")
    return model, Encoder(tokenizer, template, kwargs=kwargs, date=date), run


def has_plain_turns(folder: str) -> bool:
    """Return whether a run has trained on conversations without a chat template."""
    report = data.resolve(folder) / "data_report.json"
    splits = data.read_json(report) if report.is_file() else {}
    return PLAIN_TURNS in splits.get("train", {}).get("notes", {})


def prompt_of(
    messages: list[dict[str, str]], encoder: Encoder, in_turns: bool = False
) -> list[int]:
    """Return the token ids of a conversation; without a chat template, of its texts.

    in_turns: if there is no template, render the turns as those of the run's rows.
    """
    if encoder.templated or in_turns:
        return encoder.prompt_ids(messages)
    return encoder.prompt_ids("\n".join(message["content"] for message in messages))


def fit_context(
    messages: list[dict[str, str]], encoder: Encoder, model: Any, new: int, in_turns: bool
) -> list[int]:
    """Return the prompt of a conversation that leaves room for `new` tokens in the model's context.

    The oldest questions and their replies are removed from the messages if they do not fit, and a
    line is printed. Raises UserError if the last question alone is too long.
    """
    first = int(messages[0]["role"] == "system")
    dropped = 0
    while True:
        prompt = prompt_of(messages, encoder, in_turns)
        row = Pair(prompt, [0] * new, [0] * new, "the question and its reply", "")
        try:
            fix = "a shorter question, or a smaller --max_new_tokens"
            models.check_fit(model, encoder.tokenizer, [row], fix)
            break
        except UserError:
            if len(messages) == first + 1:
                raise
            del messages[first : first + 2]
            dropped += 1
    if dropped:
        print(f"[the context is full; oldest questions dropped, with their replies: {dropped}]")
    return prompt


def main(argv: list[str] | None = None) -> int:
    settings = commands.read_chat(argv)
    world = distributed.choose_device(distributed.World(), "auto")
    model, encoder, run = load(settings.folder, settings.before, world.device, settings.dtype)
    values = DEFAULTS | {name: run[name] for name in DEFAULTS if name in run}
    values |= {name: vars(settings)[name] for name in DEFAULTS if vars(settings)[name] is not None}
    spec = sampling.SampleSpec(**values, batch_size=1, seed=settings.seed)
    scorer = Scorer(model)
    ends = sampling.ends_of(scorer, encoder)
    streamer = Streamer(encoder.tokenizer)
    first = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = [*first]
    has_history = settings.history
    if has_history is None:  # the demo's model was trained on single questions only
        name = run.get("model_name") or settings.folder
        has_history = not data.is_same_file(name, commands.DEMO_MODEL)
    if has_history:
        print("conversation: an empty line starts a new one (--no_history: single questions)")
    else:
        print("single questions: earlier ones are not remembered (--history: a conversation)")
    in_turns = has_plain_turns(settings.folder)
    hello = prompt_of([*first, {"role": "user", "content": "Hello"}], encoder, in_turns)
    sampling.choose_way(scorer, [hello], spec.max_new_tokens, world)  # before someone waits
    print("> ", end="", flush=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a byte that is not UTF-8 ends no conversation
    for number, line in enumerate(sys.stdin):
        if not (has_history and line.strip()):
            messages = [*first]
        if line.strip():
            messages.append({"role": "user", "content": line.strip()})
            prompt = fit_context(messages, encoder, model, spec.max_new_tokens, in_turns)
            unknown = model_files.unknown(encoder.tokenizer, [line])
            for warning in model_files.describe_unknown("this line", unknown, limit=1.0):
                print(warning)
            start = time.perf_counter()
            [reply] = sampling.generate(
                scorer, [prompt], ends, world, spec, first=number, streamer=streamer
            )
            if settings.stats:
                print(streamer.stats(start))
            [text] = encoder.texts([reply])
            messages.append({"role": "assistant", "content": text.strip()})
        print("> ", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
