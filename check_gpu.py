"""What this machine has for training, what to mend, and the command to start with.

    python check_gpu.py            # some lines; the last one is the command
    python check_gpu.py --json     # the same as one JSON object
    python check_gpu.py --bench    # and how fast the devices compute and copy
    torchrun --standalone --nproc_per_node=8 check_gpu.py --bench   # and all-reduce; nodes as well
    python check_gpu.py --plan config.yaml --gpus 8 --gpu_memory 80   # does it fit, how long?
    $(python check_gpu.py | tail -n 1)                 # start with that command
    CUDA_VISIBLE_DEVICES=0,1 python check_gpu.py       # as if only these two GPUs were there

Devices are counted as the training counts them: after CUDA_VISIBLE_DEVICES, CUDA before XPU.
Facts and advice are about the node of rank 0. Exit status: 0, whatever the machine has; 2 for a
wrong flag, an environment without torch, or processes that cannot meet.

N devices, W ranks. Memory is in GiB; what --bench shows in GB/s (1e9 bytes) and TFLOP/s is in
bytes/s and FLOP/s in the JSON.
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent / "src"))  # before anything is installed

import ddp_utils.startup  # noqa: E402, F401

from ddp_utils import UserError, machine  # noqa: E402

GIB = 2**30
BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}  # what several processes talk through
TOOLS = {"CUDA": "nvidia-smi", "HIP": "rocm-smi", "XPU": "xpu-smi"}
DEVICE = (  # a line of the table
    "{index:>8}  {name:<{wide}}  {memory_gib:6.1f}  {memory_free_gib:6.1f}"
    "  {compute_capability!s:>10}  {bf16!s:>5}  {units:>5}"
)


def facts(torch, env=os.environ) -> dict:
    """What there is; nothing is judged. Memory is in GiB, null is what could not be found out."""
    kind = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
    number = getattr(torch, kind).device_count() if kind != "cpu" else 0
    group, nccl, peers = torch.distributed, None, None
    backends = {
        name: group.is_available() and bool(getattr(group, f"is_{name}_available")())
        for name in ("gloo", "nccl", "xccl")
    }
    devices = [device(getattr(torch, kind), index) for index in range(number)]
    nvidia = machine.nvidia()  # after torch has woken the GPUs: sleeping ones take seconds each
    if kind == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if backends["nccl"] else None
        reach, every = torch.cuda.can_device_access_peer, range(number)
        peers = [[i == j or bool(reach(i, j)) for j in every] for i in every]
    elif kind == "xpu":
        version = torch.xpu.get_device_properties(0).driver_version
        nvidia |= {"driver": version, "nvidia_gpus": 0}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": build(torch.version),
        "os": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        **memory(),
        **machine.host(),
        "omp_num_threads": env.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": env.get("CUDA_VISIBLE_DEVICES"),
        "settings": machine.settings(env),
        "port_problems": list(machine.about_port(env)),
        "backends": backends,
        "nccl": nccl,
        **nvidia,
        "kind": kind,
        "devices": devices,
        "tiles": sum("Max 1550" in d["name"] and d["memory_gib"] < 100 for d in devices),
        "peer_access": peers,
    }


def build(version):
    found = ((name, getattr(version, name.lower(), None)) for name in TOOLS)
    return next((f"{name} {number}" for name, number in found if number), "CPU")


def memory():
    """Of the host, of /dev/shm and of the disk; outside Linux only the host's total is known."""
    lines = machine.read(Path("/proc/meminfo")).splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = kib["MemAvailable"] * 1024 if kib else None
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    disk = shutil.disk_usage("results" if Path("results").exists() else ".")
    names = ("memory_gib", "memory_available_gib", "shm_gib", "shm_free_gib", "results_free_gib")
    sizes = (total, available, shm and shm.total, shm and shm.free, disk.free)
    return {n: s if s is None else round(s / GIB, 2) for n, s in zip(names, sizes, strict=True)}


def device(unit, index):
    """unit: torch.cuda or torch.xpu."""
    has = unit.get_device_properties(index)
    free, total = unit.mem_get_info(index)
    with unit.device(index):  # the question about bf16 is about the current device
        bf16 = bool(unit.is_bf16_supported(including_emulation=False))
    is_cuda = hasattr(has, "multi_processor_count")
    return {
        "index": index,
        "name": has.name,
        "uuid": str(getattr(has, "uuid", "")),
        "memory_gib": round(total / GIB, 2),
        "memory_free_gib": round(free / GIB, 2),
        "compute_capability": f"{has.major}.{has.minor}" if is_cuda else None,
        "bf16": bf16,
        "units": has.multi_processor_count if is_cuda else has.max_compute_units,
    }


def advice(facts) -> dict:
    """How many processes, which precision, what to mend first, and the command to start with."""
    devices, kind, flag, warnings = facts["devices"], facts["kind"], "", []
    cores = min(facts["cores"], int(facts["cpu_limit"] or facts["cores"]) or 1)
    processes = len(devices) or min(2, cores)
    precision = "bf16" if devices else "fp32"
    without = [d["index"] for d in devices if not d["bf16"]]
    if without and len(without) == len(devices) and kind == "cuda":
        precision = "fp16"
    elif without:  # a rank goes by its own device, and gradients of bf16 and fp16 do not add up
        precision, flag = "fp32", " --no_use_mixed_precision"
        lacks = f"no bf16 on {numbers(without)}, and all ranks need the same precision"
        warnings.append(f"{lacks}; fp32 works but is slow{leave_out(facts, without)}")
    if processes > 1 and not facts["backends"][BACKENDS[kind]]:
        processes = 1
        warnings.append(f"no {BACKENDS[kind]} in this torch: start one process or install another")
    if sum(" MIG " in d["name"] for d in devices) > len(facts["mig"]) > 0:
        processes = 1  # two slices of one GPU
    judges = (machine.about_nvidia, machine.about_mig, about_gpus, machine.about_links)
    warnings += [line for judge in (*judges, machine.about_settings) for line in judge(facts)]
    warnings += [*facts["port_problems"], *about_host(facts, processes, cores)]
    warnings += machine.about_limits(facts, processes)
    command, each = f"./run_distributed.sh {processes}{flag}", max(1, cores // processes)
    advised = dict(processes=processes, precision=precision, warnings=warnings, command=command)
    return advised | {"cores_each": each}


def about_gpus(facts):
    devices, peers, users = facts["devices"], facts["peer_access"] or [], facts["users"]
    names = dict.fromkeys(f"{d['name']} ({d['memory_gib']:.0f} GiB)" for d in devices)
    sizes = [d["memory_gib"] for d in devices]
    if len({d["name"] for d in devices}) > 1 or (sizes and max(sizes) > 1.05 * min(sizes)):
        what = f"the devices differ: {', '.join(names)}"
        yield f"{what}; all wait for the slowest, choose a batch_size that fits the smallest"
    busy = [d for d in devices if d["memory_free_gib"] < 0.9 * d["memory_gib"]]
    if busy:
        free = (f"{d['memory_free_gib']} of {d['memory_gib']} GiB" for d in busy)
        indices, tool = [d["index"] for d in busy], TOOLS[facts["build"].split()[0]]
        who = machine.some([user for d in busy for user in users.get(d["uuid"], [])])
        what = f"free on {numbers(indices)}: {', '.join(free)}; "
        what += f"used by {who}" if who else f"{tool} shows what else runs there"
        yield f"{what}: stop it, or lower batch_size{leave_out(facts, indices)}"
    pairs = [(i, j) for j in range(len(peers)) for i in range(j)]
    apart = [f"{i}-{j}" for i, j in pairs if not (peers[i][j] and peers[j][i])]
    if apart:
        what = f"no peer access between {len(apart)} of {len(pairs)} pairs ({machine.some(apart)})"
        yield f"{what} of GPUs, slower; if NCCL hangs, export NCCL_P2P_DISABLE=1"


def about_host(facts, processes, cores):
    """cores: those whose time this process may use."""
    free, threads = facts["shm_free_gib"], facts["omp_num_threads"] or ""
    if len(facts["devices"]) > 1 and free is not None and free < 1:
        yield f"/dev/shm has {free} GiB free and NCCL uses it; free 1 GiB (docker: --shm-size=2g)"
    threads = int(threads) if threads.isdecimal() else 1
    if processes > 1 and threads * processes > cores:
        what = f"{processes} processes x {threads} threads share {cores} cores"
        yield f"{what}; unset OMP_NUM_THREADS, or ask for more cores (Slurm: --cpus-per-task)"


def numbers(indices):
    return f"GPU {', '.join(map(str, indices))}"


def leave_out(facts, indices):
    """The end of a sentence: how to do without these devices, if others are left."""
    kept = [d["index"] for d in facts["devices"] if d["index"] not in indices]
    if not kept or facts["kind"] != "cuda":
        return ""
    shown = facts["cuda_visible_devices"]
    names = [shown.split(",")[index].strip() if shown else str(index) for index in kept]
    return f"; without {numbers(indices)}: export CUDA_VISIBLE_DEVICES={','.join(names)}"


def show(facts, advice, tables=()) -> str:
    """All for the eye: facts, devices, warnings, tables; the command is the last line."""
    f = {name: "none" if value is None else value for name, value in facts.items()}
    shown, devices, count = facts["cuda_visible_devices"], facts["devices"], advice["processes"]
    scale = " with a loss scale" if advice["precision"] == "fp16" else ""
    kinds = Counter(facts["links"].values()).items()
    lines = [
        f"python    {f['python']}, torch {f['torch']} built for {f['build']}",
        f"system    {f['os']}",
        f"cores     {f['cores']}, limit {f['cpu_limit']}, {advice['cores_each']} a process, "
        f"OMP_NUM_THREADS {facts['omp_num_threads'] or 'not set'}",
        f"memory    {f['memory_gib']} GiB, available {f['memory_available_gib']}, "
        f"limit {f['memory_limit_gib']}",
        f"/dev/shm  {f['shm_gib']} GiB, free {f['shm_free_gib']}; disk {f['results_free_gib']}",
        f"limits    open files {f['open_files'][0] or 'none'}, processes and threads {f['forks']}",
        f"network   {', '.join([*facts['interfaces'], *facts['infiniband']])}",
        f"settings  {', '.join(map('='.join, facts['settings'].items())) or 'none'}",
        f"backends  {', '.join(name for name, has in f['backends'].items() if has) or 'none'}",
        f"driver    {f['driver']}, NCCL {f['nccl']}",
        f"visible   CUDA_VISIBLE_DEVICES {'not set' if shown is None else repr(shown)}",
        f"links     {', '.join(f'{n} pairs {kind}' for kind, n in kinds) or 'none'}",
        f"devices   {len(devices) or 'no GPU, training runs on the CPU'}"
        f"{', each a tile, half of a GPU' * (facts['tiles'] > 0)}",
    ]
    wide = max(4, *(len(d["name"]) for d in devices), 0)
    if devices:
        lines.append(f"          {'name':<{wide}}     GiB    free  capability   bf16  units")
    lines += [DEVICE.format(**d, wide=wide) for d in devices]
    lines.append(f"start     {count} process{'es' * (count > 1)}, {advice['precision']}{scale}")
    lines += [f"warning: {sentence}" for sentence in advice["warnings"]]
    return "\n".join([*lines, *tables, advice["command"]])


# --- --bench -------------------------------------------------------------------------------------


def bench(torch, dist, world) -> dict:
    """FLOP/s and bytes/s of all devices here, or of each rank's own; all-reduces of all ranks.

    Raises UserError if a device has no memory left.
    """
    kind, ranks, peaks = world.device.type, world.world_size, [None, None]
    number = torch.accelerator.device_count() if ranks == 1 and kind != "cpu" else 0
    devices = [torch.device(kind, index) for index in range(number)] or [world.device]
    if kind != "cpu":
        from ddp_utils import speed  # takes seconds to import

        peaks = [speed.peak_flops(world.device, t) for t in (torch.bfloat16, torch.float32)]
    table = torch.zeros(max(ranks, len(devices)), 3, device=world.device)  # [W or N, 3]
    try:
        for row, device in enumerate(devices, start=world.rank):
            table[row] = torch.tensor(rates(torch, device))
        between = copies(torch, devices) if len(devices) > 1 else None
    except torch.OutOfMemoryError as error:
        raise UserError("--bench: no 2 GiB free on a device; stop what runs there") from error
    return {
        "ranks": ranks,
        "local": world.local_size,
        "peaks": peaks,
        "rates": dist.all_sum(table, world).tolist(),
        "copies": between,
        "all_reduces": all_reduces(torch, dist, world) if ranks > 1 else [],
    }


def timed(torch, devices, work, times=5):
    """Median seconds of work() on these devices, after two calls that warm up."""
    seconds = []
    for _ in range(2 + times):
        start = time.perf_counter()
        work()
        for device in devices:
            getattr(torch, device.type).synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def rates(torch, device) -> list:
    """FLOP/s of a matrix product in bf16 and in fp32, bytes/s of a copy from the host."""
    side, size = (1024, 2**24) if device.type == "cpu" else (8192, 2**28)
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        seconds.append(timed(torch, [device], partial(torch.mm, matrix, matrix)))
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.ones_like(host, device=device)
    copy = timed(torch, [device], partial(target.copy_, host, non_blocking=True))
    return [*(2 * side**3 / s for s in seconds), size / copy]


def copies(torch, devices, size=2**28) -> list:
    """Bytes/s from each device to each, within its own memory too: [N, N]."""
    blocks = [torch.ones(size, dtype=torch.uint8, device=device) for device in devices]
    return [
        [size / timed(torch, {a.device, b.device}, partial(b.clone().copy_, a)) for b in blocks]
        for a in blocks
    ]


def all_reduces(torch, dist, world) -> list:
    """[bytes, seconds, whether all ranks got the right sums] of an all-reduce, by size."""
    found, sizes = [], [2**n for n in (20, 22, 24, 26, 28)]
    for size in sizes[: 3 if world.device.type == "cpu" else 5]:
        block = torch.ones(size // 4, device=world.device)
        right = dist.all_sum(block, world).eq(world.world_size).all().float()
        right = dist.all_sum(right, world).item() == world.world_size
        block.zero_()  # which stays as it is, however often it is summed
        seconds = timed(torch, [world.device], partial(dist.all_sum, block, world))
        found.append([size, seconds, right])
    return found


def bandwidths(size, seconds, ranks):
    """(algorithm, bus) GB/s of an all-reduce: bytes a second, and what each link carries for it."""
    rate = size / seconds / 1e9
    return rate, rate * 2 * (ranks - 1) / ranks


def tables(bench, processes):
    """The lines that show what bench() has measured."""
    ranks, local, rows, between = map(bench.get, ("ranks", "local", "rates", "copies"))
    yield "device  bf16 TFLOP/s  of peak  fp32 TFLOP/s  of peak  from host GB/s"
    for index, (*flops, copied) in enumerate(rows):
        pairs = zip(flops, bench["peaks"], strict=True)
        shares = [(rate / 1e12, f"{rate / peak:.0%}" if peak else "-") for rate, peak in pairs]
        cells = "".join(f"{rate:>14.3f}{share:>9}" for rate, share in shares)
        yield f"{index:>6}{cells}{copied / 1e9:>16.2f}"
    if between:
        yield "copies, GB/s" + "".join(f"{f'to {i}':>9}" for i in range(len(rows)))
        for index, row in enumerate(between):
            yield f"{f'from {index}':>12}" + "".join(f"{rate / 1e9:>9.2f}" for rate in row)
    if ranks == 1:
        start = f"torchrun --standalone --nproc_per_node={max(2, processes)} check_gpu.py --bench"
        yield f"all-reduce takes several processes: {start}"
    else:
        yield f"all-reduce MiB      ms  algorithm GB/s  bus GB/s  ({ranks} ranks, {local} a node)"
    for size, seconds, right in bench["all_reduces"]:
        algorithm, bus = bandwidths(size, seconds, ranks)
        yield f"{size >> 20:>14}{seconds * 1e3:>8.2f}{algorithm:>16.2f}{bus:>10.2f}"
        if not right:
            yield "warning: its sums are wrong; export NCCL_P2P_DISABLE=1, or turn the IOMMU off"


def plan(args, found):
    """The lines of --plan, which is about one of the scripts."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: nothing is downloaded
    sys.path.insert(0, str(SRC := Path(__file__).parent / "src"))
    from ddp_utils import UserError, plan

    is_script = Path(args.plan).resolve() == SRC.resolve() / "config.py"
    if not is_script and Path(args.plan).suffix not in (".yaml", ".yml"):
        raise UserError(f"--plan: {args.plan} is neither src/config.py nor a YAML file")
    script = importlib.import_module("main_distributed" if is_script else "train")
    where = plan.machine(found, args.gpus, args.gpu_memory)
    return plan.lines(plan.read(script, args.plan, where), where, args.tokens_per_second)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--bench", action="store_true", help="measure: compute, copy, all-reduce")
    parser.add_argument("--plan", metavar="FILE", help="does it fit? config.yaml or src/config.py")
    parser.add_argument("--gpus", type=int, help="--plan: for so many of them, not those here")
    parser.add_argument("--gpu_memory", type=float, help="--plan: for GPUs of so many GiB")
    parser.add_argument("--tokens_per_second", type=float, help="--plan: of the whole run")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # a launcher's
    args = parser.parse_args(argv)
    unread = ("json", "bench") if args.plan else ("gpus", "gpu_memory", "tokens_per_second")
    given = [f"--{name}" for name in unread if getattr(args, name) != parser.get_default(name)]
    if given:
        parser.error(f"{', '.join(given)}: no effect {'with' if args.plan else 'without'} --plan")
    if importlib.util.find_spec("torch") is None:
        parser.exit(2, "error: no torch in this environment; ./run_distributed.sh makes one\n")
    import torch

    from ddp_utils import dist

    world, found, lines = dist.whoami(), {}, []
    if world.is_main:
        found = facts(torch)
        found |= advice(found)
    if args.plan:
        lines = plan(args, found) if world.is_main else []
        print(*lines, sep="\n", end="\n" * world.is_main)
        return 0
    if args.bench:
        world = dist.join(dist.meet(world), timeout_minutes=5)
        found["bench"] = bench(torch, dist, world)
        lines += tables(found["bench"], found.get("processes", 1))
    if world.is_main:
        print(json.dumps(found, indent=2) if args.json else show(found, found, lines))
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("torch"):
        from ddp_utils import dist

        dist.run(main)
    raise SystemExit(main())
