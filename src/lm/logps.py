"""Summed log-probabilities of the responses of preference pairs, SFT texts and trajectories.

A batch of pairs is one packed row in which each prompt occurs once (fast/shared_prefix.py), or,
for models whose attention does not support that, two padded rows per pair.

B examples, S responses per example, R rows, T tokens, N target tokens, D width, V vocabulary size.
"""

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig

from ddp_utils import distributed
from ddp_utils.distributed import World, to_device
from ddp_utils.policy import ScorerModule
from ddp_utils.sampler import MicroBatch, assign_micro_batches
from ddp_utils.terminal import Phase
from lm.fast import shared_prefix
from lm.token_rows import Fields, Rows

# number of tokens whose logits exist at the same time: with fewer, matrix products get slow
CHUNK = {"cpu": 256}
WIDE_CHUNK = 1024  # on a GPU

Device = torch.device | str
Examples = Mapping[int, "Example"] | Sequence["Example"]  # row -> example


class Example(Protocol):
    """One row of training data as token ids: a preference pair, an SFT text or a trajectory.

    It has one or two responses. The last token of a response is a target, but never an input.
    """

    @property
    def location(self) -> str:
        """The row's place in the data, `file:line`."""

    @property
    def prompt(self) -> list[int]:
        """Token ids before the responses; at least one."""

    @property
    def responses(self) -> list[list[int]]:
        """Token ids of each response."""

    @property
    def targets(self) -> list[Sequence[int]]:
        """For each response, the indices of the tokens whose log-probs are computed."""

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response; with two responses, of the longer sequence."""

    def num_forward_tokens(self, shared: bool) -> int:
        """Return the number of tokens that the model processes.

        shared: two responses share one copy of their prompt.
        """


class Pair(NamedTuple):
    """Token ids of one preference. Chosen and rejected end with the end-of-turn token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    location: str  # file:line
    text: str  # the prompt as it is in the data file, without the chat template
    expected: str = ""  # the chosen response as it is in the data file
    extra: Fields = Fields()  # the fields that --extra_fields names, for a loss of one's own

    @property
    def responses(self) -> list[list[int]]:
        return [self.chosen, self.rejected]

    @property
    def targets(self) -> list[Sequence[int]]:
        return [range(len(self.chosen)), range(len(self.rejected))]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    @property
    def lengths(self) -> dict[str, int]:
        """Numbers of tokens whose means are in the data report."""
        return {name: len(getattr(self, name)) for name in ("prompt", "chosen", "rejected")}

    def num_forward_tokens(self, shared: bool) -> int:
        lengths = len(self.prompt), len(self.chosen), len(self.rejected)
        return self.forward_tokens(*lengths, shared)

    @staticmethod
    def forward_tokens(prompt: Any, chosen: Any, rejected: Any, shared: bool) -> Any:
        """Return num_forward_tokens() from the lengths of the lists, numbers or arrays of them."""
        return (1 if shared else 2) * prompt + chosen - 1 + rejected - 1


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


def collate(examples: Sequence[Example], device: Device = "cpu", shared: bool = False) -> Batch:
    """Return B examples as one packed row, or as S * B right-padded rows.

    Causal attention never sees the padding, so no mask is needed and attention keeps its fast path.

    shared: pack the examples, each with one copy of its prompt.
    """

    def put(numbers: list) -> Tensor:  # numpy reads a list in a third of torch's time
        return to_device(np.array(numbers), device)

    model_kwargs = {}
    if shared:
        ids, starts, position_ids, spans = _pack(examples)
        packing = shared_prefix.Packing(spans, torch.device(device))
        model_kwargs = {"position_ids": put(position_ids), "packing": packing}
    else:
        ids, starts = _pad(examples)
    hidden_index: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    responses = by_response([example.responses for example in examples])
    index = by_response([example.targets for example in examples])
    for row, (prompt_end, start) in enumerate(starts):
        # the prompt's last token predicts the first token of the response
        predicting = [prompt_end, *range(start, start + len(responses[row]) - 1)]
        hidden_index += [predicting[i] for i in index[row]]
        targets += [responses[row][i] for i in index[row]]
        rows += [row] * len(index[row])
        columns += range(len(index[row]))
    lengths = put([len(indices) for indices in index]).view(-1, len(examples))
    tensors = put(ids), put(hidden_index), put(targets), put([rows, columns]), lengths
    return Batch(*tensors, max(map(len, index)), model_kwargs)


def by_response(table: Sequence[Sequence[Any]]) -> list[Any]:
    """Turn B lists of S items into one list: the first items of all lists, then the second ones."""
    return list(itertools.chain(*zip(*table, strict=True)))


def _pad(examples: Sequence[Example]) -> tuple[list, list[tuple[int, int]]]:
    """Return token ids [S * B, T], padded with 0.

    Also return, for each response, where the prompt's last and the response's first token are.
    """
    responses = by_response([example.responses for example in examples])
    prompts = by_response([[example.prompt] * len(example.responses) for example in examples])
    rows = [prompt + response[:-1] for prompt, response in zip(prompts, responses, strict=True)]
    width = max(map(len, rows))
    starts = [row * width + len(prompt) for row, prompt in enumerate(prompts)]
    ids = [row + [0] * (width - len(row)) for row in rows]
    return ids, [(start - 1, start) for start in starts]


def _pack(examples: Sequence[Example]) -> tuple[list, list[tuple[int, int]], list, list]:
    """Return token ids [1, T] of a packed row, and starts as in `_pad`.

    Also return position ids [1, T] and, for each example, the numbers of prompt, chosen and
    rejected tokens. A single response counts as chosen.
    """
    ids: list[int] = []
    position_ids: list[int] = []
    spans = []
    starts = []  # for each example, for each response
    for example in examples:
        lengths = [len(response) - 1 for response in example.responses]
        p, c, r = len(example.prompt), lengths[0], sum(lengths[1:])
        start = len(ids) + p
        starts.append([(start - 1, start), (start - 1, start + c)][: len(example.responses)])
        ids += example.prompt
        for response in example.responses:
            ids += response[:-1]
        position_ids += [*range(p + c), *range(p, p + r)]  # both responses follow the prompt
        spans.append((p, c, r))
    return [ids], by_response(starts), [position_ids], spans


class Scorer(ScorerModule):
    """A causal language model that returns log-probs. This module is wrapped by DDP or FSDP."""

    def __init__(self, model: Any, autocast: torch.dtype | None = None):
        super().__init__()
        self.model = model
        self.autocast = autocast  # torch.bfloat16, torch.float16 or None
        # use the model's logits of all tokens, see fast/self_test.py
        self.full_logits = not self.has_own_head()
        self.shared = False  # pack the examples of a batch, see fast/self_test.py
        self.attention = model.config._attn_implementation  # of padded rows and of generation
        self.gathered = contextlib.nullcontext  # a context in which a sharded layer is complete
        self.chunk: int | None = None  # tokens whose logits exist at a time; None: as in CHUNK
        self.in_step = False  # weights are sharded: all ranks call the model equally often
        self.way: Any = None  # how the model generates, see sampling.choose_way()

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
            states = self.states(batch)
            if self.full_logits:
                return picked_logps(states, batch.targets)
            head = self.backbone_and_head()[1]
            with self.gathered(head):
                return head_logps(head, states, batch.targets, self.chunk)

    def states(self, batch: Batch) -> Tensor:
        """Return the last hidden states that predict the targets, [N, D].

        With full_logits, return the model's logits instead, [N, V].
        """
        with self.autocasting(batch.ids.device):
            if self.full_logits:
                states = self.model(input_ids=batch.ids, **batch.model_kwargs).logits
            else:
                backbone = self.backbone_and_head()[0]
                output = backbone(input_ids=batch.ids, use_cache=False, **batch.model_kwargs)
                states = output.last_hidden_state
        # not states[index], whose backward sorts the index
        return states.flatten(0, 1).index_select(0, batch.hidden_index)

    def autocasting(self, device: torch.device) -> torch.autocast:
        """Return the context in which the model computes."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    def unwrap(self) -> Any:
        """Return the transformers model, without peft's wrapper."""
        model: Any = self.model
        return model.get_base_model() if hasattr(model, "peft_config") else model

    def backbone_and_head(self) -> tuple[Any, Any]:
        """Return the transformer and its output layer, with the adapters inside them."""
        model = self.unwrap()
        head, settings = model.get_output_embeddings(), vars(model.config.get_text_config())
        scale = settings.get("logit_scale") or 1.0  # Cohere
        scale /= settings.get("logits_scaling") or 1.0  # Granite
        cap = settings.get("final_logit_softcapping")  # Gemma 2
        is_plain = head is None or (scale == 1.0 and not cap)
        return model.base_model, head if is_plain else ScaledHead(head, scale, cap)

    def has_own_head(self) -> bool:
        """Return whether the model has an output layer, and a transformer that stops before it."""
        backbone, head = self.backbone_and_head()
        return head is not None and backbone is not self.unwrap()

    def set_layout(self, shared: bool) -> None:
        """Pack the examples of the following batches, or pad them.

        Raises TypeError for Llama 4, whose attention depends on places in the row: with more than
        8,191 tokens, those of a packed row differ from the positions in each example.
        """
        settings = self.unwrap().config.get_text_config()
        if shared and getattr(settings, "attn_temperature_tuning", False):
            raise TypeError("attention is scaled by the place in a row, not by position_ids")
        self.shared = shared
        self.unwrap().set_attn_implementation(shared_prefix.NAME if shared else self.attention)

    def collate(self, examples: Sequence[Example], device: Device) -> Batch:
        """Return the batch of these examples in this scorer's layout."""
        return collate(examples, device, self.shared)

    def micro_batches(
        self, rows: Collection[int], examples: Examples, world: World, size: int
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches, of up to `size` rows, of some rows of `examples`."""
        if isinstance(examples, Rows):
            counts = examples.select([*rows]).num_forward_tokens(self.shared).tolist()
        else:
            counts = [examples[row].num_forward_tokens(self.shared) for row in rows]
        lengths = dict(zip(rows, counts, strict=True))
        return assign_micro_batches(rows, lengths, world, size, padded=not self.shared)

    @contextlib.contextmanager
    def generating(self, device: torch.device) -> Iterator[None]:
        """Prepare the model for generation: padded rows, eval mode, its own precision.

        With gradient checkpointing in training mode, transformers would not use the cache. Settings
        of the model such as a repetition penalty are off: replies show its own distribution.
        """
        shared = self.shared
        self.set_layout(shared=False)
        self.model.eval()
        model = self.unwrap()
        settings, model.generation_config = model.generation_config, GenerationConfig()
        head = model.get_output_embeddings() or nn.Identity()
        try:
            with head.register_forward_pre_hook(contiguous), self.autocasting(device):
                yield
        finally:
            model.generation_config = settings
            self.model.train()
            if hasattr(model.base_model, "_rescale_layers"):  # RWKV halves weights in eval()
                model.base_model._rescale_layers()
            self.set_layout(shared)

    def example(self, device: torch.device) -> Batch:
        """Return the smallest possible batch: one pair of one-token responses."""
        return self.collate([Pair([0], [0], [0], "", "")], device)

    def numerics(self, device: torch.device) -> dict[str, str]:
        """Return what log-probs depend on besides model and data: precision, kernels, versions."""
        return {
            "dtype": str(next(self.model.parameters()).dtype),
            "autocast": str(self.autocast),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "device": device.type,
            "layout": "shared" if self.shared else "separate",
            "head": "full logits" if self.full_logits else "fast",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


class ScaledHead(nn.Module):
    """An output layer whose logits the model multiplies by a number, or soft-caps, or both."""

    def __init__(self, layer: nn.Module, scale: float, cap: float | None):
        super().__init__()
        self.layer, self.scale, self.cap = layer, scale, cap

    def forward(self, states: Tensor) -> Tensor:
        logits = self.layer(states) * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def contiguous(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a layer's inputs as contiguous tensors: a hook.

    Before the first token of B replies, transformers calls the head with a slice, [B, 1, D]. For
    such a slice and a frozen weight, torch's linear copies the weight B times in bf16 (torch 2.13,
    should_fold in LinearAlgebra.cpp): 3.4 GiB for 64 replies of a model with 49,152 tokens.
    """
    return tuple(map(Tensor.contiguous, inputs))


def picked_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log softmax, in fp32, of logits [N, V] at targets [N], [N]."""
    return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def head_logps(
    head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int | None = None
) -> Tensor:
    """Return the log-probs [N] of targets [N] from hidden states [N, D].

    Only the logits of one chunk of tokens exist at a time. If the head is frozen, the gradient is
    computed in the forward pass. Otherwise the backward pass recomputes the logits of each chunk
    but the last: that one is needed first, when nothing else occupies its memory.
    """
    size = chunk or CHUNK.get(hidden.device.type, WIDE_CHUNK)
    is_trained = any(parameter.requires_grad for parameter in head.parameters())
    has_hooks = head._forward_hooks or head._forward_pre_hooks
    if type(head) is nn.Linear and not is_trained and not has_hooks and hidden.requires_grad:
        from lm.fast import frozen_head

        return frozen_head.FrozenHead.apply(hidden, targets, head.weight, head.bias, size)

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
    rows: Sequence[int] | None = None,
    phase: Phase | None = None,
) -> Tensor:
    """Return the summed log-probs of all examples, without dropout, [number of examples, S].

    The examples are split over the ranks; every rank returns the complete table.

    rows: the examples to score, such as Plan.rows_used(); those of the others are NaN.
    """
    rows = list(range(len(examples)) if rows is None else rows)
    table = torch.full((len(examples), len(examples[0].responses)), torch.nan, device=world.device)
    if not rows:
        return table
    micro_batches = scorer.micro_batches(rows, examples, world, micro_batch_size)
    scores = distributed.Table(len(examples), table.shape[1], world)
    with dropout_off(scorer):
        for micro_batch in (phase or Phase()).each(micro_batches):
            batch = scorer.collate([examples[row] for row in micro_batch.index], world.device)
            scores.add(micro_batch, torch.stack(scorer(batch), -1))  # [B, S]
    table[rows] = scores.reduce()[rows]
    return table
