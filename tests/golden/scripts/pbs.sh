#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it.
# Submit it: qsub pbs.sh
#
# 300 s before the time limit, the run saves and ends with 85. PBS does not queue it again: submit
# the next job with a dependency, and it resumes from the last checkpoint.
#
#     qsub -W depend=afternotok:<jobid> pbs.sh
#
# A job that PBS runs again after a node has failed (-r y) resumes as well. For another walltime,
# generate the script again.
#PBS -A mine
#PBS -N llm_finetune
#PBS -q capacity
#PBS -l select=4:system=aurora,place=scatter
#PBS -l walltime=48:00:00
#PBS -l filesystems=home:flare
#PBS -k doe
#PBS -j oe
#PBS -r y
export DDP_JOB_END=$(($(date +%s) + 172800))
# shellcheck disable=SC2034 # for the report: this script is run as a copy
submitted=(qsub pbs.sh)
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are relative to it

set +u # modules and conda read variables that are not set
module load frameworks
# shellcheck source=/dev/null
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export CCL_PROCESS_LAUNCHER="${CCL_PROCESS_LAUNCHER:-pmix}"
export CCL_ATL_TRANSPORT="${CCL_ATL_TRANSPORT:-mpi}"
export CCL_KVS_MODE="${CCL_KVS_MODE:-mpi}"
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"

job=${PBS_JOBID:?submit it with qsub}
job=${job%%.*}
MASTER_ADDR="${MASTER_ADDR:-$(head -n 1 "$PBS_NODEFILE")}"
MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"
# PALS does not document variables for the number of processes
WORLD_SIZE=$(($(sort -u "$PBS_NODEFILE" | wc -l) * 12))
LOCAL_WORLD_SIZE=12
export MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE
# how often PBS has run this job again, for runs with --restart
runs=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/^ *run_count = //p' || true)
export PBS_RESTART_COUNT=$((${runs:-1} - 1))
exec mpiexec -n "$WORLD_SIZE" -ppn 12 --hostfile "$PBS_NODEFILE" python "$project/src/train.py" --stop_after_minutes=2875 --config=config.yaml
