"""Programs as they are typed: in a fork of tests/programs.py, and in the folders of the project."""

import dataclasses
import subprocess
import sys

import pytest

import config as dpo_config
import lm.merge
import programs
import train
import train_config
from ad import config as ad_config
from conftest import ROOT
from ddp_utils import cli, data
from dpo_inv import config as protein_config
from prompt_baking import generate_config
from prompt_baking import train_config as bake_config

# a fork is only fast if its parent has imported them
assert lm.merge and train


def process(*words, cwd=ROOT):
    """`python *words`, with imports and all."""
    done = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_fork_ends_as_the_program():
    for status, words in (
        (0, ("-m", "lm.merge", "-h")),
        (2, ("src/train.py", "--config", "nowhere.yaml")),
    ):
        forked = programs.start(*words, cwd=ROOT)
        assert forked == process(*words) and forked.returncode == status


def test_a_fork_that_raises_shows_the_traceback(tmp_path):
    (tmp_path / "program.py").write_text("1 / 0")
    code, _, error = programs.start("program.py", cwd=tmp_path)
    assert code == 1 and error.endswith("ZeroDivisionError: division by zero\n")


def test_garbage_is_collected_in_the_work_of_a_program_but_not_in_its_imports(tmp_path):
    (tmp_path / "program.py").write_text(
        "import gc\nfrom ddp_utils import cli\ncli.check_flags(print)\nprint(gc.isenabled())\n"
        "from ddp_utils import distributed as d\n"
        "d.run(lambda: print(gc.isenabled(), gc.get_freeze_count() > 10**5))\n"  # torch has more
    )
    done = programs.start("program.py", cwd=tmp_path)
    assert done == (0, "[]\nFalse\nTrue True\n", "")


def test_distributed_setup_writes_where_it_is_called(tmp_path):
    """From any folder, without src/ on the path."""
    words = ("fsdp", "--sharding_strategy", "FULL_SHARD")
    code, output, error = process(str(ROOT / "scripts/distributed_setup.py"), *words, cwd=tmp_path)
    assert (code, error) == (0, "") and "config/fsdp_config.json" in output
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "config/fsdp_config.json"]


OUTPUTS = [
    (dpo_config.Config, {"result_dir": "results/dpo", "output_dir": "", "cache_dir": "c"}),
    (train_config.Config, {"output_dir": "results/train"}),
    (protein_config.Config, {"output_dir": "outputs/dpo_ddp"}),
    (ad_config.Config, {"output_dir": "runs/ad_demo"}),
    (generate_config.Config, {"traj_out_file": "data/traj_chat.jsonl"}),
    (bake_config.Config, {"out_dir": "results/traj_chat"}),
]


@pytest.mark.parametrize("folder", ["src", "src/ad", "scripts", "tests"])
def test_nothing_is_written_into_the_folders_of_the_code(folder, monkeypatch):
    """Relative outputs are the project's there, and of the current folder everywhere else."""
    monkeypatch.chdir(ROOT / folder)
    for config_class, outputs in OUTPUTS:
        changed = {name: text for name, text in outputs.items() if text}
        config = dataclasses.asdict(
            cli.parse(config_class, [f"--{k}={v}" for k, v in changed.items()])
        )
        for name, text in outputs.items():
            is_moved = folder != "tests" and text
            assert config[name] == (f"{ROOT}/{text}" if is_moved else text), name
    assert str(data.output_path("../x")) == "../x"
    assert str(data.output_path("/x")) == "/x"


def test_the_train_py_of_another_guide_is_named_instead_of_started():
    """`accelerate launch train.py` in src/; with a flag, it is supervised fine-tuning."""
    done = programs.start("train.py", cwd=ROOT / "src")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: train.py: ") and done.stderr.count("\n") == 1
    assert "for Algorithm Distillation use ad/train.py;" in done.stderr
    done = programs.start("train.py", "--config", "nowhere.yaml", cwd=ROOT / "src")
    assert done.stderr.startswith("error: nowhere.yaml: no such file")


def test_a_job_finds_the_project_from_the_folder_of_its_submission(tmp_path):
    """Slurm starts a copy of the script in the folder where sbatch was called."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\npwd\necho $MASTER_PORT $OMP_NUM_THREADS $1\n")
        (tmp_path / name).chmod(0o755)
    script = (ROOT / "scripts/multi_gpu_train.slurm").read_text()
    path = f"{tmp_path}:/usr/bin:/bin"
    for folder in ("", "scripts", "src/ad"):
        env = {"PATH": path, "SLURM_SUBMIT_DIR": str(ROOT / folder), "SLURM_JOB_ID": "7"}
        done = programs.process(["bash", "-c", script], SLURM_JOB_NODELIST="n", **env)
        assert done.stdout == f"{ROOT}\n20007 1 --cpus-per-task=1\n"
    given = {"MASTER_PORT": "29400", "OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "8"}
    done = programs.process(["bash", "-c", script], SLURM_JOB_NODELIST="n", **env | given)
    assert done.stdout == f"{ROOT}\n29400 3 --cpus-per-task=8\n"
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path)}
    done = programs.process(["bash", "-c", script], 2, **env)
    assert done.stderr == f"error: {tmp_path}: submit it from the project's folder\n"
