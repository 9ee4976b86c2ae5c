#!/usr/bin/env bash
# The guide's name for ../run_dpo_ddp_local.sh.
exec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../run_dpo_ddp_local.sh" "$@"
