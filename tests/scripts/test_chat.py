"""Chat with the result of a run."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import programs
import runs
from conftest import LIMIT, ROOT
from ddp_utils import UserError, data, distributed
from lm import chat, logps, lora, models, preference_data, sampling
from lm.chat_template import Encoder
from ranks import ranks, run_ranks

DEMO = str(ROOT / "data/demo/model")
QUESTION = "Where is the cat?"
GREEDY = ("--temperature", "0", "--max_new_tokens", "12")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run that has changed its model visibly."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    flags = runs.words("--max_rows 32 --max_eval_rows 8 --max_steps 3 --num_samples 0")
    flags += [*runs.words("--fine_tuning lora --learning_rate 0.03"), *GREEDY]
    ranks(1, runs.main, [*flags, "--result_dir", str(folder)])
    return folder


def expected(adapter):
    """Return the most likely reply, by the other implementation: our own sampling."""
    device = torch.device("cpu")
    model = models.load(DEMO, "auto", device)
    model = lora.with_adapter(model, adapter) if adapter else model
    encoder = Encoder(models.load_tokenizer(DEMO), "auto", 1024)
    ids = encoder.ids(encoder.text([{"role": "user", "content": QUESTION}]))
    spec = sampling.SampleSpec(0.0, 1.0, 12, 1, 0)
    world = distributed.World(device=device)
    reply = sampling.generate(logps.Scorer(model), ids, encoder.ends, world, spec)
    return encoder.tokenizer.decode(reply[0], skip_special_tokens=True).strip()


def chat_about(text, words):
    sys.stdin = io.StringIO(text)
    return chat.main(words)


def answer(*words, text=f"{QUESTION}\n"):
    """Return what is printed for the questions in a text, below the line on the history."""
    outcome = run_ranks(1, chat_about, text, words)
    assert outcome.codes == [0], outcome.logs
    return outcome.logs[0].partition("\n")[2]


def test_a_chat_is_a_program_that_reads_questions():
    env = programs.environment() | {"PYTHONPATH": str(ROOT / "src")}
    options = {"env": env, "capture_output": True, "text": True, "timeout": LIMIT}
    words = [sys.executable, "-m", "lm.chat", DEMO, *GREEDY]
    done = subprocess.run(words, input=f"{QUESTION}\n", **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.partition("\n")[2] == f"> {expected(None)}\n> \n"


def test_a_byte_that_is_not_utf8_ends_no_conversation():
    env = programs.environment() | {"PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "lm.chat", DEMO, *GREEDY]
    asked = b"\xff?\n" + QUESTION.encode() + b"\n"
    done = subprocess.run(words, input=asked, env=env, capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().endswith(f"> {expected(None)}\n> \n")


def test_the_result_answers_and_with_before_the_model_before_training(run):
    after = expected(run / "model")
    before = expected(None)
    assert after != before
    assert answer(str(run)) == f"> {after}\n> \n"
    assert answer(str(run), "--before") == answer(DEMO, *GREEDY) == f"> {before}\n> \n"


@pytest.mark.show
def test_an_empty_line_starts_a_new_conversation(run):
    """Its first answer is that to the question alone, as every answer is without the history."""
    after = expected(run / "model")
    questions = f"Who produces beer?\n{QUESTION}\n\n{QUESTION}\n"
    kept = re.findall("^(?:> )+(.+)", answer(str(run), "--history", text=questions), re.M)
    assert kept[1] != kept[2] == after
    assert re.findall("^(?:> )+(.+)", answer(str(run), text=questions), re.M)[1:] == [after, after]


def test_the_first_line_says_whether_earlier_questions_are_remembered(
    tmp_path, monkeypatch, capsys
):
    """Only the demo's model answers single questions, unless a flag says otherwise."""
    other = str(shutil.copytree(DEMO, tmp_path / "other"))
    for words, kind in {
        (DEMO,): "single questions: ",
        (DEMO, "--history"): "conversation: ",
        (other,): "conversation: ",
        (other, "--no_history"): "single questions: ",
    }.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert chat.main([*words]) == 0
        assert capsys.readouterr().out.startswith(kind), words


def test_a_conversation_that_overflows_loses_its_oldest_questions(monkeypatch, capsys):
    """There is room for the system prompt, two questions and two replies, so the first one goes."""
    encoder = Encoder(models.load_tokenizer(DEMO))
    question, reply = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "a"}
    turns = [{"role": "system", "content": "Be brief."}, question, reply, question]
    prompts, room = [], 512 - len(chat.prompt_of(turns, encoder))

    def generate(scorer, prompt, *_, **options):
        prompts.extend(prompt)
        return [encoder.tokenizer("a").input_ids]

    monkeypatch.setattr(sampling, "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.StringIO(3 * f"{QUESTION}\n"))
    flags = ["--history", "--system", "Be brief.", "--max_new_tokens", str(room)]
    assert chat.main([DEMO, *flags]) == 0
    assert prompts[1] == prompts[2] == chat.prompt_of(turns, encoder)
    line = "[the context is full; oldest questions dropped, with their replies: 1]"
    assert capsys.readouterr().out.splitlines()[1:] == [f"> > > {line}", "> "]


def test_the_conversation_so_far_is_the_prompt():
    encoder = Encoder(models.load_tokenizer(DEMO))
    tokenizer = encoder.tokenizer
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = chat.prompt_of(messages, encoder)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered and "Be brief." in rendered
    ids = chat.prompt_of(messages, Encoder(tokenizer, "none"))
    assert tokenizer.decode(ids).endswith("Be brief.\na\nb\nc")


def test_without_a_template_a_run_on_conversations_is_asked_in_turns(tmp_path, monkeypatch):
    """As a row of HH is rendered for training: the question has the words of its dialogue."""
    turn = "\n\nHuman: a b\n\nAssistant:"
    row = json.dumps({"chosen": f"{turn} c", "rejected": f"{turn} d"})
    (tmp_path / "pairs.jsonl").write_text(3 * f"{row}\n")
    encoder = Encoder(models.load_tokenizer(DEMO), "none")
    _, report = preference_data.read(
        data.DataFile(str(tmp_path / "pairs.jsonl"), tmp_path), encoder
    )
    (tmp_path / "data_report.json").write_text(json.dumps({"train": report}))
    config = {"model_name": DEMO, "chat_template": "none"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model").symlink_to(DEMO)
    prompts = []

    def generate(scorer, prompt, *_, **options):
        prompts.extend(prompt)
        return [encoder.tokenizer("e").input_ids]

    monkeypatch.setattr(sampling, "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\nf\n"))
    assert chat.main([str(tmp_path), "--history"]) == 0
    following = f"{turn} e\n\nHuman: f\n\nAssistant:"
    assert prompts == [encoder.tokenizer(text).input_ids for text in (turn, following)]


def test_a_model_that_was_trained_without_its_template_is_saved_without(tmp_path):
    """Otherwise merge, and other programs, would ask it with a template that it does not know."""
    device = torch.device("cpu")
    encoder = Encoder(models.load_tokenizer(DEMO), "none")
    base = models.load(DEMO, "auto", models.META)
    models.save(models.load(DEMO, "auto", device), base, encoder, tmp_path / "model")
    assert not chat.load(str(tmp_path / "model"), False, device)[1].templated
    assert encoder.tokenizer.chat_template
    # null, and not only absent: a LoRA would get the template of its base model
    settings = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert (
        settings["chat_template"] is None and not (tmp_path / "model/chat_template.jinja").exists()
    )


def test_a_model_folder_has_no_before():
    with pytest.raises(UserError, match="--before: .* is not a run of a language model"):
        chat.load(DEMO, True, torch.device("cpu"))


def test_a_folder_without_a_model_is_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    settings = {"result_dir": str(tmp_path / "run"), "output_dir": ""}
    (tmp_path / "run/config.json").write_text(json.dumps(settings))
    (tmp_path / "run/summary.json").write_text('{"status": "preempted", "step": 7}')
    for folder, says in (
        ("no", "folder: there is no folder .*no .expected one such as results/dpo"),
        (
            "run",
            "folder: the run .*run is preempted after step 7 and has no model; run its command",
        ),
    ):
        with pytest.raises(UserError, match=says):
            chat.load(str(tmp_path / folder), False, torch.device("cpu"))


def test_a_model_in_a_folder_of_its_own_is_used(tmp_path):
    """--output_dir of main_distributed.py is not inside the run."""
    settings = {"result_dir": str(tmp_path), "output_dir": DEMO}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "summary.json").write_text("{}")
    model, *_ = chat.load(str(tmp_path), False, torch.device("cpu"))
    assert torch.equal(model.lm_head.weight, models.load(DEMO, "auto", model.device).lm_head.weight)


def test_settings_and_template_are_those_of_the_run_without_flags(tmp_path, monkeypatch):
    config = {"model_name": DEMO, "temperature": 0.5, "max_new_tokens": 7, "chat_template": "none"}
    (tmp_path / "model").symlink_to(DEMO)
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = {}

    def generate(scorer, prompts, ends, world, spec, **options):
        seen.update(spec._asdict(), prompts=prompts)
        return [[3]]

    monkeypatch.setattr(sampling, "generate", generate)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    assert chat.main([str(tmp_path), "--top_p", "0.9"]) == 0
    assert (seen["temperature"], seen["top_p"], seen["max_new_tokens"]) == (0.5, 0.9, 7)
    tokenizer = models.load_tokenizer(DEMO)
    assert seen["prompts"] == [tokenizer(QUESTION).input_ids]


def test_stats_are_the_time_to_the_first_token_and_the_speed_after_it(monkeypatch):
    """The prompt is put first; then tokens at 2, 2.5 and 3 s."""
    seconds = iter([1.0, 2.0, 2.5, 3.0])
    monkeypatch.setattr(chat.time, "perf_counter", lambda: next(seconds))
    streamer = chat.Streamer(models.load_tokenizer(DEMO))
    for token in ([1, 2, 3], 4, 5, 6):
        streamer.put(torch.tensor(token).view(-1))
    assert streamer.stats(0.5) == "[first token after 1.50 s, then 2.0 tokens/s, 3 tokens]"
    assert not streamer.times
    monkeypatch.undo()
    printed = answer(DEMO, "--stats", *GREEDY)
    assert re.search(
        r"^\[first token after \d+\.\d\d s, then .* tokens/s, \d+ tokens\]$", printed, re.M
    )


def test_a_question_longer_than_the_model_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    problem = r"the question and its reply: 5\d\d tokens, .* 512 positions; use a shorter question"
    with pytest.raises(UserError, match=problem):
        chat.main([DEMO, "--max_new_tokens", "511"])
