#!/usr/bin/env bash
# Fine-tune a language model on preference pairs, or bake a prompt into it, on several processes of
# one or more nodes.
#
#     ./run_distributed.sh [num_gpus=2] [dpo] [flags of src/main_distributed.py]
#     ./run_distributed.sh [num_gpus=2] baking [flags of generate_data.py --] [of train_loop.py]
#
# Several nodes: export NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, and start it on each.
# The same command goes on with a run that was stopped or killed. A process that dies is started
# again, with all others, up to MAX_RESTARTS times (3), from the last checkpoint.
# Exit status: 0 done, 2 wrong input, 3 loss not finite, 4 could not write, 85 stopped and saved
# (start it again), 1 anything else.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
[ -f "$here/scripts/environment.sh" ] || here=${PBS_O_WORKDIR:-${SLURM_SUBMIT_DIR:-.}}
# shellcheck source=scripts/environment.sh
. "$here/scripts/environment.sh"

processes "$@" # sets processes and words
what=dpo
if [[ "${words[0]:-}" =~ ^[a-z]+$ ]]; then
  what=${words[0]}
  unset "words[0]"
fi
case $what in
  dpo) script=main_distributed.py ;;
  baking) script=train_loop.py ;;
  *)
    echo "error: $what: not known; give dpo, baking, or flags" >&2
    exit 2
    ;;
esac
if asked_for_help "$@"; then
  [ "$what" = dpo ] || python "$root/src/generate_data.py" --help
  exec python "$root/src/$script" --help
fi
if [ "$what" = baking ]; then # flags before -- are of generate_data.py
  first=() rest=() behind=
  for word in ${words[@]+"${words[@]}"}; do
    if [ "$word" = -- ]; then
      first=(${rest[@]+"${rest[@]}"}) rest=() behind=yes
    else
      rest+=("$word")
    fi
  done
  # a typo behind -- costs one line now, not after the sampling
  (check_flags "$root/src/$script" ${rest[@]+"${rest[@]}"}) || {
    [ -n "$behind" ] || echo "flags of generate_data.py stand in front of a --" >&2
    exit 2
  }
  check_flags "$root/src/generate_data.py" ${first[@]+"${first[@]}"}
  if [[ " ${words[*]-} " =~ \ --check\  ]]; then # the data of the second is not there yet
    exec python "$root/src/generate_data.py" ${first[@]+"${first[@]}"} --check
  fi
  words=(${first[@]+"${first[@]}"} --then "$root/src/$script" ${rest[@]+"${rest[@]}"})
  script=generate_data.py
else
  check_flags "$root/src/$script" ${words[@]+"${words[@]}"}
fi
train "$processes" "$root/src/$script" ${words[@]+"${words[@]}"} # none: old bash calls it unset
