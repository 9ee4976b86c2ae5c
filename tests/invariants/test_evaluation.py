"""Exact evaluation: every row once, whatever the number of ranks and the batch size."""

import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_logps import by_hand
from transformers import AutoModelForCausalLM

import faults
import main_distributed
import reading
import runs
import train
from config import Config
from ddp_utils import distributed, metrics
from ddp_utils import run as run_
from ddp_utils.metrics import Averages
from ddp_utils.policy import Policy
from lm import logps, model_files
from lm.chat_template import Encoder
from lm.models import load_tokenizer
from ranks import ranks, run_ranks

ROWS = 7
NAMES = ("loss", "rewards/margins", "logps/chosen", "logps/rejected", "rewards/accuracies")


def seven_rows(folder):
    """Seven pairs of very different length, so that a wrong weight would be seen."""
    source = Path(runs.__file__).parents[1] / "data/demo/preferences_test.jsonl"
    rows = [json.loads(line) for line in source.read_text().splitlines()[:ROWS]]
    for number, row in enumerate(rows):
        row["chosen"] = " ".join([row["chosen"]] * (1 + number % 4))
    path = Path(folder) / "seven.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def load(path):
    data, _ = reading.pairs(path, Encoder(load_tokenizer("data/demo/model")))
    return data, AutoModelForCausalLM.from_pretrained(model_files.model_path("data/demo/model"))


def evaluations(path, reference):
    """main_distributed.evaluate of a policy against a table that is not its own log-probs."""
    world = distributed.init_process_group(distributed.whoami())
    data, model = load(path)
    policy = Policy(logps.Scorer(model).float(), world, trained=False)
    run = SimpleNamespace(step=1, world=world, evaluation=lambda _, batches, __: batches)
    tables = {"test": data}, {"test": reference}
    results = []
    for batch_size in (1, 2, 3):
        config = Config(batch_size=batch_size * world.world_size, beta=0.3)
        with torch.no_grad():
            results.append(main_distributed.evaluate(policy, "test", *tables, config, run))
    return results


def float64_means(path, reference):
    """Each pair alone, full logits, float64 throughout; the closed form of the DPO loss."""
    data, model = load(path)
    model.double()
    sums = dict.fromkeys(NAMES, 0.0)
    for row, pair in enumerate(data):
        with torch.no_grad():
            summed = by_hand(model, pair)
        chosen, rejected = summed - reference[row]
        margin = 0.3 * (chosen - rejected).item()
        loss = torch.nn.functional.softplus(torch.tensor(-margin, dtype=torch.float64)).item()
        for name, value in zip(NAMES, (loss, margin, *summed.tolist(), margin > 0), strict=True):
            sums[name] += value / ROWS
    return sums


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_complaint_03_seven_rows_are_seven_rows_on_any_number_of_ranks(world_size, tmp_path):
    path = seven_rows(tmp_path)
    # made up, so that some pairs are right and some are wrong
    reference = torch.tensor([[-300.0, -5.0], [-1.0, -9.5]]).repeat(4, 1)[:ROWS]
    expected = float64_means(path, reference.double())
    assert 0 < expected["rewards/accuracies"] < 1
    for results in ranks(world_size, evaluations, str(path), reference):
        for found in results:  # batches of 1, 2 and 3 per rank
            assert found["count"] == ROWS
            for name in NAMES:
                # fp32: 0.2e-6 with AVX-512, 1.4e-6 with SSE and AVX2; a pair counted twice: 1e-2
                assert found[name] == pytest.approx(expected[name], rel=1e-5), name
            assert found["rewards/margins_low"] < found["rewards/margins"]


def intervals():
    """Averages of two rows on each of two ranks, or of four rows on one; and those of a ratio."""
    world = distributed.init_process_group(distributed.whoami())
    averages = Averages(world, ["loss", "rewards/accuracies"])
    row = world.rank if world.world_size == 2 else slice(None)
    loss, right = torch.tensor([[1.0, 2.0], [4.0, 9.0]])[row], torch.tensor([[1, 1], [1, 0]])[row]
    values = {"loss": loss.flatten(), "rewards/accuracies": right.flatten().double()}
    averages.add(values, torch.ones_like(loss.flatten()))
    of_ratio = Averages(world, ["loss"], {"loss": "tokens"})
    rows = slice(world.rank, None, world.world_size)
    costs, tokens = (torch.tensor([*part[rows], math.nan]) for part in drawn_rows())
    weight = torch.tensor([1.0] * (len(costs) - 1) + [0.0])  # the last row is padding
    of_ratio.add({"loss": costs, "tokens": tokens}, weight)
    return averages.reduce(), of_ratio.reduce()


def drawn_rows():
    """Costs and tokens of 300 rows, whose cost per token varies with their length."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 41, size=300).astype(float)
    return tokens * generator.gamma(2.0, 1.5, size=300) * (1 + tokens / 20), tokens


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interval_is_that_of_all_rows(world_size):
    """Losses 1, 2, 4, 9: mean 4, standard deviation sqrt(38 / 3); Wilson's of 3 in 4 by hand.

    The interval of a ratio is that of a bootstrap over rows, whose own error is about 3 %.
    """
    half = 1.96 * math.sqrt(38 / 3) / 2
    z, p = 1.96**2 / 4, 0.75
    spread = 1.96 * math.sqrt(p * (1 - p) / 4 + z / 16) / (1 + z)
    costs, tokens = drawn_rows()
    rows = np.random.default_rng(1).integers(300, size=(4000, 300))
    drawn = np.quantile(costs[rows].sum(1) / tokens[rows].sum(1), (0.025, 0.975))
    error = 0.1 * (drawn[1] - drawn[0]) / 2
    for found, ratio in ranks(world_size, intervals):
        assert {*ratio} == {"count", "loss", "loss_low", "loss_high"} and ratio["count"] == 300
        assert ratio["loss"] == pytest.approx(costs.sum() / tokens.sum(), rel=1e-12)
        assert (ratio["loss_low"], ratio["loss_high"]) == pytest.approx(drawn, abs=error)
        ends = found["loss_low"], found["loss_high"]
        assert ends == pytest.approx((4 - half, 4 + half), rel=1e-12)
        ends = found["rewards/accuracies_low"], found["rewards/accuracies_high"]
        assert ends == pytest.approx(
            ((p + z / 2) / (1 + z) - spread, (p + z / 2) / (1 + z) + spread)
        )
        assert {*found} == {"count", "loss", "rewards/accuracies"} | {
            f"{name}_{end}" for name in ("loss", "rewards/accuracies") for end in ("low", "high")
        }


def test_a_ratio_of_three_units_by_hand():
    """3 / 1, 2 / 2, 7 / 3: ratio 2, residuals 1, -2, 1 and variance 6 / 2 / (2 * 2) / 3."""
    found = metrics.ratio("x", torch.tensor([3.0, 2.0, 7.0]), torch.tensor([1.0, 2.0, 3.0]))
    half = 1.96 * math.sqrt(6 / 2 / 4 / 3)
    assert found == pytest.approx({"x": 2.0, "x_low": 2 - half, "x_high": 2 + half}, rel=1e-12)
    assert metrics.ratio("x", torch.tensor([3.0]), torch.tensor([2.0])) == {"x": 1.5}
    averages = metrics.Averages(distributed.World(), ["loss", "rewards/accuracies"])
    one = torch.ones(1, dtype=torch.double)
    averages.add({"loss": 2 * one, "rewards/accuracies": one}, one)
    found = averages.reduce()  # of one row, only a fraction has an interval
    ends = {"rewards/accuracies_low", "rewards/accuracies_high"}
    assert {*found} == {"loss", "count", "rewards/accuracies", *ends}
    nothing = torch.zeros(2)
    assert math.isnan(metrics.ratio("x", nothing, nothing)["x_low"])


@pytest.mark.parametrize("script", [main_distributed, train])
def test_only_the_first_rows_are_evaluated(script, tmp_path):
    """train.py reads the chosen responses of the pairs; its loss is per token."""
    path = seven_rows(tmp_path)
    data, model = load(path)
    with torch.no_grad():
        by_row = torch.stack([by_hand(model.double(), pair) for pair in data])  # [rows, 2]
    folder = "--result_dir" if script is main_distributed else "--output_dir"
    flags = ["--model_name", str(model_files.model_path("data/demo/model"))]
    flags += runs.words("--max_steps 1 --max_rows 4 --report_to none")
    flags += [] if script is train else ["--num_samples", "0"]
    paths = ["--train_data", runs.PAIRS, "--val_data", str(path)]
    script.main([*flags, *paths, "--max_eval_rows", "3", folder, str(tmp_path / "run")])
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    before = next(line for line in lines if line["split"] == "val" and line["step"] == 0)
    assert before["count"] == 3
    chosen = by_row[:3, 0].sum().item()
    if script is train:
        tokens = torch.tensor([float(len(pair.chosen)) for pair in data[:3]])
        loss = -chosen / tokens.sum().item()
        residuals = -by_row[:3, 0] - loss * tokens
        half = 1.96 * (residuals.square().sum() / 2 / 3).sqrt().item() / tokens.mean().item()
        ends = before["loss_low"], before["loss"], before["loss_high"]
        assert ends == pytest.approx((loss - half, loss, loss + half), rel=1e-5)
    else:
        assert before["logps/chosen"] == pytest.approx(chosen / 3, rel=1e-5)


def stopped(script, folder, number=0, has_new_code=False, more=""):
    """A run of two steps that gets the signal of a time limit in an evaluation.

    number: micro-batches after which it gets the signal, or 0. Prints each that is computed.
    more: flags.
    """
    runs.hurry()
    if has_new_code:
        run_.code_digests = lambda: {"train.py": "another"}
    faults.stop_in_evaluation(number)
    how = "--max_rows 8 --max_steps 2 --log_every 1000"
    flags = f"{how} --batch_size 2 --val_data {runs.PAIRS} --num_samples 0 --result_dir {folder}"
    if script == "train":
        rows = Path(runs.__file__).parents[1] / "data/demo/instructions.jsonl"
        flags = f"{how} --micro_batch_size 1 --val_data {rows} --max_eval_rows 8 --output_dir "
        flags += f"{folder} --report_to none --train_data {rows}"
    return importlib.import_module(script).main(f"{flags} {more}".split())


@pytest.mark.parametrize(
    "script", ["main_distributed", pytest.param("train", marks=pytest.mark.show)]
)
def test_an_evaluation_continues_where_it_was_stopped(script, tmp_path):
    """Of four micro-batches per rank, before training and after it; none is computed twice."""
    [log, _] = faults.finished(run_ranks(2, stopped, script, tmp_path / "whole")).logs
    whole = log.splitlines().count("computed")
    computed = 0
    for number in (1, 2, 3, 1):
        outcome = run_ranks(2, stopped, script, tmp_path / "parts", number)
        assert outcome.codes == [85, 85], outcome.logs
        computed += outcome.logs[0].splitlines().count("computed")
    [log, _] = faults.finished(run_ranks(2, stopped, script, tmp_path / "parts")).logs
    assert computed == 7 and computed + log.splitlines().count("computed") == whole
    assert faults.is_equal(tmp_path / "parts", tmp_path / "whole")
    assert not [*tmp_path.rglob("evaluation.safetensors")]


def test_the_sums_of_a_stopped_evaluation_are_those_of_its_weights(tmp_path):
    """A run that is stopped in its test and then extended tests other weights."""
    more = f"--test_data {runs.PAIRS} --max_steps {{}}"
    whole = run_ranks(1, stopped, "main_distributed", tmp_path / "two", 0, False, more.format(2))
    count = faults.finished(whole).logs[0].splitlines().count("computed")
    for folder, number in (("parts", count - 2), ("whole", 0)):
        how = "main_distributed", tmp_path / folder, number, False
        outcome = run_ranks(1, stopped, *how, more.format(2 if number else 4))
        assert outcome.codes == [85 if number else 0], outcome.logs
    assert [*(tmp_path / "parts").rglob("evaluation.safetensors")]
    how = "main_distributed", tmp_path / "parts", 0, False
    faults.finished(run_ranks(1, stopped, *how, more.format(4)))
    found, expected = (faults.summary(tmp_path / name)["test"] for name in ("parts", "whole"))
    # in two steps the reference scores its rows in other batches; log-probs are -2 to -5
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_an_evaluation_in_other_micro_batches_is_repeated(tmp_path):
    """The batch of a step is the same, so the run may go on; its sums are of other rows."""
    sizes = [f"--micro_batch_size {x} --gradient_accumulation_steps {2 // x}" for x in (1, 2)]
    assert run_ranks(2, stopped, "train", tmp_path, 3, False, sizes[0]).codes == [85, 85]
    faults.finished(run_ranks(2, stopped, "train", tmp_path, 0, False, sizes[1]))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["count"] for line in lines if line["split"] == "val"] == [8, 8]


def test_an_evaluation_of_other_code_is_repeated(tmp_path):
    """Its metrics may be others, so that their sums do not fit."""
    assert run_ranks(2, stopped, "main_distributed", tmp_path, 3).codes == [85, 85]
    [log, _] = faults.finished(run_ranks(2, stopped, "main_distributed", tmp_path, 0, True)).logs
    assert log.splitlines().count("computed") == 8
