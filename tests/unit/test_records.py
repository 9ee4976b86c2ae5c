"""Reading json, jsonl and gz: what is accepted, and that each bad input is one line, file:line."""

import gzip
import json
import os
import threading

import pytest

from ddp_utils import UserError, records

GOOD = b'{"a": "x"}'


def write(folder, raw, name="f.jsonl"):
    file = folder / name
    file.write_bytes(raw)
    return file


def lines(found):
    """The line numbers and data of records; `where` is file:line."""
    places = [(record.where.rpartition(":")[2].split()[0], record.data) for record in found]
    return [(int(line), data) for line, data in places]


def complaint(file, *args):
    with pytest.raises(UserError) as caught:
        records.read(file, *args)
    message = str(caught.value)
    assert message.startswith(str(file)) and "Traceback" not in message
    assert "\n" not in message, "an error is one line"
    return message.removeprefix(str(file))


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw, numbers",
    [
        (GOOD + b"\n" + GOOD, [1, 2]),
        (GOOD + b"\n" + GOOD + b"\n", [1, 2]),
        (b"\xef\xbb\xbf" + GOOD, [1]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [1, 2]),
        (b"\n  \n" + GOOD + b"\n\n\t\n" + GOOD + b"\n", [3, 6]),
        (b"[" + GOOD + b"," + GOOD + b"]", [1, 1]),
        (b"[\n" + GOOD + b",\n\n" + GOOD + b"\n]\n\n", [2, 4]),
        (b'[\r\n{\r\n"a":\r\n"x"}\r\n,\r\n' + GOOD + b"]", [2, 6]),
        (b"\xef\xbb\xbf[\n" + GOOD + b"]", [2]),
    ],
    ids=["plain", "newline", "bom", "crlf", "blanks", "list", "lines", "list_crlf", "list_bom"],
)
def test_good_files_are_read_with_the_line_of_each_record(tmp_path, raw, numbers):
    found = records.read(write(tmp_path, raw))
    assert lines(found) == [(number, {"a": "x"}) for number in numbers]
    assert found[0].where == f"{tmp_path}/f.jsonl:{numbers[0]}"


def test_items_of_one_line_have_their_number(tmp_path):
    """A list as json.dump writes it, and one that begins a new line for its third item."""
    file = write(tmp_path, b"[" + GOOD + b"," + GOOD + b",\n" + GOOD + b"," + GOOD + b"]")
    places = [record.where.removeprefix(f"{file}:") for record in records.read(file)]
    assert places == ["1", "1 (item 2)", "2", "2 (item 4)"]
    file = write(tmp_path, b'[{"a": "x"}, 7]')
    assert complaint(file) == ":1 (item 2): not a JSON object; each record is one {...}"


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\\n", "\\u2028"])
def test_only_a_newline_ends_a_record(tmp_path, mark):
    raw = json.dumps({"a": f"x{mark}y"}, ensure_ascii=False).encode() + b"\n" + GOOD
    found = records.read(write(tmp_path, raw))
    assert lines(found) == [(1, {"a": f"x{mark}y"}), (2, {"a": "x"})]


def test_values_of_every_kind_come_through(tmp_path):
    row = {"a": "é\U0001f600", "b": [1, -2.5, None, True], "c": {"d": {}}, "": 10**20}
    assert lines(records.read(write(tmp_path, json.dumps(row).encode()))) == [(1, row)]


@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.gz", "f", "f.txt"])
@pytest.mark.parametrize("zipped", [False, True])
def test_gzip_is_known_by_its_first_bytes_whatever_the_name(tmp_path, name, zipped):
    raw = b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD
    file = write(tmp_path, gzip.compress(raw) if zipped else raw, name)
    assert lines(records.read(file)) == [(1, {"a": "x"}), (2, {"a": "x"})]


@pytest.mark.parametrize("limit, count", [(-1, 4), (1, 1), (3, 3), (9, 4)])
@pytest.mark.parametrize("form", ["lines", "list"])
def test_limit_is_the_most_records_read(tmp_path, form, limit, count):
    rows = [b'{"a": %d}' % n for n in range(4)]
    raw = b"\n".join(rows) if form == "lines" else b"[" + b",\n".join(rows) + b"]"
    found = records.read(write(tmp_path, raw), limit)
    assert [record.data["a"] for record in found] == list(range(count))


def test_a_relative_path_is_looked_up_here_first_and_then_in_the_project(tmp_path, monkeypatch):
    here, project = tmp_path / "here", tmp_path / "project"
    here.mkdir(), project.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(records, "ROOT", project)
    write(project, b'{"a": "project"}')
    assert records.read("f.jsonl")[0].data == {"a": "project"}
    write(here, b'{"a": "here"}')
    assert records.read("f.jsonl")[0] == ("f.jsonl:1", {"a": "here"})


# --- what is refused -----------------------------------------------------------------------------

SYNTAX = {  # bytes -> where, as line:column counted by eye
    b'{"a": }': "1:7",
    GOOD + b'\n{"a": "x",}': "2:11",
    GOOD + b'\n\n{"a" "x"}': "3:6",
    GOOD + b'\n{"a": "x': "2:7",
    GOOD + b"\r" + GOOD: "1:12",
    b'{\n"a": 1}': "1:2",
    b'\xef\xbb\xbf{"a": }': "1:7",
    b'{"a": "\x00"}': "1:8",
    b"[\n" + GOOD + b",\n]": "3:1",
    b"[" + GOOD + b",]": "1:13",
    b"[\n" + GOOD + b',\n{"a" 2}]': "3:6",
    b"[\n" + GOOD + b",": "2:12",
    b"[," + GOOD + b"]": "1:2",
}


@pytest.mark.parametrize("raw", SYNTAX)
def test_wrong_json_is_located_by_line_and_column(tmp_path, raw):
    assert complaint(write(tmp_path, raw)).startswith(f":{SYNTAX[raw]}: not JSON: ")


@pytest.mark.parametrize(
    "value, says",
    [
        (b"NaN", "NaN"),
        (b"-Infinity", "-Infinity"),
        (b"1e999", "1e999"),
        (b"-1e999", "-1e999"),
        (b"9" * 5000, "5000 digits"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"b": 1, "b": 1}', "'b' stands twice"),
        (b'{"b": {"c": 1, "c": 2}}', "'c' stands twice"),
    ],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_what_json_cannot_mean_is_located_by_line(tmp_path, form, value, says):
    bad = b'{"a": ' + value + b"}"
    raw = GOOD + b"\n" + bad if form == "lines" else b"[" + GOOD + b",\n" + bad + b"]"
    message = complaint(write(tmp_path, raw))
    assert message.startswith(":2: not JSON: ") and says in message


def test_deep_nesting_at_the_top_is_refused(tmp_path):
    assert "recursion" in complaint(write(tmp_path, b"[" * 100_000))


@pytest.mark.parametrize("value", [b"7", b'"x"', b"null", b"true"])
def test_a_line_that_is_not_an_object_is_refused(tmp_path, value):
    message = complaint(write(tmp_path, GOOD + b"\n" + value))
    assert message.startswith(":2: not a JSON object")


@pytest.mark.parametrize("value", [b"7", b'"x"', b"null", b"[]", b"[" + GOOD + b"]"])
def test_an_element_that_is_not_an_object_is_refused(tmp_path, value):
    message = complaint(write(tmp_path, b"[" + GOOD + b",\n" + value + b"]"))
    assert message.startswith(":2: not a JSON object")


@pytest.mark.parametrize(
    "raw, line",
    [
        (b"[\n" + GOOD, 2),  # never closed
        (b"[\n" + GOOD + b"\n" + GOOD + b"]", 3),  # no comma
        (b"[\n" + GOOD + b"\n]\nmore", 3),
        (b"[\n" + GOOD + b"\n]\n" + GOOD, 3),
        (b"[" + GOOD + b"]\n[" + GOOD + b"]", 1),
    ],
    ids=["unclosed", "no_comma", "text_after", "object_after", "two_lists"],
)
def test_a_list_that_does_not_end_with_the_file_is_refused(tmp_path, raw, line):
    assert complaint(write(tmp_path, raw)).startswith(f":{line}: ")


@pytest.mark.parametrize(
    "raw", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"[]", b"[\n\n ]", gzip.compress(b"", mtime=0)]
)
def test_a_file_without_records_is_refused(tmp_path, raw):
    assert complaint(write(tmp_path, raw)).startswith(": 0 records")
    assert complaint("/proc/version").startswith(": 0 records")  # not read: kmsg would never end


@pytest.mark.parametrize(
    "raw, line, byte",
    [
        (GOOD + b'\n{"a": "\xff"}', 2, 18),
        (GOOD + b'\n{"a": "\xed\xa0\x80"}', 2, 18),  # a surrogate as bytes
        ('{"a": 1}'.encode("utf-16"), 1, 0),
        (b'[\n{"a": "caf\xe9"}]', 2, 12),
    ],
    ids=["ff", "surrogate", "utf16", "latin1"],
)
def test_bytes_that_are_not_utf8_are_located(tmp_path, raw, line, byte):
    assert complaint(write(tmp_path, raw)).startswith(f":{line}: byte {byte} is not UTF-8")


def test_a_truncated_gzip_file_is_refused(tmp_path):
    whole = gzip.compress(b"\n".join(b'{"a": %d}' % n for n in range(500)))
    assert complaint(write(tmp_path, whole[: len(whole) // 2])).startswith(": ")


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_damaged_gzip_file_is_refused(tmp_path, place):
    damaged = bytearray(gzip.compress(b"\n".join(b'{"a": %d}' % n for n in range(500)), mtime=0))
    damaged[int(place * len(damaged))] ^= 0xFF
    assert complaint(write(tmp_path, bytes(damaged))).startswith(":")


def test_a_file_above_the_limit_is_refused_packed_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_BYTES", 5000)
    for content in (GOOD + b"\n" * 6000, gzip.compress(GOOD + b"\n" * 6000)):
        assert "split it" in complaint(write(tmp_path, content))


# --- paths ---------------------------------------------------------------------------------------


def test_a_missing_file_names_the_folders_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        records.read("nofile.jsonl")
    message = str(caught.value)
    assert message.startswith("nofile.jsonl: no such file")
    assert str(tmp_path) in message and str(records.ROOT) in message


def test_a_folder_is_not_a_data_file(tmp_path):
    assert "not a regular file" in complaint(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    said = []
    reader = threading.Thread(target=lambda: said.append(complaint(tmp_path / "pipe")), daemon=True)
    reader.start()
    reader.join(timeout=5)
    assert said and "not a regular file" in said[0]


@pytest.mark.parametrize("name", ["", "a\0b", "loop", "x" * 300, "~nobody_here/f"], ids=repr)
def test_an_impossible_path_is_a_users_mistake(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    with pytest.raises(UserError):
        records.read(name)


# --- text() --------------------------------------------------------------------------------------


def said_of(data, field="chosen"):
    with pytest.raises(UserError) as caught:
        records.text(records.Record("f.jsonl:7", data), field)
    message = str(caught.value)
    assert message.startswith(f"f.jsonl:7: {field} ") and "\n" not in message
    return message


def test_text_gives_the_string_as_it_stands():
    record = records.Record("f.jsonl:7", {"chosen": " é \n\U0001f600"})
    assert records.text(record, "chosen") == " é \n\U0001f600"


@pytest.mark.parametrize(
    "value", [None, 3, 1.5, True, [], ["x"], {}, {"a": "x"}, "", " ", "\n\t ", "\u3000"]
)
def test_text_refuses_what_is_not_a_non_empty_string(value):
    assert "give a non-empty string" in said_of({"chosen": value})


def test_a_long_value_is_not_printed_in_full():
    assert len(said_of({"chosen": list(range(10_000))})) < 200


@pytest.mark.parametrize("escape", ["\\u0000", "\\ud800", "\\udfff", "\\udc00\\ud800"])
def test_text_refuses_nul_and_half_a_surrogate_pair(tmp_path, escape):
    raw = b'{"chosen": "a%sb"}' % escape.encode()
    [record] = records.read(write(tmp_path, raw))
    with pytest.raises(UserError, match="NUL or half a surrogate"):
        records.text(record, "chosen")


def test_a_whole_surrogate_pair_is_one_letter(tmp_path):
    [record] = records.read(write(tmp_path, b'{"chosen": "\\ud83d\\ude00"}'))
    assert records.text(record, "chosen") == "\U0001f600"


def test_a_missing_field_suggests_the_nearest_name():
    assert "rename 'choosen', if that is meant" in said_of({"prompt": "a", "choosen": "b"})


def test_a_missing_field_far_from_any_lists_what_is_there():
    assert "found: instruction, output" in said_of({"instruction": "a", "output": "b"})
    assert "found: -" in said_of({})


def test_a_field_name_with_a_newline_does_not_break_the_line(tmp_path):
    said_of({"a\nb": 1})
    complaint(write(tmp_path, b'{"a\\nb": 1, "a\\nb": 2}'))
