"""The scripts that start training: on a node, from Slurm, from PBS; their texts are in templates/.

A place in a template is @name@; @name.sh.in@ is the whole of that file.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from setup_settings import Common, refuse

import train_config
from ddp_utils import cli, distributed, jsonl
from ddp_utils.readers import yaml_config
from ddp_utils.runs.environment import redact
from ddp_utils.sharding import deepspeed

TEMPLATES = Path(__file__).with_name("templates")
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
    use_fsdp: bool = False  # be sure that the YAML file says so


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
    time_limit: str = "48:00:00"  # minutes, h:m:s, days-hours, ..., as Slurm takes it
    partition: str = "gpu"  # queue; empty: the default one
    account: str = ""  # project that pays
    job_name: str = "llm_finetune"  # what the queue shows
    cpus_per_task: int = 8  # cores of a process
    mem_per_gpu: str = "32G"  # host memory of a process
    # its environment
    modules: tuple[str, ...] = ("cuda/12.2", "anaconda3")  # to `module load`; alone: none
    conda_env: str = "llm_finetuning"  # to activate; empty: the environment that is active
    env: tuple[str, ...] = ()  # NAME=VALUE ..., beside the guide's settings of NCCL


@dataclass
class Pbs(Slurm):
    """A job for qsub, on Aurora unless told else: scripts/pbs_job.sh.

    The mpiexec there must be that of PALS or MPICH.
    """

    num_gpus_per_node: int = 12  # processes on each, one per GPU or tile
    partition: str = "capacity"  # queue; empty: the default one
    cpus_per_task: int = 4  # cores of a process
    modules: tuple[str, ...] = ("frameworks",)  # to `module load`; alone: none
    conda_env: str = ""  # to activate; empty: the environment that is active
    # PBS alone
    system: str = "aurora"  # whole nodes of this one; empty: so many cores, GPUs and memory
    filesystems: str = "home:flare"  # that the job needs; empty: not said


# --- the scripts ---------------------------------------------------------------------------------


def launcher(options):
    train, _ = command(options)
    nodes, rank, port = options.num_nodes, options.node_rank, options.master_port
    cli.check_ranges(options, master_port=("from 1 to 65535", lambda x: 0 <= x <= 65535))
    check_plain(options, "master_addr")
    refuse(not 0 <= rank < nodes, f"--node_rank: {rank} of {nodes} nodes; give 0 to {nodes - 1}")
    says = "--master_addr: several nodes need a place to meet; give the host of node 0"
    refuse(nodes > 1 and not options.master_addr, says)
    meeting = f" MASTER_ADDR={shlex.quote(options.master_addr)}" if options.master_addr else ""
    if port or nodes > 1:
        meeting += f" MASTER_PORT={port}" if port else ' MASTER_PORT="${MASTER_PORT:-29500}"'
    node = f"run_training_node{rank}.sh" if nodes > 1 else "run_training.sh"
    options.output = options.output or f"scripts/{node}"
    return filled("launcher", options, meeting=meeting, train=train)


def slurm(options):
    train, config, total = job(options)
    places = {"environment": environment(options, "nccl.sh.in", config), "train": f'{train} "$@"'}
    places["login"] = " -l" if options.modules else ""  # `module` comes with a login shell
    # its --signal is for the tasks: with B: it would be for the script
    return filled("slurm", options, lead=lead(total), **places)


def pbs(options):
    check_plain(options, "system", "filesystems")
    train, config, total = job(options)
    defaults = "oneccl.sh.in" if options.system == "aurora" else "nccl.sh.in"
    stop = f"--stop_after_minutes={(total - lead(total)) / 60:g}"
    places = {"environment": environment(options, defaults, config), "train": f"{train} {stop}"}
    size, unit = re.fullmatch("([0-9]+)([A-Z]?)", options.mem_per_gpu).groups()
    gpus, cores = options.num_gpus_per_node, options.num_gpus_per_node * options.cpus_per_task
    chunk = f"ncpus={cores}:ngpus={gpus}:mpiprocs={gpus}:mem={gpus * int(size)}{unit or 'M'}B"
    places["chunk"] = f"system={options.system}" if options.system else chunk.lower()
    places["walltime"] = f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"
    return filled("pbs", options, lead=lead(total), **places)


def lead(total):
    """Return how many seconds before its end a job is told to stop."""
    return min(300, total // 2)


def environment(options, defaults, config):
    """Return the lines of a job that load modules and set variables; defaults: a template."""
    lines = [f"module load {name}" for name in options.modules if name]
    if options.conda_env:
        lines += ["# shellcheck source=/dev/null", f"source activate {options.conda_env}"]
    if lines:
        lines = ["set +u # modules and conda ask for variables that are not set", *lines, "set -u"]
    cores = options.cpus_per_task
    lines += ["use_environment", f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cores}}}"']
    for line in template(defaults).splitlines():  # the guide's; what the user exported stays
        if not (config.use_fsdp and "CUDA_DEVICE_MAX_CONNECTIONS" in line):
            lines.append(line)
    for pair in options.env:
        name, equals, value = pair.partition("=")
        fits = equals and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
        refuse(not fits, f"--env: {pair[:60]!r} is not NAME=VALUE; give e.g. NCCL_DEBUG=WARN")
        says = f"--env: {name} looks like a secret, and a script is no place for it; export it"
        refuse(redact(pair) != pair, says)
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines)


def filled(name, options, **places):
    """Return a template with what a user gave: quoted, or held against PLAIN.

    A directive whose value is empty is left out.
    """
    named = {"path": options.output, "project": str(jsonl.ROOT), "cwd": os.getcwd()}
    named = {name: shlex.quote(place) for name, place in named.items()} | vars(options) | places
    text = re.sub(r"@(\w+[.]sh[.]in)@\n", lambda file: template(file[1]), template(f"{name}.sh.in"))
    ends = r"(?m)^#(?:SBATCH|PBS) .*@([a-z_]+)@\n"  # with a place
    text = re.sub(ends, lambda line: line[0] if named[line[1]] else "", text)
    return re.sub("@([a-z_]+)@", lambda place: str(named[place[1]]), text)


def template(name):
    return (TEMPLATES / name).read_text("utf-8")


# --- what the user gave --------------------------------------------------------------------------


def command(options):
    """Return the flags of src/train.py, quoted, and its settings, which must fit each other."""
    cli.check_ranges(options, num_nodes=cli.ABOVE_0, num_gpus_per_node=cli.ABOVE_0)
    both = options.use_deepspeed and options.use_fsdp
    refuse(both, "--use_fsdp: --use_deepspeed is given too; give one of them")
    flags = [f"--config={options.config}"]
    if options.use_deepspeed:
        in_file = yaml_config.from_yaml(train_config.Sections, options.config).distributed
        flags.append(f"--deepspeed={in_file.deepspeed_config or 'config/ds_config.json'}")
    world = distributed.World(world_size=options.num_nodes * options.num_gpus_per_node)
    config = train_config.merged(flags, world)
    says = f"{options.config} does not say so; write use_fsdp: true there, under distributed"
    refuse(options.use_fsdp and not config.use_fsdp, f"--use_fsdp: {says}")
    if config.use_deepspeed:
        deepspeed.total_batch_size(config.sharding, config, world.world_size)
    return shlex.join(flags), config


def job(options):
    """Return the flags of src/train.py, quoted, its settings, and the seconds of the job."""
    cli.check_ranges(options, cpus_per_task=cli.ABOVE_0)
    check_plain(options, "partition", "account", "job_name", "modules", "conda_env")
    says = f"--mem_per_gpu: {options.mem_per_gpu!r:.40} is no size; give 32G, or so many K, M, T"
    refuse(not re.fullmatch("[1-9][0-9]{0,6}[KMGT]?", options.mem_per_gpu), says)
    return *command(options), seconds(options.time_limit)


def check_plain(options, *names):
    for name in names:
        value = getattr(options, name)
        for word in value if isinstance(value, tuple) else [value]:
            says = "cannot stand in a job script; use letters, digits, _.,:/=%@+- (- not first)"
            refuse(word and not PLAIN.fullmatch(word), f"--{name}: {word[:60]!r} {says}")


def seconds(text):
    """A time limit in one of Slurm's six formats."""
    form = re.fullmatch("([0-9]{1,3}-)?[0-9]{1,5}(:[0-9]{1,2}){0,2}", text)
    days, _, clock = text.rpartition("-")
    if not days and clock.count(":") < 2:  # minutes, or minutes:seconds
        clock = f"0:{clock}"
    numbers = [days or 0, *clock.split(":")] if form else []
    total = sum(int(n) * u for n, u in zip(numbers, (86400, 3600, 60, 1), strict=False))
    forms = "minutes, h:m:s, days-hours or days-h:m:s"
    refuse(total < 60, f"--time_limit: {text[:40]!r} is not a minute or more; give {forms}")
    return total
