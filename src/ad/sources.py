"""The algorithms whose learning is distilled: tabular Q-learning and posterior sampling.

H histories, T steps in each; N tasks, S states, A actions. All histories advance in parallel.
"""

import numpy as np
from tqdm import tqdm

from ad.config import Config

Array = np.ndarray

GAMMA = 0.9  # discount; for any value below 1 the best path is the shortest one
ANNEALED = 0.6  # fraction of a history in which epsilon falls from 1 to 0


class QLearning:
    """Tabular Q-learning (Watkins, 1989), epsilon-greedy, ties broken at random.

    table_of: [H] number of the table that each history reads and updates. Histories with a common
    table learn together, as the actors of A3C do, and improve faster than one could alone.
    """

    def __init__(self, config: Config, table_of: Array, steps: int):
        environment = config.environment
        self.rng = np.random.default_rng(config.alg_seed)
        self.rate = config.source_lr
        self.annealed = ANNEALED * steps
        self.states = environment.reward.shape[1]
        self.offset = table_of * self.states  # [H]: first row of a history's table
        shape = (table_of.max() + 1) * self.states, environment.actions
        self.table = np.full(shape, config.source_optimism, dtype=float)

    def act(self, time: int, state: Array) -> Array:
        """Return actions [H]: random with probability epsilon, otherwise the best so far."""
        actions = self.table.shape[1]
        ties = self.rng.random((len(state), actions)) * 1e-6
        action = (self.table[self.offset + state] + ties).argmax(-1)
        explores = self.rng.random(len(state)) < 1 - time / self.annealed
        action[explores] = self.rng.integers(actions, size=explores.sum())
        return action

    def learn(self, state: Array, action: Array, reward: Array, next_state: Array) -> None:
        """Move each table entry by the mean temporal-difference error of the steps [H] in it."""
        entry = (self.offset + state) * self.table.shape[1] + action
        best = self.table[self.offset + next_state].max(-1)
        error = reward + GAMMA * best - self.table.ravel()[entry]
        touched, place, counts = np.unique(entry, return_inverse=True, return_counts=True)
        self.table.ravel()[touched] += self.rate * (np.bincount(place, error) / counts)


class PosteriorSampling:
    """Act optimally in a randomly drawn task that could be this one (Thompson, 1933; Strens, 2000).

    It knows the training tasks only. Each history has a set of possible tasks and removes those
    that contradict its own steps. It draws one of the others at the beginning of an episode, and
    again if the drawn one is removed. If none is left, as in a held-out task, all are possible.
    With the task it draws an order of preference among equally good actions: the policy is then
    easier to imitate than one that chooses among them at random in every step.
    """

    def __init__(self, config: Config, table_of: Array, steps: int):
        environment = config.environment
        self.rng = np.random.default_rng(config.alg_seed)
        self.noise = config.source_noise
        self.horizon = environment.horizon
        tasks = np.sort(config.tasks[0])  # N of them
        values = environment.action_values(np.max, tasks, GAMMA)  # [N, S, A]
        self.best = values > values.max(-1, keepdims=True) - 1e-9  # [N, S, A]
        outcome = environment.next_state[tasks] * 2 + environment.reward[tasks]  # [N, S, A]
        self.outcome = np.ascontiguousarray(outcome.transpose(1, 2, 0))  # [S, A, N]
        self.possible = np.ones((len(table_of), len(values)), dtype=bool)  # [H, N]
        self.drawn = np.zeros(len(table_of), dtype=int)  # [H]
        self.order = np.zeros((len(table_of), environment.actions))  # [H, A] among equally good

    def act(self, time: int, state: Array) -> Array:
        """Return actions [H]: random with probability `noise`, otherwise the drawn task's best."""
        draws = ~self.possible[np.arange(len(state)), self.drawn] | (time % self.horizon == 0)
        odds = self.rng.random((draws.sum(), self.possible.shape[1]), dtype=np.float32)
        self.drawn[draws] = (odds * self.possible[draws]).argmax(-1)
        self.order[draws] = 1 + self.rng.random((draws.sum(), self.best.shape[2]))
        action = (self.order * self.best[self.drawn, state]).argmax(-1)
        explores = self.rng.random(len(state)) < self.noise
        action[explores] = self.rng.integers(self.best.shape[2], size=explores.sum())
        return action

    def learn(self, state: Array, action: Array, reward: Array, next_state: Array) -> None:
        """Remove the tasks in which the step would have had another outcome."""
        self.possible &= self.outcome[state, action] == (next_state * 2 + reward)[:, None]
        self.possible |= ~self.possible.any(-1, keepdims=True)


Source = QLearning | PosteriorSampling
SOURCES: dict[str, type[Source]] = {"q_learning": QLearning, "posterior": PosteriorSampling}


def histories(config: Config, tasks: Array, streams: int, steps: int) -> Array:
    """Run the source and return observations, actions and rewards, uint8 [3, G * streams, T].

    History g * streams + s is stream s of tasks[g]. An episode begins at every multiple of the
    horizon.
    """
    environment = config.environment
    task = np.repeat(tasks, streams)  # [H]
    table_of = np.arange(len(task)) // (streams if config.share_table else 1)
    source = SOURCES[config.source](config, table_of, steps)
    history = np.empty((3, steps, len(task)), dtype=np.uint8)
    for time in tqdm(range(steps), "source algorithm", leave=False, disable=None):
        if time % environment.horizon == 0:
            state = np.full(len(task), environment.start)
        action = source.act(time, state)
        next_state, reward = environment.step(state, action, task)
        source.learn(state, action, reward, next_state)
        history[:, time] = environment.observation[state], action, reward
        state = next_state
    return np.ascontiguousarray(history.transpose(0, 2, 1))


def returns(config: Config, tasks: Array, streams: int, steps: int) -> Array:
    """Return the mean return of each task's episodes while the source learns, [G, episodes]."""
    _, _, rewards = histories(config, tasks, streams, steps)
    return rewards.reshape(len(tasks), streams, -1, config.horizon).sum(-1).mean(1)
