"""What each of the five scripts promises: equal on 1, 2, 4 processes; stopped, killed; the best."""

import hashlib
import importlib.util
import json
import math
import os
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

import faults
import main_distributed
import runs
import train
from ad import evaluate, windows
from ad.config import read
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils.policy import Policy
from ranks import ranks, run_ranks

DEMO = ROOT / "data/demo"
STEPS = 12
# accumulations on so many processes, and flags that may change no number
SPLITS = [(1, 1, ""), (2, 2, ""), (4, 1, "")]


class Script(NamedTuple):
    module: str
    flags: str  # of twelve steps, a checkpoint each five; the last batch of an epoch is short
    folder: str = "--output_dir"
    accumulation: str = "--gradient_accumulation_steps"
    rows: str = "--batch_size"  # of one forward: of each process
    of_all: bool = False  # or of all processes together
    batch: int = 8
    splits: list = SPLITS
    dropout: str = ""  # what a run that is stopped and killed has on top
    first_loss: float | None = math.log(2)


COMMON = f"--max_steps={STEPS} --warmup_ratio=0 --log_every=1000 --save_every=5 --report_to=none "
DPO = COMMON + "--lr_scaling=none --sft_weight=0 --num_samples=0 --max_length=64 --beta=0.5 "
DPO += f"--test_data={runs.PAIRS} --val_data={runs.PAIRS} --eval_every=4 --max_rows=45 "
SFT = COMMON + "--max_length=64 --max_rows=43 --eval_every=4 --val_share=0.1 "
BAKING = COMMON + "--num_samples=0 --lora_r=8 --learning_rate=3e-3 --eval_every=4 "
PROTEIN = COMMON + f"--train_data={ROOT}/data/input/test_data_real.json --max_rows=42 "
PROTEIN += f"--val_data={ROOT}/data/input/test_data_val.json --learning_rate=1e-3 "
PROTEIN += f"--base_model_name={DEMO}/protein_model.pt "
# 25 goals, 3 of them held out; 12 episodes of 6 steps, of which the model sees 4
AD = f"""grid_size=5 horizon=6 n_stream=4 total_source_timesteps=288 train_n_stream=4
train_source_timesteps=72 n_transit=24 tf_n_embd=16 tf_n_layer=2 train_timesteps={STEPS}
num_warmup_steps=3 summary_interval=1 eval_interval=4 gen_interval=4 eval_episodes=6 eval_copies=2
ckpt_interval=5 report_to=none """
LORA = "--lora_dropout=0.1"


def distillation(words, actions=5, splits=SPLITS[:2]):
    """Algorithm Distillation on tasks of a kind."""
    return Script(
        "ad.train",
        f"{AD} {words}",
        "output_dir",
        "gradient_accumulation_steps",
        "train_batch_size",
        batch=16,
        splits=splits,
        dropout="tf_dropout=0.1 use_compressed_context=true compress_interval=12",
        first_loss=math.log(actions),  # all of them alike
    )


SCRIPTS = {
    "dpo, all weights": Script(
        "main_distributed",
        DPO + "--fine_tuning=full --learning_rate=1e-4",
        "--result_dir",
        of_all=True,
        batch=7,  # which no number of processes divides
        splits=[(1, 1, ""), (2, 1, "--layout=separate"), (4, 1, "")],
    ),
    "dpo, lora": Script(
        "main_distributed",
        DPO + "--fine_tuning=lora --learning_rate=1e-3",
        "--result_dir",
        of_all=True,
        splits=[(1, 1, ""), (4, 1, ""), (2, 4, "--use_gradient_checkpointing")],
        dropout=LORA,
    ),
    "sft": Script("train", SFT, rows="--micro_batch_size", dropout=LORA, first_loss=None),
    "baking": Script(
        "train_loop",
        BAKING,
        "--out_dir",
        dropout=f"{LORA} --report_to=tensorboard",  # whose files are continued
        first_loss=None,
    ),
    "protein": Script("dpo_inv.run_dpo_ddp", PROTEIN),
    "distillation": distillation("", splits=SPLITS),
    "distillation, permuted": distillation("env=darkroom_permuted source=q_learning n_task=40"),
    "distillation, key to door": distillation("env=key_to_door source=posterior n_task=40"),
    "distillation, frozen lake": distillation("env=FrozenLake-v1 alg_seed=1", actions=4),
    "dpo, no reference": Script(
        "main_distributed",
        DPO.replace("--sft_weight=0 ", "") + "--method=orpo --learning_rate=3e-4",
        "--result_dir",
        of_all=True,
        splits=SPLITS[:2],
        first_loss=None,
    ),
}


# other tasks train with the same script: one of them is enough
OTHERS = ("distillation, key to door", "distillation, frozen lake")
NAMES = [pytest.param(x, marks=pytest.mark.show) if x in OTHERS else x for x in SCRIPTS]


def replies(path, rows):
    """What generate_data.py would write: answers of the demo under a system prompt."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    lines = []
    for row in rows:
        tokens = [*tokenizer(row["chosen"]).input_ids, tokenizer.eos_token_id]
        line = {"question": row["prompt"], "reply": row["chosen"], "tokens": tokens}
        lines.append(json.dumps(line | {"x0": "Shout.", "model": "data/demo/model"}))
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Script -> flags of the files that this test makes for it."""
    folder = tmp_path_factory.mktemp("data")
    lines = (DEMO / "preferences_train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:50]]
    replies(folder / "train.jsonl", rows[:43])
    replies(folder / "val.jsonl", rows[43:])
    flags = {"baking": [f"--data_path={folder}/train.jsonl", f"--val_path={folder}/val.jsonl"]}
    for name, script in SCRIPTS.items():
        is_there = "FrozenLake" not in script.flags or importlib.util.find_spec("gymnasium")
        if script.module == "ad.train" and is_there:
            file = folder / f"{name}.npz"
            windows.collect(read(script.flags.split()), file)
            flags[name] = [f"traj_file={file}"]
    return flags


def flags_of(name, data, size, accumulation=1, more=""):
    script = SCRIPTS[name]
    if "FrozenLake" in script.flags:
        pytest.importorskip("gymnasium")
    rows = script.batch // accumulation
    if not script.of_all:
        rows //= size
    batch = [f"{script.rows}={rows}", f"{script.accumulation}={accumulation}"]
    return [*script.flags.split(), *data.get(name, []), *batch, *more.split()]


def life(name, folder, flags, fault=None):
    """One life of a run in this rank; returns the gradient of its first step."""
    runs.hurry()
    evaluate.write = lambda *_: None  # a picture
    first = []
    take = Policy.step

    def spy(policy, *arguments):
        if not first:
            gradients = [p.grad for p in policy.trainable().values()]
            first.append(torch.cat([g.flatten().double() for g in gradients if g is not None]))
        take(policy, *arguments)

    Policy.step = spy
    if fault:
        fault[0](*fault[1:])
    script = SCRIPTS[name]
    main = importlib.import_module(script.module).main
    assert main([*flags, f"{script.folder}={folder}"]) == 0
    return first[0] if first and os.environ["RANK"] == "0" else None


def start(size, name, folder, flags, fault=None):
    return run_ranks(size, life, name, str(folder), flags, fault)


@pytest.mark.parametrize("name", NAMES)
def test_equal_on_1_2_and_4_processes(name, data, tmp_path):
    """Losses to 4e-5, the gradient of the first step to 1.2e-5, whatever the accumulation.

    With SSE, AVX2 and AVX-512 on CPUs of AMD and Intel the largest differences were 9.1e-6 (DPO,
    all weights) and 3.0e-6 (the gradient of a LoRA, with the AVX2 kernels of MKL on Intel).
    """
    script = SCRIPTS[name]
    gradients, lines = [], []
    for number, (size, *split) in enumerate(script.splits):
        folder = tmp_path / f"{number}/run"
        flags = flags_of(name, data, size, *split)
        gradients.append(ranks(size, life, name, str(folder), flags)[0])
        lines.append(runs.lines(folder))
    losses = runs.losses(lines[0])
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    if script.first_loss:  # not world_size times it
        assert losses[0] == pytest.approx(script.first_loss, abs=1e-5)
    for number, split in enumerate(script.splits):
        assert (gradients[number] - gradients[0]).norm() <= 1.2e-5 * gradients[0].norm(), split
        for found, expected in zip(lines[number], lines[0], strict=True):
            for key in ("split", "step", "count", "learning_rate"):
                assert found.get(key) == expected.get(key), split
            for key in {"loss", "kl"} & expected.keys():
                bound = 4e-5 * max(abs(expected[key]), losses[0])
                assert abs(found[key] - expected[key]) <= bound, (split, found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_values_before_the_first_step_are_those_of_the_same_weights(name, data, tmp_path):
    """Most need no pass. A step with a rate of almost 0 changes nothing; after it all is scored."""
    still = "--max_steps=1 --learning_rate=1e-30"
    if SCRIPTS[name].module == "ad.train":
        still = "train_timesteps=1 lr=1e-30 num_warmup_steps=0"
    faults.finished(start(1, name, tmp_path / "run", flags_of(name, data, 1, more=still)))
    before, after = runs.lines(tmp_path / "run", "val")
    assert (before.pop("step"), after.pop("step")) == (0, 1)
    assert "rewards/accuracies" not in before or name == "dpo, no reference"
    assert {"loss", "kl"} & before.keys()
    before.pop("split")
    after = {key: after[key] for key in before}
    assert before == pytest.approx(after, rel=1e-4, abs=1e-5)
    assert faults.summary(tmp_path / "run")["before"] == before


def weights(folder):
    """Digest of the model, and of the newest checkpoint: weights and moments of AdamW."""
    files = sorted(Path(folder).glob("model/*.safetensors"))
    files.append(max(Path(folder).glob("checkpoints/*/state.safetensors")))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


# each script alone or as two processes, since what differs is in code that they share; the
# environments of distillation and DPO without a reference train with the same scripts
SIZES = list(zip(SCRIPTS, (1, 2, 1, 2, 1, 2), strict=False))


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_stopped_and_killed_it_goes_on_to_the_bit(name, size, data, tmp_path):
    """A signal to the last rank in step 4, SIGKILL of it in step 9.

    Without all of its state, a dropout that hangs on the step, or its place in the epoch, it
    would end elsewhere.
    """
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = flags_of(name, data, size, more=SCRIPTS[name].dropout)
    faults.finished(start(size, name, whole, flags))
    which = signal.SIGTERM if size == 1 else signal.SIGUSR1
    outcome = start(size, name, run, flags, (faults.signal_in_backward, size - 1, 3, which))
    assert outcome.codes == [85] * size, outcome.logs
    said = "stopped after step 4; run the same command to resume\n"
    assert outcome.logs[0].endswith(said)
    assert outcome.logs[1:] == [""] * (size - 1)
    summary = faults.summary(run)
    assert (summary["status"], summary["exit_code"], summary["step"]) == ("preempted", 85, 4)
    outcome = start(size, name, run, flags, (faults.kill_in_backward, size - 1, 4))
    assert outcome.codes[-1] == -9 and 0 not in outcome.codes, outcome.logs
    saved = 6 if name == "protein" else 5  # proteins also save the best epoch, of six steps
    assert faults.steps(run)[-1] == saved
    summary = faults.summary(run)  # what the report of a killed run is made of
    assert summary["step"] >= saved and "val" in summary
    if size == 1:  # otherwise rank 0 may have time to write that it has failed
        assert (summary["status"], summary["step"]) == ("running", 6 if name == "protein" else 8)
    outcome = faults.finished(start(size, name, run, flags))
    assert f"is not finished: resumes after step {saved}" in outcome.logs[0]
    assert weights(run) == weights(whole)
    assert faults.numbers(run) == faults.numbers(whole)
    assert [line["step"] for line in runs.lines(run, "train")] == list(range(1, STEPS + 1))
    assert faults.steps(run) == [10, STEPS]
    assert list(Path(run, "checkpoints").glob(".*")) == []


@pytest.mark.parametrize("name", ["dpo, lora", "sft", "baking", "protein", "distillation"])
def test_a_gradient_that_is_not_finite_stops_before_the_step(name, data, tmp_path):
    """The loss that is logged is finite; only its gradient is not."""
    fault = faults.spoil_in_backward, 0, 2, math.inf
    outcome = start(1, name, tmp_path / "run", flags_of(name, data, 1), fault)
    assert outcome.codes == [3], outcome.logs
    assert "error: step 3: the gradient is not finite; no step was taken" in outcome.logs[0]
    assert faults.summary(tmp_path / "run")["step"] == 2


# --- save_best: results and model are of the lowest validation loss ------------------------------

WORSE = "--learning_rate={} --lr_scheduler=constant --keep_checkpoints=1 --save_best"
BEST = {  # flags of a run whose validation is not lowest at its end
    # A shorter run scores fewer pairs under a reference, in other batches, with other rounding.
    "dpo, all weights": WORSE.format("3e-3") + " --val_data={swapped} --method=simpo",
    "sft": WORSE.format("1e-3") + " --type=full --val_data={curt}",
    "sft, fsdp": WORSE.format("1e-3") + " --type=full --val_data={curt} --use_fsdp",
    "sft, zero3": WORSE.format("1e-3") + " --type=full --val_data={curt} --deepspeed={zero}",
    "baking": WORSE.format("1e-2") + " --eval_every=2",
}


@pytest.fixture
def best_of(data, tmp_path):
    """best_of(name) -> (script, flags): validation prefers what training does not."""

    def flags(name):
        if "zero" in name:
            pytest.importorskip("deepspeed", reason="pip install -r requirements-deepspeed.txt")
        names = ("swapped.jsonl", "curt.jsonl", "zero.json")
        swapped, curt, zero = (tmp_path / name for name in names)
        rows = [json.loads(line) for line in Path(runs.PAIRS).read_text().splitlines()]
        lines = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
        swapped.write_text("\n".join(map(json.dumps, lines)))
        lines = [{"instruction": row["prompt"], "output": row["rejected"]} for row in rows]
        curt.write_text("\n".join(map(json.dumps, lines)))
        zero.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        script = name if name in SCRIPTS else name.split(",")[0]
        return script, flags_of(
            script, data, 2, more=BEST[name].format(swapped=swapped, curt=curt, zero=zero)
        )

    return flags


def lowest(folder):
    """(loss, step) of the lowest validation by metrics.jsonl: not the last one."""
    found = [line for line in runs.lines(folder, "val") if line["step"]]  # of trained weights
    best = min(found, key=lambda line: line.get("kl", line.get("loss")))
    assert best["step"] < found[-1]["step"], found
    return best.get("kl", best.get("loss")), best["step"]


ALIKE = {"dpo, all weights", "baking", "sft", "sft, zero3"}  # to SFT with FSDP
SOME = [pytest.param(name, marks=pytest.mark.show if name in ALIKE else ()) for name in BEST]


@pytest.mark.parametrize("name", SOME)
def test_the_best_is_that_of_a_run_that_had_ended_there(name, best_of, tmp_path):
    """Killed before the best step, and after it, it still knows it."""
    whole, run, short = (tmp_path / folder for folder in ("whole", "run", "short"))
    script, flags = best_of(name)
    outcome = faults.finished(start(2, script, whole, flags))
    loss, best = lowest(whole)
    assert f"save_best: back to step {best}, " in outcome.logs[0]
    faults.finished(start(2, script, short, [*flags, f"--max_steps={best}"]))
    assert faults.digest(whole) == faults.digest(short)
    summary, expected = faults.summary(whole), faults.summary(short)
    assert summary["best"] == {"loss": loss, "step": best} and summary["step"] == STEPS
    assert summary["val"] == expected["val"] and summary.get("test") == expected.get("test")
    for rank, turn in ((0, 2), (1, 9)):
        outcome = start(2, script, run, flags, (faults.kill_in_backward, rank, turn))
        assert outcome.codes[rank] == -9
    faults.finished(start(2, script, run, flags))
    assert faults.is_equal(run, whole)
    assert faults.steps(run) == [best, STEPS]


@pytest.mark.parametrize("name", ["dpo, lora", "sft", "baking", "protein", "distillation"])
def test_a_signal_in_the_first_step_is_obeyed_after_it(name, data, tmp_path):
    """Each start must do at least one step, or a job that is queued again never ends."""
    flags = flags_of(name, data, 1)
    fault = faults.signal_in_backward, 0, 0, signal.SIGTERM
    assert start(1, name, tmp_path / "run", flags, fault).codes == [85]
    assert faults.summary(tmp_path / "run")["step"] == 1


def test_a_stop_within_a_validation_does_not_lose_it(best_of, tmp_path):
    """The checkpoint of its step is older than it, and lacks its numbers."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    name, flags = best_of("dpo, all weights")
    faults.finished(start(1, name, whole, flags))
    fault = faults.signal_before, "main_distributed.evaluate", 1, signal.SIGTERM
    assert start(1, name, run, flags, fault).codes == [85]
    faults.finished(start(1, name, run, flags))
    assert faults.is_equal(run, whole)
    assert faults.summary(run)["val"] == faults.summary(whole)["val"]


def test_a_damaged_best_is_an_error(best_of, tmp_path):
    """A flipped bit would load silently. Without save_best the same run continues to its end."""
    run = tmp_path / "run"
    name, flags = best_of("dpo, all weights")
    fault = faults.signal_before, "main_distributed.train_step", 10, signal.SIGTERM
    assert start(1, name, run, flags, fault).codes == [85]
    file = run / f"checkpoints/step-{lowest(run)[1]:08d}/state.safetensors"
    content = bytearray(file.read_bytes())
    content[-200_000] ^= 0x40
    file.write_bytes(content)
    outcome = start(1, name, run, flags)
    assert outcome.codes == [2]
    assert outcome.logs[0].splitlines()[-1] == (
        f"error: {file.parent}: state.safetensors does not match its SHA-256; "
        "without --save_best the last weights are used"
    )
    outcome = faults.finished(start(1, name, run, [*flags, "--no_save_best"]))
    assert "save_best: True -> False, from here on" in outcome.logs[0]
    assert "best" not in faults.summary(run) and faults.summary(run)["step"] == STEPS


def test_without_validation_data_there_is_no_best():
    with pytest.raises(UserError, match="--save_best: there is no validation data"):
        main_distributed.main(["--save_best", "--test_data", runs.PAIRS, "--check"])
    with pytest.raises(UserError, match="save_best: there is no validation data"):
        train.main(["--save_best", "--val_share", "0", "--check"])
