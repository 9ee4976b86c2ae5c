"""Backbones from PDB and mmCIF files, gzipped or not: model 1, protein chains, one conformer.

L rows: the residues of the wanted chains in file order, and a masked X for each number that a gap
skips, as in the official parser. A jump of more than 32 numbers is one of residue_idx alone:
residues further apart are all alike to the model.
"""

import contextlib
import hashlib
import itertools
import os
import re
import uuid
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import gemmi
import numpy as np

from ddp_utils import UserError, jsonl

VERSION = f"1, gemmi {gemmi.__version__}"  # what another version has put into a cache is not read
MAX_JUMP = 32  # from one number to the next, above which the rows between are left out
BACKBONE = ("N", "CA", "C", "O")
THREE = "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR"
STANDARD = dict(zip(THREE.split(), "ACDEFGHIKLMNPQRSTVWY", strict=True))
# a modified residue is X but for MSE; the others are how molecular dynamics calls protons, bridges
LETTERS = STANDARD | {"MSE": "M", "CYX": "C", "CYM": "C", "ASH": "D", "GLH": "E", "LYN": "K"}
LETTERS |= dict.fromkeys(("HID", "HIE", "HIP", "HSD", "HSE", "HSP"), "H")
KIND = gemmi.EntityType

# residue number, insertion code and coordinates as a PDB file should have them, in columns 23-54
INTEGER = rb"(?:   \d|  [-\d]\d| [-\d]\d\d|[-\d]\d\d\d)"
UNUSUAL = rb"\n(?:ATOM|HETA)(?![ -~]{18}%b[ -~]{4}(?:%b\.\d{3}){3}).*" % (INTEGER, INTEGER)
NUMBER = re.compile(rb" *-?\d+ *|[A-Z][\dA-Z]{3}|[a-z][\da-z]{3}")  # the last two: hybrid-36
DECIMAL = re.compile(rb" *[-+]?(?:\d+\.?\d*|\.\d+) *")
DAMAGED = (OSError, EOFError, LookupError, MemoryError, zipfile.BadZipFile, zlib.error)
DAMAGED += (AttributeError, RuntimeError, TypeError, ValueError)  # another file of this name


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
    def places(self):
        """[L] int64: a row's place in a sequence with a letter for each number skipped, too."""
        return self.residue_idx - 100 * (self.chain_encoding - 1)


def read(path, chains=None, altloc="occupancy", cache=None) -> Structure:
    """The backbone of these chains in this order; by default of all protein chains, sorted.

    altloc: "occupancy" takes the conformer that has most of it, "first" the line of each atom that
    comes first, as the official parser does. cache: a folder to keep what was read in.
    Raises UserError, path:line: what is wrong; how to mend it.
    """
    if altloc not in ("occupancy", "first"):
        raise UserError(f"altloc {altloc!r:.40}: give 'occupancy' or 'first'")
    wanted = (chains,) if isinstance(chains, str) else tuple(chains or ())
    raw = jsonl.content(path)
    if not cache:
        return _structure(path, raw, wanted, altloc)
    key = hashlib.sha256(raw + repr((VERSION, wanted, altloc)).encode()).hexdigest()
    file = Path(cache) / f"{key}.npz"
    return _cached(file) or _kept(file, _structure(path, raw, wanted, altloc))


def _structure(path, raw, wanted, altloc):
    try:
        is_cif = re.match(rb"(?:\s|#.*)*data_", raw, re.I)
        model = (_from_cif if is_cif else _from_pdb)(path, raw)
    except (RuntimeError, ValueError, IndexError) as error:  # gemmi's, which name the line
        said = " ".join(str(error).split()) or "no data"
        at = re.match(r"(?:data:|Problem in line )(\d+)\S* |", said)
        place, said = f"{path}:{at[1]}" if at[1] else path, repr(said[at.end() :])[1:-1][:100]
        raise UserError(f"{place}: not a PDB or mmCIF file: {said}") from error
    chains, rows = _select(path, model, wanted, is_cif), []
    for number, name in enumerate(chains, start=1):
        _add_rows(rows, number, _residues(path, name, chains[name]), altloc)
    letters, atoms, places, encoding, names = map(list, zip(*rows, strict=True))
    coords = np.full((len(rows), 4, 3), np.nan, dtype=np.float32)
    for at, name in ((at, name) for at, found in enumerate(atoms) for name in found):
        coords[at, BACKBONE.index(name)] = atoms[at][name].pos.tolist()  # NaN for mmCIF's ?
    mask = np.isfinite(coords).all((1, 2))
    if not mask.any():
        raise UserError(f"{path}: no residue has N, CA, C and O; a backbone needs all four")
    bonds = np.linalg.norm(coords[:, 0] - coords[:, 1], axis=-1)  # NaN where one is missing
    for at in np.flatnonzero((bonds < 0.5) | (bonds >= 2))[:1]:
        before, there, _ = raw.partition(b"%8.3f%8.3f%8.3f" % tuple(atoms[at]["CA"].pos))
        place = f"{path}:{len(before.splitlines())}" if there else path
        said = f"N and CA of {names[at]} are {bonds[at]:.2f} Angstrom apart, 1.46 is usual"
        raise UserError(f"{place}: {said}; correct the coordinates, or take the residue out")
    places, encoding = np.array([places, encoding])
    arrays = np.nan_to_num(coords), mask.astype(np.float32), places + 100 * (encoding - 1), encoding
    lengths = tuple(np.bincount(encoding)[1:].tolist())
    return Structure(*arrays, "".join(letters), tuple(chains), lengths, np.array(names) != "")


# --- files ---------------------------------------------------------------------------------------


def _from_pdb(path, raw):
    """The first model. Each atom is looked at before: gemmi takes xx.104 for 0."""
    raw = b"\n" + raw.partition(b"\nENDMDL")[0] + b"\n"
    for atom in re.finditer(UNUSUAL, raw):
        line = atom[0][1:].rstrip()
        right = [DECIMAL.fullmatch(line[start : start + 8]) for start in (30, 38, 46)]
        right += [NUMBER.fullmatch(line[22:26]), re.match(rb"[ -~]{54}", line)]
        if not all(right):
            found, number = line[22:54].decode(errors="replace"), raw.count(b"\n", 0, atom.end())
            said = f"columns 23-54 of this atom hold {found!r:.80}, not a residue number and three"
            raise UserError(f"{path}:{number}: {said} coordinates; correct or complete the line")
    count = raw.count(b"\nATOM") + raw.count(b"\nHETA")
    if not count:
        raise UserError(f"{path}: no atoms; give a PDB or mmCIF file of a protein")
    model = gemmi.read_pdb_string(raw[1:])[0]
    if (found := model.count_atom_sites()) != count:
        raise UserError(f"{path}: {found} of {count} atoms were read; put END behind the last")
    return model


def _from_cif(path, raw):
    """The first model of the first block that has atoms."""
    tags = [f"_atom_site.Cartn_{axis}" for axis in "xyz"]
    block = next((b for b in gemmi.cif.read_string(raw) if len(b.find_values(tags[0]))), None)
    if block is None:
        raise UserError(f"{path}: no _atom_site with atoms; give the mmCIF file of a structure")
    for word in itertools.chain.from_iterable(map(block.find_values, tags)):
        with contextlib.suppress(ValueError):
            if word in "?." or (word.isascii() and "_" not in word and abs(float(word)) < 1e6):
                continue
        raise UserError(f"{path}: the coordinate {word!r:.40} is not a number; correct it")
    return gemmi.make_structure_from_block(block)[0]


# --- chains and residues -------------------------------------------------------------------------


def _select(path, model, wanted, is_cif):
    """{chain: its amino acids in file order}, in the order wanted."""
    found, labels, chosen = {}, {}, {}
    for chain in model:  # the parts of a chain that is not in one piece come one by one
        for residue in filter(_in_protein, chain):
            found.setdefault(chain.name, []).append(residue)
            labels.setdefault(residue.subchain, []).append(residue)
    present = ", ".join(jsonl.shown(name) or "' '" for name in sorted(found)) or "none"
    known = labels | found if is_cif else found  # mmCIF's own names where no author's is the same
    for name in map(str.strip, wanted or sorted(found)):
        if name not in known:
            raise UserError(f"{path}: no protein chain {name!r:.40}; it has {present:.200}")
        if {*map(id, known[name])} & {id(r) for others in chosen.values() for r in others}:
            raise UserError(f"{path}: chain {name!r:.40} is asked for twice; name it once")
        chosen[name] = known[name]
    if not chosen:
        raise UserError(f"{path}: no protein chain; give a file with one")
    return chosen


def _in_protein(residue):
    """Whether it is an amino acid of the chain: not a ligand, nor an ion of the name CA."""
    kind = residue.entity_type  # Unknown if there is no TER and no _entity
    ligand = kind not in (KIND.Polymer, KIND.Unknown)
    if residue.het_flag == "H" and (ligand or (kind == KIND.Unknown and residue.name in STANDARD)):
        return False
    known = residue.name in LETTERS or gemmi.find_tabulated_residue(residue.name).is_amino_acid()
    return known or {*BACKBONE} <= {atom.name for atom in residue}


def _residues(path, name, residues):
    """[(residue, its backbone atoms), ...] of each number: several are conformers of two names."""
    seen = set()
    for key, group in itertools.groupby(residues, key=lambda residue: str(residue.seqid)):
        group = [(r, [atom for atom in r if atom.name in BACKBONE]) for r in group]
        names = [(atom.name, atom.altloc) for _, atoms in group for atom in atoms]
        if key in seen or len(set(names)) < len(names) or key.startswith("?"):
            said = f"residue {jsonl.shown(key)} of chain {name!r:.40} is there twice or has no"
            raise UserError(f"{path}: {said} number; name each chain, number, conformer apart")
        seen.add(key)
        yield group


def _add_rows(rows, chain, residues, altloc):
    """Append (letter, atoms, place, chain, name) of one chain; those of a gap have no name."""
    before, place = np.inf, rows[-1][2] if rows else -1
    for group in residues:
        number = group[0][0].seqid.num
        jump = max(1, number - before)  # the first, an insertion and a step back are the next one
        if jump <= MAX_JUMP:
            rows += [("X", {}, place + step, chain, "") for step in range(1, jump)]
        before, place = number, place + jump
        residue, atoms = _conformer(group, altloc)
        name = jsonl.shown(f"{residue.name} {residue.seqid}")
        rows.append((LETTERS.get(residue.name, "X"), atoms, place, chain, name))


def _conformer(group, altloc):
    """(residue, {name: atom}) of one conformer; atoms without a letter belong to all of them."""
    plain = len(group) == 1 and not any(atom.has_altloc() for atom in group[0][1])
    if plain or altloc == "first":
        return group[0][0], {a.name: a for _, atoms in reversed(group) for a in atoms[::-1]}
    best, most = None, -1
    for residue, atoms in group:
        several = {atom.name for atom in atoms if atom.has_altloc()}
        own = [atom for atom in atoms if atom.name in several] or atoms
        shared = {atom.name: atom for atom in atoms if not atom.has_altloc()}
        for letter in dict.fromkeys(atom.altloc for atom in own) or " ":
            mine = {atom.name: atom for atom in own if atom.altloc == letter}
            # 0 if it is NaN; rounded, so that equal ones are equal, and the first is taken
            mean = round(sum(max(0, a.occ) for a in mine.values()) / max(1, len(mine)), 3)
            if mean > most:
                best, most = (residue, shared | mine), mean
    return best


# --- cache ---------------------------------------------------------------------------------------


def _cached(file):
    """What _kept() has put there; None if there is nothing, or nothing whole."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            found = Structure(**{name: arrays[name] for name in Structure._fields})
    except DAMAGED:
        return None
    chains, lengths = tuple(found.chains.tolist()), tuple(found.lengths.tolist())
    return found._replace(sequence=str(found.sequence), chains=chains, lengths=lengths)


def _kept(file, found):
    """What was found, written if that is possible: else the next run reads the structure again."""
    temporary = file.with_name(f".tmp-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as stream:
                np.savez(stream, **found._asdict())
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
    return found
