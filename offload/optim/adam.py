"""Adam and AdamW over the planes of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..placement import MOMENTS, StateFormat, WeightFormat
from . import kernels
from .segments import Segment, Span
from .shard import MasterPlanes, PlaneSpec

__all__ = ["Adam", "AdamPlanes"]


class AdamPlanes(MasterPlanes):
    """The planes of Adam and AdamW, wherever they are updated.

    ``state_format`` says how the moments are stored, and how many bytes of state a parameter has:

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

    moments = MOMENTS["adam"]

    def __init__(
        self,
        *,
        weight_format: WeightFormat = "bf16",
        state_format: StateFormat = "fp32",
        adamw_mode: bool = True,
    ) -> None:
        super().__init__(weight_format=weight_format, state_format=state_format)
        if state_format == "int8" and weight_format == "fp32":
            raise ConfigError("state_format 'int8' needs weight_format 'bf16'; fp32 weights take 'bf16'")
        self.adamw_mode = adamw_mode

    @property
    def type(self) -> str:
        return "AdamW" if self.adamw_mode else "Adam"

    def state_specs(self, numel: int) -> tuple[PlaneSpec, ...]:
        specs = super().state_specs(numel)
        if self.state_format != "int8":
            return specs
        return (*specs, PlaneSpec("scale", torch.float32, 2 * -(-numel // kernels.STATE_BLOCK)))

    def segment(self, span: Span, group: Mapping[str, Any]) -> Segment:
        beta1, beta2 = group["betas"]
        return Segment(
            span.begin,
            span.end,
            span.step,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            element=span.element,
        )


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
