"""The transformer of Algorithm Distillation: one token per step, an action predicted at each.

Token t holds the cell of step t, and what came before: action and reward of step t - 1. B windows
of T tokens.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ad.darkroom import ACTIONS

NONE = ACTIONS  # the action before the first one of a window
INSIDE, EPISODE, REGION = range(3)  # where a token stands: first of an episode, of a region


class Tokens(NamedTuple):
    """Integers, each [B, T]."""

    cell: torch.Tensor
    action: torch.Tensor  # that led to the cell, NONE at the beginning of a window
    reward: torch.Tensor  # of that action, 0 at the beginning of a window
    place: torch.Tensor  # INSIDE, EPISODE or REGION


class Shape(NamedTuple):
    """What a model is built from."""

    grid_size: int
    tf_n_embd: int
    tf_n_layer: int
    tf_n_head: int
    tf_n_inner: int
    window: int  # the most tokens that it sees
    tf_dropout: float = 0.0
    tf_attn_dropout: float = 0.0

    @classmethod
    def of(cls, config):
        window = 2 * config.compress_interval if config.use_compressed_context else config.n_transit
        sizes = config.grid_size, config.tf_n_embd, config.tf_n_layer, config.tf_n_head
        inner = config.tf_n_inner or 4 * config.tf_n_embd
        return cls(*sizes, inner, window, config.tf_dropout, config.tf_attn_dropout)


class Cache:
    """Keys and values of the tokens seen so far, of all layers."""

    def __init__(self, model, batch):
        shape, place = model.shape, model.head.weight
        heads = batch, shape.tf_n_head, shape.window, shape.tf_n_embd // shape.tf_n_head
        self.held = place.new_zeros(shape.tf_n_layer, 2, *heads)  # [layers, 2, B, heads, window, D]
        self.length = 0

    def add(self, layer, key, value):
        """Keep these, each [B, heads, T, D]; returns all that are there."""
        until = self.length + key.shape[-2]
        kept = self.held[layer, :, :, :, :until]
        kept[0, :, :, self.length :] = key
        kept[1, :, :, self.length :] = value
        return kept[0], kept[1]


class Model(nn.Module):
    """Pre-norm GPT with rotary positions; cells enter as x and y, so that they generalise."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.x, self.y = (nn.Embedding(shape.grid_size, shape.tf_n_embd) for _ in range(2))
        self.action = nn.Embedding(ACTIONS + 1, shape.tf_n_embd)
        self.reward = nn.Embedding(2, shape.tf_n_embd)
        self.place = nn.Embedding(3, shape.tf_n_embd)
        self.dropout = nn.Dropout(shape.tf_dropout)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.tf_n_layer))
        self.norm = nn.LayerNorm(shape.tf_n_embd)
        self.head = nn.Linear(shape.tf_n_embd, ACTIONS)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        nn.init.zeros_(self.head.weight)  # the first loss is ln 5, whatever the rest is
        nn.init.zeros_(self.head.bias)
        angles = rotations(shape.window, shape.tf_n_embd // shape.tf_n_head)
        self.register_buffer("angles", angles, persistent=False)  # [2, window, D / 2]

    def forward(self, tokens, cache=None):
        """Tokens [B, T] -> logits [B, T, ACTIONS]; with a cache, T more tokens behind its own."""
        x, y = tokens.cell // self.shape.grid_size, tokens.cell % self.shape.grid_size
        hidden = self.x(x) + self.y(y) + self.action(tokens.action)
        hidden = self.dropout(hidden + self.reward(tokens.reward) + self.place(tokens.place))
        begin = cache.length if cache else 0
        angles = self.angles[:, begin : begin + tokens.cell.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, angles, cache)
        if cache:
            cache.length += tokens.cell.shape[1]
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added."""

    def __init__(self, shape, number):
        super().__init__()
        width, self.number, self.shape = shape.tf_n_embd, number, shape
        self.norm, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.tf_n_inner), nn.Linear(shape.tf_n_inner, width)
        self.dropout = nn.Dropout(shape.tf_dropout)

    def forward(self, hidden, angles, cache):
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm(hidden)).view(batch, length, 3, self.shape.tf_n_head, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
        query, key = rotate(query, angles), rotate(key, angles)
        if cache:
            key, value = cache.add(self.number, key, value)
        drop = self.shape.tf_attn_dropout if self.training else 0.0
        causal = length > 1  # one token sees all before it
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=causal)
        hidden = hidden + self.dropout(self.out(seen.transpose(1, 2).reshape(hidden.shape)))
        inner = F.gelu(self.up(self.norm_inner(hidden)))
        return hidden + self.dropout(self.down(inner))


def rotations(length, width):
    """Cosines and sines of rotary positions [2, T, D / 2] (Su et al., 2021)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(states, angles):
    """[B, heads, T, D], pairs of its halves turned by their position's angle."""
    cosine, sine = angles.to(states.dtype)
    one, two = states.chunk(2, dim=-1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1)


class Distiller(nn.Module):
    """Windows -> mean loss and accuracy of each; what DDP wraps."""

    def __init__(self, model, autocast=None, label_smoothing=0.0):
        super().__init__()
        self.model, self.autocast, self.label_smoothing = model, autocast, label_smoothing

    def forward(self, batch):
        """(tokens, actions [B, T]) -> (cross-entropy in nats, accuracy), means over T, each [B]."""
        tokens, action = batch
        on = self.autocast is not None
        with torch.autocast(action.device.type, self.autocast, enabled=on):
            logits = self.model(tokens).float()  # [B, T, ACTIONS]
        flat = logits.flatten(0, 1), action.flatten()
        losses = F.cross_entropy(*flat, reduction="none", label_smoothing=self.label_smoothing)
        right = logits.argmax(-1) == action
        return losses.view(action.shape).mean(-1), right.float().mean(-1)

    def example(self, device):
        """A window of two steps: for the throwaway pass of optim.Policy."""
        zeros = torch.zeros(1, 2, dtype=torch.long, device=device)
        return Tokens(zeros, zeros, zeros, zeros), zeros
