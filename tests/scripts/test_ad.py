"""Algorithm Distillation, part by part: tasks, sources, windows, model, rollouts, files."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from ad import environments, evaluate, sources, windows
from ad.config import Config
from ad.model import EPISODE, INSIDE, REGION, Cache, Model, Tokens, rotate
from ad.model import rotations as rotations_of
from ddp_utils import UserError

# three episodes, one is dropped; 25 goals, 6 streams of 10 episodes
PLAIN = Config(grid_size=5, horizon=4, n_transit=12, n_stream=6, total_source_timesteps=240)
PLAIN = dataclasses.replace(PLAIN, source="q_learning", eval_temperature=1.0)
PLAIN = dataclasses.replace(PLAIN, train_n_stream=6, train_source_timesteps=40, tf_n_embd=16)
PLAIN = dataclasses.replace(PLAIN, tf_n_layer=2, tf_n_head=2, tf_n_inner=32)
# two regions of two episodes
REGIONS = dataclasses.replace(PLAIN, use_compressed_context=True, compress_interval=8)
ROOM = PLAIN.environment
ACTIONS = NONE = 5
KINDS = ["darkroom", "darkroom_permuted", "key_to_door", "FrozenLake-v1"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("histories") / "histories.npz"
    windows.collect(PLAIN, path)
    return path


@pytest.fixture(scope="module")
def arrays(path):
    return windows.read(path, PLAIN.source_settings())


def model_of(config, seed=0):
    """A model that has been through something: its head is not 0."""
    torch.manual_seed(seed)
    model = Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def small(kind):
    """Tasks of a kind that are small enough to be counted through."""
    return environments.make(kind, 2 if kind == "key_to_door" else 3, 4 if kind[0] == "d" else 6)


def test_actions_move_by_one_cell_and_walls_hold():
    here = np.array([0, 12, 24])  # a corner, the middle, the other corner
    x, y = divmod(environments.moves(5)[here], 5)
    assert x.tolist() == [[1, 0, 0, 0, 0], [3, 1, 2, 2, 2], [4, 3, 4, 4, 4]]
    assert y.tolist() == [[0, 0, 1, 0, 0], [2, 2, 3, 1, 2], [4, 4, 4, 3, 4]]
    after, reward = ROOM.step(here, np.array([4, 0, 1]), np.array([0, 17, 24]))
    assert (after.tolist(), reward.tolist()) == ([0, 17, 19], [1, 1, 0])


def test_what_the_actions_do_is_the_permuted_room_s_task():
    """Task 1 is the order 0 1 2 4 3: to stay is action 3, and -y is action 4."""
    room = environments.make("darkroom_permuted", 3, 20)
    assert (len(room.names), room.names[1], room.start) == (120, "01243", 0)
    after, reward = room.step(np.full(5, 5), np.arange(5), np.ones(5, dtype=int))
    assert (after.tolist(), reward.tolist()) == ([8, 2, 5, 5, 4], [1, 0, 0, 0, 0])
    assert room.optimum([0, 1, 119]).tolist() == [17, 17, 17]  # four steps to the other corner


def test_a_key_pays_once_and_then_a_door():
    room = environments.make("key_to_door", 3, 20)
    assert (len(room.names), room.start, room.optimum([0, 71]).tolist()) == (72, 4, [2, 2])
    task = room.names.index("1 > 5")
    states = []
    rewards = []
    state = np.array([room.start])
    # the door, without the key: nothing; the key; the key again; the door; the key, done
    for action in (2, 3, 1, 4, 0, 2, 3, 1):
        state, reward = room.step(state, np.array([action]), np.array([task]))
        states.append(state.item())
        rewards.append(reward.item())
    assert rewards == [0, 0, 1, 0, 0, 1, 0, 0]
    assert [state // 9 for state in states] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert room.seen[states].tolist() == [5, 4, 1, 1, 4, 5, 4, 1]


def test_a_table_of_gymnasium_is_its_environment(monkeypatch):
    """A walk by its own step() and by the table, with holes, and the actions in order."""
    gymnasium = pytest.importorskip("gymnasium")
    table = environments.make("FrozenLake-v1", 9, 20)
    assert (len(table.names), table.after.shape, table.names[0]) == (24, (24, 17, 4), "0123")
    rng = np.random.default_rng(0)
    played = gymnasium.make("FrozenLake-v1", is_slippery=False)
    over = set()
    for walk in ([2, 2, 1, 1, 1, 2], [1, 1, 2, 1, 2, 2], *rng.integers(4, size=(20, 12)).tolist()):
        state, _ = played.reset(seed=0)
        assert state == table.start
        here = np.array([state])
        for action in walk:
            state, reward, terminated, _, _ = played.step(action)
            here, paid = table.step(here, np.array([action]), np.array([0]))
            assert here.item() == (16 if terminated else state) and paid.item() == reward
            if terminated:
                over.add(reward)
                break
    assert over == {0, 1}
    assert table.step(np.array([16]), np.array([2]), np.array([7]))[0] == 16  # it stays over
    for name in ("Taxi-v4", "CartPole-v1", "darkrom"):
        with pytest.raises(UserError, match=f"^--env: .*{name}"):
            environments.make(name, 9, 20)
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="no darkrom; give one of darkroom, .*, or pip install"):
        environments.make("darkrom", 9, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_optimum_and_chance_are_those_of_all_sequences_of_actions(kind):
    if kind == "FrozenLake-v1":
        pytest.importorskip("gymnasium")
    room = small(kind)
    tasks = np.array([0, len(room.names) // 2, len(room.names) - 1])
    sequences = np.array([*itertools.product(range(room.actions), repeat=room.horizon)])
    for task in tasks:
        state = np.full(len(sequences), room.start)
        returns = np.zeros(len(sequences))
        for actions in sequences.T:
            state, reward = room.step(state, actions, np.full(len(sequences), task))
            returns += reward
        assert room.optimum([task]).item() == returns.max()
        assert room.chance([task]).item() == pytest.approx(returns.mean(), abs=1e-12)


def test_the_optimum_is_what_the_shortest_way_gets():
    room = environments.make("darkroom", 9, 20)
    assert room.start == 40
    assert room.optimum([40, 49, 0]).tolist() == [20, 20, 13]  # the middle, beside it, a corner
    assert room.optimum(np.arange(81)).mean() == pytest.approx(16.543, abs=1e-3)
    assert room.chance(np.arange(81)).sum() == pytest.approx(20)  # somewhere each step


def test_tasks_are_split_once_each():
    room = environments.make("darkroom", 9, 20)
    train, held_out = room.split(0, 0, 0.9)
    assert (len(train), len(held_out)) == (73, 8)
    assert sorted([*train, *held_out]) == list(range(81))
    assert held_out.tolist() == room.split(0, 0, 0.9)[1].tolist()
    assert held_out.tolist() != room.split(0, 1, 0.9)[1].tolist()
    # of some tasks alone, the same ones for any split
    drawn = room.tasks(20)
    assert len({*drawn}) == 20 and drawn.max() > 60
    assert sorted(np.concatenate(room.split(20, 3, 0.75))) == drawn.tolist()


def test_streams_that_meet_in_one_cell_learn_the_mean_of_their_errors():
    groups = np.array([0, 0, 1])
    q = sources.QLearning(ROOM, groups, 100, PLAIN, np.random.default_rng(0))  # rate 0.5
    q.table[8] = [0, 1, 0, 0, 0]  # goal 0, cell 8
    q.learn(np.array([7, 7, 7]), np.array([2, 2, 2]), np.array([1, 0, 0]), np.array([8, 8, 8]))
    # errors 1 + 0.9 and 0 + 0.9 of goal 0; the other goal's table is its own, and empty
    assert q.table[7, 2] == pytest.approx(0.5 * (1.9 + 0.9) / 2)
    assert q.table[25 + 7].tolist() == [0] * 5
    assert np.count_nonzero(q.table) == 2
    hopeful = dataclasses.replace(PLAIN, source_optimism=0.25)
    assert (sources.QLearning(ROOM, groups, 100, hopeful, q.rng).table == 0.25).all()


def test_posterior_sampling_walks_to_what_its_own_steps_have_not_ruled_out():
    """Cells that did not pay are ruled out, of that history alone; it stays where it is paid."""
    room = environments.make("darkroom", 3, 4)
    config = dataclasses.replace(PLAIN, source="posterior", source_noise=0)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        source = sources.PosteriorSampling(room, np.arange(2), 0, config, rng)
        # the first history steps to cell 1, the second to 3, and nothing pays
        source.learn(np.array([4, 4]), np.array([1, 3]), np.array([0, 0]), np.array([1, 3]))
        assert source.possible.sum(-1).tolist() == [8, 8]
        assert np.flatnonzero(~source.possible).tolist() == [1, 9 + 3]
        source.act(0, np.array([1, 3]))
        assert source.possible[[0, 1], source.drawn].all()
        # then the first one is paid in cell 2: that is the task, and it stays there
        source.learn(np.array([1, 3]), np.array([2, 4]), np.array([1, 0]), np.array([2, 3]))
        assert np.flatnonzero(source.possible[0]).tolist() == [2]
        assert source.act(1, np.array([2, 3]))[0] in (0, 1, 2, 3, 4)
        assert room.step(np.array([2]), source.act(1, np.array([2, 3]))[:1], np.array([2]))[1] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sources.SOURCES)
def test_sources_begin_at_chance_and_end_near_the_optimum_of_each_kind(kind, name):
    """What is written down is what happened, and it is the same again."""
    if kind == "FrozenLake-v1":
        pytest.importorskip("gymnasium")
    room = environments.make(kind, 3, 12)
    config = Config(source=name, source_noise=0, source_optimism=0.5 * (name == "q_learning"))
    tasks = np.arange(len(room.names))[:: max(1, len(room.names) // 12)]
    state, action, reward = sources.histories(room, tasks, 20, 360, config)
    returns = reward.reshape(len(tasks), 20, 30, 12).sum(-1).mean((0, 1))
    optimum = room.optimum(tasks).mean()
    assert returns[-1] > 0.9 * optimum
    if name == "q_learning":
        assert returns[0] == pytest.approx(room.chance(tasks).mean(), abs=0.15 * optimum)
    task = np.repeat(tasks, 20)
    for row in (0, len(task) // 2, len(task) - 1):
        here = np.array([room.start])
        for time in range(360):
            if time % 12 == 0:
                here = np.array([room.start])
            assert state[row, time] == room.seen[here]
            here, paid = room.step(here, action[row, [time]], task[[row]])
            assert reward[row, time] == paid
    again = sources.histories(room, tasks, 20, 360, config)
    assert (again == [state, action, reward]).all()


def test_streams_that_share_learn_sooner_than_one_alone():
    room = environments.make("darkroom", 9, 20)
    size = np.arange(0, 81, 8), 40, 480
    shared = sources.returns(room, *size, Config(source="q_learning"))
    alone = sources.returns(room, *size, Config(source="q_learning"), shared=False)
    assert shared.shape == alone.shape == (11, 24)
    assert shared[:, -1].mean() > 0.95 * room.optimum(size[0]).mean() > 1.5 * alone[:, -1].mean()


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
    expected = model.coordinates[0].weight[x] + model.coordinates[1].weight[y]
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
@pytest.mark.parametrize("control", [{}, {"wiped": True}, {"hide": "reward"}], ids=str)
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
    after = environments.moves(5)[cells[:, :-1], actions]
    assert (rewards == (after == goals[:, None])).all()
    arrays = {"state": cells, "action": np.pad(actions, ((0, 0), (0, 1)))}
    arrays["reward"] = np.pad(rewards, ((0, 0), (0, 1)))
    config = dataclasses.replace(PLAIN, n_stream=1, train_source_timesteps=20)
    data = windows.Histories(arrays, (0, 1), config, "cpu")
    tokens, _ = data.batch(np.arange(2), np.array([8, 8]))
    for name in Tokens._fields:  # of step 19, in a context that begins at step 8
        assert (getattr(tokens, name) == getattr(seen[-1], name)).all(), name


def test_what_is_hidden_is_hidden():
    """Rewards are paid and actions taken, and the model sees none of them."""
    model = model_of(PLAIN)
    seen = record(model)
    goals = np.full(50, ROOM.start)  # which pays those who stay
    for hide in ("", "reward", "action"):
        seen.clear()
        assert evaluate.rollout(model, PLAIN, goals, 3, 0, hide=hide).sum() > 0
        assert any(tokens.reward.any() for tokens in seen) == (hide != "reward")
        assert any((tokens.action < NONE).any() for tokens in seen) == (hide != "action")


def frequencies(temperature, explore, goal):
    """How often a model of fixed odds takes each action in the middle, step by step."""

    class Fixed(Model):
        def forward(self, tokens, cache=None):
            cache.length += tokens.cell.shape[1]
            return torch.tensor([0.0, 0, 0, 0, 2]).expand(*tokens.cell.shape, 5)

    taken = []
    environment = PLAIN.environment
    config = dataclasses.replace(
        PLAIN, eval_temperature=temperature, eval_explore_temperature=explore
    )

    class Counted:
        def __getattr__(self, name):
            return getattr(environment, name)

        def step(self, state, action, task):
            taken.append((state == ROOM.start, action))
            return environment.step(state, action, task)

    config.environment = Counted()
    evaluate.rollout(Fixed(PLAIN).eval(), config, np.full(2000, goal), 1, 0)
    shares = []
    for in_the_middle, action in taken:
        counts = np.bincount(action[in_the_middle], minlength=5)
        shares.append(counts / in_the_middle.sum())
    return shares


def test_the_temperature_divides_the_logits():
    """Odds of e^(2 / T) to 1, and the second temperature until the context holds a reward."""
    for temperature in (1.0, 0.5):
        odds = np.exp(np.array([0, 0, 0, 0, 2]) / temperature)
        found = frequencies(temperature, temperature, 0)[0]
        assert found == pytest.approx(odds / odds.sum(), abs=0.03)
    hot = np.exp([0, 0, 0, 0, 2]) / np.exp([0, 0, 0, 0, 2]).sum()
    cold = np.exp([0, 0, 0, 0, 8]) / np.exp([0, 0, 0, 0, 8]).sum()
    paid = frequencies(0.25, 1.0, ROOM.start)  # who stays in the first step is paid
    assert paid[0] == pytest.approx(hot, abs=0.03) and paid[1] == pytest.approx(cold, abs=0.01)
    unpaid = frequencies(0.25, 1.0, 0)  # a corner out of reach
    assert unpaid[1] == pytest.approx(hot, abs=0.03)


class Walks(Model):
    """Walks to cell (4, 2), whatever it sees."""

    def forward(self, tokens, cache=None):
        action = torch.where(tokens.cell == 22, 4, 0)
        return torch.nn.functional.one_hot(action, ACTIONS) * 1e3


def only(task, config):
    """The settings, with one task that is held out."""

    class One(Config):
        tasks = property(lambda self: (np.array([0]), np.array([task])))

    return One(**dataclasses.asdict(config))


def test_an_agent_that_knows_the_way_gets_the_optimum():
    config = only(22, dataclasses.replace(PLAIN, eval_episodes=3, eval_copies=2))
    summary, returns = evaluate.assess(Walks(PLAIN), config, compare=True)
    assert returns["agent"].tolist() == [[3, 3, 3]]  # two steps to go, paid from the second of four
    assert summary["optimum"] == summary["return_first"] == summary["return_last10"] == 3
    assert summary["fraction_of_optimum"] == summary["control_wiped"] == summary["area"] == 1
    assert set(returns) == {
        "agent", "control_wiped", "control_zero_reward", "teacher", "single",
    }  # fmt: skip
    assert [summary[f"episodes_to_{share}"] for share in (60, 80, 90)] == [1, 1, 1]
    # six streams share; after ten episodes the teacher stays as it was
    assert (summary["teacher_streams"], summary["single_streams"]) == (6, 1)
    config = dataclasses.replace(config, eval_episodes=12)
    _, returns = evaluate.assess(Walks(PLAIN), only(22, config), compare=True)
    teacher = sources.returns(ROOM, np.array([22]), 6, 40, PLAIN)
    assert returns["teacher"].tolist() == [[*teacher[0], *[teacher[0, -1]] * 2]]


def test_episodes_to_a_share_are_counted_from_one():
    """Of the mean over tasks, here one; null where it is never reached; the area is the mean."""
    shares = [0.1, 0.6, 0.5, 0.85, 0.7]
    found = evaluate.progress_of(np.array([shares]) * 17, 17.0, "x_")
    assert found == {
        "x_area": pytest.approx(0.55),
        "x_episodes_to_60": 2,
        "x_episodes_to_80": 4,
        "x_episodes_to_90": None,
    }
