"""Two machines on this host, n1 and n2: each with a name and a network, Slurm and qsub on both.

They are namespaces of Linux. Their programs see the host's files, except /etc/hosts, which names
them, and /etc/profile, which is a cluster's. This needs root and touches nothing outside its
folder. All processes have one ancestor, which ends when this process closes a pipe or dies, and the
kernel ends the others with it: none can be left. Below are helpers to find and end processes.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import LIMIT

ADDRESSES = {"n1": "10.99.0.1", "n2": "10.99.0.2"}
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{ip} {node}\n" for node, ip in ADDRESSES.items())
# A login shell forgets PATH, and `module` brings python and an mpiexec back.
PROFILE = """PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
module() {{ [ "$1" != load ] || export PATH={bin}:{python}:$PATH; }}
"""
SETUP = r"""set -e
cd "$1"
mount --bind hosts /etc/hosts
mount --bind profile /etc/profile
hostname n1
mkfifo up
unshare --net --uts sh -c 'hostname n2; echo $$ >up; exec sleep infinity' &
read -r second <up
ip link add eth0 type veth peer name eth0 netns "$second"
up='ip link set lo up; ip link set eth0 up; ip addr add'
eval "$up $2/24 dev eth0"
nsenter --target "$second" --net sh -c "$up $3/24 dev eth0"
echo "$second"
read -r _
"""


def need(**packages):
    """Skip the test if a program is absent: need(sbatch="slurm-wlm"), what it comes with."""
    for program, package in packages.items():
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            pytest.skip(f"{program} is not installed; it comes with {package}")


class Machines:
    """n1 and n2. folder: for what they need, and what is started there may write into it."""

    def __init__(self, folder, python=Path(sys.executable).parent):
        need(ip="iproute2", unshare="util-linux", nsenter="util-linux")
        self.folder = Path(folder)
        bin_ = self.folder / "bin"
        bin_.mkdir(parents=True)
        mpiexec = bin_ / "mpiexec"  # the host's may be that of OpenMPI
        mpiexec.write_text('#!/bin/sh\nexec mpiexec.mpich "$@"\n')
        mpiexec.chmod(0o755)
        (self.folder / "hosts").write_text(HOSTS)
        (self.folder / "profile").write_text(PROFILE.format(bin=bin_, python=python))
        spaces = ["--mount", "--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = ["unshare", *spaces, "bash", "-c", SETUP, "-", folder, *ADDRESSES.values()]
        pipe = subprocess.PIPE
        self.first = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        second = self.first.stdout.readline().strip()
        if not second:
            pytest.skip(f"needs root, to make namespaces: {self.first.communicate()[1]}")
        namespaces = f"/proc/{self.first.pid}/ns"
        enter = ["nsenter", f"--target={self.first.pid}", "--mount", "--net", "--uts"]
        enter.append(f"--pid={namespaces}/pid_for_children")
        self.enter = {
            "n1": enter,
            "n2": [*enter, "nsenter", f"--target={second}", "--net", "--uts"],
        }

    def start(self, node, *command, **options):
        """A process on a node, both its outputs in one pipe."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        place = f"--chdir={options.pop('cwd', os.getcwd())}"  # nsenter goes to /
        command = [*self.enter[node], "env", place, *map(str, command)]
        return subprocess.Popen(command, **options)

    def run(self, node, *command, timeout=LIMIT, **options):
        """The output of a command on a node; it must end with 0."""
        process = self.start(node, *command, **options)
        output = process.communicate(timeout=timeout)[0]
        assert process.returncode == 0, f"{shlex.join(map(str, command))}: {output}"
        return output


@contextlib.contextmanager
def machines(folder):
    started = Machines(folder)
    try:
        yield started
    finally:
        started.first.communicate()  # closes the pipe


# --- Slurm, and the qsub that Debian has for it --------------------------------------------------

CONF = """ClusterName=two
SlurmctldHost=n1
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
PlugStackConfig={folder}/plugstack.conf
JobSubmitPlugins=pbs
TaskProlog={folder}/prolog
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n[1-2] CPUs=16 RealMemory=64000 Gres=gpu:1 State=UNKNOWN
PartitionName=gpu Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""
# PBS itself sets this variable, the qsub for Slurm does not. Slurm runs it before the script.
PROLOG = """#!/bin/bash
file={folder}/nodes.$SLURM_JOB_ID
scontrol show hostnames "$SLURM_JOB_NODELIST" >"$file"
echo "export PBS_NODEFILE=$file"
"""


class Slurm:
    """A cluster of the two machines with one GPU each, which is none (/dev/null)."""

    def __init__(self, machines):
        need(munged="munge", slurmctld="slurm-wlm", slurmd="slurm-wlm", sbatch="slurm-wlm")
        need(qsub="slurm-wlm-torque")
        self.machines, self.folder = machines, machines.folder / "slurm"
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(parents=True)
        files = {
            "slurm.conf": CONF,
            "gres.conf": "Name=gpu File=/dev/null\n",  # it must be a device
            "plugstack.conf": "optional spank_pbs.so\n",
            "prolog": PROLOG,
            "key": os.urandom(1024).hex(),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text.replace("{folder}", str(self.folder)))
        (self.folder / "prolog").chmod(0o755)
        (self.folder / "key").chmod(0o400)
        munge = {"socket": "munge.socket", "key-file": "key", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "seed"}
        munge = [f"--{option}={self.folder}/{name}" for option, name in munge.items()]
        self.run("munged", "--force", *munge)
        self.run("slurmctld")
        for node in ADDRESSES:
            self.run("slurmd", "-N", node, node=node)
        wait(lambda: self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2)

    def run(self, *command, node="n1", **options):
        env = {
            **(options.pop("env", None) or os.environ),
            "SLURM_CONF": f"{self.folder}/slurm.conf",
        }
        env["PATH"] += ":/usr/sbin:/sbin"
        return self.machines.run(node, *command, env=env, **options)

    def job(self, number):
        """The fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def alive(pids):
    """Those of some processes that have not ended; a zombie has."""
    running = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


def descendants(pid):
    """Process ids of children, their children and so on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def kill(pids):
    """End processes, some of which may have ended already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(fits):
    """Ids of the processes for which fits(psutil.Process) is true."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if fits(process):
                result.append(process.pid)
    return alive(result)


def wait(condition, step=0.1, limit=LIMIT):
    """Until condition() is true; returns what it is. TimeoutError after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came within {limit} s")
        time.sleep(step)
    return value
