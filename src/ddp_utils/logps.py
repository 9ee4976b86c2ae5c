"""Pairs -> summed log-probs, exactly, and every token paid for once.

B pairs, R rows, T tokens, N scored tokens, D width, V words. A pair is one stretch of a packed
row (layout "shared", see fast/shared_prefix.py), or two rows that repeat the prompt ("separate",
for models whose attention cannot be steered). A response's last token is only a target: not fed.
"""

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_utils import distributed, models
from ddp_utils.data import digest_of_rows
from ddp_utils.distributed import to_device
from ddp_utils.policy import ScorerModule
from ddp_utils.sampler import MicroBatch, assign_micro_batches

CHUNK = {"cpu": 256}  # tokens whose logits are held at once: with fewer, products get slow;
WIDE_CHUNK = 1024  # a GPU wants more, and has the memory


class ModelInput(NamedTuple):
    """Token ids of one sequence, and where the predictions of its response are."""

    input_ids: list[int]  # without the response's last token, which is only a target
    hidden_index: Sequence[int]  # for each target, the position whose hidden state predicts it


class PackedInput(NamedTuple):
    """Token ids of one example as a part of a packed row: [prompt | chosen | rejected]."""

    input_ids: list[int]
    position_ids: list[int]
    span: tuple[int, int, int]  # numbers of prompt, chosen and rejected tokens in input_ids
    hidden_index: list[Sequence[int]]  # as in ModelInput, for each response


class Example(Protocol):
    """One row of training data as token ids: a preference pair, an SFT text or a trajectory.

    It has one or two responses. The last token of a response is a target, but never an input.
    """

    @property
    def location(self) -> str:
        """The row's place in the data, `file:line`."""

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response; with two responses, of the longer sequence."""

    @property
    def targets(self) -> list[list[int]]:
        """The tokens whose log-probs are computed, for each response."""

    def num_forward_tokens(self, shared: bool) -> int:
        """Return the number of tokens that the model processes.

        shared: two responses share one copy of their prompt.
        """

    def to_padded(self) -> list[ModelInput]:
        """Return the sequences of a padded batch, one per response."""

    def to_packed(self) -> PackedInput:
        """Return the example as a part of a packed row."""


class Pair(NamedTuple):
    """Token ids of one preference. Chosen and rejected end with the end-of-turn token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    location: str  # file:line
    text: str  # the prompt as it is in the data file, without the chat template
    expected: str = ""  # the chosen response as it is in the data file

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def targets(self) -> list[list[int]]:
        return [self.chosen, self.rejected]

    @property
    def lengths(self) -> dict[str, int]:
        """Numbers of tokens whose means are in the data report."""
        return {name: len(getattr(self, name)) for name in ("prompt", "chosen", "rejected")}

    def num_forward_tokens(self, shared: bool) -> int:
        prompts = 1 if shared else 2
        return prompts * len(self.prompt) + len(self.chosen) - 1 + len(self.rejected) - 1

    def to_padded(self) -> list[ModelInput]:
        first = len(self.prompt) - 1  # the prompt's last token predicts the first target
        sequences = []
        for response in self.targets:
            hidden_index = range(first, first + len(response))
            sequences.append(ModelInput(self.prompt + response[:-1], hidden_index))
        return sequences

    def to_packed(self) -> PackedInput:
        p, c, r = len(self.prompt), len(self.chosen) - 1, len(self.rejected) - 1
        input_ids = self.prompt + self.chosen[:-1] + self.rejected[:-1]
        position_ids = [*range(p + c), *range(p, p + r)]  # both responses follow the prompt
        of_chosen = range(p - 1, p + c)
        of_rejected = [p - 1, *range(p + c, p + c + r)]
        return PackedInput(input_ids, position_ids, (p, c, r), [of_chosen, of_rejected])


def pack_single(sequence: ModelInput) -> PackedInput:
    """Return a sequence with only one response as a part of a packed row."""
    length = len(sequence.input_ids)
    return PackedInput(
        sequence.input_ids, [*range(length)], (length, 0, 0), [sequence.hidden_index]
    )


class Batch(NamedTuple):
    """B pairs as token ids, and whose log-probs are asked for; S sides: a text has one."""

    ids: torch.Tensor  # [R, T]
    hidden_index: torch.Tensor  # [N] places among the R * T hidden states: each predicts ...
    targets: torch.Tensor  # [N] ... this token
    cells: torch.Tensor  # [2, N] its response (all chosen, then all rejected) and place in it
    tokens: torch.Tensor  # [S, B] scored tokens of the chosen and the rejected responses
    longest: int  # of these
    layout: dict  # what the model must be told of a packed row


def collate(pairs, device="cpu", shared=False) -> Batch:
    """B pairs as one packed row; or as a row a side padded on the right, where no token looks.

    So no mask is needed, and attention keeps its fast path. Padding is by length, not by token id.
    Texts (sft/instruction_data.py) are pairs with one side.
    """

    def put(numbers):  # numpy reads a list in a third of torch's time
        return to_device(np.array(numbers), device)

    if shared:
        from ddp_utils.fast import shared_prefix

        ids, hidden_index, positions, packing = shared_prefix.pack(pairs, torch.device(device))
        layout = {"position_ids": put([positions]), "packing": packing}
    else:
        ids, hidden_index = _padded(pairs)
        layout = {}
    responses = by_side([pair.targets for pair in pairs])
    lengths = [len(response) for response in responses]
    rows = []
    columns: list[int] = []
    targets = []
    for row, response in enumerate(responses):
        rows += [row] * len(response)
        columns += range(len(response))
        targets += response
    tokens = put(lengths).view(-1, len(pairs))
    cells = put([rows, columns])
    return Batch(put(ids), put(hidden_index), put(targets), cells, tokens, max(lengths), layout)


def by_side(table):
    """B lists of S things -> all of the first side, then all of the second."""
    return list(itertools.chain(*zip(*table, strict=True)))


def _padded(pairs):
    """Token ids [S * B, T], padded with 0, and scored places."""
    sequences = by_side([pair.to_padded() for pair in pairs])
    width = max(len(sequence.input_ids) for sequence in sequences)
    ids = []
    hidden_index = []
    for row, sequence in enumerate(sequences):
        ids.append(sequence.input_ids + [0] * (width - len(sequence.input_ids)))
        hidden_index += [row * width + position for position in sequence.hidden_index]
    return ids, hidden_index


class Scorer(ScorerModule):
    """A causal language model that answers with log-probs: the only thing that is ever wrapped."""

    def __init__(self, model, autocast=None):
        super().__init__()
        self.model = model
        self.autocast = autocast  # torch.bfloat16, torch.float16 or None
        self.own_head = False  # True: take the model's logits as they are (see fast/__init__.py)
        self.max_tokens = math.inf  # of one forward; a row with more is alone
        self.shared = False  # True: pairs as stretches of packed rows (see fast/__init__.py)
        self.attention = model.config._attn_implementation  # of separate rows and of generation
        self.gathered = contextlib.nullcontext  # of a layer whose weights are used by themselves

    @property
    def precision(self):
        """What it computes in."""
        return self.autocast or next(self.model.parameters()).dtype

    def forward(self, batch):
        """Summed log-probs of chosen and rejected, or of a text alone, [B] each, in fp32."""
        token_logps = self.token_logps(batch)  # [N]
        table = token_logps.new_zeros(batch.tokens.numel(), batch.longest)
        table = table.index_put(tuple(batch.cells), token_logps).view(*batch.tokens.shape, -1)
        return tuple(side.sum(-1) for side in table)

    def token_logps(self, batch):
        """Log-probs of the scored tokens, [N] in fp32."""
        with torch.autocast(batch.ids.device.type, self.autocast, enabled=bool(self.autocast)):
            if self.own_head:
                logits = self.model(input_ids=batch.ids, **batch.layout).logits.flatten(0, 1)
                return picked_logps(logits.index_select(0, batch.hidden_index), batch.targets)
            backbone, head = self.parts()
            output = backbone(input_ids=batch.ids, use_cache=False, **batch.layout)
            # [N, D]; not an index in brackets, whose backward sorts the places
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.hidden_index)
            with self.gathered(head):
                return head_logps(head, hidden, batch.targets)

    def unwrap(self):
        """The language model without peft around it."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def parts(self):
        """The transformer and its output layer, with whatever adapters stand in them."""
        return self.unwrap().base_model, self.unwrap().get_output_embeddings()

    def set_layout(self, shared):
        """From now on, pairs are stretches of packed rows, or separate rows."""
        self.shared = shared
        attention = self.attention
        if shared:
            from ddp_utils.fast import shared_prefix

            attention = shared_prefix.NAME
        self.unwrap().set_attn_implementation(attention)

    def collate(self, pairs, device):
        """The batch of these pairs in this scorer's layout."""
        return collate(pairs, device, self.shared)

    def micro_batches(self, rows, examples, world, micro_batch_size) -> list[MicroBatch]:
        """Return this rank's micro-batches of some rows of `examples`, by the tokens processed."""
        lengths = {row: examples[row].num_forward_tokens(self.shared) for row in rows}
        return assign_micro_batches(
            rows, lengths, world, micro_batch_size, not self.shared, self.max_tokens
        )

    @contextlib.contextmanager
    def generating(self, device):
        """Within it the model continues texts: separate rows, in its own precision, in eval().

        Nothing is trained here, and checkpointing would do without the cache.
        """
        shared = self.shared
        self.set_layout(shared=False)
        self.model.eval()
        try:
            with torch.autocast(device.type, self.autocast, enabled=bool(self.autocast)):
                yield
        finally:
            self.model.train()
            self.set_layout(shared)

    def example(self, device):
        """The smallest batch there is: one pair of one-token responses."""
        return self.collate([Pair([0], [0], [0], "", "")], device)


def picked_logps(logits, targets):
    """log softmax of [N, V] logits at [N] targets, in fp32 -> [N]."""
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def head_logps(head, hidden, targets):
    """The same from hidden states [N, D], a chunk of logits at a time.

    A frozen head's gradient is known in the forward. Else the backward makes the logits again, but
    for the last chunk, whose turn is first: it would need their memory at once.
    """
    size = CHUNK.get(hidden.device.type, WIDE_CHUNK)
    trained = any(parameter.requires_grad for parameter in head.parameters())
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) is nn.Linear and not (trained or hooked) and hidden.requires_grad:
        from ddp_utils.fast.frozen_head import FrozenHead

        return FrozenHead.apply(hidden, targets, head.weight, head.bias, size)

    def part(states, labels):
        return picked_logps(head(states), labels)

    *chunks, last = zip(hidden.split(size), targets.split(size), strict=True)
    token_logps = [checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat([*token_logps, part(*last)])


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
def score(scorer, pairs, world, budget, poll=lambda: None):
    """Log-probs of all pairs as they are now, shared out over the ranks: [number of pairs, 2]."""
    micro_batches = scorer.micro_batches(range(len(pairs)), pairs, world, budget)
    scores = []
    with dropout_off(scorer):
        for micro_batch in micro_batches:
            poll()  # stop between two batches, if asked to
            batch = scorer.collate([pairs[i] for i in micro_batch.index], world.device)
            scores.append(torch.stack(scorer(batch), -1))  # [B, 2]
    return distributed.gather_by_index(len(pairs), micro_batches, scores, world)


def fingerprint(scorer, data, names, device) -> dict:
    """What the log-probs of these pairs depend on: their tokens, the model's files, the numerics.

    names: folders or hub names of the model and its adapter.
    """
    # forwards that fast/memory_efficient.py has replaced: see fast/memory_efficient.py
    replaced = sum("forward" in vars(module) for module in scorer.model.modules())
    facts = {
        "dtype": next(scorer.model.parameters()).dtype,
        "autocast": scorer.autocast,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": device.type,
        "prompt shared": scorer.shared,
        "full logits": scorer.own_head,
        "replaced forwards": replaced,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for what, name in zip(("model", "adapter"), names, strict=False):
        facts[what] = models.digest_of_model(name, scorer.unwrap().config) if name else ""
    for split, pairs in data.items():
        facts[f"rows of {split}"] = digest_of_rows(pairs)
    return {name: str(value) for name, value in facts.items()}
