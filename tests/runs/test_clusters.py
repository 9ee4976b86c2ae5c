"""src/train.py as clusters start it: the generated scripts on two machines, and every launcher.

The machines are tests/cluster.py's: n1 and n2, with a real Slurm and its qsub. Two processes are
always one run: the same losses to the last digit, however they were started or stopped.
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cluster
import faults
import programs
from conftest import ROOT

sys.path.append(str(ROOT / "scripts"))
setup = importlib.import_module("distributed_setup")

PYTHON = sys.executable
BIN = Path(PYTHON).parent
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
    with cluster.machines(tmp_path_factory.mktemp("two")) as found:
        yield found


@pytest.fixture(scope="module")
def slurm(machines):
    return cluster.Slurm(machines)


@pytest.fixture
def here(tmp_path):
    """A folder with settings, to start in."""
    yield settle(tmp_path)
    cluster.end(tmp_path)


def settle(folder):
    (folder / "config.yaml").write_text(YAML)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The lines of a run of two processes of torchrun on one machine."""
    folder = settle(tmp_path_factory.mktemp("undisturbed"))
    torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node=2"]
    programs.process([*torchrun, TRAIN, "--config", "config.yaml"], cwd=folder)
    assert about(folder) == ("torchrun", 2, "finished")
    return numbers(folder)


def numbers(folder):
    return faults.numbers(folder / "run")


def about(folder):
    """(launcher, processes, how it ended) of a run."""
    found = [json.loads((folder / f"run/{n}.json").read_text()) for n in ("environment", "summary")]
    return found[0]["launcher"], found[0]["world_size"], found[1]["status"]


def generate(folder, line):
    """distributed_setup.py on a line of flags, in a folder; the script that it wrote."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(folder)
        assert setup.main(shlex.split(line)) == 0
    return said.getvalue().split()[1].rstrip(";")


def finished(process, timeout=100):
    said = process.communicate(timeout=timeout)[0]
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


AD = "grid_size=5 n_stream=2 total_source_timesteps=800 train_n_stream=2 n_transit=40 tf_n_embd=16 "
AD += "train_source_timesteps=400 tf_n_layer=1 train_timesteps=4 num_warmup_steps=1 eval_episodes=4"


def test_distillation_trains_in_a_slurm_job(slurm, here):
    """scripts/multi_gpu_train.slurm as it is, on two machines of one GPU."""
    (here / "src").symlink_to(ROOT / "src")  # the project is where it is submitted
    sizes = ["--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1", "--cpus-per-task=1"]
    script = ROOT / "scripts/multi_gpu_train.slurm"
    words = [*shlex.split(AD), f"traj_file={here / 'x.npz'}", "output_dir=run"]
    said = slurm.run("sbatch", *sizes, script, *words, env=ENV, cwd=here)
    said = ends(slurm, said.split()[-1], here)
    assert said.count("Number of processes: 2\nDistributed type: DistributedType.MULTI_CPU") == 1
    assert about(here) == ("srun", 2, "finished")


# --- Slurm ---------------------------------------------------------------------------------------

SLURM = "slurm --num_nodes 2 --num_gpus_per_node 1 --modules '' --conda_env '' --time_limit "


def state(slurm, job):
    return slurm.job(job)["JobState"]


def is_queued_again(slurm, job):
    """For two minutes, here for three seconds: the last life's permit has to run out."""
    queued = {"JobState": "PENDING", "Restarts": "1", "Reason": "BeginTime"}
    cluster.wait(lambda: queued.items() <= slurm.job(job).items(), 150)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds")


def ends(slurm, job, folder, wanted=("COMPLETED", "0:0")):
    """The job's end, its state and exit status as wanted; what it has said until then."""
    cluster.wait(lambda: state(slurm, job) not in ("PENDING", "RUNNING", "COMPLETING"), 100)
    said = "".join(file.read_text() for file in sorted(folder.glob(f"*[-oe]{job}*")))
    assert (state(slurm, job), slurm.job(job)["ExitCode"]) == wanted, said
    return said


def submit(slurm, program, folder, line):
    """Generate a script and give it to sbatch or qsub; the job's number."""
    said = slurm.run(program, generate(folder, line), env=ENV, cwd=folder)
    return said.split()[-1]  # "Submitted batch job 1", or "1"


def lines(folder):
    file = folder / "run/metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_slurm_job_that_is_signalled_saves_is_queued_again_and_goes_on(slurm, undisturbed, here):
    job = submit(slurm, "sbatch", here, SLURM + "00:10:00")
    cluster.wait(lambda: lines(here) >= 3, 100)
    slurm.run("scancel", "--signal=USR1", job)
    is_queued_again(slurm, job)
    assert about(here) == ("srun", 2, "preempted")
    saved = json.loads((here / "run/summary.json").read_text())
    assert saved["exit_code"] == 85 and 3 <= saved["step"] < STEPS
    said = ends(slurm, job, here)  # in both lives
    assert f"resumes after step {saved['step']}\n" in said
    assert "Traceback" not in said
    assert about(here) == ("srun", 2, "finished")
    assert numbers(here) == undisturbed


# --- two machines --------------------------------------------------------------------------------


def start_both(machines, folder):
    """Start the scripts of two nodes, each on its own."""
    flags = "launcher --num_nodes 2 --num_gpus_per_node 1 --master_addr n1 --node_rank "
    scripts = [generate(folder, flags + rank) for rank in "01"]
    assert scripts == [f"scripts/run_training_node{rank}.sh" for rank in "01"]
    nodes = zip(("n1", "n2"), scripts, strict=True)
    return [machines.start(node, "bash", script, env=ENV, cwd=folder) for node, script in nodes]


def process(folder, words, **env):
    """The process that works in a folder, has words in its command line and these variables."""

    def fits(path):
        with contextlib.suppress(OSError):  # it has just ended
            has = (path / "environ").read_text(errors="replace").split("\0")
            told = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
            in_it = os.readlink(path / "cwd") == str(folder)
            return in_it and told.startswith(words) and {f"{k}={env[k]}" for k in env} <= {*has}

    return min(int(path.name) for path in Path("/proc").glob("[0-9]*") if fits(path))


@pytest.mark.show
@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_of_one_node_ends_both_with_85_and_both_go_on(node, machines, undisturbed, here):
    started = start_both(machines, here)
    cluster.wait(lambda: lines(here) >= 3, 100)
    os.kill(process(here, "python -m ddp_utils.launch", NODE_RANK=node), signal.SIGTERM)
    said = [one.communicate(timeout=60)[0] for one in started]
    assert [one.returncode for one in started] == [85, 85], said
    for one in start_both(machines, here):
        finished(one)
    assert numbers(here) == undisturbed


@pytest.mark.show
def test_a_process_that_dies_on_the_second_node_is_started_again(machines, undisturbed, here):
    started = start_both(machines, here)
    cluster.wait(lambda: lines(here) >= 3, 100)
    os.kill(process(here, "/", RANK="1"), signal.SIGKILL)
    assert [(one.communicate(timeout=100), one.returncode)[1] for one in started] == [0, 0]
    assert numbers(here) == undisturbed


# --- PBS -----------------------------------------------------------------------------------------


def test_a_pbs_job_runs_on_two_machines(slurm, undisturbed, here):
    """With MPICH in place of PALS; `module` is what /etc/profile of the machines makes it."""
    cluster.need(**{"mpiexec.mpich": "mpich"})
    flags = "pbs --num_nodes 2 --num_gpus_per_node 1 --partition gpu --time_limit 00:10:00"
    job = submit(slurm, "qsub", here, flags)
    ends(slurm, job, here)
    assert about(here) == ("mpiexec", 2, "finished")
    assert numbers(here) == undisturbed


# --- scripts/environment.sh ----------------------------------------------------------------------


def test_the_environment_is_made_from_any_folder(tmp_path):
    """requirements.txt ends with `-e .`, which pip sees from where it is started."""
    script = tmp_path / "project/scripts/environment.sh"
    script.parent.mkdir(parents=True)
    script.symlink_to(ROOT / "scripts/environment.sh")
    pip = "#!/bin/bash\n[ -f scripts/environment.sh ] && echo made"
    for name, text in {
        "python": "exit 1",  # no torch
        "python3": f'mkdir -p "$3/bin"; echo "{pip}" >"$3/bin/pip"; chmod +x "$3/bin/pip"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", "-euc", f". '{script}'; use_environment"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["made"]), done.stderr


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
