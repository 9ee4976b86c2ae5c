"""Design sequences for backbones with ProteinMPNN, or score given ones.

    python -m dpo_inv.inference --model_path outputs/dpo_ddp/best_model.pt --pdb_file 5L33.pdb
    python -m dpo_inv.inference --model_path best_model.pt --pdb_list list.txt --design_chains B \\
        --fixed_chains A --num_samples 10 --temperature 0.1
    python -m dpo_inv.inference --model_path best_model.pt --pdb_file 5L33.pdb --fasta mine.fasta

Writes STEM_sequences.json and .fasta, the native sequence first, STEM_probabilities.csv and
all_results.json into output_dir.
"""

import dpo_inv.inference_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(
        settings.read
    )  # --help and mistakes in the settings end here, before torch is imported

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_utils import UserError, distributed
from ddp_utils.checkpoints import check_writable
from ddp_utils.data import Record, content, read_json, resolve, shown, write_text
from ddp_utils.sampler import seed_of
from dpo_inv import batches, mpnn, pairs, structure, weights


class Task(NamedTuple):
    """One structure, what may change in it, and the sequences of --fasta."""

    file: Path
    structure: structure.Structure
    designed: np.ndarray  # [L] rows whose letters are drawn
    bias: torch.Tensor  # [L, 21] added to the log-probs, -inf where a letter is not drawn
    names: list[str]
    letters: torch.Tensor | None  # [S, L]


def read_task(file, config) -> Task:
    """Read and check a structure against the flags; UserError with what to mend."""
    chains = pairs.chains_of(vars(config), "--design_chains")
    backbone = structure.read(file, *chains, config.altloc, config.homo_oligomer)
    designed = pairs.mutable(vars(config), backbone, str(file)) & (backbone.mask > 0)
    names, letters = read_fasta(config.fasta, backbone) if config.fasta else ([], None)
    bias = bias_of(backbone, config)
    for row in np.flatnonzero(designed & bias.isinf().all(-1).numpy()):
        raise UserError(f"{file}: residue {backbone.labels[row]}: every letter is omitted")
    return Task(file, backbone, designed, bias, names, letters)


def bias_of(backbone, config) -> torch.Tensor:
    """Return what is added to the log-probs before a letter is drawn, [L, 21]."""
    bias = torch.zeros(len(backbone.sequence), len(mpnn.ALPHABET))
    add_bias(bias, mpnn.ALPHABET[mpnn.UNKNOWN], "X")
    add_bias(bias, config.omit_AA, "--omit_AA")
    add_bias(bias, dict(text.partition(":")[::2] for text in config.bias_AA), "--bias_AA")
    rows = {}
    for row, label in enumerate(backbone.labels):
        rows[backbone.chains[backbone.chain_encoding[row] - 1] + label] = row
    for path in filter(None, (config.omit_AA_per_residue, config.bias_AA_per_residue)):
        for residue, given in read_json(path).items():
            if residue not in rows:
                raise UserError(f"{path}: no residue {residue!r:.40}; {[*rows][0]} is the first")
            add_bias(bias[rows[residue]], given, f"{path}: {residue}")
    return bias


def add_bias(bias, given, location):
    """Add {letter: number} to columns of [..., 21], or -inf for each letter of a text."""
    try:
        for letter in given:
            value = float(given[letter]) if isinstance(given, dict) else -math.inf
            if math.isnan(value) or value == math.inf:
                raise ValueError(f"{letter} has {value}")
            bias[..., [*mpnn.ALPHABET].index(letter)] += value
    except (TypeError, ValueError) as error:
        raise UserError(f"{location}: {given!r:.60}: {error}; give A:0.5, or omit CM") from error


def read_fasta(path, backbone):
    """Return names, and sequences [S, L]: designed chains, then the context's own letters."""
    head, *entries = f"\n{content(path)}".split("\n>")
    if head.strip() or not entries:
        raise UserError(f"{path}:1: no FASTA file; give lines with > and letters below them")
    names = []
    sequences = []
    for entry in entries:
        name, _, text = entry.partition("\n")
        record = Record(f"{path}: {shown(name.strip())}", {"sequence": text})
        names.append(name.strip())
        sequences.append(pairs.letters_of(record, "sequence", backbone))
    return names, torch.from_numpy(np.stack(sequences))


def orders(task, samples, seed):
    """Return random decoding orders [S, T, C], what is fixed first."""
    generator = np.random.default_rng(seed_of(seed, task.file.name))
    tied = task.structure.tied
    draws = generator.random((samples, len(tied)))
    return torch.from_numpy(tied[np.argsort(draws + task.designed[tied].any(-1))])


@torch.no_grad()
def sample(model, task, config, device):
    """Return S sequences [S, L], num_samples at each temperature, and log-probs [S, L, 21]."""
    temperatures = torch.tensor(config.temperature, device=device)
    temperatures = temperatures.repeat_interleave(config.num_samples)[:, None]  # [S, 1]
    order = orders(task, len(temperatures), config.seed).to(device)
    native = torch.from_numpy(mpnn.encode(task.structure.sequence)).to(device)  # [L]
    designed = torch.from_numpy(task.designed).to(device)
    bias = task.bias.to(device)
    shares = torch.from_numpy(task.structure.shares)[:, None].to(device)  # [L, 1]
    generator = torch.Generator().manual_seed(seed_of(config.seed, task.file.name, "letters"))

    def choose(residues, log_probs):  # [S, C], [S, C, 21]
        drawn = designed[residues]  # [S, C]
        # copies have one letter: by the mean of their log-probs, as in the official code
        scores = torch.where(drawn[..., None], log_probs + bias[residues], 0)
        scores = (scores * shares[residues]).sum(1)  # [S, 21]
        draw = torch.rand(scores.shape, generator=generator).clamp_min(1e-30).to(device)
        # Gumbel: a draw of the softmax
        letters = (scores / temperatures - torch.log(-torch.log(draw))).argmax(-1)  # [S]
        return torch.where(drawn, letters[:, None], native[residues])

    encoded = model.encode(*batches.tensors(task.structure, device))
    return model.sample(encoded, order, choose)


@torch.no_grad()
def score(model, task, config, device, count=1):
    """Return the task's letters [S, L] and log-probs [S, L, 21], of 1 or S decoding orders."""
    letters = task.letters.to(device)
    order = orders(task, count, config.seed).to(device)
    encoded = model.encode(*batches.tensors(task.structure, device))
    return letters, model.decode(encoded, letters, order)


def summary(task, letters, log_probs) -> list[dict]:
    """Return text, score (mean negative log-prob), perplexity and recovery of each sequence."""
    native = mpnn.encode(task.structure.sequence)
    log_probs = log_probs.gather(-1, letters[..., None])[..., 0]  # [S, L]
    entries = []
    for sequence, scores in zip(letters.cpu().numpy(), log_probs.cpu().numpy(), strict=True):
        known = task.designed & (sequence != mpnn.UNKNOWN)
        nll = float(-scores[known].mean())
        entry = {"sequence": text_of(task, sequence), "score": nll, "perplexity": math.exp(nll)}
        known &= native != mpnn.UNKNOWN
        entry["recovery"] = float((sequence == native)[known].sum() / max(1, known.sum()))
        entries.append(entry)
    return entries


def text_of(task, letters) -> str:
    """Return the designed chains, `/` between them, without the rows of numbering gaps."""
    rows = task.structure.observed & task.structure.in_design
    ends = np.flatnonzero(np.diff(task.structure.chain_encoding[rows])) + 1
    chains = np.split(np.array([*mpnn.ALPHABET])[letters[rows]], ends)
    return "/".join("".join(chain) for chain in chains)


def stem_of(file) -> str:
    """Return 1abc of 1abc.pdb and 1abc.cif.gz, 1abc.A of 1abc.A.pdb."""
    return re.sub(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", "", file.name, flags=re.I)


def write(task, config, native, entries, log_probs):
    """Write STEM_sequences.json and .fasta and the table of probabilities; return the JSON."""
    stem = Path(config.output_dir, stem_of(task.file))
    chains = task.structure.chains
    designed = len(config.design_chains) or 1
    data = {
        "pdb_file": str(task.file),
        "chain_id": chains[0],
        "design_chains": chains[:designed],
        "fixed_chains": chains[designed:],
        "sequences": [entry["sequence"] for entry in entries],
        "num_samples": len(entries),
        "temperature": config.temperature,
        "seed": config.seed,
        "native": native,
        "details": entries,
    }
    write_text(f"{stem}_sequences.json", json.dumps(data, indent=2) + "\n")
    text = ""
    for entry in (native, *entries):
        drawn = f"T={entry['temperature']:g} " if "temperature" in entry else ""
        text += f">{entry['name']} score={entry['score']:.4f} {drawn}seed={config.seed} "
        text += f"recovery={entry['recovery']:.4f}\n{entry['sequence']}\n"
    write_text(f"{stem}_sequences.fasta", text)
    table = "chain,residue,native," + ",".join(mpnn.ALPHABET[: mpnn.UNKNOWN]) + "\n"
    means = log_probs.exp().mean(0)[:, : mpnn.UNKNOWN].tolist()  # [L, 20]
    for row in np.flatnonzero(task.designed):
        chain = chains[task.structure.chain_encoding[row] - 1]
        table += f"{chain},{task.structure.labels[row]},{task.structure.sequence[row]},"
        table += ",".join(f"{value:.6f}" for value in means[row]) + "\n"
    write_text(f"{stem}_probabilities.csv", table)
    return data


def main(argv=None) -> int:
    config = settings.read(argv)
    path = weights.path_of(config.model_path, config.base_model_dir)
    text = content(config.pdb_list) if config.pdb_list else config.pdb_file
    paths = [line.strip() for line in text.split("\n") if line.strip()]
    tasks = [read_task(resolve(path), config) for path in paths]
    stems = [stem_of(task.file) for task in tasks]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UserError(f"{config.pdb_list}: {stem} is there twice; rename one of its files")
    folder = Path(config.output_dir)
    check_writable("--output_dir", folder)
    device = distributed.choose_device(distributed.World(), config.backend).device
    model = mpnn.ProteinMPNN.load(path).to(device)
    if config.check:
        for task in tasks:
            chains = " ".join(task.structure.chains)
            print(f"{task.file.name}: chains {chains}, {task.designed.sum()} residues are designed")
        return 0

    results = []
    for task in tasks:
        native = torch.from_numpy(mpnn.encode(task.structure.sequence))[None]  # [1, L]
        [native] = summary(task, *score(model, task._replace(letters=native), config, device))
        native["name"] = f"{stem_of(task.file)}_native"
        letters, log_probs = (score if config.fasta else sample)(model, task, config, device)
        entries = summary(task, letters, log_probs)
        for number, entry in enumerate(entries):
            if config.fasta:
                entry["name"] = task.names[number]
            else:
                entry["name"] = f"{stem_of(task.file)}_sample_{number}"
                entry["temperature"] = config.temperature[number // config.num_samples]
        results.append(write(task, config, native, entries, log_probs))
        line = f"{task.file.name}: {len(entries)} sequences"
        for name in ("perplexity", "recovery"):
            line += f", {name} {np.mean([entry[name] for entry in entries]):.3f}"
        print(line)
    write_text(folder / "all_results.json", json.dumps(results, indent=2) + "\n")
    print(f"-> {config.output_dir}/")
    return 0


if __name__ == "__main__":
    distributed.run(main)
