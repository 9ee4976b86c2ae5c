# Sourced by the run_*.sh: the project's root, an environment with torch, threads per process.
# shellcheck shell=bash

# In a job the script may run from a spool folder: then the project is where it was submitted.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[ -z "${PBS_O_WORKDIR:-}" ] || cd "$PBS_O_WORKDIR" || exit

# A first word that is a number says how many processes a node has: 2 without it.
# shellcheck disable=SC2034 # words is for who calls
processes() {
  processes=2 words=("$@")
  if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    processes=$1 words=("${@:2}")
  fi
}

# The active environment if it has torch (module, conda, venv), else .venv, made once.
use_environment() {
  local status=0
  python - "$root/requirements.txt" >&2 2>/dev/null <<'PYTHON' || status=$?
import importlib.util as modules, re, sys
from importlib import metadata
for name, floor in re.findall(r"(?m)^([\w-]+)>=([\d.]+)", open(sys.argv[1]).read()):
    # looking for torch, not importing it, which takes seconds
    if name == "torch" and not modules.find_spec(name):
        sys.exit(1)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:  # a module may bring torch without its metadata
        version = "none"
        if modules.find_spec(name):
            continue
    oldest, numbers = ([*map(int, re.findall(r"\d+", v))] for v in (floor, version))
    if numbers[:len(oldest)] < oldest:
        print(f"error: {name}: {version} is installed, {floor} or newer is needed; "
              f"python -m pip install '{name}>={floor}'")
        sys.exit(2)
PYTHON
  [ "$status" -ne 2 ] || exit 2
  if [ "$status" -ne 0 ]; then
    if [ ! -f "$root/.venv/ready" ]; then
      echo "setting up $root/.venv (once)"
      python3 -m venv "$root/.venv"
      (cd "$root" && .venv/bin/pip install -q -r requirements.txt) # its `-e .` is seen from here
      touch "$root/.venv/ready"
    fi
    export PATH="$root/.venv/bin:$PATH"
  fi
  # an environment with torch need not have this project installed, or has another copy of it
  export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
}

# With --help among the words it prints the head of the script that was called, and succeeds.
asked_for_help() {
  local word
  for word in "$@"; do
    if [ "$word" = -h ] || [ "$word" = --help ]; then
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      echo
      use_environment
      return 0
    fi
  done
  return 1
}

# End here for a mistake in the flags of a program, before torch is imported.
check_flags() { # what python runs (a file, or -m and a module), its flags
  use_environment
  FLAGS_ONLY=1 python "$@" || exit
}

# Check the settings, start the processes and end with their exit status: see launch.py.
train() { # processes per node, then as check_flags(), which comes first
  [ ! -t 1 ] || echo "checking settings and data"
  exec python -m ddp_utils.launch "$@"
}
