"""The older name of dpo_inv.run_dpo_ddp: the same program, for one process as for many."""

from ddp_utils.runs import preemption
from dpo_inv.run_dpo_ddp import main

if __name__ == "__main__":
    preemption.run(main)
