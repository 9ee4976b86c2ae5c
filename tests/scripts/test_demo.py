"""The demo, as a newcomer starts it: it learns, it stays right, and the files show it."""

import html
import importlib.util
import json
import random
import re
import shlex

import pytest
import torch
from test_launchers import shell

import main_distributed
import runs
from conftest import ROOT
from ddp_utils import distributed
from lm import logps, models, sampling
from lm.chat_template import Encoder
from lm.judge import load_judge
from lm.models import load_tokenizer
from ranks import ranks, run_ranks

REPLIES = 330


def held_out_prompts():
    """All questions that the demo's model has never been asked."""
    spec = importlib.util.spec_from_file_location("judge", ROOT / "data/demo/judge.py")
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    return [prompt for fact in judge.FACTS for prompt in fact.prompts(fact.held_out())]


def some_prompts(count):
    prompts = held_out_prompts()
    random.Random(0).shuffle(prompts)
    return prompts[:count]


def rates(model, prompts, system=None, judge="score"):
    """Means of the demo's judge over one sampled reply per prompt, temperature 1."""
    tokenizer = load_tokenizer("data/demo/model")
    encoder = Encoder(tokenizer)
    scorer = logps.Scorer(models.load(model, torch.float32, torch.device("cpu")))
    turns = [{"role": "system", "content": system}] if system else []
    ids = []
    for prompt in prompts:
        chat = [*turns, {"role": "user", "content": prompt}]
        ids.append(encoder.ids(encoder.render(chat, add_generation_prompt=True))[0])
    config = main_distributed.settings.Config(batch_size=110, max_new_tokens=48, seed=5)
    world = distributed.World()
    replies = sampling.generate(scorer, ids, encoder.ends, world, config)
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    score = load_judge(f"data/demo/judge.py:{judge}")
    scores = [score(p, text) for p, text in zip(prompts, texts, strict=True)]
    return {name: sum(s[name] for s in scores) / len(scores) for name in scores[0]}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_model_follows_its_system_prompts_and_only_then():
    prompts = some_prompts(220)
    told = (ROOT / "data/demo/x0.txt").read_text().strip()
    assert rates("data/demo/model", prompts, told, "capitals")["capitals"] >= 0.95
    assert rates("data/demo/model", prompts, None, "capitals")["capitals"] <= 0.05


def test_the_built_files_are_small_and_held_out_questions_are_held_out():
    files = (ROOT / "data/demo").glob("**/*.*")
    assert sum(path.stat().st_size for path in files if "__pycache__" not in str(path)) < 3e6
    splits = []
    for split, count in (("test", 100), ("train", 800), ("val", 100)):
        lines = (ROOT / f"data/demo/preferences_{split}.jsonl").read_text().splitlines()
        splits.append({json.loads(line)["prompt"] for line in lines})
        assert len(splits[-1]) == count
    held_out = set(held_out_prompts())
    assert splits[0] <= held_out and splits[2] <= held_out and not splits[1] & held_out


def check_learned(before, after, test):
    assert 0.40 <= before["courteous"] <= 0.60
    assert after["courteous"] >= 0.95
    assert before["right"] >= 0.9 and after["right"] >= 0.95 * before["right"]
    assert after["well_formed"] >= 0.9 * before["well_formed"]
    assert test["rewards/chosen"] >= 0  # not below the reference
    assert test["wins"] + test["losses"] >= 30 and test["win_rate"] >= 0.9
    assert test["rewards/accuracies"] >= 0.95


def test_a_newcomer_watches_the_demo_learn(tmp_path):
    done = shell("2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "results/dpo"
    assert done.stdout.rstrip().endswith("python -m lm.chat results/dpo")
    typed = shlex.join([str(ROOT / "run_distributed.sh"), "2"])
    assert json.loads((folder / "environment.json").read_text())["command"] == typed
    assert "run_distributed.sh 2 --restart<" in html.unescape((folder / "report.html").read_text())
    steps = re.findall(r"(?m)^step +(\d+) ", done.stdout)
    assert steps[:3] == ["1", "4", "8"] and steps[-1] == "100" and len(steps) == 26
    assert (folder / "metrics.jsonl").read_text().count('"split": "train"') == 100
    prompts = some_prompts(REPLIES)
    after = rates(str(folder / "model"), prompts)
    check_learned(rates("data/demo/model", prompts), after, summary(folder)["test"])
    for split in ("val", "test"):
        text = (folder / f"distributed_output_{split}.txt").read_text()
        for word in ("prompt:", "reference:", "fine-tuned:", "expected:", "verdict:"):
            assert text.count(f"\n{word}") == 100
    for name in ("loss.png", "rewards.png", "accuracies.png"):
        assert (folder / name).stat().st_size > 10_000


@pytest.mark.show
def test_three_seeds_learn_and_without_the_sft_term_a_warning_appears(tmp_path):
    prompts = some_prompts(REPLIES)
    before = rates("data/demo/model", prompts)
    print(f"\nbefore: {before}")
    for seed in range(3):
        folder = tmp_path / str(seed)
        ranks(2, main_distributed.main, ["--seed", str(seed), "--result_dir", str(folder)])
        after, test = rates(str(folder / "model"), prompts), summary(folder)["test"]
        print(f"seed {seed}: {after} win_rate {test['win_rate']:.3f}")
        check_learned(before, after, test)
    plain = runs.words(f"--sft_weight 0 --result_dir {tmp_path}/plain")
    ranks(2, main_distributed.main, plain)
    print(f"plain DPO: {rates(f'{tmp_path}/plain/model', prompts)}")


@pytest.mark.show  # a run of 60 steps; tests/core/test_losses.py tests the warning itself
def test_complaint_16_without_the_sft_term_the_displacement_warning_fires_once(tmp_path):
    flags = ["--sft_weight", "0", "--max_steps", "60", "--num_samples", "0", "--log_every", "60"]
    outcome = run_ranks(2, started, [*flags, "--result_dir", str(tmp_path / "run")])
    said = "".join(outcome.logs)
    assert outcome.codes == [0, 0], said
    assert said.count("warning: the chosen responses have become") == 1
    assert "--sft_weight 1" in said and "--method dpop" in said
    kept = json.loads((tmp_path / "run/summary.json").read_text())["warnings"]
    assert len(kept) == 1 and kept[0] in " ".join(said.split())  # it is wrapped


def started(flags):
    assert runs.main(flags) == 0
