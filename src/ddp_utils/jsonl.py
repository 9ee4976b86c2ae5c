"""Read json, jsonl and gz files strictly, and say file:line: field of whatever is wrong."""

import codecs
import contextlib
import difflib
import gzip
import itertools
import json
import os
import re
import reprlib
import zlib
from pathlib import Path
from typing import NamedTuple

from ddp_utils import UserError

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 8 * 2**30  # of a file after decompression
SPACE = re.compile(r"\s*")
# what would break a line of output in two, or cannot be printed at all
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Record(NamedTuple):
    """One object of a data file and where it starts, `file:line`."""

    where: str
    data: dict


def resolve(path) -> Path:
    """A relative path, from the current folder if it is there, else from the project's root."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser() takes ./~ for ~
    return expanded if os.path.exists(expanded) else ROOT / expanded


def read(path, limit=-1, skip=False) -> list[Record]:
    """Read the records of a .jsonl or .json file, gzipped or not, at most `limit` of them.

    Raises UserError if the file is absent, empty, or has a record that is not one JSON object;
    with `skip` such a line becomes a record whose data is that error.
    """
    raw = content(path)
    rows = _array(path, raw) if raw.lstrip()[:1] == b"[" else _lines(path, raw)
    records = []
    for line, data in itertools.islice(rows, limit if limit >= 0 else None):
        if not isinstance(data, dict | UserError):
            data = UserError(f"{path}:{line}: not a JSON object; each record is one {{...}}")
        if isinstance(data, UserError) and not skip:
            raise data
        records.append(Record(f"{path}:{line}", data))
    if not records:
        raise UserError(f"{path}: 0 records; each line holds one JSON object")
    return records


def text(record, field) -> str:
    """The non-empty string under `field`; UserError names the record, the field and the mend."""
    if field not in record.data:
        hint = f"found: {', '.join(map(shown, record.data)) or '-':.200}"
        for name in difflib.get_close_matches(field, record.data, n=1):
            hint = f"rename {name!r}, if that is meant"
        raise UserError(f"{record.where}: {field} is missing; {hint}")
    value = record.data[field]
    if not isinstance(value, str) or not value.strip():
        hint = f"{reprlib.repr(value):.100}; give a non-empty string"
        raise UserError(f"{record.where}: {field} is {hint}")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"{record.where}: {field} has a NUL or half a surrogate pair; remove it")
    return value


def shown(key) -> str:
    """A name that someone else has chosen, fit for a line of output."""
    return key if key.isprintable() and len(key) < 40 else repr(key)[:40]


def printable(text) -> str:
    """Return the text without control characters, which a terminal obeys; \\n and \\t stay."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


def content(path) -> bytes:
    """What a file holds, unpacked and without BOM; UserError if that is not UTF-8, or too much."""
    file = resolve(path)
    if not str(path) or not os.path.exists(file):
        places = " and in ".join(dict.fromkeys(map(str, (Path.cwd(), ROOT))))
        raise UserError(f"{str(path) or repr('')}: no such file; looked in {places}")
    if not file.is_file():
        raise UserError(f"{path}: not a regular file but a directory, pipe or device")
    try:
        size = file.stat().st_size
        raw = file.read_bytes() if size <= MAX_BYTES else b""
        if raw[:2] == b"\x1f\x8b":  # by its first bytes: names lie
            with gzip.open(file) as stream:
                raw = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if max(size, len(raw)) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES:,} bytes; unpack or split it")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8; convert it") from error
    return raw


def read_object(path) -> dict:
    """The object that a JSON file holds; UserError as for records, doubles and NaN included."""
    settings = decoded(path, 1, content(path))
    if not isinstance(settings, dict):
        raise UserError(f"{path}:1: give an object, {{...}}")
    return settings


def line_of(name, path) -> str:
    """`path:line` of a key in a JSON file; with dots one key inside others."""
    text = content(path).decode()
    at = 0
    for key in name.split("."):
        at = max(at, text.find(f'"{key}"', at))
    return f"{path}:{1 + text.count(chr(10), 0, at)}"


EACH = "; each line holds one {...}, or the file one list of them"


def _lines(path, raw):
    """(line, its object or the error) of each; str.splitlines() would cut one at U+2028."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, decoded(path, number, line, EACH)
            except UserError as error:
                yield number, error


def decoded(path, number, line, mend=""):
    with _located(path, number, mend):
        return DECODER.decode(line.decode())


def _array(path, raw):
    """The elements of one top-level list, each with the line on which it starts.

    Of several on one line, as json.dump writes them, the second and later ones with their number.
    """
    content = raw.decode()
    end = content.index("[")  # of what stands before the next element
    line = 1 + content.count("\n", 0, end)
    line_before = None
    for number in itertools.count(1):
        start = SPACE.match(content, end + 1).end()
        if number == 1 and content[start : start + 1] == "]":
            end = start
            break
        line += content.count("\n", end, start)
        with _located(path, line):
            data, behind = DECODER.raw_decode(content, start)
        yield f"{line} (item {number})" if line == line_before else line, data
        line_before = line
        end = SPACE.match(content, behind).end()
        line += content.count("\n", start, end)
        if content[end : end + 1] != ",":
            break
    if content[end : end + 1] != "]" or content[end + 1 :].strip():
        raise UserError(f"{path}:{line}: expected ',' or the end; the file is one list [...]")


@contextlib.contextmanager
def _located(path, line, mend=""):
    """Say where JSON is wrong: the decoder counts lines from where its own text begins."""
    try:
        yield
    except json.JSONDecodeError as error:
        row = max(line, error.lineno)
        raise UserError(f"{path}:{row}:{error.colno}: not JSON: {error.msg}{mend}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        raise UserError(f"{path}:{line}: not JSON: {reason}") from error


def _refuse(word):
    raise ValueError(f"{word} is not a JSON number")


def _without_doubles(pairs):
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"field {key!r:.60} stands twice in one object")
        data[key] = value
    return data


DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_without_doubles)
