"""Does fine-tuning on measured stabilities help on proteins that were not trained on?

    python tests/bench/protein_study.py outputs/study pairs.json --settings 6 --seeds 0 1 2
    python tests/bench/protein_study.py outputs/study pairs.json     # table.md and picture

Five folds, about alike in pairs, of whole families of similar proteins (dpo_inv.batches.family):
each protein is held out once per seed, and no homologue of it is in the training data. A fold is a
run of dpo_inv.run_dpo_ddp, whose numbers are kept in the folder; what it makes of the held-out
proteins is compared with the official v_48_020. Intervals: bootstrap over families, of their means
over seeds.
"""

import argparse
import collections
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from ddp_utils.distributed import World
from ddp_utils.sampler import seed_of
from dpo_inv import batches, evaluate, mpnn, weights
from dpo_inv import pairs as pairs_
from dpo_inv.config import PairSettings

FOLDS = 5
EPOCHS = 2
COMMON = f"--num_epochs {EPOCHS} --batch_size 8 --decoding_order mutated_last"
COMMON += " --lr_scheduler linear --report_to none"
SETTINGS = {  # name -> flags, beside those that all have
    "dpo, beta 0.1": "--learning_rate 1e-4",
    "dpo, beta 1": "--learning_rate 1e-4 --beta 1",
    "dpo, beta 1, sft": "--learning_rate 1e-4 --beta 1 --sft_weight 1",
    "dpo, beta 1, margin": "--learning_rate 1e-4 --beta 1 --weighting margin",
    "dpop, beta 1": "--learning_rate 1e-4 --beta 1 --method dpop",
    "ddg": "--learning_rate 1e-4 --method ddg",
    "ddg, sft": "--learning_rate 1e-4 --method ddg --sft_weight 1",
    "ddg, sft, rate 3e-4": "--learning_rate 3e-4 --method ddg --sft_weight 1",
    "listwise, sft": "--learning_rate 1e-4 --method listwise --sft_weight 1",
}


def families_of(pairs) -> np.ndarray:
    """Return the family of each pair's protein, [N], named by its first protein."""
    chains = batches.chains_of(pairs)
    return np.array([min(batches.family(pair.number, chains)) for pair in pairs])


def folds_of(families, seed) -> dict:
    """Return the fold of each family: the largest first, each into the fold with fewest pairs."""
    sizes = collections.Counter(families)
    generator = random.Random(seed_of(seed, "folds"))
    order = sorted(sizes, key=lambda family: (-sizes[family], generator.random()))
    totals = [0] * FOLDS
    folds = {}
    for family in order:
        smallest = [fold for fold in range(FOLDS) if totals[fold] == min(totals)]
        folds[family] = generator.choice(smallest)
        totals[folds[family]] += sizes[family]
    return folds


def scores(model_file, pairs) -> np.ndarray:
    """Return log-probs [N, 2] of pairs, differing letters last."""
    scorer = batches.Scorer(mpnn.ProteinMPNN.load(model_file))
    return batches.score(
        scorer, pairs, PairSettings(decoding_order="mutated_last"), World()
    ).numpy()


def run_fold(folder, name, seed, fold, items, pairs, families):
    """Train on the other folds; write what each epoch's model makes of this one."""
    file = folder / f"{name}.{seed}.{fold}.json"
    if file.exists():
        return
    run = folder / "run" / file.stem
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    of_family = folds_of(families.tolist(), seed)
    held = [row for row, family in enumerate(families.tolist()) if of_family[family] == fold]
    one_of_each = list({pairs[row].name: items[row] for row in held}.values())
    train = [item for row, item in enumerate(items) if row not in held]
    (run / "train.json").write_text(json.dumps(train))
    # natives are designed in the first seed only, which takes a third of the time
    one_of_each = one_of_each if seed == 0 else one_of_each[:1]
    (run / "val.json").write_text(json.dumps(one_of_each))  # for what becomes of natives
    command = [sys.executable, "-m", "dpo_inv.run_dpo_ddp", "--base_model_name", "v_48_020"]
    command += ["--train_data", str(run / "train.json"), "--val_data", str(run / "val.json")]
    command += ["--output_dir", str(run / "out"), "--seed", str(seed)]
    subprocess.run([*command, *COMMON.split(), *SETTINGS[name].split()], check=True)
    lines = (run / "out/metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"val"' in line][-1]
    values = {key: value for key, value in last.items() if key.startswith("natives/")}
    values |= {"proteins": len(one_of_each), "rows": held}
    tested = [pairs[row] for row in held]
    for epoch in range(1, EPOCHS + 1):
        values[f"epoch {epoch}"] = scores(run / f"out/checkpoint_epoch_{epoch}.pt", tested).tolist()
    file.write_text(json.dumps(values))
    shutil.rmtree(run)


NATIVE = ("nll", "recovery", "diversity")


def seeds_of(folder, name, pairs):
    """Return log-probs {epoch: [seeds, N, 2]} of all seeds, and natives' gains of seed 0, [1, 3].

    Natives are means over the proteins of all folds. The log-probs of a fold are of its model, and
    NaN if its file is missing.
    """
    log_probs = collections.defaultdict(list)
    natives = []
    for seed in range(10):
        files = [folder / f"{name}.{seed}.{fold}.json" for fold in range(FOLDS)]
        folds = [json.loads(file.read_text()) for file in files if file.exists()]
        if not folds:
            continue
        if seed == 0:
            proteins = [fold["proteins"] for fold in folds]
            of_folds = [[fold[f"natives/{key}/gain"] for key in NATIVE] for fold in folds]
            natives.append(np.average(of_folds, axis=0, weights=proteins))
        for epoch in range(1, EPOCHS + 1):
            after = np.full((len(pairs), 2), np.nan)
            for fold in folds:
                after[fold["rows"]] = fold[f"epoch {epoch}"]
            log_probs[epoch].append(after)
    return {epoch: np.array(after) for epoch, after in log_probs.items()}, np.array(natives)


def compare(pairs, families, before, after) -> dict:
    """Return (gain, low, high) of three measures, from log-probs [N, 2] and [seeds, N, 2]."""
    signs = np.array([pair.sign for pair in pairs])
    stability = signs * np.array([pair.margin for pair in pairs])
    protein = np.array([pair.number for pair in pairs])
    proteins = [np.flatnonzero(protein == number) for number in np.unique(protein)]
    groups = [np.flatnonzero(families == family) for family in np.unique(families)]
    sides = before[None], after  # each [seeds, N, 2]
    odds = [signs * (side[..., 0] - side[..., 1]) for side in sides]

    def own(side, rows):
        return (sides[side][:, rows, 0] > sides[side][:, rows, 1]).mean()

    def pooled(side, rows):
        of_seeds = [evaluate.spearman(of_seed[rows], stability[rows]) for of_seed in odds[side]]
        return np.mean(of_seeds)

    large = [rows for rows in proteins if len(rows) >= evaluate.MIN_MUTANTS]
    each = np.array([(pooled(0, rows), pooled(1, rows)) for rows in large])  # [proteins, 2]
    values = evaluate.gain("own", own, groups) | evaluate.gain("pooled", pooled, groups)
    of_large = np.array([families[rows[0]] for rows in large])
    alike = [np.flatnonzero(of_large == family) for family in np.unique(of_large)]
    values |= evaluate.gain("protein", lambda side, rows: each[rows, side].mean(), alike)
    ends = "gain", "gain_low", "gain_high"
    return {key: [values[f"{key}/{end}"] for end in ends] for key in ("protein", "pooled", "own")}


def report(folder, pairs, families, before):
    """Write table.md and protein_study.png of all settings, on the folds that all seeds have."""
    table = (
        "| setting | seeds | pairs | epoch | Spearman per protein | pooled | preferred likelier |"
    )
    table += " NLL, recovery, diversity |\n|---|---|---|---|---|---|---|---|\n"
    drawn = {}
    for name in SETTINGS:
        log_probs, natives = seeds_of(folder, name, pairs)
        for epoch, after in log_probs.items():
            rows = np.flatnonzero(np.isfinite(after).all((0, 2)))
            chosen = [pairs[row] for row in rows]
            gains = compare(chosen, families[rows], before[rows], after[:, rows])
            cells = [f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]" for gain, low, high in gains.values()]
            has_ends = epoch == EPOCHS and len(natives)
            ends = ", ".join(f"{x:+.3f}" for x in natives.mean(0)) if has_ends else ""
            table += f"| {name} | {len(after)} | {len(rows)} | {epoch} | "
            table += f"{' | '.join(cells)} | {ends} |\n"
            drawn[name] = gains
    (folder / "table.md").write_text(table)
    print(table)
    figure, axes = plt.subplots(1, 2, figsize=(8, 0.34 * len(drawn) + 1), sharey=True)
    titles = {"protein": "Spearman with ddG, mean of proteins", "pooled": "over all mutants"}
    for axis, (key, title) in zip(axes, titles.items(), strict=True):
        for row, gains in enumerate(drawn.values()):
            gain, low, high = gains[key]
            color = "tab:blue" if low > 0 else "tab:gray"
            axis.errorbar(gain, row, xerr=[[gain - low], [high - gain]], fmt="o", color=color)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(title=title, xlabel="gain on held-out proteins, 95 %")
    axes[0].set_yticks(range(len(drawn)), drawn)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(folder / "protein_study.png", dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--settings", type=int, nargs="*", default=[], help="of SETTINGS, from 0")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    items = json.loads(options.data.read_text())
    for item in items:
        item["pdb_file"] = str(options.data.resolve().parent / item["pdb_file"])
    pairs, _ = pairs_.read(str(options.data), {}, PairSettings())
    assert len(pairs) == len(items)
    families = families_of(pairs)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "before.json").exists():
        before = scores(weights.path_of("v_48_020"), pairs)
        (folder / "before.json").write_text(json.dumps(before.tolist()))
    names = list(SETTINGS)
    for seed in options.seeds:
        for number in options.settings:
            for fold in range(FOLDS):
                run_fold(folder, names[number], seed, fold, items, pairs, families)
    report(folder, pairs, families, np.array(json.loads((folder / "before.json").read_text())))


if __name__ == "__main__":
    main()
