"""The fused attention kernels of a GPU: which one torch would choose, and what it refuses.

B batch, H heads, K key heads, Q queries, S keys, D head size; varlen: T tokens of all sequences.
"""

import math

import torch

from pretend.device import SPECIAL, Gpu, fault, record, wrap

HALF = (torch.float16, torch.bfloat16)
host_attention = torch.nn.functional.scaled_dot_product_attention
_has_flash = True  # Ampere or newer


def install(card):
    """Replace torch's attention. card: see pretend.install."""
    global _has_flash
    import torch.nn.attention.varlen  # noqa: F401  registers its operators

    _has_flash = card != "T4"
    torch.nn.functional.scaled_dot_product_attention = attention
    torch._C._nn.scaled_dot_product_attention = attention
    SPECIAL[torch.ops.torch_attn._varlen_attn.default] = varlen
    SPECIAL[torch.ops.torch_attn._varlen_attn_backward.default] = varlen_backward


# --- on the host ----------------------------------------------------------------------------------


def attend(q, k, v, scale, allowed):
    """Return output [..., Q, D], log-sum-exp [..., Q] and probabilities [..., Q, S], in fp32.

    allowed: which keys a query sees, [Q, S], or a bias; None: all.
    """
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if allowed is not None and allowed.dtype == torch.bool:
        scores = scores.masked_fill(~allowed, -math.inf)
    elif allowed is not None:
        scores = scores + allowed
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp().nan_to_num(0)
    return probs @ v.float(), lse, probs


def attend_backward(grad, q, k, v, probs, scale, group):
    """Return the gradients of q, k and v; `group` heads share a key head, dimension -3."""
    grad = grad.float()
    d_probs = grad @ v.float().transpose(-1, -2)
    d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True)) * scale
    d_q = d_scores @ k.float()
    d_k, d_v = d_scores.transpose(-1, -2) @ q.float(), probs.transpose(-1, -2) @ grad
    return d_q, *(x.unflatten(-3, (-1, group)).sum(-3) for x in (d_k, d_v))


# --- varlen_attn ----------------------------------------------------------------------------------


def check_flash(function, *tensors):
    if not _has_flash:
        fault(f"{function}: FlashAttention only supports Ampere GPUs or newer")
    for tensor in tensors:
        if not isinstance(tensor, Gpu):
            fault(f"{function}: q, k, v must be on CUDA")
        if tensor.dtype not in HALF:
            fault(f"{function}: FlashAttention only supports fp16 and bf16, not {tensor.dtype}")
        if tensor.stride(-1) != 1:
            fault(f"{function}: input tensor must have contiguous last dimension")
        if tensor.shape[-1] % 8 or tensor.shape[-1] > 256:
            fault(f"{function}: head size {tensor.shape[-1]}, not a multiple of 8 up to 256")


def check_bounds(function, bounds, longest, total):
    """Raise what the kernel raises about sequences, or what would read outside of memory."""
    if not isinstance(bounds, Gpu) or bounds.dtype != torch.int32 or not bounds.is_contiguous():
        fault(f"{function}: cu_seqlens must be contiguous int32 on CUDA, not {bounds.dtype}")
    if type(longest) is not int:
        fault(f"{function}: the largest length must be an int")
    host = bounds.host.tolist()
    lengths = [end - start for start, end in zip(host, host[1:], strict=False)]
    if host[0] != 0 or host[-1] != total or max(lengths) > longest or min(lengths) < 1:
        fault(f"{function}: sequences {host} of {total} tokens, at most {longest}")
    return [slice(start, end) for start, end in zip(host, host[1:], strict=False)]


def sequences(function, q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window):
    """Return for each sequence its queries, its keys, and which keys a query sees."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    queries = check_bounds(function, cu_q, max_q, q.shape[0])
    keys = check_bounds(function, cu_k, max_k, k.shape[0])
    found = []
    for of_q, of_k in zip(queries, keys, strict=True):
        num_q, num_k = of_q.stop - of_q.start, of_k.stop - of_k.start
        # the last query is that of the last key
        back = torch.arange(num_q)[:, None] + (num_k - num_q) - torch.arange(num_k)
        allowed = torch.ones(num_q, num_k, dtype=torch.bool)
        allowed &= (back <= left) if left >= 0 else allowed
        allowed &= (back >= -right) if right >= 0 else allowed
        found.append((of_q, of_k, allowed))
    return found


def varlen(
    function, q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window=None, *_
):
    """Queries [T, H, D], keys and values [T, K, D] -> output [T, H, D], log-sum-exp [H, T]."""
    check_flash(function, q, k, v)
    group = q.shape[1] // k.shape[1]
    scale = scale or q.shape[-1] ** -0.5
    out = torch.empty_like(q.host, memory_format=torch.contiguous_format)
    lse = torch.zeros(q.shape[1], q.shape[0])
    for of_q, of_k, allowed in sequences(
        function, q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window
    ):
        kk, vv = (x.host[of_k].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        part, lse[:, of_q], _ = attend(q.host[of_q].transpose(0, 1), kk, vv, scale, allowed)
        out[of_q] = part.transpose(0, 1)
    record.kernels[function] += 1
    record.attention[f"varlen {str(q.dtype)[6:]}"] += 1
    return wrap((out, lse, torch.zeros(2, dtype=torch.uint64)), q.device)


def varlen_backward(
    function,
    grad,
    q,
    k,
    v,
    out,
    lse,
    cu_q,
    cu_k,
    max_q,
    max_k,
    is_causal,
    _,
    scale=None,
    window=None,
):
    check_flash(function, grad, q, k, v)
    group = q.shape[1] // k.shape[1]
    scale = scale or q.shape[-1] ** -0.5
    d_q, d_k, d_v = (torch.zeros_like(x.host, dtype=torch.float32) for x in (q, k, v))
    for of_q, of_k, allowed in sequences(
        function, q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window
    ):
        qq, gg = (x.host[of_q].transpose(0, 1) for x in (q, grad))
        kk, vv = (x.host[of_k].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = (qq.float() @ kk.float().transpose(-1, -2) * scale).masked_fill(
            ~allowed, -math.inf
        )
        probs = (scores - lse.host[:, of_q][..., None]).exp()
        parts = attend_backward(gg, qq, kk, vv, probs, scale, group)
        d_q[of_q] += parts[0].transpose(0, 1)
        d_k[of_k] += parts[1].transpose(0, 1)
        d_v[of_k] += parts[2].transpose(0, 1)
    record.kernels[function] += 1
    return tuple(Gpu(x.to(q.dtype), q.device) for x in (d_q, d_k, d_v))


# --- scaled dot-product attention -----------------------------------------------------------------


def choose_kernel(q, k, mask, dropout, causal):
    """Return the kernel that torch 2.13 chooses, in the order of its wheels for CUDA 13."""
    half, width = q.dtype in HALF, q.shape[-1]
    is_grouped = q.shape[1] != k.shape[1]
    is_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    is_allowed &= not torch.are_deterministic_algorithms_enabled()
    fits = width <= 128 and width % 8 == 0 and k.shape[2] != 1 and (dropout * 16) % 1 == 0
    if _has_flash and half and is_allowed and fits:
        return "cudnn"
    is_square = q.shape[2] == k.shape[2]
    if _has_flash and half and mask is None and width <= 256 and (is_square or not causal):
        return "flash"
    if width % (8 if half else 4) == 0 and not is_grouped:
        return "efficient"
    return "math"


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """torch.nn.functional.scaled_dot_product_attention: [B, H, Q, D], [B, K, S, D]."""
    tensors = [query, key, value]
    on_gpu = [isinstance(x, Gpu) for x in (*tensors, attn_mask) if x is not None]
    if any(on_gpu) and not all(on_gpu):
        fault("sdpa: expected all tensors to be on the same device, found cuda and cpu")
    if on_gpu[0] and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        tensors = [x.to(dtype) for x in tensors]
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    query, key, value = tensors
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if not on_gpu[0] or query.dim() != 4:
        return host_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if len({x.dtype for x in tensors}) > 1:
        fault(f"sdpa: different dtypes: {', '.join(str(x.dtype) for x in tensors)}")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        fault(f"sdpa: {query.shape[1]} heads, {key.shape[1]} key heads without enable_gqa")
    kernel = choose_kernel(query, key, attn_mask, dropout_p, is_causal)
    record.attention[f"{kernel} {str(query.dtype)[6:]}"] += 1
    if kernel == "math" or dropout_p:  # the host draws the mask of the dropout
        return host_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return Fused.apply(*tensors, attn_mask, is_causal, scale or query.shape[-1] ** -0.5)


class Fused(torch.autograd.Function):
    """One kernel forward, and one backward."""

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, scale):
        group = q.shape[1] // k.shape[1]
        allowed = mask.host if mask is not None else None
        if causal:
            allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        kk, vv = (x.host.repeat_interleave(group, 1) for x in (k, v))
        out, _, probs = attend(q.host, kk, vv, scale, allowed)
        ctx.save_for_backward(q, k, v)
        ctx.probs, ctx.scale, ctx.group = probs, scale, group
        record.kernels["attention"] += 1
        # torch's kernels return [B, Q, H, D], transposed
        out = Gpu(out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), q.device)
        return record.done("attention", (q, k, v), {}, out)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        kk, vv = (x.host.repeat_interleave(ctx.group, 1) for x in (k, v))
        parts = attend_backward(grad.host, q.host, kk, vv, ctx.probs, ctx.scale, ctx.group)
        record.kernels["attention backward"] += 1
        grads = tuple(Gpu(x.to(q.dtype), q.device) for x in parts)
        return *record.done("attention backward", (grad, q, k, v), {}, grads), None, None, None
