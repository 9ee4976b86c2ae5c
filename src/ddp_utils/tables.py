"""Data files, and their rows of token ids: made once, and mapped from a file by all.

JSON is read by data.py, tables of other kinds by data_sets.py.
"""

import array
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, data, sampler

CODE = sorted(Path(__file__).parent.glob("*.py"))  # what makes the rows
JSON = (".json", ".jsonl", ".gz", ".txt")
TABLES = (".parquet", ".csv", ".tsv", ".arrow")
END, PROMPT, SIZE, LARGEST = range(4)  # columns of Rows.numbers


class DataFile(NamedTuple):
    """A data file, or data set of the hub, and what of it is read."""

    path: str
    cache: Path | None = None  # folder for the token ids
    limit: int = -1  # rows
    on_bad_record: str = "error"
    columns: str = ""  # fields under another name: ours=theirs,ours=theirs

    def records(self):
        """Yield the records, their fields under our names."""
        theirs = dict(pair.split("=") for pair in self.columns.split(",") if pair)
        ours = {column: name for name, column in theirs.items()}
        for record in self.reader().read(self.path, self.limit, skip=True):
            if ours and isinstance(record.data, dict):  # else it is an error
                data = {}
                for column, value in record.data.items():
                    if column in ours or column not in theirs:  # else another one takes its place
                        data[ours.get(column, column)] = value
                record = record._replace(data=data)
            yield record

    def digest(self):
        """Return a digest of the content of the file."""
        reader = self.reader()
        if reader is data:
            return data.sha256(data.existing_file(self.path))
        return reader.digest(self.path)

    def reader(self):
        """Return the module that reads such a file."""
        file = data.resolve(self.path)
        folder = data.resolve(self.path.partition(":")[0])  # perhaps with a split behind it
        is_set = file.suffix in TABLES or (self.path and folder.is_dir())
        on_hub = re.fullmatch(r"[\w-]+/[\w.-]+(:\w+)?", self.path) and file.suffix not in JSON
        if is_set or (on_hub and not file.exists()):
            from ddp_utils import data_sets

            return data_sets
        return data


class Rows:
    """Rows of a data file, each made from its JSON when it is asked for.

    kind: the NamedTuple of a row; file: what write() wrote; digest: of that; index: [rows] which of
    its rows, or all.
    """

    def __init__(self, kind, path, file, digest, index=None):
        self.kind = kind
        self.path = path
        self.file = file
        self.digest = digest
        with safe_open(file, "pt") as content:  # mapped, not read
            self.json = content.get_tensor("json").numpy()
            self.numbers = content.get_tensor("numbers").numpy()
        self.index = np.arange(len(self.numbers)) if index is None else index
        self.make = functools.lru_cache(1024)(self._make)  # a step asks for each row several times

    def __len__(self):
        return len(self.index)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        return self.make(self.index[row].item())

    def _make(self, row):
        start = self.numbers[row - 1, END] if row else 0
        content = self.json[start : self.numbers[row, END]].tobytes()
        made = self.kind(*json.loads(content))
        return made._replace(location=f"{self.path}{made.location}")

    @property
    def prompts(self):
        """A number for the prompt of each row, [rows]."""
        return self.numbers[self.index, PROMPT]

    def extremes(self):
        """Return the two shortest rows, the two longest ones, and that with the largest id."""
        numbers = self.numbers[self.index]
        by_size = np.argsort(numbers[:, SIZE], kind="stable")
        rows = [*by_size[:2], *by_size[-2:], numbers[:, LARGEST].argmax()]
        return [self[row] for row in dict.fromkeys(rows)]

    def select(self, mask):
        """Return the rows where a mask [rows] is True."""
        index = self.index[mask]
        digest = hashlib.sha256(self.digest.encode() + index.tobytes()).hexdigest()
        return Rows(self.kind, self.path, self.file, digest, index)


def read(kind, source, facts, make):
    """Return the Rows of a DataFile, and the report on it, from its cache.

    make(report) yields the rows and fills in the report. It is called if no earlier start has left
    them whole there, made from the same file and facts. One process makes them, the others wait.
    Raises UserError if the folder cannot be written.
    """
    path, cache, *more = source
    facts += [kind._fields, source.digest(), data.digest_of_files(CODE), more]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    file = Path(cache) / f"{Path(path).stem}-{key}.safetensors"
    about = file.with_suffix(".json")
    manifest = _intact(file, about)
    try:
        if not manifest:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_suffix(".lock")):
                manifest = _intact(file, about)  # another process has made them
                if not manifest:
                    report = {}
                    with data.write_file(file) as temporary:
                        write(temporary, path, make(report))
                    manifest = {"sha256": data.sha256(file), "report": report}
                    data.write_text(about, json.dumps(manifest))
    except OSError as error:
        says = f"--cache_dir: {cache} cannot be written: {error.strerror}; give another folder"
        raise UserError(says) from error
    return Rows(kind, path, file, manifest["sha256"]), {"file": path, **manifest["report"]}


def write(file, path, rows):
    """Write NamedTuples: three lists of token ids, where each stands in the file at path, texts.

    Each is JSON, and four numbers: END, where that ends; PROMPT, the same for equal prompts; SIZE,
    tokens of its longest text; LARGEST, its largest token id.
    """
    content = bytearray()
    numbers = array.array("q")
    for row in rows:
        row = row._replace(location=row.location.removeprefix(path))  # which may be moved
        content += json.dumps(row, separators=(",", ":")).encode()
        largest = max(map(max, filter(None, row[:3])))
        numbers.extend((len(content), sampler.seed_of(row.text), row.num_tokens, largest))
    content = torch.frombuffer(content, dtype=torch.uint8)
    save_file({"json": content, "numbers": torch.tensor(numbers).view(-1, 4)}, file)


def _intact(file, about) -> dict:
    """Return the hash and report written beside rows, {} if a file is absent or damaged."""
    try:
        manifest = json.loads(about.read_text())
        return manifest if data.sha256(file) == manifest["sha256"] else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
