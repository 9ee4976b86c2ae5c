"""Odd surroundings: two clones with one environment.

The second clone lies in a folder with a blank, and its package prints a line when it is imported.
"""

import os
import shutil
import sys
import venv

import pytest

import programs
from conftest import ROOT

SCRIPTS = ["main_distributed", "train", "generate_data", "train_loop", "ad/train", "ad/evaluate"]
SCRIPTS = [f"src/{name}.py" for name in SCRIPTS]
SCRIPTS += ["scripts/distributed_setup.py", "scripts/get_smollm2.py", "check_gpu.py"]
MODULES = [f"dpo_inv.{name}" for name in ("run_dpo_ddp", "run_dpo", "inference", "evaluate")]
TOOLS = ("chat", "merge", "report", "memory_plan", "settings")
MODULES += ["ddp_utils.launch", *(f"ddp_utils.tools.{name}" for name in TOOLS)]
SHELL = ["run_distributed.sh", "run_dpo_ddp_local.sh", "scripts/run_dpo_ddp_local.sh"]
SHELL += ["run_dpo_ddp_aurora.sh"]
MARK = 'print("code of the second clone", flush=True)\n'


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Folder of an environment in which `pip install -e .` was run in the tests' own clone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "installed.pth").write_text("\n".join([*installed, str(ROOT / "src")]) + "\n")
    return folder


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Folder of another clone."""
    clone = tmp_path_factory.mktemp("clones") / "second clone"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "scripts", "config"):
        shutil.copytree(ROOT / name, clone / name, ignore=ignore)
    for file in (*ROOT.glob("run_*.sh"), *map(ROOT.joinpath, ("check_gpu.py", "config.yaml"))):
        shutil.copy(file, clone)
    shutil.copy(ROOT / "requirements.txt", clone)
    (clone / "data").symlink_to(ROOT / "data")
    with open(clone / "src/ddp_utils/__init__.py", "a") as file:
        file.write(MARK)
    return clone


def started(first, cwd, *command, code=0, **env):
    """Run a command in the environment of the first clone; return what it prints."""
    env = {"PATH": f"{first}/bin:{os.environ['PATH']}", "PYTHONPATH": ""} | env
    return programs.process(command, code=code, cwd=cwd, **env)


# --- two clones, one environment -----------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_the_code_of_its_own_clone(script, first, second):
    """Even if it is started in the folder of the clone that is installed."""
    assert MARK[7:30] in started(first, ROOT, "python", second / script, "--help").stdout


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_another_clone_than_the_current_folders_is_one_line(module, first, second):
    for folder in (second, second / "config"):
        done = started(first, folder, "python", "-m", module, "--help", code=2)
        assert done.stdout == "" and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: {ROOT}/src: ") and f"{second}/src" in done.stderr


def test_the_command_of_that_line_runs_the_code_of_the_current_folder(first, second):
    line = started(first, second, "python", "-m", MODULES[0], "--help", code=2).stderr
    command = f"{line.partition('run: ')[2].strip()}; python -m {MODULES[0]} --help"
    assert MARK[7:30] in started(first, second, "bash", "-c", command).stdout


def test_ranks_of_another_clone_print_one_line(first, second):
    ranks = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}
    done = started(first, second, "python", "-m", MODULES[0], code=2, **ranks)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("script", SHELL)
def test_a_shell_script_runs_the_code_of_its_own_clone(script, first, second):
    done = started(first, ROOT, "bash", second / script, "--help")
    assert MARK[7:30] in done.stdout and "error" not in done.stderr


def test_ranks_that_a_shell_script_starts_run_the_code_of_its_clone(first, second, tmp_path):
    """Started in the first clone's folder, with a module as the program."""
    words = ["bash", second / "run_dpo_ddp_local.sh", "2", "--check", "--output_dir", tmp_path]
    done = started(first, ROOT, *words, PYTHONSAFEPATH="1")
    assert done.stdout.count(MARK[7:30]) == 3  # the launcher and two ranks


def test_a_job_on_aurora_runs_the_code_of_the_clone_that_it_is_submitted_in(
    first, second, tmp_path
):
    (tmp_path / "nodes").write_text("n1\n")
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text('#!/bin/bash\nwhile [ "$1" != python ]; do shift; done\nexec "$@"\n')
    mpiexec.chmod(0o755)
    pbs = {"PBS_O_WORKDIR": str(second), "PBS_JOBID": "7.server", "PER_NODE": "1"}
    pbs |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "BASH_FUNC_module%%": "() { :; }"}
    pbs |= {"PATH": f"{tmp_path}:{first}/bin:{os.environ['PATH']}", "BACKEND": "gloo"}
    words = ["bash", second / "run_dpo_ddp_aurora.sh", "--check"]
    started(first, tmp_path, *words, "--output_dir", tmp_path / "run", **pbs)
    assert MARK[7:30] in (second / "logs/dpo_ddp_7.out").read_text()


@pytest.mark.parametrize("kind", ["launcher", "slurm", "pbs"])
def test_generated_scripts_belong_to_the_clone_of_the_program_that_writes_them(
    kind, first, second, tmp_path
):
    words = ["python", second / "scripts/distributed_setup.py", kind]
    started(first, second, *words, "--output", tmp_path / "job.sh")
    lines = (tmp_path / "job.sh").read_text().splitlines()
    assert f"project='{second}'" in lines
    assert [line for line in lines if line.startswith(f"cd '{second}'")]


def test_a_folder_that_is_no_clone_does_not_matter(first, tmp_path):
    started(first, tmp_path, "python", "-m", MODULES[1], "--help")
    started(first, tmp_path, "python", "-c", "import ddp_utils")


def test_a_current_folder_that_was_deleted_is_one_line(first, tmp_path):
    words = "mkdir gone; cd gone; rmdir ../gone; python -m ddp_utils.launch"
    error = started(first, tmp_path, "bash", "-c", words, code=2).stderr
    assert error.splitlines()[-1].startswith("error: the current folder cannot be used")
