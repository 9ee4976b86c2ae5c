"""The policy that trains in DeepSpeed's engine; see deepspeed.py for its settings.

It uses what belongs to DeepSpeed's optimizers alone, of the version in requirements-deepspeed.txt.
"""

import contextlib
import logging
import os
import warnings

import torch
import torch.distributed

from ddp_utils.policy import LossScale, Policy, cast_trained_to_fp32, check_names, parameter_groups
from ddp_utils.sharding.deepspeed import stage

STATES = {"parameter": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # DeepSpeed's names
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter")  # state of its loss scale for fp16


def import_deepspeed(device):
    """Return the package, without what it prints. device: cuda, xpu or cpu."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it looks for one, and prints which
    # it calls torch's collectives by their old names, thousands of times
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # a C++ extension for shared memory between processes, minutes to compile; gloo does it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroPolicy(Policy):
    """A scorer in DeepSpeed's engine, which makes the steps and clips in them."""

    is_sharded = True

    def set_up(self, world, strategy, trained):
        scorer = self.scorer
        self.loss_scale = LossScale(enabled=False)  # DeepSpeed has its own
        self.is_stage_3 = stage(strategy.options) == 3
        if scorer.autocast is None:  # else its weights become half ones, with fp32 copies to train
            cast_trained_to_fp32(scorer)
        deepspeed = import_deepspeed(world.device.type)
        if not torch.distributed.is_initialized():  # one process can still offload to the host
            store = torch.distributed.HashStore()
            backend = world.backend.replace("none", "gloo")
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
        groups = parameter_groups(self.trainable().values(), weight_decay=1.0)  # see make_adamw()
        if self.is_stage_3:
            # shares out what is in the host's memory, a parameter at a time
            deepspeed.zero.Init(module=scorer, config_dict_or_path=strategy.options)
            scorer.gathered = lambda module: deepspeed.zero.GatheredParameters(
                list(module.parameters()), enabled=True
            )
        # DeepSpeed asks for it; srun and PALS set none
        os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
        optimizer = torch.optim.AdamW(groups, lr=1.0)
        engine = deepspeed.initialize(model=scorer, optimizer=optimizer, config=strategy.options)
        self.engine = engine[0]
        self.safe_get_full_grad = deepspeed.utils.safe_get_full_grad

    def __call__(self, batch):
        return self.engine(batch)

    def sync_gradients(self, last):
        """Gradients are summed over micro-batches, and averaged over ranks with the last one."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss):
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self, max_norm):
        """Return the norm of the gradient that step() will clip, on all ranks."""
        zero = self.engine.optimizer
        if self.is_stage_3:
            norm = torch.linalg.vector_norm(torch.stack(zero._get_norm_groups()))
        else:
            norm = zero.scaled_global_norm()
        norm = torch.as_tensor(norm, dtype=torch.float32)
        # DeepSpeed's norm is -1 if it is not finite
        return torch.where(norm >= 0, norm, torch.inf) / float(zero.loss_scale)

    def make_adamw(self, weight_decay, rate, betas):
        """Return the engine's AdamW, which was made before the settings of AdamW were known."""
        optimizer = self.engine.basic_optimizer
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=betas, weight_decay=group["weight_decay"] * weight_decay)
        return optimizer

    def step(self, optimizer, schedule, grad_norm):
        self.engine.step()
        schedule.step()

    def gradient(self, parameter):
        return self.safe_get_full_grad(parameter)

    def full_parameter(self, parameter, key=None):
        """Return the whole of a parameter in fp32, or of AdamW's state of it, on all ranks."""
        if self.is_stage_3:
            return self.engine.optimizer.get_full_hp_param(parameter, key)
        return parameter.get_full_hp_param(key)

    def set_full_parameter(self, parameter, value, key=None):
        """Set what full_parameter() returns: of the value each rank takes its share."""
        if not self.is_stage_3:
            parameter.set_full_hp_param(value, key)
            return
        size = parameter.ds_tensor.numel()  # equal shares of the flat tensor, the last one padded
        share = value.flatten()[size * torch.distributed.get_rank() :][:size]
        share = torch.nn.functional.pad(share, (0, size - share.numel()))
        self.engine.optimizer.set_local_hp_param(share, parameter, key)

    def shares(self):
        """Return this rank's shares of all that is trained, in fp32: what AdamW updates."""
        zero = self.engine.optimizer
        if self.is_stage_3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups

    def link_states(self):
        """Let parameters find their part of AdamW's state.

        DeepSpeed does that once, after the step of the first group, when others have none yet.
        """
        if not self.is_stage_3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def state(self, optimizer, sharded=False):
        """As of a Policy; sharded: this rank's shares, under numbers."""
        self.link_states()
        tensors = {}
        if sharded:
            for number, share in enumerate(self.shares()):
                states = {"parameter": share.detach(), **optimizer.state[share]}
                tensors |= {f"{kind}/{number}": value for kind, value in states.items()}
        else:
            for name, parameter in self.trainable().items():
                for kind, key in STATES.items():
                    tensors[f"{kind}/{name}"] = self.full_parameter(parameter, key).cpu()
                tensors[f"step/{name}"] = optimizer.state[self.shares()[0]]["step"].clone()
        if self.engine.fp16_enabled():
            scaler = self.engine.optimizer.loss_scaler
            facts = [float(getattr(scaler, name, 0)) for name in SCALER]  # a static one has less
            tensors["zero_loss_scale"] = torch.tensor(facts, dtype=torch.float64)
        return tensors

    def load_tensors(self, optimizer, tensors, sharded):
        zero = self.engine.optimizer
        parameters = self.trainable()
        if not sharded:  # else shares are numbered
            check_names(parameters, tensors)
        steps = [value for key, value in tensors.items() if key.startswith("step/")]
        for share in self.shares():
            moments = {key: torch.zeros_like(share) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[share] = {"step": steps[0].clone(), **moments}
        self.link_states()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind not in STATES:
                continue
            if sharded:
                share = self.shares()[int(name)]
                states = {"parameter": share, **optimizer.state[share]}
                states[kind].copy_(value)
            else:
                self.set_full_parameter(parameters[name], value, STATES[kind])
        # the weights that compute, from their fp32 selves
        if self.is_stage_3:
            for number in range(len(self.shares())):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        else:
            zero.update_lp_params()
        if "zero_loss_scale" in tensors and self.engine.fp16_enabled():
            for name, value in zip(SCALER, tensors["zero_loss_scale"].tolist(), strict=True):
                setattr(zero.loss_scaler, name, value)
