"""scripts/distributed_setup.py: what it writes and refuses, and what bash makes of its scripts.

Expected files are those of guide 2. Scripts run with stand-ins for srun, python and
the like, which write down their words and their environment.
"""

import importlib
import json
import os
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import test_sharding_settings as examples

from conftest import ROOT
from ddp_utils import UserError

sys.path.append(str(ROOT / "scripts"))
setup = importlib.import_module("distributed_setup")

YAML = """
training:
  micro_batch_size: 4
  max_grad_norm: 0.3
  mixed_precision: bf16
distributed:
  gradient_accumulation_steps: 16
"""
DEEPSPEED = json.loads(examples.DEEPSPEED)
FSDP = json.loads(examples.FSDP)
GUIDE = """
python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16 --output config/ds_config.json
python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4 --use_deepspeed
python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD --mixed_precision BFLOAT16 --output config/fsdp_config.json
python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4
python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --use_deepspeed --time_limit 48:00:00
python scripts/distributed_setup.py launcher --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --master_addr 192.168.1.100 --master_port 29500 --node_rank 0 --use_deepspeed
python scripts/distributed_setup.py launcher --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --master_addr 192.168.1.100 --master_port 29500 --node_rank 1 --use_deepspeed
"""  # noqa: E501


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the guide's settings is the current one."""
    folder = tmp_path / "it's my folder"
    folder.mkdir()
    (folder / "config.yaml").write_text(YAML)
    monkeypatch.chdir(folder)
    return folder


def make(line, *more):
    """Run the program on a line of flags, as a shell would split it."""
    return setup.main([*shlex.split(line), *more])


def made(line, *more, name=None):
    """What it has written: a settings file as data, a script as text."""
    before = files()
    assert make(line, *more) == 0
    [path] = [Path(name)] if name else [Path(p) for p in files() if p not in before]
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()


def files():
    """Every file below the current folder and what it holds."""
    return {str(p): p.read_bytes() for p in Path(".").rglob("*") if p.is_file()}


def refused(line, *more):
    """The one line that refuses these flags; nothing was written."""
    before = files(), sorted(Path(".").rglob("*"))
    with pytest.raises(UserError) as caught:
        make(line, *more)
    assert caught.value.exit_code == 2
    assert (files(), sorted(Path(".").rglob("*"))) == before
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


STAGE3 = {
    **{k: v for k, v in DEEPSPEED["zero_optimization"].items() if k != "offload_optimizer"},
    "stage": 3,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_gather_16bit_weights_on_model_save": True,
}


def test_precision_strategy_and_buckets_are_flags():
    found = made("deepspeed --fp16 --output a.json")
    assert found["fp16"] == {"enabled": True, "loss_scale": 0} and "bf16" not in found
    found = made("deepspeed --output b.json")  # left to the YAML file
    assert found["bf16"] == {"enabled": "auto"} and found["fp16"]["enabled"] == "auto"
    found = made("fsdp --output c.json --sharding_strategy HYBRID_SHARD --mixed_precision NO")
    other = {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_mixed_precision": "NO"}
    assert found == {**FSDP, **other}
    found = made("deepspeed --reduce_bucket_size 2e8 --allgather_bucket_size=1000")
    found = found["zero_optimization"]
    assert (found["reduce_bucket_size"], found["allgather_bucket_size"]) == (200000000, 1000)
    assert ": 200000000," in Path("config/ds_config.json").read_text()


def test_concrete_settings_hold_no_auto():
    Path("c.yaml").write_text(YAML.replace("steps: 16", "steps: 8").replace("0.3", "1"))
    found = made("deepspeed --zero_stage 3 --concrete --config c.yaml")
    assert found == {
        **DEEPSPEED,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1,
        "zero_optimization": {
            **STAGE3,
            "stage3_prefetch_bucket_size": 50000000,
            "stage3_param_persistence_threshold": 100000,
        },
    }
    assert "auto" not in Path("config/ds_config.json").read_text()
    Path("c.yaml").write_text(YAML.replace("bf16", "no"))
    found = made("deepspeed --concrete --config c.yaml --output d.json")
    assert not {"bf16", "fp16"} & found.keys()
    Path("c.yaml").write_text(YAML.replace("0.3", ".inf"))  # JSON has no infinity
    assert refused("deepspeed --config c.yaml").startswith("c.yaml: max_grad_norm is")
    # without --concrete the numbers are the file's, what depends on the machine stays auto
    found = made("deepspeed --config config.yaml --output e.json")
    assert found["train_micro_batch_size_per_gpu"] == "auto"


def test_a_time_limit_in_any_of_slurms_formats():
    """The signal comes five minutes before the end, or in the middle of a short job."""
    limits = "90,300,01:30:00 1:30,45,00:01:30 00:01:00,30,00:01:00 00:12:00,300,00:12:00"
    limits += " 2-0,300,48:00:00 1-2:3,300,26:03:00 1-02:03:04,300,26:03:04"
    for line in limits.split():
        limit, signal, clock = line.split(",")
        text = made("slurm", f"--time_limit={limit}", name="scripts/slurm_job.sh")
        assert f"#SBATCH --time={limit}\n" in text and f"#SBATCH --signal=USR1@{signal}\n" in text
        text = made("pbs", f"--time_limit={limit}", name="scripts/pbs_job.sh")
        assert f"#PBS -l walltime={clock}\n" in text


JOB = "--time_limit 1-12 --partition long --account me --job_name a.b --cpus_per_task 3 "
JOB += "--mem_per_gpu 500M --num_nodes 2 --num_gpus_per_node 6 --env A=b 'C=d e' NCCL_DEBUG=WARN"
SCRIPTS = {  # in every mode; the whole text of each is tests/golden/scripts/NAME.sh
    "one": "launcher --config config.yaml --num_gpus_per_node 4",
    "node": "launcher --num_nodes 2 --master_addr ::1 --node_rank 1 --use_deepspeed",
    "slurm_guide": GUIDE.split("\n")[5].partition(" scripts/distributed_setup.py ")[2],
    "slurm_fsdp": "slurm --config fsdp.yaml --use_fsdp --account a",
    "slurm": f"slurm {JOB} --modules --conda_env= --use_deepspeed",
    "pbs": "pbs --account mine",
    "pbs_other": f"pbs {JOB} --system= --filesystems=eagle --modules a b --conda_env c",
}
FSDP_YAML = YAML + "  use_fsdp: true\n"


def test_scripts_are_the_golden_ones_and_bash_and_shellcheck_are_content(here):
    """RENEW=1 writes them anew, to be read in the difference that git shows."""
    Path("fsdp.yaml").write_text(FSDP_YAML)
    make("deepspeed")
    for name, line in SCRIPTS.items():
        make(line, f"--output={name}.sh")
        check_shell(f"{name}.sh")
        text = Path(f"{name}.sh").read_text()
        for place, sign in ((str(here), "HERE"), (str(ROOT), "PROJECT")):
            text = text.replace(shlex.quote(place), sign).replace(place, sign)
        golden = ROOT / "tests/golden/scripts" / f"{name}.sh"
        if "RENEW" in os.environ:
            golden.write_text(text)
        assert text == golden.read_text(), name


def check_shell(script):
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    subprocess.run(["bash", "-n", script], check=True)


# A stand-in writes down its words and, in NAME.env, its environment; words of several calls follow
# each other. Python is one too: it says what the check of a training script says.
RECORDS = """#!/bin/bash
name=$(basename "$0")
printf '%s\\0' "$@" >>"$RECORD/$name"
env -0 >"$RECORD/$name.env"
"""
STANDINS = {
    **dict.fromkeys(("srun", "mpiexec"), RECORDS + "exit ${STATUS:-0}"),
    "sbatch": RECORDS,
    "qsub": RECORDS,
    "scontrol": RECORDS + "[ $1 = requeue ] && exit ${REFUSES:-0}; printf 'n1\\nn2\\n'",
    "python": "#!/bin/bash\n"
    "case $1 in\n"
    '  -) cat >>"$RECORD/asked" ;;\n'  # torch is there
    '  -m) printf "%s\\0" "$@" >"$RECORD/launch"; env -0 >"$RECORD/launch.env"; '
    "exit ${STATUS:-0} ;;\n"
    '  *) [ "${*: -1}" != --check ] || { printf "%s\\0" "$@" >"$RECORD/check"; '
    'env -0 >"$RECORD/check.env"; echo run folder: x; exit ${CHECK:-0}; } ;;\n'
    "esac\n",
    "activate": 'printf "%s\\0" "$@" >"$RECORD/activate"',
    "getent": "#!/bin/bash\nexit 2",
}


@pytest.fixture(scope="module")
def bin_(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    for name, text in STANDINS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def start(bin_, tmp_path):
    """A function that runs a script; it returns what the stand-ins wrote down, by their name."""
    record = tmp_path / "record"
    (tmp_path / "nodes").write_text("n1\nn2\n")
    clean = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path), "RECORD": str(record)}
    clean["BASH_FUNC_module%%"] = '() { printf "%s\\0" "$@" >>"$RECORD/module"; }'
    clean |= {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    clean |= {"PBS_JOBID": "8123456.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    clean["PBS_O_WORKDIR"] = str(tmp_path)

    def run(script, *words, wanted=0, **env):
        record.mkdir(exist_ok=True)
        for path in record.iterdir():
            path.unlink()
        command = ["bash", os.path.abspath(script), *words]  # from anywhere
        done = subprocess.run(
            command, env={**clean, **env}, cwd=tmp_path, capture_output=True, timeout=30
        )
        assert done.returncode == wanted, done.stdout + done.stderr
        found = {p.name: os.fsdecode(p.read_bytes()).split("\0")[:-1] for p in record.iterdir()}
        for name in [name for name in found if name.endswith(".env")]:
            found[name] = dict(pair.partition("=")[::2] for pair in found[name])
        return {**found, "stderr": done.stderr.decode()}

    return run


TRAIN = str(ROOT / "src/train.py")
LAUNCH = ["-m", "ddp_utils.runs.launch"]
COMMAND = ["python", TRAIN, "--config=config.yaml", "--deepspeed=config/ds_config.json"]


def test_the_slurm_job_starts_one_task_per_gpu_and_nothing_in_it(start, here, tmp_path):
    """Complaint 25: a port from the job's number, and ranks that each task finds on its node."""
    make("slurm --config config.yaml --num_nodes 2 --num_gpus_per_node 8 --use_deepspeed")
    done = start("scripts/slurm_job.sh", "--max_steps", "3")
    assert done["srun"] == ["--cpus-per-task=8", "--wait=120", *COMMAND, "--max_steps", "3"]
    env = done["srun.env"]
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n1", "23456")
    assert env["PWD"] == str(here) and env["OMP_NUM_THREADS"] == "8"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & env.keys()  # each task finds its own
    guide = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    guide |= {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0", "NCCL_SOCKET_IFNAME": "^lo,docker"}
    assert guide.items() <= env.items() and "NCCL_ASYNC_ERROR_HANDLING" not in env
    assert done["scontrol"] == ["show", "hostnames", "n[1-2]"]
    assert done["module"] == ["load", "cuda/12.2", "load", "anaconda3"]
    assert done["activate"] == ["llm_finetuning"]
    assert done["check"] == [*COMMAND[1:], "--max_steps", "3", "--check"]
    sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert sizes.items() <= done["check.env"].items()
    asked = tmp_path / "record/asked"
    assert "find_spec(name)" in asked.read_text()  # else .venv would be made and used
    other = start("scripts/slurm_job.sh", SLURM_JOB_ID="123457")["srun.env"]["MASTER_PORT"]
    assert other == "23457"


def test_only_a_job_that_has_stopped_and_saved_is_queued_again(start):
    make("slurm")
    for status in (0, 1, 2, 3, 4, 84, 86, 137):
        done = start("scripts/slurm_job.sh", STATUS=str(status), wanted=status)
        assert "requeue" not in done["scontrol"]
    done = start("scripts/slurm_job.sh", STATUS="85", wanted=85)
    assert done["scontrol"][-2:] == ["requeue", "123456"] and done["stderr"] == ""
    done = start("scripts/slurm_job.sh", STATUS="85", REFUSES="1", wanted=85)
    assert done["stderr"] == "error: not queued again; submit the same script\n"


def test_a_mistake_that_the_check_finds_ends_the_job_before_it_starts(start):
    for command in ("slurm", "pbs"):  # that of a launcher is in launch.py
        make(f"{command} --output job.sh")
        done = start("job.sh", CHECK="2", wanted=2)
        assert not {"srun", "mpiexec"} & done.keys()


def test_the_pbs_job_starts_one_process_per_gpu(start, here, tmp_path):
    make("pbs --use_deepspeed --num_nodes 2 --time_limit 01:00:00 --conda_env mine")
    done = start("scripts/pbs_job.sh")
    command = [*COMMAND, "--stop_after_minutes=55"]
    nodes = ["-n", "24", "-ppn", "12", "--hostfile", str(tmp_path / "nodes")]
    assert done["mpiexec"] == [*nodes, *command]
    assert done["check"] == [*command[1:], "--check"]
    wanted = {"MASTER_ADDR": "n1", "MASTER_PORT": "23456", "WORLD_SIZE": "24"}
    wanted |= {"LOCAL_WORLD_SIZE": "12", "CCL_PROCESS_LAUNCHER": "pmix", "OMP_NUM_THREADS": "4"}
    wanted |= {"CCL_ATL_TRANSPORT": "mpi", "CCL_KVS_MODE": "mpi", "PWD": str(here)}
    assert wanted.items() <= done["mpiexec.env"].items()
    assert done["module"] == ["load", "frameworks"] and done["activate"] == ["mine"]
    assert not {"RANK", "LOCAL_RANK"} & done["mpiexec.env"].keys()
    start("scripts/pbs_job.sh", STATUS="85", wanted=85)
    make("pbs --system=")
    assert start("scripts/pbs_job.sh")["mpiexec.env"]["NCCL_DEBUG"] == "INFO"


def test_the_launcher_of_one_node_takes_a_free_port(start, here):
    """Complaint 25: two jobs on a machine do not meet."""
    make("launcher --config config.yaml --num_gpus_per_node 4 --use_deepspeed")
    done = start("scripts/run_training.sh", "--max_steps", "3", NNODES="7")
    assert done["launch"] == [*LAUNCH, "4", *COMMAND[1:], "--max_steps", "3"]
    env = done["launch.env"]
    assert (env["PWD"], env["NNODES"]) == (str(here), "1") and "MASTER_PORT" not in env
    start("scripts/run_training.sh", STATUS="85", wanted=85)
    make("launcher --master_port 1234")
    assert start("scripts/run_training.sh")["launch.env"]["MASTER_PORT"] == "1234"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_launcher_of_a_node_joins_the_others(start, rank):
    """Complaint 25: each node has its own rank."""
    flags = "launcher --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --use_deepspeed"
    make(f"{flags} --master_addr 192.168.1.100 --node_rank {rank}")
    done = start(f"scripts/run_training_node{rank}.sh", MASTER_ADDR="elsewhere")
    assert done["launch"] == [*LAUNCH, "8", *COMMAND[1:]]
    wanted = {"NNODES": "4", "NODE_RANK": str(rank), "MASTER_ADDR": "192.168.1.100"}
    assert (wanted | {"MASTER_PORT": "29500"}).items() <= done["launch.env"].items()
    env = {"MASTER_PORT": "77"}  # exported on every node
    done = start(f"scripts/run_training_node{rank}.sh", **env)
    assert done["launch.env"]["MASTER_PORT"] == "77"
    make(f"{flags} --master_addr 192.168.1.100 --master_port 88 --node_rank {rank}")
    done = start(f"scripts/run_training_node{rank}.sh", **env)
    assert done["launch.env"]["MASTER_PORT"] == "88"


HOSTILE = [
    "two words",
    "it's",
    'say "x"',
    "x; touch PWN1",
    "$(touch PWN2)",
    "`touch PWN3`",
    "x\ntouch PWN4\n#SBATCH --x",
    "-rf",
    "~",
    "*",
    "Grüße 蛋白",
    "x" * 4096,
    "../x && touch PWN5 # $HOME ${HOME} \\ @path@ {cwd} %j",
]
COMMANDS = ["deepspeed", "fsdp", "launcher", "slurm", "pbs"]
STRINGS = [
    (command, name)
    for command in COMMANDS
    for name, hint in get_type_hints(setup.COMMANDS[command][0]).items()
    if hint in (str, tuple[str, ...])
]
assert len(STRINGS) == 28  # every flag that is a text is attacked


def attack(command, name, value, start):
    """Generate with this value: None if it is refused, else what the script does with it."""
    if name == "config":
        try:
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).write_text(YAML)
        except (OSError, ValueError):
            pass  # no file has this name
    words = [command, f"--{name}={value}"]
    words += [] if name == "output" else ["--output=made"]
    words += ["--num_nodes=2"] if name == "master_addr" else []
    before = set(os.listdir())
    try:
        assert setup.main(words) == 0
    except UserError as error:
        assert "\n" not in str(error)
        assert set(os.listdir()) == before
        return None
    path = value if name == "output" else "made"
    if command in ("deepspeed", "fsdp"):
        assert json.loads(Path(path).read_bytes())
        return {}
    return start(os.path.join(".", path))


def carried(name, value, done):
    """Where the script has to show the value, exactly as it was."""
    text = Path("made").read_text()
    words = done.get("srun") or done.get("mpiexec") or done.get("launch")
    env = done.get("srun.env") or done.get("mpiexec.env") or done.get("launch.env")
    return {
        "config": lambda: f"--config={value}" in words,
        "master_addr": lambda: env["MASTER_ADDR"] == value,
        "modules": lambda: done["module"][-1] == value,
        "conda_env": lambda: done["activate"] == [value],
        "env": lambda: env.get(value.partition("=")[0]) == value.partition("=")[2],
        "output": lambda: True,
    }.get(name, lambda: re.search(rf"(?m)^#.*[= ]{re.escape(value)}([,:].*)?$", text))()


@pytest.mark.parametrize(("command", "name"), STRINGS, ids=str)
def test_no_hostile_value_executes_and_each_is_carried_or_refused(command, name, start, here):
    took = []
    for value in HOSTILE:
        if (done := attack(command, name, value, start)) is not None:
            took.append(value)
            if name != "output" and command not in ("deepspeed", "fsdp"):
                assert carried(name, value, done), value
    assert not list(here.parent.rglob("PWN?"))
    # a file may have any name without a line break, all else is plain
    plenty = [value for value in HOSTILE if len(value) < 200 and value not in ("~", HOSTILE[6])]
    wanted = {"config": plenty, "output": plenty}.get(name, [])
    assert took == wanted
    scripts = [v for v in took if name == "output" and command not in ("deepspeed", "fsdp")]
    for script in scripts:
        subprocess.run(["bash", "-n", os.path.join(".", script)], check=True)


def test_no_letter_that_means_something_to_a_shell_is_in_a_directive():
    for letter in {*string.punctuation, " "} - {*"_.,:/=%@+-"}:
        for flag in ("partition", "account", "job_name", "modules", "conda_env"):
            assert f"--{flag}: 'a" in refused("slurm", f"--{flag}=a{letter}b").replace('"', "'")


@pytest.mark.parametrize("command", ["slurm", "pbs"])
def test_the_value_of_a_variable_may_be_anything(command, start, here):
    for value in HOSTILE:
        if attack(command, "env", f"MINE={value}", start) is None:
            assert "\n" in value
            continue
        done = start("./made")
        env = done.get("srun.env") or done["mpiexec.env"]
        assert env["MINE"] == value
        named = attack(command, "env", f"{value}=1", start)
        assert (named is None) == (not value.isidentifier())
    assert not list(here.parent.rglob("PWN?"))


def test_what_is_swallowed_is_not_written_into_the_script(start, here):
    """--local-rank is read and forgotten, but the command stands in a comment."""
    make("slurm --modules --conda_env=", "--local-rank=x\ntouch PWN6 #")
    start("scripts/slurm_job.sh")
    assert not list(here.parent.rglob("PWN?"))


def test_a_folder_and_a_project_of_any_name_are_quoted(start, monkeypatch, tmp_path):
    for value in (*HOSTILE[:6], HOSTILE[9], HOSTILE[10]):
        folder = tmp_path / value.replace("/", "_")
        (folder / "scripts").mkdir(parents=True)
        (folder / "scripts/environment.sh").write_bytes(
            (ROOT / "scripts/environment.sh").read_bytes()
        )
        monkeypatch.chdir(folder)
        monkeypatch.setattr(setup.jsonl, "ROOT", folder)
        Path("config.yaml").write_text(YAML)
        make("slurm")
        done = start("scripts/slurm_job.sh")
        assert done["srun.env"]["PWD"] == str(folder)
        assert done["srun"][3] == str(folder / "src/train.py")
    assert not list(tmp_path.rglob("PWN?"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("deepspeed --bf16 --fp16", "--fp16: --bf16 is given too; give one of them"),
        ("deepspeed --offload_param", "--offload_param: only with --zero_stage 3"),
        ("deepspeed --concrete", "--concrete: no settings to take numbers from; give --config"),
        ("deepspeed --fp16 --config config.yaml", "--fp16: config.yaml says mixed_precision 'bf"),
        ("launcher --use_deepspeed --use_fsdp", "--use_fsdp: --use_deepspeed is given too"),
        ("launcher --use_fsdp", "--use_fsdp: config.yaml does not say so; write use_fsdp: true"),
        ("launcher --node_rank 1", "--node_rank: 1 of 1 nodes; give 0 to 0"),
        ("launcher --num_nodes 2", "--master_addr: several nodes need a place to meet; give"),
        ("slurm --mem_per_gpu 32GB", "--mem_per_gpu: '32GB' is no size of memory; give 32G"),
        ("slurm --env A", "--env: 'A' is not NAME=VALUE; give e.g. NCCL_DEBUG=WARN"),
        ("slurm --env A=1 --env B=2", "--env: given twice; write all values behind one"),
        ("slurm --env WANDB_API_KEY=abc", "--env: WANDB_API_KEY looks like a secret"),
        ("slurm --env A=hf_abcdefghijklmnopqrstuvwxyz", "--env: A looks like a secret"),
        ("slurm --partition 'a b'", "--partition: 'a b' cannot stand in a job script; use letters"),
        ("fsdp --output config.yaml", "--output: config.yaml holds what this program did not"),
    ],
)
def test_refused_with_one_line_and_nothing_written(line, says):
    assert refused(line).startswith(says)


@pytest.mark.parametrize("command", ["slurm", "pbs"])
def test_a_malformed_time_limit_is_refused(command):
    for limit in ("", "x", "1:2:3:4", "1-", "48h", "１", "00:00:59", "100000:0"):
        message = refused(command, f"--time_limit={limit}")
        assert message.startswith(f"--time_limit: {limit!r} is not") and "h:m:s" in message


TWICE = "training: {gradient_accumulation_steps: 1}\ndistributed: {gradient_accumulation_steps: 2}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("training: {use_fsdp: 1", "c.yaml:1: "),
        ("a: !!python/object/apply:os.mkdir [PWN]", "c.yaml:1: "),
        ("distributed: {use_fsdp: true}", "--use_deepspeed: c.yaml says use_fsdp: true"),
        (TWICE, "c.yaml: training.gradient_accumulation_steps is 1 and distributed.gradient_accum"),
        ("training: {micro_batch_size: 0}", "c.yaml: micro_batch_size is 0; give a whole number"),
    ],
    ids=lambda text: text[:20],
)
def test_a_yaml_file_that_cannot_be_is_refused(text, says):
    make("deepspeed")
    Path("c.yaml").write_text(text)
    assert refused("launcher --use_deepspeed --config c.yaml").startswith(says)
    assert not Path("PWN").exists()


NUMBERS = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"train_batch_size": 1024}, None),  # 2 nodes x 8 GPUs x 4 x 16
        ({"train_batch_size": 512}, "train_batch_size 512, but 2 nodes x 8 GPUs x micro_batch"),
        ({"train_micro_batch_size_per_gpu": 2}, "micro_batch_size 4, ds.json train_micro"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps 16, ds.json gradient_a"),
        ({"train_batch_size": 0}, "ds.json: train_batch_size is 0; give a whole number above 0"),
    ],
)
@pytest.mark.parametrize("command", ["launcher --master_addr n1", "slurm", "pbs"])
def test_batch_numbers_must_multiply(change, says, command):
    """Complaint 25: before anything is written."""
    Path("config.yaml").write_text(YAML + "  deepspeed_config: ds.json\n")
    Path("ds.json").write_text(json.dumps({**NUMBERS, **change}))
    line = f"{command} --num_nodes 2 --num_gpus_per_node 8 --use_deepspeed --output made"
    if says:
        assert says in refused(line)
    else:
        assert "--deepspeed=ds.json" in made(line)


def test_folders_are_made_and_a_bare_name_needs_none(capsys):
    make("deepspeed --output ds.json")
    make("fsdp --output a/b/c.json")
    make("slurm --output a/d/job.sh")
    assert {"ds.json", "a/b/c.json", "a/d/job.sh"} <= files().keys()
    assert capsys.readouterr().out.splitlines()[-1] == "wrote a/d/job.sh; next: sbatch a/d/job.sh"
    assert os.access("a/d/job.sh", os.X_OK) and not os.access("ds.json", os.X_OK)


def test_own_files_are_written_anew_and_those_of_others_only_by_force():
    for line in ("slurm --output job", "pbs --output job", "launcher --output job"):
        make(line)  # each is ours
    for line in ("deepspeed --output j.json", "fsdp --output j.json"):
        make(line)
    Path("job").write_text("#!/bin/bash\necho mine\n")
    assert "--force" in refused("slurm --output job")
    assert "--force" in refused("fsdp --output job")
    make("slurm --output job --force")
    assert "srun" in Path("job").read_text()
    Path("empty").touch()
    make("slurm --output empty")


@pytest.mark.parametrize("fails", ["write_bytes", "chmod", "replace"])
def test_a_file_is_whole_or_as_it_was(monkeypatch, fails):
    make("slurm")
    before = files()

    def broken(*_args, **_more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(os if fails == "replace" else Path, fails, broken)
        make("slurm --account other")
    assert caught.value.exit_code == 4  # could not write
    assert files() == before


def test_the_program_itself_ends_with_2_and_one_line(here):
    """The process: imports, also through a link, exit status, stderr."""
    (here / "scripts").mkdir()
    (here / "scripts/distributed_setup.py").symlink_to(setup.__file__)
    line = GUIDE.strip().split("\n")[0]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the guide's "python" is this one
    words, env = ["bash", "-c", f"{line} --fp16"], {**os.environ, "PATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    wanted = (2, "", "error: --fp16: --bf16 is given too; give one of them\n")
    assert (done.returncode, done.stdout, done.stderr) == wanted
    assert not Path("config").exists()


def test_every_command_of_the_guide_does_as_it_says():
    for line in GUIDE.strip().split("\n"):
        python, script, *words = shlex.split(line)
        assert (python, script) == ("python", "scripts/distributed_setup.py")
        assert setup.main(words) == 0
    names = "config/ds_config.json config/fsdp_config.json scripts/run_training.sh"
    names += " scripts/run_training_node0.sh scripts/run_training_node1.sh scripts/slurm_job.sh"
    assert sorted(files()) == sorted(["config.yaml", *names.split()])
    text = Path("config/ds_config.json").read_text()
    assert json.loads(text) == DEEPSPEED and list(json.loads(text)) == list(DEEPSPEED)
    assert '"reduce_bucket_size": 500000000,' in text  # an integer, not 500000000.0 or 5e8
    assert json.loads(Path("config/fsdp_config.json").read_text()) == FSDP
