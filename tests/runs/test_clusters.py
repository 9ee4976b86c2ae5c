"""src/train.py as clusters start it: the generated scripts on two machines.

The machines are tests/cluster.py's: n1 and n2, with a real Slurm and its qsub. The losses of two
processes are bit-identical, however they were started or stopped.
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
import faults
import programs
import train
from conftest import LIMIT, ROOT
from ranks import ranks

sys.path.append(str(ROOT / "scripts"))
setup = importlib.import_module("distributed_setup")

PYTHON = sys.executable
TRAIN = str(ROOT / "src/train.py")
STEPS = 20
ENV = programs.environment()
YAML = f"""
training:
  max_steps: {STEPS}
  micro_batch_size: 4
  lr_scheduler: constant
  warmup_ratio: 0
dataset:
  max_rows: 80
output:
  output_dir: run
  report_to: none
  eval_every: 8
  log_every: 10
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with cluster.machines(tmp_path_factory.mktemp("two")) as started:
        yield started


@pytest.fixture(scope="module")
def slurm(machines):
    return cluster.Slurm(machines)


@pytest.fixture
def here(tmp_path):
    """A folder with settings, to start in."""
    (tmp_path / "config.yaml").write_text(YAML)
    yield tmp_path
    cluster.kill(cluster.processes(lambda one: Path(one.cwd()).is_relative_to(tmp_path)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The lines of a run of two processes on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "config.yaml").write_text(YAML)
    flags = ["--config", str(folder / "config.yaml"), "--output_dir", str(folder / "run")]
    ranks(2, train.main, flags)
    return faults.numbers(folder / "run")


def about(folder):
    """(launcher, processes, status) of a run."""
    environment, summary = (
        json.loads((folder / f"run/{name}.json").read_text()) for name in ("environment", "summary")
    )
    return environment["launcher"], environment["world_size"], summary["status"]


def has_logged(folder):
    metrics = folder / "run/metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3


def generate(folder, line):
    """Call distributed_setup.py with a line of flags; return the name of the script."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        assert setup.main(shlex.split(line)) == 0
    return out.getvalue().split()[1].rstrip(";")


# --- Slurm and PBS -------------------------------------------------------------------------------

SLURM = "slurm --num_nodes 2 --num_gpus_per_node 1 --modules '' --conda_env '' --time_limit "
AD = "grid_size=5 n_stream=2 total_source_timesteps=800 train_n_stream=2 n_transit=40 tf_n_embd=16 "
AD += "train_source_timesteps=400 tf_n_layer=1 train_timesteps=4 num_warmup_steps=1 eval_episodes=4"


def submit(slurm, program, folder, *words):
    """Submit a script with sbatch or qsub; return the job's number."""
    output = slurm.run(program, *words, env=ENV, cwd=folder)
    return output.split()[-1]  # "Submitted batch job 1", or "1"


def output_of(slurm, job, folder):
    """Wait until a job ends with 0; return its output."""
    running = ("PENDING", "RUNNING", "COMPLETING")
    cluster.wait(lambda: slurm.job(job)["JobState"] not in running)
    output = "".join(file.read_text() for file in sorted(folder.glob(f"*[-oe]{job}*")))
    assert slurm.job(job)["JobState"] == "COMPLETED", output
    assert slurm.job(job)["ExitCode"] == "0:0" and "Traceback" not in output, output
    return output


@pytest.mark.show
def test_distillation_trains_in_a_slurm_job(slurm, here):
    """scripts/multi_gpu_train.slurm as it is, on two machines of one GPU."""
    (here / "src").symlink_to(ROOT / "src")  # the project is where it is submitted
    sizes = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=1"]
    script = ROOT / "scripts/multi_gpu_train.slurm"
    words = [*shlex.split(AD), f"traj_file={here / 'x.npz'}", "output_dir=run"]
    output = output_of(slurm, submit(slurm, "sbatch", here, *sizes, script, *words), here)
    assert output.count("Number of processes: 2\nDistributed type: DistributedType.MULTI_CPU") == 1
    assert about(here) == ("srun", 2, "finished")


def test_a_slurm_job_that_is_signalled_saves_is_queued_again_and_resumes(slurm, undisturbed, here):
    job = submit(slurm, "sbatch", here, generate(here, SLURM + "00:10:00"))
    cluster.wait(has_logged(here))
    slurm.run("scancel", "--signal=USR1", job)
    # Slurm starts it after two minutes, here after three seconds
    queued = {"JobState": "PENDING", "Restarts": "1", "Reason": "BeginTime"}
    cluster.wait(lambda: queued.items() <= slurm.job(job).items())
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")
    assert about(here) == ("srun", 2, "preempted")
    saved = json.loads((here / "run/summary.json").read_text())
    assert saved["exit_code"] == 85 and 3 <= saved["step"] < STEPS
    assert f"resumes after step {saved['step']}\n" in output_of(slurm, job, here)
    assert about(here) == ("srun", 2, "finished")
    assert faults.numbers(here / "run") == undisturbed


@pytest.mark.show
def test_a_pbs_job_runs_on_two_machines(slurm, undisturbed, here):
    """With MPICH in place of PALS; /etc/profile of the machines defines `module`."""
    cluster.need(**{"mpiexec.mpich": "mpich"})
    flags = "pbs --num_nodes 2 --num_gpus_per_node 1 --partition gpu --time_limit 00:10:00"
    output_of(slurm, submit(slurm, "qsub", here, generate(here, flags)), here)
    assert about(here) == ("mpiexec", 2, "finished")
    assert faults.numbers(here / "run") == undisturbed


# --- two machines --------------------------------------------------------------------------------


def start_both(machines, folder):
    """Start the scripts of two nodes, each on its own."""
    flags = "launcher --num_nodes 2 --num_gpus_per_node 1 --master_addr n1 --node_rank "
    scripts = [generate(folder, flags + rank) for rank in "01"]
    assert scripts == [f"scripts/run_training_node{rank}.sh" for rank in "01"]
    nodes = zip(("n1", "n2"), scripts, strict=True)
    return [machines.start(node, "bash", script, env=ENV, cwd=folder) for node, script in nodes]


@pytest.mark.show
@pytest.mark.parametrize("node", ["0", "1"])
def test_a_stop_of_one_node_ends_both_with_85_and_both_resume(node, machines, undisturbed, here):
    started = start_both(machines, here)
    cluster.wait(has_logged(here))

    def is_launcher(process):
        is_here = process.cwd() == str(here) and "ddp_utils.launch" in process.cmdline()
        return is_here and process.environ().get("NODE_RANK") == node

    os.kill(min(cluster.processes(is_launcher)), signal.SIGTERM)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in started]
    assert [process.returncode for process in started] == [85, 85], outputs
    started = start_both(machines, here)
    outputs = [process.communicate(timeout=LIMIT)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert faults.numbers(here / "run") == undisturbed


# --- scripts/environment.sh ----------------------------------------------------------------------


CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
FOR_CPUS = "PyTorch for CPUs: downloads about 0.3 GB, needs 1.4 GB on the disk"
FOR_CUDA = "PyTorch for CUDA: downloads about 3 GB, needs 6 GB on the disk"
BUILDS = {  # has a driver, reaches the index -> lines, options of pip
    (True, True): ([FOR_CUDA], ""),
    (False, True): ([FOR_CPUS], f" --extra-index-url {CPU_BUILDS}"),
    (False, False): (
        [f"{CPU_BUILDS} with PyTorch for CPUs cannot be reached; using PyPI", FOR_CUDA],
        "",
    ),
}


@pytest.mark.parametrize(("driver", "index"), BUILDS)
def test_the_environment_is_made_from_any_folder(driver, index, tmp_path):
    """requirements.txt ends with `-e .`, which is relative to the folder where pip is started.

    The build of PyTorch depends on the driver and on what can be reached; a line has its size.
    """
    script = tmp_path / "project/scripts/environment.sh"
    script.parent.mkdir(parents=True)
    script.symlink_to(ROOT / "scripts/environment.sh")
    pip = "#!/bin/bash\n[ -f scripts/environment.sh ] && echo made:\\$*"
    for name, text in {
        "python": "exit 1",  # no torch
        "python3": f"[[ $2 != *urllib* ]] || exit {int(not index)}\n[ $1 = -m ] || exit 0\n"
        f'mkdir -p "$3/bin"; echo "{pip}" >"$3/bin/pip"; chmod +x "$3/bin/pip"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    has_driver = f"has_nvidia_driver() {{ {str(driver).lower()}; }}"
    command = ["bash", "-euc", f". '{script}'; {has_driver}; use_environment"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    lines, options = BUILDS[driver, index]
    setting_up = f"setting up {tmp_path}/project/.venv (once) with {lines.pop()}"
    made = f"made:install -q -r requirements.txt -c constraints.txt{options}"
    printed = done.stdout.splitlines()
    assert (done.returncode, printed) == (0, [*lines, setting_up, made]), done.stderr


def test_an_environment_that_the_user_has_made_is_not_changed(tmp_path):
    """As the README describes it; the active one has no torch."""
    script = tmp_path / "scripts/environment.sh"
    script.parent.mkdir()
    script.symlink_to(ROOT / "scripts/environment.sh")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, text in {
        "python": "exit 1",
        ".venv/bin/python": f'exec {sys.executable} "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-euc", f". '{script}'; use_environment; command -v python"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/.venv/bin/python\n"), done.stderr
    (tmp_path / "requirements.txt").write_text("torch>=2.10  # training\nno-such.package\n-e .\n")
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    problem = "error: no-such.package: not installed"
    fix = f"{tmp_path}/.venv/bin/python -m pip install no-such.package"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{problem}; {fix}\n")


def test_an_old_package_in_the_active_environment_costs_one_line(tmp_path):
    for name, version in (("torch", "2.10.0a0+b1"), ("transformers", "5.5"), ("peft", "0.9.1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(f"Version: {version}\n")
    command = ["bash", "-euc", f". '{ROOT}/scripts/environment.sh'; use_environment"]
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "error: peft: 0.9.1 is installed, 0.20 or newer is needed; "
        "python -m pip install 'peft>=0.20'\n",
    )
