"""Counters of one queue: written by its thread, read by any."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from .engines import Operation


@dataclass(slots=True)
class _Direction:
    totals: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("bytes", "requests", "resumed", "retried", "buffered", "failed", "in_flight_max"), 0
        )
    )
    seconds_busy: float = 0.0
    seconds_latency: float = 0.0
    seconds_latency_max: float = 0.0
    in_flight: int = 0
    busy_since: float = 0.0


class Stats:
    """See ``offload.aio.DirectionStats`` for what is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._directions: dict[Operation, _Direction] = {
            "read": _Direction(), "write": _Direction(), "fsync": _Direction(),
        }  # fmt: skip

    def begin(self, operation: Operation, now: float) -> None:
        with self._lock:
            direction = self._directions[operation]
            if direction.in_flight == 0:
                direction.busy_since = now
            direction.in_flight += 1
            peak = max(direction.totals["in_flight_max"], direction.in_flight)
            direction.totals["in_flight_max"] = peak

    def end(self, operation: Operation, begun: float, *, buffered: bool) -> None:
        now = time.monotonic()
        with self._lock:
            direction = self._directions[operation]
            direction.totals["requests"] += 1
            direction.totals["buffered"] += buffered
            direction.seconds_latency += now - begun
            direction.seconds_latency_max = max(direction.seconds_latency_max, now - begun)
            direction.in_flight -= 1
            if direction.in_flight == 0:
                direction.seconds_busy += now - direction.busy_since

    def count(self, operation: Operation, name: str, number: int = 1) -> None:
        with self._lock:
            self._directions[operation].totals[name] += number

    def read(self, operation: Operation) -> dict[str, float]:
        with self._lock:
            direction = self._directions[operation]
            busy = time.monotonic() - direction.busy_since if direction.in_flight else 0.0
            return {
                **direction.totals,
                "seconds_busy": direction.seconds_busy + busy,
                "seconds_latency": direction.seconds_latency,
                "seconds_latency_max": direction.seconds_latency_max,
            }
