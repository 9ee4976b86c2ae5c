"""Faster ways to compute the same log-probs, tried on real pairs of the model before they are used.

The fast head computes the logits of the target tokens only; the shared layout computes the prompt
of a pair once. A model that does not support one of them falls back to the plain way.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_utils import UserError, distributed, out_of_memory
from ddp_utils.distributed import World
from lm import logps, model_files
from lm.logps import Pair, Scorer
from lm.model_files import one_line

Way = Callable[[], Tensor]  # computes log-probs [N]
# what a model may raise if it does not support packed rows, or computes attention in its own way
UNSUPPORTED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def choose_head_and_layout(
    scorer: Scorer, pairs: Sequence[Pair], layout: str, world: World
) -> list[str]:
    """Choose head and layout of the scorer by trying them on real pairs; return lines to print.

    The head is tried on the two shortest pairs, since full logits are large. The layout is tried on
    the shortest pair and the two longest ones, which are the ones that exceed attention windows.

    layout: "auto", "shared" or "separate". Raises UserError if the model does not support "shared".
    """
    pairs = sorted(pairs, key=lambda pair: pair.num_tokens)
    scorer.token_noise = 0.0
    with logps.dropout_off(scorer):
        check_causal(scorer, pairs[0], world.device)
        problems = [check_head(scorer, pairs[:2], world.device)]
        if layout != "separate":
            problems.append(check_layout(scorer, [pairs[0], *pairs[-2:]], world.device))
    # if one rank falls back, all do: ranks with different layouts would deadlock
    votes = [scorer.full_logits, not scorer.shared, scorer.token_noise]
    sums = distributed.all_sum(torch.tensor(votes, device=world.device), world).tolist()
    full_logits, separate, noise = sums
    scorer.full_logits, scorer.token_noise = full_logits > 0, noise / world.world_size
    scorer.set_layout(shared=separate == 0)
    if layout == "shared" and separate:
        reason = problems[1] or "not supported on every rank"
        raise UserError(f"--layout shared: {reason}; use auto")
    return [problem for problem in problems if problem]


@torch.no_grad()
def check_causal(scorer: Scorer, pair: Pair, device: torch.device) -> None:
    """Raise UserError if a prediction depends on later tokens, as in models for embeddings."""
    later = pair.chosen[:8]
    other = [abs(token - 1) for token in later]
    # the first two rows are equal, so that what is random shows
    ids = [pair.prompt + later, pair.prompt + later, pair.prompt + other]
    with scorer.autocasting(device):
        logits = scorer.model(input_ids=torch.tensor(ids, device=device)).logits
    predictions = logits[:, len(pair.prompt) - 1].float().log_softmax(-1)  # [3, V]
    noise, gap = (predictions[1:] - predictions[0]).abs().amax(-1).tolist()
    if gap > (1e-2 if scorer.precision == torch.float32 else 1.0) + 10 * noise:
        problem = f"a log-prob changes by {gap:.2g} nats with the tokens behind it"
        problem = f"the model reads a text in both directions ({problem}); use a causal model"
        raise UserError(f"{scorer.unwrap().name_or_path}: {problem}")


@torch.no_grad()
def check_head(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> str | None:
    """Compare our log-probs, of a padded batch, with the model's own logits of each row alone.

    If they differ, use the model's logits from now on and return a line to print.
    """

    def with_fast_head() -> Tensor:
        # a script's own token_logps() may return other numbers
        return logps.Scorer.token_logps(scorer, logps.collate(pairs, device))

    def with_full_logits() -> Tensor:
        scores = []
        texts = [(pair.prompt, pair.chosen) for pair in pairs]
        texts += [(pair.prompt, pair.rejected) for pair in pairs]
        for prompt, response in texts:
            ids = torch.tensor([prompt + response[:-1]], device=device)
            with scorer.autocasting(device):
                logits = scorer.model(input_ids=ids).logits[0, len(prompt) - 1 :]
            scores.append(logps.picked_logps(logits, torch.tensor(response, device=device)))
        return torch.cat(scores)

    reason: str | None = "it has no separate output layer"
    if scorer.has_own_head():
        scorer.full_logits = False
        reason = _find_difference(scorer, pairs, device, [with_fast_head, with_full_logits])
    scorer.full_logits = reason is not None
    if reason is None:
        return None
    _find_difference(scorer, pairs, device, [with_fast_head, with_full_logits])  # for token_noise
    return f"the head is not a plain layer ({reason}): using the model's full logits"


@torch.no_grad()
def check_layout(scorer: Scorer, pairs: Sequence[Pair], device: torch.device) -> str | None:
    """Compare the log-probs of a packed row with those of padded rows; set the layout.

    If they differ, or the model does not support packed rows, return a line to print.
    """
    num_layers = scorer.unwrap().config.get_text_config().num_hidden_layers

    def in_layout(shared: bool) -> Tensor:
        scorer.set_layout(shared)
        batch = scorer.collate(pairs, device)
        token_logps = scorer.token_logps(batch)
        num_calls = batch.model_kwargs["packing"].calls if shared else num_layers
        if num_calls != num_layers:
            raise TypeError(f"{num_calls} of {num_layers} layers use the attention of packed rows")
        return token_logps

    try:
        layouts = [lambda: in_layout(False), lambda: in_layout(True)]
        reason = _find_difference(scorer, pairs, device, layouts)
    except UNSUPPORTED as error:
        if out_of_memory(error):  # no other layout needs less
            raise
        reason = one_line(error)
    scorer.set_layout(shared=reason is None)
    if reason is None:
        return None
    return f"the prompt cannot be shared ({reason}): separate rows"


def _find_difference(
    scorer: Scorer, pairs: Sequence[Pair], device: torch.device, ways: Sequence[Way]
) -> str | None:
    """Return how two ways to compute the same log-probs [N] differ, None if they agree.

    They are compared twice: with the logits as they are, and with logits scaled to 100. Before
    training, a small model has logits near 0; a soft-cap, a scaling or a wrong attention changes
    its log-probs visibly only if they are scaled. In fp32 the largest difference of a token counts;
    in half precision rounding moves single tokens, so there the root mean square counts. If the
    ways agree, it becomes the scorer's token_noise, unless that is larger. With another order of
    summation in each product it is 0.07 to 0.11 nats for SmolLM2-135M in bf16.
    """
    noise = 0.0
    is_exact = scorer.precision == torch.float32
    head = scorer.unwrap().get_output_embeddings()
    prompt = torch.tensor([pairs[0].prompt], device=device)
    with scorer.autocasting(device):
        scale = 100 / scorer.model(input_ids=prompt).logits.abs().max().item()
    for factor, bound in ((1.0, 1e-3 if is_exact else 0.3), (scale, 1e-2 if is_exact else 3.0)):
        with scaled_logits(head, factor) if head else contextlib.nullcontext():
            gaps = ways[0]() - ways[1]()  # [N]
        gap = (gaps.abs().max() if is_exact else gaps.square().mean().sqrt()).item()
        if math.isnan(gap):
            model_files.check_weights(scorer.unwrap())
        if not gap <= bound:  # also if it is NaN
            return f"log-probs of a token differ by {gap:.3g} nats, logits x {factor:.3g}"
        noise = noise or gap  # of the logits as they are
    scorer.token_noise = max(scorer.token_noise, noise)
    return None


def scaled_logits(head: nn.Module, factor: float) -> RemovableHandle:
    """Multiply the output of the head within a `with`, as in a model that is more certain."""
    return head.register_forward_hook(lambda _module, _inputs, output: output * factor)
