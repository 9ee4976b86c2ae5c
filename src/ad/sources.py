"""Algorithms whose learning is what gets distilled: tabular Q-learning, and posterior sampling.

H histories, T steps of each; N tasks, S states, A actions. All histories advance at once.
"""

import numpy as np

GAMMA = 0.9  # discount; the best path is the shortest one for any below 1
ANNEALED = 0.6  # share of a history in which epsilon falls from 1 to 0


class QLearning:
    """Tabular Q-learning (Watkins, 1989), epsilon-greedy, ties broken by chance.

    table_of: [H] the number of each history's table of states and actions. Histories that share
    one learn together, as the actors of A3C do, and improve faster than one alone could.
    """

    def __init__(self, environment, table_of, steps, config, rng):
        self.rng = rng
        self.rate = config.source_lr
        self.annealed = ANNEALED * steps
        self.states = environment.after.shape[1]
        self.offset = table_of * self.states  # [H]: where a history's table begins
        shape = (table_of.max() + 1) * self.states, environment.actions
        self.table = np.full(shape, config.source_optimism, dtype=float)

    def act(self, time, state):
        """Return actions [H]: random ones with probability epsilon, else the best known."""
        actions = self.table.shape[1]
        ties = self.rng.random((len(state), actions)) * 1e-6
        action = (self.table[self.offset + state] + ties).argmax(-1)
        explores = self.rng.random(len(state)) < 1 - time / self.annealed
        action[explores] = self.rng.integers(actions, size=explores.sum())
        return action

    def learn(self, state, action, reward, after):
        """Move each entry by the mean of the errors of the histories [H] that met in it."""
        entry = (self.offset + state) * self.table.shape[1] + action
        best = self.table[self.offset + after].max(-1)
        error = reward + GAMMA * best - self.table.ravel()[entry]
        counts = np.bincount(entry, minlength=self.table.size)
        sums = np.bincount(entry, error, minlength=self.table.size)
        self.table.ravel()[:] += self.rate * (sums / np.maximum(counts, 1))


class PosteriorSampling:
    """Act as is best in a task that could be this one (Thompson, 1933; Strens, 2000).

    Each history knows the N tasks of its kind and rules out those that its own steps contradict.
    It draws one of the others when an episode begins and when the drawn one is ruled out, and with
    it an order of the actions, in which it takes equally good ones: who learns from its histories
    has less to go by if these are taken by chance in each step.
    """

    def __init__(self, environment, table_of, steps, config, rng):
        self.rng = rng
        self.noise = config.source_noise
        self.horizon = environment.horizon
        values = environment.values(np.max, np.arange(len(environment.after)), GAMMA)  # [N, S, A]
        self.best = values > values.max(-1, keepdims=True) - 1e-9  # [N, S, A]
        outcome = environment.after * 2 + environment.reward  # [N, S, A]
        self.outcome = np.ascontiguousarray(outcome.transpose(1, 2, 0))  # [S, A, N]
        self.possible = np.ones((len(table_of), len(values)), dtype=bool)  # [H, N]
        self.drawn = np.zeros(len(table_of), dtype=int)  # [H]
        self.order = np.zeros((len(table_of), environment.actions))  # [H, A] of equally good ones

    def act(self, time, state):
        """Return actions [H], of which a share `noise` is random."""
        draws = ~self.possible[np.arange(len(state)), self.drawn] | (time % self.horizon == 0)
        odds = self.rng.random((draws.sum(), self.possible.shape[1]), dtype=np.float32)
        self.drawn[draws] = (odds * self.possible[draws]).argmax(-1)
        self.order[draws] = 1 + self.rng.random((draws.sum(), self.best.shape[2]))
        action = (self.order * self.best[self.drawn, state]).argmax(-1)
        explores = self.rng.random(len(state)) < self.noise
        action[explores] = self.rng.integers(self.best.shape[2], size=explores.sum())
        return action

    def learn(self, state, action, reward, after):
        """Rule out the tasks in which the step would have ended otherwise."""
        self.possible &= self.outcome[state, action] == (after * 2 + reward)[:, None]


SOURCES = {"q_learning": QLearning, "posterior": PosteriorSampling}


def histories(environment, tasks, streams, steps, config, shared=True):
    """Return states, actions and rewards of the source while it learns, uint8 [3, G * streams, T].

    History g * streams + s is stream s of tasks[g]; its states are what is seen of them. An episode
    begins where T is a multiple of the horizon. shared: the streams of a task learn together, where
    the source can. config: source, alg_seed, source_lr, source_optimism, source_noise.
    """
    task = np.repeat(tasks, streams)  # [H]
    table_of = np.arange(len(task)) // (streams if shared else 1)
    rng = np.random.default_rng(config.alg_seed)
    source = SOURCES[config.source](environment, table_of, steps, config, rng)
    history = np.empty((3, steps, len(task)), dtype=np.uint8)
    for time in range(steps):
        if time % environment.horizon == 0:
            state = np.full(len(task), environment.start)
        action = source.act(time, state)
        after, reward = environment.step(state, action, task)
        source.learn(state, action, reward, after)
        history[:, time] = environment.seen[state], action, reward
        state = after
    return np.ascontiguousarray(history.transpose(0, 2, 1))


def returns(environment, tasks, streams, steps, config, shared=True):
    """Return the mean return of each task's episodes while the source learns it, [G, episodes]."""
    _, _, rewards = histories(environment, tasks, streams, steps, config, shared)
    size = len(tasks), streams, steps // environment.horizon, environment.horizon
    return rewards.reshape(size).sum(-1).mean(1)
