"""Write what TRL's DPOTrainer logs on the demo in 20 steps: what test_trl_demo.py compares with.

    python3 -m venv trl-env
    trl-env/bin/pip install torch==2.13.0 trl==1.16.0 peft transformers==5.23.0 datasets
    OMP_NUM_THREADS=1 trl-env/bin/python tests/golden/make.py       # one CPU core, ten seconds

Writes trl_demo_full.json, trl_demo_lora.json and demo_adapter/, the start of the LoRA (B = 0),
beside this file. Nothing of this project runs here, and the tests need no TRL.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL, DATA, ADAPTER = "data/demo/model", "data/demo/preferences_train.jsonl", HERE / "demo_adapter"
STEPS, PAIRS, BETA, MAX_LENGTH = 20, 4, 0.1, 512
RANK, ALPHA = 3, 6  # rank 4 would make the file larger than 150 kB
KINDS = {
    "full": ("full fine-tuning", 1e-4),
    "lora": (f"LoRA r={RANK} alpha={ALPHA} all-linear, start: {ADAPTER.name}/", 1e-3),
}


def load():
    return transformers.AutoModelForCausalLM.from_pretrained(ROOT / MODEL, dtype=torch.float32)


def make_adapter():
    """A fresh LoRA on every linear layer but the output, saved without what differs by chance."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    peft.get_peft_model(load(), settings).save_pretrained(ADAPTER)
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


def train(kind, learning_rate, scratch):
    """-> what TRL logs after each step."""
    tokenizer, policy = transformers.AutoTokenizer.from_pretrained(ROOT / MODEL), load()
    if kind == "lora":  # TRL keeps a frozen copy of the adapter as the reference
        policy = peft.PeftModel.from_pretrained(policy, ADAPTER, is_trainable=True)
    settings = trl.DPOConfig(
        output_dir=scratch,
        max_steps=STEPS,
        per_device_train_batch_size=PAIRS,
        train_sampling_strategy="sequential",
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=BETA,
        max_length=MAX_LENGTH,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.DPOTrainer(
        model=policy,
        args=settings,
        train_dataset=read_pairs(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    kept = ("loss", "grad_norm", "rewards/", "logps/", "step")
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in steps]


def main():
    make_adapter()
    for kind, (words, learning_rate) in KINDS.items():
        with tempfile.TemporaryDirectory() as scratch:
            log = train(kind, learning_rate, scratch)
        versions = {m.__name__: m.__version__ for m in (trl, transformers, peft, torch)}
        golden = {
            "model": MODEL,
            "data": DATA,
            "order": "file order, no shuffle",
            "batch_pairs": PAIRS,
            "steps": STEPS,
            "optimizer": "AdamW, betas .9 .999, eps 1e-8, no weight decay, constant rate, clip 1.0",
            "beta": BETA,
            "dtype": "fp32",
            "eos": "appended to each response",
            "max_length": MAX_LENGTH,
            "versions": versions,
            "kind": words,
            "learning_rate": learning_rate,
            "log": log,
        }
        (HERE / f"trl_demo_{kind}.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
