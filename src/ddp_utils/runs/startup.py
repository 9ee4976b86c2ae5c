"""What comes before torch, whose import takes seconds: streams are open, the launcher is known.

Programs import this module first; it uses the standard library alone. What a launcher has started
must end with it, or a run would outlive a launcher that was killed, and go on writing.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

# Each launcher sets one of these. What a shell starts may outlive it (nohup).
VARIABLES = "TORCHELASTIC_RUN_ID ACCELERATE_MIXED_PRECISION CROSS_SIZE PALS_RANKID PMI_RANK"
VARIABLES += " OMPI_COMM_WORLD_RANK SLURM_STEP_NUM_TASKS"


def open_streams():
    """Open /dev/null for each closed standard stream (`>&-`): a file would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def find_launcher():
    """Return the launcher's process id, None without one, and have Linux end this process with it.

    Ends this process if the launcher is gone already.
    """
    if not any(map(os.environ.get, VARIABLES.split())):
        return None
    parent = os.getppid()
    # The signal comes when the *thread* that has started this process ends. torchrun's waits for
    # it; elsewhere it must be the main one, which lists its children (until it is killed itself).
    children = []
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    is_waited_for = "TORCHELASTIC_RUN_ID" in os.environ or str(os.getpid()) in children
    if is_waited_for and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    # launch.py says who the parent is; elsewhere it may be who adopts orphans, not always 1
    expected = os.environ.pop("LAUNCHER_PID", str(parent))
    if str(os.getppid()) != expected or store_is_gone():
        end(1, "the launcher is gone")
    return parent


def store_is_gone(env=os.environ) -> bool:
    """Whether torchrun, which opens a store on its node before it starts a process, has ended."""
    if (env.get("TORCHELASTIC_USE_AGENT_STORE"), env.get("GROUP_RANK")) != ("True", "0"):
        return False
    try:
        socket.create_connection((env["MASTER_ADDR"], int(env["MASTER_PORT"])), timeout=5).close()
    except OSError as error:  # of any other meet() tells what is wrong
        return isinstance(error, ConnectionRefusedError)
    return False


def end(code, why):
    """End this process at once."""
    print(f"process {os.getpid()} ends: {why}", file=sys.stderr, flush=True)
    os._exit(code)


open_streams()
LAUNCHER = find_launcher()
