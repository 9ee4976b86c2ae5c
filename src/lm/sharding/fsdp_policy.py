"""Fully sharded data parallel (FSDP2): each rank holds a shard of every parameter.

fsdp.py reads its settings.
"""

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ddp_utils import UserError, distributed
from ddp_utils.distributed import World
from ddp_utils.policy import DTYPES, Policy, Strategy, cast_trained_to_fp32
from lm.sharding.fsdp import Settings


def layers_of(model: nn.Module, settings: Settings) -> list[Any]:
    """Return the modules that are sharded one by one.

    Classes in the JSON that the model does not have are ignored: the guides list those of several
    models. If it has none of them, the layers are those that the model itself names.
    """
    if settings.fsdp_auto_wrap_policy == "NO_WRAP":
        return []
    existing = {type(module).__name__ for module in model.modules()}
    own = set(getattr(model, "_no_split_modules", None) or ())
    names = existing & set(settings.layers) or existing & own
    if not names:
        key = "fsdp_transformer_layer_cls_to_wrap"
        raise UserError(f"{key}: the model has none of these; use the class of its layers")
    return [module for module in model.modules() if type(module).__name__ in names]


class FsdpPolicy(Policy):
    """A scorer of which each rank holds a shard."""

    is_sharded = True

    def set_up(self, world: World, strategy: Strategy, trained: bool) -> None:
        if world.device.type == "cpu":
            return_freed_memory()
        shard(self.scorer, strategy.options, world, DTYPES[strategy.grad_reduce_dtype])
        self.scorer.in_step = True
        with torch.no_grad():  # the first forward must be the root's, before calls to its parts
            self.scorer(self.scorer.example(world.device))

    def trainable(self) -> dict[str, nn.Parameter]:
        reshard(self.scorer)
        return super().trainable()

    def step(self, optimizer: AdamW, schedule: LambdaLR, grad_norm: float) -> None:
        reshard(self.scorer)  # a forward since the backward has left weights gathered
        super().step(optimizer, schedule, grad_norm)

    def gathered(self) -> contextlib.ExitStack:
        self.scorer.unshard()
        stack = contextlib.ExitStack()
        stack.callback(reshard, self.scorer)  # at the end of the with statement
        return stack

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Undo the loss scale and clip; of offloaded shards only sums visit the GPU, for NCCL."""
        gradients = [p.grad for p in self.trainable().values() if p.grad is not None]
        if not gradients or local(gradients[0]).device == self.world.device:
            return super().clip_grad_norm(max_norm)
        shards = [local(gradient) for gradient in gradients]
        square = torch.stack([shard.square().sum() for shard in shards]).sum() / self.copies
        norm = distributed.all_sum(square.to(self.world.device), self.world).sqrt()
        norm = norm / self.loss_scale.scale
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else norm.new_ones(())
        torch._foreach_mul_(shards, (factor / self.loss_scale.scale).to(shards[0].device))
        return norm

    @property
    def copies(self) -> int:
        """Return how many ranks hold the same shards: the number of nodes for HYBRID_SHARD."""
        shard: Any = next(iter(self.trainable().values()))
        mesh = shard.device_mesh
        return mesh.size(0) if mesh.ndim == 2 else 1

    def gather_tensor(self, tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        on_device: Any = tensor.to(self.world.device)  # NCCL cannot read offloaded shards
        return on_device.full_tensor()

    def to_saved(self, tensor: Tensor, layout: str) -> Tensor | None:
        if layout:
            return local(tensor)
        full = self.gather_tensor(tensor)
        return full.cpu() if distributed.is_first() else None  # one tensor at a time on the GPU

    def from_saved(self, value: Tensor, like: Any, layout: str) -> Tensor:
        """Return a saved tensor, a shard or a full one, as a DTensor with the shards of `like`."""
        if not isinstance(like, DTensor):  # of a changed script: see Run.keep()
            return super().from_saved(value, like, layout)
        mesh, placements = like.device_mesh, like.placements
        if layout:
            shape: Any = {"shape": like.shape, "stride": like.stride(), "run_check": False}
            shard = DTensor.from_local(value, mesh, placements, **shape)  # moves it to the mesh
            return shard.to(like.device)
        value = value.to(mesh.device_type)
        return distribute_tensor(value, mesh, placements, src_data_rank=None).to(like.device)


def return_freed_memory() -> None:
    """Let glibc return each freed tensor of 1 MiB or more to the system.

    Otherwise its threshold grows to 32 MiB, and the gathered layers of each step leave gaps: for
    SmolLM2-135M on two processes, the peak grew from 2.2 GiB in step 1 to 3.0 GiB in step 3.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def make_mesh(settings: Settings, world: World) -> DeviceMesh:
    """Return the mesh of all ranks; for HYBRID_SHARD [nodes, ranks per node]."""
    kind, size = world.device.type, world.world_size
    if not settings.fsdp_sharding_strategy.startswith("HYBRID_SHARD"):
        return init_device_mesh(kind, (size,))
    sizes = torch.tensor([world.local_size, world.local_size**2], device=world.device)
    total, squares = distributed.all_sum(sizes, world).tolist()
    if total**2 != size * squares:  # the variance of the nodes' sizes is not 0
        raise UserError("HYBRID_SHARD: start the same number of processes on each node")
    shape = (size // world.local_size, world.local_size)
    with distributed.without_gloos_line(), without_splitting(world):
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def without_splitting(world: World) -> Iterator[None]:
    """Let a mesh make new groups where the backend cannot split the default one, as xccl cannot.

    PyTorch splits a group that is bound to a device, whether or not its backend can
    (github.com/pytorch/pytorch/issues/186548).
    """
    group: Any = torch.distributed.group.WORLD
    device = group.bound_device_id
    if device is not None and not group._get_backend(world.device).supports_splitting:
        group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def shard(
    scorer: Any, settings: Settings, world: World, reduce_dtype: torch.dtype = torch.float32
) -> None:
    """Shard the scorer's parameters in place, layer by layer, moving them to the device.

    reduce_dtype: in which gradients are communicated.
    """
    options: dict[str, Any] = {
        "mesh": make_mesh(settings, world),
        # no input is cast: they are integers; the sums that a forward returns stay fp32
        "mp_policy": MixedPrecisionPolicy(scorer.autocast, reduce_dtype, cast_forward_inputs=False),
    }
    if settings.fsdp_offload_params:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    layers = layers_of(scorer.unwrap(), settings)
    for layer in reversed(layers):  # the inner one first, if a layer contains another
        cast_trained_to_fp32(layer)
        is_freed = settings.fsdp_sharding_strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        fully_shard(layer, **options, reshard_after_forward=is_freed)
    cast_trained_to_fp32(scorer)
    # the root's own parameters, embedding and head, are gathered once for forward and backward
    fully_shard(scorer, **options, reshard_after_forward=False)
    if settings.fsdp_forward_prefetch:
        inner = {*itertools.chain(*([*layer.modules()][1:] for layer in layers))}
        layers = [layer for layer in layers if layer not in inner]
        for layer, following in zip(layers, layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])


def reshard(scorer: nn.Module) -> None:
    """Free the gathered weights that a forward has left, since AdamW updates shards."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
