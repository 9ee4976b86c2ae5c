"""The frozen head against full logits: values, gradients, work and memory.

N scored tokens, D wide, V words.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_utils import logps
from ddp_utils.fast.self_test import scaled_logits

WORDS, WIDTH, CHUNK = 5000, 32, 64


def head_case(tokens, bias, spread=0.2):
    """A frozen head, hidden states [N, D] and targets [N]."""
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, WORDS, bias=bias).requires_grad_(False)
    head.weight.normal_(std=spread)
    return head, torch.randn(tokens, WIDTH), torch.randint(0, WORDS, (tokens,))


def value_and_gradient(function, head, hidden, targets):
    """Log-probs [N] and the gradient [N, D] of their sum, each with its own factor."""
    hidden = hidden.clone().requires_grad_()
    found = function(head, hidden, targets)
    (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum().backward()
    return found.detach().double(), hidden.grad.double()


def full_logits(head, hidden, targets):
    """What the frozen head must answer, from all logits at once."""
    return head(hidden).log_softmax(-1)[range(len(targets)), targets]


def in_float64(head, hidden, targets):
    """The same as value_and_gradient of full logits, almost exactly."""
    return value_and_gradient(full_logits, copy.deepcopy(head).double(), hidden.double(), targets)


def errors(found, exact):
    """Relative errors of value and gradient, in the 2-norm."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 64 tokens; and no other route is taken than the frozen head's."""
    monkeypatch.setitem(logps.CHUNK, "cpu", CHUNK)
    monkeypatch.setattr(logps, "checkpoint", None)


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_head_equals_full_logits_in_float64(bias, small_chunks):
    """Within 1e-6; or, for a single token, what full logits in float32 are off."""
    for tokens in (1, CHUNK - 1, CHUNK, 2 * CHUNK + 7):
        case = head_case(tokens, bias)
        exact = in_float64(*case)
        ours = errors(value_and_gradient(logps.head_logps, *case), exact)
        theirs = errors(value_and_gradient(full_logits, *case), exact)
        assert all(our < max(1e-6, 1.1 * their) for our, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_under_autocast_a_frozen_head_is_as_exact_as_bfloat16_logits(states, bias, small_chunks):
    """As exact as autograd is with the same rounded logits."""
    head, hidden, targets = head_case(2 * CHUNK + 7, bias)
    hidden = hidden.to(states)
    exact = in_float64(head, hidden, targets)

    def plain(head, hidden, targets):
        return logps.picked_logps(head(hidden), targets)

    with torch.autocast("cpu", torch.bfloat16):
        ours = errors(value_and_gradient(logps.head_logps, head, hidden, targets), exact)
        theirs = errors(value_and_gradient(plain, head, hidden, targets), exact)
    assert all(our < 1.1 * their for our, their in zip(ours, theirs, strict=True))
    assert max(ours) < 1e-2


class WideProducts(TorchDispatchMode):
    """Counts matrix products with V among their sizes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "matmul", "linear"):
            sizes = [size for a in args if isinstance(a, torch.Tensor) for size in a.shape]
            self.count += WORDS in sizes
        return function(*args, **(kwargs or {}))


def wide_work(function, case):
    """Wide matrix products of forward and backward; shapes kept in between that have V in them."""
    kept = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tuple(tensor.shape)), tensor)[1], lambda tensor: tensor
    )
    with WideProducts() as products, keep:
        value_and_gradient(function, *case)
    return products.count, [shape for shape in kept if WORDS in shape]


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_head_takes_two_products_a_chunk_and_keeps_nothing_wide(bias, small_chunks):
    """The control: full logits take two as well, and keep [N, V]."""
    case = head_case(2 * CHUNK + 7, bias)
    assert wide_work(logps.head_logps, case) == (2 * 3, [])
    products, kept = wide_work(full_logits, case)
    assert products == 2 and (2 * CHUNK + 7, WORDS) in kept


def test_a_trained_head_makes_the_logits_of_all_chunks_but_the_last_again(monkeypatch):
    """Of 3 chunks: 3 products in the forward, then 2, and 2 for the gradients of each chunk."""
    monkeypatch.setitem(logps.CHUNK, "cpu", CHUNK)
    head, *rest = head_case(2 * CHUNK + 7, bias=False)
    head.requires_grad_(True)
    products, kept = wide_work(logps.head_logps, (head, *rest))
    assert products == 3 + 2 + 2 * 3
    assert max(shape[0] for shape in kept if shape != (WORDS, WIDTH)) <= CHUNK


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_frozen_head_stays_finite_where_log_softmax_does(sign, small_chunks):
    """Logits from -1e4 to 1e4, and targets at both ends and between."""
    head = torch.nn.Linear(2, WORDS, bias=False).requires_grad_(False)
    head.weight.copy_(torch.linspace(-1e4, 1e4, WORDS)[:, None] * torch.tensor([1.0, 1e-4]))
    targets = torch.tensor([0, 1, WORDS // 2, WORDS - 2, WORDS - 1])
    case = head, torch.tensor([[sign, 0.5]]).expand(5, 2), targets
    found, exact = value_and_gradient(logps.head_logps, *case), in_float64(*case)
    assert all(bool(part.isfinite().all()) for part in found)
    assert exact[0].min() < -19_000 and exact[0].max() > -0.1
    assert max(errors(found, exact)) < 1e-6


def test_a_hook_on_a_frozen_head_is_not_passed_over():
    """The self-tests blow logits up by one; so must they be where a gradient is wanted."""
    head, hidden, targets = head_case(5, False)
    with scaled_logits(head, 3.0):
        found = value_and_gradient(logps.head_logps, head, hidden, targets)
    head.weight.mul_(3.0)
    assert max(errors(found, in_float64(head, hidden, targets))) < 1e-6
