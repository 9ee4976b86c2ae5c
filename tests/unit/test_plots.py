"""Curves: three pictures from a metrics.jsonl, with the lines where the numbers are."""

import json

import numpy as np
import pytest
from matplotlib import image, pyplot

from ddp_utils import plots

PANELS = {"loss.png": 1, "rewards.png": 2, "accuracies.png": 1}


def line(split, step, loss=0.5, reward=0.1, accuracy=0.6):
    return {
        "split": split,
        "step": step,
        "loss": loss,
        "rewards/chosen": reward,
        "rewards/rejected": -reward,
        "rewards/margins": 2 * reward,
        "rewards/accuracies": accuracy,
        "learning_rate": 1e-4,
    }


RUN = [
    *(line("train", step, 0.7 - 0.01 * step, 0.02 * step) for step in range(1, 41)),
    *(line("val", step, 0.55) for step in (20, 40)),
    line("test", 40, 0.5),
]


def folder_with(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


def drawn(folder, monkeypatch):
    """Draw, and keep each figure's axes as they were saved."""
    kept, save = {}, pyplot.Figure.savefig
    monkeypatch.setattr(pyplot, "close", lambda figure: None)

    def keep(figure, path, **options):
        kept[path.name] = figure.axes
        save(figure, path, **options)

    monkeypatch.setattr(pyplot.Figure, "savefig", keep)
    plots.draw(folder)
    return kept


@pytest.mark.parametrize(
    "window, means",
    [
        (1, [1, 3, 5, 11]),
        (2, [1, 2, 4, 8]),
        (3, [1, 2, 3, 19 / 3]),
        (9, [1, 2, 3, 5]),
    ],
)
def test_a_running_mean_ends_at_its_place(window, means):
    assert plots.running_mean([1, 3, 5, 11], window) == pytest.approx(means)


def test_a_running_mean_of_nothing_is_nothing():
    assert plots.running_mean([], 3) == []


def test_a_run_becomes_three_pictures_that_are_not_blank(tmp_path):
    plots.draw(folder_with(tmp_path, RUN))
    assert {path.name for path in tmp_path.glob("*.png")} == set(PANELS)
    for name, panels in PANELS.items():
        pixels = image.imread(tmp_path / name)[..., :3]
        height, width, _ = pixels.shape
        assert (height, width) == (570, 960 * panels)  # 3.8 x 6.4 inches at 150 dots
        ink = (pixels < 0.9).any(-1)
        assert 0.01 < ink.mean() < 0.5
        blue = np.abs(pixels - [0x1F / 255, 0x77 / 255, 0xB4 / 255]).max(-1) < 0.02
        assert blue.sum() > 300, "the curve of the first metric"
    assert pyplot.get_fignums() == []


def test_the_curves_are_the_numbers_of_the_file(tmp_path, monkeypatch):
    axes = drawn(folder_with(tmp_path, RUN), monkeypatch)
    assert {name: len(found) for name, found in axes.items()} == PANELS
    raw, mean, val, test = axes["loss.png"][0].lines
    steps, losses = range(1, 41), [0.7 - 0.01 * step for step in range(1, 41)]
    assert list(raw.get_xdata()) == list(steps)
    assert list(raw.get_ydata()) == pytest.approx(losses)
    pairs = [losses[0], *((a + b) / 2 for a, b in zip(losses, losses[1:], strict=False))]
    assert list(mean.get_ydata()) == pytest.approx(pairs)  # 40 steps: a window of 2
    assert (list(val.get_xdata()), list(val.get_ydata())) == ([20, 40], [0.55, 0.55])
    assert (list(test.get_xdata()), list(test.get_ydata())) == ([40], [0.5])


def test_the_legend_names_metric_and_split(tmp_path, monkeypatch):
    axes = drawn(folder_with(tmp_path, RUN), monkeypatch)
    rewards, margins = axes["rewards.png"]
    legend = [text.get_text() for text in rewards.get_legend().get_texts()]
    assert legend == [
        *("chosen", "chosen, val", "chosen, test"),
        *("rejected", "rejected, val", "rejected, test"),
    ]
    assert (rewards.get_title(), margins.get_title()) == ("rewards", "margins")


def test_shares_are_shown_from_0_to_1(tmp_path, monkeypatch):
    [axis] = drawn(folder_with(tmp_path, RUN), monkeypatch)["accuracies.png"]
    low, high = axis.get_ylim()
    assert -0.1 < low < 0 and 1 < high < 1.1


@pytest.mark.parametrize("lines", [RUN[:1], RUN[40:], RUN[-1:], []])
@pytest.mark.filterwarnings("error:No artists")
def test_a_short_run_is_drawn_too(tmp_path, lines):
    plots.draw(folder_with(tmp_path, lines))
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == (set(PANELS) if lines else set())  # no picture without numbers


def test_baking_has_a_picture_of_its_own(tmp_path):
    lines = [{"split": "train", "step": 1, "loss": 2.0}]
    lines += [{"split": "val", "step": 1, "kl": 0.5, "kl_base": 2.0, "share_baked": 0.75}]
    plots.draw(folder_with(tmp_path, lines))
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png", "baking.png"}


@pytest.mark.parametrize(
    "split",
    [
        "val",
        "train",
    ],
)
def test_a_null_stands_for_nan_and_is_left_out(tmp_path, split):
    plots.draw(folder_with(tmp_path, [*RUN, line(split, 41, loss=None)]))
    assert (tmp_path / "loss.png").exists()


def test_the_half_line_of_a_killed_run_is_left_out(tmp_path):
    with open(folder_with(tmp_path, RUN) / "metrics.jsonl", "a") as file:
        file.write('{"split": "tr')
    plots.draw(tmp_path)
