#!/usr/bin/env bash
# Fine-tune ProteinMPNN on preferences, on several processes of one or more nodes.
#
#     ./run_dpo_ddp_local.sh [num_gpus] [flags of dpo_inv.run_dpo_ddp]
#
# Without flags it trains on the demo's bundles. Number of processes, several nodes, restarts and
# exit status: see run_distributed.sh.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# In a batch job this script may be a copy in a spool folder.
[ -f "$here/scripts/environment.sh" ] || here=${PBS_O_WORKDIR:-${SLURM_SUBMIT_DIR:-.}}
[ -f "$here/scripts/environment.sh" ] ||
  { echo "error: $here: is not the project's folder; start $0 there" >&2 && exit 2; }
# shellcheck source=scripts/environment.sh
. "$here/scripts/environment.sh"
use_environment

number=${1:-}
[[ ! "$number" =~ ^[0-9]+$ ]] || shift
if has_word "-h|--help" "$@"; then
  print_usage
  exec python -m dpo_inv.run_dpo_ddp --help
fi
exec python -m ddp_utils.launch "$(processes_of "$number")" -m dpo_inv.run_dpo_ddp "$@"
