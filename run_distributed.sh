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

use_environment
share_cores "$processes"
script=$root/src/main_distributed.py
nodes=${NNODES:-1}

# One process checks settings, data and devices for all: a mistake costs one line.
checked=$(RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((processes * nodes)) LOCAL_WORLD_SIZE=$processes \
  python "$script" "$@" --check) || exit $?
folder=$(sed -n 's/^run folder: //p' <<<"$checked")
if [ -z "$folder" ]; then # nothing left to do
  tail -n 1 <<<"$checked"
  exit 0
fi

where=(--standalone)
if [ "$nodes" -gt 1 ]; then
  : "${NODE_RANK:?export NODE_RANK, 0 to $((nodes - 1))}"
  : "${MASTER_ADDR:?export MASTER_ADDR, the host of node 0}"
  : "${MASTER_PORT:?export MASTER_PORT, a free port of node 0}"
  where=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
    --master-port "$MASTER_PORT" --rdzv-conf "timeout=${DDP_JOIN_SECONDS:-50}")
  meet_nodes "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK"
elif [ -n "${MASTER_PORT:-}" ]; then
  where=(--master-addr 127.0.0.1 --master-port "$MASTER_PORT")
  meet_nodes 127.0.0.1 "$MASTER_PORT" 0
fi
launch "$folder" "${where[@]}" --nproc_per_node "$processes" "$script" "$@"
