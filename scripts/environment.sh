# Sourced by the run_*.sh: the project's root and a Python environment with torch.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export DDP_PROJECT="$root" # whose code `python -m` must run, whatever the current folder is
DDP_COMMAND=$(printf '%q ' "${submitted[@]:-$0}" "$@") # for the report: how to run it again
export DDP_COMMAND=${DDP_COMMAND% }
# a daemon may have closed the standard streams
for fd in 0 1 2; do [ -e "/dev/fd/$fd" ] || eval "exec $fd<>/dev/null"; done
# PBS starts a job in the home folder; where a job, or its user, has gone to since then counts
if [ "${PBS_ENVIRONMENT:-}" = PBS_BATCH ] && [ . -ef "${PBS_JOBDIR:-$HOME}" ]; then
  cd "${PBS_O_WORKDIR:?}" || exit
fi

# Use the active environment if it has torch (module, conda, venv), otherwise .venv, which is created
# unless it has torch. Old or absent packages beside torch are an error.
use_environment() {
  local status=0
  check_packages python || status=$?
  [ "$status" -ne 2 ] || exit 2
  if [ "$status" -ne 0 ]; then
    if [ ! -e "$root/.venv/unfinished" ]; then # it is there until all packages are installed
      status=0
      check_packages "$root/.venv/bin/python" || status=$?
    fi
    [ "$status" -ne 2 ] || exit 2
    [ "$status" -eq 0 ] || make_environment
    export PATH="$root/.venv/bin:$PATH" DDP_ACTIVATE="$root/.venv/bin/activate"
  fi
  # The environment need not have this project installed, or may have another copy of it.
  export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
}

# Return 0 if an interpreter has the packages of requirements.txt, 1 if it has no torch, and 2 after a
# line about a package that is absent or too old.
check_packages() {
  "$1" - "$root/requirements.txt" "$1" >&2 2>/dev/null <<'PYTHON'
import importlib.util
import re
import sys
from importlib import metadata

if not importlib.util.find_spec("torch"):
    sys.exit(1)
if sys.version_info < (3, 10):
    print("error: Python %d.%d: 3.10 or newer is needed; activate another environment"
          % sys.version_info[:2])
    sys.exit(2)
for name, oldest in re.findall(r"(?m)^([\w.-]+)(?:>=([\d.]+))?", open(sys.argv[1]).read()):
    if name == "-e":
        continue
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(name.partition(".")[0]):  # a module may have no metadata
            continue
        version = "none"
    wanted = [int(number) for number in (oldest or "0").split(".")]
    installed = [int(number) for number in re.findall(r"\d+", version)]
    if installed[: len(wanted)] < wanted:
        problem, package = "not installed", name
        if oldest:
            problem = f"{version} is installed, {oldest} or newer is needed"
            package = f"'{name}>={oldest}'"
        print(f"error: {name}: {problem}; {sys.argv[2]} -m pip install {package}")
        sys.exit(2)
PYTHON
}

# Create .venv with the tested versions. Without an NVIDIA driver, which the CUDA build of PyTorch
# needs, it gets the CPU build, if its index can be reached: pip prefers 2.13.0+cpu to 2.13.0.
make_environment() {
  local index=https://download.pytorch.org/whl/cpu options=(-r requirements.txt -c constraints.txt)
  local build="PyTorch for CUDA: downloads about 3 GB, needs 6 GB on the disk"
  local needs="Python >= 3.10 with venv (Debian, Ubuntu: apt install python3-venv)"
  python3 -c "import ensurepip, sys; sys.exit(sys.version_info < (3, 10))" 2>/dev/null ||
    fail "$root/.venv: needs $needs; or activate another one"
  if ! has_nvidia_driver; then
    if python3 -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=10)" 2>/dev/null
    then
      options+=(--extra-index-url "$index")
      build="PyTorch for CPUs: downloads about 0.3 GB, needs 1.4 GB on the disk"
    else
      echo "$index with PyTorch for CPUs cannot be reached; using PyPI"
    fi
  fi
  echo "setting up $root/.venv (once) with $build"
  { mkdir -p "$root/.venv" && : >"$root/.venv/lock"; } 2>/dev/null ||
    fail "$root/.venv: cannot be written"
  exec 9>"$root/.venv/lock"
  flock 9 2>/dev/null || true # nodes that start together make one; a disk may have no locks
  if [ ! -e "$root/.venv/unfinished" ] && check_packages "$root/.venv/bin/python"; then
    exec 9>&-
    return
  fi
  touch "$root/.venv/unfinished"
  python3 -m venv "$root/.venv" || fail "$root/.venv: needs $needs; or activate another one"
  (cd "$root" && .venv/bin/pip install -q "${options[@]}") || # `-e .` is relative
    fail "pip install -r requirements.txt: see above; or activate an environment with torch"
  rm "$root/.venv/unfinished" && exec 9>&-
}

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; }

fail() { echo "error: $1" >&2 && exit 2; }

# Print the comment at the top of the script that was called, without directives of PBS.
print_usage() {
  sed -n '2,/^[^#]/{/^#PBS/!s/^# \{0,1\}//p}' "$0"
  echo
}

# Return 0 if one of the words fits a pattern of alternatives: has_word "-h|--help" "$@"
has_word() {
  local word
  for word in "${@:2}"; do
    [[ "|$1|" != *"|$word|"* ]] || return 0
  done
  return 1
}

# Print the number of processes per node: the word if it is a number, otherwise one process per GPU,
# at most two, or two CPU processes; a line on stderr says which.
processes_of() {
  if [[ "$1" =~ ^[0-9]+$ ]]; then
    echo "$1"
  else
    python -c "import sys, torch; gpus = torch.accelerator.device_count(); print(min(gpus, 2) or 2)
where = f'{min(gpus, 2)} of {gpus} GPUs; for all: {sys.argv[1]} {gpus}' if gpus else '2 CPU processes'
print(f'starting on {where}', file=sys.stderr)" "$0"
  fi
}
