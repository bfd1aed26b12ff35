"""What the rounded state formats promise: order, error bounds, no traps, no bias, no NaN that looks like a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planes import HYPER, NUMELS, guarded, guards_intact, same_bits
from state_format_oracle import M_BIAS, M_SCALE, M_VALUES, ROOT_BIAS, ROOT_SCALE, ROOT_VALUES
from state_planes import MOMENT_TYPES, StatePlanes, to_numpy

from offload.optim import kernels
from offload.optim.kernels import STATE_BLOCK, Segment

ISAS = pytest.mark.parametrize("isa", kernels.isas())


def coded(
    m: torch.Tensor, v: torch.Tensor, format_: str = "int8", isa: str = "auto"
) -> tuple[torch.Tensor, ...]:
    """exp_avg, exp_avg_sq and scale planes, and the moments they stand for."""
    exp_avg, exp_avg_sq = (guarded(torch.zeros(m.numel(), dtype=dtype)) for dtype in MOMENT_TYPES[format_])
    scale = guarded(torch.zeros(2 * -(-m.numel() // STATE_BLOCK))) if format_ == "int8" else None
    kernels.encode_moments(guarded(m), guarded(v), exp_avg, exp_avg_sq, scale, isa=isa)
    back_m, back_v = guarded(torch.empty(m.numel())), guarded(torch.empty(m.numel()))
    kernels.decode_moments(exp_avg, exp_avg_sq, scale, back_m, back_v, isa=isa)
    planes = [exp_avg, exp_avg_sq, back_m, back_v, *([] if scale is None else [scale])]
    assert all(guards_intact(plane) for plane in planes)
    return exp_avg, exp_avg_sq, scale, back_m, back_v


def step_many(m: torch.Tensor, v: torch.Tensor, format_: str, seeds: int, grad: float = 0.0) -> torch.Tensor:
    """exp_avg and exp_avg_sq after one step from the same planes, for each of many seeds: [seeds, 2, numel]."""
    start = StatePlanes.of(torch.ones(m.numel()), m, v, format_)
    results = []
    for seed in range(seeds):
        planes = start.clone()
        planes.step(torch.full((m.numel(),), grad), 10, seed=seed, lr=0.0, weight_decay=0.0)
        results.append(torch.stack(planes.moments()))
    return torch.stack(results)


def after_step(m: torch.Tensor, v: torch.Tensor, grad: float) -> torch.Tensor:
    planes = StatePlanes.of(torch.ones(m.numel()), m, v, "fp32/fp32/fp32")
    planes.step(torch.full((m.numel(),), grad), 10, lr=0.0, weight_decay=0.0)
    return torch.stack(planes.moments())


@ISAS
def test_every_code_decodes_to_its_value_and_back(isa: str) -> None:
    """Both directions over the whole code: monotone, symmetric, zero exact, the last the scale."""
    for scale in (1.0, 3.7e-12, 9.5e17):
        m = torch.zeros(2 * STATE_BLOCK, dtype=torch.float64)
        m[:255] = torch.from_numpy(np.concatenate([-(M_VALUES[127:0:-1] - M_BIAS), M_VALUES[:128] - M_BIAS]))
        m[-1] = M_SCALE
        root = torch.zeros(2 * STATE_BLOCK, dtype=torch.float64)
        root[:256] = torch.from_numpy(ROOT_VALUES[:256] - ROOT_BIAS)
        root[0] = ROOT_SCALE  # each block sees the largest
        m, root = m * (scale / M_SCALE), root * (scale / ROOT_SCALE)
        exp_avg, exp_avg_sq, scales, back_m, back_v = coded(m.float(), root.square().float(), isa=isa)
        expected = torch.arange(-127, 128)
        assert torch.equal(exp_avg[:255].long(), expected)
        assert torch.equal(exp_avg_sq.long()[1:], torch.arange(1, 256))
        torch.testing.assert_close(back_m.double(), m, rtol=3e-7, atol=0)
        torch.testing.assert_close(back_v.double(), root.square(), rtol=6e-7, atol=0)
        torch.testing.assert_close(scales, torch.full((4,), scale), rtol=2e-7, atol=0)
        assert (back_m == 0).sum() == (exp_avg == 0).sum() == 1
        again = coded(back_m, back_v, isa=isa)
        assert same_bits(again[0], exp_avg)
        assert same_bits(again[1], exp_avg_sq)


@ISAS
@pytest.mark.parametrize("exponents", [(0, 0), (-3, 3), (-12, 12), (-60, 60)])
def test_error_of_a_block_is_bounded(exponents: tuple[int, int], isa: str) -> None:
    """Rounded to nearest: half a step, which is 1/16 (m) and 1/32 (root of v) of y = x + bias at most."""
    rng = np.random.default_rng(7)
    numel = 200 * STATE_BLOCK
    size = 2.0 ** rng.integers(exponents[0], exponents[1] + 1, numel)
    m = torch.from_numpy((rng.standard_normal(numel) * size).astype(np.float32))
    v = m.square() * torch.from_numpy(rng.random(numel).astype(np.float32)) * 1e-2
    _, codes, scales, back_m, back_v = coded(m, v, isa=isa)
    unit_m = (scales[0::2] / M_SCALE).repeat_interleave(STATE_BLOCK).double()
    unit_root = (scales[1::2] / ROOT_SCALE).repeat_interleave(STATE_BLOCK).double()
    m, root, back_root = m.double(), v.double().sqrt(), back_v.double().sqrt()
    assert ((back_m - m).abs() <= 1.001 * (m.abs() + M_BIAS * unit_m) / 32).all()
    floor = torch.where(v > 0, 1.001 * unit_root, 0.0)  # code 1 at least
    assert ((back_root - root).abs() <= (1.001 * (root + ROOT_BIAS * unit_root) / 64).maximum(floor)).all()
    assert (codes[v > 0] > 0).all()
    assert torch.equal(torch.sign(back_m)[back_m != 0], torch.sign(m)[back_m != 0].float())


def test_order_is_kept_within_a_block() -> None:
    rng = np.random.default_rng(3)
    m = torch.from_numpy(np.sort(rng.standard_normal(STATE_BLOCK) ** 5).astype(np.float32))
    v = torch.from_numpy(np.sort(rng.random(STATE_BLOCK) ** 9).astype(np.float32))
    exp_avg, exp_avg_sq, _, back_m, back_v = coded(m, v)
    for plane in (exp_avg.int(), exp_avg_sq.int(), back_m, back_v):
        assert (plane.diff() >= 0).all()


def test_an_outlier_costs_its_block_alone() -> None:
    """A value 10^4 times the others leaves them coarse; in the blocks beside it nothing changes."""
    rng = np.random.default_rng(5)
    m = torch.from_numpy(rng.standard_normal(3 * STATE_BLOCK).astype(np.float32))
    v = m.square()
    plain = coded(m, v)
    m[STATE_BLOCK + 7], v[STATE_BLOCK + 7] = 1e4, 1e8
    with_outlier = coded(m, v)
    outside = torch.ones(3 * STATE_BLOCK, dtype=torch.bool)
    outside[STATE_BLOCK : 2 * STATE_BLOCK] = False
    for plane in range(2):
        assert same_bits(plain[plane][outside], with_outlier[plane][outside])
    back_m, back_v = with_outlier[3:]
    torch.testing.assert_close(back_m[STATE_BLOCK + 7].item(), 1e4)
    torch.testing.assert_close(back_v[STATE_BLOCK + 7].item(), 1e8)
    assert ((back_m - m).abs()[~outside] <= 1e4 / M_SCALE * 1.01 / 2 * (1 + m.abs()[~outside])).all()
    assert (back_v[~outside] > 0).all()


@ISAS
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_reads_as_nan(bad: float, isa: str) -> None:
    m, v = torch.full((3 * STATE_BLOCK,), 0.5), torch.full((3 * STATE_BLOCK,), 0.25)
    m[STATE_BLOCK + 3], v[2 * STATE_BLOCK + 5] = bad, abs(bad)
    exp_avg, exp_avg_sq, scale, back_m, back_v = coded(m, v, isa=isa)
    assert torch.isnan(back_m).tolist() == [
        STATE_BLOCK <= i < 2 * STATE_BLOCK for i in range(3 * STATE_BLOCK)
    ]
    assert torch.isnan(back_v).tolist() == [i >= 2 * STATE_BLOCK for i in range(3 * STATE_BLOCK)]
    assert not exp_avg[STATE_BLOCK : 2 * STATE_BLOCK].any()
    assert not exp_avg_sq[2 * STATE_BLOCK :].any()
    canonical = scale.view(torch.int32)[torch.isnan(scale)]
    assert set(canonical.tolist()) == {0x7FC00000}


@ISAS
@pytest.mark.parametrize("format_", ["bf16/int8/bf16", "bf16/bf16/bf16", "fp32/bf16/fp32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_never_makes_a_plausible_weight(format_: str, bad: float, isa: str) -> None:
    """At once that element is not finite; with int8 its block follows a step later, and no other."""
    planes = StatePlanes.midway(3 * STATE_BLOCK + 10, format_)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(planes.weight.numel(), generator=generator).to(planes.weight.dtype)
    grad[STATE_BLOCK + 3] = bad
    planes.step(grad, 2, isa=isa)
    assert not torch.isfinite(planes.master()[STATE_BLOCK + 3])
    assert torch.isfinite(planes.weight).sum() == planes.weight.numel() - 1
    grad[STATE_BLOCK + 3] = 1.0
    planes.step(grad, 3, isa=isa)
    lost = (~torch.isfinite(planes.weight)).nonzero().flatten().tolist()
    block = list(range(STATE_BLOCK, 2 * STATE_BLOCK)) if "int8" in format_ else [STATE_BLOCK + 3]
    assert lost == block


@pytest.mark.parametrize("format_", ["bf16/int8/fp32", "bf16/bf16/fp32", "fp32/bf16/fp32"])
def test_stochastic_rounding_is_unbiased(format_: str) -> None:
    """Mean over seeds of every stored moment: within 5 standard errors of the value in fp32."""
    numel, seeds = 2 * STATE_BLOCK, 400
    rng = np.random.default_rng(1)
    m = torch.from_numpy((rng.standard_normal(numel) * 0.1).astype(np.float32))
    v = torch.from_numpy((rng.standard_normal(numel) ** 2 * 0.01 + 1e-4).astype(np.float32))
    start = StatePlanes.of(torch.ones(numel), m, v, format_)
    exact = after_step(*start.moments(), grad=0.05).double()
    got = step_many(m, v, format_, seeds, grad=0.05).double()
    unit = exact.abs() / 128
    if "int8" in format_:  # it is the root of v that is rounded
        exact[1], got[:, 1] = exact[1].sqrt(), got[:, 1].sqrt()
        unit = (exact.abs() + exact.abs().amax(1, keepdim=True) / 240) / 16
    error, spread = got.mean(0) - exact, got.std(0)
    assert (spread > 0).float().mean() > 0.85
    seldom = 10 / seeds * unit  # what no seed rounded up
    assert (error.abs() <= 5 * spread / seeds**0.5 + seldom).all()
    assert (
        (error / unit).sum(1).abs() <= 5 * (spread / unit).square().sum(1).sqrt() / seeds**0.5 + 1e-3
    ).all()


def test_an_int8_master_is_rounded_without_bias() -> None:
    """Steps of 1/10 of the residual's unit: lost if rounded to nearest, right on average here."""
    numel, steps = 64 * STATE_BLOCK, 50
    zeros = torch.zeros(numel)
    planes = StatePlanes.of(torch.ones(numel), zeros, zeros, "bf16/int8/fp32")
    unit = 2.0**-23 * 256  # of a master in [1, 2)
    hyper = {**HYPER, "lr": unit / 10, "weight_decay": 0.0, "eps": 0.0}
    for step in range(1, steps + 1):
        planes.step_segments(-torch.ones(numel), [Segment(0, numel, step, **hyper)])
    moved = (planes.master().double() - 1).mean().item() / (steps * unit / 10)
    assert moved == pytest.approx(1.0, abs=5 * (0.5 * 10 / (steps * numel) ** 0.5) + 0.03)


@pytest.mark.parametrize("format_", ["bf16/int8/fp32", "bf16/bf16/fp32"])
def test_a_slow_average_does_not_stand_still(format_: str) -> None:
    """exp_avg_sq with beta2 = 0.999 moves 0.1 % per step: the mean over elements follows fp32 for 1000 steps."""
    numel = 8 * STATE_BLOCK
    start = torch.full((numel,), 0.01)
    rounded = StatePlanes.of(torch.ones(numel), torch.zeros(numel), start, format_)
    exact = StatePlanes.of(torch.ones(numel), torch.zeros(numel), start, "fp32/fp32/fp32")
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1001):
        grad = torch.randn(numel, generator=generator) * 0.05
        for planes in (rounded, exact):
            planes.step(grad, step, lr=0.0, weight_decay=0.0)
    mine, others = (planes.moments()[1].sqrt() for planes in (rounded, exact))
    assert (1 / mine).mean().item() == pytest.approx((1 / others).mean().item(), rel=0.06)
    assert others.mean() < 0.08  # it has moved


@ISAS
@pytest.mark.parametrize("format_", ["bf16/int8/fp32", "bf16/bf16/fp32"])
def test_a_small_v_beside_a_large_one_keeps_the_step_bounded(format_: str, isa: str) -> None:
    """v of an element far below its block's scale never reads as zero beside its m: m / eps would explode."""
    numel = 16 * STATE_BLOCK
    generator = torch.Generator().manual_seed(0)
    grad = torch.full((numel,), 1e-6)
    grad[::STATE_BLOCK] = 1e6
    planes = StatePlanes.of(torch.ones(numel), torch.zeros(numel), torch.zeros(numel), format_)
    before = planes.master()
    for step in range(1, 60):
        noisy = grad * (1 + 0.3 * torch.randn(numel, generator=generator))
        planes.step(noisy, step, isa=isa, lr=1e-3, weight_decay=0.0, eps=1e-20)
        after, (m, v) = planes.master(), planes.moments()
        assert ((after - before).abs() <= 8e-3).all(), step
        assert (v[m != 0] > 0).all()
        assert (v >= 0).all()
        before = after


@ISAS
def test_tiny_moments_end_as_zero_not_as_denormals(isa: str) -> None:
    """Without gradients m and v fade: m becomes zero, v stays a normal number or becomes zero."""
    numel = 4 * STATE_BLOCK
    for format_ in ("bf16/int8/fp32", "bf16/bf16/fp32"):
        planes = StatePlanes.of(
            torch.ones(numel), torch.full((numel,), 1e-25), torch.full((numel,), 1e-33), format_
        )
        for step in range(1, 400):
            planes.step(torch.zeros(numel), step, isa=isa, beta1=0.5, beta2=0.5)
        m, v = planes.moments()
        assert not m.any()
        assert ((v == 0) | (v >= 2.0**-126)).all()


@ISAS
def test_bf16_rounds_to_a_neighbour_and_never_to_infinity(isa: str) -> None:
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, 50_000, dtype=np.uint32)
    bits[:4] = (0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F0001, 0x7F800000)
    values = torch.from_numpy(bits.view(np.float32).copy())
    exp_avg, _, _, back, _ = coded(values, torch.zeros(bits.size), "bf16", isa)
    nan = torch.isnan(values)
    assert torch.equal(torch.isnan(back), nan)
    assert set(to_numpy(exp_avg)[nan.numpy()]) == {0x7FC0}
    assert torch.equal(torch.isinf(back), torch.isinf(values))
    finite = torch.isfinite(values)
    low = (bits & 0xFFFF0000).view(np.float32)[finite.numpy()].astype(np.float64)
    got, exact = (x.double().numpy()[finite.numpy()] for x in (back, values))
    unit = np.ldexp(1.0, np.maximum(np.frexp(low)[1] - 1, -126) - 7)
    assert (np.abs(got - exact) <= unit / 2).mean() > 0.9999
    assert (np.abs(got - low) <= unit).all()


@ISAS
@pytest.mark.parametrize("format_", ["int8", "bf16"])
def test_conversions_of_every_length_stay_inside_and_agree(format_: str, isa: str) -> None:
    for numel in (*NUMELS, 127, 128, 129):
        generator = torch.Generator().manual_seed(numel)
        m = torch.randn(numel, generator=generator) * 0.1
        v = torch.randn(numel, generator=generator).square()
        mine, scalar = coded(m, v, format_, isa), coded(m, v, format_, "scalar")
        for a, b in zip(mine, scalar, strict=True):
            assert (a is None) == (b is None)
            assert a is None or same_bits(a, b)


def test_threads_do_not_show_in_conversions() -> None:
    numel = 200_001
    generator = torch.Generator().manual_seed(0)
    m, v = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator).square()
    results = []
    for threads in (1, 2, 5):
        planes = [torch.empty(numel, dtype=dtype) for dtype in MOMENT_TYPES["int8"]]
        planes.append(torch.empty(2 * -(-numel // STATE_BLOCK)))
        kernels.encode_moments(m, v, *planes, threads=threads)
        back = [torch.empty(numel), torch.empty(numel)]
        kernels.decode_moments(*planes, *back, threads=threads)
        results.append([*planes, *back])
    assert all(same_bits(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_conversions_refuse_what_is_no_format() -> None:
    fp32, codes = torch.zeros(10), torch.zeros(10, dtype=torch.int8)
    with pytest.raises(ValueError, match="to_exp_avg is fp32; it must be bf16 or int8"):
        kernels.encode_moments(fp32, fp32, fp32.clone(), fp32.clone())
    with pytest.raises(ValueError, match="int8 moments need from_scale"):
        kernels.decode_moments(codes, codes.view(torch.uint8), None, fp32, fp32.clone())
    with pytest.raises(ValueError, match=r"to_exp_avg_sq is torch\.int8; it must be torch\.uint8"):
        kernels.encode_moments(fp32, fp32, codes, codes.clone(), torch.zeros(2))
