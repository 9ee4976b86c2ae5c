"""The older name of dpo_inv.run_dpo_ddp: the same program, for one process as for many."""

import ddp_utils.runs.preemption as preemption  # before torch, whose import takes seconds

from dpo_inv.config import read_settings

if __name__ == "__main__":  # --help, or a mistake in the settings, ends here
    preemption.read_early(read_settings)

from dpo_inv.run_dpo_ddp import main

if __name__ == "__main__":
    preemption.run(main)
