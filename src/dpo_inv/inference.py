"""Design sequences for backbones with ProteinMPNN, or score given ones.

    python -m dpo_inv.inference --model_path outputs/dpo_ddp/best_model.pt --pdb_file 5L33.pdb
    python -m dpo_inv.inference --model_path best_model.pt --pdb_list list.txt --design_chains B \\
        --fixed_chains A --num_samples 10 --temperature 0.1
    python -m dpo_inv.inference --model_path best_model.pt --pdb_file 5L33.pdb --fasta mine.fasta

Writes STEM_sequences.json, STEM_sequences.fasta and all_results.json into output_dir.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from ddp_utils import UserError, cli, distributed, jsonl
from ddp_utils.runs import checkpoint, preemption
from ddp_utils.sampler import seed_of
from dpo_inv import mpnn, pairs, structure, weights

UNKNOWN = mpnn.ALPHABET.index("X")


@dataclasses.dataclass
class Config:
    # model and structures
    model_path: str = "v_48_020"  # a .pt file, or the name of an official model
    base_model_dir: str = "data/weights"  # where named models are
    pdb_file: str = ""  # one structure
    pdb_list: str = ""  # or a text file with one path per line
    chain_id: str = ""  # the designed chain; empty: the first protein chain
    design_chains: tuple[str, ...] = ()  # or several
    fixed_chains: tuple[str, ...] = ()  # context with its native sequence
    mutable_positions: tuple[int, ...] = ()  # from 0 in the designed sequence; empty: all
    mutable_ranges: tuple[str, ...] = ()  # 6-17 29-39, both ends included

    # what to do with them
    num_samples: int = 10  # sequences for each structure
    temperature: float = 0.1  # of the letters; the lower, the surer
    fasta: str = ""  # score these sequences instead of sampling
    output_dir: str = "outputs/inference"  # FASTA and JSON

    # run
    # by the device; --no_cuda is --backend gloo
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"
    seed: int = 0  # decoding orders and letters
    check: bool = False  # read and check everything, write nothing
    debug: bool = False  # tracebacks for user errors, too


class Task(NamedTuple):
    """One structure and what may change in it."""

    file: Path
    structure: structure.Structure
    designed: np.ndarray  # [L] rows whose letters are drawn
    count: int  # rows of the designed chains


def read_task(file, config) -> Task:
    """Read and check a structure against the flags; UserError with what to mend."""
    design = config.design_chains or ((config.chain_id,) if config.chain_id else ())
    if config.chain_id and config.design_chains:
        raise UserError("--chain_id and --design_chains: give one of them")
    found = structure.read(file, (*design, *config.fixed_chains) or None)
    if not design:
        if config.fixed_chains:
            raise UserError("--fixed_chains: name the design_chains, too")
        found = structure.read(file, found.chains[:1])
    count = sum(found.lengths[: len(design) or 1])
    designed = np.arange(len(found.sequence)) < count
    said = config.mutable_positions, config.mutable_ranges
    may_differ = pairs.mutable(*said, count, str(file))
    if may_differ is not None:
        designed[:count] &= may_differ
    return Task(file, found, designed & (found.mask > 0), count)


def orders(task, samples, seed):
    """Random decoding orders [S, L], what is fixed first."""
    draws = np.random.default_rng(seed_of(seed, task.file.name)).random(
        (samples, len(task.designed))
    )
    return torch.from_numpy(np.argsort(draws + task.designed, axis=-1))


@torch.no_grad()
def sample(model, task, config, device):
    """num_samples sequences [S, L] and the log-probs of their letters [S, L]."""
    order = orders(task, config.num_samples, config.seed).to(device)
    native = torch.from_numpy(pairs.encode(task.structure.sequence)).to(device)  # [L]
    designed = torch.from_numpy(task.designed).to(device)
    generator = torch.Generator().manual_seed(seed_of(config.seed, task.file.name, "letters"))

    def choose(residues, log_probs):  # [1, S], [1, S, 21]
        scores = log_probs / config.temperature
        scores[..., UNKNOWN] = -math.inf
        draw = torch.rand(scores.shape, generator=generator).clamp_min(1e-30).to(device)
        letters = (scores - torch.log(-torch.log(draw))).argmax(-1)  # Gumbel: a draw of the softmax
        return torch.where(designed[residues], letters, native[residues])

    encoded = model.encode(*tensors(task, device))
    letters, log_probs = model.sample(encoded, order[None], choose)
    return letters[0], log_probs[0].gather(-1, letters[0][..., None]).squeeze(-1)


@torch.no_grad()
def score(model, task, letters, config, device):
    """Log-probs [S, L] of given sequences [S, L], each under the same random order."""
    order = orders(task, 1, config.seed).to(device)
    encoded = model.encode(*tensors(task, device))
    log_probs = model.decode(encoded, letters[None], order)[0]  # [S, L, 21]
    return log_probs.gather(-1, letters[..., None]).squeeze(-1)


def tensors(task, device):
    """coords, mask, residue_idx, chain_encoding as a batch of one."""
    return [torch.from_numpy(array)[None].to(device) for array in task.structure[:4]]


def summary(task, letters, log_probs) -> list[dict]:
    """One entry per sequence: text, score (mean negative log-prob), perplexity, recovery."""
    native, rows = pairs.encode(task.structure.sequence), task.designed
    found = []
    for sequence, scores in zip(letters.cpu().numpy(), log_probs.cpu().numpy(), strict=True):
        known = rows & (sequence != UNKNOWN)
        nll = float(-scores[known].mean()) if known.any() else math.nan
        same = known & (native != UNKNOWN)
        text = text_of(task, sequence)
        right = float((sequence == native)[same].mean()) if same.any() else None
        found.append({"sequence": text, "score": nll, "perplexity": math.exp(nll)})
        found[-1]["recovery"] = right
    return found


def text_of(task, letters) -> str:
    """The designed chains, `/` between them, without the rows of numbering gaps."""
    parts, start = [], 0
    for length in task.structure.lengths:
        rows = [row for row in range(start, start + length) if task.structure.observed[row]]
        if start < task.count:
            parts.append("".join(mpnn.ALPHABET[letters[row]] for row in rows))
        start += length
    return "/".join(parts)


def read_fasta(path, task):
    """Names, and sequences of the designed chains [S, L], the context's letters behind them."""
    names, texts = [], []
    for line in jsonl.content(path).decode().splitlines():
        if line.startswith(">"):
            names.append(line[1:].strip())
            texts.append("")
        elif line.strip() and not names:
            raise UserError(f"{path}:1: no FASTA file; its first line begins with >")
        elif names:
            texts[-1] += line.strip()
    native = pairs.encode(task.structure.sequence)
    chains = sum(np.cumsum(task.structure.lengths) <= task.count)
    found = []
    for name, text in zip(names, texts, strict=True):
        record = jsonl.Record(f"{path}: {jsonl.shown(name)}", {"sequence": text})
        letters = pairs.letters_of(record, "sequence", task.structure, chains)
        if (letters == UNKNOWN).all():
            raise UserError(f"{record.where}: no letter is known; give at least one")
        found.append(np.concatenate([letters, native[task.count :]]))
    if not found:
        raise UserError(f"{path}: no sequences; a FASTA file has > lines and letters below them")
    return names, torch.from_numpy(np.stack(found))


def mean_of(entries, name) -> str:
    """Of those that are known, for the eye."""
    known = [entry[name] for entry in entries if entry[name] is not None]
    return f"{np.mean(known):.3f}" if known else "-"


def stem_of(file) -> str:
    """1abc of 1abc.pdb and 1abc.cif.gz, 1abc.A of 1abc.A.pdb."""
    return re.sub(r"\.(pdb|ent|cif|mmcif)(\.gz)?$", "", file.name, flags=re.I)


def write(task, config, entries):
    """STEM_sequences.json and .fasta."""
    folder, stem = Path(config.output_dir), stem_of(task.file)
    folder.mkdir(parents=True, exist_ok=True)
    design = len(text_of(task, pairs.encode(task.structure.sequence)).split("/"))
    chains = list(task.structure.chains)
    data = {
        "pdb_file": str(task.file),
        "chain_id": chains[0],
        "design_chains": chains[:design],
        "fixed_chains": chains[design:],
        "sequences": [entry["sequence"] for entry in entries],
        "num_samples": len(entries),
        "temperature": config.temperature,
        "seed": config.seed,
        "details": entries,
    }
    (folder / f"{stem}_sequences.json").write_text(json.dumps(data, indent=2) + "\n")
    with open(folder / f"{stem}_sequences.fasta", "w") as file:
        for number, entry in enumerate(entries):
            right = "" if entry["recovery"] is None else f" recovery={entry['recovery']:.4f}"
            drawn = "" if config.fasta else f"T={config.temperature:g} "
            about = f"score={entry['score']:.4f} {drawn}seed={config.seed}{right}"
            name = entry.get("name", f"{stem}_sample_{number}")
            file.write(f">{name} {about}\n{entry['sequence']}\n")
    return data


def main(argv=None) -> int:
    config = cli.parse(Config, argv, aliases={"--no_cuda": "--backend=gloo"})
    cli.check_ranges(config, num_samples=cli.ABOVE_0, temperature=cli.ABOVE_0)
    if bool(config.pdb_file) == bool(config.pdb_list):
        raise UserError("--pdb_file: give one structure, or --pdb_list with one path per line")
    path = weights.path_of(config.model_path, config.base_model_dir)
    structures = [config.pdb_file]
    if config.pdb_list:
        lines = jsonl.content(config.pdb_list).decode().splitlines()
        structures = [line.strip() for line in lines if line.strip()]
    tasks = [read_task(jsonl.resolve(file), config) for file in structures]
    stems = [stem_of(task.file) for task in tasks]
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise UserError(f"{config.pdb_list}: {twice[0]} is there twice; rename one of its files")
    given = [read_fasta(config.fasta, task) if config.fasta else (None, None) for task in tasks]
    checkpoint.check_place("--output_dir", Path(config.output_dir))
    written = {Path(config.output_dir, f"{stem}_sequences.fasta").resolve() for stem in stems}
    if config.fasta and jsonl.resolve(config.fasta).resolve() in written:
        raise UserError(f"--fasta: {config.fasta} would be overwritten; give another --output_dir")
    device = distributed.choose_device(distributed.World(), config.backend).device
    model = mpnn.ProteinMPNN.load(path).to(device)
    if config.check:
        for task in tasks:
            chains, count = " ".join(task.structure.chains), task.designed.sum()
            print(f"{task.file.name}: chains {chains}, {count} residues are designed")
        return 0

    results = []
    for task, (names, letters) in zip(tasks, given, strict=True):
        if letters is None:
            letters, scores = sample(model, task, config, device)
        else:
            scores = score(model, task, letters.to(device), config, device)
        entries = summary(task, letters, scores)
        for entry, name in zip(entries, names or [], strict=False):
            entry["name"] = name
        results.append(write(task, config, entries))
        line = f"{task.file.name}: {len(entries)} sequences, perplexity "
        print(f"{line}{mean_of(entries, 'perplexity')}, recovery {mean_of(entries, 'recovery')}")
    Path(config.output_dir, "all_results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(f"-> {config.output_dir}/")
    return 0


if __name__ == "__main__":
    preemption.run(main)
