"""scripts/distributed_setup.py: its files, its errors, and what bash does with its scripts.

Expected files are guide 2's and those in tests/golden/scripts, read by a person when they change;
tests/runs/test_clusters.py runs them. Here hostile values meet stand-ins for srun, python and the
like, which record their arguments and environment.
"""

import importlib.util
import json
import os
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import pytest

from conftest import LIMIT, ROOT
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
GUIDE = """
python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16 --output config/ds_config.json
python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4 --use_deepspeed
python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD --mixed_precision BFLOAT16 --output config/fsdp_config.json
python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4
python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --use_deepspeed --time_limit 48:00:00
python scripts/distributed_setup.py launcher --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --master_addr 192.168.1.100 --master_port 29500 --node_rank 0 --use_deepspeed
python scripts/distributed_setup.py launcher --config config.yaml --num_nodes 4 --num_gpus_per_node 8 --master_addr 192.168.1.100 --master_port 29500 --node_rank 1 --use_deepspeed
"""  # noqa: E501
JOB = "--time_limit 36:00:00 --partition long --account me --job_name a.b --cpus_per_task 3 "
JOB += "--mem_per_gpu 500M --num_nodes 2 --num_gpus_per_node 6"
GOLDEN = {  # complete; the text of each is tests/golden/scripts/NAME
    "zero1.json": "deepspeed --zero_stage 1",
    "zero3.json": "deepspeed --zero_stage 3 --offload_optimizer --offload_param --fp16",
    "fsdp.json": "fsdp --sharding_strategy HYBRID_SHARD --mixed_precision NO",
    "port.sh": "launcher --master_port 1234 --use_deepspeed",
    "one.sh": "launcher --config config.yaml --num_gpus_per_node 4",
    "node.sh": "launcher --num_nodes 2 --master_addr ::1 --node_rank 1 --use_deepspeed",
    "slurm_guide.sh": GUIDE.split("\n")[5].partition(" scripts/distributed_setup.py ")[2],
    "slurm_fsdp.sh": "slurm --config fsdp.yaml --account a",
    "slurm.sh": f"slurm {JOB} --modules= --conda_env= --use_deepspeed",
    "pbs.sh": "pbs --account mine",
    "pbs_other.sh": f"pbs {JOB} --system= --filesystems=eagle --modules 'a b' --conda_env c",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the guide's settings is the current one."""
    folder = tmp_path / "it's my folder"
    (folder / "config").mkdir(parents=True)
    (folder / "config.yaml").write_text(YAML)
    (folder / "fsdp.yaml").write_text(YAML + "  use_fsdp: true\n")
    settings = ROOT / "tests/data/guide_deepspeed.json"
    (folder / "config/ds_config.json").write_text(settings.read_text())
    monkeypatch.chdir(folder)
    return folder


def make(line, *more):
    """Run the program on a line of flags, as a shell would split it."""
    assert setup.main([*shlex.split(line), *more]) == 0


def files():
    """Every file and folder below the current one, and the content of each file."""
    return {str(p): p.read_bytes() if p.is_file() else "" for p in Path(".").rglob("*")}


def error_of(line, *more, status=2):
    """The one line of the error for these flags, after a check that nothing was written."""
    before = files()
    with pytest.raises(UserError) as caught:
        make(line, *more)
    assert caught.value.exit_code == status
    assert files() == before
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_every_command_of_the_guide_writes_its_file():
    before = set(files())
    for line in GUIDE.strip().split("\n"):
        python, script, *words = shlex.split(line)
        assert (python, script) == ("python", "scripts/distributed_setup.py")
        assert setup.main(words) == 0
    names = "config/fsdp_config.json scripts scripts/run_training.sh scripts/slurm_job.sh"
    names += " scripts/run_training_node0.sh scripts/run_training_node1.sh"
    assert set(files()) - before == set(names.split())
    page = (ROOT / "docs/strategies.md").read_text()
    for name, guide in (("ds", "deepspeed"), ("fsdp", "fsdp")):
        text = Path(f"config/{name}_config.json").read_text()
        assert f"```json\n{text}```\n" in page
        expected = json.loads((ROOT / f"tests/data/guide_{guide}.json").read_text())
        assert json.loads(text) == expected and list(json.loads(text)) == list(expected)
        assert "000000.0" not in text and "e+" not in text  # 5e8 as an integer


SETTINGS = {  # programs that only read settings -> their error
    "scripts/distributed_setup.py slrm": "COMMAND: 'slrm' is unknown",
    "src/train.py --use_fsdp --fsdp_config {}/fsdp.json": "{}/fsdp.json:1: fsdp_shard is not a",
    "src/main_distributed.py --strategy deepspeed --sharding_config {}/ds.json": "{}/ds.json:1: ",
}


@pytest.mark.parametrize("words", SETTINGS)
def test_settings_are_read_without_torch(words, tmp_path):
    """It takes seconds to import; errors have the same form and status without it."""
    (tmp_path / "fsdp.json").write_text('{"fsdp_shard": true}')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 4}}')
    program, *flags = words.format(tmp_path).split()
    command = [sys.executable, "-X", "importtime", str(ROOT / program), *flags]
    env = os.environ | {"CHECK_FLAGS_ONLY": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time")}
    assert "ddp_utils.cli" in imported and "torch" not in imported
    (error,) = [line for line in lines if not line.startswith("import time")]
    assert error.startswith(f"error: {SETTINGS[words].format(tmp_path)}"), error
    assert done.returncode == 2


def test_the_files_are_golden_and_pass_bash_and_shellcheck(here):
    """RENEW=1 writes them, to be read in the difference that git shows."""
    checker = Path(sys.executable).with_name("shellcheck")
    for name, line in GOLDEN.items():
        make(line, f"--output={name}")
        if name.endswith(".sh"):
            done = subprocess.run([checker, name], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
            subprocess.run(["bash", "-n", name], check=True)
        text = Path(name).read_text()
        for place, sign in ((str(here), "HERE"), (str(ROOT), "PROJECT")):
            text = text.replace(shlex.quote(place), sign).replace(place, sign)
        golden = ROOT / "tests/golden/scripts" / name
        if "RENEW" in os.environ:
            golden.write_text(text)
        assert text == golden.read_text(), name


def test_a_job_is_asked_to_stop_five_minutes_before_its_end_or_in_the_middle():
    for limit, signal in (("48:00:00", 300), ("0:12:00", 300), ("00:01:00", 30)):
        make("slurm --output=job", f"--time_limit={limit}")
        assert f"#SBATCH --signal=USR1@{signal}\n" in Path("job").read_text()
        make("pbs --output=job", f"--time_limit={limit}")
        assert f"#PBS -l walltime={limit}\n" in Path("job").read_text()
    for limit in ("", "x", "90", "1:2:3:4", "48h", "１:00:00", "0:00:59"):
        message = f"--time_limit: {limit!r} is not hours:minutes:seconds of at least one minute"
        assert error_of("slurm", f"--time_limit={limit}") == message


# --- hostile values -------------------------------------------------------------------------------

STANDINS = {
    **dict.fromkeys(
        ("srun", "mpiexec", "python"),
        """#!/bin/bash\nprintf '%s\\0' "$PWD" "$@" >>"$RECORD/$(basename "$0")"\n""",
    ),
    "scontrol": "printf 'n1\\nn2\\n'",
    "activate": "",
}


@pytest.fixture
def start(tmp_path):
    """A function that runs a script and returns folder and arguments of what that started."""
    bin_, record = tmp_path / "bin", tmp_path / "record"
    bin_.mkdir()
    for name, text in STANDINS.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn2\n")
    clean = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path), "RECORD": str(record)}
    clean["BASH_FUNC_module%%"] = "() { :; }"
    clean |= {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2"}
    clean |= {"PBS_JOBID": "8123456.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    clean["PBS_O_WORKDIR"] = str(tmp_path)

    def run(script):
        record.mkdir(exist_ok=True)
        for path in record.iterdir():
            path.unlink()
        command = ["bash", os.path.abspath(script)]  # from anywhere
        done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("srun", "mpiexec", "python"):
            if (record / name).exists():
                return os.fsdecode((record / name).read_bytes()).split("\0")[:-1]

    return run


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
# a file may have any name without a line break, everything else must be plain
NAMES = [value for value in HOSTILE if len(value) < 200 and value not in ("~", HOSTILE[6])]


def attack(command, flag, value, start):
    """What a script with this value starts, or None if the value is an error."""
    if flag == "--config" and value in NAMES:
        Path(value).parent.mkdir(parents=True, exist_ok=True)
        Path(value).write_bytes(setup.HEADER + YAML.encode())  # --output can use the name again
    words = [command, f"{flag}={value}"]
    words += [] if flag == "--output" else ["--output=made"]
    words += ["--num_nodes=2"] if flag == "--master_addr" else []
    before = set(os.listdir())
    try:
        assert setup.main(words) == 0
    except UserError as error:
        assert "\n" not in str(error) and set(os.listdir()) == before
        return None
    path = value if flag == "--output" else "made"
    if command in ("deepspeed", "fsdp"):
        result = json.loads(Path(path).read_bytes())
    else:
        result = start(os.path.join(".", path))
    Path(path).unlink()
    return result


def test_no_hostile_value_executes_and_each_is_quoted_or_an_error(
    start, here, tmp_path, monkeypatch
):
    monkeypatch.setattr(setup, "check_flags", lambda *_: None)  # it would refuse them
    attacked = 0
    quoted = [value for value in HOSTILE if value not in ("it's", HOSTILE[6])]
    safe = {"config": NAMES, "output": NAMES, "modules": HOSTILE[:1], "flags": quoted}
    for command, (flags, *_) in setup.COMMANDS.items():
        for name in [name for name, hint in get_type_hints(flags).items() if hint is str]:
            attacked += 1
            results = {value: attack(command, f"--{name}", value, start) for value in HOSTILE}
            accepted = [value for value, result in results.items() if result]
            assert accepted == safe.get(name, []), (command, name)
            if name == "config":
                assert all(f"--config={value}" in results[value] for value in accepted)
    assert attacked == 31  # every flag that is a text
    for value in (*HOSTILE[:6], "*", "Grüße 蛋白"):  # a folder and a project of any name
        folder = tmp_path / value.replace("/", "_")
        (folder / "scripts").mkdir(parents=True)
        (folder / "src").mkdir()
        (folder / "src/train.py").touch()
        script = folder / "scripts/environment.sh"
        script.write_bytes((ROOT / "scripts/environment.sh").read_bytes())
        monkeypatch.chdir(folder)
        monkeypatch.setattr(setup.data, "ROOT", folder)
        Path("config.yaml").write_text(YAML)
        make("slurm")
        words = start("scripts/slurm_job.sh")
        assert words[0] == str(folder) and str(folder / "src/train.py") in words
    assert not list(tmp_path.rglob("PWN?"))


def test_a_config_that_is_given_is_used_whatever_it_is_called():
    """Without one, only src/train.py has a default file. A script in the top folder is a file."""
    Path("config.yaml").write_text("beta: 0.3\n")
    for given, expected in (("", ""), (" --config config.yaml", " --config=config.yaml")):
        make(f"slurm --script src/main_distributed.py{given} --output job.sh")
        command = f'python "$project/src/main_distributed.py"{expected} "$@"'
        assert command in Path("job.sh").read_text()
    make("slurm --script check_gpu.py --output job.sh")
    assert 'python "$project/check_gpu.py" "$@"' in Path("job.sh").read_text()


def test_no_character_that_a_shell_interprets_is_in_a_directive(monkeypatch):
    monkeypatch.setattr(setup, "check_flags", lambda *_: None)  # it starts the script: 0.4 s
    for character in {*string.punctuation} - {*"_.,:/=%@+-"}:
        for flag in ("partition", "account", "job_name", "modules", "conda_env"):
            message = error_of("slurm", f"--{flag}=a{character}b")
            assert f"--{flag}: 'a" in message.replace('"', "'")


# --- errors and files -----------------------------------------------------------------------------

ERRORS = {
    "deepspeed --zero_stage 4": "--zero_stage: 4 is out of range (expected 0, 1, 2 or 3)",
    "deepspeed --bf16 --fp16": "--fp16: use only one of --bf16 and --fp16",
    "deepspeed --offload_param": "--offload_param: needs --zero_stage 3",
    "deepspeed --zero_stage 0 --offload_optimizer": "--offload_optimizer: needs --zero_stage >= 1",
    "launcher --use_deepspeed --config fsdp.yaml": "fsdp.yaml:8: distributed.use_fsdp: --deep",
    "launcher --node_rank 1": "--node_rank: 1 is out of range (expected 0 to 0)",
    "launcher --num_nodes 2": "--master_addr: required for several nodes",
    "launcher --master_port 65536": "--master_port: 65536 is out of range",
    "launcher --num_gpus_per_node 0": "--num_gpus_per_node: 0 is out of range",
    'launcher --flags "it\'s"': "--flags: No closing quotation; quote it as in a shell",
    "slurm --script src/ad/train.py --use_deepspeed": "--use_deepspeed: not available for src/ad",
    "slurm --script train.py": "--script: 'train.py': no such file (expected a file in the pro",
    "slurm --script /etc/x.py": "--script: '/etc/x.py': no such file (expected a file in the proje",
    "slurm --script nowhere": "--script: 'nowhere': no such file (expected a file in the project",
    "slurm --script 'a b.py'": "--script: 'a b.py' must consist of letters, digits and ",
    "slurm --script src/main_distributed.py --flags='--bta 3'": "--flags: --bta is not a setting;",
    "pbs --script dpo_inv.run_dpo_ddp --flags='--beta 0'": "--flags: --beta: 0.0 is out of range",
    "slurm --config nowhere.yaml": "nowhere.yaml: no such file",
    "slurm --mem_per_gpu 32GB": "--mem_per_gpu: '32GB' is not a size (expected 32G)",
    "slurm --partition 'a b'": "--partition: 'a b' must consist of letters, digits and ",
    "pbs --system ''": "--partition: capacity is Aurora's; with --system '', use your own, or ''",
    "pbs --system polaris --partition prod": "--filesystems: home:flare is Aurora's; with --system",
    "pbs --system '' --partition a --filesystems ''": "--modules: frameworks is Aurora's; with",
    "pbs --system '' --partition a --filesystems '' --modules ''": "--num_gpus_per_node: 12 is Au",
    "slurm --time_limit 00:10:00 --lead 600": "--lead: 600 is out of range (expected >= 0 and ",
    "slurm --lead 70000": "--lead: 70000 is out of range (expected <= 65535, which sbatch allows)",
    "slurm --lead -1": "--lead: -1 is out of range (expected >= 0 and below the time limit, 17",
    "pbs --filesystems 'a b'": "--filesystems: 'a b' must consist of letters, digits and ",
    "fsdp --output config.yaml": "--output: config.yaml was not written by this program",
    "fsdp --output config": "--output: config: Is a directory; use another name",
}


def test_an_error_is_one_line_and_nothing_is_written():
    for line, message in ERRORS.items():
        assert error_of(line).startswith(message), line


def test_the_lead_is_that_of_the_flag_or_half_of_a_short_limit():
    """In the signal of Slurm, and in the minutes after which a run under PBS saves."""
    for flags, lead in (("", 300), ("--lead 900", 900), ("--time_limit 00:08:00", 240)):
        make(f"slurm --output job {flags}")
        assert f"#SBATCH --signal=USR1@{lead}\n" in Path("job").read_text()
    for flags, minutes in (("", 2875), ("--lead 900", 2865), ("--time_limit 00:08:00", 4)):
        make(f"pbs --output job {flags}")
        assert f"--stop_after_minutes={minutes}" in Path("job").read_text()
    assert "\nexport DDP_JOB_END=$(($(date +%s) + 480))\n" in Path("job").read_text()


def test_another_system_than_aurora_may_have_its_nodes():
    make("pbs --output job --system sunspot --partition workq --filesystems ''")
    text = Path("job").read_text()
    assert "#PBS -l select=4:system=sunspot,place=scatter\n#PBS -l walltime" in text
    assert "#PBS -q workq\n" in text and "-ppn 12 " in text


@pytest.mark.parametrize("is_installed", [True, False])
def test_it_says_if_deepspeed_is_missing(is_installed, monkeypatch, capsys):
    found = object() if is_installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    line = "warning: DeepSpeed is not installed here; on the machine of the run: pip install"
    for command in ("deepspeed", "launcher --use_deepspeed", "slurm --use_deepspeed"):
        make(f"{command} --output j --force")
        out = capsys.readouterr().out
        assert out.startswith(line) == (not is_installed)
        assert "wrote j" in out
    make("launcher --output j --force")
    assert "DeepSpeed" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["slurm", "pbs", "launcher"])
@pytest.mark.parametrize(
    ("script", "program"),
    [
        ("src/main_distributed.py", '"$project/src/main_distributed.py"'),
        ("dpo_inv.run_dpo_ddp", "-m dpo_inv.run_dpo_ddp"),
    ],
)
def test_any_script_can_be_started_with_its_flags(command, script, program):
    words = ["--output=job", "--flags=--beta 1 --train_data='a b'"]
    make(f"{command} --script {script}", *words)
    limit = "--stop_after_minutes=2875 " * (command == "pbs")
    assert f"{program} {limit}--beta 1 '--train_data=a b'" in Path("job").read_text()


def test_own_files_are_overwritten_and_those_of_others_only_with_force(capsys):
    for line in ("slurm --output a/job", "pbs --output a/job", "launcher --output a/job"):
        make(line)  # each is ours
    assert capsys.readouterr().out.splitlines()[-1] == "wrote a/job; next: bash a/job"
    for line in ("deepspeed --output j.json", "fsdp --output j.json"):
        make(line)
    assert os.access("a/job", os.X_OK) and not os.access("j.json", os.X_OK)
    Path("job").write_text("#!/bin/bash\necho other\n")
    for line in ("slurm --output job", "fsdp --output job"):
        assert "--force" in error_of(line)
    make("slurm --output job --force")
    assert "srun" in Path("job").read_text()
    Path("empty").touch()
    make("slurm --output empty")


def test_data_of_the_user_are_not_settings_and_links_stay(capsys):
    Path("mine.jsonl").write_text('{"prompt": "q"}\n{"prompt": "r"}\n')
    Path("other.json").write_text('{"a": 1}')
    for name in ("mine.jsonl", "other.json"):
        with pytest.raises(UserError, match="was not written by this program; use another name"):
            setup.main(["deepspeed", "--output", name])
    with pytest.raises(UserError, match="--output: /dev/null is no regular file; use another"):
        setup.main(["fsdp", "--output", "/dev/null", "--force"])
    make("fsdp --output there.json")
    Path("link.json").symlink_to("there.json")
    make("fsdp --output link.json --mixed_precision NO")
    assert Path("link.json").is_symlink() and '"NO"' in Path("there.json").read_text()


def test_a_settings_file_is_that_of_any_script(monkeypatch):
    Path("dpo.yaml").write_text("beta: 0.3\n")
    make("launcher --script src/main_distributed.py --config dpo.yaml --output a.sh")
    assert '/src/main_distributed.py" --config=dpo.yaml' in Path("a.sh").read_text()
    with pytest.raises(UserError, match="--flags: nowhere.yaml: no such file"):
        setup.main(["slurm", "--script", "src/main_distributed.py", "--config", "nowhere.yaml"])
    project = Path("project").absolute()
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "src/train.py", project / "src/my_sft.py")
    monkeypatch.setattr(setup.data, "ROOT", project)
    make("launcher --script src/my_sft.py --use_deepspeed --output b.sh")
    words = "--config=config.yaml --deepspeed=config/ds_config.json"
    assert f'/src/my_sft.py" {words}' in Path("b.sh").read_text()
    for code, says in (
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)", "it "),
    ):
        (project / "src/mine.py").write_text(f"{code}  # cli.check_flags(read)")
        with pytest.raises(UserError, match=f"^--flags: {says}"):
            setup.main(["launcher", "--script", "src/mine.py"])


def test_a_limit_of_the_user_replaces_that_of_a_job():
    make("pbs --output a.sh --flags='--stop_after_minutes 10' --script src/main_distributed.py")
    line = Path("a.sh").read_text().splitlines()[-1]
    assert line.endswith(" --stop_after_minutes=2875 --stop_after_minutes 10")
    make("pbs --output b.sh --script dpo_inv.evaluate --flags='--data_path x --max_rows 2'")
    assert "--stop_after_minutes" not in Path("b.sh").read_text()


def test_a_file_is_complete_or_unchanged(monkeypatch):
    make("slurm")
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    for place, name in ((Path, "write_bytes"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            assert "No space left on device" in error_of("slurm --account other", status=4)
