"""Read measured stabilities: mutations with a ddG.

ddG: the folding free energy of the mutant minus that of the wild type, in kcal/mol; positive if the
mutant is less stable, as in FireProtDB.
"""

import contextlib
import math
import re

import numpy as np

from ddp_utils import UserError, data
from ddp_utils.data import Record
from dpo_inv.mpnn import ALPHABET, encode
from dpo_inv.structure import Structure

# from a letter, at a number with an insertion code, to a letter
MUTATION = re.compile(rf"([{ALPHABET[:-1]}])(-?\d+[A-Z]?)([{ALPHABET[:-1]}])")


def read_number(record: Record, field: str) -> float:
    """Return a field, a number or a string, as a finite number; raise UserError otherwise."""
    value = record.data[field]
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise data.wrong_value(record, field, value, "a number, in kcal/mol")


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
        if not match:
            raise UserError(f"{where} is not a mutation (expected A23V, or A23V:L45F)")
        label = match[2]
        if labels.count(label) != 1:
            raise UserError(f"{where}: {labels.count(label)} residues {label}; {hint}")
        position = positions[labels.index(label)]
        residue = structure.sequence[position]
        if residue != match[1]:
            raise UserError(f"{where}: residue {label} is {residue}; {hint}")
        copies = structure.tied[structure.tied[:, 0] == position]
        letters[copies] = ALPHABET.index(match[3])
    return letters
