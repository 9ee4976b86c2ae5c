"""docs/change_it.md: each diff applies and does what it promises; a script that is copied."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import programs
import reading
import runs
from conftest import ROOT
from lm.chat_template import Encoder
from lm.models import load_tokenizer

ROWS = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()
PAGE = (ROOT / "docs/change_it.md").read_text()
SCRIPT = "src/main_distributed.py"
COPY = "src/my_dpo.py"
TINY = runs.words("--max_rows 12 --batch_size 1 --max_steps 4 --num_samples 0 --result_dir run")
TINY += runs.words("--sft_weight 0 --num_epochs 9 --report_to none --warmup_ratio 0")


@pytest.fixture
def changed(tmp_path, request):
    """A copy of the project to which the diff of one heading is applied."""
    tree = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignore)
    shutil.copytree(ROOT / "data/demo", tree / "data/demo", ignore=ignore)
    shutil.copy(tree / SCRIPT, tree / COPY)
    section = PAGE[PAGE.index(f"\n## {request.param}\n") :]
    diff = re.search(r"```diff\n(.*?)```", section, re.S)[1]
    lines = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+|--)", line)]
    files = re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)
    assert len(lines) <= 10 and len(files) <= 2
    command = ["git", "apply", "-"]
    subprocess.run(command, input=diff, text=True, cwd=tree, check=True)
    for file in files:
        assert (tree / file).read_text() != (ROOT / file.replace(COPY, SCRIPT)).read_text()
    return tree


def train(tree, *flags, code=0, processes=1, script=COPY, **env):
    """Run the changed copy; return the lines of its metrics in the folder run."""
    env = {"PYTHONPATH": str(tree / "src")} | env
    start = ["-m", "ddp_utils.launch", str(processes)] if processes > 1 else []
    command = [sys.executable, *start, script, *TINY, *flags]
    done = programs.process(command, code=code, cwd=tree, **env)
    return [] if code else runs.lines(tree / "run", "train"), done


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_loss_of_ones_own(changed):
    """In training and in validation, the square of what the margin lacks to 1, by hand."""
    flags = ["--eval_every", "2", "--max_eval_rows", "1", "--learning_rate", "1e-3"]
    steps, _ = train(changed, *flags)
    assert steps[0]["loss"] == pytest.approx(1, abs=1e-6)  # a margin of 0
    assert len({step["loss"] for step in steps}) == 4
    lines = steps + runs.lines(changed / "run", "val")
    assert len(lines) == 7
    for line in lines:  # of one pair each
        lacks = max(0, 1 - line["rewards/margins"])
        assert line["loss"] == pytest.approx(lacks**2, abs=1e-6)
        assert line["is_beyond"] == 0


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_loss_that_only_training_has_is_an_error_before_the_first_update(changed):
    script = changed / COPY
    text = script.read_text()
    line = "        per_pair, metrics = loss_of(policy, batch, known, examples, config)\n"
    assert line in text
    script.write_text(text.replace(line, f"{line}        per_pair = 2 * per_pair\n"))
    _, done = train(changed, code=2)
    assert "the loss is 2.000000 (expected 1.000000, as loss_of() has it" in done.stderr
    assert "Traceback" not in done.stderr


def weighted(folder, weights):
    """Pairs with these weights, in the current folder of the changed script."""
    rows = [json.loads(line) | {"weight": w} for line, w in zip(ROWS, weights, strict=False)]
    (folder / "weighted.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--train_data", "weighted.jsonl", "--val_data", "weighted.jsonl", "--no_shuffle"]


@pytest.mark.parametrize("changed", ["A weight per pair"], indirect=True)
def test_a_weight_per_pair(changed):
    """The first loss is log 2 times the mean weight; on 2 processes; and a changed file is noticed.

    The field is called weight, which otherwise means that a row is not trained.
    """
    script = changed / COPY
    script.write_text(script.read_text().replace('extra["importance"]', 'extra["weight"]'))
    weights = [0.5, 2.0, 1.0, 4.0, 0.25, 8.0]
    flags = [*weighted(changed, weights), "--extra_fields", "weight", "--batch_size", "2"]
    flags += ["--eval_every", "3", "--learning_rate", "1e-3", "--max_steps", "3"]
    steps, _ = train(changed, *flags)
    log_2 = math.log(2)
    assert steps[0]["loss"] == pytest.approx(1.25 * log_2, abs=1e-6)
    before = runs.lines(changed / "run", "val")[0]
    assert before["loss"] == pytest.approx(sum(weights) / 6 * log_2, abs=1e-6)
    report = json.loads((changed / "run/data_report.json").read_text())["train"]
    assert "weight" not in report["fields_not_read"]
    both, _ = train(changed, *flags, "--result_dir", "both", processes=2)
    for one, two in zip(steps, runs.lines(changed / "both", "train"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-5)
    runs.as_if_killed(changed / "run")
    weighted(changed, weights[::-1])
    _, done = train(changed, *flags, code=2)
    assert "content of train" in done.stderr
    _, done = train(changed, *flags, "--extra_fields", "importance", "--restart", code=2)
    assert "weighted.jsonl:1: importance: missing, but --extra_fields names it" in done.stderr


@pytest.mark.parametrize("changed", ["Data"], indirect=True)
def test_data_of_ones_own(changed):
    """The same pairs in a format of one's own, and as the original script reads them."""
    rows = {"prompt": [], "own": []}
    for line in ROWS[:12]:
        row = json.loads(line)
        prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
        rows["prompt"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows["own"].append({"question": prompt, "answers": [chosen, "In between.", rejected]})
    losses = []
    for name, script in (("prompt", SCRIPT), ("own", COPY)):
        (changed / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
        steps, _ = train(changed, "--train_data", f"{name}.jsonl", script=script)
        losses.append([row["loss"] for row in steps])
        report = json.loads((changed / "run/data_report.json").read_text())["train"]
        assert (report["format"], report["fields_not_read"]) == (name, "")
    assert losses[0] == losses[1]


@pytest.mark.parametrize("changed", ["A model class"], indirect=True)
def test_a_model_class_of_ones_own(changed):
    row = json.loads(ROWS[0])
    rows = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    (changed / "one.jsonl").write_text((json.dumps(rows) + "\n") * 2)
    flags = runs.words("--train_data one.jsonl --val_data one.jsonl --max_steps 1")
    steps, _ = train(changed, *flags)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data/demo/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/demo/model")
    chat = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    answer = [{"role": "assistant", "content": row["chosen"]}]
    whole = tokenizer.apply_chat_template(chat + answer)["input_ids"]
    while tokenizer.decode(whole[-1]).isspace():  # behind the end of the turn
        whole.pop()
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0, :-1].double()
    logps = (5 * torch.tanh(logits / 5)).log_softmax(-1)
    expected = sum(logps[at - 1, whole[at]].item() for at in range(len(prompt), len(whole)))
    assert steps[0]["logps/chosen"] == pytest.approx(expected, abs=1e-3)


FAKE = """
import json
def log_metrics(metrics, step):
    with open("log.jsonl", "a") as file:
        file.write(json.dumps([step, metrics]) + "\\n")
"""


@pytest.mark.parametrize("changed", ["A logger"], indirect=True)
def test_a_logger_of_ones_own(changed):
    (changed / "src/mlflow.py").write_text(FAKE)
    steps, _ = train(changed)
    logged = [json.loads(line) for line in (changed / "log.jsonl").read_text().splitlines()]
    values = [[step, metrics["train/loss"]] for step, metrics in logged if "train/loss" in metrics]
    assert values == [[step["step"], step["loss"]] for step in steps]


@pytest.mark.parametrize("changed", ["An optimizer"], indirect=True)
def test_an_optimizer_of_ones_own(changed):
    """SGD with momentum; a run that is killed and resumed ends with the same state."""
    states = []
    flags = ["--learning_rate", "0.1", "--lr_scheduler", "constant", "--save_every", "1"]
    for is_killed in (False, True):
        shutil.rmtree(changed / "run", ignore_errors=True)
        if is_killed:
            train(changed, *flags, "--max_steps", "2")
            runs.as_if_killed(changed / "run")
        steps, _ = train(changed, *flags)
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        (path,) = (changed / "run/checkpoints").glob("step-*4/state.safetensors")
        states.append(load_file(path))
    kinds = {key.partition("/")[0] for key in states[0]}
    assert "momentum_buffer" in kinds and "exp_avg" not in kinds
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("changed", ["A schedule"], indirect=True)
def test_a_schedule_of_ones_own(changed):
    """Each of the 4 steps is a quarter of them."""
    steps, _ = train(changed, "--learning_rate", "0.001", "--lr_scaling", "none")
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([0.001, 0.0005, 0.00025, 0.000125], rel=1e-12)


@pytest.mark.parametrize("changed", ["An order of the data"], indirect=True)
def test_an_order_of_ones_own(changed):
    """Each step has one pair; both texts of a pair are counted as tokens, as in Meter."""
    path = changed / "rows.jsonl"
    path.write_text("\n".join(ROWS[:12]))
    pairs, _ = reading.pairs(path, Encoder(load_tokenizer(ROOT / "data/demo/model")))
    pairs.sort(key=lambda pair: len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)))
    expected = [2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs]
    flags = ["--train_data", "rows.jsonl", "--val_data", "rows.jsonl", "--max_steps", "12"]
    steps, _ = train(changed, *flags)
    tokens = [round(step["tokens_per_second"] * step["seconds"]) for step in steps]
    assert tokens == expected and len(tokens) == 12


# --- copy ----------------------------------------------------------------------------------------


def test_a_copied_script_starts_like_the_original(tmp_path):
    """`cp src/main_distributed.py src/my_dpo.py`, then ./run_distributed.sh with the copy."""
    tree = Path(shutil.copytree(ROOT / "src", tmp_path / "src"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    for name in ("scripts", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "run_distributed.sh", tmp_path / "start.sh")  # not a link to the original
    shutil.copy(tree / "main_distributed.py", tree / "my_dpo.py")
    command = ["bash", "start.sh", "2", "src/my_dpo.py", *TINY, "--max_steps", "1"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    programs.process([*command, "--batch_size", "2"], cwd=tmp_path, PYTHONPATH="", PATH=path)
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert "my_dpo.py" in environment["code"] and environment["world_size"] == 2
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
