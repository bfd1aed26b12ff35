"""Lion, Adagrad and SGD on the CPU, in place over flat arrays: what ``kernels`` is for Adam.

Arrays, threads and instruction sets are those of ``kernels``, and so is what results do not depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _adam
from . import kernels
from .kernels import Array
from .segments import AdagradSegment, LionSegment, SgdSegment, Span, as_tuples

__all__ = ["adagrad_segments", "lion_segments", "sgd_segments"]


def lion_segments(
    weight: Array,
    residual: Array | None,
    exp_avg: Array,
    grad: Array,
    segments: Sequence[LionSegment],
    *,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One step of Lion on the elements that ``segments`` name, in one pass over memory; others are not touched.

    Args:
        weight, residual, grad, grad_scale, seed, threads, isa: as in :func:`offload.optim.kernels.adam_segments`.
        exp_avg: the moment, fp32 or bf16; bf16 is rounded stochastically.
    """
    planes = _planes(weight, residual, ("exp_avg", exp_avg), grad)
    _adam.lion(*planes, _tuples(segments, seed), grad_scale=grad_scale, seed=seed, **_options(threads, isa))


def adagrad_segments(
    weight: Array,
    residual: Array | None,
    state_sum: Array,
    grad: Array,
    segments: Sequence[AdagradSegment],
    *,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One step of Adagrad, as :func:`lion_segments`; ``state_sum`` is that of the squares of the gradients."""
    planes = _planes(weight, residual, ("state_sum", state_sum), grad)
    _adam.adagrad(
        *planes, _tuples(segments, seed), grad_scale=grad_scale, seed=seed, **_options(threads, isa)
    )


def sgd_segments(
    weight: Array,
    residual: Array | None,
    momentum_buffer: Array | None,
    grad: Array,
    segments: Sequence[SgdSegment],
    *,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One step of SGD, as :func:`lion_segments`; without ``momentum_buffer`` every segment's momentum must be 0."""
    for index, segment in enumerate(segments):
        if momentum_buffer is None and segment.momentum != 0:
            raise ValueError(
                f"segment {index}: momentum {segment.momentum} needs a momentum_buffer, got None"
            )
    moment = None if momentum_buffer is None else ("momentum_buffer", momentum_buffer)
    planes = _planes(weight, residual, moment, grad)
    _adam.sgd(*planes, _tuples(segments, seed), grad_scale=grad_scale, seed=seed, **_options(threads, isa))


def _planes(
    weight: Array, residual: Array | None, moment: tuple[str, Array] | None, grad: Array
) -> tuple[Any, Any, Any, Any]:
    """The numpy views of the planes, after every check that a caller can fail."""
    views = kernels.master_views(weight, residual, grad, residual_type="int16")
    view = None
    if moment is not None:
        name, array = moment
        view = kernels.flat_view(name, array, kernels.numel_of(weight), "fp32", "bf16")
    return views.weight, views.residual, view, views.grad


def _tuples(segments: Sequence[Span], seed: int) -> list[tuple[Any, ...]]:
    kernels.check_noise(seed, segments)
    return as_tuples(segments)


def _options(threads: int | None, isa: str) -> dict[str, Any]:
    return {"threads": kernels.threads_of(threads), "isa": kernels.isa_of(isa)}
