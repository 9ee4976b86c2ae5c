"""How close each numeric bound of the tests is on this machine: error divided by bound.

    export PYTHONPATH=tests
    python -m pytest -n 0 -p margins -o enable_assertion_pass_hook=true tests/core   # ten closest
    MARGINS=FILE.jsonl python -m pytest -p margins ...                # also appends all to a file

Seen are `approx`, `torch.testing.assert_close`, `torch.allclose`, and assertions such as
`assert error < 1e-6` with a bound below 0.5. The last are missing if a test file was compiled
without the option (delete `__pycache__`), and all comparisons in the processes of tests/ranks.py.
`tests/instruction_sets.sh` repeats a run with the instructions of another CPU.
"""

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

ApproxScalar = type(pytest.approx(1.0))  # its module has another name in each version

TESTS = Path(__file__).parent
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
COMPARISON = re.compile(r"^([^<>=]+) <=? ([^<>=]+)$")  # error < bound
DETAIL = re.compile(r", (?:dtype|device|grad_fn)=[\w.:']+|float(?:16|32|64)")
closest: dict[str, tuple[float, float, float]] = {}  # place -> ratio, error, bound


def record(place: str, error: float, bound: float) -> None:
    """Keep the closest comparison of each place."""
    if bound > 0 and error <= bound:  # a comparison that fails may be meant to
        closest[place] = max(closest.get(place, (-1.0, 0.0, 0.0)), (error / bound, error, bound))


def caller() -> str:
    """Return the line of the test that compares."""
    frame = sys._getframe(2)
    while frame and (TESTS not in Path(frame.f_code.co_filename).parents):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return f"{Path(frame.f_code.co_filename).relative_to(TESTS)}:{frame.f_lineno}"


def tensors(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of nested containers and numbers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    else:
        yield torch.as_tensor(value)


def record_tensors(place: str, actual: Any, expected: Any, rtol: float, atol: float) -> None:
    """Record the element that is closest to its bound atol + rtol * |expected|."""
    for one, other in zip(tensors(actual), tensors(expected), strict=True):
        errors = (one.detach().double() - other.detach().double()).abs()
        bounds = atol + rtol * other.detach().double().abs()
        if errors.numel() and bool((bounds > 0).all()):
            at = int((errors / bounds).argmax())
            record(
                place, errors.flatten()[at].item(), bounds.expand_as(errors).flatten()[at].item()
            )


def watch_approx(compare: Any = ApproxScalar.__eq__) -> None:
    """Record every comparison with pytest.approx; those of containers compare their elements."""

    def __eq__(self: ApproxScalar, actual: Any) -> bool:
        result = compare(self, actual)
        if isinstance(actual, (int, float)) and isinstance(self.expected, (int, float)):
            record(caller(), abs(actual - self.expected), self.tolerance)
        return result

    ApproxScalar.__eq__ = __eq__


def watch(owner: Any, name: str, default: tuple[float, float] | None) -> None:
    """Record every call of a function that compares tensors; default: rtol and atol if none."""
    compare = getattr(owner, name)

    @functools.wraps(compare)
    def watched(actual: Any, expected: Any, *args: Any, **options: Any) -> Any:
        result = compare(actual, expected, *args, **options)
        rtol, atol = options.get("rtol"), options.get("atol")
        if rtol is None and atol is None:
            first = next(iter(tensors(actual)), torch.zeros(()))
            by_dtype = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-7, 1e-7)}
            rtol, atol = default or by_dtype.get(first.dtype, (1.6e-2, 1e-5))
        record_tensors(caller(), actual, expected, rtol or 0.0, atol or 0.0)
        return result

    setattr(owner, name, watched)


def pytest_configure(config: pytest.Config) -> None:
    """Replace the functions before the test modules import them."""
    config._inicache["enable_assertion_pass_hook"] = True
    watch_approx()
    watch(torch.testing, "assert_close", None)
    watch(torch, "allclose", (1e-5, 1e-8))


def pytest_assertion_pass(item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
    """Record `error < bound`, where the bound is a number or a product of numbers."""
    found = COMPARISON.match(DETAIL.sub("", expl.splitlines()[0]))
    sides = [list(map(float, NUMBER.findall(side))) for side in found.groups()] if found else []
    if not all(sides) or not sides or len(sides[0]) > 1:
        return
    bound = math.prod(sides[1])
    if bound < 0.5:
        record(f"{item.path.relative_to(TESTS)}:{lineno}", abs(sides[0][0]), bound)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Append what was seen to the file, if one is named."""
    if os.environ.get("MARGINS"):
        with open(os.environ["MARGINS"], "a") as file:
            for place, (ratio, error, bound) in closest.items():
                entry = {"place": place, "ratio": ratio, "error": error, "bound": bound}
                file.write(json.dumps(entry) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the closest bounds of this process."""
    for place, (ratio, error, bound) in sorted(closest.items(), key=lambda x: -x[1][0])[:10]:
        terminalreporter.write_line(f"{ratio:.2f} of {bound:.2g} at {place} ({error:.2g})")
