"""report.html: what it shows, and that texts of others are harmless in it.

tests/runs/test_report_in_a_browser.py has how it looks.
"""

import html
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import main_distributed
import programs
import runs
from conftest import ROOT
from ddp_utils import Stop
from ddp_utils.tools import report
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
        elif tag == "small":  # the meaning of a number, behind its name
            self.handle_endtag("th")
            self.cell = []
        elif tag in ("th", "td", "dt", "dd"):
            self.cell = []

    def handle_data(self, data):
        self.words.append(data)
        self.cell.append(data)

    def handle_endtag(self, tag):
        if tag in ("th", "td", "dt", "dd"):
            self.rows[-1].append("".join(self.cell))


def named(name):
    return [name, report.MEANINGS[name]]


def test_numbers_settings_data_and_examples_are_shown(tmp_path):
    found = Reader(page_of(a_run(tmp_path / "mine")))
    rows, text = found.rows, " ".join("".join(found.words).split())
    assert (
        "mine finished after 30 steps, 61 s on 2 processes, why? Loss (held out: 0.1235). Curves"
        in text
    )
    assert ["", "val", "test"] in rows and [*named("win_rate"), "0.75", ""] in rows
    assert [*named("loss"), "0.1235", "2"] in rows and ["wins", "", "3"] in rows
    assert rows.index([*named("win_rate"), "0.75", ""]) < rows.index([*named("count"), "10", ""])
    assert ["not at their defaults", "here", "default"] in rows
    assert ["beta", "0.3", "0.1"] in rows and ["judge", "why?", "-"] in rows
    assert ["train_data", "why?"] in rows and ["shuffle", "True"] in rows
    assert ["rows", "9"] in rows and "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 18 more" in text
    assert ["versions torch", "2.13.0"] in rows
    assert ["prompt", "why?"] in rows and "the other 3 settings" in text
    pictures = [attributes["alt"] for tag, attributes in found.tags if tag == "img"]
    assert pictures == ["curves: loss", "curves: returns", "curves: rewards"]


# --- texts of others -----------------------------------------------------------------------------


def test_a_hostile_text_is_shown_and_does_nothing(tmp_path):
    for number, text in enumerate([*HOSTILE.values(), HOSTILE]):
        texts = [*HOSTILE.values()] if text is HOSTILE else [text]
        page = page_of(a_run(tmp_path / f"{number}", texts))
        found = Reader(page)
        tame = Reader(page_of(a_run(tmp_path / f"tame {number}", ["why?"] * len(texts))))
        tags = [tag for tag, _ in found.tags if tag not in ("wbr", "div", "dt", "dd")]
        assert tags == [tag for tag, _ in tame.tags if tag not in ("wbr", "div", "dt", "dd")], text
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
    heads = {"summary": "Numbers", "data_report": "Data", "examples": "Examples", "*": "Curves"}
    for name in (*FILES, "*"):
        folder = a_run(tmp_path / name.replace("*", "all"))
        for path in folder.glob("*" if name == "*" else f"{name}.json"):
            path.unlink()
        page = page_of(folder)
        for file, head in heads.items():
            assert (f"<h2>{head}</h2>" in page) == (name not in (file, "*")), head
        assert "Settings" in page and "None" not in page and "Undefined" not in page
        for content in (b"", b"{", b"[]", b"\xff"):
            (folder / f"{name}.json".replace("*", "config")).write_bytes(content)
            assert "<h2>Commands</h2>" in page_of(folder)


# --- commands ------------------------------------------------------------------------------------


COMMANDS = [
    ("python", "python a.py --restart --x 1", "python a.py --x 1"),
    ("environment", "python a.py", "python a.py"),
    ("torchrun", "/b/python3.11 -u a.py", "torchrun --standalone --nproc_per_node=3 a.py"),
    ("torchrun", "python -u -m d.r", "torchrun --standalone --nproc_per_node=3 -m d.r"),
    ("deepspeed", "python -u a.py", "torchrun --standalone --nproc_per_node=3 a.py"),
    ("srun", "python a.py", "srun -n 3 python a.py"),
    ("pals", "python a.py", "mpiexec -n 3 python a.py"),
    ("srun", "", ""),
]


def test_the_command_is_the_one_that_started_it():
    for launcher, command, shown in COMMANDS:
        facts = {"launcher": launcher, "command": command, "world_size": 3}
        assert report._command(facts) == shown


def test_a_model_elsewhere_and_a_name_with_a_quote(tmp_path):
    folder, elsewhere = tmp_path / "it's", tmp_path / "my model"
    put(elsewhere, tokenizer_config={})
    put(folder, config={"result_dir": "x", "output_dir": str(elsewhere)})
    assert f'from_pretrained("{elsewhere}")' in html.unescape(page_of(folder))
    put(folder / "model", adapter_config={})
    put(folder, config={"output_dir": str(elsewhere)})  # of another script: the run folder
    page = html.unescape(page_of(folder))
    assert json.loads(re.search(r"from_pretrained\((.*)\)", page)[1]) == f"{folder}/model"
    assert f"ddp_utils.tools.merge {shlex.quote(str(folder / 'model'))} merged" in page


# --- as a part of a run --------------------------------------------------------------------------

TINY = [*runs.QUIET, *runs.words("--max_rows 4 --batch_size 2 --max_steps 1 --num_samples 0")]


def test_a_run_writes_it_and_a_stopped_one_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        main_distributed.main([*TINY, "--result_dir", f"{folder}", "--stop_after_minutes=1e-9"])
    page = (folder / "report.html").read_text()
    assert "preempted after" in page and "exit status 85" in page and "Go on from" in page
    assert main_distributed.main([*TINY, "--result_dir", f"{folder}"]) == 0
    page = (folder / "report.html").read_text()
    assert "finished after 1 step," in page and ">The same run once more" in page
    assert ["max_steps", "1", "-1"] in Reader(page).rows  # against the script's default
    assert not list(folder.glob(".tmp-*"))


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
    (tmp_path / "run/loss.png").unlink()
    assert report.main([f"{tmp_path}/run", "--no_curves"]) is None
    assert not (tmp_path / "run/loss.png").exists()
    with pytest.raises(SystemExit, match="2"):
        report.main(["nowhere"])
    assert capsys.readouterr().err.startswith("error: nowhere: no metrics.jsonl here; give a run")


def test_a_run_waits_for_neither_torch_nor_matplotlib():
    code = "import sys, ddp_utils.tools.report; print({'torch', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True)
    assert done.stdout == b"set()\n", done.stderr


# --- the result in a few lines -------------------------------------------------------------------


def test_the_result_is_said_in_lines_and_in_a_sentence(tmp_path):
    judged = {"win_rate": 0.75, "win_rate_low": 0.3, "win_rate_high": 0.95}
    judged |= {"wins": 3, "losses": 1, "ties": 6}
    val = {"loss": 0.625}  # of the best step, not the last
    folder = put(
        tmp_path / "run", summary={"status": "finished", "step": 2, "test": judged, "val": val}
    )
    put(folder, examples={"test": [{"prompt": "p", "reference": "a\nb", "fine-tuned": "x" * 99}]})
    put(folder / "model", adapter_config={})
    lines = [("train", 1, 0.75), ("train", 2, 0.5), ("val", 1, 0.625), ("val", 2, 0.875)]
    lines = [{"split": split, "step": step, "loss": loss} for split, step, loss in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.summary(folder).splitlines() == [
        "finished after 2 steps",
        "loss        0.7500 -> 0.5000, held out 0.6250",
        "win rate    0.75 [0.30, 0.95], test: 3 better, 1 worse, 6 equal",
        "p",
        "   reference  a b",
        "  fine-tuned  ...",
        f"report      {folder}/report.html",
        f"model       {folder}/model",
        f"talk to it  python -m ddp_utils.tools.chat {folder}",
    ]
    sentence = "Loss went from 0.75 to 0.5 (held out: 0.625). Of 10 replies to test prompts"
    sentence += " the judge prefers 3 to those before training, and 1 the other way round."
    assert sentence in Reader(page_of(folder)).words


def test_the_model_card_says_what_was_done_and_how_to_load_it(tmp_path):
    val = {"share_baked": 0.997, "kept/kl": 0.02, "kept/kl/pirate": 0.0123}
    test = {"kept/obeyed/pirate": 0.98, "kept/obeyed_base/pirate": 1.0}
    folder = put(
        tmp_path / "mine",
        summary={"status": "finished", "step": 2, "val": val, "test": test},
        config={"model_name": "a/base", "lora_r": 4},
        environment={"command": "python src/train_loop.py --lora_r 4", "defaults": {"lora_r": 32}},
    )
    report.write(folder)  # no model yet, no card
    assert not [*folder.rglob("README.md")]
    put(folder / "model", adapter_config={})
    report.write(folder)
    card = (folder / "model/README.md").read_text()
    assert card.startswith('---\nbase_model: "a/base"\nlibrary_name: peft\n---\n\n# mine\n')
    for line in (
        "A LoRA into which a system prompt is baked: without the prompt the model answers as it",
        "Share baked (held out: 0.997); kept: kl (held out: 0.02).",
        "| pirate | 0.0123 | 0.98 | 1.0 |",
        'model = AutoModelForCausalLM.from_pretrained("a/base")',
        "python src/train_loop.py --lora_r 4",
        "| lora_r | 4 | 32 |",
        "| share_baked | 0.997 |  |",
    ):
        assert line in card, line
    (folder / "model/adapter_config.json").unlink()
    put(folder / "model", tokenizer_config={})
    put(folder, config={"method": "ipo"}, environment={"command": "src/main_distributed.py"})
    report.write(folder)
    card = (folder / "model/README.md").read_text()
    assert "library_name: transformers" in card and "fine-tuned on preferences (ipo)." in card
    assert "peft" not in card and 'from_pretrained("path/to/this/folder")' in card
