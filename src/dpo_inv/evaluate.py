"""Compare a fine-tuned ProteinMPNN with its base on held-out pairs and measured stabilities.

    python -m dpo_inv.evaluate --model_path outputs/dpo_ddp/best_model.pt --data held_out.csv

Prints each measure before -> after, and the gain with its 95 % confidence interval over proteins.
The model before is the one that the training began with, which the .pt file names, unless
--base_model_name is another one. A model compared with itself gains exactly 0. Only the
preferences of each model itself count, not those relative to a reference.

    python -m dpo_inv.evaluate --model_path v_48_020 --mutants mutations.csv

writes the log-odds of each mutant and its wild type under one model; above 0, the model prefers the
mutant.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ddp_utils import UserError, checkpoints, cli, data, distributed, sampler
from ddp_utils.data import digest_of_files
from ddp_utils.distributed import World
from ddp_utils.terminal import Phase
from dpo_inv import batches, inference, mpnn, pairs, weights
from dpo_inv.config import DesignConfig, PairSettings
from dpo_inv.mpnn import ProteinMPNN
from dpo_inv.pairs import Pair

Natives = dict[str, list[float]]  # name -> number of each backbone
Measure = Callable[[int, np.ndarray], float]  # (model, indices of pairs) -> a number

DRAWS = 1000  # of the bootstrap
ORDERS = 4  # random orders in which a native sequence is scored
DESIGNS = 8  # sequences that are designed for each backbone
DESIGN_TEMPERATURE = 0.1
MIN_MUTANTS = 5  # with a ddG, for a rank correlation within a protein
LABELS = {  # measure -> its name on the terminal
    "own": "Preferred likelier than unpreferred",
    "spearman": "Spearman with stability, all mutants",
    "spearman_per_protein": "Spearman with stability, mean of proteins",
    "natives/nll": "Natives: negative log-likelihood",
    "natives/recovery": "Natives: recovery by designs",
    "natives/diversity": "Natives: diversity of designs",
}


@dataclass
class Config(PairSettings):
    # most used settings
    model_path: str = "outputs/dpo_ddp/best_model.pt"  # a .pt file, or an official name
    base_model_name: str = ""  # model to compare with; empty: the base model of its training
    data: str = "data/input/test_data_val.json"  # pairs, or mutations and ddG: docs/protein_data.md
    mutants: str = ""  # mutations to score instead, with or without ddG; writes a table
    output: str = ""  # a JSON file with the same numbers; with mutants, a CSV file (mutants.csv)

    # objective
    decoding_order: Literal["random", "mutated_last"] = "mutated_last"


# --- statistics ----------------------------------------------------------------------------------


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks [N] of numbers [N], from 1; equal numbers get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return the rank correlation of x [N] and y [N]; NaN if all of x or all of y are equal."""
    x = ranks(x)
    y = ranks(y)
    is_defined = len(x) > 0 and x.std() > 0 and y.std() > 0
    return float(np.corrcoef(x, y)[0, 1]) if is_defined else np.nan


def compare(rows: Sequence[Pair], before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return what two models prefer, and the gain of the second, from their log-probs [N, 2].

    own: fraction of pairs whose preferred sequence is the likelier one. spearman: rank correlation
    of a mutant's log-odds and its measured stability over all mutants; spearman_per_protein: mean
    over the proteins with at least MIN_MUTANTS. The bootstrap draws proteins, not pairs.
    """
    protein = np.array([pair.number for pair in rows])
    signs = np.array([pair.sign for pair in rows])
    stability = signs * np.array([pair.margin for pair in rows])  # [N], NaN if not measured
    is_measured = (signs != 0) & np.isfinite(stability)
    gaps = np.stack([before[:, 0] - before[:, 1], after[:, 0] - after[:, 1]])  # [2, N]

    def correlation(model: int, chosen: np.ndarray) -> float:
        return spearman(signs[chosen] * gaps[model, chosen], stability[chosen])

    of_protein = [np.flatnonzero(protein == number) for number in np.unique(protein)]
    measured = [indices[is_measured[indices]] for indices in of_protein]
    values = gain("own", lambda model, chosen: (gaps[model, chosen] > 0).mean(), of_protein)
    values |= gain("spearman", correlation, measured)
    large = [indices for indices in measured if len(indices) >= MIN_MUTANTS]
    within = np.array([[correlation(model, indices) for indices in large] for model in (0, 1)])
    within = within[:, np.isfinite(within).all(0)]  # [2, proteins]
    return values | gain_of_mean("spearman_per_protein", within)


def gain_of_mean(name: str, numbers: np.ndarray) -> dict[str, float]:
    """Return the gain of the mean over proteins, see `gain`; numbers: [2, proteins]."""
    proteins = [*np.arange(numbers.shape[1])[:, None]]
    return gain(name, lambda model, chosen: numbers[model, chosen].mean(), proteins)


def gain(name: str, measure: Measure, groups: list[np.ndarray]) -> dict[str, float]:
    """Return a measure of both models, its gain, and the bootstrap interval of the gain.

    measure(model, indices): model 0 is the one before. groups: indices of pairs; the bootstrap
    draws groups with replacement. Returns {} if the measure is not defined.
    """
    if not groups:
        return {}
    indices = np.concatenate(groups)
    before, after = float(measure(0, indices)), float(measure(1, indices))
    if not np.isfinite(after - before):
        return {}
    values = {f"{name}/before": before, f"{name}/after": after, f"{name}/gain": after - before}
    generator = np.random.default_rng(0)
    gains = []
    for _ in range(DRAWS if len(groups) > 1 else 0):
        drawn = generator.integers(len(groups), size=len(groups))
        indices = np.concatenate([groups[index] for index in drawn])
        gains.append(measure(1, indices) - measure(0, indices))
    if gains:
        low, high = np.nanquantile(gains, (0.025, 0.975))
        values |= {f"{name}/gain_low": float(low), f"{name}/gain_high": float(high)}
    return values


# --- natives and designs -------------------------------------------------------------------------


@torch.no_grad()
def natives(
    model: ProteinMPNN, rows: Sequence[Pair], seed: int, world: World, phase: Phase | None = None
) -> Natives:
    """Return three numbers of each backbone of some pairs, name -> [N]; the ranks split the work.

    nll: of the native sequence, in nats per residue, over random orders. recovery: fraction of the
    letters of designs that are native. diversity: fraction of letters in which two designs differ.
    """
    one_of_each = list({pair.number: pair for pair in rows}.values())
    lengths = [len(pair.preferred) for pair in one_of_each]
    settings = DesignConfig(seed=seed)
    micro_batches = sampler.assign_micro_batches(range(len(lengths)), lengths, world, 1)
    table = distributed.Table(len(lengths), 3, world)
    for micro_batch in (phase or Phase()).each(micro_batches):
        pair = one_of_each[micro_batch.index[0]]
        native = inference.native_letters(pair.backbone).to(world.device)  # [L]
        is_known = mpnn.encode(pair.backbone.sequence) != mpnn.UNKNOWN
        designed = pair.backbone.in_design & (pair.backbone.mask > 0) & is_known
        task = inference.Task("", Path(pair.name), pair.backbone, designed)
        letters = native.expand(ORDERS, -1)  # [ORDERS, L]
        orders = inference.random_orders(task, ORDERS, seed).to(world.device)
        log_probs = inference.score(model, task, letters, orders)
        temperatures = torch.full((DESIGNS,), DESIGN_TEMPERATURE, device=world.device)
        designs, _ = inference.sample(model, task, temperatures, settings)
        designs = designs[:, designed]  # [DESIGNS, designed]
        nll = -log_probs.gather(-1, letters[..., None])[:, designed].mean()
        recovery = (designs == native[designed]).float().mean()
        differ = designs[:, None] != designs  # [DESIGNS, DESIGNS, designed]
        # without the diagonal, where a design is compared with itself
        diversity = differ.float().mean() * DESIGNS / (DESIGNS - 1)
        table.add(micro_batch, torch.stack([nll, recovery, diversity])[None])
    values = table.reduce().T.tolist()
    return dict(zip(("nll", "recovery", "diversity"), values, strict=True))


def compare_natives(before: Natives, after: Natives) -> dict[str, float]:
    """Return the gain of each number of natives(), as a mean over proteins."""
    values: dict[str, float] = {}
    for name in before:
        values |= gain_of_mean(f"natives/{name}", np.array([before[name], after[name]]))
    return values


def describe(values: dict[str, float]) -> str:
    """Return before -> after, gain and interval of each measure, one per line."""
    lines = []
    for name, label in LABELS.items():
        if f"{name}/gain" in values:
            before, after = values[f"{name}/before"], values[f"{name}/after"]
            line = f"  {label}: {before:.4f} -> {after:.4f}, gain {values[f'{name}/gain']:+.4f}"
            if f"{name}/gain_low" in values:
                low, high = values[f"{name}/gain_low"], values[f"{name}/gain_high"]
                line += f" [{low:+.4f}, {high:+.4f}]"
            lines.append(line)
    return "\n".join(lines)


# --- main ----------------------------------------------------------------------------------------


def models_of(config: Config) -> tuple[ProteinMPNN, ProteinMPNN]:
    """Return the models before and after, and print their names; raise UserError."""
    path = weights.path_of(config.model_path, config.base_model_dir)
    model = ProteinMPNN.load(path)
    name = config.base_model_name or model.base.get("name", "")
    hint = "use --base_model_name FILE or NAME"
    if not name:
        raise UserError(f"{path}: does not name the model that its training began with; {hint}")
    base = weights.path_of(name, config.base_model_dir)
    is_known = digest_of_files([base]) == model.base.get("digest")
    if not (config.base_model_name or is_known):
        raise UserError(f"{base}: not the file that the training of {path} began with; {hint}")
    note = f" (its training began with {model.base['name']})" if model.base and not is_known else ""
    print(f"before: {name}\nafter: {config.model_path}{note}")
    return ProteinMPNN.load(base), model


def score_mutants(config: Config) -> None:
    """Write the log-odds of mutants and their wild types under one model, in nats, as a table."""
    path = weights.path_of(config.model_path, config.base_model_dir)
    config.stable_ddg = "negative"  # with the ddG of 1 below, the wild types are preferred
    rows, report = pairs.read(config.mutants, {}, config, ddg=1.0)
    world = distributed.choose_device(distributed.World(), config.backend)
    model = ProteinMPNN.load(path).to(world.device)
    log_probs = batches.score(batches.Scorer(model), rows, config, world)
    lines = ["location,structure,mutation,score"]
    for pair, (wild_type, mutant) in zip(rows, log_probs.tolist(), strict=True):
        score = mutant - wild_type
        lines.append(f"{pair.location},{pair.name},{pair.mutation},{score:.4f}")
    data.write_text(config.output, "\n".join(lines) + "\n")
    print(*pairs.describe({"mutants": report}), sep="\n")
    print(f"{len(rows)} mutants of {config.mutants} -> {config.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    config = cli.parse(Config, argv)
    cli.check_ranges(config, num_orders=cli.ABOVE_0, max_length=cli.ABOVE_0)
    if config.mutants:
        config.output = config.output or data.output_path("mutants.csv")
    if config.output:
        checkpoints.check_writable("--output", data.temporary_of(config.output))
        if Path(config.output).is_dir():
            raise UserError(f"--output: {config.output} is a folder; use the name of a file")
    if config.mutants:
        score_mutants(config)
        return 0
    rows, report = pairs.read(config.data, {}, config)
    models = models_of(config)
    print(*pairs.describe({"data": report}), sep="\n")
    world = distributed.choose_device(distributed.World(), config.backend)
    scores = []
    of_natives = []
    for model in models:
        model.to(world.device)
        log_probs = batches.score(batches.Scorer(model), rows, config, world)
        scores.append(log_probs.cpu().numpy())
        of_natives.append(natives(model, rows, config.seed, world))
    values = {"pairs": len(rows), **compare(rows, *scores), **compare_natives(*of_natives)}
    print(describe(values))
    if config.output:
        data.write_json(config.output, values)
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
