#!/bin/bash -l
#PBS -A <your_project>
#PBS -N dpo_ddp
#PBS -q capacity
#PBS -l select=2:system=aurora,place=scatter
#PBS -l walltime=02:00:00
#PBS -l filesystems=home:flare
#PBS -k doe
#PBS -j oe
#PBS -r y
# Fine-tune ProteinMPNN on Aurora. Set your project above and your data below, then, in this folder:
#
#     qsub run_dpo_ddp_aurora.sh
#     qsub -W depend=afternotok:<jobid> run_dpo_ddp_aurora.sh   # resume it after its time limit
#     qsub -l select=1 -v PER_NODE=6 run_dpo_ddp_aurora.sh      # one process per GPU, not per tile
#
# Output: logs/dpo_ddp_<jobid>.out and .err. Set-up of the machine: docs/protein_dpo.md. A job that
# PBS runs again, and the next job with the same flags, resume from the last checkpoint. The exit
# status is that of run_distributed.sh: 85 is "stopped and saved".
flags=(
  --train_data data/input/test_data_real.json
  --output_dir outputs/dpo_ddp_aurora
  --batch_size 1
  --num_epochs 10
)

set -eo pipefail
if [[ " $* " =~ \ (-h|--help)\  ]]; then # on a login node, without qsub
  # shellcheck source=scripts/environment.sh
  . "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/scripts/environment.sh"
  print_usage
  export PATH="$root/.venv/bin:$PATH" PYTHONPATH="$root/src"
  exec python -m dpo_inv.run_dpo_ddp --help
fi
cd "${PBS_O_WORKDIR:?submit it with qsub}"
[ -d src/dpo_inv ] || cd ..
[ -d src/dpo_inv ] || { echo "error: $PBS_O_WORKDIR: submit it from the project's folder" >&2; exit 2; }
mkdir -p logs
job=${PBS_JOBID%%.*}
exec >>"logs/dpo_ddp_$job.out" 2>>"logs/dpo_ddp_$job.err"

# environment: torch from the module, the other packages from a venv
module load frameworks
# shellcheck disable=SC1091 # it exists only on Aurora
[ ! -f .venv/bin/activate ] || . .venv/bin/activate
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" # the environment may have another clone
# how often PBS has run this job again, for runs with --restart
runs=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/^ *run_count = //p' || true)
export PBS_RESTART_COUNT=$((${runs:-1} - 1))
set -u

# processes: 12 tiles per node, or 6 GPUs, and the cores near each
per_node=${PER_NODE:-12}
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
case $per_node in
  12) bind=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79 ;;
  6)
    bind=list:4-11:12-19:20-27:56-63:64-71:72-79
    export ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE # the module sets FLAT: one device per tile
    ;;
  [1-9] | 1[01]) bind=none ;;
  *)
    echo "error: PER_NODE: $per_node; use 12 (tiles), 6 (GPUs), or fewer tiles" >&2
    exit 2
    ;;
esac
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((48 / per_node))}"
export WORLD_SIZE=$((nodes * per_node)) LOCAL_WORLD_SIZE=$per_node # PALS does not document them

# rank 0 is on the first node; the fast network is used if the node has a name there
first=$(head -n 1 "$PBS_NODEFILE")
fast=${first%%.*}.hsn.cm.aurora.alcf.anl.gov
export MASTER_ADDR="${MASTER_ADDR:-$(getent hosts "$fast" >/dev/null && echo "$fast" || echo "$first")}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + 10#${job//[!0-9]/} % 10000))}"
export CCL_PROCESS_LAUNCHER="${CCL_PROCESS_LAUNCHER:-pmix}" CCL_ATL_TRANSPORT="${CCL_ATL_TRANSPORT:-mpi}"
export CCL_KVS_MODE="${CCL_KVS_MODE:-mpi}" FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR:-userfaultfd}"

# before the time limit it saves and ends with 85, whatever signals PBS sends
limit=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/.*Resource_List.walltime = //p' || true)
if [[ "$limit" =~ ^([0-9]+):([0-9]+):([0-9]+)$ ]]; then
  hours=10#${BASH_REMATCH[1]} minutes=10#${BASH_REMATCH[2]} seconds=10#${BASH_REMATCH[3]}
  export DDP_JOB_END=$(($(date +%s) - SECONDS + (hours * 60 + minutes) * 60 + seconds))
fi

exec mpiexec -n "$WORLD_SIZE" -ppn "$per_node" --hostfile "$PBS_NODEFILE" --cpu-bind "$bind" \
  python -m dpo_inv.run_dpo_ddp --backend "${BACKEND:-xpu}" "${flags[@]}" "$@"
