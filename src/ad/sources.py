"""Tabular Q-learning of Dark Rooms, whose learning is what gets distilled.

G goals with S streams each, all at once, H = G * S; the streams of a goal share one table, as the
actors of A3C do. So a history improves faster than one stream alone could: see single() for that.
"""

import numpy as np

from ad.darkroom import ACTIONS

GAMMA = 0.9  # discount; the best path is the shortest one for any below 1
ANNEALED = 0.6  # share of a history in which epsilon falls from 1 to 0


class QLearning:
    """Tabular Q-learning (Watkins, 1989), epsilon-greedy, ties broken by chance.

    groups: [H] the number of each history's goal, which has a table of cells and actions.
    """

    def __init__(self, room, groups, steps, rate, rng):
        self.rng = rng
        self.rate = rate
        self.annealed = ANNEALED * steps
        self.offset = groups * room.cells  # [H]: where a history's goal has its part of the table
        self.table = np.zeros(((groups.max() + 1) * room.cells, ACTIONS))

    def act(self, time, cell):
        """Return actions [H]: random ones with probability epsilon, else the best known."""
        ties = self.rng.random((len(cell), ACTIONS)) * 1e-6
        action = (self.table[self.offset + cell] + ties).argmax(-1)
        explores = self.rng.random(len(cell)) < 1 - time / self.annealed
        action[explores] = self.rng.integers(ACTIONS, size=explores.sum())
        return action

    def learn(self, cell, action, reward, after):
        """Move each entry by the mean of the errors of the histories [H] that met in it."""
        entry = (self.offset + cell) * ACTIONS + action
        best = self.table[self.offset + after].max(-1)
        error = reward + GAMMA * best - self.table.ravel()[entry]
        counts = np.bincount(entry, minlength=self.table.size)
        sums = np.bincount(entry, error, minlength=self.table.size)
        self.table.ravel()[:] += self.rate * (sums / np.maximum(counts, 1))


def histories(room, goals, streams, steps, config):
    """Return cells, actions and rewards of the source while it learns, uint8 [3, G * S, T].

    History g * streams + s is stream s of goals[g]; an episode begins where T is a multiple of the
    room's horizon. config: alg_seed, source_lr.
    """
    groups = np.repeat(np.arange(len(goals)), streams)  # [H]
    goal = np.asarray(goals)[groups]
    rng = np.random.default_rng(config.alg_seed)
    source = QLearning(room, groups, steps, config.source_lr, rng)
    history = np.empty((3, steps, len(goal)), dtype=np.uint8)
    for time in range(steps):
        if time % room.horizon == 0:
            cell = np.full(len(goal), room.start)
        action = source.act(time, cell)
        after, reward = room.step(cell, action, goal)
        source.learn(cell, action, reward, after)
        history[:, time] = cell, action, reward
        cell = after
    return np.ascontiguousarray(history.transpose(0, 2, 1))


def single(room, goals, copies, episodes, config):
    """Return the mean return [episodes] of streams that share nothing: what one learner does."""
    goals = np.repeat(goals, copies)
    _, _, rewards = histories(room, goals, 1, episodes * room.horizon, config)
    return rewards.reshape(len(goals), episodes, room.horizon).sum(-1).mean(0)
