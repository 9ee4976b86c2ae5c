"""20 steps on real pairs against TRL 1.16: the logs that its DPOTrainer wrote, step by step."""

import json

import pytest

import runs
from ranks import ranks

LETTER = runs.words(
    "--no_shuffle --lr_scheduler constant --lr_scaling none --warmup_ratio 0 --weight_decay 0 "
    "--no_use_mixed_precision --batch_size 4 --max_steps 20 --max_rows 80 "
    "--beta 0.1 --max_grad_norm 1 --num_samples 0"
)
CASES = {
    "trl_full": ["--fine_tuning", "full"],
    "trl_full_ipo": ["--fine_tuning", "full", "--method", "ipo"],
    "trl_full_hinge": ["--fine_tuning", "full", "--method", "hinge"],
    "trl_full_robust": ["--fine_tuning", "full", "--method", "robust", "--label_smoothing", "0.1"],
    "trl_lora": ["--fine_tuning", "lora"],
}


def stories(shared, folder):
    data = shared / "data"
    return [
        *("--model_name", str(data / "models/stories260k")),
        *("--train_data", str(data / "preferences/stories_pairs_train.jsonl")),
        *("--val_data", "", "--test_data", str(data / "preferences/stories_pairs_test.jsonl")),
        *("--result_dir", str(folder)),
    ]


# each loss and both kinds of weights; test_trl_demo.py has the layouts the other way round
RUNS = [(name, "shared") for name in CASES if name != "trl_lora"] + [("trl_lora", "separate")]
RUNS += [pytest.param("trl_full", "separate", marks=pytest.mark.show)]
RUNS += [pytest.param("trl_lora", "shared", marks=pytest.mark.show)]


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_twenty_steps_equal_trl(name, layout, shared, tmp_path):
    golden = json.loads((shared / f"golden/dpo/{name}.json").read_text())
    flags = [*stories(shared, tmp_path / "run"), *LETTER, *CASES[name]]
    flags += ["--learning_rate", str(golden["learning_rate"]), "--layout", layout]
    if name == "trl_lora":
        flags += ["--init_adapter", str(shared / "golden/dpo/adapter_init")]
    ranks(2, runs.main, flags)  # TRL ran on one process
    ours = runs.lines(tmp_path / "run", "train")
    assert len(ours) == len(golden["log"]) == 20
    scale = abs(golden["log"][0]["loss"])
    for mine, theirs in zip(ours, golden["log"], strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-4 * max(scale, abs(theirs["loss"]))
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        for side in ("logps/chosen", "logps/rejected"):
            assert mine[side] == pytest.approx(theirs[side], rel=1e-4)
