"""Where a run runs: command, versions, devices, memory, precision; nothing like a secret."""

import ast
import dataclasses
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from ddp_utils import data

SRC = data.ROOT / "src"
ROOMS = ("ddp_utils/*.py", "ddp_utils/runs/*.py", "ddp_utils/fast/*.py")
ROOMS += ("ddp_utils/sharding/*.py",)
NAME = r"(?:(?:auth|access)?token|(?:api|access|secret)?[_-]?key|secret|passw(?:or)?d|pwd"
NAME += r"|passphrase|credentials?|sig|signature)"
VALUE = r"""(?:"[^"]+"|'[^']+'|[^\s'"]+)"""
SECRETS = {  # what nobody may read in a file or a log -> pattern, and what stays of it
    "token of Hugging Face": r"\bhf_\w{20,}",
    "key of OpenAI or Anthropic": r"(?<![\w-])sk-[\w-]{20,}",
    "key id of AWS": r"\b(?:AKIA|ASIA)\w{12,}",
    "token of GitHub": r"\b(?:gh[oprsu]|github_pat)_\w{20,}",
    "token of GitLab": r"\bglpat-[\w-]{20,}",
    "token of Slack": r"\bxox[a-z]-[\w-]{10,}",
    "key of Google": r"\bAIza[\w-]{30,}",
    "JSON Web Token": r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?",
    "HTTP header": r"(?i:(?P<kept>\bbearer\s+|\bauthorization:\s*\w+\s+))[\w.~+/=-]{8,}",
    "user of a URL": r"(?P<kept>:/{1,2})[^/?#\s'\"]+(?=@)",
    "password before a host": r"(?P<kept>\b[\w.+-]+:)[^\s/@:'\"]+(?=@(?!sha256:)\w)",
    "name=value": rf"(?i:(?<![a-z])(?P<kept>{NAME}=)){VALUE}",
    "JSON": rf"""(?i:(?P<kept>["'](?:[\w-]*[_-])?{NAME}["']\s*:\s*)){VALUE}""",
    "YAML": rf"(?i:(?<![a-z])(?P<kept>(?:passw(?:or)?d|pwd|secret|api[_-]?key):\s+)){VALUE}",
}


def redact(text) -> str:
    """Return the text with `<redacted>` in place of each token and password."""
    for pattern in SECRETS.values():
        text = re.sub(pattern, lambda at: at.groupdict().get("kept", "") + "<redacted>", text)
    return text


def describe(config, world) -> dict:
    """What one needs to run it again."""
    import torch  # takes seconds: redact() does without

    from ddp_utils import metrics

    git = shutil.which("git")
    command = [git, "-C", str(data.ROOT), "rev-parse", "HEAD"]
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


def code() -> dict:
    """Return a digest of each of the project's files that a run may import, and of its script.

    Of ddp_utils all rooms but the tools: some are imported only when the run comes to them.
    Comments and blank lines do not count. Keys are paths below src, or the script's name.
    """
    digests = code_of(*ROOMS)
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "")
        is_ours = SRC in file.parents
        if file.suffix == ".py" and (is_ours or getattr(module, "__name__", "") == "__main__"):
            name = str(file.relative_to(SRC)) if is_ours else file.name
            digests[name] = digest_of_code(file)
    return digests


def code_of(*patterns) -> dict:
    """Return a digest of each file below src that one of these patterns matches."""
    digests = {}
    for pattern in patterns:
        for file in sorted(SRC.glob(pattern)):
            digests[str(file.relative_to(SRC))] = digest_of_code(file)
    return digests


def digest_of_code(file) -> str:
    """Return a digest of the statements in a file of Python."""
    statements = ast.unparse(ast.parse(file.read_text(encoding="utf-8")))
    return hashlib.sha256(statements.encode()).hexdigest()[:16]


def redacted(value):
    """Plain data without anything in its texts that looks like a token or a password."""
    if isinstance(value, dict):
        return {redacted(str(key)): redacted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(part) for part in value]
    return redact(value) if isinstance(value, str) else value
