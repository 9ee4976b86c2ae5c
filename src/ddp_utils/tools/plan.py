"""Before you wait in the queue: does it fit, how long will it take, and how is it started?

check_gpu.py --plan prints what this says of the settings of main_distributed.py or train.py.
"""

import bisect
import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ddp_utils import UserError, logps, metrics, models, sampler
from ddp_utils.distributed import World
from ddp_utils.encoder import Encoder, load_tokenizer
from ddp_utils.tools import dryrun, forecast

GIB = 2**30
CUDA = GIB / 2  # what CUDA, its libraries and NCCL hold on a GPU beside the tensors
USABLE = 0.95  # of a GPU's memory: the rest is lost between blocks of unequal size
MOST = 64  # rows of a micro-batch; more are not tried
GUESS = 0.3  # of a known GPU's arithmetic is used, where no run says more
# settings that it hangs on
MEMORY = "model_name fine_tuning lora_r lora_alpha lora_targets lora_dropout init_adapter layout "
MEMORY += "base_dtype lean use_mixed_precision use_gradient_checkpointing"
LINE = "{:<25}{:>8}{:>9}{:>8}{:>8}{:>8}{:>8}{:>6}{:>7}{:>9}"
HEAD = "strategy", "GiB", "weights", "grads", "AdamW", "activ.", "host", "fits", "micro", "sent"
LEGEND = "GiB of a rank with the longest rows; activ.: and all that comes and goes; micro: the"
LEGEND += "\nlargest micro-batch that fits; sent: GiB a step and rank; < is what the settings say"


class Machine(NamedTuple):
    """Where it is to run."""

    ranks: int
    nodes: int
    device: str  # cuda, xpu or cpu
    memory: float  # bytes that a rank can use
    runtime: float  # of these, before there is a model
    name: str


def machine(facts, gpus=None, gpu_memory=None) -> Machine:
    """facts: of check_gpu.py; gpus, gpu_memory (GiB): another number or kind of GPUs than here."""
    here = facts["devices"]
    if not here and gpus is None and gpu_memory is None:
        ranks, before = facts["processes"], metrics.peak_memory_mb(torch.device("cpu")) * 2**20
        memory = (facts["memory_available_gib"] or facts["memory_gib"]) / ranks
        name = f"process with {memory:.1f} GiB"
        return Machine(ranks, 1, "cpu", memory * GIB, before, name)
    if not here and gpu_memory is None:
        raise UserError("--gpus: there is none here to ask; give their GiB: --gpu_memory 80")
    memory = min(one["memory_gib"] for one in here) if gpu_memory is None else gpu_memory
    ranks = (len(here) or 1) if gpus is None else gpus
    nodes = math.ceil(ranks / (len(here) or 8))
    if ranks < 1:
        raise UserError(f"--gpus {ranks}: give 1 or more")
    if not 0 < memory < math.inf:
        raise UserError(f"--gpu_memory {memory:g}: give the GiB of one GPU, as in 80")
    if ranks % nodes:
        raise UserError(f"--gpus {ranks}: as many to each of {nodes} nodes; give a multiple")
    name = here[0]["name"] if gpu_memory is None else "GPU"
    kind, name = facts["kind"] if here else "cuda", f"{name} with {memory:.1f} GiB"
    return Machine(ranks, nodes, kind, USABLE * memory * GIB, CUDA, name)


class Work(NamedTuple):
    """What the settings ask for."""

    path: str
    is_yaml: bool  # of train.py, where sizes count per rank
    config: object
    strategy: object  # optim.Strategy
    rows: list  # of train_data, the longest first
    micro: int  # rows of a forward and rank
    turns: int  # micro-batches of a step
    plan: sampler.Plan
    weights: int  # how many
    need: object  # (rows, **changed settings) -> dryrun.Need of them


def skeleton(name):
    """The model that a config.json describes, on the meta device; no weights need be there."""
    with models.reading(f"--model_name: {name}"):
        settings = AutoConfig.from_pretrained(str(models.model_path(name)), trust_remote_code=False)
        with models.META:
            return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)


def read(script, path, where) -> Work:
    """script: the module main_distributed, or for a YAML file train. UserErrors are theirs."""
    world = World(world_size=where.ranks, local_size=where.ranks // where.nodes)
    is_yaml = path.endswith((".yaml", ".yml"))
    if is_yaml:
        config, row_losses = script.train_config.read(["--config", path], world), script.row_losses
    else:
        config, row_losses = script.read_settings([], world), script.pair_losses
    if getattr(config, "type", "") == "qlora":
        raise UserError(f"{path}: fine_tuning.type: 4-bit weights cannot be planned; plan lora")
    tokenizer = load_tokenizer(config.model_name)
    shape = config.max_length, config.truncation, config.chat_template_kwargs
    encoder = Encoder(tokenizer, config.chat_template, *shape)
    rows = script.read_data(config, encoder, world)[0]["train"]
    outline = skeleton(config.model_name)
    models.check_fit(outline, {"train": rows})
    settings = {name: getattr(config, name) for name in MEMORY.split()}
    settings["mixed_precision"] = getattr(config, "mixed_precision", "auto")

    def need(rows, **changes):
        def losses(*arguments):
            return row_losses(*arguments, config)

        changed = SimpleNamespace(**settings | changes)
        return dryrun.need(changed, outline, rows, losses, where.device)

    micro = config.batch_size if is_yaml else math.ceil(config.batch_size / where.ranks)
    plan = sampler.Plan.of(config, len(rows), where.ranks if is_yaml else 1)
    rows = sorted(rows, key=lambda row: -row.fed(shared=True))
    weights = sum(parameter.numel() for parameter in outline.parameters())
    turns = config.gradient_accumulation_steps
    strategy = script.strategy_of(config)
    return Work(path, is_yaml, config, strategy, rows, micro, turns, plan, weights, need)


class Fits:
    """What fits a rank, by strategy and size of the micro-batch, all of it the longest rows.

    A few sizes are tried; the others lie on lines between them, for memory is linear in tokens.
    """

    def __init__(self, work, where):
        self.work, self.where, self.known = work, where, {}
        targets = max(1, sum(map(len, work.rows[0].targets)))
        for size in {1, work.micro, max(2, math.ceil(logps.WIDE_CHUNK / targets))}:
            self.known[self.tokens(size)] = self.need(size)
        self.names = [name for name in forecast.STRATEGIES if where.nodes > 1 or "HYB" not in name]
        if where.ranks == 1:  # there is nobody to share with, but the host
            self.names = ["DDP", "ZeRO-2 offload", "ZeRO-3 offload"]
        if most := max(map(self.most, self.names)):  # far out, where the line may go astray
            self.known[self.tokens(most)] = self.need(most)

    def longest(self, size):
        return (self.work.rows * math.ceil(size / len(self.work.rows)))[:size]

    def tokens(self, size):
        return sum(row.fed(shared=True) for row in self.longest(size))

    def need(self, size):
        return self.work.need(self.longest(size))

    def share(self, name, size) -> forecast.Share:
        sizes, tokens = sorted(self.known), self.tokens(size)
        right = min(max(1, bisect.bisect_left(sizes, tokens)), len(sizes) - 1)
        low, high = sizes[right - 1 : right + 1]
        need = self.known[low].towards(self.known[high], (tokens - low) / (high - low))
        return forecast.share(need, name, self.where.ranks, self.where.nodes, self.work.turns)

    def most(self, name):
        """Rows of the largest micro-batch that fits; 0 if none does."""
        room, sizes = self.where.memory - self.where.runtime, range(1, MOST + 1)
        return bisect.bisect(sizes, room, key=lambda size: self.share(name, size).device)


def lines(work, where, tokens_per_second=None):
    """What check_gpu.py prints. tokens_per_second: of all ranks together, if it is known."""
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise UserError("--tokens_per_second: give a number above 0, prompts counted twice")
    config, plan, fits = work.config, work.plan, Fits(work, where)
    kind = f"a LoRA of rank {config.lora_r}" if config.fine_tuning == "lora" else "all weights"
    kind += ", checkpointing" * config.use_gradient_checkpointing
    yield f"plan      {work.path}: {config.model_name}, {kind}"
    yield f"on        {where.ranks} x {where.name}, {where.runtime / GIB:.2f} of it in use"
    yield f"rows      {len(work.rows)}, the longest {work.rows[0].row} tokens"
    yield LINE.format(*HEAD)
    asked = forecast.name_of(work.strategy)
    for name in fits.names:
        found, most = fits.share(name, work.micro), fits.most(name)
        total = found.device + where.runtime
        cells = [f"{part / GIB:.2f}" for part in (total, *found[:5])]
        cells += ["yes" if total <= where.memory else "no", f"{most}{'+' * (most == MOST)}"]
        yield LINE.format(name + " <" * (name == asked), *cells, f"{found.sent / GIB:.3f}")
    yield LEGEND
    epoch = sum(row.tokens for row in work.rows)
    tokens = round(epoch * plan.epoch(plan.steps))
    batch = f"{plan.global_batch} rows = {where.ranks} ranks x {work.turns} x {work.micro}"
    yield f"steps     {plan.steps} of {batch}; {epoch} tokens an epoch, {tokens} in all"
    known = tokens_per_second and (tokens_per_second, "--tokens_per_second")
    rate, source = known or guessed(work, where) or (0, "")
    if rate:
        hours, minutes = divmod(math.ceil(tokens / rate / 60), 60)
        yield f"time      {hours} h {minutes:02d} min at {rate:.0f} tokens/s ({source})"
    else:
        yield "time      unknown: give --tokens_per_second"
    usable = [name for name in (asked, *fits.names) if name in fits.names and fits.most(name)]
    yield from command(work, where, fits, usable[0]) if usable else remedies(work, where)


def guessed(work, where):
    """(tokens a second, their source) by a known GPU's data sheet, or None."""
    flops = work.weights * (4 if work.config.fine_tuning == "lora" else 6)
    found = [peak * where.ranks for name, (peak, _) in metrics.PEAKS.items() if name in where.name]
    return (GUESS * found[0] / flops, f"guessed: {GUESS:.0%} mfu") if found else None


def command(work, where, fits, name):
    """How to start it, with the largest micro-batch that fits up to what the settings say."""
    size, mine = min(fits.most(name), work.micro), work.micro * work.turns
    size = max(part for part in range(1, size + 1) if mine % part == 0)  # of a rank's rows a step
    each, other = where.ranks // where.nodes, name != forecast.name_of(work.strategy)
    tool, *kind = name.replace("-", " ").split()
    if size != work.micro:
        rows, ranks = ("micro_batch_size", 1) if work.is_yaml else ("batch_size", where.ranks)
        yield f"set       {rows} to {size * ranks}, gradient_accumulation_steps to {mine // size}"
    setup, flags = "python scripts/distributed_setup.py", ""
    if not work.is_yaml:
        if other and name not in ("DDP", "FSDP FULL_SHARD"):
            yield f"start     {name} is of src/train.py: plan a config.yaml with these settings"
            return
        if where.nodes > 1:
            yield "start     on each node, with NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT:"
        yield f"./run_distributed.sh {each}" + f" --strategy {tool.lower()}" * other
        return
    if other and tool == "FSDP":
        yield f"{setup} fsdp --sharding_strategy {kind[0]}"
        if "offload" in kind:
            yield "set       fsdp_offload_params to true in config/fsdp_config.json"
        flags = " --use_fsdp --fsdp_config config/fsdp_config.json"
    elif other and tool == "ZeRO":
        away = " --offload_optimizer" * ("offload" in kind)
        away += " --offload_param" * (kind == ["3", "offload"])
        yield f"{setup} deepspeed --zero_stage {kind[0]}{away} --config {work.path}"
        flags = " --deepspeed config/ds_config.json"
    start = f"torchrun --standalone --nproc_per_node={each} src/train.py --config {work.path}"
    if where.nodes > 1:
        nodes = f"--num_nodes {where.nodes} --num_gpus_per_node {each}"
        yield f"{setup} slurm --config {work.path} {nodes}"
        start = "sbatch scripts/slurm_job.sh"
    yield f"{start}{flags}"


def remedies(work, where):
    """What would fit where nothing does."""
    row, room, found = work.rows[:1], where.memory - where.runtime, []

    def fits(need, ranks, names=forecast.STRATEGIES):
        shares = (forecast.share(need, name, ranks, where.nodes).device for name in names)
        return next((n for n, size in zip(names, shares, strict=True) if size <= room), None)

    less, lora_ = {"use_gradient_checkpointing": True}, {"fine_tuning": "lora"}
    for what, changes in (
        ("gradient checkpointing", less),
        ("a LoRA", lora_),
        ("a LoRA and gradient checkpointing", less | lora_),
    ):
        if name := fits(work.need(row, **changes), where.ranks):
            found.append(f"{what}: {name}")
    need = work.need(row)
    more = (where.ranks * 2**power for power in range(1, 9))
    if ranks := next((n for n in more if fits(need, n, ["FSDP FULL_SHARD"])), None):
        found.append(f"{ranks} GPUs: FSDP FULL_SHARD")
    yield "start     nothing fits, not even a row at a time; would fit, with the strategy named:"
    yield from (f"          {line}" for line in found)
    yield "          beyond, it takes tools that cut a model into stages (pipeline parallelism)"
