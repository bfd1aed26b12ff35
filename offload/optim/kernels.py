"""The CPU optimizer kernels, in place over flat arrays. The only module that touches the extension ``_adam``.

An array is a one-dimensional, contiguous torch tensor on the CPU, or a numpy array. numpy has no bf16: pass
the bit patterns as ``uint16``. Results do not depend on the instruction set, on the number of threads, or on
how an array is cut into calls and segments.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
import torch

from ..accel import native_watchers

try:
    from .. import _adam
except ImportError as error:
    raise ImportError(
        f"offload's CPU kernels are not usable: {error}; build them with `pip install -e .` in the checkout"
        " (needs a C++20 compiler, no CUDA toolkit), or reinstall the wheel for this Python and machine"
    ) from error

__all__ = [
    "SQUARE_BLOCK",
    "Array",
    "Segment",
    "SquareSum",
    "adam",
    "adam_segments",
    "assign_weight",
    "block_square_sums",
    "default_threads",
    "isas",
    "join_master",
    "split_master",
    "sum_of_squares",
]

logger = logging.getLogger("offload.optim")

Array: TypeAlias = torch.Tensor | npt.NDArray[Any]

SQUARE_BLOCK: Final = _adam.SQUARE_BLOCK
"""Elements per partial sum of :func:`block_square_sums`."""

THREADS_MAX: Final = 1024

# What an element type is called in torch and in numpy, and the numpy type that crosses the boundary.
_TORCH_TYPES: Final = {"bf16": torch.bfloat16, "int16": torch.int16, "fp32": torch.float32}
_NUMPY_TYPES: Final = {"bf16": np.dtype(np.uint16), "int16": np.dtype(np.int16), "fp32": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``[begin, end)`` of a chunk and the hyper-parameters they share. ``step`` counts from 1."""

    begin: int
    end: int
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class SquareSum(NamedTuple):
    """Sum of squares of an array; ``finite`` is False if an element is NaN or infinite."""

    sum: float
    finite: bool


def isas() -> list[str]:
    """The instruction sets that this machine supports, best first; the last is ``"scalar"``."""
    return _adam.isas()


@cache
def default_threads() -> int:
    """Threads a kernel uses unless told otherwise: this rank's share of the physical cores it may run on.

    ``OMP_NUM_THREADS``, which launchers set to 1, is another library's setting and is not read.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or cpus
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cpus, physical, _cgroup_cpus()) // max(1, ranks))


def _cgroup_cpus() -> int:
    """Whole CPUs that the container's quota allows; a large number where there is no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return THREADS_MAX


def adam(
    weight: Array,
    residual: Array | None,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool = True,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One Adam step over whole planes. See :func:`adam_segments`; ``step`` counts from 1."""
    segment = Segment(0, _numel(weight), step, lr, beta1, beta2, eps, weight_decay)
    adam_segments(
        weight,
        residual,
        exp_avg,
        exp_avg_sq,
        grad,
        [segment],
        adamw_mode=adamw_mode,
        grad_scale=grad_scale,
        seed=seed,
        threads=threads,
        isa=isa,
    )


def adam_segments(
    weight: Array,
    residual: Array | None,
    exp_avg: Array,
    exp_avg_sq: Array,
    grad: Array,
    segments: Sequence[Segment],
    *,
    adamw_mode: bool = True,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One Adam step on the elements that ``segments`` name, in one pass over memory; others are not touched.

    Args:
        weight: bf16 with a ``residual`` (together the exact fp32 master), or fp32 without.
        residual: int16, or None with fp32 weights.
        exp_avg, exp_avg_sq: fp32 moments.
        grad: bf16 or fp32; fp32 with fp32 weights.
        segments: ascending, without overlap; each carries its own step and hyper-parameters.
        adamw_mode: decoupled weight decay (AdamW); False adds ``weight_decay`` x master to the gradient.
        grad_scale: multiplies the gradient first: 1 / loss scale times the clip coefficient.
        seed: for moments that are rounded stochastically; fp32 moments do not use it.
        threads: None for :func:`default_threads`.
        isa: "auto" (the environment variable ``OFFLOAD_ISA``, else the best) or one of :func:`isas`.
    """
    numel = _numel(weight)
    grad_types: tuple[str, ...]
    if residual is None:
        weight_view, residual_view, grad_types = _flat("weight", weight, numel, "fp32"), None, ("fp32",)
    else:
        weight_view = _flat("weight", weight, numel, "bf16")
        residual_view, grad_types = _flat("residual", residual, numel, "int16"), ("bf16", "fp32")
    _adam.adam(
        weight_view,
        residual_view,
        _flat("exp_avg", exp_avg, numel, "fp32"),
        _flat("exp_avg_sq", exp_avg_sq, numel, "fp32"),
        _flat("grad", grad, numel, *grad_types, written=False),
        [astuple(segment) for segment in segments],
        adamw_mode=adamw_mode,
        grad_scale=grad_scale,
        threads=_threads(threads),
        isa=_isa(isa),
    )


def sum_of_squares(grad: Array, *, threads: int | None = None, isa: str = "auto") -> SquareSum:
    """Sum of squares of a bf16 or fp32 array, and whether all its elements are finite.

    The same bits whatever the threads and the instruction set. For an array in pieces see
    :func:`block_square_sums`.
    """
    total = math.fsum(block_square_sums(grad, threads=threads, isa=isa))
    return SquareSum(total, math.isfinite(total))  # squares of floats never overflow a double


def block_square_sums(
    grad: Array, *, threads: int | None = None, isa: str = "auto"
) -> npt.NDArray[np.float64]:
    """Sums of squares of the :data:`SQUARE_BLOCK`-element blocks of a bf16 or fp32 array, in order.

    For the norm of an array in pieces, cut at multiples of a block, collect the sums of all pieces and add
    them with ``math.fsum``: it rounds once, at the end, so neither the cuts nor their order show.
    """
    numel = _numel(grad)
    sums = np.empty(-(-numel // SQUARE_BLOCK), np.float64)
    values = _flat("grad", grad, numel, "bf16", "fp32", written=False)
    _adam.block_square_sums(values, sums, threads=_threads(threads), isa=_isa(isa))
    return sums


def split_master(
    master: Array, weight: Array, residual: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Write an fp32 ``master`` as bf16 ``weight`` and int16 ``residual``; :func:`join_master` gives it back.

    Exact for every finite value and both infinities. A NaN becomes the canonical NaN.
    """
    numel = _numel(master)
    _adam.split_master(
        _flat("master", master, numel, "fp32", written=False),
        _flat("weight", weight, numel, "bf16"),
        _flat("residual", residual, numel, "int16"),
        threads=_threads(threads),
        isa=_isa(isa),
    )


def join_master(
    weight: Array, residual: Array, master: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Write the fp32 ``master`` that ``weight`` and ``residual`` stand for."""
    numel = _numel(weight)
    _adam.join_master(
        _flat("weight", weight, numel, "bf16", written=False),
        _flat("residual", residual, numel, "int16", written=False),
        _flat("master", master, numel, "fp32"),
        threads=_threads(threads),
        isa=_isa(isa),
    )


def assign_weight(
    weight: Array, residual: Array, fresh: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Take over ``fresh`` bf16 weights: an unchanged one keeps its residual, a changed one has none."""
    numel = _numel(weight)
    _adam.assign_weight(
        _flat("weight", weight, numel, "bf16"),
        _flat("residual", residual, numel, "int16"),
        _flat("fresh", fresh, numel, "bf16", written=False),
        threads=_threads(threads),
        isa=_isa(isa),
    )


def _numel(array: Array) -> int:
    return array.numel() if isinstance(array, torch.Tensor) else array.size


def _flat(name: str, array: Array, numel: int, *types: str, written: bool = True) -> npt.NDArray[Any]:
    """The numpy view that crosses the boundary, after every check that a caller can fail."""
    if _numel(array) != numel:
        raise ValueError(f"{name} has {_numel(array)} elements; the first array of the call has {numel}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be flat, got shape {tuple(array.shape)}; pass a view of one dimension")
    if isinstance(array, torch.Tensor):
        view = _flat_torch(name, array, types)
    elif array.dtype not in [_NUMPY_TYPES[known] for known in types]:
        wanted = " or ".join(f"{_NUMPY_TYPES[known]} for {known}" for known in types)
        raise ValueError(f"{name} is {array.dtype}; it must be {wanted}")
    else:
        view = array
    if not view.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous (strides {view.strides} bytes)")
    if not view.flags.aligned:
        raise ValueError(f"{name} starts at an address that is not a multiple of {view.itemsize} bytes")
    if written and not view.flags.writeable:
        raise ValueError(f"{name} is written to, but is read-only")
    for watch in native_watchers:
        watch(array, written)
    return view


def _flat_torch(name: str, tensor: torch.Tensor, types: tuple[str, ...]) -> npt.NDArray[Any]:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the kernel runs on the CPU")
    if tensor.dtype not in [_TORCH_TYPES[known] for known in types]:
        wanted = " or ".join(str(_TORCH_TYPES[known]) for known in types)
        raise ValueError(f"{name} is {tensor.dtype}; it must be {wanted}")
    plain = tensor.detach()
    view: npt.NDArray[Any] = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return view


def _threads(threads: int | None) -> int:
    if threads is None:
        return default_threads()
    if not 1 <= threads <= THREADS_MAX:
        raise ValueError(f"threads must be in 1..{THREADS_MAX} or None, got {threads}")
    return threads


def _isa(isa: str) -> str:
    chosen = os.environ.get("OFFLOAD_ISA", "auto") if isa == "auto" else isa
    if chosen != "auto" and chosen not in isas():
        source = "OFFLOAD_ISA" if isa == "auto" else "isa"
        usable = ", ".join(["auto", *isas()])
        raise ValueError(f"{source}={chosen!r} is not supported on this machine; choose one of {usable}")
    best = isas()[0] if chosen == "auto" else chosen
    _log_choice(best)
    return best


@cache
def _log_choice(isa: str) -> None:
    """Once per instruction set: what a slow step is asked for first."""
    threads = default_threads()
    log: Callable[..., None] = logger.warning if threads == 1 else logger.info
    log("CPU optimizer kernels: isa=%s, threads=%d by default", isa, threads)
