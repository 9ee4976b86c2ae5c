"""The pieces of hour.py: each yields rows of a table, {column: value}, as soon as it has them.

A row with `ok` False makes its piece a failed one. DRY: on a CPU; TINY: with small models and few
steps. What takes seconds to import is imported by the piece that needs it.
"""

import contextlib
import copy
import gc
import importlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

import check_gpu

ROOT = Path(__file__).resolve().parents[2]
DRY = "--dry" in sys.argv
TINY = DRY
DEVICE = torch.device("cpu" if DRY else "cuda")
CASES = f"{tempfile.gettempdir()}/gpu_hour_cases"
# Qwen3's shapes: width, inner width, layers, heads, key heads; heads are 128 wide
SHAPES = {"0.6B": (1024, 3072, 28, 16, 8), "1.7B": (2048, 6144, 28, 16, 8)}
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
SMALL = (64, 128, 2, 2, 1)
KINDS = {"lora": "--fine_tuning lora --learning_rate 1e-3"}  # in bf16 all that a CPU can train
KINDS |= {} if DRY else {"full": "--fine_tuning full --learning_rate 3e-4"}


class Skip(Exception):
    """Why a piece cannot be done here."""


def shape(sizes, words=151936, head=128, **more):
    from transformers import Qwen3Config

    sizes = dict(zip(SIZES.split(), SMALL if TINY else sizes, strict=True))
    more |= {"tie_word_embeddings": True, "max_position_embeddings": 4096, "head_dim": head}
    more |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return Qwen3Config(**sizes, **more, vocab_size=2048 if TINY else words)


@contextlib.contextmanager
def without_files(config):
    """Meanwhile models.load() makes the model of this configuration, with random weights."""
    from transformers import AutoModelForCausalLM

    from lm import models

    def load(_name, dtype, device, _quantization=None, model_class=None):
        torch.manual_seed(0)
        kind = torch.float32 if dtype == "auto" else dtype
        # always on the GPU, in a moment: a CPU would draw other numbers, and FSDP loads on the CPU
        with DEVICE:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=kind)
        model = models.no_dropout(model.to(device))
        forget()  # that the weights were on the GPU, which they are not if a file is loaded
        return model

    with mock.patch.object(models, "load", load):
        yield


def one_process():
    """Return the world of one process, after what the scripts set in torch, such as attention."""
    from ddp_utils import distributed

    return distributed.choose_device(distributed.World(), "gloo" if DRY else "auto")


def draw_pairs(count, *lengths):
    from lm.logps import Pair

    dice = random.Random(0)
    pairs = []
    for _ in range(count):
        ids = [[dice.randrange(2, 2000) for _ in range(length)] for length in lengths]
        pairs.append(Pair(*ids, "", ""))
    return pairs


def script(name, words, run):
    """Lines of the training steps of one of the project's scripts, in this process."""
    from ddp_utils import run as run_

    run_.write_report = lambda *_, **__: ""
    assert importlib.import_module(name).main(words.split()) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "train"]


def seconds(lines):
    """Of a step; the first ones warm up."""
    return statistics.median(line["seconds"] for line in lines[len(lines) // 3 :])


def widest(one, other):
    """The largest difference between two curves, which have the same length."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def settle():
    if not DRY:
        torch.cuda.synchronize()


def forget():
    """Free unused memory, and measure the peak from here on."""
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- is it right? --------------------------------------------------------------------------------


def demo(folder):
    """The CPU in fp32, then the device in fp32 and in bf16."""
    import runs

    steps = 2 if TINY else 20
    common = " ".join(["--val_data", runs.PAIRS, *runs.QUIET, f"--max_rows {16 * steps}"])
    ways = {"CPU": "--backend gloo", "fp32": "--no_use_mixed_precision"}
    ways["bf16"] = "--base_dtype bf16" if DRY else ""  # a CPU has to be asked for it
    for kind, flags in KINDS.items():
        curves = {}
        for way, more in ways.items():
            run = folder / kind / way
            words = f"{flags} {common} {more} --max_steps {steps} --result_dir {run}"
            curves[way] = [line["loss"] for line in script("main_distributed", words, run)]
        for way, bound in {"fp32": 1e-4, "bf16": 5e-3}.items():
            gap = widest(curves[way], curves["CPU"])
            row = {"trained": kind, "in": way, "steps": steps, "first loss": curves[way][0]}
            row |= {"last loss": curves[way][-1], "last loss, CPU": curves["CPU"][-1]}
            yield row | {"largest gap": gap, "bound": bound, "ok": gap <= bound}


def attention(_folder):
    """Compare log-probs and gradients of a LoRA with those of fp32 on the CPU, in separate rows.

    nats: root mean square of the differences of all response tokens. In bf16, a shared prompt may
    differ at most twice as much as separate rows do. The rows of "short" fit into one tile of the
    attention kernel; those of "long" have several tiles of queries and of keys, also in the
    backward pass. The kernel has other tiles for each head size.
    """
    from config import Config
    from ddp_utils import distributed
    from ddp_utils.policy import Precision
    from lm import logps, models
    from lm.fast import by_sequence, self_test

    one_process()
    scale = 10 if TINY else 1  # these rows take a CPU half a minute at full length
    count = 1 if TINY else 4  # a CPU without instructions for bf16 needs seconds per pair
    rows = {"short": draw_pairs(2 * count, 60, 20, 30) + draw_pairs(count, 9, 1, 40)}
    rows["long"] = draw_pairs(1, 1500 // scale, 300 // scale, 700 // scale)
    rows["long"] += draw_pairs(1, 90 // scale, 700 // scale, 20 // scale)

    def measure(device, dtype, shared, config, pairs):
        with without_files(config):  # on the CPU: all have the same weights
            precision = Precision(torch.float32, None)
            cpu = torch.device("cpu")
            settings = Config(fine_tuning="lora", lean=shared)
            adapter = models.LoraSpec.of(settings)
            model = models.load_policy("", adapter, precision, cpu, memory_efficient=shared)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # at 0 there would be no gradient by A
                parameter.data.fill_(0.01)
        scorer = logps.Scorer(model, None if dtype == torch.float32 else dtype).to(device)
        note = "separate"
        if shared:
            lines = self_test.choose_head_and_layout(
                scorer, pairs, "auto", distributed.World(device=device)
            )
            note = "; ".join(lines) or "shared"
        with mock.patch.object(
            by_sequence, "attend_by_sequence", wraps=by_sequence.attend_by_sequence
        ) as varlen:
            token_logps = scorer.token_logps(scorer.collate(pairs, device))  # [N]
            token_logps.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        return token_logps.detach().cpu(), gradient.cpu(), note, varlen.called

    def has_kernel(dtype, head):
        return not DRY and dtype == torch.bfloat16 and by_sequence.is_supported(DEVICE, head)

    cases = [("short", 128, None), ("short", 128, 16)]  # rows, head size, attention window
    cases += [
        ("long", 64, 500 // scale),
        ("long", 128, None),
        ("long", 256, None),
        ("long", 512, None),
    ]
    for kind, head, window in cases[::2] if TINY else cases:
        pairs = rows[kind]
        more = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": window}
        config = shape((512, 1024, 4, 8, 4), 8192, head, **(more if window else {}))
        exact = measure(torch.device("cpu"), torch.float32, False, config, pairs)
        for dtype in (torch.float32, torch.bfloat16):
            worst = {}
            for shared in (False, True):
                token_logps, gradient, note, varlen = measure(DEVICE, dtype, shared, config, pairs)
                gaps = [(token_logps - exact[0]).square().mean().sqrt().item()]
                gaps.append(((gradient - exact[1]).norm() / exact[1].norm()).item())
                worst[shared] = gaps
                limits = [1e-4, 1e-4]
                if dtype == torch.bfloat16:
                    limits = [2 * gap for gap in worst[False]]
                row = {"rows": kind, "head size": head, "window": window, "in": str(dtype)[6:]}
                row |= {"prompt": note, "varlen": varlen, "nats": gaps[0], "gradient": gaps[1]}
                ok = gaps[0] <= limits[0] and gaps[1] <= limits[1]
                ok = ok and (note == "shared") == shared
                is_expected = varlen == (shared and has_kernel(dtype, head))
                yield row | {"limits": limits, "ok": ok and is_expected}


def resume(folder):
    """A run that is killed at any time and started again: weights and losses are bit-identical."""
    import faults
    import runs

    steps = 6 if TINY else 100
    common = f"--max_steps {steps} --save_every {steps // 6} --batch_size 8 --deterministic"
    common += f" --max_rows {8 * steps} --val_data {runs.PAIRS} --result_dir"

    def start(kind, name):
        words = [*KINDS[kind].split(), *runs.QUIET, *common.split(), str(folder / kind / name)]
        program = [sys.executable, "-c", "import sys, runs; runs.main(sys.argv[1:])"]
        return subprocess.Popen([*program, *words])

    first = {kind: (start(kind, "killed"), start(kind, "whole")) for kind in KINDS}
    while any(killed.poll() is None for killed, _ in first.values()):
        for kind, (killed, _) in first.items():
            metrics = folder / kind / "killed/metrics.jsonl"
            if metrics.exists() and metrics.read_text().count('"train"') > steps // 3:
                killed.kill()
        time.sleep(0.005)
    for kind, lives in first.items():
        codes = [life.wait() for life in lives]
        killed, whole = folder / kind / "killed", folder / kind / "whole"
        row = {"trained": kind, "steps": steps, "killed after": len(runs.lines(killed, "train"))}
        row["exit statuses"] = [*codes, start(kind, "killed").wait()]
        row["weights equal"] = faults.digest(killed) == faults.digest(whole)
        row["metrics equal"] = faults.numbers(killed) == faults.numbers(whole)
        ended = row["exit statuses"] == [-signal.SIGKILL, 0, 0]
        yield row | {"ok": ended and row["weights equal"] and row["metrics equal"]}


def fp16(folder):
    """The loss scale as it starts, and so large that the first gradients overflow."""
    if DRY:
        raise Skip("needs CUDA: a CPU is slow at fp16, and src/train.py refuses it there")
    from ddp_utils.policy import LossScale

    allows = LossScale.allows_step
    begin = LossScale.__init__
    exact, size = None, "--max_steps 4 --max_rows 64" if TINY else "--max_steps 40"
    for name, exponent in (("no", 0), ("fp16", 16), ("fp16", 32)):
        run = folder / f"{name}{exponent}"
        skips = []

        def spy(self, grad_norm, skips=skips):
            is_allowed = allows(self, grad_norm)
            skips.append(not is_allowed)
            return is_allowed

        def start(self, enabled, exponent=exponent):
            begin(self, enabled)
            self.scale = 2.0**exponent

        words = f"""--config {ROOT}/config.yaml --type full {size} --mixed_precision {name}
            --learning_rate 3e-4 --warmup_ratio 0 --report_to none --output_dir {run}"""
        with mock.patch.multiple(LossScale, __init__=start, allows_step=spy):
            curve = [line["loss"] for line in script("train", words, run)]
        exact = exact or curve
        row = {"mixed precision": name, "scale": f"2^{exponent}", "steps skipped": sum(skips)}
        row |= {"last loss": curve[-1], "largest gap": widest(curve, exact)}
        is_right = any(skips) if exponent == 32 else any(skips) or row["largest gap"] <= 2e-2
        is_lower = curve[-1] < curve[0] or all(skips)  # the last needs a few steps to begin
        yield row | {"ok": is_right and sum(skips) < 30 and is_lower}


# --- memory and speed ----------------------------------------------------------------------------


def memory(_folder):
    """The peak of three steps above what there was before the model, and what --plan expects.

    The trial of the largest step, before the first one, must come close to it. In fp32, a matrix of
    the attention weights of the long rows would take more memory than everything else.
    """
    import main_distributed
    from config import Config
    from ddp_utils import losses, metrics
    from ddp_utils.policy import Policy, make_optimizer
    from lm import logps, memory_plan, models

    world = one_process()
    pairs = draw_pairs(4, *((24, 8, 8) if TINY else (512, 256, 256)))
    tall = draw_pairs(1, *((48, 16, 8) if TINY else (3000, 500, 300)))

    def train(config, precision, rows):
        """Train three steps; return the peak of the trial before them, in GiB."""
        known = torch.zeros(len(rows), 2, device=DEVICE)
        adapter = models.LoraSpec.of(config)
        model = models.load_policy(
            "", adapter, precision, DEVICE, gradient_checkpointing=config.use_gradient_checkpointing
        )
        scorer = logps.Scorer(model, precision.autocast)
        scorer.set_layout(shared=True)
        policy = Policy(scorer, world)
        optimizer, schedule = make_optimizer(policy, 1e-4, 3, "constant", 0.0, 0.0)

        def backward():
            batch = scorer.collate(rows, DEVICE)
            policy.backward(
                losses.pair_losses(policy, batch, known, losses.LossSpec.of(config))[0].mean()
            )

        with policy.trial():
            backward()
        tried = metrics.peak_memory_mb(DEVICE) / 2**10
        for _ in range(3):
            backward()
            policy.step(optimizer, schedule, policy.clip_grad_norm(1.0).item())
        return tried

    shapes = list(SHAPES.items())[: 1 if TINY else 2]
    kinds = [*itertools.product(shapes, ("lora", "full"), (False, True), (True,), (pairs,))]
    kinds += [(shapes[0], "lora", checkpoints, False, tall) for checkpoints in (False, True)]
    warm_up = (("warm-up", SMALL), "lora", False, True, pairs)
    for (name, sizes), kind, checkpoints, mixed, rows in [warm_up, *kinds]:
        config = Config(fine_tuning=kind, use_gradient_checkpointing=checkpoints, sft_weight=0.0)
        config.use_mixed_precision = mixed
        precision = main_distributed.precision_of(config, DEVICE)
        settings = shape(sizes)
        forget()
        before = 0 if DRY else torch.cuda.memory_allocated() / 2**30
        with without_files(settings):
            tried = train(config, precision, rows) - before
        peak = metrics.peak_memory_mb(DEVICE) / 2**10 - before

        def losses_of(*arguments, config=config):
            return losses.pair_losses(*arguments, losses.LossSpec.of(config))

        need = memory_plan.need(config, precision, settings, rows, losses_of, DEVICE.type)
        plan = sum(memory_plan.share(need, "DDP", 1)) / 2**30
        row = {"shape": name, "trained": kind, "checkpointing": checkpoints}
        row |= {"in": "bf16" if mixed else "fp32, long", "measured GiB": peak}
        row |= {"trial GiB": tried, "predicted GiB": plan}
        if not DRY:  # a CPU's peak is that of the whole process
            row |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
            row |= {"ratio": plan / peak, "ok": 0.85 <= plan / peak <= 1.15 and tried > 0.9 * peak}
        if name != "warm-up":
            yield row


def case_of(name):
    """A case of tests/bench/cases.py; both of 8 B have one model on the disk."""
    import cases

    if TINY:
        tiny = cases.SMALL | {"hidden_size": 64, "num_hidden_layers": 2}
        with mock.patch.object(cases, "SMALL", tiny):
            return cases.make_case("short", CASES)
    with DEVICE:  # a CPU would take minutes to draw 8 G numbers
        long = cases.make_case("8b", CASES)
    forget()
    if name == "long":
        return long
    with mock.patch.object(cases, "LARGE", cases.SMALL):
        folder = cases.make_case("8b_hh", CASES)
    for file in [*folder.glob("model/model*"), folder / "model/config.json"]:
        file.unlink()
    for file in [*long.glob("model/model*"), long / "model/config.json"]:
        (folder / "model" / file.name).symlink_to(file)
    return folder


def speed(_folder, case, kind):
    """Seconds by the clock and memory of one side of tests/bench/dpo_vs_trl.py."""
    import dpo_vs_trl

    pairs = 2 if TINY else 4  # 8 of hh, padded, are more than TRL keeps in 80 GB
    arm = dpo_vs_trl.Arm(kind, kind, pairs=pairs)
    args = types.SimpleNamespace(steps=3 if TINY else 11, sft=False, trl_python=sys.executable)
    side = dpo_vs_trl.measure(arm, case_of(case), "fp32" if DRY else "bf16", args)
    step = statistics.median(b - a for a, b in itertools.pairwise(side["clock"]))
    row = {"side": kind, "pairs a step": pairs, "s a step": step}
    row |= {"tokens/s": statistics.mean(side["tokens"][1:]) / step, "losses": side["losses"]}
    row |= {"peak GiB": side["peak_mb"] / 1024, "mfu": (side.get("mfu") or ["-"])[-1]}
    entry = json.loads((FOLDER / "results.json").read_text()).get(f"speed:{case}:ours", {})
    if kind != "ours" and entry.get("machine", {}).get("device") == machine()["device"]:
        ours = entry["rows"][0]
        gap = widest(row["losses"], ours["losses"])
        row |= {"time, TRL / ours": step / ours["s a step"], "largest gap": gap}
        # Both round to bf16, at other places. A token's log-prob is then off by 0.004 nats after 36
        # layers of width 256, by 0.006 with 512 and by 0.013 with 1024, so by about 0.04 with 4096;
        # the loss of four pairs with 256 tokens per response by as much. Four times that.
        row |= {"memory, TRL / ours": row["peak GiB"] / ours["peak GiB"], "ok": gap <= 0.16}
    yield row


def kernels(folder):
    """Ten steps with long prompts under torch's profiler, after two that warm up."""
    import dpo_vs_trl
    from torch.profiler import ProfilerActivity, profile

    count, pairs = (1, 2) if TINY else (10, 4)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not DRY)
    profiler = profile(activities=activities)
    times = []

    class Record(dpo_vs_trl.Record):
        def loop_begins(self):
            """Memory is not measured here."""

        def step_ends(self):
            self.clock.append(0)
            if len(self.clock) in (2, 2 + count):
                settle()
                times.append(time.perf_counter())
                profiler.stop() if times[1:] else profiler.start()

    case = case_of("long")
    rows = [json.loads(line) for line in (case / "train.jsonl").open()][: pairs * (count + 2)]
    spec = {"case": str(case), "pairs": pairs, "steps": count + 2, "flags": []}
    spec |= {"count": False, "products": [], "sft": False, "rate": 6e-5}
    os.chdir(folder)
    dpo_vs_trl.train_ours(spec | {"dtype": "fp32" if DRY else "bf16"}, rows, Record())
    wall = 1000 * (times[1] - times[0]) / count
    events = profiler.key_averages()
    spent = {event.key: (event.self_cpu_time_total, event.count) for event in events}
    if not DRY:
        cuda = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        spent = {event.key: (event.self_device_time_total, event.count) for event in cuda}
    busy = sum(microseconds for microseconds, _ in spent.values()) / 1000 / count

    def calls(*names):
        return sum(event.count for event in events if event.key.startswith(names)) / count

    row = {"ms a step": wall, "device busy": busy / wall}
    row |= {"read by the host": calls("aten::_local_scalar_dense")}
    row |= {"waits": calls("cudaStreamSync", "cudaDeviceSync", "cudaEventSync")}
    yield row | {"to the host": calls("Memcpy DtoH"), "to the device": calls("Memcpy HtoD")}
    longest = sorted(spent.items(), key=lambda item: -item[1][0])
    for name, (total, number) in longest if DRY else longest[:20]:  # its times mean nothing
        row = {"kernel": name[:90], "ms a step": total / 1000 / count}
        yield row | {"calls a step": number / count, "share": total / 1000 / count / busy}


def generation(folder):
    """Tokens per second: ours, transformers', and vLLM's where it is installed."""
    from lm import logps, models, sampling

    config = shape(SHAPES["0.6B"])
    count, length = (2, 4) if TINY else (16, 128)
    scores = torch.randn(count, config.vocab_size, device=DEVICE)
    uniform = torch.linspace(0, 0.999, count, dtype=torch.double, device=DEVICE)
    spec = sampling.SampleSpec(1.0, 0.9, 1, count, 0)
    together = sampling.sample_tokens(scores, uniform, spec)
    for row in range(count):  # a draw does not depend on what else is in the batch
        alone = sampling.sample_tokens(scores[row : row + 1], uniform[row : row + 1], spec)
        assert alone.item() == together[row].item(), row
    prompts = [pair.prompt for pair in draw_pairs(count, 64, 1, 1)]
    with without_files(config):
        model = models.load("", torch.float32 if DRY else torch.bfloat16, DEVICE)
    ids = torch.tensor(prompts, device=DEVICE)
    world = one_process()

    def ours(size):
        spec = sampling.SampleSpec(1.0, 1.0, size, count, 0)
        sampling.generate(logps.Scorer(model), prompts, [], world, spec)

    def theirs(size):
        model.eval()
        sizes = {"min_new_tokens": size, "max_new_tokens": size, "do_sample": True, "top_k": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **sizes)

    sides = {"ours": ours, "transformers.generate": theirs}
    if not DRY and find_spec("vllm"):
        import vllm

        config.save_pretrained(folder / "model")
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        engine = vllm.LLM(str(folder / "model"), gpu_memory_utilization=0.5, **dummy)

        def vllms(size):
            limits = {"max_tokens": size, "ignore_eos": True, "detokenize": False}
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            engine.generate(inputs, vllm.SamplingParams(**limits))

        sides["vLLM"] = vllms
    rates = {name: [] for name in sides}
    for _ in range(3):  # the first call of all warms up: kernels and memory for each length
        for name, generate in sides.items():
            settle()
            start = time.perf_counter()
            generate(length)
            settle()
            rates[name].append(count * length / (time.perf_counter() - start))
    for name, (_, *later) in rates.items():
        row = {"side": name, "replies": count, "tokens of each": length}
        yield row | {"tokens/s": statistics.mean(later), "first call, tokens/s": rates[name][0]}


def sharding(folder):
    """src/train.py on all weights, in a group of one rank; what it would save is left out."""
    import train
    from ddp_utils.run import Run
    from lm import models, parallel
    from lm.sharding.fsdp_policy import FsdpPolicy

    zero = {f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}
    files = {"fsdp": {"fsdp_offload_params": True}, "zero2": {"zero_optimization": {"stage": 2}}}
    files["zero3"] = {"zero_optimization": {"stage": 3}}
    files["zero3_offload"] = {"zero_optimization": {"stage": 3, **zero}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    fsdp = "--type full --use_fsdp"
    ways = {  # strategy -> flags, and the package that it needs
        "DDP": ("--type full", "torch"),
        "FSDP": (fsdp, "torch"),
        "FSDP, offloaded": (f"{fsdp} --fsdp_config {folder}/fsdp.json", "torch"),
        "QLoRA, the demo's model": ("--type qlora", "bitsandbytes"),
        "ZeRO-2": (f"--type full --deepspeed {folder}/zero2.json", "deepspeed"),
        "ZeRO-3": (f"--type full --deepspeed {folder}/zero3.json", "deepspeed"),
        "ZeRO-3, offloaded": (f"--type full --deepspeed {folder}/zero3_offload.json", "deepspeed"),
    }
    store = torch.distributed.HashStore()
    backend = "gloo" if DRY else "nccl"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    wrap = parallel.wrap

    def wrap_one(scorer, world, strategy, trained=True):  # one rank is else left to DDP
        if strategy.kind == "fsdp":
            return FsdpPolicy(scorer, world, strategy, trained)
        return wrap(scorer, world, strategy, trained)

    exact = None
    for name, (flags, package) in ways.items():
        if not find_spec(package) or (DRY and package != "torch"):
            yield {"strategy": name, "skipped": f"needs {package}, and CUDA"}
            continue
        run = folder / name.replace(" ", "")
        words = f"--config {ROOT}/config.yaml --max_steps 4 --max_rows 40 --report_to none "
        forget()
        before = 0 if DRY else torch.cuda.memory_allocated()  # DeepSpeed's engines keep theirs
        with contextlib.ExitStack() as stack:
            if package != "bitsandbytes":
                stack.enter_context(without_files(shape(SHAPES["0.6B"])))
            stack.enter_context(mock.patch.object(parallel, "wrap", wrap_one))
            stack.enter_context(mock.patch.object(models, "save_policy"))
            stack.enter_context(mock.patch.object(Run, "save"))
            lines = script(train.__name__, f"{words} {flags} --output_dir {run}", run)
        curve = [line["loss"] for line in lines]
        row = {"strategy": name, "s a step": seconds(lines), "last loss": curve[-1]}
        row["peak GiB"] = lines[-1]["peak_memory_mb"] / 1024 - before / 2**30
        exact = exact or curve
        if package != "bitsandbytes":
            gap = widest(curve, exact)
            row |= {"gap to DDP": gap, "ok": gap <= (1e-4 if DRY else 2e-2)}
        yield row


# --- the other scripts ---------------------------------------------------------------------------


def protein(folder):
    """One pair of a backbone at a time, and four."""
    for pairs in (1, 4):
        run = folder / str(pairs)
        words = f"--max_steps {2 if TINY else 60} --batch_size {pairs} --output_dir {run}"
        lines = script("dpo_inv.run_dpo_ddp", words, run)
        row = {"pairs a step": pairs, "s a step": seconds(lines)}
        yield row | {name: lines[-1][name] for name in ("tokens_per_second", "peak_memory_mb")}


def distillation(folder):
    """Some steps, and what all of them would take."""
    from ad import evaluate

    evaluate.write = lambda *_: None  # a picture
    words = f"""--config {ROOT}/config/model/ad_dr.yaml output_dir={folder}/run num_warmup_steps=3
        traj_file={folder}/histories.npz eval_copies=1 eval_episodes=2 train_timesteps=600
        summary_interval=100"""
    if TINY:
        words += """ train_timesteps=6 summary_interval=2 n_stream=4 train_n_stream=4
            total_source_timesteps=4000 train_batch_size=4 tf_n_embd=16 tf_n_layer=1 tf_n_head=1"""
    lines = script("ad.train", words, folder / "run")
    row = {"s a step": seconds(lines), "hours for 50,000 steps": seconds(lines) * 50_000 / 3600}
    yield row | {name: lines[-1][name] for name in ("tokens_per_second", "peak_memory_mb")}


def baking(folder):
    """Sample under the demo's system prompt, then bake it."""
    import generate_data

    sizes = (4, 2, 8) if TINY else (40, 25, 64)
    words = "--num_questions {} --num_sequences_per_question {} --max_sequence_length {} "
    words += f"--traj_out_file {folder}/train.jsonl --val_out_file {folder}/val.jsonl"
    start = time.perf_counter()
    generate_data.main(words.format(*sizes).split())
    row = {"replies": sizes[0] * sizes[1], "s to sample them": time.perf_counter() - start}
    run = folder / "run"
    words = f"--data_path {folder}/train.jsonl --val_path {folder}/val.jsonl --out_dir {run}"
    words += f" --batch_size {2 if TINY else 10} --max_steps {3 if TINY else 60} --num_samples 0"
    lines = script("train_loop", words, run)
    row["s a step"] = seconds(lines)
    yield row | {name: lines[-1][name] for name in ("tokens_per_second", "peak_memory_mb")}


def commands(folder):
    """What a newcomer types, each in a process of its own; a mistake costs one line."""
    steps = "--max_steps 2" if TINY else "--max_steps 40"
    run = folder / "dpo"
    shell = {  # label -> line of the shell, exit status
        "check_gpu.py": ("python check_gpu.py" + " --bench" * (not TINY), 0),
        "run_distributed.sh": (f"./run_distributed.sh 1 {steps} --result_dir {run}", 0),
        "lm.chat": (f"echo Hello | python -m lm.chat {run}", 0),
        "run_dpo_ddp_local.sh": (
            f"./run_dpo_ddp_local.sh 1 {steps} --output_dir {folder}/protein",
            0,
        ),
        "accelerate launch": (
            f"accelerate launch src/ad/train.py output_dir={folder}/ad total_source_timesteps=2000 "
            f"n_stream=4 traj_file={folder}/histories.npz train_timesteps=20 summary_interval=10 "
            "eval_copies=1 eval_episodes=2 train_n_stream=4 num_warmup_steps=2",
            0,
        ),
    }
    if not TINY:  # what only a GPU can refuse
        start = f"python src/main_distributed.py {steps} --result_dir {folder}/two"
        node = (
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29519 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
        )
        shell |= {
            "two processes, one GPU": (f"./run_distributed.sh 2 --result_dir {folder}/two", 2),
            "two ranks on one GPU": (
                f"env RANK=1 {node} {start} & env RANK=0 {node} {start}; code=$?; wait; exit $code",
                2,
            ),
            "a full GPU": (start, 2),
        }
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    env = os.environ | {"PATH": ":".join(places)}
    for name, (line, status) in shell.items():
        full = None
        if name == "a full GPU":  # all but what the context of another process takes
            left = torch.cuda.mem_get_info()[0] - 700 * 2**20
            full = torch.empty(left, dtype=torch.uint8, device=DEVICE)
        start = time.perf_counter()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, **pipes)
        print(f"--- {line}\n{done.stdout}")
        lines = [text for text in done.stdout.splitlines() if text.strip()]
        row = {"command": name, "s": time.perf_counter() - start, "exit status": done.returncode}
        errors = [text for text in lines if "error: " in text]
        row["line"] = (errors or lines or [""])[-1].replace(f"{folder}/", "")[-300:]
        is_plain = "Traceback" not in done.stdout
        yield row | {"ok": done.returncode == status and is_plain}
        del full


# --- this process --------------------------------------------------------------------------------


def machine():
    facts = check_gpu.collect_facts()
    versions = {"torch": facts["torch"], "CUDA": facts["cuda"] or "none"}
    versions |= {name: version(name) for name in ("transformers", "peft")}
    device = "CPU" if DRY else facts["devices"][0]["name"]
    return {"device": device, "driver": facts["driver"], "versions": versions}


def main(name, *arguments):
    """Do the piece, and write its entry after each row."""
    entry = {"status": "", "reason": "", "rows": [], "machine": machine()}
    work = FOLDER / "work"
    work.mkdir()

    def keep(**changes):
        entry.update(changes)
        temporary = FOLDER / ".entry.json"
        temporary.write_text(json.dumps(entry))
        temporary.rename(FOLDER / "entry.json")

    keep()
    try:
        for row in globals()[name](work, *arguments):
            print(row)
            keep(rows=[*entry["rows"], row])
        bad = sum(row.get("ok") is False for row in entry["rows"])
        reason = f"{bad} of {len(entry['rows'])} rows are out of bounds" if bad else ""
        keep(status="failed" if bad else "ok", reason=reason)
    except Skip as skip:
        keep(status="skipped", reason=str(skip))
    except BaseException as error:
        keep(status="failed", reason=f"{type(error).__name__}: {str(error)[-300:]}")
        raise


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    main(*sys.argv[2].split(":"))
