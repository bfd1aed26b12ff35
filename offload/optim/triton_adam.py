"""The Adam pass of device_kernels.py as one Triton kernel. Imported only where Triton is.

Not yet run on hardware: no GPU was at hand when this was written. What was looked at is the result of
Triton's interpreter on a CPU and the PTX that its compiler emits. So a device runs it only after
``device_check.check_triton`` has compared it with the torch operations there, bit for bit.

What keeps the bits: ``enable_fp_fusion=False`` forbids contracting a product and a sum to anything but the
``tl.fma`` that stand here. Division and square root go through fp64, see Note [Division and square root] in
device_kernels.py: Triton's fp32 ones are approximate by default, and libdevice flushes denormals for Triton.
16-bit planes are loaded and stored as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from .coefficients import check_segments, make_coefficients
from .device_kernels import check_planes, scale_tensor
from .kernels import Segment

__all__ = ["adam_segments"]

BLOCK_ELEMENTS: Final = 1024


@triton.jit(do_not_specialize=["begin", "end"])  # type: ignore[untyped-decorator, unused-ignore]
def _adam_kernel(  # type: ignore[no-untyped-def]
    weight,
    residual,
    exp_avg,
    exp_avg_sq,
    grad,
    grad_scale,
    begin,
    end,
    keep,
    decay_into_grad,
    lerp_weight,
    beta2,
    one_minus_beta2,
    bias2_sqrt,
    eps,
    step_size,
    SPLIT_MASTER: tl.constexpr,
    BF16_GRAD: tl.constexpr,
    DECAY_INTO_GRAD: tl.constexpr,
    LERP_FROM_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < end
    if SPLIT_MASTER:
        high = tl.load(weight + i, mask=inside, other=0).to(tl.int32) << 16
        p = (high + tl.load(residual + i, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(weight + i, mask=inside, other=0.0)
    g = tl.load(grad + i, mask=inside, other=0)
    if BF16_GRAD:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g * tl.load(grad_scale)
    if DECAY_INTO_GRAD:
        g = tl.fma(p, decay_into_grad, g)
    p = p * keep
    m = tl.load(exp_avg + i, mask=inside, other=0.0)
    m = tl.fma(lerp_weight, g - m, g if LERP_FROM_GRAD else m)
    v = tl.load(exp_avg_sq + i, mask=inside, other=0.0) * beta2
    v = tl.fma(one_minus_beta2 * g, g, v)
    root = tl.sqrt(v.to(tl.float64)).to(tl.float32)
    denominator = (root.to(tl.float64) / bias2_sqrt.to(tl.float64)).to(tl.float32) + eps
    quotient = ((step_size * m).to(tl.float64) / denominator.to(tl.float64)).to(tl.float32)
    p = p - quotient
    tl.store(exp_avg + i, m, mask=inside)
    tl.store(exp_avg_sq + i, v, mask=inside)
    if SPLIT_MASTER:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(weight + i, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(residual + i, ((bits << 16) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(weight + i, p, mask=inside)


def adam_segments(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    segments: Sequence[Segment],
    *,
    adamw_mode: bool = True,
    grad_scale: float | torch.Tensor = 1.0,
) -> None:
    """One Adam step on the elements that ``segments`` name; see :func:`device_kernels.adam_segments`."""
    check_planes(weight, residual, exp_avg, exp_avg_sq, grad)
    check_segments(segments, weight.numel())
    weight, exp_avg, exp_avg_sq, grad = (t.detach() for t in (weight, exp_avg, exp_avg_sq, grad))
    planes = (
        _bits(weight),
        _bits(weight) if residual is None else residual,  # a plane that the kernel does not look at
        exp_avg,
        exp_avg_sq,
        _bits(grad),
        scale_tensor(grad_scale, weight.device),
    )
    with torch.cuda.device_of(weight):
        for segment in segments:
            if segment.begin < segment.end:
                c = make_coefficients(segment, adamw_mode)
                kernel: Any = _adam_kernel[(triton.cdiv(segment.end - segment.begin, BLOCK_ELEMENTS),)]
                kernel(
                    *planes,
                    segment.begin,
                    segment.end,
                    c.keep,
                    c.decay_into_grad,
                    c.lerp_weight,
                    c.beta2,
                    c.one_minus_beta2,
                    c.bias2_sqrt,
                    c.eps,
                    c.step_size,
                    SPLIT_MASTER=residual is not None,
                    BF16_GRAD=grad.dtype == torch.bfloat16,
                    DECAY_INTO_GRAD=c.decay_into_grad != 0,
                    LERP_FROM_GRAD=c.lerp_from_grad,
                    BLOCK=BLOCK_ELEMENTS,
                    enable_fp_fusion=False,
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
