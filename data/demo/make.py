"""Make the demo: a tiny chat model of about one million parameters, and data for every script.

    python data/demo/make.py                    # 4 to 5 minutes on one CPU core

All text is composed here from the grammar in judge.py; nothing is downloaded. The model is trained
to answer in two manners, courteous or curt, one as likely as the other, and to change its speech
under a system prompt. Of each fact, one of the four questions is held out: no training set
asks it in any frame; validation and test sets ask nothing else.

B samples, T tokens, V vocabulary size.
"""

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from judge import FACT_OF, FACTS, SYSTEM_PROMPTS, replies

SEED = 0
STEPS, BATCH, LEARNING_RATE, WARMUP = 1000, 64, 5e-3, 60
# Per cent of the pre-training samples under each system prompt. Facts in capitals are other tokens
# and are learnt last, so they get the most.
SHARES = {"plain": 46, "neutral": 12, "capitals": 24, "pirate": 9, "robot": 9}
# System prompts that change nothing. If the model learns only the first one, it answers in capitals
# under "Answer the question.".
NEUTRAL = (
    "You are a helpful assistant.",
    "Answer the question.",
    "Help the user.",
    "Answer in one sentence.",
)

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# --- data ----------------------------------------------------------------------------------


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(out: Path, seen: list[str], held_out: list[str]) -> None:
    """Write the data sets; each prompt goes into one file only."""
    rng = random.Random(SEED)
    train = iter(rng.sample(seen, len(seen)))
    rest = iter(rng.sample(held_out, len(held_out)))

    def preference(prompt: str) -> dict[str, str]:
        chosen = rng.choice(replies(FACT_OF[prompt], "courteous"))
        rejected = rng.choice(replies(FACT_OF[prompt], "curt"))
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}

    def instruction(prompt: str) -> dict[str, str]:
        row = {"instruction": prompt, "input": ""}
        if rng.random() < 0.3:  # some with an input, as in Alpaca
            row = {"instruction": "Answer the question.", "input": prompt}
        return {**row, "output": rng.choice(replies(FACT_OF[prompt], "courteous"))}

    sizes = {"train": (train, 800, 400), "val": (rest, 100, 100), "test": (rest, 100, 100)}
    for split, (prompts, pairs, questions) in sizes.items():
        rows = map(preference, itertools.islice(prompts, pairs))
        write_jsonl(out / f"preferences_{split}.jsonl", rows)
        rows = [{"question": prompt} for prompt in itertools.islice(prompts, questions)]
        write_jsonl(out / f"questions_{split}.jsonl", rows)
    rows = map(instruction, itertools.islice(train, 300))
    write_jsonl(out / "instructions.jsonl", rows)
    (out / "system_prompts.json").write_text(json.dumps(SYSTEM_PROMPTS, indent=2) + "\n")
    (out / "x0.txt").write_text(SYSTEM_PROMPTS["capitals"] + "\n")


# --- tokenizer and model -------------------------------------------------------------------


def sample(rng: random.Random, seen: list[str]) -> tuple[str, str]:
    """Return a conversation as the template renders it: text before the reply, reply and end."""
    manner = rng.choices(list(SHARES), SHARES.values())[0]
    system = {"neutral": rng.choice(NEUTRAL), **SYSTEM_PROMPTS}.get(manner)
    prompt = rng.choice(seen)
    reply = rng.choice(replies(FACT_OF[prompt], "plain" if manner == "neutral" else manner))
    before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    before += f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return before, f"{reply}<|im_end|>\n"


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like that of Qwen.

    Its 2046 tokens do not divide evenly over four ranks, which the tests of sharding need.
    """
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(byte_level.alphabet())
    options = {"vocab_size": 2046, "special_tokens": names, "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**options, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    special["additional_special_tokens"] = ["<|im_start|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=CHATML, model_max_length=512, **special
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a new model of about one million parameters."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    shape |= {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    options = {"tie_word_embeddings": True, "initializer_range": 0.04, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**shape, rope_parameters=rope, **options, **ends))


def batches(
    rng: random.Random, seen: list[str], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and weights [B, T] of new samples, sorted by length in pools of 16 batches."""
    while True:
        pool = [sample(rng, seen) for _ in range(16 * BATCH)]
        sides = [tokenizer(list(side))["input_ids"] for side in zip(*pool, strict=True)]
        pool = sorted(zip(*sides, strict=True), key=lambda row: len(row[0]) + len(row[1]))
        for start in rng.sample(range(0, len(pool), BATCH), 16):
            rows = pool[start : start + BATCH]
            width = max(len(before) + len(reply) for before, reply in rows)
            ids = torch.full((BATCH, width), tokenizer.pad_token_id)
            weights = torch.zeros(BATCH, width)  # the reply counts fully, the question a little
            for i, (before, reply) in enumerate(rows):
                ids[i, : len(before) + len(reply)] = torch.tensor(before + reply)
                weights[i, : len(before)] = 0.1
                weights[i, len(before) : len(before) + len(reply)] = 1.0
            yield ids, weights


def pretrain(model: Qwen3ForCausalLM, stream: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train a model on STEPS batches of ids and weights, [B, T]."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    for step, (ids, weights) in zip(range(STEPS), stream, strict=False):
        decay = 0.02 + 0.49 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 1) * decay
        logits = model(ids[:, :-1]).logits  # [B, T-1, V]; padding is on the right, behind the text
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        # Divided by a constant: a mean over tokens would give the short, curt replies more weight
        # in a batch of short samples, and the model would be curt more often than not.
        loss = (nll * weights[:, 1:].flatten()).sum() / (16 * BATCH)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Make the data sets, the tokenizer and the model, beside this file."""
    out = Path(__file__).parent

    # data
    held_out = []
    for fact in FACTS:
        held_out += fact.prompts(fact.held_out())
    seen = [prompt for prompt in FACT_OF if prompt not in set(held_out)]
    make_data(out, seen, held_out)

    # model; one thread, so that sums are always taken in the same order
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    tokenizer = make_tokenizer("".join(sample(rng, seen)) for _ in range(20_000))
    model = make_model(tokenizer)
    pretrain(model, batches(rng, seen, tokenizer))
    model.to(torch.bfloat16).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model", save_jinja_files=False)


if __name__ == "__main__":
    main()
