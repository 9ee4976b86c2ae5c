"""Predict the memory of a run before it is started: check_gpu.py --plan.

The model consists of torch's fake tensors, which have no contents. It takes one step under torch's
MemTracker; how each strategy splits these bytes over the ranks is computed. Sizes are in bytes. If
a case is simplified, the result is an upper bound.
"""

import functools
import logging
import math
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from ddp_utils import UserError, logps, lora, models, sampler
from ddp_utils.distributed import World
from ddp_utils.fast import memory_efficient, self_test
from ddp_utils.policy import Precision
from ddp_utils.sharding import fsdp

GIB = 2**30
CPU = torch.device("cpu")
GPU = torch.device("xpu")  # any GPU with bf16; for this kind, torch does not look at the hardware
FSDP = ("FSDP SHARD_GRAD_OP", "FSDP FULL_SHARD", "FSDP HYBRID_SHARD")
STRATEGIES = ("DDP", *FSDP, "ZeRO-1", "ZeRO-2", "ZeRO-3")
RUNTIME = GIB / 2  # memory of CUDA, its libraries and NCCL besides the tensors
USABLE = 0.95  # fraction of a GPU's memory; the rest is lost to fragmentation
BUCKET = 5e8  # elements that DeepSpeed reduces at a time, by default
NEAR = 1e9  # elements that ZeRO-3 keeps gathered because they are used again soon
AHEAD = 5e7  # elements that ZeRO-3 prefetches
SENT = 500 * 2**20  # bytes per broadcast of DDP's weights before the first step
SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of a micro-batch that are tried
LINE = "{:<21}{:>8}{:>9}{:>8}{:>8}{:>8}{:>6}{:>7}"
HEAD = ("strategy", "GiB", "weights", "grads", "AdamW", "activ.", "fits", "micro")
LEGEND = "GiB per rank at the peak, for the longest rows; activ.: with temporary buffers; micro:"
LEGEND += "\nthe largest micro-batch of those tried that fits; <: the strategy of the settings"


def machine(
    facts: dict[str, Any], gpus: int | None = None, gpu_memory: float | None = None
) -> tuple[int, int, str, float]:
    """Return the ranks, the nodes, the kind of GPU and the bytes of each GPU.

    facts: as check_gpu.py prints them; gpus, gpu_memory (GiB): of another machine.
    Raises UserError if there is no GPU, or if the nodes would have different numbers of GPUs.
    """
    devices = facts["devices"]
    if not (gpu_memory or devices):
        raise UserError("--plan: this machine has no GPU; use --gpus 8 --gpu_memory 80")
    memory = gpu_memory or min(device["memory_gib"] for device in devices)
    ranks = gpus or len(devices) or 1
    nodes = max(1, math.ceil(ranks / (len(devices) or 8)))
    if ranks < 1 or ranks % nodes:
        raise UserError(f"--gpus {ranks}: must be a multiple of the {nodes} nodes")
    return ranks, nodes, facts["kind"] if devices else "cuda", memory * GIB


# --- one step on fake tensors --------------------------------------------------------------------


def attend_on_gpu(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    packing: Any = None,
    softcap: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend to a packed row with the memory of the kernel on a GPU: each prompt's keys twice."""
    if softcap is not None:
        raise NotImplementedError("a packed row has no soft-cap")
    packing.calls += 1
    prompts = sum(prompt for prompt, _, _ in packing.spans)
    key = torch.cat([key, key[:, :, :prompts]], 2)
    value = torch.cat([value, value[:, :, :prompts]], 2)
    return scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("attend_on_gpu", attend_on_gpu)


def meta_model(model_config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the model of a config.json on the meta device; no file of weights is needed."""
    with models.META:
        return AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=False)


def build(config: Any, precision: Precision, model_config: Any) -> logps.Scorer:
    """Return the Scorer that a run would load, on the meta device."""
    model = models.no_dropout(meta_model(model_config, precision.weights))
    if config.gradient_checkpointing:
        models.checkpoint_activations(model)
    if config.fine_tuning == "lora":
        shape = config.lora_r, config.lora_alpha, config.lora_dropout, config.lora_targets
        model = lora.add(model, lora.LoraSpec(*shape, config.init_adapter))
    if config.lean:
        memory_efficient.apply(model, verify=False)  # tensors on the meta device have no numbers
    return logps.Scorer(model.train(), precision.autocast)


def peaks_of(
    scorer: logps.Scorer, rows: list, row_losses: Callable, device: str, shared: bool
) -> dict[str, float]:
    """Return the peak bytes of a step on top of weights, gradients and moments."""
    backbone, head = scorer.backbone_and_head()
    scorer.full_logits = backbone is scorer.unwrap() or head is None
    scorer.set_layout(shared)
    if shared and device != "cpu" and scorer.precision.itemsize == 2:
        scorer.unwrap().set_attn_implementation("attend_on_gpu")
    tracker: Any = MemTracker()
    tracker._mod_tracker.register_user_hooks = lambda *hooks: None  # they fail on frozen weights

    def total(when):
        return tracker.get_tracker_snapshot(when)[CPU]["Total"]

    with FakeTensorMode(allow_non_fake_inputs=True):
        scorer.to_empty(device=CPU)
        scorer.unwrap().tie_weights()
        trained = [p for p in scorer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=device == "cuda", foreach=device == "xpu")
        for parameter in trained:  # as in DDP, where gradients are parts of buckets
            parameter.grad = torch.empty_like(parameter)
        tracker.track_external(scorer)
        with tracker:
            optimizer.step()
        held = total("current")
        step = total("peak") - held
        with tracker:
            batch = scorer.collate(rows, CPU)
            loss = row_losses(scorer, batch, torch.zeros(len(rows), 2))[0].sum()
            if shared and not batch.model_kwargs["packing"].calls:
                raise TypeError("its attention cannot be steered")
            loss.backward()
        return {"backward": total("peak") - held, "step": step}


def sizes_of(scorer: logps.Scorer) -> dict[str, float]:
    """Return the bytes that do not depend on the rows, for a process that shards nothing."""
    layers = [list(x.parameters()) for x in fsdp.layers_of(scorer.unwrap(), fsdp.Settings())]
    inside = set().union(*layers)
    everything = list(scorer.parameters())
    root = [p for p in everything if p not in inside]
    matrices = [p for p in inside if p.requires_grad and p.ndim > 1]

    def computed(parameters):
        return sum(p.numel() * (scorer.autocast or p.dtype).itemsize for p in parameters)

    def trained(parameters):
        return sum(4 * p.numel() for p in parameters if p.requires_grad)

    return {
        "weights": sum(p.nbytes for p in everything),
        "gradients": trained(everything),
        "width": scorer.precision.itemsize,  # of a number in the dtype that computes
        "layers": computed(inside),  # weights in this dtype, as all that are gathered
        "layer": max(map(computed, layers)),
        "root": computed(root),  # embedding, head, last norm
        "root_gradients": trained(root),
        "copies": computed(matrices) if scorer.autocast else 0,  # which autocast keeps
    }


def need(
    config: Any,
    model_config: Any,
    rows: list,
    row_losses: Callable,
    precision: Precision,
    device: str = "cpu",
) -> types.SimpleNamespace:
    """Return the sizes and the peaks of a step on a micro-batch of these rows.

    row_losses(scorer, batch, reference [B, 2]) -> losses [B], ...
    Raises UserError for a model that takes no step on fake tensors.
    """
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # a line is enough
    chunk = logps.CHUNK["cpu"] if device == "cpu" else logps.WIDE_CHUNK
    for shared in {"auto": (True, False), "shared": (True,)}.get(config.layout, (False,)):
        scorer = build(config, precision, model_config)
        sizes = sizes_of(scorer)
        try:
            with mock.patch.dict(logps.CHUNK, cpu=chunk):
                peaks = peaks_of(scorer, rows, row_losses, device, shared)
            return types.SimpleNamespace(**sizes, **peaks)
        except self_test.UNSUPPORTED as error:  # as in a run: who cannot share repeats the prompt
            reason = models.first_line(error)
    raise UserError(f"{config.model_name}: no step without contents: {reason}")


def share(
    n: Any, strategy: str, ranks: int, nodes: int = 1, bucket: float = BUCKET
) -> tuple[float, float, float, float]:
    """Return the bytes of weights, gradients, moments and the rest on one rank at its peak.

    n: what need() returns; strategy: one of STRATEGIES. The rest: activations, gathered weights.
    """
    tool, _, kind = strategy.replace("-", " ").partition(" ")
    parts = ranks // nodes if kind == "HYBRID_SHARD" else ranks
    weights = n.weights
    moments = 2 * n.gradients
    two = n.root + 2 * n.layer
    every = n.root + n.layers
    own = n.root_gradients * n.width / 4
    peak = n.backward - n.copies  # no copies: weights are gathered in autocast's dtype
    if tool == "DDP":
        buckets = n.gradients if ranks > 1 else n.root_gradients
        phases = [(buckets, n.backward), (n.gradients, n.step)]  # gradients, all else
        if ranks > 1:
            phases.append((0, min(weights, SENT) - moments))
    elif tool == "FSDP":
        weights /= parts
        moments /= parts
        # a layer is gathered in one buffer, and copied out of it, while another one computes
        gathered = every + n.layer if kind == "SHARD_GRAD_OP" else two
        comes = own + 2 * n.layer  # gradients on their way: the root's wait for the end
        done = (n.gradients - n.root_gradients) / parts
        phases = [(comes, gathered + peak), (comes + done, two + 3 * n.root_gradients)]
        phases.append((n.gradients / parts, n.step / parts))
    else:
        learns = n.gradients * n.width / 4
        weights = every
        moments = (n.gradients + moments) / parts  # with fp32 weights of its own
        held = learns if kind == "1" else learns / parts
        waiting = own + 2 * bucket * n.width  # one bucket fills while the other is sent
        if kind == "3":
            weights /= parts
            peak += min(every, max(NEAR * n.width, two)) + min(AHEAD * n.width, every - weights)
            waiting = bucket * n.width
        phases = [(held + waiting, peak), (learns / parts, 3 * n.gradients / parts)]
    gradients, rest = max(phases, key=sum)
    return weights, gradients, moments, rest


# --- what is printed -----------------------------------------------------------------------------


def needs_of(script: Any, config: Any, rows: Any, device: str) -> dict[int, Any]:
    """Return need() of the longest rows for each size of a micro-batch that is tried."""
    with models.reading(f"--model_name: {config.model_name}"):
        folder = str(models.model_path(config.model_name))
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = meta_model(model_config)
    models.check_fit(model, rows.extremes())
    row_losses = functools.partial(script.row_losses, config=config)
    precision = script.precision_of(config, GPU)
    longest = sorted(rows, key=lambda row: -row.num_forward_tokens(shared=True))
    needs = {}
    for size in sorted({config.micro_batch_size, *SIZES}):
        micro_batch = (longest * size)[:size]
        needs[size] = need(config, model_config, micro_batch, row_losses, precision, device)
    return needs


def lines(
    script: Any, path: str, ranks: int, nodes: int, device: str, memory: float
) -> Iterator[str]:
    """Yield the lines that check_gpu.py prints: what fits into the memory, and the steps.

    script: the module train; path: its YAML file; the other arguments: what machine() returns.
    """
    world = World(world_size=ranks, local_size=ranks // nodes)
    config = script.train_config.read(["--config", path])
    if config.type == "qlora":
        raise UserError(f"{path}: fine_tuning.type: 4-bit weights cannot be planned; plan lora")
    rows = script.read_data(config, script.encoder_of(config), world)[0]["train"]
    needs = needs_of(script, config, rows, device)
    micro = config.micro_batch_size
    asked = script.strategy_of(config).name
    kind = f"a LoRA of rank {config.lora_r}" if config.fine_tuning == "lora" else "all weights"
    yield f"plan      {path}: {config.model_name}, {kind}"
    yield f"on        {ranks} x GPU with {memory / GIB:.1f} GiB, 0.50 of it in use"
    yield f"rows      {len(rows)}, the longest {max(row.num_tokens for row in rows)} tokens"
    yield LINE.format(*HEAD)
    largest = {}  # strategy -> the largest micro-batch that fits
    for name in STRATEGIES:
        largest[name] = 0
        for size, sizes in needs.items():
            parts = share(sizes, name, ranks, nodes)
            total = sum(parts) + RUNTIME
            if total <= USABLE * memory:
                largest[name] = size
            if size == micro:
                cells = [f"{part / GIB:.2f}" for part in (total, *parts)]
        cells.append("yes" if micro <= largest[name] else "no")
        yield LINE.format(name + (" <" if name == asked else ""), *cells, largest[name])
    yield LEGEND
    plan = sampler.Plan.of(config, len(rows), ranks)
    tokens = sum(row.num_forward_tokens(shared=False) + len(row.targets) for row in rows)
    batch = f"{ranks} ranks x {config.gradient_accumulation_steps} x {micro}"
    yield f"steps     {plan.steps} of {plan.global_batch} rows = {batch}; {tokens} tokens an epoch"
    if not any(largest.values()):
        yield "nothing fits, not even a row at a time; less takes gradient checkpointing, a LoRA,"
        yield "more GPUs (--gpus), offloading to the host"
