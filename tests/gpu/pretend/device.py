"""Tensors of the host that report the device cuda:N, and the checks of their operators."""

import collections
import ctypes
import functools
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import torch
from torch._decomp import decomposition_table

aten = torch.ops.aten
CPU = torch.device("cpu")
SRC = f"{Path(__file__).resolve().parents[3] / 'src'}/"
SOURCE = Path(__file__).with_name("pretend.cpp")


# --- what a run has done --------------------------------------------------------------------------


class Record:
    """What was noticed and counted since the process started.

    Kinds of `lines`: "read", the host waits until the device is done; "race", the host reads
    without waiting; "copy", numbers of the host that go to the device and are waited for; "pinned",
    those that are not waited for.
    """

    def __init__(self):
        self.faults = []  # ("file:line", what a GPU would have raised)
        self.lines = collections.Counter()  # (kind, "file:line", operator) -> how often
        self.kernels = collections.Counter()  # operator -> launches
        self.flops = collections.Counter()  # dtype -> FLOP of matrix products
        self.attention = collections.Counter()  # kernel and dtype -> calls
        self.collectives = collections.Counter()  # (collective, "file:line", dtype) -> calls
        self.memory = None  # a Memory, if it is counted
        self.trace = None  # called with (operator, args, kwargs, result) after each operator

    def note(self, kind, what):
        """Count something that a line of src/ does."""
        self.lines[kind, our_line(), str(what)] += 1

    def done(self, function, args, kwargs, result):
        """Tell the trace about an operator; return its result."""
        if self.trace:
            self.trace(function, args, kwargs, result)
        return result


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"


class Memory:
    """Bytes of all tensors on the devices, in blocks of 512; what kernels need is left out."""

    def __init__(self):
        self.now = self.peak = 0
        self.limit = math.inf
        self.has_blas = False
        self.holders = {}  # address -> tensors
        self.held = {}  # id -> Held, which would otherwise be forgotten
        self.lock = threading.RLock()

    def hold(self, tensor):
        """Count a tensor until it is freed, or held again because its data are others."""
        self.release(tensor.__dict__.pop("held", None))
        storage = tensor.host.untyped_storage()
        held = tensor.held = Held(tensor, self.release)
        held.address, held.size = storage.data_ptr(), -(-storage.nbytes() // 512) * 512
        with self.lock:
            self.held[id(held)] = held
            others = self.holders.get(held.address, 0)
            self.holders[held.address] = others + 1
            if not others:
                self.now += held.size
                self.peak = max(self.peak, self.now)
        if self.now > self.limit:
            size = f"{held.size / 2**20:.2f} MiB"
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}.\nSee also")

    def use_blas(self):
        """Make cuBLAS's handle before the first product; its memory is not torch's."""
        if not self.has_blas and self.now + 8 * 2**20 > self.limit:
            raise RuntimeError(f"{CUBLAS} when calling `cublasCreate(handle)`")
        self.has_blas = True

    def release(self, held):
        with self.lock:
            if self.held.pop(id(held), None) is None:
                return
            others = self.holders.pop(held.address) - 1
            if others:
                self.holders[held.address] = others
            else:
                self.now -= held.size


class Held(weakref.ref):
    """A tensor, without keeping it."""

    __slots__ = ("address", "size")


record = Record()


class DeviceFault(RuntimeError):
    """What a GPU would have raised."""


def fault(text):
    """Record what a GPU would have raised, and raise it."""
    record.faults.append((our_line(), text))
    raise DeviceFault(f"{text} [{our_line()}]")


def our_line():
    """Return the innermost line of src/ that is being executed."""
    frame = sys._getframe(1)
    while frame:
        path = frame.f_code.co_filename
        if path.startswith(SRC):
            return f"{path[len(SRC) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# --- the library ----------------------------------------------------------------------------------


def why_not():
    """Return why this machine cannot pretend, "" if it can."""
    if torch.cuda.is_available():
        return "it has a real GPU"
    if torch.version.cuda:
        return "needs a CPU build of torch: the kernels of a CUDA build ask the driver for memory"
    return "" if shutil.which("g++") else "needs the C++ compiler g++"


def build():
    """Compile pretend.cpp once per version of it and of torch; return the library's path."""
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")
    site = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__}{site}".encode())
    library = cache / f"pretend-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        include = [f"-I{site}/include", f"-I{site}/include/torch/csrc/api/include"]
        link = [f"-L{site}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{site}/lib"]
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-w", *include, *link]
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder, "pretend.so")
            subprocess.run(["g++", str(SOURCE), *flags, "-o", str(made)], check=True)
            made.rename(library)
    return library


def install(devices, memory):
    """Load the library, and make torch create tensors on cuda:N as Gpu."""
    global _devices
    _devices = devices
    ctypes.CDLL(str(build())).set_device_count(devices)
    if memory:
        record.memory = Memory()
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_create, "CUDA")
    by_name = torch.library.Library("aten", "IMPL")
    for overload in ("default", "start", "start_step"):  # otherwise they resize what they write to
        operator = getattr(aten.arange, overload)
        name = operator.name().removeprefix("aten::")
        by_name.impl(name, functools.partial(_create, operator), "CUDA")
    _kept.extend([fallback, by_name])
    # torch.tensor(..., device="cuda") is made on the host and copied, as with CUDA
    torch._C._set_only_lift_cpu_tensors(True)


_kept = []  # libraries that torch forgets with their objects
_devices = 1


def current_device():
    """Return the index of this thread's current device."""
    return torch._C._accelerator_getDeviceIndex()


def checked_index(index):
    """Return the index of a device, or raise what CUDA raises if it does not exist."""
    if not 0 <= index < _devices:
        raise DeviceFault(f"CUDA error: invalid device ordinal {index} of {_devices}")
    return index


def device_of(device):
    """Return the device that is meant: the current one if there is no index."""
    index = torch.device(device or "cuda").index
    return torch.device("cuda", checked_index(current_device() if index is None else index))


# --- tensors --------------------------------------------------------------------------------------


class Gpu(torch.Tensor):
    """A tensor of the host, `host`, that reports a CUDA device."""

    @staticmethod
    def __new__(cls, host, device=None):
        assert isinstance(host, torch.Tensor) and not isinstance(host, Gpu)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device or device_of(None),
            requires_grad=False,
        )
        tensor.host = host
        if record.memory:
            record.memory.hold(tensor)
        return tensor

    def __repr__(self):
        return f"Gpu({self.host})"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = Gpu(self.host.clone(), self.device)
            is_parameter = isinstance(self, torch.nn.Parameter)
            new = torch.nn.Parameter(new, self.requires_grad) if is_parameter else new
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def untyped_storage(self):
        return self.host.untyped_storage()

    def storage(self):
        return self.host.storage()

    def data_ptr(self):
        return self.host.data_ptr()

    def record_stream(self, stream):
        """Only the allocator of a GPU needs to know."""

    def __format__(self, spec):
        return self.item().__format__(spec) if self.dim() == 0 else super().__format__(spec)

    def tolist(self):
        record.note("read", "tolist")
        return self.host.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return dispatch(function, args, kwargs or {})


def unwrap(value):
    """Return an argument of an operator with the host's tensors in place of the GPU's."""
    if isinstance(value, Gpu):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)([unwrap(part) for part in value])
    return value


def tensors_of(arguments):
    """Return all tensors in the arguments of an operator."""
    found = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_of(value)
    return found


def wrap(out, device):
    """Return the result of the host's operator as tensors of a device."""
    if isinstance(out, torch.Tensor):
        return out if isinstance(out, Gpu) else Gpu(out, device)
    if isinstance(out, list | tuple):
        parts = [wrap(part, device) for part in out]
        return type(out)(parts) if type(out) in (list, tuple) else type(out)(*parts)
    return out


# --- operators ------------------------------------------------------------------------------------

SPECIAL = {}  # operator -> what computes it here: attention.py, cuda.py
COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # namespaces
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
INDEXED |= {"_unsafe_index_put"}
# their result, or its size, is needed on the host
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
READS |= {"unique_consecutive", "bincount"}
PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "mv", "dot"}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# torch 2.13 raises with use_deterministic_algorithms(True); those that could come up here
NOT_DETERMINISTIC = {"histc", "put_", "kthvalue", "median", "nll_loss2d_forward", "ctc_loss"}
NOT_DETERMINISTIC |= {"_embedding_bag_backward", "reflection_pad1d_backward"}
# no kernel is launched: only the view of the data changes, or memory is reserved
FREE = """alias as_strided chunk detach diagonal empty empty_like empty_strided expand is_same_size
lift_fresh new_empty new_empty_strided permute _reshape_alias select slice split split_with_sizes
squeeze t transpose unbind unfold _unsafe_view unsqueeze view _fused_sdp_choice"""
FREE = set(FREE.split())
NORM = aten._fused_rms_norm_backward.default


def _add_product(added, left, right, dtype, *, beta=1, alpha=1, out):
    """Compute what is added to, and the product, in another dtype than that of the factors."""
    added, left, right = (x.to(dtype) for x in (added, left, right))
    return out.copy_(torch.addmm(added, left, right, beta=beta, alpha=alpha))


def _sums(x, dim, *, dtype=None):
    """Compute cumulative sums as CUDA does: several rows in another order than one row.

    In fp32 the sums of a row then depend on whether there are other rows (seen on an H100).
    """
    if x.numel() == x.shape[dim] or not (dtype or x.dtype).is_floating_point:
        return x.cumsum(dim, dtype=dtype)
    parts, before = [], 0.0
    for part in x.to(dtype or x.dtype).split(1024, dim):
        parts.append(part.cumsum(dim) + before)
        before = parts[-1].narrow(dim, -1, 1)  # rounded to the dtype
    return torch.cat(parts, dim)


def _softmax(function, x, dim, half_to_float):
    """Compute (log-)softmax; only CUDA's kernels can return fp32 for half precision."""
    return function(x.float() if half_to_float else x, dim, False)


def _softmax_backward(function, gradient, output, dim, input_dtype):
    """Compute the gradient of (log-)softmax, in the dtype of its input."""
    return function(gradient, output, dim, output.dtype).to(input_dtype)


FORMULAS = {NORM: decomposition_table[NORM], aten.addmm.dtype_out: _add_product}  # not for CPUs
FORMULAS[aten.cumsum.default] = _sums
for _name in ("_softmax", "_log_softmax"):
    _forward, _backward = getattr(aten, _name), getattr(aten, f"{_name}_backward_data")
    FORMULAS[_forward.default] = functools.partial(_softmax, _forward)
    FORMULAS[_backward.default] = functools.partial(_softmax_backward, _backward)


def special(*operators):
    """Register a function as what computes these operators."""

    def register(function):
        SPECIAL.update(dict.fromkeys(operators, function))
        return function

    return register


def dispatch(function, args, kwargs):
    """Check an operator as a GPU would, compute it on the host, and return tensors of the GPU."""
    name = function.__name__.split(".")[0]
    if function.namespace in COLLECTIVE:
        return SPECIAL["collective"](function, args, kwargs)
    if function in SPECIAL:
        out = SPECIAL[function](function, *args, **kwargs)
        return record.done(function, args, kwargs, out)
    tensors = tensors_of([*args, *kwargs.values()] if kwargs else args)
    check(function, name, args, kwargs, tensors)
    if record.memory and name in PRODUCTS:
        record.memory.use_blas()
    options = {name: unwrap(value) for name, value in kwargs.items()}
    target = kwargs.get("device")
    if target is not None:
        options["device"] = CPU
        options.pop("pin_memory", None)
    out = FORMULAS.get(function, function)(*unwrap(args), **options)
    count(function, name, args)
    if target is not None and torch.device(target).type != "cuda":
        return out
    if target is None:
        device = next((x.device for x in tensors if isinstance(x, Gpu)), None)
    else:
        device = device_of(target)
    result = wrap(out, device)
    if written(function):  # what was written to is returned as it came
        result = with_written(function, args, kwargs, result)
    return record.done(function, args, kwargs, result)


def count(function, name, args):
    """Count the launch of a kernel, and the FLOP of a product."""
    if name not in FREE:
        record.kernels[function] += 1
    if name in PRODUCTS:
        tensors = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        left, right = tensors
        record.flops[str(left.dtype)[6:]] += 2 * left.numel() * right.shape[-1]


def check(function, name, args, kwargs, tensors):
    """Raise what a GPU would raise about an operator and its tensors; note what waits."""
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and torch.device(target).type != "cuda":
        record.note("race" if kwargs.get("non_blocking") else "read", function)
    elif function is aten.copy_.default:
        check_copy(function, *args[:2], non_blocking=len(args) > 2 and args[2])
    elif name in INDEXED:
        for index in args[1]:
            if index is not None and not isinstance(index, Gpu):
                record.note("copy", function)  # torch moves it
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                record.note("read", function)  # how many are True
        check_devices(function, tensors_of([args[0], *args[2:3]]))
    else:
        check_devices(function, tensors)
    if name in READS:
        record.note("read", function)
    if function is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        record.note("read", function)
    if name in PRODUCTS:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in FLOATS:
                fault(f'"{name}_cuda" not implemented for {tensor.dtype}')
    if name in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        fault(f"{function} does not have a deterministic implementation")
    check_generator(function, kwargs)


def check_copy(function, to, source, non_blocking):
    """Note what a copy between host and device does to the host."""
    if isinstance(to, Gpu) and isinstance(source, Gpu):
        return
    if not isinstance(to, Gpu):
        record.note("race" if non_blocking else "read", function)
    elif source.data_ptr() != to.host.data_ptr():  # equal: gloo's future has the host's tensor
        record.note("pinned" if non_blocking and source.is_pinned() else "copy", function)


def check_devices(function, tensors):
    """Raise what torch raises for tensors on several devices; a number may be on the host."""
    if len({x.device for x in tensors}) < 2:
        return
    devices = {x.device for x in tensors if isinstance(x, Gpu)}
    hosts = [x for x in tensors if not isinstance(x, Gpu) and x.device.type != "meta"]
    name = function.__name__
    takes_numbers = torch.Tag.pointwise in function.tags or name.startswith(
        ("_foreach", "fill", "masked_fill", "where", "index_put", "_index_put")
    )
    devices |= {x.device for x in hosts if x.dim() or not takes_numbers}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        fault(f"{function}: expected all tensors to be on the same device, found {found}")


def check_generator(function, kwargs):
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cuda":
        fault(f"{function}: expected a 'cuda' generator, found 'cpu'")


@functools.cache
def written(function):
    """Return (number, name) of each argument that an operator writes to -> its outputs' numbers."""
    places = {}
    for number, argument in enumerate(function._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            places[number, argument.name] = [
                at
                for at, output in enumerate(function._schema.returns)
                if output.alias_info is not None and output.alias_info.before_set == info.before_set
            ]
    return places


def with_written(function, args, kwargs, result):
    """Return the result, with the arguments that were written to in their places."""
    is_single = len(function._schema.returns) == 1
    parts = [result] if is_single else list(result or ())
    for (number, name), outputs in written(function).items():
        argument = args[number] if number < len(args) else kwargs.get(name)
        for x in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(x, Gpu) and (x.shape, x.stride()) != (x.host.shape, x.host.stride()):
                raise NotImplementedError(f"{function} changes the shape of what it writes to")
        for at in outputs:
            parts[at] = argument
    return parts[0] if is_single else tuple(parts) if parts else None


def _create(function, *args, **kwargs):
    """Compute an operator that creates a tensor of the GPU from none."""
    if any(isinstance(x, Gpu) for x in tensors_of([*args, *kwargs.values()])):
        return dispatch(function, args, kwargs)
    check_generator(function, kwargs)
    device = device_of(kwargs.pop("device", None))
    kwargs.pop("pin_memory", None)
    out = function(*args, **kwargs, device=CPU)
    count(function, function.__name__.split(".")[0], args)
    return record.done(function, args, kwargs, wrap(out, device))
