"""A frozen output layer, whose gradient is computed in the forward pass.

N target tokens, D width, V vocabulary size, n tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor


class FrozenHead(torch.autograd.Function):
    """Log-probs of a frozen head: two matrix products per token, and no logits are stored.

    The derivative of a token's log-prob by its hidden state is W[target] - softmax(W h) W. What
    follows in the backward pass only multiplies it by one factor per token, so it is computed in
    the forward pass, where the logits exist.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor, size: int
    ) -> Any:
        """Return the log-probs [N] of targets [N]; size: tokens per chunk.

        hidden [N, D], weight [V, D], bias [V] or None.
        """
        device = hidden.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        weight = weight.to(half or weight.dtype)
        token_logps = hidden.new_empty(len(targets), 1, dtype=torch.float32)
        descents = torch.empty_like(hidden)  # [N, D] the negative derivative
        # one pair of buffers for all chunks: allocating new ones takes longer than a softmax
        buffer_shape = min(size, len(targets)), len(weight)
        logits = weight.new_empty(buffer_shape)
        probs = hidden.new_empty(buffer_shape, dtype=torch.float32)
        parts = (t.split(size) for t in (hidden, targets[:, None], token_logps, descents))
        for states, labels, logps, descent in zip(*parts, strict=True):
            logits = logits[: len(states)]  # [n, V]
            probs = probs[: len(states)]
            torch.mm(states.to(weight.dtype), weight.T, out=logits)
            if bias is not None:
                logits += bias
            torch.softmax(logits, -1, torch.float32, out=probs)
            # the largest p is 1 / sum exp(logit - largest logit): one pass less than log_softmax
            logps.copy_(logits.gather(-1, labels)).sub_(logits.amax(-1, keepdim=True))
            logps.add_(probs.amax(-1, keepdim=True).log())
            probs.scatter_add_(-1, labels, -torch.ones_like(logps))
            descent.copy_(probs.to(weight.dtype) @ weight)
        ctx.save_for_backward(descents)
        return token_logps.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (descents,) = ctx.saved_tensors
        return (descents * -gradient[:, None]).to(descents.dtype), None, None, None, None
