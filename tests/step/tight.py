"""The least memory that a run may have: two slots for weights, so that most units are absent at any time."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from offload.accel import open_accelerator
from offload.config import OffloadConfig
from offload.partition import Partition
from offload.placement import placement_of
from offload.plan import MemoryPlan


def tight(model: nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the smallest budget of host memory that its plan takes."""
    settings = OffloadConfig.from_any(config)
    accelerator, free = open_accelerator(settings.accelerator), None
    if accelerator is not None:
        with contextlib.closing(accelerator):
            free = accelerator.memory()[0]
    groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    inventory = Partition(model, groups, settings.precision).inventory
    plan = MemoryPlan.build(placement_of(settings, device_free_bytes=free), inventory)
    return {**config, "memory": {"host_bytes": max(1, plan.smallest.bytes_total("host"))}}
