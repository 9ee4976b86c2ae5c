"""The scripts that start training: on a node, from Slurm, from PBS; their texts are in templates/.

A place in a template is @name@; @name.sh.in@ is the whole of that file.
"""

import os
import re
import shlex
from dataclasses import dataclass

from setup_settings import Common, refuse, template

import train_config
from ddp_utils import cli, data, distributed, yaml_config
from ddp_utils.sharding import deepspeed

# What a directive may hold. sbatch and qsub cut it at blanks and line breaks whatever is quoted,
# so that these would make another directive of it, or a command.
PLAIN = re.compile(r"(?!-)[A-Za-z0-9_.,:/=%@+-]{1,200}")


@dataclass
class Run(Common):
    # what it starts
    config: str = "config.yaml"  # settings of src/train.py
    num_nodes: int = 1  # machines
    num_gpus_per_node: int = 4  # processes on each, one per GPU
    use_deepspeed: bool = False  # with the YAML's deepspeed_config, else config/ds_config.json


@dataclass
class Launcher(Run):
    """A script that starts the processes of one node: scripts/run_training.sh."""

    # several nodes
    master_addr: str = ""  # host of node 0, needed for several nodes
    master_port: int = 0  # of node 0; 0: 29500 on several nodes, a free one on one
    node_rank: int = 0  # which node the script is for, from 0


@dataclass
class Slurm(Run):
    """A job for sbatch: scripts/slurm_job.sh."""

    num_nodes: int = 4  # machines
    num_gpus_per_node: int = 8  # processes on each, one per GPU
    # the queue
    time_limit: str = "48:00:00"  # hours:minutes:seconds
    partition: str = "gpu"  # queue; empty: the default one
    account: str = ""  # project that pays
    job_name: str = "llm_finetune"  # what the queue shows
    cpus_per_task: int = 8  # cores of a process
    mem_per_gpu: str = "32G"  # host memory of a process
    # its environment
    modules: str = "cuda/12.2 anaconda3"  # to `module load`; empty: none
    conda_env: str = "llm_finetuning"  # to activate; empty: the environment that is active


@dataclass
class Pbs(Slurm):
    """A job for qsub, on Aurora unless told else: scripts/pbs_job.sh.

    The mpiexec there must be that of PALS or MPICH.
    """

    num_gpus_per_node: int = 12  # processes on each, one per GPU or tile
    partition: str = "capacity"  # queue; empty: the default one
    cpus_per_task: int = 4  # cores of a process
    modules: str = "frameworks"  # to `module load`; empty: none
    conda_env: str = ""  # to activate; empty: the environment that is active
    # PBS alone
    system: str = "aurora"  # whole nodes of this one; empty: so many cores, GPUs and memory
    filesystems: str = "home:flare"  # that the job needs; empty: not said


# --- the scripts ---------------------------------------------------------------------------------


def launcher(options):
    train, _ = command(options)
    nodes = options.num_nodes
    rank = options.node_rank
    port = options.master_port
    cli.check_ranges(options, master_port=(">= 0 and <= 65535", lambda x: 0 <= x <= 65535))
    check_plain("master_addr", options.master_addr)
    refuse(not 0 <= rank < nodes, f"--node_rank: {rank} of {nodes} nodes; give 0 to {nodes - 1}")
    says = "--master_addr: several nodes need a place to meet; give the host of node 0"
    refuse(nodes > 1 and not options.master_addr, says)
    meeting = f" MASTER_PORT={port}" if port else ""
    if nodes > 1:
        port = port or '"${MASTER_PORT:-29500}"'
        meeting = f" MASTER_ADDR={shlex.quote(options.master_addr)} MASTER_PORT={port}"
    node = f"run_training_node{rank}.sh" if nodes > 1 else "run_training.sh"
    options.output = options.output or f"scripts/{node}"
    return filled("launcher", options, meeting=meeting, train=train)


def slurm(options):
    train, config, total = job(options)
    modules = environment(options, "nccl.sh.in", config)
    login = " -l" if options.modules else ""  # `module` comes with a login shell
    # its --signal is for the tasks: with B: it would be for the script
    places = {"lead": lead(total), "environment": modules, "login": login}
    return filled("slurm", options, train=f'{train} "$@"', **places)


def pbs(options):
    check_plain("system", options.system)
    check_plain("filesystems", options.filesystems)
    train, config, total = job(options)
    defaults = "oneccl.sh.in" if options.system == "aurora" else "nccl.sh.in"
    stop = f"--stop_after_minutes={(total - lead(total)) / 60:g}"
    gpus = options.num_gpus_per_node
    memory = f"{gpus * int(options.mem_per_gpu[:-1])}{options.mem_per_gpu[-1].lower()}b"
    chunk = f"ncpus={gpus * options.cpus_per_task}:ngpus={gpus}:mpiprocs={gpus}:mem={memory}"
    if options.system:
        chunk = f"system={options.system}"
    places = {"environment": environment(options, defaults, config), "chunk": chunk}
    return filled("pbs", options, lead=lead(total), train=f"{train} {stop}", **places)


def lead(total):
    """Return how many seconds before its end a job is told to stop."""
    return min(300, total // 2)


def environment(options, defaults, config):
    """Return the lines of a job that load modules and set variables; defaults: a template."""
    lines = [f"module load {name}" for name in options.modules.split()]
    if options.conda_env:
        lines += ["# shellcheck source=/dev/null", f"source activate {options.conda_env}"]
    if lines:
        lines = ["set +u # modules and conda ask for variables that are not set", *lines, "set -u"]
    cores = options.cpus_per_task
    lines += ["use_environment", f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"']
    for line in template(defaults).splitlines():  # the guide's; what the user exported stays
        if not (config.use_fsdp and "CUDA_DEVICE_MAX_CONNECTIONS" in line):
            lines.append(line)
    return "\n".join(lines)


def filled(name, options, **places):
    """Return a template with what a user gave: quoted, or held against PLAIN.

    A directive whose value is empty is left out.
    """
    named = {"path": options.output, "project": str(data.ROOT), "cwd": os.getcwd()}
    named = {name: shlex.quote(place) for name, place in named.items()} | vars(options) | places
    text = re.sub(r"@(\w+[.]sh[.]in)@\n", lambda file: template(file[1]), template(f"{name}.sh.in"))
    ends = r"(?m)^#(?:SBATCH|PBS) .*@([a-z_]+)@\n"  # with a place
    text = re.sub(ends, lambda line: line[0] if named[line[1]] else "", text)
    return re.sub("@([a-z_]+)@", lambda place: str(named[place[1]]), text)


# --- what the user gave --------------------------------------------------------------------------


def command(options):
    """Return the flags of src/train.py, quoted, and its settings, which must fit each other."""
    cli.check_ranges(options, num_nodes=cli.ABOVE_0, num_gpus_per_node=cli.ABOVE_0)
    flags = [f"--config={options.config}"]
    if options.use_deepspeed:
        in_file = yaml_config.read(train_config.Sections, options.config)
        named = in_file["deepspeed_config"].value if "deepspeed_config" in in_file else ""
        flags.append(f"--deepspeed={named or 'config/ds_config.json'}")
    world = distributed.World(world_size=options.num_nodes * options.num_gpus_per_node)
    config = train_config.merged(flags)
    if config.use_deepspeed:
        deepspeed.total_batch_size(config.sharding, config, world.world_size)
    return shlex.join(flags), config


def job(options):
    """Return the flags of src/train.py, quoted, its settings, and the seconds of the job."""
    cli.check_ranges(options, cpus_per_task=cli.ABOVE_0)
    for name in ("partition", "account", "job_name", "conda_env"):
        check_plain(name, getattr(options, name))
    for word in options.modules.split(" "):
        check_plain("modules", word)
    says = f"--mem_per_gpu: {options.mem_per_gpu!r:.40} is no size; give 32G, or so many K, M, T"
    refuse(not re.fullmatch("[1-9][0-9]{0,6}[KMGT]", options.mem_per_gpu), says)
    return *command(options), seconds(options.time_limit)


def check_plain(name, value):
    """Raise UserError for a value that holds more than PLAIN."""
    says = "cannot stand in a job script; use letters, digits, _.,:/=%@+- (- not first)"
    refuse(value and not PLAIN.fullmatch(value), f"--{name}: {value[:60]!r} {says}")


def seconds(text):
    """Return the seconds in hours:minutes:seconds."""
    form = re.fullmatch("([0-9]{1,5}):([0-9]{2}):([0-9]{2})", text)
    hours, minutes, rest = map(int, form.groups()) if form else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + rest
    refuse(total < 60, f"--time_limit: {text[:40]!r} is no hours:minutes:seconds from a minute on")
    return total
