"""The same numbers in less time and memory: what of it a model allows, tried on real pairs."""

import contextlib

import torch

from ddp_utils import UserError, distributed, logps
from ddp_utils.logps import Pair

# what a model may raise that does not know packed rows, or does attention in its own way
REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def self_test(scorer, pairs, layout, world) -> list[str]:
    """Choose head and layout of this model by trying them on real pairs; returns what to tell.

    The head on the two shortest rows, since full logits are large; the layout ("auto", "shared" or
    "separate") on the shortest and the two longest ones, where windows show.
    Raises UserError if the layout was insisted upon and cannot be had.
    """
    pairs = sorted(pairs, key=lambda pair: pair.num_tokens)
    with logps.dropout_off(scorer):
        lines = [check_head(scorer, pairs[:2], world.device)]
        if layout != "separate":
            lines.append(check_layout(scorer, [pairs[0], *pairs[-2:]], world.device))
    # one rank's doubt is everyone's: ranks in two layouts would wait for each other for ever
    doubts = torch.tensor([scorer.own_head, not scorer.shared], device=world.device)
    own_head, separate = distributed.all_sum(doubts.float(), world).tolist()
    scorer.own_head = own_head > 0
    scorer.set_layout(shared=separate == 0)
    if layout == "shared" and separate:
        raise UserError(f"--layout shared: {lines[1] or 'not on every rank'}; give auto")
    return [line for line in lines if line]


@torch.no_grad()
def check_head(scorer, pairs, device):
    """Compare our log-probs with the model's own logits; fall back to these if they differ.

    Ours come from a padded batch, its own from one row at a time.
    Returns one line if it fell back, else None.
    """
    batch = logps.collate(pairs, device)

    def ours():
        scorer.own_head = False
        return scorer.token_logps(batch)

    def own_of_each_row():
        scorer.own_head = True
        rows = [(pair.prompt, pair.chosen) for pair in pairs]
        rows += [(pair.prompt, pair.rejected) for pair in pairs]
        alone = [logps.collate([Pair(*row, [0], "", "")], device) for row in rows]
        return torch.cat([scorer.token_logps(row)[:-1] for row in alone])

    backbone, head = scorer.parts()
    if head is None or backbone is scorer.unwrap():
        reason = "it has no separate output layer"
    else:
        reason = _difference(scorer, pairs, device, ours, own_of_each_row)
    scorer.own_head = reason is not None
    return reason and f"the head is not a plain layer ({reason}): using the model's full logits"


@torch.no_grad()
def check_layout(scorer, pairs, device):
    """Share the prompt if this model's log-probs of a packed row equal those of separate rows.

    Returns one line if they differ or it refuses, else None.
    """

    layers = scorer.unwrap().config.get_text_config().num_hidden_layers

    def packed():
        scorer.set_layout(shared=True)
        batch = scorer.collate(pairs, device)
        token_logps = scorer.token_logps(batch)
        calls = batch.layout["packing"].calls
        if calls != layers:
            raise TypeError(f"{calls} of {layers} layers let their attention be steered")
        return token_logps

    def separate():
        scorer.set_layout(shared=False)
        return scorer.token_logps(scorer.collate(pairs, device))

    try:
        reason = _difference(scorer, pairs, device, separate, packed)
        scorer.set_layout(shared=reason is None)
    except REFUSALS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        scorer.set_layout(shared=False)
    return reason and f"the prompt cannot be shared ({reason}): separate rows"


def _difference(scorer, pairs, device, one, other):
    """What differs between two ways to score the same tokens; None if nothing does.

    Twice: as the model is, and with logits blown up to 100, where a soft-cap, a scaling or an
    attention that a small model does not feel yet comes to light. In half precision rounding
    alone moves single tokens, so there the root mean square counts.
    """
    exact = scorer.precision == torch.float32
    head = scorer.parts()[1]
    first = torch.tensor([pairs[0].prompt], device=device)
    with torch.autocast(first.device.type, scorer.autocast, enabled=bool(scorer.autocast)):
        surer = 100 / scorer.model(input_ids=first).logits.abs().max().item()
    for factor, bound in ((1.0, 1e-3 if exact else 0.1), (surer, 1e-2 if exact else 3.0)):
        with amplified(head, factor) if head else contextlib.nullcontext():
            gap = one() - other()  # [N]
        far = (gap.abs().max() if exact else gap.square().mean().sqrt()).item()
        if not far <= bound:
            return f"log-probs of a token differ by {far:.3g} nats, logits x {factor:.3g}"
    return None


@contextlib.contextmanager
def amplified(head, factor):
    """Multiply the head's output, as if the model were surer of itself."""
    handle = head.register_forward_hook(lambda _module, _inputs, output: output * factor)
    try:
        yield
    finally:
        handle.remove()
