"""Memory that a step frees stays with the process, unless the environment says otherwise."""

import ctypes
import subprocess
import sys

import pytest

# blocks of 2 to 64 MiB come and go, as in a step; pages that were asked of the kernel again
PROGRAM = """
import resource, torch
from ddp_utils import optim
optim.keep_freed_memory(torch.device("cpu"))
def step():
    for size in (2**24, 2**19, 2**22):
        torch.zeros(size)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.parametrize("threshold", [None, "131072"])
def test_a_step_asks_the_kernel_for_little_memory_that_the_last_one_had(threshold, monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    if threshold:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", threshold)
    outcome = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    pages = 20 * 4 * (2**24 + 2**19 + 2**22) // 4096
    # the heap may still grow in the first ones
    assert int(outcome.stdout) > pages // 2 if threshold else int(outcome.stdout) < pages // 5
