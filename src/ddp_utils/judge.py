"""Replies before and after training side by side, and a judge that compares them."""

import importlib.util
import inspect
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_utils import UserError, data
from ddp_utils.metrics import wilson
from ddp_utils.run import Run

Scores = dict[str, float]  # name -> score of one reply; the first decides who wins
Judge = Callable[[str, str], Scores]  # of a prompt and a reply; with the attribute `digest`


def load_judge(spec: str, root: Path | None = None) -> Judge:
    """Return the judge that `file.py:function` names.

    The function takes a prompt and a reply, and returns a number or {name: number}. Its file is
    executed, so that it may be named on the command line or in config.py only.
    root: the folder in which the file is; None: as for data files.
    """
    path, _, name = spec.rpartition(":")
    file = (root / path if root else data.resolve(path)) if path else None
    module_spec = None
    if file and file.is_file():
        module_spec = importlib.util.spec_from_file_location(f"judge_{file.stem}", file)
    if not file or not module_spec or not module_spec.loader:
        raise UserError(f"--judge: {spec!r} is not file.py:function")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function) or len(inspect.signature(function).parameters) != 2:
        raise UserError(f"--judge: {file.name} has no function {name}(prompt, reply)")

    def judge(prompt: str, reply: str) -> Scores:
        try:
            scores = function(prompt, reply)
        except ValueError as error:
            raise UserError(f"--judge: {spec} on {prompt!r:.60}: {error}") from error
        if not isinstance(scores, dict):
            scores = {"": scores}
        if not scores or not all(isinstance(x, numbers.Real) for x in scores.values()):
            problem = f"{spec} returned {scores!r:.60} (expected a number or {{name: number}})"
            raise UserError(f"--judge: {problem}")
        return {key: float(score) for key, score in scores.items()}

    judge.digest = data.sha256(file)  # type: ignore[attr-defined]
    return judge


def compare(policy: Sequence[Scores], reference: Sequence[Scores]) -> dict[str, float | None]:
    """Return mean scores and the win rate of the policy's replies over the reference's.

    A reply wins if its first score is above that of the other reply to the same prompt.
    """
    summary: dict[str, float | None] = {}
    for who, replies in (("policy", policy), ("reference", reference)):
        for name in replies[0]:
            mean = sum(scores[name] for scores in replies) / len(replies)
            summary[f"judge/{who}/{name}".rstrip("/")] = mean
    verdicts = [verdict(*scores) for scores in zip(policy, reference, strict=True)]
    wins, losses = verdicts.count("win"), verdicts.count("loss")
    low, high = wilson(wins, wins + losses)
    rate = wins / (wins + losses) if wins + losses else None
    summary |= {"win_rate": rate, "win_rate_low": low, "win_rate_high": high}
    return summary | {"wins": wins, "losses": losses, "ties": verdicts.count("tie")}


def verdict(policy: Scores, reference: Scores) -> str:
    """Return whether the policy's reply is a win, a loss or a tie."""
    first = next(iter(policy))
    if policy[first] == reference[first]:
        return "tie"
    return "win" if policy[first] > reference[first] else "loss"


def side_by_side(
    prompts: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    expected: Sequence[str],
    judge: Judge | None = None,
) -> tuple[list[dict[str, str]], dict[str, float | None]]:
    """Return the texts for each prompt, and with a judge the summary of compare()."""
    rows = []
    policy, reference = [], []  # scores
    for texts in zip(prompts, before, after, expected, strict=True):
        prompt, was, now, wanted = (text.strip() for text in texts)
        rows.append({"prompt": prompt, "reference": was, "fine-tuned": now, "expected": wanted})
        if judge:
            new, old = judge(prompt, now), judge(prompt, was)
            shown = (f"{name} {old[name]:g} -> {new[name]:g}".strip() for name in new)
            rows[-1]["verdict"] = f"{verdict(new, old)} ({', '.join(shown)})"
            policy.append(new)
            reference.append(old)
    return rows, compare(policy, reference) if policy else {}


def write_examples(
    run: Run, pairs_of: dict, before: dict, after: dict, judge: Judge | None
) -> None:
    """Write the replies before and after training, and what the judge says of them.

    pairs_of: split -> pairs; before, after: split -> replies to its first prompts.
    """
    examples = {}
    for split, replies in after.items():
        pairs = pairs_of[split][: len(replies)]
        prompts = [pair.text for pair in pairs]
        expected = [pair.expected for pair in pairs]
        rows, summary = side_by_side(prompts, before[split], replies, expected, judge)
        run.write_text(f"distributed_output_{split}.txt", as_text(rows, summary))
        run.results[split] |= summary
        examples[split] = rows
    run.write_json("examples.json", examples)


def as_text(rows: Sequence[dict[str, str]], summary: dict[str, float | None]) -> str:
    """Return the judge's summary and the texts for each prompt, for people."""
    lines = []
    for name, value in summary.items():
        lines.append(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    blocks = ["\n".join([*lines, ""])] if lines else []
    for number, row in enumerate(rows, start=1):
        width = 1 + max(map(len, row))
        lines = [f"--- {number} of {len(rows)}"]
        lines += [f"{name + ':':{width}} {text}" for name, text in row.items()]
        blocks.append("\n".join([*lines, ""]))
    return "\n".join(blocks)
