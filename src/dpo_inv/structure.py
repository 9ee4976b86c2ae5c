"""Read backbones from PDB and mmCIF files, gzipped or not: model 1, protein chains.

Of several conformers of a residue the first is taken, as in the official parser, or with
altloc="occupancy" the one whose atoms are occupied most; atoms of two are never mixed.

The L rows are the residues of the wanted chains in file order, and a masked X for each number that
a gap skips, as in the official parser. A jump of more than 32 numbers changes residue_idx alone:
all residues further apart than that are alike to the model.
"""

from typing import NamedTuple

import gemmi
import numpy as np

from ddp_utils import UserError, data

MAX_JUMP = 32  # from one number to the next, above which the rows between are left out
BACKBONE = ("N", "CA", "C", "O")
STANDARD = {gemmi.expand_one_letter(x, gemmi.ResidueKind.AA): x for x in "ACDEFGHIKLMNPQRSTVWY"}
# a modified residue is X but for MSE; the others are how molecular dynamics calls protons, bridges
LETTERS = STANDARD | {"MSE": "M", "CYX": "C", "CYM": "C", "ASH": "D", "GLH": "E", "LYN": "K"}
LETTERS |= dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "H")
MISSING = np.full((4, 3), np.nan)  # N, CA, C, O of a residue that the file does not have


class Structure(NamedTuple):
    """The backbone of some chains, one after the other."""

    coords: np.ndarray  # [L, 4, 3] float32: N, CA, C, O in Angstrom; 0 where missing
    mask: np.ndarray  # [L] float32: 1 if all four atoms are there
    residue_idx: np.ndarray  # [L] int64: place over all chains, + 100 with each further chain
    chain_encoding: np.ndarray  # [L] int64: 1, 2, ...
    sequence: str  # L letters of ACDEFGHIKLMNPQRSTVWYX
    chains: tuple[str, ...]
    observed: np.ndarray  # [L] bool: the file has this residue; False for the rows of a gap
    in_design: np.ndarray  # [L] bool: rows of the chains to design, the first ones
    numbering: np.ndarray  # [L] int64: place in a sequence with letters for skipped numbers, too
    labels: tuple[str, ...]  # [L] the file's numbers with insertion codes, "52A"; "" in a gap
    tied: np.ndarray  # [T, C] int64: rows that share a letter; without homo_oligomer C is 1

    @property
    def shares(self):
        """What a row's log-probs count in the mean over the rows that it is tied to, [L]."""
        weights = self.mask / np.bincount(self.tied.ravel())  # a row may be there several times
        copies = weights[self.tied].sum(-1, keepdims=True)  # [T, 1]
        shares = np.empty_like(self.mask)
        shares[self.tied] = weights[self.tied] / np.maximum(1, copies)
        return shares


def read(path, design=(), fixed=(), altloc="first", homo_oligomer=False) -> Structure:
    """Return the backbone of these chains in this order; by default of the first one by name.

    homo_oligomer: the designed chains are copies, their residues of one number share a letter.
    Raises UserError if the file is no structure, lacks a chain, or the chains are no copies.
    """
    residues_of = _read_chains(path, altloc)
    chains = (*design, *fixed) or (min(residues_of),)
    rows = []  # (letter, coordinates, whether the file has it, place, chain, label) of each
    place = -1
    for encoding, chain in enumerate(chains, start=1):
        if chain not in residues_of:
            problem = f"no protein chain {chain!r:.40}; it has {[*residues_of]!r:.200}"
            raise UserError(f"{path}: {problem}")
        if chains.count(chain) > 1:
            raise UserError(f"{path}: chain {chain!r:.40} is asked for twice; name it once")
        number = residues_of[chain][0].seqid.num - 1
        for residue in residues_of[chain]:
            jump = max(1, residue.seqid.num - number)  # 1 at an insertion and a step back, too
            if jump <= MAX_JUMP:
                for skipped in range(place + 1, place + jump):
                    rows.append(("X", MISSING, False, skipped, encoding, ""))
            number = residue.seqid.num
            place += jump
            letter = LETTERS.get(residue.name, "X")
            coords = _backbone_atoms(path, residue)
            rows.append((letter, coords, True, place, encoding, str(residue.seqid)))
    letters, coords, observed, numbering, encodings, labels = map(np.array, zip(*rows, strict=True))
    mask = np.isfinite(coords).all((1, 2))
    if not mask.any():
        raise UserError(f"{path}: no residue has N, CA, C and O; a backbone needs all four")
    read = Structure(
        coords=np.nan_to_num(coords).astype(np.float32),
        mask=mask.astype(np.float32),
        residue_idx=numbering + 100 * (encodings - 1),
        chain_encoding=encodings,
        sequence="".join(letters),
        chains=chains,
        observed=observed,
        in_design=encodings <= max(1, len(design)),
        numbering=numbering,
        labels=tuple(labels.tolist()),
        tied=np.arange(len(mask))[:, None],
    )
    return read._replace(tied=_copies(path, read)) if homo_oligomer else read


def _backbone_atoms(path, residue):
    """Return the coordinates of N, CA, C, O, [4, 3], NaN where one is missing."""
    coords = MISSING.copy()
    for atom, name in enumerate(BACKBONE):
        if name in residue:
            coords[atom] = residue[name][0].pos.tolist()
    bonds = np.linalg.norm(np.diff(coords, axis=0), axis=-1)  # [3], or NaN
    for bond in bonds[(bonds < 0.5) | (bonds >= 2)]:  # gemmi reads what is no number as 0
        name = f"{data.shown(residue.name)} {residue.seqid}"
        problem = f"backbone atoms of {name} are {bond:.2f} Angstrom apart, 1.2 to 1.6 is usual"
        raise UserError(f"{path}: {problem}; correct them, or take it out")
    return coords


def _copies(path, read):
    """Return rows [T, C]: those of one number in the C designed chains, or one row C times.

    A row is there several times, too, where a chain lacks the residue.
    """
    copies = {}  # number, or row -> rows
    for row in range(len(read.mask)):
        is_copy = read.observed[row] and read.in_design[row]
        copies.setdefault(read.labels[row] if is_copy else row, []).append(row)
    most = max(map(len, copies.values()))
    for label, rows in copies.items():
        letters = {read.sequence[row] for row in rows} - {"X"}
        if most == 1 or len(letters) > 1:
            problem = f"residue {label} is {' and '.join(sorted(letters))}"
            raise UserError(f"{path}: {problem}; --homo_oligomer needs --design_chains of copies")
    return np.stack([np.resize(rows, most) for rows in copies.values()])


def _read_chains(path, altloc):
    """Return {chain: its residues in file order} of the protein chains of the first model."""
    chains = {}
    try:
        structure = gemmi.read_structure_string(data.content(path))
        structure.add_entity_types(overwrite=True)  # a TER within a chain does not end it
        structure.remove_ligands_and_waters()
        if altloc == "occupancy":
            for chain in structure[0]:
                for residue in chain:
                    _keep_most_occupied(residue)
        structure.remove_alternative_conformations()
        for chain in structure[0]:
            residues = [residue for residue in chain if _is_amino_acid(residue)]
            if residues:
                chains[chain.name] = residues
    except (RuntimeError, ValueError, IndexError) as error:  # gemmi's messages have many lines
        raise UserError(f"{path}: not a PDB or mmCIF file: {str(error)!r:.100}") from error
    if not chains:
        raise UserError(f"{path}: no protein chain; give a file with one")
    return chains


def _keep_most_occupied(residue):
    """Remove the atoms of the conformers that are occupied less; of equal ones the first stays."""
    occupancy = {}  # conformer -> sum over its atoms; "\0" is what all have in common
    for atom in residue:
        occupancy[atom.altloc] = occupancy.get(atom.altloc, 0) + atom.occ
    occupancy.pop("\0", None)
    kept = max(occupancy, key=occupancy.get, default="\0")
    for index in reversed(range(len(residue))):
        if residue[index].altloc not in ("\0", kept):
            del residue[index]


def _is_amino_acid(residue):
    """Whether it is one, known or not, with a number; not a cap or a nucleotide."""
    known = gemmi.find_tabulated_residue(residue.name).is_amino_acid()
    return residue.seqid.num is not None and (known or "CA" in residue)
