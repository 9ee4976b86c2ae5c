"""Twelve steps on the demo against TRL 1.16: the logs that make.py has its trainers write."""

import json
from pathlib import Path

import pytest

import runs
from conftest import ROOT
from ranks import ranks

HERE = Path(__file__).parent
LETTER = runs.words(
    "--model_name data/demo/model --train_data data/demo/preferences_train.jsonl --val_data '' "
    "--no_shuffle --lr_scaling none --warmup_ratio 0.25 --lr_scheduler linear "
    "--no_use_mixed_precision --batch_size 4 --max_steps 12 --max_rows 48 "
    "--num_samples 0"
)
# each loss and both kinds of weights once; one of each kind of weights with the other layout, too
RUNS = [(path.stem, "shared") for path in sorted(HERE.glob("trl_*.json"))]
RUNS.append(("trl_full_sigmoid", "separate"))
RUNS.append(pytest.param("trl_lora_sigmoid", "separate", marks=pytest.mark.show))


def with_prompt(prompt, path):
    """The first pairs of the demo with this prompt, in a file."""
    rows = (ROOT / "data/demo/preferences_train.jsonl").read_text().splitlines()[:48]
    path.write_text("\n".join(json.dumps(json.loads(row) | {"prompt": prompt}) for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_twelve_steps_equal_trl(name, layout, tmp_path):
    golden = json.loads((HERE / f"{name}.json").read_text())
    flags = [*LETTER, "--test_data", runs.PAIRS, "--result_dir", str(tmp_path / "run")]
    flags += ["--layout", layout]
    for flag, value in golden["flags"].items():
        flags += [f"--{flag}", str(value)]
    if golden["flags"]["method"] == "orpo":
        flags += ["--chat_template", "none", "--train_data"]
        flags.append(with_prompt(golden["prompt"], tmp_path / "pairs.jsonl"))
    else:
        flags += ["--sft_weight", "0"]
    if golden["flags"]["fine_tuning"] == "lora":
        flags += ["--init_adapter", str(HERE / "demo_adapter")]
    ranks(2, runs.main, flags)  # TRL ran on one process
    ours = runs.lines(tmp_path / "run", "train")
    assert len(ours) == len(golden["log"]) == 12
    scale = abs(golden["log"][0]["loss"])
    for mine, theirs in zip(ours, golden["log"], strict=True):
        assert mine["step"] == theirs["step"]
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-4 * max(scale, abs(theirs["loss"]))
        assert theirs["grad_norm"] > golden["flags"]["max_grad_norm"]  # it was clipped
        for key in ("grad_norm", "learning_rate"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3), key
        for side in ("chosen", "rejected"):
            if golden["flags"]["method"] != "orpo":  # TRL then logs them per token, as the rewards
                assert mine[f"logps/{side}"] == pytest.approx(theirs[f"logps/{side}"], rel=1e-4)
            reward = pytest.approx(theirs[f"rewards/{side}"], rel=1e-3, abs=2e-4)
            assert mine[f"rewards/{side}"] == reward
