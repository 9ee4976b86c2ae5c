"""The output layer in chunks against full logits: values, gradients, work and memory.

N target tokens, D width, V vocabulary size.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm import logps
from lm.fast.self_test import scaled_logits

VOCABULARY, WIDTH, CHUNK = 5000, 32, 64
MANY = 2 * CHUNK + 7  # tokens of three chunks
# Logits are up to 18 here, and exp(x) has a relative error of |x| 2^-24 if x is rounded to fp32;
# 1.2e-6 was seen with SSE, 0.3e-6 with AVX-512.
EXACT = 5 * 18 * 2.0**-24


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(logps.CHUNK, "cpu", CHUNK)


def head_case(tokens, bias=False, trained=False):
    """Return a head, hidden states [N, D] and targets [N]."""
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
    head.weight.normal_(std=0.2)
    states, targets = torch.randn(tokens, WIDTH), torch.randint(0, VOCABULARY, (tokens,))
    return head.requires_grad_(trained), states, targets


def outcome(function, head, hidden, targets):
    """Return log-probs [N] and the gradients of their weighted sum: of states, of the head."""
    hidden = hidden.clone().requires_grad_()
    head.weight.grad = None
    values = function(head, hidden, targets)
    (values * torch.linspace(-1, 2, len(values), dtype=values.dtype)).sum().backward()
    results = [values.detach(), hidden.grad, head.weight.grad]
    return [result.double() for result in results if result is not None]


def full_logits(head, hidden, targets):
    return logps.picked_logps(head(hidden), targets)


def exact_outcome(head, hidden, targets):
    """Return the outcome of full logits in float64."""

    def wide(head, hidden, targets):
        return head(hidden).log_softmax(-1)[range(len(targets)), targets]

    return outcome(wide, copy.deepcopy(head).double(), hidden.double(), targets)


def errors(results, exact):
    """Return relative errors in the 2-norm."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_head_equals_full_logits_in_float64(bias, monkeypatch):
    """For a single token, an error up to that of full logits in float32 is accepted."""
    monkeypatch.setattr(logps, "checkpoint", None)  # no other path than that of the frozen head
    for tokens in (1, CHUNK - 1, CHUNK, MANY):
        case = head_case(tokens, bias)
        exact = exact_outcome(*case)
        ours = errors(outcome(logps.head_logps, *case), exact)
        plain = errors(outcome(full_logits, *case), exact)
        assert all(our < max(EXACT, 1.1 * error) for our, error in zip(ours, plain, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_under_autocast_a_frozen_head_is_as_exact_as_bfloat16_logits(states, bias):
    head, hidden, targets = head_case(MANY, bias)
    case = head, hidden.to(states), targets
    exact = exact_outcome(*case)
    with torch.autocast("cpu", torch.bfloat16):
        ours = errors(outcome(logps.head_logps, *case), exact)
        plain = errors(outcome(full_logits, *case), exact)
    assert all(our < 1.1 * error for our, error in zip(ours, plain, strict=True))
    assert max(ours) < 2e-2


class Work(TorchDispatchMode):
    """Counts matrix products with V among their sizes; finds the most rows of such a result."""

    products = 0
    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "matmul", "linear"):
            sizes = [size for a in args if isinstance(a, torch.Tensor) for size in a.shape]
            self.products += VOCABULARY in sizes
        if isinstance(result, torch.Tensor) and result.shape[1:] == (VOCABULARY,):
            self.rows = max(self.rows, len(result))
        return result


def work(function, case):
    """Return the outcome, the Work, and the shapes with V in them that the backward pass needs."""
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with Work() as counts, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = outcome(function, *case)
    return results, counts, {shape for shape in kept if VOCABULARY in shape}


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_head_needs_two_products_per_chunk_and_keeps_no_logits(bias):
    case = head_case(MANY, bias)
    _, counts, kept = work(logps.head_logps, case)
    assert (counts.products, counts.rows, kept) == (2 * 3, CHUNK, set())
    _, counts, kept = work(full_logits, case)  # the control
    assert counts.products == 2 and counts.rows == MANY and (MANY, VOCABULARY) in kept


def test_complaint_20_a_trained_head_never_holds_the_logits_of_all_tokens():
    """Of 3 chunks: 3 products in the forward, then 2, and 2 for the gradients of each chunk."""
    case = head_case(MANY, trained=True)
    results, counts, kept = work(logps.head_logps, case)
    assert max(errors(results, exact_outcome(*case))) < EXACT and len(results) == 3
    assert counts.products == 3 + 2 + 2 * 3
    assert counts.rows == CHUNK
    assert max(shape[0] for shape in kept - {(VOCABULARY, WIDTH)}) <= CHUNK


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_frozen_head_stays_finite_where_log_softmax_does(sign):
    """Logits from -1e4 to 1e4, and targets at both ends and between."""
    head = torch.nn.Linear(2, VOCABULARY, bias=False).requires_grad_(False)
    head.weight.copy_(torch.linspace(-1e4, 1e4, VOCABULARY)[:, None] * torch.tensor([1.0, 1e-4]))
    targets = torch.tensor([0, 1, VOCABULARY // 2, VOCABULARY - 2, VOCABULARY - 1])
    case = head, torch.tensor([[sign, 0.5]]).expand(5, 2), targets
    results, exact = outcome(logps.head_logps, *case), exact_outcome(*case)
    assert exact[0].min() < -19_000 and exact[0].max() > -0.1
    assert all(error < EXACT for error in errors(results, exact))  # a NaN fails


def test_a_hook_on_a_frozen_head_is_called():
    """The self-tests scale logits with one; it must work where a gradient is needed, too."""
    head, hidden, targets = head_case(5)
    with scaled_logits(head, 3.0):
        results = outcome(logps.head_logps, head, hidden, targets)
    head.weight.mul_(3.0)
    assert max(errors(results, exact_outcome(head, hidden, targets))) < EXACT
