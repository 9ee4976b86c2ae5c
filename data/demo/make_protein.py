"""Make the protein demo: ideal helical bundles, preference pairs on them, and a small ProteinMPNN.

    python data/demo/make_protein.py            # into data/: about a minute on one CPU core
    python data/demo/make_protein.py FOLDER     # the same files elsewhere

Everything is computed here; nothing is downloaded. A bundle is two to four ideal alpha helices
around the z axis, neighbours antiparallel, without the loops between them. The rule of the demo:
a residue whose CB is nearer to that axis than its CA is core and wants a hydrophobic letter, any
other wants a polar one. In the native sequences all residues follow it. The model is trained on
bundles of its own with SHARE_OF_NOISE of the letters drawn at random, so that it half knows the
rule; each preference pair differs in a few residues, in which the preferred sequence follows the
rule and the unpreferred one breaks it. No training pair is on a validation bundle.

L residues, S sequences.
"""

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import torch

from dpo_inv import mpnn, structure

SEED = 0
CORE, SURFACE = "AILVFM", "EKRQDST"
SHARE_OF_NOISE = 0.6  # of the letters that the model is trained on
STEPS, SEQUENCES, LEARNING_RATE = 1000, 16, 5e-3
NAMES = {letter: name for name, letter in structure.STANDARD.items()}  # K -> LYS
# The chain of each helix; a dash: three numbers are skipped between any two of the chain.
BUNDLES = ["AA", "AAA", "AAAA", "ABB", "A-A", "AAA", "AABB", "A-A-A-A", "AAA", "AAA", "ABB", "A-A"]
PAIRS = {"real": (range(9), 400), "val": (range(9, 12), 60)}  # on which bundles, and how many

# --- backbones -----------------------------------------------------------------------------------


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def extend(a, b, c, bond, angle, torsion):
    """The next atom of a chain [..., 3]: its bond to c, its angle with b-c, its torsion about it.

    Natural extension of reference frames; Angstrom and degrees.
    """
    angle, torsion = math.radians(angle), math.radians(torsion)
    x = unit(c - b)
    z = unit(np.cross(b - a, x))
    turned = math.cos(torsion) * np.cross(z, x) + math.sin(torsion) * z
    return c + bond * (math.sin(angle) * turned - math.cos(angle) * x)


def helix(length, phi=-57, psi=-47, omega=180):
    """N, CA, C, O of an ideal alpha helix along the z axis, centred: [length, 4, 3]."""
    chain = [np.array([-0.7, 1.3, 0.0]), np.array([0.0, 0.0, 0.0]), np.array([1.458, 0.0, 0.0])]
    for _ in range(length + 1):
        chain.append(extend(*chain[-3:], 1.525, 111.0, phi))  # C
        chain.append(extend(*chain[-3:], 1.329, 116.6, psi))  # N of the next residue
        chain.append(extend(*chain[-3:], 1.458, 121.7, omega))  # CA of the next residue
    n, alpha, c = np.array(chain[1 : 3 * length + 1]).reshape(length, 3, 3).swapaxes(0, 1)
    oxygen = extend(n, alpha, c, 1.231, 120.4, psi + 180)
    # the change of direction at each CA points at the axis
    bends = alpha[:-2] - 2 * alpha[1:-1] + alpha[2:]  # [L-2, 3]
    turn = (bends[0] @ bends[1]) / (bends[0] @ bends[0])
    centre = (alpha[1:-1] + bends / (2 - 2 * turn)).mean(0)
    x, z = unit(bends[0]), unit(np.cross(bends[0], bends[1]))
    return (np.stack([n, alpha, c, oxygen], 1) - centre) @ np.stack([x, np.cross(z, x), z]).T


def bundle(rng, helices):
    """So many helices in a ring about the z axis: a list of [length, 4, 3]."""
    length = rng.randint(*{2: (16, 20), 3: (13, 20), 4: (13, 17)}[helices])
    radius = rng.uniform(9.2, 9.8) / (2 * math.sin(math.pi / helices))
    bundled = []
    for number in range(helices):
        turn = rng.uniform(0, 2 * math.pi)
        place = 2 * math.pi * number / helices
        cosine = math.cos(turn)
        sine = math.sin(turn)
        spin = np.array([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]])
        atoms = helix(length - rng.randint(0, 1)) @ spin
        atoms *= [1, -1, -1] if number % 2 else [1, 1, 1]  # upside down: antiparallel
        shift = [radius * math.cos(place), radius * math.sin(place), rng.uniform(-1, 1)]
        bundled.append((atoms + shift).round(3) + 0.0)  # as in a PDB file; no -0.000
    return bundled


def is_core(coords):
    """The rule: [L, 4, 3] -> [L] whether CB, as it would be, is nearer to the z axis than CA."""
    n, alpha, c = coords[:, 0], coords[:, 1], coords[:, 2]
    beta = extend(n, c, alpha, 1.53, 110.5, 122.6)
    return np.hypot(*beta[:, :2].T) < np.hypot(*alpha[:, :2].T)


def letter(rng, core, noise=0.0):
    """One that follows the rule, or, as often as `noise` says, any."""
    return rng.choice(mpnn.ALPHABET[:20] if rng.random() < noise else CORE if core else SURFACE)


def pdb(number, rng):
    """The text of a PDB file, with a native sequence that follows the rule."""
    chains = BUNDLES[number].replace("-", "")
    skipped = 3 * ("-" in BUNDLES[number])
    lines = [f"REMARK   1 BUNDLE {number:02d}: COMPUTED, AROUND THE Z AXIS"]
    serial = 0
    last = 0
    for chain, then, atoms in zip(chains, chains[1:] + " ", bundle(rng, len(chains)), strict=True):
        for place, residue in enumerate(atoms, start=last + 1):
            name = NAMES[letter(rng, is_core(residue[None])[0])]
            for atom, xyz in zip(structure.BACKBONE, residue, strict=True):
                serial += 1
                at = "".join(f"{value:8.3f}" for value in xyz) + "  1.00  0.00"
                who = f"{serial:5d}  {atom:<3} {name} {chain}{place:4d}"
                lines.append(f"ATOM  {who}    {at}          {atom[0]:>2}  ")
        last = place + skipped if chain == then else 0
        if chain != then:
            serial += 1
            lines.append(f"TER   {serial:5d}      {name} {chain}{place:4d}")
    return "\n".join([*lines, "END"]) + "\n"


def make_structures(folder):
    (folder / "input/structures").mkdir(parents=True, exist_ok=True)
    for number in range(len(BUNDLES)):
        path = folder / f"input/structures/bundle_{number:02d}.pdb"
        path.write_text(pdb(number, random.Random(SEED + number)))


# --- pairs ---------------------------------------------------------------------------------------


def make_pair(rng, folder, number):
    """A variant of the native sequence twice, differing in 3 to 8 residues."""
    item = {"pdb_file": f"structures/bundle_{number:02d}.pdb"}
    in_complex = "B" in BUNDLES[number]
    backbone = structure.read(folder / "input" / item["pdb_file"], "AB"[in_complex])
    core = is_core(backbone.coords[backbone.observed])
    shared = [
        letter(rng, c, SHARE_OF_NOISE) if rng.random() < 0.3 else native
        for c, native in zip(core, backbone.sequence.replace("X", ""), strict=True)
    ]
    places = rng.sample(range(len(core)), rng.randint(3, 8))
    for side in ("preferred", "unpreferred"):
        for place in places:
            shared[place] = letter(rng, core[place] == (side == "preferred"))
        item[f"{side}_seq"] = "".join(shared)
    item |= {"design_chains": ["B"], "fixed_chains": ["A"]} if in_complex else {"chain_id": "A"}
    item["description"] = f"{len(places)} residues by the rule, and against it"
    if "-" not in BUNDLES[number] and rng.random() < 0.2:
        places = {*places, *rng.sample(range(len(core)), len(core) // 2)}
        item["mutable_positions"] = sorted(places)
    return item


def make_pairs(folder):
    for name, (numbers, count) in PAIRS.items():
        rng = random.Random(f"{SEED} {name}")
        items = [make_pair(rng, folder, numbers[row % len(numbers)]) for row in range(count)]
        rows = ",\n".join(json.dumps(item) for item in items)
        (folder / f"input/test_data_{name}.json").write_text(f"[\n{rows}\n]\n")


# --- model ---------------------------------------------------------------------------------------


def train(model, rng):
    """Each step: a new bundle, and sequences on it that follow the rule with noise."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        coords = np.concatenate(bundle(rng, rng.randint(2, 4)))
        core = is_core(coords)
        places = torch.arange(len(core))  # in one chain, without gaps
        inputs = torch.from_numpy(coords).float(), torch.ones(places.shape)
        encoded = model.encode(*inputs, places, torch.ones_like(places))
        texts = [[letter(rng, c, SHARE_OF_NOISE) for c in core] for _ in range(SEQUENCES)]
        letters = torch.from_numpy(np.stack([mpnn.encode(text) for text in texts]))  # [S, L]
        orders = torch.rand(letters.shape).argsort(-1)
        log_probs = model.decode(encoded, letters, orders)
        loss = -log_probs.gather(-1, letters[..., None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main(folder: Path = Path(__file__).parents[1]):
    make_structures(folder)
    make_pairs(folder)
    torch.set_num_threads(1)  # so that sums are always taken in the same order
    torch.manual_seed(SEED)
    model = mpnn.ProteinMPNN(hidden=32, encoder_layers=1, decoder_layers=1, neighbors=16)
    train(model, random.Random(SEED))
    model.save(folder / "demo/protein_model.pt")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
