"""Preference JSON -> pairs on backbones: checked, split and grouped by backbone.

An item (specs of its keys: docs/protein_dpo.md) names a structure, its designed chains, and two
sequences of these. L residues in all chains that are read, designed ones first.
"""

import difflib
import reprlib
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


def read(path, backbones, config, limit=-1) -> tuple[list[Pair], dict]:
    """The pairs of a .json or .jsonl file, and a report on them.

    backbones: (file, chains) -> (number, Structure), filled in as files are met. config:
    max_length, mutable_positions, mutable_ranges, cache, on_bad_record. limit: read so many items.
    Raises UserError naming item, file, chain, what was found and the mend.
    """
    pairs, dropped, notes, why = [], {}, {}, ""
    skip = config.on_bad_record == "skip"
    for record in jsonl.read(path, limit, skip):
        try:
            if isinstance(record.data, UserError):
                raise record.data
            pair, reason = _pair(record, Path(path), backbones, config, notes)
        except UserError as error:
            if not skip:
                raise
            pair, reason, why = None, "malformed", why or str(error)
        if pair:
            pairs.append(pair)
        else:
            dropped.setdefault(reason, []).append(record.where)
    if not pairs:
        found = [f"{len(rows)} {reason}, as {rows[0]}" for reason, rows in dropped.items()]
        found += [why] if why else []
        raise UserError(f"{path}: 0 usable pairs: {'; '.join(found)}")
    return pairs, {"file": str(path), "used": len(pairs), "dropped": dropped, "notes": notes}


def _pair(record, source, backbones, config, notes):
    """(Pair, None), or (None, why it is dropped)."""
    for key in record.data.keys() - {*KEYS, *IGNORED}:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else "it is not read"
        notes.setdefault(f"{jsonl.shown(key)}: {hint}", []).append(record.where)
    design, fixed = _chains(record)
    file = _file(jsonl.text(record, "pdb_file"), source, record)
    key = str(file), design, fixed
    if key not in backbones:
        try:
            read_ = structure.read(file, (*design, *fixed) or None, cache=config.cache or None)
        except UserError as error:
            raise UserError(f"{record.where}: {error}") from error
        if not design:  # the first protein chain
            design_of_it = read_.chains[:1]
            read_ = structure.read(file, design_of_it, cache=config.cache or None)
        backbones[key] = len(backbones), read_
    number, found = backbones[key]
    count = sum(found.lengths[: len(design) or 1])  # rows of the designed chains, with gap rows
    if int(found.mask.sum()) < 3:
        raise UserError(f"{record.where}: {file}: fewer than 3 residues with a whole backbone")
    if len(found.sequence) > config.max_length:
        return None, "longer than max_length"
    native = encode(found.sequence)
    sides = []
    for field in ("preferred_seq", "unpreferred_seq"):
        letters = letters_of(record, field, found, len(design) or 1)
        sides.append(np.concatenate([letters, native[count:]]))
    preferred, unpreferred = sides
    designed = np.arange(len(native)) < count
    flags = config.mutable_positions or config.mutable_ranges
    source = vars(config) if flags else record.data
    said = source.get("mutable_positions"), source.get("mutable_ranges")
    may_differ = mutable(*said, count, record.where)
    if may_differ is not None:
        designed[:count] &= may_differ
        outside = np.flatnonzero((preferred != unpreferred) & ~designed)
        if len(outside):
            raise UserError(
                f"{record.where}: the sequences differ at position {outside[0]} (from 0), which is "
                "not mutable; add it to mutable_positions, or give the same letter in both"
            )
    designed &= found.mask > 0
    targets = designed & (preferred != UNKNOWN) & (unpreferred != UNKNOWN)
    if not (targets & (preferred != unpreferred)).any():
        return None, "the same sequence twice"
    known = targets & (native != UNKNOWN)
    if known.any() and (preferred == native)[known].mean() < 0.2:
        notes.setdefault("less than 20 % of the native letters: another chain?", []).append(
            record.where
        )
    name = " ".join([file.name, *found.chains])
    return Pair(record.where, name, number, preferred, unpreferred, designed, targets), None


def _chains(record):
    """(designed, fixed) chain names as tuples; () for the first protein chain."""
    data, names = record.data, {}
    for key in ("design_chains", "fixed_chains"):
        value = data.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UserError(f'{record.where}: {key} is {value!r:.60}; give a list such as ["A"]')
        names[key] = tuple(value)
    if "chain_id" in data:
        if names["design_chains"]:
            raise UserError(f"{record.where}: chain_id and design_chains; give one of them")
        names["design_chains"] = (jsonl.text(record, "chain_id").strip(),)
    if both := {*names["design_chains"]} & {*names["fixed_chains"]}:
        raise UserError(f"{record.where}: chain {min(both)} is designed and fixed; give it once")
    if names["fixed_chains"] and not names["design_chains"]:
        raise UserError(f"{record.where}: fixed_chains without design_chains; name these, too")
    return names["design_chains"], names["fixed_chains"]


def _file(name, source, record):
    """A structure's path: from the folder of the JSON file, else from the current one."""
    beside = jsonl.resolve(source).parent / name
    try:
        file = beside if beside.exists() else jsonl.resolve(name)
        found = file.exists()
    except OSError:  # too long for a name: the structure itself, perhaps
        found = False
    if not found:
        name = reprlib.repr(name) if len(name) > 200 or not name.isprintable() else name
        raise UserError(f"{record.where}: pdb_file: no file {name} in {beside.parent} or here")
    return file


def encode(text) -> np.ndarray:
    """Letters of the alphabet as numbers, [L]."""
    return np.array(mpnn.encode(text), dtype=np.int64)


def letters_of(record, field, found, chains):
    """One side's letters, X in the rows of gaps; UserError if they do not fit the backbone.

    A letter for each residue of the designed chains; or for each number, skipped ones included;
    or for each residue that is not modified.
    """
    text = "".join(jsonl.text(record, field).split())  # FASTA has line breaks
    text = text.upper().replace("/", "").replace("-", "X")
    if strange := sorted({*text} - {*ALPHABET}):
        shown = ", ".join(map(jsonl.shown, strange))
        raise UserError(f"{record.where}: {field}: {shown} not in {ALPHABET}")
    count = sum(found.lengths[:chains])
    places, observed = found.places[:count], found.observed[:count]
    common = observed & (encode(found.sequence[:count]) != UNKNOWN)
    letters, length = np.full(count, UNKNOWN), int(places[-1]) + 1
    for rows in (observed, common):
        if len(text) == rows.sum():
            letters[rows] = encode(text)
            return letters
    if len(text) != length:
        raise UserError(
            f"{record.where}: {field}: {len(text)} letters, the designed chains have "
            f"{observed.sum()} residues ({length} with numbering gaps); give one letter for each"
        )
    given = encode(text)
    letters[observed] = given[places[observed]]
    given[places[observed]] = UNKNOWN
    if (given != UNKNOWN).any():
        place = int(np.flatnonzero(given != UNKNOWN)[0])
        raise UserError(
            f"{record.where}: {field}: letter {place} (from 0) is {text[place]}, where the "
            "structure has a numbering gap; give X or - there, or leave gaps out"
        )
    return letters


def mutable(positions, ranges, count, where):
    """[count] true where letters may differ; None if nothing is said.

    positions: numbers from 0 in the designed sequence; ranges: [first, last] or "first-last",
    both included. What one of them names is mutable.
    """
    if not positions and not ranges:
        return None
    try:
        found = {int(place) for place in positions or ()}
        for both in ranges or ():
            first, last = both.split("-") if isinstance(both, str) else both
            found |= set(range(int(first), int(last) + 1))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: mutable_positions are numbers, mutable_ranges pairs of them (6-17); {error}"
        ) from error
    if outside := [place for place in sorted(found) if not 0 <= place < count]:
        raise UserError(f"{where}: mutable position {outside[0]}; there are 0 to {count - 1}")
    mask = np.zeros(count, dtype=bool)
    mask[sorted(found)] = True
    return mask


def describe(split, report) -> str:
    """One line for the user."""
    notes = [f"{len(rows)} {reason}" for reason, rows in report["dropped"].items()]
    notes += [f"{len(rows)} items: {note}" for note, rows in report["notes"].items()]
    return "; ".join([f"{split}: {report['used']} pairs of {report['file']}", *notes])
