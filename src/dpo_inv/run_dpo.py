"""The older name of dpo_inv.run_dpo_ddp: the same program, for one process as for many."""

import runpy

if __name__ == "__main__":
    runpy.run_module("dpo_inv.run_dpo_ddp", run_name="__main__", alter_sys=True)
