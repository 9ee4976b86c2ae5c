"""Read measured stabilities: mutations with a ddG, from CSV files.

ddG: the folding free energy of the mutant minus that of the wild type, in kcal/mol; positive if the
mutant is less stable, as in FireProtDB.
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddp_utils import UserError, data
from ddp_utils.data import Record
from dpo_inv.mpnn import ALPHABET, encode
from dpo_inv.structure import Structure

MUTATION = re.compile(r"([A-Z])(-?\d+)([A-Z]?)([A-Z])")  # from, number, insertion code, to


def read_csv(path: str, limit: int = -1) -> Iterator[Record]:
    """Yield the rows of a CSV file, at most `limit`; all values are strings.

    A row with too many or too few fields becomes a record whose data is a UserError.
    """
    rows = csv.DictReader(io.StringIO(data.content(path), newline=""), strict=True)
    try:
        for row in itertools.islice(rows, limit if limit > 0 else None):
            location = f"{path}:{rows.line_num}"
            fields: Any = row
            if None in row or None in row.values():
                fields = UserError(f"{location}: the number of fields differs from the first line")
            yield Record(location, fields, str(rows.line_num))
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def read_number(record: Record, field: str) -> float:
    """Return a field, a number or a string, as a finite number; raise UserError otherwise."""
    value = record.data[field]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        problem = f"{field}: {str(value)!r:.40} is not a number (expected kcal/mol)"
        raise UserError(f"{record.location}: {problem}; correct or remove the row")
    return number


def mutant(record: Record, structure: Structure, numbering: str) -> np.ndarray:
    """Return the structure's own sequence with the mutations of a record, [L].

    Mutations are written A23V or A23V:L45F. numbering: "pdb" for residue numbers of the file, with
    insertion codes (A52BV), "sequence" for positions in the designed chains, from 1.
    Raises UserError if a mutation does not fit the structure.
    """
    letters = encode(structure.sequence)
    positions = np.flatnonzero(structure.observed & structure.in_design)
    positions = np.intersect1d(positions, structure.tied[:, 0])  # one of each group of copies
    labels = [structure.labels[position] for position in positions]
    if numbering == "sequence":
        labels = [str(number) for number in range(1, len(positions) + 1)]
    hint = f"--numbering is {numbering}"
    for text in re.split(r"[\s,;:/+]+", data.text(record, "mutation").strip().upper()):
        where = f"{record.location}: mutation: {data.shown(text)}"
        match = MUTATION.fullmatch(text)
        if not match or not {match[1], match[4]} <= {*ALPHABET[:-1]}:
            raise UserError(f"{where} is not a mutation (expected A23V, or A23V:L45F)")
        label = match[2] + match[3]
        count = labels.count(label)
        if count != 1:
            chains = " ".join(structure.chains)
            raise UserError(f"{where}: {count} residues {label} in chain {chains}; {hint}")
        position = positions[labels.index(label)]
        if structure.sequence[position] != match[1]:
            residue = structure.sequence[position]
            raise UserError(f"{where}: residue {label} is {residue}; {hint}")
        copies = structure.tied[structure.tied[:, 0] == position]
        letters[copies] = ALPHABET.index(match[4])
    return letters
