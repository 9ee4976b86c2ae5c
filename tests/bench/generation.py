"""Replies of our sampling against transformers' own, CPU seconds alternated in one process.

    python tests/bench/generation.py 8192 51200

A small Qwen3 with random weights; 64 prompts with lengths as in HH-RLHF, 4 samples each, 16
replies at a time, one thread. One word in 50 ends a reply, so that it has 50 words on average, 128
at most. The other side gets the prompts sorted by length, too, and returns 4 sequences a prompt.
"""

import random
import statistics
import sys
import time

import torch
import transformers
from cases import HH, SMALL, draw
from torch.nn.utils.rnn import pad_sequence

from ddp_utils import distributed, logps, sampling

SAMPLES, TOGETHER, LONGEST = 4, 16, 128
RUNS = 5


def ours(model, prompts, ends, seed):
    spec = sampling.SampleSpec(1.0, 1.0, LONGEST, TOGETHER, seed)
    scorer = logps.Scorer(model)
    prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
    return sampling.generate(scorer, prompts, ends, distributed.World(), spec)


def theirs(model, prompts, ends, seed):
    torch.manual_seed(seed)
    model.eval()
    options = {"max_new_tokens": LONGEST, "do_sample": True, "top_k": 0, "pad_token_id": ends[0]}
    options |= {"eos_token_id": ends, "num_return_sequences": SAMPLES}
    by_length = sorted(prompts, key=len)
    replies = []
    for start in range(0, len(prompts), TOGETHER // SAMPLES):
        part = [torch.tensor(prompt) for prompt in by_length[start : start + TOGETHER // SAMPLES]]
        ids = pad_sequence(part, True, -1, "left")
        rows = model.generate(ids.clamp_min(0), attention_mask=(ids >= 0).long(), **options)
        for row in rows[:, ids.shape[1] :].tolist():
            length = next((place for place, word in enumerate(row) if word in ends), len(row))
            replies.append(row[:length])
    return replies


def seconds_a_word(side, *arguments):
    start = time.process_time()
    replies = side(*arguments)
    return (time.process_time() - start) / sum(len(reply) + 1 for reply in replies)


def main():
    torch.set_num_threads(1)
    for words in map(int, sys.argv[1:] or ["8192", "51200"]):
        torch.manual_seed(0)
        config = transformers.Qwen3Config(vocab_size=words, tie_word_embeddings=False, **SMALL)
        model = transformers.Qwen3ForCausalLM(config)
        dice = random.Random(0)
        prompts = []
        for _ in range(64):
            prompts.append([dice.randrange(words) for _ in range(draw(dice, HH[0]))])
        ends = list(range(words // 50))
        times = {ours: [], theirs: []}
        for seed in range(RUNS):
            for side, spent in times.items():
                spent.append(seconds_a_word(side, model, prompts, ends, seed))
        ratios = [other / own for own, other in zip(*times.values(), strict=True)]
        own, other = (1000 * statistics.median(spent) for spent in times.values())
        print(
            f"{words} words: {other:.2f} ms a word, ours {own:.2f}: "
            f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        )


if __name__ == "__main__":
    main()
