"""Design sequences for backbones with ProteinMPNN, or score given ones.

    python -m dpo_inv.inference --model_path outputs/dpo_ddp/best_model.pt --pdb_file 5L33.pdb
    python -m dpo_inv.inference --model_path best_model.pt --pdb_list list.txt --design_chains B \\
        --fixed_chains A --num_samples 10 --temperature 0.1
    python -m dpo_inv.inference --model_path best_model.pt --pdb_file 5L33.pdb --fasta mine.fasta

Writes STEM_sequences.json and .fasta, with the native sequence first, and all_results.json to
output_dir; STEM_probabilities.csv with --probabilities.
"""

from ddp_utils import cli
from dpo_inv.config import DesignConfig, read_design_settings

if __name__ == "__main__":
    cli.check_flags(read_design_settings)  # --help and mistakes end here, before torch is imported

import itertools
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_utils import UserError, checkpoints, data, distributed
from ddp_utils.sampler import seed_of
from dpo_inv import batches, mpnn, pairs, structure, weights
from dpo_inv.mpnn import ALPHABET, UNKNOWN, ProteinMPNN
from dpo_inv.structure import Structure

# --- structures and sequences --------------------------------------------------------------------


class Task(NamedTuple):
    """One structure, the positions to design, and the sequences of --fasta."""

    stem: str  # the beginning of the names of its output files
    file: Path  # its name is the seed of orders and letters
    structure: Structure
    designed: np.ndarray  # [L] bool
    names: list[str] = []
    letters: Tensor | None = None  # [S, L]


def read_tasks(config: DesignConfig) -> list[Task]:
    """Return a task for each structure; raise UserError for a mistake in a file."""
    text = data.content(config.pdb_list) if config.pdb_list else config.pdb_file
    names = [*filter(None, map(str.strip, text.split("\n")))]
    if not names:
        raise UserError(
            f"{config.pdb_list}:1: no structure (expected the path of one in each line)"
        )
    tasks = [read_task(data.resolve(name), config) for name in names]
    for stem, count in Counter(task.stem for task in tasks).items():
        if count > 1:
            raise UserError(f"{config.pdb_list}: {stem} occurs twice; rename one of the files")
    return tasks


def read_task(file: Path, config: DesignConfig) -> Task:
    """Return the task for one structure."""
    backbone = structure.read(file, *pairs.chains_of(vars(config)), config.homo_oligomer)
    if backbone.note:
        print(f"warning: {backbone.note}")
    if backbone.unread:
        chains = " ".join(backbone.unread)
        print(f"{file.name}: not read: chains {chains}; --fixed_chains makes a chain context")
    tied = tie(config, backbone) if config.tied_positions else backbone.tied
    designed = pairs.mutable(vars(config), backbone, config.numbering, tied)
    designed &= backbone.mask > 0
    backbone = backbone._replace(tied=tied)
    # 1abc for 1abc.pdb and 1abc.cif.gz, 1abc.A for 1abc.A.pdb
    stem = re.sub(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", "", file.name, flags=re.I)
    sequences = read_fasta(config.fasta, backbone) if config.fasta else ()
    return Task(stem, file, backbone, designed, *sequences)


def tie(config: DesignConfig, backbone: Structure) -> np.ndarray:
    """Return the tied positions [T, C] of --tied_positions.

    Raises UserError for ranges of different lengths, or for a position in two groups.
    """
    groups: list[tuple[int, ...]] = []
    for text in config.tied_positions:
        where = f"--tied_positions: {text}"
        ranges = []
        for part in text.split("="):
            residues = pairs.positions_of(part, backbone, config.numbering, where)
            ranges.append([*itertools.chain(*residues.values())])
        if len({*map(len, ranges)}) > 1:
            raise UserError(f"{where}: its ranges must have the same number of residues")
        groups += zip(*ranges, strict=True)
    if len({*itertools.chain(*groups)}) < sum(map(len, groups)):
        raise UserError("--tied_positions: a residue is tied twice; name each residue once")
    return structure.tied_array(groups, len(backbone.mask))


def read_fasta(path: str, backbone: Structure) -> tuple[list[str], Tensor]:
    """Return the names and the sequences [S, L] of a FASTA file: designed chains and context."""
    head, *entries = f"\n{data.content(path)}".split("\n>")
    if head.strip() or not entries:
        raise UserError(f"{path}:1: not a FASTA file (expected > and a name, then letters)")
    names = []
    sequences = []
    for entry in entries:
        name, _, text = entry.partition("\n")
        names.append(name.strip())
        where = f"{path}: {data.shown(names[-1])}"
        sequences.append(pairs.parse_sequence(text, backbone, where))
    return names, torch.from_numpy(np.stack(sequences))


def native_letters(backbone: Structure) -> Tensor:
    """Return the structure's own sequence, [L]."""
    return torch.from_numpy(mpnn.encode(backbone.sequence))


# --- sampling and scoring ------------------------------------------------------------------------


def letter_bias(config: DesignConfig) -> Tensor:
    """Return what is added to the log-probs, [21]: -inf for letters that are never drawn.

    Raises UserError for a letter that is named twice.
    """
    bias = torch.zeros(len(ALPHABET))
    letters = [text[0] for text in config.bias_AA]
    for letter, text in zip(letters, config.bias_AA, strict=True):
        if letters.count(letter) > 1 or letter in config.omit_AA:
            raise UserError(f"--bias_AA: {letter} has two values, or is in --omit_AA, too; use one")
        bias[ALPHABET.index(letter)] = float(text[2:])
    bias[[ALPHABET.index(letter) for letter in config.omit_AA + "X"]] = -math.inf
    return bias


def random_orders(task: Task, count: int, seed: int) -> Tensor:
    """Return random decoding orders [count, T, C]: fixed positions first."""
    generator = np.random.default_rng(seed_of(seed, task.file.name))
    tied = task.structure.tied
    draws = generator.random((count, len(tied)))
    return torch.from_numpy(tied[np.argsort(draws + task.designed[tied].any(-1))])


@torch.no_grad()
def sample(
    model: ProteinMPNN, task: Task, temperatures: Tensor, config: DesignConfig
) -> tuple[Tensor, Tensor]:
    """Return S designed sequences [S, L] and their log-probs [S, L, 21]. temperatures: [S]."""
    device = temperatures.device
    order = random_orders(task, len(temperatures), config.seed).to(device)
    native = native_letters(task.structure).to(device)
    designed = torch.from_numpy(task.designed).to(device)
    bias = letter_bias(config).to(device)
    tied_weights = torch.from_numpy(task.structure.tied_weights)[:, None].to(device)  # [L, 1]
    generator = torch.Generator().manual_seed(seed_of(config.seed, task.file.name, "letters"))

    def choose(residues: Tensor, log_probs: Tensor) -> Tensor:  # [S, C], [S, C, 21] -> [S, C]
        is_designed = designed[residues]
        # tied residues get one letter, from the mean of their log-probs, as in the official code
        scores = torch.where(is_designed[..., None], log_probs + bias, 0)
        scores = (scores * tied_weights[residues]).sum(1)  # [S, 21]
        # Gumbel noise: the maximum is a draw from the softmax
        draws = torch.rand(scores.shape, generator=generator).clamp_min(1e-30).to(device)
        letters = (scores / temperatures[:, None] - torch.log(-torch.log(draws))).argmax(-1)  # [S]
        # a copy that lacks backbone atoms has the others' letter
        return torch.where(is_designed.any(-1, keepdim=True), letters[:, None], native[residues])

    encoded = model.encode(*batches.structure_tensors(task.structure, device))
    return model.sample(encoded, order, choose)


@torch.no_grad()
def score(model: ProteinMPNN, task: Task, letters: Tensor, orders: Tensor) -> Tensor:
    """Return the log-probs [S, L, 21] of sequences [S, L] in orders [1 or S, T, C]."""
    encoded = model.encode(*batches.structure_tensors(task.structure, letters.device))
    return model.decode(encoded, letters, orders)


@torch.no_grad()
def probabilities(model: ProteinMPNN, task: Task, kind: str, device: torch.device) -> Tensor:
    """Return log-probs [L, 21] of the letters at each designed position of the native sequence.

    kind: "conditional" on the letters at all other positions, or "unconditional". Tied positions do
    not see each other. Conditional log-probs of positions that are not designed are NaN.
    """
    letters = native_letters(task.structure)[None].to(device)
    tied = torch.from_numpy(task.structure.tied).to(device)  # [T, C]
    if kind == "unconditional":  # all are decoded at the same time
        return score(model, task, letters, tied.reshape(1, 1, -1))[0]
    log_probs = torch.full((letters.shape[1], len(ALPHABET)), torch.nan, device=device)
    encoded = model.encode(*batches.structure_tensors(task.structure, device))
    for number in np.flatnonzero(task.designed[task.structure.tied].any(-1)).tolist():
        order = tied.roll(len(tied) - 1 - number, 0)  # this group is the last one
        log_probs[tied[number]] = model.decode(encoded, letters, order[None])[0, tied[number]]
    return log_probs


def summarize(task: Task, names: list[str], letters: Tensor, log_probs: Tensor) -> list[dict]:
    """Return the name, text, score (NLL per residue), perplexity and recovery of each sequence.

    None: no designed residue has a known letter, or has one in the structure.
    """
    native = mpnn.encode(task.structure.sequence)
    picked = log_probs.gather(-1, letters[..., None])[..., 0].cpu().numpy()  # [S, L]
    entries = []
    for name, sequence, scores in zip(names, letters.cpu().numpy(), picked, strict=True):
        known = task.designed & (sequence != UNKNOWN)
        is_native = (sequence == native)[known & (native != UNKNOWN)]
        nll = float(-scores[known].mean()) if known.any() else None
        entry = {
            "name": name,
            "sequence": pairs.text_of(sequence, task.structure),
            "score": nll,
            "perplexity": None if nll is None else math.exp(nll),
            "recovery": float(is_native.mean()) if len(is_native) else None,
        }
        entries.append(entry)
    return entries


# --- files ---------------------------------------------------------------------------------------


def write(task: Task, config: DesignConfig, native: dict, entries: list[dict]) -> dict[str, Any]:
    """Write the JSON and FASTA files of a structure; return the content of the JSON file."""
    fasta = ""
    for entry in (native, *entries):
        columns = (
            ("score", entry["score"], ".4f"),
            ("T", entry.get("temperature"), "g"),
            ("seed", config.seed, "d"),
            ("recovery", entry["recovery"], ".4f"),
        )
        words = [f"{name}={value:{digits}}" for name, value, digits in columns if value is not None]
        fasta += f">{' '.join([entry['name'], *words])}\n{entry['sequence']}\n"
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
    stem = Path(config.output_dir, f"{task.stem}_sequences")
    data.write_text(f"{stem}.fasta", fasta)
    data.write_json(f"{stem}.json", result)
    return result


def write_probabilities(
    model: ProteinMPNN, task: Task, config: DesignConfig, device: torch.device
) -> None:
    """Write the probability of each letter at each designed residue to a CSV file."""
    per_position = probabilities(model, task, config.probabilities, device).exp().tolist()
    lines = [["residue", "native", *ALPHABET]]
    for position in np.flatnonzero(task.designed):
        chain = task.structure.chains[task.structure.chain_encoding[position] - 1]
        row = [f"{chain}{task.structure.labels[position]}", task.structure.sequence[position]]
        lines.append(row + [f"{value:.6f}" for value in per_position[position]])
    text = "".join(",".join(line) + "\n" for line in lines)
    data.write_text(Path(config.output_dir, f"{task.stem}_probabilities.csv"), text)


# --- main ----------------------------------------------------------------------------------------


def run_task(model: ProteinMPNN, task: Task, config: DesignConfig, device: torch.device) -> dict:
    """Design or score the sequences of one structure, write its files, and print one line."""
    order = random_orders(task, 1, config.seed).to(device)
    letters = native_letters(task.structure)[None].to(device)  # [1, L]
    log_probs = score(model, task, letters, order)
    [native] = summarize(task, [f"{task.stem}_native"], letters, log_probs)
    if task.letters is not None:
        letters = task.letters.to(device)
        entries = summarize(task, task.names, letters, score(model, task, letters, order))
    else:
        temperatures = np.repeat(config.temperature, config.num_samples).tolist()
        names = [f"{task.stem}_sample_{number}" for number in range(len(temperatures))]
        samples = sample(model, task, torch.tensor(temperatures, device=device), config)
        entries = summarize(task, names, *samples)
        for entry, temperature in zip(entries, temperatures, strict=True):
            entry["temperature"] = temperature
    if config.probabilities != "none":
        write_probabilities(model, task, config, device)
    result = write(task, config, native, entries)
    line = f"{task.file.name}: {len(entries)} sequences"
    for name in ("perplexity", "recovery"):
        values = [entry[name] for entry in entries if entry[name] is not None]
        line += f", {name} {np.mean(values):.3f}" if values else f", no {name}"
    print(line)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    config = read_design_settings(sys.argv[1:] if argv is None else argv)
    path = weights.path_of(config.model_path, config.base_model_dir)
    letter_bias(config)  # a mistake is an error before the structures are read
    tasks = read_tasks(config)
    folder = Path(config.output_dir)
    checkpoints.check_writable("--output_dir", folder)
    device = distributed.choose_device(distributed.World(), config.backend).device
    model = ProteinMPNN.load(path).to(device)
    if config.check:
        for task in tasks:
            chains = " ".join(task.structure.chains)
            print(f"{task.file.name}: chains {chains}, {task.designed.sum()} residues are designed")
        return 0
    results = [run_task(model, task, config, device) for task in tasks]
    data.write_json(folder / "all_results.json", results)
    print(f"-> {config.output_dir}/")
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
