"""Data files: strict JSON with file:line in every error, and files that are written atomically."""

import array
import codecs
import contextlib
import difflib
import gzip
import hashlib
import itertools
import json
import os
import re
import reprlib
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from ddp_utils import UserError

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 8 * 2**30  # of a file after decompression
# characters that would break a line of output in two, or that cannot be printed
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ONE_OBJECT_PER_LINE = "; each line must hold one {...}, or the file one list of them"


class Record(NamedTuple):
    """One object of a data file."""

    location: str  # `file:line`, or `file[index]` if the file is one list
    data: dict
    row: str = ""  # the line or the index, for reports


# --- reading -------------------------------------------------------------------------------------


def resolve(path: str | Path) -> Path:
    """Return a path relative to the current folder if it exists there, else to the project root."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser() would replace ./~ as well
    return expanded if os.path.exists(expanded) else ROOT / expanded


def existing_file(path: str | Path) -> Path:
    """Return the resolved path of a regular file; raise UserError if there is none."""
    file = resolve(path)
    if not str(path) or not os.path.exists(file):
        folders = " and in ".join(dict.fromkeys(map(str, (Path.cwd(), ROOT))))
        raise UserError(f"{str(path) or repr('')}: no such file; looked in {folders}")
    if not file.is_file():
        raise UserError(f"{path}: not a regular file but a directory, pipe or device")
    return file


def content(path: str | Path) -> str:
    """Return the text of a file, decompressed and without a byte order mark.

    Raises UserError if the file cannot be read, is not UTF-8, or is larger than MAX_BYTES.
    """
    file = existing_file(path)
    try:
        size = file.stat().st_size
        raw = file.read_bytes() if size <= MAX_BYTES else b""
        if raw.startswith(b"\x1f\x8b"):  # the magic number of gzip; the name may not end in .gz
            with gzip.open(file) as stream:
                raw = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if max(size, len(raw)) > MAX_BYTES:
        raise UserError(f"{path}: more than {MAX_BYTES:,} bytes; unpack or split it")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8; convert it") from error


def read(path: str | Path, limit: int = -1, skip: bool = False) -> Iterator[Record]:
    """Yield the records of a .jsonl or .json file, gzipped or not, at most `limit` of them.

    Raises UserError if the file is absent, empty, or has a record that is not one JSON object;
    with `skip` such a line becomes a record whose data is that error.
    """
    record = None
    for location, row, data in itertools.islice(_rows(path), limit if limit > 0 else None):
        if not isinstance(data, dict | UserError):
            data = UserError(f"{location}: not a JSON object; each record must be one {{...}}")
        if isinstance(data, UserError) and not skip:
            raise data
        record = Record(location, data, row)
        yield record
    if record is None:
        raise UserError(f"{path}: 0 records; each line must hold one JSON object")


def _rows(path: str | Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the location, the number, and the JSON value (or the UserError) of each row."""
    text = content(path)
    if text.lstrip().startswith("["):
        for index, data in enumerate(decode(text, path)):
            yield f"{path}[{index}]", str(index), data
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                data = decode(line, path, number, ONE_OBJECT_PER_LINE)
            except UserError as error:
                data = error
            yield f"{path}:{number}", str(number), data


def read_json(path: str | Path) -> dict:
    """Return the object in a JSON file; raise UserError if it is not strict JSON or no object."""
    data = decode(content(path), path)
    if not isinstance(data, dict):
        raise UserError(f"{path}:1: expected an object, {{...}}")
    return data


def decode(text: str, path: str | Path, line: int = 1, hint: str = "") -> Any:
    """Return the value of JSON text that begins on a line of a file.

    Raises UserError with the place of a syntax error, a duplicate key, or a NaN.
    """
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        raise UserError(f"{path}:{line}:{error.colno}: not JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # the rest is advice to programmers
        # the decoder does not report on which of several lines the error is
        location = path if "\n" in text.strip() else f"{path}:{line}"
        raise UserError(f"{location}: not JSON: {reason}") from error


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"duplicate field {key!r:.60}")
        data[key] = value
    return data


DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_reject_duplicates)


def text(record: Record, field: str) -> str:
    """Return the non-empty string in a field; raise UserError if there is none."""
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


def shown(name: str) -> str:
    """Return a name from a user's file in a form that fits into one line of output."""
    return name if name.isprintable() and len(name) < 40 else repr(name)[:40]


def printable(text: str) -> str:
    """Return the text with control characters replaced, except newline and tab."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


# --- writing -------------------------------------------------------------------------------------


def temporary_of(path: str | Path) -> Path:
    """Return the path under which a file or folder is written before it is renamed."""
    return Path(path).with_name(f".tmp-{Path(path).name}")


@contextlib.contextmanager
def write_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end it replaces `path` and is on the disk."""
    path = Path(path)
    temporary = temporary_of(path)
    with _removed_on_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.touch(exist_ok=False)  # fails if somebody else creates a link here
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes files that only their owner may read
        fsync(temporary)
        os.replace(temporary, path)


@contextlib.contextmanager
def write_folder(path: str | Path, clear: bool = True) -> Iterator[Path]:
    """Yield a temporary folder to write to; at the end it replaces `path` and is on the disk.

    clear: start empty; with False, files that other ranks have written there are kept.
    """
    path = Path(path)
    temporary = temporary_of(path)
    with _removed_on_error(path):
        if clear:
            _remove(temporary)
        temporary.mkdir(parents=True, exist_ok=not clear)
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for file in filter(Path.is_file, temporary.rglob("*")):
            file.chmod(file.stat().st_mode | mode)
            fsync(file)
        fsync(temporary)
        _remove(path)
        os.replace(temporary, path)
        fsync(path.parent)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Remove the temporary file or folder on an error; make errors of the disk name `path`."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(temporary_of(path))
        number = getattr(error, "errno", None)
        if isinstance(error, SafetensorError):
            number = re.search(r"os error (\d+)|$", str(error))[1]
        if not isinstance(error, OSError | SafetensorError) or not number:
            raise
        raise OSError(int(number), os.strerror(int(number)), str(path)) from error


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(target, temporary, fresh=True):  # for runs/, until run.py uses write_folder()
    if fresh:
        _remove(temporary)
    with _removed_on_error(Path(target)):
        yield


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with write_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, data: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def fsync(path: str | Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- digests -------------------------------------------------------------------------------------


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**22), b""):
            digest.update(block)
    return digest.hexdigest()


def digest_of_files(files: Iterable[Path], *more: Any) -> str:
    """Return a digest of names, sizes and contents.

    Of a large file only 64 blocks of 1 MiB are read, since reading all of it takes minutes.
    """
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for position in range(0, size, max(2**20, size // 64)):
                stream.seek(position)
                digest.update(stream.read(2**20))
    return digest.hexdigest()[:16]


def digest_of_rows(rows: Any) -> str:
    """Return a digest of the token ids of all rows; rows kept in a file have one already."""
    if hasattr(rows, "digest"):
        return rows.digest
    digest = hashlib.sha256()
    for row in rows:
        ids = *row[0], -1, *row[1], -1, *row[2], -2
        digest.update(array.array("q", ids))
    return digest.hexdigest()[:16]
