"""Whether a device computes the bits of the C++ kernel: compared on the device itself, once per process."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from ..errors import OffloadError
from . import device_kernels, kernels
from .kernels import Segment

__all__ = ["AdamSegments", "check_torch", "check_triton", "choose_adam_segments"]

logger = logging.getLogger("offload.optim")

AdamSegments = Callable[..., None]
"""``adam_segments`` of ``kernels``, ``device_kernels`` or ``triton_adam``."""

SAMPLE_ELEMENTS: Final = 20_011
EDGES: Final = (
    *(0.0, 2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149, 2.0**-126, 1e-20, 1e-8, 1 - 2.0**-24, 1.0),
    *(1 + 2.0**-23, 1 + 2.0**-8, 1.5, 1e10, 2.0**64, (2 - 2.0**-23) * 2.0**127, math.inf, math.nan),
)
SEGMENTS: Final = (
    Segment(0, 7001, 1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    Segment(7001, 13000, 7, lr=1e-2, beta1=0.3, beta2=0.95, eps=0.0, weight_decay=0.0),
    Segment(13003, SAMPLE_ELEMENTS, 1000, lr=1e-4, beta1=0.95, beta2=0.9, eps=1e-15, weight_decay=1e-4),
)


class _Sample(NamedTuple):
    weight: torch.Tensor
    residual: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor

    def to(self, device: torch.device) -> _Sample:
        return _Sample(*(None if plane is None else plane.to(device, copy=True) for plane in self))  # type: ignore[arg-type]


def check_torch(device: torch.device) -> list[str]:
    """Where the torch operations on ``device`` differ from the C++ kernel: one line per plane that does."""
    on_cpu: dict[str, Any] = {"threads": 1}
    return list(_mismatches((kernels.adam_segments, torch.device("cpu"), on_cpu), (_torch(), device, {})))


def check_triton(device: torch.device) -> list[str]:
    """Where the Triton kernel on ``device`` differs from the torch operations there.

    Over planes of random and edge values, in every format and mode. Needs Triton and a CUDA device.
    """
    return list(_mismatches((_torch(), device, {}), (_triton(), device, {})))


@cache
def choose_adam_segments(device: torch.device) -> AdamSegments:
    """The fastest pass on ``device`` that has just computed the bits of the C++ kernel there.

    Raises an OffloadError where none does. The answer is kept for the process.
    """
    wrong = check_torch(device)
    if wrong:
        raise OffloadError(
            f"Adam on {device} does not compute what the CPU kernel does ({wrong[0]}; {len(wrong)} differences);"
            " keep the optimizer state in host memory"
        )
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return _torch()
    try:
        wrong = check_triton(device)
    except Exception as error:  # a compiler can fail in any way; the torch operations need none
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        logger.warning(
            "Triton's Adam on %s is not used, the slower torch operations are: %s (%d differences)",
            *(device, wrong[0], len(wrong)),
        )
        return _torch()
    return _triton()


def _torch() -> AdamSegments:
    return device_kernels.adam_segments


def _triton() -> AdamSegments:
    from . import triton_adam  # imports Triton, which most installations do not have

    return triton_adam.adam_segments


def _mismatches(
    expected: tuple[AdamSegments, torch.device, dict[str, Any]],
    actual: tuple[AdamSegments, torch.device, dict[str, Any]],
) -> Iterator[str]:
    for seed, (weight_format, grad_dtype) in enumerate(
        (("bf16", torch.bfloat16), ("bf16", torch.float32), ("fp32", torch.float32))
    ):
        sample = _make_sample(weight_format, grad_dtype, seed)
        for adamw_mode in (True, False):
            results = []
            for update, device, options in (expected, actual):
                planes = sample.to(device)
                update(*planes, SEGMENTS, adamw_mode=adamw_mode, grad_scale=0.37, **options)
                results.append(planes.to(torch.device("cpu")))
            for name, wanted, got in zip(_Sample._fields, *results, strict=True):
                count = 0 if wanted is None else _different(wanted, got)
                if count:
                    mode = "AdamW" if adamw_mode else "Adam"
                    yield f"{mode}, {weight_format} weight, {grad_dtype} grad: {name} differs in {count} elements"


def _different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements with different bits; two NaN count as equal."""
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())


def _make_sample(weight_format: str, grad_dtype: torch.dtype, seed: int) -> _Sample:
    """Planes in which half the values are random in magnitude, a quarter ordinary, a quarter edges."""
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, exp_avg_sq, grad = (_values(generator) for _ in range(4))
    weight, residual = master, None
    if weight_format == "bf16":
        weight, residual = (torch.empty(SAMPLE_ELEMENTS, dtype=t) for t in (torch.bfloat16, torch.int16))
        kernels.split_master(master, weight, residual)
    return _Sample(weight, residual, exp_avg, exp_avg_sq.abs(), grad.to(grad_dtype))


def _values(generator: torch.Generator) -> torch.Tensor:
    size = (SAMPLE_ELEMENTS,)
    ordinary = torch.randn(size, generator=generator)
    wide = ordinary * torch.exp2(torch.randint(-149, 100, size, generator=generator).float())
    edges = torch.tensor((*EDGES, *(-edge for edge in EDGES)))
    edge = edges[torch.randint(len(edges), size, generator=generator)]
    kind = torch.randint(4, size, generator=generator)
    return torch.where(kind == 0, edge, torch.where(kind == 1, ordinary, wide))
