"""torch.cuda of pretended devices, and NCCL: gloo behind NCCL's rules."""

import contextlib
import os
import types

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from pretend import device as devices
from pretend.device import SPECIAL, Gpu, current_device, fault, record, wrap

GIB = 2**30
CARDS = {  # name, compute capability, GiB
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 80),
    "T4": ("Tesla T4", (7, 5), 16),
}


def install(card):
    """Replace what a CPU build lacks, or what would look for a driver."""
    patch_cuda(*CARDS[card])
    patch_tensors()
    patch_nccl()


# --- torch.cuda -----------------------------------------------------------------------------------


class Stream:
    """The default stream, on which everything has been done already."""

    device_type, stream_id, cuda_stream = 1, 0, 0

    def __init__(self, *_, **__):
        self.device = devices.device_of(None)
        self.device_index = self.device.index

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        record.note("read", "stream.synchronize")

    def query(self):
        return True

    def is_capturing(self):
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0

    def synchronize(self):
        record.note("read", "event.synchronize")


def set_device(device):
    """torch.cuda.set_device."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        torch._C._accelerator_setDeviceIndex(devices.checked_index(index))


@contextlib.contextmanager
def on_device(device):
    """torch.cuda.device."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device=None):
    record.note("read", "synchronize")


def memory_stats(device=None):
    """Return the part of torch's statistics that torch.cuda's functions read."""
    memory = record.memory
    bytes_ = {"current": memory.now, "peak": memory.peak} if memory else {"current": 0, "peak": 0}
    return {name: {"all": bytes_} for name in ("allocated_bytes", "reserved_bytes")}


def reset_peak(device=None):
    if record.memory:
        record.memory.peak = record.memory.now


def patch_cuda(name, capability, gib):
    """Replace functions of torch.cuda."""
    major, minor = capability
    facts = {"name": name, "major": major, "minor": minor, "total_memory": gib * GIB}
    facts |= {"multi_processor_count": 132, "warp_size": 32, "L2_cache_size": 50 << 20}
    facts |= {"max_threads_per_multi_processor": 2048, "is_integrated": 0, "uuid": "0"}
    properties = types.SimpleNamespace(**facts, gcnArchName="")

    def always(value):  # a new function each time: torch.compile tells them apart by identity
        return lambda *_, **__: value

    def stream_of(*_, **__):
        return Stream()

    functions = {
        "set_device": set_device,
        "device": on_device,
        "synchronize": synchronize,
        "memory_stats_as_nested_dict": memory_stats,
        "reset_peak_memory_stats": reset_peak,
        "current_device": current_device,
        "device_count": lambda: devices._devices,
        "get_device_properties": always(properties),
        "get_device_capability": always(capability),
        "get_device_name": always(name),
        "mem_get_info": always(((gib - 1) * GIB, gib * GIB)),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "Stream": Stream,
        "Event": Event,
        "current_stream": stream_of,
        "default_stream": lambda *_, **__: Stream(),
        "stream": always(contextlib.nullcontext()),
        "_exchange_device": always(0),
        "_maybe_exchange_device": always(0),
    }
    functions |= {name: always(True) for name in ("is_available", "is_initialized", "_is_compiled")}
    functions["is_current_stream_capturing"] = always(False)
    # random numbers are the host's, and no memory is cached
    none = "_lazy_init init empty_cache ipc_collect manual_seed manual_seed_all set_rng_state"
    functions |= {name: always(None) for name in [*none.split(), "set_rng_state_all", "set_stream"]}
    for attribute, value in functions.items():
        setattr(torch.cuda, attribute, value)
    for attribute in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, attribute, always(None))
    torch.cuda.memory.memory_stats_as_nested_dict = memory_stats
    torch.cuda.nccl.version = always((2, 28, 9))
    torch.accelerator.current_stream = lambda *_, **__: Stream()
    torch.accelerator.set_device_index = set_device
    torch.accelerator.synchronize = lambda *_, **__: synchronize()
    torch.version.cuda = "13.0"
    torch.Stream, torch.Event = Stream, Event
    torch.backends.cuda.is_built = always(True)


def patch_tensors():
    """Let a module move to a device, where parameters become another class."""

    def swap(one, other):  # as torch's, which refuses if there are weak references
        one.__class__, other.__class__ = other.__class__, one.__class__
        one.__dict__, other.__dict__ = other.__dict__, one.__dict__
        torch._C._swap_tensor_impl(one, other)
        hold(one)
        hold(other)

    def hold(tensor):
        if isinstance(tensor, Gpu) and record.memory:
            record.memory.hold(tensor)

    plain = torch.Tensor.data

    def set_data(self, value):
        if isinstance(value, Gpu) and not isinstance(self, Gpu):
            new = value.detach()
            if isinstance(self, torch.nn.Parameter):
                new = torch.nn.Parameter(new, self.requires_grad)
            swap(self, new)
            return
        plain.__set__(self, value)
        if isinstance(self, Gpu):
            self.host = value.host
            hold(self)

    torch.utils.swap_tensors = swap
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.Tensor.data = property(plain.__get__, set_data)


# --- NCCL -----------------------------------------------------------------------------------------

TYPES = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float16}
TYPES |= {torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
HOST = "host of {}"  # name of a group for tensors of the host, beside a group of NCCL
_hosts = {}  # name of a group of NCCL -> the group for tensors of the host


def collective(function, args, kwargs):
    """Check a collective's tensors as NCCL does, and compute it with gloo."""
    if "wait_tensor" in function.__name__ or "_wrap_tensor" in function.__name__:
        return args[0]  # nothing is left to be waited for
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
    for x in tensors:
        if not isinstance(x, Gpu):
            fault(f"{function}: NCCL: tensors must be on CUDA, found one on cpu")
        if x.dtype not in TYPES:
            fault(f"{function}: NCCL: unsupported data type {x.dtype}")
        if not x.is_contiguous() and function.namespace == "c10d":
            fault(f"{function}: NCCL: tensors must be contiguous")
        if x.device.index != current_device():
            fault(f"{function}: tensor on {x.device}, this rank's device is {current_device()}")
    dtype = str(tensors[0].dtype)[6:]
    record.collectives[function.__name__, devices.our_line(), dtype] += 1
    back = {id(x.host): x for x in tensors}

    def on_host(value):
        if isinstance(value, Gpu):
            return value.host
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return _hosts[dist.ProcessGroup.unbox(value).group_name].boxed()
        return HOST.format(value) if isinstance(value, str) and value in _hosts else value

    hosts, options = pytree.tree_map(on_host, (args, kwargs))
    out = function(*hosts, **options)

    def on_gpu(host):
        if function.namespace != "c10d":  # otherwise the caller has a Work to wait for
            host = torch.ops._c10d_functional.wait_tensor(host)
        return back[id(host)] if id(host) in back else wrap(host, tensors[0].device)

    return pytree.tree_map_only(torch.Tensor, on_gpu, out)


def patch_nccl():
    """Let torch create groups of NCCL, and check what they are given.

    Such a group has gloo for tensors on CUDA only: torch itself raises for those of the host, also
    in the functional collectives of DTensors. collective() uses the same gloo in a group for hosts.
    """
    SPECIAL["collective"] = collective
    helper = c10d._new_process_group_helper

    def new_group(size, rank, ranks, backend, *args, **kwargs):
        if "nccl" not in str(backend):
            return helper(size, rank, ranks, backend, *args, **kwargs)
        if kwargs.pop("device_id", None) is None and c10d._world.default_pg is None:
            record.note("warning", "NCCL guesses the device of a barrier: set device_id")
        kwargs.pop("backend_options", None)
        devices = str(backend).replace("nccl", "gloo")  # also cpu:gloo,cuda:nccl
        devices = c10d.Backend(devices if ":" in devices else f"cuda:{devices}")
        group, store = helper(size, rank, ranks, devices, *args, **kwargs)
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            host = dist.ProcessGroup(store, group.rank(), group.size())
            gloo = group._get_backend(torch.device("cuda"))
            host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            _hosts[group.group_name] = host
            torch._C._distributed_c10d._register_process_group(HOST.format(group.group_name), host)
            indices = torch.zeros(group.size(), dtype=torch.long)
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = current_device()
            indices[group.rank()] = int(seen.split(",")[index]) if seen else index
            host.allreduce([indices]).wait()
            if len(set(indices.tolist())) < group.size():
                fault(f"NCCL: Duplicate GPU detected: {indices.tolist()}")
            c10d._world.pg_map[group] = ("nccl", c10d._world.pg_map[group][1])
        return group, store

    options = type("Options", (), {"__init__": lambda self, **_: None})
    c10d._new_process_group_helper = new_group
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {"Options": options})
    for module in (dist, c10d):
        module.is_nccl_available = lambda: True
