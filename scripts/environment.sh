# Sourced by the run_*.sh: the project's root, an environment with torch, threads per process.
# shellcheck shell=bash

# In a job the script may run from a spool folder: then the project is where it was submitted.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[ -z "${PBS_O_WORKDIR:-}" ] || cd "$PBS_O_WORKDIR" || exit

# A word or variable that must be a whole number in a range: a mistake costs one line.
number() { # its name, its value, lowest, highest
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
    echo "error: $1: $2; give a number from $3 to $4" >&2
    exit 2
  fi
}

# A first word that is a number says how many processes a node has: 2 without it.
# shellcheck disable=SC2034 # words is for who calls
processes() {
  processes=2 words=("$@")
  if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    number num_gpus "$1" 1 1024
    processes=$((10#$1)) words=("${@:2}")
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

# Processes of one node share its cores; what the user exported stays.
share_cores() {
  local cores
  cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}"
}

# One process checks settings, data and devices for all, then torchrun starts them: a mistake costs
# one line. Several nodes: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say so.
train() { # processes per node, what python runs (a file, or -m and a module), its flags
  local processes=$1 nodes=${NNODES:-1} program=("$2") where checked folder name meeting
  shift 2
  number NNODES "$nodes" 1 100000
  number DDP_JOIN_SECONDS "${DDP_JOIN_SECONDS:-50}" 1 100000
  number MASTER_PORT "${MASTER_PORT:-1}" 1 65535
  if [ "$nodes" -gt 1 ]; then
    for name in NODE_RANK MASTER_ADDR MASTER_PORT; do
      [ -n "${!name:-}" ] || {
        echo "error: $name: not set; several nodes need NODE_RANK, MASTER_ADDR and MASTER_PORT" >&2
        exit 2
      }
    done
    number NODE_RANK "$NODE_RANK" 0 $((nodes - 1))
  fi
  if [ "${program[0]}" = -m ]; then
    program+=("$1")
    shift
  fi
  use_environment
  share_cores "$processes"
  checked=$(RANK=0 LOCAL_RANK=0 WORLD_SIZE=$((processes * nodes)) LOCAL_WORLD_SIZE=$processes \
    python "${program[@]}" "$@" --check) || exit $?
  if [[ " $* " =~ \ --(check|validate_only|dry_run)\  ]]; then
    echo "$checked"
    return 0
  fi
  folder=$(sed -n 's/^run folder: //p' <<<"$checked")
  if [ -z "$folder" ]; then # nothing left to do
    tail -n 1 <<<"$checked"
    return 0
  fi
  if [ "$nodes" -gt 1 ]; then
    where=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
      --master-port "$MASTER_PORT" --rdzv-conf "timeout=${DDP_JOIN_SECONDS:-50}")
    meet_nodes "$MASTER_ADDR" "$MASTER_PORT" "$NODE_RANK"
  elif [ -n "${MASTER_PORT:-}" ]; then
    where=(--master-addr 127.0.0.1 --master-port "$MASTER_PORT")
    meet_nodes 127.0.0.1 "$MASTER_PORT" 0
  else # nothing listens to other machines: torchrun's own store would, so it meets in a file
    meeting=$(mktemp)
    where=(--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint "$meeting"
      --local-addr 127.0.0.1)
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  fi
  launch "$folder" "${where[@]}" --nproc_per_node "$processes" "${program[@]}" "$@"
}

# torchrun with restarts. What batch systems send to this script or to torchrun, SIGTERM or SIGUSR1,
# reaches every rank. Ends with the run's own status: torchrun's is 1 whatever a rank ended with.
launch() { # run folder, arguments of torchrun
  local folder=$1 child status=0 before
  shift
  before=$(sed -n 's/^ *"run_id": "\([^"]*\)".*/\1/p' "$folder/summary.json" 2>/dev/null || true)
  export RUN_ID="${RUN_ID:-$(date +%s)-$$}"
  # torchrun's --signals-to-handle and --shutdown-timeout, as variables: torch 2.10 has no such flags
  export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"
  # its processes are told its id: one that starts just when it is killed must know that it was
  STATUS_IN_SUMMARY=1 sh -c 'LAUNCHER_PID=$$ exec torchrun "$@"' - \
    --max-restarts "${MAX_RESTARTS:-3}" "$@" &
  child=$!
  [ "${NNODES:-1}" -eq 1 ] || follow "$folder/summary.json" "$before" "$child" &>/dev/null &
  trap 'kill -TERM "$child"' TERM USR1
  trap 'kill -INT "$child"' INT
  while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the child
    status=0
    wait "$child" || status=$?
  done
  trap - TERM USR1 INT
  rm -f "${meeting:-}"
  exit_status "$folder/summary.json" "$status" "$before"
}

# A torchrun that is asked to stop leaves at once; those of other nodes wait 5 minutes for it, deaf
# to signals.
follow() { # summary, run id in it before, torchrun
  while kill -0 "$3"; do
    sleep 1
    if grep -q '"status": "preempted"' "$1" && ! grep -qF "\"run_id\": \"$2\"" "$1"; then
      sleep 5 # for ranks at their last lines
      kill -KILL "$3"
    fi
  done
}

exit_status() { # summary, status of torchrun, run id in the summary before
  python - "$@" <<'PYTHON'
import json, os, sys, time
path, status, before = sys.argv[1], int(sys.argv[2]), sys.argv[3]
elsewhere = os.environ.get("NODE_RANK", "0") != "0"  # than rank 0, which writes the summary
for _ in range(100):
    try:
        with open(path) as file:
            summary = json.load(file)
    except (OSError, ValueError):
        summary = {}
    run_id = summary.get("run_id")  # rank 0's, which its node alone knows
    mine = run_id == os.environ["RUN_ID"] or (elsewhere and run_id not in (None, before))
    ended = mine and summary.get("status") != "running"
    if ended or not (mine and elsewhere):
        break
    time.sleep(0.1)  # for rank 0, which may be at its last lines
# torchrun's 0 is no proof: ranks that leave their status to the summary end with 0
sys.exit(summary["exit_code"] if ended else status or int(mine))
PYTHON
}

# Several nodes, or a port that the user chose: a wrong address or a taken port costs one line.
meet_nodes() { # address, port, rank of this node
  python - "$@" <<'PYTHON'
import os, socket, sys, time
address, port, node = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
deadline = time.monotonic() + float(os.environ.get("DDP_JOIN_SECONDS", 50))
while True:
    try:
        if node == 0:
            socket.create_server(("", port)).close()
        else:
            socket.create_connection((address, port), timeout=5).close()
        sys.exit(0)
    except OSError as error:
        if node == 0:
            problem = f"MASTER_PORT: {port} is in use on {socket.gethostname()}; export another one"
        elif time.monotonic() < deadline:
            time.sleep(0.5)
            continue
        else:
            problem = (f"node {node} cannot reach {address}:{port} ({error}); check MASTER_ADDR, "
                       "MASTER_PORT and firewall, for nodes that start slowly DDP_JOIN_SECONDS")
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)
PYTHON
}
