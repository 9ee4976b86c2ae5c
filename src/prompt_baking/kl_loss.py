"""KL divergence of two next-token distributions from hidden states, never [N, V] twice.

N tokens, D width, V words, n tokens of a chunk.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_utils.logps import CHUNK, WIDE_CHUNK


def kl(teacher, student):
    """KL(teacher || student) = sum p_t (log p_t - log p_s), in nats: logits [n, V] each -> [n]."""
    teacher, student = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)  # vecdot is bf16 under autocast


def head_kl(head, student, teacher):
    """The same from hidden states [N, D] that one output layer reads -> [N] in fp32.

    No gradient flows to the teacher, nor to the head: it must be frozen.
    """
    size = CHUNK.get(student.device.type, WIDE_CHUNK)
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) is nn.Linear and not hooked and student.requires_grad:
        return FrozenKL.apply(student, teacher, head.weight, head.bias, size)

    def part(states, targets):
        return kl(head(targets), head(states))

    chunks = list(zip(student.split(size), teacher.split(size), strict=True))
    if not torch.is_grad_enabled():
        return torch.cat([part(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks])


class FrozenKL(torch.autograd.Function):
    """KL under a head that is not trained: three matrix products a token, no logits kept.

    Its derivative by the student's hidden state, (p_s - p_t) W, is made while both are at hand.
    """

    @staticmethod
    def forward(ctx, student, teacher, weight, bias, size):
        device = student.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        weight = weight.to(half or weight.dtype)
        found = student.new_empty(len(student), dtype=torch.float32)
        rises = torch.empty_like(student)  # [N, D]

        def log_probs(states):
            logits = states.to(weight.dtype) @ weight.T  # [n, V]
            return (logits if bias is None else logits + bias).float().log_softmax(-1)

        parts = (tensor.split(size) for tensor in (student, teacher, found, rises))
        for mine, other, divergence, rise in zip(*parts, strict=True):
            wanted, given = log_probs(other), log_probs(mine)  # [n, V]
            gap = wanted - given
            wanted.exp_()
            divergence.copy_(gap.mul_(wanted).sum(-1))
            rise.copy_(given.exp_().sub_(wanted).to(weight.dtype) @ weight)
        ctx.save_for_backward(rises)
        return found

    @staticmethod
    def backward(ctx, gradient):
        (rises,) = ctx.saved_tensors
        return (rises * gradient[:, None]).to(rises.dtype), None, None, None, None
