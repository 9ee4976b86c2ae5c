"""Tasks as tables: the next state and the reward of every action. The agent never sees the tables.

N tasks of one kind, S states, A actions, B parallel episodes, G selected tasks. A grid has
size x size cells; cell (x, y) has the number x * size + y.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ddp_utils import UserError

Array = np.ndarray
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # actions 0..4: +x, -x, +y, -y, stay


class Environment(NamedTuple):
    """N tasks of one kind. Every episode begins in state `start` and has `horizon` steps."""

    next_state: Array  # [N, S, A]
    reward: Array  # [N, S, A] uint8, 0 or 1
    start: int
    observation: Array  # [S] what the agent sees of a state: a number below prod(shape)
    shape: tuple[int, ...]  # sizes of the coordinates of an observation; each has an embedding
    horizon: int
    varies: str  # what differs between tasks, and what a control hides: "reward" or "action"

    @property
    def actions(self) -> int:
        """Number of actions."""
        return self.next_state.shape[2]

    def step(self, state: Array, action: Array, task: Array) -> tuple[Array, Array]:
        """Return the next states [B] and the rewards [B] for states, actions and tasks [B]."""
        return self.next_state[task, state, action], self.reward[task, state, action]

    def optimum(self, tasks: Array) -> Array:
        """Return the highest possible return of an episode of each task [G], as [G]."""
        return self.action_values(np.max, tasks)[:, self.start].max(-1)

    def random_return(self, tasks: Array) -> Array:
        """Return the expected return of uniformly random actions in each task [G], as [G]."""
        return self.action_values(np.mean, tasks)[:, self.start].mean(-1)

    def action_values(self, state_value: Callable, tasks: Array, discount: float = 1.0) -> Array:
        """Return the exact value of each action at the start of an episode, [G, S, A].

        state_value: reduces the values of a state's actions to the value of the state: np.max for
        the best policy (value iteration; Bellman, 1957), np.mean for random actions.
        """
        next_state = self.next_state[tasks]
        task = np.arange(len(next_state))[:, None, None]
        values = reward = self.reward[tasks].astype(float)
        for _ in range(self.horizon - 1):
            values = reward + discount * state_value(values, axis=-1)[task, next_state]
        return values

    def tasks(self, count: int) -> Array:
        """Return the numbers of `count` randomly drawn tasks, always the same; 0: all tasks."""
        return np.sort(np.random.default_rng(0).permutation(len(self.reward))[: count or None])

    def split(self, count: int, seed: int, ratio: float) -> list[Array]:
        """Shuffle tasks(count) and return the training tasks and the held-out tasks."""
        order = np.random.default_rng(seed).permutation(self.tasks(count))
        return np.split(order, [round(ratio * len(order))])


def moves(size: int) -> Array:
    """Return the next cell of each action in an empty grid with walls around it: [cells, 5]."""
    x, y = divmod(np.arange(size**2), size)
    next_cell = []
    for dx, dy in MOVES:
        next_cell.append(np.clip(x + dx, 0, size - 1) * size + np.clip(y + dy, 0, size - 1))
    return np.stack(next_cell, -1)


def darkroom(size: int, horizon: int) -> Environment:
    """Reward each step that ends on one invisible cell, the task (Laskin et al., 2022)."""
    cells = np.arange(size**2)
    next_state = np.broadcast_to(moves(size), (len(cells), len(cells), len(MOVES)))
    reward = (next_state == cells[:, None, None]).astype(np.uint8)
    start = size // 2 * size + size // 2
    return Environment(next_state, reward, start, cells, (size, size), horizon, "reward")


def permuted(
    next_state: Array, reward: Array, start: int, shape: tuple[int, ...], horizon: int
) -> Environment:
    """Return one table [S, A] under all orders of its actions; the order is the task."""
    orders = np.array([*itertools.permutations(range(next_state.shape[1]))])  # [N, A]
    observation = np.arange(len(next_state))
    next_state = next_state[:, orders].swapaxes(0, 1)
    reward = reward[:, orders].swapaxes(0, 1).astype(np.uint8)
    return Environment(next_state, reward, start, observation, shape, horizon, "action")


def darkroom_permuted(size: int, horizon: int) -> Environment:
    """Reward the corner opposite to the start; the effect of each action is the task."""
    next_state = moves(size)
    return permuted(next_state, next_state == size**2 - 1, 0, (size, size), horizon)


@functools.lru_cache(maxsize=1)  # its tables are large, and are asked for several times
def key_to_door(size: int, horizon: int) -> Environment:
    """Reward an invisible key once and then an invisible door once (Laskin et al., 2022).

    States are cell + cells * (0: no key, 1: has the key, 2: done); the agent sees only the cell.
    """
    cells = size**2
    key, door = np.array([*itertools.permutations(range(cells), 2)]).T[..., None, None]
    to = np.broadcast_to(moves(size).astype(np.int16), (len(key), cells, len(MOVES)))
    at_key = to == key
    at_door = to == door
    no_key, with_key, done = to, to + cells, to + 2 * cells  # 16 bits: there are many tasks
    parts = [np.where(at_key, with_key, no_key), np.where(at_door, done, with_key), done]
    next_state = np.concatenate(parts, 1)
    reward = np.concatenate([at_key, at_door, np.zeros_like(at_key)], 1).astype(np.uint8)
    start = size // 2 * size + size // 2
    seen = np.tile(np.arange(cells), 3)
    return Environment(next_state, reward, start, seen, (size, size), horizon, "reward")


def from_gymnasium(name: str, horizon: int) -> Environment:
    """Return a tabular environment of gymnasium under all orders of its actions.

    Raises UserError if gymnasium has no environment of this name, or none that fits into a table.
    """
    expected = f"expected {', '.join(KINDS)}, or after pip install gymnasium an environment with a"
    expected += " deterministic table P, a reward and at most 255 states, such as FrozenLake-v1"
    unsupported = UserError(f"--env: {name:.80} is not supported ({expected})")
    options = {"is_slippery": False} if name.startswith("FrozenLake") else {}
    if not importlib.util.find_spec("gymnasium"):
        raise unsupported
    import gymnasium

    try:
        env: Any = gymnasium.make(name, **options).unwrapped
        states, actions = len(env.P), len(env.P[0])
        next_state = np.full((states + 1, actions), states)  # one more: the episode is over
        reward = np.zeros(next_state.shape, bool)
        for state, action in np.ndindex(states, actions):
            [(_, after, paid, is_over)] = env.P[state][action]
            reward[state, action] = paid > 0
            next_state[state, action] = states if is_over else after
    except (gymnasium.error.Error, ImportError, AttributeError, ValueError) as error:
        raise unsupported from error
    if not reward.any() or states > 255:  # a state is stored as one byte
        raise unsupported
    return permuted(next_state, reward, int(env.reset(seed=0)[0]), (states + 1,), horizon)


KINDS = {kind.__name__: kind for kind in (darkroom, darkroom_permuted, key_to_door)}


def make(name: str, size: int, horizon: int) -> Environment:
    """Return all tasks of a kind, or of an environment of gymnasium; size: cells per side."""
    if name in KINDS:
        return KINDS[name](size, horizon)
    return from_gymnasium(name, horizon)
