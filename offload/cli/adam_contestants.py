"""Who takes part in ``offload bench adam``: our kernel in every format, torch's fused AdamW, DeepSpeedCPUAdam, a copy.

The peers need no module of ours, so that an interpreter of their own can make them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..slab import map_slab

HYPER: Final[dict[str, Any]] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
COPY: Final = "copy"
TORCH: Final = "torch AdamW fused fp32"
DEEPSPEED: Final = {
    "DeepSpeedCPUAdam fp32": 28.0,
    "DeepSpeedCPUAdam bf16 params": 14.0,  # its moments are bf16 too
    "DeepSpeedCPUAdam whole step": 4 + 8 + 28 + 6.0,
}
"""Bytes per parameter that a step of each reads and writes."""


@dataclass(slots=True)
class Contestant:
    """One of those compared: what one step of it does, moves and took."""

    name: str
    bytes_per_parameter: float
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeroed memory, allocated as the engine's slabs are, and touched."""
    return torch.frombuffer(map_slab(max(1, numel * dtype.itemsize)), dtype=dtype, count=numel).zero_()


def ours(numel: int, *, isas: Sequence[str], threads: Sequence[int]) -> Iterator[Contestant]:
    """Every format, by instruction set and number of threads. Formats share planes: values do not matter."""
    from ..optim import kernels

    def filled(dtype: torch.dtype) -> torch.Tensor:
        return allocate(numel, dtype).normal_()

    bf16_grad, fp32_grad = filled(torch.bfloat16), filled(torch.float32)
    fp32, residual = filled(torch.float32), allocate(numel, torch.int16)
    split = {"weight": filled(torch.bfloat16), "residual": residual}
    moments = "exp_avg", "exp_avg_sq"
    fp32_state = {name: allocate(numel, torch.float32) for name in moments}
    bf16_state = {name: allocate(numel, torch.bfloat16) for name in moments}
    int8_state = {
        "residual": allocate(numel, torch.int8),
        "exp_avg": allocate(numel, torch.int8),
        "exp_avg_sq": allocate(numel, torch.uint8),
        "scale": allocate(2 * -(-numel // kernels.STATE_BLOCK), torch.float32),
    }
    formats: dict[str, dict[str, torch.Tensor | None]] = {
        "bf16": {**split, **fp32_state, "grad": bf16_grad},
        "bf16, fp32 grad": {**split, **fp32_state, "grad": fp32_grad},
        "bf16, bf16 state": {**split, **bf16_state, "grad": bf16_grad},
        "bf16, int8 state": {**split, **int8_state, "grad": bf16_grad},
        "fp32": {"weight": fp32, "residual": None, **fp32_state, "grad": fp32_grad},
        "fp32, bf16 state": {"weight": fp32, "residual": None, **bf16_state, "grad": fp32_grad},
    }
    for count in threads:
        for isa in isas:
            where = f"{isa} {count} thread" + "s" * (count > 1)
            for name, planes in formats.items():
                yield Contestant(
                    f"offload {name} {where}", _traffic(planes, numel), _adam(planes, count, isa)
                )
            yield Contestant(
                f"offload norm bf16 {where}",
                2,
                lambda count=count, isa=isa: kernels.sum_of_squares(bf16_grad, threads=count, isa=isa),  # type: ignore[misc]
            )
            yield Contestant(
                f"offload whole step bf16 {where}",
                2 + _traffic(formats["bf16"], numel),
                whole_step(formats["bf16"], count, isa),
            )


def _traffic(planes: Mapping[str, torch.Tensor | None], numel: int) -> float:
    """Bytes per parameter: the gradient is read, all others are read and written."""
    return sum(p.nbytes * (1 if name == "grad" else 2) for name, p in planes.items() if p is not None) / numel


def _adam(planes: Mapping[str, Any], threads: int, isa: str, grad_scale: float = 1.0) -> Callable[[], object]:
    from ..optim import kernels

    return lambda: kernels.adam(**planes, step=10, **HYPER, grad_scale=grad_scale, threads=threads, isa=isa)


def whole_step(planes: Mapping[str, Any], threads: int, isa: str) -> Callable[[], object]:
    """All that the CPU does in a step: norm and finite check, then unscale, clip, update and 16-bit weight in one
    pass. The peers' own takes four: :func:`peers_whole_step`."""
    from ..optim import kernels

    update = _adam(planes, threads, isa, grad_scale=0.5)

    def step() -> None:
        kernels.sum_of_squares(planes["grad"], threads=threads, isa=isa)
        update()

    return step


def torch_fused(numel: int) -> Contestant:
    """``torch.optim.AdamW`` in its fastest form."""
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"], fused=True)
    return Contestant(TORCH, 28, optimizer.step)


def deepspeed(name: str, numel: int) -> Contestant:
    """One of :data:`DEEPSPEED`.

    Raises:
        ImportError: deepspeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    param = torch.nn.Parameter(torch.randn(numel, dtype=dtype))
    param.grad = torch.randn(numel, dtype=dtype)
    optimizer = DeepSpeedCPUAdam([param], lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])
    step = peers_whole_step(optimizer, param) if "whole step" in name else optimizer.step
    return Contestant(name, DEEPSPEED[name], step)


def peers_whole_step(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> Callable[[], object]:
    """What ZeRO-Offload does on the CPU: norm, unscale and clip, CPU Adam, and the cast to 16-bit weights."""
    weight, grad = torch.empty(param.numel(), dtype=torch.bfloat16), param.grad
    if grad is None:
        raise AssertionError("the parameter has no gradient")

    def step() -> None:
        grad.norm()
        grad.mul_(1.0)
        optimizer.step()
        weight.copy_(param.detach())

    return step


def copying(numel: int) -> Contestant:
    """fp32 elements, copied."""
    source, target = allocate(numel, torch.float32).normal_(), allocate(numel, torch.float32)
    return Contestant(COPY, 8, lambda: target.copy_(source))
