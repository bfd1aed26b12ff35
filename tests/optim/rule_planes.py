"""Planes and calls for the tests of Lion, Adagrad and SGD, and the same step written in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lion import Lion
from planes import guarded, guards_intact, same_bits

from offload.optim import kernels, rule_kernels
from offload.optim.segments import AdagradSegment, LionSegment, SgdSegment, Span

KINDS = {
    "lion": (LionSegment, {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "adagrad": (
        AdagradSegment,
        {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-8, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
    "momentum": (
        SgdSegment,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False},
    ),
    "nesterov": (
        SgdSegment,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True},
    ),
    "sgd": (
        SgdSegment,
        {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False},
    ),
}
FORMATS = (
    *("bf16/fp32/bf16", "bf16/fp32/fp16", "bf16/fp32/fp32", "fp32/fp32/fp16", "fp32/fp32/fp32"),
    *("bf16/bf16/bf16", "bf16/bf16/fp16", "bf16/bf16/fp32", "fp32/bf16/fp16", "fp32/bf16/fp32"),
)
"""Of weight, moment and gradient."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def segment(kind: str, begin: int, end: int, step: int, element: int = 0, **changed: object) -> Span:
    make, numbers = KINDS[kind]
    return make(begin, end, step, element=element, **{**numbers, **changed})


@dataclass
class RulePlanes:
    kind: str
    weight: torch.Tensor
    residual: torch.Tensor | None
    moment: torch.Tensor | None

    @classmethod
    def midway(cls, kind: str, numel: int, format_: str, seed: int = 0) -> RulePlanes:
        """As after some steps: nothing is zero, a sum is not negative."""
        weight_format, moment_format, _ = format_.split("/")
        generator = torch.Generator().manual_seed(seed)
        master, moment = (torch.randn(numel, generator=generator) for _ in range(2))
        if kind == "adagrad":
            moment = moment.square()
        return cls.of(kind, master, (moment * 0.1).to(TYPES[moment_format]), weight_format)

    @classmethod
    def of(cls, kind: str, master: torch.Tensor, moment: torch.Tensor, weight_format: str) -> RulePlanes:
        kept = None if kind == "sgd" else guarded(moment)
        if weight_format == "fp32":
            return cls(kind, guarded(master), None, kept)
        weight = guarded(torch.zeros(master.numel(), dtype=torch.bfloat16))
        residual = guarded(torch.zeros(master.numel(), dtype=torch.int16))
        kernels.split_master(master, weight, residual)
        return cls(kind, weight, residual, kept)

    def all(self) -> dict[str, torch.Tensor]:
        planes = {"weight": self.weight, "residual": self.residual, "moment": self.moment}
        return {name: plane for name, plane in planes.items() if plane is not None}

    def clone(self) -> RulePlanes:
        copies = {name: guarded(plane) for name, plane in self.all().items()}
        return RulePlanes(self.kind, **{"residual": None, "moment": None, **copies})

    def part(self, begin: int, end: int) -> RulePlanes:
        views = {name: plane[begin:end] for name, plane in self.all().items()}
        return RulePlanes(self.kind, **{"residual": None, "moment": None, **views})

    def master(self) -> torch.Tensor:
        if self.residual is None:
            return self.weight.clone()
        master = torch.empty(self.weight.numel())
        kernels.join_master(self.weight, self.residual, master)
        return master

    def step(self, grad: torch.Tensor, step: int, element: int = 0, **changed: object) -> None:
        numbers = KINDS[self.kind][1].keys() & changed.keys()
        one = segment(
            self.kind, 0, grad.numel(), step, element, **{name: changed.pop(name) for name in numbers}
        )
        self.run(grad, [one], **changed)

    def run(self, grad: torch.Tensor, segments: list[Span], **options: object) -> None:
        run = {"lion": rule_kernels.lion_segments, "adagrad": rule_kernels.adagrad_segments}
        chosen = run.get(self.kind, rule_kernels.sgd_segments)
        chosen(self.weight, self.residual, self.moment, grad, segments, **options)

    def assert_same(self, other: RulePlanes) -> None:
        for name, plane in self.all().items():
            assert same_bits(plane, other.all()[name]), name

    def assert_guarded(self) -> None:
        assert all(guards_intact(plane) for plane in self.all().values())


def gradient(numel: int, format_: str, seed: int) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + seed))
    return guarded(values.to(TYPES[format_.split("/")[-1]]))


def torch_optimizer(
    kind: str, param: torch.Tensor, *, fused: bool = True, **changed: object
) -> torch.optim.Optimizer:
    """torch's own; ``fused`` is for Adagrad, whose unfused square root is not rounded correctly."""
    numbers = {**KINDS[kind][1], **changed}
    if kind == "lion":
        return Lion([param], numbers["lr"], (numbers["beta1"], numbers["beta2"]), numbers["weight_decay"])
    if kind == "adagrad":
        return torch.optim.Adagrad([param], **numbers, foreach=False, fused=fused)
    return torch.optim.SGD([param], **numbers, foreach=False)


MOMENT_NAMES = {
    "lion": "exp_avg",
    "adagrad": "sum",
    "momentum": "momentum_buffer",
    "nesterov": "momentum_buffer",
}
