"""How long a transfer has to wait so that no more than so many bytes pass in a second."""

from __future__ import annotations

import time


class Pace:
    """Counts bytes from now on."""

    def __init__(self, rate: int | None) -> None:
        """
        Args:
            rate: bytes in a second; None: as many as come.
        """
        self._rate, self._begun, self._passed = rate, time.monotonic(), 0

    def delay(self, size: int) -> float:
        """Seconds from now until ``size`` bytes more may have passed."""
        if self._rate is None:
            return 0.0
        self._passed += size
        return max(0.0, self._begun + self._passed / self._rate - time.monotonic())
