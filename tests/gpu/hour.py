"""Prove on one GPU what was written without one, the most valuable first; results as it goes.

    python tests/gpu/hour.py                     # 40 minutes; what is in docs/gpu.json stays
    python tests/gpu/hour.py --minutes 9         # a second start does what is missing
    python tests/gpu/hour.py --only attention    # again, though it is there
    python tests/gpu/hour.py --dry               # the same list on a CPU, tiny: is it sound?

Each piece is a function of pieces.py in a process of its own, and costs only itself if it hangs or
dies. gpu.json and gpu.md in --out are written after each. Nothing comes from a network: models are
made from their configurations, their weights drawn by a seed. What the environment lacks may lie
as wheels in a folder: pip download --no-deps -d wheels trl==1.16.0 datasets dill multiprocess, then
--wheels wheels.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PREDICTED = DOCS / "gpu_predicted.json"  # written by roofline.py
REHEARSALS = DOCS / "gpu_rehearsed.json"  # written by pretend/rehearse.py


class Piece(NamedTuple):
    name: str
    seconds: int  # after which it is ended; it is not begun if fewer are left
    title: str


PIECES = [
    Piece("demo", 150, "The demo's losses, against those of the CPU"),
    Piece("attention", 120, "Attention over a shared prompt, against each response alone"),
    Piece("resume", 180, "Killed with SIGKILL and continued, `--deterministic`"),
    Piece("fp16", 120, "fp16 with a loss scale"),
    Piece("memory", 240, "Peak memory of a step, `check_gpu.py --plan` and measured"),
    Piece("speed:long:ours", 300, "LoRA DPO, Qwen3-8B's shape: prompts 512, responses 256"),
    Piece("speed:long:trl", 180, "The same with TRL in its best setting"),
    Piece("speed:long:trl defaults", 180, "The same with TRL's defaults"),
    Piece("speed:hh:ours", 300, "LoRA DPO, Qwen3-8B's shape: lengths as in HH-RLHF"),
    Piece("speed:hh:trl", 180, "The same with TRL in its best setting"),
    Piece("speed:hh:trl defaults", 180, "The same with TRL's defaults"),
    Piece("kernels", 270, "Where ten of the steps with long prompts go"),
    Piece("generation", 150, "Generation of 16 replies"),
    Piece("sharding", 180, "FSDP, ZeRO-3 and QLoRA on one GPU"),
    Piece("protein", 90, "DPO of ProteinMPNN"),
    Piece("distillation", 150, "Algorithm Distillation, `ad_dr.yaml`"),
    Piece("baking", 120, "Prompt baking of the demo"),
]

# --- the page ------------------------------------------------------------------------------------

INTRO = """# On a GPU

{}.

`python tests/gpu/hour.py` writes this page and `gpu.json` beside it. The complete list takes 40
minutes; with `--minutes 9` no piece is started that may take longer, and running the command again
measures the missing pieces. It needs no network. `--dry` tries the list on a CPU, in a separate
folder.

| piece | what | state | seconds |
|---|---|---|---|
"""

REHEARSED = """
## Rehearsed on a CPU

`python tests/gpu/pretend/rehearse.py --out docs/gpu_rehearsed.json` runs all scripts on pretended
GPUs: a CPU build of PyTorch accepts CUDA devices, each operator is checked as a GPU would check it,
and the CPU computes it. The checks are about devices, dtypes, autocast, reads and copies that make
the host wait, fused AdamW, and what NCCL does not support. Called again, it does the runs that the
file lacks, so that rows may come from different commits.

Of the {planned} runs {done} have been done; {good} ended with status 0 and had no problem.
In fp32, losses and gradient norms differed from those on a CPU by at most {gap:.1e}. A step reads
from the GPU once and waits for no copy, and a micro-batch does neither. The exceptions are in
libraries: separate rows, GPT-2 and Gemma 2 (up to two reads per forward, in transformers), sampling
on policy, FSDP with offloading, gradients that are reduced in bf16, and ZeRO. A run that was killed
and resumed had the same metrics as one that was not, bit for bit.

The pieces above end on a pretended GPU too, with small models and few steps
(`python -m pytest -n 0 -m "" tests/gpu/test_hour.py`). QLoRA and vLLM, which need packages for a
GPU, were left out.

The rehearsal shows that the scripts end and compute the same numbers as on a CPU. It cannot show
whether the kernels of a GPU agree with each other, how they round, whether streams race, or whether
NCCL works, and it says nothing about speed. `python tests/mutants.py "cuda_*"` plants 32 faults in
copies of the project, each of which a rehearsed run must notice.

| run | on one GPU | on two GPUs | largest difference | reads per step | waits in micro-batches |
|---|---|---|---|---|---|
"""
LENGTHS = {"long": "512, 256", "hh": "as in HH-RLHF", "short": "64, 512"}  # of roofline.py
FORECAST = """
## Predicted, not measured

`PYTHONPATH=src:tests/bench python tests/gpu/roofline.py --docs` predicts a step of DPO in bf16 with
4 pairs at the shape of Qwen3-8B, of a LoRA with r 16 or of all weights. It runs the step of
`src/main_distributed.py`, and that of TRL, on tensors without contents, and counts their operators.
Rows with lengths as in HH-RLHF are means of two batches. What was measured on the GPU above is next
to each prediction. Full fine-tuning of this model does not fit on one GPU of 80 GB.

{}

| prompt, response tokens | side | kernels | TFLOP | GB moved | host ms | H100 ms | A100 ms | \
measured ms | peak GiB | measured GiB |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(results):
    """docs/gpu.md: the state of each piece, then its tables."""
    machines = {describe(entry["machine"]) for entry in results.values()}
    text = INTRO.format("; ".join(sorted(machines)) or "**Not measured yet**, no GPU was at hand")
    waits = {"status": "not measured yet", "reason": "", "seconds": "", "rows": []}
    for piece in PIECES:
        entry = results.get(piece.name, waits)
        cells = piece.name, piece.title, state(entry), entry["seconds"]
        text += f"| {' | '.join(map(cell, cells))} |\n"
    for piece in PIECES:
        rows = results.get(piece.name, waits)["rows"]
        text += f"\n## {piece.name}\n" if rows else ""
        for names, group in itertools.groupby(rows, key=tuple):  # the same columns: one table
            names = [name for name in names if name != "losses"]
            text += f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
            for row in group:
                text += f"| {' | '.join(cell(row[name]) for name in names)} |\n"
    return text + predictions(results) + rehearsals()


def rehearsals():
    """The table of rehearse.py: a line for each run, with the precisions that it was done in."""
    content = json.loads(REHEARSALS.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
    runs = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    gap = max(row["gap"] for row in rows if row["gap"] is not None)
    good = sum(row["exit status"] == 0 and not row["problems"] for row in rows)
    text = REHEARSED.format(planned=content["planned"], done=len(rows), good=good, gap=gap)
    for name, group in runs.items():
        done = [[row["precision"] for row in group if row["ranks"] == ranks] for ranks in (1, 2)]
        cells = [name, *map(", ".join, done)]
        for key in ("gap", "reads per step", "in micro-batches"):
            known = [row[key] for row in group if row[key] is not None]
            cells.append(max(known) if known else "")
        text += f"| {' | '.join(map(cell, cells))} |\n"
    return text


def predictions(results):
    """The table of roofline.py, with what was measured next to each prediction."""
    content = json.loads(PREDICTED.read_text())
    text = FORECAST.format(content["model"])
    for row in content["rows"]:
        entry = results.get(f"speed:{row['case']}:{row['side']}", {})
        measured = entry["rows"][0] if entry.get("rows") else {}
        step = 1000 * measured["s a step"] if measured else "not measured yet"
        cells = [LENGTHS[row["case"]], row["what"], round(row["launches"])]
        cells += [row[name] for name in ("TFLOP", "GB moved", "host ms")]
        cells += [round(row["H100 ms"]), round(row["A100 ms"]), step]
        cells += [row["peak GiB"], measured.get("peak GiB", "not measured yet")]
        text += f"| {' | '.join(map(cell, cells))} |\n"
    return text


def describe(machine):
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    place = f"{machine['device']}, driver {machine['driver'] or 'none'}"
    return f"{place}, {versions}, commit {machine['commit']}, {machine['date']}"


def state(entry):
    return f"{entry['status']}: {entry['reason']}" if entry["reason"] else entry["status"]


def cell(value):
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")


# --- a piece -------------------------------------------------------------------------------------


def run(piece, args, results, env):
    """One piece in a process of its own -> its entry, whatever becomes of it."""
    start = time.monotonic()
    entry = {"status": "", "rows": []}
    with tempfile.TemporaryDirectory(prefix="gpu_hour_") as folder:
        Path(folder, "results.json").write_text(json.dumps(results))
        program = [sys.executable, str(Path(__file__).with_name("pieces.py")), folder, piece.name]
        with open(f"{folder}/log", "wb") as log:
            program += ["--dry"] * args.dry
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            process = subprocess.Popen(program, cwd=ROOT, env=env, **streams)
        try:
            problem = f"exit status {process.wait(piece.seconds)}"
        except subprocess.TimeoutExpired:
            problem = f"no end after {piece.seconds} s"
        finally:  # with all that it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if Path(folder, "entry.json").exists():
            entry = json.loads(Path(folder, "entry.json").read_text())
        if not entry["status"]:
            entry |= {"status": "failed", "reason": problem}
        if entry["status"] == "failed":
            entry["log"] = Path(folder, "log").read_text(errors="replace")[-3000:]
    machine = {"device": "unknown", "driver": None, "versions": {}} | entry.get("machine", {})
    machine |= {"commit": args.commit, "date": time.strftime("%Y-%m-%d")}
    return entry | {"machine": machine, "seconds": round(time.monotonic() - start)}


def environment(args):
    """What a piece finds: our modules, the wheels, no network."""
    paths = [ROOT / "src", ROOT, ROOT / "tests", ROOT / "tests/bench"]
    if args.wheels:
        site = Path(tempfile.gettempdir(), "gpu_hour_site")
        wheels = sorted(map(str, Path(args.wheels).glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", site, *wheels], check=True)
        paths.append(site)
    paths += os.environ.get("PYTHONPATH", "").split(":")
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    quiet |= {"CUDA_VISIBLE_DEVICES": ""} if args.dry else {}
    return os.environ | quiet | {"PYTHONPATH": ":".join(filter(None, map(str, paths)))}


# --- the list ------------------------------------------------------------------------------------


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--minutes", type=float, default=40.0, help="begin nothing that may take longer than this")
    add("--only", choices=[piece.name for piece in PIECES], help="one piece, though it is there")
    add("--dry", action="store_true", help="on a CPU, tiny")
    add("--out", help="folder of gpu.json and gpu.md; docs, with --dry a temporary one")
    add("--wheels", help="folder of wheels of what the environment lacks")
    add("--commit", help="where this is no clone: the commit it was copied from")
    args = parser.parse_args()
    args.out = Path(args.out or (tempfile.mkdtemp(prefix="gpu_hour_") if args.dry else DOCS))
    if args.dry and args.out.resolve() == DOCS:
        parser.error("--dry: docs/gpu.md is for GPUs; give another --out")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(FileNotFoundError):
        found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        args.commit = args.commit or found
    args.commit = args.commit or "unknown"
    return args


def read(folder):
    file = Path(folder) / "gpu.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(folder, results):
    """Both files; neither is ever half written."""
    texts = {"gpu.json": json.dumps(results, indent=1) + "\n", "gpu.md": page(results)}
    for name, text in texts.items():
        temporary = folder / f".tmp-{name}"
        temporary.write_text(text)
        temporary.rename(folder / name)


def missing(results, only):
    """Pieces to be done: those that were never tried first, then those that did not succeed."""
    if only:
        return [piece for piece in PIECES if piece.name == only]
    waiting = [p for p in PIECES if results.get(p.name, {}).get("status") != "ok"]
    return sorted(waiting, key=lambda piece: piece.name in results)


def main():
    args = read_flags()
    deadline = time.monotonic() + 60 * args.minutes
    env = environment(args)
    has_gpu = [sys.executable, "-c", "import torch; exit(not torch.cuda.is_available())"]
    if not args.dry and subprocess.run(has_gpu, env=env).returncode:
        print("error: torch sees no CUDA device; --dry rehearses on the CPU", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = read(args.out)
    for piece in missing(results, args.only):
        left = deadline - time.monotonic()
        if piece.seconds > left:
            print(f"{piece.name}: not begun, it may take {piece.seconds} of {left:.0f} s")
            continue
        entry = run(piece, args, results, env)
        results[piece.name] = entry
        write(args.out, results)
        print(f"{piece.name}, {entry['seconds']} s: {state(entry)}", flush=True)
    print(f"-> {args.out}/gpu.md")
    return int(any(entry["status"] == "failed" for entry in results.values()))


if __name__ == "__main__":
    sys.exit(main())
