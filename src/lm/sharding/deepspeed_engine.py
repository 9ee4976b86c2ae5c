"""The policy that trains in DeepSpeed's engine (ZeRO 1 to 3); deepspeed.py reads its settings.

Some attributes of DeepSpeed's optimizers are used, as of the version in requirements-deepspeed.txt.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ddp_utils import UserError, distributed
from ddp_utils.distributed import World
from ddp_utils.policy import (
    LossScale,
    Policy,
    Strategy,
    Tensors,
    cast_trained_to_fp32,
    parameter_groups,
)
from lm.sharding import json_settings
from lm.sharding.deepspeed import stage

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter")  # state of its loss scale for fp16


def import_deepspeed(device: str) -> Any:
    """Return the package, without the lines that it prints. device: cuda, xpu or cpu."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # otherwise it looks for one, and prints which
    # it calls torch's collectives by deprecated names, thousands of times
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # a C++ extension for shared memory between processes takes minutes to compile; gloo does it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def check_values(settings: dict[str, Any], path: str, world: World) -> None:
    """Raise UserError for a key or value that DeepSpeed's own models do not accept."""
    runtime = import_deepspeed(world.device.type).runtime
    precision = runtime.precision_config
    models = {"bf16": precision.DeepSpeedBF16Config, "fp16": precision.DeepSpeedFP16Config}
    models["zero_optimization"] = runtime.zero.config.DeepSpeedZeroConfig
    for section, model in models.items():
        try:
            model(**settings[section])
        except (ValueError, AssertionError) as error:  # most are pydantic's, with details
            plain: dict[str, Any] = {"loc": (), "msg": str(error)}
            first = error.errors()[0] if hasattr(error, "errors") else plain
            name = ".".join([section, *map(str, first["loc"])])
            place = json_settings.line_of(name, path)
            problem = first["msg"].replace("Extra inputs are not permitted", "no such setting")
            raise UserError(f"{place}: {name}: {problem}") from error


class ZeroPolicy(Policy):
    """A scorer in DeepSpeed's engine, which clips and makes the steps."""

    is_sharded = True
    loss_weight = 1.0

    @staticmethod
    def shards_weights(strategy: Strategy) -> bool:
        """Return whether ranks hold shards of the weights, not only of the optimizer's state."""
        return stage(strategy.options) == 3

    def set_up(self, world: World, strategy: Strategy, trained: bool) -> None:
        self.loss_scale = LossScale(enabled=False)  # DeepSpeed has its own
        self.is_stage_3 = self.shards_weights(strategy)
        if self.scorer.autocast is None:  # in half precision DeepSpeed keeps fp32 copies itself
            cast_trained_to_fp32(self.scorer)
        deepspeed = import_deepspeed(world.device.type)
        self.utils, self.zero = deepspeed.utils, deepspeed.zero
        # DeepSpeed takes it for the number of the GPU: where each task sees one GPU, that is 0
        index = world.device.index
        os.environ["LOCAL_RANK"] = str(world.local_rank if index is None else index)
        if not torch.distributed.is_initialized():  # one process can still offload to the host
            store = torch.distributed.HashStore()
            backend = world.backend.replace("none", "gloo")
            device = None if world.device.type == "cpu" else world.device
            torch.distributed.init_process_group(
                backend, store=store, rank=0, world_size=1, device_id=device
            )
        deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
        # the settings of AdamW follow in make_optimizer(); a reference model has no optimizer
        optimizer = None
        if trained:
            optimizer = AdamW(parameter_groups(self.trainable(), weight_decay=1.0), lr=1.0)
        if self.is_stage_3:
            # shards the weights in the host's memory, one parameter at a time
            deepspeed.zero.Init(module=self.scorer, config_dict_or_path=strategy.options)
            self.scorer.in_step = True
            self.scorer.gathered = lambda module: deepspeed.zero.GatheredParameters(
                list(module.parameters()), enabled=True
            )
        self.engine, *_ = deepspeed.initialize(
            model=self.scorer, optimizer=optimizer, config=strategy.options
        )

    def release(self) -> None:
        if self.is_stage_3:
            from deepspeed.runtime.zero import parameter_offload

            # each engine has put its model there
            parameter_offload.FWD_MODULE_STACK.remove(self.scorer)

    # --- a step -----------------------------------------------------------------------------------

    def __call__(self, batch):
        return self.engine(batch)

    def sync_gradients(self, last: bool) -> None:
        """Sum gradients over micro-batches; ZeRO-1 reduces them over ranks in the last one only."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        self.backward_loss = self.backward_loss + self.loss_weight * loss.detach()
        self.engine.backward(loss * self.loss_weight, scale_wrt_gas=False)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Make all gradients 0: the engine has no way to drop those that it has summed."""
        self.loss_weight = 0.0
        yield
        self.loss_weight = 1.0

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Return the norm of the gradient that step() will clip, on all ranks."""
        zero = self.engine.optimizer
        loss_scale = 1.0
        if self.is_bf16_optimizer:
            gradients = zero.get_grads_for_norm(for_clipping=True)
            norm = nn.utils.get_total_norm(gradients)
        else:
            norm = self.norm_of_shards() if self.is_stage_3 else zero.scaled_global_norm()
            loss_scale = float(zero.loss_scale)
        norm = torch.as_tensor(norm, dtype=torch.float32)
        # DeepSpeed's norm is -1 if it is not finite
        return torch.where(norm >= 0, norm, torch.inf) / loss_scale

    def norm_of_shards(self) -> Tensor:
        """Return the norm of the gradient, of which each rank has a shard (ZeRO-3)."""
        parameters = self.trainable().values()
        shards = [self.utils.safe_get_local_grad(parameter) for parameter in parameters]
        square = torch.stack([shard.double().square().sum() for shard in shards]).sum()
        return distributed.all_sum(square, self.world).sqrt()

    def make_optimizer(self, kind: Any, weight_decay: float, rate: float, **options: Any) -> Any:
        """Return the engine's AdamW, with these settings."""
        if kind is not AdamW:
            raise UserError(f"{kind.__name__}: with DeepSpeed use AdamW, or DDP or FSDP instead")
        optimizer = self.engine.basic_optimizer
        for group in optimizer.param_groups:
            group.update(lr=rate, weight_decay=group["weight_decay"] * weight_decay, **options)
        return optimizer

    def step(self, optimizer: AdamW, schedule: LambdaLR, grad_norm: float) -> None:
        self.engine.step()
        schedule.step()

    # --- full tensors -----------------------------------------------------------------------------

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return self.utils.safe_get_full_grad(parameter)

    def full_parameter(self, parameter: Tensor) -> Tensor:
        if parameter.requires_grad:
            return self.utils.safe_get_full_fp32_param(parameter)
        with self.zero.GatheredParameters([parameter], enabled=self.is_stage_3):
            return parameter.clone()  # frozen, or a buffer

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def is_bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed uses its BF16_Optimizer: for ZeRO-1 in bf16."""
        return type(self.engine.optimizer).__name__ == "BF16_Optimizer"

    def shards(self) -> list[Tensor]:
        """Return this rank's shards of everything that is trained, in fp32, as AdamW updates it."""
        zero = self.engine.optimizer
        if self.is_stage_3:
            return zero.fp32_partitioned_groups_flat
        if self.is_bf16_optimizer:
            return zero.fp32_groups_flat_partition
        return zero.single_partition_of_fp32_groups

    def updated(self) -> Tensors:
        """Return this rank's shards by number."""
        return {str(number): shard for number, shard in enumerate(self.shards())}

    def scale_state(self) -> list[float]:
        if not self.engine.fp16_enabled():
            return []
        scaler = self.engine.optimizer.loss_scaler
        return [float(getattr(scaler, name, 0)) for name in SCALER]  # a static one has fewer

    def set_scale_state(self, values: list[float]) -> None:
        for name, state in zip(SCALER, values, strict=True):
            setattr(self.engine.optimizer.loss_scaler, name, state)

    def load_tensors(self, optimizer: AdamW, tensors: Tensors, layout: str) -> None:
        super().load_tensors(optimizer, tensors, layout)
        self.update_weights()

    def swap(self, others: Tensors) -> None:
        super().swap(others)
        self.update_weights()

    def update_weights(self) -> None:
        """Copy the fp32 weights to those of the forward."""
        zero = self.engine.optimizer
        if not self.is_stage_3:
            zero.update_lp_params()
            return
        for number in range(len(self.shards())):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        kept = zero.persistent_parameters  # small ones, of which each rank has the full tensor
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)
