"""Planes of every state format for the kernel tests: torch tensors, guarded, and the same as numpy for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from planes import HYPER, guarded, guards_intact, same_bits
from state_format_oracle import State

from offload.optim import kernels
from offload.optim.kernels import Segment

# weight/state/gradient
FORMATS = (
    "bf16/fp32/bf16",
    "bf16/bf16/bf16",
    "bf16/bf16/fp32",
    "bf16/int8/bf16",
    "bf16/int8/fp32",
    "fp32/bf16/fp32",
)
MOMENT_TYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


@dataclass
class StatePlanes:
    weight: torch.Tensor
    residual: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scale: torch.Tensor | None

    @classmethod
    def of(cls, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, format_: str) -> StatePlanes:
        """The planes that hold these values, rounded to nearest."""
        weight_format, state_format = format_.split("/")[:2]
        numel = master.numel()
        exp_avg, exp_avg_sq = (guarded(torch.zeros(numel, dtype=t)) for t in MOMENT_TYPES[state_format])
        scale = None
        if state_format == "int8":
            scale = guarded(torch.zeros(2 * -(-numel // kernels.STATE_BLOCK)))
        if state_format == "fp32":
            exp_avg.copy_(m)
            exp_avg_sq.copy_(v)
        else:
            kernels.encode_moments(m, v, exp_avg, exp_avg_sq, scale)
        if weight_format == "fp32":
            return cls(guarded(master), None, exp_avg, exp_avg_sq, scale)
        weight = guarded(torch.zeros(numel, dtype=torch.bfloat16))
        residual = guarded(torch.zeros(numel, dtype=torch.int8 if state_format == "int8" else torch.int16))
        kernels.split_master(master, weight, residual)
        return cls(weight, residual, exp_avg, exp_avg_sq, scale)

    @classmethod
    def midway(cls, numel: int, format_: str, seed: int = 0) -> StatePlanes:
        """As after some steps: nothing is zero, exp_avg_sq is not negative."""
        generator = torch.Generator().manual_seed(seed)
        master, m, v = (torch.randn(numel, generator=generator) for _ in range(3))
        return cls.of(master, m * 0.1, v.square() * 0.01, format_)

    def all(self) -> dict[str, torch.Tensor]:
        planes = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: plane for name, plane in planes.items() if plane is not None}

    def clone(self) -> StatePlanes:
        copies = {name: guarded(plane) for name, plane in self.all().items()}
        return StatePlanes(**{"residual": None, "scale": None, **copies})

    def part(self, begin: int, end: int) -> StatePlanes:
        """Views of [begin, end); with int8 moments ``begin`` lies on a block."""
        views = {name: plane[begin:end] for name, plane in self.all().items()}
        if self.scale is not None:
            block = kernels.STATE_BLOCK
            views["scale"] = self.scale[begin // block * 2 : -(-end // block) * 2]
        return StatePlanes(**{"residual": None, "scale": None, **views})

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.exp_avg.dtype == torch.float32:
            return self.exp_avg.clone(), self.exp_avg_sq.clone()
        m, v = torch.empty(self.weight.numel()), torch.empty(self.weight.numel())
        kernels.decode_moments(self.exp_avg, self.exp_avg_sq, self.scale, m, v)
        return m, v

    def master(self) -> torch.Tensor:
        if self.residual is None:
            return self.weight.clone()
        master = torch.empty(self.weight.numel())
        kernels.join_master(self.weight, self.residual, master)
        return master

    def step(self, grad: torch.Tensor, step: int, element: int = 0, **changed: object) -> None:
        hyper = {name: changed.pop(name, value) for name, value in HYPER.items()}
        self.step_segments(grad, [Segment(0, grad.numel(), step, **hyper, element=element)], **changed)

    def step_segments(self, grad: torch.Tensor, segments: list[Segment], **options: object) -> None:
        kernels.adam_segments(
            self.weight,
            self.residual,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            segments,
            scale=self.scale,
            **options,
        )

    def to_oracle(self) -> State:
        arrays = {name: to_numpy(plane).copy() for name, plane in self.all().items()}
        return State(**{"residual": None, "scale": None, **arrays})

    def assert_same(self, other: StatePlanes) -> None:
        mine, others = self.all(), other.all()
        assert mine.keys() == others.keys()
        for name, plane in mine.items():
            assert same_bits(plane, others[name]), name

    def assert_equal_to_oracle(self, state: State) -> None:
        for name, plane in self.all().items():
            got, expected = to_numpy(plane), getattr(state, name)
            different = np.flatnonzero(got.view(f"u{got.itemsize}") != expected.view(f"u{got.itemsize}"))
            assert not different.size, (name, different[:5], got[different[:5]], expected[different[:5]])

    def assert_guarded(self) -> None:
        for name, plane in self.all().items():
            assert guards_intact(plane), name


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
