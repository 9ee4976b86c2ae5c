"""20 steps on the demo against TRL 1.16: the logs that make.py has its DPOTrainer write."""

import json
from pathlib import Path

import pytest

import runs
from ranks import ranks

HERE = Path(__file__).parent
LETTER = runs.words(
    "--model_name data/demo/model --train_data data/demo/preferences_train.jsonl --val_data '' "
    "--no_shuffle --lr_scheduler constant --lr_scaling none --warmup_ratio 0 --weight_decay 0 "
    "--no_use_mixed_precision --batch_size 4 --max_steps 20 --max_rows 80 "
    "--beta 0.1 --max_grad_norm 1 --sft_weight 0 --num_samples 0"
)
CASES = {
    "trl_demo_full": ["--fine_tuning", "full"],
    "trl_demo_lora": ["--fine_tuning", "lora", "--init_adapter", str(HERE / "demo_adapter")],
}


# the layouts that test_trl.py leaves to show
RUNS = [("trl_demo_full", "separate"), ("trl_demo_lora", "shared")]
RUNS += [pytest.param("trl_demo_full", "shared", marks=pytest.mark.show)]
RUNS += [pytest.param("trl_demo_lora", "separate", marks=pytest.mark.show)]


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_twenty_steps_on_the_demo_equal_trl(name, layout, tmp_path):
    golden = json.loads((HERE / f"{name}.json").read_text())
    flags = [*LETTER, *CASES[name], "--learning_rate", str(golden["learning_rate"])]
    flags += ["--test_data", runs.PAIRS, "--result_dir", str(tmp_path / "run")]
    flags += ["--layout", layout]
    ranks(2, runs.main, flags)  # TRL ran on one process
    ours = runs.lines(tmp_path / "run", "train")
    assert len(ours) == len(golden["log"]) == 20
    scale = abs(golden["log"][0]["loss"])
    for mine, theirs in zip(ours, golden["log"], strict=True):
        assert mine["step"] == theirs["step"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-4 * max(scale, abs(theirs["loss"]))
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        for side in ("logps/chosen", "logps/rejected"):
            assert mine[side] == pytest.approx(theirs[side], rel=1e-4)
