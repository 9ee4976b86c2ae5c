"""Algorithms that learn Dark Rooms by trial, and whose learning is what gets distilled.

G goals with S streams each, all at once; the streams of a goal share what they learn, as the actors
of A3C do. So a history improves faster than one stream alone could: see single() for that.
"""

import numpy as np

from ad.darkroom import ACTIONS

GAMMA = 0.9  # discount; the best path is the shortest one for any below 1
ANNEALED = 0.6  # share of a history in which epsilon falls from 1 to 0


class Source:
    """What a source starts from: for each goal a table of cells and actions, all zeros."""

    rate = None

    def __init__(self, room, groups, goal, steps, rate, rng):
        self.room, self.rng, self.rate = room, rng, rate or self.rate
        self.goal, self.annealed = goal, ANNEALED * steps
        self.offset = groups * room.cells  # [H]: where a history's goal has its part of the table
        self.table = np.zeros(((groups.max() + 1) * room.cells, ACTIONS))
        self.values = np.zeros(len(self.table))

    def learn(self, cell, action, reward, after):
        """What a step [H] teaches; nothing by default."""


class QLearning(Source):
    """Tabular Q-learning (Watkins, 1989), epsilon-greedy, ties broken by chance."""

    rate = 0.5

    def act(self, time, cell):
        ties = self.rng.random((len(cell), ACTIONS)) * 1e-6
        greedy = (self.table[self.offset + cell] + ties).argmax(-1)
        return explore(greedy, 1 - time / self.annealed, self.rng)

    def learn(self, cell, action, reward, after):
        place = (self.offset + cell) * ACTIONS + action
        best = self.table[self.offset + after].max(-1)
        error = reward + GAMMA * best - self.table.ravel()[place]
        self.table.ravel()[:] += self.rate * mean_by(place, error, self.table.size)


class ActorCritic(Source):
    """Tabular one-step actor-critic with a softmax policy (Sutton & Barto, 2018, 13.5)."""

    rate = 0.2

    def act(self, time, cell):
        logits = self.table[self.offset + cell]
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        self.odds = odds / odds.sum(-1, keepdims=True)  # [H, ACTIONS]
        drawn = self.rng.random((len(cell), 1))
        return (self.odds.cumsum(-1)[:, :-1] < drawn).sum(-1)

    def learn(self, cell, action, reward, after):
        place, size = self.offset + cell, len(self.values)
        error = reward + GAMMA * self.values[self.offset + after] - self.values[place]
        self.values += 0.5 * mean_by(place, error, size)
        for number in range(ACTIONS):
            slope = error * ((action == number) - self.odds[:, number])
            self.table[:, number] += self.rate * mean_by(place, slope, size)


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
    found = rng.random(len(action)) < share
    action[found] = rng.integers(ACTIONS, size=found.sum())
    return action


def mean_by(place, values, size):
    """[size]: the mean of the values that fall on each place, 0 where none does."""
    counts = np.bincount(place, minlength=size)
    return np.bincount(place, values, minlength=size) / np.maximum(counts, 1)


def histories(name, room, goals, streams, steps, seed, rate=None):
    """What a source does and gets while it learns: cells, actions, rewards, each uint8 [G * S, T].

    History g * streams + s is stream s of goals[g]; an episode begins where T is a multiple of the
    room's horizon.
    """
    goals = np.asarray(goals)
    groups = np.repeat(np.arange(len(goals)), streams)  # [H]
    goal = goals[groups]
    learner = SOURCES[name](room, groups, goal, steps, rate, np.random.default_rng(seed))
    found = np.empty((3, steps, len(goal)), dtype=np.uint8)
    for time in range(steps):
        if time % room.horizon == 0:
            cell = np.full(len(goal), room.start)
        action = learner.act(time, cell)
        after, reward = room.step(cell, action, goal)
        learner.learn(cell, action, reward, after)
        found[:, time] = cell, action, reward
        cell = after
    return tuple(np.ascontiguousarray(part.T) for part in found)


def single(name, room, goals, copies, episodes, seed, rate=None):
    """Mean return [episodes] of streams that share nothing: what one learner does alone."""
    alone = np.repeat(goals, copies)
    rewards = histories(name, room, alone, 1, episodes * room.horizon, seed, rate)[2]
    return rewards.reshape(len(alone), episodes, room.horizon).sum(-1).mean(0)
