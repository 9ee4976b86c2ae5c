"""Write what TRL logs on SmolLM2-135M-Instruct, with a chat template on both sides.

    . the environment of make.py
    python scripts/get_smollm2.py
    OMP_NUM_THREADS=1 trl-env/bin/python tests/golden/make_smollm2.py data/smollm2  # 4 minutes

Writes smollm2_NAME.json for each of CASES beside this file. Nothing of this project trains here.
"""

import json
import sys
import tempfile

import peft
import torch
import transformers
import trl
from datasets import Dataset
from smollm2 import HERE, ROWS, STEPS, TEMPLATE, conversations, pairs, write_adapter

import make  # sets the environment, and has the schedule

SAME = {"learning_rate": 3e-4, "max_grad_norm": 1.0, "weight_decay": 0.1}
CASES = {  # by the names of this project's flags
    "dpo": SAME | {"method": "dpo", "beta": 0.1},
    "ipo": SAME | {"method": "ipo", "beta": 0.5},
    "sft": SAME,
}


def make_trainer(folder, case, scratch, template=""):
    """Return TRL's trainer of a case; without a template it uses the model's own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    write_adapter(folder, f"{scratch}/adapter")
    policy = peft.PeftModel.from_pretrained(base, f"{scratch}/adapter", is_trainable=True)
    values = {name: value for name, value in case.items() if name != "method"}
    values |= {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "max_length": 512}
    values |= {"train_sampling_strategy": "sequential", "use_cpu": True, "bf16": False}
    values |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no"}
    values |= {"report_to": [], "disable_tqdm": True, "output_dir": scratch}
    if "method" in case:
        loss = {"dpo": "sigmoid"}.get(case["method"], case["method"])
        kind, config, rows = trl.DPOTrainer, trl.DPOConfig(loss_type=[loss], **values), pairs()
    else:
        config = trl.SFTConfig(assistant_only_loss=True, **values)
        kind, rows = trl.SFTTrainer, conversations()
    data = Dataset.from_list(rows)
    return kind(model=policy, args=config, train_dataset=data, processing_class=tokenizer)


def train(trainer):
    """Return what TRL logs after each step."""
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, make.rate)
    trainer.train()
    kept = ("loss", "grad_norm", "learning_rate", "rewards/", "logps/", "step")
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in steps]


def ids_of(trainer):
    """Return the token ids and labels of the first rows that TRL trains on, as texts."""
    rows = trainer.train_dataset.select(range(3))
    kept = ("_ids", "labels")
    return [{k: f"{v}" for k, v in row.items() if k.endswith(kept)} for row in rows]


def main():
    [folder] = sys.argv[1:]
    for name, case in CASES.items():
        golden = {
            "model": "SmolLM2-135M-Instruct of scripts/get_smollm2.py, in fp32",
            "rows": f"{ROWS} per step, in order; smollm2.py",
            "optimizer": "AdamW, betas .9 .999, eps 1e-8; norms and biases do not decay",
            "rate": "as in make.py",
            "versions": {m.__name__: m.__version__ for m in (trl, transformers, peft, torch)},
            "flags": case,
        }
        with tempfile.TemporaryDirectory() as scratch:
            if name == "dpo":
                golden["ids_with_own_template"] = ids_of(make_trainer(folder, case, scratch))
            trainer = make_trainer(folder, case, scratch, TEMPLATE.read_text())
            golden |= {"ids": ids_of(trainer), "log": train(trainer)}
        (HERE / f"smollm2_{name}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
