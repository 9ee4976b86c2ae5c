"""Replies before and after training side by side, and what a judge makes of them."""

import importlib.util
import inspect
import numbers

from ddp_utils import UserError, data
from ddp_utils.metrics import wilson


def load_judge(spec, root=None):
    """`file.py:function` -> (prompt, response) -> {score name: number}; the first decides wins.

    Runs that file, so it is only ever named on this command line or in config.py. root: the folder
    that `spec` starts from; the current one if not given. Its `digest` is that of the file.
    """
    path, _, name = spec.rpartition(":")
    file = (root / path if root else data.resolve(path)) if path else None
    if not file or not file.is_file():
        raise UserError(f"--judge: {spec!r} is not file.py:function")
    module_spec = importlib.util.spec_from_file_location(f"judge_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function) or len(inspect.signature(function).parameters) != 2:
        raise UserError(f"--judge: {file.name} has no function {name}(prompt, response)")

    def judge(prompt, response):
        try:
            scores = function(prompt, response)
        except ValueError as error:
            raise UserError(f"--judge: {spec} on {prompt!r:.60}: {error}") from error
        scores = scores if isinstance(scores, dict) else {"": scores}
        if not scores or not all(isinstance(s, numbers.Real) for s in scores.values()):
            raise UserError(f"--judge: {spec} returned {scores!r:.60}; a number or a dict of them")
        return {key: float(score) for key, score in scores.items()}

    judge.digest = data.sha256(file)

    return judge


def compare(policy, reference):
    """Mean scores and win rate; policy, reference: one {name: score} per reply, in one order.

    A win is a reply whose first score is above that of the reference's reply to the same prompt.
    """
    summary = {}
    for who, replies in (("policy", policy), ("reference", reference)):
        for name in replies[0]:
            key = f"judge/{who}/{name}" if name else f"judge/{who}"
            summary[key] = sum(scores[name] for scores in replies) / len(replies)
    first = next(iter(policy[0]))
    wins = 0
    losses = 0
    for own, other in zip(policy, reference, strict=True):
        wins += own[first] > other[first]
        losses += own[first] < other[first]
    low, high = wilson(wins, wins + losses)
    rate = wins / (wins + losses) if wins + losses else None
    summary |= {"win_rate": rate, "win_rate_low": low, "win_rate_high": high}
    return summary | {"wins": wins, "losses": losses, "ties": len(policy) - wins - losses}


def side_by_side(prompts, before, after, expected, judge=None):
    """A row of texts for each prompt, and with a judge the summary of compare()."""
    rows = []
    scores = []
    for texts in zip(prompts, before, after, expected, strict=True):
        prompt, was, now, wanted = (text.strip() for text in texts)
        rows.append({"prompt": prompt, "reference": was, "fine-tuned": now, "expected": wanted})
        if judge:
            scores.append((judge(prompt, now), judge(prompt, was)))
            rows[-1]["verdict"] = _verdict(*scores[-1])
    return rows, compare(*zip(*scores, strict=True)) if scores else {}


def as_text(rows, summary):
    """What a person reads: the judge's summary, then one block per row."""
    blocks = []
    if summary:
        block = ""
        for name, value in summary.items():
            block += f"{name}: {value:.4g}\n" if isinstance(value, float) else f"{name}: {value}\n"
        blocks.append(block)
    for number, row in enumerate(rows, start=1):
        width = 1 + max(map(len, row))
        block = f"--- {number} of {len(rows)}\n"
        for name, text in row.items():
            block += f"{name + ':':{width}} {text}\n"
        blocks.append(block)
    return "\n".join(blocks)


def _verdict(policy, reference):
    first = next(iter(policy))
    gain = policy[first] - reference[first]
    word = "tie" if gain == 0 else "win" if gain > 0 else "loss"
    shown = (f"{name} {reference[name]:g} -> {policy[name]:g}".strip() for name in policy)
    return f"{word} ({', '.join(shown)})"
