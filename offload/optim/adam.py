"""Optimizers over the planes of one shard: the mathematics, not where the planes live or when they move."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ConfigError
from ..placement import StateFormat, WeightFormat
from . import kernels
from .kernels import Segment

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
    """The planes of Adam and AdamW, wherever they are updated.

    With ``weight_format="bf16"`` the model computes with the weight plane itself, and a residual plane holds what is
    left of the fp32 master; with ``"fp32"`` the weight is the master. ``state_format`` says how the moments are
    stored, and how many bytes of state a parameter has:

    =============  ====  ====  ====
    weight format  fp32  bf16  int8
    =============  ====  ====  ====
    bf16           10    6     3.06
    fp32           8     4     -
    =============  ====  ====  ====

    - ``"fp32"``: exactly.
    - ``"bf16"``: rounded stochastically, because rounded to nearest a moment that changes by less than half a unit
      per step would stand still (Zamirai et al. 2020, "Revisiting BFloat16 Training"; torchao's low-bit optimizers
      round the weight like this).
    - ``"int8"``: 8-bit codes with scales per block of 128 elements (blocks: Dettmers et al. 2022, "8-bit Optimizers
      via Block-wise Quantization"). The codes are companded as in ITU-T G.711, and of exp_avg_sq the root is coded,
      as in FlashOptim: relative precision over a wide range without the table of bitsandbytes. The residual is
      8 bits, in parts of the weight's last place (FlashOptim), rounded stochastically. See
      ``aio_csrc/optim/moments.h``.
    """

    state_formats: ClassVar[tuple[StateFormat, ...]] = ("fp32",)

    def __init__(
        self,
        *,
        weight_format: WeightFormat = "bf16",
        state_format: StateFormat = "fp32",
        adamw_mode: bool = True,
    ) -> None:
        if weight_format not in ("bf16", "fp32"):
            raise ConfigError(f"weight_format must be 'bf16' or 'fp32', got {weight_format!r}")
        if state_format not in self.state_formats:
            known = " or ".join(repr(known) for known in self.state_formats)
            raise ConfigError(f"state_format of {type(self).__name__} must be {known}, got {state_format!r}")
        if state_format == "int8" and weight_format == "fp32":
            raise ConfigError("state_format 'int8' needs weight_format 'bf16'; fp32 weights take 'bf16'")
        self.weight_dtype = torch.bfloat16 if weight_format == "bf16" else torch.float32
        self.state_format: StateFormat = state_format
        self.adamw_mode = adamw_mode

    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        names = ("exp_avg", "exp_avg_sq")
        moments = zip(names, _MOMENT_TYPES[self.state_format], strict=True)
        specs = [PlaneSpec(name, dtype, numel) for name, dtype in moments]
        if self.weight_dtype == torch.bfloat16:
            specs.insert(0, PlaneSpec("residual", self._residual_dtype(), numel))
        if self.state_format == "int8":
            specs.append(PlaneSpec("scale", torch.float32, 2 * -(-numel // kernels.STATE_BLOCK)))
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


class Adam(AdamPlanes):
    """Adam and AdamW on the CPU: one fused pass of the C++ kernel. ``seed`` is that of stochastic rounding."""

    state_formats = ("fp32", "bf16", "int8")

    def __init__(
        self,
        *,
        weight_format: WeightFormat = "bf16",
        state_format: StateFormat = "fp32",
        adamw_mode: bool = True,
        threads: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(weight_format=weight_format, state_format=state_format, adamw_mode=adamw_mode)
        self.threads = threads
        self.seed = seed

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
            scale=planes["scale"] if self.state_format == "int8" else None,
            adamw_mode=self.adamw_mode,
            grad_scale=grad_scale,
            seed=self.seed,
            threads=self.threads,
        )
