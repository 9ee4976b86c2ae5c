"""Tables of other kinds than JSON: what stands in them, and one line for what does not."""

import csv
import json
import sys
from pathlib import Path

import pytest

import reading
import runs
from ddp_utils import UserError, data
from ddp_utils.chat_template import Encoder
from ddp_utils.models import load_tokenizer

ROWS = [json.loads(line) for line in Path(runs.PAIRS).read_text().splitlines()]
COLUMNS = "prompt=question,chosen=response_j,rejected=response_k"


def records(path, **options):
    return [record.data for record in data.read(path, **options)]


def write(path, rows, **options):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], **options)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_csv_by_hand(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,chosen\r\n"a, ""b""\nc",1\r\n,007\n')
    found = list(data.read(path))
    assert [record.data for record in found] == [
        {"prompt": 'a, "b"\nc', "chosen": "1"},
        {"prompt": "", "chosen": "007"},  # texts, whatever they look like
    ]
    assert [record.location for record in found] == [f"{path}:3", f"{path}:4"]  # where each ends
    assert len(records(path, limit=1)) == 1
    (tmp_path / "a.tsv").write_text("prompt\tchosen\na, b\tc")
    assert records(tmp_path / "a.tsv") == [{"prompt": "a, b", "chosen": "c"}]
    long = "x" * 200_000
    assert records(write(tmp_path / "long.csv", [{"prompt": long}])) == [{"prompt": long}]


def test_a_broken_csv_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    for text, says in (
        (
            "prompt,chosen,rejected\na,b,c\nd,e\n",
            ":3: expected 3 fields as in the first line; quote",
        ),
        ("prompt,chosen,rejected\na,b,c,d\n", ":2: expected 3 fields as in the first line"),
        ('prompt,chosen,rejected\n"a"b,c,d\n', ":2: not CSV: ',' expected after '\"'"),
        ("prompt,chosen,rejected\n", ": 0 records"),
        ("prompt;chosen;rejected\na;b;c\n", ":2: fields found: prompt;chosen;rejected; nearest"),
    ):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            reading.pairs(path, Encoder(load_tokenizer("data/demo/model")))
        assert str(caught.value).startswith(f"{path}{says}"), str(caught.value)


def test_columns_give_fields_our_names(tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = reading.pairs(runs.PAIRS, encoder)[0]
    theirs = []
    for row in ROWS:
        renamed = {"question": row["prompt"], "response_j": row["chosen"]}
        theirs.append({**renamed, "response_k": row["rejected"], "prompt": "of another kind"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, theirs)))
    for path in (tmp_path / "a.jsonl", write(tmp_path / "a.csv", theirs)):
        found, report = reading.pairs(path, encoder, columns=COLUMNS)
        assert [pair[:3] for pair in found] == [pair[:3] for pair in expected]
        assert report["fields_not_read"] == ""
    texts, report = reading.texts(path, encoder, columns="prompt=question,completion=response_k")
    assert report["format"] == "custom" and report["fields_not_read"] == "response_j"
    assert [text.location for text in texts] == [f"{path}:{line}" for line in range(2, 10)]


# --- what the library datasets reads -------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="pip install -r requirements-data.txt")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def chats():
    """The rows in UltraFeedback's shape."""
    rows = []
    for row in ROWS:
        asked = {"role": "user", "content": row["prompt"]}
        sides = {"prompt": row["prompt"], "score_chosen": 8.5}
        for side in ("chosen", "rejected"):
            sides[side] = [asked, {"role": "assistant", "content": row[side]}]
        rows.append(sides)
    return rows


def test_parquet_arrow_folders_and_splits_hold_the_pairs_of_the_json(library, tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = [pair[:3] for pair in reading.pairs(runs.PAIRS, encoder)[0]]
    table = library.Dataset.from_list(chats())
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    library.DatasetDict({"train_prefs": table, "test": table}).save_to_disk(tmp_path / "two")
    (tmp_path / "folder").mkdir()
    table.to_parquet(tmp_path / "folder/train-00000-of-00001.parquet")
    for name in ("a.parquet", "saved", "two:train_prefs", "folder", "folder:train"):
        found, report = reading.pairs(tmp_path / name, encoder)
        assert [pair[:3] for pair in found] == expected, name
        assert found[2].location == f"{tmp_path / name}:3"
        assert (report["format"], report["fields_not_read"]) == ("messages", "score_chosen")


def test_another_table_under_the_same_name_is_read_anew(library, tmp_path):
    digests = set()
    for rows in (chats(), chats()[:-1]):
        library.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
        digests.add(data.digest_of_data(str(tmp_path / "a.parquet")))
    assert len(digests) == 2


def test_what_is_not_there_is_one_line(library, tmp_path, monkeypatch):
    library.DatasetDict({"a": library.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "two")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_text("no table")
    for name, says in (
        (f"{tmp_path}/two", f"no split train; use {tmp_path}/two:a"),
        (f"{tmp_path}/empty", "neither a file nor a data set: "),
        (f"{tmp_path}/bad.parquet", "neither a file nor a data set: "),
        (f"{tmp_path}/no.parquet", "neither a file nor a data set: "),
        ("some/set:train", "neither a file nor a data set: Couldn't reach 'some/set'"),
    ):
        with pytest.raises(UserError) as caught:
            records(name)
        message = str(caught.value)
        assert message.startswith(f"{name}: {says}") and len(message.splitlines()) == 1, message
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install -r requirements-data.txt, or use JSON"):
        records("some/set")
