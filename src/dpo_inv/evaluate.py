"""Compare a fine-tuned ProteinMPNN with its base on held-out pairs and measured stabilities.

    python -m dpo_inv.evaluate --model_path outputs/dpo_ddp/best_model.pt --data held_out.csv

Before -> after, and the gain with its 95 % interval over proteins; a model that has not moved gains
exactly 0. Whatever the reference makes of the pairs does not count: only what each model prefers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ddp_utils import cli, distributed, sampler
from ddp_utils.data import write_text
from ddp_utils.distributed import to_device
from ddp_utils.metrics import Averages
from dpo_inv import batches, inference, inference_config, mpnn, weights
from dpo_inv import pairs as pairs_

DRAWS = 1000  # of the bootstrap
ORDERS = 4  # in which a native sequence is scored
FEWEST = 5  # measured mutants of a protein with a rank correlation of its own
SHOWN = {  # name -> how it is called on the terminal
    "own": "Preferred likelier than unpreferred",
    "spearman": "Spearman with ddG, all mutants",
    "spearman_per_protein": "Spearman with ddG, mean of proteins",
    "natives/nll": "Natives: negative log-likelihood",
    "natives/recovery": "Natives: recovery by designs",
    "natives/diversity": "Natives: diversity of designs",
}


@dataclass
class Config:
    model_path: str = "outputs/dpo_ddp/best_model.pt"  # a .pt file, or an official name
    base_model_name: str = "v_48_020"  # what it is compared with
    base_model_dir: str = "data/weights"  # where named models are
    data: str = "data/input/test_data_val.json"  # pairs, or mutations and ddG: docs/protein_dpo.md
    decoding_order: Literal["random", "sequential", "mutated_last"] = "mutated_last"  # of residues
    num_orders: int = 1  # random orders of a pair; its log-probs are averaged over them
    homo_oligomer: bool = False  # the designed chains are copies and get one sequence
    numbering: Literal["pdb", "sequence"] = "pdb"  # of mutations: the file's, or from 1
    stable_ddg: Literal["negative", "positive"] = "negative"  # the sign of a stabilising ddG
    altloc: Literal["first", "occupancy"] = "first"  # which of a residue's alternative conformers
    max_length: int = 500  # residues with context; longer items are dropped and counted
    on_bad_record: Literal["error", "skip"] = "error"  # what to do with a malformed item
    backend: Literal["auto", "nccl", "gloo", "ccl", "xccl", "xpu"] = "auto"  # by the device
    seed: int = 0  # decoding orders, designs, bootstrap
    output: str = ""  # a JSON file with the same numbers
    debug: bool = False  # tracebacks for user errors, too


# --- statistics ----------------------------------------------------------------------------------


def ranks(values):
    """Return the ranks [N] of numbers [N], from 1; equal ones share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def spearman(x, y) -> float:
    """Return the rank correlation of numbers [N] and [N], NaN if all of one side are equal."""
    x = ranks(x)
    y = ranks(y)
    return float(np.corrcoef(x, y)[0, 1]) if len(x) and x.std() > 0 and y.std() > 0 else np.nan


def compare(pairs, before, after) -> dict:
    """Return what two models prefer, from their log-probs [N, 2], and the gain, by name.

    own: share of pairs whose preferred sequence is the likelier one. spearman: rank correlation of
    a mutant's log-odds and its measured stability, over all mutants; spearman_per_protein: mean
    over the proteins with at least FEWEST. Intervals: bootstrap over proteins, not over pairs.
    """
    protein = np.array([pair.number for pair in pairs])
    signs = np.array([pair.sign for pair in pairs])
    stability = signs * np.array([pair.margin for pair in pairs])  # [N] or NaN
    known = (signs != 0) & np.isfinite(stability)
    gaps = np.stack([before[:, 0] - before[:, 1], after[:, 0] - after[:, 1]])  # [2, N]

    def pooled(side, rows):
        return spearman(signs[rows] * gaps[side, rows], stability[rows])

    of_protein = [np.flatnonzero(protein == number) for number in np.unique(protein)]
    measured = [rows[known[rows]] for rows in of_protein]
    values = gain("own", lambda side, rows: (gaps[side, rows] > 0).mean(), of_protein)
    values |= gain("spearman", pooled, measured)
    large = [rows for rows in measured if len(rows) >= FEWEST]
    each = np.array([(pooled(0, rows), pooled(1, rows)) for rows in large]).reshape(-1, 2)  # [P, 2]
    each = each[np.isfinite(each).all(-1)]
    alone = np.arange(len(each))[:, None]
    if len(each):
        values |= gain("spearman_per_protein", lambda side, rows: each[rows, side].mean(), alone)
    return values


def moved(name, before, after) -> dict:
    """Return both numbers and what was gained, by their names in metrics.jsonl."""
    return {f"{name}/before": before, f"{name}/after": after, f"{name}/gain": after - before}


def gain(name, measure, groups) -> dict:
    """Return measure(side, rows) before and after, its gain, and the interval over groups of rows.

    side: 0 before, 1 after. groups: arrays of rows, which the bootstrap draws with replacement.
    """
    rows = np.concatenate(groups)
    values = moved(name, float(measure(0, rows)), float(measure(1, rows)))
    if not np.isfinite(values[f"{name}/gain"]):  # all alike: no rank correlation
        return {}
    generator = np.random.default_rng(0)
    gains = []
    for _ in range(DRAWS if len(groups) > 1 else 0):
        drawn = generator.integers(len(groups), size=len(groups))
        rows = np.concatenate([groups[index] for index in drawn])
        gains.append(measure(1, rows) - measure(0, rows))
    if gains:
        low, high = np.nanquantile(gains, (0.025, 0.975))
        values |= {f"{name}/gain_low": float(low), f"{name}/gain_high": float(high)}
    return values


# --- natives and designs -------------------------------------------------------------------------


@torch.no_grad()
def natives(model, pairs, seed, world) -> dict:
    """Return means over the backbones of the pairs; each rank takes its share of them.

    nll: of the structure's own letters, in nats per residue, over random orders. recovery,
    diversity: share of a design's letters that are native ones, and that differ between designs.
    """
    one_of_each = list({pair.number: pair for pair in pairs}.values())
    lengths = [len(pair.preferred) for pair in one_of_each]
    averages = Averages(world)
    config = inference_config.Config(num_samples=8, seed=seed)
    for [index], weight in sampler.assign_micro_batches(range(len(lengths)), lengths, world, 1):
        name = one_of_each[index].name
        backbone = one_of_each[index].backbone
        native = mpnn.encode(backbone.sequence)  # [L]
        designed = backbone.in_design & (backbone.mask > 0) & (native != mpnn.UNKNOWN)
        bias = inference.bias_of(backbone, config)
        letters = torch.from_numpy(native).expand(ORDERS, -1)  # [ORDERS, L]
        task = inference.Task(Path(name), backbone, designed, bias, [], letters)
        letters, log_probs = inference.score(model, task, config, world.device, ORDERS)
        designs, _ = inference.sample(model, task, config, world.device)
        designs = designs[:, designed]  # [num_samples, designed]
        differ = designs[:, None] != designs  # [num_samples, num_samples, designed]
        values = {
            "nll": -log_probs.gather(-1, letters[..., None])[:, designed].mean(),
            "recovery": (designs == letters[0, designed]).float().mean(),
            # without the diagonal, where a design is compared with itself
            "diversity": differ.float().mean() * len(designs) / (len(designs) - 1),
        }
        weight = to_device(weight, world.device)
        averages.add({key: value[None] for key, value in values.items()}, weight)
    return averages.reduce()


def gains(before, after) -> dict:
    """Return natives() of two models side by side, by the names of SHOWN."""
    values = {}
    for name in ("nll", "recovery", "diversity"):
        values |= moved(f"natives/{name}", before[name], after[name])
    return values


def describe(values) -> str:
    """Return before -> after, gain and interval of all that was compared, a line each."""
    lines = []
    for name, text in SHOWN.items():
        if f"{name}/gain" in values:
            before, after, gain = (values[f"{name}/{key}"] for key in ("before", "after", "gain"))
            line = f"  {text}: {before:.4f} -> {after:.4f}, gain {gain:+.4f}"
            if f"{name}/gain_low" in values:
                low, high = values[f"{name}/gain_low"], values[f"{name}/gain_high"]
                line += f" [{low:+.4f}, {high:+.4f}]"
            lines.append(line)
    return "\n".join(lines)


# --- main ----------------------------------------------------------------------------------------


def main(argv=None) -> int:
    config = cli.parse(Config, argv, aliases={"--no_cuda": "--backend=gloo"})
    cli.check_ranges(config, num_orders=cli.ABOVE_0, max_length=cli.ABOVE_0)
    names = config.base_model_name, config.model_path
    paths = [weights.path_of(name, config.base_model_dir) for name in names]
    data, report = pairs_.read(config.data, {}, config)
    print(pairs_.describe("data", report))
    world = distributed.choose_device(distributed.World(), config.backend)
    scores = []
    of_natives = []
    for path in paths:
        model = mpnn.ProteinMPNN.load(path).to(world.device)
        scores.append(batches.score(batches.Scorer(model), data, config, world).cpu().numpy())
        of_natives.append(natives(model, data, config.seed, world))
    values = {"pairs": len(data), **compare(data, *scores), **gains(*of_natives)}
    print(describe(values))
    if config.output:
        write_text(config.output, json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    distributed.run(main)
