"""Show what this machine has for training, what to mend, and the command to start with.

    python check_gpu.py            # some lines; the last one is the command
    python check_gpu.py --json     # the same as one JSON object
    python check_gpu.py --bench    # and how fast the first device computes and copies
    torchrun --standalone --nproc_per_node=8 check_gpu.py --bench   # all of them, and all-reduce
    python check_gpu.py --plan config.yaml --gpus 8 --gpu_memory 80   # does src/train.py fit?
    $(python check_gpu.py | tail -n 1)                 # start with that command
    CUDA_VISIBLE_DEVICES=0,1 python check_gpu.py       # as if only these two GPUs were there

Devices are counted as the training counts them: after CUDA_VISIBLE_DEVICES, CUDA before XPU.
Facts and advice are about the node of rank 0. Exit status: 0, whatever the machine has; 2 for a
wrong flag, an environment without torch, or processes that cannot meet.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import timeit
from functools import partial
from pathlib import Path

if importlib.util.find_spec("torch") is None:
    print("error: no torch in this environment; ./run_distributed.sh makes one", file=sys.stderr)
    raise SystemExit(2)

import torch

SRC = Path(__file__).resolve().parent / "src"
sys.path.insert(0, str(SRC))  # the project need not be installed

from ddp_utils import distributed  # noqa: E402

GIB = 2**30
SETTINGS = ("CUDA_", "NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "OMP_")  # prefixes of what is shown
TABLES = ("devices", "rates", "all_reduces")  # a line for each row
RATES = ("bf16_tflops", "fp32_tflops", "host_gb_per_s")


def collect_facts(env=os.environ) -> dict:
    """Return what this machine has. Memory is in GiB; None is unknown."""
    kind = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
    devices = []
    if kind != "cpu":
        unit = getattr(torch, kind)
        devices = [describe_device(unit, index) for index in range(unit.device_count())]
    group = torch.distributed
    backends = [n for n in ("gloo", "nccl", "xccl") if getattr(group, f"is_{n}_available")()]
    has_nccl = kind == "cuda" and "nccl" in backends
    shm = Path("/dev/shm")
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 2),
        "shm_free_gib": round(shutil.disk_usage(shm).free / GIB, 2) if shm.exists() else None,
        "settings": {name: env[name] for name in env if name.startswith(SETTINGS)},
        "backends": backends,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        **nvidia_facts(),
        "kind": kind,
        "devices": devices,
    }


def describe_device(unit, index) -> dict:
    """Return the properties of a device of unit, which is torch.cuda or torch.xpu."""
    name = unit.get_device_properties(index).name
    free, total = (round(size / GIB, 2) for size in unit.mem_get_info(index))
    with unit.device(index):  # is_bf16_supported() asks the current device
        bf16 = bool(unit.is_bf16_supported(including_emulation=False))
    memory = {"memory_gib": total, "memory_free_gib": free}
    return {"index": index, "name": name, **memory, "bf16": bf16}


def nvidia_facts(proc="/proc/driver/nvidia", pci="/sys/bus/pci/devices") -> dict:
    """Return the driver, the NVIDIA GPUs in this machine, and why torch cannot use them."""
    version = Path(proc, "version")
    driver = re.search(r"\d+\.[\d.]+", version.read_text()) if version.exists() else None
    gpus = 0
    for kind in Path(pci).glob("*/class"):
        is_display = kind.read_text().startswith("0x03")
        gpus += is_display and kind.with_name("vendor").read_text() == "0x10de\n"
    problem = None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    return {"driver": driver and driver[0], "nvidia_gpus": gpus, "cuda_error": problem}


def advise(facts) -> dict:
    """Return the number of processes, the precision, the warnings and the command."""
    devices = facts["devices"]
    processes = len(devices) or min(2, facts["cores"])
    precision = "fp32"
    if devices:
        precision = "bf16" if all(device["bf16"] for device in devices) else "fp16"
    return {
        "processes": processes,
        "precision": precision,
        "warnings": [*device_warnings(facts), *host_warnings(facts, processes)],
        "command": f"./run_distributed.sh {processes}",
    }


def device_warnings(facts):
    """Yield which GPUs torch cannot use, are cut by MIG, differ, or are in use by others."""
    if facts["kind"] == "cpu" and facts["nvidia_gpus"]:
        mend = "look at CUDA_VISIBLE_DEVICES and the driver, ask for them (docker: --gpus all)"
        yield f"{facts['nvidia_gpus']} NVIDIA GPUs are not used: {facts['cuda_error']}; {mend}"
    names = dict.fromkeys(f"{d['name']} ({d['memory_gib']:.0f} GiB)" for d in facts["devices"])
    if len(names) > 1:
        yield f"the devices differ: {', '.join(names)}; choose a batch_size for the smallest"
    for d in facts["devices"]:
        if " MIG " in d["name"]:
            yield f"GPU {d['index']} is cut by MIG, NCCL joins no slices; undo: nvidia-smi -mig 0"
        if d["memory_free_gib"] < 0.9 * d["memory_gib"]:
            mend = "GiB; stop what runs there, lower batch_size, or leave it out"
            yield f"free on GPU {d['index']}: {d['memory_free_gib']} of {d['memory_gib']} {mend}"


def host_warnings(facts, processes):
    """Yield what there is too little of: cores, shared memory."""
    if facts["cores"] < processes:
        yield f"{processes} processes share {facts['cores']} cores; ask for one each at least"
    free = facts["shm_free_gib"]
    if len(facts["devices"]) > 1 and free is not None and free < 1:
        yield f"/dev/shm has {free} GiB free and NCCL uses it; free 1 GiB (docker: --shm-size=2g)"


def show(facts, advice) -> str:
    """Return a line for each fact, device, rate and warning; the last line is the command."""
    lines = []
    for name, value in facts.items():
        rows = value if name in TABLES else [value]
        for row in rows or [None]:
            if isinstance(row, dict):
                row = [f"{key}={item}" for key, item in row.items()]
            text = ", ".join(map(str, row)) if isinstance(row, list) else row
            lines.append(f"{name:<20}  {text or 'none'}")
    lines.append(f"{'start':<20}  {advice['processes']} processes, {advice['precision']}")
    lines += [f"warning: {warning}" for warning in advice["warnings"]]
    return "\n".join([*lines, advice["command"]])


def bench(world) -> dict:
    """Measure the device of each rank; with several ranks all-reduces, too."""
    ranks = world.world_size
    table = torch.zeros(ranks, 3, dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(device_rates(world.device))
    all_reduces = []
    for size in (2**20, 2**24, 2**27) if ranks > 1 else []:
        block = torch.zeros(size // 4, device=world.device)
        seconds = seconds_of(partial(distributed.all_sum, block, world), world.device)
        ms = round(1000 * seconds, 2)
        bus = round(size / seconds / 1e9 * 2 * (ranks - 1) / ranks, 2)  # GB/s of each link
        all_reduces.append({"mib": size >> 20, "ms": ms, "bus_gb_per_s": bus})
    rows = distributed.all_sum(table, world).round(decimals=3).tolist()
    rates = [dict(zip(RATES, row, strict=True)) for row in rows]
    return {"ranks": ranks, "rates": rates, "all_reduces": all_reduces}


def seconds_of(work, device):
    """Return the seconds of work() on this device, the least of seven times."""

    def step():
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return min(timeit.repeat(step, number=1, repeat=7))


def device_rates(device) -> list:
    """Return what RATES names: matrix products in bf16 and in fp32, a copy from the host."""
    side = 1024 if device.type == "cpu" else 8192
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        rates.append(2 * side**3 / seconds_of(partial(torch.mm, matrix, matrix), device) / 1e12)
    block = torch.ones(2**26, pin_memory=device.type == "cuda")
    copy = torch.empty(2**26, device=device)
    return [*rates, block.nbytes / seconds_of(partial(copy.copy_, block), device) / 1e9]


def plan_lines(args, report):
    """Return the lines of --plan, which is about src/train.py."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported: no downloads
    import train
    from ddp_utils.tools import memory_plan

    machine = memory_plan.machine(report, args.gpus, args.gpu_memory)
    return memory_plan.lines(train, args.plan, *machine)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--bench", action="store_true", help="measure: compute, copy, all-reduce")
    parser.add_argument("--plan", metavar="config.yaml", help="does this run of src/train.py fit?")
    parser.add_argument("--gpus", type=int, help="--plan: for so many of them, not those here")
    parser.add_argument("--gpu_memory", type=float, help="--plan: for GPUs of so many GiB")
    args = parser.parse_args(argv)
    if args.plan and (args.json or args.bench):
        parser.error("--json and --bench: no effect with --plan")
    if (args.gpus or args.gpu_memory) and not args.plan:
        parser.error("--gpus and --gpu_memory: no effect without --plan")
    world = distributed.whoami()
    facts = collect_facts() if world.is_main else {}
    if args.bench:
        world = distributed.init_process_group(world, timeout_minutes=5)
        facts |= bench(world)
    if not world.is_main:
        return 0
    if args.plan:
        print(*plan_lines(args, facts), sep="\n")
        return 0
    advice = advise(facts)
    print(json.dumps(facts | advice, indent=2) if args.json else show(facts, advice))
    return 0


if __name__ == "__main__":
    distributed.run(main)
