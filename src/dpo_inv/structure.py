"""Read backbones from PDB and mmCIF files, gzipped or not: protein chains of the first model.

If a residue has alternative conformers, the first one is used, as in the official parser
(parse_PDB_biounits of github.com/dauparas/ProteinMPNN). The official parser reads ATOM records and
MSE; Structure.note names what is read differently here.

A Structure has L positions: the residues of the requested chains in file order, and a masked X for
each residue number that a gap skips, as in the official parser. A gap of more than 32 numbers adds
no positions and changes residue_idx only, because ProteinMPNN treats all residues that are further
apart alike.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gemmi
import numpy as np

from ddp_utils import UserError, data

MAX_GAP = 32  # largest step from one residue number to the next that is filled with positions
BACKBONE = ("N", "CA", "C", "O")
STANDARD = {gemmi.expand_one_letter(x, gemmi.ResidueKind.AA): x for x in "ACDEFGHIKLMNPQRSTVWY"}
# modified residues are X, except MSE; the other names are protonation states and disulfide bonds in
# files from molecular dynamics
LETTERS = STANDARD | {"MSE": "M", "CYX": "C", "CYM": "C", "ASH": "D", "GLH": "E", "LYN": "K"}
LETTERS |= dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "H")
Names = Sequence[str]  # of chains
Residues = list[tuple[Any, str]]  # residues of a chain, and their letters: "" if they are not read
MISSING = np.full((4, 3), np.nan)  # the coordinates of a position without a residue


class Position(NamedTuple):
    """One of the L positions: a residue of the file, or a number that a gap skips."""

    number: int  # index in a sequence that has a letter for skipped numbers, too
    chain: int  # 1, 2, ...
    observed: bool = False  # whether the file has this residue
    letter: str = "X"
    label: str = ""  # the file's residue number and insertion code, such as 52A
    coords: np.ndarray = MISSING  # [4, 3] N, CA, C, O in Angstrom; NaN where an atom is missing


class Structure(NamedTuple):
    """The backbone of one or several chains."""

    coords: np.ndarray  # [L, 4, 3] float32: N, CA, C, O in Angstrom; 0 where missing
    mask: np.ndarray  # [L] float32: 1 if all four atoms are known
    residue_idx: np.ndarray  # [L] int64: index over all chains, + 100 with each further chain
    chain_encoding: np.ndarray  # [L] int64: 1, 2, ...
    sequence: str  # L letters of ACDEFGHIKLMNPQRSTVWYX
    labels: tuple[str, ...]  # [L] Position.label
    observed: np.ndarray  # [L] bool: the file has this residue; False in a gap
    numbering: np.ndarray  # [L] int64: Position.number
    chains: tuple[str, ...]
    in_design: np.ndarray  # [L] bool: positions of the designed chains, which come first
    tied: np.ndarray  # [T, C] int64: positions that share a letter; C is 1 without homo_oligomer
    name: str  # of the file
    note: str  # what the user should know about how the file was read, in one line, or ""
    unread: tuple[str, ...]  # the other protein chains of the file

    @property
    def tied_weights(self) -> np.ndarray:
        """Return the weight of each position in the mean over the positions tied to it, [L]."""
        # a position may be listed several times in its group
        weights = self.mask / np.bincount(self.tied.ravel())
        totals = weights[self.tied].sum(-1, keepdims=True)  # [T, 1]
        normalized = np.empty_like(self.mask)
        normalized[self.tied] = weights[self.tied] / np.maximum(1, totals)
        return normalized


def read(
    path: str | Path, design: Names = (), fixed: Names = (), homo_oligomer: bool = False
) -> Structure:
    """Return the backbone of the named chains in this order; by default of the first chain by name.

    homo_oligomer: the designed chains are copies, and residues with the same number are tied.
    Raises UserError if the file is not a structure, lacks a chain, or the chains are not copies.
    """
    residues_of = _read_chains(path)
    chains = (*design, *fixed) or (min(residues_of),)
    positions: list[Position] = []
    notes: list[str] = []
    for number, chain in enumerate(chains, start=1):
        if chain not in residues_of or chains.count(chain) > 1:
            problem = f"no protein chain {chain!r:.40}, or it is named twice"
            raise UserError(f"{path}: {problem}; its chains are {[*residues_of]!r:.200}")
        first = positions[-1].number + 1 if positions else 0
        positions += _positions(path, residues_of[chain], number, first)
        notes += _differences(chain, residues_of[chain])
    columns = map(np.array, zip(*positions, strict=True))
    numbering, chain_encoding, observed, letters, labels, coords = columns
    mask = np.isfinite(coords).all((1, 2))
    if not mask.any():
        raise UserError(f"{path}: no residue has N, CA, C and O; use a file with all four atoms")
    coords = np.nan_to_num(coords).astype(np.float32)
    residue_idx = numbering + 100 * (chain_encoding - 1)
    backbone = coords, mask.astype(np.float32), residue_idx, chain_encoding
    residues = "".join(letters), tuple(labels.tolist()), observed, numbering
    in_design = chain_encoding <= max(1, len(design))
    roles = chains, in_design, np.arange(len(mask))[:, None]
    name = Path(path).name
    hint = "the official parser may differ, see docs/protein_data.md"
    note = f"{name}: {', '.join(notes):.200}; {hint}" if notes else ""
    unread = tuple(sorted({*residues_of}.difference(chains)))
    structure = Structure(*backbone, *residues, *roles, name, note, unread)
    return _with_tied_copies(path, structure) if homo_oligomer else structure


def _positions(path: str | Path, residues: Residues, chain: int, first: int) -> list[Position]:
    """Return the positions of one chain; `first` is the number of its first residue."""
    positions: list[Position] = []
    labels: set[str] = set()
    number = first - 1
    previous = 0
    for residue, letter in residues:
        if not letter:
            continue
        label = str(residue.seqid)
        if label in labels and all(atom.altloc != "\0" for atom in residue):
            continue  # another conformer
        atoms = [(atom.name, atom.altloc) for atom in residue if atom.name in BACKBONE]
        if label in labels or len({*atoms}) < len(atoms):
            problem = f"residue {label} occurs twice in one chain"
            raise UserError(f"{path}: {problem}; use different chain names for different molecules")
        # insertion codes repeat a number, and some files step back: such residues still follow
        step = max(1, residue.seqid.num - previous) if labels else 1
        if step <= MAX_GAP:
            positions += [Position(skipped, chain) for skipped in range(number + 1, number + step)]
        number += step
        previous = residue.seqid.num
        labels.add(label)
        positions.append(Position(number, chain, True, letter, label, _coords(path, residue)))
    return positions


def _coords(path: str | Path, residue: gemmi.Residue) -> np.ndarray:
    """Return the coordinates of N, CA, C and O, [4, 3], NaN where an atom is missing."""
    missing = [np.nan] * 3
    atoms = [residue[name][0].pos.tolist() if name in residue else missing for name in BACKBONE]
    coords = np.array(atoms)
    bonds = np.linalg.norm(np.diff(coords, axis=0), axis=-1)  # [3], or NaN
    for bond in bonds[(bonds < 0.5) | (bonds >= 2)]:  # gemmi reads invalid numbers as 0
        name = f"{data.shown(residue.name)} {residue.seqid}"
        problem = f"backbone atoms of {name} are {bond:.2f} Angstrom apart (expected 1.2 to 1.6)"
        raise UserError(f"{path}: {problem}; correct or remove them")
    return coords


def _with_tied_copies(path: str | Path, structure: Structure) -> Structure:
    """Return a structure with tied positions [T, C]: the same residue of the C designed chains.

    These are residues with the same number. If no number occurs twice, as where numbers continue
    from chain to chain, they are residues equally far from the first one of their chain. Where a
    chain lacks the residue, and outside the designed chains, positions are repeated. A residue that
    is modified in some of the chains gets the letter of the others.
    """
    sequence = np.array([*structure.sequence])
    is_designed = structure.observed & structure.in_design
    sizes = np.bincount(structure.chain_encoding[is_designed])[1:]  # residues of each chain
    labels = np.array(structure.labels, "U9")
    if len({*labels[is_designed]}) == len(labels[is_designed]) and len({*sizes}) == 1:
        places = structure.numbering[is_designed].reshape(len(sizes), -1)
        labels[is_designed] = (places - places[:, :1] + 1).ravel()
    groups: dict[str, list[int]] = {}
    for position in np.flatnonzero(is_designed).tolist():
        groups.setdefault(labels[position], []).append(position)
    are_copies = max(map(len, groups.values()), default=1) > 1
    for label, group in groups.items():
        letters = {structure.sequence[position] for position in group} - {"X"}
        if not are_copies or len(letters) > 1:
            problem = f"residue {label} is {' and '.join(sorted(letters))} in {len(group)} chains"
            hint = "copies, with the same numbers or with numbers that continue and equal lengths"
            raise UserError(f"{path}: {problem}; --homo_oligomer needs --design_chains of {hint}")
        sequence[group] = next(iter(letters), "X")
    tied = tied_array(groups.values(), len(labels))
    return structure._replace(sequence="".join(sequence), tied=tied)


def tied_array(groups: Iterable[Sequence[int]], length: int) -> np.ndarray:
    """Return groups of positions as one array [T, C], with each other position in its own group.

    Shorter groups repeat their positions.
    """
    alone = {*range(length)}.difference(*groups)
    rows = sorted([*map(list, groups), *([position] for position in alone)])
    width = max(map(len, rows))
    return np.stack([np.resize(row, width) for row in rows])


def _read_chains(path: str | Path) -> dict[str, Residues]:
    """Return the residues, in file order, of each chain of the first model with amino acids."""
    chains = {}
    try:
        structure = gemmi.read_structure_string(data.content(path))
        for chain in structure[0]:
            residues = [*chain.first_conformer()]
            letters = _letters(residues)
            if any(letters):
                chains[chain.name] = [*zip(residues, letters, strict=True)]
    except (RuntimeError, ValueError, IndexError) as error:  # gemmi's messages have many lines
        raise UserError(f"{path}: not a PDB or mmCIF file: {str(error)!r:.100}") from error
    if not chains:
        raise UserError(f"{path}: no protein chain; use a file with one")
    return chains


def _letters(residues: list[Any]) -> list[str]:
    """Return the letter of each residue of a chain, or "" if it is not part of the protein.

    The protein ends with the last amino acid that is an ATOM record or MSE, is marked as a polymer
    (in mmCIF by its entity, in PDB by a later TER) or, in a file without such marks, is close to
    the one before. Amino acids after it are ligands.
    """
    letters = [LETTERS.get(x.name, "X") if _is_amino_acid(x) else "" for x in residues]
    end = 0  # of the protein
    previous = None  # amino acid
    for count, residue in enumerate(residues, start=1):
        is_marked = residue.het_flag != "H" or residue.entity_type == gemmi.EntityType.Polymer
        is_marked |= residue.name == "MSE"  # the official parser reads each MSE
        if letters[count - 1]:
            if is_marked or (previous and _are_close(previous, residue)):
                end = count
            previous = residue
    return letters[:end] + [""] * (len(letters) - end)


def _is_amino_acid(residue: gemmi.Residue) -> bool:
    """Return whether this is a numbered amino acid, known or not; no cap and no nucleotide."""
    is_known = gemmi.find_tabulated_residue(residue.name).is_amino_acid()
    return residue.seqid.num is not None and (is_known or "CA" in residue and "C" in residue)


def _are_close(before: gemmi.Residue, residue: gemmi.Residue) -> bool:
    """Return whether an unmarked residue is as close as a neighbor: CA is 3.8 Angstrom away."""
    first, second = before.get_ca(), residue.get_ca()
    is_unmarked = residue.entity_type == gemmi.EntityType.Unknown
    return bool(is_unmarked and first and second and first.pos.dist(second.pos) < 4.5)


def _differences(name: str, residues: Residues) -> list[str]:
    """Return what the official parser reads differently, and amino acids that are not read."""
    differences = []
    for residue, letter in residues:
        is_skipped = residue.het_flag == "H" and residue.name != "MSE"
        official = "" if is_skipped else (STANDARD | {"MSE": "M"}).get(residue.name, "X")
        if letter != official or not letter and _is_amino_acid(residue):
            reading = f"read as {letter}" if letter else "skipped"
            differences.append(f"{data.shown(residue.name)} {name}{residue.seqid} {reading}")
    numbers = [(residue.seqid.num, residue.seqid.icode) for residue, letter in residues if letter]
    if numbers != sorted(numbers):
        differences.append(f"chain {name} in file order, not by number")
    return differences
