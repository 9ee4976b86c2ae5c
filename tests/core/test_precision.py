"""bf16 on a CPU: where it is fast, what `auto` chooses, and the warning where it is slow."""

import json
import re
import sys

import pytest
import torch

import programs
import runs
from ddp_utils import distributed, policy
from ddp_utils.policy import Precision
from lm import chat
from ranks import ranks

CPU = torch.device("cpu")
LOWEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t\t: fpu sse4_2 avx2\n"
SAPPHIRE = "model name\t: Intel(R) Xeon(R)\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16\n"
GRAVITON = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd sve bf16 i8mm\n"
cpu_info = policy.cpu_info  # some tests replace it
RASPBERRY = "processor\t: 0\nFeatures\t: fp asimd crc32\n"


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Pretend to have the CPU that this /proc/cpuinfo describes, and such kernels in torch."""

    def pretend(text, kernels="AVX512", slowdown=7.4):
        (tmp_path / "cpuinfo").write_text(text)
        info = cpu_info(str(tmp_path / "cpuinfo"))
        monkeypatch.setattr(policy, "cpu_info", lambda: info)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
        monkeypatch.setattr(policy, "bf16_slowdown", lambda: slowdown)
        policy.is_bf16_fast.cache_clear()
        return info

    yield pretend
    policy.is_bf16_fast.cache_clear()
    distributed.warnings.clear()


@pytest.mark.parametrize(
    ("text", "kernels", "slowdown", "is_fast"),
    [
        (ZEN_3, "AVX2", 7.4, False),
        (SAPPHIRE, "AVX512", 0.3, True),
        (SAPPHIRE, "AVX2", 7.4, False),  # lowered by ATEN_CPU_CAPABILITY
        (SAPPHIRE.replace("avx512_bf16 amx_bf16", "avx512_vnni"), "AVX512", 3.0, False),
        (GRAVITON, "SVE256", 0.5, True),
        (GRAVITON, "DEFAULT", 0.5, True),  # as torch calls the kernels of ARM without SVE
        (RASPBERRY, "DEFAULT", 9.0, False),
        ("", "DEFAULT", 0.9, True),  # no flags are known: measured
        ("", "DEFAULT", 1.1, False),
    ],
)
def test_bf16_is_fast_on_a_cpu_with_instructions_for_it(cpu, text, kernels, slowdown, is_fast):
    cpu(text, kernels, slowdown)
    assert policy.is_bf16_fast() == is_fast


def test_name_and_flags_of_a_cpu_are_those_that_linux_lists(cpu):
    assert cpu(ZEN_3) == ("AMD EPYC 7B13", {"fpu", "sse4_2", "avx2"})
    assert cpu(GRAVITON)[1] == {"fp", "asimd", "sve", "bf16", "i8mm"}
    assert cpu_info("/does/not/exist")[1] == set()


def test_the_slowdown_is_that_of_a_layer_and_no_random_number_is_drawn():
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    policy.bf16_slowdown.cache_clear()
    assert 0.001 < policy.bf16_slowdown() < 10_000
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


ASKED = [  # how bf16 can be asked for: the settings of Precision.choose
    ("lora", "bf16", "auto"),
    ("lora", "auto", "bf16"),
    ("full", "auto", "bf16"),
    ("none", "bf16", "no"),  # generate_data.py
]


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_slow_bf16_is_used_only_if_asked_for_and_with_one_warning(cpu, asked, capsys):
    cpu(ZEN_3, "AVX2")
    for fine_tuning in ("lora", "full", "none"):
        assert Precision.choose(CPU, fine_tuning) == (torch.float32, None)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        assert torch.bfloat16 in Precision.choose(CPU, *asked)
    line = "warning: bf16 takes 7 times as long as fp32 on this CPU, measured with one layer; "
    line += "for fp32 leave out base_dtype bf16 and mixed_precision bf16"
    assert capsys.readouterr().out == f"{line}\n"
    assert distributed.warnings == [line]  # which the report shows


def test_frozen_weights_are_as_wide_as_the_forward_on_each_gpu(monkeypatch):
    """On a T4, without bf16, frozen weights of fp32 would need twice the memory."""
    cuda = torch.device("cuda")
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has_bf16, **_: has)
        assert Precision.choose(cuda, "lora") == (dtype, dtype)
        assert Precision.choose(cuda, "full") == (torch.float32, dtype)
        assert Precision.choose(cuda, "lora", mixed="no") == (torch.float32, None)
        assert Precision.choose(cuda, "lora", "bf16", "fp16") == (torch.bfloat16, torch.float16)


def test_fast_bf16_costs_no_warning(cpu, capsys):
    cpu(SAPPHIRE)
    for asked in ASKED:
        assert torch.bfloat16 in Precision.choose(CPU, *asked)
        assert Precision.choose(CPU, asked[0]) == (torch.float32, None)
    assert capsys.readouterr().out == ""


def test_chat_computes_a_bf16_folder_in_fp32_where_bf16_is_slow(cpu, capsys):
    found = {}
    for name, text in (("slow", ZEN_3), ("fast", SAPPHIRE)):
        cpu(text)
        for dtype in ("auto", "fp32", "bf16"):
            model, *_ = chat.load("data/demo/model", False, CPU, dtype)  # its files are in bf16
            found[name, dtype] = str(model.dtype).removeprefix("torch.")
    slow = {"auto": "float32", "fp32": "float32", "bf16": "bfloat16"}
    fast = slow | {"auto": "bfloat16"}
    assert found == {
        **{("slow", dtype): value for dtype, value in slow.items()},
        **{("fast", dtype): value for dtype, value in fast.items()},
    }
    assert capsys.readouterr().out.count("warning: bf16 takes 7 times") == 1


SCRIPTS = {  # command line
    "dpo": "src/main_distributed.py --fine_tuning lora --base_dtype bf16 --result_dir",
    "sft": "src/train.py --mixed_precision bf16 --output_dir",
}


@pytest.mark.parametrize("name", ["dpo", pytest.param("sft", marks=pytest.mark.show)])
def test_a_run_in_slow_bf16_says_so_before_training_and_in_its_report(name, tmp_path):
    """In a process of its own, since torch reads the variables once."""
    flags = [*SCRIPTS[name].split(), tmp_path / "run", "--max_steps=1", "--max_rows=64"]
    few = ["--num_samples=0", f"--val_data={runs.PAIRS}", f"--test_data={runs.PAIRS}"]
    flags += few if name == "dpo" else []
    done = programs.process([sys.executable, *flags, "--report_to=none"], **LOWEST)
    lines = done.stdout.splitlines()
    at, *_ = [i for i, line in enumerate(lines) if line.startswith("warning: bf16 takes ")]
    assert at < min(i for i, line in enumerate(lines) if re.match(r"step +\d", line))
    warnings = json.loads((tmp_path / "run/summary.json").read_text())["warnings"]
    assert lines[at] in warnings
    assert float(lines[at].split()[3]) >= 1
    assert "bf16 takes" in (tmp_path / "run/report.html").read_text()


def on_a_device(folder, autocast, steps):
    Precision.choose = lambda *_: Precision(torch.float32, autocast)
    flags = runs.words(f"--max_rows 8 --max_steps {steps} --save_every 1 --result_dir {folder}")
    return runs.main([*runs.QUIET, *runs.LORA, *flags])


def test_a_run_that_resumes_in_another_precision_says_so(tmp_path):
    """As on another GPU: `auto` chooses another one there."""
    ranks(1, on_a_device, str(tmp_path / "run"), torch.bfloat16, 1)
    summary = tmp_path / "run/summary.json"
    summary.write_text(summary.read_text().replace('"finished"', '"running"'))
    ranks(1, on_a_device, str(tmp_path / "run"), None, 2)
    warning = "warning: the model computes in torch.float32, until step 1 in torch.bfloat16"
    assert warning in json.loads(summary.read_text())["warnings"]
