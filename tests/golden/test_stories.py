"""An extra, for which ../shared is needed: a real model learns from real preferences.

Stories with dialogue are preferred to stories without. What learning changes is shown with the demo
in tests/launch/test_demo.py.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import main_distributed
import runs
from ranks import ranks

SETTINGS = runs.words(
    "--fine_tuning full --learning_rate 3e-4 --batch_size 8 --lr_scaling none "
    "--lr_scheduler constant --warmup_ratio 0 --log_every 20 --val_data '' --num_samples 0"
)


def stories(shared, folder):
    data = shared / "data"
    return [
        *("--model_name", str(data / "models/stories260k")),
        *("--train_data", str(data / "preferences/stories_pairs_train.jsonl")),
        *("--test_data", str(data / "preferences/stories_pairs_test.jsonl")),
        *("--result_dir", str(folder)),
        *SETTINGS,
    ]


def share_with_speech(model, shared, samples):
    """Share of sampled continuations of held-out prompts with a double quote in them."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/models/stories260k")
    model = AutoModelForCausalLM.from_pretrained(model)
    lines = (shared / "data/preferences/stories_pairs_test.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    torch.manual_seed(0)
    spoken = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(
            ids, do_sample=True, max_new_tokens=150, num_return_sequences=samples, pad_token_id=0
        )
        texts = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
        spoken += ['"' in text for text in texts]
    return sum(spoken) / len(spoken)


def result(folder):
    return json.loads((folder / "summary.json").read_text())["test"]


def test_twenty_steps_on_real_pairs_learn_something(shared, tmp_path):
    """The run below, cut short, with a lower bar."""
    flags = [*stories(shared, tmp_path / "run"), "--max_steps", "20"]
    ranks(2, main_distributed.main, flags, timeout=120)
    test = result(tmp_path / "run")
    assert test["count"] == 20
    assert test["rewards/accuracies"] >= 14 / 20
    assert test["rewards/margins_low"] > 0


@pytest.mark.show
def test_sixty_steps_rank_held_out_stories_and_change_what_is_written(shared, tmp_path):
    before = share_with_speech(shared / "data/models/stories260k", shared, samples=8)
    print(f"\nbefore: speech in {before:.3f} of 160 continuations")
    for seed in range(3):
        folder = tmp_path / str(seed)
        flags = [*stories(shared, folder), "--max_steps", "60", "--seed", str(seed)]
        ranks(2, main_distributed.main, flags, timeout=300)
        test = result(folder)
        after = share_with_speech(folder / "model", shared, samples=8)
        right = round(test["rewards/accuracies"] * test["count"])
        print(
            f"seed {seed}: {right} of {test['count']} right, margin {test['rewards/margins']:.2f} "
            f"[{test['rewards/margins_low']:.2f}, {test['rewards/margins_high']:.2f}], "
            f"speech {after:.3f}"
        )
        assert right >= 17
        assert test["rewards/margins_low"] > 0
        assert after - before >= 0.2
