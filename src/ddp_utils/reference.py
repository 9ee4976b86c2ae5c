"""The reference's log-probs: scored once, kept beside the run, checked before the first step."""

import array
import hashlib
import shutil
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, dist, logps
from ddp_utils.pairs import model_path

FILE = "reference_logps.safetensors"


def inputs(config, data, model) -> dict:
    """What a run reads, by content: a continued run must read the same."""
    found = {f"content of {split}": digest_of_rows(pairs) for split, pairs in data.items()}
    for name in ("model_name", "init_adapter", "reference_model"):
        if value := getattr(config, name):
            found[f"content of {name}"] = digest_of_model(value, model.config)
    return found


def digest_of_rows(pairs) -> str:
    """By the tokens of all pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        ids = *pair[0], -1, *pair[1], -1, *pair[2], -2
        digest.update(array.array("q", ids))
    return digest.hexdigest()[:16]


def digest_of_model(name, settings) -> str:
    """By the files of a folder, or by the commit of the hub that `settings` came from."""
    files = sorted(file for file in Path(model_path(name)).glob("*") if file.is_file())
    return digest_of_files(files, *([] if files else [name, settings._commit_hash]))


def digest_of_files(files, *more) -> str:
    """By name, size and content; of a large file 64 places, since to read all takes minutes."""
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as content:
            for place in range(0, size, max(2**20, size // 64)):
                content.seek(place)
                digest.update(content.read(2**20))
    return digest.hexdigest()[:16]


def fingerprint(scorer, data, names, device) -> str:
    """What the log-probs of these pairs hang on: their tokens, the model's files, the numerics.

    names: folders or hub names of the model and its adapter.
    """
    weights = next(scorer.model.parameters()).dtype
    facts = [weights, scorer.autocast, scorer.shared, scorer.own_head, device.type]
    facts += [torch.get_float32_matmul_precision(), torch.__version__, transformers.__version__]
    facts += [sum("forward" in vars(module) for module in scorer.model.modules())]  # see lean.py
    facts += [digest_of_model(name, scorer.bare().config) for name in names if name]
    facts += [(split, digest_of_rows(pairs)) for split, pairs in data.items()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def log_probs(scorer, data, names, budget, world, run) -> dict:
    """Reference log-probs of each split, [pairs, 2]: those of an earlier run beside this one that
    has the same fingerprint, or scored now. They are kept in the run folder.
    """
    data = {split: pairs for split, pairs in data.items() if pairs}
    mark = fingerprint(scorer, data, names, world.device) if world.is_main else ""
    return kept(mark, data, lambda pairs: score(scorer, pairs, world, budget, run.poll), world, run)


def kept(mark, data, scored, world, run) -> dict:
    """Log-probs of each split, [pairs, 2]: those of an earlier run beside this one that has the
    same mark, or scored(pairs) now. They are kept in the run folder.
    """
    found = _kept(run, mark) if world.is_main else None
    known = torch.tensor([float(found is not None)], device=world.device)
    if dist.all_sum(known, world).item():
        tables = {
            split: dist.all_sum(
                (found[split] if found else torch.zeros(len(pairs), 2)).to(world.device), world
            )
            for split, pairs in data.items()
        }
    else:
        tables = {split: scored(pairs) for split, pairs in data.items()}
    if world.is_main:
        plain = {split: table.cpu().contiguous() for split, table in tables.items()}
        save_file(plain, run.folder / FILE, metadata={"fingerprint": mark})
        shutil.copymode(run.folder / "config.json", run.folder / FILE)
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
def score(scorer, pairs, world, budget, poll=lambda: None):
    """Log-probs of all pairs as they are now, shared out over the ranks: [number of pairs, 2]."""
    parts, found = scorer.share(range(len(pairs)), pairs, world, budget), []
    with logps.dropout_off(scorer):
        for part in parts:
            poll()  # stop between two batches, if asked to
            batch = scorer.collate([pairs[i] for i in part.index], world.device)
            found.append(torch.stack(scorer(batch), -1))  # [B, 2]
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
