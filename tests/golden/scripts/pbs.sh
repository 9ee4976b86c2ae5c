#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it:
#     pbs --account mine --output=pbs.sh
# Submit it: qsub pbs.sh
#
# 300 s before the time limit it saves and ends with 85, "stopped and saved". PBS does not queue
# it again for that: have the next one wait for it, which goes on from the last checkpoint.
#
#     qsub -W depend=afternotok:<jobid> pbs.sh
#
# So does a job that PBS runs again because a node failed (-r y). Another walltime: make the script
# again. Mended in the guide's example, which is for Slurm: a process per GPU and no launcher in it,
# a port from the job's number, TORCH_NCCL_ASYNC_ERROR_HANDLING.
#PBS -A mine
#PBS -N llm_finetune
#PBS -q capacity
#PBS -l select=4:system=aurora,place=scatter
#PBS -l walltime=48:00:00
#PBS -l filesystems=home:flare
#PBS -k doe
#PBS -j oe
#PBS -r y
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are seen from here

set +u # modules and conda ask for variables that are not set
module load frameworks
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export CCL_PROCESS_LAUNCHER="${CCL_PROCESS_LAUNCHER:-pmix}"
export CCL_ATL_TRANSPORT="${CCL_ATL_TRANSPORT:-mpi}"
export CCL_KVS_MODE="${CCL_KVS_MODE:-mpi}"
export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"

job=${PBS_JOBID:?submit it with qsub}
job=${job%%.*} world=$(($(sort -u "$PBS_NODEFILE" | wc -l) * 12))
first=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR="${MASTER_ADDR:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"

# one process checks for all: a mistake is one line
command=(python "$project/src/train.py" --config=config.yaml --stop_after_minutes=2875)
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=12 \
  "${command[@]}" --check >/dev/null

export WORLD_SIZE=$world LOCAL_WORLD_SIZE=12 # PALS does not document its own
exec mpiexec -n "$world" -ppn 12 --hostfile "$PBS_NODEFILE" "${command[@]}"
