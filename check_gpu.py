"""What this machine has for training, what to mend, and the command to start with.

    python check_gpu.py            # a few lines; the last one is the command
    python check_gpu.py --json     # the same as one JSON object
    $(python check_gpu.py | tail -n 1)                 # start with that command
    CUDA_VISIBLE_DEVICES=0,1 python check_gpu.py       # as if only these two GPUs were there

Devices are counted as the training counts them: after CUDA_VISIBLE_DEVICES, CUDA before XPU.
Exit status: 0, whatever the machine has; 2 for a wrong flag or an environment without torch.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

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
    drivers, group, nccl, peers = nvidia_drivers(), torch.distributed, None, None
    backends = {
        name: group.is_available() and bool(getattr(group, f"is_{name}_available")())
        for name in ("gloo", "nccl", "xccl")
    }
    if kind == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if backends["nccl"] else None
        reach, every = torch.cuda.can_device_access_peer, range(number)
        peers = [[i == j or bool(reach(i, j)) for j in every] for i in every]
    elif kind == "xpu":
        drivers = [torch.xpu.get_device_properties(0).driver_version]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": build(torch.version),
        "os": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        **memory(),
        "omp_num_threads": env.get("OMP_NUM_THREADS"),
        "cuda_visible_devices": env.get("CUDA_VISIBLE_DEVICES"),
        "backends": backends,
        "driver": drivers[0] if drivers else None,
        "nccl": nccl,
        "nvidia_gpus": len(drivers) if kind != "xpu" else 0,  # whatever torch may see of them
        "kind": kind,
        "devices": [device(getattr(torch, kind), index) for index in range(number)],
        "peer_access": peers,
    }


def nvidia_drivers():
    """The driver's version once per GPU of the machine; empty without a working nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def build(version):
    found = ((name, getattr(version, name.lower(), None)) for name in TOOLS)
    return next((f"{name} {number}" for name, number in found if number), "CPU")


def memory():
    """Of the host and of /dev/shm; only the host's total is known outside Linux."""
    total, available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None
    if Path("/proc/meminfo").exists():
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total, available = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    names = ("memory_gib", "memory_available_gib", "shm_gib", "shm_free_gib")
    sizes = (total, available, shm and shm.total, shm and shm.free)
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
        "memory_gib": round(total / GIB, 2),
        "memory_free_gib": round(free / GIB, 2),
        "compute_capability": f"{has.major}.{has.minor}" if is_cuda else None,
        "bf16": bf16,
        "units": has.multi_processor_count if is_cuda else has.max_compute_units,
    }


def advice(facts) -> dict:
    """How many processes, which precision, what to mend first, and the command to start with."""
    devices, kind, flag, warnings = facts["devices"], facts["kind"], "", []
    processes = len(devices) or min(2, facts["cores"])
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
    warnings += [*about_gpus(facts), *about_host(facts, processes)]
    command = f"./run_distributed.sh {processes}{flag}"
    return dict(processes=processes, precision=precision, warnings=warnings, command=command)


def about_gpus(facts):
    devices, peers = facts["devices"], facts["peer_access"] or []
    names = dict.fromkeys(f"{d['name']} ({d['memory_gib']:.0f} GiB)" for d in devices)
    sizes = [d["memory_gib"] for d in devices]
    if len({d["name"] for d in devices}) > 1 or (sizes and max(sizes) > 1.05 * min(sizes)):
        what = f"the devices differ: {', '.join(names)}"
        yield f"{what}; all wait for the slowest, choose a batch_size that fits the smallest"
    busy = [d for d in devices if d["memory_free_gib"] < 0.9 * d["memory_gib"]]
    if busy:
        free = (f"{d['memory_free_gib']} of {d['memory_gib']} GiB" for d in busy)
        indices, tool = [d["index"] for d in busy], TOOLS[facts["build"].split()[0]]
        what = f"free on {numbers(indices)}: {', '.join(free)}; {tool} shows what else runs there"
        yield f"{what}: stop it, or lower batch_size{leave_out(facts, indices)}"
    pairs = [(i, j) for j in range(len(peers)) for i in range(j)]
    apart = [f"{i}-{j}" for i, j in pairs if not (peers[i][j] and peers[j][i])]
    if apart:
        some = ", ".join(apart[:6]) + ", ..." * (len(apart) > 6)
        what = f"no peer access between {len(apart)} of {len(pairs)} pairs of GPUs ({some}), slower"
        yield f"{what}; if NCCL hangs, export NCCL_P2P_DISABLE=1"


def about_host(facts, processes):
    shown, gpus, build = facts["cuda_visible_devices"], facts["nvidia_gpus"], facts["build"]
    hidden, on_cpu = shown in ("", "-1", "NoDevFiles"), facts["kind"] == "cpu"
    if on_cpu and hidden:
        yield f"CUDA_VISIBLE_DEVICES is '{shown}', which means the CPU; unset it to use GPUs"
    if on_cpu and gpus and build == "CPU":
        where = "https://pytorch.org/get-started/locally"
        yield f"{gpus} GPUs are here but torch is built for the CPU; install a CUDA build: {where}"
    elif on_cpu and gpus and not hidden:
        what = f"torch for {build} cannot use the {gpus} GPUs with driver {facts['driver']}"
        yield f"{what}; update the driver, take a torch for it, or mend CUDA_VISIBLE_DEVICES"
    free, threads = facts["shm_free_gib"], facts["omp_num_threads"] or ""
    if len(facts["devices"]) > 1 and free is not None and free < 1:
        yield f"/dev/shm has {free} GiB free and NCCL uses it; free 1 GiB (docker: --shm-size=2g)"
    threads = int(threads) if threads.isdecimal() else 1
    if processes > 1 and threads * processes > facts["cores"]:
        what = f"{processes} processes x {threads} threads share {facts['cores']} cores"
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


def show(facts, advice) -> str:
    """Both for the eye: facts, devices, warnings; the command is the last line."""
    f = {name: "none" if value is None else value for name, value in facts.items()}
    shown, devices, count = facts["cuda_visible_devices"], facts["devices"], advice["processes"]
    scale = " with a loss scale" if advice["precision"] == "fp16" else ""
    lines = [
        f"python    {f['python']}, torch {f['torch']} built for {f['build']}",
        f"system    {f['os']}",
        f"cores     {f['cores']}, OMP_NUM_THREADS {facts['omp_num_threads'] or 'not set'}",
        f"memory    {f['memory_gib']} GiB, available {f['memory_available_gib']}",
        f"/dev/shm  {f['shm_gib']} GiB, free {f['shm_free_gib']}",
        f"backends  {', '.join(name for name, has in f['backends'].items() if has) or 'none'}",
        f"driver    {f['driver']}, NCCL {f['nccl']}",
        f"visible   CUDA_VISIBLE_DEVICES {'not set' if shown is None else repr(shown)}",
        f"devices   {len(devices) or 'no GPU, training runs on the CPU'}",
    ]
    wide = max(4, *(len(d["name"]) for d in devices), 0)
    if devices:
        lines.append(f"          {'name':<{wide}}     GiB    free  capability   bf16  units")
    lines += [DEVICE.format(**d, wide=wide) for d in devices]
    lines.append(f"start     {count} process{'es' * (count > 1)}, {advice['precision']}{scale}")
    lines += [f"warning: {sentence}" for sentence in advice["warnings"]]
    return "\n".join([*lines, advice["command"]])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        parser.exit(2, "error: no torch in this environment; ./run_distributed.sh makes one\n")
    import torch

    found = facts(torch)
    advised = advice(found)
    print(json.dumps(found | advised, indent=2) if args.json else show(found, advised))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
