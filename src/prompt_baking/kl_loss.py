"""Divergence of two next-token distributions from hidden states, without two [N, V] matrices.

N tokens, D width, V vocabulary size, n tokens of a chunk.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.fast.frozen_head import FrozenHead
from lm.logps import CHUNK, WIDE_CHUNK


def divergence(teacher: Tensor, student: Tensor, kind: str = "kl") -> Tensor:
    """Return the divergence [n] of two next-token distributions, in nats; logits [n, V] each.

    kl: KL(teacher || student) = sum p_t (log p_t - log p_s); reverse_kl: KL(student || teacher);
    jsd: half of each towards their mean (Agarwal et al., On-Policy Distillation, 2024, beta 0.5).
    """
    teacher = teacher.float().log_softmax(-1)
    student = student.float().log_softmax(-1)
    if kind == "kl":
        return (teacher.exp() * (teacher - student)).sum(-1)  # vecdot is bf16 under autocast
    if kind == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    mean = torch.logaddexp(teacher, student) - math.log(2)
    sums = (teacher.exp() * (teacher - mean)).sum(-1) + (student.exp() * (student - mean)).sum(-1)
    return 0.5 * sums


def head_divergence(head: nn.Module, student: Tensor, teacher: Tensor, kind: str = "kl") -> Tensor:
    """Return the divergence [N] in fp32 from the hidden states [N, D] of one output layer.

    The head must be frozen: no gradient is computed for it, nor for the teacher.
    """
    size = CHUNK.get(student.device.type, WIDE_CHUNK)
    hooked = head._forward_hooks or head._forward_pre_hooks
    if kind == "kl" and type(head) is nn.Linear and not hooked and student.requires_grad:
        return FrozenKL.apply(student, teacher, head.weight, head.bias, size)

    def of_chunk(student, teacher):
        return divergence(head(teacher), head(student), kind)

    divergences = []
    for chunk in zip(student.split(size), teacher.split(size), strict=True):
        divergences.append(checkpoint(of_chunk, *chunk, use_reentrant=False))
    return torch.cat(divergences)


class FrozenKL(FrozenHead):
    """KL under a frozen head: three matrix products per token, and no logits are stored.

    What the backward of FrozenHead needs is the derivative by the student's hidden state with the
    opposite sign, (p_t - p_s) W. It is computed while both distributions are at hand.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor, size: int
    ) -> Any:
        device = student.device.type
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        weight = weight.to(half or weight.dtype)
        divergences = student.new_empty(len(student), dtype=torch.float32)
        minus_gradient = torch.empty_like(student)  # [N, D]

        def log_probs(states):
            logits = states.to(weight.dtype) @ weight.T  # [n, V]
            return (logits if bias is None else logits + bias).float().log_softmax(-1)

        for start in range(0, len(student), size):
            chunk = slice(start, start + size)
            target = log_probs(teacher[chunk])  # [n, V]
            log_prob = log_probs(student[chunk])
            gap = target - log_prob
            target.exp_()
            divergences[chunk] = gap.mul_(target).sum(-1)
            minus_gradient[chunk] = target.sub_(log_prob.exp_()).to(weight.dtype) @ weight
        ctx.save_for_backward(minus_gradient)
        return divergences
