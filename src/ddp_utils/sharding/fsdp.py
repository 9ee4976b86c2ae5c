"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer states in equal shares.

What accelerate writes for FSDP, in JSON, is read key by key: it has its effect, or is refused.
"""

import contextlib
import json
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_utils import UserError, cli, distributed, jsonl
from ddp_utils.optim import Policy, float_trained

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
PRECISIONS = {"BFLOAT16": "bf16", "FLOAT16": "fp16", "NO": "no"}
LAYERS = "fsdp_transformer_layer_cls_to_wrap"
# key of the JSON -> what it may say; the first is what it says if it is absent
KEYS = {
    "fsdp_sharding_strategy": STRATEGIES,
    "fsdp_mixed_precision": (None, *PRECISIONS),
    LAYERS: None,  # names of classes, a list or with commas
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
    "fsdp_offload_params": (False, True),  # all that is sharded waits in the host's memory
    "fsdp_activation_checkpointing": (False, True),
    "fsdp_forward_prefetch": (False, True),  # ask for the next layer while this one computes
    # of a full fine-tuning: a file a rank, or one file, which any number of ranks can read
    "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    # FSDP2 knows no other way, or it makes no difference:
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE",),
    "fsdp_cuda_graphs": (False,),
    "fsdp_sync_module_states": (True, False),  # every rank reads the same weights
    "fsdp_use_orig_params": (True, False),  # parameters stay themselves
    "fsdp_cpu_ram_efficient_loading": (True, False),  # weights are mapped from their files
    "fsdp_version": (2,),
}


class Settings(NamedTuple):
    """What of the JSON has an effect."""

    strategy: str = "FULL_SHARD"
    precision: str | None = None  # bf16, fp16, no; None: as the other settings say
    layers: tuple = ()  # names of the classes to be sharded one by one; empty: the model's own
    whole: bool = False  # nothing is sharded one by one
    offload: bool = False
    checkpointing: bool = False
    prefetch: bool = False
    one_file: bool = False


def read(path) -> Settings:
    """The settings in a JSON file; without a path the defaults.

    Raises UserError for what is unknown, or would have no effect.
    """
    if not path:
        return Settings()
    found = jsonl.read_object(path)
    for key, value in found.items():
        where = jsonl.line_of(key, path)
        if key not in KEYS:
            raise UserError(f"{where}: {cli.unknown(key, list(KEYS))}")
        # the type as well: to Python 1 is True
        if KEYS[key] and not any(type(value) is type(one) and value == one for one in KEYS[key]):
            known = ", ".join(json.dumps(one) for one in KEYS[key] if one is not None)
            raise UserError(f"{where}: {key} is {json.dumps(value):.60}; FSDP2 has {known}")
    said = {key: found.get(key, known and known[0]) for key, known in KEYS.items()}
    layers = said[LAYERS]
    if isinstance(layers, str | None):
        layers = [name.strip() for name in (layers or "").split(",") if name.strip()]
    names = layers if isinstance(layers, list) else [layers]
    if not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise UserError(f"{jsonl.line_of(LAYERS, path)}: {LAYERS}: give a list of class names")
    return Settings(
        said["fsdp_sharding_strategy"],
        PRECISIONS.get(said["fsdp_mixed_precision"]),
        tuple(layers),
        said["fsdp_auto_wrap_policy"] == "NO_WRAP",
        said["fsdp_offload_params"],
        said["fsdp_activation_checkpointing"],
        said["fsdp_forward_prefetch"],
        said["fsdp_state_dict_type"] == "FULL_STATE_DICT",
    )


def layers_of(model, settings):
    """(modules to be sharded one by one, a line to tell or None).

    Classes that the JSON names and the model lacks are passed over: the guides name those of
    several models. Where it has none of them, its own layers are taken.
    """
    if settings.whole:
        return [], None
    known = {type(module).__name__ for module in model.modules()}
    named = known & set(settings.layers)
    own = set(getattr(model, "_no_split_modules", None) or ())
    line = None
    if settings.layers and not named:
        own_names = ", ".join(sorted(own & known))
        line = f"fsdp: the model has no {', '.join(settings.layers)}; it has {own_names}"
    found = [module for module in model.modules() if type(module).__name__ in (named or own)]
    if not found:
        raise UserError(
            f"{LAYERS}: the model has none of these, and does not say what its layers are; "
            "give their class"
        )
    return found, line


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

    def place(self, world, strategy):
        settings = strategy.options or Settings()
        shard(self.scorer, settings, world, DTYPES[strategy.grad_reduce_dtype])
        with torch.no_grad():  # FSDP must see the root first; checks go to parts of it
            self.scorer(self.scorer.example(world.device))

    def distribute(self, world, strategy):
        """FSDP reduces gradients itself, in each backward."""

    def trainable(self):
        reshard(self.scorer)
        return super().trainable()

    @contextlib.contextmanager
    def gathered(self):
        self.scorer.unshard()
        try:
            yield
        finally:
            reshard(self.scorer)

    def full_parameter(self, parameter):
        return self.whole(parameter.detach())

    def whole(self, tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def saved(self, tensor, shared):
        if shared:
            return local(tensor)
        whole = self.whole(tensor)
        return whole if distributed.is_first() else None

    def loaded(self, value, like, shared):
        return from_share(value, like) if shared else from_whole(value, like)


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

    reduce_dtype: in which gradients travel. Returns the scorer.
    """
    kinds = {"param_dtype": scorer.autocast, "reduce_dtype": reduce_dtype}
    # batches are integers: there is nothing to cast, and the sums that come out are fp32
    policy = MixedPrecisionPolicy(**kinds, cast_forward_inputs=False)
    options = {"mesh": mesh_of(settings, world), "mp_policy": policy}
    if settings.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type != "cpu")
    options["reshard_after_forward"] = settings.strategy != "SHARD_GRAD_OP"
    layers, _ = layers_of(scorer.bare(), settings)
    for layer in layers:
        float_trained(layer)
        fully_shard(layer, **options)
    float_trained(scorer)
    # the root's own parameters, embedding and head, are gathered once for forward and backward
    fully_shard(scorer, **options | {"reshard_after_forward": False})
    if settings.prefetch:
        for layer, following in zip(layers, layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
    if settings.offload:  # buffers are not offloaded
        for module in scorer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(world.device))
    return scorer


def reshard(scorer):
    """Back to shares, for the optimizer: evaluation leaves the root, and others, gathered."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor):
    """This rank's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_whole(value, tensor):
    """`value`, the same on all ranks, shared out as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return value.to(tensor.device)
    mesh = tensor.device_mesh
    value = value.to(mesh.device_type)
    return distribute_tensor(value, mesh, tensor.placements, src_data_rank=None).to(tensor.device)


def from_share(value, tensor):
    """The tensor of which `value` is this rank's share, shared out as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return value.to(tensor.device)
    place = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    value = value.to(tensor.device)
    return DTensor.from_local(value, tensor.device_mesh, tensor.placements, **place)
