"""Replies to prompts, the same on any number of ranks, and what a judge makes of them.

P prompts, S samples of each, B rows in a batch, V words in the vocabulary.
"""

import importlib.util
import inspect
import itertools
import numbers
from typing import NamedTuple

import torch
import transformers

from ddp_utils import UserError, distributed, files, jsonl
from ddp_utils.metrics import wilson
from ddp_utils.sampler import MicroBatch, seed_of, share


class SampleSpec(NamedTuple):
    """How replies are drawn."""

    temperature: float  # 0: the most probable word each time
    top_p: float
    max_new_tokens: int
    batch_size: int  # replies of one forward
    seed: int


class SeededNoise(transformers.LogitsProcessor):
    """Gumbel noise from one generator per row: the arg max is a draw from the softmax.

    torch's own sampling takes all rows from one stream, so that a reply would depend on what
    else is in its batch. On a GPU a generator is counter-based (Philox, Salmon et al. 2011), so
    that nothing is copied.
    """

    def __init__(self, seeds, device):
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids, scores):
        rows = [torch.rand(scores.shape[-1], generator=g, device=g.device) for g in self.generators]
        uniform = torch.stack(rows).clamp_min(1e-30)  # [B, V]
        return scores.float() - torch.log(-torch.log(uniform))


@torch.no_grad()
def generate(
    scorer, prompts, ends, world, spec, samples=1, poll=lambda: None, first=0, keep_end=False
):
    """Token ids of `samples` replies to each prompt, without their end: P x S lists, on all ranks.

    prompts: P lists of token ids; ends: ids that end a reply; spec: a SampleSpec; first: the number
    of the first prompt. Batches are cut from the whole list and then shared out, and each reply has
    its own random stream, so the number of ranks changes nothing.
    """
    rows = list(itertools.product(range(len(prompts)), range(samples)))  # (prompt, sample)
    starts = range(0, len(rows), spec.batch_size)
    micro_batches = []
    replies = []
    for cut_batch in share(range(len(starts)), [0] * len(starts), world, budget=1):
        poll()  # stop between two batches, if asked to
        start = starts[cut_batch.index[0]]
        ids = []
        seeds = []
        for prompt, sample in rows[start : start + spec.batch_size]:
            ids.append(prompts[prompt])
            seeds.append(seed_of(spec.seed, first + prompt, sample))
        index = list(range(start, start + len(ids)))
        micro_batches.append(MicroBatch(index, cut_batch.weight * len(ids)))
        # 0 is what no rank has written
        replies.append(1 + _batch(scorer, ids, seeds, ends, spec, world.device))  # [B, new tokens]
    table = distributed.gather_by_index(len(rows), micro_batches, replies, world).long() - 1
    return [_until_end(reply, ends, keep_end) for reply in table.tolist()]


def _batch(scorer, prompts, seeds, ends, spec, device):
    """One call of transformers' generate on prompts padded on the left, padded to full length."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    steps = []
    if spec.temperature > 0:
        steps.append(transformers.TemperatureLogitsWarper(spec.temperature))
        if spec.top_p < 1:
            steps.append(transformers.TopPLogitsWarper(spec.top_p))
        steps.append(SeededNoise(seeds, device))
    end = ends[0] if ends else 0
    output = scorer.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        do_sample=False,  # the noise is the sampling
        logits_processor=transformers.LogitsProcessorList(steps),
        max_new_tokens=spec.max_new_tokens,
        eos_token_id=ends,
        pad_token_id=end,
    )[:, width:]
    return torch.nn.functional.pad(output, (0, spec.max_new_tokens - output.shape[1]), value=end)


def _until_end(reply, ends, keep):
    for length, token in enumerate(reply):
        if token in ends:
            return reply[: length + keep]
    return reply


def load_judge(spec, root=None):
    """`file.py:function` -> (prompt, response) -> {score name: number}; the first decides wins.

    Runs that file, so it is only ever named on this command line or in config.py. root: the folder
    that `spec` starts from; the current one if not given. Its `digest` is that of the file.
    """
    path, _, name = spec.rpartition(":")
    file = (root / path if root else jsonl.resolve(path)) if path else None
    if not file or not file.is_file():
        raise UserError(f"--judge: {spec!r} is not file.py:function")
    module_spec = importlib.util.spec_from_file_location(f"judge_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function) or len(inspect.signature(function).parameters) != 2:
        raise UserError(f"--judge: {file.name} has no function {name}(prompt, response)")

    def judge(prompt, response):
        try:
            scores = function(prompt, response)
        except ValueError as error:
            raise UserError(f"--judge: {spec} on {prompt!r:.60}: {error}") from error
        scores = scores if isinstance(scores, dict) else {"": scores}
        if not scores or not all(isinstance(s, numbers.Real) for s in scores.values()):
            raise UserError(f"--judge: {spec} returned {scores!r:.60}; a number or a dict of them")
        return {key: float(score) for key, score in scores.items()}

    judge.digest = files.sha256(file)

    return judge


def compare(policy, reference):
    """Mean scores and win rate; policy, reference: one {name: score} per reply, in one order.

    A win is a reply whose first score is above that of the reference's reply to the same prompt.
    """
    summary = {}
    for who, replies in (("policy", policy), ("reference", reference)):
        for name in replies[0]:
            key = f"judge/{who}/{name}" if name else f"judge/{who}"
            summary[key] = sum(scores[name] for scores in replies) / len(replies)
    first = next(iter(policy[0]))
    wins = 0
    losses = 0
    for own, other in zip(policy, reference, strict=True):
        wins += own[first] > other[first]
        losses += own[first] < other[first]
    low, high = wilson(wins, wins + losses)
    rate = wins / (wins + losses) if wins + losses else None
    summary |= {"win_rate": rate, "win_rate_low": low, "win_rate_high": high}
    return summary | {"wins": wins, "losses": losses, "ties": len(policy) - wins - losses}


def side_by_side(prompts, before, after, expected, judge=None):
    """A row of texts for each prompt, and with a judge the summary of compare()."""
    rows = []
    scores = []
    for texts in zip(prompts, before, after, expected, strict=True):
        prompt, was, now, wanted = (text.strip() for text in texts)
        rows.append({"prompt": prompt, "reference": was, "fine-tuned": now, "expected": wanted})
        if judge:
            scores.append((judge(prompt, now), judge(prompt, was)))
            rows[-1]["verdict"] = _verdict(*scores[-1])
    return rows, compare(*zip(*scores, strict=True)) if scores else {}


def as_text(rows, summary):
    """What a person reads: the judge's summary, then one block per row."""
    blocks = []
    if summary:
        block = ""
        for name, value in summary.items():
            block += f"{name}: {value:.4g}\n" if isinstance(value, float) else f"{name}: {value}\n"
        blocks.append(block)
    for number, row in enumerate(rows, start=1):
        width = 1 + max(map(len, row))
        block = f"--- {number} of {len(rows)}\n"
        for name, text in row.items():
            block += f"{name + ':':{width}} {text}\n"
        blocks.append(block)
    return "\n".join(blocks)


def _verdict(policy, reference):
    first = next(iter(policy))
    gain = policy[first] - reference[first]
    word = "tie" if gain == 0 else "win" if gain > 0 else "loss"
    shown = (f"{name} {reference[name]:g} -> {policy[name]:g}".strip() for name in policy)
    return f"{word} ({', '.join(shown)})"
