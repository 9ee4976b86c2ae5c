"""A step of protein DPO against the plain one, four full passes a pair: mpnn_plain.py.

Ours: the backbone encoded once, all sequences on it decoded together, the reference's log-probs
known, backward, Adam. CPU seconds on one thread, the two in turns. `python
tests/bench/test_mpnn_faster.py` prints the table of all lengths, with peak memory and the share of
the limit (limit.py); with `--official FOLDER`, in which the package proteinmpnn 0.1.3 lies, the
official model takes the plain one's place.
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
from torch.nn import functional

from bench import limit, mpnn_plain
from dpo_inv.mpnn import ProteinMPNN
from scripts.test_mpnn import backbone, letters

BARS = {1: 4.5, 4: 8.0}  # pairs on one backbone -> how much faster; a shared machine gets 0.8
MEMORY = 0.5  # of the plain step's peak


class Official(torch.nn.Module):
    """The official model, called as the plain one."""

    def __init__(self):
        super().__init__()
        from proteinmpnn.protein_mpnn_utils import ProteinMPNN as Model

        sizes = {"num_letters": 21, "node_features": 128, "edge_features": 128, "hidden_dim": 128}
        self.model = Model(**sizes, k_neighbors=48, augment_eps=0.0, dropout=0.0)

    def forward(self, coords, mask, residue_idx, chain_encoding, sequence, order):
        designed, noise = torch.ones_like(mask), torch.zeros_like(mask)
        place = mask, designed, residue_idx, chain_encoding, noise
        return self.model(coords, sequence, *place, True, order)


class Case:
    """A made-up backbone with a made-up pair, and models with the same weights."""

    def __init__(self, length, official=False):
        torch.manual_seed(0)
        self.backbone = backbone(length)
        self.order = torch.randperm(length)[None]
        self.pair = letters(2, length)
        self.ours = ProteinMPNN()
        self.plain, self.reference = (
            (Official if official else mpnn_plain.Plain)() for _ in range(2)
        )
        for model in (self.plain, self.reference):
            (model.model if official else model).load_state_dict(self.ours.state_dict())
        self.our_optimizer = torch.optim.Adam(self.ours.parameters(), lr=1e-6)
        self.plain_optimizer = torch.optim.Adam(self.plain.parameters(), lr=1e-6)

    def plain_step(self):
        models = (self.plain, self.reference, self.plain_optimizer)
        backbone = [value[None] for value in self.backbone]
        return mpnn_plain.dpo_step(*models, backbone, *self.pair[:, None], self.order)

    @torch.no_grad()
    def plain_margin(self):
        """Return the plain model's log p of one side less that of the other."""
        sums = []
        for sequence in self.pair[:, None]:  # [1, L]
            log_probs = self.plain(*(part[None] for part in self.backbone), sequence, self.order)
            sums.append(log_probs.gather(-1, sequence[..., None]).sum().item())
        return sums[0] - sums[1]

    def margins(self, pairs):
        """log p of one side less that of the other, of so many pairs: [pairs]."""
        sequences = self.pair.repeat(pairs, 1)  # [2 * pairs, L]
        scores = self.ours.decode(self.ours.encode(*self.backbone), sequences, self.order)
        sums = scores.gather(-1, sequences[..., None]).squeeze(-1).sum(-1)
        return sums[0::2] - sums[1::2]

    def our_step(self, pairs, known=0.0):
        """Return the loss of one step on so many pairs; known: the reference's margin."""
        loss = -functional.logsigmoid(0.1 * (self.margins(pairs) - known)).mean()
        self.our_optimizer.zero_grad()
        loss.backward()
        self.our_optimizer.step()
        return loss.item()


def seconds(step, *args):
    start = time.process_time()
    step(*args)
    return time.process_time() - start


def ratios(case, pairs, repeats):
    """Sorted: seconds of the plain steps for as many pairs / seconds of ours."""
    case.plain_step()
    case.our_step(pairs)  # the first ones warm up
    return sorted(
        pairs * seconds(case.plain_step) / seconds(case.our_step, pairs) for _ in range(repeats)
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


@pytest.fixture(scope="module")
def case():
    return Case(106)


def test_both_steps_have_the_same_loss(case):
    """ln 2 at first; then, from the same weights, the same number again."""
    margin = case.margins(1).item()
    for step in range(3):
        plain = case.plain_step()
        assert case.our_step(1, margin) == pytest.approx(plain, abs=1e-3)
        assert step or plain == pytest.approx(np.log(2), abs=1e-6)


def test_a_step_is_that_much_faster_than_the_plain_one(case):
    for pairs, bar in BARS.items():
        assert statistics.median(ratios(case, pairs, 3)) >= 0.8 * bar


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_takes_half_the_memory():
    assert peak("ours", 106) <= MEMORY * peak("plain", 106)


def share(case, pairs):
    """Return the limit of our step over what it takes, the median of five."""
    with limit.Products() as products:
        case.our_step(pairs)
    shares = []
    for _ in range(5):
        ours = statistics.median(seconds(case.our_step, pairs) for _ in range(5))
        shares.append(limit.seconds(products.as_list()) / ours)
    return statistics.median(shares)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] and sys.argv[1] != "--official":  # a process of peak()
        measured = Case(int(sys.argv[2]))
        before = high_water()
        for _ in range(2):
            measured.plain_step() if sys.argv[1] == "plain" else measured.our_step(1)
        print(high_water() - before)
    else:
        sys.path += sys.argv[2:]
        for length in (50, 100, 200, 400):
            case = Case(length, bool(sys.argv[1:]))
            gap = abs(case.plain_margin() - case.margins(1).item())
            for pairs in BARS:
                found = ratios(case, pairs, 9 if length < 300 else 5)
                spread = f"{statistics.median(found):.1f} [{found[0]:.1f}, {found[-1]:.1f}]"
                print(f"L={length}, {pairs} pairs: {spread}, {share(case, pairs):.2f} of the limit")
            print(f"L={length}: log-probs of the two differ by {gap:.0e} nats")
        print(f"peak memory, L=354: {peak('ours', 354):.0f} MiB, of plain {peak('plain', 354):.0f}")
