"""Scripts that start training: on one node, from Slurm, from PBS. Their texts are in templates/.

A template has places such as @num_nodes@; @environment.sh.in@ includes that template.
"""

import os
import re
import shlex
from dataclasses import dataclass
from typing import Literal

from setup_settings import Common, require, template

import train_config
from ddp_utils import UserError, cli, data, yaml_config
from ddp_utils.sharding import deepspeed

# What a directive may contain: sbatch and qsub split it at blanks and line breaks, even in quotes.
PLAIN = re.compile(r"(?!-)[A-Za-z0-9_.,:/=%@+-]{1,200}")


LanguageScript = Literal[
    "src/train.py", "src/main_distributed.py", "src/generate_data.py", "src/train_loop.py"
]
OtherScript = Literal["src/ad/train.py", "dpo_inv.run_dpo_ddp"]


@dataclass
class Run(Common):
    # the program
    script: Literal[LanguageScript, OtherScript] = "src/train.py"  # what is started
    config: str = "config.yaml"  # settings of src/train.py
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
    system: str = "aurora"  # complete nodes of this system; empty: request cores, GPUs and memory
    filesystems: str = "home:flare"  # required by the job; empty: not requested


# --- the scripts ---------------------------------------------------------------------------------


def launcher(options: Launcher) -> str:
    """Return the script of one node."""
    cli.check_ranges(options, master_port=(">= 0 and <= 65535", lambda x: 0 <= x <= 65535))
    nodes, rank = options.num_nodes, options.node_rank
    check_plain("master_addr", options.master_addr)
    command = command_of(options)
    require(0 <= rank < nodes, f"--node_rank: {rank} is out of range (expected 0 to {nodes - 1})")
    address = options.master_addr
    require(nodes == 1 or address, "--master_addr: required for several nodes: the host of node 0")
    port = f" MASTER_PORT={options.master_port}" if options.master_port else ""
    if nodes > 1:
        port = port or ' MASTER_PORT="${MASTER_PORT:-29500}"'
        port = f" MASTER_ADDR={shlex.quote(address)}{port}"
    name = f"run_training_node{rank}.sh" if nodes > 1 else "run_training.sh"
    options.output = options.output or f"scripts/{name}"
    return filled("launcher.sh.in", options, meeting=port, command=command)


def slurm(options: Slurm) -> str:
    """Return the job script for sbatch."""
    command = command_of(options)
    login = " -l" if options.modules else ""  # `module` is defined in a login shell
    return filled("slurm.sh.in", options, command=command, login=login, **job(options, "nccl"))


def pbs(options: Pbs) -> str:
    """Return the job script for qsub."""
    check_plain("system", options.system)
    check_plain("filesystems", options.filesystems)
    places = job(options, "oneccl" if options.system == "aurora" else "nccl")
    minutes = (seconds(options.time_limit) - int(places["lead"])) / 60
    command = f"{command_of(options)} --stop_after_minutes={minutes:g}"
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
    for name in ("partition", "account", "job_name", "conda_env"):
        check_plain(name, getattr(options, name))
    for word in options.modules.split(" "):
        check_plain("modules", word)
    is_size = re.fullmatch("[1-9][0-9]{0,6}[KMGT]", options.mem_per_gpu)
    require(is_size, f"--mem_per_gpu: {options.mem_per_gpu!r:.40} is not a size (expected 32G)")
    lines = [f"module load {name}" for name in options.modules.split()]
    if options.conda_env:
        lines += ["# shellcheck source=/dev/null", f"source activate {options.conda_env}"]
    if lines:
        lines = ["set +u # modules and conda read variables that are not set", *lines, "set -u"]
    lines.append("use_environment")
    lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{options.cpus_per_task}}}"')
    lines.append(template(f"{library}.sh.in").rstrip())
    lead = min(300, seconds(options.time_limit) // 2)  # the job stops so long before its end
    return {"environment": "\n".join(lines), "lead": str(lead)}


def filled(name: str, options: Run, **places: str) -> str:
    """Return a template with the values of the flags, which are quoted or match PLAIN.

    A directive with an empty value is left out.
    """
    quoted = {"path": options.output, "project": str(data.ROOT), "cwd": os.getcwd()}
    values = {key: shlex.quote(text) for key, text in quoted.items()} | vars(options) | places
    text = re.sub(r"@(\w+[.]sh[.]in)@\n", lambda file: template(file[1]), template(name))
    directive = r"(?m)^#(?:SBATCH|PBS) .*@([a-z_]+)@\n"
    text = re.sub(directive, lambda line: line[0] if values[line[1]] else "", text)
    return re.sub("@([a-z_]+)@", lambda place: str(values[place[1]]), text)


# --- the values of the flags ---------------------------------------------------------------------


def command_of(options: Run) -> str:
    """Return the script and its flags, quoted; check the settings of src/train.py."""
    cli.check_ranges(options, num_nodes=cli.ABOVE_0, num_gpus_per_node=cli.ABOVE_0)
    try:
        flags = shlex.split(options.flags)
    except ValueError as error:
        raise UserError(f"--flags: {error}; quote it as in a shell") from None
    if options.script == "src/train.py":
        flags = [*train_flags(options), *flags]
    else:
        require(not options.use_deepspeed, f"--use_deepspeed: not available for {options.script}")
    program = f'"$project/{options.script}"' if "/" in options.script else f"-m {options.script}"
    return f"{program} {shlex.join(flags)}".rstrip()


def train_flags(options: Run) -> list[str]:
    """Return the flags of src/train.py; its settings, and those of DeepSpeed, must be valid."""
    flags = [f"--config={options.config}"]
    if options.use_deepspeed:
        in_file, _ = yaml_config.read(train_config.SECTIONS, options.config)
        named = in_file.get("deepspeed_config") or "config/ds_config.json"
        flags.append(f"--deepspeed={named}")
    config = train_config.read(flags)
    if config.use_deepspeed:
        world_size = options.num_nodes * options.num_gpus_per_node
        deepspeed.total_batch_size(config.sharding, config, world_size)
    return flags


def check_plain(name: str, value: str) -> None:
    """Raise UserError for a value with other characters than PLAIN."""
    expected = "must consist of letters, digits and _.,:/=%@+- (- not first)"
    require(not value or PLAIN.fullmatch(value), f"--{name}: {value[:60]!r} {expected}")


def seconds(text: str) -> int:
    """Return the seconds in hours:minutes:seconds."""
    match = re.fullmatch("([0-9]{1,5}):([0-9]{2}):([0-9]{2})", text)
    hours, minutes, rest = map(int, match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + rest
    expected = "is not hours:minutes:seconds of at least one minute"
    require(total >= 60, f"--time_limit: {text[:40]!r} {expected}")
    return total
