"""Pairs -> summed log-probs, exactly, without ever holding the logits of a whole row.

B pairs, R = 2B rows (all chosen, then all rejected), T tokens, N scored tokens, D width, V words.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_utils import UserError, dist
from ddp_utils.batching import share

IGNORE = -100
CHUNK = 2**25  # logits of one chunk: 128 MB in fp32


class Batch(NamedTuple):
    """B pairs as 2B rows. The last token of a response is only a target, so it is not fed.

    Rows are padded on the right, where a causal model's tokens never look: no mask is needed,
    and attention keeps its fast path. Padding is by length, never by token id.
    """

    ids: torch.Tensor  # [R, T]
    targets: torch.Tensor  # [R, T] the next token where it belongs to the response, else IGNORE

    @property
    def tokens(self):
        """Scored tokens of chosen and rejected, [B] each."""
        return (self.targets != IGNORE).sum(-1).chunk(2)


def collate(pairs, device="cpu") -> Batch:
    """Pad B pairs to one length."""
    rows = [(pair.prompt, pair.chosen) for pair in pairs]
    rows += [(pair.prompt, pair.rejected) for pair in pairs]
    width = max(len(prompt) + len(response) for prompt, response in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    targets = torch.full_like(ids, IGNORE)
    for row, (prompt, response) in enumerate(rows):
        text = torch.tensor(prompt + response)
        ids[row, : len(text) - 1] = text[:-1]
        targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    if torch.device(device).type == "cuda":
        ids, targets = ids.pin_memory(), targets.pin_memory()
    return Batch(ids.to(device, non_blocking=True), targets.to(device, non_blocking=True))


class Scorer(nn.Module):
    """A causal language model that answers with log-probs: the only thing that is ever wrapped."""

    def __init__(self, model, autocast=None):
        super().__init__()
        self.model = model
        self.autocast = autocast  # torch.bfloat16, torch.float16 or None
        self.own_head = False  # True: take the model's logits as they are (see check_head)
        self.precision = autocast or next(model.parameters()).dtype

    def forward(self, batch):
        """Summed log-probs of chosen and rejected, [B] each, in fp32."""
        with torch.autocast(batch.ids.device.type, self.autocast, enabled=bool(self.autocast)):
            scored = batch.targets != IGNORE  # [R, T]
            token_logps = self._token_logps(batch, scored, batch.targets[scored])  # [N]
        table = torch.zeros(scored.shape, dtype=torch.float32, device=scored.device)
        return table.masked_scatter(scored, token_logps).sum(-1).chunk(2)

    def _token_logps(self, batch, scored, targets):
        if self.own_head:
            return picked_logps(self.model(input_ids=batch.ids).logits[scored], targets)
        backbone, head = self.parts()
        hidden = backbone(input_ids=batch.ids, use_cache=False).last_hidden_state  # [R, T, D]
        return chunked_logps(head, hidden[scored], targets)

    def parts(self):
        """The transformer and its output layer, with whatever adapters stand in them."""
        bare = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        return bare.base_model, bare.get_output_embeddings()

    def generate(self, ids, **options):
        """Sample continuations with transformers' own generate.

        In eval(): nothing is trained here, and checkpointing would do without the cache.
        """
        self.model.eval()
        with torch.autocast(ids.device.type, self.autocast, enabled=bool(self.autocast)):
            found = self.model.generate(ids, **options)
        self.model.train()
        return found

    def example(self, device):
        """The smallest batch there is: one pair of one-token responses."""
        ids = torch.zeros(2, 1, dtype=torch.long, device=device)
        return Batch(ids, torch.zeros_like(ids))


def picked_logps(logits, targets):
    """log softmax of [N, V] logits at [N] targets, in fp32 -> [N]."""
    logits = logits.float()
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def chunked_logps(head, hidden, targets):
    """The same from hidden states [N, D], a chunk at a time: the backward makes logits again."""
    words = head.weight.shape[0] if hasattr(head, "weight") else head.out_features

    def part(states, labels):
        return picked_logps(head(states), labels)

    chunks = zip(*(t.split(max(1, CHUNK // words)) for t in (hidden, targets)), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([part(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks])


@contextlib.contextmanager
def amplified(head, factor):
    """Multiply the head's output, as if the model were surer of itself."""
    handle = head.register_forward_hook(lambda _module, _inputs, output: output * factor)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def check_head(scorer, pairs, device):
    """Compare our log-probs with the model's own logits; fall back to these if they differ.

    Ours come from the padded batch, its own from one row at a time. Twice: as the model is, and
    with logits blown up to 100, where a soft-cap or a scaling that a small model does not feel
    yet comes to light. Returns one line if it fell back, else None.
    """
    batch = collate(pairs, device)
    backbone, head = scorer.parts()
    exact = scorer.precision == torch.float32
    reason = None
    if head is None or backbone is head:
        reason = "it has no separate output layer"
    else:
        surer = 100 / scorer.model(input_ids=batch.ids).logits.abs().max().item()
        for factor, bound in ((1.0, 1e-3 if exact else 0.1), (surer, 1e-2 if exact else 3.0)):
            with amplified(head, factor):
                ours, own = _both_ways(scorer, batch)
            gap = (ours - own).abs().max().item()
            if not gap <= bound:
                reason = f"log-probs of a token differ by {gap:.3g} nats, logits x {factor:.3g}"
    scorer.own_head = reason is not None
    return reason and f"the head is not a plain layer ({reason}): using the model's full logits"


def _both_ways(scorer, batch):
    """Log-probs of the scored tokens, [N] each: by our head, by the model's logits row by row."""

    def token_logps(part, own_head):
        scored = part.targets != IGNORE
        scorer.own_head = own_head
        with torch.autocast(part.ids.device.type, scorer.autocast, bool(scorer.autocast)):
            return scorer._token_logps(part, scored, part.targets[scored])

    own = []
    for ids, targets in zip(*batch, strict=True):
        length = int(torch.nonzero(targets != IGNORE).max()) + 1
        own.append(token_logps(Batch(ids[None, :length], targets[None, :length]), True))
    return token_logps(batch, False), torch.cat(own)


@contextlib.contextmanager
def dropout_off(module):
    """p = 0 in every dropout layer; not eval(), which would switch gradient checkpointing off."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]
    before = [layer.p for layer in layers]
    try:
        for layer in layers:
            layer.p = 0.0
        yield
    finally:
        for layer, p in zip(layers, before, strict=True):
            layer.p = p


@torch.no_grad()
def score(scorer, pairs, world, budget):
    """Log-probs of all pairs as they are now, shared out over the ranks: [number of pairs, 2]."""
    lengths = [pair.tokens for pair in pairs]
    parts = share(range(len(pairs)), lengths, world, budget)
    with dropout_off(scorer):
        found = [
            torch.stack(scorer(collate([pairs[i] for i in part.index], world.device)), -1)
            for part in parts
        ]
    return dist.by_row(len(pairs), parts, found, world)


def noise(dtype, tokens):
    """How far, in nats, two exact scorings of `tokens` tokens [B] may differ by rounding alone.

    fp32: 1e-3 a response. bf16 and fp16 round logits of about 10 to 2^-6; errors of many tokens
    add up like their square root. Measured in bf16 on 20 real and 100 demo pairs on a CPU, alone
    against in a batch: at most 0.2 of this.
    """
    if dtype == torch.float32:
        return torch.full_like(tokens, 1e-3, dtype=torch.float32)
    return 0.05 * tokens.float().sqrt()


def check_reference(now, reference, bound, wheres):
    """Step 0: the policy must be its own reference. now, reference [B, 2], bound [B] in nats.

    Raises UserError naming the first pair whose log-probs differ by more.
    """
    gap = (now - reference).abs().amax(-1)  # [B]
    for index in torch.nonzero(~(gap <= bound)).flatten().tolist():
        raise UserError(
            f"{wheres[index]}: before the first step the policy's log-prob differs from the "
            f"reference's by {gap[index].item():.3g} nats (at most {bound[index].item():.3g}); "
            "is dropout on, or was the reference scored in another precision?"
        )
