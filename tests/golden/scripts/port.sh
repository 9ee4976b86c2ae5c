#!/usr/bin/env bash
# Written by scripts/distributed_setup.py, which overwrites it.
# Node 0 of 1. Start it there: bash port.sh [more flags of src/train.py]
# Run the same command to resume a run that was stopped. Exit status: as in run_distributed.sh.
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are relative to it
use_environment

export NNODES=1 NODE_RANK=0
export MASTER_PORT=1234
exec python -m ddp_utils.launch 4 "$project/src/train.py" --config=config.yaml --deepspeed=config/ds_config.json "$@"
