"""SFT and DPO: one loss curve under DDP, FSDP and ZeRO, for any number of processes.

A tiny Qwen3 of random weights on the demo's data, lr 1e-4. The losses of all steps and of the
validation are compared with those of one process without any strategy.
"""

import gc
import json
import math
import os
import re
import weakref
from pathlib import Path
from shlex import split as words

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import main_distributed
import runs
import train
from conftest import ROOT
from ddp_utils import checkpoints, distributed
from lm import logps, models, parallel
from lm.sharding import fsdp_policy
from ranks import ranks, run_ranks

FSDP = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"]
OPTIONS = {  # of FSDP's JSON
    "offload": {"fsdp_offload_params": True},
    "checkpointing": {"fsdp_activation_checkpointing": True, "fsdp_forward_prefetch": True},
    "one piece": {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_state_dict_type": "FULL_STATE_DICT"},
}
ZERO = ["zero0", "zero1", "zero2", "zero3", "zero2 offload", "zero3 offload", "zero3 checkpointing"]
QUIET = "--log_every 1000 --report_to none --max_length 64 --gradient_accumulation_steps 2 "
QUIET += "--learning_rate 1e-4 --lr_scheduler constant --warmup_ratio 0 --max_rows 100 "
SCRIPTS = {  # objective -> script, its own flags
    "sft": (train, "--val_share 0.1 --train_data data/demo/instructions.jsonl"),
    "dpo": (
        main_distributed,
        "--num_samples 0 --lr_scaling none --sft_weight 0 --judge= --max_eval_rows 10 "
        "--train_data data/demo/preferences_train.jsonl",
    ),
}
DPO = {  # settings of train.py -> those of main_distributed.py
    "--type": ["--fine_tuning"],
    "--output_dir": ["--result_dir"],
    "--gradient_checkpointing": ["--use_gradient_checkpointing"],
    "--use_fsdp": ["--strategy", "fsdp"],
    "--fsdp_config": ["--sharding_config"],
    "--deepspeed": ["--strategy", "deepspeed", "--sharding_config"],
}


def settings(folder, strategy):
    """The JSON of a strategy, and the flags that name it."""
    path = Path(folder) / f"{strategy}.json"
    if strategy in FSDP or strategy in OPTIONS:
        path.write_text(json.dumps(OPTIONS.get(strategy, {"fsdp_sharding_strategy": strategy})))
        return ["--use_fsdp", "--fsdp_config", str(path)]
    if strategy in ZERO:
        zero = {"stage": int(strategy[4]), "stage3_param_persistence_threshold": 0}
        if zero["stage"] == 3:  # by itself it keeps 1e9 numbers gathered, and sums 5e8 at a time
            zero |= {"stage3_max_live_parameters": 1e7, "stage3_max_reuse_distance": 1e7}
            zero |= {"stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"}
        if "offload" in strategy:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if strategy == "zero3 offload":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
        more = ["--gradient_checkpointing"] if "checkpointing" in strategy else []
        return ["--deepspeed", str(path), *more]
    return []


def main(folder, flags):
    """The script of an objective in this rank's group -> the lines of its metrics.

    flags: the objective, then flags of train.py.
    """
    runs.hurry()
    objective, *flags = flags
    script, own = SCRIPTS[objective]
    flags = [*words(f"{QUIET} {own}"), *flags, "--output_dir", str(folder)]
    if objective == "dpo":
        size = int(os.environ.get("WORLD_SIZE") or os.environ.get("PMI_SIZE") or 1)
        at = flags.index("--micro_batch_size")
        flags[at : at + 2] = ["--batch_size", str(size * int(flags[at + 1]))]
        flags = [new for flag in flags for new in DPO.get(flag, [flag])]
    assert script.main(flags) == 0
    return runs.lines(folder)


def losses_of(world_size, folder, flags, start=main):
    """The losses of a run on this many ranks."""
    return [line["loss"] for line in ranks(world_size, start, folder, flags)[0]]


def batch(world_size):
    """Flags of a global batch of 8."""
    return words(f"--micro_batch_size {4 // world_size}")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Each objective, and the flags of a tiny model."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained("data/demo/model")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # as most are saved
    for part in (model, models.load_tokenizer("data/demo/model")):
        part.save_pretrained(folder)
    return {objective: [objective, "--model_name", str(folder)] for objective in SCRIPTS}


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """alone(objective, type, steps) -> the losses of one process."""
    known = {}

    def losses(objective, kind, steps):
        if (objective, kind, steps) not in known:
            flags = [*data[objective], "--type", kind, "--max_steps", str(steps), *batch(1)]
            folder = tmp_path_factory.mktemp("alone") / "run"
            known[objective, kind, steps] = losses_of(1, folder, flags)
        return known[objective, kind, steps]

    return losses


def same(found, expected, bound=1e-4):
    """Invariant 3: |difference| <= bound x max(|loss|, |loss at step 0|)."""
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= bound * max(abs(b), abs(expected[0])), (step, a, b, found, expected)


# a covering subset: each strategy with both adapters, both objectives, worlds of 2 and 4
SUITE = [
    ("FULL_SHARD", "full", "sft", 2),
    ("FULL_SHARD", "lora", "dpo", 2),
    ("SHARD_GRAD_OP", "lora", "sft", 2),
    ("HYBRID_SHARD", "full", "dpo", 2),
    pytest.param("HYBRID_SHARD_ZERO2", "lora", "dpo", 2, marks=pytest.mark.show),
    ("NO_SHARD", "full", "sft", 2),
    ("zero0", "lora", "dpo", 2),
    ("zero1", "full", "dpo", 2),
    ("zero2", "lora", "sft", 4),
    ("zero3", "full", "sft", 2),
    ("zero3", "lora", "dpo", 2),
    ("zero2 offload", "full", "dpo", 1),
    pytest.param("zero3 offload", "full", "sft", 2, marks=pytest.mark.show),
    ("zero3 offload", "lora", "sft", 1),
    pytest.param("offload", "lora", "sft", 2, marks=pytest.mark.show),
    pytest.param("checkpointing", "full", "dpo", 2, marks=pytest.mark.show),
    ("one piece", "full", "sft", 2),
    pytest.param("zero3 checkpointing", "lora", "dpo", 2, marks=pytest.mark.show),
    ("ddp", "lora", "sft", 4),
]


def needs(strategy):
    if strategy in ZERO:
        pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")


@pytest.mark.parametrize(("strategy", "kind", "objective", "world_size"), SUITE)
def test_one_loss_curve(strategy, kind, objective, world_size, data, alone, tmp_path):
    """Complaint 7: FSDP supports frozen and trained parameters side by side. Complaint 19: under
    each strategy the reference's log-probs of DPO come from the policy itself.
    """
    needs(strategy)
    flags = [*data[objective], "--type", kind, "--max_steps", "6", *batch(world_size)]
    flags += settings(tmp_path, strategy)
    same(losses_of(world_size, tmp_path / "run", flags), alone(objective, kind, 6))


@pytest.mark.show
@pytest.mark.parametrize("objective", ["sft", "dpo"])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ddp", *FSDP, *OPTIONS, *ZERO])
def test_one_loss_curve_of_20_steps(strategy, world_size, kind, objective, data, alone, tmp_path):
    flags = [*data[objective], "--type", kind, "--max_steps", "20", *batch(world_size)]
    flags += settings(tmp_path, strategy)
    same(losses_of(world_size, tmp_path / "run", flags), alone(objective, kind, 20))


CPU = {"device": "cpu", "pin_memory": False}
REAL_KEYS = {  # of other people's files, whose effect is not that of the strategies above
    "zero1 adamw": {"stage": 1, "contiguous_gradients": False, "round_robin_gradients": True},
    "zero2 old": {"stage": 2, "cpu_offload": True, "parameter_alignment": True}
    | {"round_robin_gradients": True, "use_multi_rank_bucket_allreduce": False},
    "zero3 plus": {"stage": 3, "zero_hpz_partition_size": 2, "sub_group_size": 0}
    | {"max_live_parameters": 0, "max_reuse_distance": 0, "prefetch_bucket_size": "auto"}
    | {"stage3_allgather_sequential": True, "leaf_module": {"classes": ["Qwen3MLP"]}}
    | {"offload_optimizer": CPU, "stage3_param_persistence_threshold": 0},
}


@pytest.mark.parametrize("name", REAL_KEYS)
def test_keys_of_real_files_train_as_without_them(name, data, alone, tmp_path):
    """The learning rate is that of the file's AdamW."""
    pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")
    adamw = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0, "betas": "auto"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": REAL_KEYS[name], "optimizer": adamw}))
    flags = [*data["sft"], *batch(2), "--type", "full", "--max_steps", "2"]
    flags += ["--deepspeed", str(path)]
    same(losses_of(2, tmp_path / "run", flags), alone("sft", "full", 2))


def test_a_layer_may_contain_another_one(data, alone, tmp_path):
    """As MambaBlock and MambaMixer, which transformers names both; the inner one comes first."""
    names = {"fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Qwen3MLP"}
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(names | {"fsdp_forward_prefetch": True}))
    flags = [*data["sft"], *batch(2), "--type", "full", "--max_steps", "2"]
    flags += ["--use_fsdp", "--fsdp_config", str(path)]
    same(losses_of(2, tmp_path / "run", flags), alone("sft", "full", 2))


class Group:
    """The default group of a backend, bound to a device."""

    def __init__(self, splits):
        self.bound_device_id, self.supports_splitting = "xpu:0", splits

    def _get_backend(self, _device):
        return self


@pytest.mark.parametrize("splits", [False, True])
def test_a_mesh_makes_new_groups_where_the_backend_cannot_split_one(splits, monkeypatch):
    """xccl cannot; nccl can."""
    group = Group(splits)
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", group)
    with fsdp_policy.without_splitting(distributed.World()):
        assert group.bound_device_id == ("xpu:0" if splits else None)
    assert group.bound_device_id == "xpu:0"


def released(path):
    """Bytes of the shards of a ZeRO-3 reference after its forward, and once it is released."""
    world = distributed.init_process_group(distributed.whoami(), "gloo", 1)
    options = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    model = models.load(path, torch.float32, torch.device("cpu")).requires_grad_(False)
    strategy = parallel.choose("deepspeed", options | {"train_batch_size": world.world_size})
    policy = parallel.wrap(logps.Scorer(model), world, strategy, trained=False)
    shards = [weakref.ref(parameter.ds_tensor) for parameter in model.parameters()]

    def size():
        return sum(shard().nbytes for shard in shards if shard() is not None)

    before = size()
    with torch.no_grad():
        policy.scorer(policy.scorer.example(world.device))
    policy.release()
    del policy, model
    gc.collect()
    return before, size()


def test_a_reference_of_zero_3_is_freed(tmp_path):
    needs("zero3")
    for before, after in ranks(2, released, "data/demo/model"):
        assert before > 1e6 and after == 0


# --- stopped, killed, changed ---------------------------------------------------------------------


def as_pals(folder, flags):
    """main() on ranks of PALS, which does not set the LOCAL_RANK that DeepSpeed reads."""
    rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    del os.environ["LOCAL_RANK"]
    names = {"PALS_RANKID": rank, "PMI_SIZE": size, "PALS_LOCAL_RANKID": rank}
    os.environ.update(names | {"PALS_LOCAL_SIZE": size})
    return main(folder, flags)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_zero_where_the_launcher_sets_no_local_rank(strategy, data, alone, tmp_path):
    needs(strategy)
    flags = [*data["sft"], *batch(2), "--type", "lora", "--max_steps", "3"]
    flags += settings(tmp_path, strategy)
    same(losses_of(2, tmp_path / "run", flags, as_pals), alone("sft", "lora", 3))


def flags_of(strategy, kind, steps, data, folder):
    more = ["--type", kind, "--max_steps", str(steps), *settings(folder, strategy)]
    return [*data["sft"], *batch(2), *more]


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("FULL_SHARD", "FULL_SHARD", "full"),
        ("zero3", "zero3", "full"),
        ("zero1", "zero1", "full"),
        pytest.param("zero3", "zero3", "lora", marks=pytest.mark.show),
        pytest.param("one piece", "ddp", "full", marks=pytest.mark.show),
        ("FULL_SHARD", "ddp", "lora"),
    ],
)
def test_a_run_resumes(first, then, kind, data, tmp_path):
    """The same bits under the same strategy, the same losses under one that reads full tensors."""
    needs(first)
    expected = ranks(2, main, tmp_path / "whole", flags_of(first, kind, 4, data, tmp_path))[0]
    ranks(2, main, tmp_path / "parts", flags_of(first, kind, 2, data, tmp_path))
    runs.as_if_killed(tmp_path / "parts")
    lines = ranks(2, main, tmp_path / "parts", flags_of(then, kind, 4, data, tmp_path))[0]
    assert len(runs.losses(lines)) == 4
    if first == then:
        assert runs.losses(lines) == runs.losses(expected)
    same(runs.losses(lines), runs.losses(expected))


def replies_of(folder):
    """Rows of the first test prompts: their replies before and after, and the verdict."""
    return json.loads((folder / "examples.json").read_text())["test"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "zero3"])
def test_dpo_has_replies_a_judge_and_a_test_set_and_resumes(strategy, data, tmp_path):
    """As one process without a strategy; before training, the greedy replies are the same."""
    needs(strategy)
    own = words(
        "--num_samples 2 --max_new_tokens 6 --temperature 0 --judge data/demo/judge.py:score"
    )

    def flags(steps, size, *more):
        common = [*data["dpo"], *own, "--type", "full", "--max_steps", str(steps)]
        return [*common, *batch(size), *more]

    sharded = settings(tmp_path, strategy)
    one, parts = tmp_path / "one", tmp_path / "parts"
    expected = ranks(1, main, one, flags(4, 1))[0]
    ranks(2, main, parts, flags(2, 2, *sharded))
    runs.as_if_killed(parts)
    lines = ranks(2, main, parts, flags(4, 2, *sharded))[0]
    same(runs.losses(lines), runs.losses(expected))
    assert [line["split"] for line in lines].count("test") == 1
    found, wanted = replies_of(parts), replies_of(one)
    assert found[0].keys() == wanted[0].keys()
    assert [row["reference"] for row in found] == [row["reference"] for row in wanted]


def on_a_disk_of_its_own(folder):
    """Each rank has another folder of the same name, as on nodes that share no disk."""
    os.chdir(Path(folder) / os.environ["RANK"])
    rows = str(ROOT / "data/demo/instructions.jsonl")
    flags = runs.words(
        "--use_fsdp --type full --max_rows 8 --max_steps 1 --report_to none --output_dir run"
    )
    return train.main([*flags, "--train_data", rows, "--val_share", "0"])


def test_parts_on_disks_that_are_not_shared_are_one_line_before_the_first_step(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    outcome = run_ranks(2, on_a_disk_of_its_own, str(tmp_path))
    assert outcome.codes == [2, 2], outcome.logs
    assert outcome.logs[1] == (
        "error: run: rank 1 does not see the folder that rank 0 sees; "
        "use a run folder on a disk that all nodes can read\n"
    )
    assert not (tmp_path / "1/run").exists() and not (tmp_path / "0/run/checkpoints").exists()


@pytest.mark.parametrize("then", ["ddp", "SHARD_GRAD_OP"])
def test_shards_of_another_strategy_are_an_error(then, data, tmp_path):
    """One line, before a model is loaded; the run stays as it is."""
    ranks(2, main, tmp_path / "run", flags_of("FULL_SHARD", "full", 1, data, tmp_path))
    runs.as_if_killed(tmp_path / "run")
    flags = flags_of(then, "full", 2, data, tmp_path)
    outcome = run_ranks(2, main, tmp_path / "run", flags)
    assert outcome.codes == [2, 2], outcome.logs
    [mistake] = re.findall("error: .*", "".join(outcome.logs))
    assert "FSDP FULL_SHARD on 2 processes" in mistake
    assert "Traceback" not in "".join(outcome.logs)
    path, skipped = checkpoints.find_newest(tmp_path / "run" / "checkpoints")
    assert (path.name, skipped) == ("step-00000001", [])
    (path / "state-00001-of-00002.safetensors").unlink()
    assert checkpoints.find_newest(path.parent)[0] is None  # half a state is none


def test_a_json_that_has_changed_is_noticed(data, tmp_path):
    path = tmp_path / "fsdp.json"
    for strategy, steps in (("FULL_SHARD", "1"), ("SHARD_GRAD_OP", "2")):
        path.write_text(json.dumps({"fsdp_sharding_strategy": strategy}))
        flags = [*data["sft"], *batch(1), "--use_fsdp", "--fsdp_config", str(path)]
        outcome = run_ranks(1, main, tmp_path / "run", [*flags, "--max_steps", steps])
        runs.as_if_killed(tmp_path / "run")
    (printed,) = outcome.logs
    assert re.search(r"\ncontent of fsdp_config: \w+ -> \w+, from here on\n", printed), printed


# --- what sharding is for -------------------------------------------------------------------------


def fraction_of_the_model(folder, flags):
    """Return what part of the parameters this rank has at the end."""
    save, fractions = models.save_policy, []

    def spy(policy, *arguments):
        fsdp_policy.reshard(policy.scorer)
        parameters = list(policy.scorer.model.parameters())
        total = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        shards = [fsdp_policy.local(getattr(p, "ds_tensor", p)) for p in parameters]
        fractions.append(sum(shard.numel() for shard in shards) / total)
        save(policy, *arguments)

    models.save_policy = spy
    main(folder / "run", flags)
    return fractions[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "zero3"])
def test_each_of_four_ranks_has_a_quarter_of_the_parameters(strategy, data, tmp_path):
    needs(strategy)
    flags = [*data["sft"], "--type", "full", "--max_steps", "1", *batch(4)]
    flags += settings(tmp_path, strategy)
    fractions = ranks(4, fraction_of_the_model, tmp_path, flags)
    assert max(fractions) <= 0.3, fractions


# --- what is saved --------------------------------------------------------------------------------


def gathered_weights(path, strategy, options):
    """Shard a model with a frozen embedding and a buffer -> what rank 0 would save, the model."""
    model = models.load(path, torch.float32, torch.device("cpu"))
    model.model.register_buffer("counts", torch.arange(5.0))
    model.get_input_embeddings().requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world = distributed.init_process_group(distributed.whoami(), "gloo", 1)
    policy = parallel.wrap(logps.Scorer(model), world, parallel.choose(strategy, options))
    base = models.load(path, "auto", models.META)
    base.model.norm.float()  # as if the files, which are in bf16, had it so
    for name in expected.keys() - {"counts", "model.counts", "model.norm.weight"}:
        expected[name] = expected[name].bfloat16()
    return models.full_weights(policy, base), expected


def clipped(path, max_norm, is_offloaded):
    """Norm and full gradients of a sharded model, as if its shards were not where NCCL reads."""
    world = distributed.init_process_group(distributed.whoami(), "gloo", 1)
    model = models.load(path, torch.float32, torch.device("cpu"))
    policy = parallel.wrap(logps.Scorer(model), world, parallel.choose("fsdp", None))
    if is_offloaded:
        policy.world = world._replace(device=torch.device("cpu", 0))
    batch = policy.scorer.collate([logps.Pair([5, 6, 7], [8, 9], [10], "", "")], "cpu")
    chosen, rejected = policy(batch)
    policy.backward((chosen - 2 * rejected).sum() * (1 + world.rank))  # FSDP takes the mean
    norm = policy.clip_grad_norm(max_norm)
    return norm, {name: policy.gradient(p) for name, p in policy.trainable().items()}


@pytest.mark.parametrize("max_norm", [0.0, 0.01])
def test_offloaded_gradients_are_clipped_as_others_are(max_norm, data):
    """Only sums of squares leave the host: NCCL does not read its memory (pytorch#148532)."""
    path = data["sft"][2]
    (expected, gradients), _ = ranks(2, clipped, path, max_norm, False)
    for norm, others in ranks(2, clipped, path, max_norm, True):
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(others, gradients, rtol=1e-5, atol=1e-9)
    total = math.sqrt(sum(gradient.double().square().sum() for gradient in gradients.values()))
    assert total == pytest.approx(max_norm or expected.item(), rel=1e-4)


ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
ZERO_3 |= {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(("strategy", "options"), [("fsdp", None), ("deepspeed", ZERO_3)])
def test_frozen_weights_and_buffers_are_saved_too(strategy, options, data):
    needs("zero3" if options else "FULL_SHARD")
    path = data["sft"][data["sft"].index("--model_name") + 1]
    weights, expected = ranks(2, gathered_weights, path, strategy, options)[0]
    expected.pop("lm_head.weight")  # the embedding
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


# --- half precision -------------------------------------------------------------------------------

NATS = 2e-2  # rounding of a loss in bf16


ALIKE = [pytest.param(name, marks=pytest.mark.show) for name in ("zero0", "zero2")]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "zero1", "zero3", *ALIKE])
def test_bf16(strategy, data, tmp_path):
    """The losses are those of DDP in bf16, within the rounding; so are gradient norms."""
    needs(strategy)
    flags = [*data["sft"], "--type", "full", "--max_steps", "4", *batch(2)]
    flags += ["--mixed_precision", "bf16"]
    plain = ranks(2, main, tmp_path / "ddp", flags)[0]
    flags += settings(tmp_path, strategy)
    sharded = ranks(2, main, tmp_path / strategy, flags)[0]
    assert [line["split"] for line in sharded].count("train") == 4
    for one, other in zip(sharded, plain, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=NATS)
        if one["split"] == "train":
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
