"""Fold a LoRA into its base model: a plain model in a folder of its own.

python -m ddp_utils.tools.merge results/mine/model merged
python -m ddp_utils.tools.merge results/mine/model merged --base Qwen/Qwen3-0.6B
python -m ddp_utils.tools.merge results/traj_chat/model half --scale 0.5   # half of the effect
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_utils import UserError, cli, distributed, lora, models
from ddp_utils.checkpoints import check_writable


@dataclass
class Settings:
    adapter: str  # folder of a LoRA
    folder: str  # where the merged model goes; it must not exist
    base: str = ""  # folder or hub name of its base; empty: the one that it names
    scale: float = 1.0  # how much of the LoRA is added: 0 is the base model
    debug: bool = False  # tracebacks for user errors, too


def merge(adapter, folder, base="", scale=1.0):
    """Save base + scale x lora_alpha / lora_r x B A, where nothing is yet.

    The tokenizer is that beside the LoRA, with the chat template of its training, or the base's.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder} is there already; give another folder")
    check_writable("folder", folder)
    if Path(adapter, "model/adapter_config.json").exists():
        raise UserError(f"adapter: {adapter} is a run folder; give {Path(adapter, 'model')}")
    with cli.located({"init_adapter": "adapter", "model_name": "--base"}):
        for device in (models.META, torch.device("cpu")):  # first: do they fit together?
            merged = lora.load_merged(adapter, "auto", device, base=base, scale=scale)
    tokenizer = adapter if Path(adapter, "tokenizer_config.json").exists() else base
    models.save(merged, models.load_tokenizer(tokenizer), folder)


def main(argv=None) -> int:
    settings = cli.parse(Settings, argv)
    cli.check_ranges(settings, scale=cli.FROM_0)
    merge(settings.adapter, settings.folder, settings.base, settings.scale)
    print(f"{settings.folder}: from_pretrained opens it")
    return 0


if __name__ == "__main__":
    distributed.run(main)
