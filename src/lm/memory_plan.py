"""Predict the memory of a run before it is started: check_gpu.py --plan.

The model consists of torch's fake tensors, which have no contents. It takes one step, in which the
bytes of all tensors are counted; how each strategy splits them over the ranks is computed. Sizes
are in bytes. If a case is simplified, the result is an upper bound.
"""

import copy
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig
from transformers.integrations import moe

from ddp_utils import UserError
from ddp_utils.policy import Precision
from lm import logps, model_files, models
from lm.fast import memory_efficient, self_test
from lm.meter import PEAKS
from lm.sharding.fsdp import Settings
from lm.sharding.fsdp_policy import layers_of

GIB = 2**30
CPU = torch.device("cpu")
GPU = torch.device("xpu")  # any GPU with bf16; for this kind, torch does not look at the hardware
STRATEGIES = ("DDP", "FSDP SHARD_GRAD_OP", "FSDP FULL_SHARD", "FSDP offloaded")
RUNTIME = GIB / 2  # memory of CUDA, its libraries and NCCL besides the tensors
USABLE = 0.95  # fraction of a GPU's memory; the rest is lost to fragmentation
SENT = 500 * 2**20  # bytes per broadcast of DDP's weights before the first step
NODE = 8  # processes of a node, at most
DISKS = (0.3, 1, 5)  # GB/s of a shared disk, an SSD, several SSDs
MFU = 0.4  # fraction of a GPU's peak that scoring reaches; docs/gpu.md has 0.34 for training
SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of a micro-batch that are tried
LINE = "{:<19}{:>8}{:>9}{:>8}{:>8}{:>8}{:>6}{:>7}"
HEAD = LINE.format("strategy", "GiB", "weights", "grads", "AdamW", "activ.", "fits", "micro")
LEGEND = """GiB per rank at the peak, for the longest rows; activ.: with temporary buffers; micro:
the largest micro-batch of those tried that fits; offloaded: fsdp_offload_params"""


def machine(
    facts: dict[str, Any], gpus: int | None = None, gpu_memory: float | None = None
) -> tuple[int, str, float]:
    """Return the number of GPUs, their kind and the bytes of each.

    facts: as check_gpu.py prints them; gpus, gpu_memory (GiB): of another machine.
    """
    devices = facts["devices"]
    if not (gpu_memory or devices):
        raise UserError("--plan: this machine has no GPU; use --gpus 8 --gpu_memory 80")
    memory = gpu_memory or min(device["memory_gib"] for device in devices)
    return gpus or len(devices) or 1, facts["kind"] if devices else "cuda", memory * GIB


# --- one step on fake tensors --------------------------------------------------------------------


def attend_on_gpu(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend to a packed row with the memory of the kernel on a GPU: each prompt's keys twice."""
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise NotImplementedError("soft-cap or sinks, as in shared_prefix.attend()")
    prompts = sum(prompt for prompt, _, _ in options["packing"].spans)
    key = torch.cat([key, key[:, :, :prompts]], 2)
    value = torch.cat([value, value[:, :, :prompts]], 2)
    return scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("attend_on_gpu", attend_on_gpu)


def build(config: Any, precision: Precision, model_config: Any) -> logps.Scorer:
    """Return the Scorer that a run would load, on the meta device; no weights are read."""
    with models.META:
        model = models.auto_class(model_config).from_config(
            copy.deepcopy(model_config), dtype=precision.weights, trust_remote_code=False
        )
    model = models.no_dropout(model)
    if config.gradient_checkpointing:
        models.checkpoint_activations(model)
    adapter = models.LoraSpec.of(config)
    if adapter and adapter.merge:
        adapter = None
    model = models.prepare(model, adapter)[0]
    if config.lean:
        memory_efficient.apply(model, verify=False)  # tensors on the meta device have no numbers
    return logps.Scorer(model.train(), precision.autocast)


class Tracker(TorchDispatchMode):
    """Count the bytes of all tensors in its context.

    torch's MemTracker finds the same numbers, but also those of each module, which takes longer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}  # address -> weak reference
        self.current = self.peak = 0.0

    def track(self, tensor: Any) -> None:
        """Count the storage of a tensor until it is freed."""
        if not isinstance(tensor, Tensor) or tensor.untyped_storage()._cdata in self.storages:
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()

        def free(_reference: Any) -> None:
            self.current -= size
            del self.storages[address]

        self.storages[address] = weakref.ref(storage, free)
        self.current += size

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            self.track(tensor)
        self.peak = max(self.peak, self.current)
        return result


def peaks_of(scorer: logps.Scorer, rows: list, loss_of: Callable, device: str) -> dict[str, float]:
    """Return the peak bytes of a step on top of weights, gradients and moments."""
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        scorer.to_empty(device=CPU)
        scorer.unwrap().tie_weights()
        trained = [p for p in scorer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=device == "cuda", foreach=device == "xpu")
        for parameter in trained:  # as in DDP, where gradients are parts of buckets
            parameter.grad = torch.empty_like(parameter)
            tracker.track(parameter.grad)
        for tensor in [*scorer.parameters(), *scorer.buffers()]:
            tracker.track(tensor)
        with tracker:
            optimizer.step()
        held = tracker.current
        step = tracker.peak - held
        tracker.peak = held
        with tracker:
            batch = scorer.collate(rows, CPU)
            loss_of(scorer, batch, torch.zeros(len(rows), 2))[0].sum().backward()
        return {"backward": tracker.peak - held, "step": step}


def sizes_of(scorer: logps.Scorer, model_config: Any) -> dict[str, float]:
    """Return the bytes that do not depend on the rows, for a process that shards nothing.

    "active" is the number of weights that compute for a token.
    """
    layers = [list(x.parameters()) for x in layers_of(scorer.unwrap(), Settings())]
    inside = set().union(*layers)
    everything = list(scorer.parameters())
    root = [p for p in everything if p not in inside]
    matrices = [p for p in inside if p.requires_grad and p.ndim > 1]
    is_lora = hasattr(scorer.model, "peft_config")
    own = [p for p in everything if not (is_lora and p.requires_grad)]  # of the model's files
    numbers = sum(map(Tensor.numel, own))
    experts = sum(p.numel() for p in own if p.ndim > 2)  # [experts, in, out]
    width = (model_config.dtype or torch.float32).itemsize  # of a number in the files

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
        "layer_gradients": max(map(trained, layers)),
        "root": computed(root),  # embedding, head, last norm
        "root_gradients": trained(root),
        "copies": computed(matrices) if scorer.autocast else 0,  # which autocast keeps
        "files": width * numbers,  # of the model
        "experts": width * experts,
        "saved": trained(everything) if is_lora else width * numbers,
        "active": numbers - (1 - active_fraction(model_config)) * experts,
    }


def active_fraction(model_config: Any) -> float:
    """Return the fraction of the experts that compute for a token."""
    get = vars(model_config.get_text_config()).get
    total = get("num_experts") or get("num_local_experts") or get("n_routed_experts") or 1
    return (get("num_experts_per_tok") or total) / total


def need(
    config: Any,
    precision: Precision,
    model_config: Any,
    rows: list,
    loss_of: Callable,
    device: str = "cpu",
) -> types.SimpleNamespace:
    """Return the sizes and the peaks of a step on a micro-batch of these rows.

    loss_of(scorer, batch, reference [B, 2]) -> losses [B], ...
    Raises UserError for a model that cannot compute a step on fake tensors.
    """
    for shared in (False,) if config.layout == "separate" else (True, False):
        scorer = build(config, precision, model_config)
        sizes = sizes_of(scorer, model_config)
        scorer.chunk = None if device == "cpu" else logps.WIDE_CHUNK
        try:
            scorer.set_layout(shared)
            if shared and device != "cpu" and scorer.precision.itemsize == 2:
                scorer.unwrap().set_attn_implementation("attend_on_gpu")
            # torch's own product of experts has no fake tensors in fp32; both return as much
            with mock.patch.object(moe, "_can_use_grouped_mm", lambda *_: False, create=True):
                peaks = peaks_of(scorer, rows, loss_of, device)
            return types.SimpleNamespace(**sizes, **peaks, eager=scorer.attention == "eager")
        except self_test.UNSUPPORTED as error:  # if rows cannot be packed, a run separates them
            reason = models.one_line(error)
    raise UserError(f"{config.model_name}: no step without contents: {reason}")


def share(n: Any, strategy: str, ranks: int) -> tuple[float, float, float, float]:
    """Return the bytes of weights, gradients, moments and the rest on one rank at its peak.

    n: what need() returns; strategy: one of STRATEGIES. The rest: activations, gathered weights.
    """
    weights = n.weights
    moments = 2 * n.gradients
    if strategy == "DDP":
        buckets = n.gradients if ranks > 1 else n.root_gradients
        phases = [(buckets, n.backward), (n.gradients, n.step)]  # gradients, everything else
        if ranks > 1:
            phases.append((0, min(weights, SENT) - moments))
    else:
        part = 0 if strategy == "FSDP offloaded" else 1 / ranks  # on the GPU
        weights *= part
        moments *= part
        # a layer is gathered in one buffer, and copied out of it, while another one computes
        two = n.root + 2 * n.layer
        gathered = n.root + n.layers + n.layer if strategy == "FSDP SHARD_GRAD_OP" else two
        # gradients that are sent: those of the root wait for the end, a layer's become fp32
        sent = (n.root_gradients + n.layer_gradients) * n.width / 4 + n.layer_gradients
        done = (n.gradients - n.root_gradients) * part
        peak = n.backward - n.copies  # no copies: weights are gathered in autocast's dtype
        # at the end: those of embedding and head, and their sum in fp32
        end = two + n.root_gradients * (2 * n.width / 4 + 1)
        phases = [(sent, gathered + peak), (sent + done, end)]
        phases.append((n.gradients * part, n.step * part))
    gradients, rest = max(phases, key=sum)
    return weights, gradients, moments, rest


def on_host(n: Any, strategy: str, ranks: int) -> tuple[float, float]:
    """Return the bytes that a node needs in the host's memory to load, and later to save.

    n, strategy: as in share(). The pages of the model's files are not counted: all processes of a
    node share them, and the system can drop them.
    """
    local = min(ranks, NODE)
    is_sharded = strategy != "DDP" and ranks > 1
    # transformers stacks the experts of the files; under DDP it does so on the GPU. Embedding and
    # head, if they are trained, become fp32 before they are sharded
    loading = local * (n.experts + n.root_gradients) if is_sharded else 0
    part = local / ranks if is_sharded and n.saved == n.files else 1  # a LoRA is saved by rank 0
    held = (n.weights + 3 * n.gradients) * local / ranks if strategy == "FSDP offloaded" else 0
    return loading, held + max(n.saved, 3 * n.gradients * part)


# --- what is printed -----------------------------------------------------------------------------


class Plan(NamedTuple):
    """What a script would do."""

    config: Any  # its settings
    precision: Precision
    rows: Sequence[Any]  # training data
    micro_batch_size: int  # rows of one forward pass of a rank
    loss_of: Callable  # (scorer, batch, reference [B, 2], rows) -> losses [B], ...
    has_reference: bool = False  # whether rows are scored before the first step


def lines(plan: Plan, path: str, ranks: int, device: str, memory: float) -> Iterator[str]:
    """Yield the lines that check_gpu.py prints: what fits into the memory.

    path: of the plan's YAML file; the other arguments: what machine() returns.
    """
    config, precision, rows, micro = plan[:4]
    is_padded = vars(config).get("layout") == "separate"  # a batch is as long as its longest row
    size_of: Callable[[Any], int] = operator.methodcaller("num_forward_tokens", shared=True)
    if is_padded:
        size_of = operator.attrgetter("num_tokens")
    longest = sorted(rows, key=size_of, reverse=True)
    name = config.model_name
    while model_files.is_adapter(name, needs_weights=False):
        from lm import lora

        name = lora.base_of(name)
    with model_files.reading(f"--model_name: {name}"):
        folder = model_files.model_path(name)
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    models.check_kind(f"--model_name: {name}", model_config)
    sizes = sorted({micro, *SIZES})

    @functools.cache
    def computed(size: int) -> Any:
        if sys.stderr.isatty():
            print(f"computing one step of {size} rows", end="\r", file=sys.stderr, flush=True)
        micro_batch = (longest * size)[:size]
        loss_of = functools.partial(plan.loss_of, pairs=micro_batch)
        return need(config, precision, model_config, micro_batch, loss_of, device)

    def need_of(size: int) -> Any:
        """Return need() of this many rows; between two computed sizes, the line through them.

        Peaks grow almost linearly with the rows. For SmolLM2-135M and up to 32 rows the line is
        between 2.3 % above and 0.2 % below the computed peak.
        """
        low, high = (sizes[0], micro) if size < micro else (micro, sizes[-1])
        if size in (low, high):
            return computed(size)
        part = (size - low) / (high - low)
        few, many = vars(computed(low)), vars(computed(high))
        return types.SimpleNamespace(**{k: few[k] + part * (many[k] - few[k]) for k in few})

    yield f"plan      {path}: {config.model_name}, {config.fine_tuning}"
    yield f"on        {ranks} x GPU with {memory / GIB:.1f} GiB, 0.50 of it in use"
    yield f"rows      {len(rows)}, the longest {max(row.num_tokens for row in rows)} tokens"
    yield HEAD
    for name in STRATEGIES:
        parts = share(need_of(micro), name, ranks)
        total = sum(parts) + RUNTIME
        is_fitting = total <= USABLE * memory
        largest = micro if is_fitting else 0
        for size in [size for size in sizes if (size > micro) == is_fitting]:
            if sum(share(need_of(size), name, ranks)) + RUNTIME <= USABLE * memory:
                largest = size
        cells = [f"{part / GIB:.2f}" for part in (total, *parts)]
        yield LINE.format(name, *cells, "yes" if is_fitting else "no", largest)
    yield LEGEND
    if ranks == 1:
        yield "one GPU   a single process uses DDP, not FSDP; to offload, use ZeRO-3"
    yield from notes(computed(micro), plan, ranks)


def notes(n: Any, plan: Plan, ranks: int) -> Iterator[str]:
    """Yield lines on the disk, the host, the time to score the reference, and on special models.

    n: what need() returns.
    """
    checkpoint = 3 * n.gradients / 1e9  # what is trained and two moments, in fp32
    seconds = ", ".join(f"{checkpoint / speed:.1f} s at {speed:g} GB/s" for speed in DISKS)
    yield f"disk      model {n.saved / 1e9:.2f} GB, checkpoint {checkpoint:.2f} GB: {seconds}"
    needs = []
    for name in (STRATEGIES[0], *STRATEGIES[-2:]):
        loading, saving = on_host(n, name, ranks)
        needs.append(f"{name} {loading / GIB:.2f}, {saving / GIB:.2f}")
    place = f"a node of {min(ranks, NODE)} processes"
    yield f"host      GiB of {place} to load, to save: {'; '.join(needs)}"
    if plan.has_reference:
        flops = 2 * n.active * sum(row.num_forward_tokens(shared=True) for row in plan.rows)
        hours = flops / (MFU * ranks * 3600)
        times = f"A100 {hours / PEAKS['A100']:.1f} h, H100 {hours / PEAKS['H100']:.1f} h"
        yield f"reference {len(plan.rows)} rows on {ranks} GPUs: {times}, at {MFU:.0%} of the peak"
    if n.experts and ranks > 1:
        size = f"{n.experts / GIB:.2f} GiB of the host's memory"
        yield f"warning: under FSDP and ZeRO, each process stacks all experts: {size}"
    if n.eager:
        fix = "use gradient checkpointing and short rows"
        yield f"warning: no fused attention: all layers keep their probabilities; {fix}"
