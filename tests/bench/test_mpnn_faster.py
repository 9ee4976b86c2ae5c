"""A step of protein DPO against the plain one, four full passes a pair: mpnn_plain.py.

Ours: the backbone encoded once, all sequences on it decoded together, the reference's log-probs
known, backward, Adam. CPU seconds on one thread, the two in turns. `python
tests/bench/test_mpnn_faster.py` prints the table of all lengths, with peak memory.
"""

import gc
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[n]) for n in (1, 0)]
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import numpy as np
import pytest
import torch
from torch.nn import functional
from unit.test_mpnn import backbone, letters

from bench import mpnn_plain
from dpo_inv.mpnn import ProteinMPNN

BARS = {1: 4.5, 4: 8.0}  # pairs on one backbone -> how much faster; a shared machine gets 0.8
MEMORY = 0.5  # of the plain step's peak
SIZES = (68, 106, 354)  # residues, each with 48 neighbours: where they lie takes no time


class Case:
    """A made-up backbone with made-up pairs, two models with the same weights."""

    def __init__(self, length):
        torch.manual_seed(0)
        self.backbone, self.order = backbone(length), torch.randperm(length)[None]
        self.pairs = letters(1, 2, length)
        self.ours, self.plain, self.reference = (
            ProteinMPNN(),
            mpnn_plain.Plain(),
            mpnn_plain.Plain(),
        )
        for model in (self.plain, self.reference):
            model.load_state_dict(self.ours.state_dict())
        models = (self.ours, self.plain)
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=1e-6) for model in models]

    def plain_step(self):
        pair = self.pairs.unbind(1)
        models = (self.plain, self.reference, self.optimizers[1])
        return mpnn_plain.dpo_step(*models, self.backbone, *pair, self.order)

    def our_step(self, pairs, known=0.0):
        """The loss of one step on so many pairs; known: the reference's margins."""
        sequences = self.pairs.repeat(1, pairs, 1)  # [1, 2 * pairs, L]
        encoded = self.ours.encode(*self.backbone)
        found = self.ours.decode(encoded, sequences, self.order)
        logps = found.gather(-1, sequences[..., None]).squeeze(-1) * self.backbone[1]
        chosen, rejected = logps.sum(-1).unflatten(1, (pairs, 2)).unbind(-1)  # [1, pairs]
        loss = -functional.logsigmoid(0.1 * (chosen - rejected - known)).mean()
        self.optimizers[0].zero_grad()
        loss.backward()
        self.optimizers[0].step()
        return loss.item()

    def plain_pass(self):
        with torch.no_grad():
            self.plain(*self.backbone, self.pairs[:, 0], self.order)


def seconds(step):
    start = time.process_time()
    step()
    return time.process_time() - start


def ratios(case, turns):
    """Pairs on the backbone -> [plain step's seconds / ours for as many pairs]."""
    case.plain_step(), case.our_step(1)  # the first ones warm up
    found = {pairs: [] for pairs in BARS}
    for _ in range(turns):
        plain = seconds(case.plain_step)
        for pairs, list_ in found.items():
            ours = seconds(lambda pairs=pairs: case.our_step(pairs))
            list_.append((pairs * plain / ours, plain, ours))
    return found


def peak(which, length):
    """MiB that two steps take above what the process had before, in a process of their own."""
    command = [sys.executable, __file__, which, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_peak(which, length):
    case = Case(int(length))
    gc.collect()
    before = high_water()
    for _ in range(2):
        case.plain_step() if which == "plain" else case.our_step(1)
    print(high_water() - before)


def high_water():
    """MiB. Not ru_maxrss: there a process starts with the peak of whoever started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def table():
    for length in SIZES:
        case = Case(length)
        case.plain_pass()
        once = statistics.median(seconds(case.plain_pass) for _ in range(7)) * 1000 / length
        print(f"L={length}: plain forward {once:.2f} ms a residue", flush=True)
        for pairs, rows in ratios(case, 9 if length < 300 else 5).items():
            ratio, plain, ours = (sorted(column) for column in zip(*rows, strict=True))
            middle = [statistics.median(column) for column in (ratio, plain, ours)]
            print(
                f"  {pairs} pairs: plain {1e3 * pairs * middle[1]:.0f} ms, ours "
                f"{1e3 * middle[2]:.0f} ms: {middle[0]:.2f} times [{ratio[0]:.2f}, {ratio[-1]:.2f}]"
                f", bar {BARS[pairs]}",
                flush=True,
            )
    plain, ours = (peak(which, 354) for which in ("plain", "ours"))
    print(f"peak memory, L=354: plain {plain:.0f} MiB, ours {ours:.0f} MiB: {ours / plain:.2f}")


@pytest.fixture(scope="module")
def case():
    return Case(106)


def test_both_steps_have_the_same_loss(case):
    """ln 2 at first; then, from the same weights, the same number again."""
    with torch.no_grad():
        encoded = case.ours.encode(*case.backbone)
        found = case.ours.decode(encoded, case.pairs, case.order)
        logps = found.gather(-1, case.pairs[..., None]).squeeze(-1).sum(-1)
    margin = (logps[:, 0] - logps[:, 1]).item()
    for step in range(3):
        plain, ours = case.plain_step(), case.our_step(1, margin)
        assert ours == pytest.approx(plain, abs=1e-3)
        assert step or plain == pytest.approx(np.log(2), abs=1e-6)


def test_a_step_is_that_much_faster_than_the_plain_one(case):
    for pairs, rows in ratios(case, 3).items():
        middle = statistics.median(row[0] for row in rows)
        print(f"{pairs} pairs: {middle:.2f} times")
        assert middle >= 0.8 * BARS[pairs]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_takes_half_the_memory():
    plain, ours = (peak(which, 106) for which in ("plain", "ours"))
    print(f"plain {plain:.0f} MiB, ours {ours:.0f} MiB")
    assert ours <= MEMORY * plain


@pytest.mark.bench
def test_table():
    table()


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_peak(*sys.argv[1:]) if sys.argv[1:] else table()
