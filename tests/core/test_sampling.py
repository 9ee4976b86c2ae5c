"""Sampling, which does not depend on other replies of the batch; judges; win rates.

tests/core/test_units_in_processes.py has the replies of the demo model, on 1, 2 and 3 ranks.
"""

import functools
import math
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers

import main_distributed
from ddp_utils import Stop, UserError, metrics, terminal
from ddp_utils.distributed import World
from lm import judge, logps, sampling
from lm.judge import ask_once, compare, load_judge


def tiny_scorer():
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, vocab_size=12, initializer_range=0.15)
    return logps.Scorer(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def sample(scorer, count, batch_size=500, max_new_tokens=1, temperature=1.0, top_p=1.0):
    """Return `count` replies to each of PROMPTS."""
    prompts = []
    for prompt in PROMPTS:
        prompts += [prompt] * count
    spec = sampling.SampleSpec(temperature, top_p, max_new_tokens, batch_size, seed=0)
    return sampling.generate(scorer, prompts, [], World(), spec)


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]  # padded on the left when they are in one batch


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8)])
def test_words_are_drawn_as_often_as_the_closed_form_says(temperature, top_p):
    """A chi-square test of 3000 first tokens after each prompt, in float64."""
    scorer = tiny_scorer()
    replies = torch.tensor(sample(scorer, 3000, temperature=temperature, top_p=top_p))
    for number, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = scorer.model(torch.tensor([prompt])).logits[0, -1].double()
        likeliest = (logits / temperature).softmax(0).sort(descending=True)
        before = likeliest.values.cumsum(0) - likeliest.values
        kept = likeliest.values * (before < top_p)  # the smallest set that has so much
        expected = 3000 * (kept / kept.sum())[likeliest.indices.argsort()]  # [12]
        counts = replies[3000 * number : 3000 * (number + 1), 0].bincount(minlength=12)
        is_kept = expected > 0
        assert not counts[~is_kept].any() and is_kept.all() == (top_p == 1)
        terms = (counts - expected)[is_kept] ** 2 / expected[is_kept]
        half_freedom = torch.tensor((len(terms) - 1) / 2, dtype=torch.float64)
        assert half_freedom >= 1.5
        assert torch.special.gammaincc(half_freedom, terms.sum() / 2) > 1e-3, number


def test_a_batch_draws_what_one_prompt_at_a_time_draws():
    scorer = tiny_scorer()
    options = dict(max_new_tokens=12, temperature=0.7, top_p=0.8)
    together = sample(scorer, 4, **options)
    assert together == sample(scorer, 4, batch_size=1, **options)
    assert len({tuple(reply) for reply in together}) > 6


def test_top_p_is_compared_with_exact_sums():
    """V equal tokens: k p is the sum before token k, and a hair more than that keeps token k.

    In fp32, half of the sums are rounded up, beyond that hair.
    """
    size = 100_000
    p = torch.zeros(size).softmax(0)[0].item()  # 1 / V in fp32
    last = torch.tensor([1 - 1e-12], dtype=torch.double)  # the last token that is kept
    for k in range(80_001, 80_031):
        spec = sampling.SampleSpec(1.0, k * p + 1e-11, 1, 1, 0)
        assert sampling.sample_tokens(torch.zeros(1, size), last, spec).item() == k


def test_the_head_gets_contiguous_states_which_it_need_not_copy():
    """torch copies a frozen bf16 weight for each reply otherwise: 3.4 GiB on a real model."""
    scorer = tiny_scorer()
    head = scorer.model.lm_head
    seen = []
    hook = head.register_forward_hook(lambda _, states, __: seen.append(states[0].is_contiguous()))
    sample(scorer, 4, max_new_tokens=3)
    assert len(seen) > 3 and all(seen)
    hook.remove()
    assert not head._forward_pre_hooks  # in training the head has none


def test_by_default_keys_and_values_of_a_batch_have_at_most_a_gibibyte(monkeypatch):
    """By hand: 2 x 16 numbers of 4 bytes in one layer for each of 5 + 3 tokens: 1024 bytes."""
    scorer = tiny_scorer()
    spec = sampling.SampleSpec(0.0, 1.0, 3, None, 0)
    scorer.way = sampling.FASTEST
    for most, size in ((2**30, 64), (5 * 1024, 5), (5 * 1024 - 1, 4), (0, 1)):
        monkeypatch.setattr(sampling, "CACHE", most)
        assert sampling.batch_size(scorer, PROMPTS, spec, World()) == size
        assert sampling.batch_size(scorer, PROMPTS, spec._replace(batch_size=7), World()) == 7
    scorer.model.config.head_dim = 16  # as in Qwen3: not hidden_size / heads, which is 8
    monkeypatch.setattr(sampling, "CACHE", 5 * 1024)
    assert sampling.batch_size(scorer, PROMPTS, spec, World()) == 2
    scorer.way = sampling.WAYS[1]
    assert sampling.batch_size(scorer, PROMPTS, spec._replace(batch_size=7), World()) == 1


def test_replies_use_a_twentieth_of_a_gpus_memory(monkeypatch):
    for gib, expected in ((80, 4), (16, 1)):
        memory = mock.Mock(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        assert sampling.cache_bytes(torch.device("cuda")) == pytest.approx(expected * 2**30)


def test_the_progress_counts_each_token(monkeypatch):
    """Two batches of two tokens at most; a reply that ends early completes its batch."""
    fractions, scorer = [], tiny_scorer()
    phase = terminal.Phase("sampling", terminal.Bar(True))
    monkeypatch.setattr(sampling, "choose_way", lambda *_: setattr(scorer, "way", sampling.FASTEST))
    advance = phase.advance
    phase.advance = lambda *by: [advance(*by), fractions.append(phase.now.n)]
    spec = sampling.SampleSpec(0.0, 1.0, 2, 2, 0)
    rows = [row for part in sampling.parts_of(scorer, PROMPTS, spec, World()) for row in part]
    sampling.sample(scorer, PROMPTS, rows, [], World(), spec, phase)
    assert fractions == pytest.approx([0, 0.25, 0.5, 0.5, 0.75, 1])


def test_stored_replies_are_used_only_for_the_same_question(tmp_path, monkeypatch):
    """Not those of another seed, length or prompt; what is stored is not sampled again."""
    scorer, sampled = tiny_scorer(), []
    original = sampling._sample_batch
    spec = sampling.SampleSpec(1.0, 1.0, 12, 2, seed=0)
    cases = [(PROMPTS, spec), (PROMPTS, spec._replace(seed=1)), (PROMPTS[:2], spec)]
    cases += [(PROMPTS, spec._replace(max_new_tokens=9, temperature=0.5))]
    expected = [sampling.generate(scorer, prompts, [], World(), how) for prompts, how in cases]

    def watched(*arguments, **options):
        sampled.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(sampling, "_sample_batch", watched)
    for (prompts, how), replies in zip(cases, expected, strict=True):
        for batches in (math.ceil(len(prompts) / 2), 0):
            sampled.clear()
            once = scorer, prompts, [], World(), how, lambda *_: terminal.Phase()
            assert sampling.generate_once(tmp_path / "replies.safetensors", *once) == replies
            assert len(sampled) == batches


def test_a_judge_that_is_stopped_scores_only_what_is_missing(tmp_path):
    """Stopped before the third of four questions, of which one comes twice."""
    asked = [("a", "x"), ("a", "y"), ("b", "x"), ("a", "x"), ("b", "y")]
    calls = []

    def judge(prompt, reply):
        calls.append((prompt, reply))
        return {"first": ord(prompt) / 7, "second": float(ord(reply))}

    def stop():
        if len(calls) == 2:
            raise Stop("stopped", 85)

    def once(poll):
        phase = functools.partial(terminal.Phase, "judging", terminal.Bar(False), poll, bool)
        run = SimpleNamespace(world=World(), folder=tmp_path, phase=lambda _, *size: phase(*size))
        calls.clear()
        return ask_once(run, "test", asked, judge)

    judge.digest = "1"
    with pytest.raises(Stop):
        once(stop)
    scored = once(lambda: None)
    assert calls == [("a", "x"), ("b", "x"), ("b", "y")]
    assert scored("b", "x") == {"first": 14.0, "second": 120.0}  # ord("b") is 98
    once(lambda: None)
    assert calls == [("a", "x")]
    judge.digest = "2"  # another judge
    once(lambda: None)
    assert len(calls) == 4


WILSON = {  # Brown, Cai, DasGupta 2001 / R's prop.test(correct=FALSE)
    (50, 100): (0.4038315, 0.5961685),
    (9, 10): (0.5958500, 0.9821238),
    (0, 10): (0.0, 0.2775328),
    (30, 30): (0.8864829, 1.0),
}


def test_wilson_interval():
    for (wins, count), interval in WILSON.items():
        assert metrics.wilson(wins, count) == pytest.approx(interval, abs=1e-5)
    # of 1, 2, 4: mean 7/3, variance of a sample 7/3; R's sd(c(1, 2, 4)) is 1.527525
    half = 1.96 * 1.527525 / 3**0.5
    assert metrics.interval(7 / 3, 7, 3) == pytest.approx((7 / 3 - half, 7 / 3 + half), abs=1e-5)


def test_the_interval_of_a_difference_of_fractions():
    """Newcombe 1998, table II, method 10; scaled by 0: the Wilson interval of the first one."""
    for (wins, others), interval in {(9, 3): (0.1705, 0.8090), (10, 0): (0.6075, 1.0)}.items():
        found = judge.difference(wins / 10, others / 10, 10)
        assert found == pytest.approx(interval, abs=5e-5)
    assert judge.difference(0.5, 0.3, 100, 0.0) == pytest.approx(WILSON[50, 100], abs=1e-5)
    # 0.8 of 9 of 10 and 3 of 10: Wilson [0.5958, 0.9821] and [0.1078, 0.6032], by R
    low, high = judge.difference(0.3, 0.9, 10, 0.8)
    assert low == pytest.approx(-0.42 - math.hypot(0.3 - 0.107789, 0.8 * 0.0821238), abs=1e-5)
    assert high == pytest.approx(-0.42 + math.hypot(0.603222 - 0.3, 0.8 * 0.304150), abs=1e-5)


def test_wins_losses_ties_and_means_by_hand():
    policy = [{"kind": 1.0, "right": 1.0}, {"kind": 1.0, "right": 0.0}, {"kind": 0.0, "right": 1.0}]
    reference = [{"kind": 0.0, "right": 1.0}, *[{"kind": 1.0, "right": 1.0}] * 2]
    found = compare(policy, reference)
    assert (found["wins"], found["losses"], found["ties"]) == (1, 1, 1)
    assert found["win_rate"] == 0.5
    assert found["judge/policy/kind"] == pytest.approx(2 / 3)
    assert found["judge/reference/right"] == 1.0
    undecided = compare(policy, policy)
    assert undecided["ties"] == 3
    assert undecided["win_rate"] is undecided["win_rate_low"] is None


def load(tmp_path, body):
    path = tmp_path / "j.py"
    path.write_text(body)
    return load_judge(f"{path}:score")


def test_a_judge_may_return_a_number_or_several(tmp_path):
    judge = load(tmp_path, "def score(p, r): return len(r)")
    assert judge("p", "abc") == {"": 3.0}
    assert "judge/policy" in compare([judge("p", "abc")], [judge("p", "ab")])
    judge = load(tmp_path, "def score(p, r): return {'long': len(r) > 2, 'same': p == r}")
    assert judge("p", "p") == {"long": 0.0, "same": 1.0}


def test_a_judge_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "its_words.py").write_text("GOOD = {'please'}")
    judge = load(tmp_path, "import its_words\ndef score(p, r): return r in its_words.GOOD")
    assert judge("p", "please") == {"": 1.0}
    with pytest.raises(UserError, match="^--judge: .*j.py: No module named 'nowhere'"):
        load(tmp_path, "import nowhere")


def test_only_rank_0_tries_the_judge(tmp_path):
    """A judge may cost money, or load a model of its own."""
    path = tmp_path / "j.py"
    path.write_text("def score(p, r): raise ValueError('asked')")
    config = main_distributed.settings.Config(judge=f"{path}:score")
    pair = SimpleNamespace(text="p", expected="r")
    main_distributed.load_judge(config, {"val": [pair], "test": []}, is_main=False)
    with pytest.raises(UserError, match="asked"):
        main_distributed.load_judge(config, {"val": [pair], "test": []}, is_main=True)


def test_each_reply_has_the_same_scores(tmp_path):
    judge = load(tmp_path, "def score(p, r, more=1): return {'ok': 1} | ({'json': 1} if r else {})")
    assert judge("p", "r") == judge("q", "s") == {"ok": 1.0, "json": 1.0}
    problem = "returned {'ok': 1}, but ok, json for another reply; return the same names for each"
    with pytest.raises(UserError, match=problem):
        judge("p", "")


UNFIT = {
    "": "has no function score",
    "score = 3": "has no function score",
    "def score(a): return 1": r"no function score\(prompt, reply\)",
    "def score(a, b): return 'good'": r"returned {'': 'good'} \(expected a finite number",
    "def score(a, b): return {'x': 1, 'y': float('nan')}": "expected a finite number or {name: ",
    "def score(a, b): return {}": "returned {}",
    "def score(a, b): raise ValueError('unknown question')": "on 'p': unknown question",
}


@pytest.mark.parametrize("body", UNFIT)
def test_a_judge_that_cannot_judge_costs_one_line(tmp_path, body):
    with pytest.raises(UserError, match=UNFIT[body]):
        load(tmp_path, body)("p", "r")
