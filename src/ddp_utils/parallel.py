"""Wrap, backward, clip, step, state: the same five calls under every strategy."""

import collections
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_utils import UserError

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
    """DDP around the scorer for several processes; the scorer itself for one."""
    scorer.loss_scale = LossScale(scorer.autocast == torch.float16)
    if world.world_size == 1:
        return scorer
    policy = DistributedDataParallel(
        scorer,
        device_ids=None if world.device.type == "cpu" else [world.device],
        gradient_as_bucket_view=True,
    )
    policy.broadcast_buffers = False  # nothing trained is a buffer (as an argument it is going)
    # DDP orders its buckets anew after the first backward: one throwaway pass, so that every
    # step, and the first one of a resumed run, sums in the same order
    chosen, rejected = policy(scorer.example(world.device))
    ((chosen + rejected).sum() * 0).backward()
    policy.zero_grad(set_to_none=True)
    policy.require_backward_grad_sync = False  # see backward()
    return policy


def bare(policy):
    """The scorer inside whatever wraps it."""
    return policy.module if isinstance(policy, DistributedDataParallel) else policy


def trainable(policy):
    """Name -> parameter of all that is trained, under the model's own names."""
    named = bare(policy).model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def backward(policy, loss, last: bool):
    """Backward of one micro-batch; gradients travel between ranks with the last one only."""
    if last and isinstance(policy, DistributedDataParallel):
        # DDP arms its reducer in the forward, so no_sync() would have to be around that, too.
        # Here every forward leaves it unarmed, and this is what the last one would have done.
        policy.reducer.prepare_for_forward()
        policy.reducer.prepare_for_backward([])
    (loss * bare(policy).loss_scale.scale).backward()


def clip(policy, max_norm):
    """Undo the loss scale and clip; returns the norm before clipping, equal on all ranks."""
    parameters = list(trainable(policy).values())
    scale = bare(policy).loss_scale
    if scale.enabled:
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], scale.scale)
    limit = max_norm if max_norm > 0 else math.inf
    scale.norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return scale.norm


def step(policy, optimizer, schedule):
    """One optimiser step and the next learning rate; fp16 skips it if the gradient overflowed."""
    if bare(policy).loss_scale.allows_step():
        optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)


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
    parameters = trainable(policy).values()
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = next(iter(parameters)).device.type == "cuda"
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=peak, fused=fused)
    warmup = math.ceil(config.warmup_ratio * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: decay(config.lr_scheduler, done, steps, warmup)
    )
    return optimizer, schedule


def bytes_to_write(outline, config):
    """Of the model and its checkpoints, at the least: fp32 weights and AdamW's two moments."""
    if config.fine_tuning == "full":
        trained = sum(p.numel() for p in outline.parameters())
    else:
        linear = [m for m in outline.modules() if isinstance(m, nn.Linear)]
        trained = sum(config.lora_r * (m.in_features + m.out_features) for m in linear)
    return 4 * trained * (1 + 3 * (config.keep_checkpoints + 1))


def state(policy, optimizer) -> dict:
    """All tensors that make the next step what it is, under plain names (no "module.").

    `parameter/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME` of what is trained.
    """
    tensors = {}
    for name, parameter in trainable(policy).items():
        tensors[f"parameter/{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}/{name}"] = value
    scale = bare(policy).loss_scale
    tensors["loss_scale"] = torch.tensor([scale.scale, scale.good_steps], dtype=torch.float64)
    return tensors


@torch.no_grad()
def load_state(policy, optimizer, schedule, tensors, step):
    """Put back what state() returned after `step` steps, on any number of ranks."""
    named, states = trainable(policy), collections.defaultdict(dict)
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(parameter): place for place, parameter in enumerate(ordered)}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if key == "loss_scale":
            scale = bare(policy).loss_scale
            scale.scale, scale.good_steps = value[0].item(), int(value[1])
        elif name not in named:
            raise UserError(f"the checkpoint trains {name}, this run does not")
        elif kind == "parameter":
            named[name].copy_(value)
        else:
            device = "cpu" if kind == "step" else named[name].device
            states[index[id(named[name])]][kind] = value.to(device, copy=True)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(states)})
    schedule.last_epoch = step
    for group, rate, factor in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = rate * factor(step)


def check_gradients(policy, fine_tuning):
    """Before step 0: what is trained has a finite gradient, what is frozen has none.

    A LoRA's B must move; its A must not, while B is 0. Raises UserError naming the parameter.
    """
    for name, parameter in bare(policy).model.named_parameters():
        adapter = "lora_" in name
        gradient = parameter.grad
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
