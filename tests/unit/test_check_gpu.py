"""check_gpu.py and machine.py: for real on this machine; on fakes of torch, of nvidia-smi and of
/proc and /sys for machines that are not here."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from fnmatch import fnmatchcase as fnmatch
from types import SimpleNamespace as Fake

import pytest
import torch

import check_gpu
from conftest import ROOT
from ddp_utils import UserError, dist
from ddp_utils import machine as host
from ddp_utils.world import World

GIB = 2**30
NVIDIA = host.nvidia  # the real one; most tests put another in its place
ROOMY = {  # a host that gives no cause for warnings
    "cores": 64,
    "cpu_limit": None,
    "memory_gib": 512.0,
    "memory_limit_gib": None,
    "shm_free_gib": 32.0,
    "results_free_gib": 900.0,
    "open_files": [2**20, 2**20],
    "forks": None,
    "locked_memory": None,
    "interfaces": ["eth0", "eth1", "lo"],
    "infiniband": [],
}
H100 = Fake(name="H100", total=80, free=79, capability=(9, 0), units=132)
A100 = Fake(name="A100", total=40, free=39.5, capability=(8, 0), units=108)
T4 = Fake(name="T4", total=15, free=14.5, capability=(7, 5), units=40)
TILE = Fake(name="Data Center GPU Max 1550", total=64, free=63, capability=None, units=448)


class Unit:
    """torch.cuda or torch.xpu of a machine with these devices."""

    def __init__(self, devices=(), strangers=()):
        self.devices, self.strangers, self.current = devices, strangers, 0
        self.nccl = Fake(version=lambda: (2, 27, 5))

    def is_available(self):
        return bool(self.devices)

    def device_count(self):
        return len(self.devices)

    def get_device_properties(self, index):
        has = self.devices[index]
        if has.capability is None:
            return Fake(name=has.name, max_compute_units=has.units, driver_version="1.6.3")
        major, minor = has.capability
        own = {"name": has.name, "uuid": f"uuid-{index}", "multi_processor_count": has.units}
        return Fake(**own, major=major, minor=minor)

    def mem_get_info(self, index):
        return self.devices[index].free * GIB, self.devices[index].total * GIB

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before

    def is_bf16_supported(self, including_emulation=True):
        capability = self.devices[self.current].capability
        return including_emulation or capability is None or capability >= (8, 0)

    def can_device_access_peer(self, one, other):
        assert one != other  # CUDA refuses the question
        return one not in self.strangers and other not in self.strangers


def machine(cuda=(), xpu=(), env=None, strangers=(), build="cuda", backends=("gloo", "nccl")):
    """(facts, advice) of check_gpu.py for a machine with these devices."""
    versions = {"cuda": "13.0", "xpu": "2025.3", "cpu": None}
    torch = Fake(
        __version__="2.13.0",
        version=Fake(**{"cuda": None, "hip": None, "xpu": None, build: versions[build]}),
        cuda=Unit(cuda, strangers),
        xpu=Unit(xpu),
        distributed=Fake(
            is_available=lambda: True,
            is_gloo_available=lambda: "gloo" in backends,
            is_nccl_available=lambda: "nccl" in backends,
            is_xccl_available=lambda: "xccl" in backends,
        ),
    )
    found = check_gpu.facts(torch, env or {}) | ROOMY
    return found, check_gpu.advice(found)


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    """What nvidia-smi tells on a machine without one; a test may put other facts in."""
    found = {"driver": None, "nvidia_gpus": 0, "nvidia_smi": "", "links": {}, "mig": {}}
    found["users"] = {}
    monkeypatch.setattr(host, "nvidia", lambda: dict(found))
    return found


def four(nvidia, driver="580.95"):
    nvidia.update(driver=driver, nvidia_gpus=4)


def last_line(found, advised):
    return check_gpu.show(found, advised).splitlines()[-1]


def run(*words, **env):
    command = [sys.executable, *words]
    env = os.environ | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_on_this_machine_the_last_line_is_the_command_of_the_json():
    """In a process, which loads neither transformers nor a script."""
    code = "import sys, check_gpu as gpu; gpu.main(['--json']); print('and'); gpu.main([]); "
    code += "print(*sys.modules, file=sys.stderr)"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    data, text = done.stdout.split("\nand\n")
    told = json.loads(data)
    assert {"python", "torch", "build", "os", "cores", "memory_gib", "shm_gib"} <= set(told)
    assert {"backends", "driver", "nccl", "devices", "peer_access", "warnings"} <= set(told)
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["command"].startswith(f"./run_distributed.sh {told['processes']}")
    assert text.splitlines()[-1] == told["command"]
    assert text.isascii() and "\x1b" not in text
    loaded = set(done.stderr.split())
    assert "torch" in loaded
    assert not loaded & {"transformers", "peft", "config", "ddp_utils.speed"}


def test_without_a_gpu_it_advises_two_cpu_processes_or_one_on_one_core():
    found, advised = machine(build="cpu", backends=["gloo"])
    assert (found["kind"], found["build"], found["devices"]) == ("cpu", "CPU", [])
    assert advised == {
        "processes": 2,
        "cores_each": 32,
        "precision": "fp32",
        "warnings": [],
        "command": "./run_distributed.sh 2",
    }
    assert "no GPU, training runs on the CPU" in check_gpu.show(found, advised)
    assert check_gpu.advice(found | {"cores": 1})["command"] == "./run_distributed.sh 1"


def test_four_equal_gpus_take_four_processes_in_bf16(nvidia):
    four(nvidia)
    found, advised = machine([H100] * 4)
    assert (found["driver"], found["nccl"], found["build"]) == ("580.95", "2.27.5", "CUDA 13.0")
    assert found["peer_access"] == [[True] * 4] * 4
    assert found["devices"][3] == {
        "index": 3,
        "name": "H100",
        "uuid": "uuid-3",
        "memory_gib": 80.0,
        "memory_free_gib": 79.0,
        "compute_capability": "9.0",
        "bf16": True,
        "units": 132,
    }
    assert (advised["processes"], advised["precision"]) == (4, "bf16")
    assert advised["warnings"] == []
    assert last_line(found, advised) == "./run_distributed.sh 4"


def test_gpus_of_two_kinds_train_in_the_precision_that_all_have():
    _, advised = machine([A100, A100, T4], env={"CUDA_VISIBLE_DEVICES": "2,5,7"})
    assert (advised["processes"], advised["precision"]) == (3, "fp32")
    assert advised["command"] == "./run_distributed.sh 3 --no_use_mixed_precision"
    precision, kinds = advised["warnings"]
    assert precision.startswith("no bf16 on GPU 2, ")
    # numbered as the user numbers them
    assert precision.endswith("; without GPU 2: export CUDA_VISIBLE_DEVICES=2,5")
    assert kinds.startswith("the devices differ: A100 (40 GiB), T4 (15 GiB); ")


def test_a_gpu_that_another_process_uses_is_named_with_a_way_around_it(nvidia):
    busy = Fake(**vars(H100) | {"free": 71.5})  # nine tenths of 80 are 72
    almost = Fake(**vars(H100) | {"free": 72.5})
    assert machine([H100, almost])[1]["warnings"] == []
    (warning,) = machine([H100, busy, H100])[1]["warnings"]
    assert warning.startswith("free on GPU 1: 71.5 of 80.0 GiB; nvidia-smi shows")
    assert warning.endswith("export CUDA_VISIBLE_DEVICES=0,2")
    (warning,) = machine([busy])[1]["warnings"]  # none is left to go to
    assert "CUDA_VISIBLE_DEVICES" not in warning
    nvidia["users"] = {"uuid-0": ["pid 7 1.0 GiB"], "uuid-1": ["pid 8 6.0 GiB", "pid 9"]}
    (warning,) = machine([H100, busy, H100])[1]["warnings"]
    assert "71.5 of 80.0 GiB; used by pid 8 6.0 GiB, pid 9: stop it" in warning


def test_a_gpu_without_peer_access_is_named_by_its_pairs():
    found, advised = machine([H100] * 3, strangers=[1])
    assert found["peer_access"] == [[True, False, True], [False, True, False], [True, False, True]]
    (warning,) = advised["warnings"]
    assert "no peer access between 2 of 3 pairs (0-1, 1-2) of GPUs" in warning
    assert "NCCL_P2P_DISABLE=1" in warning
    assert advised["command"] == "./run_distributed.sh 3"


def test_twelve_tiles_of_an_xpu_machine_take_twelve_processes():
    found, advised = machine(xpu=[TILE] * 12, build="xpu", backends=["gloo", "xccl"])
    assert (found["kind"], found["build"], found["driver"]) == ("xpu", "XPU 2025.3", "1.6.3")
    assert (found["nccl"], found["peer_access"], len(found["devices"])) == (None, None, 12)
    assert (found["devices"][11]["units"], found["devices"][11]["compute_capability"]) == (
        448,
        None,
    )
    assert (advised["precision"], advised["warnings"]) == ("bf16", [])
    assert last_line(found, advised) == "./run_distributed.sh 12"
    assert found["tiles"] == 12
    assert "devices   12, each a tile, half of a GPU" in check_gpu.show(found, advised)


def test_an_empty_cuda_visible_devices_means_the_cpu_and_it_says_so(nvidia):
    four(nvidia)  # the machine has four, torch sees none
    found, advised = machine([], env={"CUDA_VISIBLE_DEVICES": ""})
    assert (found["kind"], found["cuda_visible_devices"], found["nvidia_gpus"]) == ("cpu", "", 4)
    assert advised["warnings"] == [
        "CUDA_VISIBLE_DEVICES is '', which means the CPU; unset it to use GPUs"
    ]
    assert (advised["precision"], advised["command"]) == ("fp32", "./run_distributed.sh 2")


CANNOT = "torch for CUDA 13.0 cannot use the 4 GPUs with driver"


@pytest.mark.parametrize(
    "build, env, driver, words",
    [
        ("cpu", {}, "470.57", "4 GPUs are here but torch is built for the CPU; install"),
        ("cuda", {}, "470.57", f"{CANNOT} 470.57, it needs 580 or newer; update"),
        ("cuda", {}, "580.65", f"{CANNOT} 580.65; mend CUDA_VISIBLE_DEVICES"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0"}, "580.65", f"{CANNOT} 580.65; mend"),
        ("cuda", {}, None, f"{CANNOT} None; mend"),
    ],
)
def test_gpus_that_torch_cannot_use_are_not_passed_over(nvidia, build, env, driver, words):
    four(nvidia, driver)
    (warning,) = machine([], build=build, env=env)[1]["warnings"]
    assert warning.startswith(words)


def test_without_nccl_it_advises_one_process():
    _, advised = machine([H100] * 4, backends=["gloo"])
    assert advised["command"] == "./run_distributed.sh 1"
    (warning,) = advised["warnings"]
    assert warning.startswith("no nccl in this torch: ")


@pytest.mark.parametrize(
    "host, words",
    [
        ({"shm_free_gib": 0.06}, "/dev/shm has 0.06 GiB free"),
        ({"shm_free_gib": None}, None),  # no /dev/shm: nothing to say
        ({"cores": 3}, "4 processes x 1 threads share 3 cores"),
        ({"omp_num_threads": "17"}, "4 processes x 17 threads share 64 cores"),  # 68 threads
        ({"omp_num_threads": "16"}, None),
    ],
)
def test_a_host_too_small_for_its_gpus_is_remarked(host, words):
    found, _ = machine([H100] * 4)
    warnings = check_gpu.advice(found | host)["warnings"]
    assert len(warnings) == (words is not None)
    assert all(warning.startswith(words) for warning in warnings)


def test_without_torch_it_says_in_one_line_who_makes_it():
    done = run("-S", "check_gpu.py", "--json", PYTHONPATH="")  # -S: nothing that pip installed
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: no torch in this environment; ./run_distributed.sh makes one\n")


# --- nvidia-smi ----------------------------------------------------------------------------------

PCIE = """	GPU0	GPU1	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	PHB	0-63	0		N/A
GPU1	PHB	 X 	0-63	0		N/A
"""
PAIRS = """        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-15    0
GPU1    NV4      X      SYS     SYS     0-15    0
GPU2    SYS     SYS      X      NV4     16-31   1
GPU3    SYS     SYS     NV4      X      16-31   1
"""
MIG = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-513536b6-7d19-9063-b049-1e69664bb298)
  MIG 3g.40gb     Device  0: (UUID: MIG-ce861fb0-a248-58ce-a9a8-f9adbc22a66a)
  MIG 1g.20gb     Device  1: (UUID: MIG-a45882f0-9215-5733-a0c1-49286ab31cb5)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-d8594bd4-0fc3-8595-e355-7c98138f3b95)
"""
MISMATCH = """Failed to initialize NVML: Driver/library version mismatch
NVML library version: 550.144
"""
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)"


@pytest.fixture
def smi(monkeypatch):
    """nvidia-smi as on another machine: answers by a part of the question, (status, stdout)."""
    answers, asked = {}, []

    def answer(words, **options):
        assert words[0] == "nvidia-smi" and "shell" not in options
        asked.append(" ".join(words))
        if not answers:
            raise FileNotFoundError(words[0])
        status, text = next(told for part, told in answers.items() if part in asked[-1])
        return Fake(returncode=status, stdout=text, stderr="")

    monkeypatch.setattr(host.subprocess, "run", answer)
    return Fake(answers=answers, asked=asked)


def test_the_links_of_a_box_without_nvlink_and_of_nothing():
    assert host.links_of(PCIE) == {"0-1": "PHB"}
    assert host.links_of("") == host.links_of("GPU0\n") == {}
    nv, far = {"0-1": "NV4", "2-3": "NV4"}, ("0-2", "0-3", "1-2", "1-3")
    assert host.links_of(PAIRS) == nv | dict.fromkeys(far, "SYS")


def test_links_are_counted_by_kind_in_a_line(nvidia):
    nvidia["links"] = host.links_of(PAIRS)
    assert "\nlinks     2 pairs NV4, 4 pairs SYS\n" in check_gpu.show(*machine([H100] * 4))


def test_mig_slices_belong_to_their_gpu():
    assert host.slices_of(MIG) == {"0": ["3g.40gb", "1g.20gb"], "1": []}
    assert host.slices_of("") == {}


def test_two_slices_of_one_gpu_take_one_process(nvidia):
    nvidia["mig"] = {"0": ["3g.40gb", "1g.20gb"]}
    part = Fake(**vars(A100) | {"name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb"})
    _, advised = machine([part, part])
    assert advised["command"] == "./run_distributed.sh 1"
    (warning,) = advised["warnings"]
    assert warning.startswith("MIG cuts GPU 0 into 2 slices (3g.40gb, 1g.20gb); ")
    assert warning.endswith("sudo nvidia-smi -i 0 -mig 0")
    nvidia["mig"]["1"] = ["3g.40gb"]  # one slice of each of two GPUs may meet
    assert machine([part, part])[1]["command"] == "./run_distributed.sh 2"


def test_the_users_of_a_gpu_are_those_that_are_not_this_process():
    rows = f"GPU-5d5b, 4242, 30720\nGPU-5d5b, 4243, [N/A]\nGPU-0a1b, {os.getpid()}, 500\n"
    assert host.users_of(rows) == {"5d5b": ["pid 4242 30.0 GiB", "pid 4243"]}


def test_nvidia_smi_is_asked_for_no_more_than_there_is(smi, tmp_path):
    smi.answers |= {"driver_version": (0, "0, 580.95.05, Disabled\n"), "apps": (0, "")}
    assert NVIDIA(tmp_path) == {
        "driver": "580.95.05",
        "nvidia_gpus": 1,
        "nvidia_smi": "",
        "links": {},
        "mig": {},
        "users": {},
    }
    assert len(smi.asked) == 2  # neither topology nor slices


@pytest.mark.parametrize(
    "answer, kernel, problem, driver",
    [
        ((18, MISMATCH), KERNEL, " ".join(MISMATCH.split()), "535.183.01"),
        ((9, "NVIDIA-SMI has failed"), "", "NVIDIA-SMI has failed", None),
        ((3, ""), OPEN, "no output", "580.95.05"),
        (None, OPEN, "", "580.95.05"),  # no such tool: a container without --gpus
    ],
)
def test_without_a_working_nvidia_smi_the_kernel_is_asked(
    smi, tmp_path, answer, kernel, problem, driver
):
    if answer:
        smi.answers[""] = answer
    folder = tmp_path / "proc/driver/nvidia/gpus"
    (folder / "0000:17:00.0").mkdir(parents=True)
    (folder.parent / "version").write_text(f"{kernel}\nGCC version:  gcc version 12.2.0\n")
    found = NVIDIA(tmp_path)
    assert (found["nvidia_smi"], found["driver"]) == (problem, driver)
    assert found["nvidia_gpus"] == 1
    assert len(smi.asked) == 1  # what has failed once is not asked again


def test_an_nvidia_smi_that_hangs_is_given_up(monkeypatch):
    def hang(words, timeout, **_):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(host.subprocess, "run", hang)
    text, problem = host.ask("nvidia-smi")
    assert text == "" and problem.endswith("timed out after 20 seconds")


# --- limits and settings -------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """A folder for /; root(path=text, ...) writes files into it."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


TOP = "sys/fs/cgroup"
V2 = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    f"{TOP}/slurm/job_7/step_0/memory.max": "max\n",
    f"{TOP}/slurm/job_7/memory.max": f"{8 * GIB}\n",
    f"{TOP}/slurm/memory.max": f"{64 * GIB}\n",
    f"{TOP}/slurm/job_7/cpu.max": "150000 100000\n",
    f"{TOP}/slurm/cpu.max": "max 100000\n",
    f"{TOP}/slurm/job_7/step_0/pids.max": "512\n",
    f"{TOP}/elsewhere/memory.max": "1\n",
}
V1 = {  # of a container: its own path is not there, the mount's top is its group
    "proc/self/cgroup": "9:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n3:pids:/docker/ab\n",
    f"{TOP}/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    f"{TOP}/cpu/cpu.cfs_quota_us": "200000\n",
    f"{TOP}/cpu/cpu.cfs_period_us": "100000\n",
    f"{TOP}/pids/pids.max": "max\n",
}
FREE = V1 | {  # as version 1 says that there is no limit
    f"{TOP}/memory/memory.limit_in_bytes": "9223372036854771712\n",
    f"{TOP}/cpu/cpu.cfs_quota_us": "-1\n",
}


@pytest.mark.parametrize(
    "files, memory, cores, forks",
    [(V2, 8.0, 1.5, 512), (V1, 4.0, 2.0, 9000), (FREE, None, None, 9000), ({}, None, None, 9000)],
)
def test_the_least_limit_of_the_control_groups_counts(
    root, monkeypatch, files, memory, cores, forks
):
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_NOFILE: (1024, unlimited), resource.RLIMIT_NPROC: (9000, 9000)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, (65536, 65536)))
    assert host.host(root(files)) == {
        "memory_limit_gib": memory,
        "cpu_limit": cores,
        "forks": forks,
        "open_files": [1024, None],
        "locked_memory": 65536,
        "interfaces": [],
        "infiniband": [],
    }


def test_network_cards_are_those_of_sys(root):
    found = host.host(root({f"sys/class/{name}/x": "" for name in ("net/ib0", "net/lo")}))
    assert (found["interfaces"], found["infiniband"]) == (["ib0", "lo"], [])
    assert host.host(root({"sys/class/infiniband/mlx5_0/x": ""}))["infiniband"] == ["mlx5_0"]


@pytest.mark.parametrize(
    "limits, words",
    [
        ({"open_files": [1024, None]}, "1024 open files a process, * ulimit -n 65536"),
        ({"open_files": [1024, 1024]}, "1024 open files a process, * limits.conf, docker --ulimit"),
        ({"open_files": [65536, 65536]}, None),
        ({"forks": 512}, "512 processes and threads at most, then fork fails; ulimit -u 4096*"),
        ({"locked_memory": 65536}, None),  # no InfiniBand is here
        ({"locked_memory": 65536, "infiniband": ["mlx5_0"]}, "64 KiB of locked memory, *"),
        ({"cpu_limit": 9.5}, "* allows 9.5 of 64 cores, *; export OMP_NUM_THREADS=2"),  # 4 GPUs
        ({"memory_limit_gib": 16.0}, "* allows 16.0 of 512.0 GiB and kills beyond; *"),
        ({"results_free_gib": 3.5}, "results/ has 3.5 GiB free, *"),
    ],
)
def test_a_limit_that_hurts_is_remarked(limits, words):
    found, _ = machine([H100] * 4)
    warnings = check_gpu.advice(found | limits)["warnings"]
    assert len(warnings) == (words is not None)
    for warning in warnings:
        assert fnmatch(warning, words), warning


def test_half_a_core_is_still_one_process():
    found, _ = machine(build="cpu", backends=["gloo"])
    advised = check_gpu.advice(found | {"cpu_limit": 0.5})
    assert (advised["command"], advised["cores_each"]) == ("./run_distributed.sh 1", 1)


@pytest.mark.parametrize(
    "setting, why",
    [
        ("NCCL_P2P_DISABLE=1", "GPUs talk through host memory; unset it unless NCCL hangs"),
        ("NCCL_DEBUG=trace", "every call is written to the log; *"),
        ("NCCL_DEBUG=INFO", None),  # what the guide recommends
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", "FSDP's gathers queue behind its kernels; unset it"),
        ("NCCL_SOCKET_IFNAME=^lo,docker", None),
        ("NCCL_SOCKET_IFNAME=ib0", "no such network interface, nobody is met; *eth0, eth1, lo"),
        ("NCCL_SOCKET_IFNAME=^eth,lo", "no such network interface, nobody is met; *"),
        ("NCCL_SOCKET_IFNAME=^=eth0,lo", None),  # eth1 is left
        ("GLOO_SOCKET_IFNAME=eth0,lo", None),
        ("GLOO_SOCKET_IFNAME=eth0,ib0", "no such network interface, nobody is met; *"),
        ("NCCL_IB_DISABLE=1", None),  # there is no InfiniBand to disable
    ],
)
def test_a_setting_that_hurts_is_remarked(setting, why):
    name, _, value = setting.partition("=")
    _, advised = machine([H100] * 4, env={name: value, "SECRET": "1"})
    assert len(advised["warnings"]) == (why is not None)
    for warning in advised["warnings"]:
        assert warning.startswith(f"{setting}: ") and fnmatch(warning, f"*: {why}"), warning


def test_infiniband_that_is_switched_off_is_remarked():
    found, _ = machine([H100], env={"NCCL_IB_DISABLE": "1", "HF_TOKEN": "x"})
    assert found["settings"] == {"NCCL_IB_DISABLE": "1"}  # and nothing else of the environment
    (warning,) = check_gpu.advice(found | {"infiniband": ["mlx5_0"]})["warnings"]
    assert warning.startswith("NCCL_IB_DISABLE=1: nodes talk over TCP, not InfiniBand; unset it")


def test_a_port_that_is_taken_is_remarked_unless_a_launcher_has_taken_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (warning,) = host.about_port({"MASTER_PORT": port})
        assert warning.startswith(f"MASTER_PORT={port}: Address already in use; export another")
        (warning,) = machine([H100], env={"MASTER_PORT": port})[1]["warnings"]
        for more in ({"RANK": "0"}, {"MASTER_ADDR": "10.99.0.1"}):  # another machine's port
            assert list(host.about_port({"MASTER_PORT": port} | more)) == []
    assert list(host.about_port({"MASTER_PORT": port})) == []
    for wrong in ("0", "65536", "abc", "-1"):
        (warning,) = host.about_port({"MASTER_PORT": wrong})
        assert warning.startswith(f"MASTER_PORT={wrong}: not a port; ")


# --- --bench -------------------------------------------------------------------------------------


def test_the_bandwidths_of_an_all_reduce():
    # 1 GB in half a second is 2 GB/s; of 4 ranks each sends and receives 2 x 3/4 of it
    assert check_gpu.bandwidths(10**9, 0.5, 4) == (2.0, 3.0)
    assert check_gpu.bandwidths(10**9, 0.5, 2) == (2.0, 2.0)


def test_the_time_is_the_median_without_the_first_two(monkeypatch):
    clock, done = iter([0, 90, 0, 80, 0, 1, 0, 50, 0, 2, 0, 4, 0, 3]), []
    monkeypatch.setattr(check_gpu.time, "perf_counter", lambda: next(clock))
    cpu = torch.device("cpu")
    assert check_gpu.timed(torch, [cpu], lambda: done.append(1)) == 3
    assert len(done) == 7


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(check_gpu, "timed", lambda torch, devices, work: work() is None or 0.5)
    cpu = torch.device("cpu")
    flops = 2 * 1024**3 / 0.5
    assert check_gpu.rates(torch, cpu) == [flops, flops, 2**24 / 0.5]
    assert check_gpu.copies(torch, [cpu, cpu, cpu], size=1000) == [[2000.0] * 3] * 3


@pytest.mark.parametrize("factor, right", [(2, True), (3, False)])
def test_wrong_sums_are_noticed(monkeypatch, factor, right):
    world = World(world_size=2)
    fake = Fake(all_sum=lambda block, world: block.mul_(factor))
    found = check_gpu.all_reduces(torch, fake, world)
    assert [size for size, _, _ in found] == [2**20, 2**22, 2**24]
    assert {good for _, _, good in found} == {right}


def test_a_device_without_memory_costs_one_line(monkeypatch):
    def full(torch, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check_gpu, "rates", full)
    with pytest.raises(UserError, match="no 2 GiB free on a device; stop what runs there"):
        check_gpu.bench(torch, dist, World())


def test_after_the_tables_the_last_line_is_still_the_command(capsys, monkeypatch):
    monkeypatch.setattr(check_gpu, "timed", lambda torch, devices, work: 0.5)
    assert check_gpu.main(["--bench", "--local-rank=0"]) == 0  # what a launcher appends
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("./run_distributed.sh ")
    assert lines[-2].startswith("all-reduce takes several processes: torchrun ")
