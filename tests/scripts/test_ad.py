"""Algorithm Distillation, part by part: rooms, sources, windows, model, rollouts, files."""

import json
import math

import numpy as np
import pytest
import torch

from ad import collect, evaluate, sources, windows
from ad.config import Source
from ad.darkroom import ACTIONS, Darkroom
from ad.model import EPISODE, INSIDE, NONE, REGION, Cache, Distiller, Model, Shape, Tokens
from ddp_utils import UserError

ROOM = Darkroom(5, 4)
SHAPE = Shape(5, 16, 2, 2, 32, 12)
PLAIN = windows.Cut(12, 4, 0, 4)  # three episodes, one is dropped
REGIONS = windows.Cut(16, 8, 8, 8)  # two regions of two episodes


@pytest.fixture(scope="module")
def arrays():
    """All 25 goals, 6 streams of 10 episodes."""
    goals = np.arange(25)
    found = sources.histories("q_learning", ROOM, goals, 6, 40, 0)
    named = dict(zip(("state", "action", "reward"), found, strict=True))
    return {**named, "goal": goals, "history_goal": np.repeat(goals, 6)}


def model_of(shape, seed=0):
    """A model that has been through something: its head is not 0."""
    torch.manual_seed(seed)
    model = Model(shape)
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
    assert Darkroom(5, 1).chance(np.arange(25)).tolist() == pytest.approx(
        [0.2 if cell in (7, 11, 12, 13, 17) else 0 for cell in range(25)]
    )
    room = Darkroom(9, 20)
    assert room.chance(np.arange(81)).sum() == pytest.approx(20)  # each step is somewhere


def test_goals_are_split_once_each():
    train, held_out = Darkroom().split(0, 0.9)
    assert (len(train), len(held_out)) == (73, 8)
    assert sorted([*train, *held_out]) == list(range(81))
    assert held_out.tolist() == Darkroom().split(0, 0.9)[1].tolist()
    assert held_out.tolist() != Darkroom().split(1, 0.9)[1].tolist()


def test_streams_that_meet_in_one_cell_learn_the_mean_of_their_errors():
    groups = np.array([0, 0, 1])
    q = sources.QLearning(ROOM, groups, None, 100, 0.5, np.random.default_rng(0))
    q.table[8] = [0, 1, 0, 0, 0]  # goal 0, cell 8
    q.learn(np.array([7, 7, 7]), np.array([2, 2, 2]), np.array([1, 0, 0]), np.array([8, 8, 8]))
    # errors 1 + 0.9 and 0 + 0.9 of goal 0; the other goal's table is its own, and empty
    assert q.table[7, 2] == pytest.approx(0.5 * (1.9 + 0.9) / 2)
    assert q.table[25 + 7].tolist() == [0] * 5
    assert np.count_nonzero(q.table) == 2


def test_the_actor_critic_moves_towards_what_paid():
    critic = sources.ActorCritic(ROOM, np.array([0]), None, 100, 1.0, np.random.default_rng(0))
    action = critic.act(0, np.array([7]))
    critic.learn(np.array([7]), action, np.array([1]), np.array([8]))
    expected = np.full(5, -0.2)  # error 1 times (one-hot - 1/5)
    expected[action] += 1
    assert critic.table[7] == pytest.approx(expected)
    assert critic.values[7] == pytest.approx(0.5)


@pytest.mark.parametrize("name", sources.SOURCES)
def test_sources_begin_at_chance_and_end_near_the_optimum(name):
    room, goals = Darkroom(9, 20), np.arange(81)
    cell, action, reward = sources.histories(name, room, goals, 20, 600, 0)
    returns = reward.reshape(81, 20, 30, 20).sum(-1).mean((0, 1))
    assert returns[0] < 3.0 if name == "actor_critic" else returns[0] < 0.6  # chance: 0.247
    assert returns[-1] > 0.9 * 16.54
    # what is written down is what happened
    goal = np.repeat(goals, 20)[:, None]
    after = room.moves[cell, action]
    inside = np.arange(599) % 20 != 19
    assert (after[:, :-1] == cell[:, 1:])[:, inside].all()
    assert (cell[:, ::20] == room.start).all()
    assert ((after == goal) == reward).all()
    again = sources.histories(name, room, goals, 20, 600, 0)
    assert all((a == b).all() for a, b in zip(again, (cell, action, reward), strict=True))


SMALL = Source(grid_size=5, horizon=4, n_stream=3, total_source_timesteps=60)


def test_a_file_that_is_there_is_refused_before_the_work(tmp_path, monkeypatch):
    path = tmp_path / "histories.npz"
    path.write_text("mine")
    monkeypatch.setattr(collect, "collect", None)
    with pytest.raises(UserError, match="exists; remove it"):
        collect.main([f"traj_file={path}"])
    assert path.read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def half(stream, **arrays):
        stream.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(OSError, match="No space"):
        collect.collect(SMALL, tmp_path / "histories.npz")
    assert list(tmp_path.iterdir()) == []


def put(value):
    """A change of an array: its item at (7, 5), or at 5 if it has no columns, becomes value."""

    def change(array):
        array = array.astype(np.result_type(array, type(value)))
        array[(7, 5)[-array.ndim :]] = value
        return array

    return change


HARMS = [  # array, what becomes of it, what the line says
    ("reward", put(math.nan), "reward holds other values than 0 to 1"),
    ("reward", lambda array: array.astype(object), "bad.npz: not a file of collect.py; make it"),
    ("state", put(25), "state holds other values than 0 to 24"),
    ("action", put(1.5), "action holds other values than 0 to 4"),
    ("action", lambda array: array[:, 1:], "action is (150, 39), its settings say (150, 40)"),
    ("goal", put(25), "goal is not what its settings say"),
    ("history_goal", put(-1), "history_goal is not what its settings say"),
    ("meta", lambda array: np.array("{"), "bad.npz: not a file of collect.py (Expecting property"),
]


@pytest.mark.filterwarnings("error::RuntimeWarning")  # numpy's would be lines, too
def test_what_collect_did_not_write_is_one_line(arrays, tmp_path):
    meta = {"grid_size": 5, "horizon": 4, "n_stream": 6, "total_source_timesteps": 240}
    data = {**arrays, "meta": np.array(json.dumps(meta))}
    np.savez(tmp_path / "good.npz", **data)
    found, said = windows.read(tmp_path / "good.npz")
    assert said == meta and all((found[name] == arrays[name]).all() for name in arrays)
    for name, harm, says in HARMS:
        np.savez(tmp_path / "bad.npz", **{**data, name: harm(data[name])})
        with pytest.raises(UserError) as caught:
            windows.read(tmp_path / "bad.npz")
        assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1
    whole = (tmp_path / "good.npz").read_bytes()
    for content in (b"text", b"", whole[:-99], whole[:300] + bytes(99) + whole[399:]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="not a file of collect.py"):
            windows.read(tmp_path / "bad.npz")


def histories(arrays, cut, goals=(3, 4)):
    return windows.Histories(arrays, goals, 4, cut, 6, 40, "cpu")


def test_a_window_is_its_stretch_of_the_history(arrays):
    data = histories(arrays, PLAIN)
    assert data.count == 12
    tokens, action = data.batch(np.array([7, 0]), np.array([8, 0]))  # stream 1 of goal 4
    row = 4 * 6 + 1
    assert tokens.cell[0].tolist() == arrays["state"][row, 8:20].tolist()
    assert action[0].tolist() == arrays["action"][row, 8:20].tolist()
    assert tokens.action[0].tolist() == [NONE, *arrays["action"][row, 8:19]]
    assert tokens.reward[0].tolist() == [0, *arrays["reward"][row, 8:19]]
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
    # of 8 places to begin at the first gets its share and the anchored ones
    share = (start == 0).mean()
    assert share == pytest.approx(0.2 + 0.8 / 8, abs=0.03)
    assert {*start} == set(range(0, 32, 4))


def test_the_test_windows_begin_with_an_episode(arrays):
    """As those of the training, also where a window is no multiple of one (4 steps)."""
    _, start = histories(arrays, windows.Cut(10, 4, 0, 4)).all()
    assert start.tolist() == [0, 12, 24] * 12


def test_what_is_dropped_is_whole_episodes():
    from ad.config import Config

    assert windows.Cut.of(Config()) == (240, 20, 0, 60)
    assert windows.Cut.of(Config(n_transit=90)) == (90, 20, 0, 20)
    compressed = Config(use_compressed_context=True, compress_interval=80)
    assert windows.Cut.of(compressed) == (160, 80, 80, 80)


def random_tokens(batch, length, seed=0):
    draw = torch.Generator().manual_seed(seed)
    limits = (25, ACTIONS + 1, 2, 3)
    return Tokens(*(torch.randint(n, (batch, length), generator=draw) for n in limits))


def test_the_first_loss_is_ln_5():
    torch.manual_seed(0)
    for smoothing in (0.0, 0.1):
        distiller = Distiller(Model(SHAPE), label_smoothing=smoothing)
        losses, _ = distiller((random_tokens(3, 12), torch.randint(ACTIONS, (3, 12))))
        assert losses.tolist() == pytest.approx([math.log(5)] * 3, abs=1e-6)


def test_nothing_that_comes_later_changes_a_prediction():
    """The original padded at the end and read its answer there."""
    model, tokens = model_of(SHAPE), random_tokens(2, 12)
    expected = model(tokens)
    for cut in (1, 5, 11):
        other = random_tokens(2, 12, seed=1)
        mixed = Tokens(
            *(torch.cat([a[:, :cut], b[:, cut:]], 1) for a, b in zip(tokens, other, strict=True))
        )
        assert torch.allclose(model(mixed)[:, :cut], expected[:, :cut], atol=1e-6)
        assert not torch.allclose(model(mixed)[:, cut:], expected[:, cut:], atol=1e-3)


@pytest.mark.parametrize("kept", [1, 5, 11])
def test_keys_and_values_that_are_kept_change_nothing(kept):
    model, tokens = model_of(SHAPE), random_tokens(3, 12)
    expected = model(tokens)  # [3, 12, ACTIONS]
    cache = Cache(model, 3)
    found = [model(Tokens(*(part[:, :kept] for part in tokens)), cache)]
    for time in range(kept, 12):
        found.append(model(Tokens(*(part[:, time : time + 1] for part in tokens)), cache))
    assert torch.cat(found, 1).sub(expected).abs().max() <= 1e-5


def test_positions_turn_by_their_angle():
    from ad.model import rotate, rotations

    states = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])  # one head, D = 2: rate 1
    turned = rotate(states, rotations(3, 2))[0, 0]
    expected = [[1, 0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    assert turned.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_a_cell_is_its_x_and_its_y():
    """Factorised, so that a goal never seen is made of parts that were."""
    model, seen = model_of(SHAPE._replace(window=25)), []
    model.layers[0].norm.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    zeros = torch.zeros(1, 25, dtype=torch.long)
    model(Tokens(torch.arange(25)[None], zeros, zeros, zeros))
    x, y = divmod(np.arange(25), 5)
    expected = model.x.weight[x] + model.y.weight[y]
    expected = expected + model.action.weight[0] + model.reward.weight[0] + model.place.weight[0]
    assert torch.allclose(seen[0][0], expected, atol=1e-6)


@pytest.mark.parametrize("cut", [PLAIN, REGIONS], ids=["plain", "regions"])
@pytest.mark.parametrize("how", [{}, {"wiped": True}, {"zero_reward": True}], ids=str)
def test_a_try_is_the_same_without_a_cache(cut, how):
    """Through many drops of the oldest part; the actions are drawn from equal odds."""
    model, goals = model_of(SHAPE._replace(window=cut.window)), np.arange(25)
    kept = evaluate.rollout(model, ROOM, goals, 12, cut, 3, **how)
    anew = evaluate.rollout(model, ROOM, goals, 12, cut, 3, cached=False, **how)
    assert kept.shape == (25, 12)
    assert (kept == anew).all()
    assert (kept != evaluate.rollout(model, ROOM, goals, 12, cut, 4, **how)).any()


def test_rollouts_see_what_training_showed():
    """The tokens of a try are those of a window of its history."""
    model, cut, met = model_of(SHAPE), PLAIN, []
    real = model.forward
    model.forward = lambda tokens, cache=None: met.append(tokens) or real(tokens, cache)
    goals = np.array([12, 13])
    evaluate.rollout(model, ROOM, goals, 5, cut, 0, cached=False)
    last = met[-1]  # step 19, in a context that begins at step 8
    cells = torch.cat([tokens.cell[:, -1:] for tokens in met], 1).numpy()  # [2, 20]
    actions = torch.cat([tokens.action[:, -1:] for tokens in met[1:]], 1).numpy()
    rewards = torch.cat([tokens.reward[:, -1:] for tokens in met[1:]], 1).numpy()
    after = ROOM.moves[cells[:, :-1], actions]
    assert (rewards == (after == goals[:, None])).all()
    arrays = {"state": cells, "action": np.pad(actions, ((0, 0), (0, 1)))}
    arrays |= {"reward": np.pad(rewards, ((0, 0), (0, 1))), "goal": goals}
    arrays["history_goal"] = np.arange(2)
    data = windows.Histories(arrays, goals, 4, cut, 1, 20, "cpu")
    tokens, _ = data.batch(np.arange(2), np.array([8, 8]))
    for name in Tokens._fields:
        assert (getattr(tokens, name) == getattr(last, name)).all(), name


def test_hidden_rewards_are_hidden():
    """They are paid, and the model sees none of them."""
    model, met = model_of(SHAPE), []
    real = model.forward
    model.forward = lambda tokens, cache=None: met.append(tokens) or real(tokens, cache)
    goals = np.full(50, ROOM.start)  # which pays those who stay
    for hidden in (False, True):
        met.clear()
        assert evaluate.rollout(model, ROOM, goals, 3, PLAIN, 0, zero_reward=hidden).sum() > 0
        assert any(tokens.reward.any() for tokens in met) != hidden


def test_an_agent_that_knows_the_way_gets_the_optimum():
    class Knows(torch.nn.Module):
        """Walks to cell (4, 2), whatever it sees."""

        def __init__(self):
            super().__init__()
            self.shape, self.head = SHAPE, torch.nn.Linear(1, 1)

        def forward(self, tokens, cache=None):
            there = tokens.cell == 22
            return torch.nn.functional.one_hot(torch.where(there, 4, 0), ACTIONS) * 1e3

    config = evaluate.Settings(eval_episodes=3, eval_copies=2)
    summary, returns, others = evaluate.assess(Knows(), ROOM, np.array([22]), config, PLAIN, True)
    assert returns.tolist() == [[3, 3, 3]]  # two steps to go, paid from the second on, of four
    assert summary["optimum"] == summary["return_first"] == summary["return_last10"] == 3
    assert summary["fraction_of_optimum"] == summary["control_wiped"] == 1
    assert set(others) == {"control_wiped", "control_zero_reward"}
