"""Curves: pictures of a metrics.jsonl with names for people, whose lines have its values."""

import json
import math
import time

import pytest
from matplotlib.figure import Figure

from ddp_utils import plots

TITLES = {  # picture -> title and unit
    "loss.png": ("Loss", "loss per pair"),
    "rewards.png": ("Rewards: beta x log-ratio to the reference", "nats"),
    "margins.png": ("Margin between chosen and rejected", "nats"),
    "accuracies.png": ("Accuracy: chosen preferred", "fraction of pairs"),
}


def line(split, step, loss=0.5, reward=0.1):
    rewards = {"chosen": reward, "rejected": -reward, "margins": 2 * reward, "accuracies": 0.6}
    rewards = {f"rewards/{name}": value for name, value in rewards.items()}
    return {"split": split, "step": step, "loss": loss, "learning_rate": 1e-4, **rewards}


RUN = [
    *(line("train", step, 0.7 - 0.01 * step, 0.02 * step) for step in range(1, 41)),
    *(line("val", step, 0.55) | {"loss_low": 0.5, "loss_high": 0.625} for step in (20, 40)),
    line("test", 40, 0.5),
]


def folder_with(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture
def no_pixels(monkeypatch):
    """Name -> figure of each picture, which is an empty file: pixels cost 0.1 s each."""
    kept = {}

    def keep(figure, path, **_options):
        kept[path.name] = figure
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def legend_of(figure):
    return [entry.get_text() for entry in figure.legends[0].get_texts()]


def test_rewards_without_a_reference_have_another_title_and_no_line(tmp_path, no_pixels):
    (tmp_path / "config.json").write_text('{"method": "simpo"}')
    plots.draw(folder_with(tmp_path, RUN))
    [axis] = no_pixels["rewards.png"].axes
    assert axis.get_title() == "Rewards: beta x log-prob per token"
    assert not any("reference" in entry for entry in legend_of(no_pixels["margins.png"]))


def test_a_dollar_in_a_name_is_no_formula(tmp_path):
    rows = [{"split": "train", "step": step, "costs $5_$ or 50 %": 1.0} for step in (1, 2)]
    plots.draw_others(tmp_path, rows)  # with its pixels
    assert (tmp_path / "others.png").stat().st_size > 1000


def test_the_strong_line_is_the_mean_of_the_last_twentieth(tmp_path, no_pixels):
    """Of 60 steps the last three, or as many as there are; of 80,000 in seconds."""
    losses = [math.sin(step) + 2 for step in range(60)]
    plots.draw(folder_with(tmp_path, [line("train", n, loss) for n, loss in enumerate(losses)]))
    drawn = no_pixels["loss.png"].axes[0].lines[-1].get_ydata()
    means = [sum(losses[max(0, n - 2) : n + 1]) / min(n + 1, 3) for n in range(60)]
    assert drawn == pytest.approx(means, rel=1e-12)
    axis, start = Figure().subplots(), time.process_time()
    lines = [line("train", n, 1e16 if n == 5 else 1.0) for n in range(80_000)]
    plots.draw_curve(axis, lines, "loss", "C0")
    assert time.process_time() - start < 8  # 1 s, and 27 s and 2.5 GB with a list for each step
    assert axis.lines[-1].get_ydata()[-1] == 1  # no sum still has the outlier


def test_one_step_is_a_point(tmp_path, no_pixels):
    plots.draw(folder_with(tmp_path, [line("train", 1)]))
    assert no_pixels["loss.png"].axes[0].lines[-1].get_marker() == "."


def test_the_curves_are_the_numbers_of_the_file(tmp_path, no_pixels):
    own = [{"split": "train", "step": step, "my_metric": 2.0 * step} for step in (1, 2)]
    plots.draw(folder_with(tmp_path, [*RUN, *own]))
    others = no_pixels.pop("others.png").axes
    assert {*no_pixels} == {*TITLES}
    assert [axis.get_title() for axis in others] == ["learning rate", "my_metric"]
    assert list(others[0].lines[0].get_ydata()) == [1e-4] * 40
    assert list(others[1].lines[0].get_ydata()) == [2, 4]
    [axis] = no_pixels["loss.png"].axes
    raw, mean, val, test = axis.lines
    steps, losses = range(1, 41), [0.7 - 0.01 * step for step in range(1, 41)]
    assert list(raw.get_xdata()) == list(steps)
    assert list(raw.get_ydata()) == pytest.approx(losses)
    pairs = [losses[0], *((a + b) / 2 for a, b in zip(losses, losses[1:], strict=False))]
    assert list(mean.get_ydata()) == pytest.approx(pairs)  # 40 steps: a window of 2
    assert (list(val.get_xdata()), list(val.get_ydata())) == ([20, 40], [0.55, 0.55])
    assert (list(test.get_xdata()), list(test.get_ydata())) == ([40], [0.5])
    bars = [bar.tolist() for part in axis.collections for bar in part.get_segments()]
    assert bars == [[[20, 0.5], [20, 0.625]], [[40, 0.5], [40, 0.625]]]
    assert legend_of(no_pixels["loss.png"]) == ["training", "held out", "held out: test data"]
    two = ["reward of chosen", "reward of rejected", "training", "held out", "held out: test data"]
    assert legend_of(no_pixels["rewards.png"]) == [*two, "reference: 0"]


def test_axes_have_names_units_and_whole_steps(tmp_path, no_pixels):
    """Of a run of four steps, where half steps would be drawn."""
    plots.draw(folder_with(tmp_path, RUN[:4]))
    assert no_pixels.pop("others.png").axes[0].get_title() == "learning rate"
    for name, (title, unit) in TITLES.items():
        figure = no_pixels.pop(name)
        [axis] = figure.axes
        assert (axis.get_title(), axis.get_ylabel(), axis.get_xlabel()) == (title, unit, "step")
        low, high = axis.get_xlim()
        shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert shown and all(tick == int(tick) for tick in shown), name
        base = {"accuracies.png": ["chance: 0.5"], "loss.png": []}.get(name, ["reference: 0"])
        assert legend_of(figure)[-1:] == (base or ["training"]), name
    assert not no_pixels


UNITS = {"accuracy": "nats per action", "kl": "nats per token", "my_metric": "nats per token"}


@pytest.mark.parametrize("metric", UNITS)
def test_a_loss_has_the_unit_of_its_script(metric, tmp_path, no_pixels):
    lines = [{"split": "train", "step": 1, "loss": 0.5, metric: 0.25}]
    plots.draw(folder_with(tmp_path, lines))
    assert no_pixels["loss.png"].axes[0].get_ylabel() == UNITS[metric]
    assert legend_of(no_pixels["loss.png"]) == ["training"]


def test_the_legend_names_only_what_is_drawn(tmp_path, no_pixels):
    """Baking: the loss has no held-out value, and the KL has no value in training."""
    lines = [{"split": "train", "step": 1, "loss": 0.5}]
    lines.append({"split": "val", "step": 1, "kl": 0.5, "share_baked": 0.25})
    plots.draw(folder_with(tmp_path, lines))
    assert legend_of(no_pixels["loss.png"]) == ["training"]
    assert legend_of(no_pixels["baking.png"]) == ["held out"]
    assert no_pixels["share_baked.png"].axes[0].get_ylabel() == "fraction"
