#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it.
# Submit it: qsub pbs_other.sh
#
# 300 s before the time limit, the run saves and ends with 85. PBS does not queue it again: submit
# the next job with a dependency, and it resumes from the last checkpoint.
#
#     qsub -W depend=afternotok:<jobid> pbs_other.sh
#
# A job that PBS runs again after a node has failed (-r y) resumes as well. For another walltime,
# generate the script again.
#PBS -A me
#PBS -N a.b
#PBS -q long
#PBS -l select=2:ncpus=18:ngpus=6:mpiprocs=6:mem=3000mb,place=scatter
#PBS -l walltime=36:00:00
#PBS -l filesystems=eagle
#PBS -k doe
#PBS -j oe
#PBS -r y
export DDP_JOB_END=$(($(date +%s) + 129600))
# shellcheck disable=SC2034 # for the report: this script is run as a copy
submitted=(qsub pbs_other.sh)
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are relative to it

set +u # modules and conda read variables that are not set
module load a b
# shellcheck source=/dev/null
source activate c
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-3}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"

job=${PBS_JOBID:?submit it with qsub}
job=${job%%.*}
MASTER_ADDR="${MASTER_ADDR:-$(head -n 1 "$PBS_NODEFILE")}"
MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"
# PALS does not document variables for the number of processes
WORLD_SIZE=$(($(sort -u "$PBS_NODEFILE" | wc -l) * 6))
LOCAL_WORLD_SIZE=6
export MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE
# how often PBS has run this job again, for runs with --restart
runs=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/^ *run_count = //p' || true)
export PBS_RESTART_COUNT=$((${runs:-1} - 1))
exec mpiexec -n "$WORLD_SIZE" -ppn 6 --hostfile "$PBS_NODEFILE" python "$project/src/train.py" --stop_after_minutes=2155 --config=config.yaml
