"""Preferences, or measured stabilities -> pairs on backbones, checked.

An item (specs of its keys: docs/protein_dpo.md) names a structure, its designed chains, and two
sequences of these; or mutations and their ddG. L residues in all chains that are read, designed
ones first.
"""

import collections
import difflib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddp_utils import UserError, jsonl
from dpo_inv import stability, structure
from dpo_inv.mpnn import ALPHABET, UNKNOWN, encode

KEYS = ("pdb_file", "preferred_seq", "unpreferred_seq", "chain_id", "design_chains", "fixed_chains")
KEYS += ("mutable_positions", "mutable_ranges", "margin", "margin_kcal")
MEASURED = ("pdb_file", "chain_id", "mutation", "ddg", "design_chains", "fixed_chains")
IGNORED = ("description", "comment", "weight", "mutation", "kind", "name")


class Pair(NamedTuple):
    """Two sequences for one backbone, and where they may differ."""

    location: str  # file:line of the item
    name: str  # of the backbone: file and chains
    number: int  # of the backbone among those that were read
    backbone: structure.Structure
    preferred: np.ndarray  # [L] letters, of the context too
    unpreferred: np.ndarray  # [L]
    designed: np.ndarray  # [L] decoded last; the letters elsewhere are context
    targets: np.ndarray  # [T] designed and known in both: these log-probs are summed
    margin: np.float64  # kcal/mol by which the preferred is the more stable one; NaN: not measured

    @property
    def mutated(self):
        return self.preferred != self.unpreferred  # [L]

    @property
    def sign(self):
        """1 if the unpreferred sequence is the structure's own where they differ, -1 if the
        preferred one is, else 0."""
        own = encode(self.backbone.sequence)[self.mutated]
        if (self.unpreferred[self.mutated] == own).all():
            return 1
        return -1 if (self.preferred[self.mutated] == own).all() else 0


class Unusable(Exception):
    """A well-formed item that teaches nothing; its text is the reason, to count such items by."""


def read(path, backbones, config, limit=-1) -> tuple[list[Pair], dict]:
    """Return the pairs of a .json or .jsonl file, and a report on them.

    backbones: (file, chains) -> (number, Structure), to which new ones are added. config:
    max_length, on_bad_record, altloc, numbering, stable_ddg. limit: read so many items.
    Raises UserError for the first malformed item (with "skip" it is dropped), or if none is usable.
    """
    skip = config.on_bad_record == "skip"
    pairs = []
    dropped = collections.defaultdict(list)  # reason -> items
    notes = collections.defaultdict(list)
    is_table = Path(path).suffix == ".csv"
    records = stability.table(path, limit) if is_table else jsonl.read(path, limit, skip)
    for record in records:
        try:
            if isinstance(record.data, UserError):
                raise record.data
            pairs.append(_pair(record, path, backbones, config, notes))
        except Unusable as reason:
            dropped[str(reason)].append(record.location)
        except UserError:
            if not skip:
                raise
            dropped["malformed"].append(record.location)
    if not pairs:
        reasons = [f"{len(items)} {reason}, as {items[0]}" for reason, items in dropped.items()]
        raise UserError(f"{path}: 0 usable pairs: {'; '.join(reasons)}")
    return pairs, {"file": str(path), "used": len(pairs), "dropped": dropped, "notes": notes}


def _pair(record, source, backbones, config, notes):
    is_measured = "preferred_seq" not in record.data and {"ddG", "ddg"} & record.data.keys()
    if is_measured:
        record = record._replace(data=stability.renamed(record.data))
    keys = MEASURED if is_measured else KEYS
    for key in record.data.keys() - {*keys, *IGNORED}:
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f"did you mean {near[0]}?" if near else "it is not read"
        notes[f"{jsonl.shown(key)}: {hint}"].append(record.location)
    name = jsonl.text(record, "pdb_file")
    folder = jsonl.resolve(source).parent
    file = folder / name if (folder / name).exists() else jsonl.resolve(name)
    if not file.exists():
        raise UserError(f"{record.location}: pdb_file: no file {name:.200} in {folder} or here")
    key = (str(file), *chains_of(record.data, record.location))
    if key not in backbones:
        try:
            backbone = structure.read(*key, config.altloc, config.homo_oligomer)
            backbones[key] = (len(backbones), backbone)
        except UserError as error:
            raise UserError(f"{record.location}: {error}") from error
    number, backbone = backbones[key]
    if len(backbone.sequence) > config.max_length:
        raise Unusable("longer than max_length")
    if is_measured:
        preferred = stability.mutant(record, backbone, config.numbering)
        unpreferred = encode(backbone.sequence)
        margin = stability.number(record, "ddg") * (1 if config.stable_ddg == "positive" else -1)
        if margin < 0:
            preferred, unpreferred = unpreferred, preferred
        if margin == 0:
            raise Unusable("a ddG of 0")
    else:
        preferred = letters_of(record, "preferred_seq", backbone)
        unpreferred = letters_of(record, "unpreferred_seq", backbone)
        margin = margin_of(record)
    designed = mutable(record.data, backbone, record.location)
    outside = np.flatnonzero((preferred != unpreferred) & ~designed)
    if len(outside):
        raise UserError(
            f"{record.location}: the sequences differ at position {outside[0]} (from 0), which is "
            "not mutable; add it to mutable_positions, or give the same letter in both"
        )
    designed &= backbone.mask > 0
    first = backbone.tied[:, 0]
    for letters in (preferred, unpreferred):
        if (letters[backbone.tied] != letters[first, None]).any():
            raise UserError(f"{record.location}: the copies of --homo_oligomer are not alike")
    targets = designed[backbone.tied].any(-1)
    targets &= (preferred[first] != UNKNOWN) & (unpreferred[first] != UNKNOWN)
    if not (targets & (preferred != unpreferred)[first]).any():
        raise Unusable("the same sequence twice")
    name = " ".join([file.name, *backbone.chains])
    columns = preferred, unpreferred, designed, targets, np.float64(abs(margin))
    return Pair(record.location, name, number, backbone, *columns)


def chains_of(settings, location):
    """Return the names of (designed, fixed) chains as tuples; () for the first protein chain."""
    for field in ("design_chains", "fixed_chains", "chain_id"):
        value = settings.get(field) or ""
        is_text = isinstance(value, str | list | tuple)
        if not is_text or not all(isinstance(name, str) for name in value):
            raise UserError(f"{location}: {field}: {value!r:.60} names no chain; give a list")
    design = tuple(settings.get("design_chains") or ())
    fixed = tuple(settings.get("fixed_chains") or ())
    if settings.get("chain_id"):
        if design:
            raise UserError(f"{location}: chain_id and design_chains; give one of them")
        design = (settings["chain_id"],)
    if fixed and not design:
        raise UserError(f"{location}: fixed_chains without design_chains; name these, too")
    return design, fixed


def margin_of(record) -> float:
    """Return `margin` or `margin_kcal` of a pair, NaN if it has none."""
    for field in {"margin", "margin_kcal"} & record.data.keys():
        margin = stability.number(record, field)
        if margin < 0:
            problem = f"{field} is {margin:g}; if the other sequence is preferred, swap them"
            raise UserError(f"{record.location}: {problem}")
        return margin
    return math.nan


def letters_of(record, field, backbone):
    """Return the letters [L] of one side, X in the rows of gaps, the context's own, as numbers.

    The text has a letter for each residue of the designed chains; or for each number, skipped ones
    included; or for each residue that is not modified. Raises UserError if it does not fit.
    """
    text = "".join(jsonl.text(record, field).split())  # FASTA has line breaks
    text = text.upper().replace("/", "").replace("-", "X")
    strange = sorted({*text} - {*ALPHABET})
    if strange:
        raise UserError(f"{record.location}: {field}: {', '.join(strange)!r} not in {ALPHABET}")
    given = encode(text)
    letters = encode(backbone.sequence)
    observed = backbone.observed & backbone.in_design
    common = observed & (letters != UNKNOWN)
    letters[backbone.in_design] = UNKNOWN
    length = int(backbone.numbering[backbone.in_design][-1]) + 1
    if len(given) == observed.sum():
        letters[observed] = given
    elif len(given) == common.sum():
        letters[common] = given
    elif len(given) == length:
        letters[observed] = given[backbone.numbering[observed]]
    else:
        raise UserError(
            f"{record.location}: {field}: {len(given)} letters, the designed chains have "
            f"{observed.sum()} residues ({length} with numbering gaps); give one letter for each"
        )
    return letters


def mutable(settings, backbone, location):
    """Return a mask [L] of where letters may differ: the designed chains, or what is named of them.

    mutable_positions: numbers from 0 in the designed sequence. mutable_ranges: [first, last] or
    "first-last", both included. What one of them names is mutable.
    """
    try:
        ranges = [(position, position) for position in settings.get("mutable_positions") or ()]
        for ends in settings.get("mutable_ranges") or ():
            first, last = ends.split("-") if isinstance(ends, str) else ends
            ranges.append((int(first), int(last)))
        mask = backbone.in_design & (not ranges)
        count = backbone.in_design.sum()
        for first, last in ranges:
            if not 0 <= first <= last < count:
                raise UserError(
                    f"{location}: mutable {first} to {last}; there are 0 to {count - 1}"
                )
            mask[first : last + 1] = True
        mask[backbone.tied] = mask[backbone.tied].any(-1, keepdims=True)  # of one copy, of all
    except (AttributeError, TypeError, ValueError) as error:
        problem = "mutable_positions are numbers, mutable_ranges pairs of them (6-17)"
        raise UserError(f"{location}: {problem}; {error}") from error
    return mask


def describe(split, report) -> str:
    """Return the report of one file as one line."""
    notes = [f"{len(items)} {reason}" for reason, items in report["dropped"].items()]
    notes += [f"{len(items)} items: {note}" for note, items in report["notes"].items()]
    return "; ".join([f"{split}: {report['used']} pairs of {report['file']}", *notes])
