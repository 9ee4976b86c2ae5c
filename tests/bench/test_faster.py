"""A check that takes a minute: the step of main_distributed against TRL's way to compute it.

The full comparison, with TRL itself, is dpo_vs_trl.py. Here its layout is written out plainly: two
padded rows a pair, log-probs and the entropy of every position, full logits, stock LoRA layers.
TRL's own head makes the logits twice; this one does not, so it is the faster opponent of the two.
"""

import random
import statistics
import time

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ddp_utils import logps
from ddp_utils.fast import memory_efficient, self_test
from ddp_utils.logps import Pair

BARS = {"long": 2.8, "ragged": 5.0, "bigv": 4.5}  # of TRL 1.16; a shared machine gets 0.8 of them
WORDS = {"long": 8192, "ragged": 8192, "bigv": 51200}
PAIRS = 4


def some_pairs(case):
    """Lengths of the cases of dpo_vs_trl.py: P, C, R of 256, 64, 64; lognormal; 128, 96, 96."""
    dice = random.Random(0)

    def length(median, sigma, low, high):
        return max(low, min(high, round(median * dice.lognormvariate(0, sigma))))

    def ids(count):
        return [dice.randrange(WORDS[case]) for _ in range(count)]

    sizes = {"long": (256, 64, 64), "bigv": (128, 96, 96)}.get(case)
    ragged = [(128, 0.8, 8, 512), (96, 0.7, 4, 384), (96, 0.7, 4, 384)]
    return [
        Pair(*(ids(n) for n in sizes or [length(*spec) for spec in ragged]), "", "")
        for _ in range(PAIRS)
    ]


def tiny(case):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=1024, vocab_size=WORDS[case], tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def plainly(model, pairs):
    """Chosen and rejected log-probs [B] each, laid out as in TRL, with its metrics."""
    rows = [pair.prompt + pair.chosen for pair in pairs]
    rows += [pair.prompt + pair.rejected for pair in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [2B, T]
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    starts = torch.tensor([len(pair.prompt) for pair in pairs] * 2)
    scored = mask[:, 1:].bool() & (torch.arange(1, width) >= starts[:, None])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    found = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    with torch.no_grad():
        logs = logits.log_softmax(-1)
        _metrics = -(logs.exp() * logs).sum(-1), logits.argmax(-1), logits.mean()
    return (found * scored).sum(-1).chunk(2)


def step(score, pairs, model):
    """CPU seconds, loss and gradient of one forward and backward."""
    model.zero_grad()
    start = time.process_time()
    chosen, rejected = score(pairs)
    loss = -functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    seconds = time.process_time() - start
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return seconds, loss.item(), gradient


@pytest.mark.parametrize("case", ["long", "ragged", pytest.param("bigv", marks=pytest.mark.show)])
def test_a_step_is_that_much_faster_than_the_plain_layout(case):
    pairs, ours, theirs = some_pairs(case), tiny(case), tiny(case)
    scorer = logps.Scorer(ours)
    assert self_test.check_head(scorer, pairs[:2], "cpu") is None
    assert self_test.check_layout(scorer, pairs[:2], "cpu") is None
    memory_efficient.apply(ours)
    ratios = []
    for turn in range(6):
        mine = step(lambda pairs: scorer(scorer.collate(pairs, "cpu")), pairs, ours)
        plain = step(lambda pairs: plainly(theirs, pairs), pairs, theirs)
        assert mine[1] == pytest.approx(plain[1], abs=1e-4)
        assert (mine[2] - plain[2]).norm() <= 1e-4 * plain[2].norm()
        if turn:  # the first one warms up
            ratios.append(plain[0] / mine[0])
    print(f"{case}: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    assert statistics.median(ratios) >= 0.8 * BARS[case]
