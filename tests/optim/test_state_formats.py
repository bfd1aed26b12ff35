"""Moments in bf16 and int8: every instruction set, thread count and cut gives the bits of the oracle."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from planes import HYPER, NUMELS, gradient, same_bits
from state_format_oracle import adam, noise_of
from state_planes import FORMATS, StatePlanes

from offload import ConfigError, _adam
from offload.optim import Adam, kernels
from offload.optim.kernels import STATE_BLOCK, Segment

ROUNDED = [format_ for format_ in FORMATS if "/fp32/" not in format_]
INT8 = [format_ for format_ in FORMATS if "/int8/" in format_]


def grad_of(format_: str, numel: int, seed: int) -> torch.Tensor:
    return gradient(numel, format_.split("/")[2], seed)


def check_against_oracle(
    start: StatePlanes, grad: torch.Tensor, segments: list[Segment], isa: str, **changed: object
) -> StatePlanes:
    options = {"adamw_mode": True, "grad_scale": 0.37, "seed": 11, **changed}
    planes, state = start.clone(), start.to_oracle()
    planes.step_segments(grad, segments, isa=isa, **options)
    adam(state, segments, grad.float().numpy(), **options)
    planes.assert_equal_to_oracle(state)
    planes.assert_guarded()
    return planes


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_every_length_equals_the_oracle(format_: str, adamw_mode: bool, isa: str) -> None:
    for numel in (*NUMELS[:-1], 127, 128, 129, 255, 256, 257):
        start, grad = StatePlanes.midway(numel, format_, seed=numel), grad_of(format_, numel, numel)
        segment = Segment(0, numel, 3, **HYPER, element=5 * 128)
        check_against_oracle(start, grad, [segment], isa, adamw_mode=adamw_mode)


def edges(numel: int, seed: int) -> torch.Tensor:
    """Normal numbers scaled over the whole range, with zeros, denormals, infinities and NaN of both signs."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(numel) * 2.0 ** rng.integers(-140, 120, numel)
    for special in (0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38):
        values[rng.integers(0, numel, numel // 20)] = special
    for special in (np.inf, -np.inf, np.nan, -np.nan):
        values[rng.integers(0, numel, 2)] = special
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("format_", FORMATS)
def test_extreme_values_equal_the_oracle(format_: str, isa: str) -> None:
    """Blocks of denormals, of huge numbers, of zeros, with NaN and infinities here and there; many steps."""
    numel = 40 * STATE_BLOCK - 5
    for seed in range(3):
        master, m, v, grad = (edges(numel, 10 * seed + i) for i in range(4))
        small = slice(3 * STATE_BLOCK, 9 * STATE_BLOCK)
        for plane in (m, v, grad):  # where scales are at their lower limits
            plane[small] = torch.nan_to_num(plane[small], 0, 0, 0).clamp(-1, 1) * 1e-26
            plane[10 * STATE_BLOCK : 12 * STATE_BLOCK] = 0
        planes = StatePlanes.of(master, m, v.abs(), format_)
        grad = grad.bfloat16() if format_.endswith("bf16") else grad
        for step in range(1, 4):
            segment = Segment(0, numel, step, **{**HYPER, "beta1": 0.3 if seed == 1 else 0.9})
            planes = check_against_oracle(planes, grad, [segment], isa)


@pytest.mark.parametrize("format_", FORMATS)
def test_threads_and_cuts_do_not_show(format_: str) -> None:
    """Whole on one thread == in segments == in separate calls on shifted views, on 1 to 8 threads."""
    numel = 3 * 65536 + 4097
    start, grad = StatePlanes.midway(numel, format_), grad_of(format_, numel, 0)
    whole = start.clone()
    whole.step(grad, 7, element=1000, threads=1, seed=3)
    rng = random.Random(5)
    unit = STATE_BLOCK if format_ in INT8 else 1
    for threads in range(1, 9):
        cuts = sorted({0, numel, *(rng.randrange(numel // unit) * unit for _ in range(threads))})
        segments = [Segment(a, b, 7, **HYPER, element=1000 + a) for a, b in itertools.pairwise(cuts)]
        in_segments = start.clone()
        in_segments.step_segments(grad, segments, threads=threads, seed=3)
        in_segments.assert_same(whole)
        in_segments.assert_guarded()
        in_calls = start.clone()
        for a, b in itertools.pairwise(cuts):
            in_calls.part(a, b).step(grad[a:b], 7, element=1000 + a, threads=threads, seed=3)
        in_calls.assert_same(whole)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("format_", ROUNDED)
@pytest.mark.parametrize("before_word", [0, 1, 100, 128, 300])
def test_element_numbers_pass_2_to_the_32(format_: str, before_word: int, isa: str) -> None:
    """The noise takes new keys there, wherever the planes are cut; a block keeps those of its first element."""
    numel = 700
    start, grad = StatePlanes.midway(numel, format_), grad_of(format_, numel, 0)
    element = 3 * 2**32 - before_word
    whole = check_against_oracle(start, grad, [Segment(0, numel, 2, **HYPER, element=element)], isa)
    cut = 2 * STATE_BLOCK
    parts = [Segment(a, b, 2, **HYPER, element=element + a) for a, b in ((0, cut), (cut, numel))]
    check_against_oracle(start, grad, parts, isa).assert_same(whole)


def test_noise_is_uniform_and_no_two_streams_are_alike() -> None:
    count = 20_000
    streams = [
        np.array([noise_of(seed, step, e, e) for e in range(count)], np.uint32)
        for seed, step in ((0, 1), (0, 2), (1, 1))
    ]
    for noise in streams:
        ones = np.unpackbits(noise.view(np.uint8)).reshape(count, 32).mean(axis=0)
        assert abs(ones - 0.5).max() < 4.5 * 0.5 / count**0.5
        chi = ((np.bincount(noise >> 24, minlength=256) - count / 256) ** 2 / (count / 256)).sum()
        assert abs(chi - 255) < 4.5 * (2 * 255) ** 0.5
        again = np.corrcoef(noise[1:], noise[:-1])[0, 1]
        assert abs(again) < 4.5 / count**0.5
    for a, b in itertools.combinations(streams, 2):
        for shift in range(8):
            assert np.mean(a[shift:] == b[: count - shift]) < 1e-3
            assert abs(np.corrcoef(a[shift:], b[: count - shift])[0, 1]) < 4.5 / (count - shift) ** 0.5


@pytest.mark.parametrize("format_", ROUNDED)
def test_seed_step_and_element_decide_the_rounding_of_the_state_alone(format_: str) -> None:
    """Other noise, other stored moments; an exact master is the same one step later."""
    start, grad = StatePlanes.midway(4096, format_), grad_of(format_, 4096, 0)
    first, other_seed, other_element, again = (start.clone() for _ in range(4))
    first.step(grad, 5, seed=1)
    again.step(grad, 5, seed=1)
    other_seed.step(grad, 5, seed=2)
    other_element.step(grad, 5, seed=1, element=128)
    again.assert_same(first)
    for other in (other_seed, other_element):
        assert not same_bits(other.exp_avg, first.exp_avg)
        assert not same_bits(other.exp_avg_sq, first.exp_avg_sq)
        assert same_bits(other.master(), first.master()) == (format_ not in INT8)


@pytest.mark.parametrize("format_", FORMATS)
def test_no_rate_and_no_decay_leave_the_master_bit_for_bit(format_: str) -> None:
    planes = StatePlanes.midway(4097, format_)
    before = planes.clone()
    for step in range(1, 4):
        planes.step(grad_of(format_, 4097, step), step, lr=0.0, weight_decay=0.0)
    assert same_bits(planes.weight, before.weight)
    assert same_bits(planes.master(), before.master())
    assert not same_bits(planes.exp_avg, before.exp_avg)


@pytest.mark.parametrize("format_", INT8)
def test_gaps_between_segments_keep_their_bytes(format_: str) -> None:
    """Of a segment's last block, too, the elements behind its end: padding of the parameter."""
    numel = 10 * STATE_BLOCK
    start, grad = StatePlanes.midway(numel, format_), grad_of(format_, numel, 0)
    planes = start.clone()
    segments = [
        Segment(0, 100, 2, **HYPER),
        Segment(2 * STATE_BLOCK, 3 * STATE_BLOCK + 1, 2, **HYPER),
        Segment(4 * STATE_BLOCK, 4 * STATE_BLOCK, 2, **HYPER),
    ]
    planes.step_segments(grad, segments, threads=3)
    touched = torch.zeros(numel, dtype=torch.bool)
    for segment in segments:
        touched[segment.begin : segment.end] = True
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq"):
        now, before = getattr(planes, name)[~touched], getattr(start, name)[~touched]
        assert same_bits(now, before), name
    untouched_scales = [block * 2 + i for block in (1, 4, 5, 6, 7, 8, 9) for i in (0, 1)]
    assert same_bits(planes.scale[untouched_scales], start.scale[untouched_scales])


BAD_CUTS = {
    "segment 0: begin 64 must be a multiple of 128": [Segment(64, 128, 1, **HYPER)],
    "segment 1: begin 100 must be a multiple of 128": [
        Segment(0, 100, 1, **HYPER),
        Segment(100, 256, 1, **HYPER),
    ],
    "segment 1: begin 120 must be a multiple of 128": [
        Segment(0, 100, 1, **HYPER),
        Segment(120, 256, 1, **HYPER),
    ],
    "segment 0: element must be in 0..2^64-1, got -1": [Segment(0, 128, 1, **HYPER, element=-1)],
}


@pytest.mark.parametrize("message", BAD_CUTS)
def test_a_cut_through_a_block_is_refused_before_anything_is_written(message: str) -> None:
    planes = StatePlanes.midway(300, "bf16/int8/bf16")
    before = planes.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        planes.step_segments(gradient(300, "bf16", 0), BAD_CUTS[message])
    planes.assert_same(before)


BAD_STATES = {
    "exp_avg_sq is torch.float32; it must be torch.uint8": {"exp_avg_sq": torch.zeros(300)},
    "exp_avg_sq is torch.int8; it must be torch.uint8": {"exp_avg_sq": torch.zeros(300, dtype=torch.int8)},
    "residual is torch.int16; it must be torch.int8": {"residual": torch.zeros(300, dtype=torch.int16)},
    "int8 moments need bf16 weights and their int8 residual": {"residual": None, "weight": torch.zeros(300)},
    "int8 moments need scale: 2 fp32 for each 128 elements": {"scale": None},
    "scale has 4 elements; 300 int8 moments have 6": {"scale": torch.zeros(4)},
    "scale is torch.float64; it must be torch.float32": {"scale": torch.zeros(6, dtype=torch.float64)},
    "scale belongs to int8 moments; exp_avg is torch.bfloat16": {
        "exp_avg": torch.zeros(300, dtype=torch.bfloat16),
        "exp_avg_sq": torch.zeros(300, dtype=torch.bfloat16),
    },
    "seed must be in 0..2^64-1, got -1": {"seed": -1},
    "seed must be in 0..2^64-1, got 18446744073709551616": {"seed": 2**64},
}


@pytest.mark.parametrize("message", BAD_STATES)
def test_planes_that_are_no_format_are_refused_by_name(message: str) -> None:
    planes = StatePlanes.midway(300, "bf16/int8/bf16")
    before = planes.clone()
    arrays = {**vars(planes), "grad": gradient(300, "bf16", 0), **BAD_STATES[message]}
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.adam(**arrays, step=1, **HYPER)
    planes.assert_same(before)


def test_a_scale_that_shares_memory_is_refused() -> None:
    planes = StatePlanes.midway(300, "bf16/int8/bf16")
    planes.scale = planes.exp_avg[1 : 1 + 24].view(torch.float32)  # one guard byte makes it aligned
    with pytest.raises(ValueError, match="share memory"):
        planes.step(gradient(300, "bf16", 0), 1)


def test_the_extension_itself_refuses_mixed_formats() -> None:
    fp32, bf16, code = np.zeros(10, np.float32), np.zeros(10, np.uint16), np.zeros(10, np.int8)
    options = {"adamw_mode": True, "grad_scale": 1.0, "seed": 0, "threads": 1, "isa": "scalar"}
    for message, planes in {
        "int8 moments need scale": (bf16, code, code, code, None, bf16),
        "only int8 moments have a scale": (fp32, None, fp32, fp32.copy(), fp32[:2], fp32),
        "int8 moments need bf16 weights and their residual": (fp32, None, code, code, fp32[:2], fp32),
        "exp_avg_sq must hold 10 elements of 1 bytes, not 10 of 4": (bf16, code, code, fp32, fp32[:2], bf16),
    }.items():
        with pytest.raises(ValueError, match=message):
            _adam.adam(*planes, [], **options)


@pytest.mark.parametrize("weight_format", ["bf16", "fp32"])
@pytest.mark.parametrize("state_format", ["bf16", "int8"])
def test_the_optimizer_class_steps_as_the_kernel_does(weight_format: str, state_format: str) -> None:
    if (weight_format, state_format) == ("fp32", "int8"):
        with pytest.raises(ConfigError, match="state_format 'int8' needs weight_format 'bf16'"):
            Adam(weight_format="fp32", state_format="int8")
        return
    numel = 1000
    optimizer = Adam(weight_format=weight_format, state_format=state_format, seed=9)
    specs = optimizer.state_specs(numel)
    expected_bytes = {("bf16", "bf16"): 6000, ("bf16", "int8"): 3000 + 64, ("fp32", "bf16"): 4000}
    assert sum(spec.size_bytes for spec in specs) == expected_bytes[weight_format, state_format]
    planes = {"weight": torch.empty(numel, dtype=optimizer.weight_dtype)}
    planes |= {spec.name: torch.full((spec.numel,), 7, dtype=spec.dtype) for spec in specs}
    master = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    optimizer.init_state(planes, master)
    zeros = torch.zeros(numel)
    direct = StatePlanes.of(master, zeros, zeros, f"{weight_format}/{state_format}/fp32")
    for step in (1, 2, 3):
        grad = gradient(numel, "fp32", step)
        optimizer.update(planes, [Segment(0, numel, step, **HYPER, element=256)], grad)
        direct.step(grad, step, element=256, seed=9)
    direct.assert_same(StatePlanes(**{"residual": None, "scale": None, **planes}))
