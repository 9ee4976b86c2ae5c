"""Measure the host memory of loading a model, of a checkpoint and of saving the model.

    python tests/bench/host_memory.py                      # all cases, with this project
    python tests/bench/host_memory.py --src OTHER/src --cases fsdp
    python tests/bench/host_memory.py --python DEEPSPEED/bin/python --cases zero3

A script trains all weights for one step on two CPU processes. Meanwhile another process reads
/proc/PID/smaps_rollup of both every 10 ms. The sum of their Pss counts a page that both map once,
so it is the memory of the node; "private" is the sum of the pages that only one of them has. Both
are printed as multiples of the size of the model's safetensors, above what there was before the
phase. malloc returns freed memory at once. On a GPU the weights that stay after loading, and what
a step holds, are in the memory of the GPU.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = {  # name -> model, script, flags
    "ddp": ("dense", "train", ""),
    "fsdp": ("dense", "train", "--use_fsdp"),
    "fsdp one file": ("dense", "train", "--use_fsdp --fsdp_config one_file.json"),
    "fsdp moe": ("moe", "train", "--use_fsdp"),
    "zero3": ("dense", "train", "--use_deepspeed --deepspeed_config zero3.json"),
    "zero3 moe": ("moe", "train", "--use_deepspeed --deepspeed_config zero3.json"),
    "ddp reference": ("dense", "main_distributed", "--strategy ddp --reference_model {model}"),
    "fsdp reference": ("dense", "main_distributed", "--strategy fsdp --reference_model {model}"),
}
PHASES = ("reference", "loading", "checkpoint", "model")
FLAGS = """--learning_rate 1e-6 --max_rows 4 --max_steps 1 --max_length 32 --truncation keep_end
--save_every 1 --eval_every 1000 --backend gloo --report_to none --train_data data.jsonl
--val_data data.jsonl"""
OWN = {
    "train": "--config none.yaml --type full --mixed_precision bf16 --micro_batch_size 1 "
    "--output_dir run",
    "main_distributed": "--fine_tuning full --batch_size 2 --num_samples 0 --test_data data.jsonl "
    "--result_dir run",
}
TIDY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


# --- a rank ---------------------------------------------------------------------------------------


def watch(owner, name, phase):
    """Replace a function by one that also writes when it began and ended."""
    function = getattr(owner, name)

    def watched(*arguments, **named):
        start = time.time()
        result = function(*arguments, **named)
        line = json.dumps([phase, start, time.time()])
        with Path(f"phases-{os.getpid()}").open("a") as file:
            file.write(line + "\n")
        return result

    setattr(owner, name, watched)


def rank(src, name, flags):
    """Train as a script in src does, in the precision of a GPU."""
    sys.path.insert(0, src)
    script = importlib.import_module(name)
    import torch

    from ddp_utils import distributed, policy, run

    script.precision_of = lambda *_: policy.Precision(torch.float32, torch.bfloat16)
    for owner, function, phase in (
        (script, "load_reference", "reference"),
        (script, "load_policy", "loading"),
        (run.Run, "save", "checkpoint"),
        (script.models, "save_policy", "model"),
    ):
        if hasattr(owner, function):
            watch(owner, function, phase)
    distributed.run(lambda: script.main(flags))


# --- around them ----------------------------------------------------------------------------------


def read(pid):
    """Return Pss and private MiB of a process, or zeros."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except (OSError, ValueError):
        return 0.0, 0.0
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    return sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"]


def children(pid):
    """Return the processes that a launcher started."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found]


def measure(case, folder, python, src):
    """Return phase -> multiples of the files: Pss and private at the peak, and Pss at the end."""
    model, script, flags = CASES[case]
    path = folder / model
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2**20
    here = Path(tempfile.mkdtemp(dir=folder))
    (here / "one_file.json").write_text('{"fsdp_state_dict_type": "FULL_STATE_DICT"}')
    zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (here / "zero3.json").write_text(json.dumps(zero))
    (here / "none.yaml").write_text("training: {}")
    pairs = [{"prompt": f"Name {i}.", "chosen": "Yes.", "rejected": "No."} for i in range(4)]
    (here / "data.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    words = f"{FLAGS} {OWN[script]} {flags.format(model=path)} --model_name {path}"
    command = [*start, "--rank", str(src), script, *words.split()]
    environment = os.environ | TIDY | QUIET
    with (here / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=here, env=environment, stdout=log, stderr=log)
        samples = []
        while process.poll() is None:
            sizes = [read(child) for child in children(process.pid)]
            samples.append((time.time(), *(sum(size[i] for size in sizes) for i in (0, 1))))
            time.sleep(0.01)
    if process.returncode:
        sys.exit(f"{case}: {(here / 'log').read_text()[:3000]}")
    spans = [json.loads(line) for file in here.glob("phases-*") for line in file.open()]
    result = {}
    for phase in PHASES:
        own = [(start, end) for name, start, end in spans if name == phase]
        if own:
            start, end = min(s for s, _ in own), max(e for _, e in own)
            before = [sample for sample in samples if sample[0] <= start][-1]
            during = [sample for sample in samples if start <= sample[0] <= end] or [before]
            peaks = [(max(s[i] for s in during) - before[i]) / size for i in (1, 2)]
            result[phase] = (*peaks, (during[-1][1] - before[1]) / size)
    return result


def make_models(folder, dense):
    """Write a mixture of experts of 230 MB, and link the dense model."""
    import shutil

    import torch
    import transformers

    (folder / "dense").symlink_to(dense)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **{"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "num_experts": 64, "num_experts_per_tok": 4, "vocab_size": 49152},
        **{"tie_word_embeddings": True, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2},
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "moe")
    for file in dense.glob("*"):
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, folder / "moe")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES])
    parser.add_argument("--src", type=Path, default=ROOT / "src")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model", type=Path, default=ROOT / "data/smollm2", help="a dense model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name), args.model.resolve())
        print("| case | phase | node, peak | private, peak | node, afterwards |")
        print(5 * "|---" + "|")
        for case in args.cases:
            for phase, values in measure(case, Path(name), args.python, args.src.resolve()).items():
                print(f"| {case} | {phase} | " + " | ".join(f"{v:.2f}" for v in values) + " |")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:4], sys.argv[4:])
    else:
        main()
