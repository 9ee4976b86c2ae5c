"""Curves: four pictures of a metrics.jsonl, whose lines have the values of the file."""

import json

import pytest
from matplotlib.figure import Figure

from ddp_utils import plots

PANELS = {"loss.png": 1, "rewards.png": 1, "margins.png": 1, "accuracies.png": 1}


def line(split, step, loss=0.5, reward=0.1):
    rewards = {"chosen": reward, "rejected": -reward, "margins": 2 * reward, "accuracies": 0.6}
    rewards = {f"rewards/{name}": value for name, value in rewards.items()}
    return {"split": split, "step": step, "loss": loss, "learning_rate": 1e-4, **rewards}


RUN = [
    *(line("train", step, 0.7 - 0.01 * step, 0.02 * step) for step in range(1, 41)),
    *(line("val", step, 0.55) for step in (20, 40)),
    line("test", 40, 0.5),
]


def folder_with(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture
def no_pixels(monkeypatch):
    """Name -> axes of each picture, which is an empty file: pixels cost 0.1 s each."""
    kept = {}

    def keep(figure, path, **_options):
        kept[path.name] = figure.axes
        path.touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def test_the_curves_are_the_numbers_of_the_file(tmp_path, no_pixels):
    plots.draw(folder_with(tmp_path, RUN))
    others = no_pixels.pop("others.png")
    assert {name: len(found) for name, found in no_pixels.items()} == PANELS
    assert [axis.get_title() for axis in others] == ["learning_rate", "", ""]
    assert list(others[0].lines[0].get_ydata()) == [1e-4] * 40
    raw, mean, val, test = no_pixels["loss.png"][0].lines
    steps, losses = range(1, 41), [0.7 - 0.01 * step for step in range(1, 41)]
    assert list(raw.get_xdata()) == list(steps)
    assert list(raw.get_ydata()) == pytest.approx(losses)
    pairs = [losses[0], *((a + b) / 2 for a, b in zip(losses, losses[1:], strict=False))]
    assert list(mean.get_ydata()) == pytest.approx(pairs)  # 40 steps: a window of 2
    assert (list(val.get_xdata()), list(val.get_ydata())) == ([20, 40], [0.55, 0.55])
    assert (list(test.get_xdata()), list(test.get_ydata())) == ([40], [0.5])


def test_axes_have_names_units_and_whole_steps(tmp_path, no_pixels):
    """Of a run of four steps, where half steps would be drawn."""
    plots.draw(folder_with(tmp_path, RUN[:4]))
    assert no_pixels.pop("others.png")[0].get_title() == "learning_rate"
    assert {*no_pixels} == {*PANELS}
    for name, (axis,) in no_pixels.items():
        assert axis.get_xlabel().startswith("step") and axis.get_title(), name
        assert axis.get_ylabel() in ("nats", "fraction of pairs"), name
        low, high = axis.get_xlim()
        shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert shown and all(tick == int(tick) for tick in shown), name
        texts = " ".join(entry.get_text() for entry in axis.get_legend().get_texts())
        assert name == "loss.png" or "reference: 0" in texts or "chance: 0.5" in texts, name
