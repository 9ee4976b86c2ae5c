#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it:
#     pbs --time_limit 36:00:00 --partition long --account me --job_name a.b --cpus_per_task 3 --mem_per_gpu 500M --num_nodes 2 --num_gpus_per_node 6 --system= --filesystems=eagle --modules 'a b' --conda_env c --output=pbs_other.sh
# Submit it: qsub pbs_other.sh
#
# 300 s before the time limit it saves and ends with 85, "stopped and saved". PBS does not queue
# it again for that: have the next one wait for it, which goes on from the last checkpoint.
#
#     qsub -W depend=afternotok:<jobid> pbs_other.sh
#
# So does a job that PBS runs again because a node failed (-r y). Another walltime: make the script
# again. Mended in the guide's example, which is for Slurm: a process per GPU and no launcher in it,
# a port from the job's number, TORCH_NCCL_ASYNC_ERROR_HANDLING.
#PBS -A me
#PBS -N a.b
#PBS -q long
#PBS -l select=2:ncpus=18:ngpus=6:mpiprocs=6:mem=3000mb,place=scatter
#PBS -l walltime=36:00:00
#PBS -l filesystems=eagle
#PBS -k doe
#PBS -j oe
#PBS -r y
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are seen from here

set +u # modules and conda ask for variables that are not set
module load a
module load b
# shellcheck source=/dev/null
source activate c
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-3}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"

job=${PBS_JOBID:?submit it with qsub}
job=${job%%.*} world=$(($(sort -u "$PBS_NODEFILE" | wc -l) * 6))
first=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR="${MASTER_ADDR:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"

# one process checks for all: a mistake is one line
command=(python "$project/src/train.py" --config=config.yaml --stop_after_minutes=2155)
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=6 \
  "${command[@]}" --check >/dev/null

export WORLD_SIZE=$world LOCAL_WORLD_SIZE=6 # PALS does not document its own
exec mpiexec -n "$world" -ppn 6 --hostfile "$PBS_NODEFILE" "${command[@]}"
