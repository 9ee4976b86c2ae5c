#!/usr/bin/env bash
# Fine-tune a language model on preference pairs, on several processes of one or more nodes.
#
#     ./run_distributed.sh [num_gpus=2] [dpo] [flags of src/main_distributed.py]
#
# Several nodes: export NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, and start it on each.
# The same command goes on with a run that was stopped or killed. A process that dies is started
# again, with all others, up to MAX_RESTARTS times (3), from the last checkpoint.
# Exit status: 0 done, 2 wrong input, 3 loss not finite, 4 could not write, 85 stopped and saved
# (start it again), 1 anything else.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[ -f "$here/scripts/environment.sh" ] || here=${PBS_O_WORKDIR:-${SLURM_SUBMIT_DIR:-.}}
[ -z "${PBS_O_WORKDIR:-}" ] || cd "$PBS_O_WORKDIR"
# shellcheck source=scripts/environment.sh
. "$here/scripts/environment.sh"

processes=2
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  processes=$1
  shift
fi
if [[ "${1:-}" =~ ^[a-z]+$ ]]; then
  [ "$1" = dpo ] || { echo "error: $1: not known; give dpo, or flags" >&2; exit 2; }
  shift
fi
if [ "$processes" -lt 1 ]; then
  echo "error: num_gpus: $processes; give 1 or more" >&2
  exit 2
fi

train "$processes" "$root/src/main_distributed.py" "$@"
