"""Tasks as tables: where an action leads and what it pays; the agent sees none of it beforehand.

N tasks of a kind, S states, A actions; B tries at a time. Rooms have size x size cells, numbered
x * size + y.
"""

import importlib.util
import itertools
from typing import NamedTuple

import numpy as np

from ddp_utils import UserError

MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (0, 0))  # actions 0..4: +x, -x, +y, -y, stay


class Environment(NamedTuple):
    """N tasks of one kind; an episode has `horizon` steps, from one state on, and no fewer."""

    after: np.ndarray  # [N, S, A] the state an action leads to
    reward: np.ndarray  # [N, S, A] uint8: 1 where it pays, else 0
    start: int
    seen: np.ndarray  # [S] what is seen of a state, a number below the product of `shape`
    shape: tuple[int, ...]  # of what is seen: each of these coordinates has an embedding
    horizon: int
    names: list[str]  # of the tasks
    differ: str  # what the tasks differ in and a control hides: "reward", or "action"

    actions = property(lambda self: self.after.shape[2])

    def step(self, state, action, task):
        """Return the next states [B] and rewards [B], 0 or 1, for states, actions and tasks [B]."""
        return self.after[task, state, action], self.reward[task, state, action]

    def optimum(self, tasks):
        """Return the highest return that an episode of each task [G] can have, [G]."""
        return self.values(np.max, tasks)[:, self.start].max(-1)

    def chance(self, tasks):
        """Return the expected return of random actions in an episode of each task [G], [G]."""
        return self.values(np.mean, tasks)[:, self.start].mean(-1)

    def values(self, of_actions, tasks, discount=1.0):
        """Return each action's value with an episode to go, [G, S, A] (Bellman, 1957), exactly.

        of_actions: what a state is worth, of the values of its actions: np.max or np.mean.
        """
        after = self.after[tasks]
        row = np.arange(len(after))[:, None, None]
        values = reward = self.reward[tasks].astype(float)
        for _ in range(self.horizon - 1):
            values = reward + discount * of_actions(values, axis=-1)[row, after]
        return values

    def tasks(self, count):
        """Return the numbers of `count` tasks, always the same ones; 0: of all."""
        return np.sort(np.random.default_rng(0).permutation(len(self.after))[: count or None])

    def split(self, count, seed, ratio):
        """Shuffle `count` tasks; return those to train on and those held out."""
        order = np.random.default_rng(seed).permutation(self.tasks(count))
        return np.split(order, [round(ratio * len(order))])


def moves(size):
    """Return where the actions lead in an empty room, whose walls hold: [cells, 5]."""
    x, y = divmod(np.arange(size**2), size)
    after = []
    for dx, dy in MOVES:
        after.append(np.clip(x + dx, 0, size - 1) * size + np.clip(y + dy, 0, size - 1))
    return np.stack(after, -1)


def darkroom(size, horizon):
    """One cell, the task, pays for each step that ends on it, unseen (Laskin et al., 2022)."""
    cells = np.arange(size**2)
    after = np.broadcast_to(moves(size), (len(cells), len(cells), len(MOVES)))
    return Environment(
        after=after,
        reward=(after == cells[:, None, None]).astype(np.uint8),
        start=size // 2 * size + size // 2,
        seen=cells,
        shape=(size, size),
        horizon=horizon,
        names=[f"({cell // size}, {cell % size})" for cell in cells],
        differ="reward",
    )


def permuted(after, reward, start, shape, horizon):
    """Return as tasks one table [S, A] of states and rewards, under all orders of its actions."""
    orders = np.array([*itertools.permutations(range(after.shape[1]))])  # [N, A]
    return Environment(
        after=after[:, orders].swapaxes(0, 1),
        reward=reward[:, orders].swapaxes(0, 1).astype(np.uint8),
        start=start,
        seen=np.arange(len(after)),
        shape=shape,
        horizon=horizon,
        names=["".join(map(str, order)) for order in orders],
        differ="action",
    )


def darkroom_permuted(size, horizon):
    """From one corner to the opposite one, which pays; what the actions do is the task."""
    after = moves(size)
    return permuted(after, after == size**2 - 1, 0, (size, size), horizon)


def key_to_door(size, horizon):
    """A key pays once, then a door pays once; both are unseen, and so is whether one has the key.

    States are cell + cells * (0: no key, 1: key, 2: done). Laskin et al., 2022.
    """
    cells = size**2
    key, door = np.array([*itertools.permutations(range(cells), 2)]).T[..., None, None]
    to = np.broadcast_to(moves(size).astype(np.int16), (len(key), cells, len(MOVES)))
    at_key = to == key
    at_door = to == door
    after = [to + cells * at_key, to + cells * (1 + at_door), to + 2 * cells]
    names = [f"{a} > {b}" for a, b in zip(key.flat, door.flat, strict=True)]
    return Environment(
        after=np.concatenate(after, 1).astype(np.int16),
        reward=np.concatenate([at_key, at_door, np.zeros_like(at_key)], 1).astype(np.uint8),
        start=size // 2 * size + size // 2,
        seen=np.tile(np.arange(cells), 3),
        shape=(size, size),
        horizon=horizon,
        names=names,
        differ="reward",
    )


def gymnasium_table(name, horizon):
    """Return an environment of gymnasium with a table of transitions, under all orders of actions.

    Raises UserError if there is none by this name, or if it cannot be a table of ours.
    """
    kinds = ", ".join(KINDS)
    if not importlib.util.find_spec("gymnasium"):
        raise UserError(f"--env: no {name:.80}; give one of {kinds}, or pip install gymnasium")
    import gymnasium

    options = {"is_slippery": False} if name.startswith("FrozenLake") else {}
    problem = f"--env: {name:.80} has no table P in gymnasium, or it never pays, is left to chance "
    problem += f"or has more than 255 states (a byte); give one of {kinds}, FrozenLake-v1"
    try:
        played = gymnasium.make(name, **options).unwrapped
        states, actions = len(played.P), len(played.P[0])
        after = np.full((states + 1, actions), states)  # a state more: where an episode is over
        reward = np.zeros(after.shape, bool)
        for state, action in np.ndindex(states, actions):
            [(_, next_state, paid, over)] = played.P[state][action]
            reward[state, action] = paid > 0
            after[state, action] = states if over else next_state
    except (gymnasium.error.Error, AttributeError, ValueError) as error:
        raise UserError(problem) from error
    if not reward.any() or states > 255:
        raise UserError(problem)
    return permuted(after, reward, int(played.reset(seed=0)[0]), (states + 1,), horizon)


KINDS = {
    "darkroom": darkroom,
    "darkroom_permuted": darkroom_permuted,
    "key_to_door": key_to_door,
}


def make(name, size, horizon) -> Environment:
    """Return the tasks of a kind, or of an environment of gymnasium; size: cells to a side."""
    return KINDS[name](size, horizon) if name in KINDS else gymnasium_table(name, horizon)
