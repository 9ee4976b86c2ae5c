"""docs/change_it.md: each diff applies and does what it promises; a script that is copied."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
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
from ranks import ranks, run_ranks

ROWS = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()
PAGE = (ROOT / "docs/change_it.md").read_text()
SECTIONS = PAGE.split("\n## ")[1:]
CHANGES = [section.partition("\n")[0] for section in SECTIONS if "```diff" in section]
SCRIPT = "src/main_distributed.py"
COPY = "src/my_dpo.py"
TINY = runs.words("--max_rows 12 --batch_size 1 --max_steps 4 --num_samples 0 --sft_weight 0")
TINY += runs.words("--num_epochs 9 --report_to none --warmup_ratio 0 --max_eval_rows 2")


def copied(folder):
    """A folder with the script and a copy of it."""
    (folder / "src").mkdir(parents=True)
    for name in (SCRIPT, COPY):
        shutil.copy(ROOT / SCRIPT, folder / name)
    return folder


def change(folder, heading):
    """Copy the script to a folder, and apply the diff below a heading."""
    copied(folder)
    section = PAGE[PAGE.index(f"\n## {heading}\n") :]
    diff = re.search(r"```diff\n(.*?)```", section, re.S)[1]
    lines = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+|--)", line)]
    assert len(lines) <= 10 and re.findall(r"^\+\+\+ (.*)$", diff, re.M) == [f"b/{COPY}"]
    script = (ROOT / SCRIPT).read_text().splitlines()
    for hunk in re.split(r"^@@ -", diff, flags=re.M)[1:]:  # a reader looks there
        first, *body = hunk.splitlines()
        old = [line[1:] for line in body if not line.startswith("+")]
        start = int(first.split(",")[0]) - 1
        assert script[start : start + len(old)] == old, f"{heading}: @@ -{first}"
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True)
    assert (folder / COPY).read_text() != (ROOT / SCRIPT).read_text()
    return folder


def edit(tree, old, new):
    """Replace the text in the copy, where it stands once."""
    script = tree / COPY
    text = script.read_text()
    assert text.count(old) == 1, old
    script.write_text(text.replace(old, new))


@pytest.fixture
def changed(tmp_path, request):
    """A folder with a copy of the script to which the diff below one heading is applied."""
    return change(tmp_path / "project", request.param)


def main_of(tree, script, flags, self_test=False):
    """main() of a script of the folder, on this rank."""
    os.chdir(tree)
    sys.argv[0] = str(tree / script)
    sys.path.insert(0, str(tree / "src"))  # for a module of one's own
    spec = importlib.util.spec_from_file_location("copied", tree / script)
    module = sys.modules["copied"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runs.hurry(self_test)
    assert module.main(flags) == 0


def train(tree, *flags, processes=1, script=COPY, folder="run"):
    """Run the changed copy; return the lines of the metrics of its steps."""
    shutil.rmtree(tree / folder / "model", ignore_errors=True)
    ranks(processes, main_of, tree, script, [*TINY, *flags, "--result_dir", folder])
    return runs.lines(tree / folder, "train")


def error_of(tree, *flags):
    """The error that the changed copy ends with; its exit status is 2."""
    outcome = run_ranks(1, main_of, tree, COPY, [*TINY, *flags, "--result_dir", "run"])
    assert outcome.codes == [2] and "Traceback" not in outcome.logs[0], outcome.logs
    return outcome.logs[0]


def state_of(tree, folder="run"):
    """What the last checkpoint contains."""
    return load_file(tree / folder / "checkpoints/step-00000004/state.safetensors")


# --- all ten -------------------------------------------------------------------------------------


def own_data(tree):
    """The flags of the changes that read fields of their own, and their files."""
    rows = [json.loads(line) for line in ROWS[:12]]
    weighted = [row | {"importance": 0.5 + n} for n, row in enumerate(rows)]
    ranked = [
        {"question": row["prompt"], "answers": [row["chosen"], "?", row["rejected"]]}
        for row in rows
    ]
    for name, lines in (("weighted", weighted), ("ranked", ranked)):
        (tree / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {
        "A weight per pair": runs.words("--extra_fields importance --train_data weighted.jsonl"),
        "Data": runs.words("--train_data ranked.jsonl --val_data ranked.jsonl"),
        "An optimizer": runs.words("--learning_rate 0.1"),
    }


PARTS = {  # heading -> what the environment names, in a copy of main_distributed.py
    "Data": "ROW_READER",
    "A model class": "Capped, MODEL_CLASS",
    "A logger": "LOGGERS, MLflow",
    "An optimizer": "main",
    "A schedule": "main",
    "An order of the data": "main",
    "Averaged weights": "main",
}


def test_ten_changes_are_shown():
    assert len(CHANGES) == 10 and PARTS.keys() < {*CHANGES}


# what a run keeps of the others, or how it begins, is that of a run that is not changed
OTHERS = ("A metric", "Data", "A logger", "A schedule", "An optimizer")
SOME = [pytest.param(x, marks=pytest.mark.show) if x in OTHERS else x for x in CHANGES]


@pytest.mark.parametrize("heading", SOME)
def test_a_changed_script_resumes_and_is_the_same_on_two_processes(heading, tmp_path):
    """Killed after step 2 of 4 and resumed, it ends with the same bits; and it is named."""
    tree = change(tmp_path / "project", heading)
    (tree / "src/mlflow.py").write_text(FAKE)
    flags = [*own_data(tree).get(heading, []), "--batch_size", "2", "--eval_every", "2"]
    flags += runs.words("--save_every 1 --keep_checkpoints 9")
    whole = train(tree, *flags)
    validation, state = runs.lines(tree / "run", "val"), state_of(tree)
    for step in (3, 4):
        shutil.rmtree(tree / f"run/checkpoints/step-0000000{step}")
    runs.as_if_killed(tree / "run")
    resumed = train(tree, *flags)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert runs.lines(tree / "run", "val") == validation and len(validation) == 3
    torch.testing.assert_close(state_of(tree), state, rtol=0, atol=0)
    both = train(tree, *flags, processes=2, folder="both")
    for one, two in zip(whole, both, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-5)
        assert two.keys() == one.keys()
    facts = json.loads((tree / "run/environment.json").read_text())
    parts = PARTS.get(heading, "loss_of")
    assert facts["changes"] == f"my_dpo.py differs from main_distributed.py in {parts}"


# --- each of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_loss_of_ones_own(changed):
    """In training and in validation, the square of what the margin lacks to 1, by hand.

    Its pairs are a list, in the check before the first update, too.
    """
    beyond = "(per_pair == 0).float()"
    edit(changed, beyond, f"{beyond} * len(pairs + []) / len(pairs)")
    flags = ["--eval_every", "2", "--max_eval_rows", "1", "--learning_rate", "1e-3"]
    steps = train(changed, *flags)
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
    line = "        per_pair, metrics = loss_of(policy, batch, known, examples, config)\n"
    edit(changed, line, f"{line}        per_pair = 2 * per_pair\n")
    error = error_of(changed)
    assert "the loss is 2.000000 (expected 1.000000, as loss_of() has it" in error


def test_a_loss_of_sft_that_only_training_has_is_an_error_before_the_first_update(tmp_path):
    """The copy halves what loss_of() returns, in the gradient and in the logged loss alike."""
    (tmp_path / "src").mkdir()
    script = (ROOT / "src/train.py").read_text()
    line = "per_row, metrics = loss_of(policy, batch)\n"
    assert script.count(line) == 1
    script = script.replace(line, f"{line}        per_row = per_row / 2\n")
    (tmp_path / "src/my_sft.py").write_text(script)
    flags = runs.words("--max_rows 8 --micro_batch_size 2 --max_steps 1 --val_share 0")
    flags += ["--output_dir", "run"]
    outcome = run_ranks(2, main_of, tmp_path, "src/my_sft.py", flags)
    assert outcome.codes == [2, 2], outcome.logs
    found = r"the loss is (\d\.\d+) \(expected (\d\.\d+), as loss_of\(\) has it for the same rows\)"
    logged, expected = map(float, re.search(found, "".join(outcome.logs)).groups())
    assert logged == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_gradient_of_another_loss_than_the_logged_one_is_an_error(changed):
    """On two processes, with two micro-batches."""
    edit(changed, "loss = (per_pair * weight)", "loss = 2 * (per_pair * weight)")
    expected = "the loss given to backward() is 2.000000 (expected 1.000000, the mean of loss_of())"
    flags = [*TINY, *runs.words("--batch_size 2 --gradient_accumulation_steps 2")]
    outcome = run_ranks(2, main_of, changed, COPY, [*flags, "--result_dir", "run"])
    assert outcome.codes == [2, 2] and expected in outcome.logs[0] + outcome.logs[1], outcome.logs


@pytest.mark.parametrize("changed", ["A loss"], indirect=True)
def test_a_loss_without_the_metrics_that_the_run_reads_is_one_line(changed):
    beyond, scalar = '"is_beyond": (per_pair == 0).float()', '"z": per_pair.mean()'
    edit(changed, beyond, scalar)
    assert "error: metric z: its shape is [] (expected [1]); return one" in error_of(changed)
    own = '{"rewards/chosen": per_pair, "rewards/rejected": per_pair}'
    edit(changed, f"metrics | {{{scalar}}}", own)
    missing = "logps/chosen, logps/rejected, rewards/margins, rewards/accuracies"
    assert f"error: loss_of: missing metrics: {missing}; return those of losses" in error_of(
        changed
    )


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
    flags += runs.words("--eval_every 3 --max_eval_rows 6 --learning_rate 1e-3 --max_steps 3")
    steps = train(changed, *flags)
    log_2 = math.log(2)
    assert steps[0]["loss"] == pytest.approx(1.25 * log_2, abs=1e-6)
    before = runs.lines(changed / "run", "val")[0]
    assert before["loss"] == pytest.approx(sum(weights) / 6 * log_2, abs=1e-6)
    report = json.loads((changed / "run/data_report.json").read_text())["train"]
    assert "weight" not in report["fields_not_read"]
    both = train(changed, *flags, processes=2, folder="both")
    for one, two in zip(steps, both, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-5)
    runs.as_if_killed(changed / "run")
    weighted(changed, weights[::-1])
    assert "content of train" in error_of(changed, *flags)
    error = error_of(changed, *flags, "--extra_fields", "importance", "--restart")
    assert "weighted.jsonl:1: importance: missing, but --extra_fields names it" in error
    hint = "error: --extra_fields: weight: not kept; pass --extra_fields weight"
    assert hint in error_of(changed, "--restart")


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
        flags = "--train_data", f"{name}.jsonl", "--restart"
        steps = train(changed, *flags, script=script)
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
    steps = train(changed, *flags)
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
    steps = train(changed)
    logged = [json.loads(line) for line in (changed / "log.jsonl").read_text().splitlines()]
    values = [[step, metrics["train/loss"]] for step, metrics in logged if "train/loss" in metrics]
    assert values == [[step["step"], step["loss"]] for step in steps]


@pytest.mark.parametrize("changed", ["An optimizer"], indirect=True)
def test_an_optimizer_of_ones_own(changed):
    """SGD with momentum has a buffer for each weight."""
    train(changed, "--learning_rate", "0.1", "--lr_scheduler", "constant")
    kinds = {key.partition("/")[0] for key in state_of(changed)}
    assert kinds == {"parameter", "momentum_buffer"}


@pytest.mark.parametrize("changed", ["A schedule"], indirect=True)
def test_a_schedule_of_ones_own(changed):
    """Each of the 4 steps is a quarter of them."""
    steps = train(changed, "--learning_rate", "0.001", "--lr_scaling", "none")
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
    steps = train(changed, *flags)
    tokens = [round(step["tokens_per_second"] * step["seconds"]) for step in steps]
    assert tokens == expected and len(tokens) == 12


def weights_of(tensors, kind):
    """{name: weight} of a checkpoint, in float64."""
    names = [name for name in tensors if name.startswith(kind)]
    return {name.removeprefix(kind): tensors[name].double() for name in names}


@pytest.mark.parametrize("changed", ["Averaged weights"], indirect=True)
def test_averaged_weights(changed):
    """0.9 of the average and 0.1 of the weights, by hand; they are saved, and were evaluated."""
    flags = runs.words("--save_every 1 --keep_checkpoints 9 --eval_every 4 --batch_size 2")
    train(changed, *flags, "--learning_rate", "1e-3")
    steps = [
        load_file(changed / f"run/checkpoints/step-0000000{step}/state.safetensors")
        for step in (1, 2, 3, 4)
    ]
    expected = load_file(ROOT / "data/demo/model/model.safetensors")
    expected = {name: expected[name].double() for name in weights_of(steps[0], "parameter/")}
    for state in steps:
        for name, weight in weights_of(state, "parameter/").items():
            expected[name] = 0.9 * expected[name] + 0.1 * weight
        averages = weights_of(state, "own/averages/")
        torch.testing.assert_close(averages, expected, rtol=0, atol=1e-6)
    saved = load_file(changed / "run/model/model.safetensors")
    last = weights_of(steps[-1], "parameter/")
    assert all(torch.equal(saved[name], averages[name].to(torch.bfloat16)) for name in averages)
    assert not all(torch.equal(saved[name], last[name].to(torch.bfloat16)) for name in averages)
    evaluated = runs.lines(changed / "run", "val")[-1]
    after = ["--model_name", str(changed / "run/model"), "--max_steps", "0"]
    train(changed, *after, folder="after", script=SCRIPT)
    scored = runs.lines(changed / "after", "val")[0]
    assert evaluated["step"] == 4
    for name in ("logps/chosen", "logps/rejected"):
        assert evaluated[name] == pytest.approx(scored[name], abs=0.05)  # which bf16 has rounded


ZERO_3 = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("changed", ["Averaged weights"], indirect=True)
def test_each_rank_averages_its_own_shards(changed, strategy):
    """Two ranks evaluate and save what one process does, and train on as if nothing had been."""
    flags = runs.words("--batch_size 2 --learning_rate 1e-3 --eval_every 2 --max_eval_rows 4")
    sharded = ["--strategy", strategy]
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
        (changed / "zero.json").write_text(json.dumps(ZERO_3))
        sharded += ["--sharding_config", "zero.json"]
    train(changed, *flags)
    train(changed, *flags, *sharded, processes=2, folder="sharded")
    expected, lines = runs.lines(changed / "run"), runs.lines(changed / "sharded")
    assert abs(expected[-1]["rewards/chosen"]) > 1e-4
    for line, other in zip(expected, lines, strict=True):
        for name in ("rewards/chosen", "rewards/margins"):
            assert other[name] == pytest.approx(line[name], abs=2e-5)
    weights = [load_file(changed / f / "model/model.safetensors") for f in ("run", "sharded")]
    torch.testing.assert_close(*weights, rtol=2**-7, atol=1e-4)  # bf16: one unit in the last place


def test_numbers_of_ones_own_continue_after_a_kill(tmp_path):
    """A script that counts its steps, killed after step 2 of 4."""
    tree = copied(tmp_path / "project")
    restore, step = "        done = run.restore(", "            policy.step("
    keep = '        mine = {"steps": 0}\n        run.keep("count", mine)\n'
    edit(tree, restore, keep + restore)
    edit(tree, step, '            mine["steps"] += 1\n' + step)
    flags = runs.words("--save_every 1 --keep_checkpoints 9")
    train(tree, *flags)
    for step in (3, 4):
        shutil.rmtree(tree / f"run/checkpoints/step-0000000{step}")
    runs.as_if_killed(tree / "run")
    train(tree, *flags)
    manifests = [
        json.loads((tree / f"run/checkpoints/step-0000000{step}/manifest.json").read_text())
        for step in (2, 3, 4)
    ]
    counts = [manifest["own"] for manifest in manifests]
    assert counts == [{"own/count/steps": step} for step in (2, 3, 4)]


def test_frozen_layers_and_a_loss_of_tokens(tmp_path):
    """Only the last layer moves; each token counts half."""
    tree = copied(tmp_path / "project")
    prepare = "    return prepare(model, config, data, run)\n"
    freeze = "    for name, parameter in model.named_parameters():\n"
    freeze += '        parameter.requires_grad_(".layers.3." in name)\n'
    edit(tree, prepare, freeze + prepare)
    scorer = "class Half(logps.Scorer):\n    def token_logps(self, batch):\n"
    scorer += "        return super().token_logps(batch) / 2\n\n\n"
    edit(tree, "def prepare(model", scorer + "def prepare(model")
    edit(tree, "scorer = logps.Scorer(model", "scorer = Half(model")
    flags = ["--learning_rate", "1e-3"]
    halves, whole = train(tree, *flags), train(tree, *flags, script=SCRIPT, folder="original")
    for name in ("logps/chosen", "logps/rejected"):
        assert halves[0][name] == pytest.approx(whole[0][name] / 2, rel=2e-5)
    before = load_file(ROOT / "data/demo/model/model.safetensors")
    after = load_file(tree / "run/model/model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(".layers.3." in name for name in moved)
    again = [*TINY, *flags, "--result_dir", "again"]
    log = run_ranks(1, main_of, tree, COPY, again, True).logs[0]
    assert "the model's full logits" not in log
    edit(tree, '".layers.3." in name', "False")
    error = error_of(tree, "--restart")
    assert "error: no weight of the model is trained; leave some of them unfrozen" in error


def test_a_setting_of_a_copy(tmp_path):
    """As the page has it: in --help, as a flag, in a file, and among the settings of the run."""
    tree = copied(tmp_path / "project")
    code = re.search(r"\n  ```python\n(.*?)  ```", (ROOT / "docs/change_it.md").read_text(), re.S)
    cli = "from ddp_utils import cli\n"
    edit(tree, cli, cli + textwrap.dedent(code[1]))
    calls = "return losses.pair_losses(scorer, batch, ref_logps, losses.LossSpec.of(config))"
    own = calls.replace("return", "per_pair, metrics =")
    own += "\n    return per_pair + config.hinge, metrics"
    edit(tree, calls, own)
    command = [sys.executable, tree / COPY, "--help"]
    help_ = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"--hinge .*weight of the hinge of the margin", " ".join(help_.split()))
    (tree / "mine.yaml").write_text("hinge: 0.5\n")
    plain = train(tree, folder="plain")
    for flags, more in ((["--hinge", "2"], 2), (["--config", "mine.yaml"], 0.5)):
        lines = train(tree, *flags, folder=f"run{more}")
        assert lines[0]["loss"] == pytest.approx(plain[0]["loss"] + more, rel=1e-6)
        settings = json.loads((tree / f"run{more}/config.json").read_text())
        assert settings["hinge"] == more


@pytest.mark.parametrize("changed", ["Averaged weights"], indirect=True)
def test_a_checkpoint_without_what_the_script_keeps_is_an_error(changed):
    flags = ["--save_every", "1"]
    train(changed, *flags, script=SCRIPT)
    shutil.rmtree(changed / "run/checkpoints/step-00000004")
    runs.as_if_killed(changed / "run")
    error = error_of(changed, *flags)
    assert "step-00000003: has nothing (expected own/averages/" in error


# --- copy ----------------------------------------------------------------------------------------


def test_a_copied_script_starts_like_the_original(tmp_path):
    """`cp src/main_distributed.py src/my_dpo.py`, a new metric, then ./run_distributed.sh."""
    tree = Path(shutil.copytree(ROOT / "src", tmp_path / "src"))
    (tmp_path / "data").symlink_to(ROOT / "data")
    for name in ("scripts", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "run_distributed.sh", tmp_path / "start.sh")  # not a link to the original
    shutil.copy(change(tmp_path / "changed", "A metric") / COPY, tree)
    command = ["bash", "start.sh", "2", "src/my_dpo.py", *TINY, "--result_dir", "run"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    programs.process(
        [*command, "--max_steps", "1", "--batch_size", "2"], cwd=tmp_path, PYTHONPATH="", PATH=path
    )
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert "my_dpo.py" in environment["code"] and environment["world_size"] == 2
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"
    for file in ("report.html", "model/README.md"):
        text = (tmp_path / "run" / file).read_text()
        assert "my_dpo.py differs from main_distributed.py in loss_of" in text
    for split in ("train", "test"):
        assert "log_ratio_per_token" in runs.lines(tmp_path / "run", split)[-1]
    assert (tmp_path / "run/others.png").stat().st_size > 10_000
