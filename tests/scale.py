"""Count what many ranks ask of the store, the hub, the lock of the cache and the disk.

    PYTHONPATH=src python tests/scale.py     # 64 and 512 ranks, as in docs/clusters.md

The code that is counted is the project's own. 512 processes are too many for one machine, so ranks
are threads, and `distributed._world` is another one in each thread. Only the connection of a group
of Gloo needs processes: it is counted for a few sizes. A call of a method of the store counts as a
request.
"""

import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ddp_utils import checkpoints, data, data_sets, distributed
from ddp_utils.data import DataFile
from ddp_utils.distributed import World
from lm import token_rows
from lm.instruction_data import Text
from ranks import ranks as processes

PER_NODE = 8
METHODS = ["set", "get", "add", "wait", "append", "check", "compare_set", "multi_get"]
METHODS += ["multi_set"]


class Counting(dist.Store):
    """Counts the calls of the methods of another store."""

    def __init__(self, store):
        super().__init__()
        self.store, self.calls = store, []  # append() is safe in threads, += is not

    @property
    def requests(self):
        return len(self.calls)

    def set_timeout(self, timeout):
        self.store.set_timeout(timeout)


def counted(method):
    def call(self, *arguments):
        self.calls.append(method)
        return getattr(self.store, method)(*arguments)

    return call


for name in METHODS:
    setattr(Counting, name, counted(name))


class Local(threading.local):
    """The World of the rank that this thread is."""

    world = World()

    def __getattr__(self, name):
        return getattr(self.world, name)


def in_threads(count, fn):
    """Call fn(rank) as each of `count` ranks, PER_NODE on a node; return the results."""
    local, results = Local(), [None] * count

    def run(rank):
        size = min(count, PER_NODE)
        local.world = World(rank, count, rank % size, size)
        results[rank] = fn(rank)

    with mock.patch.object(distributed, "_world", local):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


# --- the store and the hub -----------------------------------------------------------------------


def connect():
    """Connect as one of the processes; return the requests of this rank."""
    stores, real = [], dist.TCPStore

    def count(*arguments, **options):
        stores.append(Counting(real(*arguments, **options)))
        return stores[0]

    dist.TCPStore = count
    distributed.init_process_group(distributed.whoami())
    return stores[0].requests


def hub(count, folder):
    """Look a name up as `count` ranks; return requests at the store, and (rank, commit) at the hub.

    The caches of the nodes are one folder, as on a cluster.
    """
    store, asked = Counting(dist.HashStore()), []
    name = f"org/model-{count}"

    def download(_name, revision, allow_patterns):
        asked.append((distributed._world.rank, revision))
        target = data_sets.folder_in_cache(name, "c" * 40)
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")
        return str(target)

    look_up = data_sets.snapshot.__wrapped__  # without the cache, which is of one process
    with (
        mock.patch.object(distributed, "_store", store),
        mock.patch.object(data_sets, "snapshot_download", download),
        mock.patch.object(data_sets, "connect", lambda: None),
        mock.patch.object(data_sets.constants, "HF_HUB_CACHE", str(folder)),
    ):
        folders = in_threads(count, lambda rank: look_up(name, ("*.json",)))
    assert len({*folders}) == 1
    return store.requests, asked


# --- the lock of the cache ------------------------------------------------------------------------


def opens_of_lock(count, folder, seconds):
    """Read a data file of 32 MiB as `count` ranks, one of which encodes it for some seconds.

    Return how often per second the others open its lock.
    """
    source = DataFile(str(folder / "rows.jsonl"), folder / f"cache-{count}")
    with open(source.path, "wb") as file:
        file.truncate(2**25)
    began, opened = [], []

    def watch(event, arguments):
        if event == "open" and str(arguments[0]).endswith(".lock"):
            opened.append(time.monotonic())

    def encode(_report):
        began.append(time.monotonic())
        time.sleep(seconds)
        yield Text([1], [2], [], "rows.jsonl:1", "")

    sys.addaudithook(watch)
    with mock.patch.object(token_rows, "digest_of_data", str):  # would read it `count` times
        in_threads(count, lambda rank: token_rows.cached_rows(Text, source, [], encode))
    (start,) = began
    first = start + 2.0  # every rank has tried once
    return sum(first < at < start + seconds for at in opened) / (seconds - 2.0)


# --- checkpoints ----------------------------------------------------------------------------------


def hashed_at_resume(count, folder):
    """Return how many files of a checkpoint with a shard per rank each rank hashes."""
    path = checkpoints.path_of(folder / f"run-{count}", 1)
    path.mkdir(parents=True)
    files = {}
    for rank in range(count):
        shard = path / f"state-{rank:05d}-of-{count:05d}.safetensors"
        save_file({"parameter/x": torch.zeros(10)}, shard)
        files[shard.name] = {"size": shard.stat().st_size, "sha256": data.sha256(shard)}
    checkpoints.write_manifest(path, {"step": 1, "files": files})
    hashed, opened, sha256, load_file = [], Counter(), data.sha256, checkpoints.load_file

    def watch(file):
        hashed.append(file)
        return sha256(file)

    def load(file):
        opened[file] += 1
        return load_file(file)

    with (
        mock.patch.object(data, "sha256", watch),
        mock.patch.object(checkpoints, "load_file", load),
    ):
        assert checkpoints.find_newest(path.parent)[0] == path  # on rank 0
        by_main = len(hashed)
        in_threads(count, lambda rank: checkpoints.read(path, rank))
    assert set(opened.values()) == {1} and len(opened) == count
    return by_main, len(hashed) - by_main


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in (2, 4, 8, 16):
            print(f"{count} ranks: {processes(count, connect)} requests to connect with Gloo")
        for count in (1, 64, 512):
            requests, asked = hub(count, folder)
            print(f"{count} ranks: a name costs {requests} requests at the store, hub: {asked}")
        for count in (64, 512):
            print(f"{count} ranks: {opens_of_lock(count, folder, 12.0):.0f} opens of the lock/s")
            print(f"{count} ranks: hash {hashed_at_resume(count, folder)} files (rank 0, others)")


if __name__ == "__main__":
    main()
