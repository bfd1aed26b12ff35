"""The device tier: memory of the accelerator, each piece a storage of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ..accel import Accelerator
from ..errors import PlanError


class DeviceTier:
    """Allocates device memory and knows what it is for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.allocated: Counter[str] = Counter()
        """Bytes by purpose."""

    def allocate(self, purpose: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Pieces of ``sizes`` bytes (uint8), of undefined content.

        Raises:
            PlanError: the device has not that much left.
        """
        try:
            pieces = [self._accelerator.allocate(size) for size in sizes]
        except torch.OutOfMemoryError as error:
            free, _ = self._accelerator.memory()
            raise PlanError(
                f"{self._accelerator.name}: {sum(sizes)} bytes wanted for {purpose}, {free} are free; another"
                " process may use the device; lower memory.device_bytes"
            ) from error
        self.allocated[purpose] += sum(sizes)
        return pieces
