"""report.html: what it shows, and that texts of others are harmless in it.

tests/runs/test_report_in_a_browser.py has how it looks.
"""

import html
import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard

import config
import main_distributed
import programs
import runs
import train_config
from conftest import ROOT
from ddp_utils import Stop, cli, distributed, losses, metrics, plots, run
from ddp_utils.policy import Precision
from ddp_utils.tools import changes, report
from dpo_inv import pairs
from lm import model_files, models, parallel, preference_data, sampling
from reports import HOSTILE, a_run, page_of, put


class Reader(HTMLParser):
    """Tags with their attributes, the words that are shown, and the rows of tables and cards."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self.rows, self.cell = [], [], [[]], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("tr", "div"):
            self.rows.append([])
        elif tag in ("th", "td", "dt", "dd"):
            self.cell = []

    def handle_data(self, data):
        self.words.append(data)
        self.cell.append(data)

    def handle_endtag(self, tag):
        if tag in ("th", "td", "dt", "dd"):
            self.rows[-1].append("".join(self.cell))


def test_numbers_settings_data_and_examples_are_shown(tmp_path):
    found = Reader(page_of(a_run(tmp_path / "mine")))
    rows, text = found.rows, " ".join("".join(found.words).split())
    start = "mine finished after 30 steps, 61 s on 2 processes, why? why? loss held out 0.1235"
    assert start in text
    for row in (
        ["", "val", "test"],
        ["win rate", "0.75 [0.5124, 0.875]", ""],
        ["loss", "0.1235", "2"],
        ["margin between chosen and rejected, nats", "", "0.5"],
        ["judge/policy/right", "", "0.25"],
        ["", "value", "default"],
        ["beta", "0.3", "0.1"],
        ["shuffle", "True"],
        ["versions torch", "2.13.0"],
        ["prompt", "why?"],
    ):
        assert row in rows, row
    names = [row[0] for row in rows if row]
    assert names.index("win rate") < names.index("rows")
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 18 more" in text
    pictures = [attributes["alt"] for tag, attributes in found.tags if tag == "img"]
    assert pictures == ["curves: loss", "curves: rewards", "curves: returns"]


SETTINGS = "training:\n  seed: 0\n  learning_rate: 0.5\n  lr_scheduler: cosine\n"


def test_only_settings_that_the_user_has_set_are_listed(tmp_path, monkeypatch):
    """Flags, values of a file that differ, and edits; not what a script fills in for its demo."""
    monkeypatch.setattr(changes, "git", lambda *_: None)
    demo = config.read([])
    assert demo.val_data and demo.sft_weight == 1.0
    assert run.defaults_of_set(demo) == {}
    flags = config.read(["--beta=0.1", "--seed", "3"])
    assert run.defaults_of_set(flags) == {"beta": 0.1, "seed": 0}
    (tmp_path / "my.yaml").write_text(SETTINGS)
    file = f"{tmp_path}/my.yaml"
    now = run.defaults_of_set(train_config.read(["--config", file]))
    assert now == {"config": "config.yaml", "learning_rate": None}
    (tmp_path / "my.yaml").write_text(SETTINGS + "  mixed_precision: auto\n")
    chosen = train_config.read(["--config", file])
    parallel.complete(chosen, 1, Precision(torch.float32, None), None, distributed.World())
    assert chosen.mixed_precision == "no" and run.defaults_of_set(chosen) == now
    committed = (ROOT / "src/config.py").read_text().replace("beta: float = 0.1", "beta: float = 7")
    monkeypatch.setattr(changes, "git", lambda *_: committed)
    assert run.defaults_of_set(demo) == {"beta": 7}


def test_a_constant_metric_is_drawn_in_the_middle(tmp_path, monkeypatch):
    """Except for rounding, which would otherwise fill the axis; a metric may be 0 or NaN, too."""
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    values = {"learning_rate": 2e-4, "a": 0.0, "b": math.nan}
    rows = [{"split": "train", "step": n, **values} for n in range(9)]
    rows[3]["learning_rate"] = math.nextafter(2e-4, 1)
    plots.draw_others(tmp_path, rows)
    [limits] = [x.get_ylim() for x in figures[0].axes if "rate" in x.get_title()]
    assert limits == pytest.approx((1.9e-4, 2.1e-4))


# --- texts of others -----------------------------------------------------------------------------


def test_a_hostile_text_is_shown_and_does_nothing(tmp_path):
    for number, text in enumerate([*HOSTILE.values(), HOSTILE]):
        texts = [*HOSTILE.values()] if text is HOSTILE else [text]
        page = page_of(a_run(tmp_path / f"{number}", texts))
        found = Reader(page)
        tame = Reader(page_of(a_run(tmp_path / f"tame {number}", ["why?"] * len(texts))))
        tags = [tag for tag, _ in found.tags if tag not in ("div", "dt", "dd")]
        assert tags == [tag for tag, _ in tame.tags if tag not in ("div", "dt", "dd")], text
        shown = re.sub("[\0\x1b\ud800]", "\ufffd", texts[0])
        assert "".join(found.words).count(shown) >= 5
        for tag, attributes in found.tags:
            assert tag not in ("script", "link", "iframe", "object", "base", "form", "a")
            for name, value in attributes.items():
                assert not name.startswith("on")
                assert name not in ("href", "srcset", "action", "style")
                assert name != "src" or value.startswith("data:image/png;base64,")
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
    policy = [tag.get("content") for _, tag in found.tags if "http-equiv" in tag]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


# --- what is not there ---------------------------------------------------------------------------

FILES = ("summary", "config", "environment", "data_report", "examples")


def test_what_is_missing_or_no_object_is_left_out(tmp_path):
    heads = {"summary": "<h2>Numbers", "data_report": "<summary>Data", "examples": "<h2>Examples"}
    heads["*"] = "<h2>Curves"
    for name in (*FILES, "*"):
        folder = a_run(tmp_path / name.replace("*", "all"))
        for path in folder.glob("*" if name == "*" else f"{name}.json"):
            path.unlink()
        page = page_of(folder)
        for file, head in heads.items():
            assert (head in page) == (name not in (file, "*")), head
        assert "<h2>Commands" in page and "None" not in page and "Undefined" not in page
        for content in (b"", b"{", b"[]", b"\xff"):
            (folder / f"{name}.json".replace("*", "config")).write_bytes(content)
            assert "<h2>Commands</h2>" in page_of(folder)


PATHS = {
    f"python -u {ROOT}/src/train.py --x 1": "python -u src/train.py --x 1",
    "/opt/venv/bin/python a.py": "python a.py",
    "a.py --model_name /data/secret/qwen --lr=/x/y": "a.py --model_name qwen --lr=y",
    "results/dpo ~/x/y https://host/a/b 1/2": "results/dpo ~/x/y https://host/a/b 1/2",
}


def test_no_folder_of_this_machine_is_in_report_or_card(tmp_path):
    for text, shown in PATHS.items():
        assert report.portable(text) == shown
    folder = a_run(tmp_path / "run")
    put(folder / "model", tokenizer_config={})
    names = {"result_dir": "run", "model_name": "base", "train_data": "rows.jsonl"}
    put(folder, config={key: f"{tmp_path}/{name}" for key, name in names.items()})
    put(folder, data_report={"train": {"file": f"{tmp_path}/rows.jsonl"}})
    put(folder, environment={"command": f"{tmp_path}/bin/python {tmp_path}/my.py"})
    page = page_of(folder)
    card = (folder / "model/README.md").read_text()
    assert str(tmp_path) not in page + card and "<pre>python my.py" in page
    assert "base_model:" not in card and "A model trained from base with" in card
    assert "<pre>model</pre>" in page


def test_a_model_that_is_not_in_the_run_folder(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "my_model"
    put(elsewhere, tokenizer_config={})
    put(folder, config={"result_dir": "results/x", "output_dir": str(elsewhere)})
    assert "<pre>my_model</pre>" in page_of(folder)


# --- as a part of a run --------------------------------------------------------------------------

TINY = [*runs.QUIET, *runs.words("--max_rows 4 --batch_size 2 --max_steps 1 --num_samples 0")]


def test_a_run_writes_it_and_a_stopped_one_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        main_distributed.main([*TINY, "--result_dir", f"{folder}", "--stop_after_minutes=1e-9"])
    page = (folder / "report.html").read_text()
    assert "preempted after" in page and "exit status 85" in page and "Resume from" in page
    assert main_distributed.main([*TINY, "--result_dir", f"{folder}"]) == 0
    page = (folder / "report.html").read_text()
    assert "finished after 1 step," in page and ">Run it again" in page
    assert ["max_steps", "1", "-1"] in Reader(page).rows  # against the script's default
    assert not list(folder.glob(".tmp-*"))


def test_each_warning_is_in_summary_report_and_card(tmp_path, monkeypatch, capsys):
    """Of settings, the data, a library before and after the run begins, and an earlier start."""
    folder = tmp_path / "run"
    flags = [*TINY, "--result_dir", f"{folder}", "--max_length", "12", "--num_samples", "1"]
    flags += ["--num_workers", "4"]
    load, choose = models.load_tokenizer, sampling.choose_way

    def load_tokenizer(*names, **options):
        distributed.warn("warning: of an adapter")
        return load(*names, **options)

    def choose_way(*arguments):
        distributed.warn("warning: of replies")
        return choose(*arguments)

    monkeypatch.setattr(models, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(sampling, "choose_way", choose_way)
    with monkeypatch.context() as patch:
        patch.setattr(losses.Displacement, "seen", lambda *_: "warning: of a step")
        assert main_distributed.main(flags) == 0
    first = json.loads((folder / "summary.json").read_text())["warnings"]
    runs.as_if_killed(folder)
    assert main_distributed.main([*flags, "--max_steps", "2"]) == 0
    warnings = json.loads((folder / "summary.json").read_text())["warnings"]
    starts = ["of an adapter", "train: 4 of 4 rows", "of replies", "of a step", "0 validation rows"]
    starts.append("--num_workers has no effect")
    assert {*first} == {*warnings}
    assert len(warnings) == len({*warnings}) and all(w.startswith("warning: ") for w in warnings)
    for start in starts:
        [warning] = [line for line in warnings if line.startswith(f"warning: {start}")]
        assert f"- {warning}\n" in (folder / "model/README.md").read_text()
        assert html.escape(warning) in (folder / "report.html").read_text()
    printed = capsys.readouterr().out
    assert printed.count("warning: of a step\n") == 3  # and at both ends
    assert printed.count("warning: train: 4 of 4 rows") == 4  # at both starts and ends


def test_a_report_that_cannot_be_written_does_not_make_the_run_fail(tmp_path, capsys):
    (tmp_path / "run/report.html").mkdir(parents=True)
    assert main_distributed.main([*TINY, "--result_dir", f"{tmp_path}/run"]) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
    assert "warning: no report.html: error: [Errno 21] Is a directory" in capsys.readouterr().out


def test_the_command_makes_it_again(tmp_path, capsys):
    (a_run(tmp_path / "run") / "metrics.jsonl").write_text('{"split":"val","step":1,"loss":1.0}\n')
    done = programs.start("-m", "ddp_utils.tools.report", "run", cwd=tmp_path)
    result = "finished after 30 steps in 61 s\nloss        held out 0.1235\nwhy?\n"
    assert done == (0, f"{result}report      run/report.html\n", "")
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000  # the curves, too
    with pytest.raises(SystemExit, match="2"):
        report.main(["nowhere"])
    assert capsys.readouterr().err == "error: nowhere: no summary.json (expected a run folder)\n"


def test_a_report_that_a_signal_ends_is_a_warning(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(program))
    assert run.write_report(tmp_path, True, print) == "it ended with status -9"


def test_a_model_folder_is_relative_to_where_the_run_was_started(tmp_path):
    settings = {"result_dir": "run", "output_dir": "own"}
    folder = put(tmp_path / "run", config=settings, environment={"directory": str(tmp_path)})
    put(tmp_path / "own", adapter_config={})
    put(folder, summary={"status": "finished"})
    assert report.find_model(folder, report.read_run(folder)).path == tmp_path / "own"
    assert model_files.model_folder("folder", str(folder)) == tmp_path / "own"


def test_examples_are_written_as_they_are(tmp_path):
    reply = "git clone ssh://git@github.com/a/b.git"
    one = SimpleNamespace(world=SimpleNamespace(is_main=True), folder=tmp_path)
    for name, user in (("examples.json", "git@"), ("config.json", "")):
        run.Run.write_json(one, name, {"chosen": reply})
        assert f"ssh://{user}github.com" in (tmp_path / name).read_text()


def test_a_verdict_of_ties_is_said(tmp_path):
    ties = {"win_rate": None, "wins": 0, "losses": 0, "ties": 3}
    folder = put(tmp_path / "run", summary={"test": ties})
    lines = report.results(folder, report.read_run(folder)["summary"], {})
    assert lines == ["replies     test: 0 better, 0 worse, 3 equal"]


def test_names_in_the_table_of_a_card_are_one_cell():
    assert report.cell("a<b>|c\nd") == r"a&lt;b>\|c d"


# --- the result in a few lines -------------------------------------------------------------------


def test_the_result_is_said_in_lines(tmp_path):
    judged = {"win_rate": 0.75, "win_rate_low": 0.3, "win_rate_high": 0.95}
    judged |= {"wins": 3, "losses": 1, "ties": 6}
    val = {"loss": 0.625}  # of the best step, not the last
    folder = put(
        tmp_path / "run", summary={"status": "finished", "step": 2, "test": judged, "val": val}
    )
    put(folder, summary={**report.read_run(folder)["summary"], "before": {"loss": 0.75}})
    put(folder, examples={"test": [{"prompt": "p", "reference": "a\nb", "fine-tuned": "x" * 99}]})
    put(folder / "model", adapter_config={})
    lines = [("train", 1, 0.9), ("train", 2, 0.5), ("val", 1, 0.625), ("val", 2, 0.875)]
    lines = [{"split": split, "step": step, "loss": loss} for split, step, loss in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = [
        "loss        held out 0.7500 -> 0.6250",
        "replies     test: 3 better, 1 worse, 6 equal",
        "win rate    0.75 [0.30, 0.95] of the 4 decided",
    ]
    words = Reader(page_of(folder)).words
    assert [word for word in words if word in results] == results
    assert report.result_lines(folder, report.read_run(folder)).splitlines() == [
        "finished after 2 steps",
        *results,
        "p",
        "   reference  a b",
        "  fine-tuned  " + "x" * 66,
        "              " + "x" * 33,
        f"report      {folder}/report.html",
        f"model       {folder}/model",
        f"talk to it  python -m lm.chat {folder}",
    ]


LN_2 = 0.6931
TRAINED = [  # held-out values before and after training, and which of them has become worse
    ({"loss": LN_2}, {"loss": 0.75}, "loss 0.7500 is above 0.6931"),
    ({"loss": LN_2}, {"loss": 0.65}, ""),
    ({"loss": LN_2}, {"loss": LN_2 + 5e-3}, ""),  # rounding
    ({"loss": 25.0}, {"loss": 30.0}, "loss 30.0000 is above 25.0000"),  # ipo, 1 / (4 beta^2)
    ({"loss": 1.0, "loss/preference": LN_2}, {"loss": 1.5, "loss/preference": 0.6}, ""),
    ({"kl": 0.1, "share_baked": 0.0}, {"kl": 0.2, "kl_base": 0.1}, "kl 0.2000 is above 0.1000"),
    ({"loss": LN_2}, {}, ""),
    ({}, {"loss": 9.0}, ""),
]


@pytest.mark.parametrize(("before", "after", "problem"), TRAINED)
def test_a_held_out_loss_above_that_of_an_untrained_model_is_a_warning(before, after, problem):
    end = ", that of the model before training"
    assert metrics.worse(before, after) == (f"held-out {problem}{end}" if problem else "")


def test_ends_are_means_and_a_tie_is_no_accuracy(tmp_path):
    """40 steps: the mean of a loss from 40 down to 31 is 35.5, that of 10 to 1 is 5.5."""
    summary = {"status": "finished", "step": 40, "seconds": 8.9, "warnings": ["warning: w"]}
    folder = put(tmp_path / "run", summary=summary)
    put(folder / "model", adapter_config={})
    lines = []
    for step in range(1, 41):
        values = {"loss": 41.0 - step, "rewards/accuracies": float(step > 1)}
        lines.append(json.dumps({"split": "train", "step": step, **values}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    results = ["loss        training 35.5000 -> 5.5000, means of 10 steps"]
    results += ["accuracy    training 1.0000, means of 10 steps", "warning: w"]
    shown = report.result_lines(folder, report.read_run(folder)).splitlines()
    assert shown[:4] == ["finished after 40 steps in 8 s", *results]
    assert all(line in page_of(folder) for line in ("35.5000", "warning: w"))
    assert "- warning: w\n" in (folder / "model/README.md").read_text()


def test_the_accuracy_of_a_single_step_is_not_shown(tmp_path):
    """All pairs of step 1 are ties."""
    folder = put(tmp_path / "run")
    line = {"split": "train", "step": 1, "loss": 0.7, "rewards/accuracies": 0.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    val = {"val": {"rewards/accuracies": 0.8}}
    loss = "loss        training 0.7000, single steps"
    assert report.results(folder, val, {}) == [loss, "accuracy    held out 0.8000"]
    assert report.results(folder, {}, {}) == [loss]


REPEATED = "{} of 40 held-out rows have prompts also in train_data: their numbers say nothing"
DOUBTS = [  # held-out rows, those whose prompt is also in the training data -> the warning's begin
    (1, 0, "held-out rows: 1 (expected at least 20), too few to judge the result; hold out"),
    (19, 0, "held-out rows: 19 (expected at least 20), too few"),
    (20, 0, ""),
    (20, 2, ""),
    (40, 5, REPEATED.format(5)),
    (40, 40, REPEATED.format(40)),
]


@pytest.mark.parametrize(("count", "repeated", "warning"), DOUBTS)
def test_held_out_numbers_that_can_tell_nothing_are_no_result(tmp_path, count, repeated, warning):
    """They are replaced by a warning, and by numbers of the training."""
    folder = put(tmp_path / "run")
    lines = [{"split": "train", "step": step, "loss": 1.0 / step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    val = {"count": count, "loss": 0.25, "loss_low": 0.125, "loss_high": 0.375}
    rows = {"val": {"notes": {"prompts also in train_data": repeated}}}
    found = report.results(folder, {"before": {"loss": 0.75}, "val": val}, rows)
    if warning:
        assert found[0].startswith(f"warning: {warning}")
        assert found[1:] == ["loss        training 1.0000 -> 0.5000, single steps"]
    else:
        assert found == ["loss        held out 0.7500 -> 0.2500 [0.1250, 0.3750]"]


RISEN = [  # held-out losses by step, lower limit of the last one, and what the warning begins with
    ((0.75, 0.25, 0.5), 0.375, "warning: the held-out loss was lowest after step 1 (0.2500)"),
    ((0.75, 0.25, 0.5), 0.125, ""),  # not significant
    ((0.75, 0.5, 0.25), 0.125, ""),
    ((0.75, 0.25, 0.5), None, ""),
    ((0.25, 0.5), 0.375, ""),  # above the loss before training: another warning
    ((), 0.5, ""),
]


@pytest.mark.parametrize(("losses", "low", "warning"), RISEN)
def test_a_held_out_loss_that_has_risen_again_is_a_warning(losses, low, warning):
    lines = [{"split": "train", "step": 9, "loss": 0.0}]
    lines += [{"split": "val", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    found = report.past_the_best(lines, low)
    assert len(found) == bool(warning) and "".join(found).startswith(warning)


def test_an_environment_that_is_not_active_precedes_the_next_command(monkeypatch):
    monkeypatch.delenv("DDP_ACTIVATE", raising=False)
    assert report.activation() == ""
    monkeypatch.setenv("DDP_ACTIVATE", "/my project/.venv/bin/activate")
    assert report.activation() == ". '/my project/.venv/bin/activate'; "


def test_the_names_of_the_notes_are_those_of_the_data_reports():
    assert report.REPEATED == (preference_data.REPEATED_PROMPTS, pairs.REPEATED)


LONG = "Photosynthesis is a vital biological process that occurs in plants. "
EXAMPLES = [  # replies before and after -> the lines that are printed
    (("Yes.", "Yes."), ["        both  Yes."]),
    (("Yes.",), ["   reference  Yes."]),
    (("Yes.", "No."), ["   reference  Yes.", "  fine-tuned  No."]),
    (
        (f"{LONG}It needs light.", f"{LONG}It is pink."),
        [
            "   reference  ... process that occurs in plants. It needs light.",
            "  fine-tuned  ... process that occurs in plants. It is pink.",
        ],
    ),
]


@pytest.mark.parametrize(("replies", "lines"), EXAMPLES)
def test_replies_begin_where_they_differ(tmp_path, replies, lines):
    row = dict(zip(("prompt", "reference", "fine-tuned"), ("Why?", *replies), strict=False))
    folder = put(tmp_path / "run", summary={"status": "finished"}, examples={"val": [row]})
    shown = report.result_lines(folder, report.read_run(folder)).splitlines()
    assert shown[1:-1] == ["Why?", *lines]


def test_a_reply_has_two_lines_of_80_columns_at_most(tmp_path):
    words = "word " * 100
    row = {"prompt": words, "reference": f"a {words}", "fine-tuned": f"b {words}"}
    folder = put(tmp_path / "run", summary={"status": "finished"}, examples={"val": [row]})
    shown = report.result_lines(folder, report.read_run(folder)).splitlines()[1:-1]
    assert len(shown) == 6 and max(map(len, shown)) <= 80
    assert [line.endswith("word ...") for line in shown] == [False, True] * 3


def test_the_model_card_describes_the_training(tmp_path):
    """Its metadata are read by the Hub's own class."""
    val = {"share_baked": 0.997, "kept/kl": 0.02, "kept/kl/pirate": 0.0123}
    folder = put(
        tmp_path / "mine",
        summary={"status": "finished", "step": 2, "val": val},
        config={"model_name": "a/base", "lora_r": 4, "out_dir": "results/mine"},
        environment={
            "command": "python src/train_loop.py --lora_r 4",
            "defaults": {"lora_r": 32},
            "changes": "my.py differs in loss_of",
        },
    )
    report.write(folder, report.read_run(folder))  # no model yet, no card
    assert not [*folder.rglob("README.md")]
    put(folder / "model", adapter_config={})
    report.write(folder, report.read_run(folder))
    card = ModelCard.load(folder / "model/README.md")
    assert (card.data.base_model, card.data.library_name) == ("a/base", "peft")
    assert (card.data.license, card.data.datasets) == ("unknown", [])  # to be filled in
    for line in (
        "# mine",
        "A model trained from a/base with this command (",
        "- share baked held out 0.9970",
        "python src/train_loop.py --lora_r 4",
        "loss_of.\n\n| setting | value | default |\n|---|---|---|\n| lora_r | 4 | 32 |",
        "| KL removed, fraction | 0.997 |",
        "| kept/kl/pirate | 0.0123 |",
    ):
        assert line in card.content, line
    (folder / "model/adapter_config.json").unlink()
    put(folder / "model", tokenizer_config={})
    put(folder, config={"method": "ipo"})
    report.write(folder, report.read_run(folder))
    card = ModelCard.load(folder / "model/README.md")
    assert card.data.library_name == "transformers" and card.data.base_model is None
    assert "peft" not in card.content


CARDS = [  # settings and a file of the model's folder, tags, and keys of the citations
    ({"method": "dpo"}, "tokenizer_config", ["dpo"], ["rafailov2023direct"]),
    ({"method": "ipo_sum"}, "adapter_config", ["ipo", "lora"], ["azar2024general", "hu2022lora"]),
    (
        {"method": "dpo", "objective": "sft", "type": "qlora"},
        "adapter_config",
        ["sft", "qlora"],
        ["hu2022lora", "dettmers2023qlora"],
    ),
    (
        {"divergence": "kl"},
        "adapter_config",
        ["prompt-baking", "lora"],
        ["hu2022lora", "bhargava2024prompt"],
    ),
    ({"traj_file": "x"}, "model", ["algorithm-distillation"], ["laskin2023incontext"]),
]


@pytest.mark.parametrize(("config", "file", "tags", "citations"), CARDS)
def test_tags_and_citations_name_the_method(config, file, tags, citations, tmp_path):
    folder = put(tmp_path / "mine", config={**config, "model_name": "data/demo/model"})
    put(folder / "model", **{file: {}})
    if file == "model":
        (folder / "model/model.json").rename(folder / "model/model.safetensors")
    report.write(folder, report.read_run(folder))
    card = ModelCard.load(folder / "model/README.md")
    assert card.data.tags == tags and card.data.base_model is None
    assert re.findall(r"^@\w+\{(\w+),$", card.content, re.M) == citations
    assert ("base_model_name_or_path" in card.content) == (file == "adapter_config")


def test_each_method_has_a_citation():
    text = (report.HERE / "citations.bib").read_text()
    cited = re.findall(r"\S+", " ".join(re.findall(r"^% (.*)$", text, re.M)))
    assert {method.partition("_")[0] for method in cli.METHODS} <= {*cited}
