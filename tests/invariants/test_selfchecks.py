"""Step 0 checks itself: each way of being wrong is made on purpose, and the run must refuse."""

import json
import math
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import main_distributed
import reading
import runs
import train
from conftest import ROOT
from ddp_utils import NonFiniteError, UserError, checks, distributed
from ddp_utils.policy import LossScale, Policy, Precision
from lm import logps, merge, models
from lm.chat_template import Encoder
from lm.models import load_tokenizer
from ranks import ranks, run_ranks

SHORT = runs.words("--max_rows 40 --batch_size 8 --max_steps 2")
BF16 = runs.words("--base_dtype bf16 --method dpop")


def broken(kind, folder):
    """Train with one mistake made on purpose."""
    flags = [*runs.LORA, *SHORT]
    if kind == "reference in bf16":
        score = logps.score

        def rounded(scorer, *rest, **options):
            scorer.autocast, before = torch.bfloat16, scorer.autocast
            table = score(scorer, *rest, **options)
            scorer.autocast = before
            return table

        logps.score = rounded
    elif kind == "dropout left on":
        no_dropout = models.no_dropout

        def leaky(model):
            for layer in no_dropout(model).model.layers:
                layer.mlp = torch.nn.Sequential(layer.mlp, Always(0.1))
            return model

        models.no_dropout = leaky
        flags += ["--lora_targets", "q_proj,v_proj"]
    elif kind == "frozen parameter made trainable":
        load_policy = models.load_policy

        def unfrozen(*arguments, **options):
            model = load_policy(*arguments, **options)
            next(p for n, p in model.named_parameters() if "lora" not in n).requires_grad_(True)
            return model

        models.load_policy = unfrozen
    elif kind == "adapter that cannot learn":
        backward = Policy.backward

        def cut(policy, loss):
            backward(policy, loss)
            for name, parameter in policy.trainable().items():
                if "lora_B" in name:
                    parameter.grad.zero_()

        Policy.backward = cut
    elif kind == "loss of another reference":
        checks.check_reference = lambda *arguments: None
        score = logps.score
        logps.score = lambda *rest, **options: score(*rest, **options) + torch.tensor([0.5, 0.0])
    return runs.train(folder, flags)


class Always(torch.nn.Dropout):
    """Dropout that no switch reaches, as in a hand-written layer."""

    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.1, training=True)


WRONG = {  # mistake -> what the line says
    "reference in bf16": "the policy's log-prob differs from the reference's",
    "dropout left on": "the policy's log-prob differs from the reference's",
    "frozen parameter made trainable": "belongs to the base model and is not frozen",
    "adapter that cannot learn": "has a gradient of zero: the adapter would not learn",
    "loss of another reference": "the loss is 0.71",
}


@pytest.mark.parametrize("kind", WRONG)
def test_complaint_13_a_run_that_is_wrong_at_step_0_refuses_to_train(kind, tmp_path):
    outcome = run_ranks(2, broken, kind, str(tmp_path))
    assert outcome.codes == [2, 2], outcome.logs
    lines = "".join(outcome.logs).splitlines()  # the rank that fails first prints the error
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and WRONG[kind] in errors[0], outcome.logs
    assert not any("Traceback" in line for line in lines)
    assert outcome.logs[1] in ("", f"{errors[0]}\n")
    assert runs.lines(tmp_path / "run") == []  # not one step was taken


class AnotherOrder(TorchDispatchMode):
    """Change each bf16 product, as kernels do that sum in another order for each shape.

    The change is so large that the demo's few layers have the noise of SmolLM2-135M on real pairs,
    0.07 nats per token. There 2^-23 does it, by which sums in fp32 differ.
    """

    generator = torch.Generator()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        out = (kwargs or {}).get("out")
        products = torch.ops.aten.mm.default, torch.ops.aten.mm.out
        if function not in products or args[0].dtype != torch.bfloat16:
            return function(*args, **(kwargs or {}))
        left, right = (factor.float() for factor in args)
        size = (left.square() @ right.square()).sqrt()  # root of the sum of the squared terms
        change = 2**-4 * size * torch.randn(size.shape, generator=self.generator)
        product = (left @ right + change).bfloat16()
        return product if out is None else out.copy_(product)


def without_the_first(pair):
    return [range(1, len(response)) for response in pair.responses]


def in_bf16(fault, folder):
    """Train with dpop in bf16, with a reference that has a fault."""
    score = logps.score

    def reference(scorer, pairs, world, micro_batch_size, **rest):
        if not rest:  # the policy, in the check of step 0
            return score(scorer, pairs, world, micro_batch_size)
        targets = without_the_first if fault == "a token less" else logps.Pair.targets.fget
        norm = scorer.unwrap().model.norm.weight.data
        norm *= 1 / 8 if fault == "other weights" else 1
        with mock.patch.object(logps.Pair, "targets", property(targets)):
            table = score(scorer, pairs, world, micro_batch_size, **rest)
        norm *= 8 if fault == "other weights" else 1
        return table

    logps.score = reference
    with AnotherOrder():
        return runs.train(folder, [*runs.LORA, *SHORT, *BF16])


@pytest.mark.parametrize("fault", ["other weights", "a token less"])
def test_in_bf16_too_another_reference_is_an_error(fault, tmp_path):
    outcome = run_ranks(1, in_bf16, fault, str(tmp_path))
    assert outcome.codes == [2], outcome.logs
    assert "the policy's log-prob differs from the reference's" in outcome.logs[0]


def test_rounding_is_no_error_and_no_fall_that_dpop_would_penalize(tmp_path):
    """beta * lambda_dpop is 5: a fall of 0.3 nats that counted would cost 1.5."""
    first = ranks(1, in_bf16, "", str(tmp_path))[0][0]
    assert first["loss"] == pytest.approx(math.log(2), abs=0.02)


def test_in_bf16_a_shift_of_all_responses_is_seen_in_their_mean():
    """16 pairs of 25 tokens: up to 8 * 0.07 * 5 = 2.8 nats in a pair, a quarter in the mean."""
    policy = SimpleNamespace(precision=torch.bfloat16, token_noise=0.07)
    rows = [SimpleNamespace(location=f"row {number}") for number in range(16)]
    reference = torch.full((16, 2), -30.0)
    generator = torch.Generator().manual_seed(0)
    healthy = reference + 0.07 * 5 * torch.randn(16, 2, generator=generator)

    def check(now):
        means = dict(zip(("logps/chosen", "logps/rejected"), now.mean(0).tolist(), strict=True))
        means["loss"] = math.log(2)
        checks.check_first_step(policy, means, now, reference, [25] * 16, rows, math.log(2))

    check(healthy)
    with pytest.raises(UserError, match="mean of the batch: .* by 1.* nats .at most 0.7."):
        check(healthy - 1.0)


def changed_demo(folder, name, change):
    """The demo's model with another content of a JSON file."""
    shutil.copytree(ROOT / "data/demo/model", folder)
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return ["--model_name", str(folder)]


SCRIPTS = {
    main_distributed: ["--max_rows", "40", "--num_samples", "0", "--result_dir"],
    train: ["--config", str(ROOT / "config.yaml"), "--max_rows", "40", "--output_dir"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_that_reads_in_both_directions_is_an_error(script, tmp_path):
    """As models for embeddings do; the next token would be in its own context."""
    change = {"is_causal": False}
    model = changed_demo(tmp_path / "m", "config.json", lambda config: config.update(change))
    with pytest.raises(UserError, match="/m: the model reads a text in both directions "):
        script.main([*SCRIPTS[script], str(tmp_path / "run"), *model, "--max_steps", "1"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_tokenizer_of_another_model_is_a_warning(script, tmp_path, capsys):
    """It has as many tokens; a guess among 2,046 has ln(2046) = 7.62 nats per token."""

    def turn(content):
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = dict(zip(vocabulary, [*vocabulary.values()][::-1], strict=True))

    model = changed_demo(tmp_path / "m", "tokenizer.json", turn)
    data = ["--train_data", str(ROOT / "data/demo/preferences_train.jsonl")]
    flags = [*SCRIPTS[script], str(tmp_path / "run"), "--max_steps", "1", *data]
    assert script.main([*flags, *model]) == 0
    warning = (
        r"warning: before training, the model .* \(1\d\.\d\d nats per token, a random guess 7\."
    )
    assert re.search(warning, capsys.readouterr().out)


def sft_adapter(folder):
    """A LoRA that has learned something, with dropout, as one from supervised fine-tuning."""
    torch.manual_seed(7)
    model = models.load("data/demo/model", torch.float32, torch.device("cpu"))
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)


def scores_of(adapter):
    """Log-probs of the test pairs under base model and adapter."""
    world = distributed.World()
    data, _ = reading.pairs(runs.PAIRS, Encoder(load_tokenizer("data/demo/model")))
    base = models.load("data/demo/model", torch.float32, world.device)
    plain = logps.score(logps.Scorer(base), data, world, 4)
    adapted = logps.score(logps.Scorer(PeftModel.from_pretrained(base, adapter)), data, world, 4)
    return plain.mean(0), adapted.mean(0)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_complaint_14_the_reference_of_an_sft_adapter_is_that_adapter(mode, tmp_path):
    sft_adapter(tmp_path / "sft")
    plain, adapted = scores_of(str(tmp_path / "sft"))
    assert (plain - adapted).abs().min() > 1  # the adapter does matter
    flags = ["--init_adapter", str(tmp_path / "sft"), "--fine_tuning", mode, *SHORT]
    flags += ["--train_data", runs.PAIRS, "--learning_rate", "1e-4"]
    first = ranks(2, runs.train, str(tmp_path), flags)[0][0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    found = torch.tensor([first["logps/chosen"], first["logps/rejected"]])
    torch.testing.assert_close(found, adapted, rtol=1e-5, atol=1e-3)
    if mode == "lora":  # rank and scale are the adapter's, its dropout is not
        (run,) = tmp_path.glob("run")
        made = json.loads((run / "model/adapter_config.json").read_text())
        assert (made["r"], made["lora_alpha"], made["lora_dropout"]) == (4, 8, 0.0)
        said = json.loads((run / "config.json").read_text())
        assert (said["lora_r"], said["lora_alpha"], said["lora_dropout"]) == (4, 8, 0.0)


def too_large_for_fp16(folder, *flags):
    """A CPU that computes in fp16, and a loss whose scaled gradient overflows there."""
    half = Precision(torch.float32, torch.float16)
    Precision.choose = lambda *_: half
    scales, begin, allows = [], LossScale.__init__, LossScale.allows_step

    def lower(self, enabled):  # by itself it begins at 65536: more such steps
        begin(self, enabled)
        self.scale = 512.0

    def spy(self, grad_norm):
        scales.append(self.scale)
        return allows(self, grad_norm)

    LossScale.__init__, LossScale.allows_step = lower, spy
    return runs.train(folder, [*runs.FULL, *flags]), scales


def test_an_overflow_of_fp16_in_the_first_step_is_skipped(tmp_path):
    """As in any other step: the loss scale is halved, and the step after it is taken."""
    flags = runs.words("--method ipo_sum --beta 0.02 --max_steps 2 --batch_size 8")
    flags += ["--train_data", runs.PAIRS, "--val_data", runs.PAIRS]
    lines, scales = ranks(1, too_large_for_fp16, str(tmp_path), *flags)[0]
    norms = [line["grad_norm"] for line in lines if line["split"] == "train"]
    assert norms[0] is None and norms[1] > 0
    assert scales == [512, 256]


def test_a_gradient_that_is_nan_at_every_loss_scale_of_fp16_is_an_error():
    """Otherwise the scale would fall to 0, and no step would be taken in a whole run."""
    policy = SimpleNamespace(overflows=lambda norm: True, loss_scale=LossScale(enabled=True))
    means = {"loss": 1.0, "grad_norm": math.nan}
    checks.check_gradient(policy, 7, means, "full")
    policy.loss_scale.scale = 0.5
    with pytest.raises(NonFiniteError, match="^step 8: the gradient is not finite"):
        checks.check_gradient(policy, 7, means, "full")


def test_another_reference_model_is_scored_in_its_place(tmp_path):
    flags = [*runs.FULL, *SHORT, "--train_data", runs.PAIRS]
    sft_adapter(tmp_path / "sft")
    tokenizer = load_tokenizer("data/demo/model")
    template = "{{ messages[0].content }}{{ messages[-1].content }}"
    tokenizer.chat_template = template  # of its training, not of its base
    tokenizer.save_pretrained(tmp_path / "sft")
    merge.merge(str(tmp_path / "sft"), str(tmp_path / "merged"), "data/demo/model")
    merged = load_tokenizer(str(tmp_path / "merged"))
    assert merged.chat_template == template
    plain, adapted = scores_of(str(tmp_path / "sft"))
    flags += ["--reference_model", str(tmp_path / "merged"), "--beta", "0.25"]
    first = ranks(2, runs.train, str(tmp_path), flags)[0][0]
    expected = 0.25 * ((plain - adapted)[0] - (plain - adapted)[1]).item()
    # merged in bf16, the precision of the base
    assert first["rewards/margins"] == pytest.approx(expected, rel=6e-3)


def test_a_reference_with_other_tokens_is_one_line(tmp_path, monkeypatch):
    """Two pieces have each other's ids; then the last rows of the embedding are missing."""
    other, smaller = tmp_path / "other", tmp_path / "smaller"
    for folder in (other, smaller):
        shutil.copytree(ROOT / "data/demo/model", folder)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    file.write_text(json.dumps(content))
    flags = ["--check", "--train_data", runs.PAIRS, "--result_dir", str(tmp_path / "run")]
    message = f"--reference_model: {re.escape(str(other))}: token . has the id [0-9]+, not [0-9]+; "
    with pytest.raises(UserError, match=f"^{message}use a model with the same tokenizer$"):
        main_distributed.main([*flags, "--reference_model", str(other)])
    model = models.load(str(smaller), torch.float32, torch.device("cpu"))
    model.resize_token_embeddings(model.config.vocab_size // 4)
    model.save_pretrained(smaller)
    for name in smaller.glob("tokenizer*"):
        name.unlink()
    with pytest.raises(
        UserError, match=r":[0-9]+: token id [0-9]+, reference model has [0-9]+ tokens"
    ):
        main_distributed.main([*flags, "--reference_model", str(smaller)])


@pytest.mark.parametrize(
    ("strategy", "autocast", "dtype"),
    [
        ("ddp", torch.bfloat16, torch.float32),
        ("fsdp", torch.bfloat16, "auto"),  # each rank reads all weights to the host
        ("deepspeed", torch.float16, "auto"),
        ("fsdp", None, torch.float32),  # what a bf16 file has would compute in bf16
    ],
)
def test_a_sharded_reference_has_the_dtype_of_its_files(strategy, autocast, dtype, monkeypatch):
    load, run = mock.Mock(), mock.Mock()
    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(main_distributed, "prepare", mock.Mock())
    precision = main_distributed.Precision(torch.float32, autocast)
    monkeypatch.setattr(main_distributed, "precision_of", lambda *_: precision)
    config = main_distributed.settings.Config(strategy=strategy, reference_model="m")
    main_distributed.load_reference(config, {}, run)
    on = run.world.device if strategy == "ddp" else torch.device("cpu")
    assert load.call_args.args == ("m", dtype, on)


def test_a_reference_in_bf16_stays_in_bf16(monkeypatch):
    """It is not trained; in fp32 it would need twice the memory."""
    config = main_distributed.settings.Config(reference_model="data/demo/model")
    precision = Precision(torch.bfloat16, torch.bfloat16)
    monkeypatch.setattr(main_distributed, "precision_of", lambda *_: precision)
    run = SimpleNamespace(world=distributed.World(device=torch.device("cpu")))

    def prepared(scorer, strategy, _pairs, _layout, run, trained):
        return Policy(scorer, run.world, strategy, trained)

    monkeypatch.setattr(main_distributed.parallel, "prepare", prepared)
    data = {"train": SimpleNamespace(extremes=list)}
    policy = main_distributed.load_reference(config, data, run)
    assert {parameter.dtype for parameter in policy.scorer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_complaint_17_trainable_parameters_are_fp32_on_a_bf16_base(mode):
    config = main_distributed.settings.Config(fine_tuning=mode, base_dtype="bf16")
    precision = main_distributed.precision_of(config, torch.device("cpu"))
    adapter = models.LoraSpec.of(config)
    model = models.load_policy(config.model_name, adapter, precision, torch.device("cpu"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and {p.dtype for p in trained} == {torch.float32}
    if mode == "lora":
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert frozen == {torch.bfloat16}


@pytest.mark.parametrize(
    ("step", "logp", "fix"),
    [(0, 0.0, "check loss_of"), (0, math.nan, "remove the rows"), (1, 0.0, "remove the rows")],
)
def test_a_loss_that_is_not_finite_has_the_fix_that_can_help(step, logp, fix):
    """Before the first update, finite log-probs show that only the loss itself is wrong."""
    rows = [SimpleNamespace(location="x.jsonl:1")]
    with pytest.raises(NonFiniteError, match=fix):
        checks.check_step(None, step, {"loss": math.inf}, rows, lambda: torch.tensor([[logp]]), "")
