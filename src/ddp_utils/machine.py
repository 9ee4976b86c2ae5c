"""What a machine says without torch: nvidia-smi, control groups, limits, names in the environment.

Nothing here raises: what is absent, hidden or forbidden is None or empty. root is the folder that
stands for /. Facts come first and about_*() judge them, a finding in a line: what it is, why it
hurts; how to mend it. Memory is in GiB.
"""

import os
import re
import resource
import socket
import subprocess
from pathlib import Path

GIB = 2**30
DRIVERS = {"11": 450, "12": 525, "13": 580}  # the oldest that runs a CUDA of this major version
OPEN_FILES, FORKS, DISK = 65536, 4096, 10  # fewer, or fewer GiB, are remarked
ON, UNSET = "[^0].*", "unset it"
HURT = {  # variable: the values that hurt (a pattern), why, how to mend it
    "NCCL_P2P_DISABLE": (ON, "GPUs talk through host memory", f"{UNSET} unless NCCL hangs"),
    "NCCL_SHM_DISABLE": (ON, "GPUs without peer access talk through the network", UNSET),
    "NCCL_IB_DISABLE": (ON, "nodes talk over TCP, not InfiniBand", f"{UNSET} unless NCCL fails"),
    "NCCL_DEBUG": ("TRACE", "every call is written to the log", "INFO tells enough"),
    "NCCL_ALGO": (".+", "one algorithm for messages of all sizes", f"{UNSET}, NCCL chooses"),
    "NCCL_PROTO": (".+", "one protocol for messages of all sizes", f"{UNSET}, NCCL chooses"),
    "NCCL_ASYNC_ERROR_HANDLING": (".*", "an old name", "set TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "CUDA_LAUNCH_BLOCKING": (ON, "the CPU waits for every kernel", f"{UNSET} after debugging"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "FSDP's gathers queue behind its kernels", UNSET),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another", UNSET),
    "ZE_FLAT_DEVICE_HIERARCHY": ("COMPOSITE", "one process drives two tiles", "set FLAT"),
}
SHOWN = [*HURT, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "ZE_AFFINITY_MASK"]


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def names(folder):
    return sorted(path.name for path in folder.glob("*"))


# --- NVIDIA --------------------------------------------------------------------------------------


def ask(*words):
    """(what a tool prints, why it failed); both are empty without the tool."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", "" if isinstance(error, FileNotFoundError) else str(error)
    said = " ".join((done.stdout + done.stderr).split())
    return (done.stdout, "") if done.returncode == 0 else ("", said[:200] or "no output")


def nvidia(root=Path("/")) -> dict:
    """Driver and GPUs of the machine, whatever torch sees of them; links, MIG slices, users."""
    query = ["nvidia-smi", "--format=csv,noheader,nounits"]
    text, problem = ask(*query, "--query-gpu=index,driver_version,mig.mode.current")
    gpus = [line.split(", ") for line in text.splitlines() if line.count(", ") == 2]
    kernel = read(root / "proc/driver/nvidia/version")
    kernel = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)", kernel)
    sliced = [index for index, _, mig in gpus if mig.strip() == "Enabled"]
    slices = slices_of(ask("nvidia-smi", "-L")[0]) if sliced else {}
    apps = "--query-compute-apps=gpu_uuid,pid,used_memory"
    return {
        "driver": gpus[0][1] if gpus else kernel and kernel[1],
        "nvidia_gpus": len(gpus) or len(names(root / "proc/driver/nvidia/gpus")),
        "nvidia_smi": problem,
        "links": links_of(ask("nvidia-smi", "topo", "-m")[0]) if len(gpus) > 1 else {},
        "mig": {index: slices.get(index, []) for index in sliced},
        "users": users_of(ask(*query, apps)[0]) if gpus else {},
    }


def links_of(text) -> dict:
    """`nvidia-smi topo -m` -> {"0-1": "NV18"}, a pair of GPUs each; network cards are left out."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()  # the head is underlined
    rows = [line.split() for line in lines if re.match(r"\s*GPU\d", line)]
    return {
        f"{head[3:]}-{row[0][3:]}": kind
        for number, row in enumerate(rows[1:])
        for head, kind in zip(rows[0][:number], row[1:], strict=False)
    }


def slices_of(text) -> dict:
    """`nvidia-smi -L` -> {"0": ["1g.5gb", "1g.5gb"]}: GPU and the profiles of its MIG slices."""
    parts = re.split(r"^GPU (\d+):", text, flags=re.M)[1:]
    rows = zip(parts[::2], parts[1::2], strict=True)
    return {gpu: re.findall(r"^\s+MIG (\S+)", part, re.M) for gpu, part in rows}


def users_of(text) -> dict:
    """Rows `uuid, pid, MiB` -> {uuid: ["pid 4242 30.0 GiB"]}; this process is left out."""
    found = {}
    for uuid, pid, mib in re.findall(r"^GPU-(\S+), (\d+), (.*)$", text, re.M):
        size = f" {int(mib) / 1024:.1f} GiB" if mib.isdecimal() else ""  # else [N/A]
        if pid != str(os.getpid()):
            found.setdefault(uuid, []).append(f"pid {pid}{size}")
    return found


def about_nvidia(facts):
    """facts: those of nvidia(), and kind, build and cuda_visible_devices of torch."""
    gpus, driver, build = facts["nvidia_gpus"], facts["driver"], facts["build"]
    shown, problem = facts["cuda_visible_devices"], facts["nvidia_smi"]
    major = re.match(r"CUDA (\d+)", build)
    needed, have = DRIVERS.get(major and major[1]), re.match(r"\d+", driver or "")
    cannot = f"torch for {build} cannot use the {gpus} GPUs with driver {driver}"
    if "mismatch" in problem:
        what = f"{problem}: the kernel runs another driver ({driver}), no program can use it"
        yield f"{what}; reboot, or reload the nvidia modules"
    elif facts["kind"] != "cpu":
        return
    elif shown in ("", "-1", "NoDevFiles"):
        yield f"CUDA_VISIBLE_DEVICES is '{shown}', which means the CPU; unset it to use GPUs"
    elif gpus and build == "CPU":
        where = "https://pytorch.org/get-started/locally"
        yield f"{gpus} GPUs are here but torch is built for the CPU; install a CUDA build: {where}"
    elif gpus and needed and have and int(have[0]) < needed:
        yield f"{cannot}, it needs {needed} or newer; update the driver, or take an older torch"
    elif gpus:
        what = f"{cannot}; mend CUDA_VISIBLE_DEVICES, ask for them (docker: --gpus all, Slurm: "
        yield f"{what}--gres=gpu), or start nvidia-fabricmanager where it is not running"
    elif problem:
        yield f"nvidia-smi fails: {problem}; if there is a GPU, load or install its driver"


def about_mig(facts):
    for gpu, profiles in facts["mig"].items():
        what = f"MIG cuts GPU {gpu} into {len(profiles)} slices ({', '.join(profiles) or 'none'})"
        why = "a process sees one slice and NCCL joins no two of one GPU"
        yield f"{what}; {why}; start each alone, or end it: sudo nvidia-smi -i {gpu} -mig 0"


def about_links(facts):
    """Which pairs of GPUs talk across CPU sockets, and which GPUs need not."""
    links, shown = facts["links"], facts["cuda_visible_devices"] or ""
    if re.fullmatch(r"[\d,]+", shown):
        seen = set(shown.split(","))
        links = {pair: kind for pair, kind in links.items() if seen.issuperset(pair.split("-"))}
    far = [pair for pair, kind in links.items() if kind == "SYS"]
    if far:
        gpus = sorted({gpu for pair in links for gpu in pair.split("-")}, key=int)
        near = [[b for b in gpus if f"{a}-{b}" not in far and f"{b}-{a}" not in far] for a in gpus]
        group = ",".join(max(near, key=len))
        what = f"{len(far)} of {len(links)} pairs of GPUs ({some(far)}) talk across CPU sockets"
        mend = "raise gradient_accumulation_steps to do so less often"
        if "," in group:
            mend += f", or export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={group}"
        yield f"{what}, the slowest way (SYS); {mend}"


def some(items):
    return ", ".join(items[:6]) + ", ..." * (len(items) > 6)


# --- the host ------------------------------------------------------------------------------------


def host(root=Path("/")) -> dict:
    """Limits of this process and of its control groups, network cards, disk; None: no limit."""
    files, forks, locked = map(limit, ("NOFILE", "NPROC", "MEMLOCK"))
    forks = [n for n in (forks[0], least(root, "pids", "pids.max")) if n is not None]
    memory = least(root, "memory", "memory.max", "memory.limit_in_bytes")
    return {
        "cpu_limit": cpu_limit(root),
        "memory_limit_gib": memory and round(memory / GIB, 2),
        "open_files": files,
        "forks": min(forks, default=None),
        "locked_memory": locked[0],
        "interfaces": names(root / "sys/class/net"),
        "infiniband": names(root / "sys/class/infiniband"),
    }


def limit(name):
    """[soft, hard] of a resource limit, as in getrlimit(2)."""
    pair = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return [None if n == resource.RLIM_INFINITY else n for n in pair]


def groups(root, controller):
    """Folders of this process's control groups, version 1 or 2, from its own to the top one."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controllers and controller)
            own = top / path.strip("/")  # in a container often not there, the top one is its own
            yield from (folder for folder in [own, *own.parents] if folder.is_relative_to(top))


def least(root, controller, *files):
    texts = [read(folder / file).strip() for folder in groups(root, controller) for file in files]
    # without a limit version 2 says "max", version 1 a huge number
    return min((int(n) for n in texts if n.isdecimal() and int(n) < 2**60), default=None)


def cpu_limit(root):
    """How many cores' time the control groups allow; None: no limit."""
    files = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # version 2 has both in one
    texts = [" ".join(read(folder / f) for f in files) for folder in groups(root, "cpu")]
    found = [re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", text) for text in texts]  # not max, not -1
    return min((int(pair[1]) / int(pair[2]) for pair in found if pair), default=None)


def about_limits(facts, processes):
    """facts: those of host(), and cores, memory_gib."""
    (soft, hard), forks, locked = facts["open_files"], facts["forks"], facts["locked_memory"]
    cores, memory, free = facts["cpu_limit"], facts["memory_limit_gib"], facts["results_free_gib"]
    if soft is not None and soft < OPEN_FILES:
        most = OPEN_FILES if hard is None else min(hard, OPEN_FILES)
        mend = f"ulimit -n {most}" if most > soft else "raise it in limits.conf, docker --ulimit"
        yield f"{soft} open files a process, sockets to many ranks need more; {mend}"
    if forks is not None and forks < FORKS:
        what = f"{forks} processes and threads at most, then fork fails; ulimit -u {FORKS}"
        yield f"{what}, in a container --pids-limit {FORKS}"
    if facts["infiniband"] and locked is not None:
        what = f"{locked >> 10} KiB of locked memory, InfiniBand pins its buffers"
        yield f"{what}; ulimit -l unlimited (limits.conf; docker: --ulimit memlock=-1)"
    if cores is not None and cores < facts["cores"]:
        what = f"the control group allows {cores:g} of {facts['cores']} cores, more threads wait"
        yield f"{what}; export OMP_NUM_THREADS={max(1, int(cores / processes))}"
    if memory is not None and memory < facts["memory_gib"]:
        what = f"the control group allows {memory} of {facts['memory_gib']} GiB and kills beyond"
        yield f"{what}; ask for more (Slurm: --mem, docker: --memory) if a run dies without a word"
    if free < DISK:
        yield f"results/ has {free} GiB free, checkpoints fill them; free {DISK} GiB"


# --- the environment -----------------------------------------------------------------------------


def settings(env=os.environ) -> dict:
    return {name: env[name] for name in SHOWN if name in env}


def usable(pattern, interfaces):
    """Those that NCCL_SOCKET_IFNAME leaves: a list of prefixes; =a,b exact names; ^a all others."""
    listed = pattern.lstrip("^").lstrip("=").split(",")
    exact = pattern.lstrip("^").startswith("=")
    matched = [n for n in interfaces if (n in listed if exact else n.startswith(tuple(listed)))]
    return [n for n in interfaces if (n in matched) != pattern.startswith("^")]


def about_settings(facts):
    """facts: settings, interfaces, infiniband."""
    found, interfaces = facts["settings"], facts["interfaces"]
    for name, (values, why, mend) in HURT.items():
        needless = name == "NCCL_IB_DISABLE" and not facts["infiniband"]
        if name in found and re.fullmatch(values, found[name], re.I) and not needless:
            yield f"{name}={found[name]}: {why}; {mend}"
    nccl, gloo = found.get("NCCL_SOCKET_IFNAME", ""), found.get("GLOO_SOCKET_IFNAME", "")
    wrong = [f"NCCL_SOCKET_IFNAME={nccl}"] if nccl and not usable(nccl, interfaces) else []
    wrong += [f"GLOO_SOCKET_IFNAME={gloo}"] if {*gloo.split(",")} - {*interfaces, ""} else []
    for setting in wrong if interfaces else ():
        yield f"{setting}: no such network interface, nobody is met; set one of {some(interfaces)}"


def about_port(env=os.environ):
    """Why processes cannot meet at MASTER_PORT of this machine; a launcher's own is left alone."""
    port, address = env.get("MASTER_PORT"), env.get("MASTER_ADDR", "localhost")
    if not port or "RANK" in env or address not in ("localhost", "127.0.0.1", socket.gethostname()):
        return
    if not port.isdecimal() or not 0 < int(port) < 65536:
        yield f"MASTER_PORT={port}: not a port; give a number from 1 to 65535, or unset it"
        return
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        yield f"MASTER_PORT={port}: {os.strerror(error.errno)}; export another, or unset it"
