#!/bin/bash
# Written by scripts/distributed_setup.py, which overwrites it:
#     slurm --time_limit 36:00:00 --partition long --account me --job_name a.b --cpus_per_task 3 --mem_per_gpu 500M --num_nodes 2 --num_gpus_per_node 6 --modules= --conda_env= --use_deepspeed --output=slurm.sh
# Submit it: sbatch slurm.sh [more flags of src/train.py]
#
# 300 s before the time limit Slurm signals the processes: they save, end with 85, and the job is
# queued again, as it is when a node fails. It goes on from the last checkpoint, in the same output.
#
# Mended in the guide's example:
# - 6 tasks on a node, each a launcher of as many: here srun alone starts them
# - MASTER_PORT=29500 is any job's on the node: here it comes from the job's number
# - since Slurm 22.05 srun does not take --cpus-per-task from the job: here it is told
# - NCCL_ASYNC_ERROR_HANDLING has become TORCH_NCCL_ASYNC_ERROR_HANDLING
# - CUDA_DEVICE_MAX_CONNECTIONS=1 keeps FSDP from overlapping: it is for DeepSpeed and DDP
#SBATCH --job-name=a.b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=6
#SBATCH --gres=gpu:6
#SBATCH --cpus-per-task=3
#SBATCH --mem-per-gpu=500M
#SBATCH --time=36:00:00
#SBATCH --partition=long
#SBATCH --account=me
#SBATCH --output=slurm-%j.out
#SBATCH --error=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@300
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are seen from here

use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-3}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"

job=${SLURM_JOB_ID:?submit it with sbatch} world=$((SLURM_NNODES * 6))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
export MASTER_ADDR="${MASTER_ADDR:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"

# one process checks for all: a mistake is one line
command=(python "$project/src/train.py" --config=config.yaml --deepspeed=config/ds_config.json "$@")
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=6 \
  "${command[@]}" --check >/dev/null

# each task learns its rank on its node, from SLURM_PROCID and SLURM_LOCALID; when one has ended
# the others have 120 s
status=0
srun --cpus-per-task=3 --wait=120 "${command[@]}" || status=$?
if [ "$status" -eq 85 ]; then # stopped and saved
  scontrol requeue "$job" || echo "error: not queued again; submit the same script" >&2
fi
exit "$status"
