"""Who am I under each launcher, which device, where to meet: environments in, answers out."""

import sys
from types import ModuleType

import pytest

from ddp_utils import UserError, distributed
from ddp_utils.distributed import World

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM_BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
# environment of one rank -> (rank, world size, local rank, processes on the node, launcher)
LAUNCHED = {
    "nothing": ({}, (0, 1, 0, 1, "python")),
    "torchrun": (TORCHRUN, (3, 4, 1, 2, "torchrun")),
    "accelerate": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, (3, 4, 1, 2, "accelerate")),
    "deepspeed": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"},
        (1, 2, 1, 2, "deepspeed"),
    ),
    "mpich": (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        (1, 4, 1, 4, "mpiexec"),
    ),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        (5, 8, 1, 4, "mpirun"),
    ),
    "pals on Aurora": (
        {
            **{"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12"},
            **{"PMI_RANK": "13", "PMI_SIZE": "24"},
        },
        (13, 24, 1, 12, "pals"),
    ),
    "pals whose size the job script says": (
        {
            **{"PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1"},
            **{"WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "12"},
        },
        (13, 24, 1, 12, "pals"),
    ),
    "srun": (
        SLURM_BATCH
        | {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "0"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
        (2, 6, 0, 2, "srun"),
    ),
    "the batch step of Slurm is no task": (SLURM_BATCH, (0, 1, 0, 1, "python")),
    "WORLD_SIZE exported by hand, as guide 5 does": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        (0, 1, 0, 1, "python"),
    ),
    "torchrun inside a Slurm task": (
        TORCHRUN | SLURM_BATCH | {"SLURM_STEP_NUM_TASKS": "1"},
        (3, 4, 1, 2, "torchrun"),
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_each_launcher_is_read_from_its_own_names(name):
    env, expected = LAUNCHED[name]
    assert distributed.whoami(env)[:5] == expected


def test_torch_distributed_launch_is_told_by_the_argument_that_it_appends():
    assert (
        distributed.whoami(TORCHRUN, ["x.py", "--local-rank=1"]).launcher
        == "torch.distributed.launch"
    )


def test_a_rank_that_is_no_number_is_one_line():
    with pytest.raises(UserError, match="RANK: 'one' is not a number"):
        distributed.whoami(TORCHRUN | {"RANK": "one"})


@pytest.mark.parametrize(
    ("launcher", "local_rank", "local_size", "count", "expected"),
    [
        ("torchrun", 3, 4, 4, 3),
        ("torchrun", 1, 2, 8, 1),
        ("srun", 1, 4, 1, 0),  # --gpus-per-task=1: each task sees one device, its own
        ("srun", 1, 4, 4, 1),
        ("torchrun", 3, 4, 2, "4 processes on a node with 2 cuda devices; start at most 2"),
        ("torchrun", 0, 2, 1, "2 processes on a node with 1 cuda devices; start at most 1"),
        ("torchrun", 0, 1, 0, "--backend nccl needs a cuda device"),
    ],
)
def test_no_two_processes_share_a_gpu_unasked(launcher, local_rank, local_size, count, expected):
    world = World(local_rank, local_size, local_rank, local_size, launcher)
    if isinstance(expected, int):
        assert distributed.device_index(world, "cuda", count, "nccl") == expected
    else:
        with pytest.raises(UserError, match=expected):
            distributed.device_index(world, "cuda", count, "nccl")


@pytest.mark.parametrize(
    ("has", "backend", "expected"),
    [
        ({"cuda": 2}, "auto", ("cuda", "nccl")),
        ({"xpu": 2}, "auto", ("xpu", "xccl")),
        ({}, "auto", ("cpu", "gloo")),
        ({"cuda": 2}, "gloo", ("cpu", "gloo")),
        ({"xpu": 1}, "xpu", ("xpu", "xccl")),
        ({"xpu": 1}, "ccl", ("xpu", "xccl")),  # the older guides' name: torch has its own now
        ({"xpu": 1, "bindings": 1}, "ccl", ("xpu", "ccl")),
        ({"xpu": 1, "bindings": 1}, "auto", ("xpu", "ccl")),  # a torch without xccl, as this one
        ({"cuda": 2}, "xpu", None),  # a GPU backend is never silently replaced
        ({}, "nccl", None),
    ],
)
def test_auto_is_a_look_up_and_anything_else_to_the_letter(has, backend, expected, monkeypatch):
    monkeypatch.setattr("ddp_utils.distributed._count", lambda kind: has.get(kind, 0))
    bindings = ModuleType("oneccl_bindings_for_pytorch") if "bindings" in has else None
    monkeypatch.setitem(sys.modules, "oneccl_bindings_for_pytorch", bindings)
    if expected is None:
        with pytest.raises(UserError, match="needs a"):
            distributed.choose_device(World(), backend)
    else:
        world = distributed.choose_device(World(), backend)
        assert (world.device.type, world.backend) == expected


ONE_NODE = World(1, 4, 1, 4, "mpiexec")
TWO_NODES = World(1, 4, 1, 2, "mpiexec")


@pytest.mark.parametrize(
    ("world", "env", "expected"),
    [
        (TWO_NODES, {"MASTER_ADDR": "n1", "MASTER_PORT": "29501"}, ("n1", 29501)),
        (ONE_NODE, {"SLURM_JOB_ID": "123456"}, ("127.0.0.1", 23456)),
        (ONE_NODE, {"PBS_JOBID": "77.aurora-pbs-01"}, ("127.0.0.1", 20077)),
        (TWO_NODES, {"MASTER_ADDR": "n1", "SLURM_JOB_ID": "5"}, ("n1", 20005)),
        (TWO_NODES, {}, "several nodes; export MASTER_ADDR"),
        (ONE_NODE, {"MASTER_PORT": "99999"}, "MASTER_PORT: '99999' is not a port"),
        (ONE_NODE, {"MASTER_PORT": "http"}, "MASTER_PORT: 'http' is not a port"),
    ],
)
def test_where_to_meet(world, env, expected):
    if isinstance(expected, tuple):
        assert distributed.meeting_point(world, env) == expected
    else:
        with pytest.raises(UserError, match=expected):
            distributed.meeting_point(world, env)


def test_processes_of_one_mpiexec_agree_on_a_port_without_being_told():
    address, port = distributed.meeting_point(ONE_NODE, {})
    assert address == "127.0.0.1"
    assert 20000 <= port < 30000
    assert port == distributed.meeting_point(ONE_NODE._replace(rank=2), {})[1]
