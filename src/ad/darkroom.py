"""Dark Room: a room without light in which one cell, unseen, pays 1 for each step that ends on it.

The task of Laskin et al., In-context Reinforcement Learning with Algorithm Distillation (2022).
Cells are numbers x * size + y, so that a step is one look into a table; B rooms at a time.
"""

import functools
from typing import NamedTuple

import numpy as np

MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # actions 0..4: +x, -x, +y, -y, stay
ACTIONS = len(MOVES)


class Darkroom(NamedTuple):
    """A square room. Episodes have `horizon` steps, begin in the middle and never end earlier."""

    size: int = 9
    horizon: int = 20

    @property
    def cells(self):
        return self.size**2

    @property
    def start(self):
        return self.size // 2 * self.size + self.size // 2

    @property
    def moves(self):
        """[cells, ACTIONS]: where an action leads; walls hold."""
        return _moves(self.size)

    def step(self, cell, action, goal):
        """Cells, actions and goals [B] -> next cells [B] and rewards [B] of 0 or 1."""
        after = self.moves[cell, action]
        return after, (after == goal).astype(np.uint8)

    def distance(self, goal):
        """Steps from the start to each goal [B]."""
        (x, y), (x0, y0) = divmod(np.asarray(goal), self.size), divmod(self.start, self.size)
        return np.abs(x - x0) + np.abs(y - y0)

    def optimum(self, goal):
        """The most that an episode can pay who knows the goal: the last steps are on it, [B]."""
        return np.clip(self.horizon + 1 - self.distance(goal), 0, self.horizon)

    def chance(self, goal):
        """The expected return of random actions, exactly, [B]."""
        here, paid = np.eye(self.cells)[self.start], np.zeros(self.cells)
        for _ in range(self.horizon):
            here = np.bincount(self.moves.ravel(), np.repeat(here / ACTIONS, ACTIONS), self.cells)
            paid += here
        return paid[goal]

    def split(self, seed, ratio):
        """All cells as goals, shuffled: (to train on, held out)."""
        order = np.random.default_rng(seed).permutation(self.cells)
        count = round(ratio * self.cells)
        return order[:count], order[count:]


@functools.cache
def _moves(size):
    x, y = divmod(np.arange(size**2), size)
    steps = [np.clip(x + dx, 0, size - 1) * size + np.clip(y + dy, 0, size - 1) for dx, dy in MOVES]
    return np.stack(steps, -1)
