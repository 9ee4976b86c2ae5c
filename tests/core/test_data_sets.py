"""CSV files, --columns, and what the library datasets reads."""

import csv
import datetime
import json
import sys
from pathlib import Path

import pytest

import reading
import runs
from ddp_utils import UserError, data
from lm import conversations, tool_calls
from lm.chat_template import Encoder
from lm.models import load_tokenizer

ROWS = [json.loads(line) for line in Path(runs.PAIRS).read_text().splitlines()]
COLUMNS = "prompt=question,chosen=response_j,rejected=response_k"


def error_of(path):
    """Return the message with which reading the pairs of a file fails."""
    with pytest.raises(UserError) as caught:
        reading.pairs(path, Encoder(load_tokenizer("data/demo/model")))
    message = str(caught.value)
    assert message.startswith(f"{path}:") and len(message.splitlines()) == 1, message
    return message.removeprefix(str(path))


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_rows_of_a_csv_are_texts_located_by_the_line_where_they_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,chosen\r\n"a, ""b""\nc",1\r\n,007\n')
    rows = [(f"{path}:3", {"prompt": 'a, "b"\nc', "chosen": "1"})]
    rows.append((f"{path}:4", {"prompt": "", "chosen": "007"}))
    assert [*data.read(path)] == rows and [*data.read(path, limit=1)] == rows[:1]
    path = tmp_path / "a.tsv"
    path.write_text("prompt\tchosen\na, b\tc")
    assert [*data.read(path)] == [(f"{path}:2", {"prompt": "a, b", "chosen": "c"})]
    long = write(tmp_path / "long.csv", [{"prompt": "x" * 200_000}])
    assert len(next(data.read(long)).data["prompt"]) == 200_000


def test_weights_and_labels_of_a_csv_are_read_as_values(tmp_path):
    path = tmp_path / "a.csv"
    rows = [{"label": "True", "weight": "1.0", "train": "", **ROWS[0]}]
    pairs, _ = reading.pairs(write(path, rows), Encoder(load_tokenizer("data/demo/model")))
    assert len(pairs) == 1
    for wrong in ({"weight": "0.5"}, {"weight": "0"}, {"train": "FALSE"}, {"loss": "yes"}):
        rows = [{**wrong, **ROWS[0]}]
        expected = f":2: {next(iter(wrong))}: must be 1 or true (use only such rows), not "
        assert error_of(write(path, rows)).startswith(expected)


BROKEN = {
    "prompt,chosen,rejected\na,b,c\nd,e\n": ":3: expected 3 fields as in the first line",
    "prompt,chosen,rejected\na,b,c,d\n": ":2: expected 3 fields as in the first line",
    "prompt,chosen,rejected,chosen\na,b,c,d\n": ":1: two columns have one name: prompt, chosen,",
    'prompt,chosen,rejected\n"a"b,c,d\n': ":2: not CSV: ',' expected after '\"'",
    "prompt,chosen,rejected\n": ": 0 records",
    "prompt;chosen;rejected\na;b;c\n": ":1: the fields are separated by ; (expected ',')",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_csv_is_one_line(text, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    assert error_of(tmp_path / "a.csv").startswith(BROKEN[text])


def test_columns_give_fields_our_names(tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = [pair[:3] for pair in reading.pairs(runs.PAIRS, encoder)[0]]
    theirs = []
    for row in ROWS:
        renamed = {"question": row["prompt"], "response_j": row["chosen"]}
        theirs.append({**renamed, "response_k": row["rejected"], "prompt": "of another kind"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, theirs)))
    for path in (tmp_path / "a.jsonl", write(tmp_path / "a.csv", theirs)):
        pairs, report = reading.pairs(path, encoder, columns=COLUMNS)
        assert [pair[:3] for pair in pairs] == expected and report["fields_not_read"] == ""
    _, report = reading.texts(path, encoder, columns="prompt=question,completion=response_k")
    assert (report["format"], report["fields_not_read"]) == ("custom", "response_j")


def test_a_column_of_some_rows_hides_no_field_of_the_others(tmp_path):
    rows = [ROWS[0] | {"system": "be"}, ROWS[0] | {"message": "kind", "system": "unread"}]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = data.read(tmp_path / "f.jsonl", columns="system=message")
    assert [record.data["system"] for record in records] == ["be", "kind"]
    message = r"f.jsonl: --columns tone=message_: no record has a field message_; correct the name"
    with pytest.raises(UserError, match=message):  # after the last row
        list(data.read(tmp_path / "f.jsonl", columns="system=message,tone=message_"))
    # another file may have what is ignored
    assert len(list(data.read(tmp_path / "f.jsonl", columns="ignored_label=label"))) == 2
    assert len(list(data.read(tmp_path / "f.jsonl", 1, columns="tone=later"))) == 1


# --- what the library datasets reads -------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="pip install -r requirements-data.txt")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def chats():
    """Return the rows in UltraFeedback's shape."""
    rows = []
    for row in ROWS:
        question = {"role": "user", "content": row["prompt"]}
        sides = {"prompt": row["prompt"], "score_chosen": 8.5}
        for side in ("chosen", "rejected"):
            sides[side] = [question, {"role": "assistant", "content": row[side]}]
        rows.append(sides)
    return rows


def test_parquet_files_and_folders_hold_the_pairs_of_the_json(library, tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = [pair[:3] for pair in reading.pairs(runs.PAIRS, encoder)[0]]
    table = library.Dataset.from_list(chats())
    (tmp_path / "folder").mkdir()
    for name in ("a.parquet", "folder/train-0-of-1.parquet", "folder/test-0-of-1.parquet"):
        table.to_parquet(tmp_path / name)
    for name in ("a.parquet", "folder", "folder:test"):
        pairs, report = reading.pairs(tmp_path / name, encoder)
        assert [pair[:3] for pair in pairs] == expected, name
        assert pairs[2].location == f"{tmp_path / name}:3"
        assert (report["format"], report["fields_not_read"]) == ("messages", "score_chosen")


def test_a_folder_of_save_to_disk_is_read_whole(library, tmp_path):
    rows = library.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "folder", num_shards=2)
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = [pair[:3] for pair in reading.pairs(runs.PAIRS, encoder)[0]]
    assert [pair[:3] for pair in reading.pairs(tmp_path / "folder", encoder)[0]] == expected


def test_the_splits_of_a_data_set_without_train_are_named(library, tmp_path):
    """As those of UltraFeedback's binarized version."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train_prefs\n    path: a.parquet\n---\n"
    )
    library.Dataset.from_list(ROWS).to_parquet(tmp_path / "folder/a.parquet")
    folder = tmp_path / "folder"
    says = ": it has no split train (expected one of ['train_prefs']); use "
    assert error_of(folder) == f"{says}{folder}:SPLIT"
    pairs, _ = reading.pairs(f"{folder}:train_prefs", Encoder(load_tokenizer("data/demo/model")))
    assert len(pairs) == len(ROWS)


def test_a_data_set_may_have_configurations(library, tmp_path):
    """As openai/gsm8k and smoltalk have; a folder's README names the files of each."""
    encoder = Encoder(load_tokenizer("data/demo/model"))
    head = "---\nconfigs:\n"
    for name, rows in (("main", chats()), ("few", chats()[:2])):
        library.Dataset.from_list(rows).to_parquet(tmp_path / f"folder/{name}.parquet")
        head += f"- config_name: {name}\n  data_files: {name}.parquet\n"
    (tmp_path / "folder/README.md").write_text(f"{head}---\n")
    folder = tmp_path / "folder"
    counts = [len(reading.pairs(f"{folder}:{x}:train", encoder)[0]) for x in ("main", "few")]
    assert counts == [len(ROWS), 2]
    for name in (folder, f"{folder}:train"):
        assert error_of(name) == (
            ": neither a file nor a data set: it has several configurations: ['main', 'few']; "
            f"use {folder}:CONFIGURATION:train"
        ).replace("neither a file nor a data set: ", "")
    assert data.is_data_set("openai/gsm8k:main:train") and data.is_data_set("a/b.c:d-1.2:test")
    assert not data.is_data_set("a/b.c")


def test_a_table_that_is_not_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert error_of("data/trian.parquet").startswith(": no such file (expected a regular file in ")
    assert error_of("data/trian.parquet").endswith(")")
    assert error_of(f"{tmp_path}/trian.arrow") == ": no such file (expected a regular file)"
    for name in ("org/tulu-3.1-8b-mixture", "org/name:train[:100]"):  # need a split, or another one
        assert error_of(name).endswith("; a data set of the hub is OWNER/NAME:SPLIT")


def test_an_extra_field_that_is_a_date_is_one_line(library, tmp_path):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "day": datetime.date(2026, 1, 2)}
    library.Dataset.from_list([row]).to_parquet(tmp_path / "f.parquet")
    encoder = Encoder(load_tokenizer("data/demo/model"))
    with pytest.raises(UserError, match="parquet:1: day: must be a text, a number, or lists"):
        reading.pairs(str(tmp_path / "f.parquet"), encoder, extra_fields="day")


def test_arrow_adds_no_argument_of_the_calls_of_other_rows(library, tmp_path):
    rows = []
    for arguments in ({"x": 1}, {"city": "Paris"}):
        call = {"function": {"name": "go", "arguments": arguments}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [{"role": "user", "content": "q"}, reply]})
    library.Dataset.from_list(rows).to_parquet(tmp_path / "f.parquet")
    found = [row for _, row in data._rows(str(tmp_path / "f.parquet"))]
    calls = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in found]
    assert calls == [{"x": 1}, {"city": "Paris"}]


TOOL_CALLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}
{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}
{% endfor %}{% endfor %}{% if add_generation_prompt %}
assistant: {% endif %}"""


@pytest.mark.parametrize("kind", ["texts", "pairs", "openai"])
def test_json_of_a_table_has_the_ids_of_the_rows_it_was_made_of(kind, library, tmp_path):
    """Two tools with other arguments: the library adds the arguments of each to the other."""
    rows = []
    for name, arguments in (("time", {"zone": "CET"}), ("weather", {"city": "Rome", "day": 1})):
        properties = {key: {"type": type(value).__name__} for key, value in arguments.items()}
        parameters = {"type": "object", "properties": properties}
        tools = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        question = [{"role": "user", "content": f"{name}?"}]
        call = {"function": {"name": name, "arguments": arguments}}
        reply = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        sides = {"preferred_output": reply, "non_preferred_output": "No."}
        shapes = {
            "texts": {"tools": tools, "messages": question + reply},
            "pairs": {"tools": tools, "prompt": question, "chosen": reply, "rejected": "No."},
            "openai": {"input": {"messages": question, "tools": tools}, **sides},
        }
        rows.append(shapes[kind])
    made = str(tmp_path / "made.jsonl")
    library.Dataset.from_list(rows).to_json(made)
    assert "null" in Path(made).read_text()
    own, template = tmp_path / "own.jsonl", tmp_path / "template.jinja"
    own.write_text("\n".join(map(json.dumps, rows)))
    template.write_text(TOOL_CALLS)
    encoder = Encoder(load_tokenizer("data/demo/model"), str(template))
    read = reading.texts if kind == "texts" else reading.pairs
    found, expected = (read(path, encoder)[0] for path in (made, str(own)))
    assert [row[:3] for row in found] == [row[:3] for row in expected]


def test_calls_of_a_table_without_tools_lose_the_arguments_of_others(tmp_path):
    """A null that somebody has written stays: no other key of the row is null."""
    arguments = {"zone": "CET", "city": None}
    call = {"function": {"name": "time", "arguments": arguments}}
    for question, kept in (({"tool_calls": None}, {"zone": "CET"}), ({}, arguments)):
        asked = {"role": "user", "content": "q", **question}
        turns = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        record = data.Record("f.jsonl:1", {"messages": turns})
        reply = conversations.messages_of(record, "messages")[1]
        assert reply["tool_calls"][0]["function"]["arguments"] == kept
    defaults = {"properties": {"zone": {"default": None, "enum": [None, "CET"]}}}
    assert not tool_calls.is_of_table([defaults])


def shapes():
    """Return {format: a row of messages} and how each is written by hand."""
    question, whole = [{"role": "user", "content": "q"}], {}
    sides = {"chosen": "x", "rejected": "y"}
    for side, text in sides.items():
        whole[side] = [*question, {"role": "assistant", "content": text}]
    human = [{"from": "human", "value": "q"}]
    preferred = {"preferred_output": whole["chosen"][1:]}
    preferred["non_preferred_output"] = whole["rejected"][1:]
    return {
        "messages": [{"prompt": question, **{side: whole[side][1:] for side in sides}}, whole],
        "sharegpt": [
            {"conversations": human, "chosen": {"from": "gpt", "value": "x"}, "rejected": "y"}
        ],
        "openai": [{"input": {"messages": question}, **preferred}],
    }


@pytest.mark.parametrize("name", shapes())
def test_messages_that_a_table_has_as_json_text_are_messages(name, library, tmp_path):
    encoder = Encoder(load_tokenizer("data/demo/model"))
    expected = encoder.encode("", [{"role": "user", "content": "q"}], "x", "y")[0]
    for row in shapes()[name]:
        texts = {
            field: value if isinstance(value, str) else json.dumps(value, indent=1)
            for field, value in row.items()
        }
        write(tmp_path / "a.csv", [texts])
        (tmp_path / "a.jsonl").write_text(json.dumps(texts))
        library.Dataset.from_list([texts]).to_parquet(tmp_path / "a.parquet")
        for file in ("a.csv", "a.jsonl", "a.parquet"):
            [pair], report = reading.pairs(tmp_path / file, encoder)
            assert (pair[:3], report["format"]) == (expected[:3], name), file


def test_what_pandas_writes_for_messages_is_one_line_that_tells_how_to_write_them(
    library, tmp_path
):
    """Lists of objects become Python's text, and those of Parquet numpy's, without commas."""
    pandas = pytest.importorskip("pandas")
    for row in sum(shapes().values(), []):
        pandas.DataFrame([row]).to_csv(tmp_path / "lists.csv", index=False)
        library.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
        pandas.read_parquet(tmp_path / "a.parquet").to_csv(tmp_path / "arrays.csv", index=False)
        for file in ("lists.csv", "arrays.csv"):
            problem = "a text of messages that is not JSON, such as str() writes in Python"
            assert f": {problem} (expected messages, or their" in error_of(tmp_path / file)
        pandas.DataFrame([row]).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
        assert len(
            reading.pairs(tmp_path / "a.jsonl", Encoder(load_tokenizer("data/demo/model")))[0]
        )


def test_the_digest_changes_with_the_rows_of_a_table(library, tmp_path):
    digests = set()
    for rows in (chats(), chats()[:-1]):
        library.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
        digests.add(data.digest_of_data(str(tmp_path / "a.parquet")))
    assert len(digests) == 2


def test_a_data_set_that_is_not_there_is_one_line(library, tmp_path, monkeypatch):
    library.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_text("no table")
    for name in ("empty", "bad.parquet"):
        assert error_of(tmp_path / name).startswith(": neither a file nor a data set: ")
    assert "neither a folder nor in the cache" in error_of("some/set:train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -r requirements-data.txt, or use JSON" in error_of("some/set")
