"""Write what TRL's trainers log on the demo, step by step: what test_trl.py compares with.

    python3 -m venv trl-env
    trl-env/bin/pip install torch==2.13.0 trl==1.16.0 peft transformers==5.24.0 datasets
    OMP_NUM_THREADS=1 trl-env/bin/python tests/golden/make.py       # one CPU core, a minute

Writes trl_NAME.json for each of CASES and demo_adapter/, the start of the LoRA, beside this file.
Nothing of this project runs here, and the tests need no TRL. Nothing in a case is at rest: the
gradient is clipped in each step, the rate rises and falls, weights decay, and the adapter's B is
not zero, so that the reference is the model with the adapter.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import datasets  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trl.experimental import orpo  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL, DATA, ADAPTER = "data/demo/model", "data/demo/preferences_train.jsonl", HERE / "demo_adapter"
STEPS, PAIRS, WARMUP = 12, 4, 3
RANK, ALPHA = 3, 6  # rank 4 would make the file larger than 150 kB
FULL = {"fine_tuning": "full", "learning_rate": 5e-4, "max_grad_norm": 0.25, "weight_decay": 1.0}
LORA = {"fine_tuning": "lora", "learning_rate": 5e-4, "max_grad_norm": 0.1, "weight_decay": 1.0}
CASES = {  # by the names of this project's flags
    "full_sigmoid": FULL | {"method": "dpo", "beta": 0.5},
    "full_ipo": FULL | {"method": "ipo", "beta": 0.5},
    "full_hinge": FULL | {"method": "hinge", "beta": 0.5},
    "full_robust": FULL | {"method": "robust", "beta": 0.5, "label_smoothing": 0.1},
    "lora_sigmoid": LORA | {"method": "dpo", "beta": 0.5},
    "lora_ipo": LORA | {"method": "ipo", "beta": 0.5},
    "full_orpo": FULL | {"method": "orpo", "beta": 0.5},
}
# its NLL covers the prompt as well; with a prompt of one token it is that of the response
ORPO_PROMPT = ":"


def rate(done):
    """The factor of the learning rate after so many steps: up in WARMUP steps, then down to 0."""
    return min((done + 1) / (WARMUP + 1), (STEPS - done) / (STEPS - WARMUP))


def load():
    return transformers.AutoModelForCausalLM.from_pretrained(ROOT / MODEL, dtype=torch.float32)


def make_adapter():
    """A LoRA on every linear layer but the output, saved without what differs by chance."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(load(), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(ADAPTER)
    (ADAPTER / "README.md").unlink()
    path = ADAPTER / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved |= {"base_model_name_or_path": MODEL, "target_modules": sorted(saved["target_modules"])}
    path.write_text(json.dumps(saved, indent=1) + "\n")


def read_pairs(tokenizer):
    """The pairs that the steps see, prompts as plain text: TRL applies no template of its own."""
    rows = [json.loads(line) for line in (ROOT / DATA).read_text().splitlines()]
    for row in rows:
        turn = [{"role": "user", "content": row["prompt"]}]
        row["prompt"] = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
    return datasets.Dataset.from_list(rows[: STEPS * PAIRS])


def train(case, scratch):
    """-> what TRL logs after each step."""
    tokenizer, policy = transformers.AutoTokenizer.from_pretrained(ROOT / MODEL), load()
    if case["fine_tuning"] == "lora":  # TRL keeps a frozen copy of the adapter as the reference
        policy = peft.PeftModel.from_pretrained(policy, ADAPTER, is_trainable=True)
    loss = {"dpo": "sigmoid"}.get(case["method"], case["method"])
    same = ("learning_rate", "max_grad_norm", "weight_decay", "beta", "label_smoothing")
    settings: dict = {name: case[name] for name in same if name in case}
    pairs = read_pairs(tokenizer)
    if loss == "orpo":  # a pair at a time: within a batch, its NLL is a mean over tokens
        make, trainer_class = orpo.ORPOConfig, orpo.ORPOTrainer
        settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": PAIRS}
        pairs = pairs.map(lambda row: {"prompt": ORPO_PROMPT})
    else:
        make, trainer_class = trl.DPOConfig, trl.DPOTrainer
        settings |= {"loss_type": [loss], "per_device_train_batch_size": PAIRS}
    settings = make(
        **settings,
        output_dir=scratch,
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        max_length=512,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=policy,
        args=settings,
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, rate)
    trainer.train()
    kept = ("loss", "grad_norm", "learning_rate", "rewards/", "logps/", "step")
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in steps]


def main():
    make_adapter()
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            log = train(case, scratch)
        golden = {
            "model": MODEL,
            "data": DATA,
            "order": "file order, no shuffle",
            "batch_pairs": PAIRS,
            "steps": STEPS,
            "optimizer": "AdamW, betas .9 .999, eps 1e-8; norms and biases do not decay",
            "rate": f"{WARMUP} steps up, (done + 1) / {WARMUP + 1}, then down to 0 in a line",
            "dtype": "fp32",
            "eos": "appended to each response",
            "versions": {m.__name__: m.__version__ for m in (trl, transformers, peft, torch)},
            "prompt": ORPO_PROMPT if case["method"] == "orpo" else "",
            "flags": case,
            "log": log,
        }
        (HERE / f"trl_{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
