"""Public configurations embedded in programs, re-typed."""

from __future__ import annotations

from census_whole import AIO, CPU, OPTIMIZER, PARAM, Case, nvme, stage2, zero3

EMBEDDED: dict[str, Case] = {
    "E01": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 1,
                "reduce_bucket_size": 1,
                "offload_param": nvme("~/swap", buffer_count=12, buffer_size=1),
                "offload_optimizer": nvme("~/swap", buffer_count=12),
                "stage3_gather_fp16_weights_on_model_save": True,
            },
            "fp16": {"enabled": True, "loss_scale": 0.5},
        },
        {f"{PARAM}.nvme_path": "~/swap", f"{PARAM}.buffer_size": 1, "fp16.loss_scale": 0.5},
    ),
    "E02": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": nvme("/mnt/nvme/", ratio=1.0),
                "offload_param": nvme("/mnt/nvme/", buffer_size=3e9, max_in_cpu=0),
            },
            "fp16": {"enabled": True, "initial_scale_power": 34, "min_loss_scale": 1e-10},
        },
        {
            f"{OPTIMIZER}.nvme_path": "/mnt/nvme/",
            f"{PARAM}.max_in_cpu": 0,
            f"{PARAM}.buffer_size": 3_000_000_000,
            "fp16.min_loss_scale": 1e-10,
        },
    ),
    "E03": Case(
        {"zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_parameters": CPU}},
        refused=('zero_optimization.offload_parameters: is not a setting; did you mean "offload_param"?',),
    ),
    "E04": Case(
        {
            "zero_optimization": zero3(
                offload_param=nvme(),
                stage3_max_live_parameters="auto",
                stage3_max_reuse_distance="auto",
            )
        },
        {f"{PARAM}.device": "nvme", f"{OPTIMIZER}.device": "none"},
        ('stage3_max_live_parameters: "auto"',),
    ),
    "E05": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "nvme_path": None, "buffer_count": 5, "buffer_size": 1e8},
                "offload_optimizer": {"device": "none", "pipeline_read": True, "buffer_count": 4},
                "memory_efficient_linear": False,
            },
            "moe": {"enabled": True},
        },
        {f"{PARAM}.device": "cpu", f"{PARAM}.nvme_path": None},
        (
            "memory_efficient_linear: has no effect",
            "moe: has no effect",
            f'{PARAM}: the device is "cpu", so buffer_count and buffer_size have no effect',
        ),
    ),
    "E07": Case(
        {
            "bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pipeline_read": True, "pipeline_write": True},
            },
            "data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}},
        },
        {"bf16.enabled": True},
        (
            "bf16.loss_scale: has no effect here; bfloat16 needs no",
            "data_efficiency: ",
            "pipeline_read: has no",
        ),
    ),
    "E08": Case(
        {
            "zero_optimization": stage2(cpu_offload=True, cpu_offload_params=True),
            "fp16": {"enabled": True, "opt_level": "O2"},
        },
        refused=(f"{PARAM}: needs stage 3, and the stage is 2",),
    ),
    "E09": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_params": True,
                "cpu_offload_use_pin_memory": False,
            },
            "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1}},
        },
        {
            f"{PARAM}.device": "cpu",
            f"{OPTIMIZER}.device": "cpu",
            f"{PARAM}.pin_memory": False,
            f"{OPTIMIZER}.pin_memory": False,
            "scheduler.params.last_batch_iteration": -1,
        },
        (f"cpu_offload_use_pin_memory: is an old form; read as {PARAM}.pin_memory",),
    ),
    "E10": Case(
        {
            "zero_optimization": zero3(
                sub_group_size="auto",
                stage3_max_live_parameters="auto",
                stage3_max_reuse_distance="auto",
                offload_param=CPU,
                offload_optimizer=CPU,
            ),
            "steps_per_print": 1e12,
        },
        {"steps_per_print": 10**12, "zero_optimization.sub_group_size": None},
        ('zero_optimization.sub_group_size: "auto" is taken as absent; the memory plan decides',),
    ),
    "E11": Case(
        {
            "zero_optimization": zero3(
                stage3_prefetch_bucket_size=0,
                stage3_max_live_parameters=0,
                stage3_max_reuse_distance=0,
                zero_hpz_partition_size=1,
                zero_quantized_weights=False,
                zero_quantized_gradients=False,
            ),
            "data_types": {"grad_accum_dtype": None},
        },
        {"zero_optimization.stage3_prefetch_bucket_size": 0, "data_types.grad_accum_dtype": None},
        ("zero_hpz_partition_size: has no effect", "zero_quantized_weights: false has no effect"),
    ),
    "E13": Case(
        {"zero_optimization": {"stage": 2, "offload_optimizer": True}, "optimizer": {"type": "OneBitAdam"}},
        refused=(
            'optimizer.type: "OneBitAdam" is not available; write one of Adam, AdamW, Lion, Adagrad, SGD',
        ),
    ),
    "E14": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": CPU,
                "reduce_bucket_size": 512 * 512,
                "stage3_prefetch_bucket_size": 0.1 * 512 * 512,
            },
            "aio": AIO,
        },
        {"zero_optimization.stage3_prefetch_bucket_size": 26214},
        ("stage3_prefetch_bucket_size: 26214.4 is taken as 26214", "aio: has no effect; no device is nvme"),
    ),
    "E15": Case(
        {
            "zero_optimization": {"stage": 3, "offload_optimizer": nvme()},
            "aio": {"block_size": 1048576, "num_threads": 8, "use_gds": True},
        },
        {"aio.thread_count": 8},
        ("aio.num_threads: is an old or other name; read as aio.thread_count", "aio.use_gds: has no effect"),
    ),
    "E16": Case(
        {
            "zero_optimization": zero3(
                sub_group_size=1_000_000_000, offload_optimizer=nvme(), offload_param=nvme()
            )
        },
        {"zero_optimization.sub_group_size": 10**9},
    ),
    "E17": Case(
        {
            "zero_optimization": {"stage": 1, "allgather_partitions": True, "reduce_scatter": True},
            "aio": AIO,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
        },
        {"zero_optimization.stage": 1},
        ("zero_force_ds_cpu_optimizer: has no effect", "aio: has no effect"),
    ),
    "E18": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": CPU,
                "offload_param": CPU,
                "memory_efficient_linear": False,
            },
            "aio": {"verbose": True, "queue_depth": 8},
        },
        {"aio.queue_depth": 8},
        ("aio.verbose: has no effect",),
    ),
    "E19": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "cpu",
                    "ratio": 0.9,
                    "super_offload": True,
                    "cpuadam_cores_perc": 0.9,
                },
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "train_batch_size": "$BATCH",
        },
        refused=('train_batch_size: "$BATCH" holds a shell variable that nothing filled in',),
    ),
    "E20": Case(
        '{"gradient_clipping": 1,\n "zero_optimization": {"stage": ${STAGE}}}',
        refused=("configuration: line 2, column 33: ${STAGE} is a shell variable",),
    ),
    "E21": Case(
        {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero3(
                stage3_prefetch_bucket_size=0.94e6, offload_param=CPU, offload_optimizer={"device": "none"}
            ),
        },
        {
            "zero_optimization.stage3_prefetch_bucket_size": 940000,
            f"{PARAM}.device": "cpu",
            f"{OPTIMIZER}.device": "none",
        },
    ),
    "E22": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": CPU,
                "offload_optimizer": CPU,
                "stage3_gather_fp16_weights_on_model_save": True,
            }
        },
        {"zero_optimization.stage3_gather_16bit_weights_on_model_save": True},
    ),
    "E23": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/mnt/nvme"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme"},
                "stage3_max_live_parameters": 3e9,
            }
        },
        {f"{PARAM}.nvme_path": "/mnt/nvme", "aio.queue_depth": "auto"},
    ),
    "E24": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": nvme(),
                "offload_param": {"device": "cpu", "nvme_path": "/hello", "max_in_cpu": 2},
            }
        },
        {f"{PARAM}.device": "cpu", f"{OPTIMIZER}.device": "nvme"},
        (f'{PARAM}: the device is "cpu", so nvme_path and max_in_cpu have no effect',),
    ),
    "E25": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {
                    "device": "cpu",
                    "nvme_path": None,
                    "buffer_count": None,
                    "buffer_size": None,
                },
            }
        },
        {f"{PARAM}.buffer_count": None},
    ),
    "E26": Case(
        {"zero_optimization": zero3(offload_optimizer=nvme("/tmp/swap"), offload_param=nvme("/tmp/swap"))},
        {f"{PARAM}.nvme_path": "/tmp/swap"},
    ),
    "E28": Case(
        {
            "zero_optimization": zero3(
                offload_param={"device": "cpu", "buffer_count": 5, "max_in_cpu": 1e9},
                offload_optimizer={"device": "cpu", "fast_init": True, "pipeline_write": True},
            ),
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
            "activation_checkpointing": {"number_checkpoints": None},
        },
        {"fp16.enabled": False, "bf16.enabled": False},
        ("activation_checkpointing: has no effect",),
    ),
    "E29": Case(
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
            "activation_checkpointing": {"number_checkpoints": False},
        },
        {f"{OPTIMIZER}.device": "cpu"},
        ("activation_checkpointing: has no effect",),
    ),
}
