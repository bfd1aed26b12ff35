"""DeepSpeed's settings that this engine does not read.

Two lists. Those whose absence cannot change what is learned have no effect, which a note says. Those that
would change it (other gradients, other data, other arithmetic, another batch) are refused while they are
switched on: a run that silently learned something else would be worse than a run that did not start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .legacy import block_at
from .report import Report, join, show

_LOG: Final = "this engine keeps its own ledger; see engine.report()"
_SHAPE: Final = "the memory plan sizes and orders transfers itself"
_COMM: Final = "the engine arranges communication itself"
_CHECKPOINT: Final = "the engine writes checkpoints its own way"
_SCALE: Final = "bfloat16 needs no loss scale"
_OVERLAP: Final = "reads, updates and writes always overlap"
_UNREAD: Final = "DeepSpeed does not read it either"
_ANY_OPTIMIZER: Final = "it governs an optimizer object that the program brings"
_TORCH: Final = "there is one implementation"

NO_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {
    "": {
        "wall_clock_breakdown": _LOG,
        "memory_breakdown": _LOG,
        "dump_state": _LOG,
        "log_level": 'set the level of the logger "offload"',
        "timers": _LOG,
        "flops_profiler": _LOG,
        "comms_logger": _LOG,
        "tensorboard": _LOG,
        "wandb": _LOG,
        "csv_monitor": _LOG,
        "comet": _LOG,
        "autotuning": "run `offload tune` instead",
        "zero_allow_untested_optimizer": _ANY_OPTIMIZER,
        "zero_force_ds_cpu_optimizer": _ANY_OPTIMIZER,
        "prescale_gradients": "gradients are averaged either way",
        "gradient_predivide_factor": "gradients are averaged either way",
        "communication_data_type": _COMM,
        "seq_parallel_communication_data_type": _COMM,
        "fp32_allreduce": _COMM,
        "sparse_gradients": _COMM,
        "disable_allgather": _COMM,
        "activation_checkpointing": "call torch.utils.checkpoint in the model",
        "checkpoint": _CHECKPOINT,
        "nebula": _CHECKPOINT,
        "datastates": _CHECKPOINT,
        "load_universal_checkpoint": _CHECKPOINT,
        "use_node_local_storage": _CHECKPOINT,
        "compile": "call torch.compile on the model",
        "pipeline": "only DeepSpeed's pipeline modules read it",
        "use_data_before_expert_parallelism": "experts are not cut over ranks",
        "moe": _UNREAD,
        "eigenvalue": "only DeepSpeed's quantization reads it",
        "graph_harvesting": "call torch.compile on the model",
        "vocabulary_size": _UNREAD,
    },
    "zero_optimization": {
        "overlap_comm": _OVERLAP,
        "contiguous_gradients": "gradients are always contiguous",
        "allgather_partitions": _COMM,
        "reduce_scatter": _COMM,
        "round_robin_gradients": _COMM,
        "use_multi_rank_bucket_allreduce": _COMM,
        "zero_hpz_partition_size": _COMM,
        "mics_shard_size": _COMM,
        "mics_hierarchical_params_gather": _COMM,
        "stage3_use_all_reduce_for_fetch_params": _COMM,
        "stage3_allgather_sequential": _COMM,
        "stage3_max_reuse_distance": "the recorded order of use decides what is kept",
        "stage3_model_persistence_threshold": _SHAPE,
        "stage3_module_granularity_threshold": _SHAPE,
        "leaf_module": _SHAPE,
        "memory_efficient_linear": "no layer is replaced",
        "override_module_apply": "no layer is replaced",
        "load_from_fp32_weights": _CHECKPOINT,
        "elastic_checkpoint": _CHECKPOINT,
        "pipeline_loading_checkpoint": _CHECKPOINT,
        "ignore_unused_parameters": "unused parameters are always allowed",
        "legacy_stage1": "there is one stage 1",
        "log_trace_cache_warnings": _LOG,
        "enable_sanity_checks": "the engine always checks itself",
        "save_muon_momentum_buffer_in_memory": "there is no Muon here",
    },
    "zero_optimization.offload_param": {},
    "zero_optimization.offload_optimizer": {
        "pipeline": _OVERLAP,
        "pipeline_read": _OVERLAP,
        "pipeline_write": _OVERLAP,
        "fast_init": "swap files are preallocated",
        "super_offload": _OVERLAP,
        "cpuadam_cores_perc": "the optimizer's threads follow the machine",
    },
    "aio": {
        "single_submit": "requests are submitted in batches",
        "overlap_events": _OVERLAP,
        "use_gds": "data passes through host memory, where the optimizer works",
        "verbose": _UNREAD,
    },
    "fp16": {
        "opt_level": "it was a setting of apex",
        "auto_cast": "give the model inputs of its own type",
    },
    "bf16": {
        "immediate_grad_update": _SHAPE,
        "check_grad_overflow": "gradients are always checked",
        "auto_cast": "give the model inputs of its own type",
        "opt_level": "it was a setting of apex",
        "loss_scale": _SCALE,
        "initial_scale_power": _SCALE,
        "loss_scale_window": _SCALE,
        "hysteresis": _SCALE,
        "consecutive_hysteresis": _SCALE,
        "min_loss_scale": _SCALE,
    },
    "optimizer": {"legacy_fusion": _TORCH},
    "optimizer.params": {
        "torch_adam": _TORCH,
        "fused": _TORCH,
        "foreach": _TORCH,
        "capturable": _TORCH,
        "differentiable": _TORCH,
        "set_grad_none": _TORCH,
    },
}


def _is_on(value: object, depth: int = 8) -> bool:
    """A switch that is on, or a block in which any ``enabled`` is on."""
    if isinstance(value, dict):
        if not depth:
            return True
        return any(
            _is_on(item, depth - 1)
            for key, item in value.items()
            if key == "enabled" or isinstance(item, dict)
        )
    return _is_true(value)


def _is_true(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in ("", "false", "auto", "none", "0")
    return bool(value)


def _is_given(value: object) -> bool:
    return not (isinstance(value, dict) and value.get("enabled") is False) and value is not False


def _is_sparse(value: object) -> bool:
    return _is_true(value) and not (
        isinstance(value, dict) and (value.get("mode") == "dense" or value.get("enabled") is False)
    )


def _is_cut(value: object) -> bool:
    """A degree above one, or a block that holds one."""
    if isinstance(value, dict):
        degrees = ("autotp_size", "tp_size", "tp")
        return _is_on(value) or any(
            _is_cut(value.get(name)) for name in degrees if value.get(name) is not None
        )
    return value not in (0, 1, False, None, "0", "1", "auto")


def _is_sum(value: object) -> bool:
    return not (isinstance(value, str) and value.lower() in ("mean", "avg", "average", "auto"))


def _is_false(value: object) -> bool:
    return value is False or (isinstance(value, str) and value.lower() == "false")


_Test = Callable[[object], bool]
_OTHER_DATA: Final = "it would change the data that is seen; prepare the data in the program and remove it"
_OTHER_MODEL: Final = "it would change the model; change the model in the program and remove it"
_QUANTIZED: Final = "it would round what ranks exchange; write false"
_EXACT_MASTER: Final = (
    "the master weights stay fp32 here; write false, and to store less set "
    "zero_optimization.offload_optimizer.state_format"
)

# block -> key -> (when it is on, why it is refused; what to do)
REFUSED: Final[Mapping[str, Mapping[str, tuple[_Test, str]]]] = {
    "": {
        "amp": (_is_on, 'apex is not used; write "bf16": {"enabled": true} or the same with fp16'),
        "torch_autocast": (_is_on, 'write "bf16": {"enabled": true}, or call torch.autocast in the program'),
        "sparse_attention": (_is_sparse, _OTHER_MODEL),
        "compression_training": (_is_on, _OTHER_MODEL),
        "weight_quantization": (_is_on, _OTHER_MODEL),
        "quantize_training": (_is_on, _OTHER_MODEL),
        "progressive_layer_drop": (_is_on, _OTHER_MODEL),
        "hybrid_engine": (_is_on, _OTHER_MODEL),
        "data_efficiency": (_is_on, _OTHER_DATA),
        "curriculum_learning": (_is_on, _OTHER_DATA),
        "elasticity": (_is_on, "it would change the batch size; write the batch sizes and remove it"),
        "tensor_parallel": (_is_cut, "parameters are cut by ZeRO only; cut the layers in the program"),
        "sequence_parallel_size": (_is_cut, "sequences are not cut over ranks; write 1"),
        "gradient_allreduce_op": (_is_sum, 'gradients are averaged over ranks; write "mean"'),
        "managed_gradient_accumulation": (_is_false, "the engine counts the micro-batches; write true"),
    },
    "zero_optimization": {
        "zero_quantized_weights": (_is_on, _QUANTIZED),
        "zero_quantized_nontrainable_weights": (_is_on, _QUANTIZED),
        "zero_quantized_gradients": (_is_on, _QUANTIZED),
        "zeropp_loco_param": (_is_given, "it would round what ranks exchange; remove it"),
        "zenflow": (
            _is_given,
            'it would update with stale gradients; remove it (update "deferred" overlaps exactly)',
        ),
    },
    "fp16": {"fp16_master_weights_and_grads": (_is_on, _EXACT_MASTER)},
    "bf16": {
        "bf16_master_weights_and_grads": (_is_on, _EXACT_MASTER),
        "bf16_optimizer_states": (
            _is_on,
            'write false and set zero_optimization.offload_optimizer.state_format to "bf16"',
        ),
    },
    "optimizer.params": {
        "bias_correction": (_is_false, "Adam without bias correction is not available; write true"),
        "amsgrad": (_is_on, "AMSGrad is not available; write false"),
        "maximize": (_is_on, "the loss is minimised; write false and negate the loss"),
        "fp32_optimizer_states": (
            _is_false,
            'write true and set zero_optimization.offload_optimizer.state_format to "bf16"',
        ),
    },
    "data_types": {
        "param_dtype": (_is_true, "the type follows bf16.enabled and fp16.enabled; remove it"),
        "buffer_dtype": (_is_true, "buffers keep the model's type; remove it"),
    },
}


def set_aside(tree: dict[str, Any], report: Report) -> None:
    """Take every setting that is not read out of ``tree``, with a note or a problem for each."""
    for path, reasons in NO_EFFECT.items():
        block = block_at(tree, path) or {}
        for key in [key for key in block if key in reasons]:
            if block.pop(key) is not None:
                report.note(join(path, key), f"has no effect here; {reasons[key]}")
    for path, tests in REFUSED.items():
        block = block_at(tree, path) or {}
        for key in [key for key in block if key in tests]:
            value = block.pop(key)
            is_on, reason = tests[key]
            if value is None:
                continue
            if is_on(value):
                report.problem(join(path, key), f"{show(value)} is not supported; {reason}")
            else:
                report.note(join(path, key), f"{show(value)} has no effect")


def foreign_keys(path: str) -> tuple[str, ...]:
    """The settings of a block that are known and not read."""
    return (*NO_EFFECT.get(path, ()), *REFUSED.get(path, ()))
