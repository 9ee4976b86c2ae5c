"""Which rows a step trains on, for any number of processes: every row once, equal turns."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils import UserError
from ddp_utils.distributed import World
from ddp_utils.sampler import Plan, assign_micro_batches, checked_order, order, seed_of


def split(rows, lengths, world_size, size, padded=False):
    """Return the micro-batches of every rank."""
    worlds = [World(rank=rank, world_size=world_size) for rank in range(world_size)]
    return [assign_micro_batches(rows, lengths, world, size, padded) for world in worlds]


def trained(parts):
    """Rows with weight 1 over all ranks, sorted."""
    flat = [part for rank in parts for part in rank]
    return sorted(row for index, weight in flat for row, w in zip(index, weight, strict=True) if w)


def test_every_row_once_in_as_many_turns_on_every_rank():
    sizes = itertools.product(range(1, 6), range(1, 5), (True, False), range(14))
    for world_size, budget, padded, count in sizes:
        rows = list(range(100, 100 + count))
        parts = split(rows, {row: row % 7 for row in rows}, world_size, budget, padded)
        assert trained(parts) == rows
        turns = math.ceil(math.ceil(count / world_size) / budget)
        assert [len(rank) for rank in parts] == [turns] * world_size
        for index, weight in (part for rank in parts for part in rank):
            assert 1 <= len(index) == len(weight) <= budget
            assert set(weight) == {1.0} or weight == [0.0]


def test_a_small_batch_by_hand():
    # by length: 3 (9 tokens), 0 (7), 2 (5), 4 (2), 1 (1); dealt to two ranks in turn
    parts = split([0, 1, 2, 3, 4], [7, 1, 5, 9, 2], 2, 2, True)
    assert parts == [
        [([3, 2], [1.0, 1.0]), ([1], [1.0])],
        [([0, 4], [1.0, 1.0]), ([1], [0.0])],  # the filler repeats the shortest
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    world_size=st.integers(1, 6),
    budget=st.integers(1, 5),
    mixed=st.randoms(use_true_random=False),
)
def test_micro_batches_are_balanced_and_do_not_depend_on_the_order(
    lengths, world_size, budget, mixed
):
    rows = list(range(len(lengths)))
    parts = split(rows, lengths, world_size, budget)
    assert trained(parts) == rows
    tokens = [sum(lengths[row] for row in trained([rank])) for rank in parts]
    assert max(tokens) - min(tokens) <= max(lengths)
    mixed.shuffle(rows)
    assert split(rows, lengths, world_size, budget) == parts


def test_a_packed_batch_by_hand():
    # the longest first, each into the emptiest of four bins: [9], [7], [5], [2, 1]; then to and fro
    parts = split([0, 1, 2, 3, 4], [7, 1, 5, 9, 2], 2, 2)
    assert parts == [[([3], [1.0]), ([4, 1], [1.0, 1.0])], [([0], [1.0]), ([2], [1.0])]]
    # a full bin takes no more: [9, 1] of at most two, then [5, 5]
    parts = split([0, 1, 2, 3], [1, 9, 5, 5], 2, 2)
    assert parts == [[([1, 0], [1.0, 1.0])], [([2, 3], [1.0, 1.0])]]


def test_padded_neighbours_in_a_rank_are_of_like_length():
    lengths = [(7 * row) % 31 for row in range(31)]
    for rank in split(list(range(31)), lengths, 3, 4, True):
        seen = [lengths[row] for index, _ in rank for row in index]
        assert seen == sorted(seen, reverse=True)


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = {tuple(order(57, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(57)) not in orders


def test_an_epoch_is_permuted_once():
    """Of a million rows that takes 50 ms, which a step shall not pay."""
    checked_order.cache_clear()
    plan = Plan(rows=10_000, global_batch=16, seed=3)
    for step in range(100):
        assert len(plan.batch(step)) == 16
    assert checked_order.cache_info().misses == 1


def test_a_seed_is_the_same_on_every_machine():
    # printf '(0, 1)' | b2sum -l 64
    digests = {(0, 1): 0xEDC75A6672FD4BFA, (7,): 0xB8761AD355F56517}
    for numbers, digest in digests.items():
        assert seed_of(*numbers) == digest // 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_covers_every_row_once_and_its_last_batch_is_short(shuffle):
    for rows, batch in [(12, 4), (13, 4), (3, 4), (1, 1), (7, 7), (10, 3)]:
        plan = Plan(rows, batch, seed=5, shuffle=shuffle, num_epochs=3)
        per_epoch = -(-rows // batch)
        assert plan.steps_per_epoch == per_epoch and plan.steps == 3 * per_epoch
        for epoch in range(3):
            batches = [plan.batch(epoch * per_epoch + turn) for turn in range(per_epoch)]
            assert sorted(sum(batches, [])) == list(range(rows))
            assert {len(found) for found in batches[:-1]} <= {batch}
            assert len(batches[-1]) == rows - batch * (per_epoch - 1)
    plan = Plan(5, 2, seed=9, shuffle=False, num_epochs=2)
    assert [plan.batch(step) for step in range(6)] == [[0, 1], [2, 3], [4]] * 2


STEPS = {  # rows, batch, epochs, max_steps -> steps
    (10, 3, 1, -1): 4,
    (10, 3, 2.5, -1): 10,
    (10, 3, 0.1, -1): 1,
    (10, 3, 0.5, -1): 2,
    (10, 3, 1, 0): 0,
    (10, 3, 1, 2): 2,
    (10, 3, 1, 50): 50,
    (100, 1, 1.1, -1): 110,  # 110.00000000000001 in floats
}


def test_the_rows_used_by_a_run_are_those_of_its_steps():
    plan = Plan(10, 3, seed=4, max_steps=2)
    trained_on = plan.batch(0) + plan.batch(1)
    assert plan.rows_used() == sorted(trained_on) and len(trained_on) == 6
    # in the order of the file: steps 0 and 1 have rows 0 to 5; the last of 4 steps has row 9
    by_hand = {0: [], 2: [0, 1, 2, 3, 4, 5], 3: [*range(9)], 4: [*range(10)], 99: [*range(10)]}
    for steps, rows in by_hand.items():
        plan = Plan(10, 3, seed=4, shuffle=False, max_steps=steps)
        assert plan.rows_used() == rows
    assert Plan(10, 3, 4, num_epochs=2.5).rows_used() == [*range(10)]


def test_steps_of_a_run_and_when_something_is_due():
    for (rows, batch, *length), steps in STEPS.items():
        assert Plan(rows, batch, 0, True, *length).steps == steps
    plan = Plan(10, 3, 0, num_epochs=2.5)  # four steps an epoch
    assert [plan.epoch(step) for step in (0, 1, 4, 6)] == [0, 0.25, 1, 1.5]
    due = {1: list(range(1, 11)), 4: [4, 8, 10], 0: [4, 8, 10], 3: [3, 6, 9, 10], 99: [10]}
    for every, expected in due.items():
        assert [step for step in range(1, plan.steps + 1) if plan.due(every, step)] == expected


def test_the_largest_steps_have_the_most_tokens_and_the_longest_row():
    plan = Plan(7, 3, 0, shuffle=False, num_epochs=2)  # steps: rows 0 1 2, 3 4 5, 6, and again
    tokens = [5, 5, 5, 1, 9, 6, 15]
    assert plan.largest_steps(np.array(tokens)) == [1, 2]
    assert plan.largest_steps(np.array([5, 5, 5, 1, 9, 8, 3])) == [1]
    assert plan._replace(max_steps=1).largest_steps(np.array(tokens)) == [0]


NOT_ORDERS = {  # what a changed script may return for an epoch of three rows
    "lengths instead of row numbers": [7, 7, 2],
    "too few": [0, 2],
    "from 1": [1, 2, 3],
}


@pytest.mark.parametrize("name", NOT_ORDERS)
def test_an_order_that_leaves_out_or_repeats_rows_is_an_error(name):
    plan = Plan(3, 2, 0)._replace(order=lambda *_: NOT_ORDERS[name])
    with pytest.raises(UserError, match="Plan.order: rows are repeated or left out .expected each"):
        plan.batch(0)
    assert plan._replace(order=lambda *_: [2, 0, 1]).batch(0) == [2, 0]  # a list will do
