"""One script under every launcher: started for real, the test loss of one process."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import main_distributed
import programs
import runs
from conftest import LIMIT, ROOT
from ranks import free_port, ranks, run_ranks

SCRIPT = str(ROOT / "src/main_distributed.py")
STEPS = runs.words("--max_steps 3 --max_rows 24 --batch_size 8 --log_every 10 --num_samples 0")
STEPS += ["--val_data", runs.PAIRS, "--test_data", runs.PAIRS]
PYTHON = sys.executable
BIN = os.path.dirname(PYTHON)


ACCELERATE = runs.words("--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0")
ACCELERATE += runs.words("--mixed_precision no --dynamo_backend no")


def launchers():
    """Name in environment.json -> (command, additions to the environment)."""
    port = str(free_port())
    return {
        "torchrun": (
            [f"{BIN}/torchrun", "--standalone", "--nproc_per_node=2"],
            {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        ),
        "torch.distributed.launch": (
            [PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node=2"],
            {},
        ),
        "accelerate": ([f"{BIN}/accelerate", "launch", *ACCELERATE], {"ACCELERATE_USE_CPU": "1"}),
        "deepspeed": ([f"{BIN}/deepspeed", "--num_gpus=2", f"--master_port={port}"], {}),
        "mpiexec": (["mpiexec.mpich", "-n", "2", PYTHON], {}),
        "mpirun": (
            ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON],
            {"MASTER_PORT": port},
        ),
    }


@pytest.fixture(scope="module")
def test_loss_of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1, main_distributed.main, [*STEPS, "--result_dir", str(folder)])
    return loss_in(folder)


def launch(name, folder):
    command, extra = launchers()[name]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    done = programs.process([*command, SCRIPT, *STEPS, "--result_dir", folder], **extra)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("ranks ")]
    assert len(lines) == 1  # the other ranks are silent
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["launcher"] == ("torchrun" if name == "torch.distributed.launch" else name)
    assert environment["world_size"] == 2
    assert [line["step"] for line in runs.lines(folder, "train")] == [1, 2, 3]
    return loss_in(folder)


def loss_in(folder):
    return json.loads((folder / "summary.json").read_text())["test"]["loss"]


# to torchrun, which they call, and to the mpiexec of tests/runs/test_aurora.py
ALIKE = {"torch.distributed.launch", "accelerate", "mpiexec"}
NAMES = [
    pytest.param(name, marks=pytest.mark.show if name in ALIKE else ()) for name in launchers()
]


@pytest.mark.parametrize("name", NAMES)
def test_each_launcher_ends_in_the_same_test_loss(name, tmp_path, test_loss_of_one_process):
    assert launch(name, tmp_path / "run") == pytest.approx(test_loss_of_one_process, abs=1e-5)


def shell(*arguments, cwd=ROOT, **extra):
    command, env = [ROOT / "run_distributed.sh", *arguments], programs.environment() | extra
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, cwd=cwd)


@pytest.mark.parametrize(
    ("words", "scripts"),
    [
        (["--help"], ["main_distributed.py"]),
        (["4", "baking", "--num_epochs", "3", "-h"], ["generate_data.py", "train_loop.py"]),
    ],
)
def test_help_of_the_shell_script_is_its_own_and_that_of_its_programs(words, scripts):
    done = shell(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Fine-tune a language model on preference pairs, or bake")
    usages = [line for line in done.stdout.splitlines() if line.startswith("usage: ")]
    assert usages == [f"usage: {script} [settings]" for script in scripts]
    assert "  --learning_rate " in done.stdout


def test_the_command_that_was_typed_is_noted_for_the_report():
    """tests/scripts/test_demo.py shows that it arrives there."""
    code = f'. {ROOT}/scripts/environment.sh; printf "%s" "$DDP_COMMAND"'
    words = ["./run_distributed.sh", "2", "--result_dir", "it's mine", "*"]
    done = programs.process(["bash", "-c", code, *words])
    assert shlex.split(done.stdout) == words
    # in a job, $0 is a copy in a spool folder
    code = f"submitted=(sbatch 'my job.sh'); {code}"
    done = programs.process(["bash", "-c", code, "/spool/slurm_script", "--beta", "0.3"])
    assert shlex.split(done.stdout) == ["sbatch", "my job.sh", "--beta", "0.3"]


def test_help_of_the_launcher():
    for words, code in ((["--help"], 0), (["-h"], 0), ([], 2)):
        done = programs.process([PYTHON, "-m", "ddp_utils.launch", *words], code, ROOT / "src")
        assert "Start a program in several processes" in (done.stderr if code else done.stdout)


STARTED = [  # GPUs of the machine, first word -> number of processes, the line on stderr
    (0, "", 2, "starting on 2 CPU processes\n"),
    (1, "", 1, "starting on 1 of 1 GPUs; for all: run.sh 1\n"),
    (8, "--beta", 2, "starting on 2 of 8 GPUs; for all: run.sh 8\n"),
    (8, "4", 4, ""),
]


@pytest.mark.parametrize(("gpus", "word", "processes", "line"), STARTED)
def test_how_many_processes_are_started(gpus, word, processes, line, tmp_path):
    text = f"class accelerator:\n    device_count = staticmethod(lambda: {gpus})\n"
    (tmp_path / "torch.py").write_text(text)
    code = f". {ROOT}/scripts/environment.sh; processes_of '{word}'"
    env = programs.environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", code, "run.sh"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{processes}\n", line)


def test_a_machine_without_venv_is_one_line(tmp_path):
    """Neither an environment with torch nor Debian's package python3-venv; a path with spaces."""
    project, programs_of_machine = tmp_path / "a project", tmp_path / "bin"
    shutil.copytree(ROOT / "scripts", project / "scripts")
    shutil.copy(ROOT / "run_distributed.sh", project)
    programs_of_machine.mkdir()
    for name in ("python", "python3"):
        (programs_of_machine / name).write_text("#!/bin/sh\nexit 1\n")
        (programs_of_machine / name).chmod(0o755)
    env = programs.environment() | {"PATH": f"{programs_of_machine}:/usr/bin:/bin"}
    command = [project / "run_distributed.sh"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    line = f"error: {project}/.venv: needs Python >= 3.10 with venv (Debian, Ubuntu: apt install "
    assert done.returncode == 2 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


VENV = """#!/bin/sh
# in place of python3: `-m venv FOLDER` makes a pip that needs a while, and a python
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p "$3/bin"
printf '#!/bin/sh\\n[ -e "%s/installed" ] || exit 1\\n' "$3" >"$3/bin/python"
installs='echo pip >>"%s/../log"; sleep 1; touch "%s/installed"'
printf "#!/bin/sh\\n$installs\\n" "$3" "$3" >"$3/bin/pip"
chmod +x "$3/bin/python" "$3/bin/pip"
"""


def test_nodes_that_start_together_make_one_environment(tmp_path):
    """They share the project; one installs, the other waits for it."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name, text in (("python3", VENV), ("python", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = programs.environment() | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    code = f"set -euo pipefail; . {tmp_path}/scripts/environment.sh; use_environment; python"
    command, options = ["bash", "-c", code], {"stderr": subprocess.PIPE, "text": True, "env": env}
    nodes = [subprocess.Popen(command, **options) for _ in range(2)]
    errors = [node.communicate(timeout=LIMIT)[1] for node in nodes]
    assert ([node.returncode for node in nodes], errors) == ([0, 0], ["", ""])
    assert (tmp_path / "log").read_text() == "pip\n"


def test_check_of_the_shell_script_prints_each_line_once(tmp_path):
    done = shell("2", "--check", "--train_data", runs.PAIRS, "--result_dir", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    first, warning, last = done.stdout.splitlines()
    assert warning.startswith("warning: 0 validation rows; ")
    assert first.startswith(
        "train: 8 rows in the format prompt, 8 used, split into 7 train, 0 val, 1 test;"
    )
    assert last == f"check passed: 2 steps, run folder {tmp_path / 'run'}"
    assert not (tmp_path / "run").exists()


def test_check_of_baking_reads_the_flags_of_the_second_program():
    done = shell("1", "baking", "--check", "--", "--learning_rat", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --learning_rat is not a setting; did you mean")


def test_a_check_of_baking_may_be_asked_for_with_dashes(tmp_path):
    out = [f"--traj-out-file={tmp_path}/a.jsonl", f"--val-out-file={tmp_path}/b.jsonl"]
    done = shell("1", "baking", "--num-questions=4", *out, "--", "--dry-run")
    assert done.returncode == 0 and " replies = " in done.stdout, done.stdout + done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "place", "expected"),
    [
        ("PBS_BATCH", "home", "submitted"),  # where PBS starts a job
        ("PBS_BATCH", "gone_to", "gone_to"),
        ("PBS_INTERACTIVE", "home", "home"),
        ("PBS_INTERACTIVE", "gone_to", "gone_to"),
    ],
)
def test_paths_in_a_pbs_job_are_relative_to_where_it_has_gone(kind, place, expected, tmp_path):
    for name in ("home", "submitted", "gone_to"):
        (tmp_path / name).mkdir()
    env = {"PBS_ENVIRONMENT": kind, "HOME": f"{tmp_path}/home"}
    env |= {"PBS_O_WORKDIR": f"{tmp_path}/submitted", "PBS_JOBDIR": f"{tmp_path}/home"}
    code = f". {ROOT}/scripts/environment.sh; pwd"
    done = programs.process(["bash", "-c", code], cwd=tmp_path / place, **env)
    assert done.stdout == f"{tmp_path}/{expected}\n"


def main_in_a_closed_pipe(flags):
    """As of `python src/main_distributed.py | head -1`: nobody reads what it prints."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    return main_distributed.main(flags)


def test_a_closed_pipe_does_not_stop_a_run(tmp_path):
    flags = [*STEPS, "--result_dir", str(tmp_path / "run")]
    outcome = run_ranks(1, main_in_a_closed_pipe, flags)
    assert (outcome.codes, outcome.logs) == ([0], [""])
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


def test_two_nodes_meet_by_their_environment(tmp_path, test_loss_of_one_process):
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["1", "dpo", *STEPS, "--result_dir", str(tmp_path / "run")]
    with ThreadPoolExecutor() as pool:
        second = pool.submit(shell, *words, **nodes, NODE_RANK="1")
        first = shell(*words, **nodes, NODE_RANK="0")
    second = second.result()
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    line = f"Node 1 of 2 joined: 1 process; the log is printed by node 0 ({platform.node()})\n"
    assert second.stdout + second.stderr == line and line not in first.stdout + first.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["test"]["loss"] == pytest.approx(test_loss_of_one_process, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 --beta -1", "error: --beta: -1.0 is out of range"),
        ("0", "error: num_gpus: '0' must be a whole number from 1 to "),
        ("2 bake", "error: bake: unknown program; use dpo, baking"),
        ("2 NNODES=2", "error: NODE_RANK: '' must be a whole number from 0 to 1\n"),
        ("1 NNODES=2 NODE_RANK=0", "error: MASTER_ADDR: not set; export"),
        ("2 baking --num_epochs 0", "error: --num_epochs: 0.0 is out of range"),
    ],
)
def test_a_mistake_costs_one_line(line, message, tmp_path):
    env = dict(word.split("=") for word in line.split() if word[0].isupper())
    words = [word for word in line.split() if not word[0].isupper()]
    done = shell(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", **env)
    assert done.returncode == 2
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
