"""Talking to the result of a run, through a pipe and on a terminal."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest
import torch

import programs
from conftest import ROOT
from ddp_utils import UserError, distributed, logps, lora, models, sampling
from ddp_utils.chat_template import Encoder
from ddp_utils.tools import chat

DEMO = str(ROOT / "data/demo/model")
QUESTION = "Where is the cat?"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has changed its model beyond doubt."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    flags = "--max_rows 32 --max_steps 3 --num_samples 0 --fine_tuning lora --learning_rate 0.03"
    command = [sys.executable, "src/main_distributed.py", *flags.split(), "--result_dir", folder]
    programs.process(command)
    return folder


def expected(adapter):
    """The likeliest reply, by our own sampling: the other implementation."""
    device = torch.device("cpu")
    model = models.load(DEMO, "auto", device)
    model = lora.with_adapter(model, adapter) if adapter else model
    encoder = Encoder(models.load_tokenizer(DEMO), "auto", 1024)
    ids = encoder.ids(encoder.text([{"role": "user", "content": QUESTION}]))
    spec = sampling.SampleSpec(0.0, 1.0, 12, 1, 0)
    world = distributed.World(device=device)
    reply = sampling.generate(logps.Scorer(model), ids, encoder.ends, world, spec)
    return encoder.tokenizer.decode(reply[0], skip_special_tokens=True).strip()


def answer(*words, text=f"{QUESTION}\n"):
    """What is printed for the questions through a pipe."""
    words = ["-m", "ddp_utils.tools.chat", *words, "--temperature", "0", "--max_new_tokens", "12"]
    env = programs.environment() | {"PYTHONPATH": str(ROOT / "src")}
    options = {"env": env, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([sys.executable, *words], input=text, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pipe_is_answered_by_the_result_and_by_what_it_began_with(run):
    after = expected(run / "model")
    before = expected(None)
    assert after != before
    assert answer(str(run)).split("\n") == [f"> {QUESTION}", after, "> ", ""]
    assert answer(str(run / "model")).split("\n")[1] == after
    assert answer(str(run), "--before").split("\n")[1] == before
    assert answer(DEMO).split("\n")[1] == before


def test_an_empty_line_begins_anew(run):
    """The second answer is that to the question alone, and without the empty line it is not."""
    after = expected(run / "model")
    for between, is_same in (("\n", True), ("", False)):
        shown = answer(str(run), text=f"Who produces beer?\n{between}{QUESTION}\n")
        assert (shown.rstrip("\n> ").splitlines()[-1] == after) == is_same, shown


def test_a_terminal_is_asked_and_answered_until_its_end(run):
    ours, theirs = pty.openpty()
    words = ["-m", "ddp_utils.tools.chat", str(run), "--max_new_tokens", "12"]
    env = programs.environment() | {"PYTHONPATH": str(ROOT / "src")}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, *words], env=env, **streams)
    os.close(theirs)

    def until(count):
        """Read until so many questions have been asked."""
        seen = b""
        deadline = time.monotonic() + 60
        while seen.count(b"> ") < count:
            assert select.select([ours], [], [], deadline - time.monotonic())[0], seen
            seen += os.read(ours, 1024)
        return seen.decode()

    until(1)
    os.write(ours, f"{QUESTION}\n".encode())
    shown = until(1).splitlines()
    assert shown[0] == QUESTION and len(shown) >= 3 and shown[-1] == "> "  # echo, reply, question
    os.write(ours, b"\x04")
    assert process.wait(20) == 0
    os.close(ours)


def test_the_conversation_so_far_is_the_prompt():
    tokenizer = models.load_tokenizer(DEMO)
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = chat.prompt_of(messages, tokenizer)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids[0]) == rendered and "Be brief." in rendered
    tokenizer.chat_template = None
    assert tokenizer.decode(chat.prompt_of(messages, tokenizer)[0]).endswith("Be brief.\na\nb\nc")


def test_a_model_folder_has_no_before():
    with pytest.raises(UserError, match="--before: .* is not a run of a language model"):
        chat.load(DEMO, True, torch.device("cpu"))
