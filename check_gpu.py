"""Show the hardware for training, warnings with their fixes, and the command to start with.

    python check_gpu.py            # a few lines; the last one is the command
    python check_gpu.py --json     # the same as one JSON object
    python check_gpu.py --bench    # also measure the first device: compute and copies
    torchrun --standalone --nproc_per_node=8 check_gpu.py --bench   # all devices, and all-reduce
    python check_gpu.py --plan config.yaml --gpus 8 --gpu_memory 80   # does this run fit?
    $(python check_gpu.py | tail -n 1)                 # start training with that command
    CUDA_VISIBLE_DEVICES=0,1 python check_gpu.py       # only these two GPUs

Devices are selected as in training: CUDA_VISIBLE_DEVICES is respected, CUDA has priority over XPU.
Facts and advice are about the node of rank 0. Exit status: 0 whatever the hardware; 2 for a wrong
flag, an environment without torch, or processes that cannot connect.
"""

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if importlib.util.find_spec("torch") is None:
    own = Path(__file__).resolve().with_name(".venv") / "bin/activate"
    fix = f"run: . '{own}'" if own.exists() else "./run_distributed.sh makes one"
    print(f"error: no torch in this environment; {fix}", file=sys.stderr)
    raise SystemExit(2)

import torch
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # may not be installed

from ddp_utils import UserError, cli, cpus, distributed, policy  # noqa: E402

GIB = 2**30
DRIVER, PCI = "/proc/driver/nvidia", "/sys/bus/pci/devices"  # where Linux lists NVIDIA GPUs
SETTINGS = ("CUDA_", "NCCL_", "GLOO_", "TORCH_DISTRIBUTED_", "OMP_")  # prefixes of variables
RATES = ("bf16_tflops", "fp32_tflops", "host_gb_per_s")
# of x86-64, then of ARM
INSTRUCTIONS = ("sse4_2", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def collect_facts(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the hardware and software of this machine. Memory is in GiB; None is unknown."""
    kind = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
    group = torch.distributed
    backends = [n for n in ("gloo", "nccl", "xccl") if getattr(group, f"is_{n}_available")()]
    has_nccl = kind == "cuda" and "nccl" in backends
    shm = Path("/dev/shm")
    cpu, flags = policy.cpu_info()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu": cpu,
        "cpu_instructions": " ".join(name for name in INSTRUCTIONS if name in flags) or "unknown",
        "cpu_fast_dtypes": "fp32, bf16" if policy.is_bf16_fast() else "fp32",
        "cores": cpus(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 2),
        "shm_free_gib": round(shutil.disk_usage(shm).free / GIB, 2) if shm.exists() else None,
        "settings": [f"{name}={env[name]}" for name in env if name.startswith(SETTINGS)],
        "backends": backends,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        **nvidia_facts(),
        "kind": kind,
        "devices": [] if kind == "cpu" else describe_devices(getattr(torch, kind)),
    }


def describe_devices(module: Any) -> list[dict[str, Any]]:
    """Return the properties of each device of module, which is torch.cuda or torch.xpu."""
    devices = []
    for index in range(module.device_count()):
        free, total = (round(size / GIB, 2) for size in module.mem_get_info(index))
        with module.device(index):  # is_bf16_supported() is about the current device
            bf16 = bool(module.is_bf16_supported(including_emulation=False))
        device = {"index": index, "name": module.get_device_properties(index).name}
        devices.append(device | {"memory_gib": total, "memory_free_gib": free, "bf16": bf16})
    return devices


def nvidia_facts(proc: str = DRIVER, pci: str = PCI) -> dict[str, Any]:
    """Return the driver, the NVIDIA GPUs in this machine, and why torch cannot use them."""
    version = Path(proc, "version")
    driver = re.search(r"\d+\.[\d.]+", version.read_text()) if version.exists() else None
    displays = [file for file in Path(pci).glob("*/class") if file.read_text().startswith("0x03")]
    gpus = sum(file.with_name("vendor").read_text() == "0x10de\n" for file in displays)
    problem = None
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
    return {"driver": driver and driver[0], "nvidia_gpus": gpus, "cuda_error": problem}


def advise(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the number of processes, the precision, the warnings and the command."""
    devices = facts["devices"]
    processes = len(devices) or min(2, facts["cores"])
    has_bf16 = all(device["bf16"] for device in devices)
    return {
        "processes": processes,
        "precision": "fp32" if not devices else "bf16" if has_bf16 else "fp16",
        "warnings": list(warnings_of(facts, processes)),
        "command": f"./run_distributed.sh {processes}",
    }


def warnings_of(facts: dict[str, Any], processes: int) -> Iterator[str]:
    """Yield a warning for each problem of GPUs, cores and shared memory, with its fix."""
    if facts["kind"] == "cpu" and facts["nvidia_gpus"]:
        fix = "check CUDA_VISIBLE_DEVICES and the driver, request GPUs (docker: --gpus all)"
        yield f"{facts['nvidia_gpus']} NVIDIA GPUs are not used: {facts['cuda_error']}; {fix}"
    for device in facts["devices"]:
        gpu, free, total = f"GPU {device['index']}", device["memory_free_gib"], device["memory_gib"]
        if " MIG " in device["name"]:
            yield f"{gpu} is a MIG slice; NCCL cannot connect slices; to undo it: nvidia-smi -mig 0"
        if device["bf16"] != facts["devices"][0]["bf16"]:
            fix = "let CUDA_VISIBLE_DEVICES name GPUs of one kind"
            yield f"{gpu} and GPU 0: only one of them supports bf16, so a run is an error; {fix}"
        if free < 0.9 * total:
            fix = "stop other programs on it, lower batch_size, or do not use it"
            yield f"{free} of {total} GiB are free on {gpu}; {fix}"
    if facts["cores"] < processes:
        yield f"{processes} processes share {facts['cores']} cores; request one core for each"
    free = facts["shm_free_gib"]
    if len(facts["devices"]) > 1 and free is not None and free < 1:
        yield f"/dev/shm has {free} GiB free, NCCL needs it; free 1 GiB (docker: --shm-size=2g)"


def show(facts: dict[str, Any]) -> str:
    """Return a line for each fact, device, rate and warning; the last line is the command."""
    lines = []
    hidden = {"command", "cuda_error"} if facts["nvidia_gpus"] == 0 else {"command"}
    for name, value in facts.items():
        if name in hidden:
            continue
        for row in value if isinstance(value, list) else [value]:
            text = row if isinstance(row, str) else "none" if row is None else json.dumps(row)
            lines.append(f"{name:<20}  {text}")
    return "\n".join([*lines, facts["command"]])


# --- speed ---------------------------------------------------------------------------------------


def bench(world: distributed.World) -> dict[str, Any]:
    """Measure the device of each rank, and with several ranks all-reduces."""
    ranks = world.world_size
    table = torch.zeros(ranks, len(RATES), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(device_rates(world.device))
    rows = distributed.all_sum(table, world).round(decimals=6).tolist()
    all_reduces = []
    for size in (2**20, 2**24, 2**27) if ranks > 1 else ():
        block = torch.zeros(size // 4, device=world.device)
        seconds = seconds_of(partial(distributed.all_sum, block, world))
        bus = size / seconds / 1e9 * 2 * (ranks - 1) / ranks  # GB/s of each link
        row = {"mib": size >> 20, "ms": round(1000 * seconds, 2), "bus_gb_per_s": round(bus, 2)}
        all_reduces.append(row)
    rates = [dict(zip(RATES, row, strict=True)) for row in rows]
    return {"ranks": ranks, "rates": rates, "all_reduces": all_reduces}


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of work() on the device, the mean of seven calls."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.timeit(7).mean


def device_rates(device: torch.device) -> list[float]:
    """Return the RATES of a device: matrix products in bf16 and in fp32, a copy from the host."""
    side = 512 if device.type == "cpu" else 8192
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        rates.append(2 * side**3 / seconds_of(partial(torch.mm, matrix, matrix)) / 1e12)
    block = torch.ones(2**26, pin_memory=device.type == "cuda")
    copy = torch.empty(2**26, device=device)
    return [*rates, block.nbytes / seconds_of(partial(copy.copy_, block)) / 1e9]


# --- memory of a run ------------------------------------------------------------------------------


def plan_of(path: str, world: distributed.World) -> Any:
    """Return the memory_plan.Plan of a YAML file: of train.py if it has its sections, else of DPO.

    Raises UserError for mistakes in the file, and for 4-bit weights.
    """
    import config as dpo_settings
    import main_distributed as dpo
    import train as sft
    import train_config as sft_settings
    from ddp_utils import yaml_config
    from lm import memory_plan
    from lm.chat_template import Encoder

    # fine_tuning is a section of train.py, and a setting of main_distributed.py
    content = yaml_config.load(path)
    is_sft = any(isinstance(content.get(name), dict) for name in sft_settings.SECTIONS)
    script: Any = sft if is_sft else dpo
    config: Any = (sft_settings if is_sft else dpo_settings).read(["--config", path])
    if config.in_4_bits:
        raise UserError(f"{path}: 4-bit weights cannot be planned; plan a LoRA on bf16 weights")
    encoder = Encoder.of(config, needs_weights=False)
    rows = script.read_data(config, encoder, world)[0]["train"]
    if is_sft:
        return memory_plan.Plan(
            config,
            sft.precision_of(config, memory_plan.GPU),
            rows,
            config.micro_batch_size,
            lambda scorer, batch, _reference, pairs: sft.loss_of(scorer, batch),
        )
    return memory_plan.Plan(
        config,
        dpo.precision_of(config, memory_plan.GPU),
        rows,
        dpo.micro_batch_size(config, world),
        partial(dpo.loss_of, config=config),
        config.method not in cli.REFERENCE_FREE,
    )


# --- main ----------------------------------------------------------------------------------------


@dataclass
class Options:
    # output
    json: bool = False  # one JSON object
    bench: bool = False  # measure compute, copy, all-reduce
    # does a run fit?
    plan: str = ""  # YAML file of the run
    gpus: int | None = None  # number of GPUs; None: those of this machine
    gpu_memory: float | None = None  # memory of a GPU in GiB; None: that of this machine
    # errors
    debug: bool = False  # show a traceback for user errors


def read(argv: Sequence[str] | None = None) -> Options:
    """Return the flags; raise UserError for a wrong one, or for two that exclude each other."""
    options = cli.parse(Options, argv)
    cli.check_ranges(options, gpus=cli.ABOVE_0, gpu_memory=cli.ABOVE_0)
    if options.plan and (options.json or options.bench):
        raise UserError("--plan: use it without --json and --bench")
    for name in ("gpus", "gpu_memory"):
        if getattr(options, name) is not None and not options.plan:
            raise UserError(f"--{name}: it needs --plan FILE")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = read(argv)
    world = distributed.whoami()
    facts = collect_facts() if world.is_main else {}
    if options.bench:
        world = distributed.init_process_group(world, timeout_minutes=5)
        facts |= bench(world)
    if not world.is_main:
        return 0
    if options.plan:
        os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported: no downloads
        from lm import memory_plan

        machine = memory_plan.machine(facts, options.gpus, options.gpu_memory)
        plan = plan_of(
            options.plan, distributed.World(world_size=machine[0], local_size=machine[0])
        )
        print(*memory_plan.lines(plan, options.plan, *machine), sep="\n")
        return 0
    facts |= advise(facts)
    print(json.dumps(facts, indent=2) if options.json else show(facts))
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
