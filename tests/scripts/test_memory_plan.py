"""memory_plan.py: bytes counted by hand, shares by hand, what the plan prints."""

import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace as Sizes

import pytest
import torch
import transformers

import check_gpu
import runs
from conftest import ROOT
from conftest import need as need_version
from ddp_utils import UserError
from ddp_utils.policy import Precision
from lm import memory_plan
from lm.logps import Pair
from train_config import Config

D, E, H, V, R = 64, 128, 32, 4096, 4  # width, MLP, head, vocabulary, LoRA rank
LAYER = 4 * D * D + 3 * D * E + 2 * D  # of a Llama: q, k, v, o; gate, up, down; norms
ADAPTER = R * (4 * 2 * D + 3 * (D + E))
ROOT_SIZE = (2 * V + 1) * D
GIB = 2**30


@functools.cache
def need_of(rows=1, device="cpu", layers=2, lengths=(20, 11, 16), kind="Llama", **changes):
    """Return memory_plan.need() of a small model; the loss is that of one response."""
    more = {} if kind == "Llama" else {"num_local_experts": 8, "num_experts_per_tok": 2}
    model_config = getattr(transformers, f"{kind}Config")(
        **{"hidden_size": D, "intermediate_size": E, "num_hidden_layers": layers, "vocab_size": V},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": H, **more},
        dtype=torch.bfloat16,  # of the files
    )
    config = Config(**{"type": "full", "lora_targets": "all-linear", "lora_r": R} | changes)
    pair = Pair(*([3] * length for length in lengths), "", "")

    def one_side(scorer, batch, _reference):
        return (sum(scorer(batch)),)

    place = torch.device("cpu" if device == "cpu" else "xpu")
    precision = Precision.choose(place, config.fine_tuning, config.base_dtype, "auto")
    return memory_plan.need(config, precision, model_config, [pair] * rows, one_side, device)


def test_sizes_of_a_full_fine_tuning_and_of_a_lora_on_bf16_weights():
    full = need_of()
    everything = 4 * (2 * LAYER + ROOT_SIZE)
    assert full.weights == full.gradients == everything
    assert (full.layer, full.layers, full.root) == (4 * LAYER, 8 * LAYER, 4 * ROOT_SIZE)
    assert (full.root_gradients, full.copies, full.width) == (full.root, 0, 4)
    # of the largest matrix: root and quotient
    assert full.step == pytest.approx(2 * 4 * V * D, rel=1e-2)
    lora = need_of(type="lora", base_dtype="bf16")
    assert (lora.gradients, lora.root_gradients) == (4 * 2 * ADAPTER, 0)
    assert lora.weights == 2 * (2 * LAYER + ROOT_SIZE) + 4 * 2 * ADAPTER
    assert (lora.width, lora.root, lora.copies) == (2, 2 * ROOT_SIZE, 2 * 2 * ADAPTER)


def test_all_experts_of_a_mixture_are_held_and_few_are_active():
    need_version("transformers", "5.24", "a backward pass of experts without contents")
    need = need_of(device="cuda", layers=1, kind="Mixtral")
    expert = 3 * D * E
    rest = 4 * D * D + 2 * D + 8 * D + ROOT_SIZE  # attention, norms, router, root
    assert (need.files, need.experts) == (2 * (8 * expert + rest), 2 * 8 * expert)
    assert need.saved == need.files  # in bf16, while AdamW updates fp32
    assert need.weights == need.gradients == 4 * (8 * expert + rest)
    assert need.active == 2 * expert + rest
    assert not need.eager


def test_a_model_without_fused_attention_keeps_probabilities():
    """In bf16, of two rows of 4001 tokens and 2 heads."""
    need_version("transformers", "5.24", "a backward pass of experts without contents")
    one, two = (
        need_of(device="cuda", layers=n, kind="GptOss", lengths=(1, 4001, 4001), type="lora")
        for n in (1, 2)
    )
    assert two.eager
    assert two.backward - one.backward > 2 * 2 * 2 * 4001**2


def test_checkpointing_keeps_the_input_of_each_layer():
    fed = 3 * (20 + 10 + 15)  # of each response the last token is a target only
    many = {"lengths": (20, 11, 16), "gradient_checkpointing": True, "type": "lora"}
    three, four = (need_of(3, layers=layers, **many) for layers in (3, 4))
    assert four.backward - three.backward == 4 * fed * D


def test_a_frozen_head_holds_logits_and_probabilities():
    """256 tokens at once on a CPU, in fp32; 1024 on a GPU: logits and a copy in bf16."""
    for device, each, tokens, width in (
        ("cpu", 32, 64, 4 + 4),
        ("cpu", 160, 256, 4 + 4),
        ("cuda", 160, 320, 2 + 4 + 2),
    ):
        need = need_of(
            device=device, layers=1, lengths=(20, each, each), type="lora", layout="shared"
        )
        assert 1 <= need.backward / (width * tokens * V) < 1.25, device


# full: 6 layers of 100 and a root of 200; lora: the same, frozen, and 10 of adapter a layer
FULL = {"weights": 800, "gradients": 800, "width": 4, "layers": 600, "layer": 100, "root": 200}
FULL |= {"layer_gradients": 100, "root_gradients": 200, "copies": 0, "backward": 330, "step": 70}
LARGE = FULL | {"backward": 1330}
HALF = FULL | {"width": 2, "layers": 300, "layer": 50, "root": 100, "copies": 300, "backward": 1300}
LORA = FULL | {"weights": 860, "gradients": 60, "layers": 660, "layer": 110}
LORA |= {"root_gradients": 0, "step": 1}
SHARES = [  # sizes, strategy, ranks; weights, gradients, moments, and the rest
    (FULL, "DDP", 4, (800, 800, 1600, 330)),
    # before the first step: the weights twice, and no moments yet
    (LORA, "DDP", 2, (860, 0, 120, 860 - 120)),
    (LORA | {"weights": 3e9}, "DDP", 2, (3e9, 0, 120, 500 * 2**20 - 120)),
    # alone, gradients appear while activations are freed
    (FULL, "DDP", 1, (800, 800, 1600, 70)),
    (FULL | {"backward": 990}, "DDP", 1, (800, 200, 1600, 990)),
    # a quarter of each; root and two layers gathered; the root's gradients and two of a layer
    (LARGE, "FSDP FULL_SHARD", 4, (200, 400, 400, 400 + 1330)),
    (LARGE, "FSDP SHARD_GRAD_OP", 4, (200, 400, 400, 900 + 1330)),
    # at the end: halves of the layers' gradients, and three of the root's for the embedding
    (FULL, "FSDP FULL_SHARD", 2, (400, 400 + 300, 800, 400 + 600)),
    # in half precision weights are gathered as they compute, without autocast's copies; of the
    # gradients, half of the root's and of a layer's, and that layer's in fp32
    (HALF, "FSDP FULL_SHARD", 8, (100, 150 + 100, 200, 200 + 1000)),
    # only the adapter of a layer has gradients
    (LORA | {"layer_gradients": 10}, "FSDP FULL_SHARD", 8, (107.5, 20, 15, 200 + 220 + 330)),
    (LARGE, "FSDP offloaded", 4, (0, 400, 0, 400 + 1330)),
]


def test_the_bytes_of_one_rank():
    for sizes, strategy, ranks, expected in SHARES:
        assert memory_plan.share(Sizes(**sizes), strategy, ranks) == expected, (strategy, ranks)


# all weights of 1e9 parameters in bf16 files, and a LoRA of 1e7 on experts
BILLION = {"weights": 4e9, "gradients": 4e9, "files": 2e9, "saved": 2e9, "experts": 0}
BILLION |= {"root_gradients": 5e8}  # an embedding of 1.25e8
ADAPTERS = {"weights": 2e9, "gradients": 4e7, "files": 2e9, "saved": 4e7, "experts": 1.5e9}
ADAPTERS |= {"root_gradients": 0}
HOSTS = [  # sizes, strategy, ranks; bytes to load, and to save
    (BILLION, "DDP", 16, (0, 12e9)),  # rank 0: weights and two moments
    (BILLION, "FSDP FULL_SHARD", 16, (8 * 5e8, 6e9)),  # half of the ranks
    (BILLION, "FSDP FULL_SHARD", 64, (8 * 5e8, 2e9)),  # less than the model
    (BILLION, "FSDP offloaded", 8, (8 * 5e8, 16e9 + 12e9)),
    (ADAPTERS, "DDP", 8, (0, 12e7)),
    (ADAPTERS, "FSDP FULL_SHARD", 16, (8 * 1.5e9, 12e7)),
]


def test_the_host_memory_of_a_node():
    for sizes, strategy, ranks, expected in HOSTS:
        assert memory_plan.on_host(Sizes(**sizes), strategy, ranks) == expected, (strategy, ranks)


def test_notes_on_disk_reference_and_special_models():
    rows = [Pair([3] * 500, [3] * 251, [3] * 251, "", "")] * 3600  # 1000 tokens each
    plan = memory_plan.Plan(None, None, rows, 1, None, has_reference=True)
    n = Sizes(**ADAPTERS | {"gradients": 3e10}, active=1e9, eager=True)
    disk, host, reference, experts, eager = memory_plan.notes(n, plan, 2)
    seconds = "300.0 s at 0.3 GB/s, 90.0 s at 1 GB/s, 18.0 s at 5 GB/s"
    assert disk == f"disk      model 0.04 GB, checkpoint 90.00 GB: {seconds}"
    place = "a node of 2 processes to load, to save"
    assert host.startswith(f"host      GiB of {place}: DDP 0.00, 83.8")
    # 7.2e15 FLOP on two A100 of 312e12 per second
    hours = 7.2e15 / (2 * 0.4 * 312e12) / 3600
    assert reference.startswith(f"reference 3600 rows on 2 GPUs: A100 {hours:.1f} h, H100 0.0 h")
    assert experts.startswith("warning: under FSDP and ZeRO, each process stacks all experts: 1.40")
    assert eager.startswith("warning: no fused attention")
    quiet = Sizes(**BILLION, active=1e9, eager=False)
    assert len([*memory_plan.notes(quiet, plan._replace(has_reference=False), 2)]) == 2


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    """Writes a YAML file; its model is the demo's without weights."""
    monkeypatch.chdir(ROOT)
    model = tmp_path / "model"
    shutil.copytree("data/demo/model", model, ignore=shutil.ignore_patterns("*.safetensors"))

    def write(**training):
        sections = {"training": training, "model": {"model_name": str(model)}}
        sections["output"] = {"output_dir": str(tmp_path / "results/train")}
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(sections))
        return str(path)

    return write


def printed(capsys, *words):
    assert check_gpu.main(["--plan", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_plan_of_the_demo(yaml, capsys, monkeypatch):
    monkeypatch.setattr(memory_plan, "SIZES", (1, 4))
    path = yaml(micro_batch_size=5)
    lines = printed(capsys, path, "--gpus", "16", "--gpu_memory", "80")
    assert lines[2] == "rows      285, the longest 45 tokens"  # 300 less 5 % for validation
    table = [line for line in lines if line.startswith(memory_plan.STRATEGIES)]
    assert [line[:19].strip() for line in table] == [*memory_plan.STRATEGIES]
    assert all(line.split()[-2:] == ["yes", "5"] for line in table)
    assert [line.split()[0] for line in lines[-2:]] == ["disk", "host"]


def test_the_plan_of_dpo_with_a_lora(yaml, capsys, monkeypatch):
    """Its setting fine_tuning has the name of a section of train.py."""
    monkeypatch.setattr(memory_plan, "SIZES", (1,))
    path = yaml()
    model = json.loads(Path(path).read_text())["model"]
    content = model | {"fine_tuning": "lora", "train_data": runs.PAIRS, "max_rows": 6}
    Path(path).write_text(json.dumps(content))
    lines = printed(capsys, path, "--gpus", "2", "--gpu_memory", "80")
    assert lines[2].startswith("rows      5, ")  # one is for validation


def test_the_plan_of_an_adapter_is_that_of_its_base(yaml, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_plan, "SIZES", (1,))
    plain = printed(capsys, yaml(micro_batch_size=1), "--gpus", "2", "--gpu_memory", "80")
    shutil.copytree(ROOT / "tests/golden/demo_adapter", tmp_path / "lora")
    settings = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(ROOT / "data/demo/model")
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(settings))
    path = yaml(micro_batch_size=1)
    text = Path(path).read_text().replace(str(tmp_path / "model"), str(tmp_path / "lora"))
    Path(path).write_text(text)
    assert printed(capsys, path, "--gpus", "2", "--gpu_memory", "80")[3:] == plain[3:]


def test_the_largest_micro_batch_that_fits(yaml, capsys, monkeypatch):
    monkeypatch.setattr(
        memory_plan, "need", lambda _, precision, model, rows, *more: Sizes(rows=len(rows))
    )

    def share(sizes, name, _ranks):
        return sizes.rows * {"DDP": 30, "FSDP FULL_SHARD": 10}.get(name, 20) * GIB, 0, 0, 0

    monkeypatch.setattr(memory_plan, "share", share)
    monkeypatch.setattr(memory_plan, "notes", lambda *_: [])
    path = yaml(micro_batch_size=3)
    for room, ddp, full in ((100, "yes 3", "yes 8"), (70, "no 2", "yes 4"), (5, "no 0", "no 0")):
        shown = printed(capsys, path, "--gpus", "2", "--gpu_memory", str(room))
        ends = {line[:19].strip(): " ".join(line.split()[-2:]) for line in shown}
        assert (ends["DDP"], ends["FSDP FULL_SHARD"]) == (ddp, full)


def test_a_machine_is_the_one_here_or_the_one_that_was_named():
    none = {"devices": [], "kind": "cpu"}
    four = {"devices": [{"memory_gib": 79.2}] * 4, "kind": "cuda"}
    assert memory_plan.machine(four) == (4, "cuda", 79.2 * GIB)
    assert memory_plan.machine(four, gpus=12) == (12, "cuda", 79.2 * GIB)
    assert memory_plan.machine(none, 16, 40) == (16, "cuda", 40 * GIB)
    with pytest.raises(UserError, match="^--plan: this machine has no GPU"):
        memory_plan.machine(none, gpus=8)
