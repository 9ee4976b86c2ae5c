"""How often a step of each of the five loops would make the host wait for a GPU.

Counted on a CPU (syncs.py) in the second step, with one micro-batch and with four: the difference
is what each further one costs.
"""

import importlib
import sys

import pytest
import torch

from conftest import TESTS
from ddp_utils import policy as policy_module
from ddp_utils.policy import Policy
from ranks import ranks

sys.path.append(str(TESTS / "invariants"))

import test_every_script as scripts  # noqa: E402
from syncs import Counter  # noqa: E402
from test_every_script import data  # noqa: E402, F401  a fixture

WAITS = ("read", "copy")
# reads, and copies that are waited for: of each micro-batch, and of a step beside them
LIMITS = ((0, 0), (1, 0))


class Enough(Exception):
    """The step that is counted is over."""


def second_step(name, folder, flags):
    """Kind and line -> how often, from the second train_step() until the third."""
    script = importlib.import_module(scripts.SCRIPTS[name].module)
    train_step = script.train_step
    counter = Counter()
    steps = []
    micro_batches = []
    backward = Policy.backward
    adamw = policy_module.AdamW

    def counted(policy, loss):
        micro_batches.append(len(steps))
        backward(policy, loss)

    def fused(groups, **options):  # as on a GPU, where it keeps no counters on the host
        return adamw(groups, **options | {"fused": True})

    def watched(*arguments):
        steps.append(0)
        if len(steps) == 2:
            counter.__enter__()
        elif len(steps) == 3:
            counter.__exit__()
            raise Enough
        return train_step(*arguments)

    script.train_step = watched
    Policy.backward = counted
    policy_module.AdamW = fused
    with pytest.raises(Enough):
        scripts.life(name, folder, flags)
    return counter.lines, micro_batches.count(2)


def waits(name, data, folder):  # noqa: F811
    """Lines that wait: of each micro-batch, and of a step beside these -> two dicts."""
    runs = []
    for accumulation in (1, 4):
        flags = scripts.flags_of(name, data, 1, accumulation)
        runs += ranks(1, second_step, name, f"{folder}/{accumulation}", flags)
    (few, count), (many, more) = runs
    assert more > count
    each = {place: (many[place] - few[place]) / (more - count) for place in many}
    step = {place: few[place] - count * each.get(place, 0) for place in few}
    return each, step


def total(lines):
    """Reads and copies of some lines."""
    return tuple(sum(n for (kind, _), n in lines.items() if kind == wait) for wait in WAITS)


def test_the_counter_sees_each_way_to_wait_and_nothing_else():
    values = torch.arange(6.0).view(3, 2)
    truths = values > 2
    ways = {
        "read": [
            lambda: values.sum().item(),
            lambda: values.tolist(),
            lambda: bool(truths.any()),
            lambda: values[truths],
            lambda: f"{values.sum():.2f}",
            lambda: values.cpu(),
        ],
        "copy": [
            lambda: values[[0, 1]],
            lambda: torch.tensor([1.0], device="cpu"),
            lambda: torch.tensor([1.0]).to("cpu"),
            lambda: values[torch.tensor([0, 1])],
        ],
        "pinned": [lambda: torch.tensor([1.0]).to("cpu", non_blocking=True)],
        "": [lambda: torch.tensor([1.0]).sum().item(), lambda: values[1:].sum() * 2],
    }
    for kind, calls in ways.items():
        for call in calls:
            with Counter() as counter:
                call()
            assert dict(counter.lines) == ({(kind, "elsewhere"): 1} if kind else {}), kind


@pytest.mark.parametrize("name", scripts.SCRIPTS)
def test_a_step_reads_once_and_a_micro_batch_never(name, data, tmp_path):  # noqa: F811
    each, step = waits(name, data, tmp_path)
    for title, lines in (("each micro-batch", each), ("beside them", step)):
        for (kind, line), count in sorted(lines.items()):
            if count:
                print(f"{name}: {title}: {kind} {count:g} {line}")
    assert (total(each), total(step)) == LIMITS


class Over(Exception):
    """The evaluation that is counted is over."""


@pytest.mark.parametrize("name", ["dpo, all weights", "sft", "baking"])
def test_an_evaluation_reads_once_however_many_micro_batches_it_has(name, data, tmp_path):  # noqa: F811
    ranks(1, first_evaluation, name, str(tmp_path), scripts.flags_of(name, data, 1, 4))


def first_evaluation(name, folder, flags):
    script = importlib.import_module(scripts.SCRIPTS[name].module)
    evaluate = script.evaluate
    calls = []
    add = script.Averages.add

    def counted(self, *arguments):
        calls.append(0)
        add(self, *arguments)

    def watched(*arguments, **options):
        with Counter() as counter:
            evaluate(*arguments, **options)
        assert len(calls) > 1 and total(counter.lines) == (1, 0), counter.lines
        raise Over

    script.evaluate, script.Averages.add = watched, counted
    with pytest.raises(Over):
        scripts.life(name, folder, flags)
