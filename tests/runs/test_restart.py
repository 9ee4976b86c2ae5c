"""Real launchers, real kills: restarted by torchrun, stopped by signals, no process left behind."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import faults
import runs
from conftest import ROOT
from ddp_utils.runs import checkpoint
from ranks import addresses

LORA = faults.MODES["lora"]
BIN = str(Path(sys.executable).parent)
TORCHRUN = [f"{BIN}/torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
FAULTY, SCRIPT = str(ROOT / "tests/faults.py"), str(ROOT / "run_distributed.sh")


@contextlib.contextmanager
def launched(command, folder, *flags, **env):
    """A launcher in a session of its own, its output in a file; nothing of it is left after."""
    log = folder.with_name("log")
    mine = ("RANK", "WORLD", "LOCAL", "MASTER", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    clean |= {"PATH": f"{BIN}:{clean['PATH']}", "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests"}
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [*command, *faults.STEPS, *LORA, *flags, "--result_dir", str(folder)],
            env=clean | {"OMP_NUM_THREADS": "1", **env},
            stdout=file,
            stderr=file,
            start_new_session=True,
            cwd=ROOT,
        )
    process.log = log
    try:
        yield process
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def descendants(pid):
    """Process ids of children, their children and so on."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


def ranks_of(process):
    """The ranks' process ids: descendants whom their launcher has told their rank."""
    found = []
    for pid in descendants(process.pid):
        with contextlib.suppress(OSError):
            if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return sorted(found)


def wait_until(event, seconds=60):
    deadline = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def has_logged(folder, count):
    metrics = folder / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count


def are_gone(pids):
    return lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]


def state(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "Z"


# --- restarts ------------------------------------------------------------------------------------


def test_f1_torchrun_restarts_a_killed_rank_and_the_weights_are_the_same(undisturbed, tmp_path):
    """Rank 0; without a new name for each meeting three in five restarts meet the dead rank."""
    folder = tmp_path / "run"
    with launched([*TORCHRUN, FAULTY], folder, FAULT="kill_in_backward 0 7") as process:
        assert process.wait(90) == 0, process.log.read_text()
    log = process.log.read_text()
    assert "is not finished: goes on after step 5" in log and "Traceback" not in log
    assert faults.is_equal(folder, undisturbed)


LONG = runs.words("--max_steps 60")  # so that a signal from outside comes in time


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Folder of an undisturbed run of 60 steps."""
    folder = tmp_path_factory.mktemp("long") / "run"
    faults.finished(faults.start(2, folder, *LORA, *LONG))
    return folder


@pytest.mark.show  # torchrun's, above, is the same path; 60 steps
def test_f1_the_shell_script_restarts_a_killed_rank(long_run, tmp_path):
    folder = tmp_path / "run"
    with launched([SCRIPT, "2"], folder, *LONG) as process:
        wait_until(has_logged(folder, 7))
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        assert process.wait(90) == 0, process.log.read_text()
    assert re.search(r"is not finished: goes on after step \d*[05]\n", process.log.read_text())
    assert faults.is_equal(folder, long_run)


def test_the_shell_script_does_not_restart_what_a_restart_cannot_mend(tmp_path):
    """The same fault in the real script: a learning rate that makes the loss infinite."""
    folder, flags = tmp_path / "run", runs.words("--learning_rate 9e18 --max_grad_norm 0")
    with launched([SCRIPT, "2"], folder, *flags) as process:
        assert process.wait(90) == 3, process.log.read_text()
    log = process.log.read_text()
    assert log.count("world_size=2") == log.count("error: ") == 1 and "is not finite" in log
    assert "ChildFailedError" not in log
    assert (faults.summary(folder)["status"], faults.summary(folder)["exit_code"]) == ("failed", 3)


# --- signals -------------------------------------------------------------------------------------


def test_f3_sigterm_to_the_shell_script_saves_and_ends_with_85(long_run, tmp_path):
    folder = tmp_path / "run"
    with launched([SCRIPT, "2"], folder, *LONG) as process:
        wait_until(has_logged(folder, 4))
        sockets = [addresses(pid) for pid in descendants(process.pid)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 85, process.log.read_text()
    assert set().union(*sockets) == {"127.0.0.1"}  # torchrun's too
    stopped = faults.summary(folder)
    assert stopped["status"] == "preempted" and 3 <= stopped["step"] < 60
    outcome = faults.finished(faults.start(2, folder, *LORA, *LONG))
    assert f"goes on after step {stopped['step']}" in outcome.logs[0]
    assert faults.is_equal(folder, long_run)
    with launched([SCRIPT, "2"], folder, *LONG) as process:  # finished: nothing is launched
        assert process.wait(30) == 0
    assert process.log.read_text().endswith("finished: the same settings, the same data\n")


def test_f3_sigusr1_is_passed_on_by_torchrun(tmp_path):
    folder = tmp_path / "run"
    handled = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    with launched([*TORCHRUN, *handled, FAULTY], folder, *LONG) as process:
        wait_until(has_logged(folder, 4))
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 1  # whatever its ranks ended with
    assert (faults.summary(folder)["status"], faults.summary(folder)["exit_code"]) == (
        "preempted",
        85,
    )


# --- nothing is left behind ----------------------------------------------------------------------


def marked(mark):
    """Processes with this word in their environment, whoever has adopted them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and state(path.parent.name) != "Z":
                found.append(int(path.parent.name))
    return found


PROGRAMS = {
    "dpo": [f"{ROOT}/src/main_distributed.py", "--result_dir"],
    "protein": ["-m", "dpo_inv.run_dpo_ddp", "--output_dir"],
    "sft": [f"{ROOT}/src/train.py", "--output_dir"],
}


@pytest.mark.parametrize(
    ("program", "kills"),
    [("dpo", 3), ("protein", 1)]
    + [pytest.param(name, 20, marks=pytest.mark.show) for name in PROGRAMS],
)
def test_a8_no_process_outlives_a_launcher_that_is_killed(program, kills, tmp_path):
    """As soon as it has started a rank, which knows nothing yet, then at random moments of 10 s."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    torchrun = [f"{BIN}/torchrun", "--nproc_per_node=2", *PROGRAMS[program]]
    for number in range(kills):
        mark, wait = uuid.uuid4().hex, moments.uniform(0, 10)
        process = subprocess.Popen(
            [*torchrun, str(tmp_path / f"run{number}")],
            env=os.environ | {"MARK": mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src"},
            start_new_session=True,
            cwd=ROOT,
        )
        try:
            if number == 0:
                wait_until(lambda process=process: descendants(process.pid))
            else:
                time.sleep(wait)
            print(
                f"kill {number} after {wait if number else 0:.3f} s: {len(marked(mark))} processes"
            )
            process.kill()
            process.wait()
            wait_until(lambda mark=mark: not marked(mark), seconds=5)
        finally:
            for pid in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


MOMENTS = {
    "loading": lambda folder: (folder / "config.json").exists,
    "training": lambda folder: has_logged(folder, 3),
    "saving": lambda folder: lambda: list(folder.glob("checkpoints/.tmp-*")),
}


@pytest.mark.show
@pytest.mark.parametrize("moment", MOMENTS)
def test_f18_ctrl_c_leaves_no_process_and_no_half_checkpoint(moment, long_run, tmp_path):
    folder = tmp_path / "run"
    often = ["--save_every", "1"]  # or none may be seen
    with launched([*TORCHRUN, FAULTY], folder, *LONG, *often) as process:
        wait_until(MOMENTS[moment](folder))
        ranks = ranks_of(process)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        assert process.wait(35) != 0
        assert len(ranks) == 2 and are_gone(ranks)()
    assert checkpoint.find(folder / "checkpoints")[1] == []
    faults.finished(faults.start(2, folder, *LORA, *LONG))
    assert faults.is_equal(folder, long_run)


# --- elastic -------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes():
    """Two network name spaces with a cable between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 for network name spaces")
    mine, names = f"d{os.getpid()}", ("a", "b")
    commands = [f"ip netns add {mine}{name}" for name in names]
    commands += [f"ip link add v{mine}a type veth peer name v{mine}b"]
    for number, name in enumerate(names, start=1):
        node = f"{mine}{name}"
        commands += [
            f"ip link set v{node} netns {node}",
            f"ip -n {node} addr add 10.99.0.{number}/24 dev v{node}",
            f"ip -n {node} link set lo up",
            f"ip -n {node} link set v{node} up",
        ]
    try:
        for command in commands:
            if subprocess.run(command.split(), capture_output=True).returncode:
                pytest.skip(f"{command}: not permitted here")
        yield [f"{mine}{name}" for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{mine}{name}"], capture_output=True)


@pytest.mark.show
def test_an_elastic_run_goes_on_when_a_node_dies(two_nodes, undisturbed, tmp_path):
    """Two nodes of one rank each; the second is killed; one rank does the same global batches."""
    folder, nodes = tmp_path / "run", []
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    with contextlib.ExitStack() as stack:
        for number, node in enumerate(two_nodes):
            command = ["ip", "netns", "exec", node, f"{BIN}/torchrun", "--nnodes=1:2"]
            command += ["--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
            command += ["--rdzv-endpoint=10.99.0.1:29400", "--rdzv-id=j1"]
            command += ["--rdzv-conf", f"{conf}{int(number == 0)}"]
            command += ["--local-addr", f"10.99.0.{number + 1}", FAULTY]
            env = {"GLOO_SOCKET_IFNAME": f"v{node}", "FAULT": "hang_in_backward 0 8 3"}
            nodes.append(stack.enter_context(launched(command, folder, **env)))
        wait_until(has_logged(folder, 8), seconds=90)
        assert json.loads((folder / "environment.json").read_text())["world_size"] == 2
        for pid in [*descendants(nodes[1].pid), nodes[1].pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert nodes[0].wait(120) == 0, nodes[0].log.read_text()
    log = nodes[0].log.read_text()
    assert "goes on after step 5" in log and "world_size: 2 -> 1; equal but for rounding" in log
    found, expected = runs.lines(folder), runs.lines(undisturbed)
    assert [(a["split"], a["step"]) for a in found] == [(b["split"], b["step"]) for b in expected]
    assert faults.summary(folder)["world_size"] == 1
