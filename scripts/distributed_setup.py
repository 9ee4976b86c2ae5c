"""Write files for distributed training: settings of DeepSpeed or FSDP, and scripts that start it.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD
    python scripts/distributed_setup.py launcher --num_gpus_per_node 4 --use_deepspeed
    python scripts/distributed_setup.py slurm --num_nodes 4 --num_gpus_per_node 8
    python scripts/distributed_setup.py pbs --num_nodes 2 --account mine --time_limit 02:00:00
    python scripts/distributed_setup.py slurm --script src/main_distributed.py --flags="--beta 0.3"

All flags: `slurm --help`. Everything is checked before anything is written. The texts of the files
are in templates/, with places such as @num_nodes@; @project.sh.in@ includes that template. Exit
status: 0 written, 2 wrong input, 4 could not write.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # of this clone

import train_config
from ddp_utils import DISK_ERRORS, UserError, cli, data, user_error

HEADER = b"# Written by scripts/distributed_setup.py"  # other scripts are not overwritten
SETTINGS = ("zero_optimization", "fsdp_sharding_strategy")  # a key of each JSON file of ours
AURORA = "aurora"  # name of the system in PBS
# What a directive may contain: sbatch and qsub split it at blanks and line breaks, even in quotes.
PLAIN = re.compile(r"(?!-)[A-Za-z0-9_.,:/=%@+-]{1,200}")

# --- the flags of each command -------------------------------------------------------------------


@dataclass
class Common:
    # the file
    output: str = ""  # file to write; empty: the guide's name
    force: bool = False  # overwrite a file that this program did not write
    debug: bool = False  # tracebacks for user errors, too


@dataclass
class DeepSpeed(Common):
    """Settings of DeepSpeed: config/ds_config.json, for `src/train.py --deepspeed`."""

    # content of the file
    zero_stage: int = 2  # shards 1: optimizer states, 2: gradients too, 3: all; 0: none
    offload_optimizer: bool = False  # keep optimizer states in host memory
    offload_param: bool = False  # keep parameters in host memory, with stage 3
    bf16: bool = False  # without --bf16 and --fp16: mixed_precision of the YAML file
    fp16: bool = False  # for GPUs without bf16; the loss scale is dynamic


Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass
class Fsdp(Common):
    """Settings of FSDP: config/fsdp_config.json, for distributed.fsdp_config in the YAML file."""

    # content of the file
    sharding_strategy: Sharding = "FULL_SHARD"  # see docs/strategies.md
    mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO"] = "BFLOAT16"  # in forward and backward


@dataclass
class Run(Common):
    # the program
    script: str = "src/train.py"  # file in this project, also a copy; or dpo_inv.run_dpo_ddp
    config: str = ""  # YAML file of the script; empty: none, for src/train.py config.yaml
    flags: str = ""  # more flags of the script: --flags="--seed 1 --beta 0.3"
    num_nodes: int = 1  # machines
    num_gpus_per_node: int = 4  # processes per node, one per GPU
    use_deepspeed: bool = False  # src/train.py: deepspeed_config of the YAML, or the default file


@dataclass
class Launcher(Run):
    """A script that starts the processes of one node: scripts/run_training.sh."""

    # several nodes
    master_addr: str = ""  # host of node 0, required for several nodes
    master_port: int = 0  # of node 0; 0: 29500 on several nodes, a free one on one node
    node_rank: int = 0  # which node the script is for, from 0


@dataclass
class Slurm(Run):
    """A job for sbatch: scripts/slurm_job.sh."""

    num_nodes: int = 4  # machines
    num_gpus_per_node: int = 8  # processes per node, one per GPU
    # the queue
    time_limit: str = "48:00:00"  # hours:minutes:seconds
    partition: str = "gpu"  # queue; empty: the default one
    account: str = ""  # project that is charged
    job_name: str = "llm_finetune"  # name in the queue
    cpus_per_task: int = 8  # cores per process
    mem_per_gpu: str = "32G"  # host memory per process
    lead: int = 0  # seconds before time_limit when the run saves; 0: 300, or half of a short limit
    # its environment
    modules: str = "cuda/12.2 anaconda3"  # for `module load`; empty: none
    conda_env: str = "llm_finetuning"  # to activate; empty: the active environment


@dataclass
class Pbs(Slurm):
    """A job for qsub, by default on Aurora: scripts/pbs_job.sh. Its mpiexec is PALS or MPICH."""

    num_gpus_per_node: int = 12  # processes per node, one per GPU or tile
    partition: str = "capacity"  # queue; empty: the default one
    cpus_per_task: int = 4  # cores per process
    modules: str = "frameworks"  # for `module load`; empty: none
    conda_env: str = ""  # to activate; empty: the active environment
    # only PBS
    system: str = AURORA  # complete nodes of this system; empty: request cores, GPUs and memory
    filesystems: str = "home:flare"  # required by the job; empty: not requested


# --- settings of DeepSpeed and FSDP ---------------------------------------------------------------


def require(condition: object, message: str) -> None:
    """Raise a UserError unless the condition is true."""
    if not condition:
        raise UserError(message)


def template(name: str) -> str:
    """Return the text of a file in templates/."""
    return Path(__file__).with_name("templates").joinpath(name).read_text("utf-8")


def deepspeed(options: DeepSpeed) -> str:
    """Return the guide's JSON without the parts that the flags do not select.

    Stage 3 allocates its bucket at once: 2 GB with the guide's size, whatever the model's.
    """
    stage = options.zero_stage
    note_missing_deepspeed()
    require(stage in range(4), f"--zero_stage: {stage} is out of range (expected 0, 1, 2 or 3)")
    require(not (options.bf16 and options.fp16), "--fp16: use only one of --bf16 and --fp16")
    require(stage == 3 or not options.offload_param, "--offload_param: needs --zero_stage 3")
    require(stage or not options.offload_optimizer, "--offload_optimizer: needs --zero_stage >= 1")
    settings = json.loads(template("deepspeed.json"))
    for kind, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if getattr(options, kind):
            settings[kind]["enabled"] = True
            del settings[other]
    zero = settings["zero_optimization"]
    zero["stage"] = stage
    if stage == 3:
        zero |= {"reduce_bucket_size": "auto", "allgather_bucket_size": "auto"}
    for key in list(zero):
        is_disabled = key.startswith("offload_") and not getattr(options, key)
        if is_disabled or (key.startswith("stage3_") and stage != 3):
            del zero[key]
    return json.dumps(settings, indent=2) + "\n"


def fsdp(options: Fsdp) -> str:
    """Return the guide's JSON with the selected strategy and precision."""
    settings = json.loads(template("fsdp.json"))
    settings["fsdp_sharding_strategy"] = options.sharding_strategy
    settings["fsdp_mixed_precision"] = options.mixed_precision
    return json.dumps(settings, indent=2) + "\n"


# --- scripts that start training ------------------------------------------------------------------


def launcher(options: Launcher) -> str:
    """Return the script of one node."""
    cli.check_ranges(options, master_port=(">= 0 and <= 65535", lambda x: 0 <= x <= 65535))
    check_plain(options, "master_addr")
    command = command_of(options)
    nodes, rank = options.num_nodes, options.node_rank
    require(0 <= rank < nodes, f"--node_rank: {rank} is out of range (expected 0 to {nodes - 1})")
    address = options.master_addr or nodes == 1
    require(address, "--master_addr: required for several nodes: the host of node 0")
    name = f"run_training_node{rank}.sh" if nodes > 1 else "run_training.sh"
    options.output = options.output or str(data.output_path(f"scripts/{name}"))
    return filled("launcher.sh.in", options, command=command, port=str(options.master_port or ""))


def slurm(options: Slurm) -> str:
    """Return the job script for sbatch."""
    command = command_of(options)
    cli.check_ranges(options, lead=("<= 65535, which sbatch allows", lambda x: x <= 65535))
    bash = "/bin/bash -l" if options.modules else "/bin/bash"  # -l: a login shell has `module`
    return filled("slurm.sh.in", options, command=command, bash=bash, **job(options, "nccl"))


def pbs(options: Pbs) -> str:
    """Return the job script for qsub."""
    check_plain(options, "system", "filesystems")
    if options.system != AURORA:  # with its queue, the job would never start
        names = ["partition", "filesystems"]
        if not options.system:  # another system of Intel GPUs may have the module
            names.append("modules")
        for name in names:
            is_own = getattr(options, name) != getattr(Pbs, name)
            place = f"--{name}: {getattr(Pbs, name)} is Aurora's"
            require(is_own, f"{place}; with --system {options.system!r}, use your own, or ''")
        is_own = options.system or options.num_gpus_per_node != Pbs.num_gpus_per_node
        fix = "set the number of GPUs of a node (for 12 of them, use --system NAME)"
        require(is_own, f"--num_gpus_per_node: 12 is Aurora's; with --system '', {fix}")
    places = job(options, "oneccl" if options.system == AURORA else "nccl")
    minutes = (seconds(options.time_limit) - int(places["lead"])) / 60
    command = command_of(options, f"--stop_after_minutes={minutes:g}")
    places["limit"] = str(seconds(options.time_limit))
    gpus = options.num_gpus_per_node
    memory = f"{gpus * int(options.mem_per_gpu[:-1])}{options.mem_per_gpu[-1].lower()}b"
    chunk = f"ncpus={gpus * options.cpus_per_task}:ngpus={gpus}:mpiprocs={gpus}:mem={memory}"
    if options.system:
        chunk = f"system={options.system}"
    return filled("pbs.sh.in", options, command=command, chunk=chunk, **places)


def job(options: Slurm, library: str) -> dict[str, str]:
    """Return what fills places of both kinds of jobs, after a check of the flags.

    library: template with the default settings of the communication library.
    """
    cli.check_ranges(options, cpus_per_task=cli.ABOVE_0)
    check_plain(options, "partition", "account", "job_name", "conda_env", "modules")
    is_size = re.fullmatch("[1-9][0-9]{0,6}[KMGT]", options.mem_per_gpu)
    require(is_size, f"--mem_per_gpu: {options.mem_per_gpu!r:.40} is not a size (expected 32G)")
    limit = seconds(options.time_limit)
    in_limit = f">= 0 and below the time limit, {limit}", lambda x: 0 <= x < limit
    cli.check_ranges(options, lead=in_limit)
    lead = options.lead or min(300, limit // 2)  # the job stops so long before its end
    return {"library": template(f"{library}.sh.in").rstrip(), "lead": str(lead)}


def filled(name: str, options: Run, **places: str) -> str:
    """Return a template with the values of the flags, which are quoted or match PLAIN.

    A line with an empty value is left out.
    """
    paths = {"path": options.output, "project": str(data.ROOT), "cwd": os.getcwd()}
    values = {key: shlex.quote(text) for key, text in paths.items()} | vars(options) | places
    text = re.sub(r"@(\w+[.]sh[.]in)@\n", lambda file: template(file[1]), template(name))
    lines = []
    for line in text.splitlines(keepends=True):
        if all(values[place] != "" for place in re.findall("@([a-z_]+)@", line)):
            lines.append(re.sub("@([a-z_]+)@", lambda place: str(values[place[1]]), line))
    return "".join(lines)


def command_of(options: Run, stop_flag: str = "") -> str:
    """Return the script and its flags, quoted; its settings must be valid.

    stop_flag: --stop_after_minutes of a job, for scripts that have this setting.
    """
    check_plain(options, "script")
    file = data.ROOT / "src" / (options.script.replace(".", "/") + ".py")
    if options.script.endswith(".py"):
        file = data.ROOT / options.script
    expected = "expected a file in the project such as src/train.py, or dpo_inv.run_dpo_ddp"
    problem = f"{options.script[:60]!r}: no such file ({expected})"
    require(file.is_file() and not options.script.startswith("/"), f"--script: {problem}")
    cli.check_ranges(options, num_nodes=cli.ABOVE_0, num_gpus_per_node=cli.ABOVE_0)
    flags = [f"--config={options.config}"] if options.config else []
    code = file.read_text("utf-8")
    if re.search("(?m)^import train_config", code):  # src/train.py, or a copy
        options.config = options.config or "config.yaml"
        flags = [f"--config={options.config}"]
        if options.use_deepspeed:
            note_missing_deepspeed()
            in_file, _ = cli.read_file(train_config.SECTIONS, options.config)
            named = in_file.get("deepspeed_config") or "config/ds_config.json"
            flags.append(f"--deepspeed={named}")
        train_config.read(flags)
    elif options.use_deepspeed:
        raise UserError(f"--use_deepspeed: not available for {options.script}")
    try:
        flags += shlex.split(options.flags)
    except ValueError as error:
        raise UserError(f"--flags: {error}; quote it as in a shell") from None
    if stop_flag and "cli.check_flags(" in code:
        try:
            check_flags(options.script, file, [stop_flag, *flags])
            flags = [stop_flag, *flags]  # the user's own flag counts
        except UserError as error:
            if "stop_after_minutes" not in str(error):
                raise
    check_flags(options.script, file, flags)
    is_file = options.script.endswith(".py")
    program = f'"$project/{options.script}"' if is_file else f"-m {options.script}"
    return f"{program} {shlex.join(flags)}".rstrip()


def note_missing_deepspeed() -> None:
    """Print a warning if DeepSpeed is not installed here; another machine may have it."""
    if importlib.util.find_spec("deepspeed") is None:
        fix = "pip install -r requirements-deepspeed.txt"
        print(f"warning: DeepSpeed is not installed here; on the machine of the run: {fix}")


def check_flags(script: str, file: Path, flags: list[str]) -> None:
    """Raise UserError unless a script accepts its flags; it reads them and does nothing else."""
    if "cli.check_flags(" not in file.read_text("utf-8"):
        return  # it could not be told to stop
    words = [str(file)] if script.endswith(".py") else ["-m", script]
    variables = [f"{cli.ONLY_FLAGS}=1", f"PYTHONPATH={data.ROOT / 'src'}"]
    command = ["env", *variables, sys.executable, *words, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ends with status {done.returncode}"]
        raise UserError(f"--flags: {lines[-1].removeprefix('error: ')}")  # the last of a traceback


def check_plain(options: Run, *names: str) -> None:
    """Raise UserError for a flag with other characters than PLAIN; modules are several words."""
    expected = "must consist of letters, digits and _.,:/=%@+- (- not first)"
    for name in names:
        value = getattr(options, name)
        words = value.split(" ") if name == "modules" else [value]
        is_plain = not value or all(PLAIN.fullmatch(word) for word in words)
        require(is_plain, f"--{name}: {value[:60]!r} {expected}")


def seconds(text: str) -> int:
    """Return the seconds in hours:minutes:seconds."""
    match = re.fullmatch("([0-9]{1,5}):([0-9]{2}):([0-9]{2})", text)
    hours, minutes, rest = map(int, match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + rest
    expected = "is not hours:minutes:seconds of at least one minute"
    require(total >= 60, f"--time_limit: {text[:40]!r} {expected}")
    return total


# --- main ----------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple] = {  # flags, function, the guide's file name, how to use the file
    "deepspeed": (
        DeepSpeed,
        deepspeed,
        "config/ds_config.json",
        "python src/train.py --deepspeed {}",
    ),
    "fsdp": (Fsdp, fsdp, "config/fsdp_config.json", "fsdp_config: {} in the YAML file"),
    "launcher": (Launcher, launcher, "", "bash {}"),
    "slurm": (Slurm, slurm, "scripts/slurm_job.sh", "sbatch {}"),
    "pbs": (Pbs, pbs, "scripts/pbs_job.sh", "qsub {}"),
}


def is_settings(content: bytes) -> bool:
    """Return whether the content of a file is settings of DeepSpeed or FSDP."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(content)
        return isinstance(values, dict) and not values.keys().isdisjoint(SETTINGS)
    return False


def write(path: str, text: str, force: bool) -> None:
    """Write a complete file; do not overwrite files of other programs, unless forced."""
    file, is_script = Path(path).expanduser(), text.startswith("#!")
    location = f"--output: {path[:80]}"
    try:
        if file.exists():
            require(file.is_file() or file.is_dir(), f"{location} is no regular file; use another")
            file = file.resolve()  # what a link leads to is written
        old = file.read_bytes().lstrip() if file.exists() and not force else b""
        is_ours = HEADER in old[:200] if is_script else is_settings(old)
        message = "was not written by this program; use another name, or --force"
        require(not old or is_ours, f"{location} {message}")
        with data.write_file(file) as temporary:
            temporary.write_bytes(os.fsencode(text))
        if is_script:  # whoever may read it may start it
            mode = file.stat().st_mode
            file.chmod(mode | (mode & 0o444) >> 2)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise user_error(error) from error  # status 4
        problem = data.broken_link(file) or error.strerror
        raise UserError(f"{location}: {problem}; use another name") from error


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command, *flags = words or [""]
    message = f"COMMAND: {command[:40]!r} is unknown; use one of {', '.join(COMMANDS)}"
    require(command in COMMANDS, message)
    config_class, make, name, use = COMMANDS[command]
    options = cli.parse(config_class, flags)
    options.output = options.output or (name and str(data.output_path(name)))
    text = make(options)
    write(options.output, text, options.force)
    print(f"wrote {options.output}; next: {use.format(shlex.quote(options.output))}")
    return 0


if __name__ == "__main__":
    cli.run(main)
