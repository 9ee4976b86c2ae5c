"""Algorithms that learn Dark Rooms by trial, and whose learning is what gets distilled.

G goals with S streams each, all at once; the streams of a goal share what they learn, as the actors
of A3C do. So a history improves faster than one stream alone could: see single() for that.
"""

import numpy as np

from ad.darkroom import ACTIONS

GAMMA = 0.9  # discount; the best path is the shortest one for any below 1
ANNEALED = 0.6  # share of a history in which epsilon falls from 1 to 0


class Source:
    """What all sources start from: for each goal a table of cells and actions, all zeros."""

    rate = None  # the usual learning rate

    def __init__(self, room, groups, goal, steps, rate, rng):
        self.room = room
        self.rng = rng
        self.rate = rate or self.rate
        self.goal = goal
        self.annealed = ANNEALED * steps
        self.offset = groups * room.cells  # [H]: where a history's goal has its part of the table
        self.table = np.zeros(((groups.max() + 1) * room.cells, ACTIONS))
        self.values = np.zeros(len(self.table))

    def learn(self, cell, action, reward, after):
        """Learn from a step [H]; nothing by default."""


class QLearning(Source):
    """Tabular Q-learning (Watkins, 1989), epsilon-greedy, ties broken by chance."""

    rate = 0.5

    def act(self, time, cell):
        ties = self.rng.random((len(cell), ACTIONS)) * 1e-6
        greedy = (self.table[self.offset + cell] + ties).argmax(-1)
        return explore(greedy, 1 - time / self.annealed, self.rng)

    def learn(self, cell, action, reward, after):
        entry = (self.offset + cell) * ACTIONS + action
        best = self.table[self.offset + after].max(-1)
        error = reward + GAMMA * best - self.table.ravel()[entry]
        self.table.ravel()[:] += self.rate * mean_by(entry, error, self.table.size)


class ActorCritic(Source):
    """Tabular one-step actor-critic with a softmax policy (Sutton & Barto, 2018, 13.5)."""

    rate = 0.2

    def act(self, time, cell):
        logits = self.table[self.offset + cell]
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        self.odds = odds / odds.sum(-1, keepdims=True)  # [H, ACTIONS]
        return (self.odds.cumsum(-1)[:, :-1] < self.rng.random((len(cell), 1))).sum(-1)

    def learn(self, cell, action, reward, after):
        row = self.offset + cell
        size = len(self.values)
        error = reward + GAMMA * self.values[self.offset + after] - self.values[row]
        self.values += 0.5 * mean_by(row, error, size)
        for number in range(ACTIONS):
            slope = error * ((action == number) - self.odds[:, number])
            self.table[:, number] += self.rate * mean_by(row, slope, size)


class Noise(Source):
    """No learning: the shortest way, with less and less noise (Zisman et al., 2024, AD-eps)."""

    def act(self, time, cell):
        (x, y), (to_x, to_y) = divmod(cell, self.room.size), divmod(self.goal, self.room.size)
        along_x, along_y = np.where(to_x > x, 0, 1), np.where(to_y > y, 2, 3)
        either = self.rng.random(len(cell)) < 0.5
        action = np.where((to_x != x) & (either | (to_y == y)), along_x, along_y)
        action[(to_x == x) & (to_y == y)] = 4
        return explore(action, 1 - time / self.annealed, self.rng)


SOURCES = {"q_learning": QLearning, "actor_critic": ActorCritic, "noise": Noise}


def explore(action, share, rng):
    """The actions [H], a `share` of them replaced by random ones."""
    chosen = rng.random(len(action)) < share
    action[chosen] = rng.integers(ACTIONS, size=chosen.sum())
    return action


def mean_by(index, values, size):
    """Return the mean [size] of the values of each index, 0 for an index without values."""
    counts = np.bincount(index, minlength=size)
    return np.bincount(index, values, minlength=size) / np.maximum(counts, 1)


def histories(room, goals, streams, steps, config):
    """Return cells, actions and rewards of a source while it learns, uint8 [3, G * S, T].

    History g * streams + s is stream s of goals[g]; an episode begins where T is a multiple of the
    room's horizon. config: alg, alg_seed, source_lr.
    """
    groups = np.repeat(np.arange(len(goals)), streams)  # [H]
    goal = np.asarray(goals)[groups]
    rng = np.random.default_rng(config.alg_seed)
    source = SOURCES[config.alg](room, groups, goal, steps, config.source_lr, rng)
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
