"""CSV files, and what the library datasets reads: Parquet, Arrow, folders, the hub.

This module imports none that reads data, since data.py imports it for such files.
"""

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddp_utils import UserError

LOADING_ERRORS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)


def read_csv(path: str, text: str, delimiter: str) -> Iterator[tuple[str, dict | UserError]]:
    """Yield the location of the last line of each row, and its fields, all of them texts."""
    csv.field_size_limit(2**31 - 1)  # characters; the default is too small for long texts
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = rows.fieldnames or []
        if len({*names}) < len(names):
            raise UserError(f"{path}:1: two columns have one name: {', '.join(names)}; rename one")
        for row in rows:
            location = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                problem = f"expected {len(names)} fields as in the first line; quote commas in text"
                yield location, UserError(f"{location}: {problem}")
            else:
                yield location, row
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def load(path: str, resolve: Callable[[str], Path]) -> Any:
    """Return the datasets.Dataset of a file, a folder or a name on the hub, perhaps with :split.

    Raises UserError if the library is not installed, cannot read it, or finds no such split.
    """
    from ddp_utils import hub

    name, _, split = path.partition(":")
    file = resolve(name)
    if not file.exists():
        hub.connect()  # before datasets is imported, which reads what this sets
    try:
        import datasets
    except ImportError as error:
        hint = "pip install -r requirements-data.txt, or use JSON"
        raise UserError(f"{path}: needs the library datasets; {hint}") from error
    datasets.disable_progress_bars()
    place: dict[str, Any] = {"path": str(file) if file.is_dir() else name}
    if file.suffix in (".parquet", ".arrow"):
        place = {"path": file.suffix[1:], "data_files": str(file)}
    try:
        return datasets.load_dataset(**place, split=split or "train")
    except (datasets.exceptions.DatasetsError, *LOADING_ERRORS) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        problem = f"neither a file nor a data set: {reason}"
        hint = "if it is gated or private, run `hf auth login`; otherwise use a file"
        of_hub = hub.explain(name, error, "dataset")
        raise UserError(f"{path}: {of_hub or f'{problem}; {hint}'}") from error
