"""N19: arrays of 2^31 + 7 elements. Memory that nobody touches costs nothing, so most of it is never touched."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from offload.optim import kernels, rule_kernels
from offload.optim.segments import LionSegment, Segment

NUMEL = (1 << 31) + 7
SPANS = ((0, 1000), ((1 << 31) - 640, NUMEL))
"""The begin, and what lies on both sides of 2^31; multiples of a block of moments."""
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def untouched(numel: int, dtype: type) -> npt.NDArray:
    """Zeros that take memory where they are written to."""
    memory = mmap.mmap(-1, numel * np.dtype(dtype).itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


def fill(planes: dict[str, npt.NDArray]) -> dict[str, list[npt.NDArray]]:
    """The spans of planes, filled with what is plausible; copies of them."""
    rng = np.random.default_rng(0)
    parts: dict[str, list[npt.NDArray]] = {}
    for name, plane in planes.items():
        for begin, end in SPANS:
            if name == "scale":
                begin, end = begin // 128 * 2, -(-end // 128) * 2
            view = plane[begin:end]
            if view.dtype == np.uint16:  # bf16
                view[:] = rng.standard_normal(end - begin, np.float32).view(np.uint32) >> 16
            elif view.dtype.kind == "f":
                view[:] = np.abs(rng.standard_normal(end - begin)) * 0.1 + 0.01
            else:
                view[:] = rng.integers(0, 100, end - begin)
            parts.setdefault(name, []).append(view.copy())
    return parts


def test_indices_beyond_2_to_the_31_are_the_right_ones() -> None:
    """An update of both ends of large planes is that of small ones with the same values."""
    types = {
        "weight": np.uint16,
        "residual": np.int8,
        "exp_avg": np.int8,
        "exp_avg_sq": np.uint8,
        "grad": np.float16,
    }
    planes = {name: untouched(NUMEL, dtype) for name, dtype in types.items()}
    planes["scale"] = untouched(2 * -(-NUMEL // 128), np.float32)
    parts = fill(planes)
    segments = [Segment(begin, end, 3, **HYPER, element=begin) for begin, end in SPANS]
    kernels.adam_segments(**planes, segments=segments, seed=1, threads=2)
    for index, (begin, end) in enumerate(SPANS):
        own = {name: part[index] for name, part in parts.items()}
        kernels.adam_segments(
            **own, segments=[Segment(0, end - begin, 3, **HYPER, element=begin)], seed=1, threads=1
        )
        for name, plane in planes.items():
            at = begin // 128 * 2 if name == "scale" else begin
            np.testing.assert_array_equal(plane[at : at + own[name].size], own[name], err_msg=name)
        assert own["weight"].any()
    between = slice(1000, 1000 + (1 << 20))
    assert not any(plane[between].any() for name, plane in planes.items() if name != "scale")


def test_lion_beyond_2_to_the_31() -> None:
    types = {"weight": np.uint16, "residual": np.int16, "exp_avg": np.uint16, "grad": np.uint16}
    planes = {name: untouched(NUMEL, dtype) for name, dtype in types.items()}
    parts = fill(planes)
    numbers = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    segments = [LionSegment(begin, end, 3, **numbers, element=begin) for begin, end in SPANS]
    rule_kernels.lion_segments(*planes.values(), segments, seed=1, threads=2)
    for index, (begin, end) in enumerate(SPANS):
        own = [part[index] for part in parts.values()]
        rule_kernels.lion_segments(
            *own, [LionSegment(0, end - begin, 3, **numbers, element=begin)], seed=1, threads=1
        )
        for plane, expected in zip(planes.values(), own, strict=True):
            np.testing.assert_array_equal(plane[begin:end], expected)


def test_the_norm_beyond_2_to_the_31() -> None:
    """Nearly all of it is the one page of zeros that reading gives."""
    grad = untouched(NUMEL, np.float16)
    for position in (0, (1 << 31) - 1, 1 << 31, NUMEL - 1):
        grad[position] = 3
    total, finite = kernels.sum_of_squares(grad)
    assert finite and total == 4 * 9
    grad[NUMEL - 1] = np.inf
    assert not kernels.sum_of_squares(grad).finite


@pytest.mark.soak
def test_a_whole_pass_over_2_to_the_31_elements() -> None:
    """bf16 weights, 8-bit state: 11 GiB. Weights shrink by their decay, each rounded by its own noise."""
    if psutil.virtual_memory().available < 14 << 30:
        pytest.skip("needs 14 GiB of memory")
    types = {"weight": np.uint16, "residual": np.int8, "exp_avg": np.int8, "exp_avg_sq": np.uint8}
    planes = {name: untouched(NUMEL, dtype) for name, dtype in types.items()}
    planes["scale"], planes["grad"] = untouched(2 * -(-NUMEL // 128), np.float32), untouched(NUMEL, np.uint16)
    planes["weight"][:] = 0x3F80  # 1
    kernels.adam_segments(**planes, segments=[Segment(0, NUMEL, 1, **HYPER)], seed=1)
    for begin, end in (*SPANS, (1 << 30, (1 << 30) + 1280)):
        own = {name: np.zeros(end - begin, dtype) for name, dtype in types.items()}
        own |= {
            "scale": np.zeros(2 * -(-(end - begin) // 128), np.float32),
            "grad": np.zeros(end - begin, np.uint16),
        }
        own["weight"][:] = 0x3F80
        segments = [Segment(0, end - begin, 1, **HYPER, element=begin)]
        kernels.adam_segments(**own, segments=segments, seed=1)
        for name in ("weight", "residual"):
            np.testing.assert_array_equal(planes[name][begin:end], own[name], err_msg=name)
        assert len(np.unique(own["residual"])) == 2  # 1 - 0.001 lies between two masters of 24 bits
