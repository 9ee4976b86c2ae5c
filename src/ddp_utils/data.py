"""Data files: strict JSON with file:line in every error, atomic writes, and rows of token ids.

Rows are encoded once per node and kept in a file that all processes map into memory.
"""

import array
import contextlib
import difflib
import functools
import gzip
import hashlib
import itertools
import json
import os
import re
import reprlib
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddp_utils import UserError

ROOT = Path(__file__).resolve().parents[2]
# characters that would break a line of output in two, or that cannot be printed
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ONE_OBJECT_PER_LINE = "; each line must hold one {...}, or the file one list of them"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHER_SUFFIXES = (*DELIMITERS, ".json", ".jsonl", ".gz", ".txt")  # not of a data set on the hub
ENCODERS = ("data", "data_sets", "preference_data", "conversations", "chat_template", "logps")
CODE = [Path(__file__).with_name(f"{name}.py") for name in ENCODERS]  # that makes token ids


class Record(NamedTuple):
    """One object of a data file."""

    location: str  # `file:line`, or `file[index]` if the file is one list
    data: dict
    row: str = ""  # the line or the index, for reports


class DataFile(NamedTuple):
    """A data file, or a data set of the hub, and how it is read."""

    path: str
    cache: str | Path | None = None  # folder for the token ids
    limit: int = -1  # number of rows; -1: all
    on_bad_record: str = "error"  # or "skip"
    columns: str = ""  # other names of fields: ours=theirs,ours=theirs


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
        raise UserError(f"{path}: not a regular file but a folder, pipe or device")
    return file


def content(path: str | Path) -> str:
    """Return the text of a file, decompressed and without a byte order mark."""
    file = existing_file(path)
    try:
        raw = file.read_bytes()
        if raw.startswith(b"\x1f\x8b"):  # gzip, whatever the file's name is
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8; convert it") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def read(
    path: str | Path, limit: int = -1, skip: bool = False, columns: str = ""
) -> Iterator[Record]:
    """Yield the records of a JSON, JSON Lines or CSV file, or of a data set; at most `limit`.

    Raises UserError if the file is absent or empty, or if a record is not one JSON object; with
    `skip` such a line becomes a record whose data is that error.
    columns: as in DataFile; records have our names.
    """
    theirs = dict(pair.split("=") for pair in columns.split(",") if pair)
    ours = {column: name for name, column in theirs.items()}
    record = None
    for location, row, data in itertools.islice(_rows(str(path)), limit if limit > 0 else None):
        if not isinstance(data, dict | UserError):
            data = UserError(f"{location}: not a JSON object; each record must be one {{...}}")
        if isinstance(data, UserError) and not skip:
            raise data
        if ours and isinstance(data, dict):
            # a column with the name that another column gets would hide that one
            kept = {name: data[name] for name in data if name in ours or name not in theirs}
            data = {ours.get(name, name): value for name, value in kept.items()}
        record = Record(location, data, row)
        yield record
    if record is None:
        raise UserError(f"{path}: 0 records; each line must hold one JSON object")


def _rows(path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the location, the number, and the JSON value (or the UserError) of each row."""
    delimiter = DELIMITERS.get(Path(path).suffix)
    rows: Iterable[tuple[int, Any]]
    if delimiter or is_data_set(path):
        from ddp_utils import data_sets

        if delimiter:
            rows = data_sets.read_csv(path, content(path), delimiter)
        else:
            rows = enumerate(data_sets.load(path, resolve), start=1)
    else:
        text = content(path)
        if text.lstrip().startswith("["):
            for index, data in enumerate(decode(text, path)):
                yield f"{path}[{index}]", str(index), data
            return
        rows = _json_lines(path, text)
    for number, data in rows:
        yield f"{path}:{number}", str(number), data


def _json_lines(path: str, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, decode(line, path, number, ONE_OBJECT_PER_LINE)
            except UserError as error:
                yield number, error


def is_data_set(path: str) -> bool:
    """Return whether the library datasets reads it: Parquet, Arrow, a folder, a name on the hub."""
    file = resolve(path)
    if file.suffix in (".parquet", ".arrow"):
        return True
    if path and resolve(path.partition(":")[0]).is_dir():  # a split may follow behind the colon
        return True
    is_hub_name = re.fullmatch(r"[\w-]+/[\w.-]+(:\w+)?", path)
    return bool(is_hub_name) and file.suffix not in OTHER_SUFFIXES and not file.exists()


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
        hint = f"fields found: {', '.join(map(shown, record.data)) or '-':.200}"
        for name in difflib.get_close_matches(field, record.data, n=1):
            hint = f"rename {name!r} if that is the field"
        raise UserError(f"{record.location}: {field}: missing; {hint}")
    value = record.data[field]
    if not isinstance(value, str) or not value.strip():
        raise wrong_value(record, field, value, "a non-empty string")
    if re.search("[\0\ud800-\udfff]", value):
        raise UserError(f"{record.location}: {field}: remove the NUL or half surrogate pair")
    return value


def wrong_value(record: Record, field: str, value: Any, expected: str) -> UserError:
    """Return the error for a field whose value is not what is expected."""
    problem = f"must be {expected}, not {reprlib.repr(value):.100}"
    return UserError(f"{record.location}: {field}: {problem}")


def shown(name: str) -> str:
    """Return a name from a user's file in a form that fits into one line of output."""
    return name if name.isprintable() and len(name) < 40 else repr(name)[:40]


def printable(text: str) -> str:
    """Return the text with control characters replaced, except newline and tab."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


# --- writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def write_file(path: str | Path, target: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end it replaces `path` and is on the disk.

    target: the path that errors of the disk name, if `path` itself is temporary.
    """
    path = Path(path)
    temporary = temporary_of(path)
    with _removed_on_error(path, target):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.touch(exist_ok=False)  # fails if somebody else creates a link here
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes files that only their owner may read
        fsync(temporary)
        os.replace(temporary, path)


@contextlib.contextmanager
def write_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to write to; at the end it replaces `path` and is on the disk."""
    path = Path(path)
    temporary = temporary_of(path)
    with _removed_on_error(path):
        _remove(temporary)
        temporary.mkdir(parents=True)
        yield temporary
        mode = temporary.stat().st_mode & 0o666
        for file in filter(Path.is_file, temporary.rglob("*")):
            file.chmod(file.stat().st_mode | mode)
            fsync(file)
        fsync(temporary)  # the names in it
        _remove(path)
        os.replace(temporary, path)
        fsync(path.parent)


def temporary_of(path: str | Path) -> Path:
    """Return the path under which a file or folder is written before it is renamed."""
    return Path(path).with_name(f".tmp-{Path(path).name}")


@contextlib.contextmanager
def _removed_on_error(path: Path, target: Path | None = None) -> Iterator[None]:
    """Remove the temporary file or folder on an error; make errors of the disk name `path`."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(temporary_of(path))
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, SafetensorError):  # the number is only in the text
            match = re.search(r"os error (\d+)", str(error))
            number = int(match[1]) if match else None
        if not number:
            raise
        raise OSError(number, os.strerror(number), str(target or path)) from error


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one; what a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    ids = [row[:3] for row in rows]
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


# --- rows of token ids ---------------------------------------------------------------------------

# columns of Rows.table: where the row's three lists of token ids and its texts end in the file, a
# number that is the same for equal prompts, the length of the longer sequence, the largest id
COLUMNS = ("first", "second", "third", "texts", "prompt", "num_tokens", "largest_id")
ROW = np.dtype([(name, np.int64) for name in COLUMNS])


class Rows:
    """Rows of token ids in a file that all processes map into memory.

    A row is a NamedTuple of three lists of token ids, its location in the data file, and texts.
    It is made when it is asked for.

    kind: the NamedTuple; path: the data file; file: written by write_rows(); index: [rows] which
    rows of the file, by default all.
    """

    def __init__(self, kind: type, path: str, file: Path, index: np.ndarray | None = None) -> None:
        self.kind = kind
        self.path = path
        self.file = file
        with safe_open(file, "pt") as tensors:  # "np" would read the file into memory
            self.metadata = tensors.metadata()
            self.ids = tensors.get_tensor("ids").numpy()
            self.texts = tensors.get_tensor("texts").numpy()
            self.table = tensors.get_tensor("table").numpy().view(ROW)[:, 0]
        self.index = np.arange(1, len(self.table)) if index is None else index
        self.make = functools.lru_cache(1024)(self._make)  # a step uses each row several times

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        return self.make(self.index[row].item())

    def _make(self, row: int) -> Any:
        before, entry = self.table[row - 1], self.table[row]
        bounds = before["third"], entry["first"], entry["second"], entry["third"]
        lists = [self.ids[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]
        texts = self.texts[before["texts"] : entry["texts"]].tobytes()
        location, *others = json.loads(texts)
        return self.kind(*lists, f"{self.path}{location}", *others)

    @property
    def digest(self) -> str:
        """Return a digest of the token ids and of which rows these are."""
        return hashlib.sha256(self.metadata["digest"].encode() + self.index.tobytes()).hexdigest()

    @property
    def prompts(self) -> np.ndarray:
        """Return a number for each row, [rows], that is the same for equal prompts."""
        return self.table["prompt"][self.index]

    def extremes(self) -> list:
        """Return the two shortest and the two longest rows and the one with the largest id."""
        table = self.table[self.index]
        by_length = np.argsort(table["num_tokens"], kind="stable")
        rows = [*by_length[:2], *by_length[-2:], table["largest_id"].argmax()]
        return [self[row] for row in dict.fromkeys(rows)]

    def select(self, mask: np.ndarray) -> "Rows":
        """Return the rows where a mask [rows] is True."""
        return Rows(self.kind, self.path, self.file, self.index[mask])


def write_rows(file: Path, path: str, rows: Iterable, report: dict) -> None:
    """Write rows for Rows, and the report, which may be filled in while they are made.

    Locations are written without `path`, since the data file may move.
    """
    from ddp_utils.sampler import seed_of  # imports torch, for which --help need not wait

    ids = array.array("i")
    texts = bytearray()
    table = array.array("q", [0] * len(COLUMNS))  # begins with an empty row, whose ends are 0
    for row in rows:
        for part in row[:3]:
            ids.extend(part)
            table.append(len(ids))
        texts += json.dumps([row.location.removeprefix(path), *row[4:]]).encode()
        largest = max(itertools.chain(*row[:3]))
        table.extend((len(texts), seed_of(row.text), row.num_tokens, largest))
    arrays = {"ids": np.array(ids), "texts": np.frombuffer(texts, np.uint8)}
    arrays["table"] = np.array(table).reshape(-1, len(COLUMNS))
    digest = hashlib.sha256(arrays["ids"].tobytes() + arrays["table"].tobytes()).hexdigest()
    save_file(arrays, file, {"digest": digest, "report": json.dumps(report)})


def cached_rows(
    kind: type, source: DataFile, facts: list, make: Callable[[dict], Iterable]
) -> tuple[Rows, dict]:
    """Return the Rows of a data file, and the report on it, from the cache.

    make: if they are not in the cache, make(report) yields the rows and fills in the report. One
    process of a node does so, the others wait.
    facts: what the rows depend on besides the file and its settings.
    Raises UserError if the folder cannot be written, or if the file in the cache is damaged.
    """
    path, cache, *settings = source
    facts = [kind.__name__, digest_of_data(path), digest_of_files(CODE), *settings, *facts]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    file = Path(cache or ".") / f"{Path(path).stem}-{key}.safetensors"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):
                if not file.exists():  # another process may have made it
                    report: dict = {}
                    with write_file(file) as temporary:
                        write_rows(temporary, path, make(report), report)
    except OSError as error:
        problem = f"{cache} cannot be written: {error.strerror}; use another folder"
        raise UserError(f"--cache_dir: {problem}") from error
    try:
        rows = Rows(kind, path, file)
    except SafetensorError as error:
        raise UserError(f"{file}: damaged; delete it and start again") from error
    return rows, {"file": path, **json.loads(rows.metadata["report"])}


def digest_of_data(path: str) -> str:
    """Return a digest of the content of a data file or data set."""
    if not is_data_set(path):
        return sha256(existing_file(path))
    from ddp_utils import data_sets

    files = data_sets.load(path, resolve).cache_files
    return " ".join(sha256(part["filename"]) for part in files)
