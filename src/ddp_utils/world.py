"""Who am I among how many, and on which device: what the launcher's environment says."""

import contextlib
import os
import re
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_utils import UserError

# How each launcher tells a process its rank, the world size, its rank on the node and how many
# processes the node has. It counts only when the first three are set: people export WORLD_SIZE by
# hand, and the batch step of Slurm has a SLURM_PROCID but no SLURM_STEP_NUM_TASKS. PALS documents
# its ranks but not the size: any of three names will do.
LAUNCHERS = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "pals": "PALS_RANKID PMI_SIZE|PALS_SIZE|WORLD_SIZE PALS_LOCAL_RANKID "
    "PALS_LOCAL_SIZE|LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpiexec": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
}
BINDERS = {"pals", "mpirun", "mpiexec", "srun"}  # may show each process one GPU of its own
BACKENDS = {"nccl": "cuda", "xccl": "xpu", "ccl": "xpu", "gloo": "cpu"}


class World(NamedTuple):
    """One process's place among all of them; the same fields whether there is one or a thousand."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "python"
    device: torch.device = torch.device("cpu")
    backend: str = "none"
    store: object = None  # through which the others were met

    @property
    def is_main(self):
        return self.rank == 0


def whoami(env=os.environ, argv=()) -> World:
    """Read the launcher's environment; nothing is started and no device is touched."""
    for launcher, names in LAUNCHERS.items():
        names = [next(filter(env.get, either.split("|")), "") for either in names.split()]
        if all(names[:3]):
            rank, world_size, local_rank = (_number(env, name) for name in names[:3])
            # Slurm writes "2(x3)": two tasks on each of three nodes
            local = re.match(r"\d+", env.get(names[3], ""))
            local_size = int(local.group()) if local else local_rank + 1
            if launcher == "torchrun":  # accelerate, deepspeed and others set the same names
                launcher = _who_set_rank(env, argv)
            return World(rank, world_size, local_rank, local_size, launcher)
    return World()


def _number(env, name):
    if not env[name].isdecimal():
        raise UserError(f"{name}: '{env[name]}' is not a number; let the launcher set it")
    return int(env[name])


def _who_set_rank(env, argv):
    if "ACCELERATE_MIXED_PRECISION" in env:
        return "accelerate"
    if "CROSS_SIZE" in env:
        return "deepspeed"
    if any(word.startswith("--local-rank") for word in argv):
        return "torch.distributed.launch"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"


def choose_device(world, backend) -> World:
    """Add device and backend: `auto` by what the machine has, anything else to the letter.

    Raises UserError if the backend's device is absent or has fewer units than processes.
    """
    asked = backend
    if backend in ("auto", "xpu", "ccl"):
        kinds = ("cuda", "xpu", "cpu") if backend == "auto" else ("xpu",)
        if backend == "auto" and os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true"):
            kinds = ("cpu",)  # accelerate launch --cpu
        kind = next((kind for kind in kinds if kind == "cpu" or _count(kind)), "xpu")
        backend = {"cuda": "nccl", "xpu": _xpu_backend(backend), "cpu": "gloo"}[kind]
    kind = BACKENDS[backend]
    if kind == "cpu":
        return world._replace(device=torch.device("cpu"), backend=backend)
    index = device_index(world, kind, _count(kind), asked)
    return world._replace(device=torch.device(kind, index), backend=backend)


def device_index(world, kind, count, backend) -> int:
    """Which of this node's `count` devices belongs to this process."""
    if count == 0:
        raise UserError(
            f"--backend {backend} needs a {kind} device, this machine has none; use auto"
        )
    if count == 1 and world.launcher in BINDERS:  # the launcher shows each process its own
        return 0
    if world.local_size > count:
        raise UserError(
            f"{world.local_size} processes on a node with {count} {kind} devices; "
            f"start at most {count} per node"
        )
    return world.local_rank


def _count(kind):
    unit = getattr(torch, kind)
    return unit.device_count() if unit.is_available() else 0


def _xpu_backend(asked):
    """Since torch 2.8 Intel GPUs use xccl; before, ccl, which registers itself when imported.

    Who asks for ccl, as older guides do, gets xccl where torch has no other.
    """
    if asked == "ccl" or not dist.is_xccl_available():
        with contextlib.suppress(ImportError):
            import oneccl_bindings_for_pytorch  # noqa: F401

            return "ccl"
    return "xccl"
