"""Where a run runs: command, versions, devices, memory, precision; nothing like a secret."""

import dataclasses
import hashlib
import io
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import time
import tokenize
from importlib import metadata
from pathlib import Path

import torch

from ddp_utils import UserError, dist, records, redact

SRC = records.ROOT / "src"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def describe(config, world) -> dict:
    """What one needs to run it again."""
    git = shutil.which("git")
    command = [git, "-C", str(records.ROOT), "rev-parse", "HEAD"]
    commit = git and subprocess.run(command, capture_output=True, text=True).stdout.strip()
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name: value for name, value in fields.items() if getattr(config, name) != value}
    return {
        "command": redact(shlex.join(sys.orig_argv)),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": device_name(world.device),
        "git_commit": commit or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "peft": metadata.version("peft"),
        },
        "code": code(),
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "pid": os.getpid(),
        "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "defaults": changed,  # of the settings that are others here
    }


def code(script=None) -> dict:
    """Digests of the project's own files that are imported, and of the script that runs.

    script: a module; of what it names, and what that names, alone. Comments and blank lines do not
    count. Keys are paths below src, or the script's name.
    """
    digests = {}
    for module in _named_by(script) if script else list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "")
        is_ours, is_main = SRC in file.parents, getattr(module, "__name__", "") == "__main__"
        if file.suffix == ".py" and (is_ours or is_main):
            name = str(file.relative_to(SRC)) if is_ours else file.name
            digests[name] = _digest_of_code(file)
    return digests


def _named_by(script):
    """The modules of this project whose functions and classes a module names, and so on."""
    modules, waiting = [], [script]
    while waiting:
        module = waiting.pop()
        modules.append(module)
        if hasattr(module, "__path__"):  # a package names all of its modules that are imported
            continue
        for value in vars(module).values():
            name = getattr(value, "__module__", "") or getattr(value, "__name__", "")
            owner = sys.modules.get(str(name))
            is_ours = SRC in Path(getattr(owner, "__file__", None) or "").parents
            if is_ours and owner not in modules + waiting:
                waiting.append(owner)
    return modules


def _digest_of_code(file):
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for line in lines if line.strip()]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def prepare(config):
    """What must be set before the first number is computed: --deterministic."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else CUDA refuses to start
        torch.use_deterministic_algorithms(True)


def precision(config, device):
    """(dtype of the weights that are loaded, dtype of autocast or None).

    Trainable weights are always fp32: at a learning rate of 5e-7 an update of a bf16 weight is
    below half the distance to its neighbour, and 99 % of them would never move.
    """
    # None for auto
    wanted = torch.float32 if config.fine_tuning == "full" else DTYPES.get(config.base_dtype)
    autocast = DTYPES.get(getattr(config, "mixed_precision", "auto"))
    if autocast is None and device.type != "cpu" and config.use_mixed_precision:
        has_bf16 = device.type == "xpu" or torch.cuda.is_bf16_supported(including_emulation=False)
        autocast = torch.bfloat16 if has_bf16 else torch.float16
    if wanted == torch.bfloat16 and config.use_mixed_precision:
        autocast = wanted  # on a CPU that was asked for it
    frozen = torch.bfloat16 if autocast == torch.bfloat16 else torch.float32
    return wanted or frozen, autocast


def check_same_precision(config, world):
    """All ranks must train in one precision: gradients with and without a loss scale do not mix."""
    has_bf16 = precision(config, world.device)[1] == torch.bfloat16
    votes = dist.all_sum(torch.tensor([float(has_bf16)], device=world.device), world).item()
    if 0 < votes < world.world_size:
        raise UserError(
            f"{votes:.0f} of {world.world_size} GPUs have bf16; "
            "give --no_use_mixed_precision, or leave the others out"
        )


def device_name(device):
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
    return getattr(torch, device.type).get_device_name(device)


def redacted(value):
    """Plain data without anything in its texts that looks like a token or a password."""
    if isinstance(value, dict):
        return {redacted(str(key)): redacted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(part) for part in value]
    return redact(value) if isinstance(value, str) else value


def peak_memory_mb(device):
    """Peak memory of this process: allocated on the GPU, resident on a CPU."""
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    return getattr(torch, device.type).max_memory_allocated(device) / 2**20
