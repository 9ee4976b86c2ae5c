"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer states in equal shares.

What accelerate writes for FSDP, in JSON, is read key by key: it has its effect, or is refused.
"""

import contextlib
from dataclasses import dataclass
from typing import Literal, get_type_hints

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_utils import UserError, distributed
from ddp_utils.policy import DTYPES, Policy, cast_trained_to_fp32
from ddp_utils.sharding import json_settings

PRECISIONS = {"BFLOAT16": "bf16", "FLOAT16": "fp16", "NO": "no"}
Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]


@dataclass
class Settings:
    """The JSON of FSDP, under the names that accelerate gives it."""

    fsdp_sharding_strategy: Sharding = "FULL_SHARD"
    fsdp_mixed_precision: Literal["BFLOAT16", "FLOAT16", "NO", None] = None
    # classes to be sharded one by one, a list or with commas; empty: the model's own
    fsdp_transformer_layer_cls_to_wrap: list | str | None = None
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "NO_WRAP"] = "TRANSFORMER_BASED_WRAP"
    fsdp_offload_params: bool = False  # all that is sharded waits in the host's memory
    fsdp_activation_checkpointing: bool = False
    fsdp_forward_prefetch: bool = False  # ask for the next layer while this one computes
    # of a full fine-tuning: a file a rank, or one file, which any number of ranks can read
    fsdp_state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "SHARDED_STATE_DICT"
    # FSDP2 knows no other way, or it makes no difference:
    fsdp_backward_prefetch_policy: Literal["BACKWARD_PRE"] = "BACKWARD_PRE"
    fsdp_cuda_graphs: Literal[False] = False
    fsdp_sync_module_states: bool = True  # every rank reads the same weights
    fsdp_use_orig_params: bool = True  # parameters stay themselves
    fsdp_cpu_ram_efficient_loading: bool = True  # weights are mapped from their files
    fsdp_version: Literal[2] = 2

    strategy = property(lambda self: self.fsdp_sharding_strategy)
    one_file = property(lambda self: self.fsdp_state_dict_type == "FULL_STATE_DICT")
    precision = property(lambda self: PRECISIONS.get(self.fsdp_mixed_precision))

    @property
    def layers(self):
        names = self.fsdp_transformer_layer_cls_to_wrap or []
        return names.replace(",", " ").split() if isinstance(names, str) else names


def read(path) -> Settings:
    """Return the settings in a JSON file, without a path the defaults.

    Raises UserError for what is unknown, or would have no effect.
    """
    return Settings(**json_settings.read(path, get_type_hints(Settings))) if path else Settings()


def layers_of(model, settings):
    """Return the modules to be sharded one by one, and a line for people or None.

    Classes that the JSON names and the model lacks are passed over: the guides name those of
    several models. Where it has none of them, its own layers are taken.
    """
    if settings.fsdp_auto_wrap_policy == "NO_WRAP":
        return [], None
    known = {type(module).__name__ for module in model.modules()}
    named = known & set(settings.layers)
    own = known & set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in (named or own)]
    if not layers:
        raise UserError(
            "fsdp_transformer_layer_cls_to_wrap: the model has none of these, and does not say "
            "what its layers are; give their class"
        )
    if named or not settings.layers:
        return layers, None
    names = ", ".join(settings.layers)
    return layers, f"fsdp: the model has no {names}; it has {', '.join(sorted(own))}"


def mesh_of(settings, world):
    """All ranks in a row; for HYBRID_SHARD [nodes, ranks of a node]: shards stay in their node."""
    kind, size = world.device.type, world.world_size
    if settings.strategy != "HYBRID_SHARD":
        return init_device_mesh(kind, (size,))
    shape = (size // world.local_size, world.local_size)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


class FsdpPolicy(Policy):
    """A scorer of which each rank holds a share."""

    is_sharded = True

    def set_up(self, world, strategy, trained):
        settings = strategy.options
        shard(self.scorer, settings, world, DTYPES[strategy.grad_reduce_dtype])
        with torch.no_grad():  # FSDP must see the root first; checks go to parts of it
            self.scorer(self.scorer.example(world.device))

    def trainable(self):
        reshard(self.scorer)
        return super().trainable()

    def step(self, optimizer, schedule, grad_norm):
        reshard(self.scorer)  # whoever has scored since the backward has left weights gathered
        super().step(optimizer, schedule, grad_norm)

    @contextlib.contextmanager
    def gathered(self):
        self.scorer.unshard()
        try:
            yield
        finally:
            reshard(self.scorer)

    def gather_tensor(self, tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def to_saved(self, tensor, sharded):
        if sharded:
            return local(tensor)
        whole = self.gather_tensor(tensor)
        return whole if distributed.is_first() else None

    def from_saved(self, value, like, sharded):
        """Return a tensor that was saved, a rank's share or whole, shared out as `like` is."""
        mesh = like.device_mesh
        if sharded:
            shape = {"shape": like.shape, "stride": like.stride(), "run_check": False}
            return DTensor.from_local(value.to(like.device), mesh, like.placements, **shape)
        value = value.to(mesh.device_type)
        return distribute_tensor(value, mesh, like.placements, src_data_rank=None).to(like.device)


def check_nodes(settings, world):
    """HYBRID_SHARD shares out within a node and copies across: all must have as many processes."""
    if settings.strategy != "HYBRID_SHARD":
        return
    size, here = world.world_size, world.local_size
    total, squares = distributed.all_sum(torch.tensor([here, here**2], device=world.device), world)
    if total**2 != size * squares:  # all ranks see the same: a rank's own numbers may fit
        says = f"HYBRID_SHARD: {size} processes, {here} of them on this node"
        raise UserError(f"{says}; start as many on each node")


def shard(scorer, settings, world, reduce_dtype=torch.float32):
    """Shard the scorer's parameters in place, layer by layer, moving them to the device.

    reduce_dtype: in which gradients travel.
    """
    options = {
        "mesh": mesh_of(settings, world),
        # batches are integers: there is nothing to cast, and the sums that come out are fp32
        "mp_policy": MixedPrecisionPolicy(scorer.autocast, reduce_dtype, cast_forward_inputs=False),
    }
    if settings.fsdp_offload_params:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    layers, _ = layers_of(scorer.unwrap(), settings)
    for layer in layers:
        cast_trained_to_fp32(layer)
        is_freed = settings.strategy != "SHARD_GRAD_OP"
        fully_shard(layer, **options, reshard_after_forward=is_freed)
    cast_trained_to_fp32(scorer)
    # the root's own parameters, embedding and head, are gathered once for forward and backward
    fully_shard(scorer, **options, reshard_after_forward=False)
    if settings.fsdp_forward_prefetch:
        for layer, following in zip(layers, layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
    if settings.fsdp_offload_params:  # buffers are not offloaded
        for module in scorer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(world.device))


def reshard(scorer):
    """Back to shares, for the optimizer: evaluation leaves the root, and others, gathered."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor):
    """This rank's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
