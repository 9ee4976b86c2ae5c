"""The transformer of Algorithm Distillation: one token per step, from which it predicts an action.

Token t holds the observation of step t, and the action and the reward of step t - 1. B windows of T
tokens, A actions, D width of an attention head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ad.config import Config
from ddp_utils.policy import ScorerModule

INSIDE, EPISODE, REGION = range(3)  # where a token is: inside, or first of an episode or a region


class Tokens(NamedTuple):
    """The input of the model; integers, each [B, T]."""

    cell: Tensor  # observation of the state
    action: Tensor  # the action that led to it; A for none, at the first token of a window
    reward: Tensor  # the reward of that action; 0 at the first token of a window
    place: Tensor  # INSIDE, EPISODE or REGION


class Cache:
    """Keys and values of the tokens so far, in all layers."""

    def __init__(self, model: "Model", batch: int):
        config, heads = model.config, model.config.tf_n_head
        sizes = batch, heads, config.window, config.tf_n_embd // heads
        # [layers, 2, B, heads, window, D]
        self.keys_and_values = model.head.weight.new_zeros(config.tf_n_layer, 2, *sizes)
        self.length = 0

    def add(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """Append keys and values [B, heads, T, D]; return those of all tokens so far, stacked."""
        end = self.length + key.shape[-2]
        so_far = self.keys_and_values[layer, :, :, :, :end]
        so_far[:, :, :, self.length :] = torch.stack([key, value])
        return so_far


class Model(nn.Module):
    """A pre-norm GPT with rotary positions.

    The coordinates of an observation have separate embeddings, so that the model generalizes to
    cells that it has not seen.
    """

    angles: Tensor  # [2, window, D / 2]

    def __init__(self, config: Config):
        super().__init__()
        width, actions = config.tf_n_embd, config.environment.actions
        self.config = config
        shape = config.environment.shape
        self.coordinates = nn.ModuleList(nn.Embedding(size, width) for size in shape)
        self.action = nn.Embedding(actions + 1, width)
        self.reward = nn.Embedding(2, width)
        self.place = nn.Embedding(3, width)
        self.dropout = nn.Dropout(config.tf_dropout)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.tf_n_layer))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, actions)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.head.weight)  # so that the first loss is exactly ln A
        nn.init.zeros_(self.head.bias)
        self.register_buffer("angles", rotations(config.window, width // config.tf_n_head), False)

    def forward(self, tokens: Tokens, cache: Cache | None = None) -> Tensor:
        """Return logits [B, T, A]. With a cache, the T tokens follow those in the cache."""
        hidden = self.action(tokens.action) + self.reward(tokens.reward) + self.place(tokens.place)
        rest = tokens.cell
        sizes = self.config.environment.shape
        for size, embedding in zip(sizes[::-1], reversed(self.coordinates), strict=True):
            hidden = hidden + embedding(rest % size)  # the last coordinate varies fastest
            rest = rest // size
        hidden = self.dropout(hidden)
        begin = cache.length if cache else 0
        angles = self.angles[:, begin : begin + tokens.cell.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, angles, cache)
        if cache:
            cache.length += tokens.cell.shape[1]
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection.

    number: of the layer, for the cache.
    """

    def __init__(self, config: Config, number: int):
        super().__init__()
        width = config.tf_n_embd
        self.number = number
        self.heads = config.tf_n_head
        self.attention_dropout = config.tf_attn_dropout
        self.norm = nn.LayerNorm(width)
        self.norm_inner = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        inner = config.tf_n_inner or 4 * width
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.tf_dropout)

    def forward(self, hidden: Tensor, angles: Tensor, cache: Cache | None) -> Tensor:
        """Return the hidden states [B, T, width] after this layer; angles: [2, T, D / 2]."""
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
        query, key = rotate(query, angles), rotate(key, angles)
        if cache:
            key, value = cache.add(self.number, key, value)
        drop = self.attention_dropout if self.training else 0.0
        causal = length > 1  # a single token attends to all tokens before it
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=causal)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(hidden.shape)))
        inner = F.gelu(self.up(self.norm_inner(hidden)))
        return hidden + self.dropout(self.down(inner))


def rotations(length: int, width: int) -> Tensor:
    """Return the cosines and sines of rotary positions [2, T, D / 2] (Su et al., 2021)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate [B, heads, T, D]: element i of the first half with element i of the second half."""
    cosine, sine = angles.to(states.dtype)
    one, two = states.chunk(2, dim=-1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1)


class Distiller(ScorerModule):
    """The model with its loss: the module that DDP wraps."""

    def __init__(
        self, model: Model, autocast: torch.dtype | None = None, label_smoothing: float = 0.0
    ):
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.label_smoothing = label_smoothing

    def forward(self, batch: tuple[Tokens, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy (nats) and the mean accuracy of each window, [B] each.

        batch: tokens, and the actions to predict [B, T].
        """
        tokens, action = batch
        with torch.autocast(action.device.type, self.autocast, enabled=self.autocast is not None):
            logits = self.model(tokens).float()  # [B, T, A]
        smoothing = self.label_smoothing if self.training else 0.0
        flat = logits.flatten(0, 1), action.flatten()
        losses = F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing)
        correct = (logits.argmax(-1) == action).float()
        return losses.view(action.shape).mean(-1), correct.mean(-1)

    def example(self, device: torch.device) -> tuple[Tokens, Tensor]:
        """Return a batch of one window of two steps, which the policy uses for a trial pass."""
        zeros = torch.zeros(1, 2, dtype=torch.long, device=device)
        return Tokens(zeros, zeros, zeros, zeros), zeros
