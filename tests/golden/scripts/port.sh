#!/usr/bin/env bash
# Written by scripts/distributed_setup.py, which overwrites it:
#     launcher --master_port 1234 --use_deepspeed --output=port.sh
# Node 0 of 1. Start it there: bash port.sh [more flags of src/train.py]
# The same command goes on with a run that was stopped. Exit status: as run_distributed.sh.
#
# Torch's agent starts the processes, for DeepSpeed too: `deepspeed --node_rank` would want --no_ssh
# and a hostfile. On one node the port is a free one: two runs with one number would meet.
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are seen from here

export NNODES=1 NODE_RANK=0 MASTER_PORT=1234
train 4 "$project/src/train.py" --config=config.yaml --deepspeed=config/ds_config.json "$@"
