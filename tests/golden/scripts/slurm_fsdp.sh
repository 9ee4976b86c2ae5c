#!/bin/bash -l
# Written by scripts/distributed_setup.py, which overwrites it:
#     slurm --config fsdp.yaml --account a --output=slurm_fsdp.sh
# Submit it: sbatch slurm_fsdp.sh [more flags of src/train.py]
#
# 300 s before the time limit Slurm signals the processes: they save, end with 85, and the job is
# queued again, as it is when a node fails. It goes on from the last checkpoint, in the same output.
#
# Mended in the guide's example:
# - 8 tasks on a node, each a launcher of as many: here srun alone starts them
# - MASTER_PORT=29500 is any job's on the node: here it comes from the job's number
# - since Slurm 22.05 srun does not take --cpus-per-task from the job: here it is told
# - NCCL_ASYNC_ERROR_HANDLING has become TORCH_NCCL_ASYNC_ERROR_HANDLING
# - CUDA_DEVICE_MAX_CONNECTIONS=1 keeps FSDP from overlapping: it is for DeepSpeed and DDP
#SBATCH --job-name=llm_finetune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
#SBATCH --mem-per-gpu=32G
#SBATCH --time=48:00:00
#SBATCH --partition=gpu
#SBATCH --account=a
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

set +u # modules and conda ask for variables that are not set
module load cuda/12.2
module load anaconda3
# shellcheck source=/dev/null
source activate llm_finetuning
set -u
use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-INFO}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"

job=${SLURM_JOB_ID:?submit it with sbatch} world=$((SLURM_NNODES * 8))
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
export MASTER_ADDR="${MASTER_ADDR:-$first}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"

# one process checks for all: a mistake is one line
command=(python "$project/src/train.py" --config=fsdp.yaml "$@")
RANK=0 LOCAL_RANK=0 WORLD_SIZE=$world LOCAL_WORLD_SIZE=8 \
  "${command[@]}" --check >/dev/null

# each task learns its rank on its node, from SLURM_PROCID and SLURM_LOCALID; when one has ended
# the others have 120 s
status=0
srun --cpus-per-task=8 --wait=120 "${command[@]}" || status=$?
if [ "$status" -eq 85 ]; then # stopped and saved
  scontrol requeue "$job" || echo "error: not queued again; submit the same script" >&2
fi
exit "$status"
