"""Summed log-probabilities of the responses of preference pairs, SFT texts and trajectories.

A batch of pairs is one packed row in which each prompt occurs once (fast/shared_prefix.py), or,
for models whose attention does not support that, two padded rows per pair.

B examples, S responses per example, R rows, T tokens, N target tokens, D width, V vocabulary size.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_utils import distributed
from ddp_utils.distributed import World, to_device
from ddp_utils.policy import ScorerModule
from ddp_utils.sampler import MicroBatch, assign_micro_batches

# number of tokens whose logits exist at the same time: with fewer, matrix products get slow
CHUNK = {"cpu": 256}
WIDE_CHUNK = 1024  # on a GPU

T = TypeVar("T")
Examples = Mapping[int, "Example"] | Sequence["Example"]  # row -> example


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
    """B examples as tensors. S: responses per example; N: target tokens of all responses.

    Responses are in the order: first responses (chosen) of all examples, then second ones.
    """

    ids: Tensor  # [R, T]
    hidden_index: Tensor  # [N] into the R * T hidden states: each predicts a target
    targets: Tensor  # [N] token ids
    cells: Tensor  # [2, N] of each target: number of its response, and its position there
    tokens: Tensor  # [S, B] number of targets of each response
    longest: int  # the largest of these
    model_kwargs: dict[str, Any]  # further arguments of the model, for a packed row


def collate(
    examples: Sequence[Example], device: torch.device | str = "cpu", shared: bool = False
) -> Batch:
    """Return B examples as one packed row, or as S * B right-padded rows.

    Causal attention never sees the padding, so no mask is needed and attention keeps its fast path.

    shared: pack the examples, each with one copy of its prompt.
    """

    def put(numbers) -> Tensor:  # numpy reads a list in a third of torch's time
        return to_device(np.array(numbers), device)

    if shared:
        from ddp_utils.fast import shared_prefix

        ids, hidden_index, position_ids, spans = _pack(examples)
        packing = shared_prefix.Packing(spans, torch.device(device))
        model_kwargs = {"position_ids": put(position_ids), "packing": packing}
    else:
        ids, hidden_index = _pad(examples)
        model_kwargs = {}
    responses = by_response([example.targets for example in examples])
    lengths = [len(response) for response in responses]
    rows: list[int] = []
    columns: list[int] = []
    for row, length in enumerate(lengths):
        rows += [row] * length
        columns += range(length)
    return Batch(
        ids=put(ids),
        hidden_index=put(hidden_index),
        targets=put(list(itertools.chain(*responses))),
        cells=put([rows, columns]),
        tokens=put(lengths).view(-1, len(examples)),
        longest=max(lengths),
        model_kwargs=model_kwargs,
    )


def by_response(table: Sequence[Sequence[T]]) -> list[T]:
    """Turn B lists of S items into one list: the first items of all lists, then the second ones."""
    return list(itertools.chain(*zip(*table, strict=True)))


def _pad(examples: Sequence[Example]) -> tuple[list[list[int]], list[int]]:
    """Return token ids [S * B, T], padded with 0, and the hidden_index of all targets."""
    sequences = by_response([example.to_padded() for example in examples])
    width = max(len(sequence.input_ids) for sequence in sequences)
    ids = []
    hidden_index = []
    for row, sequence in enumerate(sequences):
        ids.append(sequence.input_ids + [0] * (width - len(sequence.input_ids)))
        hidden_index += [row * width + position for position in sequence.hidden_index]
    return ids, hidden_index


def _pack(examples: Sequence[Example]) -> tuple[list[list[int]], list[int], list[list[int]], list]:
    """Return token ids [1, T], hidden_index [N], position ids [1, T] and spans of a packed row."""
    ids: list[int] = []
    position_ids: list[int] = []
    spans = []
    hidden_index = []  # for each example, for each response
    for example in examples:
        packed = example.to_packed()
        start = len(ids)
        of_example = []
        for positions in packed.hidden_index:
            of_example.append([start + position for position in positions])
        hidden_index.append(of_example)
        ids += packed.input_ids
        position_ids += packed.position_ids
        spans.append(packed.span)
    flat_index = list(itertools.chain(*by_response(hidden_index)))
    return [ids], flat_index, [position_ids], spans


class Scorer(ScorerModule):
    """A causal language model that returns log-probs. This module is wrapped by DDP or FSDP."""

    def __init__(self, model: Any, autocast: torch.dtype | None = None):
        super().__init__()
        self.model = model
        self.autocast = autocast  # torch.bfloat16, torch.float16 or None
        self.full_logits = False  # use the model's logits of all tokens, see fast/__init__.py
        self.max_tokens = math.inf  # of one micro-batch; a longer example gets one of its own
        self.shared = False  # pack the examples of a batch, see fast/__init__.py
        self.attention = model.config._attn_implementation  # of padded rows and of generation
        self.gathered = contextlib.nullcontext  # a context in which a sharded layer is complete

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the summed log-probs of the first and second responses, S tensors [B] in fp32."""
        token_logps = self.token_logps(batch)  # [N]
        table = token_logps.new_zeros(batch.tokens.numel(), batch.longest)
        table = table.index_put(tuple(batch.cells), token_logps)
        responses = table.view(*batch.tokens.shape, -1)  # [S, B, longest]
        return tuple(response.sum(-1) for response in responses)

    def token_logps(self, batch: Batch) -> Tensor:
        """Return the log-probs of the target tokens, [N] in fp32."""
        with self.autocasting(batch.ids.device):
            if self.full_logits:
                logits = self.model(input_ids=batch.ids, **batch.model_kwargs).logits
                predicting = logits.flatten(0, 1).index_select(0, batch.hidden_index)  # [N, V]
                return picked_logps(predicting, batch.targets)
            backbone, head = self.backbone_and_head()
            output = backbone(input_ids=batch.ids, use_cache=False, **batch.model_kwargs)
            # [N, D]; index_select, because the backward of hidden[index] sorts the index
            hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.hidden_index)
            with self.gathered(head):
                return head_logps(head, hidden, batch.targets)

    def autocasting(self, device: torch.device) -> torch.autocast:
        """Return the context in which the model computes."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    def unwrap(self) -> Any:
        """Return the transformers model, without peft's wrapper."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "peft_config") else model

    def backbone_and_head(self) -> tuple[Any, Any]:
        """Return the transformer and its output layer, with the adapters inside them."""
        return self.unwrap().base_model, self.unwrap().get_output_embeddings()

    def set_layout(self, shared: bool) -> None:
        """Pack the examples of the following batches, or pad them."""
        self.shared = shared
        attention = self.attention
        if shared:
            from ddp_utils.fast import shared_prefix

            attention = shared_prefix.NAME
        self.unwrap().set_attn_implementation(attention)

    def collate(self, examples: Sequence[Example], device: torch.device | str) -> Batch:
        """Return the batch of these examples in this scorer's layout."""
        return collate(examples, device, self.shared)

    def micro_batches(
        self, rows: Collection[int], examples: Examples, world: World, size: int
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches, of up to `size` rows, of some rows of `examples`."""
        lengths = {row: examples[row].num_forward_tokens(self.shared) for row in rows}
        padded = not self.shared
        return assign_micro_batches(rows, lengths, world, size, padded, self.max_tokens)

    @contextlib.contextmanager
    def generating(self, device: torch.device) -> Iterator[None]:
        """Prepare the model for generation: padded rows, eval mode, its own precision.

        With gradient checkpointing in training mode, transformers would not use the cache.
        """
        shared = self.shared
        self.set_layout(shared=False)
        self.model.eval()
        try:
            with self.autocasting(device):
                yield
        finally:
            self.model.train()
            self.set_layout(shared)

    def example(self, device: torch.device) -> Batch:
        """Return the smallest possible batch: one pair of one-token responses."""
        return self.collate([Pair([0], [0], [0], "", "")], device)

    def numerics(self, device: torch.device) -> dict[str, str]:
        """Return what log-probs depend on besides model and data: precision, kernels, versions."""
        facts = {
            "dtype": next(self.model.parameters()).dtype,
            "autocast": self.autocast,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "device": device.type,
            "prompt shared": self.shared,
            "full logits": self.full_logits,
            "memory-efficient modules": sum(
                hasattr(m, "is_memory_efficient") for m in self.model.modules()
            ),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return {name: str(value) for name, value in facts.items()}


def picked_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log softmax, in fp32, of logits [N, V] at targets [N], [N]."""
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def head_logps(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probs [N] of targets [N] from hidden states [N, D].

    Only the logits of one chunk of tokens exist at a time. If the head is frozen, the gradient is
    computed in the forward pass. Otherwise the backward pass recomputes the logits of each chunk
    but the last: that one is needed first, when nothing else occupies its memory.
    """
    size = CHUNK.get(hidden.device.type, WIDE_CHUNK)
    is_trained = any(parameter.requires_grad for parameter in head.parameters())
    has_hooks = head._forward_hooks or head._forward_pre_hooks
    if type(head) is nn.Linear and not is_trained and not has_hooks and hidden.requires_grad:
        from ddp_utils.fast.frozen_head import FrozenHead

        return FrozenHead.apply(hidden, targets, head.weight, head.bias, size)

    def of_chunk(states: Tensor, labels: Tensor) -> Tensor:
        return picked_logps(head(states), labels)

    *chunks, last = zip(hidden.split(size), targets.split(size), strict=True)
    token_logps = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.cat([*token_logps, of_chunk(*last)])


@contextlib.contextmanager
def dropout_off(module: nn.Module) -> Iterator[None]:
    """Set p = 0 in every dropout layer.

    eval() would do more: it also disables gradient checkpointing.
    """
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
def score(
    scorer: Scorer,
    examples: Sequence[Example],
    world: World,
    micro_batch_size: int,
    stop_if_requested: Callable[[], None] = lambda: None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> Tensor:
    """Return the summed log-probs of all examples, without dropout, [number of examples, S].

    The examples are split over the ranks; every rank returns the complete table.

    rows: the examples to score, such as Plan.rows_used(); those of the others are NaN.
    """
    used = np.arange(len(examples)) if rows is None else np.asarray(rows, dtype=int)
    micro_batches = scorer.micro_batches(used.tolist(), examples, world, micro_batch_size)
    scores = []
    with dropout_off(scorer):
        for micro_batch in micro_batches:
            stop_if_requested()
            batch = scorer.collate([examples[row] for row in micro_batch.index], world.device)
            scores.append(torch.stack(scorer(batch), -1))  # [B, S]
    if not scores:
        return torch.full((len(examples), 2), torch.nan, device=world.device)
    table = distributed.gather_by_index(len(examples), micro_batches, scores, world)
    table[np.setdiff1d(np.arange(len(examples)), used)] = torch.nan
    return table
