"""Odd surroundings: two clones with one environment, closed streams, symbolic links, HOME, umask.

The second clone lies in a folder with a blank, and its package prints a line when it is imported.
"""

import contextlib
import errno
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import venv
from unittest import mock

import pytest

import main_distributed
import programs
import runs
from conftest import ROOT
from ddp_utils import UserError, checkpoints, data
from lm import token_rows
from lm.logps import Pair
from ranks import run_ranks

SCRIPTS = ["main_distributed", "train", "generate_data", "train_loop", "ad/train", "ad/evaluate"]
SCRIPTS = [f"src/{name}.py" for name in SCRIPTS]
SCRIPTS += ["scripts/distributed_setup.py", "scripts/get_smollm2.py", "check_gpu.py"]
MODULES = [f"dpo_inv.{name}" for name in ("run_dpo_ddp", "run_dpo", "inference", "evaluate")]
TOOLS = ("ddp_utils.tools.report", "lm.chat", "lm.merge")
MODULES += ["ddp_utils.launch", *TOOLS]
SHELL = ["run_distributed.sh", "run_dpo_ddp_local.sh", "scripts/run_dpo_ddp_local.sh"]
SHELL += ["run_dpo_ddp_aurora.sh"]
MARK = 'print("code of the second clone", flush=True)\n'
TINY = runs.words("--max_steps 2 --max_rows 16 --batch_size 8 --num_samples 0 --report_to none")
TINY += ["--max_eval_rows", "8"]


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


# --- shell scripts behind a symbolic link ---------------------------------------------------------


@pytest.mark.parametrize("script", SHELL)
def test_a_shell_script_can_be_started_through_a_symbolic_link(script, tmp_path):
    (tmp_path / "train").symlink_to(ROOT / script)
    assert "--seed" in programs.process(["bash", "train", "--help"], cwd=tmp_path).stdout


@pytest.mark.parametrize("script", ["run_distributed.sh", "run_dpo_ddp_local.sh"])
def test_a_copy_of_a_shell_script_outside_the_project_is_one_line(script, tmp_path):
    copy = shutil.copy(ROOT / script, tmp_path)
    done = programs.process(["bash", copy, "1"], code=2, cwd=tmp_path)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# --- closed streams, encodings --------------------------------------------------------------------


def finished(folder):
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] >= 0  # nothing that was printed is in it


@pytest.mark.show
def test_a_run_with_a_closed_output_finishes(tmp_path):
    words = [sys.executable, ROOT / "src/main_distributed.py", *TINY, "--result_dir", "run"]
    programs.process(["bash", "-c", 'exec "$0" "$@" >&-', *words], cwd=tmp_path)
    finished(tmp_path / "run")


@pytest.mark.show
def test_two_ranks_with_closed_streams_finish(tmp_path):
    words = [ROOT / "run_distributed.sh", "2", *TINY, "--result_dir", "run"]
    programs.process(["bash", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *words], cwd=tmp_path)
    finished(tmp_path / "run")


def test_a_chat_with_a_closed_input_ends(tmp_path):
    words = [sys.executable, "-m", "lm.chat", ROOT / "data/demo/model"]
    programs.process(["bash", "-c", 'exec "$0" "$@" <&-', *words], cwd=tmp_path)


def test_what_an_old_encoding_lacks_is_printed_as_an_escape_sequence(tmp_path):
    (tmp_path / "program.py").write_text(
        "from ddp_utils import distributed\ndistributed.run(lambda: print('caf\\xe9'))\n"
    )
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ascii["PYTHONPATH"] = str(ROOT / "src")
    done = programs.process([sys.executable, "program.py"], cwd=tmp_path, **ascii)
    assert done.stdout == "caf\\xe9\n"


# --- links and permissions ------------------------------------------------------------------------


def trained(folder, *flags):
    os.chdir(folder)
    assert main_distributed.main([*TINY, *flags, "--result_dir", "run"]) == 0


def train(folder, *flags):
    """Train in a process of its own; return what it prints."""
    outcome = run_ranks(1, trained, folder, *flags)
    assert outcome.codes == [0], outcome.logs
    return outcome.logs[0]


def test_a_run_folder_may_be_a_symbolic_link_of_the_user(tmp_path):
    """The first start makes what it leads to; an earlier run is moved aside there."""
    (tmp_path / "run").symlink_to(tmp_path / "scratch/run")
    train(tmp_path)
    finished(tmp_path / "scratch/run")
    assert "already finished" in train(tmp_path)
    train(tmp_path, "--beta", "0.3")
    assert (tmp_path / "run").is_symlink()
    for name, beta in (("run.1", 0.1), ("run", 0.3)):
        finished(tmp_path / "scratch" / name)
        config = json.loads((tmp_path / "scratch" / name / "config.json").read_text())
        assert config["beta"] == beta


def test_a_symbolic_link_of_another_user_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "run").symlink_to(tmp_path)
    assert checkpoints.target_of(tmp_path / "run") == tmp_path
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert checkpoints.target_of(tmp_path / "run") == tmp_path / "run"
    spec = checkpoints.RunSpec(tmp_path / "run", 1, {})
    with pytest.raises(UserError, match="run folder: .*run is a symbolic link.*another folder"):
        checkpoints.inspect(spec, {}, {})


def test_a_loop_of_links_is_one_line(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "run")
    spec = checkpoints.RunSpec(tmp_path / "run", 1, {})
    with pytest.raises(UserError, match="run folder: .*run is a symbolic link"):
        checkpoints.inspect(spec, {}, {})


def test_a_link_to_nowhere_above_the_cache_is_named(tmp_path):
    (tmp_path / "results").symlink_to(tmp_path / "nowhere")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    source = data.DataFile(str(rows), tmp_path / "results/.tokens")
    with pytest.raises(UserError) as caught:
        token_rows.cached_rows(tuple, source, [], lambda report: [])
    assert f"{tmp_path}/results is a link to {tmp_path}/nowhere, which does" in str(caught.value)


def test_nodes_whose_locks_do_not_reach_each_other_write_the_same_rows(tmp_path, monkeypatch):
    """The second node begins and ends before the first one renames what it has written.

    A file that a node may be reading is not replaced.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    source = data.DataFile(str(rows), tmp_path / "cache")
    free = mock.Mock()
    free.return_value.acquire.return_value = contextlib.nullcontext()
    monkeypatch.setattr(token_rows, "FileLock", free)
    fsync, read = data.fsync, []

    def make(report):
        return [Pair([1], [2], [3], "here", {})]

    def second_node(path):
        monkeypatch.setattr(data, "fsync", fsync)
        monkeypatch.setattr(platform, "node", lambda: "n2")
        read.append(token_rows.cached_rows(Pair, source, [], make)[0])
        read.append(os.stat(read[0].file).st_ino)
        fsync(path)

    monkeypatch.setattr(data, "fsync", second_node)
    monkeypatch.setattr(platform, "node", lambda: "n1")
    found, _ = token_rows.cached_rows(Pair, source, [], make)
    faster, inode = read
    assert [pair.chosen for pair in found] == [pair.chosen for pair in faster] == [[2]]
    assert found.file == faster.file and os.stat(found.file).st_ino == inode
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [found.file.name]


def test_waiting_ranks_ask_seldom_for_the_rows_of_a_large_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for size, seconds in ((1, 0.05), (2**23, 0.5), (2**26, 2.0)):
        with open(rows, "wb") as file:
            file.truncate(size)
        assert token_rows.poll_seconds(str(rows)) == seconds
    assert token_rows.poll_seconds("a/dataset") == 1.0


def test_a_link_to_nowhere_above_a_generated_file_is_named(tmp_path):
    (tmp_path / "jobs").symlink_to(tmp_path / "nowhere")
    words = ["scripts/distributed_setup.py", "slurm", "--output", tmp_path / "jobs/job.sh"]
    code, _, error = programs.start(*words, cwd=ROOT)
    assert code == 2 and f"{tmp_path}/jobs is a link to {tmp_path}/nowhere" in error


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])  # busy: a disk is mounted there
def test_a_folder_that_cannot_be_renamed_is_one_line(code, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()

    def rename(path, target):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    says = f"run: cannot be moved to .*run.1 .{os.strerror(code)}"
    with pytest.raises(UserError, match=says):
        checkpoints.move_aside(tmp_path / "run")


def test_a_run_without_streams_and_home_and_with_umask_077(tmp_path):
    """As a daemon starts it. Its folder has a blank; nobody else may read what it writes."""
    words = [sys.executable, ROOT / "src/main_distributed.py", *TINY, "--result_dir", "my run"]
    command = 'unset HOME; umask 077; exec "$0" "$@" <&- >&- 2>&-'
    programs.process(["bash", "-c", command, *words], cwd=tmp_path, LC_ALL="C", LANG="C")
    finished(tmp_path / "my run")
    environment = json.loads((tmp_path / "my run/environment.json").read_text())
    assert (environment["launcher"], environment["world_size"]) == ("python", 1)
    files = [path for path in tmp_path.rglob("*") if path.lstat().st_mode & 0o077]
    assert not files


def test_a_generated_script_may_be_started_by_those_who_may_read_it(tmp_path):
    for mask, mode in ((0o077, 0o700), (0o022, 0o755)):
        words = [sys.executable, ROOT / "scripts/distributed_setup.py", "slurm"]
        words += ["--output", f"{mask}.sh"]
        options = {"cwd": tmp_path, "env": programs.environment(), "umask": mask}
        subprocess.run(words, check=True, capture_output=True, **options)
        assert stat.S_IMODE((tmp_path / f"{mask}.sh").stat().st_mode) == mode


# --- other programs on the same CPUs --------------------------------------------------------------


@pytest.mark.parametrize("policy", ["", "active"])
def test_threads_that_wait_soon_sleep_unless_the_user_has_set_a_policy(policy):
    """GNU OpenMP prints its settings when torch loads it."""
    env = programs.environment() | {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": f"{ROOT}/src"}
    env |= {"OMP_WAIT_POLICY": policy} if policy else {}
    env.pop("GOMP_SPINCOUNT", None)  # of this process
    command = [sys.executable, "-c", "import dpo_inv.run_dpo_ddp"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT" in done.stderr
    assert ("GOMP_SPINCOUNT = '10000'" in done.stderr) == (not policy)
