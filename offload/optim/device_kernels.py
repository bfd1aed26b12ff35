"""The kernels of kernels.py in torch operations: in place over flat tensors on any device, the same bits.

A device must compute in fp64. Nothing here waits for the device. Every NaN counts as equal to every other: the
C++ kernel does not define the payload of one either, except in a split master, where it is canonical.

Note [Same bits without a fused multiply-add]
torch promises no fused multiply-add, and its own fused operations (addcmul, lerp) use one or not as the
device likes. So fp32 fma(a, b, c) is computed in fp64, with separate operations that no device contracts:

1. p = a * b is exact: 24 + 24 bits of significand fit into 53, exponents lie within -298..256.
2. s = p + c is rounded to nearest, and TwoSum gives e with s + e = p + c exactly. That holds for any order of
   magnitudes; nothing overflows, and nothing underflows, since all terms are multiples of 2^-298.
3. s is rounded to odd instead: where e != 0, of the two fp64 neighbours of the exact sum take the one whose
   last bit is set. In bits: subtract one where e points towards zero (now s is truncated), then set the last
   bit. The sign of e * s tells the direction; the product stays in 2^-596..2^512.
4. s is rounded to fp32. An odd s is no fp32 value and no midpoint between two, and it lies on the same
   side of each as the exact sum, because those have even fp64 bit patterns. So the result is the exact sum
   rounded once. This needs 53 >= 24 + 2 bits; a subnormal result has fewer than 24, and the argument is
   the same. Beyond the largest fp32 value the midpoint to 2^128 is even as well: overflow goes to
   infinity exactly where it should.

Zeros: e is 0 where the sum is exact, and s then has the sign IEEE gives to p + c, as fma does; a nonzero p + c
is nonzero in fp64, and keeps its sign if it rounds to zero in step 4. Infinity and NaN: s is what fma gives,
and e is NaN, which is neither above nor below zero, so the bits stay.

Note [Division and square root]
fp32 / and sqrt are correctly rounded by the CPU and by torch's CUDA build (tensor by tensor; a division
by a Python number multiplies by its inverse). We do not lean on it: both are computed in fp64 and rounded to
fp32, which provably is the fp32 operation. The quotient of two 24-bit integers is a 25-bit midpoint
exactly or at least 2^-49 (relative) away, a square root 2^-51, and fp64 errs by at most 2^-53. Subnormal quotients
are covered: their midpoints have fewer bits.

Denormals are neither flushed nor read as zero, as in the CPU kernel (fp_environment.h): torch's CUDA build does
not flush them, and on the CPU the caller's torch.set_flush_denormal() is off while we compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch

from .coefficients import AdamCoefficients, check_segments, make_coefficients, to_fp32
from .kernels import SQUARE_BLOCK, Segment

__all__ = [
    "SCRATCH_BYTES_PER_ELEMENT",
    "SLICE_ELEMENTS",
    "adam_segments",
    "all_finite",
    "assign_weight",
    "block_square_sums",
    "check_planes",
    "join_master",
    "scale_tensor",
    "split_master",
]

SLICE_ELEMENTS: Final = 1 << 20
"""Elements per slice: about a hundred launches each, long enough to hide what a launch costs."""

SCRATCH_BYTES_PER_ELEMENT: Final = 4 * 8 + 3 * 4 + 3
"""Of a slice: four fp64, three fp32 and three bool arrays, one of them short-lived (NaN, in the split)."""

CANONICAL_NAN: Final = 0x7FC00000
HALF_UNIT: Final = 0x8000
SQUARE_LANES: Final = 16
ROWS_BYTES_MAX: Final = 8 << 20
"""Of gradients widened to fp64 at a time for their sums of squares, unless one row of all blocks is more."""

_GRAD_TYPES: Final = (torch.bfloat16, torch.float32)


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
    slice_elements: int = SLICE_ELEMENTS,
) -> None:
    """One Adam step on the elements that ``segments`` name; see :func:`kernels.adam_segments`.

    Args:
        grad_scale: a float, or a 0-d tensor on the same device.
        slice_elements: the pass needs ``SCRATCH_BYTES_PER_ELEMENT`` times this, whatever the planes hold.
    """
    check_planes(weight, residual, exp_avg, exp_avg_sq, grad)
    check_segments(segments, weight.numel())
    longest = max((s.end - s.begin for s in segments), default=0)
    scratch = _Scratch.empty(min(slice_elements, longest), weight.device)
    scale = scale_tensor(grad_scale, weight.device)
    with torch.no_grad(), _ieee_defaults(weight.device):
        for segment in segments:
            coefficients = make_coefficients(segment, adamw_mode)
            for begin in range(segment.begin, segment.end, slice_elements):
                part = slice(begin, min(begin + slice_elements, segment.end))
                _adam_slice(
                    coefficients,
                    scale,
                    weight[part],
                    None if residual is None else residual[part],
                    exp_avg[part],
                    exp_avg_sq[part],
                    grad[part],
                    scratch.first(part.stop - part.start),
                )


def check_planes(
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
) -> None:
    """Raise a ValueError unless the planes are flat, alike in size and device, and of a known format."""
    bf16 = torch.bfloat16
    _check("weight", weight, weight, torch.float32 if residual is None else bf16)
    if residual is not None:
        _check("residual", residual, weight, torch.int16)
    _check("exp_avg", exp_avg, weight, torch.float32)
    _check("exp_avg_sq", exp_avg_sq, weight, torch.float32)
    _check("grad", grad, weight, *((torch.float32,) if residual is None else (bf16, torch.float32)))


def scale_tensor(grad_scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A 0-d fp32 tensor on the device, made without waiting for it."""
    if not isinstance(grad_scale, torch.Tensor):
        return torch.full((), to_fp32(grad_scale), dtype=torch.float32, device=device)
    if grad_scale.ndim != 0 or grad_scale.device != device:
        shape = tuple(grad_scale.shape)
        raise ValueError(
            f"grad_scale has shape {shape} on {grad_scale.device}; it must be a float or a 0-d tensor on {device}"
        )
    return grad_scale.detach().to(torch.float32)


def block_square_sums(*grads: torch.Tensor) -> torch.Tensor:
    """fp64 sums of squares of the :data:`kernels.SQUARE_BLOCK`-element blocks, as a tensor on the device.

    Of several arrays of one type, those of the first come first. Element i of a block is added to lane i % 16,
    one after another, and the lanes in a tree, as in the CPU kernel: 1024 additions in order, each over all
    blocks of all arrays at once, so a call costs one to three thousand launches whatever there is to add.
    Scratch: 128 bytes per block and array, :data:`ROWS_BYTES_MAX`, and 64 KiB per array for its short last block.
    """
    for grad in grads:
        _check("grad", grad, grad, *((grads[0].dtype,) if grad is not grads[0] else _GRAD_TYPES))
    arrays = [grad.detach() for grad in grads]
    whole = [array.numel() // SQUARE_BLOCK for array in arrays]
    rows = SQUARE_BLOCK // SQUARE_LANES
    with torch.no_grad(), _ieee_defaults(arrays[0].device):
        tails = [_padded(array[n * SQUARE_BLOCK :]) for array, n in zip(arrays, whole, strict=True)]
        bodies = [array[: n * SQUARE_BLOCK] for array, n in zip(arrays, whole, strict=True)]
        blocks = [piece.view(-1, rows, SQUARE_LANES) for piece in (*bodies, *tails) if piece.numel()]
        lanes = _add_in_order(blocks, sum(map(len, blocks)), arrays[0])
        stride = SQUARE_LANES // 2
        while stride:
            lanes[:, :stride].add_(lanes[:, stride : 2 * stride])
            stride //= 2
        sums, of_tails = lanes[: sum(whole), 0].split(whole), lanes[sum(whole) :, 0]
        pieces, tail = [], 0
        for of_whole, padded in zip(sums, tails, strict=True):
            last = tail + (padded.numel() > 0)
            pieces += [of_whole, of_tails[tail:last]]
            tail = last
        return torch.cat(pieces)


def _add_in_order(blocks: Sequence[torch.Tensor], count: int, like: torch.Tensor) -> torch.Tensor:
    """The sums of squares over the middle axis of (n, rows, lanes) arrays: (count, lanes), fp64."""
    lanes = torch.zeros((count, SQUARE_LANES), dtype=torch.float64, device=like.device)
    if not blocks:
        return lanes
    rows = blocks[0].shape[1]
    at_once = max(1, min(rows, ROWS_BYTES_MAX // (count * SQUARE_LANES * 8)))
    # The square of an fp32 value is exact in fp64: fused or not, addcmul adds the same.
    for begin in range(0, rows, at_once):
        wide = torch.cat([piece[:, begin : begin + at_once] for piece in blocks]).double()
        for row in wide.unbind(1):
            lanes.addcmul_(row, row)
    return lanes


def _padded(values: torch.Tensor) -> torch.Tensor:
    """A short block as a whole one: squares of zeros add nothing to a sum. Empty stays empty."""
    if not values.numel():
        return values
    padded = values.new_zeros(SQUARE_BLOCK)
    padded[: values.numel()].copy_(values)
    return padded


def all_finite(sums: torch.Tensor) -> torch.Tensor:
    """Whether all elements behind the block sums are finite: a 0-d bool tensor on the device.

    Squares of floats never overflow a double.
    """
    return torch.isfinite(sums).all()


def split_master(master: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """Write an fp32 ``master`` as bf16 ``weight`` and int16 ``residual``; see :func:`kernels.split_master`."""
    _check("master", master, master, torch.float32)
    _check("weight", weight, master, torch.bfloat16)
    _check("residual", residual, master, torch.int16)
    with torch.no_grad():
        for part in _slices(master.numel()):
            bits = master[part].view(torch.int32).clone()
            _split_bits(bits, torch.empty_like(bits), weight[part], residual[part])


def join_master(weight: torch.Tensor, residual: torch.Tensor, master: torch.Tensor) -> None:
    """Write the fp32 ``master`` that ``weight`` and ``residual`` stand for."""
    _check("weight", weight, weight, torch.bfloat16)
    _check("residual", residual, weight, torch.int16)
    _check("master", master, weight, torch.float32)
    with torch.no_grad():
        for part in _slices(weight.numel()):
            bits = master[part].view(torch.int32)
            _join_bits(weight[part], residual[part], bits, torch.empty_like(bits))


def assign_weight(weight: torch.Tensor, residual: torch.Tensor, fresh: torch.Tensor) -> None:
    """Take over ``fresh`` bf16 weights: an unchanged one keeps its residual, a changed one has none."""
    _check("weight", weight, weight, torch.bfloat16)
    _check("residual", residual, weight, torch.int16)
    _check("fresh", fresh, weight, torch.bfloat16)
    with torch.no_grad():
        for part in _slices(weight.numel()):
            old, new = weight[part].view(torch.int16), fresh[part].view(torch.int16)
            residual[part].masked_fill_(old != new, 0)
            old.copy_(new)


class _Scratch(NamedTuple):
    """Temporaries of one slice. Allocated per call: the caching allocator then knows the stream."""

    wide: torch.Tensor  # (4, n) fp64
    single: torch.Tensor  # (3, n) fp32
    flags: torch.Tensor  # (2, n) bool

    @classmethod
    def empty(cls, numel: int, device: torch.device) -> _Scratch:
        return cls(
            torch.empty((4, numel), dtype=torch.float64, device=device),
            torch.empty((3, numel), dtype=torch.float32, device=device),
            torch.empty((2, numel), dtype=torch.bool, device=device),
        )

    def first(self, numel: int) -> _Scratch:
        return _Scratch(self.wide[:, :numel], self.single[:, :numel], self.flags[:, :numel])


def _adam_slice(
    c: AdamCoefficients,
    grad_scale: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scratch: _Scratch,
) -> None:
    """adam_vectors() of aio_csrc/optim/kernels.h, operation by operation."""
    g, t, joined = scratch.single
    p = weight
    if residual is not None:
        p = joined
        _join_bits(weight, residual, p.view(torch.int32), t.view(torch.int32))
    g.copy_(grad).mul_(grad_scale)
    if c.decay_into_grad != 0:
        _fma(p, c.decay_into_grad, g, g, scratch)
    p.mul_(c.keep)
    torch.sub(g, exp_avg, out=t)
    _fma(t, c.lerp_weight, g if c.lerp_from_grad else exp_avg, exp_avg, scratch)
    exp_avg_sq.mul_(c.beta2)
    torch.mul(g, c.one_minus_beta2, out=t)
    _fma(t, g, exp_avg_sq, exp_avg_sq, scratch)
    numerator, denominator = scratch.wide[0], scratch.wide[1]  # see Note [Division and square root]
    t.copy_(numerator.copy_(exp_avg_sq).sqrt_())
    t.copy_(numerator.copy_(t).div_(denominator.fill_(c.bias2_sqrt))).add_(c.eps)
    torch.mul(exp_avg, c.step_size, out=g)
    p.sub_(g.copy_(numerator.copy_(g).div_(denominator.copy_(t))))
    if residual is not None:
        _split_bits(p.view(torch.int32), t.view(torch.int32), weight, residual)


def _fma(
    a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float, out: torch.Tensor, scratch: _Scratch
) -> None:
    """out = a * b + c, rounded once. See Note [Same bits without a fused multiply-add]."""
    error, total, addend, work = scratch.wide
    towards_zero, inexact = scratch.flags
    product = error.copy_(a)
    product.mul_(b if isinstance(b, float) else work.copy_(b))
    addend.fill_(c) if isinstance(c, float) else addend.copy_(c)
    torch.add(product, addend, out=total)
    torch.sub(total, product, out=work)
    addend.sub_(work)
    torch.sub(total, work, out=work)
    error.sub_(work).add_(addend)
    error.mul_(total)  # only its sign matters from here on
    torch.lt(error, 0, out=towards_zero)
    torch.gt(error, 0, out=inexact)
    inexact.logical_or_(towards_zero)
    bits, step = total.view(torch.int64), work.view(torch.int64)
    bits.sub_(step.copy_(towards_zero)).bitwise_or_(step.copy_(inexact))
    out.copy_(total)


def _join_bits(weight: torch.Tensor, residual: torch.Tensor, bits: torch.Tensor, work: torch.Tensor) -> None:
    """bits = (weight << 16) + residual, both as bit patterns."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(work.copy_(residual))


def _split_bits(bits: torch.Tensor, work: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> None:
    """The inverse; ``bits`` and ``work`` are used up. See Note [Master in two planes] of the C++ kernels.

    Arithmetic shifts leave values that fit int16, so no conversion has to wrap.
    """
    values = bits.view(torch.float32)
    bits.masked_fill_(values != values, CANONICAL_NAN)
    weight.view(torch.int16).copy_(torch.add(bits, HALF_UNIT, out=work).bitwise_right_shift_(16))
    residual.copy_(bits.bitwise_left_shift_(16).bitwise_right_shift_(16))


def _slices(numel: int) -> Iterator[slice]:
    return (slice(begin, begin + SLICE_ELEMENTS) for begin in range(0, numel, SLICE_ELEMENTS))


def _check(name: str, tensor: torch.Tensor, first: torch.Tensor, *dtypes: torch.dtype) -> None:
    if tensor.numel() != first.numel():
        raise ValueError(
            f"{name} has {tensor.numel()} elements; the first array of the call has {first.numel()}"
        )
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat and contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device}; the first array of the call is on {first.device}")


@contextmanager
def _ieee_defaults(device: torch.device) -> Iterator[None]:
    """Denormals are kept in this scope, also where the calling thread flushes them."""
    flushing = device.type == "cpu" and torch.tensor([1e-39]).mul(1.0).item() == 0.0
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)
