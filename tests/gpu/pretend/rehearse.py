"""The scripts' runs on pretended GPUs, and what must be true of them.

    python tests/gpu/pretend/rehearse.py                          # all, on one and two ranks
    python tests/gpu/pretend/rehearse.py --only "dpo lora" --ranks 2 --precisions bf16
    python tests/gpu/pretend/rehearse.py --out docs/gpu_rehearsed.json  # those that it lacks

A run is `main()` of a script in each rank, four steps on the demo's data. In fp32 it is done again
on the CPU and compared. bf16 is what an H100 gets by default, fp16 what a T4 gets, which has
neither bf16 nor flash attention. The exit status is 1 if something is wrong with a run.
"""

import argparse
import importlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    # instead of this folder, whose cuda.py torch would import
    sys.path[:1] = [str(ROOT / part) for part in ("src", "tests", "tests/invariants", "tests/gpu")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import pretend  # noqa: E402
import runs  # noqa: E402
from ranks import run_ranks  # noqa: E402

DEMO = ROOT / "data/demo"
CARDS = {"fp32": "H100", "bf16": "H100", "fp16": "T4"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # torchrun's variables
MARKS = ("loss", "kl", "grad_norm", "rewards/margins", "nll", "return_last10")  # are compared


class Case(NamedTuple):
    """A run, and where it may differ from one read, no blocking copy, a shared prompt."""

    module: str
    flags: str
    folder: str = "--output_dir"
    fp32: str = "--mixed_precision=no"  # None: it has no other precision
    reads: int = 1  # in a step, before and behind its micro-batches
    copies: int = 0  # there, that the host waits for
    inside: int = 0  # reads, and copies, that the host waits for in its micro-batches
    on_cpu: bool = True  # a CPU can run it, too, for a comparison of the numbers
    shares: bool = True  # packs the pairs
    sharded: str = ""  # by fsdp or zero, which communicate in each micro-batch
    fused: bool = True  # uses the fused AdamW
    own_gpu: bool = False  # srun has started the ranks, and shows each of them one GPU


COMMON = "--max_steps=4 --warmup_ratio=0 --log_every=1000 --save_every=3 --report_to=none "
DPO = COMMON + "--lr_scaling=none --num_samples=0 --max_length=64 --beta=0.5 --max_rows=45 "
DPO += f"--test_data={runs.PAIRS} --val_data={runs.PAIRS} --eval_every=3 --sft_weight=0 "
DPO += "--batch_size=4 --gradient_accumulation_steps=2 "
FULL, LORA = DPO + "--learning_rate=3e-4 ", DPO + "--fine_tuning=lora --learning_rate=1e-3 "
REPLIES = "--num_samples=3 --max_new_tokens=6 --top_p=0.9 "
SFT = COMMON + "--max_length=64 --max_rows=43 --eval_every=3 --val_share=0.1 "
SFT += "--micro_batch_size=2 --gradient_accumulation_steps=2 "
BAKING = COMMON + "--num_samples=0 --lora_r=8 --learning_rate=3e-3 --eval_every=3 --batch_size=4 "
BAKING += "--data_path={data}/train.jsonl --val_path={data}/val.jsonl "
BAKING += "--gradient_accumulation_steps=2 "
PROTEIN = COMMON + "--train_data=data/input/test_data_real.json --max_rows=42 "
PROTEIN += "--val_data=data/input/test_data_val.json --learning_rate=1e-3 --batch_size=4 "
PROTEIN += "--base_model_name=data/demo/protein_model.pt --gradient_accumulation_steps=2 "
PROTEIN = PROTEIN.replace("--report_to=none ", "")
AD = """traj_file={data}/histories.npz grid_size=5 horizon=6 n_stream=4 total_source_timesteps=288
train_n_stream=4 train_source_timesteps=72 n_transit=24 tf_n_embd=16 tf_n_layer=2 train_timesteps=4
num_warmup_steps=3 summary_interval=1 eval_interval=3 gen_interval=3 eval_episodes=4 eval_copies=2
ckpt_interval=3 train_batch_size=8 gradient_accumulation_steps=2 """


def main_distributed(flags, **more):
    return Case("main_distributed", flags, "--result_dir", "--no_use_mixed_precision", **more)


def train(flags, **more):
    return Case("train", flags, **more)


def train_loop(flags, **more):
    return Case("train_loop", flags, "--out_dir", "--no_use_mixed_precision", **more)


# transformers asks the positions of each batch whether it is packed
SEPARATE: dict[str, Any] = {"shares": False, "inside": 2}
CASES = {
    "dpo full": main_distributed(FULL + REPLIES + "--save_best "),
    "dpo full, deterministic": main_distributed(FULL + REPLIES + "--deterministic "),
    "dpo full, reference": main_distributed(FULL + "--reference_model=data/demo/model "),
    "dpo simpo": main_distributed(FULL + "--method=simpo "),
    "dpo full, separate": main_distributed(FULL + "--layout=separate ", **SEPARATE),
    "dpo lora": main_distributed(LORA + REPLIES),
    "dpo lora, separate": main_distributed(LORA + "--layout=separate ", **SEPARATE),
    "dpo lora, checkpointing": main_distributed(LORA + "--use_gradient_checkpointing "),
    "dpo lora, not lean": main_distributed(LORA + "--no_lean "),
    "dpo lora, dropout": main_distributed(LORA + "--lora_dropout=0.1 "),
    "sft lora": train(SFT),
    "sft full": train(SFT + "--type=full "),
    # on GPUs only; DDP's hook copies what the collective, here one of the CPU, returns
    "train, bf16 gradients": train(
        SFT + "--type=full --grad_reduce_dtype=bf16 ", inside=1, on_cpu=False
    ),
    "baking": train_loop(BAKING + REPLIES),
    # each step samples replies, and transformers asks after each token which have ended
    "baking, on policy": train_loop(
        BAKING + "--on_policy --max_new_tokens=6 ", reads=80, copies=10
    ),
    "baking, jsd": train_loop(BAKING + "--divergence=jsd "),
    "protein": Case("dpo_inv.run_dpo_ddp", PROTEIN, fp32=""),
    "distillation": Case("ad.train", AD, "output_dir", "mixed_precision=no"),
    "distillation, dropout": Case(
        "ad.train", AD + "tf_dropout=0.1 tf_attn_dropout=0.1", "output_dir", "mixed_precision=no"
    ),
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
GPT_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4}
WINDOW = {"sliding_window": 16}
MODELS: dict[str, tuple[Any, ...]] = {  # kind of fine-tuning, configuration
    "qwen3": ("lora", transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "qwen3, tied": ("full", transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "llama": ("full", transformers.LlamaConfig, {}),
    "mistral, window": ("lora", transformers.MistralConfig, WINDOW),
    "gemma 2": ("lora", transformers.Gemma2Config, WINDOW),
    "gemma 3": ("full", transformers.Gemma3TextConfig, WINDOW),
    "gpt-2": ("full", transformers.GPT2Config, None),
    "gpt-2, lora": ("lora", transformers.GPT2Config, None),
}
# Gemma 2 has a soft-cap in its attention, and a mask of each of two kinds of layers; transformers
# asks GPT-2's positions, too
OWN_WAYS: dict[str, dict] = {"gemma 2": SEPARATE | {"inside": 4}}
OWN_WAYS |= {"gpt-2": {"inside": 2}, "gpt-2, lora": {"inside": 2}}
for _name, (_kind, *_) in MODELS.items():
    _flags = (FULL if _kind == "full" else LORA) + f'"--model_name={{data}}/{_name}" '
    _flags += "--num_samples=2 --max_new_tokens=4 "
    CASES[f"dpo {_name}"] = main_distributed(_flags, **OWN_WAYS.get(_name, {}))
FSDP = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
for _name in FSDP:
    _flags = SFT + f"--type=full --use_fsdp --fsdp_config={{data}}/{_name}.json "
    CASES[f"fsdp {_name}"] = train(_flags, sharded="fsdp")
_flags = SFT + "--type=full --use_fsdp --fsdp_config={data}/offload.json "
# the shards and AdamW are on the host: FSDP copies each layer, and the norm, and waits for them
_own = {"inside": 100, "copies": 1, "reads": 2}
CASES |= {"fsdp, offload": train(_flags, sharded="fsdp", fused=False, **_own)}
_flags = SFT + "--type=full --use_fsdp --fsdp_config={data}/one_file.json "
CASES |= {"fsdp, one file": train(_flags, sharded="fsdp")}
CASES |= {"fsdp lora": train(SFT + "--use_fsdp ", sharded="fsdp")}
_flags = FULL + "--strategy=fsdp --num_samples=2 --max_new_tokens=4 "
CASES |= {"fsdp dpo": main_distributed(_flags, sharded="fsdp")}
for _stage in (1, 2, 3):
    _flags = SFT + f"--type=full --deepspeed={{data}}/zero{_stage}.json "
    # DeepSpeed itself reads norms and copies rates; in stage 3 it waits for each parameter
    _own = {"reads": 60 if _stage == 3 else 5, "copies": 4, "inside": 20 if _stage == 3 else 0}
    CASES[f"zero {_stage}"] = train(_flags, sharded="zero", fused=False, **_own)
for _name in ("sft full", "zero 2"):
    CASES[f"{_name}, own GPU"] = CASES[_name]._replace(own_gpu=True)
RESUMED = ["dpo full", "dpo lora", "baking", "protein", "distillation", "fsdp FULL_SHARD", "zero 2"]
RESUMED += ["fsdp, offload", "fsdp, one file"]


# --- data -----------------------------------------------------------------------------------------


def make_data(folder):
    """Write what the cases read: small models, replies to bake, FSDP's and DeepSpeed's files."""
    from test_every_script import replies

    folder.mkdir(parents=True, exist_ok=True)
    lines = (DEMO / "preferences_train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:50]]
    replies(folder / "train.jsonl", rows[:43])
    replies(folder / "val.jsonl", rows[43:])
    for name in FSDP:
        (folder / f"{name}.json").write_text(json.dumps({"fsdp_sharding_strategy": name}))
    (folder / "offload.json").write_text(json.dumps({"fsdp_offload_params": True}))
    one_file = {"fsdp_state_dict_type": "FULL_STATE_DICT"}
    (folder / "one_file.json").write_text(json.dumps(one_file))
    for stage in (1, 2, 3):
        content = {"zero_optimization": {"stage": stage}}
        (folder / f"zero{stage}.json").write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    tokens |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    for name, (_, config, options) in MODELS.items():
        torch.manual_seed(0)
        sizes = (
            SIZES | options if options is not None else {"n_embd": 64, "n_layer": 2, "n_head": 4}
        )
        model = AutoModelForCausalLM.from_config(config(**tokens, **sizes))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


# --- one rank of a run ----------------------------------------------------------------------------


def life(name, flags, report, card, die):
    """Call main() of a case's script in this rank, on pretended GPUs if there is a card.

    report: file for what was seen; die: end without a trace before this step.
    """
    os.chdir(ROOT)
    module, count = CASES[name].module, int(os.environ["WORLD_SIZE"])
    if CASES[name].own_gpu:
        count = started_by_srun()
    if card:
        pretend.install(count, card, memory=True)
    runs.hurry(self_test=True)
    from ad import evaluate
    from ddp_utils.run import Run

    evaluate.write = lambda *_: None  # a picture
    script = importlib.import_module(module)
    steps = Steps(script, die)
    said = []
    say = Run.say

    def spy(run, line):
        said.append(line)
        say(run, line)

    Run.say = spy
    start, error = time.process_time(), None
    try:
        assert script.main(flags) == 0
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}"[:600]
        raise
    finally:
        record = pretend.record
        facts = {"error": error, "cpu seconds": time.process_time() - start, "said": said}
        facts |= {"faults": record.faults, "steps": steps.seen, "lines": plain(record.lines)}
        facts |= {"evaluations": steps.evaluations, "saves": steps.saves}
        facts |= {"kernels": {str(name): n for name, n in record.kernels.items()}}
        facts |= {"attention": dict(record.attention), "flops": dict(record.flops)}
        facts["collectives"] = plain(record.collectives)
        facts |= {"trial peak": steps.trial_peak, "dtypes": steps.dtypes}
        facts["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", "")
        Path(report).write_text(json.dumps(facts))


def started_by_srun():
    """Set the variables of srun, which shows each rank its own GPU; return how many it sees."""
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"]
    for theirs, name in zip(GROUP, names, strict=True):
        os.environ[name] = os.environ.pop(theirs)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["SLURM_LOCALID"]
    return 1


def plain(counter):
    return [[*key, count] for key, count in counter.items()]


class Steps:
    """What was noticed in each step: in its micro-batches, and behind them."""

    def __init__(self, script, die):
        from ddp_utils.metrics import Averages
        from ddp_utils.policy import Policy
        from ddp_utils.run import Run
        from lm import models

        self.seen = []
        self.is_trial = False  # of the largest steps, before the first one
        self.trial_peak = 0
        try_steps = Run.try_largest_steps

        def trial(*arguments):
            self.is_trial = True
            self.mark(reset=True)
            try_steps(*arguments)
            self.is_trial, self.trial_peak = False, self.mark()[3]

        Run.try_largest_steps = trial
        self.marks = None  # of this step: its begin, and the end of each micro-batch
        train_step, add = script.train_step, Averages.add
        self.dtypes = {}  # of weights that are trained, and of those that are frozen
        calls = 0

        def watched(policy, *arguments, **named):
            nonlocal calls
            arguments = policy, *arguments
            if self.is_trial:
                return train_step(*arguments, **named)
            calls += 1
            if calls == die:
                os._exit(9)
            self.end()
            for weight in policy.scorer.parameters():
                if weight.dim() > 1:
                    kind = "trained" if weight.requires_grad else "frozen"
                    self.dtypes[kind] = str(weight.dtype)[6:]
            self.marks, self.is_open = [self.mark(reset=True)], True
            result = train_step(*arguments, **named)
            self.is_open = False
            return result

        def counted(*arguments):  # what each script calls last for a micro-batch
            add(*arguments)
            if self.marks and self.is_open:
                self.marks.append(self.mark())

        script.train_step, Averages.add = watched, counted
        # of each checkpoint, and of the saved model: bytes that it keeps and needs on the device,
        # and those of the largest tensor in fp32
        self.saves = []
        Policy.state = self.weighed(Policy.state)
        models.save_policy = self.weighed(models.save_policy)
        self.evaluations = []  # what each one has waited for
        evaluate = getattr(script, "evaluate", None)

        def observed(*arguments, **named):
            before = self.mark()[0]
            values = evaluate(*arguments, **named)
            self.evaluations.append(plain(self.mark()[0] - before))
            return values

        if callable(evaluate):  # in ad.train it is a module
            script.evaluate = observed

    def weighed(self, function):
        """Return the function, which also notes what it allocates on the device."""

        def call(policy, *arguments):
            memory = pretend.record.memory
            if memory is None:
                return function(policy, *arguments)
            before = memory.peak = memory.now
            result = function(policy, *arguments)
            largest = max(4 * tensor.numel() for tensor in policy.trainable().values())
            self.saves.append([memory.now - before, memory.peak - before, largest])
            return result

        return call

    def mark(self, reset=False):
        """Return what was noticed so far, collectives, and memory now and at most since a reset."""
        record = pretend.record
        memory = record.memory or types.SimpleNamespace(now=0, peak=0)
        if reset:
            memory.peak = memory.now
        return record.lines.copy(), sum(record.collectives.values()), memory.now, memory.peak

    def end(self):
        """Add the step that is over to those seen."""
        if not self.marks:
            return
        first, *_, before, last = self.marks
        seen = {"inside": plain(last[0] - first[0]), "memory": first[2]}
        lines, _, _, seen["peak"] = self.mark()
        seen["outside"] = plain(lines - last[0])
        seen["early collectives"] = before[1] - first[1]  # before the last micro-batch
        self.seen.append(seen)


# --- a run ----------------------------------------------------------------------------------------


class Result(NamedTuple):
    name: str
    ranks: int
    precision: str
    codes: list  # exit status of each rank
    reports: list  # of each rank, what life() wrote
    gap: float | None  # largest difference from the CPU, or from the run without an interruption
    log: str


def words(name, precision, folder, data):
    """Return the flags of a run whose output is `folder`."""
    import shlex

    case = CASES[name]
    flags = shlex.split(case.flags.format(data=data))
    flags += shlex.split(case.fp32) if precision == "fp32" else []
    return [*flags, f"{case.folder}={folder}"]


def start(name, ranks, flags, folder, card="H100", die=0):
    """Run a case -> exit statuses, reports, the log of a rank that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    done = run_ranks(ranks, _life, name, flags, str(folder), card, die)
    reports = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    failed = [log for log, code in zip(done.logs, done.codes, strict=True) if code]
    return done.codes, reports, failed[0] if failed else ""


def _life(name, flags, folder, card, die):
    life(name, flags, f"{folder}/{os.environ['RANK']}.json", card, die)


def rehearse(name, ranks, precision, data, folder):
    """Run a case on pretended GPUs, in fp32 on the CPU as well -> Result."""
    folder = Path(folder)
    flags = words(name, precision, folder / "run", data)
    codes, reports, log = start(name, ranks, flags, folder / "gpu", CARDS[precision])
    gap = None
    if precision == "fp32" and CASES[name].on_cpu and not any(codes):
        flags = words(name, precision, folder / "cpu_run", data)
        backend = "backend=gloo" if CASES[name].module == "ad.train" else "--backend=gloo"
        start(name, ranks, [*flags, backend], folder / "cpu", card=None)
        gap = difference(folder / "run", folder / "cpu_run")
    return Result(name, ranks, precision, codes, reports, gap, log)


def resume(name, ranks, precision, data, folder):
    """Kill a run in its last step and start it again -> Result; gap: to one that was not killed."""
    folder = Path(folder)
    card = CARDS[precision]
    whole = words(name, precision, folder / "whole", data)
    start(name, ranks, whole, folder / "gpu", card)
    again = words(name, precision, folder / "run", data)
    killed, *_ = start(name, ranks, again, folder / "gpu", card, die=4)
    codes, reports, log = start(name, ranks, again, folder / "gpu", card)
    gap = difference(folder / "run", folder / "whole") if killed == [9] * ranks else math.inf
    return Result(title(resume, name), ranks, precision, codes, reports, gap, log)


def title(do, name):
    """Return what a run of a case is called in the table."""
    return f"{name}, resumed" if do is resume else name


def difference(one, other):
    """Return the largest relative difference between two runs' metrics; infinite if one failed."""
    if not all((folder / "metrics.jsonl").exists() for folder in (one, other)):
        return math.inf
    lines = [runs.lines(folder) for folder in (one, other)]
    if len(lines[0]) != len(lines[1]) or not lines[0]:
        return math.inf
    worst = 0.0
    for a, b in zip(*lines, strict=True):
        for key in MARKS:
            x, y = a.get(key), b.get(key)
            if (x is None) != (y is None):
                return math.inf
            if x is not None:
                worst = max(worst, abs(x - y) / max(1.0, abs(y)))
    return worst


# --- what must be true of a run -------------------------------------------------------------------

BOUND = 2e-5  # of a difference in fp32; measured: 3e-6
FALLBACKS = ("separate rows", "full logits")  # in what is printed


def waits(lines, *kinds):
    """How often the host waits in these lines."""
    return sum(count for kind, *_, count in lines if kind in kinds)


def second_step(result):
    """What was seen in the second step on rank 0, or None."""
    steps = result.reports[0].get("steps", [])
    return steps[1] if len(steps) > 1 else None


def problems(result):
    """Return what is wrong with a run, one line each."""
    case = CASES[result.name.removesuffix(", resumed")]
    report = result.reports[0]
    found = []
    if any(result.codes):
        found.append(f"exit status {result.codes}: {report.get('error') or result.log[-300:]}")
    for one in result.reports:
        found += [f"{where}: {text}" for where, text in one.get("faults", [])]
        lines = one.get("lines", [])
        found += [f"{line}: {what}" for kind, line, what, _ in lines if kind == "warning"]
        races = {line for kind, line, *_ in lines if kind == "race"} - {"elsewhere"}
        found += [f"{line}: read without waiting" for line in sorted(races)]
    found += memory_problems(case, report) + step_problems(case, result)
    own = case.reads if case.sharded == "zero" else 0  # DeepSpeed waits as in a step
    for lines in report.get("evaluations", []) if result.ranks == 1 else []:
        if waits(lines, "read", "copy") > 1 + own + 2 * case.inside:
            found.append(f"an evaluation waits more than once: {lines}")
    bound = 0.0 if result.name.endswith(", resumed") else BOUND
    if result.gap is not None and not result.gap <= bound:
        found.append(f"other numbers: {result.gap:.1e}")
    if report and case.module in ("main_distributed", "train", "train_loop"):
        found += precision_problems(case, result, report)
    return found


def step_problems(case, result):
    """Return what is wrong with the second step: waits, communication, memory that is kept."""
    step = second_step(result)
    if step is None:
        return []
    found = []
    limits = [("inside", "read", case.inside), ("inside", "copy", case.inside)]
    limits += [("outside", "read", case.reads), ("outside", "copy", case.copies)]
    for part, kind, limit in limits:
        if waits(step[part], kind) > limit:
            lines = [line for line in step[part] if line[0] == kind]
            found.append(f"{part} of the micro-batches, more than {limit}: {lines}")
    if step["early collectives"] and not case.sharded:
        found.append(f"{step['early collectives']} collectives before the last micro-batch")
    memory = [step["memory"] for step in result.reports[0]["steps"]]
    # AdamW's moments are new in the first step, or in fp16 in the first one that is not skipped;
    # DeepSpeed keeps buffers of its own
    is_settled = case.sharded != "zero" and result.precision != "fp16" and len(memory) > 2
    if is_settled and memory[2] > memory[1]:
        found.append(f"memory grows from step to step: {memory}")
    return found


def memory_problems(case, report):
    """Return what is wrong with the memory of saving and of the trial of the largest steps."""
    found = []
    for kept, needed, largest in report.get("saves", []):
        if kept > 0 or case.sharded == "fsdp" and needed > 2 * largest:
            found.append(f"saving keeps {kept} and needs {needed} bytes, a tensor {largest}")
    peak = max((step["peak"] for step in report.get("steps", [])), default=0)
    tried = report.get("trial peak", 0)
    # Threads of the pretended NCCL free FSDP's buffers sooner or later: in six runs, the peak of
    # the steps was 0.97 to 1.04 times that of the trial. Without AdamW's moments it is 1.46 times.
    margin = 1.15 if case.sharded == "fsdp" else 1.02
    if 0 < margin * tried < peak and case.sharded != "zero":
        found.append(f"a step needs {peak} bytes, the trial of the largest ones {tried}")
    if report and "expandable_segments:True" not in report["allocator"]:
        found.append("the allocator's segments are not expandable")
    return found


def precision_problems(case, result, report):
    """Return what is wrong with the kernels that a language model has used."""
    found = []
    said = [line for line in report["said"] if any(words in line for words in FALLBACKS)]
    if case.shares and said:
        found.append(f"falls back: {said[0][:200]}")
    half = result.precision != "fp32"
    names = report["attention"]
    has_flash = CARDS[result.precision] == "H100"
    is_fused = any(name.startswith("varlen") for name in names)
    if half and has_flash and case.shares and not is_fused:
        found.append(f"half precision does not use varlen_attn: {sorted(names)}")
    flops = report["flops"]
    part = flops.get(DTYPES[result.precision], 0) / max(1, sum(flops.values()))
    if part < 0.9:
        found.append(f"{part:.0%} of the products are in {result.precision}")
    if case.sharded != "zero":  # DeepSpeed has fp32 copies of its own
        wanted = {"trained": "float32", "frozen": DTYPES[result.precision]}
        found += [
            f"{kind} weights in {x}" for kind, x in report["dtypes"].items() if x != wanted[kind]
        ]
    if case.fused and not any("_fused_adamw" in name for name in report["kernels"]):
        found.append("AdamW is not the fused one")
    return found


# --- the table ------------------------------------------------------------------------------------


def row(result):
    """Return a run as a row of the table."""
    step = second_step(result)
    return {
        "run": result.name,
        "ranks": result.ranks,
        "precision": result.precision,
        "exit status": max(result.codes),
        "gap": result.gap if result.gap is None else float(f"{result.gap:.1e}"),
        "reads per step": step and waits(step["outside"], "read"),
        "in micro-batches": step and waits(step["inside"], "read", "copy"),
        "problems": problems(result),
    }


def read(file):
    """Return the rows of a file that need not be done again, {(name, ranks, precision): row}."""
    content = json.loads(Path(file).read_text()) if file and Path(file).exists() else {"rows": []}
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
    return {tuple(row.values())[:3]: row for row in rows if not row["problems"]}


def write(file, rows):
    """Write the rows in the order of the plan, a line for each; never half a file."""
    plan = [(title(do, name), *which) for do, name, *which in planned(CASES, (1, 2), CARDS)]
    columns = list(next(iter(rows.values())))
    lines = [json.dumps([*rows[run].values()]) for run in plan if run in rows]
    text = f'{{"planned": {len(plan)}, "columns": {json.dumps(columns)}, "rows": [\n'
    temporary = Path(f"{file}.tmp")
    temporary.write_text(text + ",\n".join(lines) + "\n]}\n")
    temporary.rename(file)


def planned(names, ranks, precisions):
    """Return (function, name, ranks, precision) of each run."""
    for name in names:
        for size in ranks:
            for precision in precisions:
                if precision == "fp32" or CASES[name].fp32:
                    yield rehearse, name, size, precision
            default = "bf16" if CASES[name].fp32 else "fp32"
            if name in RESUMED and default in precisions:
                yield resume, name, size, default


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", nargs="*", default=[], help="names of runs; a star at the end stands for any")
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--precisions", nargs="+", default=[*CARDS], choices=[*CARDS])
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--out", help="JSON file for the rows; those that it has without problems are not done")
    args = parser.parse_args()
    if pretend.why_not():
        print(f"error: this machine cannot pretend: {pretend.why_not()}", file=sys.stderr)
        return 2
    pretend.build()

    def is_meant(name):
        return not args.only or any(
            name == word or word.endswith("*") and name.startswith(word[:-1]) for word in args.only
        )

    rows, begin = read(args.out), time.monotonic()
    print("| run | ranks | precision | exit | gap | reads per step | in micro-batches |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="rehearse_") as folder:
        data = make_data(Path(folder, "data"))

        def attempt(number, run):
            do, *which = run
            place = Path(folder, str(number))
            done = row(do(*which, data, place))
            shutil.rmtree(place)
            *cells, found = done.values()
            print("|", *("|" if cell is None else f"{cell} |" for cell in cells), flush=True)
            for line in found:
                print(f"   WRONG: {line[:400]}", flush=True)
            rows[tuple(done.values())[:3]] = done
            if args.out:
                write(args.out, rows)

        plan = [
            (do, name, *which)
            for do, name, *which in planned(filter(is_meant, CASES), args.ranks, args.precisions)
            if (title(do, name), *which) not in rows
        ]
        with ThreadPoolExecutor(args.jobs) as pool:
            [*pool.map(attempt, range(len(plan)), plan)]
    wrong = sum(bool(one["problems"]) for one in rows.values())
    print(f"{len(rows)} runs, {wrong} with problems, {time.monotonic() - begin:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    from pretend import rehearse as module  # the ranks import it by this name

    sys.exit(module.main())
