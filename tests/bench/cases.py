"""Cases for dpo_vs_trl.py: a small Qwen3 with random weights, pairs of random words.

A word is a token. There is something to learn: chosen responses prefer the lower half of the
vocabulary, rejected ones the upper half.
"""

import hashlib
import json
import math
import random
from pathlib import Path

SMALL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}  # Qwen3-8B
LARGE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
PROMPTS, RESPONSES = (128, 0.8, 8, 512), (96, 0.7, 4, 384)  # log-normal: median, sigma, from, to
HH = (110, 0.7, 8, 512), (40, 0.8, 4, 256)  # lengths as in HH-RLHF
CASES = {  # words in the vocabulary, pairs, tokens of a prompt, tokens of a response; for a CPU
    "long": (8192, 512, 256, 64),
    "short": (8192, 512, 32, 192),
    "ragged": (8192, 512, PROMPTS, RESPONSES),
    "hh": (8192, 512, *HH),
    "bigv": (51200, 256, 128, 96),
    "bigv_ragged": (51200, 256, PROMPTS, RESPONSES),
}
GPU_CASES = {
    "8b": (151936, 256, 512, 256),
    "8b_hh": (151936, 256, *HH),
}


def draw(rng, length):
    if isinstance(length, int):
        return length
    median, sigma, low, high = length
    return max(low, min(high, round(median * math.exp(rng.gauss(0, sigma)))))


def make_case(name, root):
    """model/, train.jsonl and val.jsonl in a folder named after the recipe; made only once."""
    sizes, dtype = (LARGE, "bfloat16") if name in GPU_CASES else (SMALL, "float32")
    recipe = (CASES | GPU_CASES)[name]
    mark = hashlib.sha256(repr((sizes, recipe)).encode()).hexdigest()[:8]
    folder, (vocab, count, prompts, responses) = Path(root) / f"{name}-{mark}", recipe
    if (folder / "train.jsonl").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    ids = {word: place for place, word in enumerate(special.values())}
    ids |= {f"w{place}": place for place in range(3, vocab)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    settings = sizes | {"vocab_size": vocab, "max_position_embeddings": 4096}
    settings |= {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    config = Qwen3Config(**settings, bos_token_id=None)
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    torch.set_default_dtype(torch.float32)

    rng, half, lines = random.Random(0), vocab // 2, []

    def text(length, share):  # `share` of the words from the lower half: what is to be learned
        ends = ((3, half) if rng.random() < share else (half, vocab - 1) for _ in range(length))
        return " ".join(f"w{rng.randint(*end)}" for end in ends)

    for _ in range(count):
        prompt, chosen, rejected = (draw(rng, kind) for kind in (prompts, responses, responses))
        row = {"prompt": text(prompt, 0.5)}  # both sides add eos to a response: one word less
        row["chosen"] = " " + text(max(1, chosen - 1), 0.6)
        row["rejected"] = " " + text(max(1, rejected - 1), 0.4)
        lines.append(json.dumps(row) + "\n")
    (folder / "val.jsonl").write_text(lines[-1])
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


def make_real_case(model, pairs, root):
    """The same folder of a real model and its pairs, rendered by the model's chat template."""
    from transformers import AutoTokenizer

    rows = json.loads(Path(pairs).read_text())
    mark = hashlib.sha256(json.dumps([str(model), rows]).encode()).hexdigest()[:8]
    folder = Path(root) / f"{Path(model).name}-{mark}"
    if (folder / "train.jsonl").exists():
        return folder
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = []
    for row in rows:
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answers = {side: row[side] for side in ("chosen", "rejected")}
        lines.append(json.dumps({"prompt": prompt, **answers}) + "\n")
    (folder / "val.jsonl").write_text(lines[-1])
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


def token_counts(case, rows, sides=("chosen", "rejected")):
    """Tokens of prompt + chosen and prompt + rejected of each row, each with its end token."""
    from transformers import AutoTokenizer

    count = AutoTokenizer.from_pretrained(f"{case}/model").tokenize
    return [
        sum(len(count(row["prompt"])) + len(count(row[side])) + 1 for side in sides) for row in rows
    ]
