"""Dark Room: a room without light in which one cell, unseen, pays 1 for each step that ends on it.

The task of Laskin et al., In-context Reinforcement Learning with Algorithm Distillation (2022).
Cells are numbers x * size + y, so that a step is one look into a table; B rooms at a time.
"""

import numpy as np

MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # actions 0..4: +x, -x, +y, -y, stay
ACTIONS = len(MOVES)


class Darkroom:
    """A square room. Episodes have `horizon` steps, begin in the middle and never end earlier."""

    def __init__(self, size=9, horizon=20):
        self.size = size
        self.horizon = horizon
        self.cells = size**2
        self.start = size // 2 * size + size // 2
        self.moves = np.empty((self.cells, ACTIONS), dtype=np.int64)  # where an action leads
        x, y = divmod(np.arange(self.cells), size)
        for action, (dx, dy) in enumerate(MOVES):  # walls hold
            after_x = np.clip(x + dx, 0, size - 1)
            self.moves[:, action] = after_x * size + np.clip(y + dy, 0, size - 1)

    def step(self, cell, action, goal):
        """Return next cells [B] and rewards [B] of 0 or 1 for cells, actions and goals [B]."""
        after = self.moves[cell, action]
        return after, (after == goal).astype(np.uint8)

    def optimum(self, goal):
        """Return the most that an episode can pay: all steps after the shortest way, [B]."""
        x, y = divmod(np.asarray(goal), self.size)
        distance = np.abs(x - self.size // 2) + np.abs(y - self.size // 2)
        return np.clip(self.horizon + 1 - distance, 0, self.horizon)

    def chance(self, goal):
        """Return the expected return of random actions, exactly, [B]."""
        here = np.eye(self.cells)[self.start]
        paid = np.zeros(self.cells)
        for _ in range(self.horizon):
            here = np.bincount(self.moves.ravel(), np.repeat(here / ACTIONS, ACTIONS), self.cells)
            paid += here
        return paid[goal]

    def split(self, seed, ratio):
        """Shuffle all cells as goals; returns those to train on and those held out."""
        order = np.random.default_rng(seed).permutation(self.cells)
        count = round(ratio * self.cells)
        return order[:count], order[count:]
