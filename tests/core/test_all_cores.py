"""Rows are encoded by several processes, each prompt once: the same file as by one, row by row."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import uuid
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cluster
import programs
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils.data import DataFile
from lm import all_cores, preference_data
from lm.chat_template import Encoder, borders_of, lengths_by_first
from lm.models import load_tokenizer


@pytest.fixture
def three_processes(monkeypatch):
    """Let three processes compute all but the first four rows, in blocks of two."""
    for name, value in {"ALONE": 4, "BLOCK": 2, "cpus": lambda: 3}.items():
        monkeypatch.setattr(all_cores, name, value)


def identity_of_process(item):
    return item, os.getpid()


@pytest.mark.parametrize("number", [0, 1, 4, 5, 6, 7, 101])
def test_the_order_is_kept_and_the_first_items_stay_here(three_processes, number):
    results = list(all_cores.map_on_all_cores(identity_of_process, iter(range(number))))
    assert [item for item, _ in results] == [*range(number)]
    assert {process for _, process in results[:4]} <= {os.getpid()}
    assert os.getpid() not in {process for _, process in results[4:]}


def test_one_core_starts_no_process(three_processes, monkeypatch):
    monkeypatch.setattr(all_cores, "cpus", lambda: 1)
    results = all_cores.map_on_all_cores(identity_of_process, range(50))
    assert list(results) == [(number, os.getpid()) for number in range(50)]


def read(path, cache, **settings):
    tokenizer = load_tokenizer(ROOT / "data/demo/model")
    return preference_data.read(DataFile(str(path), cache, **settings), Encoder(tokenizer))


def rows_of_all_kinds():
    """Return rows to use, to drop and to count, and where a format lets rejected be a list."""
    rows = [
        {"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "?"} for n in range(60)
    ]
    rows[9]["chosen"] = rows[9]["rejected"]  # dropped: identical
    rows[21]["rejected"] = ""  # dropped: empty
    rows[30]["rejected"] = ["No.", "None.", "No idea."]  # three pairs
    rows[33] = rows[3]  # a duplicate
    rows[44] |= {"chosen": rows[4]["rejected"], "prompt": rows[4]["prompt"]}
    rows[44]["rejected"] = rows[4]["chosen"]  # contradicts another one
    rows[50]["chosen"] = "word " * 2000  # truncated
    rows[55]["source"] = "book"  # not read
    return rows


def test_several_processes_make_the_file_and_the_report_of_one(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of_all_kinds()))
    alone, report = read(path, tmp_path / "one")
    for name, value in {"ALONE": 4, "BLOCK": 2, "cpus": lambda: 3}.items():
        monkeypatch.setattr(all_cores, name, value)
    together, other_report = read(path, tmp_path / "three")
    assert other_report == report
    assert report["notes"]["exact duplicates"] == 1
    assert report["notes"]["pairs contradict each other"] == 2  # each of the two rows
    assert report["dropped"] == {"identical": 1, "empty response": 1} and report["used"] == 60
    assert report["notes"]["truncated"] == 1 and report["fields_not_read"] == "source"
    assert alone.metadata["digest"] == together.metadata["digest"]
    assert alone[:] == together[:]


def test_an_error_in_another_process_is_that_of_the_first_bad_row(three_processes, tmp_path):
    rows = rows_of_all_kinds()
    rows[40]["chosen"] = rows[57]["chosen"] = 7
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"{path}:41: chosen: must be .*--on_bad_record skip$"):
        read(path, tmp_path / "cache")
    _, report = read(path, tmp_path / "cache", on_bad_record="skip")
    assert report["dropped"]["malformed"] == 2


def die(item):
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_process_that_is_killed_is_an_error_and_no_hang(three_processes):
    with pytest.raises(UserError, match="a process that encodes rows was killed"):
        list(all_cores.map_on_all_cores(die, range(40)))


def stop_requested(item):
    for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm sends it to all processes of a job
        os.kill(os.getpid(), number)
    return item


def test_signals_are_left_to_the_process_that_reads(three_processes):
    main = os.getpid()  # whose own signals would end this test

    def call(item):
        return item if os.getpid() == main else stop_requested(item)

    assert [*all_cores.map_on_all_cores(call, range(40))] == [*range(40)]


PROGRAM = """
import signal, sys, time
from lm import all_cores
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
all_cores.ALONE, all_cores.BLOCK, all_cores.cpus = 0, 1, lambda: 2
print("started", flush=True)
list(all_cores.map_on_all_cores(lambda _: time.sleep(5), range(9)))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_the_one_that_reads(number):
    mark = uuid.uuid4().hex
    env = programs.environment() | {"PYTHONPATH": str(ROOT / "src"), "MARK": mark}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    cluster.wait(lambda: len(cluster.descendants(program.pid)) == 2)
    program.send_signal(number)
    _, errors = program.communicate(timeout=60)
    cluster.wait(lambda: not cluster.processes(lambda one: one.environ().get("MARK") == mark))
    assert errors.count(b"Traceback") <= 1  # that of KeyboardInterrupt in this program


# --- a prompt is encoded once ---------------------------------------------------------------------

SPECIAL = ["<s>", "</s>", "<|im|>", "<|im|>x", "<left>", "<right>", "<word>", "<norm>", "<|im|>y"]


def tokenizer_of(pre_tokenizer, normalizer=None):
    """Return a tokenizer of letters with special tokens of every kind."""
    letters = sorted({*map(chr, range(32, 127)), "▁", *pre_tokenizers.ByteLevel.alphabet()})
    merges = [("a", "b"), ("b", "a"), ("▁", "a"), ("Ġ", "a"), ("a", " ")]
    words = [*letters, *("".join(pair) for pair in merges), "<unk>"]
    inner = Tokenizer(models.BPE({w: n for n, w in enumerate(words)}, merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizer
    if normalizer:
        inner.normalizer = normalizer
    plain = {"normalized": False, "special": True}
    kinds = {
        "<left>": {"lstrip": True},
        "<right>": {"rstrip": True},
        "<word>": {"single_word": True},
    }
    kinds |= {"<norm>": {"normalized": True}, "<|im|>y": {"lstrip": True}}
    inner.add_tokens([AddedToken(name, **(plain | kinds.get(name, {}))) for name in SPECIAL])
    template = "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
    )


TOKENIZERS = {
    "bytes": lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, prefix": lambda: tokenizer_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first": lambda: tokenizer_of(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": lambda: tokenizer_of(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "lower case": lambda: tokenizer_of(
        pre_tokenizers.Whitespace(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Lowercase()]),
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_what_is_encoded_once_has_the_ids_of_the_whole_texts(kind):
    tokenizer = TOKENIZERS[kind]()
    encoder = Encoder(tokenizer)
    parts = [*SPECIAL, *SPECIAL, "a", "b", "ab", " ", "  ", "\n", "A", "im", "<", "x", "y", "|>"]
    chance = random.Random(7)
    divided = 0
    for _ in range(3000):
        text, *others = ("".join(chance.choices(parts, k=chance.randint(0, 9))) for _ in range(3))
        texts = [text, *(text + other for other in others)]
        if chance.random() < 0.1:
            texts[1] = others[0]  # a reply for which the prompt is rendered differently
        calls = []
        plain = encoder.ids
        encoder.ids = lambda *texts, plain=plain, calls=calls: calls.append(texts) or plain(*texts)
        found = encoder.ids_of_texts_that_begin_alike(*texts)
        encoder.ids = plain
        assert found == plain(*texts), texts
        divided += calls[0] != tuple(texts)
    assert divided > 1000  # so often the beginning was encoded once


def test_a_border_is_a_token_that_leaves_its_surroundings_alone():
    tokenizer = TOKENIZERS["bytes"]()
    borders = borders_of(tokenizer)
    assert "<norm>" not in borders
    assert [name for name, is_border in borders.items() if is_border] == [
        "</s>", "<|im|>x", "<right>",
    ]  # fmt: skip
    tokenizer.split_special_tokens = True
    assert borders_of(tokenizer) == {}


def test_of_several_tokens_at_one_place_the_longest_divides_a_text():
    borders = {"ab": False, "ab<": True, "<x>": True}  # "ab<" leaves "x>", which is no token
    encoder = SimpleNamespace(borders=borders, border_lengths=lengths_by_first(borders))
    encoder.border_starts = re.compile("a|<")
    for text, expected in (("1ab<x>", (1, 4)), ("1ab <x>2", (4, 7)), ("1ab2", (0, 0))):
        assert Encoder.last_border(encoder, text) == expected, text


def test_the_demo_is_encoded_by_parts():
    encoder = Encoder(load_tokenizer(ROOT / "data/demo/model"))
    calls = []
    plain = encoder.ids
    encoder.ids = lambda *texts: calls.append(texts) or plain(*texts)
    pair, _ = encoder.encode("f:1", "What is it?", "It is a lemon.", "No.")
    assert sum(text.count("What is it?") for text in calls[-1]) == 1
    encoder.ids_of_texts_that_begin_alike = plain
    assert encoder.encode("f:1", "What is it?", "It is a lemon.", "No.")[0] == pair
