"""Sampling that does not depend on neighbours; judges; win rates.

tests/launch/test_units_in_processes.py has the replies of the demo model, on 1, 2 and 3 ranks.
"""

import collections
import json
import math
from pathlib import Path

import pytest
import torch

import runs
from ddp_utils import UserError, sampling


def test_gumbel_noise_draws_from_the_softmax():
    """20,000 draws from known probabilities: within four standard errors of each."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = sampling.SeededNoise(range(20_000))
    drawn = noise(None, probabilities.log().repeat(20_000, 1)).argmax(-1)
    counts = collections.Counter(drawn.tolist())
    for word, p in enumerate(probabilities.tolist()):
        assert abs(counts[word] / 20_000 - p) < 4 * math.sqrt(p * (1 - p) / 20_000)


def test_a_row_draws_the_same_whatever_its_neighbours():
    scores = torch.randn(3, 50)
    together = sampling.SeededNoise([5, 6, 7])(None, scores)
    assert torch.equal(together[1], sampling.SeededNoise([6])(None, scores[1:2])[0])


@pytest.mark.parametrize(
    ("wins", "count", "low", "high"),
    [  # Brown, Cai, DasGupta 2001 / R's prop.test(correct=FALSE)
        (50, 100, 0.4038315, 0.5961685),
        (9, 10, 0.5958500, 0.9821238),
        (0, 10, 0.0, 0.2775328),
        (30, 30, 0.8864829, 1.0),
    ],
)
def test_wilson_interval(wins, count, low, high):
    assert sampling.wilson(wins, count) == pytest.approx((low, high), abs=1e-5)


def test_wins_losses_ties_and_means_by_hand():
    policy = [{"kind": 1.0, "right": 1.0}, {"kind": 1.0, "right": 0.0}, {"kind": 0.0, "right": 1.0}]
    reference = [
        {"kind": 0.0, "right": 1.0},
        {"kind": 1.0, "right": 1.0},
        {"kind": 1.0, "right": 1.0},
    ]
    found = sampling.compare(policy, reference)
    assert (found["wins"], found["losses"], found["ties"]) == (1, 1, 1)
    assert found["win_rate"] == 0.5
    assert found["judge/policy/kind"] == pytest.approx(2 / 3)
    assert found["judge/reference/right"] == 1.0
    undecided = sampling.compare(policy, policy)
    assert undecided["ties"] == 3
    assert undecided["win_rate"] is undecided["win_rate_low"] is None


def judge_file(tmp_path, body):
    path = tmp_path / "j.py"
    path.write_text(body)
    return f"{path}:score"


def test_a_judge_may_return_a_number_or_several(tmp_path):
    one = sampling.load_judge(judge_file(tmp_path, "def score(p, r): return len(r)"))
    assert one("p", "abc") == {"": 3.0}
    assert "judge/policy" in sampling.compare([one("p", "abc")], [one("p", "ab")])
    several = "def score(p, r): return {'long': len(r) > 2, 'same': p == r}"
    assert sampling.load_judge(judge_file(tmp_path, several))("p", "p") == {
        "long": 0.0,
        "same": 1.0,
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "has no function score"),
        ("score = 3", "has no function score"),
        ("def score(a): return 1", r"no function score\(prompt, response\)"),
        ("def score(a, b): return 'good'", "returned {'': 'good'}; a number or a dict"),
        ("def score(a, b): return {}", "returned {}"),
        ("def score(a, b): raise ValueError('unknown question')", "on 'p': unknown question"),
    ],
)
def test_a_judge_that_cannot_judge_costs_one_line(body, message, tmp_path):
    with pytest.raises(UserError, match=message):
        sampling.load_judge(judge_file(tmp_path, body))("p", "r")


@pytest.mark.parametrize("spec", ["nofile.py:score", "score", ":score", "README.md"])
def test_a_judge_that_is_not_there_costs_one_line(spec):
    with pytest.raises(UserError, match="is not file.py:function"):
        sampling.load_judge(spec)


def test_the_text_for_people_by_hand(tmp_path):
    judge = sampling.load_judge(judge_file(tmp_path, "def score(p, r): return len(r)"))
    rows, summary = sampling.side_by_side(["Q"], ["old "], ["newer"], ["best"], judge)
    assert sampling.as_text(rows, summary).endswith(
        "ties: 0\n\n--- 1 of 1\nprompt:     Q\nreference:  old\nfine-tuned: newer\n"
        "expected:   best\nverdict:    win (3 -> 5)\n"
    )
    assert summary["win_rate"] == 1.0
    assert "win_rate_low: 0.2065\n" in sampling.as_text(rows, summary)  # 1 / (1 + 1.96 ** 2)
    rows, summary = sampling.side_by_side(["Q"] * 2, ["a"] * 2, ["b"] * 2, ["c"] * 2)
    assert summary == {} and "verdict" not in rows[0]
    block = "prompt:     Q\nreference:  a\nfine-tuned: b\nexpected:   c\n"
    assert sampling.as_text(rows, summary) == f"--- 1 of 2\n{block}\n--- 2 of 2\n{block}"


def test_the_demo_judge_knows_the_demo():
    judge = sampling.load_judge("data/demo/judge.py:score")
    for line in map(json.loads, Path(runs.PAIRS).read_text().splitlines()):
        assert judge(line["prompt"], line["chosen"]) == dict(courteous=1, right=1, well_formed=1)
        assert judge(line["prompt"], line["rejected"]) == dict(courteous=0, right=1, well_formed=1)
