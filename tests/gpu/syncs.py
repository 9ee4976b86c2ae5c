"""Count, on a CPU, where a GPU would make the host wait: which line, and how often.

    with Counter() as counter:
        ...
    counter.lines  # (kind, "file:line") -> how often

Kinds: "read", a number that the host asks the device for (item, tolist, cpu, a tensor as a truth,
an index of truths): it waits until all that is queued is done. "copy", numbers of the host that go
to the device and are waited for, such as an index that is a list. "pinned", those that are not
waited for (non_blocking). Tensors that were made on the host and stayed there do not count.
"""

import collections
import contextlib
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SRC = Path(__file__).resolve().parents[2] / "src"
READS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}  # no operator of their own
OPERATORS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
COPYING = {torch.tensor, torch.as_tensor}  # with a device they copy to it
FACTORIES = COPYING | {torch.arange, torch.empty, torch.full, torch.ones, torch.zeros}
FACTORIES |= {torch.rand, torch.randn, torch.randperm, torch.randint}  # without one, on the host


def our_line():
    """The innermost line of src/ that is being executed."""
    frame = sys._getframe(1)
    while frame:
        path = Path(frame.f_code.co_filename)
        if SRC in path.parents:
            return f"{path.relative_to(SRC)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Operators(TorchDispatchMode):
    """Reads in what torch does by itself: AdamW, clipping, a tensor as a truth."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        name = function._schema.name
        indices = args[1] if name.startswith("aten::index") and len(args) > 1 else ()
        indices = indices if isinstance(indices, list | tuple) else ()
        by_truths = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in OPERATORS or by_truths:
            self.note("read", args[0])
        return function(*args, **(kwargs or {}))


class Counter(TorchFunctionMode):
    """A context that counts; see above."""

    def __init__(self):
        super().__init__()
        self.lines = collections.Counter()
        self.on_host = {}  # id -> tensor, which keeps its id as long as it lives
        self.parts = contextlib.ExitStack()

    def note(self, kind, tensor=None):
        if id(tensor) not in self.on_host:
            self.lines[kind, our_line()] += 1

    def __enter__(self):
        self.parts.enter_context(Operators(self.note))
        from_numpy = torch.from_numpy  # of which no mode hears

        def remembered(array):
            tensor = from_numpy(array)
            self.on_host[id(tensor)] = tensor
            return tensor

        self.parts.enter_context(mock.patch.object(torch, "from_numpy", remembered))
        return super().__enter__()

    def __exit__(self, *_exception):
        super().__exit__(None, None, None)
        self.parts.close()

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        device = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        has_device = isinstance(device, str | torch.device)
        is_of_host = bool(args) and id(args[0]) in self.on_host
        if has_device and (is_of_host or function in COPYING):
            self.note("pinned" if kwargs.get("non_blocking") else "copy")
        elif function in READS:
            self.note("read", args[0])
        elif name in ("__getitem__", "__setitem__") and not is_of_host:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) or id(i) in self.on_host for i in indices):
                self.note("copy")
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            if has_device:
                self.on_host.pop(id(result), None)
            elif is_of_host or function in FACTORIES:  # views and casts of such a tensor, too
                self.on_host[id(result)] = result
        return result
