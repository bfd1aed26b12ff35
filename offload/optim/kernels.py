"""The CPU optimizer kernels, in place over flat arrays. Only this module and ``rule_kernels`` touch the
extension ``_adam``.

An array is a one-dimensional, contiguous torch tensor on the CPU, or a numpy array. numpy has no bf16: pass
the bit patterns as ``uint16``. Results do not depend on the instruction set, on the number of threads, or on
how an array is cut into calls and segments.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
import torch

from ..accel import native_watchers
from .segments import Segment, Span, as_tuples

try:
    from .. import _adam
except ImportError as error:
    raise ImportError(
        f"offload's CPU kernels are not usable: {error}; build them with `pip install -e .` in the checkout"
        " (needs a C++20 compiler, no CUDA toolkit), or reinstall the wheel for this Python and machine"
    ) from error

__all__ = [
    "SQUARE_BLOCK",
    "STATE_BLOCK",
    "Array",
    "Segment",
    "SquareSum",
    "adam",
    "adam_segments",
    "assign_weight",
    "block_square_sums",
    "decode_moments",
    "default_threads",
    "encode_moments",
    "isas",
    "join_master",
    "split_master",
    "sum_of_squares",
]

logger = logging.getLogger("offload.optim")

Array: TypeAlias = torch.Tensor | npt.NDArray[Any]

SQUARE_BLOCK: Final = _adam.SQUARE_BLOCK
"""Elements per partial sum of :func:`block_square_sums`."""

STATE_BLOCK: Final = _adam.STATE_BLOCK
"""Elements that share their scales where the moments are int8."""

THREADS_MAX: Final = 1024

# What an element type is called in torch and in numpy, and the numpy type that crosses the boundary.
_TORCH_TYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
_NUMPY_TYPES: Final = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.float16),
    "int16": np.dtype(np.int16),
    "fp32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}

_EXP_AVG_SQ_TYPE: Final = {"fp32": "fp32", "bf16": "bf16", "int8": "uint8"}  # beside exp_avg of a type
_SEEDS: Final = 1 << 64


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
    scale: Array | None = None,
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
    segment = Segment(0, numel_of(weight), step, lr, beta1, beta2, eps, weight_decay)
    adam_segments(
        weight,
        residual,
        exp_avg,
        exp_avg_sq,
        grad,
        [segment],
        scale=scale,
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
    scale: Array | None = None,
    adamw_mode: bool = True,
    grad_scale: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """One Adam step on the elements that ``segments`` name, in one pass over memory; others are not touched.

    The types of the planes tell the state format. All arithmetic is fp32 and the weight is updated with the moments
    as they are computed: only what is stored is rounded, stochastically, by ``seed``, step and element.

    Args:
        weight: bf16 with a ``residual`` (together the fp32 master), or fp32 without.
        residual: None with fp32 weights; int8 with int8 moments (a master of 24 bits), else int16 (exact).
        exp_avg, exp_avg_sq: moments, both fp32, both bf16, or int8 and uint8 codes.
        grad: bf16, fp16 or fp32; not bf16 with fp32 weights.
        segments: ascending, without overlap; each carries its own step and hyper-parameters. With int8 moments they
            begin on multiples of :data:`STATE_BLOCK`, and no two of them in one block.
        scale: of int8 moments: fp32, two for each block of :data:`STATE_BLOCK` elements, exp_avg's first.
        adamw_mode: decoupled weight decay (AdamW); False adds ``weight_decay`` x master to the gradient.
        grad_scale: multiplies the gradient first: 1 / loss scale times the clip coefficient.
        seed: of stochastic rounding, in 0..2^64-1; with fp32 moments nothing is rounded.
        threads: None for :func:`default_threads`.
        isa: "auto" (the environment variable ``OFFLOAD_ISA``, else the best) or one of :func:`isas`.
    """
    numel = numel_of(weight)
    moments = _moments(exp_avg, exp_avg_sq, scale, numel)
    if residual is None and moments.format == "int8":
        raise ValueError("int8 moments need bf16 weights and their int8 residual; residual is None")
    views = master_views(
        weight, residual, grad, residual_type="int8" if moments.format == "int8" else "int16"
    )
    check_noise(seed, segments)
    _adam.adam(
        views.weight,
        views.residual,
        moments.exp_avg,
        moments.exp_avg_sq,
        moments.scale,
        views.grad,
        as_tuples(segments),
        adamw_mode=adamw_mode,
        grad_scale=grad_scale,
        seed=seed,
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


def encode_moments(
    exp_avg: Array,
    exp_avg_sq: Array,
    to_exp_avg: Array,
    to_exp_avg_sq: Array,
    to_scale: Array | None = None,
    *,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """Write fp32 moments as bf16 ones, or as int8 codes with their scales, rounded to the nearest."""
    numel = numel_of(exp_avg)
    moments = _moments(to_exp_avg, to_exp_avg_sq, to_scale, numel, prefix="to_")
    _refuse_fp32(moments, "to_exp_avg")
    _adam.encode_moments(
        flat_view("exp_avg", exp_avg, numel, "fp32", written=False),
        flat_view("exp_avg_sq", exp_avg_sq, numel, "fp32", written=False),
        moments.exp_avg,
        moments.exp_avg_sq,
        moments.scale,
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


def decode_moments(
    from_exp_avg: Array,
    from_exp_avg_sq: Array,
    from_scale: Array | None,
    exp_avg: Array,
    exp_avg_sq: Array,
    *,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """Write the fp32 moments that bf16 ones, or int8 codes and their scales, stand for."""
    numel = numel_of(exp_avg)
    moments = _moments(from_exp_avg, from_exp_avg_sq, from_scale, numel, prefix="from_", written=False)
    _refuse_fp32(moments, "from_exp_avg")
    _adam.decode_moments(
        moments.exp_avg,
        moments.exp_avg_sq,
        moments.scale,
        flat_view("exp_avg", exp_avg, numel, "fp32"),
        flat_view("exp_avg_sq", exp_avg_sq, numel, "fp32"),
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


def sum_of_squares(grad: Array, *, threads: int | None = None, isa: str = "auto") -> SquareSum:
    """Sum of squares of a bf16, fp16 or fp32 array, and whether all its elements are finite.

    The same bits whatever the threads and the instruction set. For an array in pieces see
    :func:`block_square_sums`.
    """
    total = math.fsum(block_square_sums(grad, threads=threads, isa=isa))
    return SquareSum(total, math.isfinite(total))  # squares of floats never overflow a double


def block_square_sums(
    grad: Array, *, threads: int | None = None, isa: str = "auto"
) -> npt.NDArray[np.float64]:
    """Sums of squares of the :data:`SQUARE_BLOCK`-element blocks of a bf16, fp16 or fp32 array, in order.

    For the norm of an array in pieces, cut at multiples of a block, collect the sums of all pieces and add
    them with ``math.fsum``: it rounds once, at the end, so neither the cuts nor their order show.
    """
    numel = numel_of(grad)
    sums = np.empty(-(-numel // SQUARE_BLOCK), np.float64)
    values = flat_view("grad", grad, numel, "bf16", "fp16", "fp32", written=False)
    _adam.block_square_sums(values, sums, threads=threads_of(threads), isa=isa_of(isa))
    return sums


def split_master(
    master: Array, weight: Array, residual: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Write an fp32 ``master`` as bf16 ``weight`` and ``residual``; :func:`join_master` gives it back.

    With an int16 residual exact for every finite value and both infinities; with an int8 one rounded half up to
    24 bits. A NaN becomes the canonical NaN.
    """
    numel = numel_of(master)
    _adam.split_master(
        flat_view("master", master, numel, "fp32", written=False),
        flat_view("weight", weight, numel, "bf16"),
        flat_view("residual", residual, numel, "int16", "int8"),
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


def join_master(
    weight: Array, residual: Array, master: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Write the fp32 ``master`` that ``weight`` and ``residual`` stand for."""
    numel = numel_of(weight)
    _adam.join_master(
        flat_view("weight", weight, numel, "bf16", written=False),
        flat_view("residual", residual, numel, "int16", "int8", written=False),
        flat_view("master", master, numel, "fp32"),
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


def assign_weight(
    weight: Array, residual: Array, fresh: Array, *, threads: int | None = None, isa: str = "auto"
) -> None:
    """Take over ``fresh`` bf16 weights: an unchanged one keeps its residual, a changed one has none."""
    numel = numel_of(weight)
    _adam.assign_weight(
        flat_view("weight", weight, numel, "bf16"),
        flat_view("residual", residual, numel, "int16", "int8"),
        flat_view("fresh", fresh, numel, "bf16", written=False),
        threads=threads_of(threads),
        isa=isa_of(isa),
    )


class MasterViews(NamedTuple):
    """What of an update is not a moment."""

    weight: npt.NDArray[Any]
    residual: npt.NDArray[Any] | None
    grad: npt.NDArray[Any]


def master_views(weight: Array, residual: Array | None, grad: Array, *, residual_type: str) -> MasterViews:
    """The views of weight, residual and gradient, of types that go together."""
    numel = numel_of(weight)
    if residual is None:
        weight_view, residual_view = flat_view("weight", weight, numel, "fp32"), None
        grad_types: tuple[str, ...] = ("fp16", "fp32")
    else:
        weight_view = flat_view("weight", weight, numel, "bf16")
        residual_view = flat_view("residual", residual, numel, residual_type)
        grad_types = ("bf16", "fp16", "fp32")
    return MasterViews(weight_view, residual_view, flat_view("grad", grad, numel, *grad_types, written=False))


def check_noise(seed: int, segments: Sequence[Span]) -> None:
    """Raises ValueError where what the noise depends on is out of range."""
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must be in 0..2^64-1, got {seed}")
    for index, segment in enumerate(segments):
        if not 0 <= segment.element < _SEEDS:
            raise ValueError(f"segment {index}: element must be in 0..2^64-1, got {segment.element}")


class _Moments(NamedTuple):
    format: str
    exp_avg: npt.NDArray[Any]
    exp_avg_sq: npt.NDArray[Any]
    scale: npt.NDArray[Any] | None


def _moments(
    exp_avg: Array,
    exp_avg_sq: Array,
    scale: Array | None,
    numel: int,
    *,
    prefix: str = "",
    written: bool = True,
) -> _Moments:
    """The planes of the moments in one format, that of exp_avg."""
    first = flat_view(f"{prefix}exp_avg", exp_avg, numel, "fp32", "bf16", "int8", written=written)
    format_ = {4: "fp32", 2: "bf16", 1: "int8"}[first.itemsize]
    second = flat_view(f"{prefix}exp_avg_sq", exp_avg_sq, numel, _EXP_AVG_SQ_TYPE[format_], written=written)
    if format_ != "int8":
        if scale is not None:
            raise ValueError(f"{prefix}scale belongs to int8 moments; {prefix}exp_avg is {exp_avg.dtype}")
        return _Moments(format_, first, second, None)
    if scale is None:
        raise ValueError(f"int8 moments need {prefix}scale: 2 fp32 for each {STATE_BLOCK} elements")
    scales = 2 * -(-numel // STATE_BLOCK)
    if numel_of(scale) != scales:
        raise ValueError(f"{prefix}scale has {numel_of(scale)} elements; {numel} int8 moments have {scales}")
    return _Moments(
        format_, first, second, flat_view(f"{prefix}scale", scale, scales, "fp32", written=written)
    )


def _refuse_fp32(moments: _Moments, name: str) -> None:
    if moments.format == "fp32":
        raise ValueError(f"{name} is fp32; it must be bf16 or int8: fp32 moments are stored as they are")


def numel_of(array: Array) -> int:
    """Elements of a tensor or a numpy array."""
    return array.numel() if isinstance(array, torch.Tensor) else array.size


def flat_view(name: str, array: Array, numel: int, *types: str, written: bool = True) -> npt.NDArray[Any]:
    """The numpy view that crosses the boundary, after every check that a caller can fail."""
    if numel_of(array) != numel:
        raise ValueError(f"{name} has {numel_of(array)} elements; the first array of the call has {numel}")
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


def threads_of(threads: int | None) -> int:
    """The number of threads that a call uses."""
    if threads is None:
        return default_threads()
    if not 1 <= threads <= THREADS_MAX:
        raise ValueError(f"threads must be in 1..{THREADS_MAX} or None, got {threads}")
    return threads


def isa_of(isa: str) -> str:
    """The instruction set that a call uses."""
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
