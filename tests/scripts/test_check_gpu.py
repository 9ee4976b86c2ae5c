"""check_gpu.py: for real on this machine; on fakes of torch and nvidia-smi for others."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace as Fake

import pytest
import torch

import check_gpu
from conftest import LIMIT, ROOT
from ddp_utils import UserError
from ddp_utils.distributed import World

GIB = 2**30
H100 = Fake(name="H100", total=80, free=79, bf16=True)
A100 = Fake(name="A100", total=40, free=39.5, bf16=True)
T4 = Fake(name="T4", total=15, free=14.5, bf16=False)
TILE = Fake(name="Data Center GPU Max 1550", total=64, free=63, bf16=True)


class Unit:
    """torch.cuda or torch.xpu of a machine with these devices."""

    def __init__(self, devices=()):
        self.now = 0
        self.is_available = lambda: bool(devices)
        self.device_count = lambda: len(devices)
        self.get_device_properties = lambda index: Fake(name=devices[index].name)
        self.mem_get_info = lambda index: (devices[index].free * GIB, devices[index].total * GIB)
        bf16 = [device.bf16 for device in devices]
        self.is_bf16_supported = lambda including_emulation=1: including_emulation or bf16[self.now]
        self.nccl = Fake(version=lambda: (2, 27, 5))

    @contextlib.contextmanager
    def device(self, index):
        self.now = index
        yield
        self.now = 0


@pytest.fixture
def machine(monkeypatch):
    """Calls collect_facts() and advise() for a machine with these devices and facts."""

    def report(cuda=(), xpu=(), env=None, build="13.0", **changes):
        nvidia = {"driver": "580.95", "nvidia_gpus": len(cuda), "cuda_error": None}
        monkeypatch.setattr(check_gpu, "nvidia_facts", lambda: nvidia)
        groups = {f"is_{name}_available": lambda: True for name in ("gloo", "nccl", "xccl")}
        fake = Fake(__version__="2.13.0", version=Fake(cuda=build), distributed=Fake(**groups))
        fake.cuda, fake.xpu = Unit(cuda), Unit(xpu)
        monkeypatch.setattr(check_gpu, "torch", fake)
        roomy = {"cores": 64, "shm_free_gib": 32.0}
        facts = check_gpu.collect_facts(env or {}) | roomy | changes
        return facts, check_gpu.advise(facts)

    return report


def run(*words, **env):
    options = {"env": os.environ | env, "capture_output": True, "text": True, "timeout": LIMIT}
    return subprocess.run([sys.executable, *words], cwd=ROOT, **options)


def test_on_this_machine_the_last_line_is_the_command_of_the_json():
    """In a process, which loads neither transformers nor a script."""
    code = "import sys, check_gpu as gpu; gpu.main(['--json']); print('and'); gpu.main([]); "
    code += "print(*sys.modules, file=sys.stderr)"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    data, text = done.stdout.split("\nand\n")
    report = json.loads(data)
    assert report["cpu_fast_dtypes"] in ("fp32", "fp32, bf16")
    assert {"cpu", "cpu_instructions"} <= set(report)
    assert {"torch", "cuda", "backends", "driver", "nccl", "devices", "warnings"} <= set(report)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert report["command"].startswith(f"./run_distributed.sh {report['processes']}")
    assert text.splitlines()[-1] == report["command"] and text.count(report["command"]) == 1
    assert "null" not in text
    watched = {"torch", "transformers", "peft", "config", "train", "lm.memory_plan"}
    assert watched.intersection(done.stderr.split()) == {"torch"}


def test_without_a_gpu_it_advises_two_cpu_processes_or_one_on_one_core(machine):
    facts, advice = machine(build=None)
    assert (facts["kind"], facts["devices"]) == ("cpu", [])
    assert list(advice.values()) == [2, "fp32", [], "./run_distributed.sh 2"]
    assert check_gpu.advise(facts | {"cores": 1})["command"] == "./run_distributed.sh 1"


def test_four_equal_gpus_take_four_processes_in_bf16(machine):
    facts, advice = machine([H100] * 4, [TILE])  # CUDA before XPU
    assert (facts["driver"], facts["nccl"], facts["cuda"]) == ("580.95", "2.27.5", "13.0")
    own = {"index": 3, "name": "H100", "memory_gib": 80.0, "memory_free_gib": 79.0, "bf16": True}
    assert facts["devices"][3] == own
    assert list(advice.values()) == [4, "bf16", [], "./run_distributed.sh 4"]
    lines = check_gpu.show(facts | advice | {"warnings": ["one", "two"]}).splitlines()
    assert f"devices               {json.dumps(own)}" in lines
    assert {"warnings              one", "warnings              two"} <= {*lines}
    assert lines[-1] == "./run_distributed.sh 4"


def test_the_precision_is_supported_by_all_devices(machine):
    facts, advice = machine([T4] * 2)
    assert [device["bf16"] for device in facts["devices"]] == [False, False]
    assert list(advice.values()) == [2, "fp16", [], "./run_distributed.sh 2"]
    assert machine([A100, A100, T4])[1]["precision"] == "fp16"
    facts, advice = machine(xpu=[TILE] * 12)
    assert (facts["kind"], facts["nccl"]) == ("xpu", None)
    assert list(advice.values()) == [12, "bf16", [], "./run_distributed.sh 12"]


BUSY = Fake(**vars(H100) | {"free": 71.9})  # 90 % of 80 are 72
FREE = Fake(**vars(H100) | {"free": 72})
SLICE = Fake(**vars(H100) | {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"})
UNSEEN = "Torch not compiled with CUDA enabled"
WARNINGS = [  # GPUs, other facts -> the beginning of the only warning, or none
    ([], {"nvidia_gpus": 4, "cuda_error": UNSEEN}, f"4 NVIDIA GPUs are not used: {UNSEEN}; check"),
    ([], {"nvidia_gpus": 0, "cuda_error": UNSEEN}, None),
    ([H100], {"driver": None}, None),
    ([H100] * 4, {"cores": 3}, "4 processes share 3 cores; request"),
    ([H100] * 4, {"shm_free_gib": 0.06}, "/dev/shm has 0.06 GiB free, NCCL needs it; "),
    ([H100] * 4, {"shm_free_gib": None}, None),  # there is no such folder
    ([H100], {"shm_free_gib": 0.06}, None),  # one process needs no shared memory
    ([H100, FREE], {}, None),
    ([H100, BUSY], {}, "71.9 of 80.0 GiB are free on GPU 1; stop other programs on it, lower"),
    (
        [A100, T4],
        {},
        "GPU 1 and GPU 0: only one of them supports bf16, so a run is an error; let C",
    ),
    ([SLICE], {}, "GPU 0 is a MIG slice; NCCL cannot connect slices; to undo it: nvidia-smi"),
]


@pytest.mark.parametrize(("gpus", "facts", "warning"), WARNINGS, ids=str)
def test_a_problem_of_the_machine_is_a_warning(gpus, facts, warning, machine):
    warnings = machine(gpus, **facts)[1]["warnings"]
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1 and warnings[0].startswith(warning)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--plan x.yaml --gpus -3", "--gpus: -3 is out of range (expected > 0)"),
        ("--plan x.yaml --gpu_memory 0", "--gpu_memory: 0.0 is out of range (expected > 0)"),
        ("--plan x.yaml --gpu_memory nan", "--gpu_memory: nan is not a valid float"),
        ("--gpus 2", "--gpus: it needs --plan FILE"),
        ("--plan x.yaml --json", "--plan: use it without --json and --bench"),
        ("--foo", "--foo is not a setting; expected one of --json, --bench"),
    ],
)
def test_a_wrong_flag_is_one_line(words, line):
    with pytest.raises(UserError) as caught:
        check_gpu.read(words.split())
    assert str(caught.value).startswith(line)


def test_a_signal_ends_a_program_that_saves_nothing():
    code = "import os, signal, sys; sys.path.insert(0, 'src'); from ddp_utils import distributed; "
    code += "distributed.run(lambda: ASKS or os.kill(os.getpid(), signal.SIGTERM), saves=SAVES)"
    asks = code.replace("ASKS", "distributed.stop_requested()")
    for saves, status in ((False, -signal.SIGTERM), (True, 0)):
        assert run("-c", asks.replace("SAVES", str(saves))).returncode == status
    assert run("-c", asks.replace("SAVES", "True").replace("TERM", "HUP")).returncode == 0
    # before it has asked whether it should stop, it has nothing to save
    result = run("-c", code.replace("ASKS", "False").replace("SAVES", "True"))
    line = "stopped before the first step; run the same command again\n"
    assert (result.returncode, result.stdout, result.stderr) == (85, line, "")


IN_A_ROW = """
import os, signal, sys
from collections import Counter
sys.path.insert(0, "src")
from ddp_utils import data, distributed
source = data.DataFile(sys.argv[1], "", on_bad_record="skip")
distributed.run(lambda: [*data.usable(
    source, lambda row: os.kill(os.getpid(), signal.SIGTERM), Counter())])
"""


def test_a_signal_in_a_row_is_no_error_of_the_row(tmp_path):
    """A row that is skipped for it would be missing in the cache of all later starts."""
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' * 3)
    result = run("-c", IN_A_ROW, tmp_path / "rows.jsonl")
    assert (result.returncode, result.stderr) == (85, "")


def test_a_run_under_nohup_is_not_asked_to_stop_when_the_terminal_is_closed():
    code = "import os, signal, sys; sys.path.insert(0, 'src'); from ddp_utils import distributed; "
    code += "signal.signal(signal.SIGHUP, IGNORED); distributed.run(lambda: distributed."
    code += "stop_requested() or os.kill(os.getpid(), signal.SIGHUP) or "
    code += "distributed.stop_requested())"
    for before, stops in (("signal.SIG_IGN", 0), ("signal.SIG_DFL", 1)):
        assert run("-c", code.replace("IGNORED", before)).returncode == stops


def test_a_terminal_that_is_closed_does_not_end_a_run():
    """Its output is an input/output error from then on, not a broken pipe."""
    code = "import os, pty, sys; sys.path.insert(0, 'src'); from ddp_utils import terminal; "
    code += "outer, inner = pty.openpty(); os.dup2(inner, 1); os.close(inner); os.close(outer); "
    code += "bar = terminal.Bar(True); bar.say('lost'); bar.say('too'); os._exit(7)"
    assert run("-c", code).returncode == 7


def test_only_settings_of_the_libraries_are_shown(machine):
    facts, _ = machine([H100], env={"NCCL_IB_DISABLE": "1", "HF_TOKEN": "secret"})
    assert facts["settings"] == ["NCCL_IB_DISABLE=1"]


def test_an_environment_without_torch_costs_a_line(tmp_path):
    program = shutil.copy(ROOT / "check_gpu.py", tmp_path)
    activate = tmp_path / ".venv/bin/activate"
    for fix in ("./run_distributed.sh makes one", f"run: . '{activate}'"):
        done = run("-S", program, "--json", PYTHONPATH="")  # -S: nothing that pip installed
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: no torch in this environment; {fix}\n"
        activate.parent.mkdir(parents=True, exist_ok=True)
        activate.touch()


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)"


def test_the_driver_is_what_the_kernel_names_and_the_gpus_are_on_the_bus(tmp_path):
    devices = {"vga": ("0x030000", "0x10de"), "h100": ("0x030200", "0x10de")}
    devices |= {"switch": ("0x068000", "0x10de"), "intel": ("0x030000", "0x8086")}
    for name, (kind, vendor) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "version").write_text(f"{OPEN}\nGCC version:  gcc version 12.2.0\n")
    facts = check_gpu.nvidia_facts(str(tmp_path), str(tmp_path))
    assert (facts["driver"], facts["nvidia_gpus"]) == ("580.95.05", 2)
    assert torch.cuda.is_available() == (facts["cuda_error"] is None)
    assert check_gpu.nvidia_facts(str(tmp_path / "none"))["driver"] is None


def test_a_slow_rate_is_not_rounded_to_zero(monkeypatch):
    monkeypatch.setattr(check_gpu, "seconds_of", lambda work: 60.0)  # 2 x 512^3 FLOP in a minute
    rates = check_gpu.bench(World())["rates"][0]
    assert rates["bf16_tflops"] == rates["fp32_tflops"] == 4e-6


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(check_gpu, "seconds_of", lambda work: work() is None or 0.5)
    # 2 x 512^3 FLOP and 2^28 bytes in half a second
    rates = check_gpu.device_rates(torch.device("cpu"))
    assert rates == pytest.approx([5.369e-4, 5.369e-4, 0.5369], rel=1e-3)


def test_every_rank_measures_itself_and_rank_0_has_all(monkeypatch):
    monkeypatch.setattr(check_gpu, "device_rates", lambda device: [494.5, 33.5, 25.0])
    monkeypatch.setattr(check_gpu, "seconds_of", lambda work: 0.01)
    monkeypatch.setattr(check_gpu.distributed, "all_sum", lambda tensor, world: tensor)
    result = check_gpu.bench(World(rank=1, world_size=4))
    idle = dict.fromkeys(("bf16_tflops", "fp32_tflops", "host_gb_per_s"), 0.0)
    own = {"bf16_tflops": 494.5, "fp32_tflops": 33.5, "host_gb_per_s": 25.0}
    assert result["rates"] == [idle, own, idle, idle]
    assert result["ranks"] == 4
    # 2^27 bytes in 10 ms are 13.42 GB/s; of 4 ranks each sends and receives 2 x 3/4 of it
    assert result["all_reduces"][2] == {"mib": 128, "ms": 10.0, "bus_gb_per_s": 20.13}
