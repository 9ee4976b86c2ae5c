"""Algorithm Distillation as it is usually written, to measure against.

One target per window: n - 1 transitions (state, action, reward, next state) and a query state go
through nn.TransformerEncoder, and only the action after the query is learnt; windows come one by
one from a DataLoader. So does the code of the guide (tommyma3/AD_with_Compressed_Dataset).

    python tests/bench/ad_plain.py          # return against CPU seconds -> docs/img
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parents[1])]

from ad import collect, evaluate, windows  # noqa: E402
from ad.config import Config  # noqa: E402
from ad.darkroom import ACTIONS  # noqa: E402
from ad.model import Distiller, Model, Shape  # noqa: E402
from conftest import ROOT  # noqa: E402
from ddp_utils import optim  # noqa: E402

CONFIG = Config(tf_n_embd=64, tf_n_layer=4, tf_n_head=4, n_transit=80, n_stream=40)
SHAPE, CUT = Shape.of(CONFIG), windows.Cut.of(CONFIG)


class Plain(nn.Module):
    """Post-norm encoder, learned positions; the action after the last token.

    dropout: 0.1 in the guide's configuration.
    """

    def __init__(self, dropout=0.1, width=64, layers=4, heads=4, length=80):
        super().__init__()
        self.transition = nn.Linear(2 + ACTIONS + 1 + 2, width)
        self.query = nn.Embedding(81, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        sizes = width, heads, 4 * width, dropout
        layer = nn.TransformerEncoderLayer(*sizes, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, ACTIONS)

    def forward(self, transitions, query):
        hidden = torch.cat([self.transition(transitions), self.query(query)[:, None]], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        hidden = self.encoder(hidden + self.position, mask=mask, is_causal=True)
        return self.head(hidden[:, -1])


class Rows(torch.utils.data.Dataset):
    """One window and its one target at a time."""

    def __init__(self, arrays, length=80):
        self.arrays, self.length = arrays, length
        self.starts = arrays["state"].shape[1] - length

    def __len__(self):
        return len(self.arrays["state"]) * self.starts

    def __getitem__(self, index):
        history, start = divmod(index, self.starts)
        part = slice(start, start + self.length)
        cell = self.arrays["state"][history, part].astype(np.int64)
        action = self.arrays["action"][history, part].astype(np.int64)
        reward = self.arrays["reward"][history, part].astype(np.float32)
        place = np.stack(divmod(cell, 9), -1).astype(np.float32)  # [n, 2]
        onehot = np.eye(ACTIONS, dtype=np.float32)[action[:-1]]
        transitions = np.concatenate([place[:-1], onehot, reward[:-1, None], place[1:]], -1)
        return transitions, cell[-1], action[-1]


def histories(folder):
    path = Path(folder) / "histories.npz"
    if not path.exists():
        collect.collect(CONFIG, path)
    return windows.read(path)[0]


def targets_per_second(arrays, steps=8, dropout=0.1):
    """Supervised targets per CPU second of a training step: (plain, ours, which has none)."""
    torch.manual_seed(0)
    model = Plain(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    loader = torch.utils.data.DataLoader(Rows(arrays), 64, shuffle=False)
    for step, (transitions, query, action) in enumerate(loader):
        if step == 1:
            start = time.process_time()
        F.cross_entropy(model(transitions, query), action).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps:
            break
    plain = 64 * steps / (time.process_time() - start)
    data = windows.Histories(arrays, np.arange(73), 20, CUT, 40, 480, "cpu")
    distiller = Distiller(Model(SHAPE))
    optimizer = torch.optim.AdamW(distiller.parameters(), 3e-4)
    for step in range(steps + 1):
        if step == 1:
            start = time.process_time()
        distiller(data.batch(*data.draw(0, step, 64)))[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain, 64 * 80 * steps / (time.process_time() - start)


def curve(arrays, last_only, seconds, every=20):
    """[(CPU seconds of training, mean return of episodes 21 to 30 on held-out goals), ...]."""
    torch.manual_seed(0)
    room, (goals, held_out) = CONFIG.room, CONFIG.room.split(0, 0.9)
    data = windows.Histories(arrays, goals, 20, CUT, 40, 480, "cpu")
    distiller = Distiller(Model(SHAPE))
    optimizer = torch.optim.AdamW(distiller.parameters(), 3e-3, betas=(0.9, 0.99))
    settings = evaluate.Settings(eval_episodes=30, eval_copies=8)
    found, spent, step = [], 0.0, 0
    while spent < seconds:
        start, until = time.process_time(), spent + every
        while spent + time.process_time() - start < until:
            tokens, action = data.batch(*data.draw(0, step, 64))
            optimizer.param_groups[0]["lr"] = 3e-3 * optim.decay("constant", step, 10**6, 30)
            if last_only:
                logits = distiller.model(tokens)[:, -1]
                loss = F.cross_entropy(logits, action[:, -1])
            else:
                loss = distiller((tokens, action))[0].mean()
            loss.backward()
            nn.utils.clip_grad_norm_(distiller.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        spent += time.process_time() - start
        found.append((spent, evaluate.assess(distiller.model, room, held_out, settings, CUT)[0]))
        print(last_only, step, f"{spent:.0f} s", found[-1][1]["return_last10"], flush=True)
    return [(spent, summary["return_last10"]) for spent, summary in found]


def draw(curves, path):
    from matplotlib import pyplot as plt

    room = CONFIG.room
    held_out = room.split(0, 0.9)[1]
    figure, axis = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for label, found in curves.items():
        axis.plot(*zip((0, room.chance(held_out).mean()), *found, strict=True), "o-", label=label)
    axis.axhline(room.optimum(held_out).mean(), color="tab:green", label="optimum")
    axis.axhline(room.chance(held_out).mean(), color="tab:red", label="random")
    axis.set(title="mean return on held-out goals, episodes 21 to 30", ylim=(0, None))
    axis.set_xlabel("CPU seconds of training (1 thread, 64 windows a step)")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arrays = histories(folder)
    seconds = float(sys.argv[1]) if sys.argv[1:] else 240
    kinds = {"loss at every step": False, "at the last step of a window": True}
    curves = {label: curve(arrays, last, seconds) for label, last in kinds.items()}
    draw(curves, ROOT / "docs/img/ad_return_vs_cpu.png")
