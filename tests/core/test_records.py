"""JSON, JSON Lines and gzip: the records with their places, and errors with file:line."""

import bz2
import gzip
import json
import lzma
import sys
import time

import pytest

from ddp_utils import UserError, data

GOOD = b'{"a": "x"}'


def read(*arguments, **options):
    return list(data.read(*arguments, **options))


def write(folder, raw, name="f.jsonl"):
    file = folder / name
    file.write_bytes(raw)
    return file


def error_of(file):
    """Return the one line with which reading a file fails, without the file's name."""
    with pytest.raises(UserError) as caught:
        read(file)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and message.startswith(str(file))
    return message.removeprefix(str(file))


# --- what is read --------------------------------------------------------------------------------

READ = {  # bytes -> where each record is, after the name of the file
    GOOD + b"\n" + GOOD: [":1", ":2"],
    b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD + b"\r\n": [":1", ":2"],
    b"\n  \n" + GOOD + b"\n\n\t\n" + GOOD + b"\n": [":3", ":6"],
    b"\xef\xbb\xbf[\n" + GOOD + b",\n\n" + GOOD + b"\n]\n\n": ["[0]", "[1]"],
    b'[\r\n{\r\n"a":\r\n"x"}\r\n,\r\n' + GOOD + b"]": ["[0]", "[1]"],
}


def test_good_files_are_read_with_the_place_of_each_record(tmp_path):
    for raw, places in READ.items():
        for content in (raw, gzip.compress(raw)):
            file = write(tmp_path, content, "f.txt")
            rows = [(f"{file}{place}", {"a": "x"}) for place in places]
            assert read(file) == rows
            assert read(file, limit=1) == rows[:1]
            assert read(file, limit=9) == rows


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_the_time_to_read_a_file_grows_with_its_rows_and_not_with_their_square(kind, tmp_path):
    """20 times the rows need less than 100 times the CPU time; the square would need 400 times."""

    def seconds(count):
        rows = [json.dumps({"x": str(number), "y": "word " * 20}) for number in range(count)]
        text = "".join(f"{row}\n" for row in rows)
        if kind == "json":
            text = f"[{','.join(rows)}]"
        elif kind == "csv":
            text = "x,y\n" + "".join(f"{number},{'word ' * 20}\n" for number in range(count))
        path = tmp_path / f"{count}.{kind}"
        path.write_text(text)
        start = time.process_time()
        assert sum(1 for _ in data.read(str(path))) == count
        return time.process_time() - start

    assert seconds(40_000) < 100 * min(seconds(2_000) for _ in range(3))


def test_only_a_newline_ends_a_record_and_every_value_comes_through(tmp_path):
    for mark in ("\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\\n", "\\u2028"):
        row = {"a": f"x{mark}y", "b": [1, -2.5, None, True], "c": {"d": {}}, "": 10**20}
        raw = json.dumps(row, ensure_ascii=False).encode() + b"\n" + GOOD
        assert [record.data for record in read(write(tmp_path, raw))] == [row, {"a": "x"}]


def test_a_relative_path_is_looked_up_here_first_and_then_in_the_project(tmp_path, monkeypatch):
    here, project = tmp_path / "here", tmp_path / "project"
    here.mkdir(), project.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(data, "ROOT", project)
    assert error_of("f.jsonl") == f": no such file (expected a regular file in {here} or {project})"
    with monkeypatch.context() as inside:
        inside.chdir(project)
        assert error_of("f.jsonl") == f": no such file (expected a regular file in {project})"
    write(project, b'{"a": "project"}')
    assert read("f.jsonl")[0].data == {"a": "project"}
    write(here, b'{"a": "here"}')
    assert read("f.jsonl")[0] == ("f.jsonl:1", {"a": "here"})


# --- errors: more are in corpus/ ------------------------------------------------------------

NAMES_COMMA = sys.version_info >= (3, 13)  # which older ones of Python take for right
SYNTAX = {  # bytes -> where, as line:column counted by eye
    b'{"a": }': "1:7",
    GOOD + b'\n{"a": "x",}': "2:10" if NAMES_COMMA else "2:11",
    GOOD + b"\r" + GOOD: "1:12",
    b'\xef\xbb\xbf{"a": }': "1:7",
    b"[\n" + GOOD + b",\n]": "2:11" if NAMES_COMMA else "3:1",
    b"[\n" + GOOD + b',\n{"a" 2}]': "3:6",
    b"[\n" + GOOD + b"\n" + GOOD + b"]": "3:1",
    b"[" + GOOD + b"]\n[" + GOOD + b"]": "2:1",
}


def test_wrong_json_is_located_by_line_and_column(tmp_path):
    for raw, place in SYNTAX.items():
        assert error_of(write(tmp_path, raw)).startswith(f":{place}: not JSON: "), raw


def test_what_json_cannot_mean_is_located_by_line(tmp_path):
    for value, says in (
        (b'{"b": 1, "b": 1}', "duplicate field 'b'"),
        (b'{"b": {"c\\n": 1, "c\\n": 2}}', "duplicate field 'c\\n'"),
        (b"[" * 100_000, "maximum recursion depth"),  # the one limit on depth
    ):
        bad = b'{"a": ' + value + b"}"
        assert error_of(write(tmp_path, GOOD + b"\n" + bad)).startswith(f":2: not JSON: {says}")
        file = write(tmp_path, b"[" + GOOD + b",\n" + bad + b"]")
        assert error_of(file).startswith(f": not JSON: {says}")


def test_a_table_in_one_object_is_one_line_that_names_the_way_out(tmp_path):
    """As pandas' to_json() and many programs write it; a row may consist of messages alone."""
    columns = {"prompt": {"0": "a", "1": "b"}, "chosen": {"0": "c", "1": "d"}}
    for table in (columns, {"data": [{"prompt": "a"}, {"prompt": "b"}]}):
        (tmp_path / "f.json").write_text(json.dumps(table))
        with pytest.raises(
            UserError, match='f.json:1: one object with all rows .*orient="records"'
        ):
            [*data.read(tmp_path / "f.json")]
    rows = '{"dialog": [{"speaker": "A"}]}\n' * 2  # a row for each line
    (tmp_path / "f.json").write_text(rows)
    assert len([*data.read(tmp_path / "f.json")]) == 2
    for row in ({"messages": [{"role": "user", "content": "a"}]}, {"a": ["b"]}, {"a": {}}, {}):
        (tmp_path / "f.json").write_text(json.dumps(row))
        assert [record.data for record in data.read(tmp_path / "f.json")] == [row]


def test_with_skip_a_bad_line_is_a_record_that_holds_its_error(tmp_path):
    rows = read(write(tmp_path, GOOD + b"\n{\n7\n" + GOOD), skip=True)
    assert [type(record.data) for record in rows] == [dict, UserError, UserError, dict]
    assert "f.jsonl:3: not a JSON object" in str(rows[2].data)


def test_a_damaged_gzip_file_is_one_line(tmp_path):
    packed = gzip.compress(b"\n".join(b'{"a": %d}' % n for n in range(500)), mtime=0)
    for place in (0.1, 0.5, 0.9):
        damaged = bytearray(packed)
        damaged[int(place * len(damaged))] ^= 0xFF
        error_of(write(tmp_path, bytes(damaged)))


def test_what_is_not_text_is_one_line_that_says_what_it_is(tmp_path):
    row = GOOD.decode()
    for raw, says in (
        (bz2.compress(GOOD), "compressed with bzip2"),
        (lzma.compress(GOOD), "compressed with xz"),
        (b"\x28\xb5\x2f\xfd\x04", "compressed with zstd"),
        (b"PK\x03\x04\x14", "a zip archive or an Excel file"),
        (row.encode("utf-16"), "UTF-16"),
        (b"PAR1\x15", "Parquet"),
    ):
        assert error_of(write(tmp_path, raw)).startswith(f": is {says} (expected text in UTF-8); ")


def test_a_table_may_be_compressed_and_its_name_in_capitals(tmp_path):
    for name, raw in (("F.CSV", b"a\nx\n"), ("f.tsv.gz", gzip.compress(b"a\tb\nx\ty\n"))):
        assert read(write(tmp_path, raw, name))[0].data["a"] == "x"


def test_text_is_the_string_in_the_field(tmp_path):
    [record] = read(write(tmp_path, b'{"a": " \\ud83d\\ude00\\n"}'))
    assert data.text(record, "a") == " \U0001f600\n"
