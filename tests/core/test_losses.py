"""The ten losses against closed forms in plain math: values, gradients, limits, options, metrics.

Nothing here uses the code's own formulas: `by_hand` gives each loss and its two derivatives.
"""

import math
import random

import pytest
import torch

from config import Config
from ddp_utils import UserError
from ddp_utils.cli import METHODS, loss_options
from ddp_utils.losses import Displacement, LogPs, LossSpec, at_reference, preference, sft

ALL = ["dpo", "cdpo", "robust", "ipo", "ipo_sum", "hinge", "dpop", "dposhift", "dpopshift", "simpo"]
AVERAGEABLE = ["dpo", "cdpo", "robust", "hinge", "dpop", "dposhift", "dpopshift"]
OPTIONS = {  # option -> the value given here and the methods whose paper has it
    "label_smoothing": (0.2, {"cdpo", "robust"}),
    "lambda_dpop": (5.0, {"dpop", "dpopshift"}),
    "lambda_shift": (0.6, {"dposhift", "dpopshift"}),
    "simpo_gamma": (0.7, {"simpo"}),
}
NOISE = 1e-3


def sigma(z):
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def log_sigma(z):
    return -math.log1p(math.exp(-z)) if z >= 0 else z - math.log1p(math.exp(z))


def settings(method, **given):
    used = {name: value for name, (value, users) in OPTIONS.items() if method in users}
    return Config(method=method, **{**used, **given})


def by_hand(config, chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens):
    """Loss of one pair, d loss / d chosen, d loss / d rejected."""
    average = config.length_average or config.method in ("ipo", "simpo")
    a, b = (1 / chosen_tokens, 1 / rejected_tokens) if average else (1.0, 1.0)
    beta, e = config.beta, config.label_smoothing
    if config.method == "simpo":
        z = beta * (a * chosen - b * rejected) - config.simpo_gamma
        return -log_sigma(z), (sigma(z) - 1) * beta * a, -(sigma(z) - 1) * beta * b
    u, v = a * (chosen - ref_chosen), b * (rejected - ref_rejected)
    if config.method.startswith("ipo"):
        h = u - v - 1 / (2 * beta)
        return h * h, 2 * h * a, -2 * h * b
    shift = config.lambda_shift if config.method in ("dposhift", "dpopshift") else 1.0
    z, dz_du, dz_dv = beta * (u - shift * v), beta, -beta * shift
    if config.method in ("dpop", "dpopshift") and ref_chosen - chosen > NOISE:
        z, dz_du = z + beta * config.lambda_dpop * u, beta + beta * config.lambda_dpop
    if config.method == "cdpo":
        loss, slope = -(1 - e) * log_sigma(z) - e * log_sigma(-z), sigma(z) - (1 - e)
    elif config.method == "robust":
        loss = (-(1 - e) * log_sigma(z) + e * log_sigma(-z)) / (1 - 2 * e)
        slope = ((1 - e) * (sigma(z) - 1) - e * sigma(z)) / (1 - 2 * e)
    elif config.method == "hinge":
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


def loss_and_gradients(config, rows, dtype=torch.float64):
    logps = logps_of(rows, dtype)
    sides = logps.chosen.requires_grad_(), logps.rejected.requires_grad_()
    losses, _ = preference(logps, LossSpec.of(config), NOISE)
    return losses.detach(), *torch.autograd.grad(losses.sum(), sides)


def one_loss(config, *row):
    return preference(logps_of([row]), LossSpec.of(config), NOISE)[0].item()


def check_against_hand(config, rows):
    found = loss_and_gradients(config, rows)
    wanted = zip(*(by_hand(config, *row) for row in rows), strict=True)
    hand = tuple(torch.tensor(column, dtype=torch.float64) for column in wanted)
    torch.testing.assert_close(found, hand, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1, 30, 6000])
@pytest.mark.parametrize("method", ALL)
def test_value_and_gradient_equal_the_closed_form(method, spread):
    check_against_hand(settings(method, beta=0.1), some_pairs(spread))


def test_length_average_divides_each_log_ratio_by_its_own_tokens():
    for method in AVERAGEABLE:
        check_against_hand(settings(method, beta=0.5, length_average=True), some_pairs(30))


@pytest.mark.parametrize("method", ALL)
def test_margins_of_500_stay_finite_in_single_precision(method):
    config = settings(method, beta=1.0)
    sides = [(450.0, -60.0), (-550.0, -60.0), (-50.0, 440.0)]
    rows = [(*side, -50.0, -60.0, 1, 1) for side in sides]
    for ours in loss_and_gradients(config, rows, torch.float32):
        assert torch.isfinite(ours).all()
        assert ours.dtype == torch.float32


def test_the_dpop_penalty_is_beta_lambda_times_a_fall_beyond_the_callers_noise():
    # fell by 0.25: z = 0.1 * (-0.25 + 1) = 0.075, and 0.1 * 50 * 0.25 = 1.25 less if penalised
    pair = logps_of([(-10.25, -12.0, -10.0, -11.0, 4, 4)])
    config = settings("dpop", beta=0.1, lambda_dpop=50.0)
    for noise, z in ((0.1, -1.175), (0.5, 0.075)):
        loss = preference(pair, LossSpec.of(config), noise)[0].item()
        assert loss == pytest.approx(math.log(1 + math.exp(-z)), rel=1e-12)


@pytest.mark.parametrize("method", ALL)
def test_the_loss_at_the_reference_has_its_closed_form(method):
    row = (-7.0, -9.0, -7.0, -9.0, 3, 5)
    for beta in (0.05, 0.1, 2.0):
        config = settings(method, beta=beta)
        wanted = {"hinge": 1.0, "simpo": None}.get(method, math.log(2))
        if method in ("ipo", "ipo_sum"):
            wanted = 1 / (4 * beta * beta)
        assert at_reference(LossSpec.of(config)) == (
            None if wanted is None else pytest.approx(wanted)
        )
        if wanted is not None:
            assert one_loss(config, *row) == pytest.approx(wanted, rel=1e-12)


def test_an_option_is_taken_by_its_methods_and_refused_by_the_others():
    """0 counts as given; what is left out has the documented default."""
    assert list(METHODS) == ALL
    for method in ALL:
        for option, (value, users) in OPTIONS.items():
            for given in (value, 0.0):
                config = Config(method=method, **{option: given})
                if method in users:
                    assert loss_options(config)[option] == given
                    continue
                with pytest.raises(UserError, match=f"^--{option}: {method} ") as caught:
                    loss_options(config)
                named = str(caught.value).partition("belongs to")[2].split(",")
                assert {name.strip() for name in named} == users
    for method in set(ALL) - set(AVERAGEABLE):
        with pytest.raises(UserError, match=f"--length_average: {method}"):
            loss_options(Config(method=method, length_average=True))
    defaults = {"dpo": {}, "cdpo": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}}
    defaults |= {"dpopshift": {"lambda_dpop": 50.0, "lambda_shift": 0.75}}
    defaults |= {"simpo": {"simpo_gamma": 0.5}}
    assert {method: loss_options(Config(method=method)) for method in defaults} == defaults


def test_the_sft_term_is_the_mean_negative_log_prob_of_the_chosen_tokens():
    found = sft(logps_of([(-8.0, -1.0, 0, 0, 4, 9), (-3.0, -2.0, 0, 0, 1, 1)]))
    assert found.tolist() == [2.0, 3.0]


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


def test_rewards_of_simpo_are_beta_times_log_probs_per_token():
    _, metrics = preference(logps_of([(-8.0, -11.0, -1.0, -1.0, 4, 5)]), LossSpec("simpo", beta=2))
    assert metrics["rewards/chosen"].item() == pytest.approx(2 * -8 / 4)
    assert metrics["rewards/rejected"].item() == pytest.approx(2 * -11 / 5)


def warnings_of(rewards, method="dpo"):
    watch = Displacement(method)
    return [(step, line) for step, reward in enumerate(rewards, 1) if (line := watch.seen(reward))]


def test_a_falling_chosen_response_is_told_once_with_the_two_ways_out():
    [(_, line)] = warnings_of([-0.1] * 40)
    assert "--method dpop" in line and "--sft_weight" in line and "\n" not in line


def test_no_warning_while_the_mean_of_recent_steps_is_not_below_0():
    one_bad_batch = [0.5] * 9 + [-0.3] + [0.5] * 9
    too_few = [-9.0] * 4
    for rewards in (too_few, [0.0] * 40, [0.1] * 40, one_bad_batch, [0.2, -0.1] * 20):
        assert warnings_of(rewards) == []
    assert warnings_of([-5.0] * 40, "simpo") == []  # it has no reference to fall below
    # only recent steps count: of ten, 7 * 1 + 3 * -3 is the first sum below 0
    assert [step for step, _ in warnings_of([1.0] * 100 + [-3.0] * 10)] == [103]
