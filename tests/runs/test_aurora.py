"""The job script of Aurora: its header, and its body in a stand-in for PBS and PALS."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import programs
import runs
from conftest import LIMIT, ROOT

SCRIPT = ROOT / "run_dpo_ddp_aurora.sh"
# A stand-in for PALS: it records and removes --cpu-bind, which hydra does not know, names the ranks
# as PALS does, and sets no variable with their number.
MPIEXEC = """#!/bin/bash
words=()
while [ "$1" != python ]; do
  if [ "$1" = --cpu-bind ]; then
    echo "$2 $ZE_FLAT_DEVICE_HIERARCHY" >bind
    shift
  else
    words+=("$1")
  fi
  shift
done
exec mpiexec.mpich "${words[@]}" bash -c '
  export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID
  exec env -u PMI_RANK -u PMI_SIZE -u MPI_LOCALRANKID -u MPI_LOCALNRANKS "$@"' - "$@"
"""
QSTAT = "#!/bin/bash\necho '    Resource_List.select = 2:system=aurora'\n"
QSTAT += "echo '    Resource_List.walltime = 00:30:08'\necho '    run_count = 3'\n"


@pytest.fixture
def job(tmp_path):
    """A function that runs the script as PBS would, in a folder that looks like the project's."""
    for name in ("src", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    bin_ = tmp_path / ".venv/bin"
    bin_.mkdir(parents=True)
    # what `bash -l` makes of PATH is the system's: the venv puts ours in front again
    (bin_ / "activate").write_text(f'PATH="{bin_}:{Path(sys.executable).parent}:$PATH"\n')
    for name, text in (("mpiexec", MPIEXEC), ("qstat", QSTAT)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / "nodes").write_text("127.0.0.1\n127.0.0.2\n")
    clean = programs.environment()
    del clean["OMP_NUM_THREADS"]
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    pbs |= {"PBS_JOBID": "123.server", "BASH_FUNC_module%%": "() { echo module $*; }"}
    ours = {"HYDRA_LAUNCHER": "fork", "BACKEND": "gloo", "GLOO_SOCKET_IFNAME": "lo"}

    def run(*flags, script=SCRIPT, **env):
        return subprocess.run(
            ["bash", "-l", script, *flags],
            env={**clean, **pbs, **ours, "PYTHONPATH": str(ROOT / "src"), **env},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            cwd=tmp_path,
        )

    run.folder = tmp_path
    return run


@pytest.mark.show
def test_the_body_trains_on_two_nodes_and_resumes_when_it_is_run_again(job):
    if not Path("/usr/bin/mpiexec.mpich").exists():
        pytest.skip("mpiexec.mpich is not installed")
    steps = runs.words("--log_every 1000 --max_rows 16 --max_steps 3")
    done = job(*steps, "--stop_after_minutes", "1e-6", PER_NODE="2")
    out, error = ((job.folder / f"logs/dpo_ddp_123.{kind}").read_text() for kind in ("out", "err"))
    assert done.returncode == 85, out + error + done.stderr
    assert "module load frameworks" in out
    assert "Initialized DDP: rank=0, world_size=4, local_rank=0\nUsing device: cpu\n" in out
    assert out.count("Initialized DDP") == 1 and "Traceback" not in error
    folder = job.folder / "outputs/dpo_ddp_aurora"
    about = json.loads((folder / "environment.json").read_text())
    assert (about["launcher"], about["world_size"]) == ("pals", 4)

    assert about["job_restarts"] == 2  # by qstat
    # run again it has the same number
    assert job(*steps, "--restart", PER_NODE="2").returncode == 0
    out = (job.folder / "logs/dpo_ddp_123.out").read_text()
    assert "resumes after step" in out and out.count("Initialized DDP") == 2
    assert [line["step"] for line in runs.lines(folder, "train")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("per_node", "bound"),
    [
        ("12", "list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79 FLAT"),
        ("6", "list:4-11:12-19:20-27:56-63:64-71:72-79 COMPOSITE"),
    ],
)
def test_tiles_and_gpus_are_bound_to_near_cores(per_node, bound, job):
    """Against ALCF's page on binding: GPUs 0 to 2 are at socket 0, 3 to 5 at socket 1."""
    record = 'echo "$OMP_NUM_THREADS $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" "$@" >words; '
    record += 'echo "$DDP_JOB_END" >end'
    (job.folder / ".venv/bin/mpiexec").write_text(
        MPIEXEC.replace("exec mpiexec.mpich", f"{record}; exit; :")
    )
    env = {"PER_NODE": per_node, "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    env |= {"BACKEND": "", "MASTER_PORT": "2345"} if per_node == "6" else {}
    start = time.time()
    assert job(**env).returncode == 0
    end = int((job.folder / "end").read_text())  # after a walltime of 00:30:08
    assert int(start) <= end - 1808 <= time.time()
    assert (job.folder / "bind").read_text().strip() == bound
    words = (job.folder / "words").read_text().split()
    port = "2345" if per_node == "6" else "20123"
    size = str(2 * int(per_node))
    assert words[:4] == [str(48 // int(per_node)), size, "127.0.0.1", port]
    backend = "xpu" if per_node == "6" else "gloo"
    assert words[4:9] == ["python", "-m", "dpo_inv.run_dpo_ddp", "--backend", backend]


@pytest.mark.parametrize("script", [SCRIPT, ROOT / "scripts" / SCRIPT.name])  # a link to it
def test_help_is_that_of_the_script_and_of_its_program_without_a_job(script, job):
    # a login shell sets PATH here
    (job.folder / ".bash_profile").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    outside = {"PBS_O_WORKDIR": "", "PBS_NODEFILE": "", "PBS_JOBID": ""}
    done = job("--help", script=script, HOME=str(job.folder), **outside)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Fine-tune ProteinMPNN on Aurora.") and "#PBS" not in done.stdout
    assert "\nusage: python -m dpo_inv.run_dpo_ddp [settings]\n" in done.stdout
    assert not (job.folder / "logs").exists()


def test_a_mistake_is_one_line_and_runs_nothing(job):
    for value in ("13", "x$(touch bad)"):
        done = job(PER_NODE=value)
        error = (job.folder / "logs/dpo_ddp_123.err").read_text()
        assert done.returncode == 2, done.stdout + done.stderr + error
        line = error.splitlines()[-1]
        assert line == f"error: PER_NODE: {value}; use 12 (tiles), 6 (GPUs), or fewer tiles"
    assert not (job.folder / "bad").exists()
    away = job.folder / "away/from"
    away.mkdir(parents=True)
    done = job(PBS_O_WORKDIR=str(away))
    assert (done.returncode, list(away.iterdir())) == (2, [])
    assert done.stderr == f"error: {away}: submit it from the project's folder\n"


HEADER = [  # the guide's directives, and those that ALCF's page requires
    "-A <your_project>",
    "-q capacity",  # for 1 to 16 nodes, for more than the hour of debug
    "-l select=2:system=aurora,place=scatter",
    "-l walltime=02:00:00",
    "-l filesystems=home:flare",
    "-r y",
]


def test_the_header_has_the_directives_of_aurora_and_the_guide_s_name_is_the_same_file():
    first, *lines = SCRIPT.read_text().partition("\n# ")[0].splitlines()
    assert first == "#!/bin/bash -l"  # `module` comes with a login shell
    assert {f"#PBS {option}" for option in HEADER} <= {*lines}
    assert (ROOT / "scripts/run_dpo_ddp_aurora.sh").resolve() == SCRIPT
