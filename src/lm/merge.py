"""Merge a LoRA into its base model, and save the result as a plain model folder.

python -m lm.merge results/mine merged          # a run, or its folder model
python -m lm.merge results/mine merged --base Qwen/Qwen3-0.6B
python -m lm.merge results/traj_chat half --scale 0.5   # half of the effect
python -m lm.merge results/mine merged --dtype fp32     # not rounded to the base's
"""

from ddp_utils import cli
from lm import settings as commands

if __name__ == "__main__":
    cli.check_flags(commands.read_merge)  # --help and mistakes end here, before torch is imported

from pathlib import Path
from typing import Any

import torch

from ddp_utils import UserError, data, distributed
from ddp_utils.checkpoints import check_writable
from ddp_utils.policy import DTYPES
from lm import lora, models
from lm.chat_template import Encoder
from lm.model_files import model_folder


def merge(
    adapter: str | Path, folder: str | Path, base: str = "", scale: float = 1.0, dtype: str = "auto"
) -> torch.dtype:
    """Save base + scale x lora_alpha / lora_r x B A in a new folder; return its number format.

    The tokenizer is the one next to the LoRA, with the chat template of its training; otherwise the
    tokenizer of the base model.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"folder: {folder} exists; use another folder")
    check_writable("folder", folder)
    if data.resolve(adapter).parent.is_dir():  # otherwise it is a name on the hub
        adapter = model_folder("adapter", str(adapter))
    with cli.located({"init_adapter": "adapter", "model_name": "--base"}):
        kind: Any = DTYPES.get(dtype, "auto")
        name = base or lora.base_of(adapter)
        tokenizer = models.load_tokenizer(base or adapter, adapter if base else "")
        original = lora.merge(models.load(name, kind, models.META), adapter)
        merged = lora.merge(models.load(name, kind, torch.device("cpu")), adapter, scale)
    models.save(merged, original, Encoder(tokenizer), folder)
    return merged.dtype


def main(argv: list[str] | None = None) -> int:
    settings = commands.read_merge(argv)
    adapter, base = settings.adapter, settings.base
    folder = data.output_path(settings.folder)
    dtype = str(merge(adapter, folder, base, settings.scale, settings.dtype)).partition(".")[2]
    source = "that of the base model" if settings.dtype == "auto" else "as --dtype says"
    print(f"{folder}: {dtype}, {source}; load it with from_pretrained")
    return 0


if __name__ == "__main__":
    distributed.run(main, saves=False)
