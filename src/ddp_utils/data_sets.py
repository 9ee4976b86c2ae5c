"""CSV files, and what the library datasets reads: Parquet, Arrow, folders, the hub.

This module imports none that reads data, since data.py imports it for such files.
"""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_utils import UserError

csv.field_size_limit(2**31 - 1)  # characters; the default of 131,072 is too small for long texts
LOADING_ERRORS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def read_csv(path: str, text: str, delimiter: str) -> Iterator[tuple[int, dict | UserError]]:
    """Yield the last line of each row, and its fields as texts or what is wrong with it."""
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                problem = f"expected {len(rows.fieldnames or ())} fields as in the first line"
                hint = "quote fields with a comma"
                yield rows.line_num, UserError(f"{path}:{rows.line_num}: {problem}; {hint}")
            else:
                yield rows.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def load(path: str, resolve: Callable[[str], Path]) -> Any:
    """Return the datasets.Dataset of a file, a folder or a name on the hub, perhaps with :split.

    Raises UserError if the library is not installed, cannot read it, or finds no such split.
    """
    try:
        import datasets
    except ImportError as error:
        hint = "pip install -r requirements-data.txt, or use JSON"
        raise UserError(f"{path}: needs the library datasets; {hint}") from error
    datasets.disable_progress_bars()
    name, _, split = path.partition(":")
    file = resolve(name)
    try:
        if file.suffix in (".parquet", ".arrow"):
            data = datasets.load_dataset(file.suffix[1:], data_files=str(file))
        elif (file / "dataset_dict.json").exists() or (file / "state.json").exists():
            data = datasets.load_from_disk(str(file))
        else:
            data = datasets.load_dataset(str(file) if file.is_dir() else name)
    except (datasets.exceptions.DatasetsError, *LOADING_ERRORS) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        problem = f"neither a file nor a data set: {reason}"
        raise UserError(f"{path}: {problem}; without access to the hub, use a file") from error
    if not isinstance(data, dict):
        return data
    split = split or "train"
    if split not in data:
        others = ", ".join(f"{name}:{other}" for other in data)
        raise UserError(f"{path}: no split {split}; use {others}")
    return data[split]
