"""Write what distributed training needs: DeepSpeed or FSDP settings, and the script that starts it.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD
    python scripts/distributed_setup.py launcher --num_gpus_per_node 4 --use_deepspeed
    python scripts/distributed_setup.py slurm --num_nodes 4 --num_gpus_per_node 8
    python scripts/distributed_setup.py pbs --num_nodes 2 --account mine --time_limit 02:00:00

All flags: `slurm --help`. Everything is checked before anything is written, and a file appears
whole or not at all. Exit status: 0 written, 2 wrong input, 4 could not write.
"""

import json
import os
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # nothing is installed

from setup_jobs import Launcher, Pbs, Slurm, launcher, pbs, slurm
from setup_settings import DeepSpeed, Fsdp, deepspeed, fsdp, refuse

from ddp_utils import UserError, cli, data, distributed

MARK = "# Written by scripts/distributed_setup.py"  # a script without it is someone else's
COMMANDS = {  # flags, maker, the guide's name, what to do with the file
    "deepspeed": (DeepSpeed, deepspeed, "config/ds_config.json", "src/train.py --deepspeed {}"),
    "fsdp": (Fsdp, fsdp, "config/fsdp_config.json", "fsdp_config: {} in the YAML file"),
    "launcher": (Launcher, launcher, "", "bash {}"),
    "slurm": (Slurm, slurm, "scripts/slurm_job.sh", "sbatch {}"),
    "pbs": (Pbs, pbs, "scripts/pbs_job.sh", "qsub {}"),
}


def write(path, text, is_script, force):
    """Put a whole file in its place; what someone else wrote there stays, unless forced."""
    file = Path(path).expanduser()
    location = f"--output: {path[:80]}"
    try:
        is_other = file.exists() and not file.is_file()
        refuse(is_other, f"{location} is not a regular file; give another name")
        held = file.read_bytes().lstrip() if file.exists() and not force else b""
        ours = MARK.encode() in held[:200] if is_script else held[:1] == b"{"
        says = "holds what this program did not write; give another name, or --force"
        refuse(held and not ours, f"{location} {says}")
        with data.write_file(file) as temporary:  # a reader never sees half a file
            temporary.write_bytes(os.fsencode(text))
            temporary.chmod(0o755 if is_script else 0o644)
    except OSError as error:
        wrong = UserError(f"{location}: {error.strerror}; give another name")
        raise distributed.write_error(error) or wrong from error


def main(argv=None):
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    command, *rest = words or [""]
    says = f"COMMAND: {command[:40]!r} is not known; give one of {', '.join(COMMANDS)}"
    refuse(command not in COMMANDS, says)
    flags, make, name, use = COMMANDS[command]
    options = cli.parse(flags, rest, command=command)
    options.output = options.output or name
    made = make(options)
    if isinstance(made, str):
        shell, body = made.split("\n", 1)
        made_by = data.CONTROL.sub("?", shlex.join(words))
        text = f"{shell}\n{MARK}, which overwrites it:\n#     {made_by}\n{body}"
    else:
        text = json.dumps(made, indent=2) + "\n"
    write(options.output, text, isinstance(made, str), options.force)
    print(f"wrote {options.output}; next: {use.format(shlex.quote(options.output))}")
    return 0


if __name__ == "__main__":
    distributed.run(main)
