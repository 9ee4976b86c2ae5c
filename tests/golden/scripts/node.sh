#!/usr/bin/env bash
# Written by scripts/distributed_setup.py, which overwrites it:
#     launcher --num_nodes 2 --master_addr ::1 --node_rank 1 --use_deepspeed --output=node.sh
# Node 1 of 2. Start it there: bash node.sh [more flags of src/train.py]
# The same command goes on with a run that was stopped. Exit status: as run_distributed.sh.
#
# Torch's agent starts the processes, for DeepSpeed too: `deepspeed --node_rank` would want --no_ssh
# and a hostfile. On one node the port is a free one: two runs with one number would meet.
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are seen from here

export NNODES=2 NODE_RANK=1 MASTER_ADDR=::1 MASTER_PORT="${MASTER_PORT:-29500}"
train 4 "$project/src/train.py" --config=config.yaml --deepspeed=config/ds_config.json "$@"
