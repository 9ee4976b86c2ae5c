"""A newcomer's first hour, in a fresh clone, by the commands of README and docs alone."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

import programs
from conftest import ROOT

pytestmark = pytest.mark.show  # minutes; each part has its own tests in the suite


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer") / "project"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    return folder


def run(clone, line):
    """What a line typed in the clone says."""
    done = programs.process(["bash", "-c", line], cwd=clone)
    assert "Traceback" not in done.stderr
    return done.stdout


def summary(clone, folder):
    return json.loads((clone / folder / "summary.json").read_text())


def test_the_demo(clone):
    said = run(clone, "./run_distributed.sh 2")
    assert "results/dpo/" in said.splitlines()[-1]
    test = summary(clone, "results/dpo")["test"]
    assert test["win_rate"] > 0.9
    for name in ("report.html", "loss.png", "distributed_output_test.txt", "model/config.json"):
        assert (clone / "results/dpo" / name).stat().st_size > 100
    assert "finished" in run(clone, "./run_distributed.sh 2")  # nothing is done twice


ROW = {"chosen": "Certainly! It is in the garden.", "rejected": "Garden."}
LINE = "./run_distributed.sh 2 --train_data mine.jsonl --fine_tuning lora --result_dir results/mine"
LINE += " --num_epochs 20 --save_every 1 --val_data '' --num_samples 0"


def test_own_data_ctrl_c_and_on(clone):
    rows = [ROW | {"prompt": f"Where is animal number {number}?"} for number in range(20)]
    (clone / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = subprocess.Popen(
        ["bash", "-c", LINE], cwd=clone, env=programs.environment(), start_new_session=True
    )
    metrics = clone / "results/mine/metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    said = run(clone, LINE)
    assert "is not finished: goes on after step" in said
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in steps if line["split"] == "train"]
    assert steps == list(range(1, summary(clone, "results/mine")["step"] + 1))


def test_a_prompt_is_baked(clone):
    said = run(clone, "./run_distributed.sh 2 baking")
    assert "judge/baked" in said
    assert summary(clone, "results/traj_chat")["val"]["share_baked"] > 0.95


def test_files_for_a_cluster(clone):
    page = (clone / "docs/strategies.md").read_text()
    for tool in ("fsdp", "deepspeed", "slurm"):
        line = re.search(rf"^python scripts/distributed_setup\.py {tool} .*$", page, re.M)
        run(clone, line.group())
    for name in ("config/fsdp_config.json", "config/ds_config.json", "scripts/slurm_job.sh"):
        assert (clone / name).stat().st_size > 100


def test_an_agent_is_distilled(clone):
    """Cut short, so that it learns little; the commands are those of the page."""
    short = " train_timesteps=40 gen_interval=0 eval_episodes=12"
    line = "accelerate launch --config_file config/accelerate/cpu.yaml src/ad/train.py"
    said = run(clone, line + short)
    assert "Number of processes: 2" in said and "context wiped" in said
    said = run(clone, "python src/ad/evaluate.py --ckpt_dir runs/ad_demo --goal_idx 3")
    assert said.startswith("goal (") and "overall mean" in said
