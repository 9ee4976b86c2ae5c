"""Algorithm Distillation, part by part: rooms, sources, windows, model, rollouts, files."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from ad import evaluate, evaluate_config, sources, windows
from ad.config import Config
from ad.darkroom import ACTIONS, Darkroom
from ad.model import EPISODE, INSIDE, NONE, REGION, Cache, Model, Tokens, rotate
from ad.model import rotations as rotations_of
from ddp_utils import UserError

# three episodes, one is dropped; 25 goals, 6 streams of 10 episodes
PLAIN = Config(grid_size=5, horizon=4, n_transit=12, n_stream=6, total_source_timesteps=240)
PLAIN = dataclasses.replace(PLAIN, train_n_stream=6, train_source_timesteps=40, tf_n_embd=16)
PLAIN = dataclasses.replace(PLAIN, tf_n_layer=2, tf_n_head=2, tf_n_inner=32)
# two regions of two episodes
REGIONS = dataclasses.replace(PLAIN, use_compressed_context=True, compress_interval=8)
ROOM = PLAIN.room


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("histories") / "histories.npz"
    windows.collect(PLAIN, path)
    return path


@pytest.fixture(scope="module")
def arrays(path):
    return windows.read(path, PLAIN.source())


def model_of(config, seed=0):
    """A model that has been through something: its head is not 0."""
    torch.manual_seed(seed)
    model = Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_actions_move_by_one_cell_and_walls_hold():
    here = np.array([0, 12, 24])  # a corner, the middle, the other corner
    x, y = divmod(ROOM.moves[here], 5)
    assert x.tolist() == [[1, 0, 0, 0, 0], [3, 1, 2, 2, 2], [4, 3, 4, 4, 4]]
    assert y.tolist() == [[0, 0, 1, 0, 0], [2, 2, 3, 1, 2], [4, 4, 4, 3, 4]]
    after, reward = ROOM.step(here, np.array([4, 0, 1]), np.array([0, 17, 24]))
    assert (after.tolist(), reward.tolist()) == ([0, 17, 19], [1, 1, 0])


def test_the_optimum_is_what_the_shortest_way_gets():
    room = Darkroom(9, 20)
    assert room.start == 40
    assert room.optimum([40, 49, 0]).tolist() == [20, 20, 13]  # the middle, beside it, a corner
    assert room.optimum(np.arange(81)).mean() == pytest.approx(16.543, abs=1e-3)
    assert Darkroom(9, 5).optimum([0]).tolist() == [0]  # out of reach


def test_chance_is_exact():
    expected = [0.2 if cell in (7, 11, 12, 13, 17) else 0 for cell in range(25)]
    assert Darkroom(5, 1).chance(np.arange(25)).tolist() == pytest.approx(expected)
    assert Darkroom(9, 20).chance(np.arange(81)).sum() == pytest.approx(20)  # somewhere each step


def test_goals_are_split_once_each():
    train, held_out = Darkroom().split(0, 0.9)
    assert (len(train), len(held_out)) == (73, 8)
    assert sorted([*train, *held_out]) == list(range(81))
    assert held_out.tolist() == Darkroom().split(0, 0.9)[1].tolist()
    assert held_out.tolist() != Darkroom().split(1, 0.9)[1].tolist()


def test_streams_that_meet_in_one_cell_learn_the_mean_of_their_errors():
    groups = np.array([0, 0, 1])
    q = sources.QLearning(ROOM, groups, 100, 0.5, np.random.default_rng(0))
    q.table[8] = [0, 1, 0, 0, 0]  # goal 0, cell 8
    q.learn(np.array([7, 7, 7]), np.array([2, 2, 2]), np.array([1, 0, 0]), np.array([8, 8, 8]))
    # errors 1 + 0.9 and 0 + 0.9 of goal 0; the other goal's table is its own, and empty
    assert q.table[7, 2] == pytest.approx(0.5 * (1.9 + 0.9) / 2)
    assert q.table[25 + 7].tolist() == [0] * 5
    assert np.count_nonzero(q.table) == 2


def test_the_source_begins_at_chance_and_ends_near_the_optimum():
    room, goals = Darkroom(9, 20), np.arange(81)
    config = Config(alg_seed=0)
    cell, action, reward = sources.histories(room, goals, 20, 600, config)
    returns = reward.reshape(81, 20, 30, 20).sum(-1).mean((0, 1))
    assert returns[0] < 0.6  # chance: 0.247
    assert returns[-1] > 0.9 * 16.54
    # what is written down is what happened
    after = room.moves[cell, action]
    inside = np.arange(599) % 20 != 19
    assert (after[:, :-1] == cell[:, 1:])[:, inside].all()
    assert (cell[:, ::20] == room.start).all()
    assert ((after == np.repeat(goals, 20)[:, None]) == reward).all()
    again = sources.histories(room, goals, 20, 600, config)
    assert (again == [cell, action, reward]).all()


def test_a_file_of_something_else_is_one_line(path, tmp_path):
    whole = path.read_bytes()
    for content in (b"text", b"", whole[:-99], whole[:300] + bytes(99) + whole[399:]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.npz: damaged, or no file of histories; remove"):
            windows.read(tmp_path / "bad.npz", {})
    with np.load(path) as file:
        np.savez(tmp_path / "bad.npz", **{**file, "reward": file["reward"].astype(object)})
    with pytest.raises(UserError, match="damaged, or no file"):  # it holds a pickle
        windows.read(tmp_path / "bad.npz", {})


def histories(arrays, config):
    return windows.Histories(arrays, (3, 4), config, "cpu")


def test_a_window_is_its_stretch_of_the_history(arrays):
    data = histories(arrays, PLAIN)
    assert data.count == 12
    row = 18 + arrays["reward"][18:30, 28:39].sum(1).argmax()  # of goals 3 and 4
    tokens, action = data.batch(np.array([row - 18, 0]), np.array([28, 0]))
    assert 0 < arrays["reward"][row, 28:39].sum() < 11
    assert tokens.cell[0].tolist() == arrays["state"][row, 28:40].tolist()
    assert action[0].tolist() == arrays["action"][row, 28:40].tolist()
    assert tokens.action[0].tolist() == [NONE, *arrays["action"][row, 28:39]]
    assert tokens.reward[0].tolist() == [0, *arrays["reward"][row, 28:39]]
    assert tokens.place[0].tolist() == [EPISODE, INSIDE, INSIDE, INSIDE] * 3


def test_regions_are_marked_by_the_clock(arrays):
    data = histories(arrays, REGIONS)
    tokens, _ = data.batch(np.array([0]), np.array([8]))
    first = [REGION, INSIDE, INSIDE, INSIDE, EPISODE, INSIDE, INSIDE, INSIDE]
    assert tokens.place[0].tolist() == first * 2
    assert {*data.draw(0, 0, 500)[1]} == {0, 8, 16, 24}


def test_windows_are_drawn_anew_in_each_step_and_equal_for_equal_seeds(arrays):
    data = histories(arrays, PLAIN)
    history, start = data.draw(5, 7, 4000)
    for seed, step in ((5, 8), (6, 7)):
        assert (data.draw(seed, step, 4000)[0] != history).any()
    assert (data.draw(5, 7, 4000)[0] == history).all()
    assert {*history} == set(range(12))
    # of 8 starts the first gets its share and the anchored ones
    assert (start == 0).mean() == pytest.approx(0.2 + 0.8 / 8, abs=0.03)
    assert {*start} == set(range(0, 32, 4))


def test_the_test_windows_begin_with_an_episode(arrays):
    """As those of the training, also where a window is no multiple of one (4 steps)."""
    _, start = histories(arrays, dataclasses.replace(PLAIN, n_transit=10)).all()
    assert start.tolist() == [0, 12, 24] * 12


def test_what_is_dropped_is_whole_episodes():
    for options, expected in (
        ({}, (240, 20, 60)),
        ({"n_transit": 90}, (90, 20, 20)),
        ({"use_compressed_context": True, "compress_interval": 80}, (160, 80, 80)),
    ):
        config = Config(**options)
        assert (config.window, config.unit, config.dropped) == expected


def random_tokens(batch, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    limits = (25, ACTIONS + 1, 2, 3)
    return Tokens(*(torch.randint(n, (batch, length), generator=draw) for n in limits))


def part(tokens, *index):
    return Tokens(*(tensor[:, slice(*index)] for tensor in tokens))


def test_nothing_that_comes_later_changes_a_prediction():
    """The original padded at the end and read its answer there."""
    model, tokens, other = model_of(PLAIN), random_tokens(2, 12), random_tokens(2, 12, seed=1)
    expected = model(tokens)
    for cut in (1, 5, 11):
        pairs = zip(part(tokens, cut), part(other, cut, 12), strict=True)
        mixed = model(Tokens(*(torch.cat(pair, 1) for pair in pairs)))
        assert torch.allclose(mixed[:, :cut], expected[:, :cut], atol=1e-6)
        assert not torch.allclose(mixed[:, cut:], expected[:, cut:], atol=1e-3)


def test_keys_and_values_that_are_kept_change_nothing():
    model, tokens = model_of(PLAIN), random_tokens(3, 12)
    expected = model(tokens)  # [3, 12, ACTIONS]
    for kept in (1, 5, 11):
        cache = Cache(model, 3)
        logits = [model(part(tokens, kept), cache)]
        for time in range(kept, 12):
            logits.append(model(part(tokens, time, time + 1), cache))
        assert torch.cat(logits, 1).sub(expected).abs().max() <= 1e-5


def test_positions_turn_by_their_angle():
    states = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])  # one head, D = 2: rate 1
    turned = rotate(states, rotations_of(3, 2))[0, 0]
    expected = [[1, 0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    assert turned.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_cell_is_its_x_and_its_y():
    """Factorised, so that a goal never seen is made of parts that were."""
    model, seen = model_of(dataclasses.replace(PLAIN, n_transit=25)), []
    model.layers[0].norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    zeros = torch.zeros(1, 25, dtype=torch.long)
    model(Tokens(torch.arange(25)[None], zeros, zeros, zeros))
    x, y = divmod(np.arange(25), 5)
    expected = model.x.weight[x] + model.y.weight[y]
    expected = expected + model.action.weight[0] + model.reward.weight[0] + model.place.weight[0]
    assert torch.allclose(seen[0][0], expected, atol=1e-6)


def record(model, cached=True):
    """The tokens of each forward; cached: False computes all of the context anew at each step."""
    seen, forward = [], model.forward

    def recorded(tokens, cache=None):
        seen.append(Tokens(*(tensor.clone() for tensor in tokens)))
        return forward(tokens, cache if cached else None)

    model.forward = recorded
    return seen


@pytest.mark.parametrize("config", [PLAIN, REGIONS], ids=["plain", "regions"])
@pytest.mark.parametrize("control", [{}, {"wiped": True}, {"hide_rewards": True}], ids=str)
def test_a_try_is_the_same_without_a_cache(config, control):
    """Through many drops of the oldest part; the actions are drawn from equal odds."""
    model, goals = model_of(config), np.arange(25)
    kept = evaluate.rollout(model, config, goals, 12, 3, **control)
    assert kept.shape == (25, 12)
    assert (kept != evaluate.rollout(model, config, goals, 12, 4, **control)).any()
    seen = record(model, cached=False)
    anew = evaluate.rollout(model, config, goals, 12, 3, **control)
    assert (kept == anew).all()
    lengths = [tokens.cell.shape[1] for tokens in seen]
    assert max(lengths) == (4 if control.get("wiped") else config.window)


def test_rollouts_see_what_training_showed():
    """The tokens of a try are those of a window of its history."""
    model, goals = model_of(PLAIN), np.array([12, 13])
    seen = record(model, cached=False)
    evaluate.rollout(model, PLAIN, goals, 5, 0)
    cells = torch.cat([tokens.cell[:, -1:] for tokens in seen], 1).numpy()  # [2, 20]
    actions = torch.cat([tokens.action[:, -1:] for tokens in seen[1:]], 1).numpy()
    rewards = torch.cat([tokens.reward[:, -1:] for tokens in seen[1:]], 1).numpy()
    after = ROOM.moves[cells[:, :-1], actions]
    assert (rewards == (after == goals[:, None])).all()
    arrays = {"state": cells, "action": np.pad(actions, ((0, 0), (0, 1)))}
    arrays["reward"] = np.pad(rewards, ((0, 0), (0, 1)))
    config = dataclasses.replace(PLAIN, n_stream=1, train_source_timesteps=20)
    data = windows.Histories(arrays, (0, 1), config, "cpu")
    tokens, _ = data.batch(np.arange(2), np.array([8, 8]))
    for name in Tokens._fields:  # of step 19, in a context that begins at step 8
        assert (getattr(tokens, name) == getattr(seen[-1], name)).all(), name


def test_hidden_rewards_are_hidden():
    """They are paid, and the model sees none of them."""
    model = model_of(PLAIN)
    seen = record(model)
    goals = np.full(50, ROOM.start)  # which pays those who stay
    for hidden in (False, True):
        seen.clear()
        assert evaluate.rollout(model, PLAIN, goals, 3, 0, hide_rewards=hidden).sum() > 0
        assert any(tokens.reward.any() for tokens in seen) != hidden


def test_an_agent_that_knows_the_way_gets_the_optimum():
    class Knows(Model):
        """Walks to cell (4, 2), whatever it sees."""

        def forward(self, tokens, cache=None):
            action = torch.where(tokens.cell == 22, 4, 0)
            return torch.nn.functional.one_hot(action, ACTIONS) * 1e3

    settings = evaluate_config.Config(eval_episodes=3, eval_copies=2)
    summary, returns, others = evaluate.assess(
        Knows(PLAIN), np.array([22]), PLAIN, settings, controls=True
    )
    assert returns.tolist() == [[3, 3, 3]]  # two steps to go, paid from the second on, of four
    assert summary["optimum"] == summary["return_first"] == summary["return_last10"] == 3
    assert summary["fraction_of_optimum"] == summary["control_wiped"] == 1
    assert set(others) == {"control_wiped", "control_zero_reward"}
