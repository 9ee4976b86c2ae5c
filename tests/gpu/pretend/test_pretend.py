"""Pretended GPUs notice what a GPU would refuse, and the scripts run on them.

Compiling pretend.cpp takes 10 s, once. `-m show` has all runs; rehearse.py prints them as a table.
"""

import json
import re
import sys

import pytest
import torch

from conftest import TESTS
from ranks import ranks

sys.path[:0] = [str(TESTS / "gpu"), str(TESTS / "invariants")]

import hour  # noqa: E402

import pretend  # noqa: E402
from pretend import rehearse  # noqa: E402

pytestmark = pytest.mark.skipif(bool(pretend.why_not()), reason=pretend.why_not())

# of the runs of docs/gpu.md, one for each training script; together they use each precision
SELECTION = [
    (rehearse.rehearse, "dpo lora", 1, "bf16"),
    (rehearse.rehearse, "sft lora", 1, "fp16"),
    (rehearse.rehearse, "baking", 1, "bf16"),
    (rehearse.rehearse, "protein", 2, "fp32"),
    (rehearse.rehearse, "distillation", 1, "bf16"),
]


def title(run):
    function, name, size, precision = run
    return f"{rehearse.title(function, name)}-{size}-{precision}"


ALL = [*rehearse.planned(rehearse.CASES, (1, 2), ("fp32", "bf16", "fp16"))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pretend.build()
    return rehearse.make_data(tmp_path_factory.mktemp("data"))


def check(run, data, folder):
    function, *which = run
    found = rehearse.problems(function(*which, data, folder))
    assert not found, " | ".join(found)


@pytest.mark.parametrize("run", SELECTION, ids=title)
def test_a_run_does_what_a_gpu_allows(run, data, tmp_path):
    check(run, data, tmp_path)


@pytest.mark.show
@pytest.mark.parametrize("run", ALL, ids=title)
def test_each_run_does_what_a_gpu_allows(run, data, tmp_path):
    check(run, data, tmp_path)


def test_the_committed_rows_are_of_these_runs():
    content = json.loads(hour.REHEARSALS.read_text())
    names = {(rehearse.title(do, name), *which) for do, name, *which in ALL}
    assert set(rehearse.read(hour.REHEARSALS)) <= names and content["planned"] == len(ALL)


# --- the pretended device itself ------------------------------------------------------------------


def on_gpu(function, *arguments, size=1):
    """function(*arguments) in a process with pretended GPUs."""
    pretend.build()
    return ranks(size, _pretending, function, arguments)[0]


def _pretending(function, arguments):
    import os

    pretend.install(int(os.environ["WORLD_SIZE"]), memory=True)
    return function(*arguments)


def draw_tokens():
    """Tokens drawn for 64 rows of random logits, together and one row at a time."""
    from lm import sampling

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 151_936, generator=generator).cuda()
    uniform = torch.linspace(0, 0.999, 64, dtype=torch.double).cuda()
    spec = sampling.SampleSpec(1.0, 0.9, 1, 64, 0)
    together = sampling.sample_tokens(logits, uniform, spec)
    rows = zip(logits.split(1), uniform.split(1), strict=True)
    alone = [sampling.sample_tokens(*row, spec) for row in rows]
    return together.tolist(), torch.cat(alone).tolist()


def test_a_draw_does_not_depend_on_other_rows_whose_sums_cuda_adds_in_another_order():
    together, alone = on_gpu(draw_tokens)
    assert together == alone and len(set(alone)) == 64


def count_waits():
    """Way to make the host wait -> kinds that were noted."""
    values = torch.arange(6.0).view(3, 2).cuda()
    truths = values > 2
    number = torch.tensor([1.0])
    ways = {
        "item": lambda: values.sum().item(),
        "tolist": lambda: values.tolist(),
        "truth": lambda: bool(truths.any()),
        "index of truths": lambda: values[truths],
        "format": lambda: f"{values.sum():.2f}",
        "cpu": lambda: values.cpu(),
        "cpu, not waited for": lambda: values.to("cpu", non_blocking=True),
        "list as index": lambda: values[[0, 1]],
        "new tensor": lambda: torch.tensor([1.0], device="cuda"),
        "to": lambda: number.to("cuda"),
        "to, not pinned": lambda: number.to("cuda", non_blocking=True),
        "to, pinned": lambda: number.pin_memory().to("cuda", non_blocking=True),
        "index of the host": lambda: values[torch.tensor([0, 1])],
        "of the host": lambda: number.sum().item(),
        "slice": lambda: values[1:].sum() * 2,
        "factory": lambda: torch.ones(3, device="cuda"),
    }
    found = {}
    for name, call in ways.items():
        pretend.record.lines.clear()
        call()
        found[name] = [kind for kind, _, _ in pretend.record.lines]
    return found


def test_each_way_to_wait_is_noticed_and_nothing_else():
    reads = "item", "tolist", "truth", "index of truths", "format", "cpu"
    copies = "list as index", "new tensor", "to", "to, not pinned", "index of the host"
    expected = dict.fromkeys(reads, ["read"]) | dict.fromkeys(copies, ["copy"])
    expected |= {"cpu, not waited for": ["race"], "to, pinned": ["pinned"]}
    expected |= dict.fromkeys(["of the host", "slice", "factory"], [])
    assert on_gpu(count_waits) == expected


def refusals():
    """What a GPU refuses -> the message, "" if it was accepted."""
    from ddp_utils.policy import Policy  # noqa: F401  as a run has imported it

    values = torch.ones(4, 8, device="cuda")
    host = torch.ones(4, 8)
    integers = torch.ones(4, 4, dtype=torch.long, device="cuda")
    weight = torch.nn.Parameter(torch.ones(4, 8, device="cuda"))
    adamw = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    adamw.step()

    def resumed():
        adamw.state[weight]["step"] = adamw.state[weight]["step"].cpu()
        adamw.step()

    def flash(dtype, bounds, head_size=8):
        from torch.nn.attention.varlen import varlen_attn

        q = torch.ones(4, 2, head_size, device="cuda", dtype=dtype)
        lengths = torch.tensor([0, 4], dtype=bounds, device="cuda")
        varlen_attn(q, q, q, lengths, lengths, 4, 4)

    def attention(key_heads):
        q, k = (torch.ones(1, heads, 4, 8, device="cuda") for heads in (4, key_heads))
        torch.nn.functional.scaled_dot_product_attention(q, k, k)

    calls = {
        "other device": lambda: values + host,
        "a number of the host": lambda: values * torch.tensor(2.0),
        "another GPU": lambda: values + values.to("cuda:1"),
        "no such GPU": lambda: values.to("cuda:7"),
        "product of integers": lambda: integers @ integers,
        "generator of the host": lambda: torch.rand(
            3, device="cuda", generator=torch.Generator().manual_seed(0)
        ),
        "fused AdamW": lambda: adamw.step(),
        "fused AdamW, counters on the host": resumed,
        "flash": lambda: flash(torch.bfloat16, torch.int32),
        "flash in fp32": lambda: flash(torch.float32, torch.int32),
        "flash with int64": lambda: flash(torch.bfloat16, torch.int64),
        "flash, 256 wide": lambda: flash(torch.bfloat16, torch.int32, 256),
        "flash, 264 wide": lambda: flash(torch.bfloat16, torch.int32, 264),
        "attention": lambda: attention(4),
        "attention, fewer key heads": lambda: attention(2),
        "indices on the host": lambda: values.index_select(0, torch.tensor([0])),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = ""
        except (RuntimeError, IndexError) as error:
            messages[name] = str(error)
    return messages


def test_a_gpu_refuses_what_it_would_refuse():
    expected = {
        "other device": "same device",
        "another GPU": "same device",
        "no such GPU": "invalid device ordinal 7",
        "product of integers": "not implemented for torch.int64",
        "generator of the host": "expected a 'cuda' generator",
        "fused AdamW, counters on the host": "same device",
        "flash in fp32": "only supports fp16 and bf16",
        "flash with int64": "contiguous int32",
        "flash, 264 wide": "head size 264",
        "attention, fewer key heads": "without enable_gqa",
        "indices on the host": "same device",
    }
    found = ranks(2, _pretending, refusals, ())[0]
    for name, message in found.items():
        wanted = expected.get(name)
        assert wanted in message if wanted else message == "", (name, message)


def attention_gaps():
    """Largest difference of output and gradients between the GPU's kernels and a plain formula."""
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    lengths_q, lengths_k, window = (3, 5), (6, 5), 3
    q, k, v = (torch.randn(n, heads, 8) for n, heads in ((8, 4), (11, 2), (11, 2)))
    grad = torch.randn(8, 4, 8)

    def plain(q, k, v):
        rows = []
        for qs, ks, vs in zip(
            q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True
        ):
            ks, vs = (x.repeat_interleave(2, 1) for x in (ks, vs))
            scores = torch.einsum("qhd,khd->hqk", qs, ks) / 8**0.5
            place = torch.arange(len(qs))[:, None] + len(ks) - len(qs)
            back = place - torch.arange(len(ks))
            scores = scores.masked_fill((back < 0) | (back > window), -torch.inf)
            rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
        return torch.cat(rows)

    def kernel(q, k, v):
        cu_q = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
        cu_k = torch.tensor([0, 6, 11], dtype=torch.int32, device="cuda")
        options = {"window_size": (window, 0), "enable_gqa": True}
        return varlen_attn(q, k, v, cu_q, cu_k, 5, 6, **options)

    def outcome(function, inputs, grad):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    inputs = [x.to(torch.bfloat16) for x in (q, k, v)]
    expected = outcome(plain, [x.float() for x in inputs], grad.to(torch.bfloat16).float())
    found = outcome(kernel, [x.cuda() for x in inputs], grad.to(torch.bfloat16).cuda())
    gaps = [(x.host.float() - y).abs().max().item() for x, y in zip(found, expected, strict=True)]

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    grad = torch.randn(1, 2, 5, 8)
    expected = outcome(sdpa, inputs, grad)
    found = outcome(sdpa, [x.cuda() for x in inputs], grad.cuda())
    exact = [(x.host - y).abs().max().item() for x, y in zip(found, expected, strict=True)]
    return gaps, exact, dict(pretend.record.attention)


def test_the_fused_kernels_compute_attention():
    gaps, exact, kernels = on_gpu(attention_gaps)
    assert max(gaps) < 0.05 and max(exact) < 1e-5, (gaps, exact)  # of bf16, of fp32
    assert kernels == {"varlen bfloat16": 1, "efficient float32": 1}


def grouped_attention(dtype, width):
    """Kernels of a packed pair with four heads and two key heads."""
    from lm.fast import shared_prefix

    query, key = (torch.randn(1, heads, 9, width, dtype=dtype).cuda() for heads in (4, 2))
    packing = shared_prefix.Packing([(3, 2, 4)], query.device)
    shared_prefix.attend(None, query, key, key, None, packing=packing)
    return dict(pretend.record.attention)


@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [(torch.float32, 8, "efficient float32"), (torch.bfloat16, 512, "efficient bfloat16")],
)
def test_no_kernel_keeps_all_scores_where_heads_share_keys(dtype, width, kernel):
    assert on_gpu(grouped_attention, dtype, width) == {kernel: 2}


def collectives():
    """What NCCL accepts, and the message of what it does not support."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from ddp_utils import distributed

    world = distributed.init_process_group(distributed.whoami())
    assert (world.backend, world.device.type, dist.get_backend()) == ("nccl", "cuda", "nccl")
    shard = DTensor.from_local(torch.ones(2), init_device_mesh("cuda", (2,)), [Shard(0)])
    assert shard.device.type == "cuda"  # moved by from_local
    offloaded = shard.to("cpu")
    weight = torch.nn.Parameter(offloaded)
    weight.grad = offloaded
    calls = {
        "sum": lambda: distributed.all_sum(torch.ones(2, device=world.device), world),
        "gathered": lambda: shard.full_tensor(),
        "barrier": dist.barrier,
        "of the host": lambda: distributed.all_sum(torch.ones(2), world),
        "int16": lambda: distributed.all_sum(
            torch.ones(2, dtype=torch.int16, device=world.device), world
        ),
        "functional, of the host": lambda: torch.ops._c10d_functional.all_reduce(
            torch.ones(2), "sum", dist.group.WORLD.group_name
        ),
        "gathered from the host": lambda: offloaded.full_tensor(),
        "norm of the host": lambda: float(torch.nn.utils.clip_grad_norm_([weight], 1.0)),
    }
    found = {}
    for name, call in calls.items():
        try:
            out = call()
            found[name] = out.tolist() if isinstance(out, torch.Tensor) else out
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    return found


def test_nccl_does_not_support_the_host_and_some_types():
    found = ranks(2, _pretending, collectives, ())[0]
    assert found.pop("sum") == [2.0, 2.0] and found.pop("gathered") == [1.0] * 4
    assert found.pop("barrier") is None
    assert "unsupported data type torch.int16" in found.pop("int16")
    wanted = "No backend type associated with device type cpu"
    assert set(found.values()) == {wanted} and len(found) == 4, found


def weigh():
    """Bytes that are counted after each change of a layer of 256 KiB in fp32."""
    memory, sizes = pretend.record.memory, []

    def add(*_):
        sizes.append(memory.now)

    layer = torch.nn.Linear(256, 256, bias=False)
    add(layer.to("cuda"))
    view = layer.weight.detach().t()
    add()
    layer.weight.data = layer.weight.data.bfloat16()
    add()
    del view
    add()
    add(layer.to("cpu"))
    return sizes


def test_the_memory_of_a_layer_is_counted_once_until_it_is_freed():
    assert on_gpu(weigh) == [2**18, 2**18, 2**18 + 2**17, 2**17, 0]


def out_of_memory(folder):
    """A DPO run whose largest step needs too much memory -> the error, rows of steps tried."""
    import main_distributed
    import runs
    from ddp_utils import UserError
    from ddp_utils.run import Run

    steps = []
    memory = pretend.record.memory
    train_step, try_steps = main_distributed.train_step, Run.try_largest_steps

    def tried(policy, step, rows, *more):
        steps.append(len(rows))
        return train_step(policy, step, rows, *more)

    def trial(*arguments):
        memory.limit = memory.now + 10 * 2**20  # of which AdamW's moments have 8
        try_steps(*arguments)

    runs.hurry(self_test=True)
    main_distributed.train_step, Run.try_largest_steps = tried, trial
    Run.reference_logps = None  # not called
    flags = rehearse.words("dpo full", "fp32", folder, folder)
    try:
        main_distributed.main(flags)
    except UserError as error:
        return str(error), steps
    return "", steps


def full(flags, folder):
    """A DPO run on a GPU that others have filled -> the error that is printed."""
    import main_distributed
    import runs
    from ddp_utils import user_error

    pretend.record.memory.limit = 7 * 2**20  # the demo's model has 4
    runs.hurry(self_test=True)
    try:
        main_distributed.main([*rehearse.words("dpo lora", "fp32", folder, folder), *flags])
    except RuntimeError as error:
        return str(user_error(error))
    return ""


FULL = [  # layout -> the first failure: the products of a self-test, those of a step
    "auto",
    "separate",
]


@pytest.mark.parametrize("layout", FULL)
def test_a_full_gpu_costs_one_line(layout, tmp_path):
    line = on_gpu(full, ["--layout", layout], tmp_path / "run")
    start = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`; see in nvi"
    assert line.startswith(start) and line.endswith("; --debug shows where it happened"), line


def test_a_step_without_enough_memory_is_an_error_before_anything_is_scored(tmp_path):
    line, steps = on_gpu(out_of_memory, tmp_path / "run")
    assert steps == [8]
    assert re.fullmatch(
        r"the memory of rank 0 does not suffice for step \d, 8 rows with \d+ tokens "
        r"\(CUDA out of memory\. Tried to allocate [\d.]+ MiB\); "
        "use a smaller max_length or batch size, gradient checkpointing, or more GPUs",
        line,
    )
