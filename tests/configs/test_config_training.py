"""What is trained: precision, clipping, optimizer, schedule, and when the update may run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.config import OffloadConfig
from offload.config.training import OneCycle, WarmupDecayLR, WarmupLR
from offload.errors import ConfigError


def read(**data: Any) -> OffloadConfig:
    return OffloadConfig.from_dict(data)


def refusal(**data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("bf16", "fp16", "wanted"),
    [
        (True, False, "bf16"),
        (False, True, "fp16"),
        (False, False, "fp32"),
        (None, None, "fp32"),
        ("auto", "auto", "fp32"),
        ("auto", True, "fp16"),
        (True, "auto", "bf16"),
        ("true", "False", "bf16"),
    ],
)
def test_g12_precision(bf16: object, fp16: object, wanted: str):
    assert read(bf16={"enabled": bf16}, fp16={"enabled": fp16}).precision == wanted


def test_g12_both_on():
    assert refusal(bf16={"enabled": True}, fp16={"enabled": True}) == (
        "bf16.enabled: bf16 and fp16 are both on; keep one"
    )


def test_precision_in_old_forms():
    assert read(bf16=True).precision == "bf16"
    assert read(bfloat16={"enabled": True}).precision == "bf16"
    assert "contradicts bf16" in refusal(bfloat16={"enabled": True}, bf16={"enabled": False})
    assert read().precision == "fp32"


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, None), (0, None), (0.0, None), ("auto", None), (1, 1.0), ("0.5", 0.5)]
)
def test_clipping_is_off_unless_written(value: object, wanted: float | None):
    assert read(gradient_clipping=value).gradient_clipping == wanted
    assert read().gradient_clipping is None


def test_clipping_refused():
    assert refusal(gradient_clipping=-1) == "gradient_clipping: -1.0 is below 0; write 0 or more"


@pytest.mark.parametrize(
    ("written", "params", "wanted"),
    [
        ("AdamW", {}, "AdamW"),
        ("adamw", {}, "AdamW"),
        ("Adam", {}, "AdamW"),
        ("Adam", {"adam_w_mode": True}, "AdamW"),
        ("Adam", {"adam_w_mode": "auto"}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
        ("adam", {"adamw_mode": False}, "Adam"),
        ("DeepSpeedCPUAdam", {}, "AdamW"),
        ("DeepSpeedCPUAdam", {"adamw_mode": False}, "Adam"),
        ("FusedAdam", {"adam_w_mode": False}, "Adam"),
        ("Lion", {"betas": [0.9, 0.99]}, "Lion"),
        ("FusedLion", {}, "Lion"),
        ("DeepSpeedCPULion", {}, "Lion"),
        ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.3}, "Adagrad"),
        ("DeepSpeedCPUAdagrad", {}, "Adagrad"),
        ("SGD", {"momentum": 0.9, "nesterov": True}, "SGD"),
        ("torch.optim.SGD", {}, "SGD"),
    ],
)
def test_optimizer_names(written: str, params: dict[str, Any], wanted: str):
    config = read(optimizer={"type": written, "params": params})
    assert config.optimizer is not None and config.optimizer.type == wanted
    assert config.optimizer.decoupled is (wanted == "AdamW")
    assert OffloadConfig.from_dict(config.to_dict()) == config
    is_renamed = written.lower() != wanted.lower()
    assert any(note.startswith("optimizer.type: ") for note in config.notes) is is_renamed


@pytest.mark.parametrize(
    "written", ["Lamb", "OneBitAdam", "ZeroOneAdam", "Muon", "MuAdam", "MuSGD", "Adafactor"]
)
def test_other_optimizers_are_refused_by_name(written: str):
    assert refusal(optimizer={"type": written, "params": {"lr": 1}}) == (
        f'optimizer.type: "{written}" is not available; write one of Adam, AdamW, Lion, Adagrad, SGD'
    )


def test_optimizer_refused():
    assert refusal(optimizer={}) == (
        "optimizer.type: is missing; write one of Adam, AdamW, Lion, Adagrad, SGD"
    )
    assert refusal(optimizer={"type": "auto"}).startswith('optimizer.type: "auto" is not available')
    assert "contradicts" in refusal(optimizer={"type": "AdamW", "params": {"adam_w_mode": False}})
    text = refusal(optimizer={"type": "AdamW", "params": {"betas": [0.9], "lr": -1, "momentum": 0.9}})
    assert text.splitlines() == [
        "optimizer.params.momentum: is a setting of SGD, not of AdamW; AdamW takes lr, weight_decay, betas, eps, "
        "adam_w_mode",
        "optimizer.params.lr: -1.0 is below 0; write 0 or more",
        "optimizer.params.betas: [0.9] is not a pair; write [0.9, 0.999]",
    ]


def test_optimizer_defaults():
    """As DeepSpeed's own optimizers; in particular no weight decay that the file does not name."""
    auto = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    for absent in ({}, auto, None):
        config = read(optimizer={"type": "AdamW", "params": absent})
        assert config.optimizer is not None and config.optimizer.params.lr is None
        numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        assert config.optimizer.defaults() == numbers
    given = read(
        optimizer={"type": "AdamW", "params": {"lr": "3e-4", "betas": ["0.8", 0.9], "weight_decay": 0.1}}
    )
    assert given.optimizer is not None
    numbers = {"lr": 3e-4, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    assert given.optimizer.defaults() == numbers


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        ("Lion", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        (
            "Adagrad",
            {
                "lr": 0.01,
                "lr_decay": 0.0,
                "eps": 1e-10,
                "weight_decay": 0.0,
                "initial_accumulator_value": 0.0,
            },
        ),
        ("SGD", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}),
    ],
)
def test_defaults_are_torchs_or_those_of_deepspeeds_lion(written: str, numbers: dict[str, Any]):
    config = read(optimizer={"type": written})
    assert config.optimizer is not None and config.optimizer.defaults() == numbers
    kind = getattr(torch.optim, written, None)
    if kind is not None:
        assert numbers.items() <= kind([torch.zeros(1)]).defaults.items()


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (
            {"type": "Lion", "params": {"eps": 1e-8}},
            "params.eps: is a setting of Adam, AdamW, Adagrad, not of Lion",
        ),
        (
            {"type": "SGD", "params": {"betas": [0.9, 0.9]}},
            "params.betas: is a setting of Adam, AdamW, Lion, not of SGD",
        ),
        ({"type": "SGD", "params": {"momentum": -1}}, "params.momentum: -1.0 is below 0"),
        ({"type": "Adagrad", "params": {"lr_decay": "fast"}}, "params.lr_decay"),
    ],
)
def test_a_number_of_another_rule_is_refused(params: dict[str, Any], problem: str):
    assert f"optimizer.{problem}" in refusal(optimizer=params)


def test_eight_bits_are_for_adam():
    zero = {"offload_optimizer": {"device": "cpu", "state_format": "int8"}}
    for name in ("Lion", "Adagrad", "SGD"):
        text = refusal(bf16={"enabled": True}, optimizer={"type": name}, zero_optimization=zero)
        assert text == (
            'zero_optimization.offload_optimizer.state_format: "int8" is for Adam and AdamW, and the optimizer is'
            f' {name}; write "bf16"'
        )
    zero["offload_optimizer"]["state_format"] = "bf16"
    (note,) = [
        n for n in read(optimizer={"type": "SGD"}, zero_optimization=zero).notes if "state_format" in n
    ]
    assert "has an effect only where a parameter group has momentum" in note


def test_n22_the_schedule_without_a_maximum_rises_to_the_optimizers_rate():
    config = read(
        optimizer={"type": "AdamW", "params": {"lr": 5e-7}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    )
    assert config.scheduler is not None and config.scheduler.params == WarmupLR(warmup_num_steps=1)
    assert config.scheduler.params.warmup_max_lr is None
    assert any("rises to the optimizer's learning rate" in note for note in config.notes)


def test_schedules():
    config = read(scheduler={"type": "warmupdecaylr", "params": {"total_num_steps": "auto"}})
    assert config.scheduler is not None and config.scheduler.params == WarmupDecayLR()
    assert config.scheduler.type == "WarmupDecayLR"
    assert (
        "scheduler.params.total_num_steps: is not given; the program that trains has to say it"
        in config.notes
    )
    cycle = read(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}})
    assert cycle.scheduler is not None
    assert cycle.scheduler.params == OneCycle(cycle_min_lr=1e-5, cycle_max_lr=1e-3)
    for each in (config, cycle, read(scheduler={"type": "LRRangeTest"})):
        assert OffloadConfig.from_dict(each.to_dict()) == each


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            {},
            "scheduler.type: is missing; write one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, "
            "LRRangeTest",
        ),
        ({"type": "Cosine"}, 'scheduler.type: "Cosine" is not one of "WarmupLR", '),
        (
            {"type": "OneCycle"},
            (
                "scheduler.params.cycle_min_lr: is missing; write a number\n"
                "scheduler.params.cycle_max_lr: is missing; write a number"
            ),
        ),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 1}},
            'scheduler.params.cycle_min_lr: "auto" is not filled in by anything; write a number',
        ),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 5}},
            "scheduler.params.total_num_steps: is a setting of WarmupDecayLR, WarmupCosineLR, not of Warm",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 5}},
            'scheduler.params.warmup_steps: is not a setting; did you mean "warmup_num_steps"?',
        ),
        ({"type": "WarmupLR", "parms": {}}, 'scheduler.parms: is not a setting; did you mean "params"?'),
        ({"type": "WarmupLR", "params": 5}, "scheduler.params: 5 stands where a block is expected"),
        ("WarmupLR", 'scheduler: "WarmupLR" stands where a block is expected'),
    ],
)
def test_schedules_refused(scheduler: object, message: str):
    text = refusal(scheduler=scheduler)
    assert text.startswith(message) and text.count("\n") == message.count("\n")


@pytest.mark.parametrize(
    ("other", "because"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping needs its norm"),
        ({"fp16": {"enabled": True}}, "fp16 needs to see every overflow"),
        ({"gradient_accumulation_steps": 2}, "2 micro-batches are added up"),
    ],
)
def test_updating_in_backward_needs_nothing_of_the_whole_gradient(other: dict[str, Any], because: str):
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "update": "backward"}}
    text = refusal(zero_optimization=zero, **other)
    assert (
        text.startswith('zero_optimization.offload_optimizer.update: "backward" updates before')
        and because in text
    )
    for update in ("auto", "step", "deferred"):
        read(
            zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu", "update": update}}, **other
        )
    assert read(zero_optimization=zero, gradient_accumulation_steps=1, gradient_clipping=0).notes == ()


def test_accumulation_types():
    for written, wanted in (
        ("bfp16", "bf16"),
        ("fp32", "fp32"),
        ("float16", "fp16"),
        (None, None),
        ("auto", None),
    ):
        assert read(data_types={"grad_accum_dtype": written}).data_types.grad_accum_dtype == wanted
    assert "is not one of" in refusal(data_types={"grad_accum_dtype": "int8"})
