"""Optimizers over the planes of one shard: the mathematics, not where the planes live or when they move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import ConfigError
from . import kernels
from .kernels import Segment

WeightFormat = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One plane of optimizer state: a flat array of ``numel`` elements."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class ShardOptimizer(ABC):
    """What an optimizer is to the engine.

    ``planes`` maps ``"weight"`` and the name of every plane in :meth:`state_specs` to a flat tensor of the
    same chunk; the caller owns them. Nothing is remembered between calls: chunks may come in any order.
    """

    weight_dtype: torch.dtype
    """Element type of the weight plane."""

    @abstractmethod
    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        """The planes beside ``weight`` for ``numel`` parameters, in the order in which they are stored."""

    @abstractmethod
    def init_state(self, planes: Mapping[str, torch.Tensor], master: torch.Tensor | None = None) -> None:
        """Set all planes to their state before the first step.

        The weights are those of the fp32 ``master``; without one, those that the weight plane holds.
        """

    @abstractmethod
    def update(
        self,
        planes: Mapping[str, torch.Tensor],
        segments: Sequence[Segment],
        grad: torch.Tensor,
        grad_scale: float = 1.0,
    ) -> None:
        """One step, in place, on the elements that ``segments`` name; no other element changes."""


class AdamPlanes(ShardOptimizer):
    """The planes of Adam and AdamW with fp32 moments, wherever they are updated.

    With ``weight_format="bf16"`` the fp32 master is stored as the weight and a 16-bit residual: 10 bytes of
    state per parameter, and the model computes with the weight plane itself. With ``"fp32"`` the weight is
    the master: 8 bytes.
    """

    def __init__(self, *, weight_format: WeightFormat = "bf16", adamw_mode: bool = True) -> None:
        if weight_format not in ("bf16", "fp32"):
            raise ConfigError(f"weight_format must be 'bf16' or 'fp32', got {weight_format!r}")
        self.weight_dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
        self.adamw_mode = adamw_mode

    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        moments = tuple(PlaneSpec(name, torch.float32, numel) for name in ("exp_avg", "exp_avg_sq"))
        if self.weight_dtype == torch.float32:
            return moments
        return (PlaneSpec("residual", torch.int16, numel), *moments)

    def init_state(self, planes: Mapping[str, torch.Tensor], master: torch.Tensor | None = None) -> None:
        for spec in self.state_specs(planes["weight"].numel()):
            planes[spec.name].zero_()
        if master is None:
            return
        if self.weight_dtype == torch.float32:
            planes["weight"].copy_(master)
        else:
            self._split_master(master, planes["weight"], planes["residual"])

    @abstractmethod
    def _split_master(self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        """Write the fp32 ``master`` as its two planes."""


class Adam(AdamPlanes):
    """Adam and AdamW on the CPU: one fused pass of the C++ kernel."""

    def __init__(
        self, *, weight_format: WeightFormat = "bf16", adamw_mode: bool = True, threads: int | None = None
    ) -> None:
        super().__init__(weight_format=weight_format, adamw_mode=adamw_mode)
        self.threads = threads

    def _split_master(self, master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
        kernels.split_master(master, weight, residual, threads=self.threads)

    def update(
        self,
        planes: Mapping[str, torch.Tensor],
        segments: Sequence[Segment],
        grad: torch.Tensor,
        grad_scale: float = 1.0,
    ) -> None:
        kernels.adam_segments(
            planes["weight"],
            planes["residual"] if self.weight_dtype == torch.bfloat16 else None,
            planes["exp_avg"],
            planes["exp_avg_sq"],
            grad,
            segments,
            adamw_mode=self.adamw_mode,
            grad_scale=grad_scale,
            threads=self.threads,
        )
