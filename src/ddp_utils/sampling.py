"""Replies to prompts, the same on any number of ranks.

B rows in a batch, V words in the vocabulary.
"""

import inspect
from typing import NamedTuple

import torch
import transformers

from ddp_utils import distributed
from ddp_utils.sampler import MicroBatch, assign_micro_batches, seed_of


class SampleSpec(NamedTuple):
    """How replies are drawn."""

    temperature: float  # 0: the most probable word each time
    top_p: float
    max_new_tokens: int
    batch_size: int  # replies of one forward
    seed: int


@torch.no_grad()
def generate(scorer, prompts, ends, world, spec, poll=lambda: None, first=0, keep_end=False):
    """Return the token ids of a reply to each prompt, without their end, on all ranks.

    prompts: lists of token ids, of which some may be equal; ends: ids that end a reply; spec: a
    SampleSpec; first: the number of the first prompt. Batches are cut from the whole list, the
    longest prompts first, and then shared out, and each reply has its own random numbers, so the
    number of ranks changes nothing.
    """
    rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    starts = range(0, len(rows), spec.batch_size)
    micro_batches = []
    replies = []
    for cut_batch in assign_micro_batches(range(len(starts)), [0] * len(starts), world, 1):
        poll()  # stop between two batches, if asked to
        start = starts[cut_batch.index[0]]
        index = rows[start : start + spec.batch_size]
        row_of_prompt = {}  # in the prefill
        prompt_rows = []
        uniform = []
        for row in index:
            prompt_rows.append(row_of_prompt.setdefault(tuple(prompts[row]), len(row_of_prompt)))
            seed = seed_of(spec.seed, first + row, 0)  # the 0 keeps the replies of earlier versions
            generator = torch.Generator().manual_seed(seed)
            uniform.append(torch.rand(spec.max_new_tokens, generator=generator, dtype=torch.double))
        with scorer.generating(world.device):
            ids = [*row_of_prompt]
            reply = _batch(scorer, ids, prompt_rows, torch.stack(uniform), ends, spec, world)
        micro_batches.append(MicroBatch(index, cut_batch.weight * len(index)))
        replies.append(1 + reply)  # [B, new tokens]; 0 is what no rank has written
    table = distributed.gather_by_index(len(rows), micro_batches, replies, world).long() - 1
    return [_until_end(reply, ends, keep_end) for reply in table.tolist()]


def _batch(scorer, prompts, prompt_rows, uniform, ends, spec, world):
    """Sample B replies and return their token ids, [B, new tokens].

    Each prompt is prefilled once for all of its replies; finished ones are dropped from the
    batch. prompt_rows: [B] index into `prompts`; uniform: [B, new tokens] random numbers in [0, 1).
    """
    device = world.device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)  # padded on the left
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    cache = transformers.DynamicCache(config=scorer.unwrap().config)
    takes = inspect.signature(scorer.unwrap().forward).parameters
    # transformers 5.24's name of it, that of earlier versions, and that of their Mamba
    [cache_name] = {"cache", "past_key_values", "cache_params"} & takes.keys()

    def forward(ids, mask):
        """Return the logits of the next token, [rows, V]; mask: of all tokens fed so far."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        options = {"position_ids": positions, "logits_to_keep": 1, cache_name: cache}
        options = {name: value for name, value in options.items() if name in takes}
        return scorer.model(ids, attention_mask=mask, use_cache=True, **options).logits[:, -1]

    rows = torch.tensor(prompt_rows, device=device)
    mask = mask.to(device)
    logits = forward(ids.to(device), mask)[rows]
    mask = mask[rows]
    if len(rows) > len(prompts):
        cache.reorder_cache(rows)
    uniform = uniform.to(device)
    replies = torch.zeros(uniform.shape, dtype=torch.long, device=device)
    reply_rows = torch.arange(len(rows), device=device)  # index into `replies` of each row
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    ends = torch.tensor(ends, dtype=torch.long, device=device)
    is_sharded = hasattr(scorer, "unshard")  # FSDP: ranks go on until all are done
    for step in range(spec.max_new_tokens):
        tokens = sample_tokens(logits, uniform[reply_rows, step], spec)
        replies[reply_rows, step] = tokens
        unfinished = unfinished & ~torch.isin(tokens, ends)
        rows = unfinished.nonzero()[:, 0]
        left = len(rows)
        if is_sharded:
            left = distributed.all_sum(torch.tensor(left, device=device), world).item()
        if left == 0 or step + 1 == spec.max_new_tokens:
            break
        if len(rows) == 0:
            rows = torch.zeros(1, dtype=torch.long, device=device)  # one waits; its rest is cut
        if len(rows) < len(tokens):
            cache.reorder_cache(rows)
        mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
        reply_rows = reply_rows[rows]
        unfinished = unfinished[rows]
        logits = forward(tokens[rows, None], mask)
    return replies


def sample_tokens(logits, uniform, spec):
    """Sample a token for each row of logits [B, V] by inverting its cumulative distribution; [B].

    uniform: [B] random numbers in [0, 1).
    """
    if spec.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / spec.temperature).softmax(-1)  # [B, V]
    if spec.top_p < 1:  # keep the fewest tokens that have so much probability
        likeliest, tokens = probabilities.sort(descending=True, stable=True)
        before = likeliest.cumsum(-1) - likeliest
        probabilities = probabilities.scatter(-1, tokens, likeliest * (before < spec.top_p))
    sums = probabilities.cumsum(-1, dtype=torch.double)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(-1)


def _until_end(reply, ends, keep):
    for length, token in enumerate(reply):
        if token in ends:
            return reply[: length + keep]
    return reply
