"""Sample replies to prompts; the replies are the same on any number of ranks.

transformers generates, with our random numbers. B replies of a batch, V vocabulary size.
"""

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ddp_utils import UserError, distributed, out_of_memory
from ddp_utils.distributed import World, to_device
from ddp_utils.run import Parts, in_parts
from ddp_utils.sampler import MicroBatch, assign_micro_batches, seed_of
from ddp_utils.terminal import Phase
from lm import model_files, models
from lm.chat_template import Encoder
from lm.fast.self_test import UNSUPPORTED
from lm.logps import Scorer

CACHE = 2**30  # bytes of all keys and values of a batch on a CPU
CACHE_FRACTION = 0.05  # of a GPU's memory, if that is more
Ids = Collection[int]
Prompts = Sequence[list[int]]  # token ids


class SampleSpec(NamedTuple):
    """How replies are sampled."""

    temperature: float  # 0: the most probable token each time
    top_p: float
    max_new_tokens: int
    batch_size: int | None  # replies of one forward pass; None: up to 64, see batch_size()
    seed: int


class Way(NamedTuple):
    """How the model is called."""

    batched: bool  # several prompts at a time, padded on the left
    cached: bool  # a forward pass processes only the newest token of each reply
    effect: str  # printed, unless it is the fastest way


FASTEST = Way(True, True, "")
WAYS = [
    FASTEST,
    Way(False, True, "one prompt at a time, which is slower"),
    Way(False, False, "one prompt at a time and without a cache, which is slow"),
]


def generate(
    scorer: Scorer,
    prompts: Prompts,
    ends: Ids,
    world: World,
    spec: SampleSpec,
    first: int = 0,
    keep_end: bool = False,
    streamer: Any = None,
) -> list[list[int]]:
    """Return the token ids of a reply to each prompt, on all ranks.

    prompts: token ids; equal prompts get different replies. ends: token ids that end a reply.
    first: number of the first prompt, if it is not 0. keep_end: the replies include the token that
    ends them. streamer: of transformers, for a single prompt.
    """
    rows = [*itertools.chain(*parts_of(scorer, prompts, spec, world))]
    table = sample(scorer, prompts, rows, ends, world, spec, Phase(), first, streamer)
    return until_end(table, ends, keep_end)


def generate_once(
    path: Path,
    scorer: Scorer,
    prompts: Prompts,
    ends: Ids,
    world: World,
    spec: SampleSpec,
    phase_of: Callable[[int, int], Phase],
    keep_end: bool = False,
) -> list[list[int]]:
    """Return the same as generate(); each batch of replies is stored in a file, see in_parts().

    path: a file of these weights. phase_of(parts, those that are stored): the progress of sampling.
    """
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()
    facts = scorer.numerics(world.device) | spec._asdict() | {"prompts": digest}
    parts = parts_of(scorer, prompts, spec, world)

    def sampled(_: str, missing: Parts) -> Iterator[Tensor]:
        phase = phase_of(len(parts), len(parts) - len(missing))
        for rows in missing:
            yield sample(scorer, prompts, rows, ends, world, spec, phase)
        phase.stop_if_requested()  # then the last batches may be incomplete

    tables = in_parts(path, facts, {"tokens": parts}, sampled, world)
    return until_end(tables["tokens"], ends, keep_end)


def parts_of(scorer: Scorer, prompts: Prompts, spec: SampleSpec, world: World) -> list[list[int]]:
    """Return the rows of `prompts` in parts: a batch for each rank, the longest prompts first."""
    if scorer.way is None:
        choose_way(scorer, prompts, spec.max_new_tokens, world)
    size = batch_size(scorer, prompts, spec, world) * world.world_size
    rows = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    return [rows[first : first + size] for first in range(0, len(rows), size)]


@torch.no_grad()
def sample(
    scorer: Scorer,
    prompts: Prompts,
    rows: Sequence[int],
    ends: Ids,
    world: World,
    spec: SampleSpec,
    phase: Phase,
    first: int = 0,
    streamer: Any = None,
) -> Tensor:
    """Return token ids of replies to some prompts, [prompts, new tokens]; NaN for the others.

    Batches are cut from the complete list, in the order of parts_of(), and then split over the
    ranks; each reply has its own random numbers. So the number of ranks changes nothing. A batch
    in which its rank is asked to stop ends at once, and its replies are NaN.
    """
    size = batch_size(scorer, prompts, spec, world)
    starts = range(0, len(rows), size)
    replies = distributed.Table(len(rows), spec.max_new_tokens, world)
    batches = assign_micro_batches(range(len(starts)), [0] * len(starts), world, 1)
    for assigned in phase.each(batches, spec.max_new_tokens):
        start = starts[assigned.index[0]]
        index = rows[start : start + size]
        uniform = torch.stack([_random_numbers(first + row, spec) for row in index])
        batch = [prompts[row] for row in index]
        options = {"streamer": streamer, "eos_token_id": [*ends] or None}
        sampled = _sample_batch(scorer, batch, uniform, spec, world, phase, **options)
        reply = sampled[:, len(batch[0]) :].float()  # [B, new tokens]
        reply = pad(reply, (0, spec.max_new_tokens - reply.shape[1]))
        places = [*range(start, start + len(index))]
        if phase.is_asked():
            reply = torch.full_like(reply, torch.nan)
        replies.add(MicroBatch(places, assigned.weight * len(index)), reply)
    table = torch.full((len(prompts), spec.max_new_tokens), torch.nan, device=world.device)
    table[rows] = replies.reduce()
    return table


def cache_bytes(device: torch.device) -> int:
    """Return the bytes that the keys and values of a batch may have."""
    if device.type == "cpu":
        return CACHE
    memory = getattr(torch, device.type).get_device_properties(device).total_memory
    return max(CACHE, int(CACHE_FRACTION * memory))


def batch_size(scorer: Scorer, prompts: Prompts, spec: SampleSpec, world: World) -> int:
    """Return the number of replies of one forward pass.

    By default their keys and values have at most cache_bytes(). The number depends neither on ranks
    nor on free memory, so that replies do not, either.
    """
    if not scorer.way.batched:
        return 1
    if spec.batch_size:
        return spec.batch_size
    text = scorer.unwrap().config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    kept = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size / max(heads, 1)
    width = head_dim * max(kept, 1)
    longest = max(map(len, prompts)) + spec.max_new_tokens
    size = 2 * longest * text.num_hidden_layers * width * scorer.precision.itemsize  # of a reply
    cache = distributed.on_main(world, lambda: cache_bytes(world.device))
    return max(1, min(64, int(cache / size)))


def ends_of(scorer: Scorer, encoder: Encoder) -> list[int]:
    """Return the token ids that end a reply: those of the encoder and of the model's settings."""
    return models.all_ends(encoder.ends, scorer.unwrap().generation_config.eos_token_id)


def _random_numbers(number: int, spec: SampleSpec) -> Tensor:
    """Return the random numbers in [0, 1) of one reply, one per token."""
    seed = seed_of(spec.seed, number, 0)  # the constant 0 keeps the results in docs/ reproducible
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(spec.max_new_tokens, generator=generator, dtype=torch.double)


def _sample_batch(
    scorer: Scorer,
    prompts: Prompts,
    uniform: Tensor,
    spec: SampleSpec,
    world: World,
    phase: Phase | None = None,
    streamer: Any = None,
    **options: Any,
) -> Any:
    """Return what transformers generates: [B, length of the longest prompt + new tokens].

    uniform: random numbers in [0, 1), [B, new tokens]. options: of its GenerationConfig.
    """
    padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
    ids = to_device(padded([torch.tensor(prompt) for prompt in prompts]), world.device)
    mask = padded([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts])
    uniform = to_device(uniform, world.device)

    def only_sampled(so_far: Tensor, logits: Tensor) -> Tensor:
        """Return logits from which transformers can choose only the token that is sampled here."""
        tokens = sample_tokens(logits, uniform[:, so_far.shape[1] - ids.shape[1]], spec)
        if phase:
            phase.advance()
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def is_ended(so_far: Tensor, _: Any) -> Tensor:
        """Return whether each reply ends here, since this rank was asked to stop."""
        return torch.full((len(so_far),), bool(phase and phase.is_asked()), device=so_far.device)

    options |= {"max_new_tokens": spec.max_new_tokens, "use_cache": scorer.way.cached}
    with scorer.generating(world.device):
        return scorer.unwrap().generate(
            ids,
            GenerationConfig(do_sample=False, pad_token_id=0, **options),
            attention_mask=to_device(mask, world.device),
            logits_processor=[only_sampled],
            stopping_criteria=[is_ended],
            synced_gpus=scorer.in_step,
            streamer=streamer,
        )


def sample_tokens(logits: Tensor, uniform: Tensor, spec: SampleSpec) -> Tensor:
    """Sample a token for each row of logits [B, V] by inverting its cumulative distribution, [B].

    uniform: random numbers in [0, 1), [B].
    """
    if spec.temperature < 1e-6:  # divided by less, logits could overflow
        return logits.argmax(-1)
    probabilities = (logits.float() / spec.temperature).softmax(-1)  # [B, V]
    if spec.top_p < 1:  # keep the fewest tokens that together have this probability
        likeliest, tokens = probabilities.sort(descending=True, stable=True)
        # in double: a GPU adds one row in another order than several, so that a sum in fp32 would
        # depend on the other replies of the batch
        before = likeliest.cumsum(-1, dtype=torch.double) - likeliest
        probabilities = probabilities.scatter(-1, tokens, likeliest * (before < spec.top_p))
    sums = probabilities.cumsum(-1, dtype=torch.double)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(-1)


def until_end(table: Tensor, ends: Ids, keep_end: bool = False) -> list[list[int]]:
    """Cut replies [N, new tokens] before, or behind, the first token that ends them."""
    replies = []
    for reply in table.long().tolist():
        length = next((n + keep_end for n, token in enumerate(reply) if token in ends), None)
        replies.append(reply[:length])
    return replies


# --- self-test -----------------------------------------------------------------------------------


def choose_way(scorer: Scorer, prompts: Prompts, max_new_tokens: int, world: World) -> None:
    """Set the fastest way to generate that equals the plain forward, the same on all ranks.

    It is tried on the longest prompt, which may exceed an attention window, and its second half.
    Raises UserError if no way equals the plain forward.
    """
    longest = max(prompts, key=len)
    tried = [longest, longest[len(longest) // 2 :]]
    spec = SampleSpec(0.0, 1.0, min(max_new_tokens, 6), batch_size=2, seed=0)
    reason = ""
    for way in WAYS:
        scorer.way = way
        try:
            problem = _difference(scorer, tried, spec, world)
        except UNSUPPORTED as error:
            if out_of_memory(error):  # no other way needs less
                raise
            problem = models.one_line(error)
        vote = torch.tensor(float(problem != ""), device=world.device)
        if not distributed.all_sum(vote, world).item():
            if way is not FASTEST:
                distributed.warn(f"warning: replies: {way.effect} ({reason})")
            return
        reason = problem or "not supported on every rank"
    problem = f"the model cannot generate replies here ({reason})"
    raise UserError(f"{problem}; use another model, or no replies (--num_samples 0 in training)")


def _difference(scorer: Scorer, prompts: Prompts, spec: SampleSpec, world: World) -> str:
    """Return how the logits of generated tokens differ from the plain forward, "" if they agree.

    The plain forward has no cache and no padding. Logits are compared instead of tokens, since
    rounding decides between two tokens of almost equal probability. In half precision the bound is
    wide.
    """
    size = spec.max_new_tokens
    accepted = inspect.signature(scorer.unwrap().forward).parameters
    last = {"logits_to_keep": size} if "logits_to_keep" in accepted else {}
    bound = 1e-4 if scorer.precision == torch.float32 else 0.05
    logged: Any = {"output_logits": True, "return_dict_in_generate": True}
    for batch in [prompts] if scorer.way.batched else [[prompt] for prompt in prompts]:
        uniform = torch.zeros(len(batch), size)
        output = _sample_batch(scorer, batch, uniform, spec, world, **logged)
        generated = torch.stack(output.logits, 1)  # [B, new tokens, V]
        replies = output.sequences[:, -size:].tolist()
        for prompt, reply, logits in zip(batch, replies, generated, strict=True):
            ids = torch.tensor([prompt + reply[:-1]], device=world.device)
            with scorer.generating(world.device):
                output = scorer.model(ids, use_cache=False, **last)
            plain = output.logits[0, -size:].float()  # [new tokens, V]
            gap = (logits - plain).square().mean().sqrt() / plain.amax(-1).abs().mean()
            if gap.isnan():
                model_files.check_weights(scorer.unwrap())
            if not gap.item() <= bound:  # also if it is NaN
                return f"logits differ by {gap.item():.2g} of the largest one"
    return ""
