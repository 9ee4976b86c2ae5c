"""docs/change_it.md: each diff applies and does what it promises; a script that is copied."""

import json
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
import runs
from conftest import ROOT

ROWS = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()
PAGE = (ROOT / "docs/change_it.md").read_text()
SCRIPT = "src/main_distributed.py"
TINY = runs.words("--max_rows 12 --batch_size 1 --max_steps 4 --num_samples 0 --result_dir run")
TINY += runs.words("--sft_weight 0 --num_epochs 9 --report_to none --warmup_ratio 0")


@pytest.fixture
def changed(tmp_path, request):
    """A copy of the project to which the diff of one heading is applied."""
    tree = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignore)
    shutil.copytree(ROOT / "data/demo", tree / "data/demo", ignore=ignore)
    section = PAGE[PAGE.index(f"\n## {request.param}\n") :]
    diff = re.search(r"```diff\n(.*?)```", section, re.S)[1]
    lines = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+|--)", line)]
    files = re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)
    assert len(lines) <= 10 and len(files) <= 2
    command = ["git", "apply", "-"]
    subprocess.run(command, input=diff, text=True, cwd=tree, check=True)
    assert all((tree / file).read_text() != (ROOT / file).read_text() for file in files)
    return tree


def train(tree, *flags, code=0, **env):
    """Run the changed script on one process; return the lines of its metrics."""
    env = {"PYTHONPATH": str(tree / "src")} | env
    done = programs.process([sys.executable, SCRIPT, *TINY, *flags], code=code, cwd=tree, **env)
    return [] if code else runs.lines(tree / "run", "train"), done


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_loss_of_ones_own(changed):
    steps, _ = train(changed, "--method", "squared_hinge", "--learning_rate", "1e-3")
    assert steps[0]["loss"] == pytest.approx(1, abs=1e-6)  # so says at_reference()
    assert len({step["loss"] for step in steps}) == 4
    for step in steps:  # of one pair each: the square of what the margin lacks to 1
        lacks = max(0, 1 - step["rewards/margins"])
        assert step["loss"] == pytest.approx(lacks**2, abs=1e-6)
    losses = changed / "src/ddp_utils/losses.py"
    losses.write_text(losses.read_text().replace('1.0 if "hinge" in', '0.5 if "hinge" in'))
    _, done = train(changed, "--method", "squared_hinge", "--restart", code=2)
    assert "return its value from losses.at_reference()" in done.stderr


@pytest.mark.parametrize("changed", ["Data"], indirect=True)
def test_data_of_ones_own(changed):
    rows = {"prompt": [], "ranked": []}
    for line in ROWS[:12]:
        row = json.loads(line)
        prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
        rows["prompt"].append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        rows["ranked"].append({"question": prompt, "answers": [chosen, "In between.", rejected]})
    losses = []
    for name in rows:
        (changed / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
        losses.append([row["loss"] for row in train(changed, "--train_data", f"{name}.jsonl")[0]])
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
    steps, _ = train(changed, "--report_to", "mlflow")
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


# --- copy ----------------------------------------------------------------------------------------


def test_a_copied_script_runs_as_it_is(tmp_path):
    """`cp src/main_distributed.py src/my_dpo.py`, then start the copy."""
    tree = Path(shutil.copytree(ROOT / "src", tmp_path / "src"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    shutil.copy(tree / "main_distributed.py", tree / "my_dpo.py")
    command = [sys.executable, "src/my_dpo.py", *TINY, "--max_steps", "1"]
    programs.process(command, cwd=tmp_path, PYTHONPATH="")
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert "my_dpo.py" in environment["code"]
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
