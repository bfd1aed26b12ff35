"""Whole public files, re-typed, and the forms that all census files share.

The ids are those of a census of 68 public files: W whole files, E embedded in programs, T quoted in threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Tree = dict[str, Any]
PARAM = "zero_optimization.offload_param"
OPTIMIZER = "zero_optimization.offload_optimizer"


class Case(NamedTuple):
    source: Tree | str
    values: Tree = {}  # noqa: RUF012 -- read only
    """path -> what the engine reads there."""
    notes: tuple[str, ...] = ()
    """Parts of notes that must be there."""
    refused: tuple[str, ...] = ()
    """The whole message's lines, by their beginnings."""


def zero3(**changes: Any) -> Tree:
    """The block that most public files have; None takes a key out."""
    block: Tree = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return {key: value for key, value in {**block, **changes}.items() if value is not None}


def template(zero: Any, **changes: Any) -> Tree:
    """The file around that block, as the trainers' documentation has it."""
    tree: Tree = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": zero,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    return {key: value for key, value in {**tree, **changes}.items() if value is not None}


def stage2(**changes: Any) -> Tree:
    return {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        **changes,
    }


CPU: Tree = {"device": "cpu", "pin_memory": True}
NONE: Tree = {"device": "none", "pin_memory": True}


def nvme(path: Any = "/mnt/nvme", **more: Any) -> Tree:
    return {"device": "nvme", "nvme_path": path, "pin_memory": True, **more}


AIO: Tree = {
    "block_size": 262144,
    "queue_depth": 32,
    "thread_count": 1,
    "single_submit": False,
    "overlap_events": True,
}

WHOLE_FILES: dict[str, Case] = {
    "W01": Case(
        template(
            zero3(
                sub_group_size=50000000,
                reduce_bucket_size=25000000,
                offload_optimizer=nvme("swap", buffer_count=4, fast_init=True, pin_memory=False),
                offload_param=nvme("swap", buffer_count=5, buffer_size=100000000, max_in_cpu=1000000000),
            ),
            aio=AIO,
        ),
        {
            f"{OPTIMIZER}.nvme_path": "swap",
            f"{OPTIMIZER}.pin_memory": False,
            "aio.queue_depth": 32,
            "zero_optimization.sub_group_size": 50000000,
        },
        (
            f"{OPTIMIZER}.fast_init: has no effect",
            f"{PARAM}.buffer_size: a hint",
            "aio.single_submit: has no",
        ),
    ),
    "W02": Case(
        template(
            zero3(stage3_max_live_parameters=2e10, offload_optimizer={"device": "cpu"}),
            optimizer=None,
        ),
        {f"{OPTIMIZER}.device": "cpu", "zero_optimization.stage3_max_live_parameters": 20_000_000_000},
    ),
    "W03": Case(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": stage2(),
        },
        {"train_batch_size": 32, "optimizer.type": "AdamW"},
        ('optimizer.type: "Adam" means AdamW',),
    ),
    "W04": Case(
        {
            "zero_optimization": zero3(
                sub_group_size=1e14,
                reduce_bucket_size="1",
                stage3_prefetch_bucket_size="10",
                stage3_param_persistence_threshold="0",
                stage3_gather_16bit_weights_on_model_save=None,
                stage3_gather_fp16_weights_on_model_save=True,
                offload_optimizer=CPU,
                offload_param=CPU,
            )
        },
        {
            "zero_optimization.sub_group_size": 10**14,
            "zero_optimization.reduce_bucket_size": 1,
            "zero_optimization.stage3_prefetch_bucket_size": 10,
            "zero_optimization.stage3_param_persistence_threshold": 0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
        },
        ("stage3_gather_fp16_weights_on_model_save: is an old or other name",),
    ),
    "W05": Case(
        template(
            zero3(offload_optimizer=NONE, offload_param=NONE),
            fp16={"enabled": True, "loss_scale": 512, "min_loss_scale": 0},
            bf16=None,
            flops_profiler={"enabled": False, "profile_step": 1},
        ),
        {"fp16.loss_scale": 512.0, "fp16.min_loss_scale": 0.0, f"{PARAM}.device": "none"},
        ("flops_profiler: has no effect", f'{PARAM}: the device is "none", so pin_memory'),
    ),
    "W06": Case(
        template(zero3(overlap_comm=False, offload_optimizer=CPU, offload_param=CPU)),
        {
            "train_batch_size": None,
            "gradient_clipping": None,
            "bf16.enabled": "auto",
            f"{PARAM}.device": "cpu",
        },
        ('train_batch_size: "auto"', 'gradient_clipping: "auto"', 'optimizer.params.lr: "auto"'),
    ),
    "W07": Case(
        template(zero3(offload_optimizer=CPU, offload_param=CPU), communication_data_type="bfp16"),
        {},
        ("communication_data_type: has no effect",),
    ),
    "W08": Case(
        template(
            zero3(
                sub_group_size=1000000000.0,
                stage3_max_live_parameters=1000000000.0,
                offload_optimizer=CPU,
                offload_param=CPU,
            ),
            train_micro_batch_size_per_gpu=2,
            gradient_accumulation_steps=4,
        ),
        {
            "zero_optimization.sub_group_size": 1_000_000_000,
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": None,
        },
    ),
    "W09": Case(
        template(
            zero3(),
            train_batch_size=64,
            scheduler={
                "type": "WarmupCosineLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "total_num_steps": 1000},
            },
        ),
        refused=(
            "scheduler.params.warmup_min_lr: is a setting of WarmupLR, WarmupDecayLR, not of WarmupCosineLR",
            "scheduler.params.warmup_max_lr: is a setting of WarmupLR",
        ),
    ),
    "W10": Case(
        {"zero_optimization": stage2(cpu_offload=True), "fp16": {"enabled": True}},
        {f"{OPTIMIZER}.device": "cpu", "zero_optimization.stage": 2},
        (f'zero_optimization.cpu_offload: is an old form; read as {OPTIMIZER}.device "cpu"',),
    ),
    "W11": Case(
        template(False, bf16={"enabled": True}, fp16=None),
        {"zero_optimization.stage": 0, "bf16.enabled": True},
        ("zero_optimization: false is an old form",),
    ),
    "W12": Case(
        {"train_batch_size": 8, "max_grad_norm": 1.0, "fp16": {"enabled": True}},
        refused=("max_grad_norm: DeepSpeed ignores it, so gradients are not clipped; write",),
    ),
    "W13": Case(
        {
            "zero_optimization": stage2(offload_param=CPU, offload_optimizer=CPU),
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
        },
        refused=(f"{PARAM}: needs stage 3, and the stage is 2",),
    ),
    "W14": Case(
        template(stage2(offload_optimizer=CPU)), {f"{OPTIMIZER}.device": "cpu", "zero_optimization.stage": 2}
    ),
    "W15": Case(
        template(
            {
                "stage": 2,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
            }
        ),
        {"zero_optimization.reduce_bucket_size": None},
        ('zero_optimization.reduce_bucket_size: "auto" is taken as absent; the memory plan decides',),
    ),
    "W16": Case(template(zero3(offload_optimizer={"device": "cpu"})), {f"{OPTIMIZER}.pin_memory": True}),
    "W17": Case(
        template(
            zero3(offload_optimizer=CPU),
            optimizer={"type": "AdamW", "params": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
            scheduler={
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 0,
                    "warmup_max_lr": 1e-4,
                    "warmup_num_steps": 100,
                    "warmup_type": "linear",
                    "total_num_steps": 1000,
                },
            },
        ),
        {
            "optimizer.params.lr": None,
            "scheduler.params.warmup_type": "linear",
            "optimizer.params.betas": [0.9, 0.95],
        },
    ),
    "W18": Case(
        template(
            zero3(stage3_prefetch_bucket_size=2123366, offload_optimizer=NONE, offload_param=NONE),
            fp16={"enabled": True, "initial_scale_power": 64},
            bf16=None,
            scheduler={
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 100, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1},
            },
        ),
        {"fp16.initial_scale_power": 64, "scheduler.params.cos_min_ratio": 0.1},
    ),
    "W19": Case(
        template(zero3(reduce_scatter=True, offload_optimizer=NONE, offload_param=NONE)),
        {f"{OPTIMIZER}.device": "none"},
        ("zero_optimization.reduce_scatter: has no effect",),
    ),
    "W20": Case(template(stage2()), {"zero_optimization.stage": 2, f"{OPTIMIZER}.device": "none"}),
    "W21": Case(
        template(
            zero3(stage3_gather_16bit_weights_on_model_save=False, offload_optimizer=CPU, offload_param=CPU)
        ),
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save": False},
    ),
    "W22": Case(
        template(zero3(offload_optimizer=NONE, offload_param=NONE), train_batch_size=32),
        {"train_batch_size": 32, "gradient_accumulation_steps": None},
    ),
    "W23": Case(
        template(stage2(stage3_gather_16bit_weights_on_model_save=True)),
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
    ),
    "W24": Case(
        template(
            zero3(offload_optimizer=CPU, offload_param=CPU),
            fp16={"enabled": False},
            bf16={"enabled": True},
            tensorboard={"enabled": True, "output_path": "$HOME/logs"},
        ),
        {"bf16.enabled": True},
        ("tensorboard: has no effect",),
    ),
}
