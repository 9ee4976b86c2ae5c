"""Write files for distributed training: settings of DeepSpeed or FSDP, and scripts that start it.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD
    python scripts/distributed_setup.py launcher --num_gpus_per_node 4 --use_deepspeed
    python scripts/distributed_setup.py slurm --num_nodes 4 --num_gpus_per_node 8
    python scripts/distributed_setup.py pbs --num_nodes 2 --account mine --time_limit 02:00:00
    python scripts/distributed_setup.py slurm --script src/main_distributed.py --flags="--beta 0.3"

All flags: `slurm --help`. Everything is checked before anything is written. Exit status: 0 written,
2 wrong input, 4 could not write.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # nothing is installed

from setup_jobs import Launcher, Pbs, Slurm, launcher, pbs, slurm
from setup_settings import DeepSpeed, Fsdp, deepspeed, fsdp, require

from ddp_utils import UserError, cli, data, distributed

HEADER = "# Written by scripts/distributed_setup.py"  # other scripts are not overwritten
COMMANDS: dict[str, tuple] = {  # flags, function, the guide's file name, how to use the file
    "deepspeed": (DeepSpeed, deepspeed, "config/ds_config.json", "src/train.py --deepspeed {}"),
    "fsdp": (Fsdp, fsdp, "config/fsdp_config.json", "fsdp_config: {} in the YAML file"),
    "launcher": (Launcher, launcher, "", "bash {}"),
    "slurm": (Slurm, slurm, "scripts/slurm_job.sh", "sbatch {}"),
    "pbs": (Pbs, pbs, "scripts/pbs_job.sh", "qsub {}"),
}


def write(path: str, text: str, is_script: bool, force: bool) -> None:
    """Write a complete file; do not overwrite files of other programs, unless forced."""
    file = Path(path).expanduser()
    location = f"--output: {path[:80]}"
    try:
        require(file.is_file() or not file.exists(), f"{location} is not a file; use another name")
        old = file.read_bytes().lstrip() if file.exists() and not force else b""
        is_ours = HEADER.encode() in old[:200] if is_script else old[:1] == b"{"
        message = "was not written by this program; use another name, or --force"
        require(not old or is_ours, f"{location} {message}")
        with data.write_file(file) as temporary:
            temporary.write_bytes(os.fsencode(text))
        file.chmod(0o755 if is_script else 0o644)
    except OSError as error:
        wrong_name = UserError(f"{location}: {error.strerror}; use another name")
        is_full_disk = distributed.exit_code(error) == 4
        raise distributed.user_error(error) if is_full_disk else wrong_name from error


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command, *flags = words or [""]
    message = f"COMMAND: {command[:40]!r} is unknown; use one of {', '.join(COMMANDS)}"
    require(command in COMMANDS, message)
    config_class, make, name, use = COMMANDS[command]
    options = cli.parse(config_class, flags)
    options.output = options.output or name
    content = make(options)
    if isinstance(content, str):
        shell, body = content.split("\n", 1)
        written_by = data.CONTROL.sub("?", shlex.join(words))
        text = f"{shell}\n{HEADER}, which overwrites it:\n#     {written_by}\n{body}"
    else:
        text = json.dumps(content, indent=2) + "\n"
    write(options.output, text, isinstance(content, str), options.force)
    print(f"wrote {options.output}; next: {use.format(shlex.quote(options.output))}")
    return 0


if __name__ == "__main__":
    distributed.run(main)
