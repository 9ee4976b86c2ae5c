"""Measured stabilities: mutations with a ddG become pairs, and losses that use how large it is.

ddG: dG of folding of the mutant less that of the wild type, in kcal/mol, above 0 if the mutant is
less stable, as in FireProtDB. A pair's margin is its size, the preferred sequence's advantage.
"""

import csv
import io
import itertools
import math
import re

import numpy as np
import torch

from ddp_utils import UserError, data
from dpo_inv.mpnn import ALPHABET, encode

KT = 0.593  # kcal/mol at 298 K
MUTATION = re.compile(r"([A-Z])(-?\d+)([A-Z]?)([A-Z])")  # from, number, insertion code, to


# --- data ----------------------------------------------------------------------------------------


def table(path, limit=-1):
    """Yield the records of a CSV file, all texts; one of another length is a UserError."""
    rows = csv.DictReader(io.StringIO(data.content(path), newline=""), strict=True)
    try:
        for row in itertools.islice(rows, limit if limit > 0 else None):
            location = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                row = UserError(f"{location}: not as many fields as the first line has")
            yield data.Record(location, row, str(rows.line_num))
    except csv.Error as error:
        raise UserError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error


def number(record, field) -> float:
    """Return a finite number, of a CSV's text, too; UserError if it is none."""
    value = record.data[field]
    try:
        if isinstance(value, bool) or not math.isfinite(float(value)):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        problem = f"{field}: {str(value)!r:.40} is no number; give kcal/mol, or leave the row out"
        raise UserError(f"{record.location}: {problem}") from None


def mutant(record, backbone, numbering):
    """Return the letters [L] of the structure's own sequence with the row's mutations.

    They are such as A23V, or A23V:L45F; numbering: "pdb" for the file's numbers, with insertion
    codes (A52BV), "sequence" for the place among the residues of the designed chains, from 1.
    Raises UserError if one does not fit the structure.
    """
    letters = encode(backbone.sequence)
    rows = np.flatnonzero(backbone.observed & backbone.in_design)
    rows = np.intersect1d(rows, backbone.tied[:, 0])  # one of each group of copies
    labels = [backbone.labels[row] for row in rows]
    if numbering == "sequence":
        labels = [str(place) for place in range(1, len(rows) + 1)]
    mend = f"--numbering is {numbering}"
    for text in re.split(r"[\s,;:/+]+", data.text(record, "mutation").strip().upper()):
        where = f"{record.location}: mutation: {data.shown(text)}"
        match = MUTATION.fullmatch(text)
        if not match or not {match[1], match[4]} <= {*ALPHABET[:-1]}:
            raise UserError(f"{where} is not such as A23V, or A23V:L45F")
        label = match[2] + match[3]
        if labels.count(label) != 1:
            problem = f"{labels.count(label)} residues {label} in chain {' '.join(backbone.chains)}"
            raise UserError(f"{where}: {problem}; {mend}")
        row = rows[labels.index(label)]
        if backbone.sequence[row] != match[1]:
            raise UserError(f"{where}: residue {label} is {backbone.sequence[row]}; {mend}")
        letters[backbone.tied[backbone.tied[:, 0] == row]] = ALPHABET.index(match[4])
    return letters


def check(pairs, config):
    """Raise UserError for the first pair without the ddG that method or weighting need."""
    for pair in pairs:
        if math.isnan(pair.margin):
            needs = f"--method {config.method} --weighting {config.weighting}"
            mend = "give margin_kcal, or mutation and ddG"
            raise UserError(f"{pair.location}: no ddG, which {needs} needs; {mend}")
        if config.method == "listwise" and pair.sign == 0:
            problem = "neither sequence is the structure's own where they differ"
            raise UserError(f"{pair.location}: {problem}; --method ddg needs no wild type")


# --- losses --------------------------------------------------------------------------------------


def losses(method, preferred, unpreferred, margins, signs):
    """Return the losses [B] of B pairs of one backbone, of their log-probs [B] alone.

    margins [B]: size of their ddG. signs [B]: 1 if the mutant is preferred, -1 if the wild type is.
    ddg: (kT (log p(preferred) - log p(unpreferred)) - margin)^2, in (kcal/mol)^2: a mutation's
    log-odds are to be its ddG in units of kT, Boltzmann's law.
    listwise: -log of the chance of drawing the wild type and its mutants without replacement in
    their measured order, with chances as their probs (Plackett 1975, Luce 1959), over B.
    """
    gaps = preferred - unpreferred
    if method == "ddg":
        return (KT * gaps - margins) ** 2
    scores = torch.cat([gaps * signs, gaps.new_zeros(1)])  # [B + 1] the wild type comes last
    stabilities = torch.cat([margins * signs, margins.new_zeros(1)])
    scores = scores[stabilities.argsort(descending=True)]
    remaining = scores.flip(0).logcumsumexp(0).flip(0)  # [B + 1] over what is not yet drawn
    return (remaining - scores).sum().expand(len(gaps)) / len(gaps)
