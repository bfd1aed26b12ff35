"""What a configuration asks for, as the plan takes it; and what of it this version does not carry out yet.

Pure: no torch, so that `offload plan` and the engine start from the same numbers.
"""

from __future__ import annotations

import os

from . import metrics
from .config import OffloadConfig
from .errors import ConfigError
from .plan import CHUNK_ELEMENTS_MAX, WEIGHT_ITEMSIZE, Home, Placement

HOST_SHARE = 0.8
"""Of the memory that is available at the start, for `memory.host_bytes: "auto"`."""


def placement_of(config: OffloadConfig) -> Placement:
    """What a configuration asks for, with the budgets of this machine where it says "auto"."""
    zero, memory = config.zero_optimization, config.memory
    precision = config.precision
    if precision == "fp16":
        raise AssertionError("fp16 is refused before this")
    accumulation = config.resolve_batch(1).accumulation
    update = zero.offload_optimizer.update
    grad_itemsize = WEIGHT_ITEMSIZE[precision]
    if config.data_types.grad_accum_dtype == "fp32" or (
        config.data_types.grad_accum_dtype is None and accumulation > 1
    ):
        grad_itemsize = 4
    host_bytes = memory.host_bytes
    if host_bytes == "auto":
        host_bytes = int(metrics.memory_available_bytes() * HOST_SHARE)
    return Placement(
        precision=precision,
        param_home=_home(zero.offload_param.device),
        state_home=_home(zero.offload_optimizer.device),
        update="backward" if update == "backward" else "step",
        grad_itemsize=grad_itemsize,
        micro_batches=accumulation,
        host_bytes=host_bytes,
        nvme_bytes=None if memory.nvme_bytes == "auto" else memory.nvme_bytes,
        chunk_elements_max=min(zero.sub_group_size or CHUNK_ELEMENTS_MAX, CHUNK_ELEMENTS_MAX),
    )


def nvme_path_of(config: OffloadConfig) -> str | None:
    """The one directory for swap files; None where nothing is homed on nvme."""
    return next(iter(_nvme_paths(config)), None)


def refuse_unbuilt(config: OffloadConfig) -> None:
    """Raises ConfigError naming every setting that this version does not carry out yet."""
    zero, problems = config.zero_optimization, []

    def refuse(path: str, what: str, instead: str) -> None:
        problems.append(f"{path}: {what} is not built yet; {instead}")

    if config.precision == "fp16":
        refuse("fp16.enabled", "fp16 training", "use bf16, which needs no loss scale, or fp32")
    if zero.offload_optimizer.state_format != "fp32":
        refuse(
            "zero_optimization.offload_optimizer.state_format",
            f"the format {zero.offload_optimizer.state_format!r}",
            "use 'fp32', the exact one",
        )
    if zero.offload_optimizer.update == "deferred":
        refuse("zero_optimization.offload_optimizer.update", "'deferred'", "use 'step' or 'backward'")
    for block in ("offload_param", "offload_optimizer"):
        if getattr(zero, block).device == "auto":
            refuse(f"zero_optimization.{block}.device", "'auto'", "choose none, cpu or nvme")
    paths = set(_nvme_paths(config))
    if len(paths) > 1:
        refuse(
            "zero_optimization",
            "swapping to several paths",
            f"use one of {', '.join(sorted(paths))} for both",
        )
    if config.durability.generations == 2:
        refuse(
            "durability.generations", "a second generation", "use 1: the swap files do not outlive the run"
        )
    if config.micro_batching == "per_unit":
        refuse("micro_batching", "'per_unit'", "use 'per_step'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        refuse("WORLD_SIZE", "training on several ranks", "start one process")
    if problems:
        raise ConfigError("\n".join(problems))


def _nvme_paths(config: OffloadConfig) -> list[str]:
    zero = config.zero_optimization
    return [path.path for block in (zero.offload_param, zero.offload_optimizer) for path in block.nvme_paths]


def _home(device: str) -> Home:
    return "nvme" if device == "nvme" else "host"
