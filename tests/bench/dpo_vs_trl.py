"""Compare src/main_distributed.py with TRL's DPOTrainer: CPU time, memory and loss of LoRA DPO.

With --sft it is src/train.py with SFTTrainer, on prompts and chosen responses.

    python3 -m venv trlenv
    trlenv/bin/pip install torch==2.13.0 trl==1.16.0 transformers peft datasets
    python tests/bench/dpo_vs_trl.py --trl_python trlenv/bin/python --out ratios.json
    python tests/bench/dpo_vs_trl.py --layouts --processes 2 4       # ours against ours

Rules of measurement:
- Both sides train the same rows in the same order from the same weights, and their losses must
  agree in every step (exit status 1 if not): a speed is believed only then.
- One thread per process. CPU time of the process is measured, since wall time depends on other
  users of the machine. The first step is dropped.
- The sides alternate, A B A B; ratios are those of neighbors: median [smallest, largest].
- A ratio above 1 means that A needs more than B. It is CPU time per token of both responses with
  their prompts, which is the time per step if both sides see the same batches.
- The lower bound of a step is the time of its matrix products alone (limit.py); the fraction is
  this bound divided by the measured time.
- Memory is the highest point of the loop above the resident memory at its start (weights, LoRA,
  reference), in a separate run in which malloc returns freed memory at once.
- TRL runs in its best setting: no gradient checkpointing, reference computed beforehand. With
  --trl_grouped, a further row has TRL put rows of similar length into one batch; it then
  trains the same rows in another order, so losses cannot be compared, and the ratio is per token.
  SFT has two rows, with padding and without; both train on responses only.
- --model and --pairs name a real model and a JSON file of instructions with chosen and rejected
  answers; both sides see them through the model's chat template.
- On a GPU (--cases 8b 8b_hh --dtypes bf16) it is wall time, after synchronizing, and the most that
  torch had allocated, weights included; both sides hold the base in bf16.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from cases import CASES, GPU_CASES, make_case, make_real_case, token_counts

SRC = Path(__file__).resolve().parents[2] / "src"
# How far the losses of a step may differ. In bf16 TRL is up to 2.3e-3, and we are up to 2.7e-3,
# from the fp32 losses of the same rows (measured on ragged), each in its own direction.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
TIDY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

# --- the two sides, each in a process of its own -------------------------------------------------


def memory(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


class Record:
    """What one process measures: the time at the end of each step, its peak memory in the loop."""

    def __init__(self):
        import torch

        self.gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.clock, self.losses, self.tokens, self.resident_mb = [], [], [], None

    def loop_begins(self):
        if self.gpu:
            self.resident_mb = 0
        elif self.resident_mb is None:
            Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
            self.resident_mb = memory("VmRSS")

    def step_ends(self):
        if self.gpu:
            import torch

            torch.cuda.synchronize()
            self.clock.append(time.perf_counter())
            self.peak_mb = torch.cuda.max_memory_allocated() / 2**20
        else:
            self.clock.append(time.process_time())
            self.peak_mb = memory("VmHWM")


def train_trl(spec, rows, record):
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            record.loop_begins()

        def on_step_end(self, *_, **__):
            record.step_ends()

    defaults = spec["kind"] == "trl defaults"
    settings = {
        "output_dir": "out",
        "per_device_train_batch_size": spec["pairs"],
        "max_steps": spec["steps"],
        "learning_rate": spec["rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": 1024,
        "gradient_checkpointing": defaults,
        "bf16": spec["dtype"] == "bf16",
        "train_sampling_strategy": "sequential",
        "use_cpu": not record.gpu,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 0,
    }
    if spec["sft"]:
        trainer, kind = SFTTrainer, SFTConfig
        settings |= {"completion_only_loss": True}
        if spec["kind"] == "trl padding-free":
            settings |= {"padding_free": True, "max_length": None}
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    else:
        trainer, kind = DPOTrainer, DPOConfig
        settings |= {"beta": 0.1, "precompute_ref_log_probs": not defaults}
    if spec["kind"] == "trl grouped":  # TRL leaves no column whose length the sampler could read
        lengths = token_counts(spec["case"], rows)
        rows = [row | {"length": length} for row, length in zip(rows, lengths, strict=True)]
        settings |= {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
    settings = kind(**settings)

    class Trainer(trainer):
        def training_step(self, model, inputs, *rest, **named):
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            record.tokens.append(int(mask.sum()))
            loss = super().training_step(model, inputs, *rest, **named)
            record.losses.append(loss.item())
            return loss

    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = "bfloat16" if record.gpu and settings.bf16 else "float32"
    set_seed(0)
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(f"{spec['case']}/model", dtype=dtype),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(f"{spec['case']}/model"),
        peft_config=adapter,
        callbacks=[Clock()],
    ).train()


def train_ours(spec, rows, record):
    import limit

    from ddp_utils import policy as policies

    script = importlib.import_module("train" if spec["sft"] else "main_distributed")
    make_optimizer, step = policies.make_optimizer, policies.Policy.step

    def last_before_the_loop(*arguments, **named):
        made = make_optimizer(*arguments, **named)
        record.loop_begins()
        return made

    def last_of_a_step(*arguments):
        step(*arguments)
        record.step_ends()

    # a script uses it by its name or through its module
    script.make_optimizer = policies.make_optimizer = last_before_the_loop
    policies.Policy.step = last_of_a_step
    products = limit.Products()
    if spec["count"]:
        train_step = script.train_step

        def counted(policy, step, *arguments):
            with products if step else contextlib.nullcontext():  # the first is dropped
                return train_step(policy, step, *arguments)

        script.train_step = counted
    case, pairs = spec["case"], spec["pairs"]
    flags = f"""
        --model_name {case}/model --max_rows {len(rows)} --chat_template none --no_shuffle --seed 0
        --lora_r 16 --lora_alpha 32 --learning_rate {spec["rate"]} --lr_scheduler constant
        --warmup_ratio 0 --weight_decay 0 --max_grad_norm 1.0 --max_steps {spec["steps"]}
        --eval_every 1000000 --base_dtype {spec["dtype"]}
    """
    if spec["sft"]:
        lines = [json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) for row in rows]
        Path("sft.jsonl").write_text("\n".join(lines))
        Path("none.yaml").write_text("training: {}\n")
        flags += f"""--config none.yaml --type lora --micro_batch_size {pairs}
            --train_data sft.jsonl --val_share 0 --output_dir run"""
    else:
        flags += f"""--fine_tuning lora --beta 0.1 --sft_weight 0 --lr_scaling none
            --train_data {case}/train.jsonl --val_data {case}/val.jsonl --num_samples 0
            --test_data {case}/val.jsonl --batch_size {pairs} --result_dir run"""
    script.main([*flags.split(), *spec["flags"]])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    record.losses = [line["loss"] for line in lines if line["split"] == "train"]
    record.mfu = [line.get("mfu") for line in lines if line["split"] == "train"]
    lengths = token_counts(case, rows, ("chosen",) if spec["sft"] else ("chosen", "rejected"))
    record.tokens = [sum(lengths[i : i + pairs]) for i in range(0, len(rows), pairs)]
    record.products = products.as_list()
    record.limit = limit.seconds(spec["products"]) / (spec["steps"] - 1)


def work(spec):
    """One process of one side: train, and leave record<rank>.json behind."""
    import torch

    torch.set_num_threads(1)
    lines = Path(spec["case"], "train.jsonl").read_text().splitlines()[: spec["rows"]]
    rows, record = [json.loads(line) for line in lines], Record()

    def train(side):
        side(spec, rows, record)
        Path(f"record{os.environ.get('RANK', 0)}.json").write_text(json.dumps(vars(record)))

    if spec["kind"] != "ours":
        return train(train_trl)
    sys.path.insert(0, str(SRC))
    from ddp_utils import distributed

    distributed.run(lambda: train(train_ours))


# --- measuring -----------------------------------------------------------------------------------


class Arm(NamedTuple):
    name: str
    kind: str = "ours"  # or trl, trl grouped, trl defaults, trl padded, trl padding-free
    flags: list = []  # of main_distributed.py, or of train.py
    processes: int = 1
    pairs: int = 4  # of a step, over all processes


def is_for_gpu(case):
    """Return whether a folder of make_case() has a model that is too large for a CPU."""
    return case.name.rpartition("-")[0] in GPU_CASES


def measure(arm, case, dtype, args, malloc=(), count=False, products=()):
    """Run one side once; return what it recorded, with CPU time summed over its processes.

    malloc: environment variables of glibc; count: record the matrix products; products: time these.
    """
    rows = arm.pairs * args.steps
    spec = arm._asdict() | {"case": str(case), "dtype": dtype, "rows": rows, "steps": args.steps}
    spec |= {"count": count, "products": products, "sft": args.sft}
    spec["rate"] = 6e-5 if is_for_gpu(case) else 1e-3  # for hidden states of 4096 and of 256
    python = sys.executable if arm.kind == "ours" else os.path.abspath(args.trl_python)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arm.processes}"]
    command = [python, *(torchrun if arm.processes > 1 else []), str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory(prefix="dpo_vs_trl_") as folder:
        env = os.environ | QUIET | dict(malloc) | {"HF_DATASETS_CACHE": f"{folder}/datasets"}
        command += ["--arm", json.dumps(spec)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}"[-6000:] + f"{case.name} {dtype}: {arm.name}")
        files = [Path(folder, f"record{rank}.json") for rank in range(arm.processes)]
        ranks = [json.loads(file.read_text()) for file in files]
    seconds = sum(rank["clock"][-1] - rank["clock"][0] for rank in ranks)
    found = ranks[0] | {"arm": arm.name, "s_per_step": seconds / (args.steps - 1)}
    found["s_per_token"] = seconds / sum(found["tokens"][1:])
    found["growth_mb"] = max(rank["peak_mb"] - rank["resident_mb"] for rank in ranks)
    shown = f"{seconds / (args.steps - 1):.3f} s per step, memory +{found['growth_mb']:.0f} MB"
    print(f"# {case.name} {dtype} {arm.name}: {shown}", file=sys.stderr)
    return found


def compare(arms, case, dtype, args):
    """Return one row of the table, of two arms that alternate."""
    on_gpu = is_for_gpu(case)
    first, second = arms
    memory_runs = [measure(first, case, dtype, args, TIDY_MALLOC)]
    memory_runs.append(measure(second, case, dtype, args, TIDY_MALLOC, count=not on_gpu))
    products = memory_runs[1].pop("products")
    pairs = []
    for _ in range(args.repeats):
        other = measure(first, case, dtype, args)
        pairs.append((other, measure(second, case, dtype, args, products=products)))
    gap = None
    if first.kind != "trl grouped":  # with the same rows in each step
        if any(a["tokens"] != b["tokens"] for a, b in pairs):
            sys.exit(f"{case.name}: {first.name} and {second.name} had different tokens")
        losses = [zip(a["losses"], b["losses"], strict=True) for a, b in pairs]
        gap = max(abs(a - b) for a, b in itertools.chain(*losses))
    seconds = [[run["s_per_step"] for run in runs] for runs in zip(*pairs, strict=True)]
    growth = [run["growth_mb"] for run in memory_runs]
    fractions = [b.get("limit", 0) * arms[1].processes / b["s_per_step"] for _, b in pairs]
    return {
        "case": case.name.rpartition("-")[0],
        "dtype": dtype,
        "arms": [arm.name for arm in arms],
        "s_per_step": [statistics.median(runs) for runs in seconds],
        "fraction_of_bound": statistics.median(fractions),
        "ratios": [a["s_per_token"] / b["s_per_token"] for a, b in pairs],
        "memory_mb": growth,
        "memory_ratio": growth[0] / growth[1],
        "loss_difference": gap,
        "runs": pairs,
        "memory_runs": memory_runs,
    }


def comparisons(args):
    """Return the pairs of arms that the flags select."""
    ours, found = Arm("ours", flags=args.ours), []
    if args.sft:
        return [(Arm(f"TRL, {kind}", f"trl {kind}"), ours) for kind in ("padded", "padding-free")]
    if args.trl_python:
        found.append((Arm("TRL", "trl"), ours))
    if args.trl_grouped:
        found.append((Arm("TRL, grouped by length", "trl grouped"), ours))
    if args.trl_defaults:
        found.append((Arm("TRL's defaults", "trl defaults"), ours))
    if args.layouts:
        names = "separate", "shared"
        found.append([Arm(name, flags=[*args.ours, "--layout", name]) for name in names])
    one, *more = (
        Arm(f"{n} process{'es' * (n > 1)}", "ours", args.ours, n, pairs=8)
        for n in sorted({1, *args.processes})
    )
    found += [(one, many) for many in more]
    return found


# --- showing -------------------------------------------------------------------------------------


CASE_NAMES = {
    "long": "prompts of 256 tokens, responses of 64",
    "short": "prompts of 32 tokens, responses of 192",
    "ragged": "mixed lengths",
    "hh": "lengths as in HH-RLHF",
    "bigv": "vocabulary of 51,200",
    "smollm2": "SmolLM2-135M-Instruct, short pairs",
}


def spread(row):
    return statistics.median(row["ratios"]), min(row["ratios"]), max(row["ratios"])


def table(rows):
    """The rows in Markdown."""
    head = ["case", "dtype", "A", "B", "seconds per step A", "B", "A / B", "bound / B"]
    head += ["memory A", "B", "A / B", "worst loss difference"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        gap, (ratio, low, high) = row["loss_difference"], spread(row)
        line = [row["case"], row["dtype"], *row["arms"]]
        line += [f"{seconds:.3f}" for seconds in row["s_per_step"]]
        line += [f"**{ratio:.2f}** [{low:.2f}, {high:.2f}]", f"{row['fraction_of_bound']:.2f}"]
        line += [f"{size:.0f} MB" for size in row["memory_mb"]]
        lines.append([*line, f"{row['memory_ratio']:.2f}", "-" if gap is None else f"{gap:.1e}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_bars(rows, path):
    """One bar per case and precision: the ratio of CPU times, with the smallest and the largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colors = {"fp32": "tab:blue", "bf16": "tab:orange"}
    names = list(dict.fromkeys((row["case"], row["arms"][0]) for row in rows))
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.6 * len(names)), layout="constrained")
    dtypes = sorted({row["dtype"] for row in rows}, reverse=True)
    shifts = {"fp32": -0.19, "bf16": 0.19} if len(dtypes) > 1 else {dtypes[0]: 0.0}
    for row in rows:
        ratio, low, high = spread(row)
        place = names.index((row["case"], row["arms"][0])) + shifts[row["dtype"]]
        whiskers = [[ratio - low], [high - ratio]]
        axis.barh(place, ratio, 0.36, xerr=whiskers, capsize=3, color=colors[row["dtype"]])
        axis.annotate(f"{ratio:.2f}", (high, place), (6, -4), textcoords="offset points")
    axis.axvline(1, color="black", linewidth=1, label="equal")
    for dtype in dtypes:
        axis.barh(0, 0, color=colors[dtype], label=dtype)
    axis.set_yticks(
        range(len(names)), [f"{CASE_NAMES.get(case, case)}\n{arm}" for case, arm in names]
    )
    axis.invert_yaxis()
    axis.set_title("CPU time of TRL 1.16 per token of a LoRA DPO step, divided by ours")
    limit = 1.12 * max(max(spread(row)) for row in rows)
    axis.set(xlabel="ratio (bar: median of the pairs of runs; whiskers: all)", xlim=(0, limit))
    axis.legend(loc="lower right")
    figure.savefig(path, dpi=100)


# --- main ----------------------------------------------------------------------------------------


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--arm", type=json.loads, help=argparse.SUPPRESS)  # this process is one side
    add("--trl_python", default="", help="python of an environment with trl")
    add("--sft", action="store_true", help="SFT instead of DPO")
    add("--trl_grouped", action="store_true", help="more rows: TRL's batches grouped by length")
    add("--trl_defaults", action="store_true", help="more rows: checkpointing, online reference")
    add("--layouts", action="store_true", help="ours, --layout separate against shared")
    add("--processes", type=int, nargs="+", default=[], help="ours, 1 against so many processes")
    add("--cases", nargs="+", choices=CASES | GPU_CASES, default=list(CASES))
    add("--model", help="folder of a real model, for a case of its own in place of --cases")
    add("--pairs", help="its data: JSON with instruction, input, chosen, rejected")
    add("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    add("--repeats", type=int, default=5, help="pairs of runs")
    add("--steps", type=int, default=6, help="of a run; the first one is dropped")
    add("--cache", default=f"{tempfile.gettempdir()}/dpo_vs_trl_cases", help="of the cases")
    add("--out", help="JSON of everything measured")
    add("--picture", help="PNG of the ratios")
    add("--ours", nargs=argparse.REMAINDER, default=[], help="all that follows: flags for ours")
    args = parser.parse_args()
    if args.sft and (args.trl_defaults or args.trl_grouped or args.layouts or args.processes):
        parser.error("--sft has two rows of its own: leave the other ones out")
    if (args.trl_defaults or args.trl_grouped or args.sft) and not args.trl_python:
        parser.error("TRL's rows need --trl_python")
    if bool(args.model) != bool(args.pairs):
        parser.error("--model and --pairs belong together")
    if not (args.arm or comparisons(args)):
        parser.error("use --trl_python, --layouts or --processes")
    return args


def measure_all(args):
    """Every row asked for; --out is written after each, so that a run cut short leaves some."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    report = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu and cpu[1], "cores": os.cpu_count()}
    report["amx"] = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    report |= {name: getattr(args, name) for name in ("repeats", "steps", "sft", "ours")}
    report["rows"] = []
    root = os.path.abspath(args.cache)
    if args.model:
        cases = [make_real_case(os.path.abspath(args.model), args.pairs, root)]
    else:
        cases = [make_case(name, root) for name in args.cases]
    for case, dtype in itertools.product(cases, args.dtypes):
        for arms in comparisons(args):
            report["rows"].append(compare(arms, case, dtype, args))
            if args.out:
                Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    return report


def main():
    args = read_flags()
    if args.arm:
        return work(args.arm)
    report = measure_all(args)
    print(table(report["rows"]))
    if args.picture:
        draw_bars(report["rows"], args.picture)
    gaps = [(row["loss_difference"] or 0) / TOLERANCE[row["dtype"]] for row in report["rows"]]
    if max(gaps) > 1:
        print("the losses differ: the times above are not comparable", file=sys.stderr)
    return int(max(gaps) > 1)


if __name__ == "__main__":
    sys.exit(main())
