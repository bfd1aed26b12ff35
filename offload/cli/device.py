"""Which device a run would compute on, asked without importing torch where none can be."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import OffloadConfig

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD128")
"""What the drivers of accelerators make: NVIDIA's, AMD's, WSL's, and those of graphics devices."""


def device_free_bytes(config: OffloadConfig, *, is_here: bool) -> int | None:
    """Free memory of the accelerator; None where the CPU computes.

    Args:
        is_here: the run will be on this machine. Otherwise a device that is named, with its
            ``memory.device_bytes``, need not be here to be planned for.

    Raises:
        ConfigError: the device is not here.
    """
    setting, size = config.accelerator, config.memory.device_bytes
    if setting == "cpu" or (setting == "auto" and not may_have_accelerator()):
        return None
    if setting != "auto" and size != "auto" and not is_here:
        return size
    from ..accel import open_accelerator

    accelerator = open_accelerator(setting)
    if accelerator is None:
        return None
    try:
        return accelerator.memory()[0]
    finally:
        accelerator.close()


def may_have_accelerator() -> bool:
    """Whether torch may find an accelerator here: there is a driver of one, or one is simulated."""
    return "OFFLOAD_ACCELERATOR" in os.environ or any(Path(driver).exists() for driver in _DRIVERS)
