"""Replies before and after training side by side, and a judge that compares them."""

import hashlib
import inspect
import math
import numbers
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_utils import UserError, data, distributed
from ddp_utils.metrics import wilson, wilson_of_fraction
from ddp_utils.run import Parts, Run, in_parts

Scores = dict[str, float]  # name -> score of one reply; the first decides who wins
Summary = dict[str, float | None]  # of all replies
Judge = Callable[[str, str], Scores]  # of a prompt and a reply; with the attribute `digest`


def load_judge(spec: str, demo: str = "", tried: Iterable[tuple[str, str]] = ()) -> Judge:
    """Return the judge that `file.py:function` names.

    The function takes a prompt and a reply, and returns a number or {name: number}. Its file is
    executed, so that it may be named on the command line or in config.py only.
    demo: for this spec, the file is the project's own, whatever the current folder contains.
    tried: prompts and replies that the judge is tried on; a script gives them to rank 0 only.
    """
    path, _, name = spec.rpartition(":")
    file = data.ROOT / path if spec == demo else data.resolve(path)
    if not path or not file.is_file():
        raise UserError(f"--judge: {spec!r} is not file.py:function")
    sys.path.append(str(file.parent))  # of what it imports; last, so that it hides nothing
    try:
        function: Any = runpy.run_path(str(file)).get(name)
    except ImportError as error:
        raise UserError(f"--judge: {file}: {error}") from error
    try:
        inspect.signature(function).bind("prompt", "reply")
    except (TypeError, ValueError) as error:
        problem = f"{file.name} has no function {name}(prompt, reply)"
        raise UserError(f"--judge: {problem}") from error
    names: list[str] = []  # of the scores of the first reply

    def judge(prompt: str, reply: str) -> Scores:
        try:
            scores = function(prompt, reply)
        except ValueError as error:
            raise UserError(f"--judge: {spec} on {prompt!r:.60}: {error}") from error
        if not isinstance(scores, dict):
            scores = {"": scores}
        if not scores or not all(map(is_finite, scores.values())):
            expected = "expected a finite number or {name: number}"
            raise UserError(f"--judge: {spec} returned {scores!r:.60} ({expected})")
        if not names:
            names.extend(scores)
        if {*scores} != {*names}:
            problem = f"returned {scores!r:.60}, but {', '.join(names)} for another reply"
            raise UserError(f"--judge: {spec} {problem}; return the same names for each reply")
        return {key: float(score) for key, score in scores.items()}

    judge.digest = data.sha256(file)  # type: ignore[attr-defined]
    for prompt, reply in tried:
        judge(prompt, reply)
    return judge


def is_finite(score: object) -> bool:
    """Return whether a score is a number that can be compared."""
    return isinstance(score, numbers.Real) and math.isfinite(score)


def ask_once(run: Run, name: str, asked: Sequence[tuple[str, str]], judge: Judge) -> Judge:
    """Return a judge that has scored these prompts and replies, in parts; see in_parts().

    Only rank 0 asks, since a judge may be slow or cost money. name: of the file of the scores.
    """
    asked = [*dict.fromkeys(asked)]
    world = run.world
    digest = hashlib.sha256(repr(asked).encode()).hexdigest()
    facts = {"judge": judge.digest, "asked": digest}  # type: ignore[attr-defined]
    parts = [[row] for row in range(len(asked))]
    first: Scores = distributed.on_main(world, lambda: judge(*asked[0])) if asked else {}
    scores = [*first]

    def judged(_: str, missing: Parts) -> Iterator[Tensor]:
        phase = run.phase(f"judging {name}", len(parts), len(parts) - len(missing))
        table = torch.full((len(asked), len(scores)), torch.nan, dtype=torch.double)
        for part in missing:
            for row in phase.each(part):
                one = partial(judge, *asked[row])
                verdict = distributed.on_main(world, one) if row else first
                table[row] = torch.tensor([verdict[score] for score in scores], dtype=torch.double)
            yield table.to(world.device)

    path = run.folder / f"parts/judge-{name}.safetensors"
    table = in_parts(path, facts, {"scores": parts}, judged, world)["scores"].tolist()
    known = dict(zip(asked, table, strict=True))
    return lambda prompt, reply: dict(zip(scores, known[prompt, reply], strict=True))


def compare(policy: Sequence[Scores], reference: Sequence[Scores]) -> Summary:
    """Return mean scores and the win rate of the policy's replies over the reference's.

    A reply wins if its first score is above that of the other reply to the same prompt.
    """
    summary: Summary = {}
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


def write_examples(
    run: Run, pairs_of: dict, before: dict, after: dict, judge: Judge | None
) -> None:
    """Write the replies before and after training side by side; a judge compares them.

    pairs_of: split -> pairs; before, after: split -> replies to its first prompts.
    """
    examples = {}
    for split, replies in after.items():
        rows, scores, texts, asked = [], [], [], []
        for pair, *both in zip(pairs_of[split], before[split], replies, strict=False):
            texts.append([text.strip() for text in (pair.text, *both, pair.expected)])
            prompt, was, now, _ = texts[-1]
            asked += [(prompt, now), (prompt, was)]
        if judge:
            known = ask_once(run, split, asked, judge)
        for prompt, was, now, wanted in texts:
            rows.append({"prompt": prompt, "reference": was, "fine-tuned": now, "expected": wanted})
            if judge:
                new, old = known(prompt, now), known(prompt, was)
                shown = (f"{name} {old[name]:g} -> {new[name]:g}".strip() for name in new)
                rows[-1]["verdict"] = f"{verdict(new, old)} ({', '.join(shown)})"
                scores.append((new, old))
        summary = compare(*zip(*scores, strict=True)) if scores else {}
        run.write_text(f"distributed_output_{split}.txt", as_text(rows, summary))
        run.results[split] |= summary
        examples[split] = rows
    run.write_json("examples.json", examples)


def as_text(rows: Sequence[dict[str, str]], summary: Summary) -> str:
    """Return the judge's summary and the texts for each prompt, for people."""
    lines = []
    for name, value in summary.items():
        lines.append(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    for number, row in enumerate(rows, start=1):
        lines += ["", f"--- {number} of {len(rows)}"]
        lines += [f"{name + ':':12} {text}" for name, text in row.items()]
    return "\n".join([*lines, ""]).lstrip("\n")


def difference(first: float, second: float, count: int, scale: float = 1.0) -> tuple[float, float]:
    """Return the 95 % interval of first - scale * second, for fractions of `count` > 0 each.

    From their Wilson intervals (Newcombe 1998, method 10).
    """
    middle = first - scale * second
    (low, high), (other_low, other_high) = (wilson_of_fraction(x, count) for x in (first, second))
    below = math.hypot(first - low, scale * (other_high - second))
    above = math.hypot(high - first, scale * (second - other_low))
    return middle - below, middle + above
