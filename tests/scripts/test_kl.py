"""KL of two next-token distributions: value and gradient against float64, whatever the chunks."""

import numpy as np
import pytest
import torch
from torch import nn

from prompt_baking import kl_loss

N, D, V = 23, 6, 37


def case(bias):
    """A head, and states of student and teacher [N, D]."""
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=bias).requires_grad_(False)
    return head, 3 * torch.randn(N, D), 3 * torch.randn(N, D)


def oracle(head, student, teacher):
    """In float64, by hand: values [N], and the gradient of their weighted sum by the states."""
    w = head.weight.double().numpy()
    b = head.bias.double().numpy() if head.bias is not None else 0

    def softmax(states):
        logits = states.double().numpy() @ w.T + b
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        return odds / odds.sum(-1, keepdims=True)

    p, q = softmax(teacher), softmax(student)
    return (p * np.log(p / q)).sum(-1), (q - p) @ w


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_value_and_gradient_equal_float64(plain, bias, size, monkeypatch):
    """`plain`: the head's own class; else one that only behaves so, which autograd goes through."""
    monkeypatch.setitem(kl_loss.CHUNK, "cpu", size)
    head, student, teacher = case(bias)
    layer = head if plain else nn.Sequential(head)
    student.requires_grad_()
    found = kl_loss.head_divergence(layer, student, teacher)
    weights = torch.linspace(0.5, 2, N)
    (found * weights).sum().backward()
    value, gradient = oracle(head, student.detach(), teacher)
    np.testing.assert_allclose(found.detach(), value, rtol=1e-5)
    np.testing.assert_allclose(student.grad, gradient * weights[:, None].numpy(), atol=2e-6)
    with torch.no_grad():
        np.testing.assert_allclose(
            kl_loss.head_divergence(layer, student, teacher), value, rtol=1e-5
        )


def test_no_two_matrices_of_logits_are_kept():
    """Autograd keeps one [N, D] for the frozen head: of V words nothing."""
    head, student, teacher = case(bias=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        kl_loss.head_divergence(head, student.requires_grad_(), teacher)
    assert kept == [(N, D)]


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_other_divergences_equal_float64(kind, monkeypatch):
    monkeypatch.setitem(kl_loss.CHUNK, "cpu", 5)
    head, student, teacher = case(bias=True)
    student.requires_grad_()
    found = kl_loss.head_divergence(head, student, teacher, kind)
    found.sum().backward()
    states = student.detach().double().requires_grad_()
    weight, bias = head.weight.double(), head.bias.double()
    p, q = ((h.double() @ weight.T + bias).softmax(-1) for h in (teacher, states))
    if kind == "reverse_kl":
        expected = (q * (q / p).log()).sum(-1)
    else:
        m = (p + q) / 2
        expected = (p * (p / m).log()).sum(-1) / 2 + (q * (q / m).log()).sum(-1) / 2
        assert (expected < np.log(2)).all()  # its bound
    expected.sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(student.grad.double(), states.grad, rtol=1e-4, atol=2e-6)
