"""Gradients in fp16: every one of its values, on every instruction set, in the update and in the norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planes import NUMELS, Planes, gradient, guarded, guards_intact, same_bits
from state_planes import StatePlanes

from offload.optim import kernels, rule_kernels
from offload.optim.segments import SgdSegment

ALL_VALUES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
STATE_FORMATS = ("fp32/fp32", "fp32/bf16", "bf16/fp32", "bf16/bf16", "bf16/int8")
"""Of weight and moments."""


def as_read(isa: str, values: np.ndarray) -> np.ndarray:
    """What a kernel makes of a gradient: the first momentum is the gradient itself."""
    weight, momentum = np.zeros(values.size, np.float32), np.zeros(values.size, np.float32)
    segments = [SgdSegment(0, values.size, 1, 0.1, 0.9, 0.0, 0.0, False)]
    rule_kernels.sgd_segments(weight, None, momentum, values, segments, isa=isa, threads=1)
    return momentum


@pytest.mark.parametrize("shift", [0, 1, 7])
def test_every_value_is_read_exactly(shift: int) -> None:
    """N18. Oracle: numpy's conversion. Shifted, so that each value is in every lane, and in a tail."""
    values = np.roll(ALL_VALUES, shift)[: ALL_VALUES.size - shift]
    expected = values.astype(np.float32)
    for isa in kernels.isas():
        got = as_read(isa, values)
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(got), is_nan)
        np.testing.assert_array_equal(got[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


def test_every_value_has_the_same_bits_on_every_instruction_set() -> None:
    """NaN with all their payloads, which an update keeps."""
    results = [as_read(isa, ALL_VALUES).view(np.uint32) for isa in kernels.isas()]
    for other in results[:-1]:
        np.testing.assert_array_equal(other, results[-1])


@pytest.mark.parametrize("state_format", STATE_FORMATS)
def test_equal_to_the_same_gradient_in_fp32(state_format: str) -> None:
    """N18: every length, every format, canaries around."""
    for numel in NUMELS:
        grad = guarded(gradient(numel, "fp32", numel).half())
        halves = StatePlanes.midway(numel, f"{state_format}/fp16", seed=numel)
        wide = halves.clone()
        for isa in kernels.isas():
            got, expected = halves.clone(), wide.clone()
            got.step(grad, 3, isa=isa, grad_scale=0.37, seed=5)
            expected.step(guarded(grad.float()), 3, isa=isa, grad_scale=0.37, seed=5)
            got.assert_same(expected)
            got.assert_guarded()
        assert guards_intact(grad)


def test_a_scaled_loss_is_unscaled_in_the_same_pass() -> None:
    """Gradients of a loss scaled by 2^16, as fp16 training has them: exact powers of two leave no trace."""
    grad = torch.randn(4097, generator=torch.Generator().manual_seed(3)) * 2.0**-16
    plain, scaled = Planes.midway(4097, "fp32"), Planes.midway(4097, "fp32")
    plain.step((grad * 2.0**16).half().float() / 2.0**16, 2)
    scaled.step((grad * 2.0**16).half(), 2, grad_scale=2.0**-16)
    scaled.assert_same(plain)


@pytest.mark.parametrize("numel", (*NUMELS, kernels.SQUARE_BLOCK + 1, 100_003))
def test_the_norm_is_exact(numel: int) -> None:
    grad = guarded(torch.randn(numel, generator=torch.Generator().manual_seed(numel)).half())
    results = {kernels.sum_of_squares(grad, isa=isa, threads=t) for isa in kernels.isas() for t in (1, 3)}
    (result,) = results
    assert result.finite
    assert result.sum == pytest.approx(math.fsum(x * x for x in grad.tolist()), rel=1e-14)


def test_the_norm_of_every_finite_value_and_of_every_other() -> None:
    finite = ALL_VALUES[np.isfinite(ALL_VALUES)]
    others = ALL_VALUES[~np.isfinite(ALL_VALUES)]
    exact = math.fsum(float(x) ** 2 for x in finite)
    for isa in kernels.isas():
        total, is_finite = kernels.sum_of_squares(finite, isa=isa)
        assert is_finite and total == pytest.approx(exact, rel=1e-14)
        for bad in (*others[:4], *others[-4:]):
            array = np.zeros(40, np.float16)
            for position in (0, 17, 39):
                array[:] = 1
                array[position] = bad
                assert not kernels.sum_of_squares(array, isa=isa).finite


def test_torch_and_numpy_halves_are_the_same() -> None:
    grad = torch.randn(100, generator=torch.Generator().manual_seed(0)).half()
    a, b = Planes.midway(100, "bf16"), Planes.midway(100, "bf16")
    a.step(grad, 2)
    b.step(grad.numpy(), 2)
    a.assert_same(b)
    assert same_bits(a.weight, b.weight)
