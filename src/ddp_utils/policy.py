"""The policy: a scorer that is trained on all ranks, with AdamW and its schedule.

Policy is the policy of one process and of DDP. FSDP and DeepSpeed have their own in sharding/, with
the same methods; `sharding.wrap` returns the one that a Strategy names.
"""

import contextlib
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import UserError, distributed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOOKS = {  # how gradients travel under DDP
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
SCALINGS = {  # how the learning rate grows with (global batch / base batch, world size)
    "linear": lambda ratio, world_size: ratio,
    "sqrt": lambda ratio, world_size: math.sqrt(ratio),
    "world_size": lambda ratio, world_size: world_size,
    "none": lambda ratio, world_size: 1.0,
}


class Strategy(NamedTuple):
    """How a scorer is trained on several ranks."""

    kind: str = "ddp"  # fsdp, deepspeed
    options: object = None  # of FSDP its Settings, of DeepSpeed the object in its JSON
    grad_reduce_dtype: str = "fp32"  # in which gradients travel: fp32, bf16, fp16
    bucket_mb: float | None = None  # of DDP, gradients that travel at once; None: torch's choice

    @property
    def name(self):
        """The strategy, for people: DDP, FSDP FULL_SHARD, ZeRO-2."""
        if self.kind == "deepspeed":
            return f"ZeRO-{self.options['zero_optimization']['stage']}"
        if self.kind == "fsdp":
            return f"FSDP {getattr(self.options, 'strategy', 'FULL_SHARD')}"
        return "DDP"

    def shares(self, fine_tuning, world_size) -> str:
        """What a checkpoint belongs to if every rank saves its own share, else "".

        A LoRA is small, and kept whole under every strategy: any number of ranks may continue it.
        """
        if self.kind == "ddp" or fine_tuning == "lora" or world_size == 1:
            return ""
        if getattr(self.options, "one_file", False):  # FSDP's FULL_STATE_DICT
            return ""
        return f"{self.name} on {world_size} processes"


DDP = Strategy()


class LossScale:
    """Dynamic loss scale for fp16: double after 2000 good steps, halve and skip after a bad one."""

    def __init__(self, enabled):
        self.scale = 2.0**16 if enabled else 1.0
        self.enabled = enabled
        self.good_steps = 0

    def allows_step(self, grad_norm):
        """Whether a step with this gradient may be taken; always, if not enabled."""
        if not self.enabled:
            return True
        finite = math.isfinite(grad_norm)
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % 2000 == 0:
            self.scale *= 2
        return finite


class Policy:
    """A scorer on each rank's device, under DistributedDataParallel if there are several ranks.

    trained: False for a reference model, which is moved to the device and not wrapped.
    """

    is_sharded = False

    def __init__(self, scorer, world, strategy=DDP, trained=True):
        self.scorer = scorer
        self.loss_scale = LossScale(scorer.autocast == torch.float16)
        self.ddp = None
        self.place(world, strategy)
        if world.world_size > 1 and trained:
            self.distribute(world, strategy)

    def place(self, world, strategy):
        """Bring the scorer to this rank's device."""
        float_trained(self.scorer)
        self.scorer.to(world.device)

    def distribute(self, world, strategy):
        """Let gradients travel between ranks."""
        self.ddp = DistributedDataParallel(
            self.scorer,
            device_ids=None if world.device.type == "cpu" else [world.device],
            gradient_as_bucket_view=True,
            bucket_cap_mb=strategy.bucket_mb,
        )
        self.ddp.broadcast_buffers = False  # nothing trained is a buffer (the argument is going)
        if strategy.grad_reduce_dtype != "fp32":
            self.ddp.register_comm_hook(None, HOOKS[strategy.grad_reduce_dtype])
        # DDP orders its buckets anew after the first backward: one throwaway pass, so that every
        # step, and the first one of a resumed run, sums in the same order
        (torch.stack(self(self.scorer.example(world.device))).sum() * 0).backward()
        self.ddp.zero_grad(set_to_none=True)

    @property
    def precision(self):
        """The dtype that the scorer computes in."""
        return self.scorer.precision

    def __call__(self, batch):
        """The scorer's output for a batch, in a forward that trains; else call `scorer` itself."""
        return (self.ddp or self.scorer)(batch)

    def sync_gradients(self, last: bool):
        """Before a forward: gradients travel between ranks in its backward if it is the `last`."""
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = last

    def backward(self, loss):
        """Backward of one micro-batch."""
        (loss * self.loss_scale.scale).backward()

    def clip_grad_norm(self, max_norm):
        """Undo the loss scale and clip; returns the norm before clipping, equal on all ranks."""
        parameters = list(self.trainable().values())
        if self.loss_scale.enabled:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale.scale)
        limit = max_norm if max_norm > 0 else math.inf
        return self.whole(nn.utils.clip_grad_norm_(parameters, limit))

    def overflows(self, norm):
        """Whether this gradient is too large for fp16: its step is skipped, the scale halved."""
        return self.scorer.autocast == torch.float16 and not math.isfinite(norm)

    def make_adamw(self, weight_decay, rate, betas):
        """AdamW on what is trained."""
        parameters = self.trainable().values()
        fused = next(iter(parameters)).device.type == "cuda"
        groups = parameter_groups(parameters, weight_decay)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)

    def step(self, optimizer, schedule, grad_norm):
        """One step and the next learning rate; fp16 skips it if the gradient overflowed."""
        if self.loss_scale.allows_step(grad_norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()

    def trainable(self):
        """Name -> parameter of all that is trained, under the model's own names."""
        named = self.scorer.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def gathered(self):
        """Context for calls to parts of the scorer: weights that they use are whole meanwhile."""
        return contextlib.nullcontext()

    def gradient(self, parameter):
        """The whole gradient of a parameter before the step, on all ranks; None without one."""
        return self.whole(parameter.grad)

    def full_weights(self):
        """Name -> whole weight of all that is trained, on rank 0; None if the model has them."""
        if not self.is_sharded:
            return None
        weights = {}
        for name, parameter in self.trainable().items():
            weight = self.full_parameter(parameter)  # all ranks take part
            if distributed.is_first():
                weights[name] = weight.cpu()
        return weights

    # --- state: names are the model's own --------------------------------------------------------

    def whole(self, tensor):
        """A tensor with all its shares, on all ranks, which must all call this."""
        return tensor

    def saved(self, tensor, shared):
        """What of a tensor this rank saves, or None."""
        return tensor

    def loaded(self, value, like, shared):
        """A tensor that was saved, on the device of `like`."""
        return value.to(like.device)

    def state(self, optimizer, shared="") -> dict:
        """All tensors that make the next step what it is.

        `parameter/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` of what is trained, whole
        on rank 0; shared, as Strategy.shares() says: of each rank its share. All ranks must call.
        """
        tensors = {}
        for name, parameter in self.trainable().items():
            states = {"parameter": parameter.detach(), **optimizer.state[parameter]}
            for key, tensor in states.items():
                value = self.saved(tensor, shared)
                if value is not None:
                    tensors[f"{key}/{name}"] = value
        facts = [self.loss_scale.scale, self.loss_scale.good_steps]
        tensors["loss_scale"] = torch.tensor(facts, dtype=torch.float64)
        return tensors

    @torch.no_grad()
    def load_state(self, optimizer, schedule, tensors, step, shared=""):
        """Put back what state() returned after `step` steps; if whole, on any number of ranks."""
        self.load_tensors(optimizer, tensors, shared)
        schedule.last_epoch = step
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, (rate, factor) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)

    def load_tensors(self, optimizer, tensors, shared):
        """Put back parameters, AdamW's moments and the loss scale."""
        named = self.trainable()
        check_names(named, tensors)
        fused = optimizer.defaults.get("fused")  # counts its steps on the device
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if key == "loss_scale":
                self.loss_scale.scale = value[0].item()
                self.loss_scale.good_steps = int(value[1])
            elif kind == "parameter":
                named[name].copy_(self.loaded(value, named[name], shared))
            elif kind == "step":
                home = named[name].device if fused else "cpu"
                optimizer.state[named[name]][kind] = value.to(home, copy=True)
            elif name:  # else DeepSpeed's loss scale
                moment = self.loaded(value, named[name], shared).clone()
                optimizer.state[named[name]][kind] = moment


def check_names(named, tensors):
    """Raise UserError if a checkpoint has the state of a parameter that is not among `named`."""
    unknown = {key.partition("/")[2] for key in tensors if "/" in key} - named.keys()
    if unknown:
        raise UserError(f"the checkpoint trains {min(unknown)}, this run does not")


def float_trained(module):
    """What is trained in fp32, one layer at a time: a whole model in fp32 may not fit anywhere."""
    for parameter in module.parameters():
        # `data` of a sharded parameter cannot be replaced, and is fp32 already
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


class Precision(NamedTuple):
    """In which types a model is loaded and computes."""

    weights: torch.dtype  # of those that are loaded; what is trained is fp32 always
    autocast: torch.dtype | None  # bf16, fp16, or None

    @classmethod
    def choose(cls, device, fine_tuning="full", base_dtype="auto", mixed="auto"):
        """Choose by the device what is left at "auto".

        base_dtype: of frozen weights, auto, fp32, bf16; mixed: auto, no, bf16, fp16. Trainable
        weights are always fp32: at a learning rate of 5e-7 an update of a bf16 weight is below
        half the distance to its neighbour, and 99 % of them would never move.
        """
        autocast = DTYPES.get(mixed)
        if autocast is None and device.type != "cpu" and mixed == "auto":
            is_xpu = device.type == "xpu"
            has_bf16 = is_xpu or torch.cuda.is_bf16_supported(including_emulation=False)
            autocast = torch.bfloat16 if has_bf16 else torch.float16
        if fine_tuning == "full":
            return cls(torch.float32, autocast)
        if base_dtype == "bf16" and mixed != "no":
            autocast = torch.bfloat16  # on a CPU that was asked for it
        frozen = torch.bfloat16 if autocast == torch.bfloat16 else torch.float32
        return cls(DTYPES.get(base_dtype, frozen), autocast)


def check_same_precision(precision, world):
    """Raise UserError unless all ranks have bf16 or none: gradients of two kinds do not mix."""
    has_bf16 = float(precision.autocast == torch.bfloat16)
    votes = distributed.all_sum(torch.tensor([has_bf16], device=world.device), world).item()
    if 0 < votes < world.world_size:
        raise UserError(
            f"{votes:.0f} of {world.world_size} GPUs have bf16; "
            "give --no_use_mixed_precision, or leave the others out"
        )


# --- AdamW and its schedule ----------------------------------------------------------------------


def learning_rate(config, global_batch, world_size):
    """The peak learning rate: `learning_rate` is meant for base_batch_size pairs per step."""
    ratio = global_batch / config.base_batch_size
    return config.learning_rate * SCALINGS[config.lr_scaling](ratio, world_size)


def decay(kind, done, steps, warmup):
    """Factor on the peak learning rate for the step after `done` steps.

    Warm-up: (done + 1) / (warmup + 1), so that the first step moves. Then, with
    t = (done - warmup) / (steps - warmup): constant 1, linear 1 - t, cosine (1 + cos pi t) / 2.
    """
    if done < warmup:
        return (done + 1) / (warmup + 1)
    t = min(1.0, (done - warmup) / max(1, steps - warmup))
    return {"constant": 1.0, "linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2}[kind]


def make_optimizer(policy, config, peak, steps, betas=(0.9, 0.999)):
    """AdamW and its schedule; weight decay on matrices only, not on norms and biases."""
    optimizer = policy.make_adamw(config.weight_decay, peak, betas)
    warmup = math.ceil(round(config.warmup_ratio * steps, 6))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: decay(config.lr_scheduler, done, steps, warmup)
    )
    return optimizer, schedule


def parameter_groups(parameters, weight_decay):
    """Matrices with weight decay, norms and biases without."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def bytes_to_write(meta_model, checkpoints, lora_r=None):
    """Return the bytes of a model and its checkpoints: fp32 weights, and AdamW's two moments.

    meta_model: on the meta device; lora_r: rank of the LoRA that is trained, if one is.
    """
    trained = sum(p.numel() for p in meta_model.parameters())
    if lora_r:
        linear = [m for m in meta_model.modules() if isinstance(m, nn.Linear)]
        trained = sum(lora_r * (m.in_features + m.out_features) for m in linear)
    return 4 * trained * (1 + 3 * checkpoints)
