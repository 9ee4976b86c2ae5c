"""check_gpu.py: once for real on this machine; on fakes of torch for machines that are not here."""

import contextlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace as Fake

import pytest

import check_gpu
from conftest import ROOT

GIB = 2**30
NVIDIA_DRIVERS = check_gpu.nvidia_drivers  # the real one; most tests put another in its place
ROOMY = {"cores": 64, "shm_free_gib": 32.0}  # a host that gives no cause for warnings
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
        return Fake(name=has.name, major=major, minor=minor, multi_processor_count=has.units)

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
def driver(monkeypatch):
    """nvidia-smi as on a machine without one; a test may put versions in, one per GPU."""
    versions = []
    monkeypatch.setattr(check_gpu, "nvidia_drivers", lambda: versions)
    return versions


@pytest.mark.parametrize(
    "script, versions",
    [
        ("echo 580.95; echo 580.95", ["580.95", "580.95"]),
        ("echo NVIDIA-SMI has failed; exit 9", []),  # no driver is loaded
        (None, []),
    ],
)
def test_the_driver_is_what_nvidia_smi_says_if_it_works(tmp_path, monkeypatch, script, versions):
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert NVIDIA_DRIVERS() == versions


def last_line(found, advised):
    return check_gpu.show(found, advised).splitlines()[-1]


def run(*words, **env):
    command = [sys.executable, *words]
    env = os.environ | env
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_on_this_machine_the_last_line_is_the_command_of_the_json():
    text, data = run("check_gpu.py"), run("check_gpu.py", "--json")
    assert (text.returncode, data.returncode) == (0, 0), text.stderr + data.stderr
    told = json.loads(data.stdout)
    assert {"python", "torch", "build", "os", "cores", "memory_gib", "shm_gib"} <= set(told)
    assert {"backends", "driver", "nccl", "devices", "peer_access", "warnings"} <= set(told)
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["command"].startswith(f"./run_distributed.sh {told['processes']}")
    assert text.stdout.splitlines()[-1] == told["command"]
    assert text.stdout.isascii() and "\x1b" not in text.stdout


def test_without_a_gpu_it_advises_two_cpu_processes_or_one_on_one_core():
    found, advised = machine(build="cpu", backends=["gloo"])
    assert (found["kind"], found["build"], found["devices"]) == ("cpu", "CPU", [])
    assert advised == {
        "processes": 2,
        "precision": "fp32",
        "warnings": [],
        "command": "./run_distributed.sh 2",
    }
    assert "no GPU, training runs on the CPU" in check_gpu.show(found, advised)
    assert check_gpu.advice(found | {"cores": 1})["command"] == "./run_distributed.sh 1"


def test_four_equal_gpus_take_four_processes_in_bf16(driver):
    driver += ["580.95"] * 4
    found, advised = machine([H100] * 4)
    assert (found["driver"], found["nccl"], found["build"]) == ("580.95", "2.27.5", "CUDA 13.0")
    assert found["peer_access"] == [[True] * 4] * 4
    assert found["devices"][3] == {
        "index": 3,
        "name": "H100",
        "memory_gib": 80.0,
        "memory_free_gib": 79.0,
        "compute_capability": "9.0",
        "bf16": True,
        "units": 132,
    }
    assert (advised["processes"], advised["precision"]) == (4, "bf16")
    assert advised["warnings"] == []
    assert last_line(found, advised) == "./run_distributed.sh 4"


def test_the_columns_of_the_table_stand_under_their_heads():
    lines = check_gpu.show(*machine([H100, T4])).splitlines()
    head, one, two = (lines[lines.index("devices   2") + n] for n in (1, 2, 3))
    for name, first, second in [("GiB", "80.0", "15.0"), ("free", "79.0", "14.5")]:
        end = head.index(name) + len(name)
        assert one[:end].endswith(f" {first}") and two[:end].endswith(f" {second}")
    assert len(head) == len(one) == len(two)


def test_two_t4_have_no_bf16_and_take_fp16_with_a_loss_scale():
    found, advised = machine([T4] * 2)
    assert [d["bf16"] for d in found["devices"]] == [False, False]
    assert (advised["precision"], advised["warnings"]) == ("fp16", [])
    assert advised["command"] == "./run_distributed.sh 2"
    assert "2 processes, fp16 with a loss scale" in check_gpu.show(found, advised)


def test_gpus_of_two_kinds_train_in_the_precision_that_all_have():
    _, advised = machine([A100, A100, T4], env={"CUDA_VISIBLE_DEVICES": "2,5,7"})
    assert (advised["processes"], advised["precision"]) == (3, "fp32")
    assert advised["command"] == "./run_distributed.sh 3 --no_use_mixed_precision"
    precision, kinds = advised["warnings"]
    assert precision.startswith("no bf16 on GPU 2, ")
    # numbered as the user numbers them
    assert precision.endswith("; without GPU 2: export CUDA_VISIBLE_DEVICES=2,5")
    assert kinds.startswith("the devices differ: A100 (40 GiB), T4 (15 GiB); ")


def test_gpus_that_differ_in_memory_only_are_remarked_too():
    large = Fake(**vars(A100) | {"total": 80, "free": 79.5})
    _, advised = machine([A100, large])
    assert advised["precision"] == "bf16"
    assert [w.split(";")[0] for w in advised["warnings"]] == [
        "the devices differ: A100 (40 GiB), A100 (80 GiB)"
    ]


def test_a_gpu_that_another_process_uses_is_named_with_a_way_around_it():
    busy = Fake(**vars(H100) | {"free": 71.5})  # nine tenths of 80 are 72
    almost = Fake(**vars(H100) | {"free": 72.5})
    assert machine([H100, almost])[1]["warnings"] == []
    (warning,) = machine([H100, busy, H100])[1]["warnings"]
    assert warning.startswith("free on GPU 1: 71.5 of 80.0 GiB; nvidia-smi shows")
    assert warning.endswith("export CUDA_VISIBLE_DEVICES=0,2")
    (warning,) = machine([busy])[1]["warnings"]  # none is left to go to
    assert "CUDA_VISIBLE_DEVICES" not in warning


def test_a_gpu_without_peer_access_is_named_by_its_pairs():
    found, advised = machine([H100] * 3, strangers=[1])
    assert found["peer_access"] == [[True, False, True], [False, True, False], [True, False, True]]
    (warning,) = advised["warnings"]
    assert "no peer access between 2 of 3 pairs of GPUs (0-1, 1-2)" in warning
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


def test_an_empty_cuda_visible_devices_means_the_cpu_and_it_says_so(driver):
    driver += ["580.95"] * 4  # the machine has four, torch sees none
    found, advised = machine([], env={"CUDA_VISIBLE_DEVICES": ""})
    assert (found["kind"], found["cuda_visible_devices"], found["nvidia_gpus"]) == ("cpu", "", 4)
    assert advised["warnings"] == [
        "CUDA_VISIBLE_DEVICES is '', which means the CPU; unset it to use GPUs"
    ]
    assert (advised["precision"], advised["command"]) == ("fp32", "./run_distributed.sh 2")


@pytest.mark.parametrize(
    "build, env, words",
    [
        ("cpu", {}, "2 GPUs are here but torch is built for the CPU; install"),
        ("cuda", {}, "torch for CUDA 13.0 cannot use the 2 GPUs with driver 470.57; update"),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0"}, "torch for CUDA 13.0 cannot use the 2 GPUs"),
    ],
)
def test_gpus_that_torch_cannot_use_are_not_passed_over(driver, build, env, words):
    driver += ["470.57"] * 2
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


def test_a_wrong_flag_ends_with_2_and_flags_are_not_abbreviated(capsys):
    for flag in ("--jsn", "--js"):
        with pytest.raises(SystemExit) as stop:
            check_gpu.main([flag])
        assert stop.value.code == 2
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_it_loads_neither_transformers_nor_anything_of_ours():
    code = "import sys, check_gpu; check_gpu.main([]); print(*sys.modules, file=sys.stderr)"
    loaded = set(run("-c", code).stderr.split())
    assert "torch" in loaded
    assert not loaded & {"transformers", "peft", "ddp_utils", "config"}
