"""Rows of token ids: encoded once per node, in a file that all processes map into memory."""

import array
import copy
import functools
import hashlib
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ddp_utils import UserError
from ddp_utils.data import ROOT, DataFile, broken_link, digest_of_data, digest_of_files, write_file
from ddp_utils.sampler import seed_of

# columns of Rows.table: where the row's three lists of token ids and its texts end in the file, a
# number that is the same for equal prompts, the length of the longer sequence, the number of
# targets (see logps.Example), the largest id
COLUMNS = ("first", "second", "third", "texts", "prompt", "num_tokens", "num_targets", "largest_id")
ROW = np.dtype([(name, np.int64) for name in COLUMNS])


class Fields(dict[str, Any]):
    """The fields of a row that --extra_fields names; any other raises UserError."""

    def __missing__(self, name: str) -> Any:
        raise UserError(f"--extra_fields: {name}: not kept; pass --extra_fields {name}")


class Rows:
    """Rows of token ids in a file that all processes map into memory.

    A row is a NamedTuple of three lists of token ids, its location in the data file, and texts.
    It is made when it is asked for.

    kind: the NamedTuple, a logps.Example with a function forward_tokens(); file: written by
    write_rows(); index: [rows] which rows of the file, by default all.
    """

    def __init__(self, kind: Any, file: Path, index: np.ndarray | None = None) -> None:
        self.kind = kind
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
        others = json.loads(texts)
        return self.kind(*lists, *(Fields(x) if isinstance(x, dict) else x for x in others))

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

    @property
    def num_targets(self) -> np.ndarray:
        """Return the number of targets of each row, [rows]; no row is made for it."""
        return self.table["num_targets"][self.index]

    def num_forward_tokens(self, shared: bool) -> np.ndarray:
        """Return num_forward_tokens(shared) of each row, [rows]; no row is made for it.

        Every rank plans the whole global batch, but should make only the rows that it processes.
        """
        before, table = self.table[self.index - 1], self.table[self.index]
        ends = before["third"], table["first"], table["second"], table["third"]
        return self.kind.forward_tokens(*np.diff(ends, axis=0), shared)

    def select(self, rows: Sequence[int] | slice | np.ndarray) -> "Rows":
        """Return these rows: their numbers, a slice, or a mask [rows]; none is made for it."""
        selected = copy.copy(self)
        selected.index = self.index[rows]
        return selected

    def first(self, limit: int) -> "Rows":
        """Return the first rows, at most this many; -1: all."""
        return self if limit == -1 else self.select(slice(limit))


def write_rows(file: Path, rows: Iterable, report: dict) -> None:
    """Write rows for Rows, and the report, which may be filled in while they are made."""
    ids = array.array("i")
    texts = bytearray()
    table = array.array("q", [0] * len(COLUMNS))  # begins with an empty row, whose ends are 0
    extras = []  # of rows that have some
    for row in rows:
        extras += [f"{len(table)} {json.dumps(row.extra)}"] if getattr(row, "extra", None) else []
        for part in row[:3]:
            ids.extend(part)
            table.append(len(ids))
        texts += json.dumps(row[3:]).encode()
        largest = max(itertools.chain(*row[:3]))
        targets = sum(map(len, row.targets))
        table.extend((len(texts), seed_of(row.text), row.num_tokens, targets, largest))
    arrays = {"ids": np.array(ids), "texts": np.frombuffer(texts, np.uint8)}
    arrays["table"] = np.array(table).reshape(-1, len(COLUMNS))
    ends = arrays["table"][:, :3]  # the digest does not depend on where the data file is
    content = arrays["ids"].tobytes() + ends.tobytes() + "".join(extras).encode()
    digest = hashlib.sha256(content).hexdigest()
    save_file(arrays, file, {"digest": digest, "report": json.dumps(report)})


def cached_rows(
    kind: type, source: DataFile, facts: list, make: Callable[[dict], Iterable]
) -> tuple[Rows, dict]:
    """Return the Rows of a data file, and the report on it, from the cache.

    make: if they are not in the cache, make(report) yields the rows and fills in the report. One
    process of a node does so, the others wait.
    facts: what the rows depend on besides the file, its settings and the code.
    Raises UserError if the folder cannot be written, or if the file in the cache is damaged.
    """
    code = digest_of_files(sorted((ROOT / "src").glob("*/*.py")))
    path, cache, *settings = source
    facts = [kind.__name__, path, digest_of_data(path), code, *settings, *facts]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    file = Path(cache) / f"{Path(path).stem}-{key}.safetensors"
    try:
        if not file.exists():  # otherwise the folder may be one that this user cannot write
            file.parent.mkdir(parents=True, exist_ok=True)
            seconds = poll_seconds(path)
            with FileLock(file.with_suffix(".lock")).acquire(poll_interval=seconds):
                if not file.exists():
                    report: dict = {}
                    # some file systems have locks within a node only: each node has its own file
                    own = file.with_name(f"{file.stem}-{platform.node()}")
                    with write_file(own) as temporary:
                        write_rows(temporary, make(report), report)
                    if file.exists():  # of a node that was faster, and may be reading it
                        own.unlink()
                    else:
                        os.replace(own, file)
        rows = Rows(kind, file)
    except SafetensorError as error:
        raise UserError(f"{file}: {error}; delete it") from error
    except OSError as error:
        hint = f"{broken_link(Path(cache)) or error.strerror}; use another folder"
        raise UserError(f"--cache_dir: {cache} cannot be written: {hint}") from error
    return rows, {"file": path, **json.loads(rows.metadata["report"])}


def poll_seconds(path: str) -> float:
    """Return how often a waiting rank asks for the lock: hundreds of them share a file server.

    It grows with the time that the file takes, up to 2 seconds for one of 32 MiB.
    """
    size = os.path.getsize(path) if os.path.isfile(path) else 2**24
    return min(2.0, max(0.05, size / 2**24))


def digest_of_rows(rows: Any) -> str:
    """Return a digest of the token ids of all rows; of rows kept in a file it is stored there."""
    if isinstance(rows, Rows):
        facts: Any = rows.metadata["digest"], rows.index.tobytes()
    else:
        facts = [[*row[:3], *filter(None, [getattr(row, "extra", None)])] for row in rows]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
