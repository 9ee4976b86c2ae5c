"""Data files: strict JSON with file:line in every error, atomic writes, and digests."""

import contextlib
import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import reprlib
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from ddp_utils import UserError

ROOT = Path(__file__).resolve().parents[2]
AnyPath = str | Path
# characters that would break a line of output in two, or that cannot be printed
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
TEMPORARY = ".tmp-"  # the name of a file or folder begins with it until all is written
DELIMITERS = {".csv": ",", ".tsv": "\t"}
# the first bytes of files that people have by mistake -> what they are, and what to do
NOT_TEXT = {
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "decompress it, or use gzip"),
    b"BZh": ("is compressed with bzip2", "decompress it, or use gzip"),
    b"\xfd7zXZ": ("is compressed with xz", "decompress it, or use gzip"),
    b"PK\x03\x04": ("is a zip archive or an Excel file", "unpack it, or save it as CSV (UTF-8)"),
    b"PAR1": ("is Parquet", "let its name end with .parquet"),
    b"\xff\xfe": ("is UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("is UTF-16", "save it as UTF-8"),
}


class Unusable(Exception):
    """A well-formed row that nothing can be learned from; the text is the reason, for counting."""


class WrongFields(UserError):
    """A record has not the fields of any format, which is probably so for all records."""


class Record(NamedTuple):
    """One object of a data file."""

    location: str  # `file:line`, or `file[index]` if the file is one list
    data: dict


class DataFile(NamedTuple):
    """A data file, or a data set of the hub, and how it is read."""

    path: str
    cache: AnyPath  # folder for the token ids
    limit: int = -1  # number of rows; -1: all
    on_bad_record: str = "error"  # or "skip"
    columns: str = ""  # other names of fields: ours=theirs,ours=theirs
    extra_fields: str = ""  # fields that the rows keep for the loss: importance,source


# --- reading -------------------------------------------------------------------------------------


def resolve(path: AnyPath) -> Path:
    """Return a path relative to the current folder if it exists there, else to the project root."""
    expanded = Path(os.path.expanduser(path))  # Path.expanduser() would replace ./~ as well
    return expanded if os.path.exists(expanded) else ROOT / expanded


def output_path(path: AnyPath) -> Path:
    """Return where an output goes: in src/ and scripts/, paths are relative to the project root.

    Paths with `..` are relative to the current folder everywhere.
    """
    expanded = Path(os.path.expanduser(path))
    is_in_code = any(Path.cwd().is_relative_to(ROOT / name) for name in ("src", "scripts"))
    return ROOT / expanded if is_in_code and ".." not in expanded.parts else expanded


def model_of_run(run: Path, settings: dict, facts: dict) -> Path:
    """Return the folder for the model of a run.

    settings, facts: config.json and environment.json of the run. A relative --output_dir of
    main_distributed.py is in the folder in which the run was started.
    """
    own = "result_dir" in settings and settings.get("output_dir")
    return Path(facts.get("directory", ""), own) if own else run / "model"


def is_same_file(path: AnyPath, other: AnyPath) -> bool:
    """Return whether both paths lead to one file, which does not have to exist."""
    return resolve(path).resolve() == resolve(other).resolve()


def existing_file(path: AnyPath) -> Path:
    """Return the resolved path of a regular file; raise UserError if there is none."""
    file = resolve(path)
    if not os.path.isfile(file):
        folders = " or ".join(dict.fromkeys([str(Path.cwd()), str(ROOT)]))
        place = "" if os.path.isabs(path) else f" in {folders}"
        problem = f"no such file (expected a regular file{place})"
        if re.fullmatch(r"[\w-]+/[^/]+", str(path)) and not re.search(r"\.\w+$", str(path)):
            problem += "; a data set of the hub is OWNER/NAME:SPLIT"
        raise UserError(f"{str(path) or repr('')}: {problem}")
    return file


def content(path: AnyPath) -> str:
    """Return the text of a file, decompressed if it is gzip, without a byte order mark."""
    file = existing_file(path)
    try:
        raw = file.read_bytes()
        if raw.startswith(b"\x1f\x8b"):  # gzip, whatever the file's name is
            raw = gzip.decompress(raw)
        for begin, (kind, fix) in NOT_TEXT.items():
            if raw.startswith(begin):
                raise UserError(f"{path}: {kind} (expected text in UTF-8); {fix}")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8; convert it") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: {error}") from error


def read(path: AnyPath, limit: int = -1, skip: bool = False, columns: str = "") -> Iterator[Record]:
    """Yield the records of a JSON, JSON Lines or CSV file, or of a data set; at most `limit`.

    Raises UserError if the file is absent or empty, or if a record is not one JSON object; with
    `skip` such a line becomes a record whose data is that error.
    columns: as in DataFile; records have our names.
    """
    theirs = dict(pair.split("=") for pair in columns.split(",") if pair)
    absent = {*theirs}  # of which no record has either name
    record = None
    for location, data in itertools.islice(_rows(str(path)), limit if limit > 0 else None):
        if isinstance(data, dict):
            # pandas writes NaN where a row has no value
            data = {name: None if value != value else value for name, value in data.items()}
            # a column with the name that another column gets would hide that one
            here = {name: column for name, column in theirs.items() if column in data}
            renamed = {*here, *here.values()}
            kept = {name: value for name, value in data.items() if name not in renamed}
            data = kept | {name: data[column] for name, column in here.items()}
            absent -= data.keys()
        elif not isinstance(data, UserError):
            data = UserError(f"{location}: not a JSON object; each record must be one {{...}}")
        if isinstance(data, UserError) and not skip:
            raise data
        record = Record(location, data)
        yield record
    if record is None:
        raise UserError(f"{path}: 0 records; each line must hold one JSON object")
    for name in sorted(absent) if limit <= 0 else ():  # later records may have it
        if not name.startswith("ignored_"):
            problem = f"no record has a field {theirs[name]}; correct the name, or add such a field"
            raise UserError(f"{path}: --columns {name}={theirs[name]}: {problem} to one record")


def usable(
    source: DataFile,
    make: Callable[[Record], Any],
    dropped: Counter,
    split: Callable[[Record], Iterable[Record]] | None = None,
    map_rows: Callable[[Callable, Iterable], Iterable] = map,
) -> Iterator[Any]:
    """Yield make(record) of the records of a file, and count those without it by reason.

    split: returns the records that one of the file stands for, by default itself.
    map_rows: calls `make`: the built-in map, or one that uses several processes.
    Raises UserError if no record is usable, or if one is malformed, unless these are skipped.
    """

    def result(record: Record) -> tuple[str, Any]:
        """Return the record's location, and its row or why there is none."""
        try:
            if isinstance(record.data, UserError):
                raise record.data
            return record.location, make(record)
        except (Unusable, UserError) as error:
            return record.location, error

    used = 0
    records = read(source.path, source.limit, skip=True, columns=source.columns)
    records = itertools.chain.from_iterable(map(split, records)) if split else records
    for location, row in map_rows(result, records):
        if isinstance(row, Unusable):
            dropped[str(row)] += 1
        elif isinstance(row, UserError) and source.on_bad_record == "skip":
            dropped["malformed"] += 1
        elif isinstance(row, UserError):
            # errors of the chat template have no location
            place = "" if str(row).startswith(source.path) else f"{location}: "
            hint = "" if isinstance(row, WrongFields) else "; or use --on_bad_record skip"
            raise UserError(f"{place}{row}{hint}") from row
        else:
            used += 1
            yield row
    if not used:
        raise UserError(f"{source.path}: 0 usable rows of {dropped.total()}: {listed(dropped)}")


def listed(numbers: dict) -> str:
    """Return numbers and their names, separated by commas."""
    return ", ".join(f"{number:g} {name}" for name, number in numbers.items())


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and the JSON value (or the UserError) of each row."""
    delimiter = DELIMITERS.get(Path(path.lower().removesuffix(".gz")).suffix)
    if delimiter or is_data_set(path):
        if delimiter:
            yield from read_csv(path, content(path), delimiter)
        else:
            from ddp_utils import data_sets

            for number, row in enumerate(data_sets.load(path, resolve), start=1):
                yield f"{path}:{number}", {key: without_nulls(value) for key, value in row.items()}
        return
    text = content(path)
    if text.lstrip().startswith("["):
        for index, value in enumerate(decode(text, path, decoder=ROWS)):
            yield f"{path}[{index}]", value
        return
    has_one_row = "\n" not in text.strip()
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                value = decode(line, path, number, ROWS)
                if has_one_row:
                    check_layout(f"{path}:{number}", value)
                yield f"{path}:{number}", value
            except UserError as error:
                hint = "each line must hold one {...}, or the file one list of them"
                yield f"{path}:{number}", UserError(f"{error}; {hint}")


def check_layout(location: str, row: Any) -> None:
    """Raise UserError if the only row of a file is a table, such as {column: {"0": value}}."""
    values = [*row.values()] if isinstance(row, dict) else []
    items = values[0] if len(values) == 1 and isinstance(values[0], list) else []
    # a list of messages may be the only field of a row
    is_list = items and all(isinstance(x, dict) and not {"role", "from"} & x.keys() for x in items)
    if is_list or (values and all(isinstance(x, dict) and "0" in x for x in values)):
        problem = "one object with all rows (expected one object for each row)"
        hint = 'save it with DataFrame.to_json(PATH, orient="records", lines=True)'
        raise UserError(f"{location}: {problem}; {hint}")


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls in its objects: Arrow adds the keys of all other rows."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def read_csv(path: str, text: str, delimiter: str) -> Iterator[tuple[str, dict | UserError]]:
    """Yield the location of the last line of each row, and its fields, all of them texts."""
    csv.field_size_limit(2**31 - 1)  # characters; the default is too small for long texts
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = rows.fieldnames or []
        if len({*names}) < len(names):
            raise UserError(f"{path}:1: two columns have one name: {', '.join(names)}; rename one")
        if len(names) == 1 and ";" in names[0]:
            raise UserError(f"{path}:1: the fields are separated by ; (expected {delimiter!r})")
        for row in rows:
            location = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                problem = f"expected {len(names)} fields as in the first line; quote commas in text"
                yield location, UserError(f"{location}: {problem}")
            else:
                yield location, row
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def is_data_set(path: str) -> bool:
    """Return whether the library datasets reads it: Parquet, Arrow, a folder, a name on the hub.

    After colons may follow a configuration and a split, or a split alone; a name on the hub that
    has a dot needs one.
    """
    folder = path.partition(":")[0]
    is_table = path.endswith((".parquet", ".arrow")) and os.path.exists(resolve(path))
    if is_table or (folder and os.path.isdir(resolve(folder))):
        return True
    is_hub_name = re.fullmatch(r"[\w-]+/([\w-]+|[\w.-]+(:[\w.-]+)?:\w+)", path)
    return bool(is_hub_name) and not os.path.exists(resolve(path))


def read_json(path: AnyPath) -> dict:
    """Return the object in a JSON file; raise UserError if it is not strict JSON or no object."""
    data = decode(content(path), path)
    if not isinstance(data, dict):
        raise UserError(f"{path}:1: expected an object, {{...}}")
    return data


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"duplicate field {key!r:.60}")
        data[key] = value
    return data


# the rows of a data file may have NaN in fields that are not read
ROWS = json.JSONDecoder(object_pairs_hook=_reject_duplicates)
STRICT = json.JSONDecoder(object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)


def decode(text: str, path: AnyPath, line: int = 1, decoder: json.JSONDecoder = STRICT) -> Any:
    """Return the value of JSON text that begins on a line of a file.

    Raises UserError with the place of a syntax error, a duplicate key, or (STRICT) a NaN.
    """
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        is_python = text[error.pos : error.pos + 1] == "'"
        hint = "; Python's str() writes such text, use json.dumps" if is_python else ""
        raise UserError(f"{path}:{line}:{error.colno}: not JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        # the decoder does not report on which of several lines the error is
        location = path if "\n" in text.strip() else f"{path}:{line}"
        raise UserError(f"{location}: not JSON: {error}") from error


def text(record: Record, field: str, may_be_empty: bool = False) -> str:
    """Return the string in a field; raise UserError if there is none."""
    value = record.data.get(field)
    if field not in record.data:
        raise UserError(f"{record.location}: {field}: missing; fields found: {names_of(record)}")
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise wrong_value(record, field, value, "a non-empty string")
    if re.search("[\0\ud800-\udfff]", value):
        raise UserError(f"{record.location}: {field}: remove the NUL or half surrogate pair")
    return value


def wrong_value(record: Record, field: str, value: Any, expected: str) -> UserError:
    """Return the error for a field whose value is not what is expected."""
    problem = f"must be {expected}, not {reprlib.repr(value):.100}"
    return UserError(f"{record.location}: {field}: {problem}")


def names_of(record: Record) -> str:
    """Return the names of the fields of a record, for a message."""
    return f"{', '.join(map(shown, record.data)) or '-':.200}"


def shown(name: str) -> str:
    """Return a name from a user's file in a form that fits into one line of output."""
    return name if name.isprintable() and len(name) < 40 else repr(name)[:40]


def printable(text: str) -> str:
    """Return the text with control characters replaced, except newline and tab."""
    return CONTROL.sub(lambda match: match[0] if match[0] in "\n\t" else "\ufffd", text)


# --- writing -------------------------------------------------------------------------------------


def broken_link(path: Path) -> str:
    """Return which part of a path is a symbolic link to nowhere, for a message; "" if none is."""
    for part in (path, *path.parents):
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a link to {os.readlink(part)}, which does not exist"
    return ""


def temporary_of(path: AnyPath) -> Path:
    """Return the path under which a file or folder is written before it is renamed."""
    return Path(path).with_name(f"{TEMPORARY}{Path(path).name}")


@contextlib.contextmanager
def write_file(path: AnyPath, is_folder: bool = False) -> Iterator[Path]:
    """Yield a temporary file to write to; at the end it replaces `path` and is on the disk."""
    path = Path(path)
    temporary = temporary_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        if is_folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)  # fails if somebody else creates a link here
        mode = temporary.stat().st_mode & 0o666
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            if file.is_file():
                file.chmod(mode)  # safetensors makes files that only their owner may read
            fsync(file)
        if is_folder:
            _remove(path)
        os.replace(temporary, path)
        fsync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _remove(temporary)
        # in an error of safetensors the number is only in the text
        number = re.search(r"(?:Errno|os error) (\d+)", str(error))
        if not number or not isinstance(error, OSError | SafetensorError):
            raise
        code = int(number[1])
        # the file may be in a folder that is temporary as well
        raise OSError(code, os.strerror(code), str(path).replace(TEMPORARY, "")) from error


write_folder = functools.partial(write_file, is_folder=True)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one; what a link points to stays."""
    shutil.rmtree(path, ignore_errors=True)  # does nothing to a file or link
    path.unlink(missing_ok=True)


def write_text(path: AnyPath, text: str) -> None:
    """Write a text file atomically."""
    with write_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: AnyPath, data: Any) -> None:
    """Write plain data as indented JSON, atomically."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def fsync(path: AnyPath) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- digests -------------------------------------------------------------------------------------


def sha256(path: AnyPath) -> str:
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


def digest_of_data(path: str) -> str:
    """Return a digest of the content of a data file or data set."""
    if not is_data_set(path):
        return sha256(existing_file(path))
    from ddp_utils import data_sets

    return " ".join(sha256(part["filename"]) for part in data_sets.load(path, resolve).cache_files)
