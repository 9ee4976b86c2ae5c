"""The transformer of Algorithm Distillation: one token per step, an action predicted at each.

Token t holds what is seen of the state of step t, and what came before: action and reward of step
t - 1. B windows of T tokens, A actions.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ddp_utils.policy import ScorerModule

INSIDE, EPISODE, REGION = range(3)  # where a token stands: first of an episode, of a region


class Tokens(NamedTuple):
    """Integers, each [B, T]."""

    cell: torch.Tensor  # what is seen of the state
    action: torch.Tensor  # that led to it; at the beginning of a window A, for none
    reward: torch.Tensor  # of that action, 0 at the beginning of a window
    place: torch.Tensor  # INSIDE, EPISODE or REGION


class Cache:
    """Keys and values of the tokens seen so far, of all layers."""

    def __init__(self, model, batch):
        layers = model.config.tf_n_layer
        heads = model.config.tf_n_head
        sizes = batch, heads, model.config.window, model.config.tf_n_embd // heads
        # [layers, 2, B, heads, window, D]
        self.keys_and_values = model.head.weight.new_zeros(layers, 2, *sizes)
        self.length = 0

    def add(self, layer, key, value):
        """Keep these, each [B, heads, T, D]; returns the keys and values of all tokens so far."""
        end = self.length + key.shape[-2]
        kept = self.keys_and_values[layer, :, :, :, :end]
        kept[:, :, :, self.length :] = torch.stack([key, value])
        return kept


class Model(nn.Module):
    """Pre-norm GPT with rotary positions; cells enter as x and y, so that they generalise.

    config.environment: shape of what is seen, number of actions.
    """

    def __init__(self, config):
        super().__init__()
        width = config.tf_n_embd
        self.config = config
        actions = config.environment.actions
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
        nn.init.zeros_(self.head.weight)  # the first loss is ln A, whatever the rest is
        nn.init.zeros_(self.head.bias)
        angles = rotations(config.window, width // config.tf_n_head)
        self.register_buffer("angles", angles, persistent=False)  # [2, window, D / 2]

    def forward(self, tokens, cache=None):
        """Tokens [B, T] -> logits [B, T, A]; with a cache, T more tokens behind its own."""
        hidden = self.action(tokens.action) + self.reward(tokens.reward) + self.place(tokens.place)
        rest = tokens.cell
        for embedding in reversed(self.coordinates):
            hidden = hidden + embedding(rest % embedding.num_embeddings)
            rest = rest // embedding.num_embeddings
        hidden = self.dropout(hidden)
        begin = cache.length if cache else 0
        angles = self.angles[:, begin : begin + tokens.cell.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden, angles, cache)
        if cache:
            cache.length += tokens.cell.shape[1]
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added."""

    def __init__(self, config, number):
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

    def forward(self, hidden, angles, cache):
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, D]
        query = rotate(query, angles)
        key = rotate(key, angles)
        if cache:
            key, value = cache.add(self.number, key, value)
        drop = self.attention_dropout if self.training else 0.0
        causal = length > 1  # one token sees all before it
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=causal)
        hidden = hidden + self.dropout(self.out(seen.transpose(1, 2).reshape(hidden.shape)))
        inner = F.gelu(self.up(self.norm_inner(hidden)))
        return hidden + self.dropout(self.down(inner))


def rotations(length, width):
    """Return cosines and sines of rotary positions [2, T, D / 2] (Su et al., 2021)."""
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(states, angles):
    """Turn pairs of the halves of [B, heads, T, D] by their position's angle."""
    cosine, sine = angles.to(states.dtype)
    one, two = states.chunk(2, dim=-1)
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], dim=-1)


class Distiller(ScorerModule):
    """Windows -> mean loss and accuracy of each; what DDP wraps."""

    def __init__(self, model, autocast=None, label_smoothing=0.0):
        super().__init__()
        self.model = model
        self.autocast = autocast
        self.label_smoothing = label_smoothing

    def forward(self, batch):
        """(tokens, actions [B, T]) -> (cross-entropy in nats, accuracy), means over T, each [B]."""
        tokens, action = batch
        with torch.autocast(action.device.type, self.autocast, enabled=self.autocast is not None):
            logits = self.model(tokens).float()  # [B, T, A]
        smoothing = self.label_smoothing if self.training else 0.0
        flat = logits.flatten(0, 1), action.flatten()
        losses = F.cross_entropy(*flat, reduction="none", label_smoothing=smoothing)
        correct = (logits.argmax(-1) == action).float()
        return losses.view(action.shape).mean(-1), correct.mean(-1)

    def example(self, device):
        """Return a window of two steps, for the throwaway pass of policy.Policy."""
        zeros = torch.zeros(1, 2, dtype=torch.long, device=device)
        return Tokens(zeros, zeros, zeros, zeros), zeros
