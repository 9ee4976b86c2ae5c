"""Rows of token ids in the cache: whatever happens to it, a start reads what the data file says."""

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import reading
import runs
from ddp_utils import UserError
from ddp_utils import data as data_module
from ddp_utils.data import DataFile
from ddp_utils.distributed import World
from lm import instruction_data, preference_data, token_rows
from lm.chat_template import Encoder
from lm.instruction_data import Text
from lm.logps import Pair, Scorer
from lm.models import load_tokenizer
from ranks import ranks

COUNT = 8  # rows of runs.PAIRS


def read(source, reader=preference_data, **options):
    """Return the rows, the report, and how many rows this start tokenized."""
    made = []
    encoder = Encoder(load_tokenizer("data/demo/model"), **options)
    encode = encoder.encode
    encoder.encode = lambda *texts: made.append(1) or encode(*texts)
    rows, report = reader.read(source, encoder)
    return [*rows], report, len(made)


@pytest.fixture
def data(tmp_path):
    return shutil.copy(runs.PAIRS, tmp_path / "data.jsonl")


@pytest.fixture
def source(data, tmp_path):
    return DataFile(str(data), tmp_path / "cache")


def test_a_rank_plans_a_step_without_reading_the_rows_of_others(tmp_path):
    """Its micro-batches are those of rows in lists; the numbers of tokens are counted by hand."""
    # the last pair is the shortest one only if its prompt is counted twice
    lists = [([0] * 3, [0] * 2, [0] * 4), ([0] * 9, [0] * 2, [0] * 2), ([0], [0] * 5, [0] * 4)]
    pairs = [Pair(*ids, "", "") for ids in lists]
    texts = [Text([0] * 3, [0] * 4, [1, 1, 0, 1], "", ""), Text([0], [0], [1], "", "")] * 2
    by_hand = [
        (pairs, [7, 11, 8], [10, 20, 9], [6, 4, 9]),
        (texts, [6, 1, 6, 1], [6, 1, 6, 1], [3, 1, 3, 1]),
    ]
    for number, (listed, shared, separate, targets) in enumerate(by_hand):
        rows = reading.mapped(tmp_path / str(number), listed)
        assert rows.num_forward_tokens(shared=True).tolist() == shared
        assert rows.num_forward_tokens(shared=False).tolist() == separate
        assert rows.num_targets.tolist() == targets
        some = rows.select([2, 0])
        assert some.num_targets.tolist() == [targets[2], targets[0]]
        assert some.num_forward_tokens(shared=True).tolist() == [shared[2], shared[0]]
        last = rows.select(rows.num_targets > 0).select(slice(1, None))
        assert last.num_forward_tokens(shared=False).tolist() == separate[1:]
        for rank, is_shared in itertools.product(range(2), (True, False)):
            plan = [2, 1, 0], rows, World(rank=rank, world_size=2), 2
            scorer = SimpleNamespace(shared=is_shared)
            found = Scorer.micro_batches(scorer, *plan)
            assert found == Scorer.micro_batches(scorer, plan[0], listed, *plan[2:])
        assert not rows.make.cache_info().misses
        assert [*some] == [listed[2], listed[0]] and rows.make.cache_info().misses == 2


def test_a_second_start_maps_what_the_first_one_made(source, data):
    for reader in (preference_data, instruction_data):
        first, report, made = read(source, reader)
        assert made == len(first) == COUNT and first[2].location == f"{data}:3"
        rows, same, made = read(source, reader)
        assert (rows, made) == (first, 0)
        assert json.loads(json.dumps(report)) == same


def test_a_row_is_what_the_encoder_makes_of_its_texts(source, data):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    rows = read(source)[0]
    for line, row in zip(Path(data).read_text().splitlines(), rows, strict=True):
        assert row == encoder.encode(row.location, *json.loads(line).values())[0]


def test_the_digest_of_rows_depends_on_ids_and_selection_but_not_on_the_path(source, tmp_path):
    moved = shutil.copy(source.path, tmp_path / "a longer name")
    encoder = Encoder(load_tokenizer("data/demo/model"))
    rows, _ = preference_data.read(source, encoder)
    others, _ = preference_data.read(source._replace(path=str(moved)), encoder)
    digests = [token_rows.digest_of_rows(part) for part in (rows, others)]
    digests.append(token_rows.digest_of_rows(rows.select(rows.prompts != rows.prompts[0])))
    digests.append(
        token_rows.digest_of_rows(
            preference_data.read(source, Encoder(encoder.tokenizer, "none"))[0]
        )
    )
    assert digests[0] == digests[1] and len({*digests}) == 3


def test_rows_are_made_again_if_anything_changes_that_token_ids_depend_on(source, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ x }}{% endfor %}")
    own = {"chat_template": str(template)}
    changes = [
        ({}, {}),
        ({}, {"max_length": 500}),
        ({}, {"truncation": "keep_start"}),
        ({}, {"chat_template": "none"}),
        ({}, own),
        ({}, {**own, "kwargs": '{"x": "y"}'}),
        ({"limit": 7}, {}),
        ({"on_bad_record": "skip"}, {}),
        ({"columns": "prompt=prompt"}, {}),
    ]
    for fields, options in changes:
        assert read(source._replace(**fields), **options)[2] in (7, COUNT), (fields, options)
        assert read(source._replace(**fields), **options)[2] == 0
    with open(source.path, "a") as file:
        file.write(Path(source.path).read_text().splitlines()[0].replace("a", "e") + "\n")
    assert read(source)[2] == COUNT + 1
    assert len([*source.cache.glob("*.safetensors")]) == len(changes) + 1


def test_a_deleted_file_is_made_again_and_a_damaged_one_is_one_line(source):
    first, report, _ = read(source)
    [file] = source.cache.glob("*.safetensors")
    file.unlink()
    assert read(source) == (first, report, COUNT)
    os.truncate(file, 200)
    with pytest.raises(UserError, match="safetensors: .*header.*; delete it$"):
        read(source)
    with pytest.raises(UserError, match="^--cache_dir: .* cannot be written: .*; use another fol"):
        read(source._replace(cache=file))


def dying(function, left):
    """Return a function that kills the process when `left`, [count of calls], falls to 0."""

    def call(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return call


def exit_code_if_killed(source, number):
    """Return how a start ends that is killed at its `number`-th step of making the rows."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [number]
    steps = [(Encoder, "encode"), (token_rows, "save_file"), (data_module, "fsync")]
    for owner, name in (*steps, (os, "replace")):
        setattr(owner, name, dying(getattr(owner, name), left))
    read(source)
    os._exit(0)


def test_after_a_kill_the_next_start_makes_the_rows(data, tmp_path):
    """8 rows, save_file, fsync of the file, replace by the node's name, fsync, replace."""
    first, report, _ = read(DataFile(str(data), tmp_path / "complete"))
    for number in range(1, COUNT + 6):
        source = DataFile(str(data), tmp_path / f"killed at {number}")
        assert exit_code_if_killed(source, number) == -signal.SIGKILL
        assert read(source) == (first, report, COUNT)
        assert read(source)[2] == 0
        assert len([*source.cache.iterdir()]) == 2  # no litter
    assert exit_code_if_killed(DataFile(str(data), tmp_path / "not killed"), COUNT + 6) == 0


def read_beside_others(path, cache):
    encode = Encoder.encode
    Encoder.encode = lambda *arguments: time.sleep(0.1) or encode(*arguments)
    rows, _, made = read(DataFile(path, cache))
    return rows, made


def test_of_starts_at_once_one_makes_the_rows(source):
    results = ranks(4, read_beside_others, source.path, str(source.cache))
    assert sorted(made for _, made in results) == [0, 0, 0, COUNT]
    assert all(rows == results[0][0] for rows, _ in results)
