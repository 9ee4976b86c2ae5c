"""Design sequences for backbones with ProteinMPNN, or score given ones.

    python -m dpo_inv.inference --model_path outputs/dpo_ddp/best_model.pt --pdb_file 5L33.pdb
    python -m dpo_inv.inference --model_path best_model.pt --pdb_list list.txt --design_chains B \\
        --fixed_chains A --num_samples 10 --temperature 0.1
    python -m dpo_inv.inference --model_path best_model.pt --pdb_file 5L33.pdb --fasta mine.fasta

Writes STEM_sequences.json, STEM_sequences.fasta and all_results.json into output_dir.
"""

import ddp_utils.runs.preemption as preemption  # before torch, whose import takes seconds

import dpo_inv.inference_config as settings

if __name__ == "__main__":  # --help, or a mistake in the settings, ends here
    preemption.read_early(settings.read)

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_utils import UserError, distributed, files, jsonl
from ddp_utils.runs import checkpoint
from ddp_utils.sampler import seed_of
from dpo_inv import batches, mpnn, pairs, structure, weights


class Task(NamedTuple):
    """One structure, what may change in it, and the sequences of --fasta."""

    file: Path
    structure: structure.Structure
    designed: np.ndarray  # [L] rows whose letters are drawn
    names: list[str]
    letters: torch.Tensor | None  # [S, L]


def read_task(file, config) -> Task:
    """Read and check a structure against the flags; UserError with what to mend."""
    backbone = structure.read(
        file, *pairs.chains_of(vars(config), "--design_chains"), altloc=config.altloc
    )
    designed = pairs.mutable(vars(config), backbone, str(file)) & (backbone.mask > 0)
    names, letters = read_fasta(config.fasta, backbone) if config.fasta else ([], None)
    return Task(file, backbone, designed, names, letters)


def read_fasta(path, backbone):
    """Return names, and sequences [S, L]: designed chains, then the context's own letters."""
    head, *entries = f"\n{jsonl.content(path).decode()}".split("\n>")
    if head.strip() or not entries:
        raise UserError(f"{path}:1: no FASTA file; give lines with > and letters below them")
    names = []
    sequences = []
    for entry in entries:
        name, _, text = entry.partition("\n")
        record = jsonl.Record(f"{path}: {jsonl.shown(name.strip())}", {"sequence": text})
        names.append(name.strip())
        sequences.append(pairs.letters_of(record, "sequence", backbone))
    return names, torch.from_numpy(np.stack(sequences))


def orders(task, samples, seed):
    """Return random decoding orders [S, L], what is fixed first."""
    generator = np.random.default_rng(seed_of(seed, task.file.name))
    draws = generator.random((samples, len(task.designed)))
    return torch.from_numpy(np.argsort(draws + task.designed, axis=-1))


@torch.no_grad()
def sample(model, task, config, device):
    """Return num_samples sequences [S, L] and the log-probs of their letters [S, L]."""
    order = orders(task, config.num_samples, config.seed).to(device)
    native = torch.from_numpy(mpnn.encode(task.structure.sequence)).to(device)  # [L]
    designed = torch.from_numpy(task.designed).to(device)
    generator = torch.Generator().manual_seed(seed_of(config.seed, task.file.name, "letters"))

    def choose(residues, log_probs):  # [S], [S, 21]
        scores = log_probs / config.temperature
        scores[..., mpnn.UNKNOWN] = -math.inf
        draw = torch.rand(scores.shape, generator=generator).clamp_min(1e-30).to(device)
        letters = (scores - torch.log(-torch.log(draw))).argmax(-1)  # Gumbel: a draw of the softmax
        return torch.where(designed[residues], letters, native[residues])

    encoded = model.encode(*batches.tensors(task.structure, device))
    letters, log_probs = model.sample(encoded, order, choose)
    return letters, log_probs.gather(-1, letters[..., None]).squeeze(-1)


@torch.no_grad()
def score(model, task, config, device):
    """Return the sequences of --fasta [S, L] and their log-probs, each under the same order."""
    letters = task.letters.to(device)
    order = orders(task, 1, config.seed).to(device)
    encoded = model.encode(*batches.tensors(task.structure, device))
    log_probs = model.decode(encoded, letters, order)  # [S, L, 21]
    return letters, log_probs.gather(-1, letters[..., None]).squeeze(-1)


def summary(task, letters, log_probs) -> list[dict]:
    """Return text, score (mean negative log-prob), perplexity and recovery of each sequence."""
    native = mpnn.encode(task.structure.sequence)
    entries = []
    for sequence, scores in zip(letters.cpu().numpy(), log_probs.cpu().numpy(), strict=True):
        known = task.designed & (sequence != mpnn.UNKNOWN)
        nll = float(-scores[known].mean())
        entry = {"sequence": text_of(task, sequence), "score": nll, "perplexity": math.exp(nll)}
        known &= native != mpnn.UNKNOWN
        entry["recovery"] = float((sequence == native)[known].sum() / max(1, known.sum()))
        entries.append(entry)
    for entry, name in zip(entries, task.names, strict=False):
        entry["name"] = name
    return entries


def text_of(task, letters) -> str:
    """Return the designed chains, `/` between them, without the rows of numbering gaps."""
    rows = task.structure.observed & task.structure.in_design
    texts = []
    for chain in np.unique(task.structure.chain_encoding[rows]):
        of_chain = letters[rows & (task.structure.chain_encoding == chain)]
        texts.append("".join(mpnn.ALPHABET[letter] for letter in of_chain))
    return "/".join(texts)


def stem_of(file) -> str:
    """Return 1abc of 1abc.pdb and 1abc.cif.gz, 1abc.A of 1abc.A.pdb."""
    return re.sub(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", "", file.name, flags=re.I)


def write(task, config, entries):
    """Write STEM_sequences.json and .fasta; return what the former holds."""
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
        "details": entries,
    }
    files.write_text(f"{stem}_sequences.json", json.dumps(data, indent=2) + "\n")
    drawn = "" if config.fasta else f"T={config.temperature:g} "
    text = ""
    for number, entry in enumerate(entries):
        name = entry.get("name", f"{stem.name}_sample_{number}")
        text += f">{name} score={entry['score']:.4f} {drawn}seed={config.seed} "
        text += f"recovery={entry['recovery']:.4f}\n{entry['sequence']}\n"
    files.write_text(f"{stem}_sequences.fasta", text)
    return data


def main(argv=None) -> int:
    config = settings.read(argv)
    path = weights.path_of(config.model_path, config.base_model_dir)
    paths = [config.pdb_file]
    if config.pdb_list:
        paths = jsonl.content(config.pdb_list).decode().split("\n")
    tasks = [read_task(jsonl.resolve(file.strip()), config) for file in paths if file.strip()]
    stems = [stem_of(task.file) for task in tasks]
    for stem in stems:
        if stems.count(stem) > 1:
            raise UserError(f"{config.pdb_list}: {stem} is there twice; rename one of its files")
    folder = Path(config.output_dir)
    checkpoint.check_place("--output_dir", folder)
    device = distributed.choose_device(distributed.World(), config.backend).device
    model = mpnn.ProteinMPNN.load(path).to(device)
    if config.check:
        for task in tasks:
            chains = " ".join(task.structure.chains)
            print(f"{task.file.name}: chains {chains}, {task.designed.sum()} residues are designed")
        return 0

    results = []
    for task in tasks:
        letters, log_probs = (score if config.fasta else sample)(model, task, config, device)
        entries = summary(task, letters, log_probs)
        results.append(write(task, config, entries))
        line = f"{task.file.name}: {len(entries)} sequences"
        for name in ("perplexity", "recovery"):
            line += f", {name} {np.mean([entry[name] for entry in entries]):.3f}"
        print(line)
    files.write_text(folder / "all_results.json", json.dumps(results, indent=2) + "\n")
    print(f"-> {config.output_dir}/")
    return 0


if __name__ == "__main__":
    preemption.run(main)
