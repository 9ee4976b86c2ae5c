"""Reads json, jsonl and gz files strictly; errors begin with the place, as file:line: field."""

import codecs
import difflib
import gzip
import io
import itertools
import json
import os
import re
import reprlib
import zlib
from pathlib import Path
from typing import NamedTuple

from ddp_utils import UserError, files

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 8 * 2**30  # of a file after decompression
# what would break a line of output in two, or cannot be printed at all
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Record(NamedTuple):
    """One object of a data file."""

    location: str  # `file:line`, or `file[index]` if the file is one list
    data: dict
    row: str = ""  # what reports call it: its line, or its index in the list


def resolve(path) -> Path:
    """A relative path, from the current folder if it is there, else from the project's root."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser() takes ./~ for ~
    return expanded if os.path.exists(expanded) else ROOT / expanded


def read(path, limit=-1, skip=False):
    """Yield the records of a .jsonl or .json file, gzipped or not, at most `limit` of them.

    Raises UserError if the file is absent, empty, or has a record that is not one JSON object;
    with `skip` such a line becomes a record whose data is that error.
    """
    raw = content(path)
    if raw.lstrip()[:1] == b"[":
        elements = decoded(path, 1, raw)
        rows = [(f"{path}[{index}]", str(index), data) for index, data in enumerate(elements)]
    else:
        rows = _lines(path, raw)
    record = None
    for location, row, data in itertools.islice(rows, limit if limit > 0 else None):
        if not isinstance(data, dict | UserError):
            data = UserError(f"{location}: not a JSON object; each record is one {{...}}")
        if isinstance(data, UserError) and not skip:
            raise data
        record = Record(location, data, row)
        yield record
    if record is None:
        raise UserError(f"{path}: 0 records; each line holds one JSON object")


def digest(path) -> str:
    """Of the content of a file."""
    return files.sha256(existing(path))


def text(record, field) -> str:
    """Return the non-empty string under `field`; UserError names record, field and mend."""
    if field not in record.data:
        hint = f"found: {', '.join(map(shown, record.data)) or '-':.200}"
        for name in difflib.get_close_matches(field, record.data, n=1):
            hint = f"rename {name!r}, if that is meant"
        raise UserError(f"{record.location}: {field} is missing; {hint}")
    value = record.data[field]
    if not isinstance(value, str) or not value.strip():
        hint = f"{reprlib.repr(value):.100}; give a non-empty string"
        raise UserError(f"{record.location}: {field} is {hint}")
    if re.search("[\0\ud800-\udfff]", value):
        raise UserError(f"{record.location}: {field} has a NUL or half a surrogate pair; remove it")
    return value


def shown(key) -> str:
    """Return a name from someone's file in a form that fits into a line of output."""
    return key if key.isprintable() and len(key) < 40 else repr(key)[:40]


def printable(text) -> str:
    """Return the text without control characters, which a terminal obeys; \\n and \\t stay."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


def existing(path) -> Path:
    """Return where a file is; UserError if there is none."""
    file = resolve(path)
    if not str(path) or not os.path.exists(file):
        folders = " and in ".join(dict.fromkeys(map(str, (Path.cwd(), ROOT))))
        raise UserError(f"{str(path) or repr('')}: no such file; looked in {folders}")
    if not file.is_file():
        raise UserError(f"{path}: not a regular file but a directory, pipe or device")
    return file


def content(path) -> bytes:
    """Return a file's bytes, unpacked, without BOM; UserError if they are no UTF-8, or too many."""
    file = existing(path)
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
    """Return the object that a JSON file holds; UserError as for records."""
    settings = decoded(path, 1, content(path))
    if not isinstance(settings, dict):
        raise UserError(f"{path}:1: give an object, {{...}}")
    return settings


EACH = "; each line holds one {...}, or the file one list of them"


def _lines(path, raw):
    """Yield where each row is, its line, and its object or error; only a newline ends a row."""
    for number, line in enumerate(io.BytesIO(raw), start=1):
        if line.strip():
            try:
                data = decoded(path, number, line.removesuffix(b"\n"), EACH)
            except UserError as error:
                data = error
            yield f"{path}:{number}", str(number), data


def decoded(path, line, raw, mend=""):
    """Decode JSON that begins on a line of a file; UserError says where it is wrong."""
    try:
        return DECODER.decode(raw.decode())
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        raise UserError(f"{path}:{line}:{error.colno}: not JSON: {error.msg}{mend}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # what follows is advice to programmers
        # of several lines the decoder does not say which
        location = path if b"\n" in raw.strip() else f"{path}:{line}"
        raise UserError(f"{location}: not JSON: {reason}") from error


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
