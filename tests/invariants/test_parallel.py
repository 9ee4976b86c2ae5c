"""Wrap, backward, clip, step, state: on one rank and several, and what travels between them."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import reading
import runs
from ddp_utils import checkpoints, distributed, logps, lora
from ddp_utils.chat_template import Encoder
from ddp_utils.models import load_tokenizer
from ddp_utils.policy import LossScale, Policy, Precision, decay, learning_rate, make_optimizer
from ddp_utils.sharding import fsdp
from ranks import ranks


def policy_and_pairs(fine_tuning="lora"):
    world = distributed.init_process_group(distributed.whoami())
    torch.manual_seed(0)
    precision = Precision.choose(world.device, fine_tuning)
    adapter = lora.LoraSpec(4, 8, 0.0, "q_proj,v_proj") if fine_tuning == "lora" else None
    model = lora.load_policy("data/demo/model", adapter, precision, world.device)
    policy = Policy(logps.Scorer(model, precision.autocast), world)
    data, _ = reading.pairs(runs.PAIRS, Encoder(load_tokenizer("data/demo/model")))
    optimizer, schedule = make_optimizer(policy, 1e-3, 10, "linear", 0.0, 0.0)
    return world, policy, optimizer, schedule, data


def one_step(world, policy, optimizer, schedule, data):
    """A step on all pairs, shared out; returns the loss of the global batch."""
    mine = data[world.rank :: world.world_size]
    policy.sync_gradients(True)
    chosen, rejected = policy(logps.collate(mine))
    loss = (rejected - chosen).sum() / len(data)
    policy.backward(loss * world.world_size)
    policy.step(optimizer, schedule, policy.clip_grad_norm(1.0).item())
    return distributed.all_sum(loss.detach(), world).item()


def save_after_two(folder, fine_tuning):
    parts = policy_and_pairs(fine_tuning)
    for _ in range(2):
        one_step(*parts)
    tensors = parts[1].state(parts[2])
    if parts[0].is_main:
        checkpoints.write(folder, 2, tensors, {})
    return [one_step(*parts) for _ in range(3)]


def load_and_go_on(folder, fine_tuning):
    parts = policy_and_pairs(fine_tuning)
    path, skipped = checkpoints.find_newest(folder)
    assert skipped == []
    tensors, manifest = checkpoints.read(path)
    assert manifest["step"] == 2
    parts[1].load_state(*parts[2:4], tensors, 2)
    return [one_step(*parts) for _ in range(3)]


@pytest.mark.parametrize("fine_tuning", ["lora", "full"])
def test_complaint_24_a_state_saved_on_4_ranks_goes_on_on_1_and_2(fine_tuning, tmp_path):
    expected = ranks(4, save_after_two, str(tmp_path), fine_tuning)[0]
    names = checkpoints.read(checkpoints.find_newest(tmp_path)[0])[0]
    assert not [name for name in names if "module." in name or "_orig_mod" in name]
    kinds = {name.split("/")[0] for name in names}
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq", "step", "loss_scale"}
    for world_size in (1, 2, 4):
        found = ranks(world_size, load_and_go_on, str(tmp_path), fine_tuning)[0]
        assert found == pytest.approx(expected, rel=1e-5)
    fresh = ranks(1, load_nothing, fine_tuning)[0]  # the control: without the state
    assert abs(fresh - expected[0]) > 1e-3 * abs(expected[0])


def load_nothing(fine_tuning):
    return one_step(*policy_and_pairs(fine_tuning))


def reductions():
    """How many gradient buckets travel with each of three micro-batches."""
    _, policy, _, _, data = policy_and_pairs()
    assert isinstance(policy.ddp, DistributedDataParallel)
    sent, counts = [], []

    def hook(state, bucket):
        sent.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    policy.ddp.register_comm_hook(None, hook)
    for last in (False, False, True):
        policy.sync_gradients(last)
        chosen, rejected = policy(logps.collate(data[:2]))
        policy.backward((rejected - chosen).sum())
        counts.append(len(sent))
    return counts


def test_gradients_travel_with_the_last_micro_batch_only():
    for counts in ranks(2, reductions):
        assert counts[:2] == [0, 0] and counts[2] > 0


def test_the_loss_scale_halves_after_an_overflow_and_doubles_after_2000_good_steps():
    scale = LossScale(enabled=True)
    assert scale.scale == 65536
    assert not scale.allows_step(float("inf")) and scale.scale == 32768
    assert all(scale.allows_step(1.0) for _ in range(2000)) and scale.scale == 65536
    off = LossScale(enabled=False)
    assert off.allows_step(float("nan")) and off.scale == 1.0


def test_under_a_loss_scale_gradients_and_steps_are_those_without(monkeypatch):
    found = []
    for scaled in (False, True):
        parts = policy_and_pairs()
        if scaled:
            parts[1].loss_scale = LossScale(enabled=True)
        losses = [one_step(*parts) for _ in range(3)]
        found.append((losses, list(parts[1].trainable().values())))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)


SCHEDULE = {  # 10 steps, 2 of warm-up
    "linear": {0: 1 / 3, 1: 2 / 3, 2: 1.0, 6: 0.5, 9: 0.125},
    "cosine": {6: 0.5, 4: 0.8535533905932737},
    "constant": {9: 1.0},
}


def test_the_schedule_by_hand():
    for kind, rates in SCHEDULE.items():
        found = {done: decay(kind, done, steps=10, warmup=2) for done in rates}
        assert found == pytest.approx(rates)


def test_the_peak_rate_by_hand():
    expected = {"linear": 4e-5, "sqrt": 2e-5, "world_size": 8e-5, "none": 1e-5}
    for scaling, rate in expected.items():
        assert learning_rate(1e-5, scaling, 64 / 16, world_size=8) == pytest.approx(rate)


KEPT = {  # what FSDP is told, processes of a node -> what a rank of two keeps of a layer
    "FULL_SHARD": (fsdp.Settings(), 2, (0.5, True, 3, torch.bfloat16, False)),
    "SHARD_GRAD_OP": (fsdp.Settings("SHARD_GRAD_OP"), 2, (0.5, False, 3, torch.bfloat16, False)),
    "HYBRID_SHARD": (fsdp.Settings("HYBRID_SHARD"), 1, (1.0, True, 3, torch.bfloat16, False)),
    "one piece": (
        fsdp.Settings(fsdp_auto_wrap_policy="NO_WRAP"),
        2,
        (0.5, False, 1, torch.bfloat16, False),
    ),
    "offload": (fsdp.Settings(fsdp_offload_params=True), 2, (0.5, True, 3, torch.bfloat16, True)),
}


def kept_by_fsdp():
    """Share of its numbers, whether it is shared out again after a forward, how many parts are
    sharded by themselves, the dtype that computes, and whether it waits in the host's memory."""
    world, kept = distributed.init_process_group(distributed.whoami()), []
    for settings, local_size, _ in KEPT.values():
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=12)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        scorer, dtypes = logps.Scorer(model, torch.bfloat16), []
        weight = model.model.layers[0].mlp.up_proj
        weight.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))  # noqa: B023
        fsdp.shard(scorer, settings, world._replace(local_size=local_size))
        share = fsdp.local(weight.weight).numel() / weight.weight.numel()
        with torch.no_grad():
            scorer(scorer.example(world.device))
        parts = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        group = parts[-1]._get_fsdp_state()._fsdp_param_group
        offloaded = group.fsdp_params[0].offload_to_cpu
        again = isinstance(weight.weight, DTensor)
        kept.append((share, again, len(parts), dtypes[0], offloaded))
    return kept


def test_fsdp_keeps_what_its_strategy_says():
    for kept in ranks(2, kept_by_fsdp):
        assert kept == [expected for _, _, expected in KEPT.values()]
