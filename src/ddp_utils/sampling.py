"""Sample replies to prompts; the replies are the same on any number of ranks.

B replies of a batch, V vocabulary size.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ddp_utils import distributed
from ddp_utils.distributed import World
from ddp_utils.logps import Scorer
from ddp_utils.sampler import MicroBatch, assign_micro_batches, seed_of

Ids = Collection[int]
Prompts = Sequence[Sequence[int]]  # token ids


class SampleSpec(NamedTuple):
    """How replies are sampled."""

    temperature: float  # 0: the most probable token each time
    top_p: float
    max_new_tokens: int
    batch_size: int  # replies of one forward pass
    seed: int


@torch.no_grad()
def generate(
    scorer: Scorer,
    prompts: Prompts,
    ends: Ids,
    world: World,
    spec: SampleSpec,
    stop_if_requested: Callable[[], None] = lambda: None,
    first: int = 0,
    keep_end: bool = False,
) -> list[list[int]]:
    """Return the token ids of a reply to each prompt, on all ranks.

    Batches are cut from the complete list, the longest prompts first, and then split over the
    ranks; each reply has its own random numbers. So the number of ranks changes nothing.

    prompts: token ids; equal prompts get different replies. ends: token ids that end a reply.
    first: number of the first prompt, for a list that is one part of a longer one. keep_end: the
    replies include the token that ends them.
    """
    rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    starts = range(0, len(rows), spec.batch_size)
    micro_batches = []
    replies = []
    for assigned in assign_micro_batches(range(len(starts)), [0] * len(starts), world, 1):
        stop_if_requested()
        start = starts[assigned.index[0]]
        index = rows[start : start + spec.batch_size]
        uniform = torch.stack([_random_numbers(first + row, spec) for row in index])
        batch = [prompts[row] for row in index]
        with scorer.generating(world.device):
            reply = _sample_batch(scorer, batch, uniform, ends, spec, world)
        micro_batches.append(MicroBatch(index, assigned.weight * len(index)))
        replies.append(1 + reply)  # [B, new tokens]; 0 marks what no rank has written
    table = distributed.gather_by_index(len(rows), micro_batches, replies, world).long() - 1
    return [_until_end(reply, ends, keep_end) for reply in table.tolist()]


def _random_numbers(number: int, spec: SampleSpec) -> Tensor:
    """Return the random numbers in [0, 1) of one reply, one per token."""
    seed = seed_of(spec.seed, number, 0)  # the constant 0 keeps the results in docs/ reproducible
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(spec.max_new_tokens, generator=generator, dtype=torch.double)


def _sample_batch(
    scorer: Scorer, prompts: Prompts, uniform: Tensor, ends: Ids, spec: SampleSpec, world: World
) -> Tensor:
    """Return the token ids of B replies, [B, new tokens].

    Each different prompt is processed once for all of its replies. Finished replies leave the
    batch. uniform: random numbers in [0, 1), [B, new tokens].
    """
    device = world.device
    model = scorer.unwrap()
    cache: Any = transformers.DynamicCache(config=model.config)
    accepted = inspect.signature(model.forward).parameters
    # a model has one of these; the first one since transformers 5.24, the last one is Mamba's
    names = [name for name in ("cache", "past_key_values", "cache_params") if name in accepted]

    def next_logits(ids: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of the next token, [rows, V]; mask: of all tokens so far."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        options = {"position_ids": positions, "logits_to_keep": 1, names[0]: cache}
        options = {name: value for name, value in options.items() if name in accepted}
        return scorer.model(ids, attention_mask=mask, use_cache=True, **options).logits[:, -1]

    different = list(dict.fromkeys(map(tuple, prompts)))
    pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad([torch.tensor(prompt) for prompt in different]).to(device)  # [prompts, longest one]
    mask = pad([torch.ones(len(prompt), dtype=torch.long) for prompt in different]).to(device)
    rows = torch.tensor([different.index(tuple(prompt)) for prompt in prompts], device=device)
    logits = next_logits(ids, mask)[rows]
    mask = mask[rows]
    if len(prompts) > len(different):
        cache.reorder_cache(rows)
    uniform = uniform.to(device)
    replies = torch.zeros(uniform.shape, dtype=torch.long, device=device)
    reply_index = torch.arange(len(rows), device=device)  # of each row of the batch, in `replies`
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    end_ids = torch.tensor([*ends], dtype=torch.long, device=device)
    is_sharded = hasattr(scorer, "unshard")  # FSDP: all ranks call the model equally often
    for step in range(spec.max_new_tokens):
        tokens = sample_tokens(logits, uniform[reply_index, step], spec)
        replies[reply_index, step] = tokens
        unfinished = unfinished & ~torch.isin(tokens, end_ids)
        rows = unfinished.nonzero()[:, 0]
        num_left = len(rows)
        if is_sharded:
            num_left = int(distributed.all_sum(torch.tensor(num_left, device=device), world))
        if num_left == 0 or step + 1 == spec.max_new_tokens:
            break
        if len(rows) == 0:  # other ranks still sample: continue with a reply that is cut later
            rows = torch.zeros(1, dtype=torch.long, device=device)
        if len(rows) < len(tokens):
            cache.reorder_cache(rows)
        mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
        reply_index = reply_index[rows]
        unfinished = unfinished[rows]
        logits = next_logits(tokens[rows, None], mask)
    return replies


def sample_tokens(logits: Tensor, uniform: Tensor, spec: SampleSpec) -> Tensor:
    """Sample a token for each row of logits [B, V] by inverting its cumulative distribution, [B].

    uniform: random numbers in [0, 1), [B].
    """
    if spec.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / spec.temperature).softmax(-1)  # [B, V]
    if spec.top_p < 1:  # keep the fewest tokens that together have this probability
        likeliest, tokens = probabilities.sort(descending=True, stable=True)
        before = likeliest.cumsum(-1) - likeliest
        probabilities = probabilities.scatter(-1, tokens, likeliest * (before < spec.top_p))
    sums = probabilities.cumsum(-1, dtype=torch.double)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(-1)


def _until_end(reply: list[int], ends: Ids, keep: bool) -> list[int]:
    """Cut a reply before, or behind, the first token that ends it."""
    for length, token in enumerate(reply):
        if token in ends:
            return reply[: length + keep]
    return reply
