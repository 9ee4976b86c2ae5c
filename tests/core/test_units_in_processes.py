"""Parts that are no whole run, in real processes: sampling, sockets of a group, check_gpu.py."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import programs
from ddp_utils import NonFiniteError, distributed
from lm import logps, models, sampling
from lm.chat_template import Encoder
from lm.models import load_tokenizer
from ranks import addresses, ranks, run_ranks

QUESTIONS = ["What is the capital of France?", "What is a young cow called?", "Who makes bread?"]
SETTINGS = SimpleNamespace(temperature=1.0, top_p=1.0, max_new_tokens=12, batch_size=4, seed=0)


def replies(sharded=False, longest=12):
    world = distributed.init_process_group(distributed.whoami())
    encoder = Encoder(load_tokenizer("data/demo/model"))
    scorer = logps.Scorer(models.load("data/demo/model", torch.float32, world.device))
    calls = []
    scorer.model.register_forward_hook(lambda *_: calls.append(1))
    if sharded:  # what FSDP adds to a scorer
        scorer.in_step = True
    prompts = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        prompts += 3 * [encoder.ids(encoder.render(turns, add_generation_prompt=True))[0]]
    spec = SimpleNamespace(**{**vars(SETTINGS), "max_new_tokens": longest})
    return sampling.generate(scorer, prompts, encoder.ends, world, spec), len(calls)


def test_the_same_replies_on_1_2_and_3_ranks():
    [(alone, _)] = ranks(1, replies)
    assert len(alone) == 9 and len({tuple(reply) for reply in alone}) > 5
    for world_size in (2, 3):
        for found, _ in ranks(world_size, replies):
            assert found == alone


def test_ranks_that_gather_layers_together_wait_for_the_longest_reply():
    """All call the model equally often; ranks with whole layers stop when their own have ended."""
    calls = {}
    for sharded in (False, True):
        outcomes = ranks(3, replies, sharded, 48)
        assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
        calls[sharded] = {count for _, count in outcomes}
    assert len(calls[True]) == 1 < len(calls[False]) and calls[True] == {max(calls[False])}


def sockets_of_a_group():
    """Addresses at which the group can be reached, and the interface that gloo uses."""
    world = distributed.init_process_group(distributed.whoami())
    distributed.all_sum(torch.ones(2), world)
    return addresses(), os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")
def test_a_group_of_one_node_can_be_reached_from_this_node_alone():
    assert ranks(2, sockets_of_a_group) == [({"127.0.0.1"}, "lo")] * 2
    outcome = run_ranks(2, sockets_of_a_group, env={"GLOO_SOCKET_IFNAME": "lo,lo"})
    assert [result[1] for result in outcome.results] == ["lo,lo"] * 2, outcome.logs  # the user's


def fails_on(rank):
    world = distributed.init_process_group(distributed.whoami())

    def work():
        if world.rank == rank:
            raise NonFiniteError("parameter/x is not finite; not saved")

    distributed.on_each(world, work)


def test_an_error_on_one_rank_is_printed_once_and_ends_all():
    for rank in (0, 1):
        outcome = run_ranks(2, fails_on, rank)
        assert outcome.codes == [NonFiniteError.exit_code] * 2
        printed = [log.count("error: parameter/x is not finite") for log in outcome.logs]
        assert printed == [1 - rank, rank]


@pytest.mark.show
def test_two_processes_measure_and_one_of_them_prints():
    words = "-m torch.distributed.run --standalone --nproc_per_node=2 check_gpu.py --bench --json"
    done = programs.process([sys.executable, *words.split()], CUDA_VISIBLE_DEVICES="")
    report = json.loads(done.stdout)  # one object: rank 1 is silent
    assert (report["ranks"], len(report["rates"])) == (2, 2)
    assert [row["mib"] for row in report["all_reduces"]] == [1, 16, 128]
    for row in report["rates"] + report["all_reduces"]:
        assert min(row.values()) > 0, row
