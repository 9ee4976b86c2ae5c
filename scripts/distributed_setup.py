"""Write what distributed training needs: DeepSpeed or FSDP settings, and the script that starts it.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD
    python scripts/distributed_setup.py launcher --num_gpus_per_node 4 --use_deepspeed
    python scripts/distributed_setup.py slurm --num_nodes 4 --num_gpus_per_node 8
    python scripts/distributed_setup.py pbs --num_nodes 2 --account mine --time_limit 02:00:00

All flags: `slurm --help`. Everything is checked before anything is written, and a file appears
whole or not at all. Exit status: 0 written, 2 wrong input, 4 could not write.
"""

import json
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ruamel import yaml

from ddp_utils import SECRET, UserError, cli, dist, records

MARK = "# Written by scripts/distributed_setup.py"  # a script without it is someone else's
# What a directive may hold. sbatch and qsub cut it at blanks and line breaks whatever is quoted,
# so that these would make another directive of it, or a command.
PLAIN = re.compile(r"(?!-)[A-Za-z0-9_.,:/=%@+-]{1,200}")
# the guide's, but that torch knows the second one with TORCH_ only
NCCL = "CUDA_DEVICE_MAX_CONNECTIONS=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NCCL_DEBUG=INFO "
NCCL += "NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME=^lo,docker"
# as in run_dpo_ddp_aurora.sh
ONECCL = "CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi "
ONECCL += "FI_MR_CACHE_MONITOR=userfaultfd"


@dataclass
class Common:
    output: str = ""  # file to write; empty: the guide's name
    force: bool = False  # overwrite a file that this program did not write
    debug: bool = False  # a traceback for mistakes too


@dataclass
class DeepSpeed(Common):
    """Settings of DeepSpeed: config/ds_config.json, for `src/train.py --deepspeed`."""

    zero_stage: int = 2  # 1 shards optimizer states, 2 gradients too, 3 parameters too, 0 nothing
    offload_optimizer: bool = False  # optimizer states in the host's memory
    offload_param: bool = False  # parameters in the host's memory, with stage 3
    bf16: bool = False  # without --bf16 and --fp16: as the YAML file's mixed_precision
    fp16: bool = False  # for GPUs that have no bf16; the loss scale is dynamic
    reduce_bucket_size: float = 5e8  # elements reduced at a time
    allgather_bucket_size: float = 5e8  # elements gathered at a time
    config: str = ""  # settings of src/train.py, to take numbers from
    concrete: bool = False  # their numbers in place of "auto"


@dataclass
class Fsdp(Common):
    """Settings of FSDP: config/fsdp_config.json, for distributed.fsdp_config in the YAML file."""

    # shard everything; keep parameters whole after forward; shard in each node only; as DDP
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = (
        "FULL_SHARD"
    )
    mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO"] = "BFLOAT16"  # in forward and backward


@dataclass
class Run(Common):
    config: str = "config.yaml"  # settings of src/train.py
    num_nodes: int = 1  # machines
    num_gpus_per_node: int = 4  # processes on each, one per GPU
    use_deepspeed: bool = False  # with the YAML's deepspeed_config, else config/ds_config.json
    use_fsdp: bool = False  # be sure that the YAML file says so


@dataclass
class Launcher(Run):
    """A script that starts the processes of one node: scripts/run_training.sh."""

    master_addr: str = ""  # host of node 0, needed for several nodes
    master_port: int = 0  # free port of node 0; 0: 29500 on several nodes, any free one on one
    node_rank: int = 0  # which node the script is for, from 0


@dataclass
class Slurm(Run):
    """A job for sbatch: scripts/slurm_job.sh."""

    num_nodes: int = 4  # machines
    num_gpus_per_node: int = 8  # processes on each, one per GPU
    time_limit: str = "48:00:00"  # minutes, h:m:s, days-hours, ..., as Slurm takes it
    partition: str = "gpu"  # queue; empty: the default one
    account: str = ""  # project that pays
    job_name: str = "llm_finetune"  # what the queue shows
    cpus_per_task: int = 8  # cores of a process
    mem_per_gpu: str = "32G"  # host memory of a process
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
    system: str = "aurora"  # whole nodes of this one; empty: so many cores, GPUs and memory
    filesystems: str = "home:flare"  # that the job needs; empty: not said


# --- what the user gave --------------------------------------------------------------------------


def refuse(wrong, says):
    if wrong:
        raise UserError(says)


def read(path):
    """A JSON or YAML file as plain data; src/train.py checks what it holds."""
    text = records.content(path, most=2**17).decode()
    load = json.loads if path.endswith(".json") else yaml.YAML(typ="safe", pure=True).load
    try:
        found = load(text) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", 1)
        says = (getattr(error, "problem", None) or str(error)).splitlines()[0]
        raise UserError(f"{path}:{line}: {says:.200}") from error
    refuse(not isinstance(found, dict), f"{path}:1: the file must hold names and values")
    return found


def setting(found, path, name):
    """What the YAML says of `name`, in training or distributed; None if nothing."""
    parts = [(part, found.get(part)) for part in ("training", "distributed")]
    parts = {part: v[name] for part, v in parts if isinstance(v, dict) and name in v}
    said = " and ".join(f"{part}.{name} is {value!r:.60}" for part, value in parts.items())
    refuse(len({*map(repr, parts.values())}) > 1, f"{path}: {said}; say it once")
    return next(iter(parts.values()), None)


def whole(value, path, name):
    """A whole number above 0; None for what is "auto" or not given."""
    if value in (None, "auto"):
        return None
    fits = type(value) in (int, float) and value >= 1 and value % 1 == 0
    refuse(not fits, f"{path}: {name} is {value!r:.60}; give a whole number above 0")
    return int(value)


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


def check_plain(options, *names):
    for name in names:
        value = getattr(options, name)
        for word in value if isinstance(value, tuple) else [value]:
            says = "cannot stand in a job script; use letters, digits, _.,:/=%@+- (- not first)"
            refuse(word and not PLAIN.fullmatch(word), f"--{name}: {word[:60]!r} {says}")


def check_run(options):
    """What all scripts start with, against the files it names.

    Returns the flags of src/train.py, quoted, and whether it uses FSDP.
    """
    cli.check_ranges(options, num_nodes=cli.ABOVE_0, num_gpus_per_node=cli.ABOVE_0)
    both = options.use_deepspeed and options.use_fsdp
    refuse(both, "--use_fsdp: --use_deepspeed is given too; give one of them")
    path, found = options.config, read(options.config)
    for mine, other in (("use_deepspeed", "use_fsdp"), ("use_fsdp", "use_deepspeed")):
        both = getattr(options, mine) and setting(found, path, other) is True
        refuse(both, f"--{mine}: {path} says {other}: true; leave one of them out")
    sharded = setting(found, path, "use_fsdp") is True
    says = f"--use_fsdp: {path} does not say so; write use_fsdp: true there, under distributed"
    refuse(options.use_fsdp and not sharded, says)
    flags = [f"--config={path}"]
    if options.use_deepspeed:
        file = str(setting(found, path, "deepspeed_config") or "config/ds_config.json")
        flags.append(f"--deepspeed={file}")
        if records.resolve(file).exists():
            check_batch(file, found, options)
        else:
            print(f"note: {file} is not there yet; `distributed_setup.py deepspeed` makes it")
    return " ".join(map(shlex.quote, flags)), sharded


def check_batch(file, found, options):
    """The numbers of the DeepSpeed JSON against those of the YAML, and their product."""
    says = read(file)
    mend = 'make them equal, or write "auto"'
    product = options.num_nodes * options.num_gpus_per_node
    terms = f"{options.num_nodes} nodes x {options.num_gpus_per_node} GPUs"
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        key = f"train_{name}_per_gpu" if name == "micro_batch_size" else name
        theirs = whole(says.get(key), file, key)
        ours = whole(setting(found, options.config, name), options.config, name)
        both = f"{options.config} says {name} {ours}, {file} {key} {theirs}"
        refuse(theirs and ours and theirs != ours, f"--use_deepspeed: {both}; {mend}")
        product *= theirs or ours or 0
        terms += f" x {name} {theirs or ours}"
    total = whole(says.get("train_batch_size"), file, "train_batch_size")
    both = f"{file} says train_batch_size {total}, but {terms} = {product}"
    refuse(total and product and total != product, f"--use_deepspeed: {both}; {mend}")


# --- settings ------------------------------------------------------------------------------------


def deepspeed(options):
    """The guide's JSON; with a YAML file its numbers, with --concrete no "auto" is left."""
    stage, concrete, path = options.zero_stage, options.concrete, options.config
    bucket = ("that is whole, above 0", lambda x: x >= 1 and x % 1 == 0)
    buckets = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    cli.check_ranges(options, zero_stage=("from 0 to 3", lambda x: 0 <= x <= 3), **buckets)
    refuse(options.bf16 and options.fp16, "--fp16: --bf16 is given too; give one of them")
    refuse(options.offload_param and stage != 3, "--offload_param: only with --zero_stage 3")
    only = "--offload_optimizer: only with --zero_stage 1, 2 or 3"
    refuse(options.offload_optimizer and stage == 0, only)
    refuse(concrete and not path, "--concrete: no settings to take numbers from; give --config")

    found = read(path) if path else {}
    names = "micro_batch_size", "gradient_accumulation_steps", "max_grad_norm", "mixed_precision"
    micro, steps, clip, precision = (setting(found, path, name) for name in names)
    micro, steps = whole(micro, path, names[0]), whole(steps, path, names[1])
    fits = clip is None or (type(clip) in (int, float) and 0 <= clip < 1e9)
    refuse(not fits, f"{path}: max_grad_norm is {clip!r:.60}; give a number of 0 or more")
    asked = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    both = f"--{asked}: {path} says mixed_precision {precision!r:.60}; make them equal"
    refuse(asked and precision not in (None, asked), both)
    for name, value in zip(names, [micro, steps, 0.3, asked or precision], strict=True):
        says = f"--concrete: {path} has no {name}; write it there, under training"
        refuse(concrete and value is None, says)

    asked = asked or (precision if concrete else None)
    says = f"{path}: mixed_precision is {asked!r:.60}; give bf16, fp16 or no"
    refuse(asked not in (None, "bf16", "fp16", "no"), says)
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    zero["reduce_scatter"] = True
    zero |= {name: int(getattr(options, name)) for name in buckets}  # 5e8 would be no integer
    if stage == 3:  # without the last one saved models are empty
        zero["stage3_prefetch_bucket_size"] = 50_000_000 if concrete else "auto"
        zero["stage3_param_persistence_threshold"] = 100_000 if concrete else "auto"
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for name in ("offload_optimizer", "offload_param"):
        if getattr(options, name):
            zero[name] = {"device": "cpu", "pin_memory": True}
    kinds = {"bf16": {}, "fp16": {"loss_scale": 0}}  # 0: it finds one
    kinds = {kind: more for kind, more in kinds.items() if asked in (None, kind)}
    return {
        "train_micro_batch_size_per_gpu": micro if concrete else "auto",
        "gradient_accumulation_steps": steps or 16,
        "gradient_clipping": 0.3 if clip is None else clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **{kind: {"enabled": bool(asked) or "auto", **more} for kind, more in kinds.items()},
        "zero_optimization": zero,
    }


def fsdp(options):
    """The guide's JSON."""
    models = ("Llama", "Mistral", "Gemma")
    return {
        "fsdp_transformer_layer_cls_to_wrap": [f"{model}DecoderLayer" for model in models],
        "fsdp_sharding_strategy": options.sharding_strategy,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cuda_graphs": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": False,
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_mixed_precision": options.mixed_precision,
    }


# --- scripts -------------------------------------------------------------------------------------

# @name@ is filled in. What a user gave is quoted there, or has been held against PLAIN.
TOP = """set -euo pipefail

project=@project@
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd @cwd@ # paths are seen from here

"""
LAUNCHER = f"""#!/usr/bin/env bash
# Node @node_rank@ of @num_nodes@. Start it there: bash @path@ [more flags of src/train.py]
# The same command goes on with a run that was stopped. Exit status: as run_distributed.sh.
#
# torchrun starts the processes, for DeepSpeed too: `deepspeed --node_rank` would want --no_ssh and
# a hostfile. On one node the port is a free one: two runs with one number would meet.
{TOP}export NNODES=@num_nodes@ NODE_RANK=@node_rank@@meeting@
train @num_gpus_per_node@ "$project/src/train.py" @train@ "$@"
"""
MEET = r"""export MASTER_ADDR="${MASTER_ADDR:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"

# one process checks for all: a mistake is one line
command=(python "$project/src/train.py" @train@)
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=@num_gpus_per_node@ \
  "${command[@]}" --check >/dev/null
"""
SLURM = r"""#!/bin/bash@login@
# Submit it: sbatch @path@ [more flags of src/train.py]
#
# @lead@ s before the time limit Slurm signals the processes: they save, end with 85, and the job is
# queued again, as it is when a node fails. It goes on from the last checkpoint, in the same output.
#
# Mended in the guide's example:
# - @num_gpus_per_node@ tasks on a node, each a launcher of as many: here srun alone starts them
# - MASTER_PORT=29500 is any job's on the node: here it comes from the job's number
# - since Slurm 22.05 srun does not take --cpus-per-task from the job: here it is told
# - NCCL_ASYNC_ERROR_HANDLING has become TORCH_NCCL_ASYNC_ERROR_HANDLING
# - CUDA_DEVICE_MAX_CONNECTIONS=1 keeps FSDP from overlapping: it is for DeepSpeed and DDP
@directives@
@top@@environment@

job=${SLURM_JOB_ID:?submit it with sbatch} world=$((SLURM_NNODES * @num_gpus_per_node@))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
@meet@
# each task learns its rank on its node, from SLURM_PROCID and SLURM_LOCALID; when one has ended
# the others have 120 s
status=0
srun --cpus-per-task=@cpus_per_task@ --wait=120 "${command[@]}" || status=$?
if [ "$status" -eq 85 ]; then # stopped and saved
  scontrol requeue "$job" || echo "error: not queued again; submit the same script" >&2
fi
exit "$status"
"""
PBS = """#!/bin/bash -l
# Submit it: qsub @path@
#
# @lead@ s before the time limit it saves and ends with 85, "stopped and saved". PBS does not queue
# it again for that: have the next one wait for it, which goes on from the last checkpoint.
#
#     qsub -W depend=afternotok:<jobid> @path@
#
# So does a job that PBS runs again because a node failed (-r y). Another walltime: make the script
# again. Mended in the guide's example, which is for Slurm: a process per GPU and no launcher in it,
# a port from the job's number, TORCH_NCCL_ASYNC_ERROR_HANDLING.
@directives@
@top@@environment@

job=${PBS_JOBID:?submit it with qsub}
job=${job%%.*} world=$(($(sort -u "$PBS_NODEFILE" | wc -l) * @num_gpus_per_node@))
first=$(head -n 1 "$PBS_NODEFILE")
@meet@
export WORLD_SIZE=$world LOCAL_WORLD_SIZE=@num_gpus_per_node@ # PALS does not document its own
exec mpiexec -n "$world" -ppn @num_gpus_per_node@ --hostfile "$PBS_NODEFILE" "${command[@]}"
"""


def launcher(options):
    train, _ = check_run(options)
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
    return filled(LAUNCHER, options, meeting=meeting, train=train)


def slurm(options):
    total, places = check_job(options, NCCL)
    places["train"] += ' "$@"'
    places["login"] = " -l" if options.modules else ""  # `module` comes with a login shell
    # USR1 is for the tasks: with B: it would be for the script
    header = f"""--job-name={options.job_name} --nodes={options.num_nodes}
        --ntasks-per-node={options.num_gpus_per_node} --gres=gpu:{options.num_gpus_per_node}
        --cpus-per-task={options.cpus_per_task} --mem-per-gpu={options.mem_per_gpu}
        --time={options.time_limit} --partition={options.partition} --account={options.account}
        --output=slurm-%j.out --error=slurm-%j.out --open-mode=append --requeue
        --signal=USR1@{places["lead"]}"""
    lines = [f"#SBATCH {line}" for line in header.split() if not line.endswith("=")]
    return filled(SLURM, options, directives="\n".join(lines), **places)


def pbs(options):
    check_plain(options, "system", "filesystems")
    total, places = check_job(options, ONECCL if options.system == "aurora" else NCCL)
    places["train"] += f" --stop_after_minutes={(total - places['lead']) / 60:g}"
    size, unit = re.fullmatch("([0-9]+)([A-Z]?)", options.mem_per_gpu).groups()
    gpus, cores = options.num_gpus_per_node, options.num_gpus_per_node * options.cpus_per_task
    chunk = f"ncpus={cores}:ngpus={gpus}:mpiprocs={gpus}:mem={gpus * int(size)}{unit or 'M'}B"
    chunk = f"system={options.system}" if options.system else chunk.lower()
    clock = f"{total // 3600:02}:{total // 60 % 60:02}:{total % 60:02}"
    header = f"""-A={options.account} -N={options.job_name} -q={options.partition}
        -l=select={options.num_nodes}:{chunk},place=scatter -l=walltime={clock}
        -l=filesystems={options.filesystems} -k=doe -j=oe -r=y"""
    lines = [line.replace("=", " ", 1) for line in header.split() if not line.endswith("=")]
    return filled(PBS, options, directives="\n".join(f"#PBS {line}" for line in lines), **places)


def check_job(options, defaults):
    """The flags of a job; returns its seconds, and what the script says of flags and settings."""
    train, sharded = check_run(options)
    cli.check_ranges(options, cpus_per_task=cli.ABOVE_0)
    check_plain(options, "partition", "account", "job_name", "modules", "conda_env")
    memory, total = options.mem_per_gpu, seconds(options.time_limit)
    says = f"--mem_per_gpu: {memory[:40]!r} is no size of memory; give 32G, or so many K, M, T"
    refuse(not re.fullmatch("[1-9][0-9]{0,6}[KMGT]?", memory), says)
    lines = [f"module load {name}" for name in options.modules if name]
    if options.conda_env:
        lines += ["# shellcheck source=/dev/null", f"source activate {options.conda_env}"]
    if lines:
        lines = ["set +u # modules and conda ask for variables that are not set", *lines, "set -u"]
    lines, given = [*lines, "use_environment"], {}
    for pair in options.env:
        name, equals, given[name] = pair.partition("=")
        fits = equals and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
        refuse(not fits, f"--env: {pair[:60]!r} is not NAME=VALUE; give e.g. NCCL_DEBUG=WARN")
        says = f"--env: {name} looks like a secret, and a script is no place for it; export it"
        refuse(SECRET.search(pair), says)
    for pair in f"OMP_NUM_THREADS={options.cpus_per_task} {defaults}".split():
        name, _, value = pair.partition("=")
        if not (sharded and name == "CUDA_DEVICE_MAX_CONNECTIONS"):
            lines.append(f'export {name}="${{{name}:-{value}}}"')  # what the user exported stays
    lines += [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
    lead = min(300, total // 2)
    return total, {"environment": "\n".join(lines), "train": train, "lead": lead}


def filled(template, options, **places):
    named = {"path": options.output, "project": str(records.ROOT), "cwd": os.getcwd()}
    named = {name: shlex.quote(place) for name, place in named.items()}
    named |= vars(options) | places
    template = template.replace("@top@", TOP).replace("@meet@", MEET)
    return re.sub("@([a-z_]+)@", lambda place: str(named[place[1]]), template)


# --- the file ------------------------------------------------------------------------------------

COMMANDS = {  # flags, maker, the guide's name, what to do with the file
    "deepspeed": (DeepSpeed, deepspeed, "config/ds_config.json", "src/train.py --deepspeed {}"),
    "fsdp": (Fsdp, fsdp, "config/fsdp_config.json", "fsdp_config: {} in the YAML file"),
    "launcher": (Launcher, launcher, "", "bash {}"),
    "slurm": (Slurm, slurm, "scripts/slurm_job.sh", "sbatch {}"),
    "pbs": (Pbs, pbs, "scripts/pbs_job.sh", "qsub {}"),
}


def write(path, text, is_script, force):
    """Put a whole file in its place; what someone else wrote there stays, unless forced."""
    file, where = Path(os.path.expanduser(path)), f"--output: {path[:80]}"
    temporary = file.parent / f".distributed_setup.{os.getpid()}"
    try:
        there = os.path.lexists(file)
        refuse(there and not file.is_file(), f"{where} is not a regular file; give another name")
        held = file.read_bytes().lstrip() if there and not force else b""
        ours = MARK.encode() in held[:200] if is_script else held[:1] == b"{"
        says = "holds what this program did not write; give another name, or --force"
        refuse(held and not ours, f"{where} {says}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(os.fsencode(text))
            temporary.chmod(0o755 if is_script else 0o644)
            os.replace(temporary, file)  # a reader never sees half a file
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        wrong = UserError(f"{where}: {error.strerror}; give another name")
        raise dist.write_error(error) or wrong from error


def main(argv=None):
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command, *rest = words or [""]
    says = f"COMMAND: {command[:40]!r} is not known; give one of {', '.join(COMMANDS)}"
    refuse(command not in COMMANDS, says)
    for flag in ("--modules", "--env"):
        twice = sum(word.partition("=")[0] == flag for word in rest) > 1
        refuse(twice, f"{flag}: given twice; write all values behind one: {flag} A B")
    flags, make, name, use = COMMANDS[command]
    options = cli.parse(flags, rest)
    options.output = options.output or name
    made = make(options)
    if isinstance(made, str):
        shell, body = made.split("\n", 1)
        made_by = records.CONTROL.sub("?", shlex.join(words))
        text = f"{shell}\n{MARK}, which overwrites it:\n#     {made_by}\n{body}"
    else:
        text = json.dumps(made, indent=2) + "\n"
    write(options.output, text, isinstance(made, str), options.force)
    print(f"wrote {options.output}; next: {use.format(shlex.quote(options.output))}")
    return 0


if __name__ == "__main__":
    dist.run(main)
