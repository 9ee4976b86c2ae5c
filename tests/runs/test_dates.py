"""A chat template that writes today's date: in a run it is that of the first start."""

import datetime
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import chat_template_utils

import faults
from ddp_utils import checkpoints
from ddp_utils.tools import report
from lm import chat, chat_template
from lm.chat_template import DATE, Encoder

# in the manner of Llama 3.2, with the demo's tokens
TEMPLATE = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|im_start|>system\nToday Date: ' + date_string + '<|im_end|>\n' }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FIRST, NEXT = "2024-02-28", "2024-02-29"


def set_clocks(days, fault=None):
    """It is a day of its own on each rank, for the project and for transformers."""
    noon = datetime.datetime.fromisoformat(f"{days[int(os.environ['RANK'])]}T12:00")
    chat_template_utils.datetime = SimpleNamespace(now=lambda: noon)
    chat_template.today = lambda: noon.date().isoformat()
    if fault:
        fault[0](*fault[1:])


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start a run on some days, one for each rank, with a cache of token ids of its own."""
    file = tmp_path_factory.mktemp("template") / "date.jinja"
    file.write_text(TEMPLATE)

    def start(folder, days, *flags, fault=None):
        cache = tmp_path_factory.mktemp("cache")  # of a node that has no other one
        more = ["--max_steps", "4", "--save_every", "2", "--chat_template", str(file), *flags]
        clocks = (set_clocks, days, fault)
        more += ["--cache_dir", str(cache)]
        return faults.start(len(days), folder, *faults.MODES["lora"], *more, fault=clocks)

    return start


@pytest.fixture(scope="module")
def resumed(start, tmp_path_factory):
    """A run that was killed on one day and resumed on the next; it is midnight when it starts."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    kill = (faults.kill_in_backward, 0, 3)
    assert -9 in start(folder, (FIRST, NEXT), fault=kill).codes
    outcome = faults.finished(start(folder, (NEXT, NEXT)))
    assert f"the chat template writes the date {FIRST}\n" in outcome.logs[0]
    assert "resumes after step 2" in outcome.logs[0]
    return folder


def test_a_run_resumed_on_the_next_day_is_that_of_one_day(start, resumed, tmp_path):
    faults.finished(start(tmp_path / "run", (FIRST, FIRST)))
    assert faults.is_equal(resumed, tmp_path / "run")
    assert json.loads((resumed / "environment.json").read_text())["inputs"][DATE] == FIRST
    log = start(resumed, (NEXT,)).logs[0]
    assert "this run is already finished (same settings and data)" in log


def test_only_a_restart_has_the_date_of_its_own_day(start, resumed):
    for flags, day in ((["--check"], FIRST), (["--check", "--restart"], NEXT)):
        log = faults.finished(start(resumed, (NEXT,), *flags)).logs[0]
        assert f"the chat template writes the date {day}\n" in log


def test_a_launcher_that_starts_the_processes_again_does_not_restart(tmp_path, monkeypatch):
    """The flags are the same; so --restart counts for its first start."""
    config = SimpleNamespace(restart=True, check=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    facts = checkpoints.start_facts() | {"inputs": {DATE: FIRST}}
    (tmp_path / "environment.json").write_text(json.dumps(facts))
    for parent, is_again in ((os.getppid(), True), (1, False)):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        date = chat_template.date_of(str(tmp_path), config, None)
        assert date == (FIRST if is_again else chat_template.today())


def test_chat_and_the_model_card_have_the_date_of_the_run(resumed):
    encoder = chat.load(str(resumed), False, torch.device("cpu"))[1]
    ids = chat.prompt_of([{"role": "user", "content": "Hi"}], encoder)
    assert "Today Date: 28 Feb 2024" in encoder.tokenizer.decode(ids)
    report.main(["--no_curves", str(resumed)])
    assert (
        f"writes the current date; in all of the training it was\n{FIRST}."
        in (resumed / "model/README.md").read_text()
    )
    shutil.copytree(resumed / "model", resumed.parent / "model")  # without the run
    encoder = chat.load(str(resumed.parent / "model"), False, torch.device("cpu"))[1]
    assert encoder.date == chat_template.today()


OTHERS = {  # template -> arguments -> what it renders on that day
    "{% macro day() %}{{ strftime_now('%A') }}{% endmacro %}{{ day() }}": {"": "Wednesday"},
    "{{ strftime_now('%H:%M') if strftime_now is defined }}": {"": "00:00"},
    TEMPLATE.partition("{{ '<")[0] + "{{ date_string }}": {
        "": "28 Feb 2024",
        '{"date_string": "26 Jul 2024"}': "26 Jul 2024",
    },
}


@pytest.mark.parametrize("template", OTHERS)
def test_each_way_to_write_a_date_writes_that_of_the_encoder(template):
    from test_pairs import chat_tokenizer

    ends = "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
    tok = chat_tokenizer(template + ends, bos=False)
    for arguments, expected in OTHERS[template].items():
        encoder = Encoder(tok, kwargs=arguments, date=FIRST)
        assert encoder.text("Hi") == f"{expected}Hi<|eot|>"
        assert Encoder(tok, kwargs=arguments, date=NEXT).facts() != encoder.facts()


def test_the_date_of_a_template_without_one_changes_nothing():
    from test_pairs import CHATML, chat_tokenizer

    one, other = (Encoder(chat_tokenizer(CHATML), date=day) for day in (FIRST, NEXT))
    assert one.facts() == other.facts() and one.inputs == {} and one.notes == []
