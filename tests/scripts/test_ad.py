"""Algorithm Distillation, part by part: tasks, sources, windows, model, rollouts, files."""

import dataclasses
import itertools
import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import runs
from ad import environments, evaluate, sources, train, windows
from ad.config import Config, read
from ad.model import EPISODE, INSIDE, REGION, Cache, Model, Tokens, rotate
from ad.model import rotations as rotations_of
from ddp_utils import UserError
from ddp_utils.distributed import World

# windows of three episodes, of which one is dropped; 25 goals, 6 streams of 10 episodes
WORDS = """grid_size=5 horizon=4 n_transit=12 n_stream=6 total_source_timesteps=240
source=q_learning eval_temperature=1.0 train_n_stream=6 train_source_timesteps=40 tf_n_embd=16
tf_n_layer=2 tf_n_head=2 tf_n_inner=32"""
PLAIN = read(runs.words(WORDS))
# two regions of two episodes
REGIONS = dataclasses.replace(PLAIN, use_compressed_context=True, compress_interval=8)
ACTIONS = NO_ACTION = 5
KINDS = ["darkroom", "darkroom_permuted", "key_to_door", "FrozenLake-v1"]


def make(kind, size, horizon):
    """Return an environment; skip the test if gymnasium is needed and missing."""
    if kind not in environments.KINDS:
        pytest.importorskip("gymnasium")
    return environments.make(kind, size, horizon)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("histories") / "histories.npz"
    windows.collect(PLAIN, path)
    return path


@pytest.fixture(scope="module")
def arrays(path):
    return windows.read(path, PLAIN)


def random_model(config):
    """Return a model whose weights, the head's included, are random."""
    torch.manual_seed(0)
    model = Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


# --- tasks ---------------------------------------------------------------------------------------


def test_actions_move_by_one_cell_and_walls_stop_them():
    cells = np.array([0, 12, 24])  # a corner, the middle, the opposite corner
    x, y = divmod(environments.moves(5)[cells], 5)
    assert x.tolist() == [[1, 0, 0, 0, 0], [3, 1, 2, 2, 2], [4, 3, 4, 4, 4]]
    assert y.tolist() == [[0, 0, 1, 0, 0], [2, 2, 3, 1, 2], [4, 4, 4, 3, 4]]
    state, reward = PLAIN.environment.step(cells, np.array([4, 0, 1]), np.array([0, 17, 24]))
    assert (state.tolist(), reward.tolist()) == ([0, 17, 19], [1, 1, 0])


def test_the_order_of_actions_is_the_task_of_darkroom_permuted():
    """Task 1 is the order 0 1 2 4 3: action 3 stays, and action 4 moves to -y."""
    grid = make("darkroom_permuted", 3, 20)
    assert (len(grid.reward), grid.start) == (120, 0)
    state, reward = grid.step(np.full(5, 5), np.arange(5), np.ones(5, dtype=int))
    assert (state.tolist(), reward.tolist()) == ([8, 2, 5, 5, 4], [1, 0, 0, 0, 0])
    assert grid.optimum([0, 1, 119]).tolist() == [17, 17, 17]  # four steps to the other corner


def test_a_key_is_rewarded_once_and_then_a_door():
    grid = make("key_to_door", 3, 20)
    assert (len(grid.reward), grid.start, grid.optimum([0, 71]).tolist()) == (72, 4, [2, 2])
    task = [*itertools.permutations(range(9), 2)].index((1, 5))
    states, rewards, state = [], [], np.array([grid.start])
    # the door, without the key: nothing; the key; the key again; the door; the key, done
    for action in (2, 3, 1, 4, 0, 2, 3, 1):
        state, reward = grid.step(state, np.array([action]), np.array([task]))
        states.append(state.item())
        rewards.append(reward.item())
    assert rewards == [0, 0, 1, 0, 0, 1, 0, 0]
    assert [state // 9 for state in states] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert grid.observation[states].tolist() == [5, 4, 1, 1, 4, 5, 4, 1]
    assert grid.next_state.dtype == np.int16 and make("key_to_door", 3, 20) is grid


def test_a_table_of_gymnasium_equals_its_environment(monkeypatch):
    """Compare with gymnasium's own step() on sequences that reach holes and the goal."""
    gymnasium = pytest.importorskip("gymnasium")
    table = make("FrozenLake-v1", 9, 20)
    shape = table.next_state.shape
    assert shape == (24, 17, 4)
    rng = np.random.default_rng(0)
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    last_rewards = set()
    to_goal, to_hole = [2, 2, 1, 1, 1, 2], [1, 1, 2, 1, 2, 2]
    for actions in (to_goal, to_hole, *rng.integers(4, size=(20, 12)).tolist()):
        state, _ = env.reset(seed=0)
        assert state == table.start
        ours = np.array([state])
        for action in actions:
            state, reward, terminated, _, _ = env.step(action)
            ours, our_reward = table.step(ours, np.array([action]), np.array([0]))
            assert ours.item() == (16 if terminated else state) and our_reward.item() == reward
            if terminated:
                last_rewards.add(reward)
                break
    assert last_rewards == {0, 1}
    assert table.step(np.array([16]), np.array([2]), np.array([7]))[0] == 16  # it remains over
    for name in ("Taxi-v4", "CartPole-v1", "darkrom", "no_such_module:Env-v0"):
        with pytest.raises(UserError, match=f"^--env: {name} is not supported .expected darkroom"):
            make(name, 9, 20)
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^--env: FrozenLake-v1 .*after pip install gymnasium"):
        environments.make("FrozenLake-v1", 9, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_optimum_and_random_return_equal_an_enumeration_of_all_action_sequences(kind):
    grid = make(kind, 2 if kind == "key_to_door" else 3, 4 if kind[0] == "d" else 6)
    sequences = np.array([*itertools.product(range(grid.actions), repeat=grid.horizon)])
    for task in (0, len(grid.reward) // 2, len(grid.reward) - 1):
        state = np.full(len(sequences), grid.start)
        returns = np.zeros(len(sequences))
        for actions in sequences.T:
            state, reward = grid.step(state, actions, np.full(len(sequences), task))
            returns += reward
        assert grid.optimum([task]).item() == returns.max()
        assert grid.random_return([task]).item() == pytest.approx(returns.mean(), abs=1e-12)


def test_the_optimum_is_the_return_of_the_shortest_path():
    grid = make("darkroom", 9, 20)
    assert grid.start == 40
    assert grid.optimum([40, 49, 0]).tolist() == [20, 20, 13]  # the middle, beside it, a corner
    assert grid.optimum(np.arange(81)).mean() == pytest.approx(16.543, abs=1e-3)
    assert grid.random_return(np.arange(81)).sum() == pytest.approx(20)  # in some cell each step


def test_each_task_is_either_trained_on_or_held_out():
    grid = make("darkroom", 9, 20)
    train, held_out = grid.split(0, 0, 0.9)
    assert (len(train), len(held_out)) == (73, 8)
    assert sorted([*train, *held_out]) == list(range(81))
    assert held_out.tolist() == grid.split(0, 0, 0.9)[1].tolist()
    assert held_out.tolist() != grid.split(0, 1, 0.9)[1].tolist()
    # 20 of the tasks, the same ones for any split
    drawn = grid.tasks(20)
    assert len({*drawn}) == 20 and drawn.max() > 60
    assert sorted(np.concatenate(grid.split(20, 3, 0.75))) == drawn.tolist()


# --- sources -------------------------------------------------------------------------------------


def test_streams_that_meet_in_one_entry_learn_the_mean_of_their_errors():
    groups = np.array([0, 0, 1])
    q = sources.QLearning(PLAIN, groups, 100)  # rate 0.5
    q.table[8] = [0, 1, 0, 0, 0]  # goal 0, cell 8
    q.learn(np.array([7, 7, 7]), np.array([2, 2, 2]), np.array([1, 0, 0]), np.array([8, 8, 8]))
    # errors 1 + 0.9 and 0 + 0.9 for goal 0; the other goal has its own table, which is empty
    assert q.table[7, 2] == pytest.approx(0.5 * (1.9 + 0.9) / 2)
    assert q.table[25 + 7].tolist() == [0] * 5
    assert np.count_nonzero(q.table) == 2
    optimistic = dataclasses.replace(PLAIN, source_optimism=0.25)
    assert (sources.QLearning(optimistic, groups, 100).table == 0.25).all()


def test_posterior_sampling_acts_only_for_tasks_that_its_steps_do_not_contradict():
    """It rules out cells without a reward, per history, and stays where it is rewarded."""
    for seed in range(20):
        config = Config(grid_size=3, horizon=4, source_noise=0, alg_seed=seed, train_env_ratio=1)
        grid = config.environment
        source = sources.PosteriorSampling(config, np.arange(2), 0)
        # the first history steps to cell 1, the second to cell 3, without a reward
        source.learn(np.array([4, 4]), np.array([1, 3]), np.array([0, 0]), np.array([1, 3]))
        assert source.possible.sum(-1).tolist() == [8, 8]
        assert np.flatnonzero(~source.possible).tolist() == [1, 9 + 3]
        source.act(0, np.array([1, 3]))
        assert source.possible[[0, 1], source.drawn].all()
        # then the first one is rewarded in cell 2: this is the task, and it stays there
        source.learn(np.array([1, 3]), np.array([2, 4]), np.array([1, 0]), np.array([2, 3]))
        assert np.flatnonzero(source.possible[0]).tolist() == [2]
        action = source.act(1, np.array([2, 3]))
        assert grid.step(np.array([2]), action[:1], np.array([2]))[1] == 1


def test_posterior_sampling_does_not_know_the_held_out_tasks():
    """It goes to the only training goal that is left, and never heads for a held-out one."""
    config = Config(grid_size=3, horizon=4, source_noise=0, train_env_ratio=0.5)
    known, unknown = config.tasks
    source = sources.PosteriorSampling(config, np.arange(1), 0)
    assert source.possible.shape == (1, len(known)) and len(known) == 4
    histories = sources.histories(config, unknown, 10, 400)
    rewarded = histories[2].reshape(len(unknown), 10, -1, 4).sum(-1)
    optimum = config.environment.optimum(unknown).mean()
    assert rewarded.mean() < 0.5 * optimum  # it passes some of them on its way to another goal
    assert sources.returns(config, known, 10, 400)[:, -1].mean() > 0.9 * optimum


def test_held_out_histories_are_those_of_a_source_that_knows_the_tasks(tmp_path):
    """For the loss; otherwise it would measure the imitation of a source that finds nothing."""
    config = Config(grid_size=3, horizon=4, source_noise=0, train_env_ratio=0.5, n_stream=10)
    config.total_source_timesteps = 4000  # 100 episodes in each stream
    windows.collect(config, tmp_path / "x.npz")
    reward = windows.read(tmp_path / "x.npz", config)["reward"]
    last = reward.reshape(9, 10, -1, 4).sum(-1)[:, :, -1].mean(1)  # [tasks]
    for tasks in config.tasks:
        assert last[tasks].mean() > 0.9 * config.environment.optimum(tasks).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sources.SOURCES)
def test_sources_start_at_chance_and_end_near_the_optimum(kind, name):
    """The histories record what happened, and are reproducible."""
    grid = make(kind, 3, 12)
    config = Config(env=kind, grid_size=3, horizon=12, source=name, source_noise=0)
    config.train_env_ratio = 1.0  # the source knows all tasks
    config.source_optimism = 0.5 if name == "q_learning" else 0.0
    tasks = np.arange(len(grid.reward))[:: max(1, len(grid.reward) // 12)]
    state, action, reward = sources.histories(config, tasks, 20, 360)
    returns = reward.reshape(len(tasks), 20, 30, 12).sum(-1).mean((0, 1))
    optimum = grid.optimum(tasks).mean()
    assert returns[-1] > 0.9 * optimum
    if name == "q_learning":
        chance = grid.random_return(tasks).mean()
        assert returns[0] == pytest.approx(chance, abs=0.15 * optimum)
    task = np.repeat(tasks, 20)
    for row in (0, len(task) // 2, len(task) - 1):
        for time in range(360):
            if time % 12 == 0:
                here = np.array([grid.start])
            assert state[row, time] == grid.observation[here]
            here, expected = grid.step(here, action[row, [time]], task[[row]])
            assert reward[row, time] == expected
    again = sources.histories(config, tasks, 20, 360)
    assert (again == [state, action, reward]).all()


def test_streams_with_a_common_table_learn_sooner_than_one_alone():
    config = Config(source="q_learning")
    size = np.arange(0, 81, 8), 40, 480
    common = sources.returns(config, *size)
    alone = sources.returns(dataclasses.replace(config, share_table=False), *size)
    assert common.shape == alone.shape == (11, 24)
    optimum = config.environment.optimum(size[0]).mean()
    assert common[:, -1].mean() > 0.95 * optimum > 1.5 * alone[:, -1].mean()


# --- windows -------------------------------------------------------------------------------------


def test_a_file_that_is_no_file_of_histories_is_one_line(path, tmp_path):
    intact = path.read_bytes()
    bad = tmp_path / "bad.npz"
    for content in (b"text", b"", intact[:-99], intact[:300] + bytes(99) + intact[399:]):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.npz is damaged or is not a file of histories"):
            windows.read(bad, PLAIN)
    with np.load(path) as file:
        np.savez(bad, **{**file, "reward": file["reward"].astype(object)})
    with pytest.raises(UserError, match="is damaged or is not"):  # it holds a pickle
        windows.read(bad, PLAIN)
    with pytest.raises(UserError, match="--traj_file: .*: Is a directory; use another file"):
        windows.read(tmp_path, PLAIN)
    np.save(tmp_path / "one.npy", np.zeros(3))  # one array without names
    with pytest.raises(UserError, match=r"one\.npy is damaged or is not a file of histories"):
        windows.read(tmp_path / "one.npy", PLAIN)


def test_of_two_runs_that_need_the_same_histories_one_collects_them(path, monkeypatch, tmp_path):
    calls = []

    def collect(_, made):
        calls.append(made)
        sleep(0.5)  # the other one waits meanwhile
        shutil.copy(path, made)
        return np.zeros(2)

    monkeypatch.setattr(windows, "collect", collect)
    made = tmp_path / "new/made.npz"
    with ThreadPoolExecutor(2) as pool:
        runs_ = [pool.submit(train.load_histories, PLAIN, made, World()) for _ in range(2)]
        assert [len(run.result()) for run in runs_] == [2, 2]
    assert calls == [made]


def test_others_may_read_the_model_and_a_damaged_one_is_one_line(tmp_path):
    train.save_model(random_model(PLAIN), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    os.umask(mask := os.umask(0))
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(PLAIN)))
    evaluate.load(tmp_path)
    file.write_bytes(file.read_bytes()[:99])
    with pytest.raises(UserError, match="is not a finished run of src/ad/train.py"):
        evaluate.load(tmp_path)


def test_histories_of_the_original_code_are_imported_and_checked(arrays, tmp_path):
    """A group per goal; [T, n_stream] instead of [n_stream, T], and x and y instead of a number."""
    h5py = pytest.importorskip("h5py")
    config = dataclasses.replace(PLAIN, source="imported")

    def write(name, change=lambda task, group: None):
        with h5py.File(tmp_path / name, "w") as file:
            for task in range(25):
                rows = slice(6 * task, 6 * task + 6)
                group = {key: arrays[key][rows].T.astype(np.int32) for key in arrays}
                group["state"] = np.stack(divmod(group["state"], 5), -1)
                change(task, group)
                for key, value in group.items():
                    file[f"{task}/{key}s"] = value
        return tmp_path / name

    found = windows.read(write("intact.hdf5"), config)
    for name, array in arrays.items():
        assert found[name].dtype == np.uint8 and (found[name] == array).all()
    fewer = dataclasses.replace(config, total_source_timesteps=120)  # the first 20 steps
    assert (
        windows.read(tmp_path / "intact.hdf5", fewer)["reward"] == arrays["reward"][:, :20]
    ).all()

    def fails(message, options=None, change=lambda task, group: None):
        with pytest.raises(UserError, match=rf"^--traj_file: .*x.hdf5: group {message}"):
            windows.read(write("x.hdf5", change), dataclasses.replace(config, **options or {}))

    def moved(task, group):
        if task == 3:  # stays, and is then elsewhere
            group["action"][5:7] = 4
            group["state"][6] = (group["state"][5] + 1) % 5

    def other_goal(task, group):
        if task == 7:
            group["reward"][:] = 0

    fails(r"3: a step is impossible; use grid_size and horizon", change=moved)
    fails("7: a step is impossible", change=other_goal)
    fails("0: a step is impossible", {"horizon": 5, "total_source_timesteps": 240})
    fails(
        r"0: states are \[40, 6, 2\] \(expected \[40, 5, 2\]\); change n_str",
        {"n_stream": 5, "total_source_timesteps": 200},
    )
    (tmp_path / "text.hdf5").write_bytes(b"text")
    h5py.File(tmp_path / "empty.hdf5", "w").close()
    for name in ("text", "empty", "none"):
        with pytest.raises(UserError, match=f"{name}.hdf5: group 0: .*expected states, actions"):
            windows.read(tmp_path / f"{name}.hdf5", config)


def histories(arrays, config):
    return windows.Histories(arrays, (3, 4), config, "cpu")


def test_a_window_is_a_stretch_of_its_history(arrays):
    data = histories(arrays, PLAIN)
    assert data.count == 12
    row = 18 + arrays["reward"][18:30, 28:39].sum(1).argmax()  # of goals 3 and 4
    tokens, action = data.batch(np.array([row - 18, 0]), np.array([28, 0]))
    assert 0 < arrays["reward"][row, 28:39].sum() < 11
    assert tokens.cell[0].tolist() == arrays["state"][row, 28:40].tolist()
    assert action[0].tolist() == arrays["action"][row, 28:40].tolist()
    assert tokens.action[0].tolist() == [NO_ACTION, *arrays["action"][row, 28:39]]
    assert tokens.reward[0].tolist() == [0, *arrays["reward"][row, 28:39]]
    assert tokens.place[0].tolist() == [EPISODE, INSIDE, INSIDE, INSIDE] * 3


def test_regions_begin_at_multiples_of_their_length(arrays):
    data = histories(arrays, REGIONS)
    tokens, _ = data.batch(np.array([0]), np.array([8]))
    first = [REGION, INSIDE, INSIDE, INSIDE, EPISODE, INSIDE, INSIDE, INSIDE]
    assert tokens.place[0].tolist() == first * 2
    assert {*data.draw(0, 0, 500)[1]} == {0, 8, 16, 24}


def test_each_step_and_seed_has_its_own_reproducible_windows(arrays):
    data = histories(arrays, PLAIN)
    history, start = data.draw(5, 7, 4000)
    for seed, step in ((5, 8), (6, 7)):
        assert (data.draw(seed, step, 4000)[0] != history).any()
    assert (data.draw(5, 7, 4000)[0] == history).all()
    assert {*history} == set(range(12))
    # of 8 starts the first one gets an eighth and the anchored windows
    assert (start == 0).mean() == pytest.approx(0.2 + 0.8 / 8, abs=0.03)
    assert {*start} == set(range(0, 32, 4))


def test_validation_windows_begin_with_an_episode_and_do_not_overlap(arrays):
    """Also where the length of a window is no multiple of an episode (4 steps)."""
    _, start = histories(arrays, dataclasses.replace(PLAIN, n_transit=10)).all()
    assert start.tolist() == [0, 12, 24] * 12


def test_a_full_window_drops_complete_episodes():
    regions = {"use_compressed_context": True, "compress_interval": 80}
    cases = [({}, (240, 20, 60)), ({"n_transit": 90}, (90, 20, 20)), (regions, (160, 80, 80))]
    for options, expected in cases:
        config = Config(**options)
        assert (config.window, config.unit, config.dropped) == expected


# --- model ---------------------------------------------------------------------------------------


def random_tokens(batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    limits = (25, ACTIONS + 1, 2, 3)
    return Tokens(*(torch.randint(n, (batch, length), generator=generator) for n in limits))


def part(tokens, *index):
    return Tokens(*(tensor[:, slice(*index)] for tensor in tokens))


def test_later_tokens_do_not_change_a_prediction():
    """The original code padded at the end and read its answer there."""
    model = random_model(PLAIN)
    tokens = random_tokens(2, 12)
    other = random_tokens(2, 12, seed=1)
    expected = model(tokens)
    for cut in (1, 5, 11):
        pairs = zip(part(tokens, cut), part(other, cut, 12), strict=True)
        mixed = model(Tokens(*(torch.cat(pair, 1) for pair in pairs)))
        assert torch.allclose(mixed[:, :cut], expected[:, :cut], atol=1e-6)
        assert not torch.allclose(mixed[:, cut:], expected[:, cut:], atol=1e-3)


def test_the_cache_of_keys_and_values_does_not_change_the_logits():
    model, tokens = random_model(PLAIN), random_tokens(3, 12)
    expected = model(tokens)  # [3, 12, ACTIONS]
    for cached in (1, 5, 11):
        cache = Cache(model, 3)
        logits = [model(part(tokens, cached), cache)]
        for time in range(cached, 12):
            logits.append(model(part(tokens, time, time + 1), cache))
        assert torch.cat(logits, 1).sub(expected).abs().max() <= 1e-5


def test_positions_rotate_by_their_angle():
    states = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])  # one head, D = 2: rate 1
    rotated = rotate(states, rotations_of(3, 2))[0, 0]
    expected = [[1, 0], [math.cos(1), math.sin(1)], [-math.sin(2), math.cos(2)]]
    assert rotated.tolist() == [pytest.approx(row, abs=1e-6) for row in expected]


def test_x_and_y_of_a_cell_have_separate_embeddings():
    """So an unseen goal is composed of coordinates that were seen."""
    model, inputs = random_model(dataclasses.replace(PLAIN, n_transit=25)), []
    model.layers[0].norm.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    zeros = torch.zeros(1, 25, dtype=torch.long)
    model(Tokens(torch.arange(25)[None], zeros, zeros, zeros))
    x, y = divmod(np.arange(25), 5)
    expected = model.coordinates[0].weight[x] + model.coordinates[1].weight[y]
    expected = expected + model.action.weight[0] + model.reward.weight[0] + model.place.weight[0]
    assert torch.allclose(inputs[0][0], expected, atol=1e-6)


# --- rollouts ------------------------------------------------------------------------------------


def rollout(model, config, tasks, episodes, seed, **control):
    config = dataclasses.replace(config, eval_episodes=episodes, seed=seed)
    return evaluate.rollout(model, config, tasks, **control)


def record(model, cached=True):
    """Record the tokens of each forward; cached=False computes the full context in each step."""
    recorded, forward = [], model.forward

    def recording(tokens, cache=None):
        recorded.append(Tokens(*(tensor.clone() for tensor in tokens)))
        return forward(tokens, cache if cached else None)

    model.forward = recording
    return recorded


@pytest.mark.parametrize("config", [PLAIN, REGIONS], ids=["plain", "regions"])
@pytest.mark.parametrize("control", [{}, {"wiped": True}, {"hide": "reward"}], ids=str)
def test_a_rollout_without_a_cache_is_the_same(config, control):
    """Through many drops of the oldest steps; the model has random weights."""
    model, goals = random_model(config), np.arange(25)
    returns = rollout(model, config, goals, 12, 3, **control)
    assert returns.shape == (25, 12)
    assert (returns != rollout(model, config, goals, 12, 4, **control)).any()
    recorded = record(model, cached=False)
    assert (returns == rollout(model, config, goals, 12, 3, **control)).all()
    lengths = [tokens.cell.shape[1] for tokens in recorded]
    assert max(lengths) == (4 if control.get("wiped") else config.window)


def test_rollouts_and_training_windows_have_the_same_tokens():
    model, goals = random_model(PLAIN), np.array([12, 13])
    recorded = record(model, cached=False)
    rollout(model, PLAIN, goals, 5, 0)
    cells = torch.cat([tokens.cell[:, -1:] for tokens in recorded], 1).numpy()  # [2, 20]
    actions = torch.cat([tokens.action[:, -1:] for tokens in recorded[1:]], 1).numpy()
    rewards = torch.cat([tokens.reward[:, -1:] for tokens in recorded[1:]], 1).numpy()
    next_cells = environments.moves(5)[cells[:, :-1], actions]
    assert (rewards == (next_cells == goals[:, None])).all()
    arrays = {"state": cells, "action": np.pad(actions, ((0, 0), (0, 1)))}
    arrays["reward"] = np.pad(rewards, ((0, 0), (0, 1)))
    config = dataclasses.replace(PLAIN, n_stream=1, train_source_timesteps=20)
    data = windows.Histories(arrays, (0, 1), config, "cpu")
    tokens, _ = data.batch(np.arange(2), np.array([8, 8]))
    for name in Tokens._fields:  # of step 19, in a context that begins at step 8
        assert (getattr(tokens, name) == getattr(recorded[-1], name)).all(), name


@pytest.mark.parametrize("hide", ["", "reward", "action"])
def test_a_control_hides_rewards_or_actions_from_the_model(hide):
    model = random_model(PLAIN)
    recorded = record(model)
    goals = np.full(50, PLAIN.environment.start)  # rewards those who stay
    assert rollout(model, PLAIN, goals, 3, 0, hide=hide).sum() > 0
    assert any(tokens.reward.any() for tokens in recorded) == (hide != "reward")
    assert any((tokens.action < NO_ACTION).any() for tokens in recorded) == (hide != "action")


class Fixed(Model):
    """A model whose logits are always the same."""

    def forward(self, tokens, cache=None):
        cache.length += tokens.cell.shape[1]
        return torch.tensor([0.0, 0, 0, 0, 2]).expand(*tokens.cell.shape, 5)


def frequencies(temperature, explore, goal):
    """Return how often a Fixed model takes each action in the middle cell, step by step."""
    environment = PLAIN.environment
    temperatures = {"eval_temperature": temperature, "eval_explore_temperature": explore}
    config = dataclasses.replace(PLAIN, **temperatures)
    fractions = []

    class Counting:
        def __getattr__(self, name):
            return getattr(environment, name)

        def step(self, state, action, task):
            counts = np.bincount(action[state == environment.start], minlength=5)
            fractions.append(counts / counts.sum())
            return environment.step(state, action, task)

    config.environment = Counting()
    config.eval_episodes = 1
    evaluate.rollout(Fixed(PLAIN).eval(), config, np.full(2000, goal))
    return fractions


def softmax(*logits):
    odds = np.exp(logits)
    return odds / odds.sum()


def test_the_temperature_divides_the_logits():
    """The second temperature counts until the context holds a reward."""
    for temperature in (1.0, 0.5):
        expected = softmax(0, 0, 0, 0, 2 / temperature)
        first = frequencies(temperature, temperature, 0)[0]
        assert first == pytest.approx(expected, abs=0.03)
    hot, cold = softmax(0, 0, 0, 0, 2), softmax(0, 0, 0, 0, 8)
    rewarded = frequencies(0.25, 1.0, PLAIN.environment.start)  # for staying in the first step
    assert rewarded[0] == pytest.approx(hot, abs=0.03)
    assert rewarded[1] == pytest.approx(cold, abs=0.01)
    unrewarded = frequencies(0.25, 1.0, 0)  # a corner out of reach
    assert unrewarded[1] == pytest.approx(hot, abs=0.03)


class ToCell22(Model):
    """An agent that always goes to cell (4, 2)."""

    def forward(self, tokens, cache=None):
        action = torch.where(tokens.cell == 22, 4, 0)
        return torch.nn.functional.one_hot(action, ACTIONS) * 1e3


class OneTask(Config):
    """Cell 22 is the only held-out task."""

    tasks = property(lambda self: (np.array([0]), np.array([22])))


def test_an_agent_that_knows_the_goal_reaches_the_optimum():
    config = OneTask(**dataclasses.asdict(PLAIN))
    config.eval_episodes, config.eval_copies = 3, 2
    summary, returns = evaluate.evaluate_agent(ToCell22(PLAIN), config, compare=True)
    assert returns["agent"].tolist() == [[3, 3, 3]]  # two steps away: rewarded from the second on
    assert summary["optimum"] == summary["return_first"] == summary["return_last10"] == 3
    assert summary["fraction_of_optimum"] == summary["control_wiped"] == summary["area"] == 1
    names = {"agent", "control_wiped", "control_zero_reward", "teacher", "single"}
    assert returns.keys() == names
    assert [summary[f"episodes_to_{percent}"] for percent in (60, 80, 90)] == [1, 1, 1]
    # six streams cooperate; after its ten episodes the teacher keeps its return
    assert (summary["teacher_streams"], summary["single_streams"]) == (6, 1)
    config.eval_episodes = 12
    _, returns = evaluate.evaluate_agent(ToCell22(PLAIN), config, compare=True)
    teacher = sources.returns(PLAIN, np.array([22]), 6, 40)
    assert returns["teacher"].tolist() == [[*teacher[0], *[teacher[0, -1]] * 2]]


def test_episodes_to_a_level_are_counted_from_one():
    """Levels of the mean over tasks, None if never reached; the area is the mean over episodes."""
    fractions = [0.1, 0.6, 0.5, 0.85, 0.7]
    speed = evaluate.learning_speed(np.array([fractions]) * 17, 17.0, "x_")
    reached = {"x_episodes_to_60": 2, "x_episodes_to_80": 4, "x_episodes_to_90": None}
    assert speed == {"x_area": pytest.approx(0.55), **reached}


# --- intervals -----------------------------------------------------------------------------------


class TwoTasks(Config):
    """Cells 22 and 0 are held out; an agent that goes to 22 gets 3 of 3 and 0 of 1."""

    tasks = property(lambda self: (np.array([1]), np.array([22, 0])))


def test_returns_have_intervals_over_tasks():
    """Returns 3 and 0 of 3 and 1: ratio 3/4, residuals +-3/4; the deviation of 3 and 0 is 3/2."""
    config = TwoTasks(**dataclasses.asdict(PLAIN))
    config.eval_episodes, config.eval_copies = 3, 2
    summary, _ = evaluate.evaluate_agent(ToCell22(PLAIN), config)
    half, half_return = 1.96 * math.sqrt(2 * 0.75**2 / 2) / 2, 1.96 * 1.5
    expected = {"fraction_of_optimum": (0.75, half), "return_last10": (1.5, half_return)}
    for name, (mean, width) in expected.items():
        found = summary[f"{name}_low"], summary[name], summary[f"{name}_high"]
        assert found == pytest.approx((mean - width, mean, mean + width)), name
    text = "1.50 [-1.44, 4.44] in the last 10; optimum 2.00 (75% [2%, 148%])"
    assert text in evaluate.describe(summary)


def test_held_out_intervals_are_over_tasks():
    """Losses 1, 2, 3 and 5, 6, 10 of two tasks: means 2 and 7, whose deviation is 5 / sqrt(2)."""
    losses = torch.tensor([1.0, 2.0, 3.0, 5.0, 6.0, 10.0])
    windows_of = {"all": lambda: (np.arange(6), np.zeros(6)), "batch": lambda rows, _: losses[rows]}
    data = SimpleNamespace(tasks=2, **windows_of)
    config = dataclasses.replace(PLAIN, test_batch_size=4)
    found = train.held_out_loss(lambda batch: (batch, (batch > 2).float()), data, config)
    half = 1.96 * 5 / 2
    ends = found["loss_low"], found["loss"], found["loss_high"]
    assert ends == pytest.approx((4.5 - half, 4.5, 4.5 + half))
    assert (found["count"], found["accuracy"]) == (6, pytest.approx(2 / 3))
