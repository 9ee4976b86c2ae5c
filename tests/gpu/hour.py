"""Measure on one GPU what was written without one, the most valuable pieces first.

    python tests/gpu/hour.py                        # all: 25 minutes on an H100, at most 50
    python tests/gpu/hour.py --minutes 9            # the first five pieces; call it again for more
    python tests/gpu/hour.py --only attention demo  # these pieces, even if they are done
    python tests/gpu/hour.py --dry                  # the same list on a CPU, with small models

The script needs one NVIDIA GPU with 80 GB (Ampere or newer), 20 GB of disk space in the folder of
temporary files, and a Python with torch >= 2.11, transformers and peft. It needs no network: models
are made from their configurations, with random weights. Some pieces need a package more and are
skipped without it. If the GPU machine lacks such packages, download them as wheels elsewhere (5 MB;
for another version of Python add --python-version 3.12 and a --platform, see pip's help) and pass
the folder as --wheels wheels:

    python -m pip download --no-deps --only-binary=:all: -d wheels trl==1.16.0 gemmi==0.7.5 \\
        ruamel.yaml==0.19.1 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19

Each piece is a function of pieces.py in its own process, so that a piece that hangs or dies costs
only itself. A piece is not begun if it probably takes longer than the time that is left. gpu.json
and gpu.md in --out are written after each piece; a second call measures the pieces that failed,
then those that are missing.
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
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PREDICTED = DOCS / "gpu_predicted.json"  # written by roofline.py
REHEARSALS = DOCS / "gpu_rehearsed.json"  # written by pretend/rehearse.py


class Piece(NamedTuple):
    name: str
    # On an H100; the last three have not been measured yet. The piece is not begun if less time
    # is left, and on a GPU it is ended after twice this time.
    seconds: int
    title: str
    needs: tuple[str, ...] = ()  # packages, in addition to PACKAGES
    after: str = ""  # the piece that it is compared with, which must be done


PACKAGES = ("torch", "transformers", "peft")  # all pieces need them
TRL = ("trl", "datasets", "dill", "multiprocess")
YAML = ("ruamel.yaml",)
PIECES = [
    Piece("attention", 60, "Attention over a shared prompt, compared with separate rows"),
    Piece(
        "speed:long:ours",
        80,
        "LoRA DPO, Qwen3-8B's shape, 4 pairs per step, 512 prompt and 256 response tokens",
    ),
    Piece(
        "speed:long:trl",
        145,
        "The task of `speed:long:ours`, run with TRL in its best settings",
        TRL,
        "speed:long:ours",
    ),
    Piece("kernels", 85, "Profile of ten steps of `speed:long:ours`"),
    Piece("sharding", 115, "FSDP, ZeRO and QLoRA on one GPU", YAML),
    Piece("memory", 85, "Peak memory of a step, measured and predicted"),
    Piece("demo", 36, "Losses of 20 steps of the demo, compared with fp32 on a CPU"),
    Piece(
        "resume", 90, "A run of 100 steps with `--deterministic`, killed with SIGKILL and resumed"
    ),
    Piece("fp16", 30, "SFT of the demo in fp16 with loss scaling, compared with fp32", YAML),
    Piece("generation", 60, "Generation of 16 replies of 128 tokens"),
    Piece(
        "speed:hh:ours",
        60,
        "LoRA DPO, Qwen3-8B's shape, 4 pairs per step, lengths as in HH-RLHF",
    ),
    Piece("commands", 160, "First commands of the guides, and user errors", YAML),
    Piece("protein", 20, "DPO of ProteinMPNN", ("gemmi",)),
    Piece("distillation", 30, "Algorithm Distillation with `ad_dr.yaml`", YAML),
    Piece("baking", 30, "Prompt baking of the demo"),
    Piece(
        "speed:hh:trl",
        145,
        "The task of `speed:hh:ours`, run with TRL in its best settings",
        TRL,
        "speed:hh:ours",
    ),
    Piece(
        "speed:long:trl defaults",
        140,
        "The task of `speed:long:ours`, run with TRL in its default settings",
        TRL,
        "speed:long:ours",
    ),
    Piece(
        "speed:hh:trl defaults",
        120,
        "The task of `speed:hh:ours`, run with TRL in its default settings",
        TRL,
        "speed:hh:ours",
    ),
]
LONGEST_DRY = 900  # seconds after which a piece is ended on a CPU, which may be slow or busy

# --- the page ------------------------------------------------------------------------------------

INTRO = """# On a GPU

Except for the last two sections, the results on this page were measured on {}.

`python tests/gpu/hour.py` runs the benchmarks of this page on one NVIDIA GPU with 80 GB. It writes
this page and [gpu.json](gpu.json), which has more columns. `--help` lists the requirements and the
flag that selects benchmarks. A second run measures only failed and missing benchmarks. For
tokens/s, MFU and peak memory, see [metrics](../results/README.md#metrics). The column "loss
difference" contains the largest difference of the losses of two runs in any step.
"""
NOTES = {  # below the title of a piece
    "attention": """
The reference values were computed on a CPU in fp32 with separate rows, in which each response has
its own copy of the prompt. The table shows the largest differences from the reference values: the
root mean square difference of the token log-probs, and the relative difference of the LoRA
gradient. The cases in [gpu.json](gpu.json) differ in row lengths, head size and attention window.
In bf16, the benchmark fails if the differences with a shared prompt are more than twice those with
separate rows.
""",
    "kernels": """
"Device busy" is the fraction of the step time during which the GPU computes. The four columns to
the right of "device busy" count events per step. "Waits" are calls in which the host waits for the
GPU. [gpu.json](gpu.json) lists the times of the 20 kernels that take the most time.
""",
    "sharding": "\nAll strategies except QLoRA train all weights of a 0.6B model.\n",
    "memory": """
A step has 4 pairs with 512 prompt and 256 response tokens, or one pair with 3,000 prompt tokens
("long").
""",
    "commands": "\nEach command must exit with the expected status and without a traceback.\n",
}
TITLES = {  # column in gpu.json -> title on the page
    "in": "precision",
    "side": "program",
    "rows": "cases",
    "nats": "log-probs, nats",
    "gradient": "LoRA gradient",
    "mfu": "MFU",
    "tokens_per_second": "tokens/s",
    "peak_memory_mb": "peak MiB",
    "read by the host": "reads by the host",
    "to the host": "copies to the host",
    "to the device": "copies to the device",
    "checkpointing": "gradient checkpointing",
    "gap to DDP": "loss difference from DDP",
    "largest gap": "loss difference",
    "killed after": "killed after step",
    "scale": "initial loss scale",
}
SHOWN = {"kernels": 1}  # the page has only so many rows of these pieces
HIDDEN = {  # columns that only gpu.json has
    "memory": {"trial GiB", "reserved GiB", "ratio"},
    "demo": {"steps", "first loss", "last loss, CPU", "bound"},
    "distillation": {"hours for 50,000 steps"},
    "sharding": {"last loss"},
    "resume": {"steps", "exit statuses"},
    "generation": {"replies", "tokens of each"},
    "commands": {"s", "line"},
}
HIDDEN |= {piece.name: {"pairs a step"} for piece in PIECES if piece.name.startswith("speed")}

REHEARSED = """
## Rehearsed on a CPU

`python tests/gpu/pretend/rehearse.py --out docs/gpu_rehearsed.json` runs all scripts on simulated
GPUs: a CPU build of PyTorch accepts CUDA devices, checks the inputs of each operator as a CUDA
build would, and computes the operator on the CPU. The checks cover devices, dtypes, autocast,
host-device synchronization, fused AdamW, and operations that NCCL does not support.

Of {planned} planned runs on one or two GPUs, {done} were completed, and {good} ended with status 0
and without a problem. [gpu_rehearsed.json](gpu_rehearsed.json) lists the runs, which may come from
different commits. They cover DPO, SFT, baking, proteins, distillation, FSDP and ZeRO 1, 2 and 3.
The DPO runs train all weights or a LoRA of Qwen3, Llama, Mistral, Gemma 2, Gemma 3 or GPT-2. The
FSDP runs cover four sharding strategies, offloading, LoRA and DPO. The precisions are fp32, bf16
and fp16 (for proteins, only fp32).

In fp32, losses and gradient norms differed from those on a CPU by at most {gap:.1e}. The metrics of
a run that was killed and resumed were bit-identical to those of an uninterrupted run. In most runs,
the host reads from the GPU once per step, and does not wait for the GPU within micro-batches.
The table lists the other runs, whose additional reads and waits are caused by libraries:

| runs | reads per step | waits in micro-batches |
|---|---|---|
{exceptions}{bad}
The benchmarks above were also completed on a simulated GPU, with small models. QLoRA and vLLM
were left out, because their packages need a GPU. The rehearsal cannot show how the kernels of a GPU
round, whether CUDA streams have race conditions, whether NCCL works, or how fast a run is.
"""
PROBLEMS = """
These runs have a problem (in parentheses: the number of GPUs, and the precision):

| problem | runs |
|---|---|
"""
NO_EXCEPTION = {(1, 0), (None, None)}  # reads per step, waits in micro-batches
LENGTHS = {"long": "512, 256", "hh": "HH-RLHF", "short": "64, 512"}  # of roofline.py
FORECAST = """
## Predicted, not measured

`PYTHONPATH=src:tests/bench python tests/gpu/roofline.py --docs` predicts the time and the memory of
a DPO step in bf16. The model has the shape of Qwen3-8B, and a step has 4 pairs. The step trains a
LoRA of rank 16 or all weights. Full fine-tuning does not fit on one GPU with 80 GB. The script runs
the steps of `src/main_distributed.py` and of TRL on tensors without data, and counts their
operators. For lengths as in HH-RLHF, times are means of two batches, and the peak memory is the
larger of their two peaks. [gpu_predicted.json](gpu_predicted.json) also has the numbers of kernels,
FLOPs and bytes moved.

{}

Each column title contains the numbers of prompt and response tokens. Each cell contains the ms per
step on an H100, the ms per step on an A100, and the peak memory in GiB:

"""
COMPARED = """
The next table compares predictions with measurements on an H100. The other predictions have not
been checked. For HH-RLHF, the measured peak is the maximum over 11 batches.

| prompt, response tokens | program | predicted ms | measured ms | predicted GiB | measured GiB |
|---|---|---|---|---|---|
"""


def page(results):
    """docs/gpu.md: a section with title, state and tables for each piece."""
    text = INTRO.format(measured_on(results) or "no GPU yet")
    tried = [piece for piece in PIECES if piece.name in results]
    waiting = [f"- `{piece.name}`: {piece.title}\n" for piece in PIECES if piece not in tried]
    text += (
        f"\nThese benchmarks have not been measured yet:\n\n{''.join(waiting)}" if waiting else ""
    )
    for piece in tried:
        entry = results[piece.name]
        ended = f"\n\n{textwrap.fill(f'State: {state(entry)}.', 120)}"
        ended = "" if state(entry) == "ok" else ended
        text += f"\n## {piece.name}\n\n*{piece.title}*{ended}\n{NOTES.get(piece.name, '')}"
        rows = entry["rows"][: SHOWN.get(piece.name)]
        rows = largest(rows, ("in", "prompt")) if piece.name == "attention" else rows
        for _, group in itertools.groupby(rows, key=tuple):  # the same columns: one table
            text += table([*group], HIDDEN.get(piece.name, set()))
    return text + predictions(results) + rehearsals()


def table(rows, hidden):
    """Return rows with the same columns in Markdown.

    The column `ok` is shown only if a row is not.
    """
    hidden = hidden | {"losses"} | ({"ok"} if all(row.get("ok") for row in rows) else set())
    titles = {
        name: TITLES.get(name, name.replace(" a ", " per "))
        for name in rows[0]
        if name not in hidden
    }
    text = f"\n{line(*titles.values())}|{'---|' * len(titles)}\n"
    return text + "".join(line(*(row[name] for name in titles)) for row in rows)


def largest(rows, by):
    """Return a row for each value of the columns `by`: the largest of the numbers, whether ok."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    found = []
    for values, group in groups.items():
        row = dict(zip(by, values, strict=True)) | {"rows": len(group)}
        row |= {name: max(one[name] for one in group) for name in ("nats", "gradient")}
        found.append(row | {"ok": all(one["ok"] for one in group)})
    return found


def rehearsals():
    """The runs of rehearse.py: how many were done, and a table of those that wait more often."""
    content = json.loads(REHEARSALS.read_text())
    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
    runs = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    counts = {"planned": content["planned"], "done": len(rows)}
    counts["good"] = sum(row["exit status"] == 0 and not row["problems"] for row in rows)
    bad = {}  # first problem, without its details -> runs
    for row in rows:
        for problem in row["problems"][:1]:
            names = bad.setdefault(problem.partition(": [[")[0], {})  # in their order
            names[f"{row['run']} ({row['ranks']}, {row['precision']})"] = True
    listed = "".join(line(problem, "; ".join(names)) for problem, names in bad.items())
    counts["bad"] = PROBLEMS + listed if bad else ""
    counts["gap"] = max(row["gap"] for row in rows if row["gap"] is not None)
    exceptions = {}  # reads per step, waits in micro-batches -> runs
    for name, group in runs.items():
        cells = []
        for key in ("reads per step", "in micro-batches"):
            known = [row[key] for row in group if row[key] is not None]
            cells.append(max(known) if known else None)
        if tuple(cells) not in NO_EXCEPTION:
            exceptions.setdefault(tuple(cells), []).append(name)
    lines = [line("; ".join(names), *cells) for cells, names in exceptions.items()]
    return REHEARSED.format(**counts, exceptions="".join(lines))


def predictions(results):
    """The table of roofline.py, and what was measured next to its prediction."""
    content = json.loads(PREDICTED.read_text())
    sides, compared = {}, ""
    for row in content["rows"]:
        step, peak = round(row["H100 ms"]), row["peak GiB"]
        cells = sides.setdefault(row["what"], dict.fromkeys(LENGTHS, ""))
        cells[row["case"]] = f"{step}, {round(row['A100 ms'])}, {cell(peak)}"
        for measured in results.get(f"speed:{row['case']}:{row['side']}", {}).get("rows", [])[:1]:
            names = LENGTHS[row["case"]], row["what"]
            compared += line(*names, step, 1000 * measured["s a step"], peak, measured["peak GiB"])
    text = FORECAST.format(content["model"]) + line("program", *LENGTHS.values())
    text += f"|{'---|' * (1 + len(LENGTHS))}\n"
    text += "".join(line(what, *cells.values()) for what, cells in sides.items())
    return text + (COMPARED + compared if compared else "")


def measured_on(results):
    """Return each machine with its versions, and the commits and dates of its sessions."""
    sessions = {}
    for machine in (entry["machine"] for entry in results.values() if "machine" in entry):
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        place = f"{machine['device']}, driver {machine['driver'] or 'none'}, {versions}"
        session = f"commit {machine['commit']}, {machine['date']}"
        sessions.setdefault(place, set()).add(session)
    places = [f"{place} ({'; '.join(sorted(found))})" for place, found in sorted(sessions.items())]
    return " and on ".join(places)


def state(entry):
    return f"{entry['status']} ({entry['reason']})" if entry["reason"] else entry["status"]


def line(*values):
    """Return a row of a table."""
    return f"| {' | '.join(map(cell, values))} |\n"


def cell(value):
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("|", "/").replace("\n", " ")


# --- a piece -------------------------------------------------------------------------------------


def run(piece, limit, args, results, env):
    """Run a piece in its own process for at most `limit` seconds; return its entry."""
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
            problem = f"exit status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            problem = f"no end after {limit:.0f} s"
        finally:  # with all that it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if Path(folder, "entry.json").exists():
            entry = json.loads(Path(folder, "entry.json").read_text())
        if not entry["status"]:
            entry |= {"status": "failed", "reason": problem}
        if entry["status"] == "failed":
            log = Path(folder, "log").read_text(errors="replace")[-3000:]
            for place in (f"{ROOT}/", f"{folder}/"):  # of this machine
                log = log.replace(place, "")
            entry["log"] = log
    machine = {"device": "unknown", "driver": None, "versions": {}} | entry.get("machine", {})
    machine |= {"commit": args.commit, "date": time.strftime("%Y-%m-%d")}
    return entry | {"machine": machine, "seconds": round(time.monotonic() - start)}


def environment(args):
    """Return the variables of a piece: our modules, the wheels, no network."""
    paths = [ROOT / "src", ROOT, ROOT / "tests", ROOT / "tests/bench"]
    if args.wheels:
        site = Path(tempfile.gettempdir(), "gpu_hour_site")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
        if subprocess.run([*pip, "--target", site, *args.wheels]).returncode:
            sys.exit(2)  # pip has printed the reason
        paths.append(site)
    paths += os.environ.get("PYTHONPATH", "").split(":")
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if args.dry:  # several threads would wait for each other on a busy machine
        quiet |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | {"PYTHONPATH": ":".join(filter(None, map(str, paths)))}


# not in this process: a piece needs all of the GPU's memory
PROBE = """
import json, sys
from importlib.util import find_spec

def is_missing(name):
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:  # the package around it: ruamel of ruamel.yaml
        return True

missing = [name for name in sys.argv[1:] if is_missing(name)]
device = None
if "torch" not in missing:
    import torch
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps([missing, device]))
"""


def probe(env):
    """Return which packages are not installed, and the GPU's name, None without one."""
    names = set(PACKAGES).union(*(piece.needs for piece in PIECES))
    program = [sys.executable, "-c", PROBE, *sorted(names)]
    return json.loads(subprocess.run(program, env=env, stdout=subprocess.PIPE, check=True).stdout)


# --- the list ------------------------------------------------------------------------------------


def read_flags():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--minutes", type=float, default=50.0, help="time limit")
    names = [piece.name for piece in PIECES]
    add("--only", nargs="+", choices=names, metavar="PIECE", help="pieces, even if they are done")
    add("--dry", action="store_true", help="on a CPU, with small models")
    add("--out", help="folder of gpu.json and gpu.md; docs, with --dry a temporary one")
    add("--wheels", help="folder with wheels of packages that this Python lacks")
    add("--commit", help="commit of the code, if this folder is not a git clone")
    args = parser.parse_args()
    args.out = Path(args.out or (tempfile.mkdtemp(prefix="gpu_hour_") if args.dry else DOCS))
    if args.dry and args.out.resolve() == DOCS:
        parser.error("--dry: docs/gpu.md is for GPUs; use another --out")
    if args.wheels:
        folder, args.wheels = args.wheels, sorted(map(str, Path(args.wheels).glob("*.whl")))
        if not args.wheels:
            parser.error(f"--wheels {folder}: no *.whl in this folder; download them, see --help")
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
    """Return the pieces to run: those that failed and what needs them, then those never tried."""
    if only:
        return [piece for piece in PIECES if piece.name in only]
    waiting = [p for p in PIECES if results.get(p.name, {}).get("status") != "ok"]
    failed = {piece.name for piece in waiting if piece.name in results}
    return sorted(waiting, key=lambda piece: not failed & {piece.name, piece.after})


def why_not(piece, results, device, left):
    """Return why a piece cannot be begun now, or an empty string."""
    partner = results.get(piece.after, {})
    if piece.after and partner.get("status") != "ok":
        return f"it is compared with {piece.after}, which is not measured"
    if piece.after and partner["machine"]["device"] != device:
        return f"it is compared with {piece.after}, measured on {partner['machine']['device']}"
    if piece.seconds > left:
        return f"it takes about {piece.seconds} s, and {left:.0f} s are left"
    return ""


def main():
    args = read_flags()
    deadline = time.monotonic() + 60 * args.minutes
    env = environment(args)
    lacking, gpu = probe(env)
    device = "CPU" if args.dry else gpu
    absent = ", ".join(name for name in PACKAGES if name in lacking)
    if absent:
        fix = "start this script with a Python that has the packages of requirements.txt"
        print(f"error: {sys.executable}: {absent}: not installed; {fix}", file=sys.stderr)
        return 2
    if not device:
        print("error: torch finds no CUDA device; use --dry on a CPU", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = read(args.out)
    for piece in missing(results, args.only):
        left = deadline - time.monotonic()
        absent = ", ".join(name for name in piece.needs if name in lacking)
        reason = why_not(piece, results, device, left)
        if absent:
            entry = {"status": "skipped", "reason": f"needs {absent}", "rows": [], "seconds": ""}
            results.setdefault(piece.name, entry)  # an earlier result is kept
            print(f"{piece.name}: {state(entry)}", flush=True)
        elif reason:
            print(f"{piece.name}: not begun: {reason}", flush=True)
        else:
            limit = min(left, LONGEST_DRY if args.dry else 2 * piece.seconds)
            entry = run(piece, limit, args, results, env)
            results[piece.name] = entry
            print(f"{piece.name}, {entry['seconds']} s: {state(entry)}", flush=True)
        write(args.out, results)
    print(f"-> {args.out}/gpu.md")
    return int(any(entry["status"] == "failed" for entry in results.values()))


if __name__ == "__main__":
    sys.exit(main())
