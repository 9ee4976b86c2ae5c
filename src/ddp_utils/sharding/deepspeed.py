"""DeepSpeed's ZeRO, stages 1 to 3: its JSON made whole, its engine as a policy.

DeepSpeed is an extra: pip install -r requirements-deepspeed.txt. Nothing here imports it before
it is asked for.
"""

import collections
import contextlib
import json
import logging
import os
import warnings
from importlib.util import find_spec

import torch
import torch.distributed

from ddp_utils import UserError, cli, jsonl
from ddp_utils.optim import LossScale, Policy, check_names, float_trained, parameter_groups

FITS = {  # what a key may hold
    (WHOLE := "a whole number"): lambda x: type(x) in (int, float) and 0 <= x == x // 1,
    (SWITCH := "true or false"): lambda x: type(x) is bool,
    (OFF := "false, AdamW is torch's"): lambda x: x is False,
    (OBJECT := "an object, {...}"): lambda x: isinstance(x, dict),
    "a number of 0 or more": lambda x: type(x) in (int, float) and x >= 0,
    "0, 1, 2 or 3": lambda x: type(x) is int and 0 <= x <= 3,
    '"cpu" or "none"': lambda x: x in ("cpu", "none"),
    '"fp32", "bf16" or "fp16"': lambda x: x in ("fp32", "bf16", "fp16"),
}
# section of the JSON -> what is left to DeepSpeed, which meets other keys with a traceback
KNOWN = {
    "": {
        WHOLE: "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        SWITCH: "zero_allow_untested_optimizer wall_clock_breakdown",
        OFF: "zero_force_ds_cpu_optimizer",
        OBJECT: "zero_optimization bf16 fp16 data_types comms_logger flops_profiler",
        "a number of 0 or more": "gradient_clipping steps_per_print",
        '"fp32", "bf16" or "fp16"': "communication_data_type",
    },
    "zero_optimization": {
        "0, 1, 2 or 3": "stage",
        WHOLE: "reduce_bucket_size allgather_bucket_size sub_group_size stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_param_persistence_threshold stage3_prefetch_bucket_size",
        SWITCH: "contiguous_gradients overlap_comm reduce_scatter allgather_partitions "
        "round_robin_gradients stage3_gather_16bit_weights_on_model_save",
        OBJECT: "offload_optimizer offload_param",
    },
    "bf16": {SWITCH: "enabled check_grad_overflow"},
    "fp16": {
        SWITCH: "enabled",
        WHOLE: "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    },
}
OFFLOAD = {"offload_optimizer": 1, "offload_param": 3}  # from which stage on
for name in OFFLOAD:
    KNOWN[f"zero_optimization.{name}"] = {'"cpu" or "none"': "device", SWITCH: "pin_memory"}
OURS = {
    "optimizer": "src/train.py makes the optimizer, AdamW",
    "scheduler": "src/train.py makes the schedule: training.lr_scheduler",
    "activation_checkpointing": "it is training.gradient_checkpointing",
    "tensorboard": "it is output.report_to",
}
BUCKETS = {  # "auto" as transformers fills it in, from what the matrices of a layer hold
    "reduce_bucket_size": lambda width: width**2,
    "allgather_bucket_size": lambda width: width**2,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width**2),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
OPEN = {*KNOWN[""][WHOLE].split(), "gradient_clipping", "enabled", *BUCKETS}  # may be "auto"


def read(path) -> dict:
    """DeepSpeed's settings; UserError for what is unknown, or is another setting's business."""
    found = jsonl.read_object(path)
    _check(found, path)
    for key, first in OFFLOAD.items():
        device = found.get("zero_optimization", {}).get(key, {}).get("device")
        if device == "cpu" and stage(found) < first:
            name = f"zero_optimization.{key}"
            raise UserError(f"{jsonl.line_of(name, path)}: {name}: only with stage {first} and up")
    return found


def _check(part, path, section=""):
    known = {key: kind for kind, keys in KNOWN[section].items() for key in keys.split()}
    for key, value in part.items():
        name = f"{section}.{key}".lstrip(".")
        where = jsonl.line_of(name, path)
        if name in OURS:
            raise UserError(f"{where}: {name}: {OURS[name]}; leave it out")
        if key not in known:
            raise UserError(f"{where}: {cli.unknown(key, list(known))}")
        if not FITS[known[key]](value) and not (value == "auto" and key in OPEN):
            raise UserError(f"{where}: {name} is {json.dumps(value):.40}; give {known[key]}")
        if name in KNOWN:
            _check(value, path, name)


def stage(found) -> int:
    """The ZeRO stage; at 0 nothing is sharded, and DDP does the same."""
    return found.get("zero_optimization", {}).get("stage", 0)


def precision(found):
    """bf16, fp16 or no, where the JSON says so, else None ("auto")."""
    said = {kind: found[kind].get("enabled") for kind in ("bf16", "fp16") if kind in found}
    if on := [kind for kind, value in said.items() if value is True]:
        return on[0]
    return "no" if {*said.values()} == {False} else None


def filled(found, config, world, width) -> dict:
    """The settings without any "auto": numbers from ours. width: of the model's hidden states.

    Raises UserError if the product of the batch sizes, or the precision, is not what they say,
    and without DeepSpeed: here rather than in ZeroPolicy, where a run has begun.
    """
    if stage(found) and not find_spec("deepspeed"):
        raise UserError("DeepSpeed is not installed; pip install -r requirements-deepspeed.txt")
    ours = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,
    }
    mixed = {kind: config.mixed_precision == kind for kind in ("bf16", "fp16")}
    ranks, steps = world.world_size, config.gradient_accumulation_steps
    product, total = ranks * steps * config.batch_size, found.get("train_batch_size", "auto")
    if total not in ("auto", product):
        where = jsonl.line_of("train_batch_size", config.deepspeed_config)
        says = f"{ranks} ranks x {steps} accumulation x {config.batch_size} = {product}"
        raise UserError(f'{where}: train_batch_size is {total}, but {says}; or write "auto"')
    zero = dict(found.get("zero_optimization", {}))
    for key, value in zero.items():
        if value == "auto" or type(value) is float:  # 5e8 is no integer
            zero[key] = BUCKETS[key](width) if value == "auto" else int(value)
    for name in OFFLOAD.keys() & zero.keys() if world.device.type == "cpu" else ():
        zero[name] = {**zero[name], "pin_memory": False}  # there is no GPU to copy to
    half = {}
    for kind, wanted in mixed.items():
        said = found.get(kind, {})
        if said.get("enabled", "auto") not in ("auto", wanted):
            where = jsonl.line_of(f"{kind}.enabled", config.deepspeed_config)
            says = f"{str(not wanted).lower()}, but mixed_precision is {config.mixed_precision}"
            raise UserError(f"{where}: {kind}.enabled is {says}; choose one")
        half[kind] = {**said, "enabled": wanted} if wanted else {"enabled": False}
    if mixed["bf16"]:  # a step whose gradient is not finite is not taken
        half["bf16"].setdefault("check_grad_overflow", True)
        # sums over micro-batches and ranks, as DDP and FSDP make them
        half |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
        half |= {key: found[key] for key in half.keys() & found.keys() - mixed.keys()}
    rest = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    rest |= {"steps_per_print": 10**9, **found, **ours, **half}
    return rest | {"train_batch_size": product, "zero_optimization": zero}


def import_deepspeed(device="cpu"):
    """The package, quiet; UserError if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it looks for one, and says so
    # it calls torch's collectives by their old names, thousands of times
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.utils import logger
    except ImportError as error:
        raise UserError(
            f"DeepSpeed cannot be imported ({error}); pip install -r requirements-deepspeed.txt"
        ) from error
    logger.setLevel(logging.ERROR)
    with contextlib.suppress(AttributeError, KeyError):
        # a C++ extension for shared memory between processes, minutes to compile; gloo does it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroPolicy(Policy):
    """A scorer in DeepSpeed's engine, which makes the steps and clips in them."""

    is_sharded = True

    def __init__(self, scorer, world, strategy):
        self.scorer = scorer
        self.loss_scale = LossScale(enabled=False)  # DeepSpeed has its own
        if scorer.autocast is None:  # else its weights become half ones, with fp32 copies to train
            float_trained(scorer)
        deepspeed = import_deepspeed(world.device.type)
        if not torch.distributed.is_initialized():  # one process can still offload to the host
            backend, alone = world.backend.replace("none", "gloo"), torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=alone, rank=0, world_size=1)
        deepspeed.init_distributed(
            dist_init_required=False, auto_mpi_discovery=False, verbose=False
        )
        groups = parameter_groups(self.trainable().values(), weight_decay=1.0)  # see make_adamw()
        if stage(strategy.options) == 3:
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

    def __call__(self, batch):
        return self.engine(batch)

    def sync_gradients(self, last):
        """Gradients are summed over micro-batches, and averaged over ranks with the last one."""
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss):
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip_grad_norm(self, max_norm):
        """The norm of the gradient that step() will clip; on all ranks."""
        zero = self.engine.optimizer
        if hasattr(zero, "scaled_global_norm"):  # stages 1 and 2
            norm = zero.scaled_global_norm()
        else:
            norm = torch.linalg.vector_norm(torch.stack(list(zero._get_norm_groups())))
        norm = torch.as_tensor(norm, dtype=torch.float32)
        # DeepSpeed says -1 for what is not finite
        return torch.where(norm >= 0, norm, torch.inf) / float(zero.loss_scale)

    def make_adamw(self, weight_decay, rate, betas):
        """The AdamW in the engine, which was made before the settings of AdamW were known."""
        optimizer = self.engine.basic_optimizer
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=betas, weight_decay=group["weight_decay"] * weight_decay)
        return optimizer

    def step(self, optimizer, schedule):
        self.engine.step()
        schedule.step()

    def gradient(self, parameter):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def full_parameter(self, parameter):
        """The whole of a parameter in fp32, on all ranks."""
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)

    def state(self, optimizer, shared=""):
        """As of a Policy; shared: this rank's shares, under numbers."""
        from deepspeed.utils import safe_get_full_optimizer_state

        adam, flat = optimizer.state, _flat(self.engine)
        tensors = {}
        _link(self.engine)
        if shared:
            for number, share in enumerate(flat):
                tensors[f"parameter/{number}"] = share.detach()
                tensors |= {f"{key}/{number}": value for key, value in adam[share].items()}
        for name, trained in {} if shared else self.trainable().items():
            tensors[f"parameter/{name}"] = self.full_parameter(trained).cpu()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}/{name}"] = safe_get_full_optimizer_state(trained, key).cpu()
            tensors[f"step/{name}"] = adam[flat[0]]["step"].clone()
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        if scaler is not None and self.engine.fp16_enabled():
            facts = [float(scaler.cur_scale), scaler.cur_iter, scaler.last_overflow_iter]
            tensors["zero_loss_scale"] = torch.tensor(facts, dtype=torch.float64)
        return tensors

    def load_tensors(self, optimizer, tensors, shared):
        engine, named = self.engine, self.trainable()
        if not shared:  # else shares are numbered
            check_names(named, tensors)
        zero, adam = engine.optimizer, optimizer.state
        steps = [value for key, value in tensors.items() if key.startswith("step/")]
        for share in _flat(engine):
            adam[share] = {"step": steps[0].clone()}
            adam[share] |= {key: torch.zeros_like(share) for key in ("exp_avg", "exp_avg_sq")}
        _link(engine)
        by_name = collections.defaultdict(dict)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind in ("parameter", "exp_avg", "exp_avg_sq"):
                by_name[name][kind] = value
        for name, kinds in by_name.items():
            if shared:
                share = _flat(engine)[int(name)]
                for kind, value in kinds.items():
                    (share if kind == "parameter" else adam[share][kind]).copy_(value)
                continue
            for kind, value in kinds.items():
                _set(named[name], value, kind)
        if hasattr(zero, "update_lp_params"):
            zero.update_lp_params()  # the weights that compute, from their fp32 selves
        else:
            for number in range(len(_flat(engine))):
                zero._reassign_or_swap_out_partitioned_parameters(number)
        if "zero_loss_scale" in tensors and engine.fp16_enabled():
            scaler = zero.loss_scaler
            scale, done, overflow = tensors["zero_loss_scale"].tolist()
            scaler.cur_scale, scaler.cur_iter = scale, int(done)
            scaler.last_overflow_iter = overflow


def _flat(engine):
    """This rank's shares of all that is trained, in fp32: what AdamW updates."""
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return zero.single_partition_of_fp32_groups
    return zero.fp32_partitioned_groups_flat


def _link(engine):
    """Stages 1 and 2: let parameters find their part of AdamW's state.

    DeepSpeed does that once, after the step of the first group, when the others have none yet.
    """
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _set(parameter, value, kind):
    """Of a whole tensor, this rank's share."""
    import deepspeed.utils as safe

    if hasattr(parameter, "ds_id"):  # stage 3: equal shares of the flat tensor, the last one padded
        size, world_size = parameter.ds_tensor.numel(), torch.distributed.get_world_size()
        padded = torch.nn.functional.pad(value.flatten(), (0, size * world_size - value.numel()))
        share = padded[size * torch.distributed.get_rank() :][:size]
        if kind == "parameter":
            safe.safe_set_local_fp32_param(parameter, share)
        else:
            safe.safe_set_local_optimizer_state(parameter, share, kind)
    elif kind == "parameter":
        safe.safe_set_full_fp32_param(parameter, value)
    else:
        safe.safe_set_full_optimizer_state(parameter, value, kind)
