#!/usr/bin/env bash
# Fine-tune ProteinMPNN on preferences, on several processes of one or more nodes.
#
#     ./run_dpo_ddp_local.sh [num_gpus=2] [flags of dpo_inv.run_dpo_ddp]
#
# Without flags it trains on the demo's bundles. Several nodes, restarts, exit status: as
# run_distributed.sh.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[ -f "$here/scripts/environment.sh" ] || here=${PBS_O_WORKDIR:-${SLURM_SUBMIT_DIR:-.}}
# shellcheck source=scripts/environment.sh
. "$here/scripts/environment.sh"

processes "$@" # sets processes and words
if asked_for_help "$@"; then
  exec python -m dpo_inv.run_dpo_ddp --help
fi
check_flags -m dpo_inv.run_dpo_ddp ${words[@]+"${words[@]}"}
train "$processes" -m dpo_inv.run_dpo_ddp ${words[@]+"${words[@]}"} # none: old bash calls it unset
