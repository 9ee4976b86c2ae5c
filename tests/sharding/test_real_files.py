"""Settings files that people have: --check accepts each, or names the key and the reason.

The keys and values are those of DeepSpeed's files in LLaMA-Factory (31 files), axolotl (9),
transformers (4), accelerate (6), DeepSpeedExamples and a dozen other projects, and of the files for
FSDP of accelerate, transformers, TRL and ms-swift. Rows that differ in numbers only are one row.
What a key does comes from the documentation of these projects; what DeepSpeed rejects, from its own
models where it is installed.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import train
from ddp_utils import UserError, policy
from lm.sharding import deepspeed, deepspeed_engine

AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
AUTO |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
AUTO |= {"bf16": {"enabled": "auto"}, "wall_clock_breakdown": False}
FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
FACTORY = AUTO | {"fp16": FP16 | {"hysteresis": 2, "min_loss_scale": 1}}
FACTORY |= {"zero_allow_untested_optimizer": True}
ZERO2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8}
ZERO2 |= {"overlap_comm": False, "reduce_scatter": True, "reduce_bucket_size": 5e8}
ROBIN = ZERO2 | {"contiguous_gradients": True, "round_robin_gradients": True}
ZERO3 = {"stage": 3, "sub_group_size": 1e9, "reduce_bucket_size": "auto", "overlap_comm": True}
ZERO3 |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
ZERO3 |= {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4, "pin_memory": True}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}}
QUIET = {"comms_config": {"verbose": False}, "comms_logger": {"enabled": False}}
PREFETCH = {"prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}
CHAT = {"stage3_param_persistence_threshold": 1e4, "memory_efficient_linear": False}
CHAT |= {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-5, "freeze_step": 2000}}
OFF = {name: {"enabled": False, "level": 1} for name in ("amp", "flops_profiler", "hybrid_engine")}
OFF |= {"elasticity": {"enabled": False}, "zero_force_ds_cpu_optimizer": False}
PARTITION = {"activation_checkpointing": {"partition_activations": True, "profile": False}}
TRAINING = "it is not supported, and would change the training; leave it out"
SCHEDULE = "scheduler (use lr_scheduler and warmup_ratio)"
FP32 = "AdamW updates fp32 weights here, in the host's memory if they are offloaded; leave it out"
ADAM = {"lr": 0.00015, "weight_decay": 0.01}
SMALL = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
SMALL |= {"steps_per_print": 10, "wall_clock_breakdown": False}
NO_FP16 = {"fp16": {"enabled": False}}
PRINT = "steps_per_print (use log_every)"


def zero(settings, **more):
    return {"zero_optimization": settings | more}


def optimizer(type, **more):
    return {"optimizer": {"type": type, "params": ADAM | more}}


DEEPSPEED = {  # file: content, the warning or the error; an error begins with the key
    "LLaMA-Factory z0": (FACTORY | zero(ROBIN, stage=0), "zero_optimization.round_robin_gradients"),
    "LLaMA-Factory z2": (
        FACTORY | zero(ROBIN) | QUIET | {"monitor_config": {"enabled": True, "tag": "a"}},
        "zero_optimization.round_robin_gradients; monitor_config (use report_to)",
    ),
    "LLaMA-Factory z3": (FACTORY | zero(ZERO3 | GATHER), ""),
    "LLaMA-Factory z3 offload": (
        FACTORY | zero(ZERO3 | GATHER, offload_optimizer=CPU, offload_param=CPU),
        "",
    ),
    "LLaMA-Factory partial offload": (
        FACTORY | zero(ZERO3, offload_optimizer=CPU) | {"zero_force_ds_cpu_optimizer": True},
        "zero_force_ds_cpu_optimizer",
    ),
    "LLaMA-Factory gaudi": (
        AUTO | zero(ROBIN, stage=1) | {"timers": {"throughput": {"enabled": True}}},
        "zero_optimization.round_robin_gradients, timers",
    ),
    "LLaMA-Factory quantized": (
        FACTORY | zero(ZERO3, zero_quantized_gradients=True),
        f"zero_optimization.zero_quantized_gradients: {TRAINING}",
    ),
    "LLaMA-Factory granularity": (
        FACTORY | PARTITION | zero(ZERO3, stage3_module_granularity_threshold=16),
        "activation_checkpointing (use gradient_checkpointing); "
        "zero_optimization.stage3_module_granularity_threshold",
    ),
    "LLaMA-Factory fp32 sums": (
        FACTORY | zero(ZERO3) | {"data_types": {"grad_accum_dtype": "fp32"}},
        "",
    ),
    "axolotl zero1": (
        AUTO | zero({"stage": 1, "overlap_comm": True}) | {"optimizer": ADAMW},
        "",
    ),
    "axolotl zero2": (
        AUTO | zero(ZERO2, offload_optimizer={"device": "cpu"}) | {"fp16": {"auto_cast": False}},
        "",
    ),
    "axolotl zero3 bf16": (
        AUTO | zero({"stage": 3, "max_live_parameters": 0, "max_reuse_distance": 0} | PREFETCH),
        "",
    ),
    "transformers zero2": (
        AUTO | zero(ZERO2) | {"optimizer": ADAMW, "scheduler": WARMUP, "steps_per_print": 2000},
        f"{SCHEDULE}; steps_per_print (use log_every)",
    ),
    "transformers zero3 bf16": (
        {"bfloat16": {"enabled": "auto"}}
        | zero(ZERO3, stage3_gather_fp16_weights_on_model_save=True),
        "",
    ),
    "accelerate stage 3": (
        AUTO | zero(ZERO3, stage3_gather_16bit_weights_on_model_save="auto", sub_group_size="auto"),
        "",
    ),
    "DeepSpeed-Chat": (
        AUTO | zero({"stage": 3} | CHAT) | OFF | {"prescale_gradients": False},
        "",
    ),
    "ZeRO++": (
        AUTO | zero(ZERO3, zero_hpz_partition_size=8, zero_quantized_weights=False),
        "",
    ),
    "DeepSpeedExamples nvme": (
        AUTO | zero(ZERO3, offload_param=NVME) | {"aio": {"queue_depth": 32}},
        "zero_optimization.offload_param.device: 'nvme' is not 'cpu' or 'none'",
    ),
    "DeepSpeedExamples one bit": (
        AUTO | {"optimizer": ONE_BIT},
        "optimizer.type: 'OneBitAdam' is not 'AdamW' or 'Adam' or 'adamw' or 'adam'",
    ),
    "DeepSpeedExamples ZenFlow": (
        AUTO | zero(ZERO2, zenflow={"topk_ratio": 0.1}),
        f"zero_optimization.zenflow: {TRAINING}",
    ),
    "DeepSpeedExamples Megatron": (
        AUTO | zero({"stage": 2, "cpu_offload": True, "reduce_bucket_size": 50000000}),
        "",
    ),
    "DeepSpeedExamples bing_bert": (
        AUTO | {"prescale_gradients": True, "gradient_predivide_factor": 8},
        "prescale_gradients, gradient_predivide_factor",
    ),
    "Twin-Flow": (
        AUTO | zero(ZERO3, offload_optimizer=CPU | {"ratio": 0.3}),
        f"zero_optimization.offload_optimizer.ratio: {FP32}",
    ),
    "accelerate's own": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        "this is accelerate's file; use a file of DeepSpeed's own settings: "
        "scripts/distributed_setup.py deepspeed --zero_stage 3",
    ),
    "FlagEmbedding": (
        AUTO | {"bf16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2}} | zero(ZERO2),
        "bf16.hysteresis",
    ),
    "DeepSpeedExamples layer drop": (
        SMALL | {"prescale_gradients": True} | optimizer("Adam", bias_correction=False),
        f"{PRINT}; prescale_gradients, optimizer.params.bias_correction",
    ),
    "DeepSpeedExamples SQuAD": (
        SMALL | optimizer("Adam", max_grad_norm=1.0),
        "optimizer.params.max_grad_norm: DeepSpeed does not read it here; use gradient_clipping; "
        "leave it out",
    ),
    "DeepSpeedExamples infinity": (
        zero({"stage": 3, "stage3_param_persitance_threshold": 1e5}),
        "zero_optimization.stage3_param_persitance_threshold: no such setting",
    ),
    "DeepSpeedExamples QANet": (
        SMALL
        | optimizer("Adam", betas=[0.8, 0.999], eps=1e-8)
        | {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.004}}},
        f"{PRINT}; optimizer.params.betas; {SCHEDULE}",
    ),
    "DeepSpeedExamples leaves": (
        zero({"stage": 3, "leaf_module": {"classes": ["a.Block"]}}),
        "",
    ),
    "DeepSpeedExamples ImageNet": (
        {"gradient_clipping": 0, "cuda_visible_devices": 0},
        "cuda_visible_devices is not a setting; expected one of train_batch_size, ",
    ),
    "DeepSpeedExamples alpaca": (
        PARTITION | zero({"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}),
        "activation_checkpointing (use gradient_checkpointing); "
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    "DeepSpeedExamples distillation": (
        {"student": {"dtype": "bfloat16"}, "deepspeed_config": "configs/ds_zero3.json"},
        "student is not a setting; ",
    ),
    "LMFlow": (
        NO_FP16 | {"bf16": {"enabled": False}, "steps_per_print": 20000000000000000} | QUIET,
        PRINT,
    ),
    "WizardMath": (
        zero(ZERO3, sub_group_size=0, stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
        | {"fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32}},
        "",
    ),
    "Baichuan2": (
        AUTO
        | zero({"stage": 3, "overlap_comm": True} | GATHER)
        | {"flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None}},
        "",
    ),
    "ms-swift": (
        AUTO
        | zero(ZERO2, offload_optimizer=CPU)
        | NO_FP16
        | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "eps": 1e-8}}},
        "",
    ),
    "gpt-neox": (
        {"pipe-parallel-size": 1, "optimizer": {"type": "Adam"}},
        "pipe-parallel-size is not a setting; ",
    ),
    "gpt-neox autotuning": (
        {"zero_optimization": {"stage": [0, 1, 2, 3]}},
        "zero_optimization.stage: [0, 1, 2, 3] is not 0 or 1 or 2 or 3",
    ),
    "Megatron-DeepSpeed": (
        SMALL | zero({"stage": 1}) | {"bf16": {"enabled": True, "immediate_grad_update": True}},
        f"{PRINT}; bf16.immediate_grad_update",
    ),
    "numbers as texts": (
        {"train_micro_batch_size_per_gpu": "4"},
        "train_micro_batch_size_per_gpu: '4' is not a valid int",
    ),
    "parameters in stage 2": (
        AUTO | zero(ZERO2, offload_optimizer=CPU, offload_param=CPU),
        "warning: offload_param has no effect (use stage 3)",
    ),
    "an optimizer that is not sharded": (
        AUTO | zero({"stage": 0}, offload_optimizer=CPU),
        "warning: offload_optimizer has no effect (use stage 1)",
    ),
    "bf16 without a copy": (
        AUTO | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        f"bf16.bf16_master_weights_and_grads: {FP32}",
    ),
}

SECTIONS = {  # of the same files: a part with an effect, which these scripts do not have
    "tensor_parallel": {"autotp_size": 2},  # LLaMA-Factory
    "sequence_parallel": {"enabled": True, "size": 4},
    "fp8": {"enabled": True},
    "quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 16}},  # MoQ
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
    "sparse_attention": {"mode": "fixed", "block": 16},
    "expert_parallel": {"enabled": True, "autoep_size": 8},
    "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "elasticity": {"enabled": True, "max_train_batch_size": 2000},
}
UNUSED = {  # the training is the same without them
    "autotuning": {"enabled": True, "fast": True},
    "compile": {"disable": False, "backend": "inductor"},  # axolotl
    "seq_parallel_communication_data_type": "bf16",  # accelerate
}
for key, section in SECTIONS.items():
    DEEPSPEED[key] = (FACTORY | zero(ZERO3) | {key: section}, f"{key}: {TRAINING}")
for key, section in UNUSED.items():
    DEEPSPEED[key] = (AUTO | zero(ZERO3) | {key: section}, key)

CLUSTER = {"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP"}
CLUSTER |= {"downcast_bf16": "no", "num_processes": 8, "tpu_env": [], "use_cpu": False}
V1 = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE"}
V1 |= {"fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": False}
V1 |= {"fsdp_sync_module_states": True, "fsdp_use_orig_params": True, "fsdp_offload_params": False}
V2 = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
TRANSFORMERS = {"backward_prefetch": "backward_pre", "forward_prefetch": "true", "xla": False}
TRANSFORMERS |= {"use_orig_params": "true", "min_num_params": 0, "limit_all_gathers": True}
LAUNCHER = "compute_environment, num_processes (use the options of the launcher)"
FSDP = {  # file: content, the warning or the error, and the strategy
    "accelerate 1": (CLUSTER | {"fsdp_config": V1}, LAUNCHER, "FULL_SHARD"),
    "accelerate 2": (CLUSTER | {"fsdp_config": V2}, LAUNCHER, "FULL_SHARD"),
    "accelerate of 2023": (
        CLUSTER | {"deepspeed_config": {}, "ipex_config": {}, "fsdp_config": V1},
        LAUNCHER,
        "FULL_SHARD",
    ),
    "accelerate before": (
        V1 | {"fsdp_sharding_strategy": 2, "fsdp_backward_prefetch_policy": "NO_PREFETCH"},
        "fsdp_backward_prefetch_policy",
        "SHARD_GRAD_OP",
    ),
    "not freed": (V2 | {"fsdp_reshard_after_forward": False}, "", "SHARD_GRAD_OP"),
    "by name": (
        V1 | {"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2", "fsdp_version": 1},
        "fsdp_version",
        "HYBRID_SHARD_ZERO2",
    ),
    "transformers": (TRANSFORMERS | {"reshard_after_forward": "full_shard"}, "", "FULL_SHARD"),
    "transformers 5": (
        {"version": 2, "cpu_offload": False, "state_dict_type": "FULL_STATE_DICT"},
        "",
        "FULL_SHARD",
    ),
    "original parameters": (
        {"fsdp_use_orig_params": False, "fsdp_min_num_params": 10},
        "fsdp_use_orig_params; fsdp_min_num_params (use fsdp_transformer_layer_cls_to_wrap)",
        "FULL_SHARD",
    ),
    "one precision in two spellings": (
        V1 | {"fsdp_mixed_precision": "BFLOAT16", "mixed_precision": "bf16"},
        "",
        "FULL_SHARD",
    ),
    "two strategies": (
        V2 | {"fsdp_sharding_strategy": "NO_SHARD"},
        "fsdp_sharding_strategy is NO_SHARD, but another key sets FULL_SHARD; use only one of them",
        None,
    ),
    "offloaded but not sharded": (
        {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_offload_params": True},
        "warning: fsdp_offload_params has no effect (use FULL_SHARD)",
        "NO_SHARD",
    ),
    "quoted": (
        V1
        | {"fsdp_offload_params": "no", "fsdp_forward_prefetch": "False"}
        | {"fsdp_reshard_after_forward": "false", "fsdp_use_orig_params": "Yes"},
        "",
        "SHARD_GRAD_OP",
    ),
    "accelerate's template": (
        {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2}
        | {"fsdp_config": V1 | {"fsdp_activation_checkpointing": False}},
        "num_processes (use the options of the launcher)",
        "FULL_SHARD",
    ),
    "ms-swift": (
        {"_note": "a", "fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}},
        "fsdp is not a setting; did you mean fsdp_sharding_strategy?",
        None,
    ),
    "ms-swift's old name": (
        CLUSTER | {"fsdp_config": V1 | {"fsdp_transformer_cls_names_to_wrap": "Qwen3DecoderLayer"}},
        "fsdp_transformer_cls_names_to_wrap is not a setting; did you mean fsdp_transformer_",
        None,
    ),
    "by size": (
        V1 | {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
        "fsdp_auto_wrap_policy: 'SIZE_BASED_WRAP' is not 'TRANSFORMER_BASED_WRAP' or 'NO_WRAP'",
        None,
    ),
    "fp8": (
        {"distributed_type": "FSDP", "fp8_config": {"backend": "TE"}, "mixed_precision": "fp8"},
        "fp8_config: it is not supported; leave it out",
        None,
    ),
    "parallelism": (
        CLUSTER | {"fsdp_config": V2, "parallelism_config": {"parallelism_config_tp_size": 2}},
        "parallelism_config: it is not supported; leave it out",
        None,
    ),
    "another type": (
        {"distributed_type": "MULTI_GPU"},
        "distributed_type: 'MULTI_GPU' is no",
        None,
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("training: {}\n")
    monkeypatch.setattr(policy, "warn_if_bf16_is_slow", lambda: None)  # it depends on the CPU
    if not find_spec("deepspeed"):  # then the values are unchecked
        monkeypatch.setattr(deepspeed, "find_spec", lambda name: True)
        monkeypatch.setattr(deepspeed_engine, "check_values", lambda *_: None)


def check(flags, path, capsys):
    """What --check says about the keys of a file: its error, or its warning, without the path."""
    rows = ["--max_rows", "40", "--config", "empty.yaml"]
    try:
        train.main([*rows, *flags, path, "--check"])
    except UserError as error:
        return str(error).partition(": ")[2]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    return "".join(lines).replace(f"{path}: ", "").removeprefix("warning: no effect here: ")


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_file_of_deepspeed(name, capsys):
    content, expected = DEEPSPEED[name]
    if "no such setting" in expected:
        pytest.importorskip("deepspeed", reason="DeepSpeed checks zero_optimization itself")
    Path("ds.json").write_text(json.dumps(content, indent=1))
    says = check(["--deepspeed"], "ds.json", capsys)
    assert says.startswith(expected) if "is not a setting" in expected else says == expected


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("name", FSDP)
def test_a_file_of_fsdp(name, suffix, capsys, monkeypatch):
    content, expected, strategy = FSDP[name]
    Path(f"fsdp.{suffix}").write_text(json.dumps(content, indent=1))  # which is YAML, too
    configs = []
    own = train.runs.check
    monkeypatch.setattr(train.runs, "check", lambda *all: configs.append(all[1]) or own(*all))
    says = check(["--use_fsdp", "--fsdp_config"], f"fsdp.{suffix}", capsys)
    if strategy:
        assert says == expected
        assert configs[0].sharding.fsdp_sharding_strategy == strategy
    else:
        assert says.startswith(expected) and not configs
