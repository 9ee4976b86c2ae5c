"""Where a run runs: command, versions, devices, memory, precision; nothing like a secret."""

import dataclasses
import hashlib
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import tokenize
from importlib import metadata
from pathlib import Path

import torch

from ddp_utils import jsonl, metrics, redact

SRC = jsonl.ROOT / "src"


def describe(config, world) -> dict:
    """What one needs to run it again."""
    git = shutil.which("git")
    command = [git, "-C", str(jsonl.ROOT), "rev-parse", "HEAD"]
    commit = git and subprocess.run(command, capture_output=True, text=True).stdout.strip()
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    changed = {name: value for name, value in fields.items() if getattr(config, name) != value}
    return {
        "command": redact(shlex.join(sys.orig_argv)),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": metrics.device_name(world.device),
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


def redacted(value):
    """Plain data without anything in its texts that looks like a token or a password."""
    if isinstance(value, dict):
        return {redacted(str(key)): redacted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(part) for part in value]
    return redact(value) if isinstance(value, str) else value
