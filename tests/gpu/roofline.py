"""Predict the time and the memory of a training step on a GPU, from the operators that it runs.

    export PYTHONPATH=src:tests/bench
    python tests/gpu/roofline.py                    # a table, in Markdown
    python tests/gpu/roofline.py --cases long --sides ours --top 30
    python tests/gpu/roofline.py --docs             # also docs/gpu_predicted.json and docs/gpu.md

LoRA DPO, r 16, bf16, at the shape of Qwen3-8B. Ours is main_distributed.train_step, TRL's is
DPOTrainer._compute_loss of TRL 1.16. Both run on torch's fake tensors, which have a shape and a
device but no contents; pretend/ makes a CPU build of torch accept CUDA as their device. TRL's
padding-free mode is not there, since TRL 1.16 disables it for DPO.

An operator is one kernel, except for views, which are none, and for the backward of attention,
which is three. Attention computes the visible pairs of positions only; with a mask, as for TRL's
padded rows of different lengths, it computes all pairs. TRL's fused head reads each tile of logits
once in the forward pass, and reads and writes it once in the backward pass. Fused kernels (of Liger
or of the Hub: RMSNorm, SwiGLU, rotary embedding) read and write each tensor once. The peak of
memory is that of all tensors that exist at the same time.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib.util
import json
import logging
import random
import sys
import types
import weakref
from typing import NamedTuple
from unittest import mock

import cases
import hour
import pretend
import torch
import torch._dynamo  # imported later, it would look for a CUDA build
from peft import LoraConfig, get_peft_model
from pretend import cuda
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen

import main_distributed
from config import Config
from ddp_utils.distributed import World
from ddp_utils.policy import Policy, make_optimizer
from lm import memory_plan
from lm.logps import Pair

HAS_TRL = importlib.util.find_spec("trl") is not None
if HAS_TRL:
    from trl.kernels import chunked_logprob
    from trl.trainer import dpo_trainer, utils

MODEL = """The predicted time of a kernel is the largest of these values: the time for its FLOPs at
70 % of the GPU's peak FLOP/s for its dtype, the time to read and write its data at 85 % of the
memory bandwidth, and 2 us. The host needs 50 us per kernel launch. This value was measured for our
step with lengths as in HH-RLHF, in which the GPU is busy a fifth of the time. The predicted time of
a step is the time of its kernels on the GPU or of all launches on the host, whichever is longer.
The peak memory excludes the CUDA context and fragmentation of the allocator. With its best
settings, TRL uses no gradient checkpointing and precomputes the reference log-probs. "Fused
kernels" are those of Liger or of the Hugging Face Hub for RMSNorm, SwiGLU and rotary embedding."""
MATRIX, MEMORY, LAUNCH, HOST = 0.7, 0.85, 2e-6, 50e-6  # as MODEL says

aten = torch.ops.aten
GIB = 2**30
DEVICE = torch.device("cuda", 0)
CASES = {"long": (512, 256), "hh": cases.HH, "short": (64, 512)}  # prompts, responses
SIDES = {  # name -> title
    "ours": "ours",
    "ours separate": "ours, `--layout separate`",
    "ours plain": "ours, `--no_lean`",
    "ours checkpointing": "ours, `--use_gradient_checkpointing`",
    "ours full": "ours, `--fine_tuning full`",
    "trl": "TRL 1.16, best settings",
    "trl kernels": "TRL 1.16, best settings and fused kernels",
    "trl defaults": "TRL 1.16, defaults",
}
SETTINGS = {  # of main_distributed.py
    "ours separate": {"layout": "separate"},
    "ours plain": {"lean": False},
    "ours checkpointing": {"use_gradient_checkpointing": True},
    "ours full": {"fine_tuning": "full"},
}
DEFAULT = ["ours", "ours checkpointing", "ours full", "trl", "trl kernels", "trl defaults"]


class Card(NamedTuple):
    """The peaks of a GPU: FLOP/s of matrix products in half precision and in fp32, bytes/s."""

    half: float
    single: float
    bandwidth: float

    def seconds(self, kernel):
        """Return how long the calls of a Kernel take, without the host."""
        peak = self.half if kernel.dtype in ("bfloat16", "float16") else self.single
        busy = kernel.flops / (MATRIX * peak), kernel.bytes / (MEMORY * self.bandwidth)
        return max(*busy, LAUNCH * kernel.launches)


CARDS = {
    "H100": Card(989e12, 67e12, 3.35e12),  # SXM, 80 GB
    "A100": Card(312e12, 19.5e12, 2.04e12),  # SXM, 80 GB
}


# --- counting -------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One call of an operator."""

    name: str
    dtype: str
    flops: int
    bytes: int
    launches: int = 1


class Counter(TorchDispatchMode):
    """Count the kernels of fake tensors on CUDA, and the bytes of those that exist.

    visible: pairs of positions that attention computes; scored: tokens whose mask is True; equal:
    what the host reads when it asks whether all rows are equally long.
    """

    def __init__(self, visible, scored, equal):
        super().__init__()
        self.visible, self.scored, self.equal = visible, scored, equal
        self.kernels = collections.Counter()  # Kernel -> calls
        self.reads = 0  # of the host, which waits for the device
        self.storages = {}  # of tensors on the device: key -> bytes
        self.bytes = self.peak = 0

    def hold(self, tensor):
        """Count the bytes of a tensor until its storage is freed."""
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and storage._cdata not in self.storages:
            self.storages[storage._cdata] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.release, storage._cdata).atexit = False

    def release(self, key):
        self.bytes -= self.storages.pop(key)

    def kernel(self, name, flops, tensors, dtype, launches=1):
        """Count a kernel that reads or writes each of these tensors once."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.kernels[Kernel(name, str(dtype)[6:], flops, size, launches)] += 1

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            self.reads += 1
            return self.equal if args[0].dtype == torch.bool else 0
        if func is aten.index.Tensor and args[1][0].dtype == torch.bool:
            out = args[0].new_empty(self.scored, *args[0].shape[args[1][0].ndim :])
        else:
            out = func(*args, **kwargs)
        ins = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        outs = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        for tensor in outs:
            self.hold(tensor)
        if any(tensor.device.type == "cuda" for tensor in ins + outs):
            self.count(func, args, kwargs, ins, outs)
        return out

    def count(self, func, args, kwargs, ins, outs):
        name = func._overloadpacket.__name__
        read = {tensor.untyped_storage()._cdata for tensor in ins}
        is_new = any(tensor.untyped_storage()._cdata not in read for tensor in outs)
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        is_itself = func is aten.copy_.default and args[0] is args[1]
        if not (is_new or writes) or "empty" in name or is_itself:
            return
        if name == "_varlen_attn":
            return self.attention(args[0], [*args[:3], *outs[:2]])
        if name == "_varlen_attn_backward":
            return self.attention(args[1], [*args[:6], *outs], backward=True)
        tensors = list({id(tensor): tensor for tensor in ins + outs}.values())
        flops, launches, dtype = 0, 1, (outs or ins)[0].dtype
        if name.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
            left, right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            flops, dtype = 2 * left.numel() * right.shape[-1], left.dtype
        if name.startswith(("_foreach", "_fused_adam")):
            launches = max(1, len(ins) // 400)  # of as many pointers as fit into a launch
        elif name in ("select_backward", "slice_backward"):
            launches = 2  # zeros, and a copy
        if name in ("embedding", "index_select", "gather", "index"):
            tensors = [*outs, *outs, ins[-1]]  # only what is asked for is read
        elif name == "scatter_add_":
            tensors = [args[3], *args[2:]]  # only what is added to is read, and written
        self.kernel(name, flops, tensors, dtype, launches)

    def attention(self, query, tensors, backward=False, pairs=None):
        """Count a fused kernel; query [..., heads, (tokens,) width]; its backward recomputes."""
        heads = query.shape[1]
        products, launches = (10, 3) if backward else (4, 1)
        flops = products * (pairs or self.visible) * heads * query.shape[-1]
        name = "attention backward" if backward else "attention"
        self.kernel(name, flops, tensors, query.dtype, launches)


class Attention(torch.autograd.Function):
    """scaled_dot_product_attention as one kernel, for fake tensors."""

    @staticmethod
    def forward(ctx, counter, pairs, query, key, value, *mask):
        out = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, *mask, out, lse)
        ctx.counter, ctx.pairs = counter, pairs
        counter.attention(query, [query, key, value, *mask, out, lse], pairs=pairs)
        return out

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in saved[:3]]
        ctx.counter.attention(grad, [*saved, grad, *grads], backward=True, pairs=ctx.pairs)
        return None, None, *grads, *[None] * (len(saved) - 5)


def one_kernel(counter, name, count):
    """Return a function of tensors that is one kernel, with outputs like its first inputs."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outs = tuple(torch.empty_like(tensor) for tensor in inputs[:count])
            counter.kernel(name, 0, [*inputs, *outs], inputs[0].dtype)
            ctx.save_for_backward(*inputs)
            return outs if count > 1 else outs[0]

        @staticmethod
        def backward(ctx, *grads):
            saved = ctx.saved_tensors
            outs = tuple(torch.empty_like(tensor) for tensor in saved)
            counter.kernel(f"{name} backward", 0, [*saved, *grads, *outs], grads[0].dtype)
            return outs

    return Fused.apply


# --- the two sides --------------------------------------------------------------------------------


def draw_pairs(case, count, seed):
    """Return pairs whose lengths are those of a case; their token ids mean nothing."""
    rng = random.Random(seed)
    prompts, responses = CASES[case]
    lengths = [[cases.draw(rng, n) for n in (prompts, responses, responses)] for _ in range(count)]
    return [Pair(*([5] * n for n in row), "", "") for row in lengths]


def qwen3(layers, **changes):
    """Return the configuration of Qwen3-8B with so many layers."""
    sizes = cases.LARGE | {"num_hidden_layers": layers, "vocab_size": 151936, **changes}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return Qwen3Config(**sizes, **ids, max_position_embeddings=40960, tie_word_embeddings=False)


def visible_positions(queries, keys):
    """Return how many pairs of positions causal attention of the last `queries` computes."""
    return queries * (keys - queries) + queries * (queries + 1) // 2


def ours(model_config, pairs, counter, **settings):
    """Return the model on the meta device, and a function that returns its step."""
    kind = {"fine_tuning": "lora", "sft_weight": 0.0, "batch_size": len(pairs)}
    config = Config(**(kind | settings))
    precision = main_distributed.precision_of(config, DEVICE)
    scorer = memory_plan.build(config, precision, model_config)
    scorer.set_layout(config.layout != "separate")
    for pair in pairs:
        prompt, chosen, rejected = len(pair.prompt), len(pair.chosen) - 1, len(pair.rejected) - 1
        counter.visible += visible_positions(prompt + chosen, prompt + chosen)
        counter.visible += visible_positions(rejected, prompt + rejected)

    def prepare():
        world = World(device=DEVICE)
        scorer.to = lambda _device: scorer  # parameters of fake tensors cannot be moved
        policy = Policy(scorer, world)
        optimizer, schedule = make_optimizer(policy, 1e-4, 9, "constant", 0.0, 0.0)
        run = types.SimpleNamespace(world=world, reduce=lambda _averages, grad_norm: grad_norm)
        data, known = {"train": pairs}, {"train": torch.zeros(len(pairs), 2, device=DEVICE)}

        def step():
            main_distributed.train_step(policy, 0, range(len(pairs)), data, known, config, run)
            policy.step(optimizer, schedule, 1.0)

        return step

    return scorer, prepare


def trl(model_config, pairs, counter, defaults=False):
    """Return TRL's model on the meta device, and a function that returns a step of DPOTrainer.

    Its best setting: reference computed beforehand, no gradient checkpointing.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        dpo_trainer.add_fused_lm_head(model, outputs=outputs)
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, adapter).train()
    if defaults:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lengths = [len(p.prompt) + len(response) for p in pairs for response in p.responses]
    counter.scored = sum(len(response) for p in pairs for response in p.responses)
    counter.equal = len(set(lengths)) == 1
    settings = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def same(value):
        return value

    accelerator = {"device": DEVICE, "gather": same, "gather_for_metrics": same}
    trainer = types.SimpleNamespace(
        model=model,
        ref_model=None,
        accelerator=types.SimpleNamespace(**accelerator, unwrap_model=same),
        args=types.SimpleNamespace(**settings),
        precompute_ref_logps=not defaults,
        aux_loss_enabled=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        beta=0.1,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        use_weighting=False,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    def prepare():
        shape = len(lengths), max(lengths)
        names = ("input_ids", "attention_mask", "completion_mask")
        inputs = {name: torch.zeros(shape, dtype=torch.long, device=DEVICE) for name in names}
        for name in ("ref_chosen_logps", "ref_rejected_logps"):
            inputs[name] = torch.zeros(len(pairs), device=DEVICE)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss = dpo_trainer.DPOTrainer._compute_loss(trainer, model, dict(inputs), False)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return model, prepare


def fused_kernels(counter):
    """Return the patches for one kernel per RMSNorm, SwiGLU and rotary embedding in TRL's model."""
    norm, swiglu = one_kernel(counter, "rms_norm", 1), one_kernel(counter, "swiglu", 1)
    rope = one_kernel(counter, "rope", 2)

    def feed_forward(self, x):
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    return [
        mock.patch.object(qwen.Qwen3RMSNorm, "forward", lambda self, x: norm(x)),
        mock.patch.object(qwen.Qwen3MLP, "forward", feed_forward),
        mock.patch.object(qwen, "apply_rotary_pos_emb", lambda q, k, *_, **__: rope(q, k)),
    ]


def triton_kernels(counter):
    """Return the patches for TRL's fused head, each kernel of which is given its tile first."""

    def forward(tile, *_, **__):
        counter.kernel("head", 0, [tile], tile.dtype)

    def backward(tile, *_, **__):
        counter.kernel("head backward", 0, [tile, tile], tile.dtype)

    any_grid = {"_forward_kernel": forward, "_backward_kernel": backward}
    grids = {name: collections.defaultdict(lambda k=kernel: k) for name, kernel in any_grid.items()}
    triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    names = grids | {"_use_triton": lambda _device: True, "triton": triton}
    return [
        mock.patch.multiple(chunked_logprob, create=True, **names),
        mock.patch.object(utils, "_use_triton", names["_use_triton"]),
    ]


# --- a prediction ---------------------------------------------------------------------------------


def make_cuda():
    """Let this process create fake tensors on CUDA, whose operators are those of a GPU."""
    ctypes.CDLL(str(pretend.build())).set_device_count(1)
    cuda.patch_cuda(*cuda.CARDS["H100"])
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it logs what is caught
    library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
        library.impl(name, lambda *_: None, "CUDA")  # otherwise a CPU build splits it into others
    return library  # torch forgets what it contains when this object is freed


WHY_NOT = pretend.why_not()
LIBRARY = None if WHY_NOT else make_cuda()


@contextlib.contextmanager
def fake_gpu(counter, patches=()):
    """Meanwhile tensors are fake, and attention is one kernel."""

    def attend(query, key, value, attn_mask=None, is_causal=False, **_options):
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
        pairs = len(query) * query.shape[2] * key.shape[2]
        if is_causal:
            pairs = len(query) * visible_positions(query.shape[2], key.shape[2])
        mask = [] if attn_mask is None else [attn_mask]
        return Attention.apply(counter, pairs, query, key, value, *mask)

    foreach = "_has_foreach_support"
    with contextlib.ExitStack() as stack:
        for patch in [
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attend),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
            mock.patch.object(torch.nn.utils.clip_grad, foreach, lambda *_: True),
            mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda _mode: True)),
            *patches,
        ]:
            stack.enter_context(patch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def count_step(side, model_config, pairs, **settings):
    """Return the Counter of the second step, when AdamW has its moments."""
    counter = Counter(visible=0, scored=0, equal=True)
    patches, options, make = [], settings | SETTINGS.get(side, {}), ours
    if side.startswith("trl"):
        make, patches = trl, triton_kernels(counter)
        options = {"defaults": side == "trl defaults"}
        patches += fused_kernels(counter) if side == "trl kernels" else []
    model, prepare = make(model_config, pairs, counter, **options)
    with fake_gpu(counter, patches), counter:
        model.to_empty(device=DEVICE)
        step = prepare()
        step()
        counter.kernels.clear()
        counter.reads = 0
        step()
    return counter


def summarize(counters, cards):
    """Return the means over the steps of several batches, and their largest peak."""
    count = len(counters)

    def mean(function):
        return sum(function(k) * n for c in counters for k, n in c.kernels.items()) / count

    row = {"launches": mean(lambda k: k.launches), "TFLOP": mean(lambda k: k.flops) / 1e12}
    row |= {"GB moved": mean(lambda k: k.bytes) / 1e9, "host ms": row["launches"] * HOST * 1e3}
    row["reads"] = sum(counter.reads for counter in counters) / count
    row["peak GiB"] = max(counter.peak for counter in counters) / GIB
    for name in cards:
        row[f"{name} device ms"] = 1e3 * mean(CARDS[name].seconds)
        row[f"{name} ms"] = max(row[f"{name} device ms"], row["host ms"])
    return row


def predict(args):
    """Yield a row of the table per case and side."""
    for case in args.cases:
        batches = 1 if all(isinstance(n, int) for n in CASES[case]) else args.batches
        for side in args.sides:
            counters = []
            for seed in range(batches):
                pairs = draw_pairs(case, args.pairs, seed)
                counters.append(count_step(side, qwen3(args.layers), pairs))
            names = {"case": case, "side": side, "what": SIDES[side]}
            yield names | summarize(counters, args.gpus)
            for kernel, name, *numbers in top(counters[-1], args.gpus[0])[: args.top]:
                print(f"{kernel:26}{name:10}", *(f"{n:10.4g}" for n in numbers), file=sys.stderr)


def top(counter, card):
    """Return [operator, dtype, launches, TFLOP, GB, ms] of a step, the longest first."""
    rows = collections.defaultdict(lambda: [0, 0, 0, 0])
    for kernel, calls in counter.kernels.items():
        seconds = CARDS[card].seconds(kernel)
        numbers = kernel.launches, kernel.flops / 1e12, kernel.bytes / 1e9, 1e3 * seconds
        row = rows[kernel.name, kernel.dtype]
        row[:] = [total + calls * number for total, number in zip(row, numbers, strict=True)]
    return sorted(([*key, *row] for key, row in rows.items()), key=lambda row: -row[-1])


def table(rows):
    """Return the rows in Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    for row in rows:
        lines.append([x if isinstance(x, str) else f"{x:,.4g}" for x in row.values()])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_flags(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES), help="lengths of the pairs")
    add("--sides", nargs="+", choices=SIDES, default=DEFAULT, help="what computes the step")
    add("--gpus", nargs="+", choices=CARDS, default=list(CARDS), help="cards")
    add("--layers", type=int, default=cases.LARGE["num_hidden_layers"], help="of the model")
    add("--pairs", type=int, default=4, help="pairs per step")
    add("--batches", type=int, default=2, help="batches of different lengths; the mean is shown")
    add("--top", type=int, default=0, help="also print so many operators, the longest first")
    add("--docs", action="store_true", help="also write docs/gpu_predicted.json and docs/gpu.md")
    return parser.parse_args(argv)


def main():
    args = read_flags()
    if WHY_NOT:
        print(f"error: roofline.py {WHY_NOT}", file=sys.stderr)
        return 2
    if not HAS_TRL:
        print("TRL is not installed: its rows are left out", file=sys.stderr)
        args.sides = [side for side in args.sides if not side.startswith("trl")]
    rows = list(predict(args))
    print(table(rows))
    if args.docs:
        hour.PREDICTED.write_text(json.dumps({"model": MODEL, "rows": rows}, indent=1) + "\n")
        (hour.DOCS / "gpu.md").write_text(hour.page(hour.read(hour.DOCS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
