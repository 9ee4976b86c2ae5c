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

from ddp_utils import UserError, data
from dpo_inv import stability, structure
from dpo_inv.mpnn import ALPHABET, UNKNOWN, encode

CHAINS = ("chain_id", "design_chains", "fixed_chains")
KEYS = ("pdb_file", *CHAINS, "preferred_seq", "unpreferred_seq", "margin_kcal", "mutation", "ddg")
KEYS += ("mutable_positions", "mutable_ranges")
IGNORED = ("description", "comment", "weight", "kind", "name")
OTHER_NAMES = {"pdb": "pdb_file", "chain": "chain_id", "mutations": "mutation", "ddG": "ddg"}
OTHER_NAMES["margin"] = "margin_kcal"


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

    backbones: what structure.read() was given -> (number, Structure); new ones are added. config:
    max_length, on_bad_record, altloc, numbering, stable_ddg. limit: read so many items.
    Raises UserError for the first malformed item (with "skip" it is dropped), or if none is usable.
    """
    skip = config.on_bad_record == "skip"
    pairs = []
    dropped = collections.defaultdict(list)  # reason -> items
    notes = collections.defaultdict(list)
    is_table = Path(path).suffix == ".csv"
    records = stability.table(path, limit) if is_table else data.read(path, limit, skip)
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
    fields = {OTHER_NAMES.get(key, key): value for key, value in record.data.items()}
    record = record._replace(data=fields)
    for key in fields.keys() - {*KEYS, *IGNORED}:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else "it is not read"
        notes[f"{data.shown(key)}: {hint}"].append(record.location)
    name = data.text(record, "pdb_file")
    folder = data.resolve(source).parent
    file = folder / name if (folder / name).exists() else data.resolve(name)
    if not file.exists():
        raise UserError(f"{record.location}: pdb_file: no file {name:.200} in {folder} or here")
    key = (str(file), *chains_of(data, record.location), config.altloc, config.homo_oligomer)
    if key not in backbones:
        try:
            backbones[key] = len(backbones), structure.read(*key)
        except UserError as error:
            raise UserError(f"{record.location}: {error}") from error
    number, backbone = backbones[key]
    if len(backbone.sequence) > config.max_length:
        raise Unusable("longer than max_length")
    if "ddg" in data and "preferred_seq" not in data:
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
        margin = stability.number(record, "margin_kcal") if "margin_kcal" in data else math.nan
        if margin < 0:
            problem = f"margin_kcal is {margin:g}; if the other sequence is preferred, swap them"
            raise UserError(f"{record.location}: {problem}")
    designed = mutable(data, backbone, record.location)
    for place in np.flatnonzero((preferred != unpreferred) & ~designed):
        problem = f"the sequences differ at position {place} (from 0), which is not mutable"
        mend = "add it to mutable_positions, or give the same letter in both"
        raise UserError(f"{record.location}: {problem}; {mend}")
    designed &= backbone.mask > 0
    first = backbone.tied[:, 0]
    sides = np.stack([preferred, unpreferred])  # [2, L]
    if (sides[:, backbone.tied] != sides[:, first, None]).any():
        raise UserError(f"{record.location}: the copies of --homo_oligomer are not alike")
    targets = designed[backbone.tied].any(-1) & (sides[:, first] != UNKNOWN).all(0)  # [T]
    if not (targets & (preferred != unpreferred)[first]).any():
        raise Unusable("the same sequence twice")
    name = " ".join([file.name, *backbone.chains])
    columns = preferred, unpreferred, designed, targets, np.float64(abs(margin))
    return Pair(record.location, name, number, backbone, *columns)


def chains_of(settings, location):
    """Return the names of (designed, fixed) chains as tuples; () for the first protein chain."""
    for field in CHAINS:
        value = settings.get(field) or ""
        is_text = isinstance(value, str | list | tuple)
        if not is_text or not all(isinstance(name, str) for name in value):
            raise UserError(f"{location}: {field}: {value!r:.60} names no chain; give a list")
    chain, design, fixed = (settings.get(field) or () for field in CHAINS)
    if chain and design:
        raise UserError(f"{location}: chain_id and design_chains; give one of them")
    if fixed and not (chain or design):
        raise UserError(f"{location}: fixed_chains without design_chains; name these, too")
    return (chain,) if chain else tuple(design), tuple(fixed)


def letters_of(record, field, backbone):
    """Return the letters [L] of one side, X in the rows of gaps, the context's own, as numbers.

    The text has a letter for each residue of the designed chains; or for each number, skipped ones
    included; or for each residue that is not modified. Raises UserError if it does not fit.
    """
    text = "".join(data.text(record, field).split())  # FASTA has line breaks
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
    if len(given) == length:
        given = given[backbone.numbering[observed]]
    rows = common if len(given) == common.sum() else observed
    if len(given) != rows.sum():
        problem = f"{len(given)} letters, the designed chains have {observed.sum()} residues"
        mend = f"({length} with numbering gaps); give one letter for each"
        raise UserError(f"{record.location}: {field}: {problem} {mend}")
    letters[rows] = given
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
        end = backbone.in_design.sum() - 1
        for first, last in ranges:
            if not 0 <= first <= last <= end:
                raise UserError(f"{location}: mutable {first} to {last}; there are 0 to {end}")
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
