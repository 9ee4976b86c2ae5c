"""The same numbers with less kept for the backward, for a LoRA over a frozen base.

D and E input and output features, R rank. Autograd keeps, for each operation, what its own backward
asks for; a backward written for several operations together makes the cheap ones again.
"""

import copy
import types

import torch
from peft.tuners import lora
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _Linear(torch.autograd.Function):
    """inputs W' + b + scale (inputs A') B', the inputs being x, or silu(x) up if there is an up.

    x, up [..., D], W [E, D], b [E], A [R, D], B [E, R] -> [..., E]. W and b are frozen. The low
    rank is computed in A's dtype, as in peft, and under autocast in autocast's.
    """

    @staticmethod
    def forward(ctx, x, up, weight, bias, A, B, scale):
        inputs = x if up is None else F.silu(x).mul_(up)  # [..., D]
        output = F.linear(inputs, weight, bias)  # [..., E]
        narrow = output.dtype if torch.is_autocast_enabled(x.device.type) else A.dtype
        low = F.linear(inputs.to(narrow), A.to(narrow))  # [..., R]
        _add_product(output, low, B.to(narrow).T, scale)
        ctx.save_for_backward(x, up, weight, A, B, low)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, up, weight, A, B, low = ctx.saved_tensors
        for_x, for_up, _, _, for_A, for_B, _ = ctx.needs_input_grad
        grad_x = grad_up = grad_A = grad_B = None
        with torch.autocast(grad.device.type, enabled=False):  # dtypes are those of the forward
            narrow = grad.to(low.dtype)  # [..., E]
            grad_low = narrow @ B.to(low.dtype)  # [..., R]
            silu = None if up is None else F.silu(x)
            if for_B:
                grad_B = narrow.flatten(0, -2).T @ low.flatten(0, -2) * ctx.scale  # [E, R]
            if for_A:
                inputs = (x if up is None else silu * up).to(low.dtype)
                grad_A = grad_low.flatten(0, -2).T @ inputs.flatten(0, -2) * ctx.scale  # [R, D]
                del inputs
            if for_x or for_up:
                grad_x = grad @ weight.to(grad.dtype)  # [..., D]
                _add_product(grad_x, grad_low, A.to(low.dtype), ctx.scale)
                if up is not None:
                    grad_up = silu.mul_(grad_x)
                    grad_x = torch.ops.aten.silu_backward(grad_x.mul_(up), x)
        return grad_x, grad_up, None, None, grad_A, grad_B, None


def _add_product(total, left, right, scale):
    """total [..., E] += scale left [..., R] @ right [R, E], rounded once to the dtype of total."""
    total = total.view(-1, total.shape[-1])
    # where the dtypes agree, .to() gives total itself and nothing is copied
    total.copy_(total.to(left.dtype).addmm_(left.flatten(0, -2), right, alpha=scale))


class _Norm(torch.autograd.Function):
    """weight x / rms(x) over the last dimension: x [..., D], weight [D], frozen -> [..., D].

    Keeps what it returns, which a LoRA behind it keeps anyway, and divides by the weight.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
        output = weight * (wide * scale).to(x.dtype)  # as transformers rounds it
        ctx.save_for_backward(output, weight, scale)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        output, weight, scale = ctx.saved_tensors
        unit = output.float() / weight  # [..., D] x / rms(x)
        grad = (grad * weight).float()
        along = (grad * unit).mean(-1, keepdim=True)  # [..., 1]
        return grad.addcmul_(unit, along, value=-1).mul_(scale), None, None


def _adapted(module):
    """[W, b, A, B, scale] of a LoRA linear that is the plain formula right now, else None."""
    if type(module) is not lora.Linear or module.disable_adapters or module.merged:
        return None
    names = module.active_adapters
    base = module.base_layer
    if len(names) != 1 or names[0] not in module.lora_A or names[0] in module.lora_variant:
        return None
    A, B, dropout = (part[names[0]] for part in (module.lora_A, module.lora_B, module.lora_dropout))
    frozen = type(base) is nn.Linear and not any(p.requires_grad for p in base.parameters())
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (base, A, B))
    if hooked or not frozen or not isinstance(dropout, nn.Identity) or B.bias is not None:
        return None
    return [base.weight, base.bias, A.weight, B.weight, module.scaling[names[0]]]


def _function(module):
    """What the module does to x, as one of the functions above, if it is one right now."""
    adapted = _adapted(module)
    if adapted:
        return lambda x: _Linear.apply(x, None, *adapted)
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
        parts = type(module.act_fn).__name__.startswith("SiLU") and _adapted(module.down_proj)
        return parts and (lambda x: _Linear.apply(module.gate_proj(x), module.up_proj(x), *parts))
    if type(module).__name__.endswith("RMSNorm") and not module.weight.requires_grad:
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        return eps and (lambda x: _Norm.apply(x, module.weight, eps))


def _forward(self, x, *args, **kwargs):
    function = None if args or kwargs else _function(self)
    return function(x) if function else type(self).forward(self, x, *args, **kwargs)


def _agrees(module):
    """Does a copy of the module with random weights answer the same, gradients included?"""
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    trial = copy.deepcopy(module)
    for weight in trial.parameters():
        if weight.requires_grad or weight.ndim == 1:  # B of a fresh LoRA is 0, a norm's weight 1
            weight.data.copy_(torch.randn(weight.shape, generator=generator))
    like = next(trial.parameters())  # [D] or [E, D]
    x = torch.randn(2, 3, like.shape[-1], generator=generator).to(like).requires_grad_()
    wanted = [x, *(p for p in trial.parameters() if p.requires_grad)]
    outcomes = []
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        for answer in (trial.forward, types.MethodType(_forward, trial)):
            try:
                y = answer(x)
            except (TypeError, RuntimeError):  # it wants other inputs
                return False
            outcomes.append([y, *torch.autograd.grad(y, wanted, y.detach())])
    bound = 1e-5 if x.dtype.itemsize > 2 else 2e-2
    pairs = zip(*outcomes, strict=True)
    return all((own - ours).abs().max() <= bound * own.abs().max() for own, ours in pairs)


def apply(model):
    """Give every module that qualifies a forward that keeps less; returns how many got one.

    LoRA linears without dropout over a frozen nn.Linear, SwiGLU blocks whose down_proj is one, and
    RMSNorms with a frozen weight without zeros. The first of each class is tried against its own
    forward, and the class is left alone if values or gradients differ. What changes later (adapters
    disabled or merged, weights unfrozen) is seen at each call, which then takes the module's own
    forward. Call it with the adapter in place and active. Parameters and state_dict stay the same.
    """
    verdicts = {}
    count = 0
    for module in model.modules():
        if "forward" not in vars(module) and _function(module):
            kind = type(module), next(module.parameters()).dtype
            if kind not in verdicts:
                verdicts[kind] = _agrees(module)
            # a norm divides by its weight; the others have none of their own
            if verdicts[kind] and all(w.all() for w in module.parameters(recurse=False)):
                module.forward = types.MethodType(_forward, module)
                count += 1
    return count
