"""Data files, read as the scripts read them, with a cache that nobody shares."""

import tempfile

from ddp_utils import data
from lm import instruction_data, preference_data, token_rows


def pairs(path, encoder, *options, **more):
    """List of Pairs, and the report; options: of a DataFile."""
    return _read(preference_data, path, encoder, *options, **more)


def texts(path, encoder, *options, **more):
    """List of Texts, and the report; options: of a DataFile."""
    return _read(instruction_data, path, encoder, *options, **more)


def _read(reader, path, encoder, *options, **more):
    with tempfile.TemporaryDirectory() as cache:
        rows, report = reader.read(data.DataFile(str(path), cache, *options, **more), encoder)
        return list(rows), report


def mapped(path, rows):
    """These rows as those of a file, mapped from `path`."""
    token_rows.write_rows(path, rows, {})
    return token_rows.Rows(type(rows[0]), path)
