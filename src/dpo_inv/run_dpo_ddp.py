"""Fine-tune ProteinMPNN with DPO on preferred and unpreferred sequences of backbones.

    ./run_dpo_ddp_local.sh 4
    torchrun --nproc_per_node=4 -m dpo_inv.run_dpo_ddp \\
        --train_data data/input/test_data_real.json --output_dir outputs/dpo_ddp --num_epochs 10
    mpiexec -n 12 -ppn 6 python -m dpo_inv.run_dpo_ddp --train_data data.json \\
        --output_dir outputs/ --backend ccl
    python -m dpo_inv.run_dpo_ddp --train_data ... --output_dir ...      # one process

Settings: src/dpo_inv/config.py. Guide: docs/protein_dpo.md. Results: output_dir.
"""

from ddp_utils import cli
from dpo_inv.config import read_settings

if __name__ == "__main__":
    cli.check_flags(read_settings)  # --help and mistakes end here, before torch is imported

import functools
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_utils import checks, distributed, metrics, sampler
from ddp_utils import policy as policies
from ddp_utils import run as runs
from ddp_utils.data import digest_of_files
from ddp_utils.distributed import World, to_device
from ddp_utils.losses import Displacement, Known, LossSpec, checked_metrics, pair_losses
from ddp_utils.policy import Policy
from ddp_utils.run import Run
from dpo_inv import batches, evaluate, pairs, weights
from dpo_inv.batches import Scorer
from dpo_inv.config import MEASURED_METHODS, Config
from dpo_inv.losses import ddg, listwise
from dpo_inv.mpnn import ProteinMPNN
from dpo_inv.pairs import Pair

# with a 95 % interval in evaluation
INTERVALS = ("loss", "rewards/margins", "rewards/accuracies", "logps/accuracies")
Data = dict[str, list[Pair]]  # train and val -> their pairs

# --- data ----------------------------------------------------------------------------------------


def read_data(config: Config, world: World) -> tuple[Data, dict[str, dict]]:
    """Return the pairs of both splits, and a report on each file."""
    backbones: dict = {}
    train, report = pairs.read(config.train_data, backbones, config, config.max_rows)
    data = {"train": train, "val": []}
    reports = {"train": report}
    if config.val_data:
        data["val"], reports["val"] = pairs.read(config.val_data, backbones, config)
        pairs.note_repeated(train, data["val"], reports["val"])
    elif len(train) >= 10:
        data["train"], data["val"] = batches.split(train, config.seed, world.is_main)
        names = sorted({pair.name for pair in data["val"]})
        of_file: dict = {
            "dropped": {},
            "notes": {},
            "warnings": [],
        }  # of all pairs, which train has
        reports["val"] = report | of_file | {"used": len(data["val"]), "held_out": names}
        report["used"] = len(data["train"])
    if config.method in MEASURED_METHODS or config.weighting == "margin":
        pairs.check_margins(data["train"] + data["val"], config.method, config.weighting)
    if not data["val"]:
        problem = "0 validation pairs; use --val_data FILE, or more structures"
        report["warnings"].append(f"warning: {problem}")
    sampler.check_enough_rows(config.train_data, data, world)
    return data, reports


# --- step ----------------------------------------------------------------------------------------


def loss_of(
    scorer: Any, batch: batches.Batch, ref_logps: Tensor, rows: list[Pair], config: Config
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair [B] and its metrics, name -> [B].

    This is the only place where a loss is computed, in training, in validation and in the check
    before the first step. scorer(batch) returns the summed log-probs of the preferred and the other
    sequences, [B] each; ref_logps: those of the reference, [B, 2]; rows: the pairs of the batch.
    """
    spec = LossSpec.of(config)
    without_sft = spec._replace(sft_weight=0.0)  # its term is added below, to any loss
    losses, values = pair_losses(scorer, batch, ref_logps, without_sft)
    gaps = values["logps/chosen"] - values["logps/rejected"]  # [B]
    if config.method in MEASURED_METHODS:
        loss = {"ddg": ddg, "listwise": listwise}[config.method]
        losses = loss(gaps, batch.margins, batch.signs)
    # the preference of the policy itself, whatever that of the reference is
    values["logps/accuracies"] = (gaps > 0).float()
    values["nll"] = -values["logps/chosen"] / batch.tokens[0]
    if spec.sft_weight or config.weighting == "margin":
        values["loss/preference"] = losses
        if config.weighting == "margin":
            losses = losses * batch.margins
        losses = losses + spec.sft_weight * values["nll"]
    return losses, {**values, "loss": losses}


def micro_batches_of(rows: list[Pair], config: Config, world: World) -> list[sampler.MicroBatch]:
    """Return this rank's micro-batches of a global batch; each has pairs of one backbone."""
    size = batches.GROUP_SIZE if config.method == "listwise" else config.batch_size
    return batches.micro_batches(range(len(rows)), rows, size, world)


def train_step(
    policy: Policy, rows: list[Pair], ref_logps: Tensor, config: Config, run: Run
) -> dict[str, float]:
    """Run forward and backward on a global batch; return its exact means. The gradient is ready."""
    world = run.world
    averages = metrics.Averages(world)
    micro_batches = micro_batches_of(rows, config, world)
    for micro_batch in micro_batches:
        policy.sync_gradients(micro_batch is micro_batches[-1])
        part = [rows[i] for i in micro_batch.index]
        batch = batches.collate(part, config, world.device)
        known = ref_logps[to_device(micro_batch.index, world.device)]  # [B, 2]
        per_pair, values = loss_of(policy, batch, known, part, config)
        weight = to_device(micro_batch.weight, world.device)
        # DDP averages over ranks: times world_size / global count is the mean of the global batch
        policy.backward((per_pair * weight).sum() * (world.world_size / len(rows)))
        averages.add(checked_metrics(per_pair, values), weight)
    return run.reduce(averages, policy.clip_grad_norm(config.max_grad_norm))


def check_first_step(
    policy: Policy,
    values: dict[str, float],
    rows: list[Pair],
    now: Tensor,
    ref_logps: Tensor,
    config: Config,
    world: World,
) -> None:
    """Check that the policy is its reference, and that the loss is what follows from that.

    values: of train_step(); now, ref_logps: log-probs of the global batch, [B, 2].
    """
    averages = metrics.Averages(world)
    for micro_batch in micro_batches_of(rows, config, world):
        part = [rows[i] for i in micro_batch.index]
        batch = batches.collate(part, config, world.device)
        known = ref_logps[to_device(micro_batch.index, world.device)]
        losses, _ = loss_of(Known(known), batch, known, part, config)
        averages.add({"loss": losses}, to_device(micro_batch.weight, world.device))
    residues = [int(pair.targets.sum()) for pair in rows]
    expected = averages.reduce()["loss"]
    checks.check_first_step(policy, values, now, ref_logps, residues, rows, expected)


# --- evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def validate(
    scorer: Scorer, step: int, rows: list[Pair], ref_logps: Tensor, config: Config, run: Run
) -> dict[str, float]:
    """Return exact means over all validation pairs: each counts once, on any number of ranks.

    Before the first step, nothing is scored: the log-probs are those of the reference.
    """
    world = run.world
    averages = metrics.Averages(world, INTERVALS)
    scores = distributed.Table(len(rows), 2, world)
    micro_batches = batches.micro_batches(range(len(rows)), rows, batches.GROUP_SIZE, world)
    run.bar.begin("Validation", len(micro_batches))
    for micro_batch in micro_batches:
        run.stop_if_requested()
        part = [rows[i] for i in micro_batch.index]
        batch = batches.collate(part, config, world.device)
        known = ref_logps[to_device(micro_batch.index, world.device)]  # [B, 2]
        source = scorer if step else Known(known)
        per_pair, values = loss_of(source, batch, known, part, config)
        values = checked_metrics(per_pair, values)
        averages.add(values, to_device(micro_batch.weight, world.device))
        scores.add(micro_batch, torch.stack([values["logps/chosen"], values["logps/rejected"]], -1))
        if run.bar.is_shown:  # to read the losses, the host waits for the GPU
            run.bar.advance(per_pair.tolist())
    means = averages.reduce()
    if not step:  # all pairs are ties
        for end in ("", "_low", "_high"):
            del means[f"rewards/accuracies{end}"]
    # the exponential of more than 709 is not a float
    means["perplexity"] = math.exp(means["nll"]) if means["nll"] < 700 else math.inf
    return means | evaluate.compare(rows, ref_logps.cpu().numpy(), scores.reduce().cpu().numpy())


# --- epochs --------------------------------------------------------------------------------------


def begin_epoch(step: int, plan: sampler.Plan, run: Run) -> None:
    """Print the number of the epoch that `step` belongs to, and start its progress bar."""
    epoch, step_of_epoch = divmod(step, plan.steps_per_epoch)
    epochs = math.ceil(plan.epoch(plan.steps))
    run.say(f"\nEpoch {epoch + 1}/{epochs}")
    left = plan.steps - epoch * plan.steps_per_epoch  # fewer with --max_steps
    run.bar.begin("Training", min(plan.steps_per_epoch, left), step_of_epoch)


def write_epoch(
    step: int, plan: sampler.Plan, model: ProteinMPNN, values: dict[str, float], run: Run
) -> None:
    """Write the models of the epoch that ends after `step` steps; print its summary.

    values: of the validation; empty if there is no validation data.
    """
    epoch = math.ceil(plan.epoch(step))
    names = [f"checkpoint_epoch_{epoch}.pt", "latest_model.pt"]
    if run.best == step:
        names.append("best_model.pt")

    def write() -> None:
        for name in names:
            model.save(run.folder / name)
        loss = train_loss(run.folder, (epoch - 1) * plan.steps_per_epoch, step)
        run.say(f"\nEpoch {epoch} Summary:\n  Train Loss: {loss:.4f}")

    if step:
        distributed.on_main(run.world, write)
    if values:
        run.say(f"  Val Loss:   {values['loss']:.4f}")
    name = "rewards/accuracies"
    if name in values:
        interval = f"[{values[f'{name}_low']:.4f}, {values[f'{name}_high']:.4f}]"
        run.say(f"  Val Accuracy: {values[name]:.4f} {interval}")
    run.say(evaluate.describe(values))


def train_loss(folder: Path, after: int, until: int) -> float:
    """Return the mean loss over the pairs of the steps from after + 1 to until."""
    from ddp_utils.plots import read_metrics

    lines = [line for line in read_metrics(folder) if line["split"] == "train"]
    lines = [line for line in lines if after < line["step"] <= until]
    weights = [line["count"] for line in lines]
    return float(np.average([line["loss"] for line in lines], weights=weights))


# --- main ----------------------------------------------------------------------------------------


@cli.located()
def main(argv: list[str] | None = None) -> int:
    """Run the script with these flags, or with those of the command line; return 0."""
    # setup
    config = read_settings(sys.argv[1:] if argv is None else argv)
    world = distributed.start(config)

    # data
    data, report = read_data(config, world)
    base = weights.path_of(config.base_model_name, config.base_model_dir)
    model = ProteinMPNN.load(base)
    model.base = {"name": config.base_model_name, "digest": digest_of_files([base])}
    plan = sampler.Plan.of(config, len(data["train"]), world.world_size)
    plan = plan._replace(order=functools.partial(batches.epoch_order, data["train"]))
    inputs = {f"content of {split}": pairs.digest(rows) for split, rows in data.items()}
    inputs["global_batch"] = str(plan.global_batch)
    inputs["content of base_model_name"] = model.base["digest"]
    if config.lr_scaling == "world_size":
        inputs["processes (lr_scaling)"] = str(world.world_size)
    spec = runs.RunSpec(
        folder=Path(config.output_dir),
        steps=plan.steps,
        log_every=config.log_every,
        inputs=inputs,
        report=report,
        lines=pairs.describe(report),
        save_best=True,
    )
    if config.check:
        return runs.check(spec, config, world)
    ratio = plan.global_batch / config.base_batch_size
    rate: Any = config.learning_rate  # read_settings has replaced None
    peak = policies.learning_rate(rate, config.lr_scaling, ratio, world.world_size)

    with Run(spec, config, world) as run:
        run.say(
            f"Initialized DDP: rank=0, world_size={world.world_size}, local_rank=0\n"
            f"Using device: {world.device}\n"
            f"Loaded {len(data['train'])} training and {len(data['val'])} validation pairs\n"
            f"Batch size per GPU: {config.batch_size}, Total batch size: {plan.global_batch}\n"
            f"Learning rate: {peak:.3g}, linear rule: {rate * ratio:.3g}"
        )
        loss = f"{config.method}, beta {config.beta:g}"
        steps = f"{plan.steps}, {policies.rate_text(peak, config)}"
        run.describe(model=config.base_model_name, loss=loss, steps=steps)

        # model
        scorer = Scorer(model, config.temperature).to(world.device)
        policy = Policy(scorer, world)
        unscored = torch.zeros(plan.global_batch, 2, device=world.device)
        run.try_largest_steps(
            policy,
            plan,
            np.array([len(pair.preferred) for pair in data["train"]]),
            lambda _, rows: train_step(
                policy, [data["train"][row] for row in sorted(rows)], unscored, config, run
            ),
        )
        score = functools.partial(batches.score, scorer, settings=config, world=world)
        depends_on = {"device": world.device.type, "torch": torch.__version__}
        used = {"train": plan.rows_used()}
        ref_logps = run.reference_logps(depends_on, data, used, score)
        schedule_options = config.lr_scheduler, config.warmup_ratio, config.weight_decay
        optimizer, schedule = policies.make_optimizer(policy, peak, plan.steps, *schedule_options)

        def natives() -> evaluate.Natives:
            phase = run.phase("designing sequences")
            return evaluate.natives(model, data["val"], config.seed, world, phase)

        natives_before = run.once("natives", natives) if data["val"] else {}
        done = run.restore(policy, optimizer, schedule)

        def end_epoch(step: int) -> None:
            if not plan.due(0, step) or run.validated >= step:
                return
            values: dict[str, float] = {}
            if data["val"]:
                held_out = data["val"], ref_logps["val"]
                values = run.evaluated(lambda: validate(scorer, step, *held_out, config, run))
                if step == plan.steps:
                    after = run.evaluated(natives)
                    values |= evaluate.compare_natives(natives_before, after)
                run.results["before" if step == 0 < plan.steps else "val"] = values
            run.log(step, values, "val", echo=False)
            if step or not plan.steps:
                write_epoch(step, plan, model, values, run)

        end_epoch(done)  # if the run was stopped in a validation

        # loop: one iteration is one optimizer step
        displacement = Displacement(config.method, config.sft_weight, "preferred sequences")
        for step in range(done, plan.steps):
            start = time.perf_counter()
            indices = sorted(plan.batch(step))
            rows = [data["train"][index] for index in indices]
            known = ref_logps["train"][to_device(indices, world.device)]  # [global batch, 2]
            if step == done or step % plan.steps_per_epoch == 0:
                begin_epoch(step, plan, run)
            values = train_step(policy, rows, known, config, run)
            checks.check_step(policy, step, values, rows, functools.partial(score, rows), "full")
            if step == 0:
                check_first_step(policy, values, rows, score(rows), known, config, world)
            values["learning_rate"] = optimizer.param_groups[0]["lr"]
            policy.step(optimizer, schedule, values["grad_norm"])
            seconds = time.perf_counter() - start
            values["epoch"] = plan.epoch(step + 1)
            values["seconds"] = seconds
            values["tokens_per_second"] = sum(2 * len(pair.preferred) for pair in rows) / seconds
            values["peak_memory_mb"] = metrics.peak_memory_mb(world.device)
            run.log(step + 1, values)
            run.bar.advance([values["loss"]])
            run.warn(displacement.seen(values["rewards/chosen"]))
            end_epoch(step + 1)
            run.save_if_due(plan.due(config.save_every, step + 1))
    return 0


if __name__ == "__main__":
    distributed.run(main)
