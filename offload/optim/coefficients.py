"""What a segment's hyper-parameters become in an Adam loop: make_coefficients() of aio_csrc/optim/adam.cpp.

The CPU kernel computes these in C++. Kernels that run elsewhere take them from here, and a test holds the two
together: every operation is done in double precision in the same order, then rounded once to fp32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

from .kernels import Segment

__all__ = ["AdamCoefficients", "check_segments", "make_coefficients", "to_fp32"]


class AdamCoefficients(NamedTuple):
    """The coefficients of one Adam step. All floats are fp32 values."""

    keep: float
    """1 - lr * weight_decay, or 1: what decoupled decay leaves of the master."""
    decay_into_grad: float
    """weight_decay of the L2 form, or 0."""
    lerp_weight: float
    lerp_from_grad: bool
    """beta1 <= 0.5: interpolate from the nearer end, as torch.lerp does."""
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    """sqrt(1 - beta2^step)."""
    eps: float
    step_size: float
    """lr / (1 - beta1^step)."""


def to_fp32(value: float) -> float:
    """The nearest fp32 value, infinite beyond the largest: static_cast<float> of C++."""
    return ctypes.c_float(value).value


def make_coefficients(segment: Segment, adamw_mode: bool) -> AdamCoefficients:
    """The one place in Python where hyper-parameters lose their double precision."""
    step = float(segment.step)
    bias1 = 1 - segment.beta1**step
    bias2 = 1 - segment.beta2**step
    lerp_weight = 1 - segment.beta1
    lerp_from_grad = lerp_weight >= 0.5
    return AdamCoefficients(
        keep=to_fp32(1 - segment.lr * segment.weight_decay) if adamw_mode else 1.0,
        decay_into_grad=0.0 if adamw_mode else to_fp32(segment.weight_decay),
        lerp_weight=to_fp32(lerp_weight - 1 if lerp_from_grad else lerp_weight),
        lerp_from_grad=lerp_from_grad,
        beta2=to_fp32(segment.beta2),
        one_minus_beta2=to_fp32(1 - segment.beta2),
        bias2_sqrt=to_fp32(math.sqrt(bias2)),
        eps=to_fp32(segment.eps),
        step_size=to_fp32(segment.lr / bias1),
    )


def check_segments(segments: Sequence[Segment], numel: int) -> None:
    """Raise the ValueError that the CPU kernel raises, before anything is written."""
    previous_end = 0
    for index, s in enumerate(segments):
        if s.begin < 0 or s.end < 0:
            raise ValueError(f"segment {index}: begin and end must not be negative")
        if s.begin > s.end or s.end > numel or s.begin < previous_end:
            raise ValueError(
                f"segment {index}: [{s.begin}, {s.end}) must lie in [{previous_end}, {numel}):"
                " after the segment before it, inside the planes"
            )
        if s.step < 1:
            raise ValueError(f"segment {index}: step must be at least 1, got {s.step}")
        for name, value, in_range, wanted in (
            ("lr", s.lr, math.isfinite(s.lr), "finite"),
            ("beta1", s.beta1, 0 <= s.beta1 < 1, "in [0, 1)"),
            ("beta2", s.beta2, 0 <= s.beta2 < 1, "in [0, 1)"),
            ("eps", s.eps, math.isfinite(s.eps) and s.eps >= 0, "finite and not negative"),
            ("weight_decay", s.weight_decay, math.isfinite(s.weight_decay), "finite"),
        ):
            if not in_range:
                raise ValueError(f"segment {index}: {name} must be {wanted}, got {value:f}")
        previous_end = s.end
