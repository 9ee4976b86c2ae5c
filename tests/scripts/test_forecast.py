"""dryrun.py, forecast.py, plan.py: bytes counted by hand, shares by hand, what the plan prints."""

import functools
import json
import shutil
from types import SimpleNamespace as Settings

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

import check_gpu
from conftest import ROOT
from ddp_utils import UserError, optim, sampler
from ddp_utils.encoder import Pair
from ddp_utils.tools import dryrun, forecast, plan

D, E, H, V, LAYERS, R = 64, 128, 32, 512, 5, 4  # width, MLP, head, vocabulary, layers, LoRA rank
LAYER = (
    4 * D * D + 3 * D * E + 2 * D
)  # of a Llama with two heads: q, k, v, o; gate, up, down; norms
LORA = R * (4 * 2 * D + 3 * (D + E))
GIB = 2**30


def settings(**changes):
    usual = {
        "fine_tuning": "full",
        "lora_r": R,
        "lora_alpha": R,
        "lora_targets": "all-linear",
        "lora_dropout": 0.0,
    }
    usual |= {"model_name": "tiny", "init_adapter": "", "base_dtype": "auto", "layout": "auto"}
    usual |= {"use_mixed_precision": True, "use_gradient_checkpointing": False, "lean": True}
    return Settings(**usual | changes)


def outline(kind=transformers.LlamaConfig, **shape):
    shape = {"hidden_size": D, "intermediate_size": E, "num_hidden_layers": LAYERS} | shape
    shape = {"vocab_size": V, "num_attention_heads": 2, "num_key_value_heads": 2} | shape
    shape = {"head_dim": H, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0} | shape
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(kind(**shape))


def rows_of(count, prompt=20, chosen=11, rejected=16):
    return [Pair([3] * prompt, [4] * chosen, [5] * rejected, "", "")] * count


def losses(scorer, batch, _reference):
    return (torch.sub(*scorer(batch)),)


@functools.cache
def need_of(rows=1, device="cpu", kind=transformers.LlamaConfig, shape=(), lengths=(), **changes):
    model = outline(kind, **dict(shape))
    return dryrun.need(settings(**changes), model, rows_of(rows, *lengths), losses, device)


def test_weights_gradients_and_moments_of_a_full_fine_tuning():
    need = need_of()
    count = LAYERS * LAYER + 2 * V * D + D
    assert need.gradients == 4 * count
    assert need.weights == pytest.approx(4 * count, abs=2 * 4 * H)  # and angles for positions
    assert need.moments == pytest.approx(8 * count, rel=1e-3)  # and AdamW's counter of each
    assert (need.layer, need.layers, need.root) == (
        4 * LAYER,
        4 * LAYERS * LAYER,
        4 * (2 * V + 1) * D,
    )
    assert need.layer_gradients == 4 * LAYER and need.root_gradients == need.root
    assert need.step == pytest.approx(
        2 * 4 * V * D, rel=1e-2
    )  # of the largest one: root and quotient
    assert need.copies == need.table == 0


def test_a_lora_on_bf16_weights_has_gradients_of_the_adapter_alone():
    need = need_of(fine_tuning="lora", base_dtype="bf16", shape=(("num_hidden_layers", 3),))
    frozen, trained = 3 * LAYER + 2 * V * D + D, 3 * LORA
    assert (need.gradients, need.layer_gradients, need.root_gradients) == (4 * trained, 4 * LORA, 0)
    assert need.weights == pytest.approx(2 * frozen + 4 * trained, abs=2 * 4 * H)
    assert (need.width, need.root) == (2, 2 * (2 * V + 1) * D)


def test_checkpointing_keeps_the_input_of_each_layer():
    fed = 3 * (20 + 10 + 15)  # of each response the last token is a target only
    one, two = (
        need_of(3, use_gradient_checkpointing=True, shape=(("num_hidden_layers", n),))
        for n in (1, 2)
    )
    assert two.kept - one.kept == 4 * fed * D


@pytest.mark.parametrize(
    ("device", "each", "tokens", "width"),
    # 256 tokens at once on a CPU, in fp32; 1024 on a GPU: logits and a copy in bf16
    [("cpu", 32, 64, 4 + 4), ("cpu", 160, 256, 4 + 4), ("cuda", 160, 320, 2 + 4 + 2)],
)
def test_a_frozen_head_holds_logits_and_probabilities(device, each, tokens, width):
    shape = (("num_hidden_layers", 1),)
    need = need_of(device=device, fine_tuning="lora", lengths=(20, each, each), shape=shape)
    there = need.head - need.kept - width * tokens * V
    assert 0 <= there < 0.1 * need.head


def test_another_tracker_finds_the_same_peak():
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    with FakeTensorMode():
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
        )
        optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(300, 64)
        tracker.track_external(net, optimizer, x)
        with tracker:
            net(x).square().mean().backward()
            optimizer.step()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    with FakeTensorMode(), dryrun.Live() as live:
        net = torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
        )
        optimizer, x = torch.optim.AdamW(net.parameters()), torch.randn(300, 64)
        live.since()
        net(x).square().mean().backward()
        optimizer.step()
    assert live.peak == pytest.approx(theirs, rel=0.01)


# full: 6 layers of 100 and a root of 200; lora: the same, frozen, and 10 of adapter a layer
FULL = dryrun.Need(800, 800, 0, 1600, 4, 600, 100, 200, 100, 200, 0, 300, 310, 330, 320, 90, 70)
LORA_ = dryrun.Need(860, 60, 150, 120, 4, 660, 110, 200, 10, 0, 0, 300, 310, 330, 320, 0, 1)
HALF = FULL._replace(width=2, layers=300, layer=50, root=100, copies=300, forward=610, head=730)


def held(need, strategy, ranks, **options):
    return forecast.share(need, strategy, ranks, **options)


def test_ddp():
    share = held(FULL, "DDP", 4)
    assert share[:4] == (800, 800, 1600, 330)
    assert (share.device, share.host) == (3530, 0)
    assert share.sent == 2 * 3 / 4 * 800  # a ring all-reduce
    # the peak is before the first step: the weights twice, and no moments yet
    assert held(LORA_, "DDP", 2).device == 2 * 860
    assert held(LORA_._replace(weights=3e9), "DDP", 2).device == 3e9 + 500 * 2**20


def test_a_process_alone_has_no_gradients_in_the_forward():
    assert held(FULL, "DDP", 1)[:4] == (800, 800, 1600, 70)  # the step: 870 against 330, 200 + 320
    assert held(FULL._replace(backward=900), "DDP", 1)[:4] == (800, 200, 1600, 900)
    assert held(LORA_, "DDP", 1)[:4] == (710, 0, 120, 330)  # the embedding stays in its file
    assert held(FULL, "DDP", 1).sent == 0


def test_full_shard():
    share = held(FULL, "FSDP FULL_SHARD", 4, turns=3)
    # backward: root and two layers gathered, a layer's and the root's gradients: 400 + 300 + 320
    assert share[:4] == (200 + 400, 300, 400, 320)
    # each micro-batch: layers gathered twice, the root once, gradients once
    assert share.sent == 3 * 3 / 4 * (2 * 600 + 200 + 800)
    assert held(LORA_, "FSDP FULL_SHARD", 2)[:4] == (430 + 420, 110, 60, 320)


def test_shard_grad_op_leaves_all_gathered():
    share = held(FULL, "FSDP SHARD_GRAD_OP", 4)
    assert share[:4] == (200 + 900, 300, 400, 320)
    assert share.sent == 3 / 4 * (600 + 200 + 800)


def test_hybrid_shard_shares_within_a_node_and_sums_across():
    share = held(FULL, "FSDP HYBRID_SHARD", 8, nodes=2)
    assert share[:5] == held(FULL, "FSDP FULL_SHARD", 4)[:5]
    assert share.sent == 3 / 4 * 2200 + 2 * 1 / 2 * 200


def test_half_precision_is_gathered_and_has_no_copies():
    share = held(HALF, "FSDP FULL_SHARD", 4)
    assert share[:4] == (200 + 100 + 2 * 50, 0, 400, 730 - 300)
    # backward: gradients as they are computed, and a layer's in fp32 on their way
    share = held(HALF._replace(backward=900), "FSDP FULL_SHARD", 4)
    assert share[:4] == (200 + 200, 100 + 100, 400, 600)
    assert held(HALF, "DDP", 2)[:4] == (800, 800, 1600, 730)


def test_zero():
    one, two, three = (held(FULL, f"ZeRO-{stage}", 4, turns=3, bucket=10) for stage in (1, 2, 3))
    # beside AdamW's moments its own fp32 weights, both in quarters
    assert one[:4] == (800, 800 + 2 * 10 * 4, 200 + 400, 90)  # all gradients and two buckets
    assert two[:4] == (800, 200, 200 + 400, 3 * 200)  # the step: gradients in fp32, two like them
    assert held(FULL._replace(head=900), "ZeRO-2", 4, bucket=10)[:4] == (800, 280, 600, 900)
    # so small a model stays gathered, and what comes next is on its way: three quarters of 800
    assert three[:4] == (200 + 800 + 600, 200 + 10 * 4, 600, 310)
    assert (one.sent, two.sent) == (3 / 4 * (800 + 800), 3 / 4 * (3 * 800 + 800))
    assert three.sent == 3 / 4 * 3 * (2 * 800 + 800)


def test_offload():
    share = held(FULL, "FSDP FULL_SHARD offload", 4)
    assert share[:4] == (400, 300, 0, 320) and share.host == (800 + 1600 + 800) / 4
    two = held(FULL, "ZeRO-2 offload", 4, bucket=10)
    assert two[:4] == (800, 80 + 200, 0, 330) and two.host == (800 + 1600 + 800) / 4
    three = held(FULL, "ZeRO-3 offload", 4, bucket=10)
    assert three[:4] == (800 + 600, 40, 0, 310) and three.host == (800 + 800 + 1600 + 800) / 4


HERE = {
    "devices": [],
    "processes": 2,
    "memory_available_gib": 8.0,
    "memory_gib": 9.0,
    "kind": "cpu",
}
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.2}
NODE = HERE | {"devices": [H100] * 4, "kind": "cuda"}


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    """Writes a YAML file; its model is the demo's without weights."""
    monkeypatch.chdir(ROOT)
    model = tmp_path / "model"
    shutil.copytree("data/demo/model", model, ignore=shutil.ignore_patterns("*.safetensors"))

    def write(**sections):
        sections.setdefault("output", {"output_dir": str(tmp_path / "results/train")})
        sections.setdefault("model", {"model_name": str(model)})
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(sections))
        return str(path)

    return write


def test_the_plan_of_the_demo(yaml, capsys):
    path = yaml(training={"micro_batch_size": 5, "num_epochs": 2})
    words = ["--plan", path, "--gpus", "16", "--gpu_memory", "80", "--tokens_per_second", "10"]
    assert check_gpu.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith(forecast.STRATEGIES)]
    assert [line[:25].replace(" <", "").strip() for line in table] == [*forecast.STRATEGIES]
    assert all(len(line) <= 100 for line in lines if path not in line)
    assert table[0].startswith("DDP <") and " yes " in table[0]
    # 300 questions less a share for validation: 285 rows, 80 a step
    steps = next(line for line in lines if line.startswith("steps")).split()
    assert " ".join(steps[1:12]) == "8 of 80 rows = 16 ranks x 1 x 5;"
    minutes = -(-int(steps[-3]) // 10 // 60)
    assert f"time      {minutes // 60} h {minutes % 60:02d} min at 10 tokens/s" in "\n".join(lines)
    assert lines[-2].endswith(f"slurm --config {path} --num_nodes 2 --num_gpus_per_node 8")
    assert lines[-1] == "sbatch scripts/slurm_job.sh"


def test_a_machine_is_the_one_here_or_the_one_that_was_named():
    cpu = plan.machine(HERE)
    assert (cpu.ranks, cpu.nodes, cpu.device, cpu.memory) == (2, 1, "cpu", 4 * GIB)
    here = plan.machine(NODE)
    assert here[:3] == (4, 1, "cuda") and here.memory == pytest.approx(0.95 * 79.2 * GIB)
    assert plan.machine(NODE, gpus=12)[:3] == (12, 3, "cuda")  # nodes like this one
    assert plan.machine(HERE, 16, 40)[:3] == (16, 2, "cuda")
    wrong = {(None, 0.0): "--gpu_memory 0: ", (8, float("nan")): "--gpu_memory nan: "}
    wrong |= {(8, float("inf")): "--gpu_memory inf: ", (0, 80.0): "--gpus 0: give 1 or more"}
    wrong |= {(9, 80.0): "--gpus 9: as many to each of 2 nodes"}
    for (gpus, memory), says in wrong.items():
        with pytest.raises(UserError, match=f"^{says}"):
            plan.machine(HERE, gpus, memory)
    with pytest.raises(UserError, match="--gpu_memory 80"):
        plan.machine(HERE, gpus=8)


class Line:
    """Stands for Need: so many bytes a token, and a thousand more."""

    def __init__(self, tokens):
        self.tokens = tokens

    def towards(self, other, share):
        return Line(self.tokens + (other.tokens - self.tokens) * share)


def work_of(**changes):
    """A plan whose memory is 1000 + 10 a token; rows have 50, 40, 30, 20 and 10 tokens."""
    rows = [Pair([1] * 2, [1] * (n // 2), [1] * (n // 2), "", "") for n in (50, 40, 30, 20, 10)]
    tried = []

    def need(rows, **_changes):
        tried.append(len(rows))
        return Line(sum(row.fed(True) for row in rows))

    config = Settings(model_name="m", fine_tuning="full")
    config.output_dir, config.lora_r, config.use_gradient_checkpointing = "nowhere/run", 4, False
    usual = {"path": "config.yaml", "is_yaml": True, "config": config, "rows": rows, "micro": 4}
    usual |= {
        "strategy": optim.DDP,
        "turns": 1,
        "plan": sampler.Plan(5, 4, 0),
        "weights": 100,
        "need": need,
    }
    return plan.Work(**usual | changes), tried


@pytest.fixture
def by_tokens(monkeypatch):
    def share(need, name, *_rest):
        times = 1 if name == "FSDP FULL_SHARD" else 2
        return forecast.Share(1000, 0, 0, 10 * times * need.tokens, 0, 0)

    monkeypatch.setattr(forecast, "share", share)


def where_of(memory, ranks=2, nodes=1):
    return plan.Machine(ranks, nodes, "cuda", memory, 100, "GPU")


def test_the_largest_micro_batch_that_fits(by_tokens):
    work, tried = work_of()
    fed = [row.fed(True) for row in work.rows]
    assert fed == [50, 40, 30, 20, 10]
    room = 1100 + 20 * (50 + 40) + 1  # two rows in DDP; 180 tokens in FSDP: 50 40 30 20 10, not 50
    fits = plan.Fits(work, where_of(room))
    assert (fits.most("DDP"), fits.most("FSDP FULL_SHARD")) == (2, 5)
    assert 5 in tried  # not only on the line
    assert plan.Fits(work, where_of(1100 + 999)).most("DDP") == 0
    # 3 of 4 fit with more room, but 4 = 2 x 2: the step stays as it is
    where = where_of(1100 + 20 * (50 + 40 + 30) + 1)
    lines = list(plan.command(work, where, plan.Fits(work, where), "DDP"))
    assert lines[0].endswith("micro_batch_size to 2, gradient_accumulation_steps to 2")
    assert lines[1].startswith("torchrun --standalone --nproc_per_node=2 src/train.py")
