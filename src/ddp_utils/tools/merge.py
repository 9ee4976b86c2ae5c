"""Merge a LoRA into its base model, and save the result as a plain model folder.

python -m ddp_utils.tools.merge results/mine merged          # a run, or its folder model
python -m ddp_utils.tools.merge results/mine merged --base Qwen/Qwen3-0.6B
python -m ddp_utils.tools.merge results/traj_chat half --scale 0.5   # half of the effect
"""

from ddp_utils import cli
from ddp_utils.tools import settings as tools

if __name__ == "__main__":
    cli.check_flags(tools.read_merge)  # --help and mistakes end here, before torch is imported

from pathlib import Path

import torch

from ddp_utils import UserError, data, distributed, lora, models
from ddp_utils.chat_template import Encoder
from ddp_utils.checkpoints import check_writable, model_folder


def merge(adapter: str | Path, folder: str | Path, base: str = "", scale: float = 1.0) -> None:
    """Save base + scale x lora_alpha / lora_r x B A in a new folder.

    The tokenizer is the one next to the LoRA, with the chat template of its training; otherwise the
    tokenizer of the base model.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"folder: {folder} exists; use another folder")
    check_writable("folder", folder)
    if data.resolve(adapter).parent.is_dir():  # otherwise it is a name on the hub
        adapter = model_folder("adapter", str(adapter))
        if any(adapter.glob("model*.safetensors")):
            raise UserError(f"adapter: {adapter} is a full model; only a LoRA can be merged")
    with cli.located({"init_adapter": "adapter", "model_name": "--base"}):
        original = lora.load_merged(adapter, "auto", models.META, base=base)
        merged = lora.load_merged(adapter, "auto", torch.device("cpu"), base=base, scale=scale)
    tokenizer = lora.load_tokenizer(base, adapter) if base else lora.load_tokenizer(adapter)
    models.save(merged, original, Encoder(tokenizer), folder)


def main(argv: list[str] | None = None) -> int:
    settings = tools.read_merge(argv)
    merge(settings.adapter, settings.folder, settings.base, settings.scale)
    print(f"{settings.folder}: load it with from_pretrained")
    return 0


if __name__ == "__main__":
    distributed.run(main)
