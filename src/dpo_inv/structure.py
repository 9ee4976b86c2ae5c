"""Read backbones from PDB and mmCIF files, gzipped or not: model 1, protein chains, one conformer.

The L rows are the residues of the wanted chains in file order, and a masked X for each number that
a gap skips, as in the official parser. A jump of more than 32 numbers changes residue_idx alone:
all residues further apart than that are alike to the model.
"""

import itertools
from typing import NamedTuple

import gemmi
import numpy as np

from ddp_utils import UserError, jsonl

MAX_JUMP = 32  # from one number to the next, above which the rows between are left out
BACKBONE = ("N", "CA", "C", "O")
THREE = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
STANDARD = dict(zip(THREE.split(), "ACDEFGHIKLMNPQRSTVWY", strict=True))
# a modified residue is X but for MSE; the others are how molecular dynamics calls protons, bridges
LETTERS = STANDARD | {"MSE": "M", "CYX": "C", "CYM": "C", "ASH": "D", "GLH": "E", "LYN": "K"}
LETTERS |= dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "H")
KIND = gemmi.EntityType
MISSING = np.full((4, 3), np.nan)  # N, CA, C, O of a residue that the file does not have


class Structure(NamedTuple):
    """The backbone of some chains, one after the other."""

    coords: np.ndarray  # [L, 4, 3] float32: N, CA, C, O in Angstrom; 0 where missing
    mask: np.ndarray  # [L] float32: 1 if all four atoms are there
    residue_idx: np.ndarray  # [L] int64: place over all chains, + 100 with each further chain
    chain_encoding: np.ndarray  # [L] int64: 1, 2, ...
    sequence: str  # L letters of ACDEFGHIKLMNPQRSTVWYX
    chains: tuple[str, ...]
    lengths: tuple[int, ...]  # rows of each chain
    observed: np.ndarray  # [L] bool: the file has this residue; False for the rows of a gap

    @property
    def numbering(self):
        """[L] int64: a row's place in a sequence with a letter for each number skipped, too."""
        return self.residue_idx - 100 * (self.chain_encoding - 1)


def read(path, chains=()) -> Structure:
    """Return the backbone of these chains in this order; by default of all, sorted by name.

    Raises UserError if the file is no structure, or lacks a chain, or has impossible atoms.
    """
    selected = _select_chains(path, _read_model(path), chains)
    rows = []  # (letter, coordinates, whether the file has it, its place, its chain) of each
    for chain, residues in enumerate(selected.values(), start=1):
        number_before = None
        for number, residue, atoms in _conformers(path, residues):
            # the first residue, an insertion and a step back have the next number
            jump = 1 if number_before is None else max(1, number - number_before)
            last = rows[-1][3] if rows else -1
            if jump <= MAX_JUMP:
                rows += [("X", MISSING, False, last + step, chain) for step in range(1, jump)]
            letter = LETTERS.get(residue.name, "X")
            rows.append((letter, _coordinates(path, residue, atoms), True, last + jump, chain))
            number_before = number
    letters, coords, observed, numbering, encoding = map(np.array, zip(*rows, strict=True))
    mask = np.isfinite(coords).all((1, 2))
    if not mask.any():
        raise UserError(f"{path}: no residue has N, CA, C and O; a backbone needs all four")
    return Structure(
        coords=np.nan_to_num(coords).astype(np.float32),
        mask=mask.astype(np.float32),
        residue_idx=numbering + 100 * (encoding - 1),
        chain_encoding=encoding,
        sequence="".join(letters),
        chains=tuple(selected),
        lengths=tuple(np.bincount(encoding)[1:].tolist()),
        observed=observed,
    )


def _read_model(path):
    """Return the first model of a file."""
    content = jsonl.content(path)
    try:
        return gemmi.read_structure_string(content)[0]
    except (RuntimeError, ValueError, IndexError) as error:  # gemmi's messages have many lines
        raise UserError(f"{path}: not a PDB or mmCIF file: {str(error)!r:.100}") from error


def _select_chains(path, model, wanted):
    """Return {chain: its amino acids in file order}, in the order wanted."""
    chains = {}
    for chain in model:
        residues = list(filter(_is_in_protein, chain))
        if residues:
            chains[chain.name] = residues
    if not chains:
        raise UserError(f"{path}: no protein chain; give a file with one")
    names = [name.strip() for name in wanted] or sorted(chains)
    for name in names:
        if name not in chains:
            present = ", ".join(jsonl.shown(chain) or "' '" for chain in sorted(chains))
            raise UserError(f"{path}: no protein chain {name!r:.40}; it has {present:.200}")
        if names.count(name) > 1:
            raise UserError(f"{path}: chain {name!r:.40} is asked for twice; name it once")
    return {name: chains[name] for name in names}


def _is_in_protein(residue):
    """Whether it is an amino acid of the chain: not a ligand, nor an ion of the name CA."""
    kind = residue.entity_type  # Unknown if there is no TER and no _entity
    if residue.het_flag == "H" and kind == KIND.Unknown and residue.name in STANDARD:
        return False
    if residue.het_flag == "H" and kind not in (KIND.Polymer, KIND.Unknown):
        return False
    known = residue.name in LETTERS or gemmi.find_tabulated_residue(residue.name).is_amino_acid()
    return known or {*BACKBONE} <= {atom.name for atom in residue}


def _conformers(path, residues):
    """Yield (number, residue, {name: backbone atom}) of the likeliest conformer of each residue.

    Residues of one number are conformers of several names; atoms without a letter belong to all.
    """
    seen = set()
    for key, group in itertools.groupby(residues, key=lambda residue: str(residue.seqid)):
        group = list(group)
        number = group[0].seqid.num
        if key in seen or number is None:
            raise UserError(
                f"{path}: residue {key} is there twice in a chain or has no number; give each "
                "chain and each residue a name of its own"
            )
        seen.add(key)
        candidates = [(-1, group[0], {})]
        for residue in group:
            backbone = [atom for atom in residue if atom.name in BACKBONE]
            for letter in dict.fromkeys(atom.altloc for atom in backbone):
                atoms = {}
                for atom in sorted(backbone, key=gemmi.Atom.has_altloc):  # its own ones last
                    if atom.altloc == letter or not atom.has_altloc():
                        atoms[atom.name] = atom
                # rounded, so that equal sums are equal, and the first of them is taken
                occupancy = round(sum(atom.occ for atom in atoms.values()), 3)
                candidates.append((occupancy, residue, atoms))
        _, residue, atoms = max(candidates, key=lambda candidate: candidate[0])
        yield number, residue, atoms


def _coordinates(path, residue, atoms):
    """Return N, CA, C and O [4, 3] of a residue, NaN where one is missing."""
    coords = MISSING.copy()
    for row, name in enumerate(BACKBONE):
        if name in atoms:
            coords[row] = atoms[name].pos.tolist()
    bonds = np.linalg.norm(np.diff(coords, axis=0), axis=-1)  # NaN where an atom is missing
    for bond in bonds[(bonds < 0.5) | (bonds >= 2)]:  # gemmi takes what is no number for 0
        raise UserError(
            f"{path}: backbone atoms of {jsonl.shown(residue.name)} {residue.seqid} are "
            f"{bond:.2f} Angstrom apart, 1.2 to 1.6 is usual; correct the coordinates, or take "
            "the residue out"
        )
    return coords
