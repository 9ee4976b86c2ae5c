"""Design sequences for backbones with ProteinMPNN, or score given ones.

    python -m dpo_inv.inference --model_path outputs/dpo_ddp/best_model.pt --pdb_file 5L33.pdb
    python -m dpo_inv.inference --model_path best_model.pt --pdb_list list.txt --design_chains B \\
        --fixed_chains A --num_samples 10 --temperature 0.1
    python -m dpo_inv.inference --model_path best_model.pt --pdb_file 5L33.pdb --fasta mine.fasta

Writes STEM_sequences.json and .fasta, with the native sequence first, STEM_probabilities.csv and
all_results.json to output_dir.
"""

import dpo_inv.inference_config as settings
from ddp_utils import cli

if __name__ == "__main__":
    cli.check_flags(settings.read)  # --help and mistakes end here, before torch is imported

import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_utils import UserError, distributed
from ddp_utils.checkpoints import check_writable
from ddp_utils.data import Record, content, read_json, resolve, shown, write_json, write_text
from ddp_utils.sampler import seed_of
from dpo_inv import batches, mpnn, pairs, structure, weights
from dpo_inv.inference_config import Config
from dpo_inv.mpnn import ALPHABET, UNKNOWN, ProteinMPNN
from dpo_inv.structure import Structure

# --- settings and structures ---------------------------------------------------------------------


class Task(NamedTuple):
    """One structure, the positions to design, and the sequences of --fasta."""

    file: Path
    structure: Structure
    designed: np.ndarray  # [L] bool
    bias: Tensor  # [L, 21] added to the log-probs; -inf for letters that are never drawn
    names: list[str] = []
    letters: Tensor | None = None  # [S, L]


def read_tasks(config: Config) -> list[Task]:
    """Return a task for each structure; raise UserError for a mistake in a flag or a file."""
    text = content(config.pdb_list) if config.pdb_list else config.pdb_file
    files = [resolve(line.strip()) for line in text.split("\n") if line.strip()]
    tasks = [read_task(file, config) for file in files]
    stems = [stem_of(file) for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UserError(f"{config.pdb_list}: {stem} occurs twice; rename one of the files")
    return tasks


def read_task(file: Path, config: Config) -> Task:
    """Return the task for one structure."""
    design, fixed = pairs.chains_of(vars(config), "--design_chains")
    backbone = structure.read(file, design, fixed, config.altloc, config.homo_oligomer)
    designed = pairs.mutable(vars(config), backbone, str(file)) & (backbone.mask > 0)
    names, letters = read_fasta(config.fasta, backbone) if config.fasta else ([], None)
    bias = read_bias(backbone, config)
    for position in np.flatnonzero(designed & bias.isinf().all(-1).numpy()):
        label = backbone.labels[position]
        raise UserError(f"{file}: residue {label}: every letter is omitted; allow at least one")
    return Task(file, backbone, designed, bias, names, letters)


def read_bias(backbone: Structure, config: Config) -> Tensor:
    """Return the biases and omissions that the flags ask for, [L, 21]."""
    bias = torch.zeros(len(backbone.sequence), len(ALPHABET))
    add_bias(bias, ALPHABET[UNKNOWN], "X")
    add_bias(bias, config.omit_AA, "--omit_AA")
    pairs_of_text = [text.partition(":")[::2] for text in config.bias_AA]
    add_bias(bias, dict(pairs_of_text), "--bias_AA")
    positions = {}  # A12 -> its position
    for position, label in enumerate(backbone.labels):
        chain = backbone.chains[backbone.chain_encoding[position] - 1]
        positions[chain + label] = position
    for path in filter(None, (config.omit_AA_per_residue, config.bias_AA_per_residue)):
        for residue, change in read_json(path).items():
            if residue not in positions:
                first = next(iter(positions))
                raise UserError(f"{path}: no residue {residue!r:.40}; the first is {first}")
            add_bias(bias[positions[residue]], change, f"{path}: {residue}")
    return bias


def add_bias(bias: Tensor, change: Any, location: str) -> None:
    """Add {letter: number} to columns of [..., 21], or -inf for each letter of a string."""
    try:
        for letter in change:
            value = float(change[letter]) if isinstance(change, dict) else -math.inf
            if math.isnan(value) or value == math.inf:
                raise ValueError(f"{letter} has {value}")
            bias[..., [*ALPHABET].index(letter)] += value
    except (TypeError, ValueError) as error:
        problem = f"{change!r:.60}: {error}"
        raise UserError(f"{location}: {problem} (expected biases A:0.5, or letters CM)") from error


def read_fasta(path: str, backbone: Structure) -> tuple[list[str], Tensor]:
    """Return the names and the sequences [S, L] of a FASTA file: designed chains and context."""
    head, *entries = f"\n{content(path)}".split("\n>")
    if head.strip() or not entries:
        raise UserError(f"{path}:1: not a FASTA file (expected > and a name, then letters)")
    names = []
    sequences = []
    for entry in entries:
        name, _, text = entry.partition("\n")
        record = Record(f"{path}: {shown(name.strip())}", {"sequence": text})
        names.append(name.strip())
        sequences.append(pairs.parse_sequence(record, "sequence", backbone))
    return names, torch.from_numpy(np.stack(sequences))


# --- sampling and scoring ------------------------------------------------------------------------


def random_orders(task: Task, count: int, seed: int) -> Tensor:
    """Return random decoding orders [count, T, C]: fixed positions first."""
    generator = np.random.default_rng(seed_of(seed, task.file.name))
    tied = task.structure.tied
    draws = generator.random((count, len(tied)))
    return torch.from_numpy(tied[np.argsort(draws + task.designed[tied].any(-1))])


@torch.no_grad()
def sample(
    model: ProteinMPNN, task: Task, temperatures: Tensor, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return S designed sequences [S, L] and their log-probs [S, L, 21]. temperatures: [S]."""
    temperatures = temperatures[:, None].to(device)  # [S, 1]
    order = random_orders(task, len(temperatures), seed).to(device)
    native = torch.from_numpy(mpnn.encode(task.structure.sequence)).to(device)  # [L]
    designed = torch.from_numpy(task.designed).to(device)
    bias = task.bias.to(device)
    tied_weights = torch.from_numpy(task.structure.tied_weights)[:, None].to(device)  # [L, 1]
    generator = torch.Generator().manual_seed(seed_of(seed, task.file.name, "letters"))

    def choose(residues: Tensor, log_probs: Tensor) -> Tensor:  # [S, C], [S, C, 21] -> [S, C]
        is_designed = designed[residues]
        # tied residues get one letter, from the mean of their log-probs, as in the official code
        scores = torch.where(is_designed[..., None], log_probs + bias[residues], 0)
        scores = (scores * tied_weights[residues]).sum(1)  # [S, 21]
        # Gumbel noise: the maximum is a draw from the softmax
        draws = torch.rand(scores.shape, generator=generator).clamp_min(1e-30).to(device)
        letters = (scores / temperatures - torch.log(-torch.log(draws))).argmax(-1)  # [S]
        return torch.where(is_designed, letters[:, None], native[residues])

    encoded = model.encode(*batches.structure_tensors(task.structure, device))
    return model.sample(encoded, order, choose)


@torch.no_grad()
def score(
    model: ProteinMPNN,
    task: Task,
    letters: Tensor,
    seed: int,
    device: torch.device | str,
    orders: int = 1,
) -> Tensor:
    """Return the log-probs [S, L, 21] of sequences [S, L], in one or in S random orders."""
    order = random_orders(task, orders, seed).to(device)
    encoded = model.encode(*batches.structure_tensors(task.structure, device))
    return model.decode(encoded, letters.to(device), order)


def summarize(task: Task, letters: Tensor, log_probs: Tensor) -> list[dict[str, Any]]:
    """Return the text, score (NLL per residue), perplexity and recovery of each sequence."""
    native = mpnn.encode(task.structure.sequence)
    picked = log_probs.cpu().gather(-1, letters.cpu()[..., None])[..., 0]  # [S, L]
    entries = []
    for sequence, scores in zip(letters.cpu().numpy(), picked.numpy(), strict=True):
        known = task.designed & (sequence != UNKNOWN)
        nll = float(-scores[known].mean())
        comparable = known & (native != UNKNOWN)
        recovered = (sequence == native)[comparable].sum()
        entry = {
            "sequence": text_of(task, sequence),
            "score": nll,
            "perplexity": math.exp(nll),
            "recovery": float(recovered / max(1, comparable.sum())),
        }
        entries.append(entry)
    return entries


# --- files ---------------------------------------------------------------------------------------


def text_of(task: Task, letters: np.ndarray) -> str:
    """Return the designed chains, separated by `/`, without the positions of numbering gaps."""
    positions = task.structure.observed & task.structure.in_design
    ends = np.flatnonzero(np.diff(task.structure.chain_encoding[positions])) + 1
    chains = np.split(np.array([*ALPHABET])[letters[positions]], ends)
    return "/".join("".join(chain) for chain in chains)


def stem_of(file: Path) -> str:
    """Return 1abc for 1abc.pdb and 1abc.cif.gz, 1abc.A for 1abc.A.pdb."""
    return re.sub(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", "", file.name, flags=re.I)


def write(
    task: Task, config: Config, native: dict, entries: list[dict], log_probs: Tensor
) -> dict[str, Any]:
    """Write the JSON, FASTA and CSV files of a structure; return the content of the JSON file."""
    stem = Path(config.output_dir, stem_of(task.file))
    chains = task.structure.chains
    designed = len(config.design_chains) or 1
    result = {
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
    write_json(f"{stem}_sequences.json", result)
    fasta = ""
    for entry in (native, *entries):
        temperature = f"T={entry['temperature']:g} " if "temperature" in entry else ""
        fasta += f">{entry['name']} score={entry['score']:.4f} {temperature}seed={config.seed} "
        fasta += f"recovery={entry['recovery']:.4f}\n{entry['sequence']}\n"
    write_text(f"{stem}_sequences.fasta", fasta)
    table = "chain,residue,native," + ",".join(ALPHABET[:UNKNOWN]) + "\n"
    means = log_probs.exp().mean(0)[:, :UNKNOWN].tolist()  # [L, 20]
    for position in np.flatnonzero(task.designed):
        chain = chains[task.structure.chain_encoding[position] - 1]
        letter = task.structure.sequence[position]
        probabilities = ",".join(f"{value:.6f}" for value in means[position])
        table += f"{chain},{task.structure.labels[position]},{letter},{probabilities}\n"
    write_text(f"{stem}_probabilities.csv", table)
    return result


# --- main ----------------------------------------------------------------------------------------


def run_task(model: ProteinMPNN, task: Task, config: Config, device: torch.device) -> dict:
    """Design or score the sequences of one structure, write its files, and print one line."""
    stem = stem_of(task.file)
    native_letters = torch.from_numpy(mpnn.encode(task.structure.sequence))[None]  # [1, L]
    log_probs = score(model, task, native_letters, config.seed, device)
    native = summarize(task, native_letters, log_probs)[0]
    native["name"] = f"{stem}_native"
    if task.letters is not None:
        log_probs = score(model, task, task.letters, config.seed, device)
        entries = summarize(task, task.letters, log_probs)
        for name, entry in zip(task.names, entries, strict=True):
            entry["name"] = name
    else:
        temperatures = torch.tensor(config.temperature).repeat_interleave(config.num_samples)
        letters, log_probs = sample(model, task, temperatures, config.seed, device)
        entries = summarize(task, letters, log_probs)
        for number, entry in enumerate(entries):
            entry["name"] = f"{stem}_sample_{number}"
            entry["temperature"] = config.temperature[number // config.num_samples]
    line = f"{task.file.name}: {len(entries)} sequences"
    for name in ("perplexity", "recovery"):
        line += f", {name} {np.mean([entry[name] for entry in entries]):.3f}"
    result = write(task, config, native, entries, log_probs)
    print(line)
    return result


def main(argv: list[str] | None = None) -> int:
    config = settings.read(sys.argv[1:] if argv is None else argv)
    path = weights.path_of(config.model_path, config.base_model_dir)
    tasks = read_tasks(config)
    folder = Path(config.output_dir)
    check_writable("--output_dir", folder)
    device = distributed.choose_device(distributed.World(), config.backend).device
    model = ProteinMPNN.load(path).to(device)
    if config.check:
        for task in tasks:
            chains = " ".join(task.structure.chains)
            print(f"{task.file.name}: chains {chains}, {task.designed.sum()} residues are designed")
        return 0
    results = [run_task(model, task, config, device) for task in tasks]
    write_json(folder / "all_results.json", results)
    print(f"-> {config.output_dir}/")
    return 0


if __name__ == "__main__":
    distributed.run(main)
