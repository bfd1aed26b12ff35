"""What an optimizer is to the engine: the mathematics over the planes of a chunk, not where they live or move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import ConfigError
from ..placement import StateFormat, WeightFormat
from .segments import Span

__all__ = ["MasterPlanes", "PlaneSpec", "ShardOptimizer"]

_MOMENT_TYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.int8, torch.uint8),
}


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
    saves_step: ClassVar[bool] = True
    """Whether torch's optimizer of the same name keeps the number of steps in its state."""

    @property
    def type(self) -> str:
        """Its name in a configuration: it has to be the same to go on from saved state."""
        return type(self).__name__

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """Names of the planes that hold moments: those of torch's state."""

    @abstractmethod
    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        """The planes beside ``weight`` for ``numel`` parameters, in the order in which they are stored."""

    @abstractmethod
    def init_state(self, planes: Mapping[str, torch.Tensor], master: torch.Tensor | None = None) -> None:
        """Set all planes to their state before the first step.

        The weights are those of the fp32 ``master``; without one, those that the weight plane holds.
        """

    @abstractmethod
    def segment(self, span: Span, group: Mapping[str, Any]) -> Span:
        """The elements of a span with the numbers of a parameter group, whose keys are torch's."""

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The moments that the parameters of a group have: all but those that its numbers switch off."""
        return self.moments

    def first_moments(self, group: Mapping[str, Any]) -> dict[str, float]:
        """What moments are before step 1, where that is not zero. The planes hold zeros all the same until then."""
        return {}

    @abstractmethod
    def update(
        self,
        planes: Mapping[str, torch.Tensor],
        segments: Sequence[Any],
        grad: torch.Tensor,
        grad_scale: float = 1.0,
    ) -> None:
        """One step, in place, on the elements that ``segments`` name; no other element changes.

        Args:
            segments: made by :meth:`segment`, ascending, without overlap.
        """


class MasterPlanes(ShardOptimizer):
    """The planes of a master and its moments.

    With ``weight_format="bf16"`` the model computes with the weight plane itself, and a residual plane holds what is
    left of the fp32 master; with ``"fp32"`` the weight is the master.
    """

    state_formats: ClassVar[tuple[StateFormat, ...]] = ("fp32",)

    def __init__(self, *, weight_format: WeightFormat = "bf16", state_format: StateFormat = "fp32") -> None:
        if weight_format not in ("bf16", "fp32"):
            raise ConfigError(f"weight_format must be 'bf16' or 'fp32', got {weight_format!r}")
        if state_format not in self.state_formats:
            known = " or ".join(repr(known) for known in self.state_formats)
            raise ConfigError(f"state_format of {type(self).__name__} must be {known}, got {state_format!r}")
        self.weight_dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
        self.state_format: StateFormat = state_format

    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        moments = zip(self.moments, _MOMENT_TYPES[self.state_format], strict=False)
        specs = [PlaneSpec(name, dtype, numel) for name, dtype in moments]
        if self.weight_dtype == torch.bfloat16:
            specs.insert(0, PlaneSpec("residual", self._residual_dtype(), numel))
        return tuple(specs)

    def _residual_dtype(self) -> torch.dtype:
        return torch.int8 if self.state_format == "int8" else torch.int16

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
