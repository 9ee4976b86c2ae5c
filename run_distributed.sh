#!/usr/bin/env bash
# Fine-tune a language model on preference pairs, or bake a prompt into it, on several processes of
# one or more nodes.
#
#     ./run_distributed.sh [num_gpus] [dpo] [flags of src/main_distributed.py]
#     ./run_distributed.sh [num_gpus] baking [flags of generate_data.py --] [of train_loop.py]
#     ./run_distributed.sh [num_gpus] SCRIPT.py [its flags]          # a script of your own
#
# Without num_gpus it starts one process per GPU, at most 2, or two CPU processes.
# Several nodes: export NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, and start it on each.
# To resume a run that was stopped or killed, run the same command again. On one node, if a process
# is killed, all are restarted from the last checkpoint, up to MAX_RESTARTS times (3).
# Exit status: 0 done, 2 wrong input, 3 loss not finite, 4 could not write, 85 stopped and saved
# (run it again), 130 Ctrl-C, 1 anything else.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# In a batch job this script may be a copy in a spool folder.
if [ ! -f "$here/scripts/environment.sh" ]; then
  here=${PBS_O_WORKDIR:-${SLURM_SUBMIT_DIR:-.}}
  # shellcheck disable=SC2034 # for the report
  submitted=("$here/run_distributed.sh")
fi
[ -f "$here/scripts/environment.sh" ] ||
  { echo "error: $here: is not the project's folder; start $0 there" >&2 && exit 2; }
# shellcheck source=scripts/environment.sh
. "$here/scripts/environment.sh"
use_environment

what=dpo number=${1:-}
[[ ! "$number" =~ ^[0-9]+$ ]] || shift
if [[ "${1:-}" =~ ^[a-z]+$ || "${1:-}" = *.py ]]; then
  what=$1
  shift
fi
case $what in
  *.py)
    [ -f "$what" ] || fail "$what: no such file"
    programs=("$what")
    ;;
  dpo) programs=("$root/src/main_distributed.py") ;;
  baking) programs=("$root/src/generate_data.py" "$root/src/train_loop.py") ;;
  *) fail "$what: unknown program; use dpo, baking, a file SCRIPT.py, or flags" ;;
esac
if has_word "-h|--help" "$@"; then
  print_usage
  for program in "${programs[@]}"; do python "$program" --help; done
  exit
fi
processes=$(processes_of "$number")
if [ "$what" != baking ]; then
  exec python -m ddp_utils.launch "$processes" "${programs[@]}" "$@"
fi

# baking: flags before a -- are those of generate_data.py
generate=("${programs[0]}") train=("${programs[1]}")
if has_word -- "$@"; then
  while [ "$1" != -- ]; do
    generate+=("$1")
    shift
  done
  shift
fi
train+=("$@")
# A mistake in the flags of the second program is an error now, not after the sampling.
python -c "import sys; sys.argv.pop(0); from ddp_utils import cli
from prompt_baking import train_config; cli.check_flags(train_config.read)" "${train[@]}"
words=("$@" "${generate[@]}") # in flags, - is _
if has_word "__check|__validate_only|__dry_run" "${words[@]//-/_}"; then
  # the data of the second program does not exist yet
  exec python -m ddp_utils.launch "$processes" "${generate[@]}" --check
fi
exec python -m ddp_utils.launch "$processes" "${generate[@]}" --then "${train[@]}"
