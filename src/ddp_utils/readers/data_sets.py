"""Tables -> records: what the library datasets reads: Parquet, Arrow, the hub."""

import itertools
from pathlib import Path

from ddp_utils import UserError, files, jsonl, models
from ddp_utils.jsonl import Record


def read(path, limit=-1, skip=True):
    """Yield the records of a table; `skip` as of jsonl.read()."""
    rows = itertools.islice(_load(path), limit if limit > 0 else None)
    for number, row in enumerate(rows, start=1):
        yield Record(f"{path}:{number}", row, str(number))


def digest(path) -> str:
    """Of the content of all that a table is made of."""
    return " ".join(files.sha256(Path(part["filename"])) for part in _load(path).cache_files)


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
    file = jsonl.resolve(name)
    if file.suffix in (".parquet", ".arrow"):
        jsonl.existing(name)
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
