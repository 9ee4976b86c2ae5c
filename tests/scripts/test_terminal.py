"""What a person sees of a run: on terminals of 80 and 100 columns, in a file, of a failed run."""

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest

import main_distributed
import programs
import runs
from conftest import ROOT
from ddp_utils import terminal
from ddp_utils.distributed import World
from ddp_utils.run import Run
from ranks import run_ranks
from terminal import ESCAPE, on_a_terminal

SCRIPT = str(ROOT / "src/main_distributed.py")
SHORT = runs.words(
    "--max_steps 6 --max_rows 96 --max_eval_rows 24 --num_samples 4 --max_new_tokens 12"
)


def widest(output):
    """Columns of the widest line, whatever is drawn over it."""
    lines = re.split(r"[\r\n]+", ESCAPE.sub("", output))
    return max(map(len, lines))


def check_summary(text):
    for line in (
        r"finished after 6 steps in \d+ s",
        r"loss +held out \d\.\d{4} -> \d\.\d{4} \[\d\.\d{4}, \d\.\d{4}\]",
        r"accuracy +held out \d\.\d{4} \[\d\.\d{4}, \d\.\d{4}\]",
        r"replies +test: \d better, \d worse, \d equal",
        r"win rate +[01]\.\d\d \[0\.\d\d, [01]\.\d\d\] of the \d decided",
        r" +reference  \S.*\n +fine-tuned  \S.*|  +both  \S.*",
        r"report +run/report.html",
        r"model +run/model",
        r"talk to it +python -m lm.chat run",
    ):
        assert re.search(rf"^{line}$", text, re.M), (line, text)
    assert len(re.findall(r"^ +(fine-tuned|both)  ", text, re.M)) == 3


@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=pytest.mark.show)])
def test_a_run_on_a_terminal(columns, tmp_path):
    command = [sys.executable, SCRIPT, *SHORT, "--result_dir", "run", "--judge", str(judge())]
    status, output = on_a_terminal(command, columns, tmp_path, programs.environment())
    assert status == 0, output
    text = re.sub(r"[\r\n]+", "\n", ESCAPE.sub("", output))
    assert widest(output) <= columns, output
    live = re.findall(r"\| ([06])/6 \[(\d\d):(\d\d)<(?:.*loss +\d\.\d{4})?", text)  # one live line
    shown = {steps: 60 * int(minutes) + int(seconds) for steps, minutes, seconds in live}
    before = [60 * int(minutes) + int(seconds) for steps, minutes, seconds in live if steps == "0"]
    seconds = int(re.search(r"finished after 6 steps in (\d+) s", text)[1])
    # with the first step, the clock of the bar starts: before it, other work was timed
    assert shown["0"] == 0 or shown["0"] < max(before), text
    assert 0 <= seconds - max(before) - shown["6"] <= 2 + seconds / 2, text
    assert "\nstep " not in text  # and no second one for the same steps
    for name in ("ranks", "model", "loss", "steps", "files", "folder", "data"):
        assert re.search(rf"^{name} ", text, re.M), name
    check_summary(text)


def judge():
    return ROOT / "data/demo/judge.py:score"


def main_in(folder, flags):
    os.chdir(folder)
    return main_distributed.main(flags)


def test_a_run_without_a_terminal(tmp_path):
    """Output and errors are one file; test_demo.py shows that nothing is printed as an error."""
    outcome = run_ranks(1, main_in, tmp_path, [*SHORT, "--result_dir", "run"])
    assert outcome.codes == [0], outcome.logs
    (text,) = outcome.logs
    assert widest(text) <= 80, text
    steps = re.findall(r"^step +(\d+) \| loss .*$", text, re.M)
    assert steps == list("123456")
    assert re.search(r"^loss +dpo, beta 0.1, sft_weight 1$", text, re.M)
    paths = [f"data/demo/preferences_{split}.jsonl" for split in ("train", "val", "test")]
    assert " ".join(["files", *paths]) in " ".join(text.split())
    check_summary(text)


def test_a_long_phase_in_a_pipe_is_one_line_with_the_time_left(monkeypatch, capsys):
    """20 micro-batches of 3 s: after the fourth 12 s have passed, and 16 x 3 s are left."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for is_main in (True, False):
        phase = terminal.Phase("scoring train", terminal.Bar(is_main))
        for _ in phase.each(range(20)):
            now[0] += 3
        printed = "scoring train: about 00:48 left\n" if is_main else ""
        assert capsys.readouterr().out == printed
    resumed = terminal.Phase("sampling", terminal.Bar(True), parts=4, done=2)  # half is done
    for _ in range(2):
        for _ in resumed.each(range(2), units=3):
            for _ in range(3):
                now[0] += 5
                resumed.advance()
    assert capsys.readouterr().out == "sampling: about 00:50 left\n"


def test_lines_of_a_phase_in_a_pipe_are_at_least_ten_minutes_apart(monkeypatch, capsys):
    """By hand: 400 s are a fifth, 800 s are too early, and after 1200 s another 800 s are left.

    A phase of less than 10 seconds has no line, nor has the last micro-batch.
    """
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    for count, seconds in ((3, 3), (1, 30), (5, 400)):
        for _ in terminal.Phase("scoring val", terminal.Bar(True)).each(range(count)):
            now[0] += seconds
    lines = ["scoring val: about 26:40 left", "scoring val: about 13:20 left"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_warning_is_wrapped_at_words():
    assert terminal.wrapped("step 1 " * 20) == "step 1 " * 20
    lines = terminal.wrapped(f"warning: {'word ' * 14}--sft_weight 1").splitlines()
    assert lines == ["warning: " + "word " * 13 + "word", "         --sft_weight 1"]


def test_the_accuracy_of_step_1_is_not_printed_but_in_the_file():
    """It is noise while policy and reference are equal, but not if another model is the reference.

    What a step prints is its state before it.
    """
    bar = SimpleNamespace(reach=lambda *_: None, is_shown=False)
    of_run = {"spec": SimpleNamespace(log_every=0), "steps": 2, "metrics": io.BytesIO(), "bar": bar}
    said: list[str] = []
    fake = SimpleNamespace(world=World(), loggers=[], say=said.append, **of_run)
    for step, margin in ((1, 1e-4), (1, -0.5), (2, 1e-4)):
        values = {"loss": 0.5, "rewards/margins": margin, "rewards/accuracies": 0.25}
        Run.log(fake, step, values)
    equal, other, later = said
    assert equal.endswith("margin  0.0001")
    assert other.endswith("accuracy  0.2500") and later.endswith("accuracy  0.2500")
    assert fake.metrics.getvalue().count(b'"rewards/accuracies": 0.25') == 3


def test_the_end_of_a_run_ends_the_bar_of_a_phase():
    bar = terminal.Bar(True)
    phase = terminal.Phase("scoring train", bar)
    micro_batches = phase.each(range(3))
    next(micro_batches)  # an error in the first one
    bar.close()
    assert phase.now.disable  # tqdm no longer draws it


def test_a_failed_run(tmp_path):
    """The last line says what is wrong, and none of what went before is wider than a terminal."""
    flags = [*SHORT, "--result_dir", "run", "--learning_rate", "1e15", "--save_every", "1"]
    env = programs.environment()
    flags += ["--sft_weight", "0", "--max_grad_norm", "0"]
    status, output = on_a_terminal([sys.executable, SCRIPT, *flags], 80, tmp_path, env)
    text = ESCAPE.sub("", output).replace("\r", "\n")
    assert status == 3, output
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("error: ") and "is not finite" in last
    assert "finished" not in text and "Traceback" not in text
