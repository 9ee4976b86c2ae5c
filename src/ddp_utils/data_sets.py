"""Tables -> records: CSV, and what the library datasets reads: Parquet, Arrow, the hub."""

import csv
import io
import itertools
from pathlib import Path

from ddp_utils import UserError, data, models
from ddp_utils.data import Record

csv.field_size_limit(2**31 - 1)  # characters; its 131,072 would refuse long texts
DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read(path, limit=-1, skip=True):
    """Yield the records of a table; `skip` as of data.read()."""
    rows = _csv(path) if Path(path).suffix in DELIMITERS else enumerate(_load(path), start=1)
    for number, row in itertools.islice(rows, limit if limit > 0 else None):
        yield Record(f"{path}:{number}", row, str(number))


def digest(path) -> str:
    """Of the content of all that a table is made of."""
    if Path(path).suffix in DELIMITERS:
        return data.sha256(data.existing_file(path))
    return " ".join(data.sha256(Path(part["filename"])) for part in _load(path).cache_files)


def _csv(path):
    """Yield the last line of each row, and its fields, all texts; or what is wrong with it."""
    text = io.StringIO(data.content(path), newline="")
    rows = csv.DictReader(text, delimiter=DELIMITERS[Path(path).suffix], strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                says = f"it has not as many fields as the first line, {len(rows.fieldnames)}"
                row = UserError(f"{path}:{rows.line_num}: {says}; quote what holds a comma")
            yield rows.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def _load(path):
    """Return the Dataset of a file, a folder or a name on the hub, perhaps with :split behind it.

    Raises UserError if the library is not there, cannot read it, or finds no such split.
    """
    try:
        import datasets
    except ImportError as error:
        says = "the library datasets reads it: pip install -r requirements-data.txt; or give JSON"
        raise UserError(f"{path}: {says}") from error
    datasets.disable_progress_bars()
    name, _, split = path.partition(":")
    file = data.resolve(name)
    if file.suffix in (".parquet", ".arrow"):
        data.existing_file(name)
    try:
        if file.is_file():
            table = datasets.load_dataset(file.suffix[1:], data_files=str(file))
        elif (file / "dataset_dict.json").exists() or (file / "state.json").exists():
            table = datasets.load_from_disk(str(file))
        else:
            table = datasets.load_dataset(str(file) if file.is_dir() else name)
    except (datasets.exceptions.DatasetsError, *models.FAULTS) as error:
        says = f"neither a file nor a data set: {models.first_line(error)}"
        raise UserError(f"{path}: {says}; without the hub give a file") from error
    if not isinstance(table, dict):
        return table
    split = split or "train"
    if split not in table:
        others = ", ".join(f"{name}:{known}" for known in table)
        raise UserError(f"{path}: it has no split {split}; give {others}")
    return table[split]
