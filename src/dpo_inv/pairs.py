"""Preference JSON -> pairs on backbones, checked.

An item (specs of its keys: docs/protein_dpo.md) names a structure, its designed chains, and two
sequences of these. L residues in all chains that are read, designed ones first.
"""

import collections
import difflib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_utils import UserError, jsonl
from dpo_inv import mpnn, structure
from dpo_inv.mpnn import ALPHABET

KEYS = ("pdb_file", "preferred_seq", "unpreferred_seq", "chain_id", "design_chains", "fixed_chains")
KEYS += ("mutable_positions", "mutable_ranges")
IGNORED = ("description", "comment", "weight", "margin", "margin_kcal", "mutation", "kind", "name")
UNKNOWN = ALPHABET.index("X")


class Pair(NamedTuple):
    """Two sequences for one backbone, and where they may differ."""

    where: str  # file:line of the item
    name: str  # of the backbone: file and chains
    backbone: int  # which of the backbones that were read
    preferred: np.ndarray  # [L] letters, of the context too
    unpreferred: np.ndarray  # [L]
    designed: np.ndarray  # [L] decoded last; the letters elsewhere are context
    targets: np.ndarray  # [L] designed and known in both: these log-probs are summed

    @property
    def mutated(self):
        return self.preferred != self.unpreferred  # [L]


class Unusable(Exception):
    """A well-formed item that teaches nothing; its text is the reason, to count such items by."""


def read(path, backbones, config, limit=-1) -> tuple[list[Pair], dict]:
    """Return the pairs of a .json or .jsonl file, and a report on them.

    backbones: (file, chains) -> (number, Structure), to which new ones are added. config:
    max_length, mutable_positions, mutable_ranges, on_bad_record. limit: read so many items.
    Raises UserError for the first malformed item (with "skip" it is dropped), or if none is usable.
    """
    skip = config.on_bad_record == "skip"
    pairs = []
    dropped = collections.defaultdict(list)  # reason -> items
    notes = collections.defaultdict(list)
    for record in jsonl.read(path, limit, skip):
        try:
            if isinstance(record.data, UserError):
                raise record.data
            pairs.append(_pair(record, Path(path), backbones, config, notes))
        except Unusable as reason:
            dropped[str(reason)].append(record.where)
        except UserError:
            if not skip:
                raise
            dropped["malformed"].append(record.where)
    if not pairs:
        reasons = [f"{len(items)} {reason}, as {items[0]}" for reason, items in dropped.items()]
        raise UserError(f"{path}: 0 usable pairs: {'; '.join(reasons)}")
    return pairs, {"file": str(path), "used": len(pairs), "dropped": dropped, "notes": notes}


def _pair(record, source, backbones, config, notes):
    for key in record.data.keys() - {*KEYS, *IGNORED}:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else "it is not read"
        notes[f"{jsonl.shown(key)}: {hint}"].append(record.where)
    design, fixed = chains_of(record)
    file = _file(record, source)
    key = (str(file), design, fixed)
    if key not in backbones:
        try:
            backbones[key] = (len(backbones), read_backbone(file, design, fixed))
        except UserError as error:
            raise UserError(f"{record.where}: {error}") from error
    number, backbone = backbones[key]
    if len(backbone.sequence) > config.max_length:
        raise Unusable("longer than max_length")
    chains = len(design) or 1
    count = sum(backbone.lengths[:chains])  # rows of the designed chains, with those of gaps
    native = encode(backbone.sequence)
    context = native[count:]
    preferred = np.append(letters_of(record, "preferred_seq", backbone, chains), context)
    unpreferred = np.append(letters_of(record, "unpreferred_seq", backbone, chains), context)
    by_flags = config.mutable_positions or config.mutable_ranges
    settings = vars(config) if by_flags else record.data
    designed = np.zeros(len(native), dtype=bool)
    designed[:count] = mutable(settings, count, record.where)
    outside = np.flatnonzero((preferred != unpreferred) & ~designed)
    if len(outside):
        raise UserError(
            f"{record.where}: the sequences differ at position {outside[0]} (from 0), which is "
            "not mutable; add it to mutable_positions, or give the same letter in both"
        )
    designed &= backbone.mask > 0
    targets = designed & (preferred != UNKNOWN) & (unpreferred != UNKNOWN)
    if not (targets & (preferred != unpreferred)).any():
        raise Unusable("the same sequence twice")
    known = targets & (native != UNKNOWN)
    if known.any() and (preferred == native)[known].mean() < 0.2:
        notes["less than 20 % of the native letters: another chain?"].append(record.where)
    name = " ".join([file.name, *backbone.chains])
    return Pair(record.where, name, number, preferred, unpreferred, designed, targets)


def read_backbone(file, design, fixed):
    """Return the Structure of the designed chains (by default the first), then the fixed ones."""
    backbone = structure.read(file, (*design, *fixed))
    return backbone if design else structure.read(file, backbone.chains[:1])


def chains_of(record):
    """Return the names of (designed, fixed) chains as tuples; () for the first protein chain."""
    for key in ("design_chains", "fixed_chains"):
        value = record.data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UserError(f'{record.where}: {key} is {value!r:.60}; give a list such as ["A"]')
    design = tuple(record.data.get("design_chains") or ())
    fixed = tuple(record.data.get("fixed_chains") or ())
    if "chain_id" in record.data:
        if design:
            raise UserError(f"{record.where}: chain_id and design_chains; give one of them")
        design = (jsonl.text(record, "chain_id"),)
    if fixed and not design:
        raise UserError(f"{record.where}: fixed_chains without design_chains; name these, too")
    return design, fixed


def _file(record, source):
    """Return a structure's path: from the folder of the JSON file, else from the current one."""
    name = jsonl.text(record, "pdb_file")
    beside = jsonl.resolve(source).parent / name
    file = beside if os.path.exists(beside) else jsonl.resolve(name)
    if not os.path.exists(file):
        folder = beside.parent
        raise UserError(f"{record.where}: pdb_file: no file {name:.200} in {folder} or here")
    return file


def encode(text) -> np.ndarray:
    """Return letters of the alphabet as numbers, [L]."""
    return np.array(mpnn.encode(text), dtype=np.int64)


def letters_of(record, field, backbone, chains):
    """Return the letters of one side, X in the rows of gaps, as numbers.

    The text has a letter for each residue of the designed chains (the first `chains`); or for each
    number, skipped ones included; or for each residue that is not modified. Raises UserError if it
    does not fit the backbone.
    """
    text = "".join(jsonl.text(record, field).split())  # FASTA has line breaks
    text = text.upper().replace("/", "").replace("-", "X")
    strange = sorted({*text} - {*ALPHABET})
    if strange:
        shown = ", ".join(map(jsonl.shown, strange))
        raise UserError(f"{record.where}: {field}: {shown} not in {ALPHABET}")
    given = encode(text)
    count = sum(backbone.lengths[:chains])
    numbering = backbone.numbering[:count]
    observed = backbone.observed[:count]
    common = observed & (encode(backbone.sequence[:count]) != UNKNOWN)
    letters = np.full(count, UNKNOWN)
    for rows in (observed, common):
        if len(given) == rows.sum():
            letters[rows] = given
            return letters
    length = int(numbering[-1]) + 1
    if len(given) != length:
        raise UserError(
            f"{record.where}: {field}: {len(given)} letters, the designed chains have "
            f"{observed.sum()} residues ({length} with numbering gaps); give one letter for each"
        )
    letters[observed] = given[numbering[observed]]
    return letters


def mutable(settings, count, where):
    """Return a mask [count] of where letters may differ; all of it, if the settings name nothing.

    mutable_positions: numbers from 0 in the designed sequence. mutable_ranges: [first, last] or
    "first-last", both included. What one of them names is mutable.
    """
    try:
        ranges = [(position, position) for position in settings.get("mutable_positions") or ()]
        for ends in settings.get("mutable_ranges") or ():
            first, last = ends.split("-") if isinstance(ends, str) else ends
            ranges.append((int(first), int(last)))
        mask = np.full(count, not ranges)
        for first, last in ranges:
            if not 0 <= first <= last < count:
                raise UserError(f"{where}: mutable {first} to {last}; there are 0 to {count - 1}")
            mask[first : last + 1] = True
    except (AttributeError, TypeError, ValueError) as error:
        problem = "mutable_positions are numbers, mutable_ranges pairs of them (6-17)"
        raise UserError(f"{where}: {problem}; {error}") from error
    return mask


def describe(split, report) -> str:
    """Return the report of one file as one line."""
    notes = [f"{len(items)} {reason}" for reason, items in report["dropped"].items()]
    notes += [f"{len(items)} items: {note}" for note, items in report["notes"].items()]
    return "; ".join([f"{split}: {report['used']} pairs of {report['file']}", *notes])
