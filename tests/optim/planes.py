"""Planes for the kernel tests: guarded, misaligned, seeded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_adam import FUSED_ADAM_IS_OURS

from offload.optim import kernels

NUMELS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 4097)
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
GUARD = 67  # elements on either side that no kernel may write; odd, so that views are misaligned
FORMATS = ("bf16/bf16", "bf16/fp32", "fp32/fp32")  # weight/gradient


where_fused_adam_is_ours = pytest.mark.skipif(
    not FUSED_ADAM_IS_OURS,
    reason="torch's fused Adam was compared with ours on AVX2 and AVX-512 only: it may round in other places",
)


def guarded(values: torch.Tensor) -> torch.Tensor:
    """A view of equal values inside a larger array, at an address aligned to nothing but its elements."""
    base = torch.empty(values.numel() + 2 * GUARD, dtype=values.dtype)
    base.view(torch.uint8).fill_(0xA5)
    inner = base[GUARD : GUARD + values.numel()]
    inner.copy_(values)
    return inner


def guards_intact(inner: torch.Tensor) -> bool:
    base = inner if inner._base is None else inner._base
    raw = torch.cat([base[:GUARD], base[GUARD + inner.numel() :]]).view(torch.uint8)
    return bool((raw == 0xA5).all())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass
class Planes:
    weight: torch.Tensor
    residual: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def start(cls, master: torch.Tensor, weight_format: str) -> Planes:
        numel = master.numel()
        zeros = torch.zeros(numel)
        if weight_format == "fp32":
            return cls(guarded(master), None, guarded(zeros), guarded(zeros))
        weight = guarded(torch.zeros(numel, dtype=torch.bfloat16))
        residual = guarded(torch.zeros(numel, dtype=torch.int16))
        kernels.split_master(master, weight, residual)
        return cls(weight, residual, guarded(zeros), guarded(zeros))

    @classmethod
    def midway(cls, numel: int, weight_format: str, seed: int = 0) -> Planes:
        """As after some steps: nothing is zero, exp_avg_sq is not negative."""
        generator = torch.Generator().manual_seed(seed)
        planes = cls.start(torch.randn(numel, generator=generator), weight_format)
        planes.exp_avg.copy_(torch.randn(numel, generator=generator) * 0.1)
        planes.exp_avg_sq.copy_(torch.randn(numel, generator=generator).square() * 0.01)
        return planes

    def all(self) -> list[torch.Tensor]:
        planes = [self.weight, self.exp_avg, self.exp_avg_sq]
        return planes if self.residual is None else [*planes, self.residual]

    def clone(self) -> Planes:
        residual = None if self.residual is None else guarded(self.residual)
        return Planes(guarded(self.weight), residual, guarded(self.exp_avg), guarded(self.exp_avg_sq))

    def master(self) -> torch.Tensor:
        if self.residual is None:
            return self.weight.clone()
        master = torch.empty(self.weight.numel())
        kernels.join_master(self.weight, self.residual, master)
        return master

    def step(self, grad: torch.Tensor, step: int, **changed: object) -> None:
        arguments = {**HYPER, **changed}
        kernels.adam(self.weight, self.residual, self.exp_avg, self.exp_avg_sq, grad, step=step, **arguments)

    def step_segments(self, grad: torch.Tensor, segments: list[kernels.Segment], **options: object) -> None:
        kernels.adam_segments(
            self.weight, self.residual, self.exp_avg, self.exp_avg_sq, grad, segments, **options
        )

    def assert_same(self, other: Planes) -> None:
        for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
            mine, others = getattr(self, name), getattr(other, name)
            assert (mine is None) == (others is None)
            assert mine is None or same_bits(mine, others), name

    def assert_guarded(self) -> None:
        assert all(guards_intact(plane) for plane in self.all())


def gradient(numel: int, grad_format: str, seed: int) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + seed))
    return guarded(values.bfloat16() if grad_format == "bf16" else values)
