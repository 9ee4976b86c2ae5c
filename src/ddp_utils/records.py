"""Read json, jsonl and gz files strictly, and say file:line: field of whatever is wrong."""

import codecs
import contextlib
import difflib
import gzip
import json
import math
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
    try:
        if not str(path) or CONTROL.search(str(path)):
            raise ValueError("it is empty or has control characters")
        found = Path(os.path.expanduser(path))  # Path.expanduser() takes ./~ for ~
        places = [found, ROOT / found]  # the same place twice if it is absolute
        return next((place for place in places if place.exists()), places[-1])
    except (OSError, ValueError) as error:  # too long, no permission
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{str(path)[:80]!r}: not a path that can be read: {reason}") from error


def read(path, limit=-1, skip=False) -> list[Record]:
    """Read the records of a .jsonl or .json file, gzipped or not, at most `limit` of them.

    Raises UserError if the file is absent, empty, or has a record that is not one JSON object;
    with `skip` such a line becomes a record whose data is that error.
    """
    raw = content(path)
    records = []
    for line, decode in _array(path, raw) if raw.lstrip()[:1] == b"[" else _lines(path, raw):
        if 0 <= limit == len(records):
            break
        try:
            data = decode()
            if not isinstance(data, dict):
                raise UserError(f"{path}:{line}: not a JSON object; each record is one {{...}}")
        except UserError as error:
            if not skip:
                raise
            data = error
        records.append(Record(f"{path}:{line}", data))
    if not records:
        raise UserError(f"{path}: 0 records; each line holds one JSON object")
    return records


def text(record, field) -> str:
    """The non-empty string under `field`; UserError names the record, the field and the mend."""
    if field not in record.data:
        near = difflib.get_close_matches(field, record.data, n=1)
        found = f"found: {', '.join(map(shown, record.data)) or '-':.200}"
        found = f"rename {near[0]!r}, if that is meant" if near else found
        raise UserError(f"{record.where}: {field} is missing; {found}")
    value = record.data[field]
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"{record.where}: {field} is {reprlib.repr(value):.100}; give a non-empty string"
        )
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"{record.where}: {field} has a NUL or half a surrogate pair; remove it")
    return value


def shown(key) -> str:
    """A name that someone else has chosen, fit for a line of output."""
    return key if key.isprintable() and len(key) < 40 else repr(key)[:40]


def printable(text) -> str:
    """Return the text without control characters, which a terminal obeys; \\n and \\t stay."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


def content(path, most=None) -> bytes:
    """What a file holds, unpacked and without BOM; UserError if that is not UTF-8, or too much."""
    file = resolve(path)
    if not file.exists():
        places = " and in ".join(dict.fromkeys(map(str, (Path.cwd(), ROOT))))
        raise UserError(f"{path}: no such file; looked in {places}")
    if not file.is_file():
        raise UserError(f"{path}: not a regular file but a directory, pipe or device")
    most = most or MAX_BYTES
    try:
        size = file.stat().st_size
        # /proc/kmsg is a regular file of no size, and would be read for ever
        raw = file.read_bytes() if 0 < size <= most else b""
        if raw[:2] == b"\x1f\x8b":  # by its first bytes: names lie
            with gzip.open(file) as stream:
                raw = stream.read(most + 1)
            size = len(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if size > most:
        raise UserError(f"{path}: more than {most:,} bytes; unpack or split it")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8; convert it") from error
    return raw


EACH = "; each line holds one {...}, or the file one list of them"


def _lines(path, raw):
    """One record per line; cut at b"\\n" alone: str.splitlines() would cut one at U+2028."""
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            yield number, lambda number=number, line=line: decoded(path, number, line, EACH)


def decoded(path, number, line, mend=""):
    with _located(path, number, mend=mend):
        return _decoder().decode(line.decode())


def _array(path, raw):
    """The elements of one top-level list, each with the line on which it starts.

    Of several on one line, as json.dump writes them, the second and later ones with their number.
    """
    content, decoder = raw.decode(), _decoder()
    at, previous, line, before, number = content.index("["), 0, 1, 0, 0
    while True:
        first, at = previous == 0, SPACE.match(content, at + 1).end()  # past "[" or ","
        if first and content[at : at + 1] == "]":
            break  # an empty list; after a comma, "]" is the decoder's error
        line += content.count("\n", previous, at)
        previous = at
        with _located(path, line, 1):
            data, at = decoder.raw_decode(content, at)
        number += 1
        yield f"{line} (item {number})" if line == before else line, lambda data=data: data
        before = line
        at = SPACE.match(content, at).end()
        if content[at : at + 1] != ",":
            break
    if content[at : at + 1] != "]" or content[at + 1 :].strip():
        line += content.count("\n", previous, at)
        raise UserError(f"{path}:{line}: expected ',' or the end; the file is one list [...]")


@contextlib.contextmanager
def _located(path, line, first=None, mend=""):
    """Say where JSON is wrong: `first` is the line that the decoder calls its first."""
    try:
        yield
    except json.JSONDecodeError as error:
        row = (first or line) + error.lineno - 1
        raise UserError(f"{path}:{row}:{error.colno}: not JSON: {error.msg}{mend}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        raise UserError(f"{path}:{line}: not JSON: {reason}") from error


def _decoder():
    return json.JSONDecoder(
        parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_without_doubles
    )


def _refuse(word):
    raise ValueError(f"{word:.40} is not a JSON number")


def _finite(digits):
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _without_doubles(pairs):
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"field {key!r:.60} stands twice in one object")
        data[key] = value
    return data
