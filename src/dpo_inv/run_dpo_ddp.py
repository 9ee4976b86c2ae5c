"""Fine-tune ProteinMPNN on preferred and unpreferred sequences of backbones with DPO.

    ./run_dpo_ddp_local.sh 4
    torchrun --nproc_per_node=4 -m dpo_inv.run_dpo_ddp \\
        --train_data data/input/test_data_real.json --output_dir outputs/dpo_ddp --num_epochs 10
    mpiexec -n 12 -ppn 6 python -m dpo_inv.run_dpo_ddp --train_data data.json \\
        --output_dir outputs/ --backend ccl
    python -m dpo_inv.run_dpo_ddp --train_data ... --output_dir ...      # one process

Guide: docs/protein_dpo.md. Results: output_dir (see results/README.md).
"""

from ddp_utils import cli
from dpo_inv.config import read_settings

if __name__ == "__main__":
    cli.check_flags(
        read_settings
    )  # --help and mistakes in the settings end here, before torch is imported

import hashlib
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ddp_utils import checks, distributed, losses, metrics, sampler
from ddp_utils.data import digest_of_files
from ddp_utils.distributed import to_device
from ddp_utils.metrics import Averages, wilson
from ddp_utils.policy import Policy, bytes_to_write, learning_rate, make_optimizer
from ddp_utils.run import Run, RunSpec, check
from dpo_inv import batches, evaluate, mpnn, stability, weights
from dpo_inv import pairs as pairs_
from dpo_inv.batches import Scorer
from dpo_inv.config import MEASURED_METHODS

# --- data ----------------------------------------------------------------------------------------


def read_data(config, world):
    """Return {"train": pairs, "val": pairs} and their reports."""
    backbones = {}
    train, report = pairs_.read(config.train_data, backbones, config, config.max_rows)
    data = {"train": train, "val": []}
    reports = {"train": report}
    if config.val_data:
        data["val"], reports["val"] = pairs_.read(config.val_data, backbones, config)
    elif len(train) >= 10:
        data["train"], data["val"] = batches.split(train, config.seed)
        names = sorted({pair.name for pair in data["val"]})
        reports["val"] = report | {"used": len(data["val"]), "held_out": names}
        report["used"] = len(data["train"])
    if config.method in MEASURED_METHODS or config.weighting == "margin":
        stability.check(data["train"] + data["val"], config)
    sampler.check_enough_rows(config.train_data, len(data["train"]), world)
    return data, reports


# --- step ----------------------------------------------------------------------------------------


def pair_losses(policy, batch, table, config):
    """Return losses [B] and metrics, each [B], of B pairs; table: reference log-probs [B, 2]."""
    preferred, unpreferred = policy(batch)  # [B], [B]
    tokens = batch.targets.sum(-1)  # [B]
    logps = losses.LogPs(preferred, unpreferred, *table.unbind(-1), tokens, tokens)
    per_pair, metrics = losses.preference(logps, losses.LossSpec.of(config))
    if config.method in MEASURED_METHODS:
        sides = preferred, unpreferred, batch.margins, batch.signs
        per_pair = stability.losses(config.method, *sides)
    likelier = (preferred > unpreferred).float()  # by the policy alone, whatever the reference says
    metrics |= {"logps/accuracies": likelier, "nll": -preferred / tokens}
    if config.sft_weight or config.weighting == "margin":
        metrics["loss/preference"] = per_pair
        per_pair = per_pair * (batch.margins if config.weighting == "margin" else 1)
        per_pair = per_pair + config.sft_weight * metrics["nll"]
    return per_pair, {"loss": per_pair, **metrics}


def train_step(policy, pairs, table, config, run):
    """Forward and backward of one global batch; return its exact means. The gradient is ready."""
    world = run.world
    averages = Averages(world)
    size = batches.TOGETHER if config.method == "listwise" else config.batch_size
    micro_batches = batches.share(pairs, size, world)
    for micro_batch in micro_batches:
        policy.sync_gradients(micro_batch is micro_batches[-1])
        batch = batches.collate([pairs[i] for i in micro_batch.index], config, world.device)
        known = table[to_device(micro_batch.index, world.device)]
        per_pair, metrics = pair_losses(policy, batch, known, config)
        weight = to_device(micro_batch.weight, world.device)
        # DDP averages over ranks: times world_size / global count is the mean of the global batch
        loss = (per_pair * weight).sum() * (world.world_size / len(pairs))
        policy.backward(loss)
        averages.add(metrics, weight)
    norm = policy.clip_grad_norm(config.max_grad_norm)
    return run.reduce(averages, norm)


def check_step(policy, step, means, pairs, table, score, config):
    """Stop before an update that a NaN or a wrong start would spoil."""
    checks.check_step(policy, step, means, pairs, lambda: score(pairs), "full")
    if step == 0:
        tokens = [int(pair.targets.sum()) for pair in pairs]
        checks.check_first_step(policy, means, score(pairs), table, tokens, pairs, config)


@torch.no_grad()
def validate(policy, pairs, table, config, run):
    """Return exact means over all validation pairs: each counted once, whatever the world size."""
    world = run.world
    averages = Averages(world)
    losses_of_rank = []
    scores = []
    micro_batches = batches.share(pairs, batches.TOGETHER, world)
    run.bar.begin("Validation", len(micro_batches))
    for micro_batch in micro_batches:
        run.stop_if_requested()
        batch = batches.collate([pairs[i] for i in micro_batch.index], config, world.device)
        known = table[to_device(micro_batch.index, world.device)]
        # not through DDP, which would only wait for gradients
        per_pair, metrics = pair_losses(policy.scorer, batch, known, config)
        averages.add(metrics, to_device(micro_batch.weight, world.device))
        scores.append(torch.stack([metrics["logps/chosen"], metrics["logps/rejected"]], -1))
        losses_of_rank += per_pair.tolist()
        run.bar.advance(loss=losses_of_rank[-1], avg_loss=np.mean(losses_of_rank))
    values = averages.reduce()
    name = "rewards/accuracies"
    low, high = wilson(values[name] * values["count"], values["count"])
    perplexity = math.exp(values["nll"]) if values["nll"] < 700 else math.inf  # beyond it, or NaN
    values |= {f"{name}_low": low, f"{name}_high": high, "perplexity": perplexity}
    now = distributed.gather_by_index(len(pairs), micro_batches, scores, world)  # [N, 2]
    return values | evaluate.compare(pairs, table.cpu().numpy(), now.cpu().numpy())


# --- epochs --------------------------------------------------------------------------------------


def end_epoch(step, plan, policy, data, table, config, run):
    """Validation, the epoch's lines and models; nothing if a stopped run has done it already."""
    if not plan.due(0, step) or run.validated >= step > 0 or step == 0 < plan.steps:
        return
    values = {}
    epoch = math.ceil(plan.epoch(step))
    names = [f"checkpoint_epoch_{epoch}.pt", "latest_model.pt"]
    if data["val"]:
        values = validate(policy, data["val"], table["val"], config, run)
        if step == plan.steps:
            natives = evaluate.natives(policy.scorer.model, data["val"], config.seed, run.world)
            values |= evaluate.gains(run.results["natives"], natives)
        run.results["val"] = values
        before = run.results.get("best", {"loss": math.inf})["loss"]
        if values["loss"] < before:
            run.results["best"] = {"loss": values["loss"], "step": step}
            names.append("best_model.pt")

    def write():
        for name in names:
            policy.scorer.model.save(run.folder / name)
        train = train_loss(run.folder, (epoch - 1) * plan.steps_per_epoch, step)
        run.say(f"\nEpoch {epoch} Summary:\n  Train Loss: {train:.4f}")

    if step:  # else it was to be evaluated only
        distributed.on_main(run.world, write)
    if values:
        ends = ("", "_low", "_high")
        share, low, high = (values[f"rewards/accuracies{end}"] for end in ends)
        run.say(f"  Val Loss:   {values['loss']:.4f}")
        run.say(f"  Val Accuracy: {share:.4f} [{low:.4f}, {high:.4f}]")
        run.say(evaluate.describe(values))
    run.log(step, values, "val", echo=False)


# --- main ----------------------------------------------------------------------------------------


def digest(pairs) -> str:
    """Return a digest of all that the log-probs of these pairs depend on, but for the model."""
    sha256 = hashlib.sha256()
    for pair in pairs:
        sha256.update(f"{pair.name}\n".encode())  # which its decoding orders are drawn by
        for array in (*pair[4:], *pair.backbone[:4]):
            sha256.update(array.tobytes())
    return sha256.hexdigest()[:16]


def train_loss(folder, after, until):
    """Mean over the pairs of some training steps, of earlier starts, too: `after` < step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    lines = [line for line in lines if line["split"] == "train" and after < line["step"] <= until]
    return np.average([line["loss"] for line in lines], weights=[line["count"] for line in lines])


def main(argv=None) -> int:
    # setup
    world = distributed.whoami(argv=sys.argv)
    config = read_settings(argv)
    if not config.check:
        world = distributed.init_process_group(world, config.backend, config.timeout_minutes)

    # data
    data, reports = read_data(config, world)
    base = weights.path_of(config.base_model_name, config.base_model_dir)
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    model = mpnn.ProteinMPNN.load(base)
    inputs = {f"content of {split}": digest(pairs) for split, pairs in data.items()}
    inputs["global_batch"] = str(plan.global_batch)
    inputs["content of base_model_name"] = digest_of_files([base])
    size = bytes_to_write(model, config.keep_checkpoints + 1)
    lines = [pairs_.describe(*report) for report in reports.items()]
    folder = Path(config.output_dir)
    spec = RunSpec(folder, "--output_dir", plan.steps, inputs, size, reports, lines)
    if config.check:
        distributed.choose_device(world, config.backend)
        return check(spec, config, world)

    peak = learning_rate(
        config.learning_rate,
        config.lr_scaling,
        plan.global_batch / config.base_batch_size,
        world.world_size,
    )

    with Run(spec, config, world) as run:
        run.say(
            f"Initialized DDP: rank=0, world_size={world.world_size}, local_rank=0\n"
            f"Using device: {world.device}\n"
            f"Loaded {len(data['train'])} training and {len(data['val'])} validation pairs\n"
            f"Batch size per GPU: {config.batch_size}, Total batch size: {plan.global_batch}\n"
            f"Learning rate: {peak:.3g}, linear rule: "
            f"{config.learning_rate * plan.global_batch / config.base_batch_size:.3g}"
        )
        loss = f"{config.method}, beta {config.beta:g}"
        steps = f"{plan.steps}, learning rate {peak:.3g}"
        run.describe(model=config.base_model_name, loss=loss, steps=steps)

        # model
        scorer = Scorer(model, config.temperature).to(world.device)
        policy = Policy(scorer, world)

        def score(pairs, _rows):
            return batches.score(scorer, pairs, config, world, run.stop_if_requested)

        # what the reference's log-probs depend on, beside settings and inputs of this run
        fingerprint = {"device": world.device.type, "torch": torch.__version__}
        table = run.reference_logps(fingerprint, data, {}, score)
        optimizer, schedule = make_optimizer(
            policy,
            peak,
            plan.steps,
            config.lr_scheduler,
            config.warmup_ratio,
            config.weight_decay,
        )
        done = run.restore(policy, optimizer, schedule)
        if data["val"] and not done:
            run.results["natives"] = evaluate.natives(model, data["val"], config.seed, world)
        rest = plan, policy, data, table, config, run
        end_epoch(done, *rest)

        # loop: one turn is one optimiser step
        displacement = losses.Displacement(config.method, "sequences", "--method dpop")
        epochs = math.ceil(max(config.num_epochs, plan.epoch(plan.steps)))
        for step in range(done, plan.steps):
            start = time.perf_counter()
            rows = sorted(batches.batch(plan, data["train"], step))
            pairs = [data["train"][row] for row in rows]
            known = table["train"][to_device(rows, world.device)]  # [B, 2]
            epoch, turn = divmod(step, plan.steps_per_epoch)
            if turn == 0 or step == done:
                run.say(f"\nEpoch {epoch + 1}/{epochs}")
                run.bar.begin("Training", plan.steps_per_epoch, turn)
                epoch_losses = []
            values = train_step(policy, pairs, known, config, run)
            check_step(policy, step, values, pairs, known, score, config)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            seconds = time.perf_counter() - start
            residues = sum(len(pair.preferred) for pair in pairs)
            values |= {"epoch": plan.epoch(step + 1), "seconds": seconds}
            values["tokens_per_second"] = 2 * residues / seconds
            values["peak_memory_mb"] = metrics.peak_memory_mb(world.device)
            run.log(step + 1, values, echo=(step + 1) % config.log_every == 0)
            epoch_losses.append(values["loss"])
            run.bar.advance(loss=values["loss"], avg_loss=np.mean(epoch_losses))
            warning = displacement.seen(values["rewards/chosen"])
            if warning:
                run.say(warning)
            end_epoch(step + 1, *rest)
            run.save_if_due(plan.due(config.save_every, step + 1))
    return 0


if __name__ == "__main__":
    distributed.run(main)
