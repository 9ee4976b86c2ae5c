"""The losses against closed forms in plain math: values, gradients, limits, options, metrics.

Nothing here uses the code's own formulas: `by_hand` gives each loss and its two derivatives.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from config import Config
from ddp_utils import UserError
from ddp_utils.cli import METHODS
from ddp_utils.losses import Displacement, LogPs, LossSpec, preference
from ddp_utils.losses import noise as rounding

ALL = ["dpo", "cdpo", "robust", "ipo", "ipo_sum", "hinge", "dpop", "dposhift", "dpopshift", "simpo"]
ALL += ["orpo"]
AVERAGEABLE = ["dpo", "cdpo", "robust", "hinge", "dpop", "dposhift", "dpopshift"]
OPTIONS = {  # option -> the value given here and the methods whose paper has it
    "label_smoothing": (0.2, {"cdpo", "robust"}),
    "lambda_dpop": (5.0, {"dpop", "dpopshift"}),
    "lambda_shift": (0.6, {"dposhift", "dpopshift"}),
    "simpo_gamma": (0.7, {"simpo"}),
}
FREE = ["simpo", "orpo"]  # without a reference
NOISE = 1e-3


def sigma(z):
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def log_sigma(z):
    return -math.log1p(math.exp(-z)) if z >= 0 else z - math.log1p(math.exp(z))


def spec_of(method, **options):
    """Return the loss with the options of OPTIONS that the method uses."""
    used = {name: value for name, (value, users) in OPTIONS.items() if method in users}
    return LossSpec(method, **{**used, **options})


def by_hand(spec, chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens):
    """Loss of one pair, d loss / d chosen, d loss / d rejected."""
    average = spec.length_average or spec.method in ("ipo", "simpo", "orpo")
    a, b = (1 / chosen_tokens, 1 / rejected_tokens) if average else (1.0, 1.0)
    beta, e = spec.beta, spec.label_smoothing
    if spec.method == "simpo":
        z = beta * (a * chosen - b * rejected) - spec.simpo_gamma
        return -log_sigma(z), (sigma(z) - 1) * beta * a, -(sigma(z) - 1) * beta * b
    if spec.method == "orpo":  # 1 - p = -expm1(log p); the slope of the log odds is 1 / (1 - p)
        x, y = a * chosen, b * rejected
        z = x - y - math.log(-math.expm1(x)) + math.log(-math.expm1(y))
        slope = beta * (sigma(z) - 1)
        return -beta * log_sigma(z), -slope * a / math.expm1(x), slope * b / math.expm1(y)
    u, v = a * (chosen - ref_chosen), b * (rejected - ref_rejected)
    if spec.method.startswith("ipo"):
        h = u - v - 1 / (2 * beta)
        return h * h, 2 * h * a, -2 * h * b
    shift = spec.lambda_shift if spec.method in ("dposhift", "dpopshift") else 1.0
    z, dz_du, dz_dv = beta * (u - shift * v), beta, -beta * shift
    if spec.method in ("dpop", "dpopshift") and ref_chosen - chosen > NOISE:
        z, dz_du = z + beta * spec.lambda_dpop * u, beta + beta * spec.lambda_dpop
    if spec.method == "cdpo":
        loss, slope = -(1 - e) * log_sigma(z) - e * log_sigma(-z), sigma(z) - (1 - e)
    elif spec.method == "robust":
        loss = (-(1 - e) * log_sigma(z) + e * log_sigma(-z)) / (1 - 2 * e)
        slope = ((1 - e) * (sigma(z) - 1) - e * sigma(z)) / (1 - 2 * e)
    elif spec.method == "hinge":
        loss, slope = max(0.0, 1 - z), -1.0 if z < 1 else 0.0
    else:
        loss, slope = -log_sigma(z), sigma(z) - 1
    return loss, slope * dz_du * a, slope * dz_dv * b


def some_pairs(spread, count=64, seed=0):
    """Rows of LogPs; log-ratios up to +-spread nats."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        tokens = draw.randint(1, 40), draw.randint(1, 40)
        refs = [draw.uniform(-5, -0.1) * n for n in tokens]
        ratios = [draw.uniform(-spread, spread) for _ in tokens]
        rows.append((refs[0] + ratios[0], refs[1] + ratios[1], *refs, *tokens))
    return rows


def logps_of(rows, dtype=torch.float64):
    columns = [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]
    return LogPs(*columns)


def loss_and_gradients(spec, rows, dtype=torch.float64):
    logps = logps_of(rows, dtype)
    inputs = logps.chosen.requires_grad_(), logps.rejected.requires_grad_()
    losses, _ = preference(logps, spec, NOISE)
    return losses.detach(), *torch.autograd.grad(losses.sum(), inputs)


def check_against_hand(spec, rows):
    found = loss_and_gradients(spec, rows)
    expected = zip(*(by_hand(spec, *row) for row in rows), strict=True)
    tensors = tuple(torch.tensor(column, dtype=torch.float64) for column in expected)
    torch.testing.assert_close(found, tensors, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1, 30, 6000])
@pytest.mark.parametrize("method", ALL)
def test_value_and_gradient_equal_the_closed_form(method, spread):
    rows = some_pairs(spread)
    if method == "orpo":  # of probabilities, so that log-probs are below 0
        rows = [(-abs(chosen), -abs(rejected), *rest) for chosen, rejected, *rest in rows]
    check_against_hand(spec_of(method, beta=0.1), rows)


def test_length_average_divides_each_log_ratio_by_its_own_tokens():
    for method in AVERAGEABLE:
        check_against_hand(spec_of(method, beta=0.5, length_average=True), some_pairs(30))


def test_margins_of_500_stay_finite_in_single_precision():
    margins = [(450.0, -60.0), (-550.0, -60.0), (-50.0, 440.0)]
    rows = [(*logps, -50.0, -60.0, 1, 1) for logps in margins]
    for method in ALL:
        for found in loss_and_gradients(spec_of(method, beta=1.0), rows, torch.float32):
            assert torch.isfinite(found).all() and found.dtype == torch.float32, method


def test_the_noise_of_a_response_grows_like_the_square_root_of_its_tokens():
    scorer = SimpleNamespace(precision=torch.bfloat16, token_noise=0.07)
    tokens = torch.tensor([1, 4, 100])
    torch.testing.assert_close(rounding(scorer, tokens), torch.tensor([0.56, 1.12, 5.6]))
    torch.testing.assert_close(rounding(scorer, tokens, 4.0), torch.tensor([0.28, 0.56, 2.8]))
    scorer.token_noise = 0.0  # the rounding of a logit remains
    torch.testing.assert_close(rounding(scorer, tokens), torch.tensor([0.1, 0.2, 1.0]))
    scorer.precision = torch.float32
    torch.testing.assert_close(rounding(scorer, tokens), torch.full((3,), 1e-3))


def test_the_dpop_penalty_is_beta_lambda_times_a_fall_beyond_the_noise():
    # fell by 0.25: z = 0.1 * (-0.25 + 1) = 0.075, and 0.1 * 50 * 0.25 = 1.25 less if penalized
    pair = logps_of([(-10.25, -12.0, -10.0, -11.0, 4, 4)])
    spec = LossSpec("dpop", beta=0.1, lambda_dpop=50.0)
    for noise, z in ((0.1, -1.175), (0.5, 0.075)):
        loss = preference(pair, spec, noise)[0].item()
        assert loss == pytest.approx(math.log(1 + math.exp(-z)), rel=1e-12)


@pytest.mark.parametrize("method", [method for method in ALL if method not in FREE])
def test_the_loss_at_the_reference_has_its_closed_form(method):
    pair = logps_of([(-7.0, -9.0, -7.0, -9.0, 3, 5)])
    for beta in (0.05, 0.1, 2.0):
        ipo = 1 / (4 * beta * beta)
        expected = {"hinge": 1.0, "ipo": ipo, "ipo_sum": ipo}.get(method, math.log(2))
        spec = spec_of(method, beta=beta)
        assert preference(pair, spec)[0].item() == pytest.approx(expected, rel=1e-12)


def test_an_option_is_an_error_for_methods_that_do_not_use_it():
    """0 counts as given."""
    assert list(METHODS) == ALL
    for method in ALL:
        for option, (value, users) in OPTIONS.items():
            for given in (value, 0.0):
                config = Config(method=method, **{option: given})
                if method in users:
                    assert getattr(LossSpec.of(config), option) == given
                    continue
                with pytest.raises(UserError, match=f"^--{option}: {method} ") as caught:
                    LossSpec.of(config)
                assert [user for user in users if user not in str(caught.value)] == []
    for method in set(ALL) - set(AVERAGEABLE):
        with pytest.raises(UserError, match=f"--length_average: {method}"):
            LossSpec.of(Config(method=method, length_average=True))


def test_an_option_that_is_left_out_has_the_documented_default():
    documented = {
        "dpo": LossSpec("dpo", beta=0.3),
        "cdpo": LossSpec("cdpo", beta=0.3, label_smoothing=0.1),
        "robust": LossSpec("robust", beta=0.3, label_smoothing=0.1),
        "dpopshift": LossSpec("dpopshift", beta=0.3, lambda_dpop=50.0, lambda_shift=0.75),
        "simpo": LossSpec("simpo", beta=0.3, simpo_gamma=0.5),
    }
    for method, spec in documented.items():
        config = Config(method=method, beta=0.3, sft_weight=1.5)
        assert LossSpec.of(config) == spec._replace(sft_weight=1.5)
    assert LossSpec.of(Config(length_average=True)).length_average
    for weight, expected in ((None, 1.0), (0.0, 0.0), (0.5, 0.5)):  # of the NLL in Hong et al.
        assert LossSpec.of(Config(method="orpo", sft_weight=weight)).sft_weight == expected
    assert LossSpec.of(Config()).sft_weight == 0


def test_the_odds_ratio_of_certain_responses_is_finite():
    """p of 0.2 and 0.1: odds 1/4 and 1/9, so L = -0.3 log(1 / (1 + 4/9)). p may be 1 in fp32."""
    rows = [(2 * math.log(0.2), 3 * math.log(0.1), 0.0, 0.0, 2, 3)]
    losses, metrics = preference(logps_of(rows), LossSpec("orpo", beta=0.3))
    assert losses.item() == pytest.approx(0.3 * math.log(13 / 9), rel=1e-12)
    assert metrics["rewards/chosen"].item() == pytest.approx(0.3 * math.log(0.2), rel=1e-12)
    for chosen, rejected in ((0.0, -90.0), (-90.0, 0.0), (1e-7, 1e-7), (-900.0, -1e-9)):
        rows = [(chosen, rejected, 0.0, 0.0, 3, 4)]
        for found in loss_and_gradients(LossSpec("orpo", beta=1.0), rows, torch.float32):
            assert torch.isfinite(found).all(), rows


def test_the_metrics_are_beta_times_the_summed_log_ratios_whatever_the_loss():
    rows = [(-8.0, -11.0, -10.0, -10.0, 4, 5), (-9.0, -4.0, -7.0, -5.0, 4, 5)]
    rows += [(-7.0, -9.0, -7.0, -9.0, 3, 5)]  # a tie is not ranked right
    expected = {
        "rewards/chosen": [1.0, -1.0, 0.0],
        "rewards/rejected": [-0.5, 0.5, 0.0],
        "rewards/margins": [1.5, -1.5, 0.0],
        "rewards/accuracies": [1.0, 0.0, 0.0],
        "logps/chosen": [-8.0, -9.0, -7.0],
        "logps/rejected": [-11.0, -4.0, -9.0],
    }
    for method in ("dpo", "ipo", "dposhift", "dpop"):
        _, metrics = preference(logps_of(rows), LossSpec(method, beta=0.5))
        assert {name: values.tolist() for name, values in metrics.items()} == expected
    _, metrics = preference(logps_of(rows[:1]), LossSpec("simpo", beta=2.0))  # per token
    assert [metrics["rewards/chosen"].item(), metrics["rewards/rejected"].item()] == [-4.0, -4.4]


def warned(rewards, method="dpo"):
    """Return the steps in which a warning is printed."""
    displacement = Displacement(method, sft_weight=0)
    lines = [displacement.seen(reward) for reward in rewards]
    return [step for step, line in enumerate(lines, start=1) if line]


REWARDS = {  # reason -> rewards/chosen of each step, and the steps with a warning
    "falls": ([-0.1] * 40, [5]),
    # 5 x -3: -1 + 1.96 sqrt(4.44 / 10) = 0.31; 6 x -3: -1.4 + 1.96 sqrt(4.27 / 10) = -0.12
    "only the last ten steps count": ([1.0] * 100 + [-3.0] * 10, [106]),
    "too few steps": ([-9.0] * 4, []),
    "zero": ([0.0] * 40, []),
    "rises": ([0.1] * 40, []),
    "one bad batch": ([0.5] * 9 + [-0.3] + [0.5] * 9, []),
    "rises on the mean": ([0.2, -0.1] * 20, []),
}


@pytest.mark.parametrize("reason", REWARDS)
def test_a_warning_is_printed_once_if_chosen_responses_become_less_likely(reason):
    rewards, steps = REWARDS[reason]
    assert warned(rewards) == steps
    for method in FREE:
        assert warned(rewards, method) == []


@pytest.mark.parametrize(
    ("method", "sft_weight", "remedy"),
    [
        ("dpo", 0, "--sft_weight 1 or --method dpop"),
        ("dpo", 1, "a larger --sft_weight or --method dpop"),
        ("dpop", 0, "--sft_weight 1"),
        ("ddg", 0, "--sft_weight 1"),  # of proteins: its user has measured values
        ("listwise", 0.5, "a larger --sft_weight"),
    ],
)
def test_the_warning_is_that_of_the_method(method, sft_weight, remedy):
    displacement = Displacement(method, sft_weight, "preferred sequences")
    line = [displacement.seen(-1.0) for _ in range(5)][-1]
    assert f"displacement: {method} may lower both" in line
    assert line.endswith(f"; {remedy} prevents this")
