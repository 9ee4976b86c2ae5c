"""What each rank of the tests has in memory when it starts: see ranks.py."""

import importlib

from transformers import conversion_mapping

MODULES = """
torch.nn.parallel torch.distributed.checkpoint matplotlib.figure peft
transformers.models.llama.modeling_llama transformers.models.qwen3.modeling_qwen3
main_distributed train train_loop generate_data dpo_inv.run_dpo_ddp ad.train ad.evaluate
lm.sharding.fsdp_policy pytest hypothesis
"""
for name in MODULES.split():
    importlib.import_module(name)
# a table of all architectures, which transformers makes when it loads the first model
conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
