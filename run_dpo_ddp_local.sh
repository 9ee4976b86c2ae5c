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

processes=2
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  processes=$1
  shift
fi
if [ "$processes" -lt 1 ]; then
  echo "error: num_gpus: $processes; give 1 or more" >&2
  exit 2
fi
train "$processes" -m dpo_inv.run_dpo_ddp "$@"
