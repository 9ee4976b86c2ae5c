"""Store fewer activations for the backward pass of a LoRA over a frozen base; same numbers.

Autograd stores what the backward of each single operation needs. The functions here cover several
operations at once and recompute the cheap ones in the backward pass.

D and E input and output features, R rank.
"""

import copy
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ddp_utils import out_of_memory

aten = torch.ops.aten


class _Linear(torch.autograd.Function):
    """inputs W' + b + scale (inputs A') B' for inputs x, or silu(x) * up if `up` is not None.

    x, up [..., D], W [E, D], b [E], A [R, D], B [E, R] -> [..., E]. W and b are frozen. As in peft,
    the low-rank part is computed in A's dtype, and under autocast in the dtype of autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Any, W: Tensor, b: Any, A: Tensor, B: Tensor, scale: float
    ) -> Any:
        inputs = x if up is None else F.silu(x).mul_(up)  # [..., D]
        output = F.linear(inputs, W, b)  # [..., E]
        narrow = output.dtype if torch.is_autocast_enabled(x.device.type) else A.dtype
        A, B = A.to(narrow), B.to(narrow)  # also for the backward: small, and a kernel each
        low = _product(inputs.to(narrow), A.T, scale)  # [N, R]
        _add_product(output, low, B.T)
        ctx.save_for_backward(x, up, W, A, B, low)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, up, W, A, B, low = ctx.saved_tensors
        needs_x, needs_up, _, _, needs_A, needs_B, _ = ctx.needs_input_grad
        grad_x = grad_up = grad_A = grad_B = None
        with torch.autocast(grad.device.type, enabled=False):  # dtypes are those of the forward
            narrow = grad.to(low.dtype)  # [..., E]
            grad_low = _product(narrow, B, ctx.scale)  # [N, R]
            silu = None if up is None else F.silu(x)
            if needs_B:
                grad_B = narrow.flatten(0, -2).T @ low  # [E, R]
            if needs_A:
                inputs = (x if up is None else silu * up).to(low.dtype)
                grad_A = grad_low.T @ inputs.flatten(0, -2)  # [R, D]
                del inputs
            if needs_x or needs_up:
                grad_x = grad @ W.to(grad.dtype)  # [..., D]
                _add_product(grad_x, grad_low, A)
                if up is not None and silu is not None:
                    grad_up = silu.mul_(grad_x)
                    grad_x = aten.silu_backward(grad_x.mul_(up), x)
        return grad_x, grad_up, None, None, grad_A, grad_B, None


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale * left [..., D] @ right [D, R] as [N, R], in one kernel."""
    ignored = left.new_empty(())  # since beta is 0
    return torch.addmm(ignored, left.flatten(0, -2), right, beta=0, alpha=scale)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [N, R] @ right [R, E] to total [..., E], rounding once to its dtype."""
    total = total.view(-1, total.shape[-1])
    # if the dtypes are equal, .to() returns total itself and nothing is copied
    total.copy_(total.to(left.dtype).addmm_(left, right))


class _Norm(torch.autograd.Function):
    """weight x / rms(x) over the last dimension: x [..., D], weight [D], frozen -> [..., D].

    Stores its output, which the LoRA that reads it stores anyway, and divides it by the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Any:
        if _has_fused_norm(x, weight):  # rounds once, where transformers rounds twice
            output, scale = aten._fused_rms_norm(x, weight.shape, weight, eps)
        else:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
            output = weight * (wide * scale).to(x.dtype)  # rounded as in transformers
        # the output of a norm of each head is stored by nobody else
        ctx.keeps_x = x.ndim > 3 and _has_fused_norm(x, weight)
        ctx.save_for_backward(x if ctx.keeps_x else output, weight, scale)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, weight, scale = ctx.saved_tensors
        if _has_fused_norm(output, weight):
            x = output if ctx.keeps_x else (output / weight).div_(scale)
            needed = [True, False]  # gradients of x, but not of the weight
            fused = aten._fused_rms_norm_backward(grad, x, weight.shape, scale, weight, needed)
            return fused[0], None, None
        unit = output.float() / weight  # [..., D] x / rms(x)
        grad = (grad * weight).float()
        along = (grad * unit).mean(-1, keepdim=True)  # [..., 1]
        return grad.addcmul_(unit, along, value=-1).mul_(scale), None, None


def _has_fused_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a kernel for RMSNorm; on a CPU it has none for the backward."""
    return x.device.type == "cuda" and x.dtype == weight.dtype


# --- modules -------------------------------------------------------------------------------------


class Efficient(nn.Module):
    """Base of the classes below, each of which is put before the class of an existing module.

    What changes later (adapters disabled or merged, weights trained) is noticed in each call, which
    then uses the original forward.
    """


class EfficientLora(Efficient):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        adapter = _plain_adapter(self)
        if adapter is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        return _Linear.apply(x, None, *adapter)


class EfficientSwiGLU(Efficient):
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Any:
        adapter = _plain_adapter(self.down_proj)
        if adapter is None:
            return super().forward(x)
        return _Linear.apply(self.gate_proj(x), self.up_proj(x), *adapter)


class EfficientNorm(Efficient):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.weight.requires_grad or args or kwargs:
            return super().forward(x, *args, **kwargs)
        return _Norm.apply(x, self.weight, _epsilon(self))


def _plain_adapter(module: Any) -> list[Any] | None:
    """Return [W, b, A, B, scale] of a LoRA linear if it computes just their formula now."""
    if not isinstance(module, lora.Linear) or module.disable_adapters or module.merged:
        return None
    names = module.active_adapters
    base = module.base_layer
    if len(names) != 1 or names[0] not in module.lora_A or names[0] in module.lora_variant:
        return None
    A, B, dropout = (part[names[0]] for part in (module.lora_A, module.lora_B, module.lora_dropout))
    is_frozen = type(base) is nn.Linear and not any(p.requires_grad for p in base.parameters())
    has_hooks = any(m._forward_hooks or m._forward_pre_hooks for m in (base, A, B))
    if has_hooks or not is_frozen or not isinstance(dropout, nn.Identity) or B.bias is not None:
        return None
    return [base.weight, base.bias, A.weight, B.weight, module.scaling[names[0]]]


def _epsilon(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def _find_class(module: Any) -> type[Efficient] | None:
    """Return the class above that computes what this module computes, if there is one."""
    if _plain_adapter(module):
        return EfficientLora
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= module._modules.keys():
        is_silu = type(module.act_fn).__name__.startswith("SiLU")
        return EfficientSwiGLU if is_silu and _plain_adapter(module.down_proj) else None
    is_norm = type(module).__name__.endswith("RMSNorm") and bool(module._parameters)
    is_frozen = is_norm and not module.weight.requires_grad
    return EfficientNorm if is_frozen and _epsilon(module) else None


def _agree(module: nn.Module, new_class: type[nn.Module]) -> bool:
    """Return whether a copy with random weights computes the same in both classes."""
    generator = torch.Generator().manual_seed(0)  # does not change the state of the global one
    trial = copy.deepcopy(module)
    for weight in trial.parameters():
        if weight.requires_grad or weight.ndim == 1:  # B of a new LoRA is 0, a norm's weight is 1
            weight.data.copy_(torch.randn(weight.shape, generator=generator))
    like = next(trial.parameters())  # [D] or [E, D]
    x = torch.randn(2, 3, like.shape[-1], generator=generator).to(like).requires_grad_()
    inputs = [x, *(p for p in trial.parameters() if p.requires_grad)]
    outcomes = []
    for trial.__class__ in (type(module), new_class):
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            try:
                y = trial.forward(x)
            except (TypeError, RuntimeError) as error:  # its forward has other arguments
                if out_of_memory(error):
                    raise
                return False
            outcomes.append([y, *torch.autograd.grad(y, inputs, y.detach())])
    bound = 1e-5 if x.dtype.itemsize > 2 else 2e-2
    pairs = zip(*outcomes, strict=True)
    return all((old - new).abs().max() <= bound * old.abs().max() for old, new in pairs)


def apply(model: nn.Module, verify: bool = True) -> int:
    """Replace the forward of all modules that qualify; return their number.

    These are LoRA linears without dropout over a frozen nn.Linear, SwiGLU blocks whose down_proj is
    one, and RMSNorms with a frozen weight without zeros. Call this with the adapter in place and
    active. As in FSDP2, modules get another class; parameters and state_dict stay the same.
    `module.__class__ = module.__class__.__bases__[1]` restores a module.

    verify: compare values and gradients with those of the original forward, once per class of
    module; modules whose numbers differ do not qualify.
    """
    classes: dict[tuple, type[nn.Module] | None] = {}  # original class and dtype -> new class
    count = 0
    for module in model.modules():
        efficient = None if isinstance(module, Efficient) else _find_class(module)
        if efficient is None:
            continue
        original = type(module)
        key = original, next(module.parameters()).dtype
        if key not in classes:
            new_class = type(f"{efficient.__name__}_{original.__name__}", (efficient, original), {})
            classes[key] = new_class if not verify or _agree(module, new_class) else None
        # only a norm has weights of its own here; its backward divides by them
        no_zeros = not verify or all(w.all() for w in module.parameters(recurse=False))
        if classes[key] and no_zeros:
            module.__class__ = classes[key]  # type: ignore[assignment]
            count += 1
    return count
