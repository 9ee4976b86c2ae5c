"""Ranks, devices and addresses, from the environment that each launcher sets."""

import os
import time
import zlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ddp_utils import UserError, distributed, user_error
from ddp_utils.distributed import World
from ddp_utils.policy import check_same_precision
from ranks import run_ranks


def env_of(text):
    return dict(word.split("=") for word in text.split())


TORCHRUN = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none "
SLURM_BATCH = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_JOB_ID=7 "
OPENMPI = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
PALS = "PALS_RANKID=13 PALS_LOCAL_RANKID=1 "
SRUN = "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=2(x3)"
UNEVEN = "SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=5,3 "
LAST = "WORLD_SIZE=8 LOCAL_WORLD_SIZE=5 "
# environment of one rank -> (rank, world size, local rank, processes on the node, launcher)
LAUNCHED = {
    "": (0, 1, 0, 1, "python"),
    TORCHRUN: (3, 4, 1, 2, "torchrun"),
    TORCHRUN + "ACCELERATE_MIXED_PRECISION=no": (3, 4, 1, 2, "accelerate"),
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 CROSS_SIZE=1 LOCAL_SIZE=2": (1, 2, 1, 2, "deepspeed"),
    "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4": (1, 4, 1, 4, "mpiexec"),
    OPENMPI + "OMPI_COMM_WORLD_LOCAL_SIZE=4": (5, 8, 1, 4, "mpirun"),
    PALS + "PALS_LOCAL_SIZE=12 PMI_RANK=13 PMI_SIZE=24": (13, 24, 1, 12, "pals"),
    PALS + "WORLD_SIZE=24 LOCAL_WORLD_SIZE=12": (13, 24, 1, 12, "pals"),  # Aurora's job script
    SLURM_BATCH + SRUN: (2, 6, 0, 2, "srun"),
    # nodes with five, three and three tasks; without SLURM_NODEID the first one
    SRUN + " SLURM_STEP_NUM_TASKS=11 SLURM_STEP_TASKS_PER_NODE=5,3(x2) SLURM_NODEID=2": (
        (2, 11, 0, 3, "srun")
    ),
    UNEVEN + "SLURM_NODEID=0 SLURM_PROCID=4 SLURM_LOCALID=4": (4, 8, 4, 5, "srun"),
    UNEVEN + "SLURM_NODEID=1 SLURM_PROCID=7 SLURM_LOCALID=2": (7, 8, 2, 3, "srun"),
    UNEVEN + "SLURM_PROCID=0 SLURM_LOCALID=0": (0, 8, 0, 5, "srun"),
    # `mpiexec -n 8 -ppn 5`, for which Aurora's job script exports 5 on both nodes
    LAST + "PALS_RANKID=4 PALS_LOCAL_RANKID=4": (4, 8, 4, 5, "pals"),
    LAST + "PALS_RANKID=5 PALS_LOCAL_RANKID=0": (5, 8, 0, 3, "pals"),
    LAST + "PALS_RANKID=7 PALS_LOCAL_RANKID=2": (7, 8, 2, 3, "pals"),
    TORCHRUN + "SLURM_NODEID=1": (3, 4, 1, 2, "torchrun"),  # inside a job of Slurm
    SLURM_BATCH: (0, 1, 0, 1, "python"),  # the batch step is no task
    TORCHRUN + SLURM_BATCH + "SLURM_STEP_NUM_TASKS=1": (3, 4, 1, 2, "torchrun"),
    "WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500": (0, 1, 0, 1, "python"),  # guide 5
}


def test_each_launcher_is_read_from_its_own_names():
    for text, expected in LAUNCHED.items():
        assert distributed.whoami(env_of(text))[:5] == expected, text


def test_the_gpus_of_an_uneven_node_are_counted_for_that_node(monkeypatch):
    """Rank 7, the third of the second node, uses the third of its three GPUs."""
    for node, local_rank, rank, count in ((0, 4, 4, 5), (1, 2, 7, 3)):
        monkeypatch.setattr(distributed, "device_count", lambda kind, count=count: count)
        place = f"SLURM_NODEID={node} SLURM_PROCID={rank} SLURM_LOCALID={local_rank}"
        world = distributed.whoami(env_of(UNEVEN + place))
        assert distributed.choose_device(world, "nccl").device.index == local_rank
        assert not world.is_one_node


ONE = "for one process run: unset "
CONTRADICTIONS = {  # environment of a process that is alone -> what is wrong, and the way out
    "RANK=1 WORLD_SIZE=2": f"RANK is set, but LOCAL_RANK is not; export it, or {ONE}RANK",
    "RANK=0": f"RANK is set, but WORLD_SIZE is not; export it, or {ONE}RANK",
    "RANK=5 WORLD_SIZE=1 LOCAL_RANK=0": f"RANK: 5 must be less than WORLD_SIZE, which is 1; {ONE}",
    SRUN + " SLURM_JOB_NAME=bash SLURM_STEP_ID=0 SLURM_PTY_PORT=4": "srun has started 6 shells",
    PALS: "PALS_RANKID is set, but PMI_SIZE or PALS_SIZE or WORLD_SIZE is not; ",
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2": "but OMPI_COMM_WORLD_LOCAL_RANK is not; ",
    "FLUX_JOB_SIZE=4": "FLUX_JOB_SIZE is 4, but no supported launcher has set it; use srun, mpi",
    SRUN + " SLURM_JOB_NAME=bash": f"srun has started 6 shells; {ONE}SLURM_PROCID; for 6 run: srun",
}
ALONE = {  # the same with what the message advises, and what is no contradiction
    "WORLD_SIZE=2 RANK= LOCAL_RANK=0": (0, 1, 0, 1, "python"),
    SRUN + " SLURM_JOB_NAME=bash SLURM_PROCID=": (0, 1, 0, 1, "python"),
    SRUN + " SLURM_JOB_NAME=mine": (2, 6, 0, 2, "srun"),
    SRUN + " SLURM_JOB_NAME=bash SLURM_STEP_ID=1": (2, 6, 0, 2, "srun"),  # srun in that shell
    SRUN + " SLURM_JOB_NAME=bash SLURM_STEP_ID=0": (2, 6, 0, 2, "srun"),  # srun bash -c "..."
    "FLUX_JOB_SIZE=1": (0, 1, 0, 1, "python"),
    "RANK=0 WORLD_SIZE=1": (0, 1, 0, 1, "python"),  # Kubeflow with one worker
    SRUN + " SLURM_JOB_NAME=bash SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1": (0, 1, 0, 1, "srun"),
    OPENMPI + "RANK=5 WORLD_SIZE=8": (5, 8, 1, 2, "mpirun"),  # its user has exported two of three
}


def test_variables_of_processes_that_do_not_exist_are_one_line(monkeypatch):
    for text, message in CONTRADICTIONS.items():
        with pytest.raises(UserError) as error:
            distributed.whoami(env_of(text))
        assert message in str(error.value)
    for text, expected in ALONE.items():
        assert distributed.whoami(env_of(text))[:5] == expected, text
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)  # of any other job
    with pytest.raises(UserError, match="srun has started 6 shells"):
        distributed.whoami(env_of(SRUN + " SLURM_JOB_NAME=mine"))


DEVICES = [  # launcher, local rank, processes of the node, its GPUs -> which is this rank's
    ("torchrun", 3, 4, 4, 3),
    ("torchrun", 1, 2, 8, 1),
    ("srun", 1, 4, 1, 0),  # --gpus-per-task=1: each task sees one device, its own
    ("srun", 1, 4, 4, 1),
    ("torchrun", 3, 4, 2, "4 processes on a node with 2 cuda devices; start at most 2"),
    ("torchrun", 0, 2, 1, "start at most 1 per node, or --backend gloo for processes on the CPU"),
    ("environment", 3, 1, 2, "4 processes on a node with 2 cuda devices"),  # LOCAL_RANK=3
    ("torchrun", 0, 1, 0, "--backend nccl needs a cuda device"),
]


def test_no_two_processes_share_a_gpu(monkeypatch):
    for launcher, local_rank, local_size, count, expected in DEVICES:
        world = World(local_rank, local_size, local_rank, local_size, launcher)
        monkeypatch.setattr(distributed, "device_count", lambda kind, count=count: count)
        if isinstance(expected, int):
            assert distributed.choose_device(world, "nccl").device.index == expected
        else:
            with pytest.raises(UserError, match=expected):
                distributed.choose_device(world, "nccl")


BACKENDS = [  # what the machine has, --backend -> device and backend; None: an error
    ("cuda", "auto", ("cuda", "nccl")),
    ("xpu", "auto", ("xpu", "xccl")),
    ("", "auto", ("cpu", "gloo")),
    ("cuda", "gloo", ("cpu", "gloo")),
    ("xpu", "xpu", ("xpu", "xccl")),
    ("xpu", "ccl", ("xpu", "xccl")),  # the name of Intel's backend before torch had its own
    ("cuda", "xpu", None),  # a GPU backend is never silently replaced
    ("", "nccl", None),
]


def test_auto_selects_the_best_device_and_no_backend_is_replaced(monkeypatch):
    for has, backend, expected in BACKENDS:
        monkeypatch.setattr(distributed, "device_count", lambda kind, has=has: 2 * (kind == has))
        if expected is None:
            with pytest.raises(UserError, match="this machine has none"):
                distributed.choose_device(World(), backend)
        else:
            world = distributed.choose_device(World(), backend)
            assert (world.device.type, world.backend) == expected


def raised(answer):
    """Return a value, or raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


DRIVER = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU"


@pytest.mark.parametrize("kept", ["", "no CUDA", "no GPU", "hidden", "denied", "gloo", "others"])
def test_a_gpu_that_pytorch_cannot_use_is_an_error(kept, monkeypatch, tmp_path):
    """With PyTorch for CUDA 13 and an older driver, is_available() is only False."""
    for number in (0, 3):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(distributed, "device_count", lambda kind: 0)
    monkeypatch.setattr(torch.version, "cuda", None if kept == "no CUDA" else "13.0")
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=RuntimeError(DRIVER)))
    files = tmp_path / ("none" if kept == "no GPU" else "nvidia[0-9]*")
    monkeypatch.setattr(distributed, "NVIDIA_GPUS", str(files))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if kept == "denied":  # as Slurm does for a job without a GPU; root may open any file
        monkeypatch.setattr(distributed.os, "open", mock.Mock(side_effect=PermissionError))
    if kept == "others":  # of other jobs; this one has the last GPU
        answers = {str(tmp_path / "nvidia0"): PermissionError(), str(tmp_path / "nvidia3"): 0}
        opened = mock.Mock(side_effect=lambda path, _: raised(answers[path]))
        monkeypatch.setattr(distributed.os, "open", opened)
        monkeypatch.setattr(distributed.os, "close", lambda _: None)
    if kept == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if kept not in ("", "others"):
        backend = "gloo" if kept == "gloo" else "auto"
        assert distributed.choose_device(World(), backend).device.type == "cpu"
        return
    with pytest.raises(UserError, match=r"cannot use it: .* too old .*12020.*; update"):
        distributed.choose_device(World())


def test_ranks_that_the_user_exports_keep_the_gpu_that_srun_shows_them(monkeypatch):
    """srun --gpus-per-task=1 bash -c 'export RANK=$SLURM_PROCID ...; exec python ...'."""
    monkeypatch.setattr(distributed, "device_count", {"cuda": 1}.get)
    world = World(1, 2, 1, 2, "environment")
    with pytest.raises(UserError, match="2 processes on a node with 1 cuda devices"):
        distributed.choose_device(world)
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(UserError, match="2 processes on a node with 1 cuda devices"):
        distributed.choose_device(world)  # in a batch script, without srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert distributed.choose_device(world).device == torch.device("cuda", 0)


@pytest.mark.parametrize(("local_size", "seconds"), [(2, 50), (1, 600)])
def test_ranks_of_another_node_may_start_ten_minutes_later(local_size, seconds, monkeypatch):
    """Cold imports from a file system of a cluster take that long; torch itself waits 300 s."""
    store = mock.Mock()
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    monkeypatch.setattr(torch.distributed, "PrefixStore", mock.Mock())
    monkeypatch.delenv("DDP_JOIN_SECONDS", raising=False)
    distributed._open_store(World(1, 2, local_size - 1, local_size, "srun"), "n1", 29500)
    assert store.call_args.kwargs["timeout"].total_seconds() == seconds


@pytest.mark.parametrize("own", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_a_gpu_grows_in_segments_unless_the_user_says_otherwise(own, monkeypatch):
    monkeypatch.setattr(distributed, "device_count", lambda kind: kind == "cuda")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        if name != own:
            monkeypatch.delenv(name)
    distributed.choose_device(World())
    names = {"": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    assert os.environ.get("PYTORCH_ALLOC_CONF") == names.get(own)


def test_memory_of_an_intel_gpu_does_not_grow_in_segments(monkeypatch):
    """There, collectives can fail with it."""
    monkeypatch.setattr(distributed, "device_count", lambda kind: kind == "xpu")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.choose_device(World()).device.type == "xpu"
    assert "PYTORCH_ALLOC_CONF" not in os.environ


NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:94, invalid usage
(run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
"""


def test_the_reason_that_nccl_writes_last_is_printed(monkeypatch):
    world = World(1, 2, 1, 2, "torchrun", torch.device("cpu"), "nccl")
    monkeypatch.setattr(distributed, "choose_device", lambda *_: world)
    monkeypatch.setattr(distributed, "_store", None)  # and again after this test
    monkeypatch.setattr(distributed, "_open_store", lambda *_: mock.Mock())
    failing = mock.Mock(side_effect=RuntimeError(NCCL))
    monkeypatch.setattr(torch.distributed, "init_process_group", failing)
    with pytest.raises(UserError) as caught:
        distributed.init_process_group(world)
    line = "rank 1: nccl: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000; "
    assert str(caught.value) == f"{line}for more about it export NCCL_DEBUG=INFO"


ONE_NODE = World(1, 4, 1, 4, "mpiexec")
TWO_NODES = World(1, 4, 1, 2, "mpiexec")
PARENT = 20000 + os.getppid() % 10000  # the same on all ranks of one mpiexec
MEET = [  # the processes, their environment -> address and port of rank 0, or the error
    (TWO_NODES, "MASTER_ADDR=n1 MASTER_PORT=29501", ("n1", 29501)),
    (TWO_NODES, "MASTER_ADDR=n1", ("n1", 29500)),
    (ONE_NODE, "", ("127.0.0.1", PARENT)),
    # each task may be a wrapper, so that the parents differ
    (
        ONE_NODE._replace(launcher="srun"),
        "SLURM_JOB_ID=71234 SLURM_STEP_ID=5",
        ("127.0.0.1", 20000 + zlib.crc32(b"71234.5") % 10000),
    ),
    (TWO_NODES, "", "MASTER_ADDR: not set; export the host of rank 0"),
    (ONE_NODE, "MASTER_PORT=99999", "MASTER_PORT: '99999' must be a whole number from 1"),
    (ONE_NODE, "MASTER_PORT=http", "MASTER_PORT: 'http' must be a whole number"),
]


def test_attention_on_a_gpu_does_not_use_cudnn_which_plans_each_new_shape(monkeypatch):
    monkeypatch.setattr(distributed, "device_count", lambda kind: kind == "cuda")
    torch.backends.cuda.enable_cudnn_sdp(True)
    distributed.choose_device(World())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_where_the_ranks_meet():
    for world, text, expected in MEET:
        if isinstance(expected, tuple):
            assert distributed.meeting_point(world, env_of(text)) == expected
        else:
            with pytest.raises(UserError, match=expected):
                distributed.meeting_point(world, env_of(text))


def compute_in(*dtypes):
    world = distributed.init_process_group(distributed.whoami(), "gloo")
    check_same_precision(dtypes[world.rank], world)


def test_gpus_with_and_without_bf16_are_one_line():
    outcome = run_ranks(2, compute_in, torch.bfloat16, torch.float16)
    line = "error: mixed precision: 1 of 2 GPUs support bf16 (expected all or none); "
    assert outcome.codes == [2, 2]
    assert "".join(outcome.logs) == line + "use GPUs of one kind, or turn it off\n"
    assert run_ranks(2, compute_in, torch.bfloat16, torch.bfloat16).codes == [0, 0]


def test_the_line_of_a_node_has_its_number_by_rank():
    """Three nodes with 5, 3 and 2 processes, which have joined in another order."""
    names = ["8@c", "0@a", "5@b"]
    lines = [distributed.joined(World(rank, 10, 0, size), names) for rank, size in ((5, 3), (8, 2))]
    assert lines == [
        "Node 1 of 3 joined: 3 processes; the log is printed by node 0 (a)",
        "Node 2 of 3 joined: 2 processes; the log is printed by node 0 (a)",
    ]


# --- the end of a job ----------------------------------------------------------------------------


ENDINGS = {  # environment, seconds since this process started, of the last save -> must it stop?
    ("", 2000, 0): False,
    ("SLURM_JOB_END_TIME=11000", 2000, 0): False,
    ("SLURM_JOB_END_TIME=11000", 2000, 490): False,
    ("SLURM_JOB_END_TIME=11000", 2000, 510): True,  # twice as long as what is left
    ("SLURM_JOB_END_TIME=10110", 2000, 0): True,
    ("SLURM_JOB_END_TIME=10110", 60, 0): False,  # 110 s of 170: more than half of the job
    ("SLURM_JOB_END_TIME=10080", 90, 0): True,
    ("SLURM_JOB_END_TIME=11000 DDP_SAVE_SECONDS=1100", 2000, 0): True,
    ("SLURM_JOB_END_TIME=11000 DDP_JOB_END=10110", 2000, 0): True,
    ("SLURM_JOB_END_TIME=7000", 2000, 0): False,  # of an earlier job
    ("SLURM_JOB_END_TIME=Unknown", 2000, 0): False,
}


@pytest.mark.parametrize(("text", "age", "save"), ENDINGS)
def test_a_run_stops_so_early_that_it_can_save_before_its_job_ends(text, age, save, monkeypatch):
    clock = SimpleNamespace(time=lambda: 10000.0, monotonic=lambda: 500.0)
    monkeypatch.setattr(distributed, "time", clock)
    monkeypatch.setattr(distributed, "_started", 500.0 - age)
    with mock.patch.dict(os.environ, env_of(text), clear=True):
        assert distributed.stop_requested(last_save=save) == ENDINGS[text, age, save]


def since_start():
    return time.monotonic() - distributed._started


def test_the_time_of_a_rank_begins_with_its_process():
    run_ranks(1, float)  # the fork server is older than the next rank
    outcome = run_ranks(1, since_start)
    assert 0 <= outcome.results[0] <= outcome.seconds


ASK = "; see in nvidia-smi or xpu-smi whether another program uses it; otherwise use a smaller "
ASK += "batch size or max_length, gradient checkpointing, or more GPUs; --debug shows where it "
FULL = {  # message, shortened -> what is printed of it; the second is that of an H100
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 1.02 GiB is free. Process 7 has 78.15 GiB memory in use. Of the allocated memory 77.00 "
    "GiB is allocated by PyTorch": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 79.18 GiB of which 1.02 GiB is free",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "CUDA error: "
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously": "CUDA error: out of "
    "memory",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)": "level_zero "
    "backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
}


@pytest.mark.parametrize("text", FULL)
def test_a_device_without_memory_costs_one_line(text):
    known = user_error(RuntimeError(text))
    assert isinstance(known, UserError) and str(known) == f"{FULL[text]}{ASK}happened"
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert user_error(other) is other
