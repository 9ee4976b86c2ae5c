"""Read preference pairs of sequences, or mutations with a ddG, and check them.

An item names a structure, its designed chains and two sequences of these, or mutations and their
ddG; docs/protein_data.md lists its fields. Errors about an item begin with its field, to which
data.usable adds the file and the line. A sequence has L positions: those of all chains that are
read, designed chains first. The ddG is the folding free energy of the mutant minus that of the wild
type, in kcal/mol: positive if the mutant is less stable, as in FireProtDB.
"""

import contextlib
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddp_utils import UserError, data
from ddp_utils.data import DataFile, Record, Unusable
from ddp_utils.metrics import wilson
from dpo_inv import structure
from dpo_inv.config import PairSettings
from dpo_inv.mpnn import ALPHABET, UNKNOWN, encode
from dpo_inv.structure import Structure

CHAINS = ("chain_id", "design_chains", "fixed_chains")
MUTABLE = ("fixed_residues", "mutable_positions", "mutable_ranges")
OF_PAIRS = {"preferred_seq", "unpreferred_seq", "margin_kcal"}
OF_MUTANTS = {"mutation", "ddg"}
FIELDS = {"pdb_file", *CHAINS, *MUTABLE}
IGNORED = {"description", "comment", "weight", "kind", "name"}
ALIASES = {  # name in other data sets -> ours
    **dict.fromkeys(("pdb", "pdb_id", "WT_name"), "pdb_file"),
    **dict.fromkeys(("mutations", "mut_type"), "mutation"),
    **dict.fromkeys(("ddG", "ddG_ML"), "ddg"),
    **{"chain": "chain_id", "margin": "margin_kcal"},
}
EMPTY = ("", "-", None)
REPEATED = "sequences also in train_data"  # which tools/report.py reads
# fields that may tell which sequence is better
DIRECTIONS = "labels?|preference|score|winner|choice|better|(un)?preferred(_(?!seq$).*)?"
DIRECTIONS += "|(score|rank|ddg|dg|energy|stability|fitness)_(un)?preferred"
# a residue: its chain, if it is named, and its number with an insertion code
RESIDUE = r"([A-Za-z]?)(-?\d+[A-Za-z]?)"
RANGE = re.compile(rf"{RESIDUE}(?:-{RESIDUE})?")
# a mutation: from a letter, at a residue, to a letter
MUTATION = re.compile(rf"([{ALPHABET[:-1]}]){RESIDUE}([{ALPHABET[:-1]}])", re.IGNORECASE)
SEPARATOR = re.compile(r"[\s,;:/+]+")  # of several mutations
NO_SUBSTITUTION = re.compile(r"(?i)wt|(ins|del).*|[a-z]+\d+(ins|del|\*).*")


class Pair(NamedTuple):
    """Two sequences for one backbone."""

    location: str  # file:line of the item
    name: str  # of the backbone: file and chains; the seed of its decoding orders
    number: int  # of the backbone among those that were read
    backbone: Structure
    preferred: np.ndarray  # [L] letters as numbers, including the context
    unpreferred: np.ndarray  # [L]
    designed: np.ndarray  # [L] bool: decoded last; the letters elsewhere are context
    targets: np.ndarray  # [T] bool: designed, and known in both; these log-probs are summed
    margin: np.float64  # |ddG| in kcal/mol, the advantage of `preferred`; NaN: not measured

    @property
    def mutated(self) -> np.ndarray:
        """Return where the two sequences differ, [L] bool."""
        return self.preferred != self.unpreferred

    @property
    def mutation(self) -> str:
        """Return how the unpreferred sequence differs from the preferred one: A23V:L45F."""
        letters = np.array([*ALPHABET])
        columns = letters[self.preferred], self.backbone.labels, letters[self.unpreferred]
        return ":".join("".join(x) for x in np.stack(columns, 1)[self.mutated])

    @property
    def key(self) -> tuple[str, frozenset[bytes]]:
        """Return what equal pairs have in common, whatever their order and their files' names."""
        both = frozenset((self.preferred.tobytes(), self.unpreferred.tobytes()))
        return self.backbone.sequence, both

    @property
    def sign(self) -> int:
        """Return 1 if the unpreferred sequence is the wild type, -1 if the preferred one is, or 0.

        The wild type is the structure's own sequence; only mutated positions are compared.
        """
        wild_type = encode(self.backbone.sequence)[self.mutated]
        if (self.unpreferred[self.mutated] == wild_type).all():
            return 1
        return -1 if (self.preferred[self.mutated] == wild_type).all() else 0


def read(
    path: str, backbones: dict, settings: PairSettings, limit: int = -1, ddg: float | None = None
) -> tuple[list[Pair], dict]:
    """Return the pairs of a .json, .jsonl or .csv file, and a report on its items.

    backbones: the structures read so far, to which new ones are added: arguments of
    structure.read, and the names in the data file -> (number, Structure). limit: read only the
    first items. ddg: of all mutants, if the file need not have it.
    Raises UserError for the first malformed item (with on_bad_record="skip" it is dropped), or if
    no item is usable.
    """
    dropped: Counter = Counter()  # reason -> number of items
    notes: Counter = Counter()
    signs = []  # of the mutants with a ddG: 1 if the mutant is the stabler one, otherwise -1

    def make(record: Record) -> Pair:
        fields = _our_fields(record, ddg)
        is_mutant = "preferred_seq" not in fields
        unread = fields.keys() - FIELDS - IGNORED - (OF_MUTANTS if is_mutant else OF_PAIRS)
        if unread:
            notes[f"not read: {data.shown(', '.join(sorted(unread)))}"] += 1
        name, convention = "ddG", settings
        if ddg is None and record.data.get("ddG_ML") not in EMPTY:  # the mega-scale data set
            name, convention = "ddG_ML", replace(settings, stable_ddg="positive")
        pair = _pair(record._replace(data=fields), path, backbones, convention)
        if is_mutant:
            signs.append(pair.sign)
        elif ddg is None and "ddg" in fields:  # of a mutant and its wild type; it may have no sign
            worse = -1 if convention.stable_ddg == "negative" else 1
            if pair.sign == worse and str(fields["ddg"]).lstrip().startswith("-"):
                problem = "does not mean that preferred_seq is more stable"
                raise UserError(f"ddg: {fields['ddg']!r:.40} {problem}; swap the two, or remove it")
        if is_mutant and ddg is None:
            effect = "stabilizes" if convention.stable_ddg == "positive" else "destabilizes"
            notes[f"a {name} above 0 {effect}"] += 1
        return pair

    source = DataFile(path, "", limit, settings.on_bad_record)
    pairs = list(data.usable(source, make, dropped))
    report = {"file": path, "used": len(pairs), "dropped": dropped, "notes": notes}
    return pairs, report | {"warnings": _warnings(pairs, signs, settings)}


def _our_fields(record: Record, ddg: float | None) -> dict[str, Any]:
    """Return the fields of a record that are not empty, under our names.

    The names of ProteinDPO, the mega-scale data set and FireProtDB are known. ddg: see `read`.
    """
    fields = {name: value for name, value in record.data.items() if value not in EMPTY}
    if "mut_type" in fields:  # in ProteinDPO, `mutation` is the new letter
        letter = str(fields.pop("mutation", ""))
        if not str(fields["mut_type"]).endswith(letter):
            raise UserError(f"mutation: {data.shown(letter)} contradicts mut_type; leave one out")
    elif "wild_type" in fields:  # FireProtDB
        number = fields.pop("pdb_position", None) or fields.pop("position", "")
        fields["mutation"] = f"{fields.pop('wild_type')}{number}{fields.get('mutation', '')}"
    if "pdb_file" in fields:
        fields.pop("WT_name", None)
    ours = {ALIASES.get(name, name): value for name, value in fields.items()}
    if len(ours) < len(fields):
        raise UserError("two names of one field, such as ddG and ddg")
    if ddg is not None:
        ours["ddg"] = ddg
    text = str(ours.get("mutation", ""))
    if NO_SUBSTITUTION.fullmatch(text):
        raise Unusable("not a substitution")
    if text and "ddg" in {ALIASES.get(name, name) for name in record.data} - ours.keys():
        raise Unusable("without a ddG")
    matches = filter(None, map(MUTATION.fullmatch, SEPARATOR.split(text)))
    chains = sorted({match[2] for match in matches} - {""})
    if chains and not ours.keys() & {*CHAINS}:
        ours["design_chains"] = chains
    return ours


def _warnings(pairs: Sequence[Pair], signs: Sequence[int], settings: PairSettings) -> list[str]:
    """Return what is unusual in the pairs of a file; signs: see `read`."""
    warnings = []
    lowest, _ = wilson(signs.count(1), len(signs))
    if lowest is not None and lowest > 0.5:
        other = "negative" if settings.stable_ddg == "positive" else "positive"
        problem = f"{signs.count(1)} of {len(signs)} mutants are more stable than the wild type"
        warnings.append(f"{problem}; if ddG has the other sign here, use --stable_ddg {other}")
    keys = [(pair.number, pair.preferred.tobytes(), pair.unpreferred.tobytes()) for pair in pairs]
    seen = {*keys}
    count = sum((number, worse, better) in seen for number, better, worse in seen)
    if count:
        warnings.append(f"{count} pairs contradict each other; keep one of two equal mutations")
    if len(seen) < len(keys):
        margins = [str(pair.margin) for pair in pairs]
        count = len({*zip(keys, margins, strict=True)}) - len(seen)
        problem = f"{len(keys) - len(seen)} pairs occur again ({count} with another ddG)"
        warnings.append(f"{problem}; keep one row of each pair or mutation")
    one_of_each = {pair.number: pair for pair in pairs}.values()
    backbones = {(pair.name, pair.backbone.coords.tobytes()) for pair in one_of_each}
    for name, count in Counter(name for name, _ in backbones).items():
        if count > 1:
            warnings.append(f"{count} structures are named {name}; rename the files")
    notes = sorted({pair.backbone.note for pair in pairs} - {""})
    if notes:
        warnings.append(f"{len(notes)} structures such as {notes[0]}")
    return [f"warning: {text}" for text in warnings]


def note_repeated(train: Sequence[Pair], held_out: Sequence[Pair], report: dict) -> None:
    """Count in the report of held-out pairs how many, and of which structures, are trained on."""
    pairs = {pair.key for pair in train}
    sequences = dict(pairs)
    count = sum(pair.key in pairs for pair in held_out)
    of_structures = sum(pair.backbone.sequence in sequences for pair in held_out)
    counts = {REPEATED: count, "structures also in train_data": of_structures}
    report["notes"] += Counter(counts)  # which leaves out counts of 0
    if 100 * count > len(held_out):
        problem = f"{count} pairs have {REPEATED}; remove them from one of the files"
        report["warnings"].append(f"warning: {problem}, because they are not held out")


def _pair(record: Record, source: str, backbones: dict, settings: PairSettings) -> Pair:
    """Return the pair of one item; raise UserError or Unusable."""
    number, backbone = _backbone(record, source, backbones, settings)
    if len(backbone.sequence) > settings.max_length:
        raise Unusable("longer than max_length")
    preferred, unpreferred, margin = _sequences(record, backbone, settings)
    designed = mutable(record.data, backbone, settings.numbering)
    for position in np.flatnonzero((preferred != unpreferred) & ~designed):
        problem = f"the sequences differ at residue {backbone.labels[position]}, which is fixed"
        raise UserError(f"{problem}; add it to mutable_positions, in {settings.numbering} numbers")
    designed &= backbone.mask > 0
    both = np.stack([preferred, unpreferred])  # [2, L]
    first = backbone.tied[:, 0]
    if (both[:, backbone.tied] != both[:, first, None]).any():
        raise UserError("the copies of --homo_oligomer differ")
    targets = designed[backbone.tied].any(-1) & (both[:, first] != UNKNOWN).all(0)  # [T]
    if (preferred == unpreferred).all():
        raise Unusable("the same sequence twice")
    differ = (preferred != unpreferred)[first]  # [T]
    if not (targets & differ).any():
        raise Unusable("different only at residues that are unknown or lack backbone atoms")
    if np.isfinite(margin) and (differ & ~targets).any():  # it was measured for all of them
        raise Unusable("with a mutated residue that is unknown or lacks backbone atoms")
    name = " ".join([backbone.name, *backbone.chains])
    arrays = preferred, unpreferred, designed, targets, np.float64(margin)
    return Pair(record.location, name, number, backbone, *arrays)


def _backbone(
    record: Record, source: str, backbones: dict, settings: PairSettings
) -> tuple[int, Structure]:
    """Return the number and the structure of an item's backbone."""
    name = data.text(record, "pdb_file")
    options = *chains_of(record.data), settings.homo_oligomer
    as_written = source, name, *options
    if as_written in backbones:  # looking for the file takes longer than reading a mutation
        return backbones[as_written]
    folder = data.resolve(source).parent
    # the files of the mega-scale data set have a colon there; FireProtDB lists several structures
    spellings = dict.fromkeys([name, name.replace("|", ":"), name.split("|")[0]])
    names = [*map("".join, itertools.product(spellings, ("", ".pdb", ".cif")))]
    files = [*(folder / name for name in names), *map(data.resolve, names)]
    file = next(filter(Path.is_file, files), None)
    if not file:
        folders = " or ".join(dict.fromkeys([str(folder.resolve()), str(Path.cwd())]))
        raise UserError(f"pdb_file: no file {name:.200} in {folders}")
    key = file.resolve(), *options
    if key not in backbones:
        backbones[key] = len(backbones), structure.read(file, *options)
    backbones[as_written] = backbones[key]
    return backbones[key]


def _sequences(
    record: Record, backbone: Structure, settings: PairSettings
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the preferred and the unpreferred sequence, [L] each, and the margin in kcal/mol."""
    if "preferred_seq" not in record.data:
        if "ddg" not in record.data:
            problem = f"neither this field nor preferred_seq is among {data.names_of(record)}"
            raise UserError(f"ddg: {problem}; rename the field of the ddG in kcal/mol")
        mutant = mutant_of(data.text(record, "mutation"), backbone, settings.numbering)
        wild_type = encode(backbone.sequence)
        ddg = read_number(record, "ddg")
        if ddg == 0:
            raise Unusable("a ddG of 0")
        is_stabilizing = (ddg > 0) == (settings.stable_ddg == "positive")
        both = (mutant, wild_type) if is_stabilizing else (wild_type, mutant)
        return *both, abs(ddg)
    for field in record.data:
        if re.fullmatch(DIRECTIONS, field, re.IGNORECASE):
            hint = "put the better sequence first, or use margin_kcal"
            raise UserError(f"{field}: not supported; {hint}")
    texts = data.text(record, "preferred_seq"), data.text(record, "unpreferred_seq")
    preferred = parse_sequence(texts[0], backbone, "preferred_seq")
    unpreferred = parse_sequence(texts[1], backbone, "unpreferred_seq")
    margin = read_number(record, "margin_kcal") if "margin_kcal" in record.data else math.nan
    if margin < 0:
        raise data.wrong_value(record, "margin_kcal", margin, ">= 0 (or swap the two sequences)")
    return preferred, unpreferred, margin


def read_number(record: Record, field: str) -> float:
    """Return a field, a number or a string, as a finite number; raise UserError otherwise."""
    value = record.data[field]
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise data.wrong_value(record, field, value, "a number, in kcal/mol")


def mutant_of(mutations: str, backbone: Structure, numbering: str) -> np.ndarray:
    """Return the structure's own sequence with some mutations, [L].

    Mutations are written A23V or A23V:L45F, or with the chain behind the first letter: AB23V.
    numbering: see `find`. Raises UserError if a mutation does not fit the backbone.
    """
    letters = encode(backbone.sequence)
    new: dict[int, str] = {}  # position of the first copy -> letter
    for text in SEPARATOR.split(mutations.strip("; \n")):  # a line of FoldX ends with ;
        where = f"mutation: {data.shown(text)}"
        match = MUTATION.fullmatch(text)
        if not match:
            raise UserError(f"{where} is not a mutation (expected A23V, or A23V:L45F)")
        position = find(match[2], match[3], backbone, numbering, where)
        residue = backbone.sequence[position]
        if residue != match[1].upper():
            raise UserError(f"{where}: residue {match[3]} is {residue}; --numbering is {numbering}")
        copies = backbone.tied[(backbone.tied == position).any(-1)]
        letter = match[4].upper()
        if new.setdefault(int(copies.min()), letter) != letter:
            raise UserError(f"{where}: residue {match[3]} has two mutations; use one per residue")
        letters[copies] = ALPHABET.index(letter)
    return letters


def find(chain: str, label: str, backbone: Structure, numbering: str, where: str) -> int:
    """Return the position of a residue of the designed chains, or of the named chain of them.

    numbering: "pdb" for residue numbers of the file, with insertion codes (52A); "sequence" for a
    count of residues from 1; "gapped" if the count includes the numbers that gaps skip.
    """
    positions = np.flatnonzero(backbone.observed & backbone.in_design)
    if chain:
        names = np.array(backbone.chains)[backbone.chain_encoding[positions] - 1]
        positions = positions[names == chain]
    else:
        positions = np.intersect1d(positions, backbone.tied[:, 0])  # one of each group of copies
    labels = [backbone.labels[position] for position in positions]
    if numbering != "pdb":
        counts = backbone.numbering[positions] if numbering == "gapped" else range(len(positions))
        labels = [str(count - counts[0] + 1) for count in counts]
    count = labels.count(label.upper())
    if count != 1:
        hint = f"name the chain, as in A{label}" if count else f"--numbering is {numbering}"
        raise UserError(f"{where}: {count} residues {chain}{label} in {backbone.name}; {hint}")
    return int(positions[labels.index(label.upper())])


def positions_of(value: Any, backbone: Structure, numbering: str, where: str) -> dict[str, range]:
    """Return the positions of residues and ranges: 52, A52, 52A, 6-17, A6-17, or [6, 17]."""
    texts = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise UserError(f"{where}: {value!r:.60} (expected a list of residues, such as 52 or A52)")
    positions: dict[str, range] = {}
    for part in texts:
        text = "-".join(map(str, part)) if isinstance(part, list | tuple) else str(part)
        match = RANGE.fullmatch(text)
        if not match:
            raise UserError(f"{where}: {text!r:.60} is not a residue (expected 52, A52 or 6-17)")
        chain, first, last_chain, last = match.groups()
        if (last_chain or chain) != chain:
            raise UserError(f"{where}: {text}: from one chain to another; use a range of each")
        if where == "mutable_ranges" and not last:
            raise UserError(f"{where}: {text} is not a range (expected 6-17, or [6, 17] in a list)")
        start = stop = find(chain, first, backbone, numbering, f"{where}: {text}")
        if last:
            stop = find(chain, last, backbone, numbering, f"{where}: {text}")
        if stop < start:
            raise UserError(f"{where}: {text}: its end comes before its start; swap them")
        positions[text] = range(start, stop + 1)
    return positions


def parse_sequence(text: str, backbone: Structure, where: str) -> np.ndarray:
    """Return a sequence as numbers [L]: X in gaps, the structure's own in the context.

    The text must have one letter for each residue of the designed chains, or for each residue
    number including skipped ones, or for each residue that is not modified; otherwise UserError.
    """
    text = re.sub(r"\s", "", text).upper().replace("-", "X")  # FASTA has line breaks
    observed = backbone.observed & backbone.in_design
    sizes = [*Counter(backbone.chain_encoding[observed].tolist()).values()]  # residues of chains
    given = [*map(len, text.split("/"))]
    if len(given) == len(sizes) > 1 and given != sizes and sum(given) == sum(sizes):
        problem = f"the chains have {given} letters, but in this order {sizes} residues"
        raise UserError(f"{where}: {problem}; write the chains in the order of the file")
    text = text.replace("/", "")
    invalid = sorted({*text} - {*ALPHABET})
    if invalid:
        raise UserError(f"{where}: {', '.join(invalid)!r} not in {ALPHABET}")
    letters = encode(text)
    sequence = encode(backbone.sequence)
    unmodified = observed & (sequence != UNKNOWN)
    sequence[backbone.in_design] = UNKNOWN
    length = int(backbone.numbering[backbone.in_design][-1]) + 1
    if len(letters) == length:
        letters = letters[backbone.numbering[observed]]
    positions = unmodified if len(letters) == unmodified.sum() else observed
    if len(letters) != positions.sum():
        problem = f"{len(letters)} letters, but the designed chains have {observed.sum()} residues"
        raise UserError(f"{where}: {problem} ({length} with numbering gaps); use one letter each")
    sequence[positions] = letters
    return sequence


def text_of(letters: np.ndarray, backbone: Structure) -> str:
    """Return the letters [L] of the designed chains, separated by /, without those in gaps."""
    positions = backbone.observed & backbone.in_design
    ends = np.flatnonzero(np.diff(backbone.chain_encoding[positions])) + 1
    chains = np.split(np.array([*ALPHABET])[letters[positions]], ends)
    return "/".join("".join(chain) for chain in chains)


def chains_of(settings: Mapping) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the designed and of the fixed chains; () for the first protein chain."""
    chains: list[tuple[str, ...]] = []
    for field in CHAINS:
        names = settings.get(field)
        if isinstance(names, str):  # AB and A,B are two chains
            names = [names] * (names != "") if field == "chain_id" else re.sub(r"[\s,]", "", names)
        names = () if names is None else names
        if not isinstance(names, str | list | tuple) or {*map(type, names)} - {str}:
            raise UserError(f"{field}: {names!r:.60} (expected a list of chain names)")
        chains.append(tuple(names))
    chain, design, fixed = chains
    if chain and design:
        raise UserError("chain_id: design_chains is set, too; use only one of them")
    if fixed and not (chain or design):
        raise UserError("fixed_chains: design_chains is missing; name these as well")
    return chain or design, fixed


def mutable(
    settings: Mapping, backbone: Structure, numbering: str, tied: np.ndarray | None = None
) -> np.ndarray:
    """Return where letters may differ, [L] bool: all designed chains, or the named residues.

    mutable_positions and mutable_ranges are combined; fixed_residues are excluded. numbering: see
    `find`. tied: groups [T, C] that are one residue, instead of the copies of the backbone. Raises
    UserError if nothing remains of one of the residues and ranges, or of all.
    """
    fixed, named = np.zeros((2, *backbone.in_design.shape), bool)
    tied = backbone.tied if tied is None else tied
    for field in MUTABLE:
        value = settings.get(field)
        mask = fixed if field == "fixed_residues" else named
        residues = positions_of(() if value is None else value, backbone, numbering, field)
        for text, positions in residues.items():
            mask[positions] = True
            mask[tied] = mask[tied].any(-1, keepdims=True)  # all of its copies
            if mask is named and fixed[positions].all():
                raise UserError(f"{field}: {text} is in fixed_residues, too; use one of them")
    allowed = (named if named.any() else backbone.in_design) & ~fixed
    if not allowed.any():
        raise UserError(f"fixed_residues: they are all residues of {backbone.name}; use fewer")
    return allowed


def check_margins(pairs: Iterable[Pair], method: str, weighting: str) -> None:
    """Raise UserError for the first pair without the ddG or the wild type that the loss needs."""
    wild_types: dict[int, np.ndarray] = {}  # number of a backbone -> letters [L]
    for pair in pairs:
        if math.isnan(pair.margin):
            problem = f"no ddG, but --method {method} --weighting {weighting} needs one"
            raise UserError(f"{pair.location}: {problem}; add margin_kcal, or mutation and ddg")
        if method != "listwise":
            continue
        if pair.sign == 0:
            problem = "neither sequence is the structure's own where they differ"
            raise UserError(f"{pair.location}: {problem}; use --method ddg, which accepts this")
        wild_type = pair.unpreferred if pair.sign == 1 else pair.preferred
        known = wild_types.setdefault(pair.number, wild_type)
        if (known != wild_type).any():
            problem = f"neither sequence is the wild type of the other pairs of {pair.name}"
            raise UserError(f"{pair.location}: {problem}; use --method ddg, which accepts this")


def digest(pairs: Iterable[Pair]) -> str:
    """Return a digest of everything but the model that the log-probs of these pairs depend on."""
    sha256 = hashlib.sha256()
    for pair in pairs:
        sha256.update(f"{pair.name}\n".encode())
        for array in (*pair[4:], *pair.backbone[:4]):
            sha256.update(array.tobytes())
    return sha256.hexdigest()[:16]


def describe(reports: Mapping[str, dict]) -> list[str]:
    """Return one line on the file of each split, and one for each warning."""
    lines = []
    for split, report in reports.items():
        parts = [f"{split}: {report['used']} pairs of {report['file']}"]
        parts += [f"{count} {reason}" for reason, count in report["dropped"].items()]
        parts += [f"{count} items: {note}" for note, count in report["notes"].items()]
        lines += ["; ".join(parts), *report["warnings"]]
    return lines
