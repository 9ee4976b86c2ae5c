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

from bench.cases import CASES, SMALL, draw
from ddp_utils import distributed
from lm import logps
from lm.fast import memory_efficient, self_test
from lm.logps import Pair

BARS = {"long": 2.8, "ragged": 5.0, "bigv": 4.5}  # of TRL 1.16; a shared machine gets 0.8 of them


def some_pairs(case):
    """Return four pairs of random tokens, with the lengths of the cases of dpo_vs_trl.py."""
    vocabulary, _, prompt, response = CASES[case]
    dice = random.Random(0)

    def ids(length):
        return [dice.randrange(vocabulary) for _ in range(draw(dice, length))]

    return [Pair(ids(prompt), ids(response), ids(response), "", "") for _ in range(4)]


def tiny(case):
    torch.manual_seed(0)
    sizes = SMALL | {"num_hidden_layers": 2, "vocab_size": CASES[case][0]}
    config = transformers.Qwen3Config(**sizes, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def plainly(model, pairs):
    """Return chosen and rejected log-probs [B] each, in the layout of TRL, with its metrics."""
    rows = [pair.prompt + pair.chosen for pair in pairs]
    rows += [pair.prompt + pair.rejected for pair in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [2B, T]
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    starts = torch.tensor([len(pair.prompt) for pair in pairs] * 2)
    scored = mask[:, 1:].bool() & (torch.arange(1, width) >= starts[:, None])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    log_probs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    with torch.no_grad():
        logs = logits.log_softmax(-1)
        _metrics = -(logs.exp() * logs).sum(-1), logits.argmax(-1), logits.mean()
    return (log_probs * scored).sum(-1).chunk(2)


def step(score, pairs, model):
    """Return CPU seconds, loss and gradient of one forward and backward."""
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
    world = distributed.World()
    assert self_test.choose_head_and_layout(scorer, pairs, "shared", world) == []
    memory_efficient.apply(ours)
    ratios = []
    for turn in range(6):
        fast = step(lambda pairs: scorer(scorer.collate(pairs, "cpu")), pairs, ours)
        plain = step(lambda pairs: plainly(theirs, pairs), pairs, theirs)
        assert fast[1] == pytest.approx(plain[1], abs=1e-4)
        assert (fast[2] - plain[2]).norm() <= 1e-4 * plain[2].norm()
        if turn:  # the first one warms up
            ratios.append(plain[0] / fast[0])
    print(f"{case}: {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    assert statistics.median(ratios) >= 0.8 * BARS[case]
