"""The reference's log-probs: scored once, kept beside the run."""

import array
import hashlib
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from ddp_utils import UserError, distributed, files, models
from ddp_utils.runs import checkpoint

FILE = "reference_logps.safetensors"


def inputs(config, data, model) -> dict:
    """What a run reads, by content: a continued run must read the same."""
    found = {f"content of {split}": digest_of_rows(pairs) for split, pairs in data.items()}
    for name in ("model_name", "init_adapter", "reference_model"):
        if value := getattr(config, name):
            found[f"content of {name}"] = models.digest_of_model(value, model.config)
    return found


def digest_of_rows(pairs) -> str:
    """By the tokens of all pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        ids = *pair[0], -1, *pair[1], -1, *pair[2], -2
        digest.update(array.array("q", ids))
    return digest.hexdigest()[:16]


def fingerprint(scorer, data, names, device) -> dict:
    """What the log-probs of these pairs depend on: their tokens, the model's files, the numerics.

    names: folders or hub names of the model and its adapter.
    """
    # forwards that memory_efficient has replaced: see lean.py
    replaced = sum("forward" in vars(module) for module in scorer.model.modules())
    facts = {
        "dtype": next(scorer.model.parameters()).dtype,
        "autocast": scorer.autocast,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": device.type,
        "prompt shared": scorer.shared,
        "full logits": scorer.own_head,
        "replaced forwards": replaced,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for what, name in zip(("model", "adapter"), names, strict=False):
        facts[what] = models.digest_of_model(name, scorer.bare().config) if name else ""
    for split, pairs in data.items():
        facts[f"rows of {split}"] = digest_of_rows(pairs)
    return {name: str(value) for name, value in facts.items()}


def log_probs(scorer, data, names, score, run) -> dict:
    """Reference log-probs of each split, [pairs, 2], on all ranks; see cached().

    names: as of fingerprint(); score: pairs -> their log-probs as they are now.
    """
    data = {split: pairs for split, pairs in data.items() if pairs}
    return cached(fingerprint(scorer, data, names, run.world.device), data, score, run)


def cached(fingerprint, data, score, run) -> dict:
    """Log-probs of each split, [pairs, 2], on all ranks: score(pairs), once a run.

    They are kept in the run folder. Those of another run are read if --reference_logps names it.
    fingerprint: what they depend on, as plain data.
    """
    world = run.world
    path = distributed.on_main(world, lambda: _cached_file(run, fingerprint))
    if path:
        tables = {split: torch.zeros(len(pairs), 2) for split, pairs in data.items()}
        if world.is_main:
            tables = load_file(path)
        tables = {
            split: distributed.all_sum(tables[split].to(world.device), world) for split in data
        }
    else:
        tables = {split: score(pairs) for split, pairs in data.items()}
    if world.is_main:
        plain = {split: table.cpu().contiguous() for split, table in tables.items()}
        save_file(plain, run.folder / FILE)
        shutil.copymode(run.folder / "config.json", run.folder / FILE)
        run.add_cached_file(FILE, fingerprint)
    return tables


def _cached_file(run, fingerprint) -> str:
    """The file with the log-probs of this fingerprint, or ""."""
    path = run.cached_file(FILE, fingerprint)
    other = Path(run.config.reference_logps)
    if path or not run.config.reference_logps:
        return str(path or "")
    try:
        entry = checkpoint.read_manifest(other)["files"][FILE]
    except (ValueError, KeyError) as error:
        raise UserError(f"--reference_logps: {other}: {error}; give another run folder") from error
    for name, value in fingerprint.items():
        if entry.get("fingerprint", {}).get(name) != value:
            raise UserError(f"--reference_logps: {other} has another {name}; leave it out")
    if files.sha256(other / FILE) != entry["sha256"]:
        raise UserError(f"--reference_logps: {other / FILE} is damaged; leave it out")
    run.say(f"reference log-probs: those of {other}")
    return str(other / FILE)
