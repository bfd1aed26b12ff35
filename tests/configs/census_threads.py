"""Public configurations quoted in threads, re-typed."""

from __future__ import annotations

from census_whole import AIO, CPU, OPTIMIZER, PARAM, Case, nvme, stage2, template, zero3

THREADS: dict[str, Case] = {
    "T01": Case(template(zero3(offload_optimizer=CPU, offload_param=CPU)), {f"{PARAM}.device": "cpu"}),
    "T02": Case(
        {"zero_optimization": {"stage": 3, "offload_optimizer": nvme(buffer_size=1e8), "offload_param": CPU}},
        refused=(f"{OPTIMIZER}.buffer_size: does not belong here; it belongs in {PARAM}",),
    ),
    "T03": Case(
        {
            "train_batch_size": 15,
            "zero_optimization": {
                "stage": 3,
                "offload_param": nvme("~/swap"),
                "offload_optimizer": nvme("~/swap"),
                "aio": AIO,
            },
            "fp16": {"enabled": True, "opt_level": "O2"},
        },
        {"aio.block_size": 262144, "train_batch_size": 15},
        ("zero_optimization.aio: belongs at the top level", "fp16.opt_level: has no effect"),
    ),
    "T04": Case(
        {
            "fp16": {"enabled": True, "loss_scale": 0.0, "initial_scale_power": 32},
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-5}},
            "zero_optimization": stage2(stage=3, offload_param=CPU, offload_optimizer=CPU),
        },
        {"fp16.loss_scale": 0.0, "fp16.initial_scale_power": 32},
        ("scheduler.params.warmup_max_lr: 1e-05 is the rate that counts, not optimizer.params.lr 3e-05",),
    ),
    "T05": Case(
        {"zero_optimization": {"stage": 3, "offload_optimizer": nvme(pipeline=True), "aio": AIO}},
        {"aio.thread_count": 1},
        (f"{OPTIMIZER}.pipeline: has no effect", "zero_optimization.aio: belongs at the top level"),
    ),
    "T06": Case(
        {"zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": nvme(ratio=0.3)}},
        refused=(f'{OPTIMIZER}.ratio: 0.3 is for the device "cpu"',),
    ),
    "T07": Case(
        """{"optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4,}},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"},
                                  "round_robin_gradients": true,},}""",
        {"optimizer.type": "AdamW", f"{OPTIMIZER}.device": "cpu", "zero_optimization.stage": 1},
        ('optimizer.type: "DeepSpeedCPUAdam" means AdamW',),
    ),
    "T08": Case(
        {
            "zero_optimization": {"stage": 2, "cpu_offload": True, "reduce_bucket_size": 5e8},
            "fp16": {"enabled": True, "loss_scale": 4096},
        },
        {"fp16.loss_scale": 4096.0, f"{OPTIMIZER}.device": "cpu"},
    ),
    "T09": Case(
        {
            "train_batch_size": None,
            "zero_optimization": {
                "stage": 3,
                "offload_param": CPU,
                "offload_optimizer": CPU,
                "param_persistence_threshold": 1e4,
                "max_live_parameters": 3e7,
                "prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
                "gather_16bit_weights_on_model_save": True,
            },
        },
        {
            "zero_optimization.stage3_param_persistence_threshold": 10000,
            "zero_optimization.stage3_max_live_parameters": 30_000_000,
            "zero_optimization.stage3_prefetch_bucket_size": 30_000_000,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
            "train_batch_size": None,
        },
    ),
    "T10": Case(
        """{
            "zero_optimization": {"stage": 2, "overlap_comm": true,},  # 零冗余优化器
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-7}},    // taux d'apprentissage, très bas
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1,}},
        }""",
        {"scheduler.params.warmup_max_lr": None, "optimizer.params.lr": 5e-7},
        ("scheduler.params.warmup_max_lr: is not given; the schedule rises to the optimizer's",),
    ),
    "T11": Case(
        """{"zero_optimization": {
              "offload_optimizer": {  # nested twice
                "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme"}}}}""",
        {f"{OPTIMIZER}.device": "cpu"},
        (
            f"{OPTIMIZER}.offload_optimizer: stands inside a block of the same name",
            f'{OPTIMIZER}.device: "cpu" is done as asked; DeepSpeed offloads nothing at stage 0',
            f'{OPTIMIZER}: the device is "cpu", so nvme_path',
        ),
    ),
    "T12": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 1e9,
                "sub_group_size": 1e9,
                "offload_optimizer": {"device": "cpu", "ratio": 0.9},
            }
        },
        {f"{OPTIMIZER}.ratio": 0.9},
    ),
    "T13": Case(
        {
            "zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU},
            "fp16": {"enabled": True, "auto_cast": True},
        },
        {"fp16.enabled": True},
        ("fp16.auto_cast: has no effect",),
    ),
    "T14": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "nvme_path": None},
                "offload_param": {"device": "cpu", "nvme_path": None},
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "steps_per_print": float("inf"),
        },
        {"steps_per_print": 0},
        ("steps_per_print: infinite means never",),
    ),
    "T15": Case(
        {"zero_optimization": zero3(offload_optimizer=nvme(), offload_param=nvme(), aio=AIO)},
        {"aio.queue_depth": 32},
        ("zero_optimization.aio: belongs at the top level",),
    ),
    "T16": Case({"zero_optimization": zero3(offload_optimizer=CPU)}, {f"{OPTIMIZER}.device": "cpu"}),
    "T17": Case(
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": nvme(),
                "reduce_bucket_size": 100 * 100,
                "stage3_prefetch_bucket_size": 0.9 * 101 * 101,
            },
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
        },
        {"zero_optimization.stage3_prefetch_bucket_size": 9180},
        ("stage3_prefetch_bucket_size: 9180.900000000001 is taken as 9180",),
    ),
    "T18": Case(
        '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}',
        refused=("configuration: line 1, column 1: the file starts with a key; put { in front",),
    ),
}
