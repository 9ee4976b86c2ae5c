"""Make the protein demo: ideal helical bundles, preference pairs on them, and a small ProteinMPNN.

    python data/demo/make_protein.py            # into data/; takes a minute on one CPU core
    python data/demo/make_protein.py FOLDER     # the same files elsewhere

Everything is computed here; nothing is downloaded. A bundle is two to four ideal alpha helices
around the z axis, with antiparallel neighbors and without the loops between them.

The rule of the demo: a residue whose CB is closer to the axis than its CA is a core residue and
should be hydrophobic; any other residue is a surface residue and should be polar. Native sequences
follow the rule. The model is trained on other bundles with a fraction NOISE of random letters, and
for STEPS steps only, so that it ranks some of the pairs wrongly. The sequences of a preference pair
differ in a few residues, in which the preferred sequence follows the rule and the unpreferred one
breaks it. Training and validation pairs have different bundles.

L residues, S sequences. Coordinates are in Angstrom, angles in degrees.
"""

import json
import math
import sys
from pathlib import Path
from random import Random

import numpy as np
import torch

from dpo_inv import mpnn, structure

SEED = 0
CORE, SURFACE = "AILVFM", "EKRQDST"
NOISE = 0.6  # fraction of random letters in the training of the model
STEPS, SEQUENCES, LEARNING_RATE = 40, 16, 5e-3
NAMES = {letter: name for name, letter in structure.STANDARD.items()}  # K -> LYS
# the chain of each helix; a dash: three residue numbers are skipped between helices of a chain
BUNDLES = ["AA", "AAA", "AAAA", "ABB", "A-A", "AAA", "AABB", "A-A-A-A", "AAA", "AAA", "ABB", "A-A"]
PAIRS = {"real": (range(9), 400), "val": (range(9, 12), 60)}  # bundles and number of pairs

Array = np.ndarray

# --- backbones -----------------------------------------------------------------------------------


def unit(vectors: Array) -> Array:
    """Return vectors [..., 3] divided by their lengths."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def extend(a: Array, b: Array, c: Array, bond: float, angle: float, torsion: float) -> Array:
    """Return the next atom of a chain of atoms, [..., 3] (natural extension of reference frames).

    a, b, c: the three atoms before it, [..., 3]; bond: its distance to c; angle: at c; torsion:
    about the bond from b to c.
    """
    angle, torsion = math.radians(angle), math.radians(torsion)
    x = unit(c - b)
    z = unit(np.cross(b - a, x))
    sideways = math.cos(torsion) * np.cross(z, x) + math.sin(torsion) * z
    return c + bond * (math.sin(angle) * sideways - math.cos(angle) * x)


def helix(length: int, phi: float = -57, psi: float = -47, omega: float = 180) -> Array:
    """Return N, CA, C, O of an ideal alpha helix along the z axis, centered: [length, 4, 3]."""
    chain = [np.array([-0.7, 1.3, 0.0]), np.array([0.0, 0.0, 0.0]), np.array([1.458, 0.0, 0.0])]
    for _ in range(length + 1):
        chain.append(extend(*chain[-3:], 1.525, 111.0, phi))  # C
        chain.append(extend(*chain[-3:], 1.329, 116.6, psi))  # N of the next residue
        chain.append(extend(*chain[-3:], 1.458, 121.7, omega))  # CA of the next residue
    n, alpha, c = np.array(chain[1 : 3 * length + 1]).reshape(length, 3, 3).swapaxes(0, 1)
    oxygen = extend(n, alpha, c, 1.231, 120.4, psi + 180)
    bends = alpha[:-2] - 2 * alpha[1:-1] + alpha[2:]  # [length - 2, 3], each points at the axis
    cosine = (bends[0] @ bends[1]) / (bends[0] @ bends[0])
    center = (alpha[1:-1] + bends / (2 - 2 * cosine)).mean(0)
    x, z = unit(bends[0]), unit(np.cross(bends[0], bends[1]))
    return (np.stack([n, alpha, c, oxygen], 1) - center) @ np.stack([x, np.cross(z, x), z]).T


def bundle(rng: Random, helices: int) -> list[Array]:
    """Return helices in a ring around the z axis, [length, 4, 3] each."""
    length = rng.randint(*{2: (16, 20), 3: (13, 20), 4: (13, 17)}[helices])
    radius = rng.uniform(9.2, 9.8) / (2 * math.sin(math.pi / helices))
    bundled = []
    for number in range(helices):
        spin = rng.uniform(0, 2 * math.pi)  # about the axis of the helix
        cosine, sine = math.cos(spin), math.sin(spin)
        rotation = np.array([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]])
        atoms = helix(length - rng.randint(0, 1)) @ rotation
        atoms *= [1, -1, -1] if number % 2 else [1, 1, 1]  # every second one is upside down
        angle = 2 * math.pi * number / helices
        place = [radius * math.cos(angle), radius * math.sin(angle), rng.uniform(-1, 1)]
        bundled.append((atoms + place).round(3) + 0.0)  # as in a PDB file; no -0.000
    return bundled


def is_core(coords: Array) -> Array:
    """Return whether each residue is a core residue, [L]; coords: [L, 4, 3]."""
    n, alpha, c, _ = coords.swapaxes(0, 1)
    beta = extend(n, c, alpha, 1.53, 110.5, 122.6)
    return np.hypot(*beta[:, :2].T) < np.hypot(*alpha[:, :2].T)


def draw_letter(rng: Random, is_core: bool, noise: float = 0.0) -> str:
    """Return a letter that follows the rule, or with probability `noise` any letter."""
    letters = CORE if is_core else SURFACE
    return rng.choice(mpnn.ALPHABET[:20] if rng.random() < noise else letters)


def pdb(number: int, rng: Random) -> str:
    """Return a bundle with a native sequence as the text of a PDB file."""
    chains = BUNDLES[number].replace("-", "")
    skipped = 3 if "-" in BUNDLES[number] else 0
    lines = [f"REMARK   1 BUNDLE {number:02d}: COMPUTED, AROUND THE Z AXIS"]
    serial, last = 0, 0  # numbers of an atom and of a residue
    helices = bundle(rng, len(chains))
    for chain, next_chain, atoms in zip(chains, chains[1:] + " ", helices, strict=True):
        for residue_number, residue in enumerate(atoms, start=last + 1):
            name = NAMES[draw_letter(rng, is_core(residue[None])[0])]
            for atom, xyz in zip(structure.BACKBONE, residue, strict=True):
                serial += 1
                identity = f"{serial:5d}  {atom:<3} {name} {chain}{residue_number:4d}"
                place = "".join(f"{value:8.3f}" for value in xyz)
                lines.append(f"ATOM  {identity}    {place}  1.00  0.00          {atom[0]:>2}  ")
        last = residue_number + skipped
        if chain != next_chain:
            serial += 1
            lines.append(f"TER   {serial:5d}      {name} {chain}{residue_number:4d}")
            last = 0
    return "\n".join([*lines, "END"]) + "\n"


def make_structures(folder: Path) -> None:
    """Write the PDB files."""
    structures = folder / "input/structures"
    structures.mkdir(parents=True, exist_ok=True)
    for number in range(len(BUNDLES)):
        text = pdb(number, Random(SEED + number))
        (structures / f"bundle_{number:02d}.pdb").write_text(text)


# --- pairs ---------------------------------------------------------------------------------------


def make_pair(rng: Random, folder: Path, number: int) -> dict:
    """Return a pair: variants of the native sequence that differ in 3 to 8 residues."""
    item = {"pdb_file": f"structures/bundle_{number:02d}.pdb"}
    is_complex = "B" in BUNDLES[number]
    backbone = structure.read(folder / "input" / item["pdb_file"], "B" if is_complex else "A")
    core = is_core(backbone.coords[backbone.observed])
    sequence = [*backbone.sequence.replace("X", "")]
    for place in range(len(core)):
        if rng.random() < 0.3:
            sequence[place] = draw_letter(rng, core[place], NOISE)
    places = rng.sample(range(len(core)), rng.randint(3, 8))
    for side in ("preferred", "unpreferred"):
        for place in places:
            sequence[place] = draw_letter(rng, core[place] == (side == "preferred"))
        item[f"{side}_seq"] = "".join(sequence)
    item |= {"design_chains": ["B"], "fixed_chains": ["A"]} if is_complex else {"chain_id": "A"}
    item["description"] = f"{len(places)} residues by the rule, and against it"
    if "-" not in BUNDLES[number] and rng.random() < 0.2:
        others = rng.sample(range(len(core)), len(core) // 2)
        item["mutable_positions"] = sorted(place + 1 for place in {*places, *others})
    return item


def make_pairs(folder: Path) -> None:
    """Write the files of training and validation pairs."""
    for name, (numbers, count) in PAIRS.items():
        rng = Random(f"{SEED} {name}")
        items = [make_pair(rng, folder, numbers[row % len(numbers)]) for row in range(count)]
        rows = ",\n".join(json.dumps(item) for item in items)
        (folder / f"input/test_data_{name}.json").write_text(f"[\n{rows}\n]\n")


# --- model ---------------------------------------------------------------------------------------


def train(model: mpnn.ProteinMPNN, rng: Random) -> None:
    """Train on a new bundle in each step, with sequences that follow the rule with noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        coords = np.concatenate(bundle(rng, rng.randint(2, 4)))
        core = is_core(coords)
        numbers = torch.arange(len(core))  # one chain without gaps
        ones = torch.ones_like(numbers)
        encoded = model.encode(torch.from_numpy(coords).float(), ones, numbers, ones)
        texts = [[draw_letter(rng, x, NOISE) for x in core] for _ in range(SEQUENCES)]
        letters = torch.from_numpy(np.stack([mpnn.encode(text) for text in texts]))  # [S, L]
        log_probs = model.decode(encoded, letters, torch.rand(letters.shape).argsort(-1))
        (-log_probs.gather(-1, letters[..., None]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main(folder: Path = Path(__file__).parents[1]) -> None:
    make_structures(folder)
    make_pairs(folder)
    torch.set_num_threads(1)  # so that sums have the same order everywhere
    torch.manual_seed(SEED)
    model = mpnn.ProteinMPNN(hidden=32, layers=1, neighbors=16)
    train(model, Random(SEED))
    model.save(folder / "demo/protein_model.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
