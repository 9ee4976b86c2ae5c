"""The reference's log-probs: scored once, kept beside the run, checked before the first step."""

import array
import hashlib
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, dist, logps
from ddp_utils.pairs import model_path

FILE = "reference_logps.safetensors"


def fingerprint(scorer, data, names, device) -> str:
    """What the log-probs of these pairs hang on: their tokens, the model's files, the numerics.

    names: folders or hub names of the model and its adapter. Files count by name, size and time
    of change; should that ever deceive, step 0 finds the policy unlike its reference and stops.
    """
    weights = next(scorer.model.parameters()).dtype
    facts = [weights, scorer.autocast, scorer.shared, scorer.own_head, device.type]
    facts += [torch.get_float32_matmul_precision(), torch.__version__, transformers.__version__]
    facts += [sum("forward" in vars(module) for module in scorer.model.modules())]  # see lean.py
    for name in filter(None, names):
        folder = Path(model_path(name))
        files = sorted(file for file in folder.glob("*") if file.is_file())
        stats = [(file, file.stat()) for file in files]
        facts += [(file.name, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
        if not files:  # of the hub
            facts += [name, scorer.bare().config._commit_hash]
    digest = hashlib.sha256(repr(facts).encode())
    for split, pairs in data.items():
        digest.update(split.encode())
        for pair in pairs:
            ids = *pair.prompt, -1, *pair.chosen, -1, *pair.rejected, -2
            digest.update(array.array("q", ids))
    return digest.hexdigest()


def log_probs(scorer, data, names, budget, world, run) -> dict:
    """Reference log-probs of each split, [pairs, 2]: those of an earlier run beside this one that
    has the same fingerprint, or scored now. They are kept in the run folder.
    """
    data = {split: pairs for split, pairs in data.items() if pairs}
    mark, found = None, None
    if world.is_main:
        mark = fingerprint(scorer, data, names, world.device)
        found = _kept(run, mark)
    known = torch.tensor([float(found is not None)], device=world.device)
    if dist.all_sum(known, world).item():
        tables = {
            split: dist.all_sum(
                (found[split] if found else torch.zeros(len(pairs), 2)).to(world.device), world
            )
            for split, pairs in data.items()
        }
    else:
        tables = {split: score(scorer, pairs, world, budget) for split, pairs in data.items()}
    if world.is_main:
        plain = {split: table.cpu().contiguous() for split, table in tables.items()}
        save_file(plain, run.folder / FILE, metadata={"fingerprint": mark})
    return tables


def _kept(run, mark):
    """The tables with this fingerprint among the runs beside this one, if there are any."""
    for path in sorted(run.folder.parent.glob(f"*/{FILE}")):
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata() == {"fingerprint": mark}:
                    run.say(f"reference log-probs: the same as in {path}")
                    return {split: file.get_tensor(split) for split in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # half a file of a run that was killed
    return None


@torch.no_grad()
def score(scorer, pairs, world, budget):
    """Log-probs of all pairs as they are now, shared out over the ranks: [number of pairs, 2]."""
    parts = scorer.share(range(len(pairs)), pairs, world, budget)
    with logps.dropout_off(scorer):
        found = [
            torch.stack(scorer(scorer.collate([pairs[i] for i in part.index], world.device)), -1)
            for part in parts
        ]
    return dist.by_row(len(pairs), parts, found, world)


def noise(dtype, tokens):
    """How far, in nats, two exact scorings of `tokens` tokens [B] may differ by rounding alone.

    fp32: 1e-3 a response. bf16 and fp16 round logits of about 10 to 2^-6; errors of many tokens
    add up like their square root. Measured in bf16 on 20 real and 100 demo pairs on a CPU, alone
    against in a batch: at most 0.2 of this.
    """
    if dtype == torch.float32:
        return torch.full_like(tokens, 1e-3, dtype=torch.float32)
    return 0.05 * tokens.float().sqrt()


def check_reference(now, reference, bound, wheres):
    """Step 0: the policy must be its own reference. now, reference [B, 2], bound [B] in nats.

    Raises UserError naming the first pair whose log-probs differ by more.
    """
    gap = (now - reference).abs().amax(-1)  # [B]
    for index in torch.nonzero(~(gap <= bound)).flatten().tolist():
        raise UserError(
            f"{wheres[index]}: before the first step the policy's log-prob differs from the "
            f"reference's by {gap[index].item():.3g} nats (at most {bound[index].item():.3g}); "
            "is dropout on, or was the reference scored in another precision?"
        )
