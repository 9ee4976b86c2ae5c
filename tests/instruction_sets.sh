#!/usr/bin/env bash
# Run tests with the instructions of another x86-64 CPU.
#
#     tests/instruction_sets.sh default|avx2|avx512 [arguments of pytest]
#
# `default` has SSE4 only. PyTorch, oneDNN and MKL use no instructions above the level, so that sums
# are rounded as on such a CPU.
set -euo pipefail

case ${1:-} in
  default) onednn=SSE41 mkl=SSE4_2 ;;
  avx2) onednn=AVX2 mkl=AVX2 ;;
  avx512) onednn=AVX512_CORE mkl=AVX512 ;;
  *) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
export ATEN_CPU_CAPABILITY=$1 ONEDNN_MAX_CPU_ISA=$onednn MKL_ENABLE_INSTRUCTIONS=$mkl
shift
exec python -m pytest "$@"
