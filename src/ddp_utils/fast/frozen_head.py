"""A head that is not trained: its gradient is known in the forward.

N scored tokens, D width, V words.
"""

import torch


class FrozenHead(torch.autograd.Function):
    """Log-probs of a head that is not trained: two matrix products a token, no logits kept.

    The derivative of a token's log-prob by its hidden state, W[target] - softmax(W h) W, depends
    on what follows by one factor a token only: it is made here, while the logits are at hand.
    """

    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, size):
        device = hidden.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        weight = weight.to(half or weight.dtype)
        token_logps = hidden.new_empty(len(targets), 1, dtype=torch.float32)
        falls = torch.empty_like(hidden)  # [N, D] the derivative with the opposite sign
        # one pair of buffers for all chunks: to ask for fresh memory costs more than a softmax
        room = min(size, len(targets)), len(weight)
        logits = weight.new_empty(room)
        probs = hidden.new_empty(room, dtype=torch.float32)
        parts = (t.split(size) for t in (hidden, targets[:, None], token_logps, falls))
        for states, labels, logps, fall in zip(*parts, strict=True):
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
            fall.copy_(probs.to(weight.dtype) @ weight)
        ctx.save_for_backward(falls)
        return token_logps.squeeze(-1)

    @staticmethod
    def backward(ctx, gradient):
        (falls,) = ctx.saved_tensors
        return (falls * -gradient[:, None]).to(falls.dtype), None, None, None, None
