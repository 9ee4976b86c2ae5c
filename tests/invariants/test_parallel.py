"""Wrap, backward, clip, step, state: on one rank and several, and what travels between them."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import reading
import runs
from ddp_utils import checkpoints, distributed
from ddp_utils.policy import (
    LossScale,
    Policy,
    Precision,
    decay,
    learning_rate,
    make_optimizer,
    rate_text,
)
from ddp_utils.run import from_main
from lm import logps, models, parallel
from lm.chat_template import Encoder
from lm.logps import Pair
from lm.models import load_tokenizer
from lm.sharding import fsdp, fsdp_policy
from ranks import ranks


def policy_and_pairs(fine_tuning="lora"):
    world = distributed.init_process_group(distributed.whoami())
    torch.manual_seed(0)
    precision = Precision.choose(world.device, fine_tuning)
    adapter = models.LoraSpec(4, 8, 0.0, "q_proj,v_proj") if fine_tuning == "lora" else None
    model = models.load_policy("data/demo/model", adapter, precision, world.device)
    policy = Policy(logps.Scorer(model, precision.autocast), world)
    data, _ = reading.pairs(runs.PAIRS, Encoder(load_tokenizer("data/demo/model")))
    optimizer, schedule = make_optimizer(policy, 1e-3, 10, "linear", 0.0, 0.0)
    return world, policy, optimizer, schedule, data


def one_step(world, policy, optimizer, schedule, data):
    """A step on all pairs, split over the ranks -> the loss of the global batch."""
    policy.sync_gradients(True)
    chosen, rejected = policy(logps.collate(data[world.rank :: world.world_size]))
    loss = (rejected - chosen).sum() / len(data)
    policy.backward(loss * world.world_size)
    policy.step(optimizer, schedule, policy.clip_grad_norm(1.0).item())
    return distributed.all_sum(loss.detach(), world).item()


def three_steps(folder, fine_tuning, is_resumed):
    """Save a state after two steps, or load it -> the losses of the next three steps."""
    parts = policy_and_pairs(fine_tuning)
    world, policy, optimizer, schedule, _ = parts
    if is_resumed:
        path, skipped = checkpoints.find_newest(folder)
        tensors, manifest = checkpoints.read(path)
        assert (manifest["step"], skipped) == (2, [])
        policy.load_state(optimizer, schedule, tensors, 2)
    else:
        for _ in range(2):
            one_step(*parts)
        tensors = policy.state(optimizer)
        if world.is_main:
            checkpoints.write(folder, 2, tensors, {})
    return [one_step(*parts) for _ in range(3)]


@pytest.mark.parametrize("fine_tuning", [pytest.param("full", marks=pytest.mark.show), "lora"])
def test_complaint_24_a_state_saved_on_4_ranks_is_loaded_on_1_and_2(fine_tuning, tmp_path):
    expected = ranks(4, three_steps, tmp_path, fine_tuning, False)[0]
    names = checkpoints.read(checkpoints.find_newest(tmp_path)[0])[0]
    assert not [name for name in names if "module." in name or "_orig_mod" in name]
    kinds = {name.split("/")[0] for name in names}
    assert kinds == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    for world_size in (1, 2, 4):
        losses = ranks(world_size, three_steps, tmp_path, fine_tuning, True)[0]
        assert losses == pytest.approx(expected, rel=1e-5)
    first_loss = one_step(*policy_and_pairs(fine_tuning))  # without the state it is another
    assert abs(first_loss - expected[0]) > 1e-3 * abs(expected[0])


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


def test_a_first_step_that_overflows_is_no_warning_of_the_schedule():
    """torch's advice on the order of two calls: the first was skipped, and the schedule counts."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    weight.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Policy.step(SimpleNamespace(loss_scale=LossScale(True)), optimizer, schedule, math.inf)
    assert (weight.item(), schedule.get_last_lr()) == (1, [0.5])


def test_a_loss_scale_is_loaded_in_fp16_alone():
    """In another precision nothing would divide the gradients by it."""
    parts = policy_and_pairs()
    policy, optimizer, schedule = parts[1:4]
    policy.loss_scale = LossScale(enabled=True)
    one_step(*parts)
    tensors = policy.state(optimizer)
    for enabled, expected in ((False, (1.0, 0)), (True, (65536.0, 1))):
        policy.loss_scale = LossScale(enabled)
        policy.load_state(optimizer, schedule, tensors, 1)
        assert (policy.loss_scale.scale, policy.loss_scale.good_steps) == expected
    policy.loss_scale = LossScale(enabled=False)
    assert "loss_scale" not in policy.state(optimizer)


def test_under_a_loss_scale_steps_are_those_without():
    curves = []
    for is_scaled in (False, True):
        parts = policy_and_pairs()
        parts[1].loss_scale = LossScale(is_scaled)
        curves.append([one_step(*parts) for _ in range(3)])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


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
    config = SimpleNamespace(learning_rate=1e-4, lr_scaling="linear")
    assert rate_text(1e-4, config) == "learning rate 0.0001"
    assert rate_text(2e-4, config) == "learning rate 0.0002 (0.0001 x 2, lr_scaling linear)"


PAIRS = [Pair([5, 6, 7], [8, 9, 2], [10, 2], "", "")]
KEPT = {  # settings of FSDP -> what a rank of two keeps of a layer, see below
    (): (0.5, True, 3, False),
    (("fsdp_sharding_strategy", "SHARD_GRAD_OP"),): (0.5, False, 3, False),
    (("fsdp_sharding_strategy", "HYBRID_SHARD"),): (1.0, True, 3, False),
    (("fsdp_auto_wrap_policy", "NO_WRAP"),): (0.5, False, 1, False),
    (("fsdp_offload_params", True),): (0.5, True, 3, True),
}


def kept_by_fsdp():
    """For each of KEPT: the part of a weight that this rank has, whether it is sharded again after
    a forward, how many modules are sharded one by one, and whether shards are on the host."""
    world, kept = distributed.init_process_group(distributed.whoami()), []
    for options in KEPT:
        settings = fsdp.Settings(**dict(options))
        is_hybrid = settings.fsdp_sharding_strategy == "HYBRID_SHARD"
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=12)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        scorer, dtypes = logps.Scorer(model, torch.bfloat16), []
        layer = model.model.layers[0].mlp.up_proj
        layer.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))  # noqa: B023
        fsdp_policy.shard(scorer, settings, world._replace(local_size=1 if is_hybrid else 2))
        fraction = fsdp_policy.local(layer.weight).numel() / layer.weight.numel()
        with torch.no_grad():
            scorer(scorer.example(world.device))
        assert dtypes[0] == torch.bfloat16
        modules = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        group = modules[-1]._get_fsdp_state()._fsdp_param_group
        is_sharded_again = isinstance(layer.weight, DTensor)
        on_host = group.fsdp_params[0].offload_to_cpu
        kept.append((fraction, is_sharded_again, len(modules), on_host))
    return kept


def continued_with_nadam(layout):
    """Loss and numbers of NAdam after each of two steps, the second one also from a saved state."""
    world, found = distributed.init_process_group(distributed.whoami()), []
    precision = Precision(torch.float32, None)
    states = {}
    for is_resumed in (False, True):
        model = models.load_policy("data/demo/model", None, precision, world.device, sharded=True)
        policy = parallel.wrap(logps.Scorer(model), world, parallel.choose("fsdp"))
        how = {"optimizer_class": torch.optim.NAdam}
        optimizer, schedule = make_optimizer(policy, 1e-3, 10, "linear", 0.0, 0.0, **how)
        if is_resumed:
            policy.load_state(optimizer, schedule, states, 1, layout)
        for step in range(is_resumed, 2):
            loss = sum(policy(logps.collate(PAIRS))).sum()
            policy.backward(loss)
            policy.step(optimizer, schedule, policy.clip_grad_norm(1.0).item())
            if step == 0:
                full = policy.state(optimizer, layout)
                states = {name: value.clone() for name, value in full.items()}
                states = states if layout else from_main(states, world)
        numbers = {float(state["mu_product"]) for state in optimizer.state.values()}
        found.append((loss.item(), numbers))
    return found


@pytest.mark.parametrize("layout", ["", "FSDP FULL_SHARD on 2 processes"])
def test_fsdp_resumes_an_optimizer_with_numbers_of_its_own(layout):
    for whole, resumed in ranks(2, continued_with_nadam, layout):
        assert resumed == whole and len(whole[1]) == 1 and 0 < min(whole[1]) < 1


def test_fsdp_keeps_what_its_strategy_says():
    for kept in ranks(2, kept_by_fsdp):
        assert kept == list(KEPT.values())
