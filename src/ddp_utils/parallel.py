"""Wrap, backward, clip, step, state: the same calls under DDP, FSDP and DeepSpeed.

config.strategy says which ("ddp" without it); config.sharding what FSDP or DeepSpeed is told.
"""

import collections
import contextlib
import math

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import NonFiniteError, UserError, dist, fsdp, zero

HOOKS = {  # how gradients travel under DDP
    "fp32": None,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
SCALINGS = {  # how the learning rate grows with (global batch / base batch, world size)
    "linear": lambda ratio, world_size: ratio,
    "sqrt": lambda ratio, world_size: math.sqrt(ratio),
    "world_size": lambda ratio, world_size: world_size,
    "none": lambda ratio, world_size: 1.0,
}


class LossScale:
    """Dynamic loss scale for fp16: double after 2000 good steps, halve and skip after a bad one."""

    def __init__(self, enabled):
        self.scale = 2.0**16 if enabled else 1.0
        self.enabled = enabled
        self.good_steps = 0
        self.norm = None  # of this step's gradient

    def allows_step(self):
        """Whether this step may be taken; always, if not enabled. The one host sync of fp16."""
        if not self.enabled:
            return True
        finite = bool(torch.isfinite(self.norm))
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self.good_steps % 2000 == 0:
            self.scale *= 2
        return finite


def wrap(scorer, config, world):
    """What trains the scorer on all ranks, on their devices; with one process the scorer itself.

    Every call of what is returned, and of the scorer in it, must then be made by all ranks.
    """
    strategy, options = _strategy(config)
    scorer.loss_scale = LossScale(scorer.autocast == torch.float16 and strategy != "deepspeed")
    if strategy == "deepspeed":
        if scorer.autocast is None:  # else its weights become half ones, with fp32 copies to train
            fsdp.float_trained(scorer)
        return zero.wrap(scorer, options, _groups(trainable(scorer).values(), config), world)
    place(scorer, config, world)
    if strategy == "fsdp" or world.world_size == 1:
        return scorer
    policy = DistributedDataParallel(
        scorer,
        device_ids=None if world.device.type == "cpu" else [world.device],
        gradient_as_bucket_view=True,
        bucket_cap_mb=getattr(config, "bucket_mb", None),
    )
    policy.broadcast_buffers = False  # nothing trained is a buffer (as an argument it is going)
    if hook := HOOKS[getattr(config, "grad_reduce_dtype", "fp32")]:
        policy.register_comm_hook(None, hook)
    # DDP orders its buckets anew after the first backward: one throwaway pass, so that every
    # step, and the first one of a resumed run, sums in the same order
    (torch.stack(policy(scorer.example(world.device))).sum() * 0).backward()
    policy.zero_grad(set_to_none=True)
    policy.require_backward_grad_sync = False  # see backward()
    return policy


def check_nodes(config, world):
    """HYBRID_SHARD shares out within a node and copies across: all must have as many processes."""
    if getattr(_strategy(config)[1], "strategy", "") != "HYBRID_SHARD":
        return
    size, here = world.world_size, world.local_size
    total, squares = dist.all_sum(torch.tensor([here, here**2], device=world.device), world)
    if total**2 != size * squares:  # all ranks see the same: a rank's own numbers may fit
        says = f"HYBRID_SHARD: {size} processes, {here} of them on this node"
        raise UserError(f"{says}; start as many on each node")


def place(scorer, config, world):
    """The scorer on this rank's device, with FSDP its share of it; also of what is not trained."""
    strategy, options = _strategy(config)
    if strategy == "fsdp" and world.world_size > 1:
        reduce_dtype = fsdp.DTYPES[getattr(config, "grad_reduce_dtype", "fp32")]
        fsdp.shard(scorer, options, world, reduce_dtype)
        with torch.no_grad():  # FSDP must see the root first; checks go to parts of it
            scorer(scorer.example(world.device))
    else:
        fsdp.float_trained(scorer)
        scorer.to(world.device)
    return scorer


def _strategy(config):
    """(ddp, fsdp or deepspeed, what it is told); what shards nothing is DDP."""
    strategy = getattr(config, "strategy", "ddp")
    options = getattr(config, "sharding", None) or (fsdp.Settings() if strategy == "fsdp" else None)
    nothing = strategy == "fsdp" and options.strategy == "NO_SHARD"
    nothing = nothing or (strategy == "deepspeed" and zero.stage(options) == 0)
    return ("ddp", None) if nothing else (strategy, options)


def named(config) -> str:
    """The strategy, for people."""
    strategy, options = _strategy(config)
    if strategy == "deepspeed":
        return f"ZeRO-{zero.stage(options)}"
    return f"FSDP {options.strategy}" if strategy == "fsdp" else "DDP"


def bare(policy):
    """The scorer inside whatever wraps it."""
    return getattr(policy, "module", policy)


def is_zero(policy):
    """Whether DeepSpeed's engine is around it."""
    return hasattr(policy, "set_gradient_accumulation_boundary")


@contextlib.contextmanager
def together(policy):
    """For calls to parts of an FSDP scorer: what the root itself holds is gathered meanwhile."""
    fsdp.unshard(bare(policy))
    try:
        yield
    finally:
        fsdp.reshard(bare(policy))


def trainable(policy):
    """Name -> parameter of all that is trained, under the model's own names."""
    fsdp.reshard(bare(policy))
    named = bare(policy).model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def backward(policy, loss, last: bool):
    """Backward of one micro-batch; gradients travel between ranks with the last one only."""
    if is_zero(policy):
        zero.backward(policy, loss, last)
        return
    if last and isinstance(policy, DistributedDataParallel):
        # DDP arms its reducer in the forward, so no_sync() would have to be around that, too.
        # Here every forward leaves it unarmed, and this is what the last one would have done.
        policy.reducer.prepare_for_forward()
        policy.reducer.prepare_for_backward([])
    (loss * bare(policy).loss_scale.scale).backward()


def clip(policy, max_norm):
    """Undo the loss scale and clip; returns the norm before clipping, equal on all ranks."""
    scale = bare(policy).loss_scale
    if is_zero(policy):  # DeepSpeed clips in its step
        return zero.norm(policy)
    parameters = list(trainable(policy).values())
    if scale.enabled:
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], scale.scale)
    limit = max_norm if max_norm > 0 else math.inf
    scale.norm = fsdp.whole(torch.nn.utils.clip_grad_norm_(parameters, limit))
    return scale.norm


def step(policy, optimizer, schedule):
    """One optimiser step and the next learning rate; fp16 skips it if the gradient overflowed."""
    if is_zero(policy):
        policy.step()
    else:
        if bare(policy).loss_scale.allows_step():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    schedule.step()


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


def make_optimizer(policy, config, peak, steps):
    """AdamW and its schedule; weight decay on matrices only, not on norms and biases."""
    if is_zero(policy):
        optimizer = zero.basic(policy)
        for group in optimizer.param_groups:
            group["lr"] = peak
    else:
        parameters = trainable(policy).values()
        fused = next(iter(parameters)).device.type == "cuda"
        betas = getattr(config, "betas", (0.9, 0.999))
        groups = _groups(parameters, config)
        optimizer = torch.optim.AdamW(groups, lr=peak, betas=betas, fused=fused)
    warmup = math.ceil(round(config.warmup_ratio * steps, 6))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: decay(config.lr_scheduler, done, steps, warmup)
    )
    return optimizer, schedule


def _groups(parameters, config):
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def bytes_to_write(outline, config):
    """Of the model and its checkpoints, at the least: fp32 weights and AdamW's two moments."""
    if config.fine_tuning == "full":
        trained = sum(p.numel() for p in outline.parameters())
    else:
        linear = [m for m in outline.modules() if isinstance(m, nn.Linear)]
        trained = sum(config.lora_r * (m.in_features + m.out_features) for m in linear)
    checkpoints = config.keep_checkpoints + 1 + getattr(config, "save_best", False)
    return 4 * trained * (1 + 3 * checkpoints)


def shares(config, world_size) -> str:
    """What a checkpoint belongs to, if every rank saves its own share; else "", and any may go on.

    A LoRA is small, and kept whole under every strategy.
    """
    strategy, options = _strategy(config)
    if strategy == "ddp" or config.fine_tuning == "lora" or world_size == 1:
        return ""
    if strategy == "fsdp":
        kind = f"FSDP {options.strategy}"
        return "" if options.one_file else f"{kind} on {world_size} processes"
    return f"ZeRO-{zero.stage(options)} on {world_size} processes"


def state(policy, optimizer, shared="") -> dict:
    """All tensors that make the next step what it is, under plain names (no "module.").

    `parameter/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` of what is trained. Whole, on
    rank 0 alone; or where shares() says so, this rank's share. All ranks must call it.
    """
    named = trainable(policy)
    if is_zero(policy):
        return zero.state(policy, named, one_file=not shared)
    tensors = {}
    for name, parameter in named.items():
        states = {"parameter": parameter.detach(), **optimizer.state[parameter]}
        for key, value in states.items():
            value = fsdp.local(value) if shared else fsdp.whole(value)
            if shared or not fsdp.is_sharded(parameter) or dist.is_first():
                tensors[f"{key}/{name}"] = value
    scale = bare(policy).loss_scale
    tensors["loss_scale"] = torch.tensor([scale.scale, scale.good_steps], dtype=torch.float64)
    return tensors


def weights(policy):
    """The whole weights of all that is trained, on rank 0, if they are not whole anyway."""
    found = {}
    if not is_zero(policy) and not any(map(fsdp.is_sharded, trainable(policy).values())):
        return None
    for name, parameter in trainable(policy).items():
        value = zero.parameter(parameter) if is_zero(policy) else fsdp.whole(parameter.detach())
        if dist.is_first():
            found[name] = value.cpu()
    return found


@torch.no_grad()
def load_state(policy, optimizer, schedule, tensors, step, shared=""):
    """Put back what state() returned after `step` steps; if whole, on any number of ranks."""
    named, states = trainable(policy), collections.defaultdict(dict)
    unknown = {key.partition("/")[2] for key in tensors if "/" in key} - named.keys()
    if unknown and not (shared and is_zero(policy)):  # which numbers its shares
        raise UserError(f"the checkpoint trains {min(unknown)}, this run does not")
    if is_zero(policy):
        zero.load_state(policy, named, tensors, one_file=not shared)
    else:
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        index = {id(parameter): place for place, parameter in enumerate(ordered)}
        place = fsdp.from_share if shared else fsdp.from_whole
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if key == "loss_scale":
                scale = bare(policy).loss_scale
                scale.scale, scale.good_steps = value[0].item(), int(value[1])
            elif not name:  # DeepSpeed's loss scale
                continue
            elif kind == "parameter":
                named[name].copy_(place(value, named[name]))
            elif kind == "step":
                states[index[id(named[name])]][kind] = value.to("cpu", copy=True)
            else:
                states[index[id(named[name])]][kind] = place(value, named[name]).clone()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(states)})
    schedule.last_epoch = step
    for group, rate, factor in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = rate * factor(step)


def overflows(policy, norm):
    """Whether this gradient is too large for fp16: its step is skipped, with a smaller scale."""
    return bare(policy).autocast == torch.float16 and not bool(torch.isfinite(norm))


def check_finite(per_pair, wheres, step):
    """Name the rows whose loss is NaN or infinite; every rank sees the same table and stops."""
    bad = [where for where, loss in zip(wheres, per_pair.tolist(), strict=True) if loss - loss != 0]
    if bad:
        others = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NonFiniteError(
            f"{', '.join(bad[:3])}{others}: the loss is not finite in step {step + 1}; "
            "no step was taken; a smaller --learning_rate, or remove the rows"
        )


def check_gradients(policy, fine_tuning):
    """Before step 0: what is trained has a finite gradient, what is frozen has none.

    A LoRA's B must move; its A must not, while B is 0. Raises UserError naming the parameter.
    """
    fsdp.reshard(bare(policy))
    for name, parameter in bare(policy).model.named_parameters():
        adapter = "lora_" in name
        gradient = parameter.grad
        if parameter.requires_grad:
            gradient = zero.gradient(parameter) if is_zero(policy) else fsdp.whole(gradient)
        if not parameter.requires_grad:
            wrong = "is frozen and has a gradient" if gradient is not None else None
        elif fine_tuning == "lora" and not adapter:
            wrong = "belongs to the base model and is not frozen"
        elif gradient is None:
            wrong = "has no gradient"
        elif not bool(torch.isfinite(gradient).all()):
            wrong = "has a gradient that is not finite"
        elif "lora_B" in name and not bool(gradient.any()):
            wrong = "has a gradient of zero: the adapter would not learn"
        else:
            wrong = None
        if wrong:
            raise UserError(f"before the first step: {name} {wrong}")
