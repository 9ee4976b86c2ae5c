"""The policy: a scorer that is trained on all ranks, with AdamW and its schedule.

`Policy` declares every method that scripts call, and implements them for one process and for DDP.
FsdpPolicy and ZeroPolicy in sharding/ override them; `parallel.wrap` chooses one of the three.
"""

import contextlib
import functools
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_utils import UserError, distributed
from ddp_utils.distributed import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = dict[str, Tensor]  # name -> tensor


class ScorerModule(nn.Module):
    """What a policy trains: a model whose forward returns what the loss needs."""

    model: nn.Module
    autocast: torch.dtype | None  # the dtype of a mixed-precision forward; None: no autocast
    token_noise: float = 0.0  # in nats, how far rounding moves a log-prob: see fast/self_test.py

    @property
    def precision(self) -> torch.dtype:
        """Return the dtype in which the forward computes."""
        return self.autocast or next(self.model.parameters()).dtype

    def example(self, device: torch.device) -> Any:
        """Return a small batch, for a forward whose result is not used."""
        raise NotImplementedError


class Strategy(NamedTuple):
    """How a scorer is trained on several ranks; parallel.choose() makes those that shard."""

    kind: str = "ddp"  # fsdp, deepspeed
    name: str = "DDP"  # as it is printed: FSDP FULL_SHARD, ZeRO-2
    options: Any = None  # fsdp: its Settings; deepspeed: the object in its JSON file
    grad_reduce_dtype: str = "fp32"  # in which gradients are communicated: fp32, bf16, fp16
    bucket_mb: float | None = None  # DDP: MiB of gradients per collective; None: the default
    saves_shards: bool = False  # every rank saves its own shards

    def shard_layout(self, fine_tuning: str, world: World) -> str:
        """Return the strategy and numbers of ranks that can load a sharded checkpoint.

        Return "" if rank 0 saves full tensors, which any number of ranks can load: always under
        DDP, and under FSDP for a LoRA, which is small.
        """
        is_alone = world.world_size == 1
        if not self.saves_shards or (self.kind == "fsdp" and (fine_tuning == "lora" or is_alone)):
            return ""
        # a node of HYBRID_SHARD has all shards
        nodes = f", {world.local_size} per node" if "HYBRID" in self.name else ""
        return f"{self.name} on {world.world_size} processes{nodes}"


DDP = Strategy()


class LossScale:
    """Dynamic loss scale for fp16: double after 2000 good steps, halve and skip after a bad one."""

    def __init__(self, enabled: bool):
        self.scale = 2.0**16 if enabled else 1.0
        self.enabled = enabled
        self.good_steps = 0

    def allows_step(self, grad_norm: float) -> bool:
        """Return whether the optimizer may step, and adapt the scale: always True in fp32, bf16."""
        if not self.enabled:
            return True
        finite = math.isfinite(grad_norm)
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % 2000 == 0:
            self.scale *= 2
        return finite


def check_same_precision(autocast: torch.dtype | None, world: World) -> None:
    """Raise UserError unless all ranks compute in bf16 or none does: their gradients are summed."""
    count = torch.tensor([float(autocast == torch.bfloat16)], device=world.device)
    with_bf16 = int(distributed.all_sum(count, world).item())
    if 0 < with_bf16 < world.world_size:
        problem = f"{with_bf16} of {world.world_size} GPUs support bf16 (expected all or none)"
        raise UserError(f"mixed precision: {problem}; use GPUs of one kind, or turn it off")


class Policy:
    """A scorer on the device of each rank, wrapped in DistributedDataParallel on several ranks.

    All ranks must call its methods. trained: False for a reference model, which is not wrapped.
    """

    is_sharded = False

    def __init__(
        self, scorer: ScorerModule, world: World, strategy: Strategy = DDP, trained: bool = True
    ):
        check_same_precision(scorer.autocast, world)
        self.world = world
        self.scorer: Any = scorer  # with more methods than a policy calls: see logps.Scorer
        self.loss_scale = LossScale(scorer.autocast == torch.float16)
        self.backward_loss: Any = 0.0  # the sum of the losses that backward() got since the start
        self.ddp: DistributedDataParallel | None = None
        self.set_up(world, strategy, trained)

    def set_up(self, world: World, strategy: Strategy, trained: bool) -> None:
        """Move the scorer to the device, and distribute it over the ranks."""
        cast_trained_to_fp32(self.scorer)
        self.scorer.to(world.device)
        if world.world_size == 1 or not trained:
            return
        devices = None if world.device.type == "cpu" else [world.device]
        self.ddp = DistributedDataParallel(
            self.scorer, devices, gradient_as_bucket_view=True, bucket_cap_mb=strategy.bucket_mb
        )
        self.ddp.broadcast_buffers = False  # no buffer is trained (the argument is deprecated)
        if strategy.grad_reduce_dtype != "fp32":
            name = f"{strategy.grad_reduce_dtype}_compress_hook"
            self.ddp.register_comm_hook(None, getattr(default_hooks, name))
        # DDP reorders its buckets after the first backward. With one unused pass before the first
        # step, every step, also the first one after a resume, sums in the same order.
        (torch.stack(self(self.scorer.example(world.device))).sum() * 0).backward()
        self.ddp.zero_grad(set_to_none=True)

    def release(self) -> None:
        """Forget what else keeps a reference model in memory that is not needed any more."""

    @property
    def precision(self) -> torch.dtype:
        """Return the dtype in which the scorer computes."""
        return self.scorer.precision

    @property
    def token_noise(self) -> float:
        """Return the token_noise of the scorer."""
        return self.scorer.token_noise

    # --- a step: forward, backward, clip, AdamW ---------------------------------------------------

    def __call__(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the scorer's output in training; in evaluation call `scorer` itself."""
        return (self.ddp or self.scorer)(batch)

    def sync_gradients(self, last: bool) -> None:
        """Before a forward: gradients are reduced over ranks in its backward if it is the last."""
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = last

    def backward(self, loss: Tensor) -> None:
        """Run the backward of one micro-batch."""
        self.backward_loss = self.backward_loss + loss.detach()
        (loss * self.loss_scale.scale).backward()

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Return a context for steps whose gradients are dropped, as short of memory as later ones.

        It holds as much memory as AdamW's moments will.
        """
        shards = self.trainable().values()
        moments = [(torch.empty_like(shard), torch.empty_like(shard)) for shard in shards]
        yield
        del moments
        for parameter in self.trainable().values():
            parameter.grad = None
        self.backward_loss = 0.0

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Undo the loss scale and clip (0: do not); return the norm before clipping."""
        parameters = list(self.trainable().values())
        if self.loss_scale.enabled:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale.scale)
        limit = max_norm if max_norm > 0 else math.inf
        return self.gather_tensor(nn.utils.clip_grad_norm_(parameters, limit))

    def overflows(self, norm: float) -> bool:
        """Return whether fp16 overflowed: the step will be skipped and the loss scale halved."""
        return self.scorer.autocast == torch.float16 and not math.isfinite(norm)

    def make_optimizer(self, kind: Any, weight_decay: float, rate: float, **options: Any) -> Any:
        """Return an optimizer of all trained parameters; kind: a class of torch.optim."""
        groups = parameter_groups(self.trainable(), weight_decay)
        if kind is AdamW:
            options = {"fused": groups[0]["params"][0].device.type == "cuda"} | options
        return kind(groups, lr=rate, **options)

    def step(self, optimizer: AdamW, schedule: LambdaLR, grad_norm: float) -> None:
        """Update the weights and the learning rate; fp16 skips the weights after an overflow."""
        if self.loss_scale.allows_step(grad_norm):
            optimizer.step()
        else:  # the schedule counts the step nevertheless
            warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
        optimizer.zero_grad(set_to_none=True)
        schedule.step()

    # --- parameters, under the names that the model gives them ------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return name -> parameter of everything that is trained."""
        named = self.scorer.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def gathered(self) -> contextlib.AbstractContextManager:
        """Return a context in which each rank has all weights, for calls to parts of the scorer."""
        return contextlib.nullcontext()

    def gather_tensor(self, tensor: Any) -> Any:
        """Return the full tensor of which each rank has a shard."""
        return tensor

    def full_parameter(self, parameter: Tensor) -> Tensor:
        """Return the full weight in fp32."""
        return self.gather_tensor(parameter.detach())

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the full gradient between backward and step; None if there is none."""
        return self.gather_tensor(parameter.grad)

    # --- checkpoints: `layout` is Strategy.shard_layout -------------------------------------------

    def updated(self) -> Tensors:
        """Return name -> tensor of everything that AdamW updates."""
        return {**self.trainable()}

    @torch.no_grad()
    def swap(self, others: Tensors) -> None:
        """Exchange the values of updated() with those of other tensors, such as their averages."""
        for name, tensor in self.updated().items():
            value = tensor.clone()
            tensor.copy_(others[name])
            others[name].copy_(value)

    @contextlib.contextmanager
    def swapped(self, others: Tensors) -> Iterator[None]:
        """Return a context in which updated() and other tensors are exchanged; see swap()."""
        self.swap(others)
        try:
            yield
        finally:
            self.swap(others)

    def state(self, optimizer: AdamW, layout: str = "") -> Tensors:
        """Return all tensors that the next step depends on.

        These are `parameter/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` of updated(), and
        `loss_scale`: with a layout this rank's shards, otherwise full tensors on rank 0.
        """
        tensors = {}
        for name, parameter in self.updated().items():
            states = {"parameter": parameter.detach(), **optimizer.state[parameter]}
            for key, tensor in states.items():
                value = self.to_saved(tensor, layout)
                if value is not None:
                    tensors[f"{key}/{name}"] = value
        values = self.scale_state()
        if values:
            tensors["loss_scale"] = torch.tensor(values, dtype=torch.float64)
        return tensors

    def scale_state(self) -> list[float]:
        """Return the numbers that the loss scale consists of; [] except in fp16."""
        scale = self.loss_scale
        return [scale.scale, scale.good_steps] if scale.enabled else []

    def set_scale_state(self, values: list[float]) -> None:
        """Continue with a loss scale of an earlier start."""
        self.loss_scale.scale, good_steps = values
        self.loss_scale.good_steps = int(good_steps)

    @torch.no_grad()
    def load_state(
        self, optimizer: AdamW, schedule: LambdaLR, tensors: Tensors, step: int, layout: str = ""
    ) -> None:
        """Load what state() returned after `step` steps; full tensors on any number of ranks."""
        self.load_tensors(optimizer, tensors, layout)
        schedule.last_epoch = step
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, (rate, factor) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)

    def load_tensors(self, optimizer: AdamW, tensors: Tensors, layout: str) -> None:
        """Load parameters, AdamW's moments and the loss scale."""
        named = self.updated()
        is_fused = optimizer.defaults.get("fused")  # a fused AdamW counts steps on the device
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if key == "loss_scale":
                if self.scale_state():  # otherwise an earlier start has computed in fp16
                    self.set_scale_state(value.tolist())
            elif kind == "parameter":
                named[name].copy_(self.from_saved(value, named[name], layout))
            elif kind == "step" or value.ndim == 0 < named[name].ndim:  # one number per parameter
                device = named[name].device if is_fused else "cpu"
                optimizer.state[named[name]][kind] = value.to(device, copy=True)
            else:
                moment = self.from_saved(value, named[name], layout)
                optimizer.state[named[name]][kind] = moment.clone()

    def to_saved(self, tensor: Tensor, layout: str) -> Tensor | None:
        """Return what this rank saves of a tensor, or None."""
        return tensor

    def from_saved(self, value: Tensor, like: Tensor, layout: str) -> Tensor:
        """Return a saved tensor on the device, and with the shards, of `like`."""
        return value.to(like.device)


def cast_trained_to_fp32(module: nn.Module) -> None:
    """Cast what is trained to fp32, one parameter at a time."""
    for parameter in module.parameters():
        # a sharded parameter has no `data` that can be replaced, and is in fp32 already
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


# --- precision ------------------------------------------------------------------------------------


class Precision(NamedTuple):
    """The dtypes in which a model is loaded and computes."""

    weights: torch.dtype  # as they are loaded; trained weights are always fp32
    autocast: torch.dtype | None  # bf16, fp16, or None

    @classmethod
    def choose(
        cls,
        device: torch.device,
        fine_tuning: str = "full",
        base_dtype: str = "auto",
        mixed: str = "auto",
    ) -> "Precision":
        """Return the settings, with what is "auto" chosen by the device.

        base_dtype: of frozen weights, auto, fp32, bf16; mixed: auto, no, bf16, fp16. Trained
        weights are always fp32: at a learning rate of 5e-7 the update of a bf16 weight is less
        than half the distance to the next bf16 number, and 99 % of the weights would never move.
        """
        autocast = DTYPES.get(mixed)
        if autocast is None and device.type != "cpu" and mixed == "auto":
            is_xpu = device.type == "xpu"
            has_bf16 = is_xpu or torch.cuda.is_bf16_supported(including_emulation=False)
            autocast = torch.bfloat16 if has_bf16 else torch.float16
        weights = torch.float32
        if fine_tuning != "full":
            if base_dtype == "bf16" and mixed == "auto":
                autocast = torch.bfloat16  # also on a CPU
            weights = DTYPES.get(base_dtype, autocast or torch.float32)
        if device.type == "cpu" and torch.bfloat16 in (weights, autocast):
            warn_if_bf16_is_slow()
        return cls(weights, autocast)


def cpu_info(path: str = "/proc/cpuinfo") -> tuple[str, set[str]]:
    """Return the name of this CPU and its flags, such as avx2; none are known outside Linux."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    values = {key.strip(): value.strip() for key, _, value in (s.partition(":") for s in lines)}
    flags = values.get("flags") or values.get("Features") or ""  # x86 or ARM
    return values.get("model name") or platform.processor() or "unknown", set(flags.split())


@functools.cache
def is_bf16_fast() -> bool:
    """Return whether this CPU has instructions for bf16: AVX512-BF16, AMX or, on ARM, BF16.

    On a CPU whose flags are not known, one layer is measured.
    """
    _, flags = cpu_info()
    if not flags:
        return bf16_slowdown() <= 1
    if "bf16" in flags:  # ARM
        return True
    kernels = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY can lower it
    return bool(flags & {"avx512_bf16", "amx_bf16"}) and kernels not in ("DEFAULT", "AVX2")


@functools.cache
def bf16_slowdown() -> float:
    """Return how many times longer a linear layer takes in bf16 than in fp32 on this CPU.

    It is measured once per process, on one thread: forward and backward of a layer of 512 x 512
    for 128 tokens. It was 0.3 with AMX, and 4 to 24 without instructions for bf16.
    """
    seconds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        tokens = torch.ones(128, 512, dtype=dtype)
        weight = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(4):  # the first one includes preparations
            start = time.thread_time()  # without the time of other programs
            (tokens @ weight.T) @ weight
            times.append(time.thread_time() - start)
        seconds[dtype] = min(times)
    torch.set_num_threads(threads)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def warn_if_bf16_is_slow() -> None:
    """Print a warning, which the report repeats, if bf16 was asked for on a CPU that lacks it."""
    if not is_bf16_fast():
        fix = "for fp32 leave out base_dtype bf16 and mixed_precision bf16"
        line = f"warning: bf16 takes {bf16_slowdown():.0f} times as long as fp32 on this CPU"
        distributed.warn(f"{line}, measured with one layer; {fix}")


# --- AdamW and its schedule -----------------------------------------------------------------------


def learning_rate(rate: float, lr_scaling: str, batch_ratio: float, world_size: int) -> float:
    """Return the peak learning rate.

    batch_ratio: global batch over the batch size for which `rate` was chosen.
    """
    factors = {"linear": batch_ratio, "sqrt": math.sqrt(batch_ratio), "world_size": world_size}
    return rate * factors.get(lr_scaling, 1.0)


def rate_text(peak: float, config: Any) -> str:
    """Return the peak learning rate and, if it differs from the setting, how it was scaled."""
    rate = config.learning_rate
    if peak == rate:
        return f"learning rate {peak:.3g}"
    return (
        f"learning rate {peak:.3g} ({rate:.3g} x {peak / rate:.3g}, lr_scaling {config.lr_scaling})"
    )


def decay(kind: str, done: int, steps: int, warmup: int) -> float:
    """Return the factor on the peak learning rate for the step after `done` steps.

    Warm-up: (done + 1) / (warmup + 1), so that the first step moves. Then, with
    t = (done - warmup) / (steps - warmup): constant 1, linear 1 - t, cosine (1 + cos pi t) / 2.
    """
    if done < warmup:
        return (done + 1) / (warmup + 1)
    t = min(1.0, (done - warmup) / max(1, steps - warmup))
    return {"constant": 1.0, "linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2}[kind]


def make_optimizer(
    policy: Policy,
    rate: float,
    steps: int,
    lr_scheduler: str,
    warmup_ratio: float,
    weight_decay: float,
    optimizer_class: type[Optimizer] = AdamW,
    schedule: Callable[[int, int], float] | None = None,
    **options: Any,
) -> tuple[AdamW, LambdaLR]:
    """Return AdamW and its schedule over `steps` steps.

    rate: the peak learning rate; warmup_ratio: the fraction of the steps before the peak.
    optimizer_class: another optimizer whose state consists of tensors; options: its arguments, such
    as betas. schedule: (steps done, steps) -> factor on the rate, instead of lr_scheduler and
    warmup_ratio.
    """
    optimizer = policy.make_optimizer(optimizer_class, weight_decay, rate, **options)
    warmup = math.ceil(round(warmup_ratio * steps, 6))

    def factor(done: int) -> float:
        return schedule(done, steps) if schedule else decay(lr_scheduler, done, steps, warmup)

    return optimizer, LambdaLR(optimizer, factor)


def parameter_groups(trainable: dict[str, nn.Parameter], weight_decay: float) -> list[dict]:
    """Return groups for AdamW: matrices with weight decay, norms and biases without."""
    if not trainable:
        raise UserError("no weight of the model is trained; leave some of them unfrozen")
    matrices = [parameter for parameter in trainable.values() if parameter.ndim >= 2]
    others = [parameter for parameter in trainable.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
