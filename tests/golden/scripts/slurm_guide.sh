#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it.
# Submit it: sbatch slurm_guide.sh [more flags of src/train.py]
#
# 300 s before the time limit, Slurm signals the processes: they save and end with 85, and the job
# is queued again, as it is when a node fails. It resumes from the last checkpoint.
#
# Changes from the guide's example:
# - srun starts one process per GPU; the guide starts a launcher with all processes in each task
# - MASTER_PORT comes from the job number, so that two jobs on a node do not share it
# - --cpus-per-task is also set for srun, which ignores that of the job since Slurm 22.05
# - NCCL_ASYNC_ERROR_HANDLING is now called TORCH_NCCL_ASYNC_ERROR_HANDLING
# - without CUDA_DEVICE_MAX_CONNECTIONS=1, which prevents that communication overlaps with compute
#SBATCH --job-name=llm_finetune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-gpu=32G
#SBATCH --time=48:00:00
#SBATCH --partition=gpu
#SBATCH --output=slurm-%j.out
#SBATCH --error=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@300
# shellcheck disable=SC2034 # for the report: this script is run as a copy
submitted=(sbatch slurm_guide.sh)
set -euo pipefail

project=PROJECT
# shellcheck source=/dev/null
. "$project/scripts/environment.sh"
cd HERE # paths are relative to it

set +u # modules and conda read variables that are not set
module load cuda/12.2 anaconda3
# shellcheck source=/dev/null
source activate llm_finetuning
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"

job=${SLURM_JOB_ID:?submit it with sbatch}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${MASTER_ADDR:-${hosts%%$'\n'*}}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + job % 10000))}"

# after one task has ended, the others have 120 s
status=0
srun --cpus-per-task=8 --wait=120 python "$project/src/train.py" --config=config.yaml --deepspeed=config/ds_config.json "$@" || status=$?
if [ "$status" -eq 85 ]; then # stopped and saved
  scontrol requeue "$job" || echo "error: not queued again; submit the same script" >&2
fi
exit "$status"
