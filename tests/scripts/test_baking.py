"""Baking: the same replies and the same losses on any number of processes, killed or not."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import faults
import generate_data
import programs
import runs
import train_loop
from conftest import ROOT
from ddp_utils import Stop, UserError, data
from ddp_utils import run as run_
from lm import chat_template, models, sampling
from prompt_baking import generate_config
from ranks import free_port, ranks, run_ranks

# 12 questions x 6 replies and 12 to measure, a write after each 4 per process
SMALL = runs.words("--num_questions 12 --num_sequences_per_question 6 --batch_size 4")
SMALL += runs.words("--max_sequence_length 32 --val_split 0.2")
FILES = "traj_chat.jsonl", "traj_val.jsonl"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What generate() and train() change for speed, some of them in this process, is put back."""
    monkeypatch.setattr(run_, "write_report", run_.write_report)


def generate(folder, *flags, fault=None):
    torch.set_num_threads(1)
    if fault:
        fault()
    files = ["--traj_out_file", f"{folder}/{FILES[0]}", "--val_out_file", f"{folder}/{FILES[1]}"]
    return generate_data.main([*SMALL, *files, *flags])


def content(folder):
    return [(Path(folder) / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with what one process has generated."""
    folder = tmp_path_factory.mktemp("made")
    ranks(1, generate, str(folder))
    return folder


def rows_of(folder):
    return [[json.loads(row) for row in raw.decode().splitlines()] for raw in content(folder)]


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_rows_on_any_number_of_processes(size, made, tmp_path):
    ranks(size, generate, str(tmp_path))
    assert content(tmp_path) == content(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)  # no litter


def test_a_models_own_generation_settings_change_no_distribution(made, tmp_path):
    """Some ship a repetition_penalty, which transformers applies to whatever is generated."""
    model = Path(shutil.copytree(ROOT / "data/demo/model", tmp_path / "model"))
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 3.0}))
    assert generate(tmp_path, "--model_name", str(model)) == 0
    found, expected = ([r["tokens"] for r in rows_of(folder)[0]] for folder in (tmp_path, made))
    assert found == expected


def test_rows_are_split_by_question_and_hold_what_the_teacher_said(made):
    train, val = rows_of(made)
    asked = [{row["question"] for row in rows} for rows in (train, val)]
    assert len(asked[0]) + len(asked[1]) == 12 and len(asked[1]) == 2  # 0.2 x 12 = 2.4
    assert not asked[0] & asked[1]
    assert len(train) == 60 and len({row["reply"] for row in train}) > 30
    kept = [row for row in train if "kept" in row]
    assert len(kept) == 18  # 0.3 x 60
    assert len({row["system"] for row in kept}) == 18  # of 20 prompts
    others = {row["kept"]: row["system"] for row in val if "kept" in row}
    assert [*others] == ["pirate", "robot", "neutral"]
    assert not {*others.values()} & {row["system"] for row in kept}
    assert len(val) == 2 * 6 + 2 * 3 * 2  # two replies to each question under each of three
    for name, sound in (("pirate", "A"), ("robot", "Beep.")):
        replies = [row["reply"] for row in val if row.get("kept") == name]
        assert len(replies) == 4 and all(reply.startswith(sound) for reply in replies)
    assert not any(row["reply"].isupper() for row in kept)
    loud = [row["reply"].isupper() for row in train + val if "kept" not in row]
    assert sum(loud) / len(loud) > 0.9  # x0 asks for capitals
    assert {row["x0"] for row in train} == {"Answer in capital letters.\n"}
    assert {row["tokens"][-1] for row in train if len(row["tokens"]) < 32} == {2}  # the end counts


def kill_after(parts):
    """SIGKILL in the middle of writing a part."""
    save_tables, left, run_.SAVE_FRACTION = run_.save_tables, [parts], math.inf

    def kill(path, *rest):
        left[0] -= 1
        if left[0] < 0:
            data.temporary_of(path).write_bytes(b"half of a file")
            os.kill(os.getpid(), signal.SIGKILL)
        save_tables(path, *rest)

    run_.save_tables = kill


def life(folder, killed):
    assert generate(folder, fault=(lambda: kill_after(3)) if killed else None) == 0


def test_killed_while_it_writes_it_goes_on_with_the_same_rows(made, tmp_path):
    outcome = run_ranks(2, life, str(tmp_path), True)
    assert -9 in outcome.codes and not (tmp_path / FILES[0]).exists()
    outcome = run_ranks(2, life, str(tmp_path), False)
    assert outcome.codes == [0, 0] and "resumed after 3 of 11 parts" in outcome.logs[0]
    assert content(tmp_path) == content(made)


def test_stopped_by_a_time_limit_it_goes_on_with_the_same_rows(made, tmp_path):
    with pytest.raises(Stop, match="stopped after 0 of 21 parts") as caught:
        generate(tmp_path, "--stop_after_minutes", "1e-9")
    assert caught.value.exit_code == 85
    assert generate(tmp_path) == 0
    assert content(tmp_path) == content(made)
    with pytest.raises(Stop, match="these replies are already finished") as caught:
        generate(tmp_path)
    assert caught.value.exit_code == 0


def test_an_adapter_that_is_carried_on_has_its_own_rank(tmp_path):
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "rows.jsonl").write_text('{"model": "data/demo/model"}')
    flags = ["--resume_from", str(tmp_path), "--data_path", str(tmp_path / "rows.jsonl")]
    with pytest.raises(UserError, match="--lora_r: the adapter in init_adapter has 4; leave"):
        train_loop.complete_settings(train_loop.settings.read([*flags, "--lora_r", "8"]))
    config = train_loop.complete_settings(train_loop.settings.read(flags))
    assert (config.lora_r, config.lora_alpha) == (4, 8)


def test_what_an_other_setting_has_made_is_made_anew(made, tmp_path):
    assert generate(tmp_path, "--seed", "1") == 0
    other = content(tmp_path)
    assert generate(tmp_path) == 0
    assert content(tmp_path) == content(made) != other
    kept = [(tmp_path / f"{name}.1").read_bytes() for name in FILES]
    assert kept == other  # nothing is overwritten


def test_template_arguments_go_with_the_replies(tmp_path, monkeypatch):
    template, arguments, found = tmp_path / "t.jinja", '{"mood": "!"}', []
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}")
    flags = ["--chat_template", str(template)]
    assert generate(tmp_path, *flags, "--chat_template_kwargs", arguments) == 0
    rows = sum(rows_of(tmp_path), [])
    assert {row["chat_template_kwargs"] for row in rows} == {arguments}
    monkeypatch.setattr(train_loop, "check", lambda spec, config, world: found.append(config))
    train(tmp_path / "run", tmp_path, *flags, "--check")
    assert found[0].chat_template_kwargs == arguments


def test_the_template_goes_with_the_replies(made, tmp_path, monkeypatch):
    """As a file or as none; replies of another template are not those of these prompts."""
    monkeypatch.setattr(train_loop, "check", lambda spec, config, world: found.append(config))
    template, found = tmp_path / "t.jinja", []
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    for name, other in (("none", str(template)), (str(template), "none")):
        folder = tmp_path / Path(name).stem
        folder.mkdir()
        assert generate(folder, "--chat_template", name) == 0
        train(tmp_path / "run", folder, "--check")
        assert found[-1].chat_template == name
        message = f"--chat_template: {other} is not the one with which .*:1 was sampled; use that"
        with pytest.raises(UserError, match=message):
            train(tmp_path / "run", folder, "--check", "--chat_template", other)
    ended = "{{ m.content }}{% if m.role == 'assistant' %}!{% endif %}"
    template.write_text(template.read_text().replace("{{ m.content }}", ended))
    with pytest.raises(
        UserError, match="t.jinja is not the one with which .* was sampled; use tha"
    ):
        train(tmp_path / "run", folder, "--check")
    # only another end of the replies, but the same prompts
    assert generate(folder, "--chat_template", name) == 0
    train(tmp_path / "run", folder, "--check")
    train(tmp_path / "run", made, "--check")
    assert found[-1].chat_template == "auto"


def test_without_a_template_x0_ends_with_a_line(tmp_path):
    (tmp_path / "x0.txt").write_text("Answer in capital letters.")
    assert generate(tmp_path, "--chat_template", "none", "--x0_file", f"{tmp_path}/x0.txt") == 0
    assert {row["x0"] for row in rows_of(tmp_path)[0]} == {"Answer in capital letters.\n"}


def test_replies_that_are_cut_are_counted(tmp_path, capsys):
    few = runs.words("--num_questions 2 --num_sequences_per_question 1 --max_sequence_length 2")
    assert generate(tmp_path, *few) == 0
    warning = "warning: 8 of 8 replies are cut at --max_sequence_length; a larger value takes more"
    assert warning in capsys.readouterr().out  # 2, and 2 to measure each of 3 prompts


@pytest.mark.parametrize("text", ["\n\nHuman: Why?\n\nAssistant:", "<|im_start|>user\nWhy?"])
def test_a_question_that_a_template_has_rendered_is_one_line(text, made, tmp_path):
    file = tmp_path / "q.json"
    file.write_text(json.dumps([{"question": "Why?"}, {"question": text}]))
    message = f"{re.escape(str(file))}: .*: begins with .* .expected text without a templ"
    with pytest.raises(UserError, match=message):
        generate(tmp_path, "--question_dataset", str(file))
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", made, "--check", "--questions", str(file))


def test_a_template_with_a_date_has_that_of_the_first_start_of_sampling(tmp_path, monkeypatch):
    """Stopped on one day, resumed on the next, and baked on the third."""
    template, days, found = tmp_path / "t.jinja", ["2024-02-28", "2024-02-29", "2024-03-01"], []
    template.write_text(
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    flags = ["--chat_template", str(template)]
    few = [
        *flags,
        "--num_questions",
        "4",
        "--num_sequences_per_question",
        "2",
        "--other_prompts",
        "",
    ]
    for name, starts in (("at once", days[:1]), ("twice", days[:2])):
        (tmp_path / name).mkdir()
        for number, day in enumerate(starts, start=1):
            for module in (generate_data, chat_template):
                monkeypatch.setattr(module, "today", lambda day=day: day)
            stop = ["--stop_after_minutes", "1e-9"] * (number < len(starts))
            with pytest.raises(Stop) if stop else contextlib.nullcontext():
                generate(tmp_path / name, *few, *stop)
    assert content(tmp_path / "twice") == content(tmp_path / "at once")
    rows = sum(rows_of(tmp_path / "twice"), [])
    assert {row["template_date"] for row in rows} == {days[0]}
    monkeypatch.setattr(chat_template, "today", lambda: days[2])
    with pytest.raises(Stop, match="these replies are already finished"):
        generate(tmp_path / "twice", *few)
    monkeypatch.setattr(train_loop, "check", lambda spec, config, world: found.append(spec))
    train(tmp_path / "run", tmp_path / "twice", *flags, "--check")
    assert found[0].inputs[chat_template.DATE] == days[0]
    assert f"the chat template writes the date {days[0]}" in found[0].lines


def test_each_setting_that_changes_a_reply_is_in_the_mark():
    changes = [{"seed": 1}, {"temperature": 0.5}, {"top_p": 0.5}, {"batch_size": 3}]
    changes += [{"max_sequence_length": 9}, {"num_sequences_per_question": 2}, {"val_split": 0.5}]
    changes += [{"base_dtype": "bf16"}, {"chat_template_kwargs": "{}"}, {}]
    changes += [{"retain_share": 0.5}, {"retain_share": 0.0}]
    marks = set()
    encoder = SimpleNamespace(template_digest="t", ends=[2])
    for change in changes:
        config = generate_config.Config(**change)
        rows = generate_data.plan_rows(config, ["a", "b", "c"], {"line 1": "Be kind."}, {})
        marks.add(generate_data.hash_of(config, rows, [], encoder))
    for more in ({"ends": [3]}, {"template_digest": "other"}):
        other = SimpleNamespace(**vars(encoder) | more)
        marks.add(generate_data.hash_of(config, rows, [], other))
    assert len(marks) == len(changes) + 2


WRONG = {
    "--val_out_file FOLDER/traj_chat.jsonl": "--val_out_file: .* is also the traj_out_file",
    '--chat_template_kwargs {"day":1}': "the chat template does not use day; remove it",
    "--chat_template FOLDER/../silent.jinja": "the chat template does not support system; use",
    "--retain_share 1": r"--retain_share: 1.0 is out of range \(expected >= 0 and < 1\)",
    "--other_prompts data/demo/retain_prompts.txt": "line 1: it is also line 1 of retain_prompts",
}


@pytest.mark.parametrize("flags", WRONG)
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_mistakes_of_sampling_are_one_line(flags, check, tmp_path):
    (tmp_path.parent / "silent.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(UserError, match=WRONG[flags]):
        generate(tmp_path, *flags.replace("FOLDER", str(tmp_path)).split(), *check)
    assert not list(tmp_path.iterdir())


FLAGS = runs.words("--max_steps 6 --learning_rate 3e-3 --warmup_ratio 0 --num_samples 0 --lora_r 8")


def train(folder, rows, *flags):
    run_.write_report = lambda *_, **__: ""
    torch.set_num_threads(1)
    files = ["--data_path", f"{rows}/{FILES[0]}", "--val_path", f"{rows}/{FILES[1]}"]
    return train_loop.main([*FLAGS, *files, *flags, "--out_dir", str(folder)])


def batch(per_process, accumulation=1):
    return runs.words(f"--batch_size {per_process} --gradient_accumulation_steps {accumulation}")


@pytest.fixture(scope="module")
def one(made, tmp_path_factory):
    """The run on one process; 60 rows in steps of 8, so that a step has 4."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1, train, str(folder), str(made), *batch(8), "--max_steps", "8")
    return folder


def assert_same_losses(folder, expected):
    found, expected = runs.lines(folder), runs.lines(expected)
    assert [(a["split"], a["step"]) for a in found] == [(b["split"], b["step"]) for b in expected]
    first = next(line["loss"] for line in expected if line["split"] == "train")
    for a, b in zip(found, expected, strict=True):
        name = "loss" if a["split"] == "train" else "kl"
        assert abs(a[name] - b[name]) <= 1e-5 * max(b[name], first), (a, b)
        assert a["count"] == b["count"]
    norms = [
        [line["grad_norm"] for line in lines if "grad_norm" in line] for lines in (found, expected)
    ]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)


def stop_once(monkeypatch, at_step):
    """Let train_step() raise Stop when it is first called for this step."""
    train_step, steps = train_loop.train_step, []

    def stop(policy, step, *rest):
        steps.append(step)
        if step == at_step and steps.count(step) == 1:
            raise Stop("stopped", 85)
        return train_step(policy, step, *rest)

    monkeypatch.setattr(train_loop, "train_step", stop)


def adapter_in(folder):
    return (folder / "model/adapter_model.safetensors").read_bytes()


@pytest.mark.show  # as tests/invariants/test_every_script.py does for each script
def test_two_processes_have_the_losses_of_one(one, made, tmp_path):
    ranks(2, train, str(tmp_path / "run"), str(made), *batch(4), "--max_steps", "8")
    assert_same_losses(tmp_path / "run", one)


def train_stopped(number, folder, rows):
    faults.stop_in_evaluation(number)
    return train(folder, rows, *batch(4), "--max_steps", "2", "--log_every", "1000")


@pytest.mark.show  # as tests/invariants/test_evaluation.py does for DPO
def test_an_evaluation_continues_where_it_was_stopped(made, tmp_path):
    """That of the base model as well as that of the LoRA; no micro-batch is computed twice."""
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    [log, _] = faults.finished(run_ranks(2, train_stopped, 0, whole, str(made))).logs
    assert log.splitlines().count("computed") == 5  # 2 of the base model, 3 of the LoRA
    computed = 0
    for number in (1, 2, 1):
        outcome = run_ranks(2, train_stopped, number, parts, str(made))
        assert outcome.codes == [85, 85], outcome.logs
        computed += outcome.logs[0].splitlines().count("computed")
    [log, _] = faults.finished(run_ranks(2, train_stopped, 0, parts, str(made))).logs
    assert computed == 4 and log.splitlines().count("computed") == 1
    assert faults.is_equal(parts, whole)
    assert not [*tmp_path.rglob("evaluation.safetensors")]


ON_POLICY = runs.words("--on_policy --divergence jsd --max_new_tokens 12")


def test_on_policy_the_student_answers_itself_in_each_step(made, tmp_path, monkeypatch):
    """At first as the base model does without the prompt; a stopped run resumes bit-identically."""
    ranks(1, train, str(tmp_path / "one"), str(made), *batch(8), *ON_POLICY)
    ranks(2, train, str(tmp_path / "two"), str(made), *batch(4), *ON_POLICY)
    first, second = (runs.lines(tmp_path / name, "train") for name in ("one", "two"))
    assert first[0]["loss"] == pytest.approx(second[0]["loss"], rel=1e-5)
    for a, b in zip(first, second, strict=True):  # two ranks rarely sample another token
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    sampled, seeds, sample, own = [], set(), sampling.generate, train_loop.own_replies

    def own_replies(*arguments):
        sampled.extend(own(*arguments).values())
        return dict(zip(arguments[1], sampled[-len(arguments[1]) :], strict=True))

    def generate_replies(scorer, prompts, ends, world, spec, *rest, **options):
        seeds.add(spec.seed)
        return sample(scorer, prompts, ends, world, spec, *rest, **options)

    monkeypatch.setattr(sampling, "generate", generate_replies)
    monkeypatch.setattr(train_loop, "own_replies", own_replies)
    stop_once(monkeypatch, 3)
    flags = [*batch(8), *ON_POLICY, "--save_every", "2"]
    with pytest.raises(Stop):
        train(tmp_path / "stopped", made, *flags)
    assert train(tmp_path / "stopped", made, *flags) == 0
    assert adapter_in(tmp_path / "stopped") == adapter_in(tmp_path / "one")
    baked = [row.reply for row in sampled[:8] if not row.kept]
    tokenizer = train_loop.models.load_tokenizer("data/demo/model")
    texts = tokenizer.batch_decode(baked, skip_special_tokens=True)
    assert baked and not any(text.isupper() for text in texts)  # the teacher's are in capitals
    assert len({tuple(row.reply) for row in sampled}) > 20
    assert len(seeds) == 6  # of each step its own random numbers


def test_another_global_batch_is_another_run(made, tmp_path, monkeypatch):
    """On fewer processes the same flags would visit rows again: it must not go on in silence."""
    specs = []
    monkeypatch.setattr(train_loop, "check", lambda spec, *_: specs.append(spec))
    for size in "12":
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", size)):
            monkeypatch.setenv(name, value)
        train(tmp_path / "run", made, *batch(4), "--check")
    assert [spec.inputs["global_batch"] for spec in specs] == ["4", "8"]


def test_many_cut_replies_are_a_warning(made, tmp_path, monkeypatch):
    specs = []
    monkeypatch.setattr(train_loop, "check", lambda spec, *_: specs.append(spec))
    train(tmp_path / "run", made, "--check")
    train(tmp_path / "run", made, "--check", "--max_traj_len", "32")
    assert not any("warning" in line for line in specs[0].lines)
    tokenizer = models.load_tokenizer("data/demo/model")
    count = used = 0
    for row in rows_of(made)[0]:
        turns = [{"role": "user", "content": row["question"]}]
        system = row.get("system", row["x0"]).strip()
        turns = [{"role": "system", "content": system}, *turns] if system else turns
        options = {"add_generation_prompt": True, "return_dict": False}
        prompt = len(tokenizer.apply_chat_template(turns, **options))
        used += 1
        count += prompt + len(row["tokens"]) > 32  # cut, or dropped with its prompt
    expected = f"warning: train: {count} of {used} rows are longer than --max_traj_len; "
    assert specs[1].lines[1].startswith(expected)


LM_HEAD = ["--lora_targets", "q_proj, lm_head", "--check"]


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"x0": "Mixed."}, ["--val_path", "MADE"], "--val_path: more than one x0"),
        ({"chat_template_kwargs": '{"a": 1}'}, [], "^--chat_template_kwargs: the chat template d"),
        ({}, ["--val_path", "TRAIN"], r"traj_chat.jsonl:1: question: it is also in data_path"),
        ({}, LM_HEAD, "--lora_targets: output layer and embedding cannot"),
        ({}, ["--max_traj_len", "8"], "0 usable rows with x0; --max_traj_len is 8, x0 and "),
        ({"tokens": [99999], "reply": ""}, [], "token id 99999, model has"),
    ],
)
def test_mistakes_are_one_line(change, flags, message, made, tmp_path):
    for name, rows in zip(FILES, rows_of(made), strict=True):
        text = "".join(json.dumps(row | change) + "\n" for row in rows)
        (tmp_path / name).write_text(text)
    flags = [flag.replace("TRAIN", f"{tmp_path}/{FILES[0]}") for flag in flags]
    flags = [flag.replace("MADE", f"{made}/{FILES[1]}") for flag in flags]
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", tmp_path, *flags)


def test_a_lora_that_is_not_fresh_is_noticed_before_the_first_step(made, tmp_path, monkeypatch):
    def loaded(*arguments, **options):
        model = load(*arguments, **options)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.01)
        return model

    load = train_loop.models.load_policy
    monkeypatch.setattr(train_loop.models, "load_policy", loaded)
    with pytest.raises(UserError, match=r"jsonl:\d+: before the first step the policy's log-prob"):
        train(tmp_path / "run", made, *batch(8))


def shell(folder, *words, code=0):
    """./run_distributed.sh 2 baking in a folder of its own -> summary and what it said."""
    command = [ROOT / "run_distributed.sh", "2", "baking", *words]
    done = programs.process(command, code, folder)
    if code:
        return None, done.stderr
    return json.loads((folder / "results/traj_chat/summary.json").read_text()), done.stdout


def test_a_mistake_of_the_second_program_is_found_before_the_first_one_starts(tmp_path):
    _, said = shell(tmp_path, "--num_questions", "4", "--", "--learning_rate=0", code=2)
    assert "error: --learning_rate: 0.0 is out of range" in said
    assert list(tmp_path.iterdir()) == []


def assert_baked(summary, share):
    val, test = summary["val"], summary["test"]
    assert val["kl_base"] >= 0.1 and val["share_baked"] >= share
    assert val["share_baked"] == pytest.approx(1 - val["kl"] / val["kl_base"])
    assert test["judge/base/capitals"] <= 0.05 and test["judge/baked/capitals"] >= 0.9
    assert test["judge/baked/right"] >= 0.9 * test["judge/prompted/right"]
    for name in ("pirate", "robot", "neutral"):  # none is in a row that was trained on
        assert test[f"kept/obeyed_base/{name}"] >= 0.95
        assert test[f"kept/obeyed/{name}"] >= 0.9 * test[f"kept/obeyed_base/{name}"]
        assert test[f"kept/right/{name}"] >= test[f"kept/right_base/{name}"] - 0.1
    assert val["kept/kl"] <= 0.1


def main_in(folder, main, flags):
    """What `./run_distributed.sh 2 baking` starts, on this rank."""
    os.chdir(folder)
    assert main(flags) == 0


def test_the_shell_script_bakes_on_two_processes(tmp_path):
    """Few rows and one step; the next test trains until the prompt is baked."""
    words = "--num_questions 8 --num_sequences_per_question 2 -- --max_steps 1 --num_samples 2"
    summary, said = shell(tmp_path, *runs.words(words))
    assert (summary["world_size"], summary["status"], summary["step"]) == (2, "finished", 1)
    assert "replies   16 replies = 8 questions x 2, " in said
    assert (tmp_path / "results/traj_chat/model/adapter_model.safetensors").exists()


@pytest.mark.show
def test_the_demo_is_baked(tmp_path):
    first = runs.words("--num_questions 60 --num_sequences_per_question 20 --")
    summary, said = shell(tmp_path, *first, *runs.words("--log_every 1000 --num_samples 40"))
    assert_baked(summary, 0.95)
    assert summary["world_size"] == 2 and summary["test"]["count"] == 40
    assert "replies   1200 replies = 60 questions x 20, 324 of them under 20 other pr" in said
    assert re.search(r"kept +pirate: kl 0\.\d+,(?s:.*)obeyed", said) and "warning" not in said
    text = (tmp_path / "results/traj_chat/distributed_output_test.txt").read_text()
    columns = ["question:", "base:", "prompted:", "baked:", "pirate, base:"]
    assert re.search(r"--- 1 of 40\n" + ".*\n".join(columns), text)
    flags = first[:-1], runs.words("--log_every 1000 --num_samples 40")
    for script, words, what in zip(
        (generate_data, train_loop), flags, ("these replies are", "this run is"), strict=True
    ):
        outcome = run_ranks(2, main_in, tmp_path, script.main, words)
        assert outcome.codes == [0, 0] and f"{what} already finished" in outcome.logs[0]
    # what was trained is a plain adapter
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(ROOT / "data/demo/model", dtype=torch.float32)
    PeftModel.from_pretrained(base, tmp_path / "results/traj_chat/model")


def weights(model):
    return {name: tensor.double() for name, tensor in model.state_dict().items()}


def test_a_lora_is_a_model_and_half_of_it_half_the_way():
    """W + scale x alpha / r x B A, from the tensors of the file."""
    from safetensors.torch import load_file

    from lm import lora, models

    folder = ROOT / "tests/golden/demo_adapter"
    settings = json.loads((folder / "adapter_config.json").read_text())
    adapter = load_file(folder / "adapter_model.safetensors")
    cpu = torch.device("cpu")
    demo = str(ROOT / "data/demo/model")
    base = weights(models.load(demo, torch.float32, cpu))
    with pytest.MonkeyPatch.context() as inside:
        inside.chdir(ROOT)  # it names its base from there
        whole = weights(models.load(str(folder), torch.float32, cpu))
        half = weights(lora.merge(models.load(demo, torch.float32, cpu), folder, 0.5))
        meta_model = models.load(str(folder), torch.float32, models.META)
    assert not any("lora" in name for name, _ in meta_model.named_parameters())
    moved = 0
    for name, weight in base.items():
        parts = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        delta = 0
        if parts.format("A") in adapter:
            a, b = (adapter[parts.format(part)].double() for part in "AB")
            delta = settings["lora_alpha"] / settings["r"] * b @ a
            moved += 1
        torch.testing.assert_close(whole[name], weight + delta, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(half[name], weight + 0.5 * delta, atol=1e-6, rtol=1e-6)
    assert moved > 4


def test_replies_can_be_sampled_from_a_lora(made, tmp_path, capsys):
    """It is folded into its base, and what is baked next is a LoRA on both."""
    adapter = shutil.copytree(ROOT / "tests/golden/demo_adapter", tmp_path / "first")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(ROOT / "data/demo/model")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    models_of = Path(shutil.copytree(ROOT / "data/demo/model", tmp_path / "tokenizer"))
    for file in models_of.glob("tokenizer*"):
        shutil.copy(file, adapter)
    assert generate(tmp_path, "--model_name", str(adapter)) == 0
    assert rows_of(tmp_path)[0] != rows_of(made)[0]
    assert train(tmp_path / "run", tmp_path, *batch(8), "--max_steps", "6") == 0
    saved = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(adapter)
    printed = " ".join(capsys.readouterr().out.split())
    assert "the result is a LoRA on a LoRA, which only these scripts can load" in printed
    first, last = (runs.lines(tmp_path / "run", "train")[step]["loss"] for step in (0, 5))
    assert first > last


@pytest.mark.show
def test_the_lines_of_the_guide(tmp_path):
    """They run in a copy of src/, with fewer replies; without --r, which torchrun would read."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/demo").symlink_to(ROOT / "data/demo")
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PET_MASTER_PORT": str(free_port())}
    first = "torchrun --nproc_per_node=2 generate_data.py --num_questions 88 --batch_size 38 "
    first += "--num_sequences_per_question 4"
    second = "torchrun --nproc_per_node=2 train_loop.py --num_epochs 1000 --batch_size 10 "
    second += "--learning_rate 1e-4 --lora_r 32"
    for line in (first, f"{second} --max_steps 3"):
        programs.process(runs.words(line), cwd=tmp_path / "src", **env)
    assert sum(map(len, rows_of(tmp_path / "data"))) == 88 * 4 + 9 * 3 * 2
    assert len(runs.lines(tmp_path / "results/traj_chat", "train")) == 3


def test_the_rank_has_three_names(made):
    for flag in ("-r", "--r", "--lora_r"):
        flags = [flag, "4", "--data_path", str(made / FILES[0])]
        assert train_loop.complete_settings(train_loop.settings.read(flags)).lora_r == 4
